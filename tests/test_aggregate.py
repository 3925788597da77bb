"""The server's mean against exact fractions, and what must hold for any mean."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reference.aggregate import fair_shares, weighted_sum
from semifed.aggregate import shares, weighted_mean
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
