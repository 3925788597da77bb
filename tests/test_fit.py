"""The training loop against SGD written out in NumPy, and what it promises when things go wrong."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from reference.sgd import Descent
from semifed.data.client import Batch, Budget, ClientData, Samples, batches
from semifed.data.views import Views
from semifed.fit import Course, Diverged, Fitted, Loss, Optimiser, fit
from semifed.models.network import build_network
from semifed.net import Net
from semifed.objectives import supervised
from semifed.pseudo import PseudoLabels
from toys import equal_weights, toy_dataset

Array = NDArray[np.float64]


def small_net(batchnorm: str = "static", width: tuple[int, int, int] = (3, 4, 5)) -> Net:
    generator = torch.Generator().manual_seed(0)
    network = build_network("cnn", channels=1, size=(8, 8), classes=3, width=width, generator=generator)
    return Net(network, batchnorm)


def data_of(labelled: int = 12, unlabelled: int = 0) -> ClientData:
    images = toy_dataset().x_train
    views = Views.parse("flip crop(1)", "flip crop(1)", mean=(0.5,), std=(0.25,))
    labels = torch.arange(labelled) % 3
    return ClientData(images, torch.arange(labelled), labels, torch.arange(labelled, labelled + unlabelled), views)


def steps_of(count: int) -> list[Batch]:
    return list(batches(data_of(), Budget(None, count, 5), (0, 1, 2)))


def quadratic(targets: list[dict[str, Tensor]]) -> Callable[[Net, Batch], Loss]:
    """A loss whose gradient is w − target, a different target in each step, so that NumPy can follow."""
    remaining = iter(targets)

    def loss(net: Net, batch: Batch) -> Loss:
        target = next(remaining)
        parameters = net.named_parameters()
        value = sum((((parameters[name] - goal) ** 2).sum() / 2 for name, goal in target.items()), torch.zeros(()))
        return Loss(value, {"distance": value})

    return loss


def targets_for(net: Net, count: int, seed: int, without: str = "nothing") -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            name: torch.randn(parameter.shape, generator=generator)
            for name, parameter in net.named_parameters().items()
            if name != without
        }
        for _ in range(count)
    ]


def numbers(net: Net) -> dict[str, Array]:
    return {name: value.detach().numpy().astype(np.float64) for name, value in net.named_parameters().items()}


def close(net: Net, expected: dict[str, Array]) -> None:
    for name, found in numbers(net).items():
        np.testing.assert_allclose(found, expected[name], rtol=2e-5, atol=2e-6, err_msg=name)


@settings(max_examples=25)
@given(
    st.sampled_from([0.0, 0.5, 0.9]),
    st.booleans(),
    st.sampled_from([0.0, 0.01, 0.3]),
    st.sampled_from([None, 0.5, 1e6]),
    st.booleans(),
    st.integers(0, 99),
)
def test_descent(
    momentum: float, nesterov: bool, weight_decay: float, clip: float | None, spares: bool, seed: int
) -> None:
    nesterov = nesterov and momentum > 0
    net = small_net()
    targets = targets_for(net, 5, seed)
    weights = numbers(net)
    descent = Descent(
        lr=0.05,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        clip=clip,
        decayed_vectors=not spares,
    )
    for target in targets:
        descent.step(weights, {name: weights[name] - goal.double().numpy() for name, goal in target.items()})
    fit(net, steps_of(5), quadratic(targets), Optimiser(0.05, momentum, nesterov, weight_decay, clip, spares))
    close(net, weights)


def test_a_real_loss_follows_pytorchs_own_optimiser() -> None:
    steps = steps_of(6)
    net, other = small_net(), small_net()
    fit(net, steps, supervised, Optimiser(0.1, 0.9, True, 1e-2, 0.7))
    sgd = torch.optim.SGD(other.network.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2)
    other.network.train()
    for batch in steps:
        sgd.zero_grad()
        logits = other.network(batch.labelled.weak).logits
        torch.nn.functional.cross_entropy(logits, batch.labelled.labels).backward()
        torch.nn.utils.clip_grad_norm_(other.network.parameters(), 0.7)
        sgd.step()
    for name, tensor in net.state().items():
        torch.testing.assert_close(tensor, other.state()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spares", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_kept_momentum_continues_to_the_bit(nesterov: bool, spares: bool) -> None:
    steps, optimiser = steps_of(6), Optimiser(0.1, 0.9, nesterov, 1e-2, 0.7, spares)
    whole, halves = small_net(), small_net()
    fit(whole, steps, supervised, optimiser)
    first = fit(halves, steps[:3], supervised, optimiser)
    kept = {name: buffer.clone() for name, buffer in first.momentum.items()}
    contiguous = {name: buffer.contiguous().clone() for name, buffer in first.momentum.items()}  # as read from disk
    state = halves.state()
    second = fit(halves, steps[3:], supervised, optimiser, first.momentum)
    assert equal_weights(whole.state(), halves.state())
    assert equal_weights(first.momentum, kept), "the momentum that was given must not be written to"
    halves.load(state)
    again = fit(halves, steps[3:], supervised, optimiser, contiguous)
    assert equal_weights(whole.state(), halves.state())
    assert equal_weights(again.momentum, second.momentum)


def test_without_kept_momentum_it_starts_at_rest() -> None:
    steps, optimiser = steps_of(6), Optimiser(0.1, 0.9)
    whole, halves = small_net(), small_net()
    fit(whole, steps, supervised, optimiser)
    fit(halves, steps[:3], supervised, optimiser)
    fit(halves, steps[3:], supervised, optimiser)
    assert not equal_weights(whole.state(), halves.state())


def test_no_momentum_leaves_no_momentum() -> None:
    assert fit(small_net(), steps_of(2), supervised, Optimiser(0.1)).momentum == {}


def test_parameters_without_gradient_are_not_decayed() -> None:
    net = small_net()
    before = net.state()
    targets = targets_for(net, 3, 0, without="classifier.bias")
    fitted = fit(net, steps_of(3), quadratic(targets), Optimiser(0.1, 0.9, weight_decay=0.5))
    after = net.state()
    assert torch.equal(after["classifier.bias"], before["classifier.bias"])
    assert not torch.equal(after["classifier.weight"], before["classifier.weight"])
    assert "classifier.bias" not in fitted.momentum


def test_a_loss_without_gradient_moves_nothing() -> None:
    net = small_net()
    before = net.state()
    fitted = fit(net, steps_of(3), lambda net, batch: Loss(torch.tensor(1.5), {}), Optimiser(0.1, 0.9, False, 0.5))
    assert equal_weights(net.state(), before)
    assert (fitted.steps, fitted.terms) == (3, {"total": 1.5})


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_loss_that_is_no_number_stops_the_training(bad: float) -> None:
    net = small_net()
    count = iter(range(9))

    def loss(net: Net, batch: Batch) -> Loss:
        assert net.network.training
        healthy = supervised(net, batch)
        return healthy._replace(value=healthy.value * bad) if next(count) == 2 else healthy

    with pytest.raises(Diverged, match=f"became {bad} in step 3"):
        fit(net, steps_of(5), loss, Optimiser(0.1))
    assert not any(module.training for module in net.network.modules())
    assert all(bool(torch.isfinite(tensor).all()) for tensor in net.state().values())


def test_terms_are_means_and_sums_are_sums() -> None:
    values = iter([1.0, 2.0, 6.0])

    def loss(net: Net, batch: Batch) -> Loss:
        number = next(values)
        value = 0 * net.named_parameters()["classifier.bias"].sum() + number
        terms = {"twice": 2 * value} if number > 1 else {}
        return Loss(value, terms, {"counts": torch.tensor([1.0, number])})

    net = small_net()
    fitted = fit(net, steps_of(3), loss, Optimiser(0.1))
    assert fitted.terms == pytest.approx({"total": 3.0, "twice": 16 / 3})
    assert fitted.sums["counts"].tolist() == [3.0, 9.0]
    assert not fitted.sums["counts"].requires_grad
    assert not net.network.training


def test_images_steps_and_pseudo_labels_are_counted() -> None:
    steps = list(batches(data_of(6, 20), Budget(1, None, 4, 2), (0,)))

    def loss(net: Net, batch: Batch) -> Loss:
        at = batch.unlabelled.position
        return supervised(net, batch)._replace(pseudo=PseudoLabels(at, at % 3, at > 5))

    fitted = fit(small_net(), steps, loss, Optimiser(0.1))
    assert fitted.steps == len(steps)
    assert fitted.steps_taken == len(steps)
    assert fitted.images == sum(len(step.labelled) for step in steps)  # nobody looked at the unlabelled ones
    for given_, step in zip(fitted.pseudo, steps, strict=True):
        assert torch.equal(given_.position, step.unlabelled.position)


def test_a_batch_that_is_seen_twice_counts_once() -> None:
    data, budget = data_of(6, 20), Budget(1, None, 4, 2)
    turns = iter([True, False] * 9)

    def loss(net: Net, batch: Batch, _: None) -> Loss:
        if next(turns):
            return supervised(net, batch)
        return Loss(net(batch.unlabelled.weak).logits.square().mean(), {})

    course = Course(budget, (0,), Optimiser(0.1), None)
    fitted = course.follow(small_net(), data, loss, None, times=2)
    steps = list(batches(data, budget, (0,)))
    assert fitted.steps == 2 * len(steps)
    assert fitted.images == sum(len(part) for step in steps for part in step)


@settings(max_examples=10)
@given(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=4, max_size=4), st.sampled_from([0.0, 0.9]))
def test_a_step_takes_its_share_of_the_learning_rate_after_clipping(rates: list[float], momentum: float) -> None:
    net = small_net()
    targets, weights = targets_for(net, 4, 0), numbers(net)
    plain, coming = quadratic(targets), iter(rates)
    descent = Descent(lr=0.05, momentum=momentum, nesterov=False, weight_decay=0.01, clip=0.5)
    for target, rate in zip(targets, rates, strict=True):
        descent.lr = rate * 0.05
        descent.step(weights, {name: weights[name] - goal.double().numpy() for name, goal in target.items()})
    optimiser = Optimiser(0.05, momentum, False, 0.01, 0.5)
    fit(net, steps_of(4), lambda net, batch: plain(net, batch)._replace(rate=next(coming)), optimiser)
    close(net, weights)


def test_what_is_measured_is_summed_with_its_number() -> None:
    values = iter([{"weight": torch.tensor([1.0, 2.0])}, {}, {"weight": torch.tensor(6.0), "other": torch.ones(0)}])

    def loss(net: Net, batch: Batch) -> Loss:
        return supervised(net, batch)._replace(measured=next(values))

    fitted = fit(small_net(), steps_of(3), loss, Optimiser(0.1))
    assert {name: pair.tolist() for name, pair in fitted.measured.items()} == {"weight": [9.0, 3.0], "other": [0, 0]}
    assert fitted.terms.keys() == {"total", "supervised"}
    assert fitted.then(fitted).measured["weight"].tolist() == [18.0, 6.0]


def test_no_steps_leave_everything_as_it_was() -> None:
    net = small_net("tracked")
    before = net.state()
    fitted = fit(net, [], supervised, Optimiser(0.1, 0.9))
    assert equal_weights(net.state(), before)
    assert fitted[:5] == (0, 0, 0, {}, {})
    assert (fitted.pseudo, fitted.momentum) == ([], {})


def test_static_statistics_stay_and_tracked_ones_move() -> None:
    for mode, moves in (("static", False), ("tracked", True)):
        net = small_net(mode)
        before = net.state()
        fit(net, steps_of(2), supervised, Optimiser(0.1))
        after = net.state()
        for name in (name for name in before if "running_" in name):
            assert torch.equal(before[name], after[name]) != moves


def test_batches_are_drawn_while_training() -> None:
    """A step's images are augmented when it is their turn, so memory does not grow with the steps."""
    log: list[str] = []

    def stream() -> object:
        for step in steps_of(2):
            log.append("drawn")
            yield step

    def loss(net: Net, batch: Batch) -> Loss:
        log.append("trained")
        return supervised(net, batch)

    fit(small_net(), stream(), loss, Optimiser(0.1))  # type: ignore[arg-type]
    assert log == ["drawn", "trained"] * 2


