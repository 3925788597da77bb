"""Communities of a graph by Infomap: the partition that describes a random walk in the fewest bits."""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from semifed.discovery.graph import Links
from semifed.errors import UserError

if TYPE_CHECKING:
    from infomap import Infomap

SEEDS = 2**31 - 1  # Infomap takes 1 to this


def communities(links: Links, nodes: int, *, seed: int, trials: int = 1) -> Tensor:
    """The community of each node, [nodes]: 0, 1, ... in the order of their first members; −1 without a link.

    Two levels, directed, the best of so many trials. A link without a positive weight is none. A node without links
    is not shown to Infomap, which may put it anywhere.
    """
    member = torch.full((nodes,), -1)
    real = links.weight > 0
    if not real.any():
        return member
    walk = infomap_class()(two_level=True, directed=True, silent=True, seed=1 + seed % SEEDS, num_trials=trials)
    walk.add_links(torch.stack([part[real].double() for part in links], dim=1).numpy())
    module = walk.run().modules()
    linked = torch.tensor(sorted(module))
    member[linked] = _by_first_member(torch.tensor([module[node] for node in linked.tolist()]))
    return member


def _by_first_member(module: Tensor) -> Tensor:
    _, first, which = np.unique(module.numpy(), return_index=True, return_inverse=True)
    return torch.from_numpy(first.argsort().argsort()[which])


def infomap_class() -> "type[Infomap]":
    """Infomap, or a `UserError` that says how to install it."""
    # A process that loads faiss after infomap crashes in the first run of either. Nothing here needs faiss, but
    # whoever uses both finds it loaded in time, unless infomap was there before.
    if "infomap" not in sys.modules:
        with suppress(ImportError):
            import faiss  # noqa: F401
    try:
        from infomap import Infomap
    except ImportError:
        raise UserError("category discovery needs infomap: pip install 'semifed[discovery]'") from None
    return Infomap
