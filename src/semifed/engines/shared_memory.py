"""Payloads packed once and read in place: in memory that processes share, or in files where memory would not do."""

import math
import os
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from tempfile import NamedTemporaryFile

import torch
from torch import Tensor

from semifed.errors import UserError, legible

ROOM = 2**30  # bytes of a round's replies that stay in memory
FILE = 2**27  # bytes of a file that holds some of the others
Layout = list[tuple[str, torch.dtype, tuple[int, ...], int]]  # name, type, shape, first byte


def in_shared_memory(tensor: Tensor) -> Tensor:
    """The same tensor where other processes can read it."""
    try:
        tensor.share_memory_()
    except RuntimeError as error:  # containers often have 64 MB of it
        raise UserError(
            f"{tensor.numel() * tensor.element_size() / 1e6:,.1f} MB do not fit in shared memory ({legible(error)}); "
            "give the machine more (docker: --shm-size), or use engine.workers=1"
        ) from None
    return tensor


def _shared(size: int) -> Tensor:
    return in_shared_memory(torch.empty(size, dtype=torch.uint8))


def _in_a_file(size: int) -> Tensor:
    """Memory that the system can write out: a file without a name, gone when nobody holds the tensor any more.

    Ordinary memory where no file of that size can be had.
    """
    reserve = getattr(os, "posix_fallocate", None)  # macOS has none, and a full disk must say so here, not amid a write
    if reserve is not None:
        with suppress(OSError, RuntimeError), NamedTemporaryFile(prefix="semifed-") as file:
            reserve(file.fileno(), 0, size)
            return torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
    return torch.empty(size, dtype=torch.uint8)


class SharedBuffer:
    """Named arrays packed one after the other in one tensor of bytes, which is replaced when it is too small."""

    def __init__(self, allocate: Callable[[int], Tensor] = _shared) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._allocate = allocate
        self._places: tuple[list[Layout], list[dict[str, Tensor]]] = [], []  # of the last payloads

    def write(self, *payloads: dict[str, Tensor]) -> tuple[list[Layout], bool]:
        """Pack payloads, what they share once; says where all of it is, and whether the buffer is a new one."""
        start: dict[int, int] = {}
        end = 0
        for array in chain.from_iterable(payload.values() for payload in payloads):
            if id(array) not in start:
                start[id(array)] = end
                end += -(-array.numel() * array.element_size() // 64) * 64
        fresh = end > len(self.memory)
        if fresh:
            self.memory = self._allocate(end)
        layouts = [[(name, a.dtype, tuple(a.shape), start[id(a)]) for name, a in part.items()] for part in payloads]
        if fresh or layouts != self._places[0]:
            self._places = layouts, [read_buffer(self.memory, layout) for layout in layouts]
        for places, payload in zip(self._places[1], payloads, strict=True):
            for place, array in zip(places.values(), payload.values(), strict=True):
                if start.pop(id(array), None) is not None:
                    place.copy_(array)
        return layouts, fresh


def read_buffer(memory: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Views of the arrays in a buffer."""
    numbers = {dtype: memory.view(dtype) for dtype in {dtype for _, dtype, _, _ in layout}}
    arrays = {}
    for name, dtype, shape, start in layout:
        first = start // dtype.itemsize
        arrays[name] = numbers[dtype][first : first + math.prod(shape)].view(shape)
    return arrays


class Spool:
    """The replies of one round: a gigabyte of them in memory, the others in files, so that cohorts may be large."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._file = torch.empty(0, dtype=torch.uint8)
        self._used = 0  # bytes of it

    def keep(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        """A copy of a reply's arrays."""
        self._room -= sum(array.nbytes for array in arrays.values())
        if self._room >= 0:
            return {name: array.clone() for name, array in arrays.items()}
        buffer = SharedBuffer(self._next_part)
        (layout,), _ = buffer.write(arrays)
        return read_buffer(buffer.memory, layout)

    def keep_packed(self, memory: Tensor, layout: Layout) -> dict[str, Tensor]:
        """The same for a reply that lies in a buffer."""
        self._room -= len(memory)
        kept = memory.clone() if self._room >= 0 else self._next_part(len(memory)).copy_(memory)
        return read_buffer(kept, layout)

    def _next_part(self, size: int) -> Tensor:
        if self._used + size > len(self._file):  # one file for many replies: a process may map only so many
            self._file, self._used = _in_a_file(size * max(1, FILE // max(size, 1))), 0  # replies are of one size
        self._used += size
        return self._file[self._used - size : self._used]
