"""Metrics against scikit-learn, loops over all pairs or thresholds, and cases worked out by hand."""

import math
from collections import Counter
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from semifed.metrics import (
    accuracy,
    ari,
    aupr,
    auroc,
    calibration_histogram,
    confusion,
    expected_calibration_error,
    fpr_at_tpr,
    hungarian_accuracy,
    nmi,
    oscr,
    overall_auroc,
    per_class_accuracy,
)

# Small whole numbers tie heavily; the floats hardly ever.
some_scores = st.one_of(
    st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    st.lists(st.floats(-1e3, 1e3, allow_subnormal=False), min_size=1, max_size=40),
)
labels = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60)


def as_binary(known, unknown):
    return np.repeat([0, 1], [len(known), len(unknown)]), np.array([*known, *unknown], dtype=np.float64)


# --- accuracy and confusion -------------------------------------------------------------------------------------


@given(labels)
def test_confusion_is_that_of_scikit_learn(pairs):
    predicted, truth = map(np.array, zip(*pairs, strict=True))
    ours = confusion(predicted, truth, 5)
    np.testing.assert_array_equal(ours, sk.confusion_matrix(truth, predicted, labels=range(5)))
    assert accuracy(predicted, truth) == pytest.approx(sk.accuracy_score(truth, predicted))
    recalls = per_class_accuracy(predicted, truth, 5)
    for label in range(5):
        hits = [guess == label for guess, answer in pairs if answer == label]
        assert recalls[label] == (sum(hits) / len(hits) if hits else pytest.approx(math.nan, nan_ok=True))


def test_confusion_has_true_classes_as_rows():
    assert confusion([1, 1, 2], [0, 0, 2], 3).tolist() == [[0, 2, 0], [0, 0, 0], [0, 0, 1]]


def test_a_rejected_sample_is_a_mistake():
    assert accuracy([-1, 1], [0, 1]) == 0.5
    assert per_class_accuracy([-1, 0, 1], [0, 0, 1], 2) == [0.5, 1.0]


def test_no_sample_has_no_accuracy():
    assert math.isnan(accuracy([], []))
    assert all(map(math.isnan, per_class_accuracy([], [], 3)))
    assert confusion([], [], 2).tolist() == [[0, 0], [0, 0]]


def test_labels_outside_the_classes_are_refused():
    with pytest.raises(ValueError, match=r"predicted classes: expected 0 to 1, found -1 to 0"):
        confusion([-1, 0], [0, 1], 2)
    with pytest.raises(ValueError, match=r"true classes: expected 0 to 1, found 0 to 2"):
        per_class_accuracy([0, 1], [0, 2], 2)
    with pytest.raises(ValueError, match="true classes"):
        confusion([0, 1], [0, 2], 2)


def test_what_is_no_label_is_refused():
    with pytest.raises(ValueError, match=r"shape \(2, 3\)"):
        accuracy(torch.zeros(2, 3), [0, 1])
    with pytest.raises(ValueError, match="found 2 and 3"):
        accuracy([0, 1], [0, 1, 2])
    with pytest.raises(ValueError, match="whole numbers"):
        accuracy([0.5, 1.0], [0, 1])


# --- unknown scores ---------------------------------------------------------------------------------------------


@given(some_scores, some_scores)
def test_auroc_counts_pairs(known, unknown):
    wins = [1.0 if u > k else 0.5 if u == k else 0.0 for u in unknown for k in known]
    assert auroc(known, unknown) == pytest.approx(sum(wins) / len(wins), abs=1e-12)
    assert auroc(known, unknown) == pytest.approx(sk.roc_auc_score(*as_binary(known, unknown)), abs=1e-12)
    assert auroc(unknown, known) == pytest.approx(1 - auroc(known, unknown), abs=1e-12)


@given(some_scores, some_scores)
def test_aupr_is_average_precision(known, unknown):
    is_unknown, scores = as_binary(known, unknown)
    assert aupr(known, unknown, "unknown") == pytest.approx(sk.average_precision_score(is_unknown, scores))
    assert aupr(known, unknown, "known") == pytest.approx(sk.average_precision_score(1 - is_unknown, -scores))
    assert aupr(known, unknown) == aupr(known, unknown, "known")


@given(some_scores, some_scores, st.sampled_from([0.05, 0.5, 0.9, 0.95, 1.0]))
def test_fpr_is_that_of_the_first_sufficient_threshold(known, unknown, tpr):
    for threshold in sorted(set(known)):
        if sum(k <= threshold for k in known) * 100 >= round(tpr * 100) * len(known):
            break
    expected = sum(u <= threshold for u in unknown) / len(unknown)
    assert fpr_at_tpr(known, unknown, tpr) == pytest.approx(expected)


