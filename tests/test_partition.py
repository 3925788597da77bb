"""Client partitions: covers, sizes, the laws they are drawn from, and SAGE's measured statistics."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from semifed.data import partition as module
from semifed.data.partition import KINDS, partition
from semifed.errors import UserError

EVEN = ("iid", "paired", "balanced-dirichlet")


def split(kind, labels, clients, alpha=0.5, seed=0):
    if kind == "shards":
        alpha = math.ceil(alpha)
    return partition(kind, np.asarray(labels), clients, alpha=alpha, rng=np.random.default_rng(seed))


def histogram(parts, labels, classes):
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])


def assert_disjoint_cover(parts, clients, total):
    assert len(parts) == clients
    assert all(part.dtype == np.int64 and part.ndim == 1 for part in parts)
    assert all(a < b for part in parts for a, b in pairwise(part.tolist()))
    assert sorted(np.concatenate(parts).tolist()) == list(range(total))


pools = st.lists(st.integers(-1, 6), max_size=120)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    labels=pools,
    clients=st.integers(1, 30),
    alpha=st.sampled_from([1e-6, 0.01, 0.1, 1.0, 30.0, 1000.0]),
    seed=st.integers(0, 2**32),
)
def test_every_sample_has_one_client(kind, labels, clients, alpha, seed):
    labels = np.array(labels, dtype=np.int64)
    parts = split(kind, labels, clients, alpha, seed)
    assert_disjoint_cover(parts, clients, len(labels))
    sizes = [len(part) for part in parts]
    if kind in EVEN:
        assert sizes == [len(part) for part in np.array_split(labels, clients)]
    if kind == "dirichlet":
        assert min(sizes) >= min(10, len(labels) // (2 * clients))
    again = split(kind, labels, clients, alpha, seed)
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_generator_decides(kind):
    labels = np.repeat(np.arange(10), 50)
    one, other = (np.concatenate(split(kind, labels, 10, seed=seed)) for seed in (0, 1))
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_order_of_labels_matters_not_their_values(kind):
    labels = np.random.default_rng(3).integers(0, 4, 300)
    renamed = np.array([-1, 7, 8, 500])[labels]
    for one, other in zip(split(kind, labels, 7), split(kind, renamed, 7), strict=True):
        np.testing.assert_array_equal(one, other)


def test_iid_does_not_look_at_labels():
    labels = np.repeat(np.arange(4), 25)
    for one, other in zip(split("iid", labels, 7), split("iid", labels[::-1], 7), strict=True):
        np.testing.assert_array_equal(one, other)


def test_iid_shares_are_those_of_the_pool():
    labels = np.repeat([0, 1, 2], [6000, 3000, 1000])
    counts = histogram(split("iid", labels, 10), labels, 3)
    assert stats.chi2_contingency(counts).pvalue > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("total", [0, 1, 3, 2000])
@pytest.mark.parametrize("clients", [1, 5, 4001])
def test_one_class_no_class_and_more_clients_than_samples(kind, total, clients):
    parts = split(kind, np.full(total, 4), clients, alpha=0.01)
    assert_disjoint_cover(parts, clients, total)


@pytest.mark.parametrize("kind", ["dirichlet", "paired", "balanced-dirichlet"])
def test_alpha_goes_from_one_class_to_even(kind):
    labels = np.repeat(np.arange(10), 1000)
    effective = [
        effective_classes(histogram(split(kind, labels, 20, alpha), labels, 10)) for alpha in (0.01, 0.1, 1, 1000)
    ]
    assert effective == sorted(effective)
    assert effective[0] < 6
    assert effective[-1] > 9.9


# --- paired -----------------------------------------------------------------------------------------------------


def effective_classes(counts):
    """Mean over clients of e^entropy."""
    perplexities = []
    for row in counts:
        shares = [n / row.sum() for n in row if n]
        perplexities.append(math.prod(p**-p for p in shares))
    return sum(perplexities) / len(perplexities)


def variation(counts, others):
    """Mean over rows of the total variation distance of class shares."""
    return float(np.mean([abs(a / a.sum() - b / b.sum()).sum() / 2 for a, b in zip(counts, others, strict=True)]))


def skew(labelled, unlabelled):
    """The seven statistics of one labelled and one unlabelled split, from class counts [clients, classes]."""
    pairs = unlabelled[0::2] + unlabelled[1::2]
    return np.array(
        [
            effective_classes(labelled),
            effective_classes(unlabelled),
            np.mean((labelled == 0).sum(axis=1)),
            np.mean((unlabelled == 0).sum(axis=1)),
            variation(labelled, unlabelled),
            variation(unlabelled, np.ones_like(unlabelled)),
            variation(pairs, np.ones_like(pairs)),
        ]
    )


# Of SAGE's own splitter with its fixed seed 0: effective classes (labelled, unlabelled), empty classes (labelled,
# unlabelled), distance labelled-unlabelled, unlabelled-uniform, union of a pair-uniform.
OF_THE_AUTHORS = {
    (10, 0.1): (6.1, 5.7, 2.0, 2.2, 0.47, 0.43, 0.016),
    (10, 0.5): (6.7, 7.2, 1.2, 0.8, 0.42, 0.32, 0.016),
    (10, 1.0): (7.8, 7.6, 0.6, 0.8, 0.39, 0.30, 0.016),
    (100, 0.1): (57, 58, 29, 19, 0.55, 0.44, 0.053),
    (100, 1.0): (67, 79, 19, 3.5, 0.42, 0.27, 0.053),
}


def balanced_pools(classes):
    return np.repeat(np.arange(classes), 5000 // classes), np.repeat(np.arange(classes), 45000 // classes)


def paired_by_loops(labels, clients, alpha, random):
    """The splitter one sample at a time, as its description reads (even number of clients)."""
    order = list(range(len(labels)))
    random.shuffle(order)
    length = int(2 / clients * len(order))
    lists = []
    for index in range(clients // 2):
        last = index == clients // 2 - 1
        members = order[index * length :] if last else order[index * length : (index + 1) * length]
        by_class = [[i for i in members if labels[i] == c] for c in range(max(labels) + 1)]
        pair = [[], []]
        while min(map(len, pair)) < math.floor(0.5 * len(members) / 2):
            pair = [[], []]
            for mine in by_class:
                shares = random.dirichlet([alpha, alpha])
                shares = [q * (len(held) < len(members) / 2) for q, held in zip(shares, pair, strict=True)]
                cut = int(shares[0] / sum(shares) * len(mine))
                pair[0] += mine[:cut]
                pair[1] += mine[cut:]
        lists += pair
    return np.array_split(np.concatenate(lists), clients)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
def test_the_loops_are_the_authors_splitter(alpha):
    """With the authors' generator the oracle below gives their numbers to the digits we have."""
    counts = []
    for labels in balanced_pools(10):
        parts = paired_by_loops(labels.tolist(), 20, alpha, np.random.RandomState(0))
        counts.append(histogram(parts, labels, 10))
    digits = np.array([0.1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.001])
    assert np.all(abs(skew(*counts) - OF_THE_AUTHORS[10, alpha]) <= 0.51 * digits)


