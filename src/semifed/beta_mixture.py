"""ProSub's mixture of two Beta distributions over subspace scores: one of known images, one of unknown ones."""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from semifed.shapes import Shaped

LEAST_SCORE = 1e-4  # scores stay this far from 0 and 1, where densities may be infinite
LEAST_VARIANCE = 1e-6
LEAST_SHAPE, LARGEST_SHAPE = 1e-2, 1e3
LEAST_WEIGHT = 1e-6  # a smaller sum of weights is nothing to fit to
NO_DENSITY = 1e-8  # keeps a responsibility defined where both densities vanish


class BetaMixture(NamedTuple):
    """Shapes (a, b) of both distributions, [2] each, in double precision."""

    known: Annotated[Tensor, Shaped(2)]  # a1, b1
    unknown: Annotated[Tensor, Shaped(2)]  # a2, b2


def initial_mixture() -> BetaMixture:
    """Known scores near 1, unknown ones near 0."""
    return BetaMixture(torch.tensor([10.0, 2.0]).double(), torch.tensor([2.0, 10.0]).double())


def known_probability(scores: Tensor, mixture: BetaMixture, prior: float, floor: float = NO_DENSITY) -> Tensor:
    """π f1 / (π f1 + (1 − π) f2 + floor) for each score, [n].

    A high floor takes scores that neither distribution expects for unknown.
    """
    known, unknown = (
        weight * _density(scores, shapes) for weight, shapes in zip((prior, 1 - prior), mixture, strict=True)
    )
    return known / (known + unknown + floor)


def fitted_shapes(scores: Tensor, weights: Tensor, otherwise: Tensor) -> Tensor:
    """Shapes of the Beta distribution with the weighted mean and variance of the scores; `otherwise` without any.

    Shapes above the largest are scaled down together, which keeps the mean.
    """
    total = weights.sum()
    if total < LEAST_WEIGHT:
        return otherwise
    inside = _inside(scores)
    mean = (weights * inside).sum() / total
    variance = ((weights * (inside - mean) ** 2).sum() / total).clamp(min=LEAST_VARIANCE)
    return _bounded(torch.stack([mean, 1 - mean]) * (mean * (1 - mean) / variance - 1))


def refitted(mixture: BetaMixture, labelled: Tensor, unlabelled: Tensor, prior: float) -> BetaMixture:
    """One step of expectation and moments: labelled scores count as known, unlabelled ones by responsibility."""
    known = known_probability(unlabelled, mixture, prior)
    return BetaMixture(
        fitted_shapes(
            torch.cat([labelled, unlabelled]), torch.cat([torch.ones(len(labelled)).double(), known]), mixture.known
        ),
        fitted_shapes(unlabelled, 1 - known, mixture.unknown),
    )


def mean_mixture(mixtures: Sequence[BetaMixture]) -> BetaMixture:
    """The mean of the shapes, everyone the same; whatever was claimed, the result is within bounds."""
    bounded = [[_bounded(shapes.double()) for shapes in mixture] for mixture in mixtures]
    return BetaMixture(*(torch.stack(shapes).mean(dim=0) for shapes in zip(*bounded, strict=True)))


def _density(scores: Tensor, shapes: Tensor) -> Tensor:
    inside = _inside(scores)
    a, b = shapes.double()
    constant = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)
    return torch.exp((a - 1) * inside.log() + (b - 1) * torch.log1p(-inside) + constant)


def _inside(scores: Tensor) -> Tensor:
    return scores.double().clamp(LEAST_SCORE, 1 - LEAST_SCORE)


def _bounded(shapes: Tensor) -> Tensor:
    scale = (LARGEST_SHAPE / shapes.max()).clamp(0, 1)
    return (shapes * scale).clamp(LEAST_SHAPE, LARGEST_SHAPE)
