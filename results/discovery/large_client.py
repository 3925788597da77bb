"""What category discovery costs a client with many images, stage by stage, and what fewer links do to its concepts.

    python results/discovery/large_client.py --images 50000 --features 768
    python results/discovery/large_client.py --images 10000 --dataset fashion-mnist --neighbours 100

draws features around random directions, or takes principal components of a dataset's images, labels half of the
images of half of the classes, discovers concepts with one thread, and prints one row of a Markdown table: processor
seconds of each stage, the most memory the process ever held, and how well the concepts match the classes. Peak memory
is that of a whole process, so each row is a call of its own.
"""

import argparse
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from semifed.data.datasets import load
from semifed.discovery import concepts
from semifed.discovery.seen_threshold import seen_threshold
from semifed.metrics import hungarian_accuracy, nmi

STAGES = ("nearest_neighbours", "neighbour_links", "refined", "communities")
LABELLED_SHARE = 0.5
NOISE = 2.0  # of features, by the length of the direction of a class


def main() -> None:
    """Discover concepts once, print the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--classes", type=int, default=10, help="of drawn features")
    parser.add_argument("--dataset", help="instead of drawn features")
    parser.add_argument("--neighbours", type=int, help="instead of the rule's number")
    parser.add_argument("--most-links", type=int, default=concepts.MOST_LINKS)
    parser.add_argument("--rule", choices=("clique", "reweight", "cut", "none"), default="clique")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    draws = torch.Generator().manual_seed(asked.seed)
    if asked.dataset:
        features, truth = dataset_features(asked.dataset, asked.images, asked.features, draws)
    else:
        features, truth = drawn_features(asked.images, asked.features, asked.classes, draws)
    known = int(truth.max() + 1) // 2
    told = (truth < known) & (torch.rand(len(truth), generator=draws) < LABELLED_SHARE)
    labels = torch.where(told, truth, -1)
    by_rule = concepts.neighbour_count(len(truth), truth[told].bincount(), LABELLED_SHARE)
    seconds: dict[str, float] = defaultdict(float)
    with ExitStack() as stack:
        for stage in STAGES:
            stack.enter_context(patch.object(concepts, stage, timed(getattr(concepts, stage), seconds)))
        found = timed(concepts.discover_concepts, seconds)(
            features,
            labels,
            neighbours=asked.neighbours or by_rule,
            least_similarity=0.0,
            rule=asked.rule,
            partners=20,
            generator=draws,
            most_links=asked.most_links,
        )
    timed(seen_threshold, seconds)(torch.rand(int(told.sum()), generator=draws).sqrt(), 50)
    match = hungarian_accuracy(found.member[~told], truth[~told], known)
    cells = [
        f"{len(features):,}",
        str(features.shape[1]),
        str(asked.neighbours or by_rule),
        f"{seconds['nearest_neighbours']:.1f}",
        f"{seconds['neighbour_links'] + seconds['refined']:.1f}",
        f"{seconds['communities']:.1f}",
        f"{seconds['discover_concepts']:.1f}",
        f"{seconds['seen_threshold']:.1f}",
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f}",
        str(len(found.prototypes)),
        " / ".join(f"{100 * share:.0f}" for share in match),
        f"{nmi(found.member[~told], truth[~told]):.2f}",
    ]
    print("| " + " | ".join(cells) + " |")


def timed(stage: Callable[..., Any], seconds: dict[str, float]) -> Callable[..., Any]:
    """The same function, with its processor time noted."""

    def watched(*values: Any, **settings: Any) -> Any:
        start = time.process_time()
        result = stage(*values, **settings)
        seconds[stage.__name__] += time.process_time() - start
        return result

    return watched


def drawn_features(images: int, width: int, classes: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Features [images, width] around a random direction for each class, and the classes."""
    truth = torch.randint(classes, (images,), generator=draws)
    directions = torch.randn(classes, width, generator=draws)
    return directions[truth] + NOISE * torch.randn(images, width, generator=draws), truth


def dataset_features(name: str, images: int, width: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """The first principal components of some training images, and their classes."""
    dataset = load(name)
    chosen = torch.randperm(len(dataset.y_train), generator=draws)[:images]
    pixels = dataset.x_train[chosen].flatten(1).float() / 255
    pixels -= pixels.mean(dim=0)
    _, axes = torch.linalg.eigh(pixels.T @ pixels)
    return F.normalize(pixels @ axes[:, -width:], dim=1), dataset.y_train[chosen]


if __name__ == "__main__":
    main()
