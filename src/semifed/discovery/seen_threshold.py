"""How confident a client's model must be of an unlabelled image before it passes for one of a seen class (FedLPA)."""

import math
from typing import Literal

import torch
from torch import Tensor

Density = Literal["plain", "logit"]
GRID = 2000  # points on which the density is followed
LEAST_BANDWIDTH, LARGEST_BANDWIDTH = 0.005, 0.1  # lest single values, or the whole range, become one bump
FEWEST = 10  # labelled images below which a density says less than their quantile
LEAST_SPREAD = 1e-6
CERTAIN = 1e-9  # from 0 and 1, where a logit is still finite
PAIRS_AT_ONCE = 2**22  # kernels held at a time, 32 MB


def seen_threshold(
    confidence: Tensor, percentile: float, bandwidth: float = 0.0, *, density: Density = "plain"
) -> float:
    """The confidence above which an image counts as seen, by the density of those of labelled images, [m].

    It is the left edge of the component around the mode where the log-density is at least that percentile (0 to 100)
    of the log-densities of the labelled images. Only the left one: a Gaussian kernel leaks beyond 1, so the density
    falls again where the model is surest, and a threshold on the density itself would reject those. Without labelled
    images nothing is seen (infinity), for few or equal ones it is the plain quantile. The surest of them always pass,
    however many share the largest confidence. Bandwidth 0 is Scott's rule, within bounds if the density is "plain".
    """
    if not 0 <= percentile <= 100:
        raise ValueError(f"percentile: expected 0 to 100, found {percentile}")
    if bandwidth < 0:
        raise ValueError(f"bandwidth: expected a positive number, or 0 for Scott's rule, found {bandwidth}")
    if len(confidence) == 0:
        return math.inf
    known = confidence.double()
    if len(known) < FEWEST or known.std() < LEAST_SPREAD:
        edge = float(known.quantile(percentile / 100))
    elif density == "logit":
        logits = known.logit(CERTAIN)
        grid = torch.linspace(float(logits.min()), float(logits.max()), GRID, dtype=torch.float64)
        found = left_edge(logits, percentile, bandwidth or scotts_bandwidth(logits), grid)
        edge = 1 / (1 + math.exp(-found))
    else:
        width = bandwidth or min(max(scotts_bandwidth(known), LEAST_BANDWIDTH), LARGEST_BANDWIDTH)
        edge = left_edge(known, percentile, width, torch.linspace(0, 1, GRID, dtype=torch.float64))
    # In the precision of the confidences, or rounding would lift it to the surest again.
    return min(edge, float(torch.nextafter(confidence.max(), confidence.new_zeros(()))))


def left_edge(values: Tensor, percentile: float, bandwidth: float, grid: Tensor) -> float:
    """Where the walk from the mode to the left stops: the next point has less than that percentile of log-densities.

    Where the quantile of the values lies between these two points, it is the quantile: saturated confidences may all
    lie there, and none would exceed an edge that was rounded up.
    """
    density = log_density(grid, values, bandwidth)
    least = log_density(values, values, bandwidth).quantile(percentile / 100)
    mode = int(density.argmax())
    too_low = (density[: mode + 1] < least).nonzero()
    # The mode itself is too low where it lies beside the grid, or the percentile is 100: it is the edge all the same.
    place = min(int(too_low[-1]) + 1, mode) if len(too_low) else 0
    edge, quantile = float(grid[place]), float(values.quantile(percentile / 100))
    return quantile if place and grid[place - 1] < quantile < edge else edge


def scotts_bandwidth(values: Tensor) -> float:
    """σ m^(−1/5) for m values."""
    return float(values.std()) * math.pow(len(values), -0.2)


def log_density(at: Tensor, values: Tensor, bandwidth: float) -> Tensor:
    """Logarithm of the Gaussian kernel density of the values at each point, [points]; −inf where it underflows."""
    parts = [
        torch.exp(-0.5 * ((some[:, None] - values) / bandwidth) ** 2).sum(dim=1)
        for some in at.split(max(PAIRS_AT_ONCE // len(values), 1))
    ]
    return torch.cat(parts).log() - math.log(len(values) * bandwidth * math.sqrt(2 * math.pi))
