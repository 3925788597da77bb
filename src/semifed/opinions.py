"""How the labels of a client's own model and of the received one compare: what SAGE and ProxyFL plot over rounds.

Every number is pooled over the images of a round's clients, so a client counts by its images.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from semifed.losses import entropy
from semifed.pseudo import PseudoLabels
from semifed.targets import Opinion, confidence_gap

RANKS = 5  # of Fig. 8's histogram; those beyond are counted together

Side = Literal["local", "received"]


class Labelled(NamedTuple):
    """One client's unlabelled images with the labels they were last given, beside the truth."""

    pseudo: PseudoLabels
    truth: Tensor  # [n], -1 where it is no known class
    majority: Tensor | None  # [classes] bool, see `majority_classes`; None at a client without labels


class _Both(NamedTuple):
    """Images on which both models have an opinion."""

    same: Tensor  # [n] bool, they name the same class
    gap: Tensor  # ΔC [n]
    mixing: Tensor  # λ [n], NaN where the method has none
    local_sure: Tensor  # [n] bool
    received_sure: Tensor  # [n] bool
    local_rank: Tensor  # [n], of the local label among the received model's classes
    received_rank: Tensor  # [n], of the received label among the local model's classes
    local_right: Tensor  # [n] bool
    received_right: Tensor  # [n] bool
    given_right: Tensor  # [n] bool, the label the image was trained towards
    standing: Tensor  # [n]: 1 a majority class of the client by the local label, 0 a minority class, -1 not known


def majority_classes(labels: Tensor, classes: int) -> Tensor | None:
    """The classes that have at least an even share of a client's labels, [classes] bool; None without labels."""
    if len(labels) == 0:
        return None
    return torch.bincount(labels, minlength=classes) * classes >= len(labels)


def rank_of(label: Tensor, probabilities: Tensor) -> Tensor:
    """The place of each label among the classes by probability, [n]; 1 is the most probable, ties share the best."""
    own = probabilities.gather(1, label[:, None])
    return 1 + (probabilities > own).sum(dim=1)


def label_entropy(label: Tensor, classes: int) -> float:
    """Entropy in nats of how often each class is named (SAGE's supplement, eq. 14); 0 where nothing is."""
    share = torch.bincount(label, minlength=classes).double() / max(len(label), 1)
    return float(-torch.xlogy(share, share).sum())


def compare_opinions(clients: Sequence[Labelled]) -> dict[str, Any]:
    """What each model's labels are worth, and how far both agree; empty without any opinion, see docs/rounds.md."""
    sides: tuple[Side, Side] = ("local", "received")
    found = {side: _quality(clients, side) for side in sides}
    both = [_both(one, one.pseudo.local, one.pseudo.received) for one in clients]
    together = [one for one in both if one is not None]
    return {
        **{side: quality for side, quality in found.items() if quality},
        **(_agreement(_Both(*(torch.cat(parts) for parts in zip(*together, strict=True)))) if together else {}),
    }


def _quality(clients: Sequence[Labelled], side: Side) -> Mapping[str, Any]:
    """How many labels one model is sure of, how many of these are right, and how spread its answers are."""
    asked = [(one, said) for one in clients if (said := getattr(one.pseudo, side)) is not None]
    if not asked:
        return {}
    sure = torch.cat([said.sure for _, said in asked])
    correct = torch.cat([said.label == one.truth for one, said in asked])
    entropies = torch.cat([entropy(said.probabilities) for _, said in asked])  # SAGE's supplement, eq. 12
    named = [(said.label[said.sure], said.probabilities.shape[1]) for _, said in asked]
    spread = sum(len(label) * label_entropy(label, classes) for label, classes in named)
    count = int(sure.sum())
    return {
        "sure": count,
        "share": _mean(sure),
        "accuracy": _mean(correct[sure]),
        "confidence": _mean(torch.cat([said.confidence for _, said in asked])),
        "entropy": _mean(entropies),
        "class_entropy": spread / count if count else None,
    }


def _both(client: Labelled, local: Opinion | None, received: Opinion | None) -> _Both | None:
    if local is None or received is None:
        return None
    gap = confidence_gap(local, received)
    unknown = torch.full_like(local.label, -1)
    return _Both(
        local.label == received.label,
        gap,
        torch.full_like(gap, torch.nan) if client.pseudo.mixing is None else client.pseudo.mixing,
        local.sure,
        received.sure,
        rank_of(local.label, received.probabilities),
        rank_of(received.label, local.probabilities),
        local.label == client.truth,
        received.label == client.truth,
        client.pseudo.label == client.truth,
        unknown if client.majority is None else client.majority[local.label].long(),
    )


def _agreement(both: _Both) -> dict[str, Any]:
    mixed = both.local_sure & ~both.mixing.isnan()
    return {
        "gap": _by_standing(both.gap, both.local_sure, both.standing),
        "mixing": _by_standing(both.mixing, mixed, both.standing),
        "agreement": {
            "same": _mean(both.same),
            "local_rank": _mean(both.local_rank[both.local_sure]),
            "received_rank": _mean(both.received_rank[both.received_sure]),
            "local_ranks": _histogram(both.local_rank[both.local_sure]),
            "received_ranks": _histogram(both.received_rank[both.received_sure]),
        },
        "both_sure": _rightness(both, both.local_sure & both.received_sure),
        "only_local_sure": _rightness(both, both.local_sure & ~both.received_sure),
        "only_received_sure": _rightness(both, ~both.local_sure & both.received_sure),
    }


def _rightness(both: _Both, group: Tensor) -> dict[str, float | None]:
    """How many images a group has, and how often each model's label and the one in use are right there."""
    return {
        "share": _mean(group),
        "local": _mean(both.local_right[group]),
        "received": _mean(both.received_right[group]),
        "given": _mean(both.given_right[group]),
    }


def _by_standing(values: Tensor, counted: Tensor, standing: Tensor) -> dict[str, float | None]:
    return {
        "mean": _mean(values[counted]),
        "majority": _mean(values[counted & (standing == 1)]),
        "minority": _mean(values[counted & (standing == 0)]),
    }


def _histogram(rank: Tensor) -> list[int]:
    """How many labels are first, second, ... of the other model's classes, and how many come later."""
    return torch.bincount(rank.clamp(max=RANKS + 1), minlength=RANKS + 2)[1:].tolist()


def _mean(values: Tensor) -> float | None:
    """The mean; None of nothing."""
    return float(values.double().mean()) if len(values) else None
