"""Networks: sizes of the papers' tables, forward passes against NumPy, initialisation, and what users may misspell."""

import doctest
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from semifed.errors import UserError
from semifed.models import BatchNorm, HeadSpec, Network, build_network, network, set_batchnorm

Array = NDArray[np.float64]
SSB = {"ova": "mlp3(1024)"}
DRAWN = ["cnn", "dense-cnn", "resnet8", "wrn-28-2"]  # all of it trained from scratch
NARROW: dict[str, Any] = {"cnn": [4, 6, 8], "dense-cnn": [8], "resnet8": 0.5, "wrn-28-2": 0.5}


def build(name: str, seed: int = 0, **options: Any) -> Network:
    settings: dict[str, Any] = {"channels": 3, "size": (32, 32), "classes": 10} | options
    return build_network(name, generator=torch.Generator().manual_seed(seed), **settings)


def parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def randomised(module: nn.Module, seed: int) -> None:
    """Give batch norm scales, shifts and statistics that a wrong order or a forgotten layer would show."""
    generator = torch.Generator().manual_seed(seed)
    for layer in module.modules():
        if isinstance(layer, BatchNorm):
            for tensor in (layer.weight, layer.running_var):
                tensor.data.uniform_(0.5, 1.5, generator=generator)
            for tensor in (layer.bias, layer.running_mean):
                tensor.data.normal_(0.0, 0.3, generator=generator)


# ------------------------------------------------------------------------------------------ sizes


@pytest.mark.parametrize(("classes", "count"), [(10, 1_227_594), (100, 1_250_724)])
def test_resnet8_has_the_size_of_sage(classes: int, count: int) -> None:
    assert parameter_count(build("resnet8", classes=classes)) == count


@pytest.mark.parametrize(("size", "side"), [((32, 32), 16), ((24, 18), 6), ((8, 8), 8)])
@pytest.mark.parametrize(
    ("name", "width"), [("cnn", (4, 4, 4)), ("dense-cnn", (5,)), ("resnet8", 0.25), ("wrn-28-2", 0.25)]
)
def test_larger_images_are_seen_as_means_over_areas(
    name: str, width: float | tuple[int, ...], size: tuple[int, int], side: int
) -> None:
    images = torch.randn(3, 3, *size, generator=torch.Generator().manual_seed(2))
    areas = [
        [rows.mean((-2, -1)) for rows in part.tensor_split(side, dim=-1)] for part in images.tensor_split(side, dim=-2)
    ]
    shrunk = torch.stack([torch.stack(row, dim=-1) for row in areas], dim=-2)  # [3, 3, side, side]
    with_size = build(name, size=size, width=width, input_size=side).eval()
    without = build(name, size=(side, side), width=width).eval()
    torch.testing.assert_close(with_size(images).logits, without(shrunk).logits)


def test_proxyfl_adds_its_two_projections() -> None:
    further = {"feature": "linear(256)", "proxy": "linear(256, no-bias)"}
    assert parameter_count(build("resnet8", further=further)) == 1_358_922
    assert parameter_count(build("resnet8", classes=100, further=further)) == 1_382_052


def test_wrn_backbone_has_the_size_of_openmatch() -> None:
    backbone = build("wrn-28-2").backbone
    norms = [layer for layer in backbone.modules() if isinstance(layer, BatchNorm)]
    assert parameter_count(backbone) == 1_466_320
    assert len(norms) == 25
    assert sum(norm.running_mean.numel() for norm in norms) == 1_808


@pytest.mark.parametrize(
    ("head", "further", "counts"),
    [
        ("linear", {}, (1_467_094, 1_473_415, 1_476_640)),
        ("linear", {"ova": "linear"}, (1_468_630, 1_487_495, 1_497_120)),
        ("mlp3(1024)", SSB, (3_848_162, 3_998_837, 4_075_712)),
        ("mlp3(1024)", SSB | {"projection": "128"}, (3_881_186, 4_031_861, 4_108_736)),
    ],
)
def test_wrn_with_heads_has_the_sizes_of_the_table(
    head: str, further: Mapping[str, str], counts: tuple[int, int, int]
) -> None:
    sizes = [parameter_count(build("wrn-28-2", classes=k, head=head, further=further)) for k in (6, 55, 80)]
    assert sizes == list(counts)


