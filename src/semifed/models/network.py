"""The network of a run: a backbone, a classifier and named further heads, initialised from one generator."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import init

from semifed.errors import UserError, nearest
from semifed.models.backbones import (
    CNN,
    Adapter,
    Backbone,
    DenseCNN,
    Normalisation,
    ResNet8,
    Setting,
    WideResNet28,
    Width,
    ZeroLinear,
)
from semifed.models.batchnorm import BatchNorm
from semifed.models.efficientnet import EfficientNetLite0
from semifed.models.heads import (
    Cosine,
    DinoLinear,
    HeadSpec,
    Subspace,
    build_head,
    class_head_spec,
    further_head_spec,
)
from semifed.models.stem_store import StemStore
from semifed.models.vit import VisionTransformer

__all__ = ["MODELS", "HeadSpec", "Network", "Output", "build_network"]


class Output(NamedTuple):
    """What a network says of n images."""

    logits: Tensor  # [n, classes]
    features: Tensor  # [n, d]
    heads: dict[str, Tensor]  # by name, such as "ova" [n, 2, classes] (0 unknown, 1 known), "projection" [n, m]


class Network(nn.Module):
    """A backbone with a classifier and further heads on its features."""

    backbone: Backbone
    classifier: nn.Module
    heads: nn.ModuleDict
    stems: StemStore | None = None  # where stems are kept from run to run

    def __init__(self, backbone: Backbone, classifier: nn.Module, heads: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.backbone = backbone
        self.classifier = classifier
        self.heads = nn.ModuleDict(heads)

    def forward(self, x: Tensor) -> Output:
        """Logits, features and the outputs of all further heads of images [n, channels, h, w]."""
        return self.after_stem(self.stem(x))

    def stem(self, x: Tensor) -> Tensor:
        """What training never changes about images: maps [n, ...]."""
        if self.stems is None:
            return self.backbone.frozen_part(x)
        return self.stems.maps(x, self.backbone.frozen_part)

    def after_stem(self, maps: Tensor) -> Output:
        """All outputs, given what `stem` said of the images."""
        return self.after_backbone(self.backbone.trainable_part(maps))

    def after_backbone(self, features: Tensor) -> Output:
        """All outputs, given the features."""
        return Output(self.classifier(features), features, {name: head(features) for name, head in self.heads.items()})


Initialiser = Callable[[Tensor, torch.Generator], object]


def _kaiming_fan_out(weight: Tensor, generator: torch.Generator) -> None:
    """N(0, 2 / (k² · outputs)); OpenMatch's WRN asks for leaky ReLU with no slope, so gain √2 as well."""
    init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu", generator=generator)


def _xavier_normal(weight: Tensor, generator: torch.Generator) -> None:
    """N(0, 2 / (inputs + outputs))."""
    init.xavier_normal_(weight, generator=generator)


def _uniform_fan_in(weight: Tensor, generator: torch.Generator) -> None:
    """U(±1/√inputs), what PyTorch gives linear and convolutional layers by default."""
    bound = weight[0].numel() ** -0.5
    init.uniform_(weight, -bound, bound, generator=generator)


class _Family(NamedTuple):
    summary: str
    backbone: Callable[[Setting], Backbone]
    conv: Initialiser
    linear: Initialiser
    zero_bias: bool
    keys: tuple[str, ...] = ("width", "input_size")  # of [model], that shape its backbone


_PRETRAINED_KEYS = ("weights", "input_size", "trainable")


_FAMILIES = {
    "cnn": _Family(
        "three conv blocks, width = their channels (default [32, 64, 128]); quick on a CPU",
        CNN,
        _uniform_fan_in,
        _uniform_fan_in,
        zero_bias=False,
    ),
    "dense-cnn": _Family(
        "two conv layers and a hidden one, width = its units (default [128]); light to train, heavy to send",
        DenseCNN,
        _uniform_fan_in,
        _uniform_fan_in,
        zero_bias=False,
    ),
    "resnet8": _Family(
        "CIFAR ResNet of 8 layers, width = multiple of 16-32-64 channels (default 4); SAGE, ProxyFL",
        ResNet8,
        _kaiming_fan_out,
        _uniform_fan_in,
        zero_bias=False,
    ),
    "wrn-28-2": _Family(
        "wide ResNet of 28 layers, width = widening factor (default 2); OpenFL, SemiFL, SSB; wants a GPU",
        WideResNet28,
        _kaiming_fan_out,
        _xavier_normal,
        zero_bias=True,
    ),
    "adapter": _Family(
        "raw pixels and a residual layer that starts as zero, width = its hidden units (default [256])",
        Adapter,
        _uniform_fan_in,
        _uniform_fan_in,
        zero_bias=False,
        keys=("width",),
    ),
    "efficientnet-lite0": _Family(
        "EfficientNet-Lite0 with ImageNet weights, frozen but its last stage; needs semifed[efficientnet]",
        EfficientNetLite0,
        _kaiming_fan_out,
        _uniform_fan_in,
        zero_bias=False,
        keys=_PRETRAINED_KEYS,
    ),
    "vit": _Family(
        "a ViT from weights of yours (DINO), frozen but its last block; needs semifed[vit], wants a GPU",
        VisionTransformer,
        _kaiming_fan_out,
        _uniform_fan_in,
        zero_bias=False,
        keys=_PRETRAINED_KEYS,
    ),
}

