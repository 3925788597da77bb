"""The open-set losses, gates, pivots and client weights of SSB and OpenFL, one number at a time."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from reference.losses import cross_entropies, log_probabilities, mean_over_all

Array = NDArray[np.float64]


def decisions(ova: Array) -> list[list[tuple[float, float]]]:
    """(log φ^unknown, log φ^known) of each sample and class, for logits [n, 2, classes]."""
    result = []
    for sample in ova:
        row = []
        for k in range(sample.shape[1]):
            unknown, known = log_probabilities([sample[0, k], sample[1, k]])
            row.append((unknown, known))
        result.append(row)
    return result


def positives(ova: Array, labels: Sequence[int]) -> list[float]:
    """−log φ^known of the label."""
    return [-row[label][1] for row, label in zip(decisions(ova), labels, strict=True)]


def negatives(ova: Array, labels: Sequence[int]) -> list[float]:
    """−Σ over the other classes of log φ^unknown, divided by the number of all classes."""
    return [
        sum(-unknown for k, (unknown, _) in enumerate(row) if k != label) / len(row)
        for row, label in zip(decisions(ova), labels, strict=True)
    ]


def hardest(ova: Array, labels: Sequence[int]) -> list[float]:
    """The largest −log φ^unknown among the other classes."""
    return [
        max((-unknown for k, (unknown, _) in enumerate(row) if k != label), default=0.0)
        for row, label in zip(decisions(ova), labels, strict=True)
    ]


def entropies(ova: Array) -> list[float]:
    """Mean over classes of H(φ^known) = −q log q − (1 − q) log(1 − q)."""
    result = []
    for row in decisions(ova):
        total = 0.0
        for unknown, known in row:
            total -= math.exp(known) * known + math.exp(unknown) * unknown
        result.append(total / len(row))
    return result


def socr(ova: Array, other: Array) -> list[float]:
    """Twice the sum over classes of the squared difference of φ^known: both outcomes differ alike."""
    return [
        sum(2 * (math.exp(a[1]) - math.exp(b[1])) ** 2 for a, b in zip(one, two, strict=True))
        for one, two in zip(decisions(ova), decisions(other), strict=True)
    ]


def marked_negatives(ova: Array, marked: Sequence[Sequence[bool]]) -> list[float]:
    """−Σ over the marked classes of log φ^unknown."""
    return [
        sum(-unknown for (unknown, _), use in zip(row, marks, strict=True) if use)
        for row, marks in zip(decisions(ova), marked, strict=True)
    ]


def cosine(one: Array, other: Array) -> float:
    """The cosine of the angle; 0 with a vector of no length."""
    length = math.sqrt(float((one**2).sum())) * math.sqrt(float((other**2).sum()))
    return float((one * other).sum()) / length if length else 0.0


def alignments(
    vectors: Array, pivots: Array, labels: Sequence[int], gated: Sequence[bool], temperature: float
) -> list[float]:
    """OpenFL's eq. (1), sample by sample."""
    result = []
    for z, label, gate in zip(vectors, labels, gated, strict=True):
        similar = [cosine(z, pivot) / temperature for pivot in pivots]
        top = max(similar)
        value = top + math.log(sum(math.exp(s - top) for s in similar))
        result.append(value - similar[label] if gate else value)
    return result


def contrasts(vectors: Array, labels: Sequence[int], temperature: float) -> list[float]:
    """Supervised contrast: −mean over partners of log(e^(s_ip/T) / Σ_{a≠i} e^(s_ia/T)); 0 without a partner."""
    result = []
    for i, z in enumerate(vectors):
        others = [a for a in range(len(vectors)) if a != i]
        partners = [a for a in others if labels[a] == labels[i]]
        total = sum(math.exp(cosine(z, vectors[a]) / temperature) for a in others)
        logs = [cosine(z, vectors[a]) / temperature - math.log(total) for a in partners]
        result.append(-sum(logs) / len(logs) if logs else 0.0)
    return result


def unit_sums(vectors: Array, labels: Sequence[int], classes: int) -> Array:
    """For each class the sum of its vectors, each of length 1."""
    sums = np.zeros((classes, vectors.shape[1]))
    for z, label in zip(vectors, labels, strict=True):
        sums[label] += z / math.sqrt(float((z**2).sum()))
    return sums


def masks(
    logits: Array, ova: Array, threshold: float, known_threshold: float, negative_threshold: float
) -> tuple[list[int], list[bool], list[bool], list[list[bool]]]:
    """Label, confident, known, and surely-not for each class, of each sample."""
    label, confident, known, negative = [], [], [], []
    for row, decision in zip(logits, decisions(ova), strict=True):
        probabilities = [math.exp(value) for value in log_probabilities(row.tolist())]
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        label.append(best)
        confident.append(probabilities[best] >= threshold)
        known.append(math.exp(decision[best][1]) >= known_threshold)
        negative.append([math.exp(unknown) >= negative_threshold for unknown, _ in decision])
    return label, confident, known, negative


def trust_shares(losses: Sequence[float], epsilon: float, most: float) -> list[float]:
    """Eq. (2) between bounds: the one vector of clipped shares in proportion to 1/(loss + ε) that sums to 1.

    Found by trying every number of clients at the upper and at the lower bound.
    """
    trust = [1 / (max(loss, 0.0) + epsilon) for loss in losses]
    count = len(trust)
    low, high = 1 / (most * count), most / count
    order = sorted(range(count), key=lambda i: -trust[i])
    best: tuple[float, list[float]] | None = None
    for top in range(count):
        for bottom in range(count - top):
            middle = order[top : count - bottom]
            scale = (1 - top * high - bottom * low) / sum(trust[i] for i in middle)
            shares = [min(max(scale * t, low), high) for t in trust]
            error = abs(sum(shares) - 1)
            if best is None or error < best[0]:
                best = (error, shares)
    assert best is not None
    assert best[0] < 1e-9
    return best[1]


def server_objective(
    weak: Sequence[tuple[Array, Array]],
    strong: Sequence[tuple[Array, Array]],
    labels: Sequence[int],
    detector_weight: float,
    *,
    strong_too: bool,
) -> tuple[float, float, float]:
    """SSB on labels, for (logits, ova) of two weak and two strong views: the whole, cross entropy, detector."""
    everything = [*weak, *strong]
    cross = [value for logits, _ in (everything if strong_too else weak) for value in cross_entropies(logits, labels)]
    positive = [value for _, ova in weak for value in positives(ova, labels)]
    negative = [value for _, ova in everything for value in negatives(ova, labels)]
    ce = sum(cross) / len(cross)
    detector = sum(positive) / len(positive) + sum(negative) / len(negative)
    return ce + detector_weight * detector, ce, detector


def client_objective(
    weak: Array,
    flipped: Array,
    strong: tuple[Array, Array],
    label: Sequence[int],
    used: Sequence[bool],
    negative: Sequence[Sequence[bool]],
) -> dict[str, float]:
    """SSB's four terms on unlabelled images, for the detector's logits on three views."""
    logits, ova = strong
    everyone = [True] * len(label)
    entropy = (mean_over_all(entropies(weak), everyone) + mean_over_all(entropies(flipped), everyone)) / 2
    return {
        "consistency": mean_over_all(cross_entropies(logits, label), used),
        "entropy": entropy,
        "socr": mean_over_all(socr(weak, flipped), everyone),
        "negative": mean_over_all(marked_negatives(ova, negative), everyone),
    }
