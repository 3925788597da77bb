"""Batch norm and what follows it, by compiled kernels where their bits are PyTorch's, by PyTorch elsewhere."""

import ctypes
from enum import IntEnum
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from semifed.kernels.library import Unavailable, library

LANES = 16  # channels come in multiples of it, the most that a processor has
_LAST = torch.channels_last


class Finish(NamedTuple):
    """What follows a batch norm: maxima over windows of pixels, then a ReLU, leaky where `slope` is above 0."""

    slope: float | None = None  # None: no ReLU
    pool: tuple[int, int] = (1, 1)

    def of(self, normalised: Tensor, plus: Tensor | None = None) -> Tensor:
        """By PyTorch, over a map that nobody else reads: the shortcut of a residual block is added first."""
        if plus is not None:
            normalised += plus
        if self.pool != (1, 1):
            normalised = F.max_pool2d(normalised, self.pool)
        if self.slope is None:
            return normalised
        return F.leaky_relu(normalised, self.slope, inplace=True) if self.slope else F.relu(normalised, inplace=True)


class Scale(NamedTuple):
    """What batch norm learns, and how it guards and remembers variances."""

    weight: Tensor
    bias: Tensor
    eps: float
    momentum: float
    running: tuple[Tensor, Tensor] | None  # mean and variance, which a batch moves
    kernels: bool = True  # of our own, where there are any


class _After(IntEnum):
    """As the kernels number it."""

    PLAIN = 0
    RELU = 1
    LEAKY = 2

    @classmethod
    def of(cls, slope: float | None) -> "_After":
        return cls.PLAIN if slope is None else cls.LEAKY if slope else cls.RELU


def normalised_by_batch(x: Tensor, scale: Scale, finish: Finish, plus: Tensor | None = None) -> Tensor:
    """Maps [n, channels, h, w] normalised by their own statistics, and finished."""
    if _fits(x, scale, finish, plus) and _agrees():
        return _by_kernels(x, scale, finish, plus)
    return finish.of(_by_batch(x, scale), plus)


def normalised_by(
    x: Tensor, mean: Tensor, var: Tensor, scale: Scale, finish: Finish, plus: Tensor | None = None
) -> Tensor:
    """Maps normalised by given statistics, and finished."""
    learns = torch.is_grad_enabled() and any(
        one is not None and one.requires_grad for one in (x, scale.weight, scale.bias, plus)
    )
    if learns or not (_fits(x, scale, finish, plus, mean, var) and _agrees()):
        return finish.of(_by(x, mean, var, scale), plus)
    return _applied(x, *_terms(mean, var, scale), finish, plus)[0]


def who_normalises() -> str:
    """Whose kernels normalise on this machine, and why not ours if it is not they."""
    if isinstance(found := library(), Unavailable):
        return f"PyTorch's kernels ({found})"
    if torch.get_num_threads() > 1:
        return "PyTorch's kernels (ours are for one thread)"
    return "own kernels" if _tried() else "PyTorch's kernels (ours round otherwise than this version of it)"


def _by_kernels(x: Tensor, scale: Scale, finish: Finish, plus: Tensor | None) -> Tensor:
    done: Tensor = _Normalised.apply(x, scale.weight, scale.bias, plus, scale, finish)  # type: ignore[no-untyped-call]
    return done


def _by_batch(x: Tensor, scale: Scale) -> Tensor:
    mean, var = (None, None) if scale.running is None else scale.running
    return F.batch_norm(x, mean, var, scale.weight, scale.bias, True, scale.momentum, scale.eps)


def _by(x: Tensor, mean: Tensor, var: Tensor, scale: Scale) -> Tensor:
    return F.batch_norm(x, mean, var, scale.weight, scale.bias, False, 0.0, scale.eps)


