"""Parts of a network that nobody trains: what moves, what travels, what is delivered, what may be kept."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from semifed.assembly import build_workplace
from semifed.client_round import Task, client_round
from semifed.data import client
from semifed.errors import UserError
from semifed.fit import Loss, Optimiser, fit
from semifed.models import network as network_module
from semifed.models import stem_cache
from semifed.models.backbones import CNN, Normalisation, Setting
from semifed.models.batchnorm import BatchNorm, freeze, frozen_names, recalibrate, set_batchnorm
from semifed.models.network import Network, build_network
from semifed.models.stem_cache import StemCache
from semifed.net import Net
from semifed.payloads import Down
from semifed.predict import load_model
from toys import Quiet, equal_weights, meaningful, place_of, run_toy, toy_parts, toy_recipe

LITE = {"name": "efficientnet-lite0", "weights": "random", "input_size": 32, "trainable": "last", "width": None}
TOY = Normalisation((0.5,), (0.25,))


def frozen_network(**options: Any) -> Network:
    """One whose stem was drawn and then frozen: all that freezing means, without any pretrained weights."""
    settings = {"weights": "random", "input_size": 32, "trainable": "last"} | options
    network = build_network(
        "efficientnet-lite0",
        channels=1,
        size=(8, 8),
        classes=3,
        normalised=TOY,
        further={"projection": "mlp2(6, 4, gelu)"},
        generator=torch.Generator().manual_seed(0),
        **settings,
    )
    # As in a pretrained network, no statistics are those of a fresh layer.
    generator = torch.Generator().manual_seed(1)
    for layer in network.modules():
        if isinstance(layer, BatchNorm):
            layer.running_mean.normal_(0.0, 0.1, generator=generator)
            layer.running_var.uniform_(0.5, 1.5, generator=generator)
    return network


@pytest.fixture(scope="module")
def network() -> Network:
    return frozen_network()


@pytest.fixture
def net(network: Network) -> Iterator[Net]:
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    yield Net(network, "tracked")
    network.load_state_dict(before)


def images(count: int, seed: int = 0) -> Tensor:
    drawn = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return drawn.contiguous(memory_format=torch.channels_last)


def stepped(net: Net, steps: int = 2) -> None:
    """A few steps on everything the network says."""

    def loss(net: Net, batch: Any) -> Loss:
        output = net(batch.x)
        value = output.logits.square().mean() + output.features.mean() + output.heads["projection"].sum()
        return Loss(value, {})

    shown: Any = [Seen(images(4, seed)) for seed in range(steps)]
    fit(net, shown, loss, Optimiser(0.1))


class Seen:
    """As much of a batch as the loop looks at."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __iter__(self) -> Iterator[Any]:
        return iter(())


# --------------------------------------------------------------------------------------- layers


def test_a_fixed_layer_normalises_by_what_it_holds_and_records_nothing() -> None:
    layer = BatchNorm(3, mode="fixed", eps=1e-3)
    generator = torch.Generator().manual_seed(0)
    layer.running_mean.normal_(generator=generator)
    layer.running_var.uniform_(0.5, 2, generator=generator)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    x = torch.randn(5, 3, 2, 2, generator=generator)
    expected = torch.empty_like(x)
    for channel in range(3):
        mean, variance = float(layer.running_mean[channel]), float(layer.running_var[channel])
        expected[:, channel] = (x[:, channel] - mean) / (variance + 1e-3) ** 0.5
    for training in (True, False):
        torch.testing.assert_close(layer.train(training)(x), expected)
    assert all(torch.equal(layer.state_dict()[name], tensor) for name, tensor in before.items())


def test_switching_the_rest_leaves_fixed_layers_fixed() -> None:
    layers = nn.Sequential(BatchNorm(2), BatchNorm(2))
    freeze(layers[0])
    for mode in ("static", "tracked"):
        set_batchnorm(layers, mode)
        assert [layer.mode for layer in layers] == ["fixed", mode]
    assert frozen_names(layers) == {"0.weight", "0.bias", "0.running_mean", "0.running_var"}


def test_recalibration_passes_fixed_layers_by() -> None:
    layers = nn.Sequential(BatchNorm(1), BatchNorm(1))
    layers[0].running_mean.fill_(2.0)
    layers[0].running_var.fill_(9.0)
    freeze(layers[0])
    x = images(6)
    recalibrate(layers, x)
    assert (float(layers[0].running_mean), float(layers[0].running_var)) == (2.0, 9.0)
    seen = ((x - 2) / (9 + 1e-5) ** 0.5).double()
    assert float(layers[1].running_mean) == pytest.approx(float(seen.mean()), rel=1e-5)
    assert float(layers[1].running_var) == pytest.approx(float(seen.var()), rel=1e-5)


# ---------------------------------------------------------------------------------------- names


