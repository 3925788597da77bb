"""Objectives and their gradients, one sample and one class at a time."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def log_probabilities(logits: Sequence[float]) -> list[float]:
    """The logarithm of the softmax of one sample."""
    top = max(logits)
    total = sum(math.exp(value - top) for value in logits)
    return [value - top - math.log(total) for value in logits]


def cross_entropies(logits: Array, labels: Sequence[int]) -> list[float]:
    """−log p(label), sample by sample."""
    return [-log_probabilities(row.tolist())[label] for row, label in zip(logits, labels, strict=True)]


def soft_cross_entropies(logits: Array, targets: Array) -> list[float]:
    """−Σ_c target_c log p_c, sample by sample."""
    result = []
    for row, target in zip(logits, targets, strict=True):
        total = 0.0
        for log_p, share in zip(log_probabilities(row.tolist()), target.tolist(), strict=True):
            total -= share * log_p
        result.append(total)
    return result


def mean_over_all(values: Sequence[float], used: Sequence[bool]) -> float:
    """The sum over the used samples divided by the number of all of them; 0 if there is none."""
    total = sum(value for value, use in zip(values, used, strict=True) if use)
    return total / len(values) if len(values) else 0.0


def squared_distance(one: Sequence[Array], other: Sequence[Array]) -> float:
    """‖w − w'‖² over a list of arrays, number by number."""
    total = 0.0
    for left, right in zip(one, other, strict=True):
        for a, b in zip(left.ravel().tolist(), right.ravel().tolist(), strict=True):
            total += (a - b) ** 2
    return total


def fixmatch(
    labelled: Array,
    labels: Sequence[int],
    weak: Array,
    strong: Array,
    threshold: float,
    unlabelled_weight: float,
) -> tuple[float, float, float]:
    """FixMatch (NeurIPS 2020), eqs. 3 and 4, for given logits: the whole, its supervised and its unlabelled part."""
    supervised = mean_over_all(cross_entropies(labelled, labels), [True] * len(labels))
    guesses, sure = [], []
    for row in weak:
        probabilities = [math.exp(value) for value in log_probabilities(row.tolist())]
        guesses.append(probabilities.index(max(probabilities)))
        sure.append(max(probabilities) >= threshold)
    unlabelled = mean_over_all(cross_entropies(strong, guesses), sure)
    return supervised + unlabelled_weight * unlabelled, supervised, unlabelled


def softmax_gradient(logits: Array, label: int) -> Array:
    """The closed form of d(−log p(label)) / d logits: p − one-hot."""
    gradient: Array = np.exp(np.array(log_probabilities(logits.tolist())))
    gradient[label] -= 1
    return gradient
