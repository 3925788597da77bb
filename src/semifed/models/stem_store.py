"""What the frozen part of a network says of batches, kept on disk for the next run that draws the same views."""

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from zlib import crc32

import torch
from safetensors.torch import load, save
from torch import Tensor

from semifed.process import processor

_CHECKSUM = 4  # bytes
_CODE = Path(__file__).parent  # of all networks: what they compute may change with it


class StemStore:
    """The stems of batches in a directory, by all that decides their bits.

    Views are drawn from streams of seed, round, client and step alone, so runs that differ in their method or its
    hyper-parameters show the frozen part the same batches, and only the first of them need compute what it says. A
    batch is looked up as a whole, for the last bits of a convolution depend on its size.
    """

    def __init__(self, directory: Path, frozen: Mapping[str, Tensor], shape: str) -> None:
        """`frozen` are the weights of the frozen part; `shape` tells apart networks that share them."""
        self._directory = directory
        self._full = False
        # Another release or processor may round otherwise.
        told = (shape, torch.__version__, _transformers(), torch.backends.cpu.get_cpu_capability(), processor())
        digest = _digest(repr(told))
        for path in sorted(_CODE.glob("*.py")):
            digest.update(path.read_bytes())
        for name, tensor in sorted(frozen.items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().numpy().data)
        self._network = digest.hexdigest()

    def maps(self, images: Tensor, stem: Callable[[Tensor], Tensor]) -> Tensor:
        """The stem of a batch, from the directory if it is there."""
        path = self._path(images)
        kept = _read(path)
        if kept is not None:
            return kept
        maps = stem(images)
        if not self._full:
            try:
                _write(path, maps.detach())
            except OSError:  # a full disk costs time, not the run, whose checkpoints may need what room is left
                self._full = True
        return maps

    def _path(self, images: Tensor) -> Path:
        precision = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else images.dtype
        digest = _digest(repr((self._network, tuple(images.shape), images.stride(), precision)))
        digest.update(images.contiguous().numpy().data)
        name = digest.hexdigest()
        return self._directory / name[:2] / name[2:]


def _digest(text: str) -> "hashlib.blake2b":
    return hashlib.blake2b(text.encode(), digest_size=16)


def _read(path: Path) -> Tensor | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    checksum, packed = content[:_CHECKSUM], content[_CHECKSUM:]
    if checksum != _checksum(packed):  # half of it was written when the power went
        return None
    ((layout, maps),) = load(packed).items()
    return maps.permute(0, 3, 1, 2) if layout == "channels last" else maps


def _write(path: Path, maps: Tensor) -> None:
    # The layout is kept: what comes after would round otherwise in another.
    last = maps.ndim == 4 and maps.is_contiguous(memory_format=torch.channels_last)
    packed = save({"channels last": maps.permute(0, 2, 3, 1)} if last else {"rows": maps.contiguous()})
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")  # workers may keep the same batch at the same time
    try:
        partial.write_bytes(_checksum(packed) + packed)
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise


def _transformers() -> str | None:
    """The release of the package that has the layers of vision transformers, if it is here."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


def _checksum(packed: bytes) -> bytes:
    return crc32(packed).to_bytes(_CHECKSUM, "big")
