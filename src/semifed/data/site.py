"""What one party of a consortium holds: folders of images on its own disk.

    labelled/CLASS/...    images whose class is known, a folder a class
    unlabelled/...        all others, in any arrangement

An image that lies in both counts once. Decoded images are kept beside the party's state, because every round may be
another process.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from semifed.data.client import ClientData
from semifed.data.image_folder import image_files, read_image
from semifed.data.views import Views
from semifed.durable import packed, write_atomically
from semifed.errors import UserError, nearest


def read_site(
    folder: Path, classes: Sequence[str], shape: Sequence[int], views: Views, *, cache: Path | None = None
) -> ClientData:
    """A party's images as its training sees them, scaled to the shape (channels, height, width) all have agreed on."""
    if not folder.is_dir():
        raise UserError(f"{folder}: expected a folder with 'labelled' or 'unlabelled' in it, found none")
    labelled = _labelled_files(folder / "labelled", classes)
    unlabelled = image_files(folder / "unlabelled") if (folder / "unlabelled").is_dir() else []
    files = [path for path, _ in labelled] + unlabelled
    if not files:
        raise UserError(f"{folder}: expected images in 'labelled' or 'unlabelled', found none")
    stamp = _stamp(folder, files, shape)
    pixels = _remembered(cache, stamp)
    if pixels is None:
        pixels = decoded(files, shape)
        if cache is not None:
            write_atomically(cache, packed({"images": pixels}, {"stamp": stamp}))
    first = {pixels[row].numpy().tobytes(): row for row in reversed(range(len(labelled)))}
    rows = range(len(labelled), len(files))
    return ClientData(
        pixels,
        torch.arange(len(labelled)),
        torch.tensor([label for _, label in labelled], dtype=torch.int64),
        torch.tensor([first.get(pixels[row].numpy().tobytes(), row) for row in rows], dtype=torch.int64),
        views,
    )


def _labelled_files(folder: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    """Images and their classes, by file name and then class: an order that does not follow the labels."""
    if not folder.is_dir():
        return []
    found = []
    for child in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        if child.name not in classes:
            raise UserError(f"{child}: the consortium knows no class '{child.name}'; {nearest(child.name, classes)}")
        found += [(path, list(classes).index(child.name)) for path in image_files(child)]
    return sorted(found, key=lambda pair: (pair[0].name, pair[1], str(pair[0])))


def decoded(files: Sequence[Path], shape: Sequence[int]) -> torch.Tensor:
    """Image files as uint8 [n, channels, height, width], scaled to that shape."""
    channels, height, width = shape
    images = np.empty((len(files), channels, height, width), np.uint8)
    for row, path in zip(images, files, strict=True):
        row[:] = read_image(path, (height, width), channels == 1)
    return torch.from_numpy(images)


def _stamp(folder: Path, files: Sequence[Path], shape: Sequence[int]) -> str:
    """Changes when any file does."""
    facts = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr((facts, list(shape))).encode()).hexdigest()


def _remembered(cache: Path | None, stamp: str) -> torch.Tensor | None:
    if cache is None or not cache.exists():
        return None
    try:
        with safe_open(cache, "pt") as opened:
            if opened.metadata().get("stamp") != stamp:
                return None
        return load_file(cache)["images"]
    except (SafetensorError, OSError):  # a damaged cache is no cache
        return None