def test_samples_have_a_length() -> None:
    samples = Samples(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.arange(3), torch.arange(3), data_of().views, ())
    assert len(samples) == 3


def test_a_step_with_nothing_to_learn_from_moves_nothing() -> None:
    """Neither weight decay nor momentum may move a model whose loss has no gradient."""
    net = small_net("static")
    steps = list(batches(data_of(0, 8), Budget(2, None, 4), (0,)))
    before = net.state()
    fitted = fit(
        net,
        steps,
        supervised,
        Optimiser(0.1, 0.9, weight_decay=0.1),
        {n: torch.ones_like(p) for n, p in net.named_parameters().items()},
    )
    assert (fitted.steps, fitted.steps_taken) == (len(steps), 0)
    assert equal_weights(net.state(), before)


# Networks beside the first one


def pair() -> tuple[Net, Net]:
    """Two networks of different weights."""
    net = small_net()
    twin = net.twin()
    twin.load({name: tensor * 0.5 + 0.1 for name, tensor in net.state().items()})
    return net, twin


def both(first: Callable[[Net, Batch], Loss], second: Callable[[Net, Batch], Loss], twin: Net) -> Callable[..., Loss]:
    def loss(net: Net, batch: Batch, *_: object) -> Loss:
        assert net.network.training
        assert twin.network.training
        return Loss(first(net, batch).value + second(twin, batch).value, {})

    return loss