@pytest.mark.parametrize(("classes", "alpha"), OF_THE_AUTHORS)
def test_paired_has_the_skew_of_the_authors_splits(classes, alpha):
    """The mean over seeds is within 10 % of the authors' one seed, or their seed is an ordinary one among ours."""
    pools_ = balanced_pools(classes)
    seeds = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        seeds.append(
            skew(
                *(
                    histogram(partition("paired", labels, 20, alpha=alpha, rng=rng), labels, classes)
                    for labels in pools_
                )
            )
        )
    mean, spread = np.mean(seeds, axis=0), np.std(seeds, axis=0)
    theirs = np.array(OF_THE_AUTHORS[classes, alpha])
    off = abs(mean - theirs)
    is_count_of_empty = np.array([False, False, True, True, False, False, False])
    assert np.all(off[~is_count_of_empty] <= 0.1 * theirs[~is_count_of_empty])
    assert np.all(off <= np.maximum(0.1 * theirs, 2.5 * spread))


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_paired_agrees_with_the_loops_on_uneven_classes(alpha):
    labels = np.repeat(np.arange(6), [40, 10, 90, 60, 5, 95])
    ours, loops = [], []
    for seed in range(60):
        ours.append(histogram(split("paired", labels, 6, alpha, seed), labels, 6))
        parts = paired_by_loops(labels.tolist(), 6, alpha, np.random.RandomState(seed))
        loops.append(histogram(parts, labels, 6))
    for statistic in (lambda h: np.sum(h**2, axis=0), lambda h: np.sum(h == 0, axis=0)):
        a, b = (np.array([statistic(h) for h in some], dtype=float) for some in (ours, loops))
        error = np.sqrt((a.var(axis=0) + b.var(axis=0)) / len(a)) + 1e-9
        assert np.all(abs(a.mean(axis=0) - b.mean(axis=0)) < 4.5 * error)