def test_unknown_scores_by_hand():
    known, unknown = [0.1, 0.2, 0.3, 0.9], [0.3, 0.8, 1.0]
    assert auroc(known, unknown) == pytest.approx((2.5 + 3 + 4) / 12)
    assert fpr_at_tpr(known, unknown, 0.75) == pytest.approx(1 / 3)
    assert fpr_at_tpr(known, unknown, 0.95) == pytest.approx(2 / 3)
    # The unknowns in falling order: 1 of 1, then 2 of 3 at 0.8, then 3 of 5 at the tie of 0.3.
    assert aupr(known, unknown, "unknown") == pytest.approx((1 + 2 / 3 + 3 / 5) / 3)
    # The knowns in rising order: 1 of 1, 2 of 2, 3 of 4 at the tie, 4 of 6.
    assert aupr(known, unknown, "known") == pytest.approx((1 + 1 + 3 / 4 + 4 / 6) / 4)


def test_separated_reversed_and_constant_scores():
    low, high = [0, 1, 2], [3, 4]
    assert (auroc(low, high), aupr(low, high), fpr_at_tpr(low, high)) == (1, 1, 0)
    assert (auroc(high, low), fpr_at_tpr(high, low)) == (0, 1)
    flat, more = [7.0] * 30, [7.0] * 10
    assert (auroc(flat, more), aupr(flat, more), aupr(flat, more, "unknown")) == (0.5, 0.75, 0.25)
    assert fpr_at_tpr(flat, more) == 1


def test_the_share_of_knowns_is_counted_exactly():
    """0.07 times 100 is more than 7 in floating point; the eighth known must not be asked for."""
    assert fpr_at_tpr(range(100), [6, 7], 0.07) == 0.5
    assert fpr_at_tpr(range(20), [18, 19], 0.95) == 0.5
    assert fpr_at_tpr(range(21), [18, 19, 20], 0.95) == pytest.approx(2 / 3)


@given(some_scores, some_scores)
def test_only_the_order_of_scores_matters(known, unknown):
    ranks = {score: rank for rank, score in enumerate(sorted({*known, *unknown}))}
    known_ranks, unknown_ranks = ([math.exp(ranks[s] / 10) for s in some] for some in (known, unknown))
    for metric in (auroc, aupr, fpr_at_tpr):
        assert metric(known, unknown) == metric(known_ranks, unknown_ranks)


@pytest.mark.parametrize("metric", [auroc, aupr, fpr_at_tpr, lambda k, u: oscr(k, [True] * len(k), u)])
def test_one_kind_alone_says_nothing(metric):
    for known, unknown in (([], [1.0]), ([1.0], []), ([], [])):
        assert math.isnan(metric(known, unknown))


