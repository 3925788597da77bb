"""Gaussians that stand for groups: fitted at clients, merged at the server, contrasted with (AGCL's local part)."""

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from semifed.aggregate import MOST_IMAGES
from semifed.discovery.finch import finch
from semifed.metrics import hungarian_accuracy
from semifed.prototypes import class_sums
from semifed.shapes import Shaped

LEAST_VARIANCE = 1e-3  # of unit vectors, along one axis: a group of one image has none of its own


class Mixture(NamedTuple):
    """Diagonal Gaussians; rows of no images are padding."""

    mean: Annotated[Tensor, Shaped("most_groups", "projection")]
    variance: Annotated[Tensor, Shaped("most_groups", "projection")]
    images: Annotated[Tensor, Shaped("most_groups")]  # how many stand behind each

    @property
    def present(self) -> "Mixture":
        """Without padding."""
        return Mixture(*(part[self.images > 0] for part in self))

    def padded(self, groups: int) -> "Mixture":
        """The largest so many groups, and padding up to that number: what travels has the same shape everywhere."""
        largest = self.images.argsort(descending=True, stable=True)[:groups]
        missing = groups - len(largest)
        mean, variance, count = (part[largest] for part in self)
        return Mixture(
            F.pad(mean, (0, 0, 0, missing)), F.pad(variance, (0, 0, 0, missing), value=1.0), F.pad(count, (0, missing))
        )


def fitted_mixture(points: Tensor, member: Tensor) -> Mixture:
    """Mean and variance of each group of points [n, d]."""
    groups = int(member.max()) + 1 if len(member) else 0
    count = torch.bincount(member, minlength=groups).to(points.dtype)
    mean = class_sums(points, member, groups) / count[:, None]
    variance = class_sums((points - mean[member]) ** 2, member, groups) / count[:, None]
    return Mixture(mean, variance.clamp(min=LEAST_VARIANCE), count)


def local_groups(points: Tensor, labels: Tensor, known: int) -> Tensor:
    """FINCH's partition that names the labelled points best, the coarser of equals; without labels the coarsest.

    Labels are linked from the start, so fine partitions name them rightly without having found anything.
    """
    levels = finch(points, labels)
    named = labels >= 0
    if not named.any():
        return levels[-1]
    coarse = levels[::-1]
    right = [hungarian_accuracy(level[named], labels[named], known).all for level in coarse]
    return coarse[right.index(max(right))]


def merged_mixture(mixtures: Sequence[Mixture], groups: int) -> Mixture:
    """Client Gaussians grouped by FINCH on their means; a group has the moments of all images behind it.

    Whatever was claimed, it is about unit vectors.
    """
    told = [_of_unit_vectors(mixture).present for mixture in mixtures]
    every = Mixture(*(torch.cat([getattr(part, name) for part in told]) for name in Mixture._fields))
    if not len(every.images):
        return mixtures[0]
    member = finch(every.mean, torch.full((len(every.images),), -1))[0]
    total = torch.zeros(int(member.max()) + 1).index_add_(0, member, every.images)
    share = every.images / total[member]
    mean = class_sums(share[:, None] * every.mean, member, len(total))
    second = class_sums(share[:, None] * (every.variance + every.mean**2), member, len(total))
    return Mixture(mean, (second - mean**2).clamp(min=LEAST_VARIANCE), total).padded(groups)


def _of_unit_vectors(claimed: Mixture) -> Mixture:
    """What moments of unit vectors and counts can be; those that are so stay as they are."""
    return Mixture(
        claimed.mean.clamp(-1, 1), claimed.variance.clamp(LEAST_VARIANCE, 1), claimed.images.clamp(0, MOST_IMAGES)
    )


def log_densities(points: Tensor, mixture: Mixture, margin: Tensor | None = None) -> Tensor:
    """Mean over the d axes of the log density of points [n, d] under each Gaussian, [n, groups].

    The mean in place of the sum keeps the contrast soft whatever d is. `margin` [n, groups] scales squared distances.
    """
    squared = (points[:, None] - mixture.mean) ** 2 / mixture.variance
    scaled = squared if margin is None else squared * margin[:, :, None]
    return -(scaled + mixture.variance.log() + math.log(2 * math.pi)).mean(dim=2) / 2


def gaussian_contrast(points: Tensor, member: Tensor, mixture: Mixture, margin: float) -> Tensor:
    """−log of a point's own Gaussian by the sum over all, [n]; its own distance is made larger by 1 + margin."""
    own = F.one_hot(member, len(mixture.images)).to(points.dtype)
    return F.cross_entropy(log_densities(points, mixture, 1 + margin * own), member, reduction="none")