@settings(max_examples=15, deadline=None)
@given(total=st.sampled_from([5000, 45000]), alpha=st.sampled_from([0.01, 0.1, 1.0]), seed=st.integers(0, 999))
def test_the_union_of_a_pair_is_iid(total, alpha, seed):
    labels = np.arange(total) % 10
    counts = histogram(split("paired", labels, 20, alpha, seed), labels, 10)
    pairs = counts[0::2] + counts[1::2]
    distances = abs(pairs / pairs.sum(axis=1, keepdims=True) - 0.1).sum(axis=1) / 2
    # Sampling alone moves a slice of 500 further than one of 4500; drawing without replacement takes 10 % off.
    expected = 5 * math.sqrt(2 / math.pi * 0.09 * 0.9 / (total / 10))
    assert distances.mean() < 1.35 * expected
    assert total == 5000 or distances.mean() < 0.03


def test_with_an_odd_number_of_clients_the_last_is_iid():
    labels = np.arange(30_000) % 10
    counts = histogram(split("paired", labels, 5, alpha=0.05), labels, 10)
    distances = abs(counts / 6000 - 0.1).sum(axis=1) / 2
    assert distances[4] < 0.03
    assert distances[:4].min() > 0.2


@pytest.mark.parametrize("seed", range(20))
def test_a_pair_is_cut_class_by_class(seed):
    rng = np.random.default_rng(seed)
    counts, gammas = rng.integers(0, 40, (6, 5)), rng.gamma(0.3, size=(2, 6, 5))
    with pytest.MonkeyPatch.context() as patch:
        drawn = iter(np.log(gammas))
        patch.setattr(module, "_log_gamma", lambda alpha, shape, rng: next(drawn))
        to_first = module._paired_draw(counts, 0.3, rng)
    for pair, row in enumerate(counts.tolist()):
        held = [0, 0]
        for c, n in enumerate(row):
            share = gammas[0, pair, c] / gammas[:, pair, c].sum()
            if held[0] >= sum(row) / 2:
                share = 0
            elif held[1] >= sum(row) / 2:
                share = 1
            assert to_first[pair, c] == int(share * n)
            held = [held[0] + int(share * n), held[1] + n - int(share * n)]


def test_hopeless_pairs_keep_the_most_balanced_draw(monkeypatch):
    ratios = iter([9.0, 3.5, 99.0, 1e9] * 50)

    def given_odds(alpha, shape, rng):
        given_odds.called += 1
        return np.full(shape, math.log(next(ratios)) if given_odds.called % 2 else 0.0)

    given_odds.called = 0
    monkeypatch.setattr(module, "_log_gamma", given_odds)
    to_first = module._paired_counts(np.array([[900]]), 0.1, np.random.default_rng(0))
    assert to_first.tolist() == [[700]]


# --- dirichlet --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1e-6, 0.01, 0.1, 0.5, 1.0, 20.0, 1000.0])
def test_shares_have_the_law_of_dirichlet(alpha):
    """One share against the others is beta distributed; its log odds keep what rounds to 0 or 1 apart."""
    logarithms = module._log_gamma(alpha, (4000, 4), np.random.default_rng(5))
    log_odds = logarithms[:, 0] - special.logsumexp(logarithms[:, 1:], axis=1)
    low = stats.beta(alpha, 3 * alpha).cdf(special.expit(np.minimum(log_odds, 0)))
    high = stats.beta(3 * alpha, alpha).sf(special.expit(-np.maximum(log_odds, 0)))
    if alpha > 1e-3:
        assert stats.kstest(np.where(log_odds < 0, low, high), "uniform").pvalue > 1e-3
    assert np.isfinite(logarithms).all()
    assert abs(np.mean(log_odds > 0) - stats.beta(alpha, 3 * alpha).sf(0.5)) < 0.03


