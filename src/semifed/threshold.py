"""The unknown score above which an image is called unknown, from nothing but the server's labelled images.

The model has learnt these images by heart, so their own scores promise too much: a threshold that accepts 95 % of
them accepts far fewer new ones. What new images score is therefore seen on held-out ones: models that the server
trains without a fold of its images are asked about that fold. Such a model may be more or less sure than the
delivered one, so scores are not compared but ranks: how far up a held-out image lies among augmented views of the
images its model has learnt. The delivered model's threshold has the same rank among its own.
"""

import copy
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semifed.data.client import ClientData
from semifed.fit import Diverged
from semifed.methods import AnyMethod
from semifed.net import Net
from semifed.server import ServerSite
from semifed.wire import Weights

FOLDS = 5
VIEWS = 10  # of each kind: plain, weak, strong
BATCH = 128
ROUGH = "augmented views of the server's labelled images, none of them held out: a rough guide"

Scores = npt.NDArray[np.float64]


class Threshold(NamedTuple):
    """Where rejection starts, and what that was learnt from."""

    value: float | None  # None: nothing is rejected
    calibrated_on: str


def rejection_threshold(
    method: AnyMethod, site: ServerSite, initial: Weights, delivered: Weights, accept: float, *, hold_out: bool = True
) -> Threshold:
    """The threshold that accepts the given share of new images of known classes.

    `site` is the server before its first round, `initial` the weights it starts from.
    """
    held = site.labelled
    if held is None:
        return Threshold(None, "nothing: the server holds no labels")
    rank, source = accept, ROUGH
    if hold_out and int(torch.bincount(held.labels).min()) > 1:  # a class that is all held out cannot be learnt
        try:
            ranks = held_out_ranks(method, site, held, initial)
        except Diverged:
            pass
        else:
            rank = float(np.quantile(ranks, accept))
            source = f"the server's {len(ranks)} labelled images, each held out once in {FOLDS} folds"
    site.net.load(delivered)
    return Threshold(float(np.quantile(_of_views(method, site, held), rank)), source)


def held_out_ranks(method: AnyMethod, site: ServerSite, held: ClientData, initial: Weights) -> Scores:
    """For each labelled image its rank, from 0 to 1, among views of those that a model without it has learnt."""
    fold_of = folds(held.labels, FOLDS, site.stream("folds"))
    ranks = np.empty(len(fold_of))
    for fold in fold_of.unique().tolist():
        out = fold_of == fold
        rest = held._replace(labelled=held.labelled[~out], labels=held.labels[~out])
        there = copy.copy(site)
        there.labelled, there.notes = rest, {}
        site.net.load(method.delivered(method.setup(initial, there)))
        learnt = np.sort(_of_views(method, there, rest))
        new = _scores(method, site.net, held.views.plain(held.images[held.labelled[out]]))
        ranks[out.numpy()] = np.searchsorted(learnt, new) / len(learnt)
    return ranks


def folds(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """A fold for each image: all folds alike in size, and in the number of each class, up to one image."""
    order = torch.randperm(len(labels), generator=generator)
    by_class = order[labels[order].argsort(stable=True)]
    fold = torch.empty_like(labels)
    fold[by_class] = torch.arange(len(labels)) % count
    return fold


def _of_views(method: AnyMethod, site: ServerSite, held: ClientData) -> Scores:
    """Scores of plain, weak and strong views in equal numbers: from what was learnt by heart to what is hard."""
    images, views = held.images[held.labelled], held.views
    stream = site.stream("views for the threshold")
    plain = _scores(method, site.net, views.plain(images))
    drawn = [
        _scores(method, site.net, view(images, stream)) for _ in range(VIEWS) for view in (views.weak, views.strong)
    ]
    return np.concatenate([np.repeat(plain, VIEWS), *drawn])


@torch.no_grad()
def _scores(method: AnyMethod, net: Net, images: Tensor) -> Scores:
    parts = [method.predict(net, part).unknown for part in images.split(BATCH)]
    return torch.cat(parts).double().numpy()
