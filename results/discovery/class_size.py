"""How far a client's k is from the 0.3 to 0.5 of a class it should be, by how the size of a class is estimated.

    python results/discovery/class_size.py

spreads ten classes of 5,000 images over five clients (CIFAR-10's sizes), twenty times, labels half of the images of
the first five classes, and prints one row of a Markdown table for each spread and estimate. The size that k is held
against is known here: that of the class an image of the client is of, in the mean, or the median over the classes of
which it has at least a hundredth of its images.
"""

from typing import NamedTuple, get_args

import numpy as np
import torch

from semifed.data.partition import partition
from semifed.discovery.concepts import ClassSize, neighbour_count

CLASSES, KNOWN, PER_CLASS, CLIENTS, SEEDS = 10, 5, 5000, 5, 20
LABELLED_SHARE = 0.5
AIM = (0.3, 0.5)
SLIVER = 0.01  # of a client's images


class Client(NamedTuple):
    """How many images of each class it has, and how many of them with a label, [classes] each."""

    images: np.ndarray
    labels: np.ndarray

    def neighbours(self, class_size: ClassSize) -> int:
        """k by the rule."""
        counts = torch.from_numpy(self.labels)
        return neighbour_count(int(self.images.sum()), counts, LABELLED_SHARE, class_size=class_size)

    @property
    def typical(self) -> float:
        """Size of an image's class in the mean."""
        return float((self.images**2).sum() / self.images.sum())

    @property
    def median(self) -> float:
        """Median size of its classes, slivers left out."""
        return float(np.median(self.images[self.images >= SLIVER * self.images.sum()]))


def spread(alpha: float | None, seed: int) -> list[Client]:
    """The clients of one draw; without alpha all classes are alike everywhere."""
    rng = np.random.default_rng(seed)
    classes = np.repeat(np.arange(CLASSES), PER_CLASS)
    kind = "iid" if alpha is None else "balanced-dirichlet"
    found = []
    for part in partition(kind, classes, CLIENTS, alpha=alpha, rng=rng):
        own = classes[part]
        labelled = own[(own < KNOWN) & (rng.random(len(own)) < LABELLED_SHARE)]
        found.append(Client(*(np.bincount(some, minlength=CLASSES) for some in (own, labelled))))
    return found


def main() -> None:
    """Print the table."""
    heads = ["α", "`class_size`", "clients", "k is 0.3 to 0.5 of a typical class", "below 0.1 of it"]
    print("| " + " | ".join([*heads, "0.3 to 0.5 of a median class"]) + " |")
    print("|---|---|---|---|---|---|")
    for alpha in (0.05, 0.2, 1.0, None):
        clients = [client for seed in range(SEEDS) for client in spread(alpha, seed)]
        for class_size in get_args(ClassSize):
            by_typical, by_median = (
                np.array([client.neighbours(class_size) / getattr(client, size) for client in clients])
                for size in ("typical", "median")
            )
            shares = [((by >= AIM[0]) & (by <= AIM[1])).mean() for by in (by_typical, by_median)]
            cells = [shares[0], (by_typical < 0.1).mean(), shares[1]]
            told = [f"{alpha:g}" if alpha else "iid", f"`{class_size}`", str(len(clients))]
            print("| " + " | ".join(told + [f"{100 * cell:.0f} %" for cell in cells]) + " |")


if __name__ == "__main__":
    main()
