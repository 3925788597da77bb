"""Batch norm: against PyTorch's layer, and statistics of the server's images against NumPy."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from semifed.errors import UserError
from semifed.models import BatchNorm, Network, batchnorm, build_network, recalibrate, set_batchnorm

Array = NDArray[np.float64]


@pytest.fixture
def layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make any number of images too many for one pass."""
    monkeypatch.setattr(batchnorm, "_ONE_PASS_BYTES", 0)


def network(name: str = "cnn", *, size: tuple[int, int] = (12, 10), width: Any = (4, 6, 5)) -> Network:
    generator = torch.Generator().manual_seed(0)
    net = build_network(name, channels=2, size=size, classes=3, width=width, generator=generator)
    for layer in norms(net):
        layer.weight.data.uniform_(0.5, 1.5, generator=generator)
        layer.bias.data.normal_(0.0, 0.3, generator=generator)
    set_batchnorm(net, "static")
    return net


def norms(module: nn.Module) -> list[BatchNorm]:
    return [layer for layer in module.modules() if isinstance(layer, BatchNorm)]


def buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.named_buffers()}


def class_sorted_images(count: int, size: tuple[int, int] = (12, 10), seed: int = 1) -> Tensor:
    """Images whose mean and contrast change along the set, as in a labelled set sorted by class."""
    images = torch.randn(count, 2, *size, generator=torch.Generator().manual_seed(seed))
    place = torch.linspace(-1, 1, count)[:, None, None, None]
    return images * (1.5 + place) + 2 * place


def assert_buffers_close(first: dict[str, Tensor], second: dict[str, Tensor], tolerance: float) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=tolerance, atol=tolerance, msg=name)


# ----------------------------------------------------------------------- against PyTorch's own layer


def twins(channels: int = 3) -> tuple[BatchNorm, nn.BatchNorm2d]:
    ours, theirs = BatchNorm(channels), nn.BatchNorm2d(channels)
    with torch.no_grad():
        for parameter in (ours.weight, ours.bias):
            parameter.copy_(torch.tensor([0.5, -1.25, 2.0]))
        theirs.load_state_dict(ours.state_dict(), strict=False)
    return ours, theirs


def test_tracked_layer_is_that_of_pytorch_through_training_and_evaluation() -> None:
    ours, theirs = twins()
    generator = torch.Generator().manual_seed(2)
    for step in range(6):
        for layer in (ours, theirs):
            layer.train(step % 3 != 2)
        x = torch.randn(4, 3, 5, 6, generator=generator) * 3 + step
        upstream = torch.randn(x.shape, generator=generator)
        gradients = []
        for layer in (ours, theirs):
            own = x.clone().requires_grad_()
            out = layer(own)
            out.backward(upstream)
            gradients.append((out.detach(), own.grad, layer.weight.grad, layer.bias.grad))
        for mine, reference in zip(*gradients, strict=True):
            assert torch.equal(mine, reference)
        state = theirs.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in ours.state_dict().items())


def test_tracked_momentum_and_unbiased_variance_in_closed_form() -> None:
    layer = BatchNorm(1)
    x = torch.tensor([1.0, 2.0, 6.0]).reshape(3, 1, 1, 1)
    layer(x)
    assert layer.running_mean.item() == pytest.approx(0.1 * 3)
    assert layer.running_var.item() == pytest.approx(0.9 * 1 + 0.1 * 7)


def test_static_layer_trains_like_tracked_and_records_nothing() -> None:
    ours, theirs = twins()
    set_batchnorm(ours, "static")
    ours.running_mean.fill_(0.7)
    ours.running_var.fill_(2.0)
    x = torch.randn(4, 3, 5, 6, generator=torch.Generator().manual_seed(3)) + 5
    before = buffers(ours)
    assert torch.equal(ours.train()(x), theirs.train()(x))
    assert_buffers_close(buffers(ours), before, 0)
    expected = (x - 0.7) / (2.0 + 1e-5) ** 0.5
    weight, bias = (p.detach()[:, None, None] for p in (ours.weight, ours.bias))
    torch.testing.assert_close(ours.eval()(x).detach(), expected * weight + bias)
    assert_buffers_close(buffers(ours), before, 0)


