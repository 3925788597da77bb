"""Objectives that several methods share, composed of the formulas in `losses`."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from semifed.data.client import Batch, Samples
from semifed.fit import Loss
from semifed.losses import (
    cross_entropy,
    masked_mean,
    mean,
    ova_entropy,
    ova_negatives,
    ova_positive,
    pseudo_negatives,
    soft_cross_entropy,
    soft_open_consistency,
)
from semifed.models.network import Output
from semifed.net import Net
from semifed.pseudo import Gates, PseudoLabels
from semifed.targets import Targets


def supervised(net: Net, batch: Batch) -> Loss:
    """Cross entropy on the weak views of the labelled images; 0 where there are none."""
    if len(batch.labelled) == 0:
        return Loss(torch.zeros(()), {})
    value = mean(cross_entropy(net(batch.labelled.weak).logits, batch.labelled.labels))
    return Loss(value, {"supervised": value})


def semi_supervised(
    batch: Batch,
    labelled: Output,
    strong: Output,
    chosen: Targets,
    unlabelled_weight: float,
    image_weight: Tensor | float = 1.0,
) -> Loss:
    """FixMatch's objective: cross entropy on the labels plus that of strong views on the targets in use.

    Images may count differently, `image_weight` [n].
    """
    supervised_term = mean(cross_entropy(labelled.logits, batch.labelled.labels))
    distance = cross_entropy if chosen.target.ndim == 1 else soft_cross_entropy
    consistency = masked_mean(image_weight * distance(strong.logits, chosen.target), chosen.used)
    value = supervised_term + unlabelled_weight * consistency
    if len(batch.labelled) == 0 and not (unlabelled_weight and chosen.used.any()):
        value = value.detach()  # nothing to learn from: weight decay and momentum alone must not move the model
    return Loss(
        value,
        {"supervised": supervised_term, "consistency": consistency},
        pseudo=PseudoLabels(batch.unlabelled.position, chosen.label, *chosen[1:]),
    )


def plus(loss: Loss, name: str, weight: float, term: Tensor) -> Loss:
    """The loss with one more weighted and named term; alone, such a term is nothing to learn from."""
    if not loss.value.requires_grad:
        return loss
    return loss._replace(value=loss.value + weight * term, terms={**loss.terms, name: term})


class OpenSetWeights(NamedTuple):
    """Weights of SSB's terms on unlabelled images; `detector` scales all of the detector's."""

    consistency: float
    detector: float
    entropy: float
    socr: float
    negative: float


class OpenSetViews(NamedTuple):
    """A network's outputs on SSB's three views of unlabelled images."""

    weak: Output
    flipped: Output
    strong: Output


def open_set_supervised(
    net: Net, labelled: Samples, detector_weight: float, *, strong_too: bool
) -> tuple[Loss, list[Output]]:
    """SSB's loss on labels: cross entropy, and one-vs-all with the negatives of two weak and two strong views.

    `strong_too` takes the strong views into the cross entropy as well; 0 where there are no labels. The outputs
    on the four views come with it.
    """
    if len(labelled) == 0:
        return Loss(torch.zeros(()), {}), []
    labels = labelled.labels
    views = net.each(labelled.weak, labelled.flipped, labelled.strong, labelled.strong_again)
    weak = views[:2]
    cross = mean_over([cross_entropy(view.logits, labels) for view in (views if strong_too else weak)])
    positive = mean_over([ova_positive(view.heads["ova"], labels) for view in weak])
    negative = mean_over([ova_negatives(view.heads["ova"], labels) for view in views])
    detector = positive + negative
    return Loss(cross + detector_weight * detector, {"supervised": cross, "detector": detector}), views


def open_set_unsupervised(
    net: Net, unlabelled: Samples, gates: Gates, used: Tensor, weights: OpenSetWeights
) -> tuple[Loss, OpenSetViews]:
    """SSB's loss on unlabelled images: consistency of those in use, and the detector's entropy, SOCR and negatives."""
    # One pass a view: each is normalised by its own statistics, the weak ones by nearly those of plain images.
    views = OpenSetViews(*net.each(unlabelled.weak, unlabelled.flipped, unlabelled.strong))
    first, second, strong = (view.heads["ova"] for view in views)
    consistency = masked_mean(cross_entropy(views.strong.logits, gates.label), used)
    entropy = mean_over([ova_entropy(first), ova_entropy(second)])
    socr = mean(soft_open_consistency(first, second))
    negative = mean(pseudo_negatives(strong, gates.negative))
    detector = weights.entropy * entropy + weights.socr * socr + weights.negative * negative
    value = weights.consistency * consistency + weights.detector * detector
    watched = weights.detector * max(weights.entropy, weights.socr, weights.negative) > 0
    if not watched and not (weights.consistency > 0 and used.any()):
        value = value.detach()  # nothing to learn from: weight decay and momentum alone must not move the model
    return Loss(
        value,
        {"consistency": consistency, "entropy": entropy, "socr": socr, "negative": negative},
        pseudo=PseudoLabels(unlabelled.position, gates.label, used),
    ), views


def ssb_loss(net: Net, batch: Batch, labelled: Loss, gates: Gates, weights: OpenSetWeights) -> Loss:
    """SSB at a client: the loss on its labels, if any, and on unlabelled images; the confident are in use."""
    if len(batch.unlabelled) == 0:
        return labelled
    here = gates.at(batch.unlabelled.position)
    unlabelled, _ = open_set_unsupervised(net, batch.unlabelled, here, here.confident, weights)
    return together(labelled, unlabelled)


def mean_over(views: Sequence[Tensor]) -> Tensor:
    """The mean over several views of a batch."""
    return mean(torch.cat(list(views)))


def together(labelled: Loss, unlabelled: Loss) -> Loss:
    """The sum of two losses on different images; sums and pseudo-labels are those of the second."""
    return unlabelled._replace(value=labelled.value + unlabelled.value, terms={**labelled.terms, **unlabelled.terms})