@pytest.mark.parametrize("metric", [auroc, aupr, fpr_at_tpr, lambda k, u: oscr(k, [True] * len(k), u)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_must_be_finite(metric, bad):
    with pytest.raises(ValueError, match="known scores: 1 of 2 are not finite"):
        metric([0.0, bad], [1.0])
    with pytest.raises(ValueError, match="unknown scores: 1 of 3 are not finite"):
        metric([0.0], [1.0, bad, 2.0])


def test_settings_are_checked():
    with pytest.raises(ValueError, match="'known' or 'unknown', found 'in'"):
        aupr([0.0], [1.0], "in")
    for tpr in (0, -0.1, 1.01, math.nan):
        with pytest.raises(ValueError, match="tpr"):
            fpr_at_tpr([0.0], [1.0], tpr)


def test_overall_auroc_gives_the_seen_half_the_weight():
    assert overall_auroc(0.8, [0.5, 0.6, 1.0]) == pytest.approx((0.8 + 0.7) / 2)
    assert overall_auroc(0.8, []) == 0.8
    assert math.isnan(overall_auroc(0.8, [0.5, math.nan]))


@given(some_scores, some_scores, st.integers(0, 2**40))
def test_oscr_is_the_area_under_its_curve(known, unknown, bits):
    correct = [bool(bits >> i & 1) for i in range(len(known))]
    curve = [(0.0, 0.0)]
    for threshold in sorted({*known, *unknown}):
        accepted_right = sum(right and k <= threshold for k, right in zip(known, correct, strict=True))
        accepted_unknown = sum(u <= threshold for u in unknown)
        curve.append((accepted_unknown / len(unknown), accepted_right / len(known)))
    fpr, ccr = zip(*curve, strict=True)
    assert oscr(known, correct, unknown) == pytest.approx(np.trapezoid(ccr, fpr), abs=1e-12)


def test_oscr_of_perfect_and_useless_models():
    assert oscr([0, 1], [True, True], [2, 3]) == 1
    assert oscr([0, 1], [True, False], [2, 3]) == 0.5
    assert oscr([0, 1], [False, False], [2, 3]) == 0
    with pytest.raises(ValueError, match="found 2 and 1"):
        oscr([0, 1], [True], [2, 3])


# --- calibration ------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.2, 1 / 3, 0.6, 1.0]) | st.floats(0, 1), st.booleans()), min_size=1),
    st.sampled_from([1, 3, 5, 15]),
)
def test_calibration_error_bin_by_bin(samples, bins):
    edges = np.linspace(0, 1, bins + 1)
    error, counts = 0.0, []
    for index, (low, high) in enumerate(pairwise(edges)):
        inside = [(c, r) for c, r in samples if low < c <= high or (index == 0 and c == 0)]
        counts.append(len(inside))
        error += abs(sum(r for _, r in inside) - sum(c for c, _ in inside)) / len(samples)
    confidence, correct = zip(*samples, strict=True)
    assert expected_calibration_error(confidence, correct, bins) == pytest.approx(error, abs=1e-12)
    assert calibration_histogram(confidence, correct, bins).samples.tolist() == counts


def test_calibration_by_hand():
    histogram = calibration_histogram([0.5, 0.3, 0.9, 0.8], [True, False, True, False], bins=2)
    assert histogram.edges.tolist() == [0, 0.5, 1]
    assert histogram.samples.tolist() == [2, 2]
    assert histogram.confidence.tolist() == pytest.approx([0.4, 0.85])
    assert histogram.accuracy.tolist() == [0.5, 0.5]
    assert expected_calibration_error([0.5, 0.3, 0.9, 0.8], [1, 0, 1, 0], 2) == pytest.approx((0.1 + 0.35) / 2)
    assert expected_calibration_error([1.0] * 4, [True] * 4) == 0
    empty = calibration_histogram([0.9], [True], bins=2)
    assert math.isnan(empty.confidence[0])
    assert math.isnan(empty.accuracy[0])
    assert math.isnan(expected_calibration_error([], []))


def test_confidences_are_probabilities():
    assert expected_calibration_error([1.0000001], [True]) == pytest.approx(0, abs=1e-6)
    for bad in (1.01, -0.01):
        with pytest.raises(ValueError, match=r"confidences in \[0, 1\]"):
            expected_calibration_error([0.5, bad], [True, True])
    with pytest.raises(ValueError, match="bins"):
        expected_calibration_error([0.5], [True], bins=0)
    with pytest.raises(ValueError, match="found 2 and 1"):
        calibration_histogram([0.5, 0.6], [True])
    with pytest.raises(ValueError, match="true or false"):
        expected_calibration_error([0.5], [2])


# --- history ----------------------------------------------------------------------------------------------------


# --- discovery --------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=30))
def test_hungarian_accuracy_is_the_best_of_all_matches(pairs):
    predicted, truth = zip(*pairs, strict=True)
    # A class above 3 does not occur: there are at most as many classes as clusters.
    best = max(sum(match[p] == t for p, t in pairs) for match in permutations(range(5)))
    found = hungarian_accuracy(predicted, truth, known=2)
    assert found.all == pytest.approx(best / len(pairs))
    old = [t < 2 for t in truth]
    parts = (found.old if any(old) else 0) * sum(old) + (found.new if not all(old) else 0) * (len(old) - sum(old))
    assert parts == pytest.approx(best)
    assert math.isnan(found.old) == (not any(old))
    assert math.isnan(found.new) == all(old)


@given(st.lists(st.tuples(st.integers(-1, 4), st.integers(0, 3)), min_size=1, max_size=30))
def test_balanced_accuracy_is_the_mean_over_classes_by_the_same_match(pairs):
    predicted, truth = zip(*pairs, strict=True)
    plain, balanced = (hungarian_accuracy(predicted, truth, known=2, balanced=flag) for flag in (False, True))
    # With as many copies of each sample as make classes alike, the match may change; without, it is that of `plain`.
    sizes = Counter(truth)
    if len(set(sizes.values())) == 1:
        assert balanced == pytest.approx(plain, nan_ok=True)
    assert math.isnan(balanced.old) == math.isnan(plain.old)
    weights = [len([t for t in sizes if t < 2]), len([t for t in sizes if t >= 2])]
    parts = [weight * part for weight, part in zip(weights, balanced[1:], strict=True) if weight]
    assert balanced.all == pytest.approx(sum(parts) / len(sizes))


def test_a_small_class_counts_as_much_as_a_large_one():
    truth = [0] * 8 + [1] * 2 + [2] * 4
    predicted = [7] * 8 + [7, 1] + [2, 2, 2, 9]
    assert hungarian_accuracy(predicted, truth, known=2) == (12 / 14, 9 / 10, 3 / 4)
    assert hungarian_accuracy(predicted, truth, known=2, balanced=True) == (
        pytest.approx((1 + 1 / 2 + 3 / 4) / 3),
        pytest.approx(3 / 4),
        3 / 4,
    )


def test_one_match_serves_old_and_new():
    """A cluster shared by an old and a new class counts for one of them; matching each subset would count both."""
    truth = [0] * 5 + [1] * 4 + [2] * 3
    predicted = [8] * 5 + [3] * 4 + [8] * 3
    assert hungarian_accuracy(predicted, truth, known=2) == (9 / 12, 1.0, 0.0)
    assert hungarian_accuracy(predicted, truth, known=2)._asdict() == {"all": 9 / 12, "old": 1.0, "new": 0.0}


def test_too_many_clusters_are_not_merged():
    truth = [0] * 6 + [1] * 4
    assert hungarian_accuracy([0, 0, 0, 0, 5, 5, 2, 2, 2, 2], truth, known=1) == (0.8, 4 / 6, 1.0)
    assert hungarian_accuracy([3] * 10, truth, known=1) == (0.6, 1.0, 0.0)


def test_outliers_are_no_cluster():
    truth = [0, 0, 0, 1, 1, 1]
    alone = [0, 0, 0, 9, 10, 11]
    outliers = [0, 0, 0, -1, -1, -1]
    assert hungarian_accuracy(outliers, truth, known=1) == (4 / 6, 1.0, 1 / 3)
    assert nmi(outliers, truth) == pytest.approx(sk.normalized_mutual_info_score(truth, alone))
    assert ari(outliers, truth) == pytest.approx(sk.adjusted_rand_score(truth, alone))
    assert outliers == [0, 0, 0, -1, -1, -1]


@given(labels)
def test_nmi_and_ari_by_counting(pairs):
    predicted, truth = zip(*pairs, strict=True)
    joint = confusion(predicted, truth, 5) / len(pairs)

    def entropy(shares):
        return -sum(p * math.log(p) for p in shares if p > 0)

    entropies = entropy(joint.sum(axis=0)), entropy(joint.sum(axis=1))
    information = sum(entropies) - entropy(joint.ravel())
    if sum(entropies) > 1e-9:
        assert nmi(predicted, truth) == pytest.approx(2 * information / sum(entropies), abs=1e-9)
    both = one = other = 0
    for i in range(len(pairs)):
        for j in range(i):
            together = predicted[i] == predicted[j], truth[i] == truth[j]
            one, other, both = one + together[0], other + together[1], both + all(together)
    chance = one * other / math.comb(len(pairs), 2) if len(pairs) > 1 else 0
    if (one + other) / 2 != chance:
        assert ari(predicted, truth) == pytest.approx((both - chance) / ((one + other) / 2 - chance), abs=1e-9)


def test_no_sample_has_no_clusters():
    assert all(map(math.isnan, (*hungarian_accuracy([], [], 1), nmi([], []), ari([], []))))


def test_the_true_class_must_be_given():
    for metric in (nmi, ari, lambda p, t: hungarian_accuracy(p, t, 1)):
        with pytest.raises(ValueError, match="true class of every sample"):
            metric([0, 1], [0, -1])


# --- inputs and outputs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_give_what_arrays_give_as_plain_floats(dtype):
    known = torch.linspace(0, 1, 9, dtype=dtype, requires_grad=True)
    unknown = torch.linspace(0.5, 2, 7, dtype=dtype)[::2]
    plain = [tensor.detach().double().tolist() for tensor in (known, unknown)]
    for metric in (auroc, aupr, fpr_at_tpr):
        assert metric(known, unknown) == metric(*plain)
        assert type(metric(known, unknown)) is float
    correct = known.detach() < 0.6
    assert oscr(known, correct, unknown) == oscr(plain[0], correct.tolist(), plain[1])
    assert type(oscr(known, correct, unknown)) is float
    assert type(expected_calibration_error(known, correct)) is float
    one, other = torch.tensor([0, 1, 2], dtype=torch.uint8), torch.tensor([0, 2, 2])
    values = [accuracy(one, other), *per_class_accuracy(one, other, 3), nmi(one, other), ari(one, other)]
    values += [*hungarian_accuracy(one, other, 1), overall_auroc(np.float32(0.5), [np.float32(0.5)])]
    assert {type(value) for value in values} == {float}


def test_inputs_are_left_as_they_are():
    known, unknown = np.array([3.0, 1.0, 2.0]), np.array([5.0, 4.0])
    clusters = np.array([1, -1, 0])
    for metric in (auroc, aupr, fpr_at_tpr):
        metric(known, unknown)
    hungarian_accuracy(clusters, np.array([0, 1, 2]), 1)
    assert (known.tolist(), unknown.tolist(), clusters.tolist()) == ([3, 1, 2], [5, 4], [1, -1, 0])


def test_counts_of_a_million_do_not_overflow():
    half = np.arange(500_000)
    assert auroc(half, half) == 0.5
    assert auroc(half, half + 0.5) == pytest.approx(0.5 + 1 / 1_000_000)
