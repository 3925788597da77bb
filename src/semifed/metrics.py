"""How good a model is, as pure functions of predictions and scores: arrays or tensors in, Python floats out.

An unknown score grows with unknown-ness: a sample is accepted as known where its score is at most a threshold.
A quantity that has no sample to speak of is NaN, never 0. What only category discovery needs is imported where it
is used, because it would double the time to start.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Values = torch.Tensor | npt.ArrayLike
Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class CalibrationHistogram(NamedTuple):
    """Equal bins of confidence (lower, upper], each array [bins]; means are NaN where a bin is empty."""

    edges: Floats  # [bins + 1]
    samples: Integers
    confidence: Floats
    accuracy: Floats


class ClusterAccuracy(NamedTuple):
    """Share of samples in the cluster matched to their class: over all, the known (old) and the novel (new)."""

    all: float
    old: float
    new: float


def accuracy(predicted: Values, truth: Values) -> float:
    """Share of samples whose predicted class is the true one."""
    guesses, answers = _label_pair(predicted, truth)
    return _ratio(int(np.count_nonzero(guesses == answers)), len(answers))


def per_class_accuracy(predicted: Values, truth: Values, classes: int) -> list[float]:
    """Accuracy over the samples of each true class; a prediction outside the classes, such as -1, is wrong."""
    guesses, answers = _label_pair(predicted, truth)
    _check_classes("true", answers, classes)
    present = np.bincount(answers, minlength=classes)
    right = np.bincount(answers[guesses == answers], minlength=classes)
    return [_ratio(hits, count) for hits, count in zip(right.tolist(), present.tolist(), strict=True)]


def confusion(predicted: Values, truth: Values, classes: int) -> Integers:
    """Counts [true class, predicted class]."""
    guesses, answers = _label_pair(predicted, truth)
    _check_classes("true", answers, classes)
    _check_classes("predicted", guesses, classes)
    return np.bincount(answers * classes + guesses, minlength=classes**2).reshape(classes, classes)


def auroc(known_scores: Values, unknown_scores: Values) -> float:
    """Probability that an unknown scores higher than a known, ties counting one half (Mann-Whitney)."""
    # Looking up sorted scores stays in the cache.
    known, unknown = np.sort(_scores("known", known_scores)), np.sort(_scores("unknown", unknown_scores))
    below = np.searchsorted(known, unknown, side="left").sum()
    not_above = np.searchsorted(known, unknown, side="right").sum()
    return _ratio(int(below) + int(not_above), 2 * len(known) * len(unknown))


def aupr(known_scores: Values, unknown_scores: Values, positive: Literal["known", "unknown"] = "known") -> float:
    """Average precision of finding the `positive` kind: precision at each distinct score, weighted by recall gained."""
    known, unknown = _scores("known", known_scores), _scores("unknown", unknown_scores)
    if positive not in ("known", "unknown"):
        raise ValueError(f"positive: expected 'known' or 'unknown', found {positive!r}")
    wanted, others = (known, unknown) if positive == "known" else (-unknown, -known)
    if len(wanted) == 0 or len(others) == 0:
        return math.nan
    thresholds, gained = np.unique(wanted, return_counts=True)
    found = np.cumsum(gained)
    mistaken = np.searchsorted(np.sort(others), thresholds, side="right")
    return float(np.sum(gained * (found / (found + mistaken))) / len(wanted))


def fpr_at_tpr(known_scores: Values, unknown_scores: Values, tpr: float = 0.95) -> float:
    """Share of unknowns accepted by the smallest threshold that accepts at least `tpr` of the knowns."""
    known, unknown = _scores("known", known_scores), _scores("unknown", unknown_scores)
    if not 0 < tpr <= 1:
        raise ValueError(f"tpr: expected a share above 0 and up to 1, found {tpr}")
    if len(known) == 0 or len(unknown) == 0:
        return math.nan
    # As a decimal fraction, for 0.07 of 100 is 7, and not the 8 that rounding up a float product gives.
    needed = math.ceil(Fraction(str(float(tpr))) * len(known))
    threshold = np.partition(known, needed - 1)[needed - 1]
    return _ratio(int(np.count_nonzero(unknown <= threshold)), len(unknown))


def overall_auroc(seen: float, unseen: Sequence[float]) -> float:
    """Mean of the AUROC of seen unknowns and the mean over the unseen sets; that of the seen if there is none."""
    return float(seen) if len(unseen) == 0 else float((seen + math.fsum(unseen) / len(unseen)) / 2)


def oscr(known_scores: Values, known_correct: Values, unknown_scores: Values) -> float:
    """Open-set classification rate: area under the share of knowns accepted and right over that of unknowns accepted.

    With the trapezoidal rule that area is the probability that a known is right and scores below an unknown.
    """
    known, correct = _scores("known", known_scores), _flags(known_correct)
    unknown = _scores("unknown", unknown_scores)
    _check_same_length(known, correct)
    if len(known) == 0 or len(unknown) == 0:
        return math.nan
    return float(correct.mean()) * auroc(known[correct], unknown) if correct.any() else 0.0


def calibration_histogram(confidence: Values, correct: Values, bins: int = 15) -> CalibrationHistogram:
    """Counts, mean confidence and accuracy in equal bins of confidence; 0 belongs to the first."""
    certainty, right = _scores("confidence", confidence), _flags(correct)
    _check_same_length(certainty, right)
    if bins < 1:
        raise ValueError(f"bins: expected at least 1, found {bins}")
    # A single-precision softmax may exceed 1 by its rounding.
    if len(certainty) and not (certainty.min() >= 0 and certainty.max() <= 1 + 1e-5):
        raise ValueError(f"expected confidences in [0, 1], found {certainty.min():g} to {certainty.max():g}")
    edges = np.linspace(0, 1, bins + 1)
    bin_of = np.clip(np.searchsorted(edges, certainty, side="left") - 1, 0, bins - 1)
    samples = np.bincount(bin_of, minlength=bins)
    per_bin = np.where(samples > 0, samples, np.nan)
    return CalibrationHistogram(
        edges,
        samples,
        np.bincount(bin_of, weights=certainty, minlength=bins) / per_bin,
        np.bincount(bin_of, weights=right, minlength=bins) / per_bin,
    )


def expected_calibration_error(confidence: Values, correct: Values, bins: int = 15) -> float:
    """Mean gap between confidence and accuracy of a bin, weighted by its samples."""
    histogram = calibration_histogram(confidence, correct, bins)
    gaps = np.abs(histogram.accuracy - histogram.confidence)
    return _ratio(float(np.nansum(gaps * histogram.samples)), int(histogram.samples.sum()))


def hungarian_accuracy(predicted: Values, truth: Values, known: int, *, balanced: bool = False) -> ClusterAccuracy:
    """Accuracy of clusters under the best one-to-one match with classes, of which those below `known` are old.

    One match over all samples serves the old and the new (the "v2" protocol of generalised category discovery).
    A cluster without a class is wrong throughout, a sample in no cluster (-1) is a cluster of its own. `balanced` is
    the mean over classes, by the same match.
    """
    from scipy.optimize import linear_sum_assignment

    clusters, answers = _clustering(predicted, truth)
    classes, class_of = np.unique(answers, return_inverse=True)
    overlap = np.zeros((int(clusters.max(initial=-1)) + 1, len(classes)), np.int64)
    np.add.at(overlap, (clusters, class_of), 1)
    rows, columns = linear_sum_assignment(overlap, maximize=True)
    matched = np.zeros(len(classes), np.int64)
    matched[columns] = overlap[rows, columns]
    present = overlap.sum(axis=0)
    is_old = classes < known
    groups = (np.full(len(classes), True), is_old, ~is_old)
    if balanced:
        return ClusterAccuracy(*(_ratio(float((matched / present)[some].sum()), int(some.sum())) for some in groups))
    return ClusterAccuracy(*(_ratio(int(matched[some].sum()), int(present[some].sum())) for some in groups))


def nmi(predicted: Values, truth: Values) -> float:
    """Normalised mutual information of clusters and classes (arithmetic mean of entropies); -1 as above."""
    from sklearn.metrics import normalized_mutual_info_score

    clusters, answers = _clustering(predicted, truth)
    return float(normalized_mutual_info_score(answers, clusters)) if len(answers) else math.nan


def ari(predicted: Values, truth: Values) -> float:
    """Adjusted Rand index of clusters and classes; a sample in no cluster (-1) is a cluster of its own."""
    from sklearn.metrics import adjusted_rand_score

    clusters, answers = _clustering(predicted, truth)
    return float(adjusted_rand_score(answers, clusters)) if len(answers) else math.nan


def _ratio(part: float, whole: int) -> float:
    return part / whole if whole else math.nan


def _array(values: Values) -> npt.NDArray[np.generic]:
    if isinstance(values, torch.Tensor):
        tensor = values.detach().cpu()
        # NumPy has no bfloat16.
        array = (tensor.double() if tensor.is_floating_point() else tensor).numpy()
    else:
        array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"expected one value per sample, found shape {array.shape}")
    return array


def _scores(name: str, values: Values) -> Floats:
    scores = _array(values).astype(np.float64)
    finite = np.isfinite(scores)
    if not finite.all():
        raise ValueError(f"{name} scores: {np.count_nonzero(~finite)} of {len(scores)} are not finite")
    return scores


def _flags(values: Values) -> npt.NDArray[np.bool_]:
    flags = _array(values)
    if not np.isin(flags, (0, 1)).all():
        raise ValueError("expected true or false for each sample")
    return flags.astype(np.bool_)


def _labels(values: Values) -> Integers:
    labels = _array(values)
    if len(labels) and labels.dtype.kind not in "biu":
        raise ValueError(f"expected whole numbers as labels, found {labels.dtype}")
    return labels.astype(np.int64)


def _label_pair(predicted: Values, truth: Values) -> tuple[Integers, Integers]:
    guesses, answers = _labels(predicted), _labels(truth)
    _check_same_length(guesses, answers)
    return guesses, answers


def _clustering(predicted: Values, truth: Values) -> tuple[Integers, Integers]:
    """Cluster ids from 0 without gaps, and classes; every sample in no cluster has an id of its own."""
    guesses, answers = _label_pair(predicted, truth)
    if answers.min(initial=0) < 0:
        raise ValueError("expected the true class of every sample, found a negative one")
    alone = guesses < 0
    guesses[alone] = guesses.max(initial=-1) + 1 + np.arange(np.count_nonzero(alone))
    return np.unique(guesses, return_inverse=True)[1], answers


def _check_same_length(one: npt.NDArray[np.generic], other: npt.NDArray[np.generic]) -> None:
    if len(one) != len(other):
        raise ValueError(f"expected as many of both, found {len(one)} and {len(other)}")


def _check_classes(kind: str, labels: Integers, classes: int) -> None:
    if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
        raise ValueError(f"{kind} classes: expected 0 to {classes - 1}, found {labels.min()} to {labels.max()}")
