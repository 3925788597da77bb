"""CBAFed's balance of classes: how often each is learnt, how sure a label of it must be, which labels so come in."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from semifed.aggregate import capped_shares, claimed_counts, shares
from semifed.data.client import ClientData
from semifed.targets import opinion

EVEN = 0.1  # r_c of every class if all are learnt equally often: 1/C scaled by C/10
NEVER = 2.0  # a threshold no probability reaches


class Given(NamedTuple):
    """The labels a client trains on for a round."""

    label: Tensor  # [n] of all its unlabelled images
    used: Tensor  # [n] bool
    counts: Tensor  # of the used ones and its own labels [classes]


class Demand(NamedTuple):
    """What is asked of a label before it is learnt."""

    threshold: Tensor  # T_c [classes]
    rare: Tensor  # [classes] bool: whether a second guess will do

    @property
    def attainable(self) -> bool:
        """Whether any label can meet it."""
        return bool((self.threshold < NEVER).any() or self.rare.any())

    def labels(self, logits: Tensor, own: Tensor) -> Given:
        """Labels from a client's logits [n, classes] and its own labels.

        A label is the most probable class if its probability reaches the threshold of that class, else the second
        one if that is rare.
        """
        probabilities = logits.detach().softmax(dim=1)
        best = opinion(probabilities, self.threshold)
        if probabilities.shape[1] < 2:
            return self._given(best.label, best.sure, own)
        second = probabilities.topk(2, dim=1).indices[:, 1]
        instead = ~best.sure & self.rare[second]
        return self._given(torch.where(instead, second, best.label), best.sure | instead, own)

    def _given(self, label: Tensor, used: Tensor, own: Tensor) -> Given:
        return Given(label, used, class_counts(torch.cat([own, label[used]]), len(self.rare)))


def balanced_demand(frequency: Tensor, threshold: float, most: float, rare: float) -> Demand:
    """CBAFed's T_c = r_c + threshold − std(r), none above `most`; classes with r_c below `rare` are rare.

    r_c = frequency_c · C / 10, so its mean is 0.1 for any number C of classes.
    """
    relative = frequency * len(frequency) * EVEN
    spread = relative.std() if len(relative) > 1 else torch.zeros(())
    return Demand((relative + threshold - spread).clamp(max=most), relative < rare)


def no_labels(frequency: Tensor) -> Demand:
    """A demand that no label meets."""
    return Demand(torch.full_like(frequency, NEVER), torch.zeros_like(frequency, dtype=torch.bool))


def class_counts(labels: Tensor, classes: int) -> Tensor:
    """How many labels there are of each class, [classes]."""
    return torch.bincount(labels, minlength=classes).float()


def pooled_frequencies(counts: Sequence[Tensor], server: ClientData | None, before: Tensor, most: float) -> Tensor:
    """Shares of the classes [classes] among all that is learnt, by clients and server; as before if that is nothing.

    No party counts more than `most` equal shares. Negative numbers, what is none, and counts of other classes count
    as 0.
    """
    told = [*counts, *([] if server is None else [class_counts(server.labels, len(before))])]
    claimed = [claimed_counts((each if each.shape == before.shape else 0 * before).tolist()) for each in told]
    totals = [float(each.sum()) for each in claimed]
    if not any(totals):
        return before
    weight = capped_shares(totals, most)
    parts = [share * shares(each) for share, each in zip(weight, claimed, strict=True)]
    return torch.stack(parts).sum(dim=0).float()
