"""The losses of category discovery against plain loops and closed forms."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy as relative_entropy

from semifed.discovery.guided import true_members
from semifed.discovery.objectives import (
    TwoViews,
    contrast,
    prior_alignment,
    self_distillation,
    sharpening,
    smoothed_prior,
    unit,
)
from semifed.losses import prior_divergence
from semifed.models.network import Output


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def said(projected: torch.Tensor) -> Output:
    return Output(torch.empty(len(projected), 2), torch.empty(len(projected), 3), {"projection": projected})


def views(labelled: int, unlabelled: int, labels: list[int]) -> TwoViews:
    return TwoViews(
        said(drawn(2 * labelled, 5)),
        torch.tensor(labels * 2, dtype=torch.int64),
        said(drawn(2 * unlabelled, 5, seed=1)),
    )


def looped_contrast(z: np.ndarray, group: list[int], temperature: float) -> float:
    """−1/N Σ_i 1/|P(i)| Σ_p [s_ip − log Σ_{a≠i} exp s_ia], one pair after the other."""
    z = z / np.linalg.norm(z, axis=1, keepdims=True)
    total = 0.0
    for i in range(len(z)):
        others = [a for a in range(len(z)) if a != i]
        below = math.log(sum(math.exp(z[i] @ z[a] / temperature) for a in others))
        positive = [p for p in others if group[p] == group[i]]
        total -= sum(z[i] @ z[p] / temperature - below for p in positive) / len(positive)
    return total / len(z)


@pytest.mark.parametrize(("labels", "unlabelled"), [([0, 1, 0, 2], 3), ([1], 2), ([2, 2, 2], 1)])
def test_contrast_is_gcds_pair_of_losses(labels: list[int], unlabelled: int) -> None:
    seen = views(len(labels), unlabelled, labels)
    found = contrast(seen, 0.07, 1.0)
    with_label = seen.labelled.heads["projection"].numpy()
    everything = np.concatenate([with_label, seen.unlabelled.heads["projection"].numpy()])
    images = [*range(len(labels))] * 2 + [100 + i for i in range(unlabelled)] * 2
    assert float(found.supervised) == pytest.approx(looped_contrast(with_label, labels * 2, 0.07))
    assert float(found.unsupervised) == pytest.approx(looped_contrast(everything, images, 1.0))


def test_contrast_without_labels_or_without_unlabelled_images() -> None:
    alone = contrast(views(0, 3, []), 0.07, 1.0)
    assert float(alone.supervised) == 0
    assert float(alone.unsupervised) > 0
    assert float(contrast(views(2, 0, [0, 1]), 0.07, 1.0).unsupervised) > 0


def test_contrast_of_unrelated_views_is_the_logarithm_of_their_number() -> None:
    # tau_u = 1: with equal cosines every other view is equally likely.
    same = torch.ones(8, 5)
    found = contrast(TwoViews(said(same[:0]), torch.empty(0, dtype=torch.int64), said(same)), 0.07, 1.0)
    assert float(found.unsupervised) == pytest.approx(math.log(7), abs=1e-6)


def test_every_view_is_taught_by_the_other_one_and_not_by_itself() -> None:
    logits = drawn(6, 4)
    found = self_distillation(logits, 2.5)
    for i in range(6):
        other = (i + 3) % 6
        teacher = np.exp(2.5 * logits[other].numpy())
        student = np.exp(logits[i].numpy())
        expected = -np.sum(teacher / teacher.sum() * np.log(student / student.sum()))
        assert float(found[i]) == pytest.approx(expected)


def test_no_gradient_reaches_the_teacher() -> None:
    logits = drawn(2, 3).requires_grad_()
    self_distillation(logits, 2.0)[0].backward()
    assert logits.grad is not None
    assert logits.grad[0].abs().sum() > 0
    assert logits.grad[1].abs().sum() == 0


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=6), st.integers(0, 99))
def test_divergences_are_those_of_scipy(values: list[float], seed: int) -> None:
    mean = torch.tensor(values, dtype=torch.float64)
    mean = mean / mean.sum()
    prior = drawn(len(values), seed=seed).softmax(dim=0)
    one, other = mean.numpy(), prior.numpy()
    assert float(prior_divergence(mean, prior, "kl")) == pytest.approx(relative_entropy(one, other), abs=1e-12)
    assert float(prior_divergence(mean, prior, "kl_fwd")) == pytest.approx(relative_entropy(other, one), abs=1e-12)
    assert float(prior_divergence(mean, prior, "jsd")) == pytest.approx(jensenshannon(one, other) ** 2, abs=1e-9)
    assert float(prior_divergence(mean, prior, "jsd")) <= math.log(2)


@pytest.mark.parametrize("kind", ["kl", "kl_fwd", "jsd"])
def test_a_met_prior_costs_nothing(kind: str) -> None:
    prior = drawn(5).softmax(dim=0)
    assert float(prior_divergence(prior, prior, kind)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("kind", ["kl", "kl_fwd", "jsd"])
@pytest.mark.parametrize("temperature", [0.1, 0.02, 0.01, 0.001])
def test_predictions_of_nothing_have_a_gradient(kind: str, temperature: float) -> None:
    """Cosines over a small temperature: float32 knows no probability as small as that of the last concept."""
    cosines = torch.tensor([[1.0, 0.9, -1.0], [0.9, 1.0, -1.0]]).requires_grad_()
    value = prior_alignment(cosines / temperature, torch.tensor([0.5, 0.25, 0.25]), kind)
    value.backward()
    assert cosines.grad is not None
    assert torch.isfinite(value)
    assert torch.isfinite(cosines.grad).all()


def test_a_uniform_prior_is_simgcds_mean_entropy_term() -> None:
    logits = drawn(10, 4)
    mean = logits.softmax(dim=1).mean(dim=0).numpy()
    uniform = torch.full((4,), 0.25, dtype=torch.float64)
    assert float(prior_alignment(logits, uniform, "kl")) == pytest.approx(math.log(4) - relative_entropy(mean))


def test_an_absent_concept_keeps_a_trace() -> None:
    member = torch.tensor([0, 0, 2])
    assert smoothed_prior(member, 4, 0.5).tolist() == pytest.approx([2.5 / 5, 0.5 / 5, 1.5 / 5, 0.5 / 5])
    bare = smoothed_prior(member, 4, 0.0)
    assert bare.tolist() == pytest.approx([2 / 3, 0, 1 / 3, 0], abs=1e-7)
    assert torch.isfinite(prior_divergence(torch.full((4,), 0.25), bare, "kl"))


def test_the_teacher_cools_down_and_stays_cold() -> None:
    factors = [sharpening(round_, 30, 0.1, 0.07, 0.04) for round_ in (1, 16, 31, 99)]
    assert factors == pytest.approx([0.1 / 0.07, 0.1 / 0.055, 0.1 / 0.04, 0.1 / 0.04])


def test_unit_features_have_length_one() -> None:
    assert torch.linalg.vector_norm(unit(drawn(4, 3)), dim=1).tolist() == pytest.approx([1.0] * 4)


def test_the_oracle_moves_wrong_images_to_the_largest_concept_of_their_class() -> None:
    # Concepts 0 and 1 are of class 0, concept 2 of class 1; class 2 has none.
    member = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 0, -1, 2])
    classes = torch.tensor([0, 0, 0, 0, 0, 1, 1, 0, 1, 0, 2])
    expected = [0, 0, 0, 1, 1, 2, 2, 0, 2, 0, 2]
    assert true_members(member, classes).tolist() == expected


def test_the_oracle_changes_nothing_that_is_right() -> None:
    classes = torch.tensor([3, 3, 1, 1, 0])
    member = torch.tensor([0, 0, 1, 1, 2])
    assert torch.equal(true_members(member, classes), member)
    assert torch.equal(true_members(member - 9, classes), member - 9), "nothing was found, nothing is moved"