def test_only_the_last_stage_and_the_heads_are_named_to_the_optimiser(net: Net) -> None:
    learning = set(net.named_parameters())
    assert {name.split(".")[2] for name in learning if name.startswith("backbone.")} == {"16", "17"}
    assert {name.split(".")[0] for name in learning} == {"backbone", "classifier", "heads"}
    assert sum(net.named_parameters()[name].numel() for name in learning if name.startswith("backbone")) == 1_017_600
    assert all(parameter.requires_grad for parameter in net.named_parameters().values())


@pytest.mark.parametrize("batchnorm", ["tracked", "static", "local"])
def test_what_is_frozen_is_no_part_of_the_state(network: Network, batchnorm: str) -> None:
    net = Net(network, batchnorm)
    frozen, state = net.frozen_weights(), net.state()
    assert not frozen.keys() & state.keys()
    assert frozen.keys() | state.keys() == set(network.state_dict())
    assert set(net.trained_names()) <= set(state)
    assert not any("running_" in name for name in state), "statistics are fixed, also where scale and shift learn"
    scales = {name for name in state if ".norm." in name}
    assert len(scales) == 2 * 4
    assert set(net.private()) == (scales if batchnorm == "local" else set())
    assert set(net.trained_names()) == set(state) - (scales if batchnorm == "local" else set())


@pytest.mark.parametrize(("trainable", "learning"), [("all", 49), ("last", 4), ("none", 0)])
def test_how_much_learns_can_be_chosen(trainable: str, learning: int) -> None:
    net = Net(frozen_network(trainable=trainable), "tracked")
    convs = [name for name in net.named_parameters() if name.startswith("backbone") and "conv." in name]
    statistics = [name for name in net.trained_names() if "running_" in name]
    assert len(convs) == learning
    assert len(statistics) == (2 * 49 if trainable == "all" else 0)
    assert net(images(2)).features.shape == (2, 1280)


# ------------------------------------------------------------------------------------- training


def test_training_moves_what_learns_and_nothing_else(net: Net) -> None:
    frozen, before = net.frozen_weights(), net.state()
    stepped(net)
    assert equal_weights(net.frozen_weights(), frozen)
    after = net.state()
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_features_depend_neither_on_the_mode_nor_on_the_batch(net: Net) -> None:
    alone = net(images(8)).features
    net.network.train()
    joint = net.joint(images(8), 3 * images(8, 1))[0].features
    net.network.eval()
    torch.testing.assert_close(joint, alone, rtol=1e-4, atol=1e-5)


def test_copies_share_what_is_frozen_and_own_the_rest(net: Net) -> None:
    twin, teacher = net.twin(), net.frozen()
    said = net(images(3))
    torch.testing.assert_close(twin(images(3)).logits, said.logits, rtol=0, atol=0)
    torch.testing.assert_close(teacher(images(3)).logits, said.logits.detach(), rtol=0, atol=0)
    own, theirs = net.network.state_dict(), twin.network.state_dict()
    shared = {name for name in own if own[name].data_ptr() == theirs[name].data_ptr()}
    assert shared == set(net.frozen_weights())
    stepped(net)
    torch.testing.assert_close(twin(images(3)).logits, said.logits, rtol=0, atol=0)
    torch.testing.assert_close(teacher(images(3)).logits, said.logits.detach(), rtol=0, atol=0)


def test_no_gradient_is_kept_of_the_stem(net: Net) -> None:
    assert not net.stem(images(2)).requires_grad
    output = net.after_stem(net.stem(images(2)))
    torch.testing.assert_close(output.logits, net(images(2)).logits, rtol=0, atol=0)
    assert output.logits.requires_grad


# -------------------------------------------------------------------------------------- a round