@pytest.mark.parametrize("mode", ["tracked", "static"])
@pytest.mark.parametrize("count", [0, 1])
def test_a_single_value_per_channel_is_normalised_by_the_running_statistics(mode: str, count: int) -> None:
    layer = BatchNorm(3, mode=mode)
    layer.running_mean.fill_(0.5)
    layer.running_var.fill_(4.0)
    before = buffers(layer)
    x = torch.full((count, 3, 1, 1), 2.5, requires_grad=True)
    out = layer.train()(x)
    torch.testing.assert_close(out.detach(), torch.ones(count, 3, 1, 1), rtol=1e-4, atol=1e-4)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert_buffers_close(buffers(layer), before, 0)


def test_two_values_per_channel_use_the_batch() -> None:
    out = BatchNorm(1).train()(torch.tensor([5.0, 7.0]).reshape(1, 1, 1, 2))
    torch.testing.assert_close(out.detach().flatten(), torch.tensor([-1.0, 1.0]), rtol=1e-4, atol=1e-4)


def test_state_has_no_batch_counter_and_modes_survive_copies() -> None:
    layer = BatchNorm(3, mode="static")
    assert list(layer.state_dict()) == ["weight", "bias", "running_mean", "running_var"]
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin.mode == "static"
    assert "static" in repr(layer)


def test_unknown_modes_name_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'static'"):
        set_batchnorm(network(), "statc")
    with pytest.raises(UserError, match="did you mean 'tracked'"):
        BatchNorm(3, mode="track")


def test_the_mode_is_set_in_every_layer() -> None:
    net = network("resnet8", width=0.25)
    set_batchnorm(net, "tracked")
    assert [layer.mode for layer in norms(net)] == ["tracked"] * 9


# ------------------------------------------------------------------------------------ recalibration


