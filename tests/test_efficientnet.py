"""The frozen layers of EfficientNet-Lite0 as they are computed, batch norms folded, against the layers themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import init

from semifed.models import efficientnet
from semifed.models.backbones import Normalisation, Setting
from semifed.models.batchnorm import BatchNorm
from semifed.models.efficientnet import ConvNorm, EfficientNetLite0


def backbone(size: int, trainable: str = "last") -> EfficientNetLite0:
    """One with weights of no fresh layer, every batch norm another affine map."""
    by = Normalisation((0.5,) * 3, (0.25,) * 3)
    setting = Setting(3, (size, size), weights="random", input_size=size, trainable=trainable, normalised=by)
    built = EfficientNetLite0(setting)
    redraw(built, 0)
    return built.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


@torch.no_grad()
def redraw(built: EfficientNetLite0, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for layer in built.modules():
        if isinstance(layer, ConvNorm):
            init.kaiming_normal_(layer.conv.weight, generator=generator)
        if isinstance(layer, BatchNorm):
            layer.weight.uniform_(0.5, 1.5, generator=generator)
            layer.bias.normal_(0.5, 0.5, generator=generator)
            layer.running_mean.normal_(0.0, 0.5, generator=generator)
            layer.running_var.uniform_(0.5, 2.0, generator=generator)


def images(count: int, size: int) -> Tensor:
    drawn = torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))
    return drawn.contiguous(memory_format=torch.channels_last)


def plain(built: EfficientNetLite0, x: Tensor) -> Tensor:
    """The oracle: layer after layer, all images at once."""
    maps: Tensor = built.layers[: built.frozen_layers](built.form(x))
    return maps


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())
    assert float(expected.std()) > 0.01 * float(expected.abs().max()), "something to be seen"


# Sides of maps: 64 and 32 halve to even ones; 75 to 38, 19, 10, 5, 3; 33 to 17, 9, 5, 3, 2.
@pytest.mark.parametrize("size", [64, 32, 75, 33])
@pytest.mark.parametrize("count", [1, 19, 70])
@pytest.mark.parametrize("training", [False, True])
def test_folded_layers_say_what_the_plain_ones_say(
    size: int, count: int, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(efficientnet, "_FOLDED_FROM", 0)
    built, x = backbone(size).train(training), images(count, size)
    before = {name: tensor.clone() for name, tensor in built.state_dict().items()}
    assert_same(built.frozen_part(x), plain(built, x))
    assert all(torch.equal(tensor, before[name]) for name, tensor in built.state_dict().items())


@pytest.mark.parametrize("trainable", ["last", "none"])
def test_folding_keeps_up_with_the_weights(trainable: str) -> None:
    built, x = backbone(32, trainable), images(40, 32)
    first = built.frozen_part(x)
    redraw(built, 1)
    second = built.frozen_part(x)
    assert_same(second, plain(built, x))
    assert not torch.allclose(first, second, rtol=0.1)
    other = backbone(32, trainable)
    built.load_state_dict(other.state_dict())
    assert torch.equal(built.frozen_part(x), first)
    given: dict[str, Any] = {name: tensor * 1.1 for name, tensor in other.state_dict().items()}
    with torch.no_grad():
        for name, tensor in built.state_dict().items():
            tensor.copy_(given[name])
    swapped = torch.func.functional_call(Stem(other), {f"backbone.{name}": one for name, one in given.items()}, (x,))
    assert_same(built.frozen_part(x), plain(built, x))
    assert torch.equal(swapped, built.frozen_part(x))


class Stem(torch.nn.Module):
    """The frozen part as a module, which `functional_call` wants."""

    def __init__(self, backbone: EfficientNetLite0) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone.frozen_part(x)


def test_few_images_pass_the_plain_layers() -> None:
    built = backbone(64)
    assert torch.equal(built.frozen_part(images(1, 64)), plain(built, images(1, 64)))
    assert built.frozen_part(images(0, 64)).shape == (0, 192, 2, 2)


def test_gradients_reach_images_but_no_frozen_weight() -> None:
    built = backbone(32)
    x, same = (images(40, 32).requires_grad_() for _ in range(2))
    assert not built.frozen_part(x.detach()).requires_grad
    built.frozen_part(x).square().sum().backward()
    plain(built, same).square().sum().backward()
    assert x.grad is not None
    assert same.grad is not None
    assert float((x.grad - same.grad).norm()) <= 1e-3 * float(same.grad.norm())
    assert all(parameter.grad is None for parameter in built.parameters())


def test_what_learns_whole_has_nothing_folded() -> None:
    built, x = backbone(32, "all"), images(40, 32)
    assert torch.equal(built.frozen_part(x), built.form(x))
    assert torch.equal(built.eval()(x), built.layers(built.form(x)))
