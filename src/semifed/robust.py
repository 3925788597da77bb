"""Defences against broken and hostile clients: steps that turn a round's updates into safer ones.

A step never looks at what a method does with updates afterwards, so any of them goes with every method. Where a step
makes one model of many (median, trimmed mean), all clients that learnt anything send that model on, with their own
counts: whatever weights a method then averages them with, it is what it gets.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from semifed.errors import UserError, nearest
from semifed.kernels import averages
from semifed.wire import SMALL, Weights

ABSURD = 100.0  # times the median change: no client that works as told gets there
LARGEST_CHANGE = 1e8  # of all weights, whatever others do: networks have overflowed long before
TOGETHER = 2**13  # weights that are compared at once, of all clients: more would not stay in the processor's cache
FEWEST = 3  # updates that a median says anything about


class Step(NamedTuple):
    """One step of a defence with its number."""

    name: str
    value: float | None

    def __call__(self, updates: Sequence[Any], received: Weights) -> list[Any]:
        """The updates that go on."""
        return STEPS[self.name](list(updates), received, self.value)


def defence(text: str) -> list[Step]:
    """The steps of a text such as "clip(1) trimmed(0.2)"; "none" has none."""
    if text == "none":
        return []
    steps = []
    for word in text.split():
        match = re.fullmatch(r"([a-z-]+)(?:\(([0-9.]+)\))?", word)
        if match is None or match[1] not in STEPS:
            raise UserError(f"defence.steps: there is no '{word}'; {nearest(word.partition('(')[0], sorted(STEPS))}")
        value = float(match[2]) if match[2] is not None else None
        low, high = BOUNDS[match[1]]
        if value is not None and not low <= value <= high:
            raise UserError(f"defence.steps: {match[1]}({match[2]}) is out of range: from {low:g} to {high:g}")
        steps.append(Step(match[1], value))
    return steps


def refuse_idle(steps: Iterable[Step], clients: int) -> None:
    """A step that could keep no hostile client of a round out would only look like a defence."""
    for name, value in steps:
        told = name if value is None else f"{name}({value:g})"
        if name not in ("clip", "counts") and clients < FEWEST:
            raise UserError(f"defence.steps: {told} needs {FEWEST} clients a round at least, there are {clients}")
        if name in ("trimmed", "multi-krum") and not _left_out(name, value, clients):
            enough = math.ceil(100 / clients) / 100
            raise UserError(
                f"defence.steps: {told} of {clients} clients a round leaves nobody out; {name}({enough:g}) would"
            )


def change_norms(updates: Sequence[Any], received: Weights, *, exact: bool = True) -> Tensor:
    """How far each update is from what the clients received: the norm over all weights, [updates].

    Without being `exact`, squares are added up by kernels where tensors are large, else in the weights' own precision:
    five digits or so of sizes between 1e-20 and 1e19, nothing below and infinity beyond.
    """
    start: dict[tuple[str, ...], Tensor] = {}
    precision = torch.float64 if exact else None
    norms = []
    for one in updates:
        squares = {} if exact else _squares_by_kernels(one.weights, received)
        names = tuple(name for name in one.weights if name not in squares)
        if names not in start:
            start[names] = _joined(received[name] for name in names)
        change = _joined(one.weights[name] for name in names).sub_(start[names])
        rest = float(torch.linalg.vector_norm(change, dtype=precision))
        norms.append(math.hypot(rest, *map(math.sqrt, squares.values())))
    return torch.tensor(norms)


def _squares_by_kernels(weights: Weights, received: Weights) -> dict[str, float]:
    """Sums of squared changes of the large tensors; none where there are no kernels for them."""
    large = (name for name, tensor in weights.items() if tensor.numel() > SMALL)
    squares = {name: averages.squared_distance(weights[name], received[name]) for name in large}
    return {name: square for name, square in squares.items() if square is not None}


def absurd(updates: Sequence[Any], received: Weights) -> list[str | None]:
    """For each update, why its size is beyond belief; None if it is not.

    The measure is the median change of those who learnt anything; among fewer than three nobody can tell more than that
    no training goes so far.
    """
    learnt = torch.tensor([float(one.samples) > 0 for one in updates], dtype=torch.bool)
    comparable = int(learnt.sum()) >= FEWEST
    rough = change_norms(updates, received, exact=False)
    clear = min(ABSURD * float(rough[learnt].median()), LARGEST_CHANGE) if comparable else LARGEST_CHANGE
    if clear > 0 and bool((rough <= clear / 2).all()):  # as nearly always
        return [None] * len(updates)
    norms = change_norms(updates, received)
    usual = float(norms[learnt].median()) if comparable else 0.0

    def fault(norm: float) -> str | None:
        if norm > ABSURD * usual > 0:
            return f"it changes the weights by {norm:.3g}, most others by {usual:.3g}"
        return f"it changes the weights by {norm:.3g}, which no training does" if norm > LARGEST_CHANGE else None

    return list(map(fault, norms.tolist()))


def clipped(updates: list[Any], received: Weights, factor: float | None) -> list[Any]:
    """No change larger than `factor` times the median one (default 1); larger ones are scaled down."""
    norms = change_norms(updates, received)
    learnt = [index for index, one in enumerate(updates) if float(one.samples) > 0]
    if not learnt:
        return updates
    limit = (1.0 if factor is None else factor) * float(norms[learnt].median())
    return [
        one if norm <= limit else one._replace(weights=_scaled(one.weights, received, limit / norm))
        for one, norm in zip(updates, norms.tolist(), strict=True)
    ]


def counts_bounded(updates: list[Any], _: Weights, factor: float | None) -> list[Any]:
    """No claim of more images than `factor` times the median claim (default 1): a mean by counts is nobody's alone."""
    claimed = torch.tensor([float(one.samples) for one in updates if float(one.samples) > 0], dtype=torch.float64)
    if not len(claimed):
        return updates
    limit = (1.0 if factor is None else factor) * float(claimed.median())
    return [
        one if float(one.samples) <= limit else one._replace(samples=torch.full_like(one.samples, limit))
        for one in updates
    ]


