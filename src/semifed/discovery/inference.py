"""Groups among images nobody has named: what a delivered model is asked for at the end."""

from typing import Literal

import torch
from torch import Tensor

from semifed.discovery.concepts import FEWEST_NEIGHBOURS, MOST_LINKS, MOST_NEIGHBOURS, discover_concepts
from semifed.discovery.gallery import Gallery
from semifed.discovery.guided import GraphSettings, guided_concepts
from semifed.discovery.objectives import unit
from semifed.discovery.semi_kmeans import estimated_clusters, semi_supervised_kmeans

MOST_FINAL_LINKS = 2 * MOST_LINKS  # FedLPA and FedLPA+ must link the same images; 10,000 of ten classes need 5 million
TRIALS = 5  # of Infomap or k-means: one would do while training, the last word deserves more
MOST_BY_KNOWN = 5  # classes there may be, by known ones, where their number must be found too
SHARE_OF_CLASS = 0.25  # neighbours, of the largest a class can be where all images are of known classes


def graph_clusters(gallery: Gallery, settings: GraphSettings, *, with_labels: bool) -> Tensor:
    """Infomap's groups [n] of the images alone (FedLPA), or of a graph that is told the labels (FedLPA+)."""
    neighbours = settings.neighbours or neighbours_among(gallery)
    generator = torch.Generator().manual_seed(gallery.seed)
    if with_labels:
        guided = guided_concepts(
            gallery.labelled,
            gallery.labels,
            gallery.images,
            settings,
            neighbours,
            generator=generator,
            trials=TRIALS,
            most_links=MOST_FINAL_LINKS,
        )
        return guided.concepts.member[len(gallery.labels) :]
    return discover_concepts(
        gallery.images.features,
        torch.full((len(gallery.images.features),), -1),
        neighbours=neighbours,
        least_similarity=settings.least_similarity,
        rule="none",
        partners=0,
        smallest=settings.smallest_concept,
        outliers="nearest",
        generator=generator,
        trials=TRIALS,
        most_links=MOST_FINAL_LINKS,
    ).member


def kmeans_clusters(gallery: Gallery, clusters: int) -> Tensor:
    """GCD's groups [n]: semi-supervised k-means on unit features, which must be told how many groups there are.

    Every labelled class has one, whatever is told, and beside those there are no more groups than images.
    """
    present = len(gallery.labels.unique())
    clusters = min(max(clusters, present, 1), present + len(gallery.images.features))
    return semi_supervised_kmeans(
        unit(gallery.images.features),
        unit(gallery.labelled.features),
        gallery.labels,
        clusters,
        generator=torch.Generator().manual_seed(gallery.seed),
    ).member


def gcd_clusters(gallery: Gallery, novel: int | Literal["searched"]) -> Tensor:
    """Groups [n] by k-means that is told the number of novel classes, or has it searched."""
    known = gallery.images.logits.shape[1]
    return kmeans_clusters(gallery, likely_classes(gallery) if novel == "searched" else known + novel)


def likely_classes(gallery: Gallery) -> int:
    """How many classes GCD's search finds in the images, at least the known ones.

    Without labelled images nothing can be searched by: as many novel classes as known ones.
    """
    known = gallery.images.logits.shape[1]
    most = min(MOST_BY_KNOWN * known, len(gallery.images.features))
    if not len(gallery.labels) or most < known:
        return 2 * known
    found = estimated_clusters(
        unit(gallery.images.features),
        unit(gallery.labelled.features),
        gallery.labels,
        most,
        generator=torch.Generator().manual_seed(gallery.seed),
        tries=TRIALS,
    )
    return max(found, known)


def neighbours_among(gallery: Gallery) -> int:
    """k of a graph over all images: a share of the mean size of the known classes, if there were no others.

    A client's k follows from its labels; here nobody knows how many images a class has, only that there are more
    classes than the model can name.
    """
    images, classes = len(gallery.images.features), gallery.images.logits.shape[1]
    return max(FEWEST_NEIGHBOURS, min(MOST_NEIGHBOURS, int(SHARE_OF_CLASS * images / classes)))
