"""The data sets semifed knows by name, where it looks for them, and how a name or a path becomes arrays.

Nothing is ever downloaded: a data set is found in the given directory, in $SEMIFED_DATA, in ./data laid out as
torchvision does, or in /usr/share/datasets where Debian's packages put theirs.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from semifed.data.formats import (
    Arrays,
    Official,
    Pixels,
    idx_file,
    read_cifar_set,
    read_idx_set,
    read_image_folder,
    read_npz,
    read_svhn_set,
    stratified_split,
)
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


class Entry(NamedTuple):
    """A row of the catalogue: what a data set is, where it was found on this machine, and how to get it."""

    name: str
    summary: str
    found: str | None
    how: str


class UnknownDataset(UserError):
    """A name that is neither in the catalogue nor a path."""


class _Source(NamedTuple):
    name: str
    geometry: tuple[int, int, int]  # channels, height, width
    classes: tuple[str, ...]
    images: tuple[int, int]  # official training and test counts
    how: str
    locate: Callable[[Path, str], Path | None]  # the set's own files in a directory
    read: Callable[[Path], Arrays]
    mean: tuple[float, ...] | None = None  # as the papers print them; None: computed
    std: tuple[float, ...] | None = None

    @property
    def summary(self) -> str:
        """Geometry, classes and official counts in one line."""
        channels, height, width = self.geometry
        colour = "grey" if channels == 1 else "colour"
        train, test = self.images
        return f"{height}x{width} {colour}, {len(self.classes)} classes, {train:,}/{test:,}"


def _key(name: str) -> str:
    """A name without case, dashes and underscores: FashionMNIST, fashion_mnist and fashion-mnist are one."""
    return name.lower().replace("-", "").replace("_", "")


def _belongs(directory: Path, key: str) -> bool:
    # idx files are named alike in every data set, so the directory must say which one it holds
    directory = directory.resolve()
    return key == _key(directory.parent.name if directory.name == "raw" else directory.name)


def _locate_idx(directory: Path, key: str) -> Path | None:
    present = any(idx_file(directory, stem) for stem in ("train-images", "t10k-images"))
    return directory if present and _belongs(directory, key) else None


def _locate_cifar(directory: Path, _key: str, *, folder: str, archive: str) -> Path | None:
    if directory.resolve().name == folder:
        return directory
    if (directory / folder).is_dir():
        return directory / folder
    return directory / archive if (directory / archive).is_file() else None


def _locate_svhn(directory: Path, _key: str) -> Path | None:
    present = any((directory / f"{part}_32x32.mat").is_file() for part in ("train", "test"))
    return directory if present else None


def _locate_folders(directory: Path, key: str) -> Path | None:
    return directory if _belongs(directory, key) and (directory / "train").is_dir() else None


def _digits(_: Path) -> Arrays:
    from sklearn.datasets import load_digits  # slow to import and needed by this set alone

    digits = load_digits()
    x = np.rint(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    y = digits.target.astype(np.int64)
    kept, held = stratified_split(y, dict.fromkeys(range(10), 50))
    return Arrays(x[kept], y[kept], x[held], y[held])


def _idx_official(train_images: str, train_labels: str, test_images: str, test_labels: str) -> Mapping[str, Official]:
    return {
        "train-images": Official(60_000, train_images),
        "train-labels": Official(60_000, train_labels),
        "t10k-images": Official(10_000, test_images),
        "t10k-labels": Official(10_000, test_labels),
    }


_TEN_DIGITS = tuple("0123456789")
_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm"""
_SHIPS = "ships with scikit-learn"

