"""What is measured: recipes as shipped, cut to a few rounds, on images of noise.

What a step costs depends on the shape of the images, not on what they show, so no data set is needed. Every client
holds the same number of images (IID), so that no contestant is helped or hurt by an uneven split.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from semifed.assembly import Parts, prepare_run
from semifed.recipe_file import load_recipe

FASHION, CIFAR = (1, 28, 28), (3, 32, 32)
CLASSES = 10
TESTS = 2_000


class Workload(NamedTuple):
    """A recipe with a few overrides, and the shape of its images."""

    name: str
    recipe: str
    overrides: tuple[str, ...]
    shape: tuple[int, int, int]
    images: int = 20_000
    tests: int = TESTS

    def parts(self, folder: Path, *further: str) -> Parts:
        """Data and method, ready to run; the images are written to `folder` once."""
        channels, height, width = self.shape
        path = folder / f"noise-{self.images}-{self.tests}x{channels}x{height}x{width}.npz"
        if not path.exists():
            write_noise(path, self.images, self.shape, self.tests)
        common = (f"dataset={path}", "scenario.partition=iid", "evaluate.unseen=[]")
        return prepare_run(load_recipe(self.recipe, [*common, *self.overrides, *further]))


def write_noise(path: Path, images: int, shape: Sequence[int], tests: int) -> None:
    """A data set of random pixels and labels, every class equally often."""
    drawn = np.random.default_rng(0)
    x_train, x_test = (drawn.integers(0, 256, (count, *shape), dtype=np.uint8) for count in (images, tests))
    y_train, y_test = (np.arange(count) % CLASSES for count in (images, tests))
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)


_FASHION_CLIENTS = ("scenario.clients=100", "clients_per_round=10", "scenario.labelled_per_class=100")
_CIFAR_CLIENTS = (
    *("scenario.clients=20", "clients_per_round=4", "scenario.subset=10000"),
    *("model.input_size=32", "local.steps=20", "local.batch=16", "local.unlabelled_ratio=2"),
)

FIXMATCH_CNN = Workload(
    "FixMatch, CNN 16-32-64", "sage/fashion-mini", ("method=fixmatch-lpl", *_FASHION_CLIENTS), FASHION
)
SAGE_CNN = Workload("SAGE, CNN 16-32-64", "sage/fashion-mini", ("method=sage", *_FASHION_CLIENTS), FASHION)
OPENFL_CNN = Workload(
    "OpenFL, CNN 32-64-128",
    "openfl/table1-fashion-iid",
    ("server.warmup_epochs=0", "evaluate.folds=0"),
    FASHION,
    images=40_000,
)
OPENFL_ONE_EPOCH = OPENFL_CNN._replace(
    name="OpenFL, CNN 32-64-128, one local epoch", overrides=(*OPENFL_CNN.overrides, "local.epochs=1")
)
FIXMATCH_RESNET = Workload("FixMatch, ResNet-8", "sage/cifar10-mini", ("method=fixmatch-lpl", *_CIFAR_CLIENTS), CIFAR)
SAGE_RESNET = Workload("SAGE, ResNet-8", "sage/cifar10-mini", ("method=sage", *_CIFAR_CLIENTS), CIFAR)
MANY_SMALL = FIXMATCH_CNN._replace(
    name="FixMatch, CNN 16-32-64, many small clients",
    overrides=(*FIXMATCH_CNN.overrides, "clients_per_round=50", "local.steps=2", "local.batch=8"),
)
# The shape of pfl-research's published benchmark: clients of 50 images, 50 a round, one pass in batches of ten.
FEDAVG_DENSE = Workload(
    "FedAvg, CNN of 1.6 million weights",
    "sage/cifar10-mini",
    (
        *("method=fedavg", "scenario.clients=200", "clients_per_round=50", "scenario.subset=10000"),
        *("scenario.labelled_per_class=1000", "model.name=dense-cnn", "model.width=[128]", "model.input_size=32"),
        *("local.steps=5", "local.batch=10", "local.momentum=0", "local.lr=0.1", "local.weight_decay=0"),
    ),
    CIFAR,
    images=10_000,
)
# The network of SAGE's own code, four times as wide as that of our small recipes.
SAGE_NETWORK = FIXMATCH_RESNET._replace(
    name="FixMatch, SAGE's ResNet-8",
    overrides=(
        *FIXMATCH_RESNET.overrides,
        "model.width=4",
        "local.steps=4",
        "local.batch=8",
        "local.unlabelled_ratio=1",
    ),
)
AGAINST_FLOOR = (FIXMATCH_CNN, FIXMATCH_RESNET, OPENFL_CNN, OPENFL_ONE_EPOCH, SAGE_CNN, SAGE_RESNET)