class HalfFrozen(CNN):
    """A small network of which the first block is frozen, and the second normalises by fixed statistics."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        freeze(self.convs[0])
        freeze(self.norms[0])
        set_batchnorm(self.norms[1], "fixed")

    def load_pretrained(self) -> None:
        """Statistics of no fresh layer."""
        for norm in self.norms[:2]:
            norm.running_mean.fill_(0.1)  # type: ignore[operator, union-attr]
            norm.running_var.fill_(1.5)  # type: ignore[operator, union-attr]


QUICK = [("fedprox", "clients"), ("fedlabel", "clients"), ("semifl", "server")]
FROZEN = {f"backbone.norms.0.{name}" for name in ("weight", "bias", "running_mean", "running_var")} | {
    "backbone.convs.0.weight",
    "backbone.norms.1.running_mean",
    "backbone.norms.1.running_var",
}


@pytest.fixture
def half_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    families = network_module._FAMILIES
    monkeypatch.setitem(families, "cnn", families["cnn"]._replace(backbone=HalfFrozen))


@pytest.mark.usefixtures("half_frozen")
def test_a_client_neither_gets_nor_sends_what_is_frozen() -> None:
    parts = toy_parts(toy_recipe("fedavg", "clients"))
    place = place_of(parts)
    frozen, down = place.net.frozen_weights(), Down(place.net.state())
    reply = client_round(place, Task(1, 1, 0.05, None), down, parts.scenario.client(1))
    assert set(frozen) == FROZEN
    assert not set(down.weights) & FROZEN
    assert set(reply.up.weights) == set(down.weights)
    assert equal_weights(place.net.frozen_weights(), frozen)
    del down.weights["backbone.convs.1.weight"]
    with pytest.raises(TypeError, match="the broadcast lacks"):
        client_round(place, Task(1, 1, 0.05, None), down, parts.scenario.client(1))


@pytest.mark.usefixtures("half_frozen")
@pytest.mark.parametrize(("labels", "batchnorm"), [("clients", "tracked"), ("server", "static"), ("server", "local")])
def test_runs_with_every_kind_of_batch_norm(tmp_path: Path, labels: str, batchnorm: str) -> None:
    changes = {"model": {"batchnorm": batchnorm}, "evaluate": {"folds": 0}}
    outcome = run_toy(toy_parts(toy_recipe("fedfixmatch", labels, changes)), tmp_path)
    sent = {name for exchange in outcome.exchanges for name in exchange.down.weights}
    assert set(outcome.weights) - sent == FROZEN
    assert outcome.rounds[1]["bytes_down"] == 3 * sum(4 * outcome.weights[name].numel() for name in sent)
    checkpoint = load_file(next((tmp_path / "checkpoint").glob("round-*.safetensors")))
    assert {name.removeprefix("weights/") for name in checkpoint if name.startswith("weights/")} == sent
    statistics = outcome.weights["backbone.norms.2.running_mean"]
    assert statistics.abs().max() > 0.01, "what is not fixed goes on as ever"
    for name in ("backbone.norms.0", "backbone.norms.1"):
        assert set(outcome.weights[f"{name}.running_var"].tolist()) == {1.5}
    assert not torch.equal(outcome.weights["backbone.norms.1.weight"], torch.ones(4))


@pytest.mark.usefixtures("half_frozen")
@pytest.mark.parametrize(
    ("method", "labels"),
    [
        pytest.param(method, labels, marks=[] if (method, labels) in QUICK else pytest.mark.slow)
        for method, labels in meaningful()
    ],
)
def test_every_method_runs_with_frozen_parts(tmp_path: Path, method: str, labels: str) -> None:
    """Proximal terms, teachers, twins, moving averages, sums of changes: all over what learns, and nothing else."""
    beyond_warm_up = 4 if method == "fedlpa" else 2
    recipe = toy_recipe(method, labels, {"evaluate": {"folds": 0}}, rounds=beyond_warm_up)
    parts = toy_parts(recipe)
    start = place_of(parts).net.frozen_weights()
    outcome = run_toy(parts, tmp_path)
    assert not outcome.rounds[-1]["failures"]
    assert equal_weights({name: outcome.weights[name] for name in FROZEN}, start)


@pytest.mark.usefixtures("half_frozen")
def test_the_delivered_model_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = toy_parts(toy_recipe("fedfixmatch", "server", {"evaluate": {"folds": 0}}, rounds=1))
    run_toy(parts, tmp_path)
    views, shown = parts.scenario.views, parts.scenario.dataset.x_test
    net = place_of(parts).net
    net.load(load_file(tmp_path / "model" / "model.safetensors"))
    with torch.no_grad():
        confidence = net(views.plain(shown)).logits.softmax(dim=1).max(dim=1).values

    def nowhere(self: HalfFrozen) -> None:
        raise UserError("the pretrained weights are not here")

    monkeypatch.setattr(HalfFrozen, "load_pretrained", nowhere)
    said = load_model(tmp_path).said_of(shown)
    assert [answer[1] for answer in said] == pytest.approx(confidence.tolist(), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "rounds"), [("fixmatch-gpl", 2), ("fedlpa", 4)])
def test_workers_and_interruptions_change_nothing(tmp_path: Path, method: str, rounds: int) -> None:
    """FedLPA's last two rounds look at stems that a worker keeps, and which worker keeps which changes nothing."""
    changes: dict[str, Any] = {"model": LITE, "local": {"epochs": None, "steps": 1}}
    alone = toy_parts(toy_recipe(method, "clients", changes, rounds=rounds))
    pooled = toy_parts(toy_recipe(method, "clients", {**changes, "engine": {"workers": 2}}, rounds=rounds))
    whole = run_toy(alone, tmp_path / "alone")
    assert equal_weights(run_toy(pooled, tmp_path / "pooled").weights, whole.weights)
    with pytest.raises(KeyboardInterrupt):
        run_toy(alone, tmp_path / "parts", reporter=Quiet(stop_after=rounds - 1))
    assert equal_weights(run_toy(alone, tmp_path / "parts", resume=True).weights, whole.weights)


