"""The unknown score above which an image is called unknown, from nothing but the server's labelled images.

If some are held back that nobody trains on (`scenario.validation_fraction`), it accepts the wanted share of these.

Otherwise the model has learnt all of them by heart, and their own scores promise too much: a threshold that accepts
95 % of them accepts far fewer new ones. What new images score is therefore seen on held-out ones: models that the
server trains without a fold of its images are asked about that fold. Such a model may be more or less sure than the
delivered one, so scores are not compared but ranks: how far up a held-out image lies among augmented views of the
images its model has learnt. The delivered model's threshold has the same rank among its own.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semifed.data.client import ClientData
from semifed.fit import Diverged
from semifed.methods import AnyMethod
from semifed.net import Net
from semifed.predictions import predictions
from semifed.server import ServerSite
from semifed.wire import Weights

VIEWS = 10  # of each kind: plain, weak, strong
ROUGH = "augmented views of the server's labelled images, none of them held out: a rough guide"

Scores = npt.NDArray[np.float64]


class Threshold(NamedTuple):
    """Where rejection starts, and what that was learnt from."""

    value: float | None  # None: nothing is rejected
    calibrated_on: str


def rejection_threshold(
    method: AnyMethod,
    site: ServerSite,
    initial: Weights,
    delivered: Weights,
    accept: float,
    folds: int,
    validation: ClientData | None = None,
) -> Threshold:
    """The threshold that accepts the given share of new images of known classes.

    `site` is the server before its first round, `initial` the weights it starts from. Each of the folds costs another
    warm-up; with fewer than two the threshold is a rough one. With `validation`, labelled images that nobody trains on,
    none of this is needed.
    """
    if validation is not None:
        site.net.load(delivered)
        new = scores(method, site.net, validation.views.plain(validation.images[validation.labelled]))
        return Threshold(float(np.quantile(new, accept)), f"{len(new)} labelled images that nobody trained on")
    if site.labelled is None:
        return Threshold(None, "nothing: the server holds no labels")
    rank, source = accept, ROUGH
    if folds > 1 and int(torch.bincount(site.labelled.labels).min()) > 1:  # else a class could not be learnt at all
        try:
            found = np.concatenate([ranks(new, learnt) for new, learnt in held_out(method, site, initial, folds)])
            rank = float(np.quantile(found, accept))
            source = f"the server's {len(found)} labelled images, each held out once in {folds} folds"
        except Diverged:
            pass
    site.net.load(delivered)
    return Threshold(float(np.quantile(scores_of_views(method, site), rank)), source)


def held_out(method: AnyMethod, site: ServerSite, initial: Weights, count: int) -> Iterator[tuple[Scores, Scores]]:
    """For each fold, what a model trained without it scores on it, and on views of the images it has learnt."""
    held = site.labelled
    assert held is not None
    fold_of = assigned_folds(held.labels, count, site.stream("folds"))
    for fold in fold_of.unique().tolist():
        out = fold_of == fold
        there = copy.copy(site)
        there.labelled = held._replace(labelled=held.labelled[~out], labels=held.labels[~out])
        there.notes = {}
        there.tell = partial(_as_part_of_all, site.tell, fold, int(fold_of.max()) + 1)
        site.net.load(method.delivered(method.setup(initial, there)))
        yield (
            scores(method, site.net, held.views.plain(held.images[held.labelled[out]])),
            scores_of_views(method, there),
        )


def _as_part_of_all(tell: Callable[[str, int, int], None], fold: int, folds: int, _: str, done: int, all_: int) -> None:
    """One fold's warm-up as a part of what all of them take."""
    tell("threshold", fold * all_ + done, folds * all_)


def ranks(new: Scores, learnt: Scores) -> Scores:
    """How far up each of the new scores lies among the others, from 0 to 1.

    >>> ranks(np.array([0.1, 0.35, 0.9]), np.array([0.4, 0.2, 0.3, 0.5]))
    array([0. , 0.5, 1. ])
    """
    return np.searchsorted(np.sort(learnt), new) / len(learnt)


def assigned_folds(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """A fold for each image: all folds alike in size, and in the number of each class, up to one image."""
    order = torch.randperm(len(labels), generator=generator)
    by_class = order[labels[order].argsort(stable=True)]
    fold = torch.empty_like(labels)
    fold[by_class] = torch.arange(len(labels)) % count
    return fold


def scores_of_views(method: AnyMethod, site: ServerSite) -> Scores:
    """Scores of plain, weak and strong views in equal numbers: from what was learnt by heart to what is hard."""
    held = site.labelled
    assert held is not None
    images, views, stream = held.images[held.labelled], held.views, site.stream("views for the threshold")
    drawn = [
        scores(method, site.net, view(images, stream)) for view in (views.weak, views.strong) for _ in range(VIEWS)
    ]
    return np.concatenate([np.repeat(scores(method, site.net, views.plain(images)), VIEWS), *drawn])


def scores(method: AnyMethod, net: Net, images: Tensor) -> Scores:
    """The unknown score of each image."""
    found: Scores = predictions(method, net, images, lambda part: part).unknown.double().numpy()
    return found