MODELS: dict[str, str] = {name: family.summary for name, family in _FAMILIES.items()}


def build_network(
    name: str,
    *,
    channels: int,
    size: tuple[int, int],
    classes: int,
    width: Width = None,
    head: str = "linear",
    further: Mapping[str, str | int | HeadSpec] | None = None,
    weights: str | None = None,
    input_size: int | None = None,
    trainable: str | None = None,
    normalised: Normalisation | None = None,
    architecture: Mapping[str, Any] | None = None,
    generator: torch.Generator,
) -> Network:
    """The network `name` for images [n, channels, *size], its weights drawn from the generator alone, or pretrained.

    `head` is "linear", "cosine" or "mlpN(hidden)"; `further` names more heads (see `heads.further_head_spec`).
    Pretrained networks must know how images are `normalised`, to normalise them in their own way. With an
    `architecture` they come without their weights, which the caller must load.
    Backbone and classifier are drawn first and further heads in the order of their names, so that methods
    with different further heads start from the same classifier.

    >>> generator = torch.Generator().manual_seed(0)
    >>> network = build_network("cnn", channels=1, size=(28, 28), classes=6, further={"ova": "mlp2(256)"},
    ...                         generator=generator)
    >>> network(torch.zeros(5, 1, 28, 28)).heads["ova"].shape
    torch.Size([5, 2, 6])
    """
    if name not in _FAMILIES:
        raise UserError(f"model.name: '{name}' is unknown; {nearest(name, _FAMILIES)}")
    family = _FAMILIES[name]
    setting = Setting(channels, size, width, weights, input_size, trainable, normalised, architecture)
    for key in ("width", *_PRETRAINED_KEYS):
        if key not in family.keys and getattr(setting, key) is not None:
            others = ", ".join(f"model.{one}" for one in family.keys)
            raise UserError(f"model.{key}: {name} has no such setting; it has {others}")
    if min(channels, classes, *size) < 1:
        raise ValueError(f"no network for {channels} channels, {size} pixels and {classes} classes")
    classifier_spec = class_head_spec(head, "model.head")
    specs = {key: further_head_spec(key, value) for key, value in sorted((further or {}).items())}
    # Cosines of known and of novel classes are compared, so they have one scale.
    specs = {key: spec._replace(temperature=classifier_spec.temperature) for key, spec in specs.items()}
    # On the meta device PyTorch's own initialisation costs nothing and leaves the global random state alone.
    with torch.device("meta"):
        backbone = family.backbone(setting)
        network = Network(
            backbone,
            build_head(classifier_spec, features=backbone.features, classes=classes, key="model.head"),
            {
                key: build_head(spec, features=backbone.features, classes=classes, key=f"model.heads.{key}")
                for key, spec in specs.items()
            },
        )
    # `to_empty` does the same, but a likeness of a meta tensor makes PyTorch import sympy, half a second a process.
    empty = {
        key: torch.empty(one.shape, dtype=one.dtype, device=generator.device)
        for key, one in network.state_dict().items()
    }
    network.load_state_dict(empty, assign=True)
    _initialise(network, family, generator)
    if architecture is None:
        backbone.load_pretrained()
    return network


@torch.no_grad()
def _initialise(network: Network, family: _Family, generator: torch.Generator) -> None:
    read = set(network.backbone.modules()) if network.backbone.pretrained else set()
    for module in network.modules():
        if module in read:
            continue
        match module:
            case Cosine() | DinoLinear():
                module.reset(generator)
            case BatchNorm() | Subspace() | ZeroLinear():
                module.reset()
            case nn.Conv2d() | nn.Linear():
                draw = family.conv if isinstance(module, nn.Conv2d) else family.linear
                draw(module.weight, generator)
                if module.bias is not None:
                    bound = 0.0 if family.zero_bias else module.weight[0].numel() ** -0.5
                    init.uniform_(module.bias, -bound, bound, generator=generator)
