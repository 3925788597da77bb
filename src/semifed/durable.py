"""Files that are either the old one or the whole new one, whatever happens while they are written."""

import ctypes
import os
import sys
from collections.abc import Iterable
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
    first: dict[int, str] = {}  # by memory
    shared = {
        name for name, array in arrays.items() if first.setdefault(array.untyped_storage().data_ptr(), name) != name
    }
    own = {
        name: array.clone(memory_format=torch.contiguous_format)
        if name in shared or not array.is_contiguous()
        else array
        for name, array in arrays.items()
    }
    return save(own, metadata)


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


def write_together(files: Iterable[tuple[Path, bytes]]) -> None:
    """Write files that nobody reads before this is done, also after a power cut: all are brought to disk at once.

    Fifty small files so take as long as a few that are waited for one by one.
    """
    written = []
    for path, content in files:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            raise not_written(path, error) from None
        written.append(path)
    if written and not _sync_file_system(written[0]):
        for path in written:
            _sync(path)
        for directory in {path.parent for path in written} | {path.parent.parent for path in written}:
            with suppress(OSError):
                _sync(directory)


def _sync_file_system(path: Path) -> bool:
    """All that waits to be written on the disk of a file, in one go; says whether the system can."""
    syncfs = getattr(ctypes.CDLL(None), "syncfs", None) if sys.platform == "linux" else None
    if syncfs is None:
        return False
    opened = os.open(path, os.O_RDONLY)
    try:
        return bool(syncfs(opened) == 0)
    finally:
        os.close(opened)


def _sync(path: Path) -> None:
    """So that a file, or the names in a directory, survive a power cut too."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
