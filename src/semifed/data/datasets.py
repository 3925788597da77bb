"""The data sets semifed knows by name, where it looks for them, and how a name or a path becomes arrays.

Nothing is downloaded but what `hub:NAME` asks for: a data set is found in the given directory, in $SEMIFED_DATA, in
./data laid out as torchvision does, or in /usr/share/datasets where Debian's packages put theirs.
"""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from semifed.data.formats import Arrays, Pixels, read_npz
from semifed.data.hub import PREFIX, read_hub_set
from semifed.data.image_folder import read_image_folder
from semifed.data.sources import CATALOGUE, SHIPS, Source, plain_name, read_digits
from semifed.errors import UserError, nearest

SYSTEM_PLACE = "/usr/share/datasets"


class Dataset(NamedTuple):
    """Images uint8 [n, c, h, w] and labels int64 [n] of a training and a test set, with what normalises them."""

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str
    owner: Tensor | None = None  # int64 [n], client of each training image, where the files say so
    undivided: bool = False  # nobody said which are to be tested on: we held some out


class Entry(NamedTuple):
    """A row of the catalogue: what a data set is, where it was found on this machine, and how to get it."""

    name: str
    summary: str
    found: str | None
    how: str


class UnknownDataset(UserError):
    """A name that is neither in the catalogue nor a path."""


def _places(data: str | None) -> list[Path]:
    if data is not None and not Path(data).expanduser().is_dir():
        raise UserError(f"data = '{data}': expected a directory to look for data sets in, found none")
    given = (data, os.environ.get("SEMIFED_DATA"), "data", SYSTEM_PLACE)
    return list(dict.fromkeys(Path(place).expanduser() for place in given if place))


