"""Batch normalisation with running statistics tracked in training, or written by the server only.

"tracked" is the usual layer. "static" is the static batch norm of HeteroFL and SemiFL: clients normalise by
the statistics of their own batches and record nothing, so no statistics leave them; evaluation, gates and
pivots use moments that `recalibrate` takes from images the server holds. "fixed" normalises by the statistics it
has, in training too: those a pretrained network came with.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from semifed.errors import UserError, nearest
from semifed.kernels import Finish, Scale, normalised_by, normalised_by_batch

MODES = ("tracked", "static", "fixed")
NOTHING = Finish()

_ONE_PASS_IMAGES = 4096
_ONE_PASS_BYTES = 512 * 2**20
# A residual block holds its input, its shortcut, the layer's input and its deviations from the mean at once.
_LIVE_TENSORS = 4


class BatchNorm(nn.Module):
    """Normalise each channel of [n, channels, h, w] as `nn.BatchNorm2d` does, holding float tensors only.

    Training with a single value per channel (one image of 1x1 pixels), which has no variance, falls back on
    the running statistics and records nothing, instead of raising.
    """

    weight: nn.Parameter
    bias: nn.Parameter
    running_mean: Tensor
    running_var: Tensor
    kernels: bool = True  # it may compute by ours

    def __init__(self, channels: int, *, mode: str = "tracked", eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.mode = _checked(mode)
        self.eps = eps
        self.momentum = momentum
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.register_buffer("running_mean", torch.empty(channels))
        self.register_buffer("running_var", torch.empty(channels))
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Become the identity in evaluation: scale 1, shift 0, mean 0, variance 1."""
        self.weight.fill_(1.0)
        self.bias.zero_()
        self.running_mean.zero_()
        self.running_var.fill_(1.0)

    def forward(self, x: Tensor, finish: Finish = NOTHING, plus: Tensor | None = None) -> Tensor:
        """Normalise by the batch's own statistics in training, by the running ones in evaluation or where fixed.

        What follows is done with it: a shortcut is added, maxima are taken, a ReLU is applied.
        """
        running = (self.running_mean, self.running_var)
        moved = None if self.mode == "static" else running
        scale = Scale(self.weight, self.bias, self.eps, self.momentum, moved, self.kernels)
        if not self.training or self.mode == "fixed" or x.numel() <= x.shape[1]:
            return normalised_by(x, *running, scale, finish, plus)
        return normalised_by_batch(x, scale, finish, plus)

    def extra_repr(self) -> str:
        """What `print(network)` shows of this layer."""
        return f"{self.weight.numel()}, mode={self.mode!r}"


def set_batchnorm(module: nn.Module, mode: str) -> None:
    """Switch every batch-norm layer of `module`, but not back from "fixed"; the buffers stay as they are."""
    _checked(mode)
    for layer in module.modules():
        if isinstance(layer, BatchNorm) and layer.mode != "fixed":
            layer.mode = mode


def use_kernels(module: nn.Module, used: bool) -> None:
    """Whether its batch norms may compute by kernels of our own: the same bits, at another speed."""
    for layer in module.modules():
        if isinstance(layer, BatchNorm):
            layer.kernels = used


def freeze(module: nn.Module) -> None:
    """Nothing in `module` learns any more, and its batch norms no longer look at batches."""
    module.requires_grad_(False)
    set_batchnorm(module, "fixed")


def frozen_names(module: nn.Module) -> set[str]:
    """The weights that training cannot change: frozen parameters, and the statistics of fixed batch norms."""
    fixed = [name for name, layer in module.named_modules() if isinstance(layer, BatchNorm) and layer.mode == "fixed"]
    statistics = {name for name, _ in module.named_buffers() if name.rpartition(".")[0] in fixed}
    return statistics | {name for name, parameter in module.named_parameters() if not parameter.requires_grad}


