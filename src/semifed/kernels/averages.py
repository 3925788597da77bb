"""What a server computes over large tensors of its clients, in one pass over each; None where PyTorch has to do it."""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from semifed.kernels.library import Unavailable, library


def weighted_sum(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor | None:
    """Σ share · tensor, added in the given order in float64, every product rounded, and the sum rounded to float32."""
    return _weighted_sum(tensors, shares) if _alike(tensors) and _exact() else None


def squared_distance(one: Tensor, other: Tensor) -> float | None:
    """Σ (one − other)² in float64, added in an order of the kernel's own."""
    found = library()
    if isinstance(found, Unavailable) or not _alike((one, other)):
        return None
    square = ctypes.c_double()
    found.squared_distance(one.data_ptr(), other.data_ptr(), one.numel(), ctypes.byref(square))
    return square.value


def who_adds() -> str:
    """Whose kernels make means of models on this machine, and why not ours if it is not they."""
    if isinstance(found := library(), Unavailable):
        return f"PyTorch's kernels ({found})"
    return "own kernels" if _exact() else "PyTorch's kernels (ours round otherwise)"


def _weighted_sum(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    found = library()
    assert not isinstance(found, Unavailable), "asked for only where they are"
    count = len(tensors)
    if len(shares) != count:
        raise ValueError(f"{count} tensors and {len(shares)} shares")
    places = (ctypes.c_void_p * count)(*(one.data_ptr() for one in tensors))
    summed = torch.empty_like(tensors[0])
    found.weighted_sum(places, (ctypes.c_double * count)(*shares), count, summed.numel(), summed.data_ptr())
    return summed


def _alike(tensors: Sequence[Tensor]) -> bool:
    """Whether they are numbers one after the other in memory, as many of each: what the kernels read."""
    return all(_plain(one) and one.shape == tensors[0].shape for one in tensors)


def _plain(one: Tensor) -> bool:
    as_it_lies = one.is_contiguous() and not one.is_neg() and not one.requires_grad
    return as_it_lies and one.dtype == torch.float32 and one.device.type == "cpu"


@cache
def _exact() -> bool:
    """Whether there are kernels here that round every product: a compiler might contract some with sums all the same.

    A product that its rounded self was taken from just before leaves nothing then, and its rounding error otherwise.
    """
    if isinstance(library(), Unavailable):
        return False
    zeros, minus_one, tenth = (torch.full((2501,), value) for value in (0.0, -1.0, 0.1))  # they fill no block
    third = 1 / 3
    for place in range(1, 6):  # wherever a model stands, it may be added by other lines of the kernel
        tensors, shares = [zeros] * 6, [1.0] * 6
        tensors[place - 1 : place + 1] = minus_one, tenth
        shares[place - 1 : place + 1] = float(tenth[0]) * third, third
        if bool(_weighted_sum(tensors, shares).any()):
            return False
    return True
