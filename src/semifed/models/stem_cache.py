"""What the frozen part of a network says of an image, computed once: it never changes while the rest is trained."""

from collections.abc import Callable

import torch
from torch import Tensor

LARGEST = 2**17  # bytes of a stem that is worth keeping: of larger ones a budget holds too few to save their passes


class StemCache:
    """The stems of images by key, kept in one process as far as its budget of bytes goes.

    A key stands for one image: its position in the shared store. Images pass the stem one at a time. In a batch the
    last bits would depend on its size, hence on what is kept already, hence on which clients this process has been
    before; so the answer is the same whether all, some or none of it is kept. It is not, to the last bit, what a batch
    gives.
    """

    def __init__(self, stem: Callable[[Tensor], Tensor], budget: int) -> None:
        self._stem = stem
        self._budget = budget
        self._kept: dict[int, Tensor] = {}
        self._small: bool | None = None  # not known before the first stem
        self.size = 0  # bytes kept

    def __len__(self) -> int:
        return len(self._kept)

    @torch.no_grad()
    def worth_it(self, view: Callable[[], Tensor]) -> bool:
        """Whether stems are small enough to be kept; all have the size of that of any one image, which `view` gives.

        It depends on the network and the size of images alone, so every process comes to the same answer.
        """
        if self._small is None:
            self._small = self._bytes(self._stem(view())) <= LARGEST
        return self._small

    @torch.no_grad()
    def maps(self, keys: Tensor, view: Callable[[Tensor], Tensor]) -> Tensor:
        """Stems [n, ...] for keys [n], at least one; `view` gives the normalised images of given places in `keys`."""
        stems = [self._found(key, place, view) for place, key in enumerate(keys.tolist())]
        maps = torch.stack(stems)
        return maps.contiguous(memory_format=torch.channels_last) if maps.ndim == 4 else maps

    def _found(self, key: int, place: int, view: Callable[[Tensor], Tensor]) -> Tensor:
        if key in self._kept:
            return self._kept[key]
        stem = self._stem(view(torch.tensor([place])))[0].clone()
        taken = self._bytes(stem)
        if self.size + taken <= self._budget:
            self._kept[key] = stem
            self.size += taken
        return stem

    @staticmethod
    def _bytes(stem: Tensor) -> int:
        return stem.numel() * stem.element_size()
