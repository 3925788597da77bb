"""What stands for a class: directions, means and the subspace they span."""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from semifed.shapes import Shaped


def class_sums(vectors: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The sum of the vectors of each class, [classes, d]."""
    return torch.zeros(classes, vectors.shape[1]).index_add_(0, labels, vectors)


def class_directions(vectors: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Sums of unit vectors by class: normalised first, so that no long vector dominates."""
    return class_sums(F.normalize(vectors, dim=1), labels, classes)


class ClassTotals(NamedTuple):
    """What one party knows of the classes; both empty where it holds no labels."""

    sums: Annotated[Tensor, Shaped("classes", "features", optional=True)]
    counts: Annotated[Tensor, Shaped("classes", optional=True)]


def class_totals(vectors: Tensor, labels: Tensor, classes: int) -> ClassTotals:
    """Sums and counts by class; empty for no vectors."""
    if len(vectors) == 0:
        return ClassTotals(torch.empty(0), torch.empty(0, dtype=torch.int64))
    return ClassTotals(class_sums(vectors, labels, classes), labels.bincount(minlength=classes))


def class_means(totals: Sequence[ClassTotals], otherwise: Tensor) -> Tensor:
    """The mean vector of each class over all parties, [classes, d]; a class nobody has keeps what it had."""
    told = [part for part in totals if len(part.counts) and len(part.sums)]
    if not told:
        return otherwise
    counts = torch.stack([part.counts for part in told]).sum(dim=0)[:, None]
    means = torch.stack([part.sums.double() for part in told]).sum(dim=0) / counts.clamp(min=1)
    return torch.where(counts > 0, means.to(otherwise.dtype), otherwise)


def subspace_basis(prototypes: Tensor) -> Tensor:
    """An orthonormal basis of what the prototypes [classes, d] span, [d, classes], by reduced QR (ProSub).

    A class without a prototype, a vector of zeros, adds no direction: its column stays 0.
    """
    present = prototypes.ne(0).any(dim=1)
    basis = torch.zeros_like(prototypes.T, memory_format=torch.contiguous_format)
    # Double precision: pooled features share a large common part, so prototypes are nearly parallel.
    basis[:, present] = torch.linalg.qr(prototypes[present].T.double()).Q.to(basis.dtype)
    return basis


def subspace_score(features: Tensor, basis: Tensor) -> Tensor:
    """u(h) = cos(h, QQᵀh) = |Qᵀh| / |h| in [0, 1], [n]; 0 without a basis (ProSub).

    ProSub stops the gradient at the projection QQᵀh. For an orthogonal projection that changes nothing: the
    derivative of |QQᵀh| is QQᵀh / |QQᵀh|, so the gradient is the same with or without.
    """
    score: Tensor = torch.linalg.vector_norm(F.normalize(features, dim=1) @ basis, dim=1)
    return score.clamp(max=1)


def refreshed(old: Tensor, new: Tensor) -> Tensor:
    """The new directions; a class of which nobody told any keeps its old one, if there is one."""
    return torch.where(new.any(dim=1, keepdim=True), new, old) if len(old) else new


def mean_direction_norm(pivots: Tensor) -> Tensor:
    """Length of the mean of the unit pivots: 0 well spread, 1 collapsed on one direction."""
    norm: Tensor = torch.linalg.vector_norm(F.normalize(pivots, dim=1).mean(dim=0))
    return norm
