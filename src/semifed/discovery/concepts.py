"""The concepts of one client: what its images fall into, seen or not, and the direction that stands for each (FedLPA).

Their ids are the client's own and mean nothing elsewhere.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from semifed.discovery.communities import communities
from semifed.discovery.graph import Rule, neighbour_links, refined
from semifed.discovery.neighbours import nearest_neighbours
from semifed.prototypes import class_directions

ClassSize = Literal["typical", "median"]
SHARE_OF_CLASS = 0.4  # neighbours by images of a class
FEWEST_NEIGHBOURS, MOST_NEIGHBOURS = 5, 2000
MOST_LINKS = 5_000_000  # to neighbours: about 1 GB and a quarter of a minute of Infomap
MOST_CONCEPTS, MOST_CONCEPTS_BY_IMAGE = 1000, 0.2  # more are fragments
ATTEMPTS = 4  # with twice the neighbours each


class Concepts(NamedTuple):
    """What a client's images fall into: ids from 0 without gaps, −1 for an image of none."""

    member: Tensor  # [n]
    prototypes: Tensor  # [concepts, d], rows of unit length


def discover_concepts(
    features: Tensor,
    labels: Tensor,
    *,
    neighbours: int,
    least_similarity: float,
    rule: Rule,
    partners: int,
    generator: torch.Generator,
    trials: int = 1,
    smallest: int = 3,
    outliers: Literal["nearest", "none"] = "nearest",
    most_links: int = MOST_LINKS,
) -> Concepts:
    """Concepts of all images of a client by their features [n, d] and the labels [n] that are known (−1 for none).

    Communities of fewer than `smallest` images, and images that are linked to none, are outliers: they join the concept
    of the nearest prototype, which they do not move, or none. If all are outliers that want a concept, they are one:
    no division was found, and every image keeps a prototype. Where n neighbourhoods would hold too many links, the
    concepts are those of a random sample with proportionally fewer neighbours, and the other images join the nearest.
    """
    if not features.isfinite().all():
        raise ValueError("features: expected finite numbers")
    count = len(features)
    unit = F.normalize(features.float(), dim=1)
    for attempt in range(ATTEMPTS):
        k = min(neighbours * 2**attempt, max(count - 1, 0))
        drawn = sampled(count, k, most_links, generator)
        some, known = unit[drawn], labels[drawn]
        near = nearest_neighbours(some, math.ceil(k * len(drawn) / count) if count else 0)
        links = neighbour_links(near, least_similarity)
        links = refined(links, near, known, rule=rule, partners=partners, generator=generator)
        seed = int(torch.randint(2**31 - 1, (), generator=generator))
        modules = communities(links, len(some), seed=seed, trials=trials)
        group = _without_small(modules, smallest)
        if k >= count - 1 or not _in_fragments(modules, group):
            break
    if outliers == "nearest" and not _groups(group):
        group = torch.zeros_like(group)
    inside = group >= 0
    prototypes = F.normalize(class_directions(some[inside], group[inside], _groups(group)), dim=1)
    member = torch.full((count,), -1)
    member[drawn] = group
    # Not drawn is not an outlier.
    joining = member < 0
    if outliers == "none":
        joining[drawn] = False
    if len(prototypes):
        member[joining] = (unit[joining] @ prototypes.T).argmax(dim=1)
    return Concepts(member, prototypes)


def neighbour_count(
    images: int,
    label_counts: Tensor,
    labelled_share: float,
    *,
    class_size: ClassSize = "typical",
    most: int = MOST_NEIGHBOURS,
) -> int:
    """How many neighbours to link each of a client's images to, by how many labels it has of each class, [classes].

    The number governs how many concepts are found, and should be 0.3 to 0.5 of the images of a class. Their number is
    that of its labels by the share of labelled images among those of seen classes: of the class a labelled image is of
    in the mean ("typical"), or the median over classes that have any. A skewed client has slivers of many classes:
    they decide a median, but hardly an image is of them (results/discovery/class_size.md).
    Without labels it is the square root of the images: right for 0.4 of that root classes, 13 among a thousand.
    With fewer a class falls into fragments (results/discovery/large_client.md), so a large client keeps this number and
    discovers its concepts in a sample.
    """
    if not 0 < labelled_share <= 1:
        raise ValueError(f"labelled_share: expected a share above 0 and up to 1, found {labelled_share}")
    present = label_counts[label_counts > 0].double()
    if not len(present):
        wanted = math.sqrt(images)
    else:
        labels = present.quantile(0.5) if class_size == "median" else present.square().sum() / present.sum()
        wanted = SHARE_OF_CLASS * float(labels) / labelled_share
    return max(min(max(round(wanted), FEWEST_NEIGHBOURS), most, images - 1), 0)


def sampled(images: int, neighbours: int, most_links: int, generator: torch.Generator) -> Tensor:
    """Which images to link so that, with neighbours in proportion, the links are not too many; in order.

    A share s of the images with a share s of the neighbours has s² of the links, and k is the same part of a class.
    """
    if images * neighbours <= most_links:
        return torch.arange(images)
    share = math.sqrt(most_links / (images * neighbours))
    drawn: Tensor = torch.randperm(images, generator=generator)[: max(int(share * images), 1)]
    return drawn.sort().values


def _in_fragments(modules: Tensor, group: Tensor) -> bool:
    """Whether there are too many concepts, or modules but none that is large enough to be one."""
    concepts = _groups(group)
    most = min(MOST_CONCEPTS, MOST_CONCEPTS_BY_IMAGE * len(group))
    return concepts > most or (concepts == 0 and _groups(modules) > 0)


def _groups(member: Tensor) -> int:
    return int(member.max()) + 1 if len(member) else 0


def _without_small(member: Tensor, smallest: int) -> Tensor:
    """Members of groups of at least that size, renumbered in the same order; −1 for all others."""
    large = member[member >= 0].bincount() >= smallest
    # The last entry is for −1, the index of no group.
    renumbered = torch.cat([torch.where(large, large.cumsum(0) - 1, -1), torch.tensor([-1])])
    return renumbered[member]
