"""ProSub's Beta mixture, one score at a time, with SciPy's densities."""

from collections.abc import Sequence

from scipy import stats

Shapes = tuple[float, float]


def inside(score: float) -> float:
    """The score, away from 0 and 1."""
    return min(max(score, 1e-4), 1 - 1e-4)


def known_probability(score: float, known: Shapes, unknown: Shapes, prior: float, floor: float) -> float:
    """π f1 / (π f1 + (1 − π) f2 + floor)."""
    one = prior * float(stats.beta.pdf(inside(score), *known))
    other = (1 - prior) * float(stats.beta.pdf(inside(score), *unknown))
    return one / (one + other + floor)


def weighted_moments(scores: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Mean and variance of weighted scores."""
    total = mean = variance = 0.0
    for score, weight in zip(scores, weights, strict=True):
        total += weight
        mean += weight * inside(score)
    mean /= total
    for score, weight in zip(scores, weights, strict=True):
        variance += weight * (inside(score) - mean) ** 2
    return mean, max(variance / total, 1e-6)


def shapes_of(mean: float, variance: float) -> Shapes:
    """mean = a / (a + b) and variance = mean (1 − mean) / (a + b + 1), solved; at most 1000 together, at least 0.01."""
    total = mean * (1 - mean) / variance - 1
    total = min(total, 1e3 / max(mean, 1 - mean))
    return max(mean * total, 1e-2), max((1 - mean) * total, 1e-2)
