"""Who holds what: ways to split a pool of labels over clients, as positions into that pool."""

import math

import numpy as np
import numpy.typing as npt

from semifed.errors import UserError, nearest

Part = npt.NDArray[np.int64]
"""Positions into the given labels that one client holds, in increasing order."""

KINDS: tuple[str, ...] = ("iid", "dirichlet", "paired", "balanced-dirichlet", "shards")
"""Names of the splits computed here; `folders` is given by the data."""

# Every class has had a single owner long before; much further down, dividing by alpha overflows.
SMALLEST_ALPHA = 1e-6
ENOUGH_SAMPLES = 10  # SemiFL draws again until every client has that many
ATTEMPTS = 25  # the papers' loops have no limit


def partition(
    kind: str, labels: npt.NDArray[np.integer], clients: int, *, alpha: float | None, rng: np.random.Generator
) -> list[Part]:
    """Positions of each client's samples: a disjoint cover of `range(len(labels))`, some empty if few.

    `alpha` is the Dirichlet concentration, or for `shards` the number of shards per client; `iid` ignores it.

    >>> ten = np.repeat(np.arange(5), 2)
    >>> [len(part) for part in partition("iid", ten, 3, alpha=None, rng=np.random.default_rng(0))]
    [4, 3, 3]
    """
    if kind not in KINDS:
        raise UserError(f"scenario.partition: '{kind}' is not a way to split the data; {nearest(kind, KINDS)}")
    if clients < 1:
        raise UserError(f"scenario.clients: expected at least 1, found {clients}")
    if np.ndim(labels) != 1:
        raise ValueError(f"expected one label per sample, found labels of shape {np.shape(labels)}")
    names, classes = np.unique(labels, return_inverse=True)
    if kind == "iid":
        owners = _iid(len(classes), clients, rng)
    elif kind == "shards":
        owners = _shards(classes, clients, _shards_per_client(alpha), rng)
    elif kind == "dirichlet":
        owners = _dirichlet(classes, len(names), clients, _concentration(kind, alpha), rng)
    elif kind == "paired":
        owners = _paired(classes, len(names), clients, _concentration(kind, alpha), rng)
    else:
        owners = _balanced_dirichlet(classes, len(names), clients, _concentration(kind, alpha), rng)
    ends = np.cumsum(np.bincount(owners, minlength=clients))
    return np.split(np.argsort(owners, kind="stable").astype(np.int64, copy=False), ends[:-1])


def _concentration(kind: str, alpha: float | None) -> float:
    expected = f"partition '{kind}' needs a number of at least {SMALLEST_ALPHA:g} (0.1 is skewed, 100 almost even)"
    if alpha is None:
        raise UserError(f"scenario.alpha: missing; {expected}")
    if not SMALLEST_ALPHA <= alpha < math.inf:
        raise UserError(f"scenario.alpha: found {alpha:g}; {expected}")
    return float(alpha)


def _shards_per_client(alpha: float | None) -> int:
    expected = "partition 'shards' needs the number of shards per client, a whole number of at least 1"
    if alpha is None:
        raise UserError(f"scenario.alpha: missing; {expected}")
    if not (1 <= alpha < math.inf and alpha == int(alpha)):
        raise UserError(f"scenario.alpha: found {alpha:g}; {expected}")
    return int(alpha)


def _iid(total: int, clients: int, rng: np.random.Generator) -> Part:
    owners = np.empty(total, np.int64)
    owners[rng.permutation(total)] = np.repeat(np.arange(clients), _even_sizes(total, clients))
    return owners


def _shards(classes: Part, clients: int, per_client: int, rng: np.random.Generator) -> Part:
    """McMahan et al. 2017: sort by label, cut into shards, deal every client the same number of them."""
    total = len(classes)
    per_client = min(per_client, max(total, 1))
    filled = min(total, clients * per_client)  # shards beyond the samples are empty and need no owner
    dealt = rng.choice(clients * per_client, filled, replace=False) // per_client
    owners = np.empty(total, np.int64)
    owners[_shuffled_by_class(classes, rng)] = np.repeat(dealt, _even_sizes(total, max(filled, 1))[:filled])
    return owners


