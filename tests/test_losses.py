"""Loss terms and shared objectives against loops in float64, closed forms and their limits."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reference import losses as reference
from semifed.data.client import Batch, Samples
from semifed.data.views import Views
from semifed.fit import Loss
from semifed.losses import cross_entropy, masked_mean, mean, proximal, soft_cross_entropy
from semifed.models.network import Output, build_network
from semifed.net import Net
from semifed.objectives import plus, semi_supervised, supervised
from semifed.pseudo import confident_label
from semifed.targets import Targets
from toys import toy_dataset


def drawn(seed: int, *shape: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes_of(seed: int, count: int, classes: int) -> Tensor:
    return torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 10**6), st.integers(0, 9), st.integers(1, 6), st.sampled_from([0.1, 3.0, 40.0]))
def test_cross_entropy(seed: int, count: int, classes: int, scale: float) -> None:
    logits, labels = drawn(seed, count, classes, scale=scale), classes_of(seed, count, classes)
    found = cross_entropy(logits, labels)
    assert found.shape == (count,)
    expected = reference.cross_entropies(logits.double().numpy(), labels.tolist())
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_cross_entropy_has_the_gradient_of_softmax() -> None:
    logits, labels = drawn(0, 4, 5).requires_grad_(), torch.tensor([0, 4, 2, 2])
    cross_entropy(logits, labels).sum().backward()
    for row in range(4):
        expected = reference.softmax_gradient(logits.detach()[row].double().numpy(), int(labels[row]))
        assert logits.grad is not None
        np.testing.assert_allclose(logits.grad[row].numpy(), expected, atol=1e-6)


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(2, 6))
def test_soft_cross_entropy(seed: int, count: int, classes: int) -> None:
    logits, target = drawn(seed, count, classes), drawn(seed + 1, count, classes).softmax(dim=1)
    found = soft_cross_entropy(logits, target)
    assert found.shape == (count,)
    expected = reference.soft_cross_entropies(logits.double().numpy(), target.double().numpy())
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_soft_cross_entropy_of_a_certain_target_is_cross_entropy() -> None:
    logits, labels = drawn(1, 6, 4), classes_of(1, 6, 4)
    certain = torch.nn.functional.one_hot(labels, 4).float()
    torch.testing.assert_close(soft_cross_entropy(logits, certain), cross_entropy(logits, labels))


def test_soft_cross_entropy_is_the_divergence_plus_entropy() -> None:
    logits, target = drawn(2, 6, 4), drawn(3, 6, 4).softmax(dim=1)
    divergence = (target * (target.log() - logits.log_softmax(dim=1))).sum(dim=1)
    entropy = -(target * target.log()).sum(dim=1)
    torch.testing.assert_close(soft_cross_entropy(logits, target), divergence + entropy)


@given(st.lists(st.floats(-100, 100, width=32), max_size=8))
def test_mean(values: list[float]) -> None:
    expected = sum(values) / len(values) if values else 0.0
    assert float(mean(torch.tensor(values))) == pytest.approx(expected, rel=1e-5, abs=1e-4)


@given(st.lists(st.tuples(st.floats(-100, 100, width=32), st.booleans()), max_size=8))
def test_masked_samples_count_as_zero_in_the_mean(pairs: list[tuple[float, bool]]) -> None:
    values, used = [value for value, _ in pairs], [use for _, use in pairs]
    found = masked_mean(torch.tensor(values), torch.tensor(used, dtype=torch.bool))
    assert float(found) == pytest.approx(reference.mean_over_all(values, used), rel=1e-5, abs=1e-4)


def test_an_empty_or_wholly_masked_batch_gives_zero_and_no_gradient() -> None:
    nothing = torch.zeros(0, requires_grad=True)
    mean(nothing).backward()
    some = drawn(0, 5).requires_grad_()
    value = masked_mean(some, torch.zeros(5, dtype=torch.bool))
    value.backward()
    assert mean(nothing).item() == value.item() == 0.0
    assert some.grad is not None
    assert torch.equal(some.grad, torch.zeros(5))


def test_proximity_is_half_the_squared_distance_over_the_named_weights() -> None:
    weights = {"a": drawn(0, 3, 2), "b": drawn(1, 4)}
    received = {"a": drawn(2, 3, 2), "b": drawn(3, 4), "never trained": drawn(4, 9)}
    expected = reference.squared_distance(
        [weights[name].double().numpy() for name in "ab"], [received[name].double().numpy() for name in "ab"]
    )
    assert float(proximal(weights, received)) == pytest.approx(expected / 2, rel=1e-6)


def test_proximity_pulls_by_the_difference() -> None:
    weights, received = {"a": drawn(0, 3).requires_grad_()}, {"a": drawn(1, 3)}
    proximal(weights, received).backward()
    assert weights["a"].grad is not None
    torch.testing.assert_close(weights["a"].grad, weights["a"].detach() - received["a"])


def batch_of(labelled: int, unlabelled: int, classes: int = 3) -> Batch:
    images = toy_dataset().x_train
    views = Views.parse("flip crop(1)", "flip crop(1) cutout(3)", mean=(0.5,), std=(0.25,))
    nothing = torch.empty(0, dtype=torch.int64)
    return Batch(
        Samples(images[:labelled], torch.arange(labelled), classes_of(0, labelled, classes), views, (0, "labelled")),
        Samples(images[10 : 10 + unlabelled], torch.arange(unlabelled) + 7, nothing, views, (0, "unlabelled")),
    )


def output_of(logits: Tensor) -> Output:
    return Output(logits, torch.zeros(len(logits), 1), {})


def small_net(classes: int = 3) -> Net:
    generator = torch.Generator().manual_seed(0)
    network = build_network("cnn", channels=1, size=(8, 8), classes=classes, width=(4, 4, 8), generator=generator)
    return Net(network, "static")


@given(st.integers(0, 10**6), st.integers(0, 6), st.integers(0, 8), st.sampled_from([0.0, 0.5, 0.95]))
def test_fixmatch_objective(seed: int, labelled: int, unlabelled: int, threshold: float) -> None:
    batch = batch_of(labelled, unlabelled)
    logits, weak, strong = drawn(seed, labelled, 3), drawn(seed + 1, unlabelled, 3), drawn(seed + 2, unlabelled, 3)
    label, sure = confident_label(weak, threshold)
    loss = semi_supervised(batch, output_of(logits), output_of(strong), Targets(label, sure), unlabelled_weight=0.7)
    whole, supervised_part, unlabelled_part = reference.fixmatch(
        logits.double().numpy(),
        batch.labelled.labels.tolist(),
        weak.double().numpy(),
        strong.double().numpy(),
        threshold,
        0.7,
    )
    assert loss.value.item() == pytest.approx(whole, rel=1e-5, abs=1e-6)
    assert {name: term.item() for name, term in loss.terms.items()} == pytest.approx(
        {"supervised": supervised_part, "consistency": unlabelled_part}, rel=1e-5, abs=1e-6
    )
    assert loss.pseudo is not None
    assert torch.equal(loss.pseudo.position, torch.arange(unlabelled) + 7)
    assert torch.equal(loss.pseudo.label, label)
    assert torch.equal(loss.pseudo.used, sure)


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_a_batch_with_nothing_in_use_and_no_label_is_nothing_to_learn_from(threshold: float) -> None:
    net, batch = small_net(), batch_of(0, 4)
    outputs = net.joint(batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong)
    label, sure = confident_label(outputs[1].logits, threshold)
    loss = semi_supervised(batch, outputs[0], outputs[2], Targets(label, sure), 1.0)
    assert loss.value.requires_grad is bool(sure.any())
    assert plus(loss, "penalty", 1.0, outputs[2].logits.sum()).value.requires_grad is bool(sure.any())


@pytest.mark.parametrize(("labelled", "unlabelled"), [(0, 4), (4, 0)])
def test_an_empty_part_of_a_batch_adds_nothing_and_no_nan(labelled: int, unlabelled: int) -> None:
    net, batch = small_net(), batch_of(labelled, unlabelled)
    outputs = net.joint(batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong)
    label, sure = confident_label(outputs[1].logits, 0.0)
    loss = semi_supervised(batch, outputs[0], outputs[2], Targets(label, sure), 1.0)
    loss.value.backward()
    assert bool(torch.isfinite(loss.value))
    assert (loss.terms["supervised"].item() == 0) == (labelled == 0)
    assert (loss.terms["consistency"].item() == 0) == (unlabelled == 0)
    for parameter in net.named_parameters().values():
        assert parameter.grad is not None
        assert bool(torch.isfinite(parameter.grad).all())


def test_supervised_is_the_mean_over_weak_views() -> None:
    net, batch = small_net(), batch_of(5, 3)
    logits = net(batch.labelled.weak).logits.detach().double().numpy()
    expected = np.mean(reference.cross_entropies(logits, batch.labelled.labels.tolist()))
    loss = supervised(net, batch)
    assert loss.value.item() == pytest.approx(expected, rel=1e-5)
    assert loss.terms["supervised"].item() == loss.value.item()


def test_supervised_without_labels_moves_nothing() -> None:
    loss = supervised(small_net(), batch_of(0, 3))
    assert loss.value.item() == 0
    assert not loss.value.requires_grad
    assert loss.terms == {}


def test_plus_adds_a_weighted_term_and_reports_it_unweighted() -> None:
    first = Loss(torch.tensor(2.0, requires_grad=True), {"first": torch.tensor(2.0)}, {"count": torch.tensor(3)})
    both = plus(first, "second", 0.1, torch.tensor(5.0))
    assert both.value.item() == pytest.approx(2.5)
    assert {name: float(term) for name, term in both.terms.items()} == {"first": 2.0, "second": 5.0}
    assert both.sums == first.sums
    assert set(first.terms) == {"first"}


def test_no_gradient_flows_through_pseudo_labels() -> None:
    batch = batch_of(0, 6)
    weak, strong = drawn(0, 6, 3).requires_grad_(), drawn(1, 6, 3).requires_grad_()
    label, sure = confident_label(weak, 0.3)
    loss = semi_supervised(batch, output_of(drawn(2, 0, 3)), output_of(strong), Targets(label, sure), 1.0)
    loss.value.backward()
    assert weak.grad is None
    assert strong.grad is not None
    assert strong.grad.abs().sum() > 0