@torch.no_grad()
def recalibrate(module: nn.Module, images: Tensor | Sequence[Tensor], batch: int = 256) -> None:
    """Write the moments of each batch-norm layer's input over all `images` [n, c, h, w] to its buffers.

    Exact, up to rounding, for any number of images: the result is that of one training-mode pass over all
    of them as a single batch. Each layer gets the mean and the unbiased variance of its input, while the
    layers before it normalise by their own moments over all images (with the biased variance, as training
    does). Hence neither the order of the images nor `batch` matters, a short last batch has its proper
    weight, and a second call changes nothing. The customary cumulative average (HeteroFL, SemiFL) is only
    an approximation of this: there, earlier layers normalise by the statistics of one batch, and variance
    between batches is lost.

    Where one pass over all images would need too much memory, batches of `batch` images run once per layer,
    each time only as far as that layer. A layer that sees a single value in all keeps its statistics: it
    has no variance, and a fixed one too. Nothing but the running buffers changes.
    """
    parts = [part for part in ([images] if isinstance(images, Tensor) else images) if len(part)]
    if not parts:
        raise ValueError("recalibrate needs at least one image")
    with _evaluation(module):
        values = _values_per_image(module, parts[0][:1])
        if not values:
            return
        batches = _batches(parts, max(values.values()), batch)
        layers = list(values)
        counts: dict[BatchNorm, int] = {}
        if len(batches) == 1:
            _observe(module, layers, batches, counts)
        else:
            for layer in layers:
                _observe(module, [layer], batches, counts)
        for layer, count in counts.items():
            layer.running_var.mul_(count / (count - 1))


class _Moments:
    """Count, mean and summed squared deviation per channel, combined over batches in double precision."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(1, dtype=torch.float64)
        self.squares = torch.zeros(1, dtype=torch.float64)

    def add(self, x: Tensor) -> None:
        """Take in a batch [n, channels, h, w] (pairwise update of Chan, Golub and LeVeque)."""
        # Two passes over the data: torch.var_mean is five times slower on channels_last, and the statistics
        # that F.batch_norm gathers there are off by up to 1e-4 when the mean is larger than the deviation.
        dims = (0, 2, 3)
        centre = x.mean(dims, keepdim=True)
        deviation = (x - centre).square_().mean(dims).to("cpu", torch.float64)
        mean = centre.flatten().to("cpu", torch.float64)
        count = x.numel() // x.shape[1]
        total = self.count + count
        shift = mean - self.mean
        self.squares = self.squares + deviation * count + shift.square() * (self.count * count / total)
        self.mean = self.mean + shift * (count / total)
        self.count = total

    def write(self, layer: BatchNorm) -> None:
        """Set the layer's buffers to the mean and the biased variance."""
        layer.running_mean.copy_(self.mean)
        layer.running_var.copy_(self.squares / self.count)


class _Reached(Exception):
    """The pass has come as far as it needs to."""


def _observe(
    module: nn.Module, layers: Sequence[BatchNorm], batches: Sequence[Tensor], counts: dict[BatchNorm, int]
) -> None:
    """Pass all batches up to the last of `layers` and set their buffers; note the values per channel.

    Several layers, in order of use, need a single batch: the later ones must see the earlier ones normalised.
    """
    moments = {layer: _Moments() for layer in layers}

    def take(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, BatchNorm)
        moments[layer].add(inputs[0])
        if layer is layers[-1]:
            raise _Reached
        settle(layer)

    def settle(layer: BatchNorm) -> None:
        if moments[layer].count > 1:
            moments[layer].write(layer)
            counts[layer] = moments[layer].count

    hooks = [layer.register_forward_pre_hook(take) for layer in layers]
    try:
        for images in batches:
            try:
                module(images)
            except _Reached:
                continue
    finally:
        for hook in hooks:
            hook.remove()
    settle(layers[-1])


def _values_per_image(module: nn.Module, image: Tensor) -> dict[BatchNorm, int]:
    """The batch-norm layers in order of use, each with the size of its input for one image."""
    values: dict[BatchNorm, int] = {}

    def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, BatchNorm)
        values.setdefault(layer, inputs[0].numel())

    layers = [layer for layer in module.modules() if isinstance(layer, BatchNorm) and layer.mode != "fixed"]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        if layers:
            module(image)
    finally:
        for hook in hooks:
            hook.remove()
    return values


def _batches(parts: Sequence[Tensor], values_per_image: int, batch: int) -> list[Tensor]:
    """All images in one batch if they are few enough and alike, else in batches of `batch`."""
    count = sum(len(part) for part in parts)
    needed = count * values_per_image * parts[0].element_size() * _LIVE_TENSORS
    alike = len({part.shape[1:] for part in parts}) == 1
    if alike and count <= _ONE_PASS_IMAGES and needed <= _ONE_PASS_BYTES:
        return [parts[0] if len(parts) == 1 else torch.cat(list(parts))]
    return [chunk for part in parts for chunk in torch.split(part, batch)]


@contextmanager
def _evaluation(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; each submodule gets its own flag back."""
    flags = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, training in flags:
            child.training = training


def _checked(mode: str) -> str:
    if mode not in MODES:
        raise UserError(f"batch norm mode '{mode}' is unknown; {nearest(mode, MODES)}")
    return mode
