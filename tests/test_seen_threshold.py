"""The confidence above which an image counts as seen, against SciPy's density and a walk of single steps."""

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import gaussian_kde

from semifed.discovery.seen_threshold import (
    GRID,
    LARGEST_BANDWIDTH,
    LEAST_BANDWIDTH,
    Density,
    log_density,
    seen_threshold,
)

Array = NDArray[np.float64]
DENSITIES: tuple[Density, ...] = ("plain", "logit")
PERCENTILES = (5, 10, 25, 50, 75, 90, 100)


def peaked(seed: int, count: int = 400) -> Array:
    return np.random.default_rng(seed).beta(12, 1.5, count)


def two_bumps(seed: int, count: int = 400) -> Array:
    draw = np.random.default_rng(seed)
    low = draw.normal(0.5, 0.05, count // 4)
    return np.concatenate([low, 1 - np.abs(draw.normal(0, 0.03, count - count // 4))]).clip(0.1, 1)


def threshold(values: Array, percentile: float, bandwidth: float = 0.0) -> float:
    return seen_threshold(torch.from_numpy(values), percentile, bandwidth)


def saturated(seed: int, count: int, own: float = 0.8, other: float = -0.2) -> Array:
    """Confidences of cosines as a trained classifier has them, divided by 0.1: nearly all within a thousandth of 1."""
    noise = np.random.default_rng(seed).normal(0, 0.03, (count, 5))
    logits = (np.array([own] + [other] * 4) + noise) / 0.1
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray((powers / powers.sum(axis=1, keepdims=True)).max(axis=1))


def walked(values: Array, percentile: float, bandwidth: float = 0.0) -> float:
    """The definition, point by point."""
    spread = math.sqrt(sum((value - values.mean()) ** 2 for value in values) / (len(values) - 1))
    width = bandwidth or float(np.clip(spread / len(values) ** 0.2, 0.005, 0.1))

    def density(at: float) -> float:
        kernels = (math.exp(-(((at - value) / width) ** 2) / 2) / math.sqrt(2 * math.pi) for value in values)
        total = sum(kernels) / (len(values) * width)
        return math.log(total) if total else -math.inf

    least = float(np.percentile([density(value) for value in values], percentile))
    first, last = (0, 1) if max(values) <= 1 else (min(values), max(values))  # confidences, or their logits
    grid = [first + (last - first) * step / 1999 for step in range(2000)]
    heights = [density(point) for point in grid]
    place = max(range(2000), key=lambda step: heights[step])
    while place > 0 and heights[place - 1] >= least:
        place -= 1
    quantile = float(np.percentile(values, percentile))
    return quantile if place and grid[place - 1] < quantile < grid[place] else grid[place]


@pytest.mark.parametrize("percentile", [10, 50, 100])
@pytest.mark.parametrize("values", [peaked(0, 60), two_bumps(1, 60)], ids=["peaked", "two bumps"])
def test_it_is_the_walk_of_single_steps(values: Array, percentile: float) -> None:
    assert threshold(values, percentile) == pytest.approx(walked(values, percentile), abs=1e-12)
    assert threshold(values, percentile, 0.03) == pytest.approx(walked(values, percentile, 0.03), abs=1e-12)


@given(st.integers(0, 999))
def test_the_density_is_scipys_with_scotts_bandwidth(seed: int) -> None:
    values = peaked(seed, 50)
    theirs = gaussian_kde(values)
    grid = np.linspace(0, 1, 101)
    width = float(values.std(ddof=1) * len(values) ** -0.2)
    ours = log_density(torch.from_numpy(grid), torch.from_numpy(values), width).numpy()
    reached = theirs(grid) > 1e-300
    np.testing.assert_allclose(ours[reached], theirs.logpdf(grid[reached]), rtol=1e-9, atol=1e-9)
    assert width == pytest.approx(float(np.sqrt(theirs.covariance[0, 0])))


@pytest.mark.parametrize("seed", range(3))
def test_with_one_peak_it_is_nearly_the_quantile(seed: int) -> None:
    values = peaked(seed, 1000)
    for percentile in (5, 10, 25):
        assert threshold(values, percentile) == pytest.approx(np.percentile(values, percentile), abs=0.01)
    assert -0.08 < threshold(values, 50) - np.percentile(values, 50) <= 0.001


@pytest.mark.parametrize("seed", range(8))
def test_a_second_bump_of_doubtful_images_lies_below(seed: int) -> None:
    values = two_bumps(seed)
    for percentile in (5, 10, 20):
        assert threshold(values, percentile, 0.03) > 0.75
        assert np.percentile(values, percentile) < 0.6
    assert threshold(values, 50) == pytest.approx(np.percentile(values, 50), abs=0.06)


@pytest.mark.parametrize("percentile", PERCENTILES)
def test_the_surest_images_are_always_seen(percentile: float) -> None:
    # A two-sided rule would reject them: the density at 1 is below the median of the densities.
    values = peaked(3)
    at_one, own = (
        log_density(torch.tensor(at).double(), torch.from_numpy(values), 0.03) for at in ([1.0], values.tolist())
    )
    assert float(at_one) < float(own.quantile(0.5))
    assert threshold(values, percentile, 0.03) < 1


@pytest.mark.parametrize("percentile", PERCENTILES)
def test_saturated_confidences_are_told_apart_too(percentile: float) -> None:
    # The edge was the last point of the grid, 1.0, which no confidence exceeds: nothing was ever identified.
    values = saturated(0, 200)
    assert np.median(values) > 0.9997
    found = threshold(values, percentile)
    assert found < values.max()
    assert (values > found).mean() >= 1 - percentile / 100 - 0.01


DRAWS: dict[str, Callable[[np.random.Generator, float, int], Array]] = {
    "beta": lambda draw, tail, count: draw.beta(tail, 1, count),
    "logit-normal": lambda draw, tail, count: 1 / (1 + np.exp(-draw.normal(np.log(tail), 1, count))),
}


@given(
    seed=st.integers(0, 999),
    name=st.sampled_from(sorted(DRAWS)),
    tail=st.floats(0, 12).map(math.exp),
    count=st.integers(1, 150),
    percentile=st.floats(0, 100),
    density=st.sampled_from(DENSITIES),
)
def test_the_promised_share_of_labelled_images_passes_and_the_surest_always(
    seed: int, name: str, tail: float, count: int, percentile: float, density: Density
) -> None:
    # In float32 many are equal, and the surest may be 1 exactly.
    values = torch.from_numpy(DRAWS[name](np.random.default_rng(seed), tail, count)).float()
    passing = values > seen_threshold(values, percentile, density=density)
    assert passing[values == values.max()].all()
    # As near as this they are one bump; where there are two, the lower one may fail as a whole.
    if density == "plain" and float(values.max() - values.min()) <= 2 * LEAST_BANDWIDTH:
        assert int(passing.sum()) >= math.floor((1 - percentile / 100) * count) - 1


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=60),
    st.lists(st.floats(0, 100), min_size=2, max_size=4).map(sorted),
)
def test_a_higher_percentile_is_never_laxer(values: list[float], percentiles: list[float]) -> None:
    found = [seen_threshold(torch.tensor(values), percentile) for percentile in percentiles]
    # Not by more than the step of the grid: below that the quantile may take its place.
    assert all(higher >= lower - 1 / (GRID - 1) for lower, higher in pairwise(found))
    assert all(0 <= value <= 1 for value in found)


def test_few_or_equal_confidences_give_the_quantile_and_none_infinity() -> None:
    few = torch.tensor([0.2, 0.9, 0.4])
    assert seen_threshold(torch.empty(0), 50) == math.inf
    assert seen_threshold(few, 50) == pytest.approx(0.4)
    assert seen_threshold(few, 25) == pytest.approx(0.3)
    assert seen_threshold(torch.full((40,), 0.75), 90) == pytest.approx(0.75)
    assert seen_threshold(torch.tensor([0.7]), 90) == pytest.approx(0.7)
    nine, ten = torch.linspace(0.1, 0.9, 9), torch.linspace(0.1, 0.9, 10)
    assert seen_threshold(nine, 25) == pytest.approx(0.3)
    assert seen_threshold(ten, 25) != pytest.approx(float(ten.quantile(0.25)), abs=0.005)


def test_scotts_bandwidth_is_bounded_and_an_asked_one_is_obeyed() -> None:
    wide, narrow = torch.linspace(0, 1, 40), 0.9 + torch.linspace(0, 1e-3, 40)
    for values, bound in ((wide, LARGEST_BANDWIDTH), (narrow, LEAST_BANDWIDTH)):
        assert seen_threshold(values, 30) == seen_threshold(values, 30, bound)
    assert seen_threshold(wide, 30) != seen_threshold(wide, 30, 0.3)


@pytest.mark.parametrize(("percentile", "bandwidth"), [(-1, 0), (101, 0), (50, -0.1)])
def test_what_makes_no_sense_is_refused(percentile: float, bandwidth: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        seen_threshold(torch.rand(20), percentile, bandwidth)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("density", DENSITIES)
def test_half_or_more_of_saturated_confidences_pass_but_not_all(density: Density, seed: int) -> None:
    values = torch.from_numpy(1 / (1 + np.exp(-np.random.default_rng(seed).normal(8, 1.5, 1000))))
    assert 0.5 <= float((values > seen_threshold(values, 50, density=density)).double().mean()) < 0.85
    assert seen_threshold(torch.ones(40), 50, density=density) < 1


def test_a_density_of_logits_is_that_of_the_logits() -> None:
    values = peaked(5, 80)
    logits = np.log(values / (1 - values))
    width = float(np.std(logits, ddof=1)) / 80**0.2
    expected = 1 / (1 + math.exp(-walked(logits, 50, width)))
    assert seen_threshold(torch.from_numpy(values), 50, density="logit") == pytest.approx(expected, abs=1e-9)
