"""How confident a client's model must be of an unlabelled image before it passes for one of a seen class (FedLPA)."""

import math

import torch
from torch import Tensor

GRID = 2000  # points of [0, 1] on which the density is followed
LEAST_BANDWIDTH, LARGEST_BANDWIDTH = 0.005, 0.1
FEWEST = 10  # labelled images below which a density says less than their quantile
LEAST_SPREAD = 1e-6
PAIRS_AT_ONCE = 2**22  # kernels held at a time, 32 MB


def seen_threshold(confidence: Tensor, percentile: float, bandwidth: float = 0.0) -> float:
    """The confidence above which an image counts as seen, by the density of those of labelled images, [m].

    It is the left edge of the component around the mode where the log-density is at least that percentile (0 to 100)
    of the log-densities of the labelled images. Only the left one: a Gaussian kernel leaks beyond 1, so the density
    falls again where the model is surest, and a threshold on the density itself would reject those. Without labelled
    images nothing is seen (infinity), for few or equal ones it is the plain quantile. Bandwidth 0 is Scott's rule
    within bounds.
    """
    if not 0 <= percentile <= 100:
        raise ValueError(f"percentile: expected 0 to 100, found {percentile}")
    if bandwidth < 0:
        raise ValueError(f"bandwidth: expected a positive number, or 0 for Scott's rule, found {bandwidth}")
    if len(confidence) == 0:
        return math.inf
    known = confidence.double()
    if len(known) < FEWEST or known.std() < LEAST_SPREAD:
        return float(known.quantile(percentile / 100))
    width = bandwidth or scotts_bandwidth(known)
    grid = torch.linspace(0, 1, GRID, dtype=torch.float64)
    density = log_density(grid, known, width)
    least = log_density(known, known, width).quantile(percentile / 100)
    mode = int(density.argmax())
    too_low = (density[: mode + 1] < least).nonzero()
    # The mode itself is too low where it lies beside the grid, or the percentile is 100: it is the edge all the same.
    edge = min(int(too_low[-1]) + 1, mode) if len(too_low) else 0
    return float(grid[edge])


def scotts_bandwidth(values: Tensor) -> float:
    """σ m^(−1/5) for m values, but so that neither single values nor the whole range become one bump."""
    return min(max(float(values.std()) * math.pow(len(values), -0.2), LEAST_BANDWIDTH), LARGEST_BANDWIDTH)


def log_density(at: Tensor, values: Tensor, bandwidth: float) -> Tensor:
    """Logarithm of the Gaussian kernel density of the values at each point, [points]; −inf where it underflows."""
    parts = [
        torch.exp(-0.5 * ((some[:, None] - values) / bandwidth) ** 2).sum(dim=1)
        for some in at.split(max(PAIRS_AT_ONCE // len(values), 1))
    ]
    return torch.cat(parts).log() - math.log(len(values) * bandwidth * math.sqrt(2 * math.pi))
