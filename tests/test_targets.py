"""Targets from two opinions, image by image in plain Python, and the limits between SAGE, LPL, GPL and ProxyFL."""

import math
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from reference.losses import mean_over_all, soft_cross_entropies
from semifed.losses import masked_mean, soft_cross_entropy
from semifed.targets import (
    KAPPA,
    Targets,
    Trust,
    confidence_gap,
    gap_mixing,
    opinion,
    sage_targets,
    targets,
)

CLASSES = 4
seeds = st.integers(0, 10**6)
thresholds = st.sampled_from([0.0, 0.3, 0.5, 0.8, 0.95])
TRUSTS: list[Trust] = ["local", "received", "either"]


def opinions(seed: int, count: int = 6) -> tuple[Tensor, Tensor]:
    """Probabilities of two models that agree on some images and are sure of some."""
    generator = torch.Generator().manual_seed(seed)
    common, mine, yours = (torch.randn(count, CLASSES, generator=generator, dtype=torch.float64) for _ in range(3))
    return (4 * common + 2 * mine).softmax(dim=1), (3 * common + 2 * yours).softmax(dim=1)


def by_loop(
    local: Tensor, received: Tensor, threshold: float, trust: str, mixing: float | None, soft: bool
) -> tuple[list[list[float]], list[bool], list[float]]:
    """The spec's table: the target of each image, whether it is used, and λ; no mixing is SAGE's own."""
    found, used, shares = [], [], []
    for p_l, p_g in zip(local.tolist(), received.tolist(), strict=True):
        c_l, c_g = max(p_l), max(p_g)
        m_l, m_g = c_l >= threshold, c_g >= threshold
        gap = min(max(abs(c_l - c_g) + 1e-6, 1e-6), 1.0)
        share = min(max(math.exp(-math.log(2) / 0.05 * gap), 1e-6), 1.0) if mixing is None else mixing
        d_l = p_l if soft else [float(index == p_l.index(c_l)) for index in range(len(p_l))]
        d_g = p_g if soft else [float(index == p_g.index(c_g)) for index in range(len(p_g))]
        found.append([share * a + (1 - share) * b for a, b in zip(d_l, d_g, strict=True)] if m_l else d_g)
        used.append({"local": m_l, "received": m_g, "either": m_l or m_g}[trust])
        shares.append(share)
    return found, used, shares


def chosen(local: Tensor, received: Tensor, threshold: float, **options: Any) -> Targets:
    return targets(opinion(local, threshold), opinion(received, threshold), **options)


@given(seeds, thresholds, st.sampled_from(TRUSTS), st.sampled_from([0.0, 0.3, 1.0, None]), st.booleans())
def test_the_table(seed: int, threshold: float, trust: Trust, mixing: float | None, soft: bool) -> None:
    local, received = opinions(seed)
    assume(all(abs(row.max() - threshold) > 1e-6 for row in (*local, *received)))
    ours, theirs = opinion(local, threshold), opinion(received, threshold)
    share = gap_mixing(confidence_gap(ours, theirs), KAPPA) if mixing is None else mixing
    found = targets(ours, theirs, trust=trust, mixing=share, soft=soft)
    expected, used, shares = by_loop(local, received, threshold, trust, mixing, soft)
    np.testing.assert_allclose(found.target.numpy(), expected, rtol=1e-6, atol=1e-7)
    assert found.used.tolist() == used
    assert found.mixing is not None
    np.testing.assert_allclose(found.mixing.numpy(), shares, rtol=1e-6)
    assert found.local == ours
    assert found.received == theirs
    np.testing.assert_allclose(found.target.sum(dim=1).numpy(), 1.0, rtol=1e-6)


@given(seeds, thresholds, st.booleans())
def test_sages_own(seed: int, threshold: float, soft: bool) -> None:
    local, received = opinions(seed)
    found = sage_targets(opinion(local, threshold), opinion(received, threshold), soft=soft)
    expected, used, _ = by_loop(local, received, threshold, "either", None, soft)
    np.testing.assert_allclose(found.target.numpy(), expected, rtol=1e-6, atol=1e-7)
    assert found.used.tolist() == used


def test_kappa_halves_the_say_at_a_gap_of_a_twentieth() -> None:
    assert pytest.approx(math.log(2) / 0.05) == KAPPA
    # The specification's worked numbers: 0.97 against 0.80 and against 0.60.
    gaps = torch.tensor([0.05, 0.17, 0.37, 0.0], dtype=torch.float64)
    assert gap_mixing(gaps, KAPPA).tolist() == pytest.approx([0.5, 0.095, 0.006, 1.0], abs=6e-4)


@pytest.mark.parametrize(("one", "other"), [(1.0, 1.0), (1.0, 0.25), (0.25, 1.0), (0.7, 0.6)])
def test_gap_and_mixing_stay_within_their_bounds(one: float, other: float) -> None:
    def certain(confidence: float) -> Tensor:
        return torch.tensor([[confidence, *[(1 - confidence) / 3] * 3]])

    gap = confidence_gap(opinion(certain(one), 0.5), opinion(certain(other), 0.5))
    assert gap.tolist() == pytest.approx([min(abs(one - other) + 1e-6, 1.0)], rel=1e-5)
    assert 1e-6 * (1 - 1e-6) <= float(gap_mixing(gap, 1e9)) <= float(gap_mixing(gap, KAPPA)) <= 1.0


