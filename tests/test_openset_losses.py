"""The terms of SSB and OpenFL against loops, by hand, and at the ends of their range."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reference import openset as reference
from semifed.losses import (
    alignment,
    ova_entropy,
    ova_hardest_negative,
    ova_negatives,
    ova_positive,
    pseudo_negatives,
    soft_open_consistency,
    supervised_contrastive,
)
from semifed.models.network import Output
from semifed.payloads import detected
from semifed.prototypes import class_directions, class_sums, mean_direction_norm, refreshed

seeds = st.integers(0, 10_000)
counts = st.integers(1, 6)
class_counts = st.integers(1, 5)
temperatures = st.sampled_from([0.05, 0.1, 0.5, 1.0])


def drawn(seed: int, *shape: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels_of(seed: int, count: int, classes: int) -> Tensor:
    return torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(seed + 1))


def coins(seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed + 2)) < 0.5


def array(tensor: Tensor) -> Any:
    return tensor.detach().double().numpy()


def near(found: Tensor, expected: list[float], tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(array(found), expected, rtol=tolerance, atol=tolerance)


@given(seeds, counts, class_counts, st.floats(0, 30))
def test_detector_terms(seed: int, count: int, classes: int, scale: float) -> None:
    ova, other = drawn(seed, count, 2, classes, scale=scale), drawn(seed + 5, count, 2, classes, scale=scale)
    labels, marked = labels_of(seed, count, classes), coins(seed, count, classes)
    near(ova_positive(ova, labels), reference.positives(array(ova), labels.tolist()))
    near(ova_negatives(ova, labels), reference.negatives(array(ova), labels.tolist()))
    near(ova_hardest_negative(ova, labels), reference.hardest(array(ova), labels.tolist()))
    near(ova_entropy(ova), reference.entropies(array(ova)))
    near(soft_open_consistency(ova, other), reference.socr(array(ova), array(other)))
    near(pseudo_negatives(ova, marked), reference.marked_negatives(array(ova), marked.tolist()))


def test_detector_terms_by_hand() -> None:
    """Three classes, two samples; odds of 3 to 1 in favour of the unknown or of the known outcome, or even."""
    odds = math.log(3.0)
    unknown = torch.tensor([[odds, 0.0, 0.0], [0.0, odds, odds]])
    known = torch.tensor([[0.0, odds, 0.0], [0.0, 0.0, 0.0]])
    ova = torch.stack([unknown, known], dim=1)
    labels = torch.tensor([1, 0])
    near(ova_positive(ova, labels), [-math.log(3 / 4), -math.log(1 / 2)], 1e-6)
    near(ova_negatives(ova, labels), [(-math.log(3 / 4) - math.log(1 / 2)) / 3, -2 * math.log(3 / 4) / 3], 1e-6)
    near(ova_hardest_negative(ova, labels), [math.log(2), -math.log(3 / 4)], 1e-6)
    near(soft_open_consistency(ova, torch.zeros(2, 2, 3)), [2 * 2 * 0.25**2] * 2, 1e-6)


@pytest.mark.parametrize("classes", [1, 2, 3, 10])
def test_detector_losses_of_perfect_and_ignorant_detectors(classes: int) -> None:
    labels = torch.arange(classes)
    sure = torch.full((classes, 2, classes), 0.0)
    sure[:, 0] = 100.0
    for k in range(classes):
        sure[k, 0, k], sure[k, 1, k] = 0.0, 100.0
    assert float((ova_positive(sure, labels) + ova_negatives(sure, labels)).abs().max()) == 0.0
    assert float(ova_hardest_negative(sure, labels).abs().max()) == 0.0
    assert float(ova_entropy(sure).abs().max()) < 1e-12
    even = torch.zeros(classes, 2, classes)
    near(
        ova_positive(even, labels) + ova_negatives(even, labels),
        [math.log(2) + (classes - 1) / classes * math.log(2)] * classes,
        1e-6,
    )


@given(seeds, counts, class_counts, st.floats(0, 50))
def test_entropy_is_at_most_log_two_and_consistency_at_least_zero(
    seed: int, count: int, classes: int, scale: float
) -> None:
    ova = drawn(seed, count, 2, classes, scale=scale)
    assert float(ova_entropy(ova).max()) <= math.log(2) + 1e-6
    assert float(ova_entropy(ova).min()) >= 0
    assert torch.equal(soft_open_consistency(ova, ova.clone()), torch.zeros(count))
    other = drawn(seed + 1, count, 2, classes, scale=scale)
    assert torch.equal(soft_open_consistency(ova, other), soft_open_consistency(other, ova))
    assert float(soft_open_consistency(ova, other).max()) <= 2 * classes + 1e-5


def test_entropy_of_an_even_decision_is_log_two() -> None:
    near(ova_entropy(torch.full((3, 2, 4), 1.7)), [math.log(2)] * 3, 1e-6)


def test_consistency_teaches_both_views() -> None:
    ova, other = drawn(0, 3, 2, 4).requires_grad_(), drawn(1, 3, 2, 4).requires_grad_()
    soft_open_consistency(ova, other).sum().backward()
    assert ova.grad is not None
    assert other.grad is not None
    assert min(float(ova.grad.abs().min()), float(other.grad.abs().min())) > 0


@pytest.mark.parametrize("logit", [-1e4, 1e4])
def test_extreme_logits_stay_finite_and_teach(logit: float) -> None:
    ova = torch.zeros(2, 2, 3)
    ova[:, 1] = logit
    ova.requires_grad_()
    labels = torch.tensor([0, 2])
    total = ova_positive(ova, labels) + ova_negatives(ova, labels) + ova_entropy(ova)
    total.sum().backward()
    assert bool(torch.isfinite(total).all())
    assert ova.grad is not None
    assert bool(torch.isfinite(ova.grad).all())


# Eq. (1)


@given(seeds, counts, class_counts, temperatures, st.floats(0.01, 20))
def test_alignment(seed: int, count: int, classes: int, temperature: float, length: float) -> None:
    z, pivots = drawn(seed, count, 4, scale=length), drawn(seed + 9, classes, 4)
    label, gated = labels_of(seed, count, classes), coins(seed, count)
    expected = reference.alignments(array(z), array(pivots), label.tolist(), gated.tolist(), temperature)
    near(alignment(z, pivots, label, gated, temperature), expected, 2e-5)


@given(seeds, st.integers(2, 7), temperatures)
def test_alignment_keeps_its_range(seed: int, classes: int, temperature: float) -> None:
    """Section 4.5: gated losses are positive, ungated ones at least log K − 1/T."""
    z, pivots = drawn(seed, 30, 3), drawn(seed + 9, classes, 3)
    label = labels_of(seed, 30, classes)
    gated = array(alignment(z.double(), pivots.double(), label, torch.ones(30, dtype=torch.bool), temperature))
    ungated = array(alignment(z.double(), pivots.double(), label, torch.zeros(30, dtype=torch.bool), temperature))
    slack = 1e-9
    assert gated.min() >= 0
    assert gated.min() >= math.log1p((classes - 1) * math.exp(-2 / temperature)) - slack
    assert gated.max() <= math.log1p((classes - 1) * math.exp(2 / temperature)) + slack
    assert ungated.min() >= math.log(classes) - 1 / temperature - slack
    assert ungated.max() <= math.log(classes) + 1 / temperature + slack


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_both_ends_of_the_range_are_reached(temperature: float) -> None:
    """All pivots in one direction: a gated loss is log K wherever it is, an ungated one log K ± 1/T."""
    pivots = torch.tensor([[1.0, 0.0]]).repeat(6, 1) * torch.arange(1.0, 7.0)[:, None]
    z = torch.tensor([[3.0, 0.0], [-2.0, 0.0], [0.0, 1.0]])
    label = torch.tensor([0, 3, 5])
    near(alignment(z, pivots, label, torch.ones(3, dtype=torch.bool), temperature), [math.log(6)] * 3)
    ungated = alignment(z, pivots, label, torch.zeros(3, dtype=torch.bool), temperature)
    near(ungated, [math.log(6) + 1 / temperature, math.log(6) - 1 / temperature, math.log(6)])


def test_the_values_of_the_papers_argument() -> None:
    """Cosine 0.8 to one pivot and 0 to five others: small with the right label, large with a wrong one."""
    pivots = torch.eye(7)[:6]
    z = torch.tensor([[0.8, 0, 0, 0, 0, 0, 0.6]])
    yes = torch.tensor([True])
    for temperature, right, wrong in ((0.1, 0.002, 8.0), (0.2, 0.088, 4.1), (0.5, 0.70, 2.3), (1.0, 1.18, 2.0)):
        assert float(alignment(z, pivots, torch.tensor([0]), yes, temperature)) == pytest.approx(right, abs=0.006)
        assert float(alignment(z, pivots, torch.tensor([3]), yes, temperature)) == pytest.approx(wrong, abs=0.05)


@given(seeds, st.integers(2, 6), temperatures, st.booleans())
def test_the_gradient_of_alignment_is_purely_angular(seed: int, classes: int, temperature: float, gate: bool) -> None:
    z = drawn(seed, 1, 5).double().requires_grad_()
    pivots = drawn(seed + 9, classes, 5).double()
    label = labels_of(seed, 1, classes)
    alignment(z, pivots, label, torch.tensor([gate]), temperature).sum().backward()
    assert z.grad is not None
    vector, slope = array(z)[0], array(z.grad)[0]
    assert abs(float(vector @ slope)) < 1e-9
    length = float(np.linalg.norm(vector))
    unit = vector / length
    pivot = array(pivots) / np.linalg.norm(array(pivots), axis=1, keepdims=True)
    soft = np.exp(pivot @ unit / temperature)
    pull = (soft / soft.sum()) @ pivot - gate * pivot[int(label)]
    np.testing.assert_allclose(slope, (pull - unit * (unit @ pull)) / (temperature * length), rtol=1e-7, atol=1e-9)


def test_pivots_and_labels_of_ungated_images_do_not_matter() -> None:
    z, pivots = drawn(1, 4, 3), drawn(2, 5, 3)
    closed = torch.zeros(4, dtype=torch.bool)
    one = alignment(z, pivots, torch.zeros(4, dtype=torch.int64), closed, 0.5)
    assert torch.equal(one, alignment(z, pivots, torch.full((4,), 3), closed, 0.5))
    near(alignment(z, 100 * pivots, torch.zeros(4, dtype=torch.int64), closed, 0.5), one.tolist())


@pytest.mark.parametrize("nothing", ["vector", "pivot"])
def test_a_direction_that_is_none_gives_no_nan(nothing: str) -> None:
    z, pivots = drawn(1, 2, 3), drawn(2, 4, 3)
    (z if nothing == "vector" else pivots)[1] = 0.0
    z.requires_grad_()
    gated = torch.tensor([True, True])
    value = alignment(z, pivots, torch.tensor([1, 1]), gated, 0.5)
    near(value, reference.alignments(array(z), array(pivots), [1, 1], [True, True], 0.5))
    value.sum().backward()
    assert z.grad is not None
    assert bool(torch.isfinite(z.grad).all())


@given(seeds, st.integers(1, 7), class_counts, st.sampled_from([0.2, 0.5, 1.0]))
def test_supervised_contrast(seed: int, count: int, classes: int, temperature: float) -> None:
    z, labels = drawn(seed, count, 4), labels_of(seed, count, classes)
    near(supervised_contrastive(z, labels, temperature), reference.contrasts(array(z), labels.tolist(), temperature))


def test_contrast_has_a_finite_gradient_also_for_a_lonely_sample() -> None:
    z = drawn(3, 3, 4).requires_grad_()
    supervised_contrastive(z, torch.tensor([0, 1, 1]), 0.5).sum().backward()
    assert z.grad is not None
    assert bool(torch.isfinite(z.grad).all())
    alone = drawn(3, 1, 4).requires_grad_()
    value = supervised_contrastive(alone, torch.tensor([0]), 0.5)
    value.sum().backward()
    assert value.tolist() == [0.0]
    assert alone.grad is not None
    assert not alone.grad.isnan().any()


# Pivots


@given(seeds, st.integers(0, 12), class_counts, st.floats(0.01, 100))
def test_directions(seed: int, count: int, classes: int, length: float) -> None:
    z, labels = drawn(seed, count, 3, scale=length), labels_of(seed, count, classes)
    found = class_directions(z, labels, classes)
    np.testing.assert_allclose(array(found), reference.unit_sums(array(z), labels.tolist(), classes), atol=1e-5)
    plain = [[sum(float(z[i, d]) for i in range(count) if labels[i] == k) for d in range(3)] for k in range(classes)]
    np.testing.assert_allclose(array(class_sums(z, labels, classes)), plain, rtol=1e-4, atol=1e-4 * length)


def test_how_far_pivots_have_collapsed() -> None:
    assert float(mean_direction_norm(torch.tensor([[2.0, 0.0], [0.5, 0.0]]))) == pytest.approx(1.0)
    assert float(mean_direction_norm(torch.tensor([[2.0, 0.0], [-0.5, 0.0]]))) == pytest.approx(0.0)
    assert float(mean_direction_norm(torch.eye(4))) == pytest.approx(0.5)


def test_a_class_of_which_nobody_tells_keeps_its_direction() -> None:
    old, new = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([[0.0, -1.0], [0.0, 0.0], [2.0, 0.0]])
    assert refreshed(old, new).tolist() == [[0.0, -1.0], [3.0, 4.0], [2.0, 0.0]]
    assert refreshed(torch.empty(0), new) is new


@given(seeds, counts, class_counts)
def test_the_detector_of_the_named_class_says_how_unknown(seed: int, count: int, classes: int) -> None:
    logits, ova = drawn(seed, count, classes), drawn(seed + 1, count, 2, classes)
    answer = detected(Output(logits, torch.zeros(count, 1), {"ova": ova}))
    assert answer.logits is logits
    for row, decision, score in zip(array(logits), reference.decisions(array(ova)), answer.unknown, strict=True):
        assert float(score) == pytest.approx(1 - math.exp(decision[int(row.argmax())][1]), abs=1e-5)


every_term = pytest.mark.parametrize(
    "term",
    [
        lambda n: ova_positive(torch.zeros(n, 2, 3), torch.zeros(n, dtype=torch.int64)),
        lambda n: ova_negatives(torch.zeros(n, 2, 3), torch.zeros(n, dtype=torch.int64)),
        lambda n: ova_hardest_negative(torch.zeros(n, 2, 3), torch.zeros(n, dtype=torch.int64)),
        lambda n: ova_entropy(torch.zeros(n, 2, 3)),
        lambda n: soft_open_consistency(torch.zeros(n, 2, 3), torch.zeros(n, 2, 3)),
        lambda n: pseudo_negatives(torch.zeros(n, 2, 3), torch.ones(n, 3)),
        lambda n: alignment(torch.ones(n, 2), torch.eye(2), torch.zeros(n, dtype=torch.int64), torch.ones(n) > 0, 0.5),
        lambda n: supervised_contrastive(torch.ones(n, 2), torch.zeros(n, dtype=torch.int64), 0.5),
    ],
)


@every_term
@pytest.mark.parametrize("count", [0, 3])
def test_a_value_for_each_sample(term: Callable[[int], Tensor], count: int) -> None:
    assert term(count).shape == (count,)