def numpy_moments(net: Network, images: Tensor) -> dict[str, Array]:
    """Mean and unbiased variance of each batch norm's input in the CNN, all images as one batch, by loops."""
    state = {name: value.double().numpy() for name, value in net.state_dict().items()}
    x = images.double().numpy()
    moments: dict[str, Array] = {}
    for block in range(3):
        weight = state[f"backbone.convs.{block}.weight"]
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        maps = np.zeros((len(x), len(weight), *x.shape[2:]))
        for row in range(3):
            for column in range(3):
                patch = padded[:, :, row : row + x.shape[2], column : column + x.shape[3]]
                maps += np.einsum("nchw,oc->nohw", patch, weight[:, :, row, column])
        norm = f"backbone.norms.{block}"
        x = np.zeros_like(maps)
        mean, variance = np.zeros(len(weight)), np.zeros(len(weight))
        for channel in range(len(weight)):
            values = maps[:, channel]
            mean[channel] = values.sum() / values.size
            spread = ((values - mean[channel]) ** 2).sum()
            variance[channel] = spread / (values.size - 1)
            scale = state[f"{norm}.weight"][channel] / np.sqrt(spread / values.size + 1e-5)
            x[:, channel] = (values - mean[channel]) * scale + state[f"{norm}.bias"][channel]
        moments |= {f"{norm}.running_mean": mean, f"{norm}.running_var": variance}
        x = np.maximum(x, 0)
        height, breadth = (side // 2 for side in x.shape[2:])
        x = x[:, :, : 2 * height, : 2 * breadth].reshape(*x.shape[:2], height, 2, breadth, 2).max((3, 5))
    return moments


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("batch", [256, 16])
def test_moments_equal_numpy_in_every_layer(
    memory_format: torch.memory_format, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if batch == 16:
        monkeypatch.setattr(batchnorm, "_ONE_PASS_IMAGES", 16)
    net = network()
    net.to(memory_format=memory_format)  # type: ignore[call-overload]
    images = class_sorted_images(70).contiguous(memory_format=memory_format)
    recalibrate(net, images, batch)
    expected = numpy_moments(net, images)
    written = buffers(net)
    assert written.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(written[name].numpy(), values, rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(("name", "width"), [("cnn", (4, 6, 5)), ("resnet8", 0.25), ("wrn-28-2", 0.25)])
def test_result_is_that_of_one_training_batch(name: str, width: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network(name, width=width)
    images = class_sorted_images(37)
    whole = copy.deepcopy(net)
    set_batchnorm(whole, "tracked")
    for layer in norms(whole):
        layer.momentum = 1.0
    with torch.no_grad():
        whole.train()(images)
    recalibrate(net, images)
    assert_buffers_close(buffers(net), buffers(whole), 1e-4)
    chunked = network(name, width=width)
    monkeypatch.setattr(batchnorm, "_ONE_PASS_BYTES", 0)
    recalibrate(chunked, images, batch=8)
    assert_buffers_close(buffers(chunked), buffers(whole), 1e-4)


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(2, 40),
    batch=st.integers(1, 45),
    seed=st.integers(0, 2**16),
    cut=st.integers(0, 40),
)
def test_neither_batches_nor_order_nor_grouping_matter(count: int, batch: int, seed: int, cut: int) -> None:
    images = class_sorted_images(count, seed=seed)
    net = network()
    recalibrate(net, images)
    expected = buffers(net)
    shuffled = images[torch.randperm(count, generator=torch.Generator().manual_seed(seed))]
    with pytest.MonkeyPatch.context() as patch:
        for one_pass_bytes in (0, 2**40):
            patch.setattr(batchnorm, "_ONE_PASS_BYTES", one_pass_bytes)
            recalibrate(net, [shuffled[:cut], shuffled[cut:]], batch)
            assert_buffers_close(buffers(net), expected, 5e-5)


@pytest.mark.parametrize("batch", [256, 16])
def test_a_second_time_changes_nothing(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batchnorm, "_ONE_PASS_IMAGES", batch)
    net = network()
    recalibrate(net, class_sorted_images(40), batch)
    first = buffers(net)
    recalibrate(net, class_sorted_images(40), batch)
    assert_buffers_close(buffers(net), first, 0)


@pytest.mark.usefixtures("layer_by_layer")
def test_a_large_mean_costs_no_precision_in_the_variance() -> None:
    layer = BatchNorm(1)
    values = torch.randn(1000, 1, 1, 2, generator=torch.Generator().manual_seed(7)) + 500
    recalibrate(layer, values, batch=64)
    assert layer.running_mean.item() == pytest.approx(values.double().mean().item(), rel=1e-7)
    assert layer.running_var.item() == pytest.approx(values.double().var().item(), rel=1e-5)


def test_images_of_different_sizes_count_by_their_pixels() -> None:
    layer = BatchNorm(1)
    small, large = torch.full((3, 1, 1, 1), 2.0), torch.full((2, 1, 2, 3), -1.0)
    recalibrate(layer, [small, large])
    values = np.array([2.0] * 3 + [-1.0] * 12)
    assert layer.running_mean.item() == pytest.approx(values.mean())
    assert layer.running_var.item() == pytest.approx(values.var(ddof=1))


@pytest.mark.parametrize("one_pass_bytes", [0, 2**40])
def test_nothing_but_the_buffers_changes(one_pass_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batchnorm, "_ONE_PASS_BYTES", one_pass_bytes)
    net = network("resnet8", width=0.25).train()
    net.backbone.get_submodule("blocks.1").eval()
    norms(net)[2].mode = "tracked"
    images = class_sorted_images(20)
    flags = [module.training for module in net.modules()]
    modes = [layer.mode for layer in norms(net)]
    parameters = [p.detach().clone() for p in net.parameters()]
    given_images, random_state = images.clone(), torch.get_rng_state()
    before = buffers(net)
    recalibrate(net, images, batch=8)
    assert [module.training for module in net.modules()] == flags
    assert [layer.mode for layer in norms(net)] == modes
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), parameters, strict=True))
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(images, given_images)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(module._forward_pre_hooks for module in net.modules())
    assert all(not torch.equal(value, before[name]) for name, value in buffers(net).items())
    assert net(images).logits.requires_grad


