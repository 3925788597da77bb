"""Sums over models by compiled kernels: PyTorch's bits, and PyTorch itself wherever they cannot be."""

import math
import platform
import shutil
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semifed.aggregate import shares, weighted_mean
from semifed.kernels import averages, library
from semifed.kernels.library import Unavailable
from semifed.payloads import Up
from semifed.robust import absurd, change_norms
from semifed.wire import SMALL
from sources import changed_sources

on_intel = pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have no such vectors")
pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, library.COMPILERS)), reason="there is no C compiler, so there are no kernels"
)


def drawn(count: int, size: int, seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) * scale for _ in range(count)]


def off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averages, "library", lambda: Unavailable("a test says so"))
    monkeypatch.setattr(averages, "_exact", lambda: False)


@given(
    count=st.integers(1, 11),
    size=st.one_of(st.integers(0, 40), st.sampled_from([8191, 8192, 8193, 8200, 16384, 20003])),
    exponent=st.integers(-44, 38),
    odd=st.lists(st.sampled_from([0.0, -0.0, 1e-45, 3e38, math.inf, -math.inf]), max_size=6),
    seed=st.integers(0, 1000),
)
def test_a_weighted_sum_has_numpy_s_bits(count: int, size: int, exponent: int, odd: list[float], seed: int) -> None:
    tensors = drawn(count, size, seed, 10.0**exponent)
    for place, number in enumerate(odd[:size]):
        tensors[place % count][-1 - place] = number
    share = np.random.default_rng(seed).dirichlet(np.ones(count)).tolist()
    share[seed % count] *= seed % 3  # nothing at times
    with np.errstate(all="ignore"):
        total = tensors[0].numpy().astype(np.float64) * share[0]
        for tensor, factor in zip(tensors[1:], share[1:], strict=True):
            total = total + tensor.numpy().astype(np.float64) * factor
        expected = total.astype(np.float32)
    found = averages.weighted_sum(tensors, share)
    assert found is not None
    there = ~np.isnan(expected)  # what is no number has many names
    np.testing.assert_array_equal(found.numpy().view(np.int32)[there], expected.view(np.int32)[there])
    assert np.isnan(found.numpy()[~there]).all()


def test_what_tells_contracted_products() -> None:
    tenth, third = Fraction(float(torch.tensor(0.1))), Fraction(1 / 3)
    assert tenth * third != Fraction(float(tenth) * float(third))
    assert averages._exact()


VECTORS = "sum = first && model == 0 ? term : sum + term;"
REST = "one += product_of_one(tensors[model][i], shares[model]);"
LANE_BY_LANE = """if (first || {unless}) sum = first && model == 0 ? term : sum + term;
            else for (int lane = 0; lane < LANES; lane++)
                sum[lane] = __builtin_fma(tensors[model][start + i + lane], shares[model], sum[lane]);"""


@pytest.mark.parametrize("vectors", [(), pytest.param(("-mno-avx512f",), marks=on_intel), ("-O1",)], ids=" ".join)
@pytest.mark.parametrize(
    ("line", "contracted"),
    [
        pytest.param(VECTORS, LANE_BY_LANE.format(unless="models > 1"), id="models one by one"),
        pytest.param(VECTORS, LANE_BY_LANE.format(unless="models == 1"), id="models together"),
        pytest.param(
            REST, "one = __builtin_fma(tensors[model][i], shares[model], one);", id="numbers that fill no block"
        ),
    ],
)
def test_contracted_products_are_not_used(
    line: str, contracted: str, vectors: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = tmp_path / "other.so"
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, *vectors))
    monkeypatch.setattr(library, "SOURCES", changed_sources(tmp_path, line, contracted))
    library._compile(library._compiler(), made)
    monkeypatch.setattr(averages, "library", lambda: library.loaded(made))
    averages._exact.cache_clear()
    try:
        assert not averages._exact()
        assert averages.who_adds() == "PyTorch's kernels (ours round otherwise)"
        assert averages.weighted_sum(drawn(2, 10, 0), [0.5, 0.5]) is None
    finally:
        averages._exact.cache_clear()


@given(size=st.one_of(st.integers(0, 70), st.integers(1000, 3000)), seed=st.integers(0, 1000))
def test_squared_distance(size: int, seed: int) -> None:
    one, other = drawn(2, size, seed)
    found = averages.squared_distance(one, other)
    exact = math.fsum((a - b) ** 2 for a, b in zip(one.tolist(), other.tolist(), strict=True))
    assert found == pytest.approx(exact, rel=1e-12)


