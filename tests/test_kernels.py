"""Compiled kernels: PyTorch's bits wherever they are used, and PyTorch itself wherever they cannot be."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from command import assert_same_weights, process, surroundings
from semifed.kernels import Finish, averages, library, normalise
from semifed.kernels.library import Unavailable
from semifed.kernels.normalise import Scale
from semifed.methods import method_names
from semifed.models import BatchNorm, build_network
from semifed.net import Net
from sources import changed_sources
from toys import equal_weights, meaningful, run_toy, toy_parts, toy_recipe

PLAIN, RELU, LEAKY, POOLED = Finish(), Finish(0.0), Finish(0.1), Finish(0.0, (2, 2))

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, library.COMPILERS)), reason="there is no C compiler, so there are no kernels"
)


class Passes:
    """Counts what the kernels computed."""

    def __init__(self) -> None:
        self.count = 0


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> Passes:
    normalise._agrees()  # tried once before it counts
    counted, applied = Passes(), normalise._applied

    def counting(*given: Any) -> tuple[Tensor, ...]:
        counted.count += 1
        return applied(*given)

    monkeypatch.setattr(normalise, "_applied", counting)
    return counted


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A home without kernels; what this process knows of others is forgotten for a while."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache"
    forget()


def forget() -> None:
    library.library.cache_clear()
    normalise._tried.cache_clear()
    averages._exact.cache_clear()


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


class Case:
    """Maps, what batch norm knows, and a gradient of what comes out."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        finish: Finish,
        *,
        adds: bool,
        tracked: bool,
        grain: float,
        seed: int,
        momentum: float = 0.1,
    ) -> None:
        drawn = torch.Generator().manual_seed(seed)
        channels = shape[1]

        def noise(*size: int) -> Tensor:
            values = torch.randn(size, generator=drawn) * 2 + 0.3
            return (values / grain).round() * grain if grain else values

        self.finish, self.momentum = finish, momentum
        self.inputs = [channels_last(noise(*shape)), noise(channels), noise(channels)]
        if adds:
            self.inputs.append(channels_last(noise(*shape)))
        self.running = (noise(channels), noise(channels).square()) if tracked else None
        height, width = shape[2] // finish.pool[0], shape[3] // finish.pool[1]
        self.gradient = channels_last(noise(*shape[:2], height, width))

    def learnt(self) -> list[Tensor]:
        """What comes out of a pass, its gradients, and the statistics it leaves."""
        x, weight, bias, *plus = (
            one.clone(memory_format=torch.preserve_format).requires_grad_() for one in self.inputs
        )
        running = None if self.running is None else (self.running[0].clone(), self.running[1].clone())
        out = normalise.normalised_by_batch(x, Scale(weight, bias, 1e-5, self.momentum, running), self.finish, *plus)
        gradients = torch.autograd.grad(out, [x, weight, bias, *plus], self.gradient)
        return [out.detach(), *gradients, *(running or ())]

    def told(self) -> Tensor:
        """What comes out in evaluation."""
        x, weight, bias, *plus = self.inputs
        mean, var = self.running or (bias, bias.square())
        with torch.no_grad():
            return normalise.normalised_by(x, mean, var, Scale(weight, bias, 1e-5, 0.1, None), self.finish, *plus)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    finish = draw(st.sampled_from([PLAIN, RELU, LEAKY, POOLED]))
    side = st.integers(2 if finish == POOLED else 1, 7)
    shape = (draw(st.integers(1, 4)), 16 * draw(st.sampled_from([1, 2, 3, 4, 5, 7])), draw(side), draw(side))
    assume(shape[0] * shape[2] * shape[3] > 1)  # of a single value there is no variance
    adds = finish == RELU and draw(st.booleans())
    grain = draw(st.sampled_from([0.0, 0.0, 0.5, 2.0]))  # coarse numbers: equal maxima, and exact zeros
    options = {"adds": adds, "tracked": draw(st.booleans()), "grain": grain, "seed": draw(st.integers(0, 2**16))}
    return Case(shape, finish, **options, momentum=draw(st.sampled_from([0.1, 0.01, 0.3, 0.003])))


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@needs_compiler
def test_kernels_are_used_on_this_machine() -> None:
    assert not isinstance(library.library(), Unavailable)
    assert normalise._agrees()


