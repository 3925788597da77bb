"""Confidence-guided category discovery: labels and sure guesses are put into a graph before it falls into concepts."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from semifed.data.client import ClientData
from semifed.discovery.concepts import MOST_LINKS, ClassSize, Concepts, discover_concepts, neighbour_count
from semifed.discovery.graph import Rule
from semifed.discovery.seen_threshold import Density, seen_threshold
from semifed.models.network import Output
from semifed.net import Net
from semifed.payloads import Visit
from semifed.prototypes import class_directions
from semifed.pseudo import PseudoLabels

ALMOST_ALL = 0.95  # a threshold that lets more than this through while
RELIABLE = 0.8  # the classifier names fewer of the labelled images rightly, tells nothing


class GraphSettings(NamedTuple):
    """How images become a graph, and what of the labels it is told."""

    percentile: float = 50.0
    bandwidth: float = 0.0
    density: Density = "plain"
    refine: Rule = "clique"
    partners: int = 20
    neighbours: int = 0  # 0: by a rule
    class_size: ClassSize = "typical"  # by which a client's rule goes
    least_similarity: float = 0.5
    smallest_concept: int = 3


class Guided(NamedTuple):
    """Concepts over labelled and then unlabelled images, and what the graph was told of the latter."""

    concepts: Concepts
    label: Tensor  # [unlabelled], the classifier's guess
    identified: Tensor  # [unlabelled] bool, surely of a known class
    doubted: bool  # the threshold told nothing, so no label entered the graph and no image is identified

    @property
    def pseudo(self) -> PseudoLabels:
        """The labels it gave."""
        return PseudoLabels(torch.arange(len(self.label)), self.label, self.identified)

    @property
    def measured(self) -> dict[str, Tensor]:
        """Whether it was doubted, as sum and number of one value."""
        return {"doubted": torch.tensor([float(self.doubted), 1.0])}


def guided_concepts(
    labelled: Output,
    labels: Tensor,
    unlabelled: Output,
    settings: GraphSettings,
    neighbours: int,
    *,
    outliers: Literal["nearest", "none"] = "nearest",
    generator: torch.Generator,
    trials: int = 1,
    most_links: int = MOST_LINKS,
) -> Guided:
    """Concepts of a graph in which labels and the guesses that are surer than most labelled images count as known."""
    confidence, label = unlabelled.logits.softmax(dim=1).max(dim=1)
    own, guess = labelled.logits.softmax(dim=1).max(dim=1)
    identified = confidence > seen_threshold(own, settings.percentile, settings.bandwidth, density=settings.density)
    some = len(labels) > 0 and len(label) > 0
    doubted = some and _share(identified) > ALMOST_ALL and _share(guess == labels) < RELIABLE
    identified = identified & (not doubted)
    concepts = discover_concepts(
        torch.cat([labelled.features, unlabelled.features]),
        torch.cat([labels, torch.where(identified, label, -1)]),
        neighbours=neighbours,
        least_similarity=settings.least_similarity,
        rule="none" if doubted else settings.refine,
        partners=settings.partners,
        smallest=settings.smallest_concept,
        outliers=outliers,
        generator=generator,
        trials=trials,
        most_links=most_links,
    )
    return Guided(concepts, label, identified, doubted)


def local_concepts(
    net: Net,
    data: ClientData,
    settings: GraphSettings,
    labelled_share: float,
    outliers: Literal["nearest", "none"],
    visit: Visit,
) -> Guided:
    """What a client discovers among its un-augmented images with the received network."""
    count = len(data.labelled) + len(data.unlabelled)
    by_rule = neighbour_count(count, data.labels.bincount(), labelled_share, class_size=settings.class_size)
    return guided_concepts(
        data.labelled_outputs(net),
        data.labels,
        data.plain_outputs(net),
        settings,
        settings.neighbours or by_rule,
        outliers=outliers,
        generator=visit.stream("concepts"),
    )


def true_classes(data: ClientData) -> Tensor:
    """Of a client's labelled and then unlabelled images."""
    assert data.classes is not None, "only an oracle is told the classes"
    return torch.cat([data.labels, data.classes])


def true_concepts(net: Net, data: ClientData) -> Concepts:
    """The concepts of an oracle: the true classes of a client's images."""
    _, member = true_classes(data).unique(return_inverse=True)
    features = torch.cat([data.labelled_outputs(net).features, data.plain_outputs(net).features])
    directions = class_directions(features, member, int(member.max()) + 1)
    return Concepts(member, torch.nn.functional.normalize(directions, dim=1))


def true_members(member: Tensor, classes: Tensor) -> Tensor:
    """Found concepts [n] as an oracle would count them: a wrong image moves to the largest concept of its class.

    A concept is of the class that most of its images have. A class without a concept keeps its images where they are.
    """
    inside = member >= 0
    if not inside.any():
        return member
    counts = torch.zeros(int(member.max()) + 1, int(classes.max()) + 1, dtype=torch.int64)
    counts.index_put_((member[inside], classes[inside]), torch.ones(int(inside.sum()), dtype=torch.int64), True)
    majority = counts.argmax(dim=1)
    size = torch.where(majority[:, None] == torch.arange(counts.shape[1]), counts.sum(dim=1, keepdim=True), 0)
    largest = torch.where(size.any(dim=0), size.argmax(dim=0), -1)[classes]
    right = inside & (majority[member.clamp(min=0)] == classes)
    return torch.where(right | (largest < 0), member, largest)


def _share(flags: Tensor) -> float:
    return float(flags.double().mean())