@pytest.mark.parametrize("alpha", [1.0, 5.0])
def test_the_first_class_is_spread_by_dirichlet(alpha):
    """A single class meets no cap: mean, variance and covariance of the client's shares in closed form."""
    clients, total = 4, 20_000
    shares = np.array(
        [[len(part) / total for part in split("dirichlet", np.zeros(total), clients, alpha, s)] for s in range(600)]
    )
    mean, variance = 1 / clients, (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    np.testing.assert_allclose(shares.mean(axis=0), mean, atol=5 * math.sqrt(variance / len(shares)))
    np.testing.assert_allclose(shares.var(axis=0), variance, rtol=0.25)
    off_diagonal = np.cov(shares.T)[~np.eye(clients, dtype=bool)]
    np.testing.assert_allclose(off_diagonal, -variance / (clients - 1), rtol=0.4)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=8),
    clients=st.integers(1, 12),
    alpha=st.sampled_from([0.01, 0.3, 10.0]),
    seed=st.integers(0, 999),
)
def test_a_full_client_gets_no_further_class(sizes, clients, alpha, seed):
    """Without the class it got last, each client would be below the even share."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    counts = histogram(split("dirichlet", labels, clients, alpha, seed), labels, len(sizes))
    assert np.all((counts.sum(axis=1) - counts.max(axis=1)) * clients < len(labels))


def test_no_class_is_always_the_one_that_fills_the_gaps():
    """Classes come in random order: in a fixed one the cap squeezes the last class into fewer clients."""
    labels = np.repeat(np.arange(5), 200)
    concentration = np.array(
        [((histogram(split("dirichlet", labels, 10, 0.5, s), labels, 5) / 200) ** 2).sum(axis=0) for s in range(400)]
    )
    first, last = concentration[:, 0], concentration[:, 4]
    assert abs(first.mean() - last.mean()) < 4 * math.sqrt((first.var() + last.var()) / 400)


@pytest.mark.parametrize("kind", ["dirichlet", "balanced-dirichlet", "shards", "paired"])
def test_samples_of_a_class_are_shuffled(kind):
    """The first client does not hold the first samples of its class."""
    first = split(kind, np.zeros(1000, dtype=int), 2, alpha=1)[0]
    assert not np.array_equal(first, np.arange(len(first)))
    assert abs(first.mean() - 500) < 100


def test_a_client_with_its_even_share_is_closed():
    members = [np.arange(50), np.arange(50, 100)]  # each class goes to one client whole
    for seed in range(20):
        owners = module._capped_draw(members, 2, 1e-6, np.random.default_rng(seed))
        assert np.bincount(owners, minlength=2).tolist() == [50, 50]


@pytest.mark.parametrize(("total", "clients", "least"), [(1797, 20, 10), (240, 20, 6), (90, 30, 1), (59, 30, 0)])
def test_everybody_has_enough_even_where_no_draw_gives_it(total, clients, least):
    for seed in range(10):
        assert min(map(len, split("dirichlet", np.arange(total) % 10, clients, 0.01, seed))) >= least


def test_the_draw_that_lacks_least_is_topped_up(monkeypatch):
    draws = [np.repeat([0, 1, 2], sizes) for sizes in ([100, 0, 0], [60, 36, 4], [90, 9, 1])]
    left = iter(draws * module.ATTEMPTS)
    monkeypatch.setattr(module, "_capped_draw", lambda *_: next(left))
    parts = split("dirichlet", np.zeros(100, dtype=int), 3)
    assert [len(part) for part in parts] == [54, 36, 10]
    assert set(range(96, 100)) <= set(parts[2].tolist())


def topped_up_sizes(sizes, wanted):
    sizes = list(sizes)
    while min(sizes) < wanted:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(min(sizes))] += 1
    return sorted(sizes)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=10).filter(any), seed=st.integers(0, 99))
def test_top_up_takes_from_the_largest(sizes, seed):
    wanted = min(10, sum(sizes) // (2 * len(sizes)))
    owners = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    repaired = module._topped_up(owners, len(sizes), wanted, np.random.default_rng(seed))
    after = np.bincount(repaired, minlength=len(sizes))
    assert sorted(after.tolist()) == topped_up_sizes(sizes, wanted)
    moved = owners != repaired
    assert moved.sum() == sum(max(wanted - size, 0) for size in sizes)
    assert all(sizes[receiver] < wanted for receiver in repaired[moved])


# --- balanced-dirichlet -----------------------------------------------------------------------------------------


def test_draws_without_replacement_have_the_law_of_choice():
    left, weights, size = np.array([3, 0, 4, 2]), np.array([0.6, 0.1, 0.05, 0.25]), 4
    rng = np.random.default_rng(7)
    class_of = np.repeat(np.arange(4), left)
    per_sample = weights[class_of] / weights[class_of].sum()
    ours, theirs = Counter(), Counter()
    for _ in range(4000):
        ours[tuple(module._drawn_counts(left, np.log(weights) + 3, size, rng).tolist())] += 1
        chosen = class_of[rng.choice(9, size, replace=False, p=per_sample)]
        theirs[tuple(np.bincount(chosen, minlength=4).tolist())] += 1
    outcomes = [o for o in ours.keys() | theirs.keys() if ours[o] + theirs[o] >= 10]
    table = [[some[o] for o in outcomes] for some in (ours, theirs)]
    assert len(outcomes) > 5
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_when_a_class_runs_out_the_next_likely_one_follows():
    left = np.array([5, 50, 7, 9])
    log_weights = np.array([0.0, -90_000.0, -30_000.0, -60_000.0])  # all but one underflow as weights
    for size, expected in ((3, [3, 0, 0, 0]), (8, [5, 0, 3, 0]), (22, [5, 1, 7, 9]), (71, [5, 50, 7, 9])):
        taken = module._drawn_counts(left, log_weights, size, np.random.default_rng(size))
        assert taken.tolist() == expected


def test_each_client_has_its_own_preference():
    labels = np.repeat(np.arange(4), 1000)
    favourites = [
        histogram(split("balanced-dirichlet", labels, 8, 0.01, seed), labels, 4)[0].argmax() for seed in range(200)
    ]
    assert stats.chisquare(np.bincount(favourites, minlength=4)).pvalue > 1e-3


# --- shards -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_client", [1, 2, 5])
def test_a_client_has_at_most_its_shards_of_classes(per_client):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 100))
    counts = histogram(split("shards", labels, 20, per_client), labels, 10)
    assert (counts.sum(axis=1) == 50).all()
    assert (counts > 0).sum(axis=1).max() == per_client
    assert set((counts % (50 // per_client)).ravel()) == {0}


def test_shards_are_runs_in_the_order_of_labels():
    labels = np.arange(103)  # a class per sample: the order is fixed
    for part in split("shards", labels, 4, 3):
        runs = np.split(part, np.flatnonzero(np.diff(part) > 1) + 1)
        assert len(runs) <= 3
        assert len(part) in range(3 * 8, 3 * 9 + 1)


def test_more_shards_than_samples_cost_nothing():
    assert_disjoint_cover(split("shards", np.zeros(50, dtype=int), 100_000, 1e18), 100_000, 50)


# --- mistakes and size ------------------------------------------------------------------------------------------


def test_a_misspelt_kind_is_told_with_the_nearest():
    with pytest.raises(UserError, match=r"scenario\.partition.*'dirichlett'.*did you mean 'dirichlet'"):
        split("dirichlett", [0], 1)


@pytest.mark.parametrize("kind", ["dirichlet", "paired", "balanced-dirichlet", "shards"])
@pytest.mark.parametrize("alpha", [None, 0, -1.0, math.nan, math.inf, 1e-7])
def test_alpha_is_checked_where_it_is_used(kind, alpha):
    with pytest.raises(UserError, match=rf"scenario\.alpha.*'{kind}'"):
        partition(kind, np.zeros(4, dtype=int), 2, alpha=alpha, rng=np.random.default_rng(0))
    partition("iid", np.zeros(4, dtype=int), 2, alpha=alpha, rng=np.random.default_rng(0))


def test_half_a_shard_is_a_mistake():
    with pytest.raises(UserError, match=r"scenario\.alpha: found 1\.5.*whole number"):
        partition("shards", np.zeros(4, dtype=int), 2, alpha=1.5, rng=np.random.default_rng(0))


@pytest.mark.parametrize("clients", [0, -3])
def test_there_is_at_least_one_client(clients):
    with pytest.raises(UserError, match=rf"scenario\.clients.*{clients}"):
        split("iid", [0, 1], clients)


def test_labels_are_one_per_sample():
    with pytest.raises(ValueError, match=r"shape \(2, 2\)"):
        split("iid", [[0, 1], [1, 0]], 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_thousand_clients(kind):
    labels = np.arange(1_000_000) % 10
    parts = split(kind, labels, 100_000, alpha=0.1)
    assert len(np.unique(np.concatenate(parts))) == len(labels)
    assert min(map(len, parts)) >= (5 if kind == "dirichlet" else 10)
