"""The server's mean against exact fractions, and what must hold for any mean."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reference.aggregate import fair_shares, weighted_sum
from reference.openset import trust_shares
from semifed.aggregate import (
    FEWEST_GATED,
    alignment_level,
    equal_shares,
    momentum_step,
    moving_average,
    reliability_shares,
    shares,
    weighted_mean,
)
from semifed.method import averaged
from semifed.payloads import Up
from semifed.server import ServerSite
from toys import toy_parts, toy_recipe

counts = st.lists(st.integers(0, 5000), min_size=1, max_size=6)


def models_of(count: int, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {"kernel": torch.randn(2, 3, generator=generator), "bias": torch.randn(4, generator=generator)}
        for _ in range(count)
    ]


@given(counts)
def test_shares(numbers: list[int]) -> None:
    found = shares(numbers)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), [float(share) for share in fair_shares(numbers)], rtol=1e-15)
    assert float(found.sum()) == pytest.approx(1.0, abs=1e-15)


def test_shares_of_nobody() -> None:
    assert shares([]).tolist() == []


@given(counts, st.floats(1e-3, 1e3))
def test_shares_do_not_depend_on_the_unit(numbers: list[int], unit: float) -> None:
    torch.testing.assert_close(shares([number * unit for number in numbers]), shares(numbers))


@given(counts, st.integers(0, 1000))
def test_weighted_mean(numbers: list[int], seed: int) -> None:
    models = models_of(len(numbers), seed)
    found = weighted_mean(models, shares(numbers))
    exact = fair_shares(numbers)
    for name in models[0]:
        columns = np.stack([model[name].numpy().ravel() for model in models], axis=1)
        expected = [float(weighted_sum(column.tolist(), exact)) for column in columns]
        np.testing.assert_allclose(found[name].numpy().ravel(), expected, rtol=1e-6, atol=1e-7)
        assert found[name].dtype == torch.float32


@given(counts, st.integers(0, 1000))
def test_the_mean_of_equal_models_is_that_model_bit_for_bit(numbers: list[int], seed: int) -> None:
    model = models_of(1, seed)[0]
    found = weighted_mean([model] * len(numbers), shares(numbers))
    assert all(torch.equal(found[name], model[name]) for name in model)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_the_mean_does_not_depend_on_the_order(numbers: list[int], random: object) -> None:
    models = models_of(len(numbers), 0)
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(sum(numbers))).tolist()
    one = weighted_mean(models, shares(numbers))
    other = weighted_mean([models[i] for i in order], shares([numbers[i] for i in order]))
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-6, atol=1e-7)


def test_a_share_of_zero_leaves_a_model_out() -> None:
    models = models_of(3, 1)
    found = weighted_mean(models, shares([0, 5, 0]))
    assert all(torch.equal(found[name], models[1][name]) for name in found)


def test_whole_numbers_survive() -> None:
    model = {"batches": torch.tensor([7, 1, 123_456_789])}
    for count in range(1, 12):
        found = weighted_mean([model] * count, shares([1] * count))["batches"]
        assert torch.equal(found, model["batches"]), count


def site() -> ServerSite:
    parts = toy_parts(toy_recipe("fedavg", "clients"))
    from semifed.assembly import build_workplace
    from semifed.run import RoundLoop

    return RoundLoop(parts, build_workplace(parts.recipe, (1, 8, 8), 3).net, *[None] * 4).site  # type: ignore[arg-type]


def test_averaging_keeps_what_clients_do_not_send() -> None:
    received = {"kernel": torch.zeros(2), "statistics": torch.tensor([5.0])}
    ups = [
        Up({"kernel": torch.tensor([1.0, 2.0])}, torch.tensor(1.0)),
        Up({"kernel": torch.tensor([5.0, 6.0])}, torch.tensor(3.0)),
    ]
    place = site()
    found = averaged(received, ups, place)
    assert found["kernel"].tolist() == [4.0, 5.0]
    assert found["statistics"].tolist() == [5.0]
    assert place.notes["client_weights"] == [0.25, 0.75]


def test_averaging_nobody_keeps_the_received_weights() -> None:
    received = {"kernel": torch.ones(2)}
    assert averaged(received, [], site()) is received


@pytest.mark.parametrize("weight", [None, torch.tensor([0.5, 0.5], dtype=torch.float64)])
def test_clients_that_learnt_nothing_change_nothing_not_even_statistics(weight: torch.Tensor | None) -> None:
    received = {"kernel": torch.ones(2), "statistics": torch.zeros(2)}
    seen = {"kernel": torch.ones(2), "statistics": torch.tensor([3.0, 4.0])}
    place = site()
    assert averaged(received, [Up(seen, torch.tensor(0.0))] * 2, place, weight) is received
    assert "client_weights" not in place.notes
    found = averaged(received, [Up(seen, torch.tensor(0.0)), Up(seen, torch.tensor(1.0))], place, weight)
    assert found["statistics"].tolist() == [3.0, 4.0]


@given(counts)
def test_equal_shares_go_to_those_who_have_anything_to_tell(numbers: list[int]) -> None:
    found = equal_shares([float(number) for number in numbers]).tolist()
    active = sum(number > 0 for number in numbers)
    assert found == [(number > 0) / active if active else 1 / len(numbers) for number in numbers]


# OpenFL's eq. (2)

claims = st.lists(st.floats(0, 60), min_size=1, max_size=6)
bounds = st.floats(1, 12)
anything = st.one_of(
    st.floats(0, 5),
    st.floats(),
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0, -1e30, 1e20, 3.4e38, 1e300]),
)


@given(claims, st.floats(1e-3, 2), bounds)
def test_trust_is_the_clipped_inverse_of_the_loss(losses: list[float], epsilon: float, most: float) -> None:
    found = reliability_shares(losses, epsilon, most)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), trust_shares(losses, epsilon, most), rtol=1e-7, atol=1e-10)


@given(st.lists(st.floats(0.5, 1.5), min_size=1, max_size=6), st.floats(1e-3, 1e3))
def test_away_from_the_bounds_trust_is_eq_2_whatever_kappa(losses: list[float], kappa: float) -> None:
    trust = [kappa / (loss + 0.1) for loss in losses]
    expected = [value / sum(trust) for value in trust]
    np.testing.assert_allclose(reliability_shares(losses, 0.1, 5.0).numpy(), expected, rtol=1e-9)


@given(claims, st.floats(1e-3, 1e3))
def test_only_ratios_of_trust_matter(losses: list[float], scale: float) -> None:
    one = reliability_shares(losses, 0.1, 5.0)
    other = reliability_shares([loss * scale for loss in losses], 0.1 * scale, 5.0)
    np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-7)


@given(st.lists(anything, min_size=1, max_size=12), bounds)
def test_whatever_clients_claim_everyone_has_a_bounded_share(losses: list[float], most: float) -> None:
    found = reliability_shares(losses, 0.1, most).numpy()
    count = len(losses)
    assert np.isfinite(found).all()
    assert found.sum() == pytest.approx(1.0, abs=1e-12)
    assert found.min() >= 1 / (most * count) * (1 - 1e-9)
    assert found.max() <= most / count * (1 + 1e-9)


@given(st.lists(anything, min_size=2, max_size=12), bounds)
def test_a_worse_claim_never_earns_more(losses: list[float], most: float) -> None:
    found = reliability_shares(losses, 0.1, most).tolist()
    badness = [math.inf if math.isnan(loss) else max(loss, 0.0) for loss in losses]
    for one, mine in zip(badness, found, strict=True):
        for other, theirs in zip(badness, found, strict=True):
            if one <= other:
                assert mine >= theirs


def test_losses_apart_within_the_bounds_earn_strictly_less() -> None:
    found = reliability_shares([0.3, 0.6, 0.9, 1.2], 0.1, 5.0).tolist()
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 4


@given(anything, st.integers(1, 12), bounds)
def test_equal_claims_earn_equal_shares(claim: float, count: int, most: float) -> None:
    assert reliability_shares([claim] * count, 0.1, most).tolist() == pytest.approx([1 / count] * count, rel=1e-12)


@pytest.mark.parametrize("huge", [1e12, 1e20, 3.4e38, 1e300, math.inf, math.nan])
def test_one_huge_claim_does_not_blur_the_others(huge: float) -> None:
    """The scale that is looked for must not depend on how bad the worst claim is."""
    found = reliability_shares([0.4, 0.9, huge], 0.1, 5.0)
    np.testing.assert_allclose(found.numpy(), trust_shares([0.4, 0.9, 1e9], 0.1, 5.0), rtol=1e-6)


@pytest.mark.parametrize("worst", [1e30, math.inf])
def test_one_honest_client_among_hopeless_ones_stays_within_its_bound(worst: float) -> None:
    found = reliability_shares([0.5] + [worst] * 9, 0.1, 5.0).tolist()
    assert found == pytest.approx([0.5] + [0.5 / 9] * 9, rel=1e-9)


def test_a_bound_of_one_is_the_plain_mean_and_nobody_gets_nothing() -> None:
    assert reliability_shares([0.1, 5.0, 0.0], 0.1, 1.0).tolist() == pytest.approx([1 / 3] * 3)
    assert reliability_shares([], 0.1, 5.0).tolist() == []


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("count", [0, 1, FEWEST_GATED - 1, FEWEST_GATED, 100])
def test_alignment_level(count: int, shift: bool) -> None:
    found = alignment_level(torch.tensor(-30.0), torch.tensor(count), 6, 0.5, shift=shift)
    level = -30.0 / count if count >= FEWEST_GATED else math.log(6)
    assert found.dtype == torch.float32
    assert found.ndim == 0
    assert float(found) == pytest.approx(level - (math.log(6) - 2.0) if shift else level, rel=1e-5)


@given(st.integers(2, 100), st.floats(0.05, 2))
def test_a_shifted_level_is_never_negative(classes: int, temperature: float) -> None:
    least = 10 * (math.log(classes) - 1 / temperature)  # ten samples, each as low as eq. (1) can be
    found = alignment_level(torch.tensor(least), torch.tensor(10), classes, temperature, shift=True)
    assert float(found) == pytest.approx(0.0, abs=1e-4)


# R-EMA and the server's momentum


@given(st.integers(0, 99), st.floats(0, 1))
def test_moving_average(seed: int, decay: float) -> None:
    old, new = models_of(2, seed)
    found = moving_average(old, new, decay)
    for name in old:
        expected = decay * old[name].double().numpy() + (1 - decay) * new[name].double().numpy()
        np.testing.assert_allclose(found[name].numpy(), expected, rtol=1e-5, atol=1e-6)
        assert found[name].dtype == torch.float32


def test_ends_of_the_moving_average_are_exact() -> None:
    old, new = models_of(2, 3)
    for name in old:
        assert torch.equal(moving_average(old, new, 0.0)[name], new[name])
        assert torch.equal(moving_average(old, new, 1.0)[name], old[name])


@given(st.integers(0, 99), st.floats(0, 1))
def test_server_momentum(seed: int, momentum: float) -> None:
    """Heavy ball by hand over three rounds; what clients do not send stays as it was."""
    received, *means = models_of(4, seed)
    received["statistics"] = torch.tensor([7.0])
    weights, velocity = received, {}
    expected = {name: tensor.double().numpy() for name, tensor in received.items()}
    speed = {name: np.zeros_like(expected[name]) for name in means[0]}
    for mean in means:
        weights, velocity = momentum_step(weights, mean, velocity, momentum)
        for name, tensor in mean.items():
            speed[name] = momentum * speed[name] + (expected[name] - tensor.double().numpy())
            expected[name] = expected[name] - speed[name]
    assert weights.keys() == expected.keys()
    assert velocity.keys() == means[0].keys()
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name].numpy(), value, rtol=1e-4, atol=1e-4)


def test_without_momentum_the_server_takes_the_mean() -> None:
    received, mean = models_of(2, 1)
    found, _ = momentum_step(received, mean, {}, 0.0)
    for name in mean:
        torch.testing.assert_close(found[name], mean[name])