def test_cnn_has_the_sizes_of_the_specification() -> None:
    further = {"ova": "mlp2(256)", "projection": 128}
    net = build("cnn", channels=1, size=(28, 28), classes=6, further=further)
    assert parameter_count(net.backbone) == 92_896
    assert parameter_count(net.classifier) == 774
    assert parameter_count(net.heads["ova"]) == 36_108
    assert parameter_count(net.heads["projection"]) == 33_024
    assert parameter_count(net) == 162_802
    small = build("cnn", channels=1, size=(28, 28), classes=6, width=[16, 32, 64])
    assert parameter_count(small.backbone) == 23_408
    assert small.backbone.features == 64


def test_dense_cnn_has_the_size_of_pfls_benchmark() -> None:
    assert parameter_count(build("dense-cnn")) == 1_626_442
    assert build("dense-cnn", width=[7]).backbone.features == 7


def test_width_scales_the_residual_networks() -> None:
    assert build("resnet8", width=1).backbone.features == 64
    assert build("resnet8", width=0.5).backbone.features == 32
    assert build("wrn-28-2", width=1).backbone.features == 64
    # 16-32-64 channels with no shortcut in the first stage, counted by hand.
    convs = 27 * 16 + 8 * 9 * 16**2 + (9 * 16 * 32 + 7 * 9 * 32**2) + (9 * 32 * 64 + 7 * 9 * 64**2)
    shortcuts = 16 * 32 + 32 * 64
    norms = 2 * (8 * 16 + (16 + 7 * 32) + (32 + 7 * 64) + 64)
    assert parameter_count(build("wrn-28-2", width=1).backbone) == convs + shortcuts + norms


# ------------------------------------------------------------------- forward passes against NumPy


def spatial_mean(x: Array) -> Array:
    mean: Array = x.sum((2, 3)) / (x.shape[2] * x.shape[3])
    return mean


