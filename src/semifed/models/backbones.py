"""Backbones from images to features: two CNNs, ResNet-8, WRN-28, and raw pixels with an adapter."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semifed.errors import UserError
from semifed.kernels import Finish
from semifed.models.batchnorm import BatchNorm

Width = float | Sequence[int] | None
RELU, LEAKY = Finish(slope=0.0), Finish(slope=0.1)


class Normalisation(NamedTuple):
    """The mean and deviation a channel by which the views normalised the images."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


class Setting(NamedTuple):
    """What a backbone is built for: the images it will see, and the keys of [model] that shape it."""

    channels: int
    size: tuple[int, int]
    width: Width = None
    weights: str | None = None
    input_size: int | None = None
    trainable: str | None = None  # "all", "last" or "none"
    normalised: Normalisation | None = None
    architecture: Mapping[str, Any] | None = None  # given where the caller loads all weights: no other are looked for


class Backbone(nn.Module):
    """Maps images [n, channels, h, w] to vectors [n, features], first by what is frozen, then by what is trained."""

    features: int
    pretrained: bool = False  # its weights are read, not drawn

    @property
    def architecture(self) -> dict[str, Any]:
        """What is needed beside the keys of [model] to build it without its pretrained weights."""
        return {}

    def load_pretrained(self) -> None:
        """Read the weights it is named for; none where they are drawn."""

    def frozen_part(self, x: Tensor) -> Tensor:
        """What training never changes about images: maps [n, ...], by default the images themselves."""
        return x

    def trainable_part(self, maps: Tensor) -> Tensor:
        """Features [n, features] of what `frozen_part` gave."""
        raise TypeError(f"{type(self).__name__} must say how features come about")

    def forward(self, x: Tensor) -> Tensor:
        """Features [n, features] of images [n, channels, h, w]."""
        return self.trainable_part(self.frozen_part(x))


class Convolutional(Backbone):
    """Trained from scratch on images, which it shrinks to `input_size` pixels a side first, if that is given.

    At half of the side a network does a quarter of the work.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        side = setting.input_size
        if side is not None and side > min(setting.size):
            height, breadth = setting.size
            raise UserError(
                f"model.input_size: images are shrunk to it, and these have {height} x {breadth} pixels; "
                f"use at most {min(setting.size)}, or leave it out"
            )
        self.size = setting.size if side is None else (side, side)  # of what it looks at

    def frozen_part(self, x: Tensor) -> Tensor:
        """The images, or means over areas of their pixels."""
        return x if x.shape[2:] == self.size else F.adaptive_avg_pool2d(x, self.size)


class CNN(Convolutional):
    """Three blocks of conv 3x3 - batch norm - ReLU - max-pool 2, then the global mean."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        widths = _block_widths((32, 64, 128) if setting.width is None else setting.width)
        self.features = widths[-1]
        self.convs = nn.ModuleList(
            _conv3(before, after) for before, after in zip((setting.channels, *widths), widths, strict=False)
        )
        self.norms = nn.ModuleList(BatchNorm(after) for after in widths)
        self.pools: list[tuple[int, int]] = []
        height, breadth = self.size
        for _ in widths:
            # A side that is down to one pixel is pooled no further.
            pool = (min(2, height), min(2, breadth))
            height, breadth = height // pool[0], breadth // pool[1]
            self.pools.append(pool)

    def trainable_part(self, maps: Tensor) -> Tensor:
        """Features [n, features] of images [n, channels, h, w]."""
        for conv, norm, pool in zip(self.convs, self.norms, self.pools, strict=True):
            # ReLU is monotone, so it commutes with the maximum and costs a quarter after it.
            maps = norm(conv(maps), Finish(slope=0.0, pool=pool))
        return maps.mean((2, 3))


class DenseCNN(Convolutional):
    """conv 3x3 - ReLU, twice, without padding, max-pool 2, a hidden layer of `width` units (in a list), ReLU.

    The network of cross-device benchmarks (Reddi et al. 2021, without its dropout; pfl-research): most of its weights
    are in the hidden layer, so it costs little to train and much to send.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        height, breadth = self.size
        if min(height, breadth) < 6:
            raise UserError(f"model.name: dense-cnn needs images of at least 6 x 6 pixels, not {height} x {breadth}")
        self.convs = nn.ModuleList([nn.Conv2d(setting.channels, 32, 3), nn.Conv2d(32, 64, 3)])
        self.features = _hidden_units((128,) if setting.width is None else setting.width, "dense-cnn")
        self.hidden = nn.Linear(64 * ((height - 4) // 2) * ((breadth - 4) // 2), self.features)

    def trainable_part(self, maps: Tensor) -> Tensor:
        """Features [n, features] of images [n, channels, h, w]."""
        first, second = self.convs
        maps = F.max_pool2d(second(F.relu(first(maps), inplace=True)), 2)
        if maps.requires_grad and maps.is_contiguous(memory_format=torch.channels_last):
            # Rows hand their gradient back in the other layout, and for that the pool would copy its large map twice.
            maps.register_hook(lambda gradient: gradient.contiguous(memory_format=torch.channels_last))
        # ReLU commutes with the maximum, and after maps have become rows its gradient need not mix two layouts.
        return F.relu(self.hidden(F.relu(maps.flatten(1), inplace=True)), inplace=True)


class ResNet8(Convolutional):
    """The CIFAR ResNet of 6n+2 layers with n = 1 (He et al. 2016), `width` times as wide; SAGE uses 4."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        widths = _stage_widths(4 if setting.width is None else setting.width)
        self.features = widths[-1]
        self.conv = _conv3(setting.channels, widths[0])
        self.norm = BatchNorm(widths[0])
        self.blocks = nn.Sequential(
            BasicBlock(widths[0], widths[0], stride=1),
            BasicBlock(widths[0], widths[1], stride=2),
            BasicBlock(widths[1], widths[2], stride=2),
        )

    def trainable_part(self, maps: Tensor) -> Tensor:
        """Features [n, features] of images [n, channels, h, w]."""
        maps = self.blocks(self.norm(self.conv(maps), RELU))
        return maps.mean((2, 3))