@needs_compiler
@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_bits_are_pytorch_s(case: Case) -> None:
    ours, told = case.learnt(), case.told()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(normalise, "_agrees", lambda: False)
        assert_same([*ours, told], [*case.learnt(), case.told()])


@needs_compiler
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 1e38])
@pytest.mark.parametrize("finish", [PLAIN, RELU, LEAKY, POOLED])
def test_what_is_no_number_spreads_as_in_pytorch(odd: float, finish: Finish, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((2, 32, 4, 4), finish, adds=False, tracked=True, grain=0.0, seed=0)
    case.inputs[0][0, 3, 1, 2] = odd
    ours, told = case.learnt(), case.told()
    monkeypatch.setattr(normalise, "_agrees", lambda: False)
    theirs = [*case.learnt(), case.told()]
    out, *_ = theirs
    assert bool(out[:, 3].isnan().any()) == (odd != 1e38) or finish != PLAIN
    # Products of zero and infinity: PyTorch has them for pixels without gradient, the kernels do not ask these.
    apart = [0, len(theirs) - 1] if odd != 1e38 else range(len(theirs))
    assert_same([[*ours, told][number] for number in apart], [theirs[number] for number in apart])


@needs_compiler
def test_maxima_and_gradients_are_those_of_numpy() -> None:
    case = Case((3, 16, 5, 6), POOLED, adds=False, tracked=False, grain=0.0, seed=1)
    out, by_x, by_weight, by_bias = (one.double().numpy() for one in case.learnt())
    x, weight, bias = (one.double().numpy() for one in case.inputs)
    gradient = case.gradient.double().numpy()
    mean, deviation = x.mean((0, 2, 3)), np.sqrt(x.var((0, 2, 3)) + 1e-5)
    expected, slope = np.zeros_like(out), np.zeros_like(x)
    for image, channel, row, column in np.ndindex(out.shape):
        window = x[image, channel, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        values = (window - mean[channel]) / deviation[channel] * weight[channel] + bias[channel]
        expected[image, channel, row, column] = max(values.max(), 0)
        if values.max() > 0:
            down, right = np.unravel_index(values.argmax(), (2, 2))
            slope[image, channel, 2 * row + down, 2 * column + right] = gradient[image, channel, row, column]
    normal = (x - mean[:, None, None]) / deviation[:, None, None]
    by_normal = slope * weight[:, None, None]
    centred = by_normal - by_normal.mean((0, 2, 3))[:, None, None]
    along = normal * (by_normal * normal).mean((0, 2, 3))[:, None, None]
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(by_x, (centred - along) / deviation[:, None, None], atol=1e-5)
    np.testing.assert_allclose(by_weight, (slope * normal).sum((0, 2, 3)), atol=1e-4)
    np.testing.assert_allclose(by_bias, slope.sum((0, 2, 3)), atol=1e-4)


# ------------------------------------------------------------------------------------- whole networks


def trained(name: str, width: Any, mode: str) -> list[Tensor]:
    """Three steps of SGD, then a look in evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    network = build_network(name, channels=3, size=(12, 10), classes=4, width=width, generator=generator)
    net = Net(network, mode)
    images = channels_last(torch.randn(6, 3, 12, 10, generator=generator))
    net.train(True)
    for _ in range(3):
        loss = F.cross_entropy(net(images).logits, torch.arange(6) % 4)
        slopes = torch.autograd.grad(loss, list(net.learners().values()))
        with torch.no_grad():
            for one, slope in zip(net.learners().values(), slopes, strict=True):
                one -= 0.1 * slope
    net.train(False)
    with torch.no_grad():
        return [net(images).logits, *net.state().values()]


@needs_compiler
@pytest.mark.parametrize("mode", ["averaged", "static"])
@pytest.mark.parametrize(
    ("name", "width", "layers"), [("cnn", [16, 32, 16], 3), ("resnet8", 1, 9), ("wrn-28-2", 1, 25)]
)
def test_networks_learn_the_same(
    name: str, width: Any, layers: int, mode: str, by_kernels: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = trained(name, width, mode)
    assert by_kernels.count == 4 * layers, "three steps and a look"
    monkeypatch.setattr(normalise, "_agrees", lambda: False)
    assert_same(ours, trained(name, width, mode))
    assert by_kernels.count == 4 * layers


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("method", method_names())
def test_every_method_learns_the_same(
    method: str, tmp_path: Path, by_kernels: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = next(labels for name, labels in meaningful() if name == method)
    model = {"name": "cnn", "width": [16, 16, 32]}
    parts = toy_parts(toy_recipe(method, place, {"model": model, "engine": {"workers": 1}}))
    ours = run_toy(parts, tmp_path / "ours")
    assert by_kernels.count > 0
    monkeypatch.setattr(normalise, "_agrees", lambda: False)
    assert equal_weights(ours.weights, run_toy(parts, tmp_path / "theirs").weights)


@needs_compiler
@pytest.mark.slow
def test_a_run_without_kernels_is_the_same_run(tmp_path: Path) -> None:
    recipe = ("quickstart", "rounds=2", "evaluate.folds=0", "model.width=[16,32,16]", "--quiet", "--out")
    process("run", *recipe, "with", cwd=tmp_path, env=surroundings(XDG_CACHE_HOME=str(tmp_path / "cache")))
    assert list((tmp_path / "cache").rglob("*.so"))
    process("run", *recipe, "without", cwd=tmp_path, env=surroundings(SEMIFED_KERNELS="off"))
    assert_same_weights(tmp_path / "with", tmp_path / "without")


# --------------------------------------------------------------------------- gradients of other kinds


@needs_compiler
@pytest.mark.parametrize("finish", [PLAIN, RELU, LEAKY, POOLED])
def test_a_gradient_can_be_differentiated_again(
    finish: Finish, by_kernels: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case((2, 16, 4, 4), finish, adds=finish == RELU, tracked=True, grain=0.0, seed=2)

    def second() -> list[Tensor]:
        x, weight, bias, *plus = (
            one.clone(memory_format=torch.preserve_format).requires_grad_() for one in case.inputs
        )
        out = normalise.normalised_by_batch(x, Scale(weight, bias, 1e-5, 0.1, case.running), finish, *plus)
        first = torch.autograd.grad(out.square().sum(), [x, weight, bias, *plus], create_graph=True)
        return [*first, *torch.autograd.grad(sum(one.square().sum() for one in first), [x, weight, bias, *plus])]

    assert case.running is not None
    start = case.running[0].clone()
    ours = second()
    assert by_kernels.count == 1
    moved = case.running[0].clone()
    monkeypatch.setattr(normalise, "_agrees", lambda: False)
    case.running[0].copy_(start)
    theirs = second()
    assert torch.equal(moved, case.running[0]), "by the pass, not again by its gradient"
    assert_same(
        [one.detach() for one in ours[: len(case.inputs)]], [one.detach() for one in theirs[: len(case.inputs)]]
    )
    for one, other in zip(ours, theirs, strict=True):  # the second gradient adds up in another order
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-2)


@needs_compiler
@pytest.mark.parametrize(("name", "width"), [("cnn", [16, 32, 16]), ("resnet8", 1), ("wrn-28-2", 1)])
def test_a_network_s_gradient_can_be_differentiated_again(
    name: str, width: Any, by_kernels: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shortcut of a residual block lies behind what it is added to."""
    generator = torch.Generator().manual_seed(0)
    network = build_network(name, channels=3, size=(8, 8), classes=4, width=width, generator=generator)
    images = channels_last(torch.randn(4, 3, 8, 8, generator=generator))

    def slopes() -> list[Tensor]:
        learners = list(Net(network, "static").learners().values())
        network.train()
        weight = torch.ones((), requires_grad=True)  # of the loss, as FedDure's regulators weigh images
        first = torch.autograd.grad(
            weight * F.cross_entropy(network(images).logits, torch.arange(4)), learners, create_graph=True
        )
        (second,) = torch.autograd.grad(sum(one.square().sum() for one in first), [weight])
        return [second, *(one.detach() for one in first)]

    ours = slopes()
    assert by_kernels.count > 0
    monkeypatch.setattr(normalise, "_agrees", lambda: False)
    assert_same(ours, slopes())


@needs_compiler
@pytest.mark.parametrize("finish", [PLAIN, RELU, LEAKY, POOLED])
def test_gradients_of_any_layout(finish: Finish, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((2, 16, 4, 6), finish, adds=finish == RELU, tracked=False, grain=0.0, seed=3)
    layouts = [case.gradient.contiguous(), case.gradient[:, :1, :1].expand_as(case.gradient)]
    ours = []
    for case.gradient in layouts:
        ours += case.learnt()
    monkeypatch.setattr(normalise, "_agrees", lambda: False)
    theirs = []
    for case.gradient in layouts:
        theirs += case.learnt()
    assert_same(ours, theirs)


# ------------------------------------------------------------------------------- when PyTorch computes


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(torch.randn(2, 16, 4, 4), id="another layout"),
        pytest.param(channels_last(torch.randn(2, 24, 4, 4)), id="channels that fill no block"),
        pytest.param(channels_last(torch.randn(2, 16, 4, 4, dtype=torch.float64)), id="double precision"),
        pytest.param(channels_last(torch.randn(2, 16, 4, 4)).bfloat16(), id="bfloat16"),
        pytest.param(torch.randn(4, 16, 1, 1), id="one pixel"),
    ],
)
def test_other_maps_are_pytorch_s(x: Tensor, by_kernels: Passes) -> None:
    layer = BatchNorm(x.shape[1]).to(x.dtype)
    torch.testing.assert_close(layer(x, RELU), F.relu(nn.BatchNorm2d(x.shape[1]).to(x.dtype)(x)), rtol=0, atol=0)
    assert by_kernels.count == 0


@pytest.mark.parametrize("finish", [Finish(0.0, (2, 1)), Finish(0.1, (2, 2)), Finish(None, (2, 2))])
def test_other_finishes_are_pytorch_s(finish: Finish, by_kernels: Passes) -> None:
    x = channels_last(torch.randn(2, 16, 4, 4))
    expected = F.max_pool2d(nn.BatchNorm2d(16)(x), finish.pool)
    if finish.slope is not None:
        expected = F.leaky_relu(expected, finish.slope)
    torch.testing.assert_close(BatchNorm(16)(x, finish), expected, rtol=0, atol=0)
    assert by_kernels.count == 0


def test_several_threads_add_up_otherwise(by_kernels: Passes) -> None:
    torch.set_num_threads(2)
    try:
        assert normalise.who_normalises().startswith("PyTorch's kernels (")
        BatchNorm(16)(channels_last(torch.randn(2, 16, 4, 4)), RELU)
    finally:
        torch.set_num_threads(1)
    assert by_kernels.count == 0


@pytest.mark.parametrize("odd", ["too few", "double"])
def test_what_does_not_belong_together_is_left_to_pytorch(odd: str, by_kernels: Passes) -> None:
    """It raises; C would read what lies behind."""
    layer = BatchNorm(16) if odd == "too few" else BatchNorm(32).double()
    x = channels_last(torch.randn(2, 32, 4, 4))
    for mode in (True, False):
        with torch.no_grad(), pytest.raises(RuntimeError):
            layer.train(mode)(x, RELU)
    assert by_kernels.count == 0


@needs_compiler
def test_a_compiler_that_never_ends(anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CC", str(slow))
    monkeypatch.setattr(library, "PATIENCE", 0.2)
    assert str(library.library()) == f"{slow} or what it made did not end within 0.2 seconds"


def test_without_a_source_pytorch_computes(anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "SOURCES", (tmp_path / "gone.c",))
    assert isinstance(library.library(), Unavailable)


def test_without_a_compiler_pytorch_computes(anew: Path, monkeypatch: pytest.MonkeyPatch, by_kernels: Passes) -> None:
    monkeypatch.setenv("PATH", os.fspath(anew))
    monkeypatch.delenv("CC", raising=False)
    forget()
    assert str(library.library()) == "there is no C compiler (cc, gcc, clang, or $CC)"
    x = channels_last(torch.randn(2, 16, 4, 4))
    torch.testing.assert_close(BatchNorm(16)(x, RELU), F.relu(nn.BatchNorm2d(16)(x)), rtol=0, atol=0)
    assert by_kernels.count == 0


def test_kernels_can_be_turned_off(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMIFED_KERNELS", "off")
    assert str(library.library()) == "SEMIFED_KERNELS says so"
    assert not anew.exists()


@needs_compiler
def test_a_source_that_does_not_compile(anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.c"
    broken.write_text("no C at all")
    monkeypatch.setattr(library, "SOURCES", (broken,))
    assert "does not compile them: " in str(library.library())
    assert "error" in str(library.library())
    assert [path.name for path in anew.rglob("*.so")] == []


@needs_compiler
@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_others_may_write_is_not_loaded(anew: Path, what: str) -> None:
    made = library.built()
    {"folder": made.parent, "file": made}[what].chmod(0o777)
    assert str(library.library()).startswith("others may write ")


@needs_compiler
def test_a_home_that_cannot_be_written(anew: Path) -> None:
    anew.write_text("a file, not a folder")
    assert str(library.library()).startswith("they cannot be kept: ")


@needs_compiler
def test_instructions_that_the_processor_refuses(anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They end the process that tries them, not the one that trains."""
    trap = "void apply() { __builtin_trap(); }\nvoid other(const"
    monkeypatch.setattr(library, "SOURCES", changed_sources(tmp_path, "void apply(const", trap))
    assert "the processor does not run them" in str(library.library())
    assert [path.name for path in anew.rglob("*.so")] == []


@needs_compiler
def test_kernels_that_round_otherwise_are_not_used(
    anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by_kernels: Passes
) -> None:
    line = "sum[b] += off * off;"
    monkeypatch.setattr(library, "SOURCES", changed_sources(tmp_path, line, "sum[b] += off * off * 1.0000001f;"))
    forget()
    assert not isinstance(library.library(), Unavailable)
    assert not normalise._agrees()
    tried = by_kernels.count
    BatchNorm(16)(channels_last(torch.randn(2, 16, 4, 4)), RELU)
    assert by_kernels.count == tried


@needs_compiler
@pytest.mark.parametrize("mask", [0o022, 0o002])
def test_a_library_is_compiled_once(anew: Path, monkeypatch: pytest.MonkeyPatch, mask: int) -> None:
    before = os.umask(mask)
    try:
        first = library.built()
    finally:
        os.umask(before)
    monkeypatch.setattr(library, "_compile", lambda *_: pytest.fail("compiled again"))
    assert library.built() == first
    assert [path.name for path in anew.rglob("*") if path.is_file()] == [first.name]
    assert first.stat().st_mode & 0o022 == 0, "nobody else may write what we load"