def _children(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:  # a place that does not exist or may not be read holds nothing for us
        return []


def _directories(place: Path, key: str) -> list[Path]:
    own = [child for child in _children(place) if plain_name(child.name) == key and child.is_dir()]
    return [directory for parent in (place, *own) for directory in (parent, parent / "raw")]


def _npz_files(directory: Path, key: str) -> list[Path]:
    """`<name>.npz`, or else every `<name>_<what it holds>.npz`."""
    files = [p for p in _children(directory) if p.suffix == ".npz"]
    whole = [p for p in files if plain_name(p.stem) == key]
    return whole or [p for p in files if p.stem.lower().replace("-", "").startswith(f"{key}_")]


def _candidates(name: str, places: list[Path]) -> list[Path]:
    """The files of a data set in the first place that has any: one path, or several subsets to choose from."""
    source, key = CATALOGUE.get(name), plain_name(name)
    for place in places:
        for directory in _directories(place, key):
            if source is not None and (path := source.locate(directory, key)) is not None:
                return [path]
            if files := _npz_files(directory, key):
                return files
        if source is None and (place / name).is_dir():
            return [place / name]
    return []


def catalogue(data: str | None = None) -> list[Entry]:
    """Every data set known by name and where its files are; looks for files without reading them."""
    places = _places(data)
    found: dict[str, str | None] = {"digits": SHIPS}
    for name in CATALOGUE.keys() - found.keys():
        found[name] = next(map(str, _candidates(name, places)), None)
    return [Entry(name, source.summary, found[name], source.how) for name, source in CATALOGUE.items()]


def load(name: str, data: str | None = None) -> Dataset:
    """A data set by its name in the catalogue, by the name of an .npz or image folder in `data`, by its path, or
    by its name on the hub."""
    if name.startswith(PREFIX):
        return _assembled(name, read_hub_set(name), name, None)
    places = _places(data)
    if name == "digits":
        return _assembled(name, read_digits(Path()), "scikit-learn", CATALOGUE[name])
    path = Path(name).expanduser()
    if name not in CATALOGUE and (path.exists() or path.name != name or path.suffix == ".npz"):
        resolved = path.resolve()
        return _assembled(resolved.name if path.is_dir() else resolved.stem, _read(path), str(path), None)
    candidates = _candidates(name, places)
    if len(candidates) > 1:
        choices = ", ".join(map(str, candidates))
        raise UserError(f"data set '{name}': expected one file, found {choices}; give the path of one of them")
    if candidates:
        source = CATALOGUE.get(name)
        return _assembled(name, _read(candidates[0], source), str(candidates[0]), source)
    if name in CATALOGUE:
        looked = ", ".join(map(str, places))
        raise UserError(f"data set '{name}' not found in {looked}.\nHow to get it: {CATALOGUE[name].how}")
    hint = nearest(name, CATALOGUE)
    raise UnknownDataset(
        f"unknown data set '{name}': {hint}\nA path to an .npz or to an image folder also works, or hub:NAME."
    )


def _read(path: Path, source: Source | None = None) -> Arrays:
    if path.suffix == ".npz" and path.is_file():
        return read_npz(path)
    if source is not None:
        return source.read(path)
    if path.is_dir():
        return read_image_folder(path)
    found = "another file" if path.exists() else "nothing"
    raise UserError(f"{path}: expected an .npz file or a folder of images, found {found}")


def _assembled(name: str, arrays: Arrays, where: str, source: Source | None) -> Dataset:
    if source is not None and arrays.x_test.shape[1:] != source.geometry:
        found = list(arrays.x_test.shape[1:])
        raise UserError(f"{where}: expected images {list(source.geometry)} (c, h, w) of {name}, found {found}")
    lowest = int(min(arrays.y_train.min(initial=0), arrays.y_test.min(initial=0)))
    highest = int(max(arrays.y_train.max(initial=0), arrays.y_test.max(initial=0)))
    classes = arrays.classes or (source.classes if source is not None else None)
    if classes is None:
        classes = tuple(str(label) for label in range(highest + 1))
    if lowest < 0 or highest >= len(classes):
        raise UserError(f"{where}: expected labels from 0 to {len(classes) - 1}, found {lowest} to {highest}")
    if source is not None and source.mean is not None and source.std is not None:
        mean, std = source.mean, source.std
    else:
        mean, std = moments(arrays.x_train if len(arrays.x_train) else arrays.x_test)
    counts = len(arrays.x_train), len(arrays.x_test)
    if source is not None and counts != source.images:
        parts = zip(counts, source.images, ("training", "test"), strict=True)
        where += f" (subset: {', '.join(f'{n:,} of {all_:,} {part} images' for n, all_, part in parts)})"
    x_train, y_train, x_test, y_test = (torch.from_numpy(np.require(a, requirements=("C", "W"))) for a in arrays[:4])
    owner = None if arrays.owner is None else torch.from_numpy(arrays.owner)
    return Dataset(name, x_train, y_train, x_test, y_test, classes, mean, std, where, owner, arrays.undivided)


def moments(x: Pixels) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of pixels in [0, 1], exact because pixels have only 256 values."""
    levels = np.arange(256) / 255
    mean: list[float] = []
    std: list[float] = []
    for channel in range(x.shape[1]):
        # in pieces: bincount widens its input to eight bytes a pixel
        pieces = (x[start : start + 4096, channel].ravel() for start in range(0, len(x), 4096))
        counts = sum((np.bincount(piece, minlength=256) for piece in pieces), np.zeros(256, np.int64))
        centre = float(np.average(levels, weights=counts))
        spread = float(np.average((levels - centre) ** 2, weights=counts)) ** 0.5
        mean.append(centre)
        std.append(spread or 1.0)  # a constant channel is centred, not divided by zero
    return tuple(mean), tuple(std)


def content_hash(dataset: Dataset) -> str:
    """The sha256 of images, labels and shapes: equal for equal content, wherever it was found."""
    digest = hashlib.sha256()
    for part in (dataset.x_train, dataset.y_train, dataset.x_test, dataset.y_test):
        digest.update(repr(tuple(part.shape)).encode())
        digest.update(part.contiguous().numpy().data)
    return digest.hexdigest()