def test_flags_and_hooks_are_restored_after_a_failure() -> None:
    net = network().train()
    with pytest.raises(RuntimeError):
        recalibrate(net, torch.zeros(4, 3, 12, 10))
    assert all(module.training for module in net.modules())
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_a_layer_with_one_value_in_all_keeps_its_statistics() -> None:
    net = network(size=(2, 2))
    norms(net)[1].running_mean.fill_(0.25)
    recalibrate(net, torch.randn(1, 2, 2, 2))
    first, second, third = norms(net)
    assert first.running_mean.abs().max() > 0
    assert torch.equal(second.running_mean, torch.full((6,), 0.25))
    assert torch.equal(third.running_var, torch.ones(5))


def test_no_image_is_refused_and_no_layer_is_no_work() -> None:
    for nothing in ([], torch.zeros(0, 2, 12, 10), [torch.zeros(0, 2, 12, 10)]):
        with pytest.raises(ValueError, match="at least one image"):
            recalibrate(network(), nothing)
    recalibrate(nn.Conv2d(2, 3, 1), torch.zeros(1, 2, 4, 4))


def test_large_sets_go_through_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    net = network()
    first = net.backbone.get_submodule("convs.0")
    first.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    images = class_sorted_images(21)
    recalibrate(net, images, batch=8)
    assert seen == [1, 21]
    # 4 channels of 12 x 10 float32 values, four tensors alive at a time.
    monkeypatch.setattr(batchnorm, "_ONE_PASS_BYTES", 21 * 4 * 120 * 4 * 4 - 1)
    seen.clear()
    recalibrate(net, images, batch=8)
    assert seen == [1] + [8, 8, 5] * 3
    monkeypatch.setattr(batchnorm, "_ONE_PASS_BYTES", 2**40)
    monkeypatch.setattr(batchnorm, "_ONE_PASS_IMAGES", 20)
    seen.clear()
    recalibrate(net, images, batch=8)
    assert seen == [1] + [8, 8, 5] * 3


def test_evaluation_after_recalibration_normalises_the_images() -> None:
    net = network()
    images = class_sorted_images(64)
    captured: list[Tensor] = []
    layer = norms(net)[0]
    layer.register_forward_pre_hook(lambda _, given: captured.append(given[0].detach()))
    recalibrate(net, images)
    captured.clear()
    net.eval()(images)
    normal = layer(captured[0]).detach()
    out = (normal - layer.bias.detach()[:, None, None]) / layer.weight.detach()[:, None, None]
    torch.testing.assert_close(out.mean((0, 2, 3)), torch.zeros(4), rtol=0, atol=1e-5)
    torch.testing.assert_close(out.var((0, 2, 3)), torch.ones(4), rtol=0, atol=1e-3)


def test_a_client_trains_without_touching_the_statistics_it_received() -> None:
    net = network()
    recalibrate(net, class_sorted_images(30))
    received = buffers(net)
    weights = [p.detach().clone() for p in net.parameters()]
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    net.train()
    for step in range(3):
        loss = F.cross_entropy(net(class_sorted_images(6, seed=step)).logits, torch.arange(6) % 3)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
    assert_buffers_close(buffers(net), received, 0)
    assert all(not torch.equal(p, old) for p, old in zip(net.parameters(), weights, strict=True))
