"""FINCH: groups by first neighbours, then groups of groups (Sarfraz et al., CVPR 2019); no number of groups needed."""

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from semifed.discovery.neighbours import nearest_neighbours
from semifed.discovery.objectives import unit
from semifed.prototypes import class_sums


def finch(points: Tensor, labels: Tensor) -> list[Tensor]:
    """Partitions [n] of points [n, d] by cosine, from the finest to the coarsest that is not one group alone.

    An image with a label (−1 for none) is linked to the others of its label in place of its first neighbour: in the
    finest partition all images of a label are in one group, and no group has two labels. A single group is returned
    only if there is nothing finer.
    """
    member = _components(unit(points), labels)
    levels = [member]
    while (groups := len(member.unique())) > 2:
        means = class_sums(points, member, groups) / torch.bincount(member)[:, None]
        member = _components(unit(means), torch.full((groups,), -1))[member]
        if int(member.max()) == 0 or int(member.max()) + 1 == groups:
            break
        levels.append(member)
    return levels


def _components(vectors: Tensor, labels: Tensor) -> Tensor:
    count = len(vectors)
    if count < 2:
        return torch.zeros(count, dtype=torch.int64)
    first = nearest_neighbours(vectors, 1).node[:, 0].numpy()
    unnamed = (labels < 0).nonzero()[:, 0].numpy()
    chained = torch.argsort(labels, stable=True)[len(unnamed) :]
    same = (labels[chained[1:]] == labels[chained[:-1]]).numpy()
    rows = np.concatenate([unnamed, chained[:-1][same].numpy()])
    columns = np.concatenate([first[unnamed], chained[1:][same].numpy()])
    graph = coo_array((np.ones(len(rows)), (rows, columns)), shape=(count, count))
    return torch.from_numpy(connected_components(graph, directed=False)[1].astype(np.int64))