@given(seeds, thresholds)
def test_no_kappa_is_collaboration_alone(seed: int, threshold: float) -> None:
    local, received = (opinion(part, threshold) for part in opinions(seed))
    without = targets(local, received, trust="either", mixing=gap_mixing(confidence_gap(local, received), 0.0))
    assert torch.equal(without.target, targets(local, received, trust="either", mixing=1.0).target)
    eq_1 = torch.where(local.sure, local.label, received.label)
    assert torch.equal(without.label[without.used], eq_1[without.used])


@given(seeds, thresholds)
def test_a_large_kappa_is_the_received_label(seed: int, threshold: float) -> None:
    """ProxyFL's unlabelled loss: the received label wherever either model is sure."""
    local, received = (opinion(part, threshold) for part in opinions(seed))
    assume(bool(((local.confidence - received.confidence).abs() > 1e-5).all()))
    found = targets(local, received, trust="either", mixing=gap_mixing(confidence_gap(local, received), 1e7))
    proxy = targets(local, received, trust="either", mixing=0.0)
    torch.testing.assert_close(found.target, proxy.target, rtol=0, atol=1.1e-6)
    assert torch.equal(proxy.label, received.label)
    assert torch.equal(found.used, proxy.used)


@given(seeds, thresholds, st.floats(0, 1), st.sampled_from(TRUSTS))
def test_where_both_name_one_class_mixing_is_irrelevant(
    seed: int, threshold: float, mixing: float, trust: Trust
) -> None:
    local, received = opinions(seed)
    top = local.argmax(dim=1)
    swapped = received.clone()  # the received model's largest probability moves to the local model's class
    for index, (mine, yours) in enumerate(zip(top.tolist(), received.argmax(dim=1).tolist(), strict=True)):
        swapped[index, [mine, yours]] = received[index, [yours, mine]]
    found = chosen(local, swapped, threshold, trust=trust, mixing=mixing)
    expected = torch.nn.functional.one_hot(swapped.argmax(dim=1), CLASSES).double()
    torch.testing.assert_close(found.target.double(), expected)


@given(seeds, thresholds)
def test_two_equal_opinions_are_local_labels(seed: int, threshold: float) -> None:
    one = opinion(opinions(seed)[0], threshold)
    found = sage_targets(one, one)
    torch.testing.assert_close(found.target, one.chosen(soft=False).double(), rtol=0, atol=1e-6)
    assert torch.equal(found.used, one.sure)
    assert torch.equal(found.label, one.label)


@given(seeds, thresholds, st.booleans())
def test_the_loss_is_the_divergence_of_the_authors_code(seed: int, threshold: float, soft: bool) -> None:
    """KL(target + 1e-10 ‖ p + 1e-10) is our cross entropy minus the target's entropy, which has no gradient."""
    local, received = opinions(seed)
    found = sage_targets(opinion(local, threshold), opinion(received, threshold), soft=soft)
    generator = torch.Generator().manual_seed(seed + 1)
    output = torch.randn(len(local), CLASSES, generator=generator, dtype=torch.float64).clamp(-3, 3)
    target = found.target.double().numpy() + 1e-10
    kl = scipy.special.rel_entr(target, output.softmax(dim=1).numpy() + 1e-10).sum(axis=1)
    entropy = -scipy.special.xlogy(target, target).sum(axis=1)
    used = found.used.tolist()
    ours = float(masked_mean(soft_cross_entropy(output, found.target), found.used))
    assert ours == pytest.approx(mean_over_all(list(kl + entropy), used), abs=1e-6)
    assert ours == pytest.approx(mean_over_all(soft_cross_entropies(output.numpy(), target), used), abs=1e-6)


def test_nothing_of_a_target_has_a_gradient() -> None:
    weak = torch.randn(6, CLASSES, requires_grad=True)
    teacher = torch.randn(6, CLASSES, requires_grad=True)
    local, received = opinion(weak.softmax(dim=1), 0.3), opinion(teacher.softmax(dim=1), 0.3)
    for soft in (False, True):
        found = sage_targets(local, received, soft=soft)
        assert not any(part.requires_grad for part in (found.target, *local, *received))
        strong = torch.randn(6, CLASSES, requires_grad=True)
        masked_mean(soft_cross_entropy(strong, found.target), found.used).backward()
        assert strong.grad is not None
        assert weak.grad is None
        assert teacher.grad is None


def test_a_threshold_for_each_class() -> None:
    """FlexMatch's: each image is held to the threshold of the class it is put into."""
    p = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7]])
    assert opinion(p, torch.tensor([0.65, 0.5, 0.7])).sure.tolist() == [False, True, True]
    assert opinion(p, 0.6).sure.tolist() == [True, False, True]
    assert torch.equal(opinion(p, torch.full((3,), 0.6)).sure, opinion(p, 0.6).sure)


def test_a_confidence_at_the_threshold_is_enough() -> None:
    assert opinion(torch.tensor([[0.75, 0.25]]), 0.75).sure.all()


def test_no_images_have_no_targets() -> None:
    nobody = opinion(torch.zeros(0, 3), 0.5)
    found = sage_targets(nobody, nobody)
    assert found.target.shape == (0, 3)
    assert found.used.shape == found.label.shape == (0,)
    assert targets(nobody, nobody, trust="local", mixing=1.0).target.shape == (0, 3)
