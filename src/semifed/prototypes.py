"""What stands for a class: directions, means and the subspace they span."""

import torch
from torch import Tensor
from torch.nn import functional as F


def class_sums(vectors: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The sum of the vectors of each class, [classes, d]."""
    return torch.zeros(classes, vectors.shape[1]).index_add_(0, labels, vectors)


def class_directions(vectors: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Sums of unit vectors by class: normalised first, so that no long vector dominates."""
    return class_sums(F.normalize(vectors, dim=1), labels, classes)


def mean_direction_norm(pivots: Tensor) -> Tensor:
    """Length of the mean of the unit pivots: 0 well spread, 1 collapsed on one direction."""
    norm: Tensor = torch.linalg.vector_norm(F.normalize(pivots, dim=1).mean(dim=0))
    return norm