_CATALOGUE: Mapping[str, _Source] = {
    source.name: source
    for source in (
        _Source(
            "digits",
            (1, 8, 8),
            _TEN_DIGITS,
            (1_297, 500),
            _SHIPS,
            lambda directory, key: None,
            _digits,
        ),
        _Source(
            "fashion-mnist",
            (1, 28, 28),
            ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
            (60_000, 10_000),
            "Debian's package dataset-fashion-mnist, or Zalando Research's four idx files in DIR/fashion-mnist",
            _locate_idx,
            partial(
                read_idx_set,
                official=_idx_official(
                    "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                    "9018921c3c673c538a1fc5bad174d6f9",
                    "8181f5470baa50b63fa0f6fddb340f0a",
                    "15d484375f8d13e6eb1aabb0c3f46965",
                ),
            ),
            (0.2860,),
            (0.3530,),
        ),
        _Source(
            "mnist",
            (1, 28, 28),
            _TEN_DIGITS,
            (60_000, 10_000),
            "the four idx files of LeCun, Cortes and Burges' MNIST in DIR/mnist",
            _locate_idx,
            partial(
                read_idx_set,
                official=_idx_official(
                    "6bbc9ace898e44ae57da46a324031adb",
                    "a25bea736e30d166cdddb491f175f624",
                    "2646ac647ad5339dbf082846283269ea",
                    "27ae3e4e09519cfbb04c329615203637",
                ),
            ),
        ),
        _Source(
            "kmnist",
            (1, 28, 28),
            ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
            (60_000, 10_000),
            "the four idx files of the Kuzushiji-MNIST project (ROIS-CODH) in DIR/kmnist",
            _locate_idx,
            partial(read_idx_set, official={}),
        ),
        _Source(
            "cifar10",
            (3, 32, 32),
            tuple(_CIFAR10.split()),
            (50_000, 10_000),
            "cifar-10-python.tar.gz of the University of Toronto's CIFAR page, packed or unpacked, in DIR",
            partial(_locate_cifar, folder="cifar-10-batches-py", archive="cifar-10-python.tar.gz"),
            partial(
                read_cifar_set,
                train=[f"data_batch_{i}" for i in range(1, 6)],
                test="test_batch",
                label_key="labels",
                official={
                    "data_batch_1": Official(10_000, "c99cafc152244af753f735de768cd75f"),
                    "data_batch_2": Official(10_000, "d4bba439e000b95fd0a9bffe97cbabec"),
                    "data_batch_3": Official(10_000, "54ebc095f3ab1f0389bbae665268c751"),
                    "data_batch_4": Official(10_000, "634d18415352ddfa80567beed471001a"),
                    "data_batch_5": Official(10_000, "482c414d41f54cd18b22e5b47cb7c3cb"),
                    "test_batch": Official(10_000, "40351d587109b95175f43aff81a1287e"),
                },
            ),
            (0.4914, 0.4822, 0.4465),
            (0.2471, 0.2435, 0.2616),
        ),
        _Source(
            "cifar100",
            (3, 32, 32),
            tuple(_CIFAR100.split()),
            (50_000, 10_000),
            "cifar-100-python.tar.gz of the University of Toronto's CIFAR page, packed or unpacked, in DIR",
            partial(_locate_cifar, folder="cifar-100-python", archive="cifar-100-python.tar.gz"),
            partial(
                read_cifar_set,
                train=["train"],
                test="test",
                label_key="fine_labels",
                official={
                    "train": Official(50_000, "16019d7e3df5f24257cddd939b257f8d"),
                    "test": Official(10_000, "f0ef6b0ae62326f3e7ffdfab6717acfc"),
                },
            ),
            (0.5071, 0.4867, 0.4408),
            (0.2675, 0.2565, 0.2761),
        ),
        _Source(
            "svhn",
            (3, 32, 32),
            _TEN_DIGITS,
            (73_257, 26_032),
            "train_32x32.mat and test_32x32.mat (cropped digits) of Stanford's SVHN page in DIR",
            _locate_svhn,
            partial(
                read_svhn_set,
                official={
                    "train_32x32.mat": Official(73_257, "e26dedcc434d2e4c54c9b2d4a06d8373"),
                    "test_32x32.mat": Official(26_032, "eb5a983be6a315427106f1b164d9cef3"),
                },
            ),
            (0.4377, 0.4438, 0.4728),
            (0.1980, 0.2010, 0.1970),
        ),
        _Source(
            "cinic10",
            (3, 32, 32),
            tuple(_CIFAR10.split()),
            (90_000, 90_000),
            "CINIC-10 of the University of Edinburgh's DataShare, unpacked so that DIR/cinic-10 holds train and test",
            _locate_folders,
            read_image_folder,
            (0.4789, 0.4723, 0.4305),
            (0.2421, 0.2383, 0.2587),
        ),
    )
}


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
    own = [child for child in _children(place) if _key(child.name) == key and child.is_dir()]
    return [directory for parent in (place, *own) for directory in (parent, parent / "raw")]