def _terms(mean: Tensor, var: Tensor, scale: Scale) -> tuple[Tensor, Tensor]:
    """PyTorch's own factor and offset, read off a pixel of one without offset and a pixel of zero."""
    zeros = torch.zeros_like(mean)
    pixel = zeros[None, :, None, None]
    return _by(pixel + 1, zeros, var, scale._replace(bias=zeros)), _by(pixel, mean, var, scale)


def _fits(x: Tensor, scale: Scale, finish: Finish, plus: Tensor | None, *statistics: Tensor) -> bool:
    """Whether the kernels are written for it, and PyTorch would add up in their order."""
    if not (scale.kernels and _usual(x) and x.shape[1] % LANES == 0 and torch.get_num_threads() == 1):
        return False
    known = (scale.weight, scale.bias, *(scale.running or ()), *statistics)
    if torch.compiler.is_compiling() or not all(_a_number_for_each(one, x.shape[1]) for one in known):
        return False
    if finish.pool != (1, 1):
        return finish.pool == (2, 2) and min(x.shape[2:]) > 1 and finish.slope == 0 and plus is None
    return plus is None or (finish.slope == 0 and plus.shape == x.shape and _usual(plus))


def _a_number_for_each(one: Tensor, channels: int) -> bool:
    plain = one.dtype == torch.float32 and one.device.type == "cpu" and one.is_contiguous()
    return plain and one.shape == (channels,)


def _usual(x: Tensor) -> bool:
    """Single precision on the processor, channels last and in no other way; no stand-in that a tracer hands over."""
    plain = type(x) is Tensor and x.dtype == torch.float32 and x.device.type == "cpu"
    return plain and x.is_contiguous(memory_format=_LAST) and not x.is_contiguous()


class _Normalised(torch.autograd.Function):
    """The kernels with their gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, plus: Tensor | None, scale: Scale, finish: Finish
    ) -> Tensor:
        rows, channels = x.numel() // x.shape[1], x.shape[1]
        mean, inverse, factor, offset = x.new_empty(4, channels).unbind()
        _kernels().statistics(
            *(*_at(x), rows, channels, scale.eps, *_at(weight, bias, mean, inverse, factor, offset)),
            *(scale.momentum, *_at(*(scale.running or (None, None)))),
        )
        out, *left = _applied(x, factor, offset, finish, plus)
        # What came out says where ReLU cut something off that was added to.
        ctx.save_for_backward(x, weight, bias, plus, mean, inverse, factor, offset, *left, *[out][: plus is not None])
        ctx.scale, ctx.finish = scale, finish
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        x, weight, bias, plus, mean, inverse, factor, offset, *left = ctx.saved_tensors
        finish: Finish = ctx.finish
        if torch.is_grad_enabled() or (finish.slope is None and not _usual(gradient)):
            # A gradient of this gradient may be wanted; and to one that lies otherwise PyTorch adds up otherwise.
            inputs = [x, weight, bias] if plus is None else [x, weight, bias, plus]
            again = _again(inputs, ctx.scale, finish, gradient, differentiable=torch.is_grad_enabled())
            return *again, *[None] * (6 - len(inputs))
        gradient = gradient.contiguous(memory_format=_LAST)
        images, channels, height, width = x.shape
        rows = images * height * width
        by_x, by_plus = torch.empty_like(x), None if plus is None else torch.empty_like(x)
        by_weight, by_bias, *room = x.new_empty(4, channels).unbind()
        answers = _at(by_weight, by_bias, *room)
        if finish.pool == (1, 1):
            terms = _at(mean, inverse, factor, offset, weight)
            after = (_After.of(finish.slope), finish.slope or 0.0)
            given = _at(x, *(left or [None]), gradient)
            _kernels().unapply(*given, rows, channels, *terms, *after, *_at(by_x, by_plus), *answers)
        else:
            given, terms = _at(x, *left, gradient), _at(mean, inverse, weight, by_x)
            _kernels().unapply_pooled(*given, images, height, width, channels, *terms, *answers)
        return by_x, by_weight, by_bias, by_plus, None, None


def _applied(x: Tensor, factor: Tensor, offset: Tensor, finish: Finish, plus: Tensor | None) -> tuple[Tensor, ...]:
    """The finished map; where maxima were taken also what they were before, and whose pixels they are."""
    images, channels, height, width = x.shape
    if finish.pool == (1, 1):
        out = torch.empty_like(x)
        after = (_After.of(finish.slope), finish.slope or 0.0)
        _kernels().apply(*_at(x), images * height * width, channels, *_at(factor, offset, plus), *after, *_at(out))
        return (out,)
    out = torch.empty_like(x[:, :, : height // 2, : width // 2], memory_format=_LAST)
    best, taken = torch.empty_like(out), torch.empty_like(out, dtype=torch.int32)
    _kernels().apply_pooled(*_at(x), images, height, width, channels, *_at(factor, offset, out, best, taken))
    return out, best, taken


def _at(*tensors: Tensor | None) -> list[int | None]:
    """Where they lie."""
    return [None if one is None else one.data_ptr() for one in tensors]


def _again(
    inputs: list[Tensor], scale: Scale, finish: Finish, gradient: Tensor, *, differentiable: bool
) -> tuple[Tensor, ...]:
    """The gradients as PyTorch takes them, of a pass that is made again; it leaves no statistics behind."""
    with torch.enable_grad():
        # Views of their own: of two inputs one may lie behind the other, and its gradient is that of this map alone.
        x, weight, bias, *plus = (
            one.view_as(one) if differentiable and one.requires_grad else one.detach().requires_grad_()
            for one in inputs
        )
        out = finish.of(_by_batch(x, scale._replace(weight=weight, bias=bias, running=None)), *plus)
        return torch.autograd.grad(out, [x, weight, bias, *plus], gradient, create_graph=differentiable)


def _kernels() -> ctypes.CDLL:
    found = library()
    assert not isinstance(found, Unavailable), "asked for only where they are"
    return found


def _agrees() -> bool:
    """Whether there are kernels here whose bits are PyTorch's: another version of it may add up otherwise."""
    return not isinstance(library(), Unavailable) and _tried()