def _dirichlet(classes: Part, class_count: int, clients: int, alpha: float, rng: np.random.Generator) -> Part:
    """SemiFL's split: every class over all clients by Dir(alpha), closed to those that hold their even share.

    The classes come in random order and shuffled, because with the cap the last ones go where room is left.
    """
    wanted = min(ENOUGH_SAMPLES, len(classes) // (2 * clients))
    ends = np.cumsum(np.bincount(classes, minlength=class_count))
    members = np.split(_shuffled_by_class(classes, rng), ends)[:-1]
    fewest_missing = math.inf
    for _ in range(ATTEMPTS):
        owners = _capped_draw(members, clients, alpha, rng)
        missing = np.maximum(wanted - np.bincount(owners, minlength=clients), 0).sum()
        if missing < fewest_missing:
            fewest_missing, best = missing, owners
        if missing == 0:
            return owners
    return _topped_up(best, clients, wanted, rng)


def _capped_draw(members: list[Part], clients: int, alpha: float, rng: np.random.Generator) -> Part:
    total = sum(map(len, members))
    owners = np.empty(total, np.int64)
    sizes = np.zeros(clients, np.int64)
    for index in rng.permutation(len(members)):
        # Somebody is below the even share as long as a sample is left, so the shares never all vanish.
        has_room = sizes * clients < total
        log_shares = np.where(has_room, _log_gamma(alpha, (clients,), rng), -np.inf)
        shares = np.cumsum(np.exp(log_shares - log_shares.max()))
        cuts = np.floor(shares / shares[-1] * len(members[index])).astype(np.int64)
        given = np.diff(cuts, prepend=0)
        owners[members[index]] = np.repeat(np.arange(clients), given)
        sizes += given
    return owners


def _topped_up(owners: Part, clients: int, wanted: int, rng: np.random.Generator) -> Part:
    """Move random samples, always from the client that is largest then, until everybody has `wanted`."""
    sizes = np.bincount(owners, minlength=clients)
    missing = np.maximum(wanted - sizes, 0)
    # Taking from the largest one by one lowers them to a common level: the highest that frees enough.
    low, high = wanted, int(sizes.max())
    while low < high:
        middle = (low + high + 1) // 2
        if np.maximum(sizes - middle, 0).sum() >= missing.sum():
            low = middle
        else:
            high = middle - 1
    given = np.maximum(sizes - low, 0)
    given[np.flatnonzero(given)[: given.sum() - missing.sum()]] -= 1
    grouped = _shuffled_by_class(owners, rng)
    within = np.arange(len(owners)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    moved = grouped[within < np.repeat(given, sizes)]
    result = owners.copy()
    result[moved] = rng.permutation(np.repeat(np.arange(clients), missing))
    return result


def _paired(classes: Part, class_count: int, clients: int, alpha: float, rng: np.random.Generator) -> Part:
    """SAGE's split: IID slices, each divided between two clients by Dir(alpha), then re-cut to equal sizes.

    With an odd number of clients the last slice is half as long and belongs to one.
    """
    total = len(classes)
    pairs, slices = clients // 2, (clients + 1) // 2
    slice_of = np.minimum(np.arange(total) // max(2 * total // clients, 1), slices - 1)
    shuffled = rng.permutation(total)
    cell = slice_of * class_count + classes[shuffled]
    by_cell = np.argsort(cell, kind="stable")
    shuffled, cell = shuffled[by_cell], cell[by_cell]

    counts = np.bincount(cell, minlength=slices * class_count).reshape(slices, class_count)
    to_first = counts.copy()
    to_first[:pairs] = _paired_counts(counts[:pairs], alpha, rng)
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts.ravel(), counts.ravel())
    holder = 2 * (cell // max(class_count, 1)) + (within >= to_first.ravel()[cell])

    # Each holder's samples are in order of class: the re-cut moves first or last classes to a neighbour.
    owners = np.empty(total, np.int64)
    owners[shuffled[np.argsort(holder, kind="stable")]] = np.repeat(np.arange(clients), _even_sizes(total, clients))
    return owners


def _paired_counts(counts: Part, alpha: float, rng: np.random.Generator) -> Part:
    """How many of `counts` [pairs, classes] go to the first of each pair; the lesser has at least 1/4."""
    lengths = counts.sum(axis=1)
    best, best_lesser = np.zeros_like(counts), np.full(len(counts), -1)
    open_pairs = np.arange(len(counts))
    for _ in range(ATTEMPTS):
        drawn = _paired_draw(counts[open_pairs], alpha, rng)
        first = drawn.sum(axis=1)
        lesser = np.minimum(first, lengths[open_pairs] - first)
        better = lesser > best_lesser[open_pairs]
        best[open_pairs[better]], best_lesser[open_pairs[better]] = drawn[better], lesser[better]
        open_pairs = open_pairs[lesser < lengths[open_pairs] // 4]
        if len(open_pairs) == 0:
            break
    return best


def _paired_draw(counts: Part, alpha: float, rng: np.random.Generator) -> Part:
    log_odds = _log_gamma(alpha, counts.shape, rng) - _log_gamma(alpha, counts.shape, rng)
    shares = np.exp(-np.logaddexp(0, -log_odds))
    drawn = np.empty_like(counts)
    lengths = counts.sum(axis=1)
    first, second = np.zeros_like(lengths), np.zeros_like(lengths)
    for index, count in enumerate(counts.T):
        # Both are full only when nothing is left, so no share is 0/0 as it can be in the authors' code.
        share = np.where(2 * first >= lengths, 0, np.where(2 * second >= lengths, 1, shares[:, index]))
        drawn[:, index] = np.floor(share * count)
        first += drawn[:, index]
        second += count - drawn[:, index]
    return drawn


def _balanced_dirichlet(classes: Part, class_count: int, clients: int, alpha: float, rng: np.random.Generator) -> Part:
    """FedLPA's split: client after client draws an even share of what is left, by its own Dir(alpha)."""
    order = _shuffled_by_class(classes, rng)
    left = np.bincount(classes, minlength=class_count)
    start = np.cumsum(left) - left
    owners = np.full(len(classes), clients - 1, np.int64)
    for client, size in enumerate(_even_sizes(len(classes), clients)[:-1]):
        taken = _drawn_counts(left, _log_gamma(alpha, (class_count,), rng), size, rng)
        within = np.arange(size) - np.repeat(np.cumsum(taken) - taken, taken)
        owners[order[np.repeat(start, taken) + within]] = client
        start += taken
        left -= taken
    return owners


def _drawn_counts(left: Part, log_weights: npt.NDArray[np.float64], size: int, rng: np.random.Generator) -> Part:
    """How many of each class are in `size` weighted draws without replacement from `left` [classes] samples.

    Drawing one by one is a race of exponential clocks, one per sample, with its weight as rate: the first
    `size` to ring are drawn. Only the first `size` of a class matter; logarithms keep weights near 0 apart.
    """
    racing = np.minimum(left, size)
    begins = np.cumsum(racing) - racing
    class_of = np.repeat(np.arange(len(left)), racing)
    still_racing = np.repeat(left + begins, racing) - np.arange(len(class_of))
    rings = np.cumsum(rng.standard_exponential(len(class_of)) / still_racing)
    rings -= np.concatenate(([0.0], rings))[np.repeat(begins, racing)]
    log_rings = np.log(np.maximum(rings, np.finfo(np.float64).tiny)) - np.repeat(log_weights, racing)
    drawn = np.argpartition(log_rings, size - 1)[:size] if size else np.empty(0, np.int64)
    return np.bincount(class_of[drawn], minlength=len(left))


def _log_gamma(alpha: float, shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Logarithms of Gamma(alpha) variables, whose softmax is Dir(alpha) with no share lost to underflow.

    Gamma(alpha) = Gamma(alpha + 1) U^(1/alpha), and -log U is exponential.
    """
    logarithms: npt.NDArray[np.float64] = np.log(rng.standard_gamma(alpha + 1, shape))
    return logarithms - rng.standard_exponential(shape) / alpha


def _even_sizes(total: int, parts: int) -> Part:
    return total // parts + (np.arange(parts) < total % parts).astype(np.int64)


def _shuffled_by_class(classes: Part, rng: np.random.Generator) -> Part:
    """Positions in order of class, random within each."""
    shuffled = rng.permutation(len(classes))
    return shuffled[np.argsort(classes[shuffled], kind="stable")]