def _npz_files(directory: Path, key: str) -> list[Path]:
    """`<name>.npz`, or else every `<name>_<what it holds>.npz`."""
    files = [p for p in _children(directory) if p.suffix == ".npz"]
    whole = [p for p in files if _key(p.stem) == key]
    return whole or [p for p in files if p.stem.lower().replace("-", "").startswith(f"{key}_")]


def _candidates(name: str, places: list[Path]) -> list[Path]:
    """The files of a data set in the first place that has any: one path, or several subsets to choose from."""
    source, key = _CATALOGUE.get(name), _key(name)
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
    found: dict[str, str | None] = {"digits": _SHIPS}
    for name in _CATALOGUE.keys() - found.keys():
        found[name] = next(map(str, _candidates(name, places)), None)
    return [Entry(name, source.summary, found[name], source.how) for name, source in _CATALOGUE.items()]


def load(name: str, data: str | None = None) -> Dataset:
    """A data set by its name in the catalogue, by the name of an .npz or image folder in `data`, or by its path."""
    places = _places(data)
    if name == "digits":
        return _assembled(name, _digits(Path()), "scikit-learn", _CATALOGUE[name])
    path = Path(name).expanduser()
    if name not in _CATALOGUE and (path.exists() or path.name != name or path.suffix == ".npz"):
        resolved = path.resolve()
        return _assembled(resolved.name if path.is_dir() else resolved.stem, _read(path), str(path), None)
    candidates = _candidates(name, places)
    if len(candidates) > 1:
        choices = ", ".join(map(str, candidates))
        raise UserError(f"data set '{name}': expected one file, found {choices}; give the path of one of them")
    if candidates:
        source = _CATALOGUE.get(name)
        return _assembled(name, _read(candidates[0], source), str(candidates[0]), source)
    if name in _CATALOGUE:
        looked = ", ".join(map(str, places))
        raise UserError(f"data set '{name}' not found in {looked}.\nHow to get it: {_CATALOGUE[name].how}")
    hint = nearest(name, _CATALOGUE)
    raise UnknownDataset(f"unknown data set '{name}': {hint}\nA path to an .npz or to an image folder also works.")


def _read(path: Path, source: _Source | None = None) -> Arrays:
    if path.suffix == ".npz" and path.is_file():
        return read_npz(path)
    if source is not None:
        return source.read(path)
    if path.is_dir():
        return read_image_folder(path)
    found = "another file" if path.exists() else "nothing"
    raise UserError(f"{path}: expected an .npz file or a folder of images, found {found}")


def _assembled(name: str, arrays: Arrays, where: str, source: _Source | None) -> Dataset:
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
        mean, std = _moments(arrays.x_train if len(arrays.x_train) else arrays.x_test)
    counts = len(arrays.x_train), len(arrays.x_test)
    if source is not None and counts != source.images:
        parts = zip(counts, source.images, ("training", "test"), strict=True)
        where += f" (subset: {', '.join(f'{n:,} of {all_:,} {part} images' for n, all_, part in parts)})"
    x_train, y_train, x_test, y_test = (torch.from_numpy(np.require(a, requirements=("C", "W"))) for a in arrays[:4])
    return Dataset(name, x_train, y_train, x_test, y_test, classes, mean, std, where)


def _moments(x: Pixels) -> tuple[tuple[float, ...], tuple[float, ...]]:
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
