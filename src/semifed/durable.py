"""Files that are either the old one or the whole new one, whatever happens while they are written."""

import os
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from semifed.errors import not_written

PARTIAL = ".partial"


def packed(arrays: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """Named arrays and texts as the content of a safetensors file."""
    # A server may hold one tensor twice (a moving average before its first round); the format wants each its own.
    return save({name: array.clone(memory_format=torch.contiguous_format) for name, array in arrays.items()}, metadata)


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file so that it is either the old one or the whole new one, also after a power cut."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        with suppress(OSError):  # some network file systems know no such thing, and the file is in place
            _sync(path.parent)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise not_written(path, error) from None


def _sync(directory: Path) -> None:
    """So that the name of a file survives a power cut too."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