@settings(max_examples=15)
@given(st.sampled_from([0.0, 0.9]), st.sampled_from([None, 0.5, 5.0]), st.integers(0, 99))
def test_each_network_has_its_own_gradient_clipping_and_momentum(
    momentum: float, clip: float | None, seed: int
) -> None:
    net, twin = pair()
    optimiser = Optimiser(0.05, momentum, False, 0.01, clip)
    ours, theirs = targets_for(net, 4, seed), targets_for(twin, 4, seed + 1000)
    theirs = [{name: 30 * goal for name, goal in target.items()} for target in theirs]  # clipping sees the difference
    expected = []
    for each, targets in ((net, ours), (twin, theirs)):
        weights = numbers(each)
        descent = Descent(lr=0.05, momentum=momentum, nesterov=False, weight_decay=0.01, clip=clip)
        for target in targets:
            descent.step(weights, {name: weights[name] - goal.double().numpy() for name, goal in target.items()})
        expected.append(weights)
    fit(net, steps_of(4), both(quadratic(ours), quadratic(theirs), twin), optimiser, beside=[twin])
    close(net, expected[0])
    close(twin, expected[1])


def test_training_beside_is_training_alone() -> None:
    steps, optimiser = steps_of(5), Optimiser(0.1, 0.9, True, 1e-2, 0.7)
    (net, twin), (alone, other) = pair(), pair()
    fit(net, steps, both(supervised, supervised, twin), optimiser, beside=[twin])
    fit(alone, steps, supervised, optimiser)
    fit(other, steps, supervised, optimiser)
    for one, two in ((net, alone), (twin, other)):
        for name, tensor in one.state().items():
            torch.testing.assert_close(tensor, two.state()[name], rtol=1e-5, atol=1e-6)


