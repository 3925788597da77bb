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

    Images that share a label (−1 for none) are linked from the start. A single group is returned only if there is
    nothing finer.
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
    order = torch.argsort(labels, stable=True)
    order = order[labels[order] >= 0]
    same = (labels[order[1:]] == labels[order[:-1]]).numpy() if len(order) else np.empty(0, bool)
    chained = order.numpy()
    rows = np.concatenate([np.arange(count), chained[:-1][same]])
    columns = np.concatenate([first, chained[1:][same]])
    graph = coo_array((np.ones(len(rows)), (rows, columns)), shape=(count, count))
    return torch.from_numpy(connected_components(graph, directed=False)[1].astype(np.int64))
