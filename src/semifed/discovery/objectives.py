"""Objectives that the methods of category discovery share: two views of every image, contrast, self-distillation."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from semifed.aggregate import equal_shares
from semifed.data.client import Batch, ClientData
from semifed.fit import Course, Fitted, Loss
from semifed.losses import cross_entropy, mean, prior_divergence, soft_cross_entropy, supervised_contrastive
from semifed.method import averaged
from semifed.models.network import Output
from semifed.net import Net
from semifed.payloads import Server, Update
from semifed.server import ServerSite

ONLY_NOVEL = {
    "server": "its clients learn from labels of their own; the nearest setting that works is scenario.labels=clients",
    "known": "there is nothing to discover; the nearest setting that works is scenario.classes=novel",
    "open": "it groups unknown images, it rejects none; the nearest setting that works is scenario.classes=novel",
}
_BOUNDED = "its temperatures are those of cosines; the nearest setting that works is model.head=cosine"
ONLY_COSINES = {**ONLY_NOVEL, "linear": _BOUNDED, "mlp": _BOUNDED}
PROJECTION = "mlp3(2048, 256, gelu)"  # DINO's head, on which GCD, SimGCD and FedLPA contrast


class TwoViews(NamedTuple):
    """What a network says of two weak views of every image: all first views, then all second ones."""

    labelled: Output
    labels: Tensor  # of both views
    unlabelled: Output


class Contrast(NamedTuple):
    """GCD's pair of losses, scalars; 0 where there is nothing to contrast."""

    supervised: Tensor  # Eq. (5), over the labelled views
    unsupervised: Tensor  # Eq. (6), over all views


def two_views(net: Net, batch: Batch) -> TwoViews:
    """One pass over both weak views of the whole batch."""
    labelled, unlabelled = net.joint(
        *(torch.cat([part.weak, part.weak_again]) for part in (batch.labelled, batch.unlabelled))
    )
    return TwoViews(labelled, batch.labelled.labels.repeat(2), unlabelled)


def contrast(seen: TwoViews, supervised_temperature: float, unsupervised_temperature: float) -> Contrast:
    """Views of one class attract each other, views of one image too; all others repel (GCD, SimGCD)."""
    with_label, without = seen.labelled.heads["projection"], seen.unlabelled.heads["projection"]
    # InfoNCE is supervised contrast in which every image is a class of its own.
    images = torch.cat([_image_of(with_label), _image_of(without) + len(with_label)])
    return Contrast(
        mean(supervised_contrastive(with_label, seen.labels, supervised_temperature)),
        mean(supervised_contrastive(torch.cat([with_label, without]), images, unsupervised_temperature)),
    )


def self_distillation(logits: Tensor, sharpening: float) -> Tensor:
    """Every view is taught by the other one: −Σ q' log p over two views [2n, classes], [2n] (SimGCD).

    The teacher q' is the other view's distribution at a lower temperature, `sharpening` times the student's.
    """
    teacher = (sharpening * logits.detach()).softmax(dim=1)
    return soft_cross_entropy(logits, teacher.roll(len(logits) // 2, dims=0))


def prior_alignment(logits: Tensor, prior: Tensor, kind: str) -> Tensor:
    """D(p̄, π): how far the mean prediction over both views is from the batch's prior."""
    return prior_divergence(logits.softmax(dim=1).mean(dim=0), prior, kind)


def smoothed_prior(member: Tensor, concepts: int, smoothing: float) -> Tensor:
    """π: the share of each concept among the images, every concept counted `smoothing` times more, [concepts].

    Without smoothing a concept that is absent from a batch keeps a trace, or KL(p̄‖π) would be infinite.
    """
    counts = torch.bincount(member, minlength=concepts) + smoothing
    return (counts / counts.sum()).clamp(min=1e-8)


def then_classify(fitted: Fitted, net: Net, data: ClientData, course: Course) -> Fitted:
    """After other training, one pass over the labelled images, if any, that moves the classifier alone.

    The backbone stands still, so its features are computed once, of the un-augmented images.
    """
    if not len(data.labelled):
        return fitted
    known = data._replace(unlabelled=data.unlabelled[:0])
    features = data.labelled_outputs(net).features

    def step(net: Net, batch: Batch, features: Tensor) -> Loss:
        logits = net.classify(features[batch.labelled.position])
        value = mean(cross_entropy(logits, batch.labelled.labels))
        return Loss(value, {"classifier": value})

    return fitted.then(course.follow(net, known, step, features, stage="classifier", steps=course.epoch(known)))


def sharpening(round_: int, rounds: float, student: float, first: float, last: float) -> float:
    """The student's temperature over the teacher's, which falls from the first to the last within so many rounds."""
    passed = min(1.0, (round_ - 1) / rounds)
    return student / (first + passed * (last - first))


def equal_mean(server: Server, ups: Sequence[Update], site: ServerSite) -> Server:
    """The next model where every client that learnt anything counts the same, however many images it has."""
    return Server(averaged(server.weights, ups, site, equal_shares([float(up.samples) for up in ups])))


def unit(features: Tensor) -> Tensor:
    """h: features scaled to length 1."""
    return F.normalize(features, dim=1)


def _image_of(views: Tensor) -> Tensor:
    return torch.arange(len(views) // 2).repeat(2)