class Reference:
    """The networks once more, in NumPy and double precision, from the state dict and the specification."""

    def __init__(self, net: Network) -> None:
        self.state = {name: value.double().numpy() for name, value in net.state_dict().items()}
        self.training = net.training

    def conv(self, x: Array, name: str, stride: int = 1) -> Array:
        weight = self.state[f"backbone.{name}.weight"]
        side = weight.shape[-1]
        padded = np.pad(x, ((0, 0), (0, 0), (side // 2,) * 2, (side // 2,) * 2))
        height, breadth = ((s - 1) // stride + 1 for s in x.shape[2:])
        out = np.zeros((len(x), len(weight), height, breadth))
        for row in range(height):
            for column in range(breadth):
                top, left = row * stride, column * stride
                window = padded[:, :, top : top + side, left : left + side]
                out[:, :, row, column] = np.tensordot(window, weight, ((1, 2, 3), (1, 2, 3)))
        return out

    def norm(self, x: Array, name: str) -> Array:
        state = {key: self.state[f"backbone.{name}.{key}"] for key in ("weight", "bias")}
        mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
        if not self.training:
            mean = self.state[f"backbone.{name}.running_mean"]
            variance = self.state[f"backbone.{name}.running_var"]
        scale = state["weight"] / np.sqrt(variance + 1e-5)
        out: Array = (x - mean[:, None, None]) * scale[:, None, None] + state["bias"][:, None, None]
        return out

    def cnn(self, x: Array) -> Array:
        for block in range(3):
            x = np.maximum(self.norm(self.conv(x, f"convs.{block}"), f"norms.{block}"), 0)
            height, breadth = (max(1, side // 2) for side in x.shape[2:])
            steps = [min(2, side) for side in x.shape[2:]]
            pooled = np.zeros((*x.shape[:2], height, breadth))
            for row in range(height):
                for column in range(breadth):
                    top, left = row * steps[0], column * steps[1]
                    pooled[:, :, row, column] = x[:, :, top : top + steps[0], left : left + steps[1]].max((2, 3))
            x = pooled
        return spatial_mean(x)

    def dense_cnn(self, x: Array) -> Array:
        for layer in range(2):
            # Without padding: the padded result but for its border.
            inner = self.conv(x, f"convs.{layer}")[:, :, 1:-1, 1:-1]
            x = np.maximum(inner + self.state[f"backbone.convs.{layer}.bias"][:, None, None], 0)
        height, breadth = (side // 2 for side in x.shape[2:])
        blocks = x[:, :, : 2 * height, : 2 * breadth].reshape(*x.shape[:2], height, 2, breadth, 2)
        return np.maximum(self.dense(blocks.max((3, 5)).reshape(len(x), -1), "backbone.hidden"), 0)

    def resnet8(self, x: Array) -> Array:
        x = np.maximum(self.norm(self.conv(x, "conv"), "norm"), 0)
        for block, stride in enumerate((1, 2, 2)):
            name = f"blocks.{block}"
            out = np.maximum(self.norm(self.conv(x, f"{name}.conv1", stride), f"{name}.norm1"), 0)
            out = self.norm(self.conv(out, f"{name}.conv2"), f"{name}.norm2")
            if stride == 2:
                x = self.norm(self.conv(x, f"{name}.shortcut.0", 2), f"{name}.shortcut.1")
            x = np.maximum(out + x, 0)
        return spatial_mean(x)

    def wrn(self, x: Array) -> Array:
        def leaky(values: Array) -> Array:
            return np.where(values > 0, values, 0.1 * values)

        x = self.conv(x, "conv")
        for block in range(12):
            name = f"blocks.{block}"
            stride = 2 if block in (4, 8) else 1
            active = leaky(self.norm(x, f"{name}.norm1"))
            out = leaky(self.norm(self.conv(active, f"{name}.conv1", stride), f"{name}.norm2"))
            out = self.conv(out, f"{name}.conv2")
            x = out + (self.conv(active, f"{name}.shortcut", stride) if block in (0, 4, 8) else x)
        return spatial_mean(leaky(self.norm(x, "norm")))

    def dense(self, x: Array, *names: str) -> Array:
        for position, name in enumerate(names):
            x = np.maximum(x, 0) if position else x
            x = x @ self.state[f"{name}.weight"].T + self.state.get(f"{name}.bias", 0.0)
        return x


FORWARDS: list[tuple[str, Any, Callable[[Reference, Array], Array]]] = [
    ("cnn", [4, 6, 5], Reference.cnn),
    ("dense-cnn", [40], Reference.dense_cnn),
    ("resnet8", 0.25, Reference.resnet8),
    ("wrn-28-2", 0.5, Reference.wrn),
]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("name", "width", "reference"), FORWARDS)
def test_features_equal_a_numpy_network(
    name: str,
    width: Any,
    reference: Callable[[Reference, Array], Array],
    memory_format: torch.memory_format,
    training: bool,
) -> None:
    net = build(name, size=(20, 17), width=width)
    randomised(net, seed=1)
    net.train(training)
    x = torch.randn(5, 3, 20, 17, generator=torch.Generator().manual_seed(2))
    expected = reference(Reference(net), x.double().numpy())
    net.to(memory_format=memory_format)  # type: ignore[call-overload]
    with torch.no_grad():
        features = net(x.contiguous(memory_format=memory_format)).features
    assert features.std() > 0.05
    np.testing.assert_allclose(features.numpy(), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_pool_of_the_dense_cnn_gets_gradients_in_its_own_layout(memory_format: torch.memory_format) -> None:
    """Else PyTorch copies the map in front of it twice; the numbers are the same."""
    net = build("dense-cnn", size=(20, 17), width=[8]).to(memory_format=memory_format)  # type: ignore[call-overload]
    x = torch.randn(5, 3, 20, 17, generator=torch.Generator().manual_seed(2)).contiguous(memory_format=memory_format)
    features = net(x).features
    node, layouts = features.grad_fn, []
    while node is not None and "MaxPool2D" not in node.name():
        node = max((following for following, _ in node.next_functions if following), key=depth, default=None)
    assert node is not None
    node.register_prehook(lambda given: layouts.append(given[0].is_contiguous(memory_format=memory_format)))
    features.square().sum().backward()
    assert layouts == [True]


def depth(node: Any) -> int:
    """Of the graph behind it: the way to the images is longer than that to any weight."""
    return 1 + max((depth(following) for following, _ in node.next_functions if following), default=0)


def test_heads_equal_matrix_products() -> None:
    further = {
        "ova": "mlp3(11)",
        "projection": 7,
        "feature": "linear(4)",
        "proxy": "linear(5, no-bias)",
        "wide": "mlp2(9, 3)",
    }
    net = build("cnn", width=(4, 6, 8), classes=3, head="mlp2(13)", further=further).eval()
    output = net(torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(3)))
    reference = Reference(net)
    features = output.features.detach().double().numpy()
    pairs = reference.dense(features, *(f"heads.ova.layers.{layer}" for layer in (0, 2, 4)))
    expected = {
        "logits": reference.dense(features, "classifier.0", "classifier.2"),
        "ova": np.stack([pairs[:, :3], pairs[:, 3:]], axis=1),
        "projection": reference.dense(features, "heads.projection.0", "heads.projection.2"),
        "feature": reference.dense(features, "heads.feature"),
        "proxy": reference.dense(features, "heads.proxy"),
        "wide": reference.dense(features, "heads.wide.0", "heads.wide.2"),
    }
    assert set(output.heads) == set(further)
    assert "heads.proxy.bias" not in reference.state
    for name, values in {"logits": output.logits, **output.heads}.items():
        np.testing.assert_allclose(values.detach().numpy(), expected[name], rtol=1e-4, atol=1e-5)


def test_one_vs_all_linear_head_has_no_bias_and_two_logits_a_class() -> None:
    net = build("cnn", classes=6, further={"ova": "linear"})
    assert [tuple(p.shape) for p in net.heads["ova"].parameters()] == [(12, 128)]
    assert net(torch.zeros(2, 3, 32, 32)).heads["ova"].shape == (2, 2, 6)


def test_a_head_spec_may_stand_for_its_words() -> None:
    spec = HeadSpec("projection", (9,), 3)
    first = build("cnn", further={"z": spec}).state_dict()
    second = build("cnn", further={"z": "mlp2(9, 3)"}).state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, size) for name in DRAWN for size in [(8, 8), (28, 28), (32, 32), (6, 31)]),
        *((name, size) for name in DRAWN if name != "dense-cnn" for size in [(5, 31), (3, 3), (1, 1)]),
    ],
)
def test_every_image_size_gives_features(name: str, size: tuple[int, int]) -> None:
    net = build(name, channels=1, size=size, width=NARROW[name])
    for training in (True, False):
        output = net.train(training)(torch.randn(2, 1, *size))
        assert output.features.shape == (2, net.backbone.features)
        assert output.logits.shape == (2, 10)
        assert output.logits.isfinite().all()


def test_digits_shrink_to_one_pixel_by_three_pools() -> None:
    assert build("cnn", channels=1, size=(8, 8)).backbone.pools == [(2, 2)] * 3
    assert build("cnn", channels=1, size=(2, 5)).backbone.pools == [(2, 2), (1, 2), (1, 1)]


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("mode", ["tracked", "static"])
def test_gradients_reach_every_parameter(name: str, mode: str) -> None:
    net = build(name, size=(16, 16), width=NARROW[name], head="mlp2(32)", further={"ova": "mlp2(32)", "z": 8})
    set_batchnorm(net, mode)
    generator = torch.Generator().manual_seed(4)
    output = net(torch.randn(8, 3, 16, 16, generator=generator))
    outputs: list[Tensor] = [output.logits, *output.heads.values()]
    loss = torch.stack([(o * torch.randn(o.shape, generator=generator)).sum() for o in outputs]).sum()
    torch.autograd.backward(loss)
    still = [
        key
        for key, p in net.named_parameters()
        if p.grad is None or not p.grad.isfinite().all() or p.grad.abs().max() == 0
    ]
    assert still == []


def test_a_head_outside_the_loss_gets_no_gradient_at_all() -> None:
    net = build("cnn", further={"projection": 16})
    net(torch.randn(4, 3, 32, 32)).logits.sum().backward()
    # None, not zero: with a zero gradient, weight decay would still shrink the head.
    assert [p.grad for p in net.heads["projection"].parameters()] == [None] * 4


# ---------------------------------------------------------------------------------------- adapter


@pytest.mark.parametrize(("channels", "size"), [(1, (8, 8)), (3, (5, 4))])
def test_an_untrained_adapter_shows_the_pixels(channels: int, size: tuple[int, int]) -> None:
    net = build("adapter", channels=channels, size=size)
    x = torch.randn(4, channels, *size, generator=torch.Generator().manual_seed(0))
    for memory_format in (torch.contiguous_format, torch.channels_last):
        features = net(x.contiguous(memory_format=memory_format)).features
        assert torch.equal(features, x.reshape(4, -1))
    assert net.backbone.features == channels * size[0] * size[1]


def test_an_adapter_adds_a_perceptron_of_the_pixels() -> None:
    net = build("adapter", channels=1, size=(3, 2), width=(7,))
    generator = torch.Generator().manual_seed(1)
    for parameter in net.parameters():
        parameter.data.normal_(generator=generator)
    x = torch.randn(5, 1, 3, 2, generator=generator)
    pixels = x.reshape(5, 6).double().numpy()
    moved = Reference(net).dense(pixels, "backbone.layers.0", "backbone.layers.2")
    np.testing.assert_allclose(net(x).features.detach().numpy(), pixels + moved, rtol=1e-4, atol=1e-5)
    assert parameter_count(net.backbone) == 6 * 7 + 7 + 7 * 6 + 6


def test_an_adapter_learns_from_its_second_step_on_with_all_its_weights() -> None:
    net = build("adapter", channels=1, size=(8, 8))
    x = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    moving = []
    for _ in range(2):
        sgd.zero_grad()
        net(x).logits.square().sum().backward()
        moving.append({name for name, p in net.named_parameters() if p.grad is not None and p.grad.abs().max() > 0})
        sgd.step()
    everything = {name for name, _ in net.named_parameters()}
    assert moving == [everything - {"backbone.layers.0.weight", "backbone.layers.0.bias"}, everything]


# --------------------------------------------------------------------------------- initialisation


def weights_of(net: nn.Module, kind: type[nn.Conv2d] | type[nn.Linear]) -> list[Tensor]:
    return [layer.weight.detach() for layer in net.modules() if isinstance(layer, kind)]


def pooled_pvalue(scaled: list[Tensor], distribution: Any) -> float:
    """Kolmogorov-Smirnov over all weights, each tensor scaled to the same distribution."""
    return float(stats.kstest(torch.cat([w.flatten() for w in scaled]).numpy(), distribution.cdf).pvalue)


@pytest.mark.parametrize(("name", "width"), [("resnet8", 1), ("wrn-28-2", 1)])
def test_residual_convs_are_normal_by_fan_out(name: str, width: float) -> None:
    convs = weights_of(build(name, width=width).backbone, nn.Conv2d)
    scaled = [w / np.sqrt(2 / (w.shape[0] * w.shape[2] * w.shape[3])) for w in convs]
    for weight in scaled:
        # The standard deviation of a sample has a relative error of 1/√(2n).
        assert abs(weight.std().item() - 1) < 5 / np.sqrt(2 * weight.numel())
    assert pooled_pvalue(scaled, stats.norm) > 1e-3


def test_wrn_heads_are_xavier_normal_with_zero_bias() -> None:
    net = build("wrn-28-2", width=0.5, head="mlp3(256)", further={"ova": "linear", "z": 64})
    linears = [layer for layer in net.modules() if isinstance(layer, nn.Linear)]
    assert all(layer.bias is None or layer.bias.abs().max() == 0 for layer in linears)
    scaled = [layer.weight.detach() / np.sqrt(2 / sum(layer.weight.shape)) for layer in linears]
    for weight in scaled:
        assert abs(weight.std().item() - 1) < 5 / np.sqrt(2 * weight.numel())
    assert pooled_pvalue(scaled, stats.norm) > 1e-3


@pytest.mark.parametrize("name", ["cnn", "dense-cnn", "resnet8"])
def test_linear_layers_are_drawn_as_pytorch_does(name: str) -> None:
    net = build(name, head="mlp2(128)", further={"z": 64})
    linears = [layer for layer in net.modules() if isinstance(layer, nn.Linear)]
    for layer in linears:
        assert layer.bias.abs().max() <= layer.in_features**-0.5
    biases = [layer.bias.detach() * layer.in_features**0.5 for layer in linears]
    assert pooled_pvalue(biases, stats.uniform(-1, 2)) > 1e-3
    scaled = [layer.weight.detach() * layer.in_features**0.5 for layer in linears]
    assert max(w.abs().max().item() for w in scaled) <= 1 + 1e-6
    assert pooled_pvalue(scaled, stats.uniform(-1, 2)) > 1e-3
    with torch.random.fork_rng():
        torch.manual_seed(5)
        default = nn.Linear(linears[0].in_features, linears[0].out_features)
    ours = linears[0].weight.detach().flatten().numpy()
    assert stats.ks_2samp(ours, default.weight.detach().flatten().numpy()).pvalue > 1e-3


def test_resnet8_classifier_of_sage_lies_within_a_sixteenth() -> None:
    weight = build("resnet8").classifier.weight
    assert isinstance(weight, Tensor)
    assert 0.95 / 16 < weight.abs().max() <= 1 / 16


def test_biases_of_convs_are_drawn_as_pytorch_does() -> None:
    convs = [layer for layer in build("dense-cnn").modules() if isinstance(layer, nn.Conv2d)]
    biases = [layer.bias.detach() * layer.weight[0].numel() ** 0.5 for layer in convs if layer.bias is not None]
    assert [len(bias) for bias in biases] == [32, 64]
    assert max(bias.abs().max().item() for bias in biases) <= 1 + 1e-6
    assert pooled_pvalue(biases, stats.uniform(-1, 2)) > 1e-3


def test_cnn_convs_are_drawn_as_pytorch_does() -> None:
    convs = weights_of(build("cnn").backbone, nn.Conv2d)
    assert pooled_pvalue([w * w[0].numel() ** 0.5 for w in convs], stats.uniform(-1, 2)) > 1e-3
    with torch.random.fork_rng():
        torch.manual_seed(6)
        default = nn.Conv2d(64, 128, 3).weight.detach().flatten().numpy()
    assert stats.ks_2samp(convs[-1].flatten().numpy(), default).pvalue > 1e-3


@pytest.mark.parametrize("name", DRAWN)
def test_weights_come_from_the_generator_alone(name: str) -> None:
    further = {"ova": "mlp2(16)", "projection": 8}
    before = torch.get_rng_state()
    first = build(name, further=further).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(99)
        again = build(name, further=further).state_dict()
    other = build(name, seed=1, further=further).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    drawn = [key for key, value in first.items() if value.numel() > 1 and value.std() > 0]
    assert len(drawn) >= 8
    assert not any(torch.equal(first[key], other[key]) for key in drawn)


def test_further_heads_leave_backbone_and_classifier_as_they_are() -> None:
    plain = build("cnn").state_dict()
    forward = build("cnn", further={"ova": "linear", "z": 8}).state_dict()
    backward = build("cnn", further={"z": 8, "ova": "linear"}).state_dict()
    assert all(torch.equal(plain[key], forward[key]) for key in plain)
    assert list(forward) == list(backward)
    assert all(torch.equal(forward[key], backward[key]) for key in forward)


@pytest.mark.parametrize("name", DRAWN)
def test_state_holds_float32_tensors_only(name: str) -> None:
    state = build(name, further={"ova": "linear"}).state_dict()
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert not any(value.is_meta for value in state.values())
    assert not any("num_batches_tracked" in key for key in state)


# ---------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "resnet9"}, ["model.name", "'resnet9'", "did you mean 'resnet8'?"]),
        ({"name": "vgg"}, ["model.name", "cnn", "resnet8", "wrn-28-2"]),
        ({"head": "lineer"}, ["model.head", "'lineer'", "did you mean 'linear'?"]),
        ({"head": "mlp2"}, ["model.head", "mlp2(256)"]),
        ({"head": "mlp1(64)"}, ["model.head", "2 to 9"]),
        ({"head": "mlp3(0)"}, ["model.head", "'mlp3(0)'"]),
        ({"further": {"ova": "mlp2(256, 4)"}}, ["model.heads.ova", "mlp2(256)"]),
        ({"further": {"projection": "linear"}}, ["model.heads.projection", "linear(128)"]),
        ({"further": {"projection": -3}}, ["model.heads.projection", "'-3'"]),
        ({"further": {"a.b": 8}}, ["'a.b'", "cannot name a head"]),
        ({"further": {"keys": 8}}, ["'keys'", "cannot name a head"]),
        ({"further": {"z": HeadSpec("projection")}}, ["model.heads.z", "number of outputs"]),
        ({"further": {"z": HeadSpec("liner")}}, ["model.heads.z", "did you mean 'linear'?"]),
        ({"width": 2}, ["model.width", "[32, 64, 128]", "not 2"]),
        ({"width": [16, 32]}, ["model.width", "[16, 32]"]),
        ({"width": [16, 32, 0]}, ["model.width"]),
        ({"name": "resnet8", "width": [16, 32, 64]}, ["model.width", "[16, 32, 64]"]),
        ({"name": "resnet8", "width": True}, ["model.width", "not True"]),
        ({"name": "resnet8", "width": 0}, ["model.width", "not 0"]),
        ({"name": "wrn-28-2", "width": 0.3}, ["model.width", "16 x width", "0.3"]),
        ({"name": "wrn-28-2", "width": "wide"}, ["model.width", "'wide'"]),
        ({"name": "adapter", "width": 256}, ["model.width", "[256]", "not 256"]),
        ({"name": "adapter", "width": [256, 64]}, ["model.width", "[256]"]),
        ({"name": "dense-cnn", "width": 128}, ["model.width", "dense-cnn", "not 128"]),
        ({"name": "dense-cnn", "size": (5, 9)}, ["dense-cnn", "at least 6 x 6", "not 5 x 9"]),
        ({"name": "adaptor"}, ["model.name", "did you mean 'adapter'?"]),
    ],
)
def test_mistakes_name_the_key_and_what_would_be_right(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        build(**({"name": "cnn"} | options))
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for word in words:
        assert word in message


def test_a_network_without_classes_or_pixels_is_refused() -> None:
    with pytest.raises(ValueError, match="0 classes"):
        build("cnn", classes=0)
    with pytest.raises(ValueError, match=r"\(0, 28\) pixels"):
        build("cnn", size=(0, 28))


def test_the_example_in_the_documentation_runs() -> None:
    result = doctest.testmod(network)
    assert result.attempted >= 3
    assert result.failed == 0
