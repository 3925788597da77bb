"""Batch norm with what follows it, and means of models, in compiled kernels: PyTorch's bits in less time (ADR 19)."""

from semifed.kernels.normalise import Finish, Scale, normalised_by, normalised_by_batch, who_normalises

__all__ = ["Finish", "Scale", "normalised_by", "normalised_by_batch", "who_normalises"]