def coordinate_median(updates: list[Any], received: Weights, _: float | None) -> list[Any]:
    """Each weight is the median over clients; of an even number, the mean of the middle two."""

    def median(ranked: Tensor) -> Tensor:
        count = ranked.shape[1]
        return torch.lerp(ranked[:, (count - 1) // 2].double(), ranked[:, count // 2].double(), 0.5)

    return _unanimous(updates, median)


def trimmed_mean(updates: list[Any], received: Weights, share: float | None) -> list[Any]:
    """Each weight is the mean over clients without the given share of the largest and of the smallest values."""

    def trimmed(ranked: Tensor) -> Tensor:
        count = ranked.shape[1]
        drop = min(_least_one("trimmed", share, count), (count - 1) // 2)
        return ranked[:, drop : count - drop].double().mean(dim=1)

    return _unanimous(updates, trimmed)


def squared_distances(models: Sequence[Weights]) -> Tensor:
    """Between every two of them over all weights, [models, models]; in parts, or all would be there at once."""
    total = torch.zeros(len(models), len(models), dtype=torch.float64)
    for name in models[0]:
        for part in zip(*(one[name].flatten().split(TOGETHER) for one in models), strict=True):
            told = torch.stack(part).double()
            total += torch.cdist(told, told, compute_mode="donot_use_mm_for_euclid_dist").square()
    return total


def krum_scores(distances: Tensor, hostile: int) -> Tensor:
    """Krum's score of each update: the sum of squared distances [n, n] to its n − hostile − 2 nearest, [n]."""
    count = len(distances)
    near = max(min(count - hostile - 2, count - 1), 1)
    others = distances + torch.diag(torch.full((count,), torch.inf, dtype=distances.dtype))
    return others.sort(dim=1).values[:, :near].sum(dim=1)


def krum(updates: list[Any], _: Weights, share: float | None) -> list[Any]:
    """Only the update nearest to its neighbours goes on, where that share of the clients may be hostile."""
    return _nearest("krum", updates, share, kept=lambda count, hostile: 1)


def multi_krum(updates: list[Any], _: Weights, share: float | None) -> list[Any]:
    """All but the hostile share of the updates go on, those nearest to their neighbours."""
    return _nearest("multi-krum", updates, share, kept=lambda count, hostile: max(count - hostile, 1))


STEPS: dict[str, Callable[[list[Any], Weights, float | None], list[Any]]] = {
    "clip": clipped,
    "counts": counts_bounded,
    "median": coordinate_median,
    "trimmed": trimmed_mean,
    "krum": krum,
    "multi-krum": multi_krum,
}
BOUNDS = {
    "clip": (0.01, 1000.0),
    "counts": (1.0, 1000.0),
    "median": (0.0, 0.0),
    "trimmed": (0.0, 0.49),
    "krum": (0, 0.49),
    "multi-krum": (0, 0.49),
}


USUAL_SHARE = {"trimmed": 0.1, "krum": 0.2, "multi-krum": 0.2}


def _left_out(step: str, share: float | None, clients: int) -> int:
    """That share of the clients, rounded down; 0.29 of 100 are 29, though their product is a little less."""
    return int((USUAL_SHARE[step] if share is None else share) * clients + 1e-9)


def _least_one(step: str, share: float | None, clients: int) -> int:
    """The same where it may not be nobody: clients that a round is missing must not end a defence."""
    return max(1, _left_out(step, share, clients))


def _nearest(step: str, updates: list[Any], share: float | None, kept: Callable[[int, int], int]) -> list[Any]:
    learnt = [one for one in updates if float(one.samples) > 0]
    if len(learnt) < FEWEST:
        return updates
    hostile = (_left_out if step == "krum" else _least_one)(step, share, len(learnt))
    scores = krum_scores(squared_distances([one.weights for one in learnt]), hostile)
    order = scores.argsort(stable=True)[: kept(len(learnt), hostile)]
    return [learnt[place] for place in sorted(order.tolist())]


def _unanimous(updates: list[Any], combined: Callable[[Tensor], Tensor]) -> list[Any]:
    """One model for all who learnt anything; updates that nothing was learnt for stay as they are.

    `combined` makes weights of what clients say of them, [weights, clients], the smallest first.
    """
    learnt = [one for one in updates if float(one.samples) > 0]
    if not learnt:
        return updates
    model = {}
    for name, tensor in learnt[0].weights.items():
        told = zip(*(one.weights[name].flatten().split(TOGETHER) for one in learnt), strict=True)
        value = torch.cat([combined(torch.stack(part, dim=1).sort(dim=1).values) for part in told]).view(tensor.shape)
        model[name] = (value if tensor.dtype.is_floating_point else value.round()).to(tensor.dtype)
    return [one._replace(weights=model) if float(one.samples) > 0 else one for one in updates]


def _joined(tensors: Iterable[Tensor]) -> Tensor:
    """All numbers one after the other, in their own precision."""
    parts = [tensor.flatten() for tensor in tensors]
    kinds = {part.dtype for part in parts}
    if len(kinds) != 1 or not kinds.pop().is_floating_point:  # nothing between float32 and int64 keeps both
        parts = [torch.zeros(0, dtype=torch.float64), *(part.double() for part in parts)]
    return torch.cat(parts)


def _scaled(weights: Weights, received: Weights, factor: float) -> Weights:
    """The change times a factor; counters are what they are."""
    return {
        name: (received[name].double() + factor * (tensor.double() - received[name].double())).to(tensor.dtype)
        if tensor.dtype.is_floating_point
        else tensor
        for name, tensor in weights.items()
    }