def test_all_networks_are_back_in_evaluation_mode() -> None:
    net, twin = pair()
    loss = both(supervised, supervised, twin)
    fit(net, steps_of(2), loss, Optimiser(0.1), beside=[twin])
    assert not any(module.training for each in (net, twin) for module in each.network.modules())
    net.load({"classifier.bias": torch.full((3,), torch.nan)})
    with pytest.raises(Diverged):
        fit(net, steps_of(2), loss, Optimiser(0.1), beside=[twin])
    assert not any(module.training for each in (net, twin) for module in each.network.modules())


def test_only_the_first_networks_momentum_is_kept_and_given_back() -> None:
    steps, optimiser = steps_of(6), Optimiser(0.1, 0.9)
    (net, twin), (alone, other) = pair(), pair()
    first = fit(net, steps[:3], both(supervised, supervised, twin), optimiser, beside=[twin])
    assert first.momentum.keys() == net.named_parameters().keys()
    fit(net, steps[3:], both(supervised, supervised, twin), optimiser, first.momentum, [twin])
    fit(alone, steps, supervised, optimiser)
    fit(other, steps[:3], supervised, optimiser)
    fit(other, steps[3:], supervised, optimiser)  # starts at rest again
    for one, two in ((net, alone), (twin, other)):
        for name, tensor in one.state().items():
            torch.testing.assert_close(tensor, two.state()[name], rtol=1e-5, atol=1e-6)


