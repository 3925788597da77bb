"""The data sets semifed knows by name: geometry, classes, official counts and checksums, and where they come from."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from semifed.data.formats import (
    Arrays,
    Official,
    idx_file,
    read_cifar_set,
    read_idx_set,
    read_svhn_set,
    stratified_split,
)
from semifed.data.image_folder import read_image_folder


class Source(NamedTuple):
    """A published data set: what it is, how its files are recognised and read."""

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


def plain_name(name: str) -> str:
    """A name without case, dashes and underscores: FashionMNIST, fashion_mnist and fashion-mnist are one."""
    return name.lower().replace("-", "").replace("_", "")


def _belongs(directory: Path, key: str) -> bool:
    # idx files are named alike in every data set, so the directory must say which one it holds
    directory = directory.resolve()
    return key == plain_name(directory.parent.name if directory.name == "raw" else directory.name)


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


def read_digits(_: Path) -> Arrays:
    """Scikit-learn's digits, with a test set of 50 images a class that never changes."""
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
SHIPS = "ships with scikit-learn"

CATALOGUE: Mapping[str, Source] = {
    source.name: source
    for source in (
        Source(
            "digits",
            (1, 8, 8),
            _TEN_DIGITS,
            (1_297, 500),
            SHIPS,
            lambda directory, key: None,
            read_digits,
        ),
        Source(
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
        Source(
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
        Source(
            "kmnist",
            (1, 28, 28),
            ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
            (60_000, 10_000),
            "the four idx files of the Kuzushiji-MNIST project (ROIS-CODH) in DIR/kmnist",
            _locate_idx,
            partial(read_idx_set, official={}),
        ),
        Source(
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
        Source(
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
        Source(
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
        Source(
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
