"""FedDB's class priors: how a model's lean to some classes is measured, taken out of labels and out of an average."""

from collections.abc import Sequence

import torch
from torch import Tensor

from semifed.aggregate import equal_shares, shares

LEAST_PRIOR = 1e-6  # nothing is divided by less
RIDGE = 1e-8  # among equally good weights of clients the most equal are the answer
NO_STEP, NO_PRESSURE = 1e-14, 1e-13  # what rounding alone may leave


def tracked_prior(prior: Tensor, probabilities: Tensor, momentum: float) -> Tensor:
    """The prior p̄ after a batch, [classes]: momentum · p̄ + (1 − momentum) · mean p; p̄ itself for no images."""
    if len(probabilities) == 0:
        return prior
    return momentum * prior + (1 - momentum) * probabilities.detach().mean(dim=0)


def debiased(probabilities: Tensor, prior: Tensor) -> Tensor:
    """q(c|u) ∝ p(c|u) / p̄_c, [n, classes]: what the model would say if it leant to no class."""
    lifted = probabilities.detach() / prior.clamp(min=LEAST_PRIOR)
    return lifted / lifted.sum(dim=1, keepdim=True)


def unbiased_shares(counts: Sequence[float], priors: Sequence[Tensor], *, exact: bool, most: float) -> Tensor:
    """Weights of those who have anything to tell: together, their priors are to be near the uniform one.

    By the authors' iteration, or as the `exact` minimiser with no client above `most` or below 1/`most` of an equal
    share. Whatever a client claims counts as a distribution over classes: negative shares and what is no number
    count as 0, the rest is scaled to sum to 1, and nothing at all is the uniform prior.
    """
    active = torch.as_tensor(counts, dtype=torch.float64) > 0
    if not active.any():
        return equal_shares(counts)
    told = [prior.flatten().double() for prior, tells in zip(priors, active.tolist(), strict=True) if tells]
    nothing = torch.zeros(max(1, *map(len, told)), dtype=torch.float64)
    claimed = torch.stack(
        [shares((prior if len(prior) == len(nothing) else nothing).nan_to_num(nan=0.0).clamp(0, 1)) for prior in told]
    )
    weight = torch.zeros(len(counts), dtype=torch.float64)
    weight[active] = nearest_mixture(claimed, most) if exact else settled_mixture(claimed)
    return shares(weight)


def settled_mixture(priors: Tensor) -> Tensor:
    """Weights of the released solver for priors [clients, classes]; they never get far from equal ones.

    It takes a hundred steps of SGD (rate 1, Nesterov momentum 0.9, weight decay 0.9) on the mean squared distance to
    the uniform prior, each with a fresh optimiser, hence 1.9 times its gradient, and each followed by a softmax.
    """
    count, classes = priors.shape
    weight = torch.full((count,), 1 / count, dtype=priors.dtype)
    for _ in range(100):
        slope = priors @ (weight @ priors - 1 / classes) * 2 / classes
        weight = torch.softmax(weight - 1.9 * (slope + 0.9 * weight), dim=0)
    return weight


def nearest_mixture(priors: Tensor, most: float) -> Tensor:
    """Weights w for which Σ_k w_k p_k of the priors [clients, classes] is nearest to the uniform prior.

    They sum to 1 and are within [1/`most`, `most`] of an equal share. This convex quadratic programme is solved
    exactly, by a primal active-set method: weights at a bound are held there, the others go to their minimum or to
    the first bound in the way; at a minimum, the held weight that presses most against its bound is let go.
    """
    count, classes = priors.shape
    bounds = torch.tensor([1 / (most * count), most / count], dtype=priors.dtype)
    curvature = priors @ priors.T + RIDGE * torch.eye(count, dtype=priors.dtype)
    pull = priors.sum(dim=1) / classes
    weight = torch.full((count,), 1 / count, dtype=priors.dtype)
    held = torch.full((count,), most <= 1)
    for _ in range(20 * count):  # far more than it ever takes; should it not end, the weights are within bounds
        free = ~held
        if not free.any():
            break
        slope = curvature @ weight - pull
        sides = torch.stack([-slope[free], torch.ones_like(slope[free])], dim=1)
        down, flat = torch.linalg.solve(curvature[free][:, free], sides).T
        down = down - flat * down.sum() / flat.sum()
        step = torch.zeros_like(weight)
        step[free] = down - down.mean()  # what rounding left of the sum: the weights add up to 1 all along
        bound = bounds[(step > 0).long()]
        room, first = torch.where(step.abs() > NO_STEP, (bound - weight) / step, torch.inf).min(dim=0)
        weight = weight + step * room.clamp(max=1)
        if room < 1:
            weight[first], held[first] = bound[first], True
            continue
        slope = curvature @ weight - pull
        rise = slope - slope[free].mean()
        pressure = torch.where(weight > 1 / count, rise, -rise) * held
        if pressure.max() <= NO_PRESSURE:
            break
        held[pressure.argmax()] = False
    return shares(weight.clamp(*bounds))