@cache
def _tried() -> bool:
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        generator = torch.Generator().manual_seed(0)
        finishes = (Finish(), Finish(0.0), Finish(0.1), Finish(0.0, (2, 2)))
        return all(_same(channels, finish, generator) for channels, finish in product((16, 48, 112), finishes))


def _same(channels: int, finish: Finish, generator: torch.Generator) -> bool:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, further = (drawn(3, channels, 5, 7).mul(2).add(0.5).contiguous(memory_format=_LAST) for _ in range(2))
    weight, bias, mean = drawn(3, channels).unbind()
    var = drawn(channels).square()
    plus = further if finish == Finish(0.0) else None
    inputs = [one.requires_grad_() for one in (x, weight, bias, plus) if one is not None]
    ours, theirs = (Scale(weight, bias, 1e-5, 0.1, (mean.clone(), var.clone())) for _ in range(2))
    out, expected = _by_kernels(x, ours, finish, plus), finish.of(_by_batch(x, theirs), plus)
    # Given as a factor: to look at a gradient that is handed over PyTorch imports half of a compiler.
    factor = drawn(*out.shape).contiguous(memory_format=_LAST)
    slopes, slopes_expected = (torch.autograd.grad((one * factor).sum(), inputs) for one in (out, expected))
    with torch.no_grad():
        fixed = _applied(x, *_terms(mean, var, ours), finish, plus)[0]
        fixed_expected = finish.of(_by(x, mean, var, ours), plus)
    computed = (out, fixed, *slopes, *(ours.running or ()))
    wanted = (expected, fixed_expected, *slopes_expected, *(theirs.running or ()))
    return all(torch.equal(one, other) for one, other in zip(computed, wanted, strict=True))
