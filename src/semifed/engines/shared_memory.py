"""Payloads in memory that processes share: packed once, read in place."""

from itertools import chain

import torch
from torch import Tensor

Layout = list[tuple[str, torch.dtype, tuple[int, ...], int]]  # name, type, shape, first byte


class SharedBuffer:
    """Named arrays packed one after the other in one shared tensor, which grows when it must."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

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
            self.memory = torch.empty(end, dtype=torch.uint8).share_memory_()
        layouts = [[(name, a.dtype, tuple(a.shape), start[id(a)]) for name, a in part.items()] for part in payloads]
        for layout, payload in zip(layouts, payloads, strict=True):
            for place, array in zip(read_buffer(self.memory, layout).values(), payload.values(), strict=True):
                if start.pop(id(array), None) is not None:
                    place.copy_(array)
        return layouts, fresh


def read_buffer(memory: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Views of the arrays in a buffer."""
    arrays = {}
    for name, dtype, shape, start in layout:
        count = 1
        for side in shape:
            count *= side
        arrays[name] = memory[start : start + count * dtype.itemsize].view(dtype).view(shape)
    return arrays
