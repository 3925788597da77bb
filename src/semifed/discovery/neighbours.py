"""The nearest neighbours of every feature by cosine, exactly, in bounded memory."""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 2**24  # numbers of an [images, images] matrix held at a time, 64 MB: more does not make it quicker


class Neighbours(NamedTuple):
    """The k nearest others of each image, from most similar; ties in no order to rely on."""

    similarity: Tensor  # [n, k]
    node: Tensor  # [n, k], which of the n


def rows_at_once(columns: int) -> int:
    """How many rows of a matrix with that many columns fit into a block."""
    return max(BLOCK // max(columns, 1), 1)


def nearest_neighbours(unit: Tensor, k: int) -> Neighbours:
    """The k most similar of the other unit vectors [n, d] for each, all n − 1 of them where there are fewer than k.

    An image is left out of its own neighbours by its index, not by its rank: a copy of it may come first. Products in
    blocks and a partial sort were 1.3 to 4 times as quick as faiss's exact index in every case measured
    (results/discovery/large_client.md), so nothing here depends on whether faiss is installed.
    """
    count = len(unit)
    near = min(k, max(count - 1, 0))
    similarity = unit.new_empty(count, near)
    node = torch.empty(count, near, dtype=torch.int64)
    rows = rows_at_once(count)
    for start in range(0, count, rows):
        block = unit[start : start + rows] @ unit.T
        block.diagonal(start).fill_(-torch.inf)
        similarity[start : start + rows], node[start : start + rows] = block.topk(near, dim=1)
    return Neighbours(similarity, node)
