"""Classifier rows as proxies of the classes: ProxyFL's tuning at the server, its pool at clients, its prior."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from semifed.aggregate import shares
from semifed.errors import UserError
from semifed.losses import mean
from semifed.models.network import Output
from semifed.net import Net
from semifed.targets import Opinion

WIDEST_MARGIN = 100.0  # the authors' bound
LEAST_SIMILARITY = 1e-6  # rows less alike are no negatives, in the authors' code
NEAREST = 1e-6  # a smaller distance between proxies has no direction
GRAIN = 0.01  # about how far one step on all rows at once moves a proxy
MOST_COUNTED = 1e12  # of one class by one client: keeps sums finite, whatever is claimed

EMBEDDING, PROXY_EMBEDDING = "embedding", "proxy_embedding"  # W_f of features, W_p of classifier rows
HEADS = {EMBEDDING: "linear(features)", PROXY_EMBEDDING: "linear(features, no-bias)"}

Anchor = Literal["local", "global"]
Count = Annotated[int, Field(ge=0, le=1_000_000)]
AtLeastOne = Annotated[int, Field(ge=1)]


class Tuning(NamedTuple):
    """How global proxies are tuned; "rescale" takes only their length from it and leaves them where they point."""

    mode: Literal["on", "rescale", "off"]
    steps: int  # on four rows each, as the authors count them: Q M C / b
    lr: float
    batch: int  # rows a step; 0 is all of them, in fewer and longer steps
    anchor: Anchor
    margin: bool


def margin_of(average: Tensor) -> Tensor:
    """γ = max_c min_{c'≠c} ‖Ω̄^c − Ω̄^c'‖ of proxies [classes, d], at most 100."""
    apart = torch.cdist(average, average).fill_diagonal_(torch.inf)
    return apart.min(dim=1).values.max().clamp(max=WIDEST_MARGIN)


def tuning_slope(tuned: Tensor, local: Tensor, pairs: Tensor, anchor: Anchor, margin: Tensor | float) -> Tensor:
    """Slope of the tuning loss (eq. 2) at proxies [classes, d], mean over pairs m · classes + c.

    With the local anchor ω_m^c must find its own among the global proxies, CE(−‖ω_m^c − Ω^c'‖ over c', c); with the
    global one Ω^c must find its own among those of client m, local [clients, classes, d]. The margin lengthens the
    distance to the own one. By hand: autograd takes two to six times as long.
    """
    classes = len(tuned)
    client, label = pairs // classes, pairs % classes
    if anchor == "local":
        rows = local[client, label]
        pull = _pull(torch.cdist(rows, tuned), label, margin) / len(pairs)
        return pull.sum(dim=0)[:, None] * tuned - pull.T @ rows
    slope = torch.zeros_like(tuned)
    for one in client.unique().tolist():
        own = label[client == one]
        pull = _pull(torch.cdist(tuned[own], local[one]), own, margin) / len(pairs)
        slope.index_add_(0, own, pull.sum(dim=1, keepdim=True) * tuned[own] - pull @ local[one])
    return slope


def _pull(distance: Tensor, label: Tensor, margin: Tensor | float) -> Tensor:
    """d CE / d distance, over the distance: its product with a difference of proxies is the slope at one of them."""
    own = F.one_hot(label, distance.shape[1]).to(distance.dtype)
    share = (-(distance + margin * own)).softmax(dim=1)
    return torch.where(distance > NEAREST, (own - share) / distance, 0.0)


def tuned(average: Tensor, local: Sequence[Tensor], tuning: Tuning, stream: torch.Generator) -> Tensor:
    """Global proxy tuning, from the clients' average down the slope at their own proxies, each [classes, d].

    Many small steps on few rows and few long ones on all rows follow the same curve as far: lr · steps.
    """
    if tuning.mode == "off" or not local:
        return average
    moved, rows = average.double(), torch.stack(list(local)).double()
    margin = margin_of(moved) if tuning.margin else 0.0
    for pairs, rate in _steps(len(rows) * len(moved), len(moved), tuning, stream):
        moved = moved - rate * tuning_slope(moved, rows, pairs, tuning.anchor, margin)
    if tuning.mode == "rescale":
        moved = average * (moved.norm() / average.double().norm().clamp(min=NEAREST))
    return moved.to(average.dtype)


def _steps(pairs: int, classes: int, tuning: Tuning, stream: torch.Generator) -> Iterator[tuple[Tensor, float]]:
    """Which pairs each step sees, and its rate."""
    if tuning.batch == 0:
        way = tuning.lr * tuning.steps
        count = -int(-way // (classes * GRAIN))
        yield from ((torch.arange(pairs), way / count) for _ in range(count))
        return
    left = tuning.steps
    while left:
        epoch = torch.randperm(pairs, generator=stream).split(tuning.batch)[:left]
        yield from ((part, tuning.lr) for part in epoch)
        left -= len(epoch)


def change(average: Tensor, tuned: Tensor) -> dict[str, float]:
    """How much longer tuning made the proxies, and the mean cosine with where they pointed."""
    return {
        "proxy_scale": float(tuned.norm() / average.norm().clamp(min=NEAREST)),
        "proxy_cosine": float(F.cosine_similarity(average, tuned, dim=1).mean()),
    }


def category_sets(probabilities: Tensor, sure: Tensor, prior: Tensor, categories: Literal["prior"] | int) -> Tensor:
    """What each image may be, [n, classes] bool: its likeliest class where sure, else all likelier than their prior.

    A number instead of "prior" takes the likeliest so many. No set is empty: at worst it is the likeliest class.
    """
    best = F.one_hot(probabilities.argmax(dim=1), probabilities.shape[1]).bool()
    if categories == "prior":
        wide = probabilities > prior
    else:
        top = probabilities.topk(min(categories, probabilities.shape[1]), dim=1).indices
        wide = torch.zeros_like(best).scatter(1, top, True)
    return torch.where(sure[:, None] | ~wide.any(dim=1, keepdim=True), best, wide)


def positive_shares(sets: Tensor, sure: Tensor, probabilities: Tensor) -> Tensor:
    """How much of each proxy an image's positive holds, [n, classes]: all of one where sure, else its set by weight."""
    return sets * torch.where(sure[:, None], 1.0, probabilities)


def pool_contrast(unit: Tensor, sets: Tensor, positive: Tensor) -> Tensor:
    """−log of the positive's part in the pool for the last rows of a batch, as many as there are positives, [a].

    The pool of a row is its positive [a, d] and those of all rows [n, d] with a disjoint set [n, classes]; 0 for a row
    without such negatives.
    """
    first = len(unit) - len(positive)
    similarity = unit[first:] @ unit.T
    given = sets.to(unit.dtype)
    negative = (given[first:] @ given.T == 0) & (similarity.detach() >= LEAST_SIMILARITY)
    own = (unit[first:] * positive).sum(dim=1)
    pool = torch.cat([own[:, None], similarity.masked_fill(~negative, -torch.inf)], dim=1)
    return pool.logsumexp(dim=1) - own


class Rows(NamedTuple):
    """Whose features are in the pool, and what is thought of the images."""

    labelled: Opinion  # they only serve as negatives
    unlabelled: Opinion  # of the weak view, and taken over for the strong one
    weights: Tensor  # [n, classes], of proxies in the positive of an unsure row


class Pool(NamedTuple):
    """How the positive-negative proxy pool is made."""

    prior: Tensor  # [classes]
    categories: Literal["prior"] | int
    means: Literal["one", "separate"]


def contrast(net: Net, views: Sequence[Output], rows: Rows, pool: Pool) -> Tensor:
    """ICPL's loss (eq. 7) from the labelled, weak and strong views: unlabelled rows learn, all rows are the pool.

    One mean over the rows that learn, or that of the sure and that of the unsure added; without gradient where no row
    has a negative. Features and classifier rows meet as they are, or through the heads made for it if there are any.
    """
    features = torch.cat([view.heads.get(EMBEDDING, view.features) for view in views])
    proxies = net.parameter(net.class_rows)
    if PROXY_EMBEDDING in net.network.heads:
        proxies = net.head(PROXY_EMBEDDING, proxies)
    known, sets = (category_sets(part.probabilities, part.sure, pool.prior, pool.categories) for part in rows[:2])
    positive = positive_shares(sets, rows.unlabelled.sure, rows.weights) @ F.normalize(proxies, dim=1)
    values = pool_contrast(F.normalize(features, dim=1), torch.cat([known, sets, sets]), positive.repeat(2, 1))
    sure = rows.unlabelled.sure.repeat(2)
    value = mean(values) if pool.means == "one" else mean(values[sure]) + mean(values[~sure])
    return value if values.any() else value.detach()


def updated_prior(prior: Tensor, claims: Sequence[Tensor], rule: Literal["ema", "round"], decay: float, /) -> Tensor:
    """The global prior [classes] after a round: the pooled counts by moving average, or the mean of clients' shares.

    It stays a distribution whatever clients claim: what is no count counts as 0, who counted nothing is not heard.
    """
    counts = [
        claim.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(0, MOST_COUNTED)
        for claim in claims
        if claim.shape == prior.shape
    ]
    told = [count for count in counts if count.sum() > 0]
    if not told:
        return prior
    if rule == "round":
        fresh = torch.stack([shares(count) for count in told]).mean(dim=0)
    else:
        fresh = decay * prior.double() + (1 - decay) * shares(torch.stack(told).sum(dim=0))
    return shares(fresh).to(prior.dtype)


def class_count(net: Net, *, compared: bool) -> int:
    """How many classes a network has; where features are compared with its classifier's rows, that must be possible."""
    rows = net.parameter(net.class_rows).detach()
    if compared and net.class_rows != "classifier.weight":
        raise UserError("model.head: proxies are the rows of a linear classifier on the features; use 'linear'")
    if EMBEDDING in net.network.heads:
        given, asked = (net.head(name, rows).shape[1] for name in (PROXY_EMBEDDING, EMBEDDING))
        if given != asked:
            raise UserError(
                f"model.heads.{PROXY_EMBEDDING}: its {given} outputs are compared with the {asked} of "
                f"model.heads.{EMBEDDING}; give both the same number"
            )
    return len(rows)
