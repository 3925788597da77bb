"""K-means in which labelled points keep their class, and the number of clusters by how well it finds classes (GCD)."""

from typing import NamedTuple

import torch
from torch import Tensor

from semifed.discovery.neighbours import rows_at_once
from semifed.metrics import hungarian_accuracy
from semifed.prototypes import class_sums


class KMeans(NamedTuple):
    """Clusters of the unlabelled points. The first are the labelled classes by rising label, the rest are novel."""

    member: Tensor  # [n]
    centres: Tensor  # [clusters, d]
    inertia: float  # squared distances to the centres, of labelled points too


def semi_supervised_kmeans(
    unlabelled: Tensor,
    labelled: Tensor,
    labels: Tensor,
    clusters: int,
    *,
    generator: torch.Generator,
    tries: int = 10,
    iterations: int = 200,
    tolerance: float = 1e-4,
) -> KMeans:
    """Clusters of the unlabelled points [n, d], given labelled ones [m, d]; the best of several starts.

    GCD gives features of unit length. A cluster id is a label only where the labels are 0, 1, ... without gaps.
    """
    present, fixed = labels.unique(return_inverse=True)
    if not max(len(present), 1) <= clusters <= len(present) + len(unlabelled):
        raise ValueError(
            f"clusters: expected at least the {max(len(present), 1)} labelled classes and at most one more for each of "
            f"{len(unlabelled)} unlabelled points, found {clusters}"
        )
    counts = fixed.bincount(minlength=len(present))[:, None]
    known = class_sums(labelled.float(), fixed, len(present)) / counts
    found = [
        lloyd(
            unlabelled,
            labelled,
            fixed,
            spread_centres(unlabelled, known, clusters, generator),
            iterations=iterations,
            tolerance=tolerance,
        )
        for _ in range(tries if clusters > len(present) else 1)
    ]
    return min(found, key=lambda run: run.inertia)


def lloyd(
    unlabelled: Tensor, labelled: Tensor, fixed: Tensor, centres: Tensor, *, iterations: int, tolerance: float
) -> KMeans:
    """Lloyd's iterations from these centres, until the sum of their shifts, squared, is at most the tolerance.

    Labelled points stay in their clusters, `fixed` [m]. A centre without a point moves to the point that is furthest
    from its own.
    """
    points = torch.cat([labelled, unlabelled]).float()
    member, distance = nearest_centres(unlabelled.float(), centres)
    for _ in range(iterations):
        group = torch.cat([fixed, member])
        counts = group.bincount(minlength=len(centres))
        moved = class_sums(points, group, len(centres)) / counts.clamp(min=1)[:, None]
        empty = counts == 0
        moved[empty] = unlabelled.float()[distance.argsort(descending=True)[: int(empty.sum())]]
        shift = float(torch.linalg.vector_norm(moved - centres, dim=1).sum())
        centres = moved
        member, distance = nearest_centres(unlabelled.float(), centres)
        if shift**2 <= tolerance:
            break
    inertia = distance.double().sum() + (labelled.float() - centres[fixed]).double().square().sum()
    return KMeans(member, centres, float(inertia))


def nearest_centres(points: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest centre of each point and the squared distance to it, [n] each."""
    member, distance = [torch.empty(0, dtype=torch.int64)], [points.new_empty(0)]
    lengths = centres.square().sum(dim=1)
    for some in points.split(rows_at_once(len(centres))):
        nearest = torch.addmm(lengths, some, centres.T, alpha=-2).min(dim=1)
        member.append(nearest.indices)
        distance.append((nearest.values + some.square().sum(dim=1)).clamp(min=0))
    return torch.cat(member), torch.cat(distance)


def spread_centres(points: Tensor, centres: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """These centres and points drawn as more of them, by the squared distance to the nearest so far (k-means++)."""
    points = points.float()
    distance = nearest_centres(points, centres)[1] if len(centres) else points.new_full((len(points),), torch.inf)
    chosen = [centres]
    for _ in range(clusters - len(centres)):
        # Without a centre, or with one on every point, all are as good.
        chances = distance if bool(distance.isfinite().all()) and bool(distance.any()) else torch.ones(len(points))
        drawn = points[torch.multinomial(chances, 1, generator=generator)]
        chosen.append(drawn)
        distance = torch.minimum(distance, nearest_centres(points, drawn)[1])
    return torch.cat(chosen)


def estimated_clusters(
    unlabelled: Tensor,
    labelled: Tensor,
    labels: Tensor,
    most: int,
    *,
    generator: torch.Generator,
    tries: int = 1,
    evaluations: int = 20,
) -> int:
    """The number of clusters, up to `most`, at which k-means of all points, told no label, finds the labelled classes.

    Brent's bounded search (GCD) for the largest accuracy of labelled points under the best match of clusters and
    classes. Every number is tried with the same draws; the smallest of the best is taken. The accuracy has steps and
    several peaks, so the answer is a good number, not the best.
    """
    from scipy.optimize import minimize_scalar

    least = len(labels.unique())
    if least == 0:
        raise ValueError("labels: expected some, the number of clusters is judged by them")
    if most < least:
        raise ValueError(f"most: expected at least the {least} labelled classes, found {most}")
    everything = torch.cat([labelled, unlabelled])
    nobody, nothing = labelled[:0], labels[:0]
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    wrong: dict[int, float] = {}

    def loss(clusters: float) -> float:
        count = round(clusters)
        if count not in wrong:
            draws = torch.Generator().manual_seed(seed)
            found = semi_supervised_kmeans(everything, nobody, nothing, count, generator=draws, tries=tries)
            wrong[count] = 1 - hungarian_accuracy(found.member[: len(labels)], labels, known=0).all
        return wrong[count]

    loss(least)
    if most > least:
        minimize_scalar(loss, bounds=(least, most), method="bounded", options={"maxiter": evaluations, "xatol": 0.5})
    return min(wrong, key=lambda count: (wrong[count], count))
