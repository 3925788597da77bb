"""What discovered groups are worth, beside those that other ways of grouping find in the same features."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from semifed.discovery.gallery import Gallery
from semifed.discovery.guided import GraphSettings
from semifed.discovery.inference import graph_clusters, kmeans_clusters
from semifed.metrics import ari, hungarian_accuracy, nmi
from semifed.models.network import Output


def judged_groups(member: Tensor, classes: Tensor, known: int) -> dict[str, float]:
    """All metrics of one grouping; classes below `known` are the old ones."""
    plain, balanced = (hungarian_accuracy(member, classes, known, balanced=flag) for flag in (False, True))
    return {
        **plain._asdict(),
        **{f"{name}_balanced": value for name, value in balanced._asdict().items()},
        "clusters": float(len(member[member >= 0].unique())),
        "nmi": nmi(member, classes),
        "ari": ari(member, classes),
    }


def discovery_metrics(own: Tensor, gallery: Gallery, classes: Tensor) -> dict[str, float]:
    """What a method's own groups are worth, and three that anyone could make of its features.

    `infomap.` needs no number of classes, `plus.` (FedLPA+) is told the labelled images, `kmeans.` the labelled
    images and the true number of classes.
    """
    known = gallery.images.logits.shape[1]
    metrics = judged_groups(own, classes, known)
    beside = {
        "infomap": graph_clusters(gallery, GraphSettings(), with_labels=False),
        "kmeans": kmeans_clusters(gallery, len(classes.unique())),
    }
    if len(gallery.labels):
        beside["plus"] = graph_clusters(gallery, GraphSettings(), with_labels=True)
    for prefix, member in beside.items():
        judged = judged_groups(member, classes, known)
        metrics |= {f"{prefix}.{name}": judged[name] for name in ("all", "old", "new", "clusters")}
    return metrics


def confidence_histograms(gallery: Gallery, classes: Tensor, taught: Output, bins: int) -> dict[str, Any]:
    """How sure the classifier of known classes is of images (the paper's Figs. 1, 2).

    Of the clients' labelled ones, which taught it, of labelled ones it never saw, of known and of novel ones.
    """
    edges = np.linspace(0, 1, bins + 1)

    def sure(said: Output) -> Tensor:
        return said.logits.softmax(dim=1).max(dim=1).values

    grouped, known = sure(gallery.images), classes < gallery.images.logits.shape[1]
    groups = {
        "taught": sure(taught),
        "labelled": sure(gallery.labelled),
        "known": grouped[known],
        "novel": grouped[~known],
    }
    counts = {name: np.histogram(values.numpy(), edges)[0].tolist() for name, values in groups.items()}
    return {"bins": edges.tolist(), "counts": counts}


def described_groups(
    member: Tensor, classes: Tensor, names: list[str], features: Tensor, shown: int
) -> list[dict[str, Any]]:
    """The groups from largest to smallest: how many images of each class, and which images are nearest its middle."""
    groups = []
    for group in member[member >= 0].unique().tolist():
        inside = (member == group).nonzero()[:, 0]
        vectors = torch.nn.functional.normalize(features[inside], dim=1)
        nearest = (vectors @ vectors.mean(dim=0)).argsort(descending=True, stable=True)[:shown]
        counts = torch.bincount(classes[inside], minlength=len(names)).tolist()
        groups.append({"size": len(inside), "counts": counts, "images": inside[nearest].tolist()})
    return sorted(groups, key=lambda group: -group["size"])