class BasicBlock(nn.Module):
    """conv - norm - ReLU - conv - norm, plus the input (by 1x1 conv and norm if shapes differ), ReLU."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3(before, after, stride)
        self.norm1 = BatchNorm(after)
        self.conv2 = _conv3(after, after)
        self.norm2 = BatchNorm(after)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and before == after
            else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), BatchNorm(after))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps [n, after, h/stride, w/stride]."""
        first = self.norm1(self.conv1(x), RELU)
        out: Tensor = self.norm2(self.conv2(first), RELU, plus=self.shortcut(x))
        return out


class WideResNet28(Convolutional):
    """WRN-28 (Zagoruyko and Komodakis 2016) as in OpenMatch and SSB; `width` is the widening factor.

    Where a block changes the shape, its first conv and its shortcut both take the activated input.
    OpenMatch and SSB feed them the raw input in stages 2 and 3, which leaves one batch norm in each without
    use or gradient.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        widths = _stage_widths(2 if setting.width is None else setting.width)
        self.features = widths[-1]
        self.conv = _conv3(setting.channels, 16)
        blocks: list[nn.Module] = []
        before = 16
        for after, stride in zip(widths, (1, 2, 2), strict=True):
            for position in range(4):
                blocks.append(PreActivationBlock(before, after, stride if position == 0 else 1))
                before = after
        self.blocks = nn.Sequential(*blocks)
        self.norm = BatchNorm(before)

    def trainable_part(self, maps: Tensor) -> Tensor:
        """Features [n, features] of images [n, channels, h, w]."""
        maps = self.norm(self.blocks(self.conv(maps)), LEAKY)
        return maps.mean((2, 3))


class PreActivationBlock(nn.Module):
    """norm - leaky ReLU - conv, twice, plus the raw input, or 1x1 conv of the active one if shapes differ."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm1 = BatchNorm(before)
        self.conv1 = _conv3(before, after, stride)
        self.norm2 = BatchNorm(after)
        self.conv2 = _conv3(after, after)
        self.shortcut = None if stride == 1 and before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [n, after, h/stride, w/stride]."""
        active = self.norm1(x, LEAKY)
        out: Tensor = self.conv2(self.norm2(self.conv1(active), LEAKY))
        out += x if self.shortcut is None else self.shortcut(active)
        return out


class Adapter(Backbone):
    """Raw pixels x plus a two-layer perceptron of them that starts as zero: untrained, the features are the pixels.

    It stands in for a pretrained network of which only the last block learns: the features mean something before any
    training, and training moves them little by little. `width` is the number of hidden units, in a list.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        height, breadth = setting.size
        self.features = setting.channels * height * breadth
        hidden = _hidden_units((256,) if setting.width is None else setting.width, "adapter")
        self.layers = nn.Sequential(
            nn.Linear(self.features, hidden), nn.ReLU(inplace=True), ZeroLinear(hidden, self.features)
        )

    def frozen_part(self, x: Tensor) -> Tensor:
        """Pixels [n, channels · h · w]."""
        return x.flatten(1)

    def trainable_part(self, maps: Tensor) -> Tensor:
        """The pixels, moved."""
        moved: Tensor = maps + self.layers(maps)
        return moved


class ZeroLinear(nn.Linear):
    """A linear layer that answers zero until it is trained."""

    @torch.no_grad()
    def reset(self) -> None:
        """No weight, no bias."""
        self.weight.zero_()
        self.bias.zero_()


def _conv3(before: int, after: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, stride, padding=1, bias=False)


def _block_widths(width: Width) -> tuple[int, int, int]:
    match width:
        case [int(first), int(second), int(third)] if min(first, second, third) > 0:
            return first, second, third
    raise UserError(
        f"model.width: expected the channels of the cnn's three blocks, such as [32, 64, 128], not {width!r}"
    )


def _hidden_units(width: Width, name: str) -> int:
    match width:
        case [int(units)] if units > 0:
            return units
    raise UserError(f"model.width: expected the hidden units of the {name}, such as [256], not {width!r}")


def _stage_widths(width: Width) -> tuple[int, int, int]:
    """The channels of the three stages of a residual network: 16, 32 and 64 times the factor."""
    if isinstance(width, bool) or not isinstance(width, int | float) or width <= 0 or 16 * width % 1:
        raise UserError(
            f"model.width: expected a factor that makes 16 x width a whole number of channels, "
            f"such as 1, 2 or 0.5, not {width!r}"
        )
    narrow = int(16 * width)
    return narrow, 2 * narrow, 4 * narrow