# ---------------------------------------------------------------------------------- kept stems


def store(count: int) -> Tensor:
    return images(count, seed=9)


def views_of(positions: Tensor, calls: list[int]) -> Any:
    def view(places: Tensor) -> Tensor:
        calls.append(len(places))
        return store(12)[positions[places]]

    return view


@pytest.mark.parametrize("budget", [0, 3 * 192 * 4, 10**9])
def test_kept_or_not_the_stem_is_the_same(net: Net, budget: int) -> None:
    """In whatever order, company and number images were seen before: engines must agree to the last bit."""
    fresh = StemCache(net.stem, 10**9)
    wanted = torch.tensor([7, 2, 11, 5, 0])
    expected = fresh.maps(wanted, views_of(wanted, []))
    used = StemCache(net.stem, budget)
    for positions in (torch.tensor([2, 3, 4]), torch.arange(11, 4, -1), wanted):
        maps = used.maps(positions, views_of(positions, []))
    assert torch.equal(maps, expected)
    assert maps.stride() == expected.stride()
    assert torch.equal(net.after_stem(maps).logits, net.after_stem(expected).logits)
    assert used.size <= budget
    assert used.size == len(used) * 192 * 4
    torch.testing.assert_close(maps, net.stem(store(12)[wanted]), rtol=1e-4, atol=1e-4)


def test_an_image_passes_the_stem_once(net: Net) -> None:
    calls: list[int] = []
    cache = StemCache(net.stem, 10**9)
    for positions in (torch.tensor([1, 5]), torch.tensor([5, 2, 1]), torch.tensor([5])):
        cache.maps(positions, views_of(positions, calls))
    assert calls == [1, 1, 1]
    assert len(cache) == 3


def test_training_leaves_kept_stems_true(net: Net) -> None:
    positions = torch.tensor([3, 1])
    cache = StemCache(net.stem, 10**9)
    before = cache.maps(positions, views_of(positions, []))
    stepped(net)
    again = StemCache(net.stem, 10**9).maps(positions, views_of(positions, []))
    assert torch.equal(before, again)


def test_plain_images_of_a_client_pass_the_stem_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = toy_parts(toy_recipe("fedlpa", "clients", {"model": LITE}))
    net, data = build_workplace(parts.recipe, (1, 8, 8), 3, TOY).net, parts.scenario.client(1)
    passed: list[int] = []
    assert net.stems is not None
    stem = net.stems._stem
    monkeypatch.setattr(net.stems, "_stem", lambda images: (passed.append(len(images)), stem(images))[1])
    first = data.plain_outputs(net)
    assert sum(passed) == 1 + len(data.unlabelled), "one tells how large a stem is"
    again = data.plain_outputs(net)
    assert sum(passed) == 1 + len(data.unlabelled), "the second look costs no pass"
    assert torch.equal(first.features, again.features)
    whole = net(data.views.plain(data.images[data.unlabelled]))
    torch.testing.assert_close(first.features, whole.features, rtol=1e-3, atol=1e-4)
    nobody = data._replace(labelled=data.labelled[:0])
    assert nobody.labelled_outputs(net).features.shape == (0, first.features.shape[1])


def test_large_stems_are_not_kept_and_pass_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = toy_parts(toy_recipe("fedlpa", "clients", {"model": LITE}))
    data = parts.scenario.client(1)
    small = build_workplace(parts.recipe, (1, 8, 8), 3, TOY).net
    kept = data.plain_outputs(small)
    assert small.stems is not None
    bytes_of_one = small.stems.size // len(small.stems)
    for largest, batches in ((bytes_of_one, []), (bytes_of_one - 1, [4] * (len(data.unlabelled) // 4))):
        monkeypatch.setattr(stem_cache, "LARGEST", largest)
        monkeypatch.setattr(client, "BATCH_OF_LARGE", 4)
        net = build_workplace(parts.recipe, (1, 8, 8), 3, TOY).net
        passed: list[int] = []
        whole = net.network.forward
        monkeypatch.setattr(net.network, "forward", lambda x, of=whole, to=passed: (to.append(len(x)), of(x))[1])
        said = data.plain_outputs(net)
        assert passed[: len(batches)] == batches
        assert bool(passed) == bool(batches)
        assert net.stems is not None
        assert bool(len(net.stems)) != bool(batches)
        torch.testing.assert_close(said.features, kept.features, rtol=1e-3, atol=1e-4)


def test_a_network_that_learns_as_a_whole_keeps_no_stems() -> None:
    parts = toy_parts(toy_recipe("fedlpa", "clients"))
    assert place_of(parts).net.stems is None