def test_a_network_with_nothing_to_learn_from_stays_though_the_other_one_learns() -> None:
    net, twin = pair()
    before = net.state()

    def silent(net: Net, batch: Batch) -> Loss:
        return Loss(supervised(net, batch).value.detach(), {})

    optimiser = Optimiser(0.1, 0.9, weight_decay=0.5, clip=1.0)
    fitted = fit(net, steps_of(3), both(silent, supervised, twin), optimiser, beside=[twin])
    assert equal_weights(net.state(), before)
    assert not equal_weights(twin.state(), pair()[1].state())
    assert (fitted.steps_taken, fitted.momentum) == (3, {})


def test_a_course_takes_networks_beside() -> None:
    course = Course(Budget(None, 4, 5), (0, 1, 2), Optimiser(0.1), None)
    (net, twin), (alone, other) = pair(), pair()
    fitted = course.follow(net, data_of(), both(supervised, supervised, twin), "const", beside=[twin])
    fit(alone, steps_of(4), both(supervised, supervised, other), Optimiser(0.1), beside=[other])
    assert equal_weights(net.state(), alone.state())
    assert equal_weights(twin.state(), other.state())
    assert (fitted.steps, fitted.left) == (4, "const")


def test_two_stages_are_one() -> None:
    def labels(position: int) -> PseudoLabels:
        return PseudoLabels(torch.tensor([position]), torch.tensor([0]), torch.tensor([True]))

    first = Fitted(3, 2, 30, {"total": 1.5, "a": 1.0}, {"n": torch.tensor(2.0)}, [labels(1)], {"w": torch.ones(1)}, "x")
    sums = {"n": torch.tensor(3.0), "m": torch.tensor(5.0)}
    second = Fitted(4, 4, 7, {"total": 0.25, "b": 2.0}, sums, [labels(2)], {}, "y")
    whole = first.then(second)
    assert whole[:3] == (7, 6, 37)
    assert whole.terms == {"total": 1.75, "a": 1.0, "b": 2.0}
    assert {name: float(value) for name, value in whole.sums.items()} == {"n": 5.0, "m": 5.0}
    assert [int(part.position) for part in whole.pseudo] == [1, 2]
    assert (whole.momentum, whole.left) == ({}, "y")


def test_learnt_counts_labels_and_images_whose_pseudo_label_was_used() -> None:
    data = data_of(labelled=3, unlabelled=5)
    shared = data._replace(unlabelled=torch.cat([data.unlabelled, data.labelled[:1]]))  # SAGE lists labelled ones twice

    def given(position: list[int], used: list[bool]) -> PseudoLabels:
        return PseudoLabels(torch.tensor(position), torch.zeros(len(position), dtype=torch.int64), torch.tensor(used))

    steps = [given([0, 1, 5], [True, False, True]), given([1, 4], [False, True]), given([0, 2], [True, False])]
    fitted = Fitted(3, 3, 0, {}, {}, steps, {})
    assert float(fitted.learnt(shared)) == 3 + 2
    assert float(fitted.samples(shared)) == 8
    assert float(fitted._replace(pseudo=[]).learnt(shared)) == 3
    assert float(fitted._replace(steps_taken=0).learnt(shared)) == 0