def test_squares_do_not_overflow() -> None:
    far = averages.squared_distance(torch.full((100,), 3e38), torch.full((100,), -3e38))
    assert far == pytest.approx(100 * (2 * float(torch.tensor(3e38))) ** 2)


def test_no_number_stays_none() -> None:
    broken = torch.zeros(100)
    broken[37] = torch.nan
    assert math.isnan(averages.squared_distance(broken, torch.zeros(100)) or 0.0)


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param([torch.randn(4, 4).double()] * 2, id="double precision"),
        pytest.param([torch.randn(4, 4).bfloat16()] * 2, id="bfloat16"),
        pytest.param([torch.arange(16)] * 2, id="whole numbers"),
        pytest.param([torch.randn(4, 6), torch.randn(6, 4).T], id="another layout"),
        pytest.param([torch.randn(4), torch.randn(5)], id="other shapes"),
        pytest.param([torch.randn(4), torch.randn(4).double()], id="mixed"),
        pytest.param([torch.randn(4), torch._neg_view(torch.randn(4))], id="another sign than in memory"),
        pytest.param([torch.randn(4), torch.randn(4, requires_grad=True)], id="with a gradient"),
    ],
)
def test_other_tensors_are_pytorch_s(tensors: list[Tensor]) -> None:
    assert averages.weighted_sum(tensors, [0.5, 0.5]) is None
    assert averages.squared_distance(*tensors) is None


def test_as_many_shares_as_tensors() -> None:
    with pytest.raises(ValueError, match="2 tensors and 1 shares"):
        averages.weighted_sum(drawn(2, 5, 0), [1.0])


# ------------------------------------------------------------------------------------- where they are used


def cohort(count: int, *, counts: bool = True) -> list[Up]:
    """Models with small and large tensors, of another layout too, and a counter, with which sums are in float64."""
    generator = torch.Generator().manual_seed(count)
    return [
        Up(
            {
                "conv": torch.randn(8, 3, 3, 3, generator=generator),
                "hidden": torch.randn(200, 301, generator=generator),
                "turned": torch.randn(190, 211, generator=generator).T,
                **({"counter": torch.tensor(number)} if counts else {}),
            },
            torch.tensor(1.0 + number),
        )
        for number in range(count)
    ]


def test_the_mean_of_models_has_the_same_bits_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    models, weight = [one.weights for one in cohort(7)], shares([3, 1, 4, 1, 5, 9, 2])
    assert models[0]["hidden"].numel() > SMALL
    asked: list[tuple[int, ...]] = []
    by_kernels = averages._weighted_sum

    def counting(tensors: list[Tensor], share: list[float]) -> Tensor:
        asked.append(tuple(tensors[0].shape))
        return by_kernels(tensors, share)

    monkeypatch.setattr(averages, "_weighted_sum", counting)
    ours = weighted_mean(models, weight)
    assert asked == [(200, 301)]
    off(monkeypatch)
    theirs = weighted_mean(models, weight)
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert asked == [(200, 301)]


@pytest.mark.parametrize("counts", [False, True])
def test_rough_sizes_are_exact_ones_nearly(counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    updates = cohort(4, counts=counts)
    received = {name: torch.zeros_like(tensor) for name, tensor in updates[0].weights.items()}
    expected = [math.sqrt(sum(float(part.double().square().sum()) for part in one.weights.values())) for one in updates]
    np.testing.assert_allclose(change_norms(updates, received, exact=False), expected, rtol=1e-6)
    off(monkeypatch)
    np.testing.assert_allclose(change_norms(updates, received, exact=False), expected, rtol=1e-5)
    np.testing.assert_allclose(change_norms(updates, received), expected, rtol=1e-6)


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("part", ["conv", "hidden", "turned"])
@pytest.mark.parametrize("factor", [99.0, 101.0, 1e18, 1e30])
def test_an_absurd_part_is_found_wherever_it_is(
    counts: bool, part: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = {name: torch.zeros_like(tensor) for name, tensor in cohort(1, counts=counts)[0].weights.items()}
    usual = {name: torch.zeros_like(tensor) for name, tensor in received.items()}
    usual[part] = usual[part].clone()
    usual[part][0, 0] = 1.0
    updates = [Up(usual, torch.tensor(1.0))] * 3
    updates.append(Up(usual | {part: usual[part] * factor}, torch.tensor(1.0)))
    found = [fault is not None for fault in absurd(updates, received)]
    assert found == [False, False, False, factor > 100]
    off(monkeypatch)
    assert [fault is not None for fault in absurd(updates, received)] == found
