"""OpenFL, FedSSB and FedSSB-EMA against their formulas, in their limits, and with clients that misbehave."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reference import openset as reference
from reference.batchnorm import cnn_statistics
from semifed.assembly import Parts
from semifed.checkpoint import Checkpoint
from semifed.client_round import Reply, Task, Workplace, client_round
from semifed.data.client import Batch, ClientData, Samples, batches
from semifed.errors import UserError
from semifed.fit import Loss, fit
from semifed.method import payload_types
from semifed.models.network import Output
from semifed.net import Net
from semifed.payloads import Visit
from semifed.wire import Weights, fault_of, to_arrays
from toys import Outcome, Quiet, equal_weights, place_of, run_toy, site_of, toy_parts, toy_recipe

GATES = {"threshold": 0.6, "known_threshold": 0.45, "negative_threshold": 0.5}  # of a hardly trained model
Changes = dict[str, dict[str, Any]]
SHORT: Changes = {"server": {"warmup_epochs": 2}}  # for whole runs in which the gates do not matter


def parts_of(labels: str = "server", changes: Changes | None = None, name: str = "openfl", **options: Any) -> Parts:
    """Gates that let some images pass after ten epochs at the server, and alignment from the first round on."""
    chosen = {**GATES, "align_after": 0.0} if name == "openfl" else {k: GATES[k] for k in GATES if "known" not in k}
    method = {**chosen, **options}
    tables = {**(changes or {}), "method": method}
    tables["server"] = {"warmup_epochs": 10, **tables.get("server", {})}
    return toy_parts(toy_recipe(name, labels, tables, rounds=3))


READY: dict[str, Any] = {}


def setup_of(parts: Parts) -> Any:
    """The state before the first round, computed once for each recipe."""
    key = parts.recipe.model_dump_json()
    if key not in READY:
        site = site_of(parts)
        READY[key] = parts.method.setup(site.net.state(), site)
    return READY[key]


def answered(parts: Parts, down: Any, client: int = 1, round_: int = 1, data: ClientData | None = None) -> Reply:
    held = data or parts.scenario.client(client)
    return client_round(place_of(parts), Task(round_, client, 0.05, None), down, held)


def ups_of(parts: Parts, state: Any, round_: int = 1) -> list[Any]:
    return [answered(parts, parts.method.broadcast(state), client, round_).up for client in range(4)]


def final_state(parts: Parts, out: Path) -> Any:
    server_type, *_ = payload_types(parts.method)
    finished = Checkpoint(out / "checkpoint").load(server_type)
    assert finished is not None
    return finished.server


def array(tensor: Tensor) -> Any:
    return tensor.detach().double().numpy()


def parameters(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if "running_" not in name}


def first_step(parts: Parts, client: int = 1) -> tuple[Net, Batch, Any, Any]:
    """Network in training mode, first batch and constants of a client, and what it received."""
    place, data = place_of(parts), parts.scenario.client(client)
    down = parts.method.broadcast(setup_of(parts))
    place.net.load(down.weights)
    visit = Visit(0, 1, client)
    local = parts.method.prepare(place.net, down, data, None, visit)
    batch = next(batches(local.data, place.budget, visit))
    place.net.network.train()
    return place.net, batch, local.const, down


@torch.no_grad()
def seen(net: Net, images: Tensor) -> tuple[Any, Any, Any]:
    """Logits, detector and projection as NumPy arrays."""
    output = net(images)
    projected = output.heads.get("projection", torch.empty(0))
    return array(output.logits), array(output.heads["ova"]), array(projected)


# The objectives


@pytest.mark.parametrize("strong_too", [False, True])
@pytest.mark.parametrize("name", ["openfl", "fedssb", "fedssb-ema"])
def test_the_servers_loss(name: str, strong_too: bool) -> None:
    parts = parts_of(name=name, strong_cross_entropy=strong_too, detector_weight=0.7)
    assert parts.scenario.server is not None
    net = place_of(parts).net
    batch = next(batches(parts.scenario.server, place_of(parts).budget, (0,)))
    net.network.train()
    labelled = batch.labelled
    weak = [seen(net, view)[:2] for view in (labelled.weak, labelled.flipped)]
    strong = [seen(net, view)[:2] for view in (labelled.strong, labelled.strong_again)]
    expected = reference.server_objective(weak, strong, labelled.labels.tolist(), 0.7, strong_too=strong_too)
    loss = parts.method.server_loss(net, batch)
    found = [loss.value.item(), loss.terms["supervised"].item(), loss.terms["detector"].item()]
    assert found == pytest.approx(list(expected), rel=1e-4)


def test_the_servers_contrast() -> None:
    parts = parts_of(contrast_weight=0.3)
    assert parts.scenario.server is not None
    net = place_of(parts).net
    batch = next(batches(parts.scenario.server, place_of(parts).budget, (0,)))
    net.network.train()
    projected = np.concatenate([seen(net, view)[2] for view in (batch.labelled.weak, batch.labelled.flipped)])
    contrast = reference.contrasts(projected, batch.labelled.labels.tolist() * 2, 0.5)
    loss = parts.method.server_loss(net, batch)
    without = parts_of().method.server_loss(net, batch)
    assert loss.terms["contrast"].item() == pytest.approx(sum(contrast) / len(contrast), rel=1e-4)
    assert loss.value.item() == pytest.approx(without.value.item() + 0.3 * loss.terms["contrast"].item(), rel=1e-5)


WEIGHTS = {
    "consistency_weight": 0.9,
    "detector_weight": 0.8,
    "entropy_weight": 0.7,
    "socr_weight": 0.6,
    "negative_weight": 0.4,
}


def by_hand(parts: Parts, used_by: str) -> tuple[dict[str, float], Loss]:
    """Terms and weighted sum of a client's first step from plain loops, and what the method makes of it."""
    method: Any = parts.method
    net, batch, const, down = first_step(parts)
    received = place_of(parts).net
    received.load(down.weights)
    images = batch.unlabelled
    logits, ova, _ = seen(received, images.plain)
    known_threshold = getattr(method, "known_threshold", 0.0)
    label, confident, known, negative = reference.masks(
        logits, ova, method.threshold, known_threshold, method.negative_threshold
    )
    dual = [a and b for a, b in zip(confident, known, strict=True)]
    assert 0 < sum(dual) < len(dual), "the toy must have images on both sides of the gate"
    assert any(any(row) for row in negative)
    views = {name: seen(net, getattr(images, name)) for name in ("weak", "flipped", "strong")}
    used = dual if used_by == "dual" else confident
    terms = reference.client_objective(
        views["weak"][1], views["flipped"][1], views["strong"][:2], label, used, negative
    )
    total = method.consistency_weight * terms["consistency"] + method.detector_weight * (
        method.entropy_weight * terms["entropy"]
        + method.socr_weight * terms["socr"]
        + method.negative_weight * terms["negative"]
    )
    if hasattr(method, "align_view"):
        chosen = {"strong": ["strong"], "weak": ["weak"], "both": ["weak", "strong"]}[method.align_view]
        values = np.mean(
            [
                reference.alignments(views[view][2], array(down.pivots), label, dual, method.temperature)
                for view in chosen
            ],
            axis=0,
        )
        terms["align"] = float(values.mean())
        total += method.align_weight * terms["align"]
    return {**terms, "total": total}, method.loss(net, batch, const)


@pytest.mark.parametrize("name", ["fedssb", "fedssb-ema"])
def test_the_loss_of_fedssb_at_a_client(name: str) -> None:
    with_gate = parts_of(name=name, **WEIGHTS)
    net, batch, const, down = first_step(with_gate)
    received = place_of(with_gate).net
    received.load(down.weights)
    logits, ova, _ = seen(received, batch.unlabelled.plain)
    label, confident, _, negative = reference.masks(logits, ova, 0.6, 0.0, 0.5)
    assert 0 < sum(confident) < len(confident)
    views = {view: seen(net, getattr(batch.unlabelled, view)) for view in ("weak", "flipped", "strong")}
    terms = reference.client_objective(
        views["weak"][1], views["flipped"][1], views["strong"][:2], label, confident, negative
    )
    loss = with_gate.method.loss(net, batch, const)
    assert {name: term.item() for name, term in loss.terms.items()} == pytest.approx(terms, rel=1e-4)
    total = 0.9 * terms["consistency"] + 0.8 * (0.7 * terms["entropy"] + 0.6 * terms["socr"] + 0.4 * terms["negative"])
    assert loss.value.item() == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("name", ["openfl", "fedssb", "fedssb-ema"])
def test_a_client_with_labels_learns_from_both(name: str) -> None:
    """The server's loss on its labels, and the loss of its unlabelled images as of a client without any."""
    parts = parts_of("clients", name=name, **WEIGHTS)
    net, batch, const, _ = first_step(parts)
    assert len(batch.labelled)
    assert len(batch.unlabelled)
    labelled = batch.labelled
    weak = [seen(net, view)[:2] for view in (labelled.weak, labelled.flipped)]
    strong = [seen(net, view)[:2] for view in (labelled.strong, labelled.strong_again)]
    own, cross, detector = reference.server_objective(
        weak, strong, labelled.labels.tolist(), WEIGHTS["detector_weight"], strong_too=True
    )
    nothing = Samples(labelled.raw[:0], labelled.position[:0], labelled.labels[:0], labelled._views, (0,))
    alone = parts.method.loss(net, batch._replace(labelled=nothing), const)
    loss = parts.method.loss(net, batch, const)
    assert own > 0.1
    assert loss.value.item() == pytest.approx(own + alone.value.item(), rel=1e-4)
    assert [loss.terms[term].item() for term in ("supervised", "detector")] == pytest.approx(
        [cross, detector], rel=1e-4
    )


@pytest.mark.parametrize("mask", ["dual", "conf"])
@pytest.mark.parametrize("view", ["strong", "weak", "both"])
def test_the_loss_of_openfl_at_a_client(mask: str, view: str) -> None:
    parts = parts_of(con_mask=mask, align_view=view, align_weight=0.35, **WEIGHTS)
    expected, loss = by_hand(parts, mask)
    total = expected.pop("total")
    assert {name: term.item() for name, term in loss.terms.items()} == pytest.approx(expected, rel=1e-4)
    assert loss.value.item() == pytest.approx(total, rel=1e-4)


def test_the_two_masks_of_consistency_differ_in_the_toy() -> None:
    dual, conf = (by_hand(parts_of(con_mask=mask), mask)[1].terms["consistency"].item() for mask in ("dual", "conf"))
    assert conf > dual + 1e-3


def test_pivots_and_masks_get_no_gradient() -> None:
    net, batch, const, _ = first_step(parts_of())
    loss = parts_of().method.loss(net, batch, const)
    loss.value.backward()
    assert not any(part.requires_grad for part in (*const.gates, const.pivots, const.before))


# Masks


@pytest.mark.parametrize("name", ["openfl", "fedssb", "fedssb-ema"])
def test_masks_are_fixed_within_a_round_and_new_in_the_next(name: str) -> None:
    parts = parts_of(name=name, changes={"local": {"epochs": 3}})
    place, data = place_of(parts), parts.scenario.client(1)
    down = parts.method.broadcast(setup_of(parts))
    place.net.load(down.weights)

    def labels_now(net: Net) -> tuple[list[int], list[bool]]:
        """Labels and use by a loop, with the network as it is now."""
        with torch.no_grad():
            output = net(data.views.plain(data.images[data.unlabelled]))
        label, confident, known, _ = reference.masks(array(output.logits), array(output.heads["ova"]), 0.6, 0.45, 0.5)
        return label, [a and (b or name != "openfl") for a, b in zip(confident, known, strict=True)]

    expected = labels_now(place.net)
    visit = Visit(0, 1, 1)
    local = parts.method.prepare(place.net, down, data, None, visit)
    fitted = fit(
        place.net,
        batches(local.data, place.budget, visit),
        lambda net, batch: parts.method.loss(net, batch, local.const),
        place.optimiser._replace(lr=0.5),
    )
    visits = np.zeros(len(data.unlabelled))
    for pseudo in fitted.pseudo:
        for position, label, used in zip(*(part.tolist() for part in pseudo[:3]), strict=True):
            assert (label, used) == (expected[0][position], expected[1][position])
            visits[position] += 1
    assert visits.max() == 3
    after = labels_now(place.net)
    assert after != expected, "training must have changed the model's mind"
    again = parts.method.prepare(place.net, down._replace(weights=place.net.state()), data, None, Visit(0, 2, 1))
    masks: Any = again.const.gates if name == "openfl" else again.const  # type: ignore[attr-defined]
    assert masks.label.tolist() == after[0]
    assert (masks.dual if name == "openfl" else masks.confident).tolist() == after[1]


# Batch norm


@pytest.mark.parametrize("name", ["openfl", "fedssb", "fedssb-ema"])
def test_a_client_leaves_the_statistics_it_received_and_sends_none(name: str) -> None:
    parts = parts_of(name=name)
    place = place_of(parts)
    down = parts.method.broadcast(setup_of(parts))
    before = {key: value.clone() for key, value in to_arrays(down).items()}
    reply = client_round(place, Task(1, 1, 0.05, None), down, parts.scenario.client(1))
    buffers = dict(place.net.network.named_buffers())
    assert buffers
    assert all(torch.equal(value, down.weights[key]) for key, value in buffers.items())
    assert not set(buffers) & set(reply.up.weights)
    assert set(reply.up.weights) == {key for key, _ in place.net.network.named_parameters()}
    assert equal_weights(before, to_arrays(down))


def test_both_models_of_the_server_have_statistics_of_their_own() -> None:
    parts = parts_of()
    state = setup_of(parts)
    after = parts.method.aggregate(state, ups_of(parts, state), site_of(parts, 1))
    server = parts.scenario.server
    assert server is not None
    plain = (server.images[server.labelled].numpy().astype(np.float64) / 255 - 0.5) / 0.25
    for weights in (after.weights, after.average):
        for name, expected in cnn_statistics(weights, plain).items():
            np.testing.assert_allclose(weights[name].numpy(), expected, rtol=2e-4, atol=2e-5)
    assert any(
        not torch.allclose(after.weights[k], after.average[k], rtol=1e-3) for k in after.weights if "running" in k
    )


# The moving average


@pytest.mark.parametrize("name", ["openfl", "fedssb-ema", "fedavg-sl"])
@pytest.mark.parametrize("epochs", [0, 1, 3])
def test_one_update_of_the_average_a_round(name: str, epochs: int) -> None:
    labels = "server"
    options = {"ema": 0.8} if name != "fedavg-sl" else {}
    parts = (
        parts_of(labels, {"server": {"finetune_epochs": epochs}}, name, **options)
        if name != "fedavg-sl"
        else toy_parts(toy_recipe(name, labels, {"method": {"ema": 0.8}, "server": {"finetune_epochs": epochs}}))
    )
    state = setup_of(parts)
    assert equal_weights(state.weights, state.average)
    after = parts.method.aggregate(state, ups_of(parts, state), site_of(parts, 1))
    for key, tensor in parameters(after.average).items():
        expected = 0.8 * array(state.average[key]) + 0.2 * array(after.weights[key])
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert not equal_weights(parameters(after.weights), parameters(state.weights))


@pytest.mark.parametrize("name", ["openfl", "fedssb-ema", "fedavg-sl"])
@pytest.mark.parametrize("every", ["round", "epoch"])
def test_ends_of_the_average_are_exact(name: str, every: str) -> None:
    if every == "epoch" and name != "openfl":
        return
    further = {"ema_every": every} if name == "openfl" else {}
    for ema in (0.0, 1.0):
        parts = toy_parts(toy_recipe(name, "server", {"method": {"ema": ema, **further}}))
        state = setup_of(parts)
        after = parts.method.aggregate(state, ups_of(parts, state), site_of(parts, 1))
        assert equal_weights(after.average, after.weights if ema == 0 else state.average)
        assert not equal_weights(after.weights, state.weights)
        assert parts.method.delivered(after) is after.average


def test_with_ema_every_epoch_each_fine_tuning_epoch_counts() -> None:
    """The weights after epoch e are those of a server that fine-tunes for e epochs: same stream, same steps."""
    finals = []
    for epochs in (1, 2, 3):
        parts = parts_of("server", {"server": {"finetune_epochs": epochs}}, ema=0.7, ema_every="epoch")
        state = setup_of(parts)
        after = parts.method.aggregate(state, ups_of(parts, state), site_of(parts, 1))
        finals.append(parameters(after.weights))
    for key, tensor in parameters(after.average).items():
        expected = array(state.average[key])
        for weights in finals:
            expected = 0.7 * expected + 0.3 * array(weights[key])
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("labels", "epochs"), [("server", 0), ("clients", 1)])
def test_with_ema_every_epoch_a_server_that_trains_none_still_follows(labels: str, epochs: int) -> None:
    """Otherwise the delivered model would stay the one before the first round for ever."""
    parts = parts_of(labels, {"server": {"finetune_epochs": epochs}}, ema=0.5, ema_every="epoch")
    state = setup_of(parts)
    after = parts.method.aggregate(state, ups_of(parts, state), site_of(parts, 2))
    for key, tensor in parameters(after.average).items():
        expected = 0.5 * array(state.average[key]) + 0.5 * array(after.weights[key])
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_the_average_never_leaves_the_server() -> None:
    parts = parts_of()
    state = setup_of(parts)
    after = parts.method.aggregate(state, ups_of(parts, state), site_of(parts, 1))
    sent = parts.method.broadcast(after)
    assert equal_weights(sent.weights, after.weights)
    assert set(sent._fields) == {"weights", "pivots", "aligning"}
    assert sent.pivots.shape == (3, 128)


# Pivots


def pivots_by_hand(parts: Parts, weights: Weights) -> Any:
    net, server = place_of(parts).net, parts.scenario.server
    assert server is not None
    net.load(weights)
    _, _, projected = seen(net, server.views.plain(server.images[server.labelled]))
    return reference.unit_sums(projected, server.labels.tolist(), 3)


@pytest.mark.parametrize("source", ["ema", "current"])
def test_pivots_are_mean_directions_of_the_servers_labels(source: str) -> None:
    parts = parts_of(pivots_from=source)
    state = setup_of(parts)
    np.testing.assert_allclose(array(state.pivots), pivots_by_hand(parts, state.weights), rtol=1e-4, atol=1e-4)
    site = site_of(parts, 1)
    after = parts.method.aggregate(state, ups_of(parts, state), site)
    right, wrong = (after.average, after.weights) if source == "ema" else (after.weights, after.average)
    np.testing.assert_allclose(array(after.pivots), pivots_by_hand(parts, right), rtol=1e-4, atol=1e-4)
    assert np.abs(array(after.pivots) - pivots_by_hand(parts, wrong)).max() > 1e-3
    unit = array(after.pivots) / np.linalg.norm(array(after.pivots), axis=1, keepdims=True)
    assert site.notes["pivot_norm"] == pytest.approx(float(np.linalg.norm(unit.mean(axis=0))), rel=1e-5)


def test_clients_with_labels_report_directions_of_their_own_model() -> None:
    parts = parts_of("some-clients")
    state = setup_of(parts)
    assert state.pivots.numel() == 0
    place = place_of(parts)
    ups = []
    expected = np.zeros((3, 128))
    for client in range(4):
        data = parts.scenario.client(client)
        reply = client_round(place, Task(1, client, 0.05, None), parts.method.broadcast(state), data)
        ups.append(reply.up)
        assert bool(len(reply.up.directions)) == bool(len(data.labelled))
        if len(data.labelled):
            _, _, projected = seen(place.net, data.views.plain(data.images[data.labelled]))
            own = reference.unit_sums(projected, data.labels.tolist(), 3)
            np.testing.assert_allclose(array(reply.up.directions), own, rtol=1e-4, atol=1e-4)
            lengths = np.linalg.norm(own, axis=1, keepdims=True)
            expected += own / np.where(lengths > 0, lengths, 1)
    assert 0 < sum(len(up.directions) > 0 for up in ups) < 4
    after = parts.method.aggregate(state, ups, site_of(parts, 1))
    np.testing.assert_allclose(array(after.pivots), expected, rtol=1e-4, atol=1e-4)
    assert bool(after.aligning)

    nobody = [up for up in ups if not len(up.directions)]
    later = parts.method.aggregate(after, nobody, site_of(parts, 2))
    assert torch.equal(later.pivots, after.pivots)
    assert torch.equal(parts.method.aggregate(after, [], site_of(parts, 2)).pivots, after.pivots)


def test_a_long_direction_has_no_more_weight_than_any_other() -> None:
    parts = parts_of("clients")
    state = setup_of(parts)
    ups = ups_of(parts, state)
    shouting = [ups[0]._replace(directions=1e6 * ups[0].directions), *ups[1:]]
    honest = parts.method.aggregate(state, ups, site_of(parts, 1)).pivots
    torch.testing.assert_close(parts.method.aggregate(state, shouting, site_of(parts, 1)).pivots, honest)


@pytest.mark.parametrize("statistic", ["gated", "all_pre"])
def test_labels_count_as_gated_in_the_alignment_a_client_reports(statistic: str) -> None:
    """Else a client whose known images are all labelled would report chance, and weigh less than one that guesses."""
    parts = parts_of("some-clients", align_after=0.0, statistic=statistic)
    state = setup_of(parts)
    aligning = parts.method.aggregate(state, ups_of(parts, state), site_of(parts, 1))
    assert bool(aligning.aligning)
    place, down = place_of(parts), parts.method.broadcast(aligning)
    for client in range(4):
        data = parts.scenario.client(client)
        only_labels = data._replace(unlabelled=data.unlabelled[:0])
        if len(data.labelled) < 5:
            continue
        reply = client_round(place, Task(2, client, 0.05, None), down, only_labels)
        if statistic == "all_pre":
            place.net.load(down.weights)
        _, _, projected = seen(place.net, data.views.plain(data.images[data.labelled]))
        labels, sure = data.labels.tolist(), [True] * len(data.labels)
        own = reference.alignments(projected, array(aligning.pivots), labels, sure, parts.method.temperature)
        shift = 0.0 if statistic == "gated" else math.log(3) - 1 / parts.method.temperature
        assert float(reply.up.alignment) == pytest.approx(float(np.mean(own)) - shift, rel=1e-3)
        break
    else:
        pytest.fail("no client of this scenario holds labels")


def test_a_class_of_which_no_client_of_the_round_has_labels_keeps_its_pivot() -> None:
    parts = parts_of("clients")
    state = setup_of(parts)
    ups = ups_of(parts, state)
    first = parts.method.aggregate(state, ups, site_of(parts, 1))
    without = [up._replace(directions=up.directions * torch.tensor([[1.0], [0.0], [1.0]])) for up in ups[:2]]
    second = parts.method.aggregate(first, without, site_of(parts, 2))
    assert torch.equal(second.pivots[1], first.pivots[1])
    expected = torch.nn.functional.normalize(ups[0].directions) + torch.nn.functional.normalize(ups[1].directions)
    torch.testing.assert_close(second.pivots[[0, 2]], expected[[0, 2]])


# When alignment starts


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, [True, True, True]), (0.5, [False, False, True]), (1.0, [False] * 3)],
)
def test_rounds_of_alignment(share: float, expected: list[bool], tmp_path: Path) -> None:
    outcome = run_toy(parts_of("server", SHORT, align_after=share), tmp_path / "run")
    assert [bool(exchange.down.aligning) for exchange in outcome.exchanges] == expected
    assert ["align" in line["loss"] for line in outcome.rounds[1:]] == expected
    assert [len(line["alignment"]) > 0 for line in outcome.rounds[1:]] == expected
    for line, aligned in zip(outcome.rounds[1:], expected, strict=True):
        assert aligned or line["client_weights"] == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_who_learnt_nothing_counts_for_nothing(share: float) -> None:
    parts = parts_of(align_after=share)
    state, site = setup_of(parts), site_of(parts, 1)
    assert bool(state.aligning) == (share == 0)
    idle, *others = ups_of(parts, state)
    parts.method.aggregate(state, [idle._replace(samples=torch.tensor(0.0)), *others], site)
    weights = site.notes["client_weights"]
    assert isinstance(weights, list)
    assert weights[0] == 0
    assert sum(weights) == pytest.approx(1)
    assert min(weights[1:]) > 0


@pytest.mark.parametrize("percent", [0, 7, 10, 14, 28, 55, 100])
def test_the_share_of_rounds_is_exact(percent: int) -> None:
    """0.07 * 100 is a little more than 7 in floating point: alignment must not start a round late."""
    parts = parts_of(align_after=percent / 100)
    state = setup_of(parts)
    site = site_of(parts)
    site.rounds = 100
    for finished in (percent - 1, percent):
        if 0 <= finished < 100:
            site.round = finished
            after = parts.method.aggregate(state, [], site)
            assert bool(after.aligning) == (finished >= percent)


def test_with_labels_at_clients_alignment_waits_for_pivots(tmp_path: Path) -> None:
    outcome = run_toy(parts_of("clients", SHORT), tmp_path / "run")
    assert [bool(exchange.down.aligning) for exchange in outcome.exchanges] == [False, True, True]


# The projection is not touched before its time (weight decay is on in the toy)


def projection(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if name.startswith("heads.projection")}


def test_the_projection_does_not_move_before_alignment(tmp_path: Path) -> None:
    parts = parts_of("server", SHORT, align_after=1.0)
    assert parts.recipe.local.weight_decay > 0
    start = projection(place_of(parts).net.state())
    assert start
    outcome = run_toy(parts, tmp_path / "run")
    for exchange in outcome.exchanges:
        assert equal_weights(projection(exchange.down.weights), start)
        for answer in exchange.answers:
            assert isinstance(answer, Reply)
            assert equal_weights(projection(answer.up.weights), start)
    assert equal_weights(projection(final_state(parts, tmp_path / "run").weights), start)


def test_the_server_never_trains_the_projection_unless_it_contrasts() -> None:
    for weight, moves in ((0.0, False), (0.5, True)):
        parts = parts_of(contrast_weight=weight)
        site = site_of(parts, 1)
        start = place_of(parts).net.state()
        after = site.fine_tune(start, parts.method.server_loss)
        assert equal_weights(projection(after), projection(start)) != moves
        assert not torch.equal(after["heads.ova.layers.0.weight"], start["heads.ova.layers.0.weight"])


def test_alignment_trains_the_projection_at_clients() -> None:
    parts = parts_of()
    state = setup_of(parts)
    assert not equal_weights(projection(ups_of(parts, state)[0].weights), projection(state.weights))


# In their limits the methods are one another


def test_openfl_without_its_parts_is_fedssb(tmp_path: Path) -> None:
    """Parameter for parameter and bit for bit, over three real rounds."""
    changes: Changes = {"local": {"epochs": 2}}
    bare = parts_of("server", changes, align_weight=0.0, weighting="uniform", ema=0.0, con_mask="conf")
    ssb = parts_of("server", changes, "fedssb")
    one, other = run_toy(bare, tmp_path / "openfl"), run_toy(ssb, tmp_path / "fedssb")
    assert len(one.exchanges) == len(other.exchanges) == 3
    for mine, theirs in zip(one.exchanges, other.exchanges, strict=True):
        assert mine.clients == theirs.clients
        assert not bool(mine.down.aligning)
        assert shared(mine.down.weights, theirs.down.weights)
        for answer, expected in zip(mine.answers, theirs.answers, strict=True):
            assert isinstance(answer, Reply)
            assert isinstance(expected, Reply)
            assert shared(answer.up.weights, expected.up.weights)
    assert shared(one.weights, other.weights)
    assert not shared(one.weights, one.exchanges[0].down.weights), "three rounds must have moved the model"


def shared(larger: Weights, smaller: Weights) -> bool:
    """Whether all weights of the smaller network are in the larger one, beside a projection, with the same bits."""
    assert set(larger) - set(smaller) <= set(projection(larger))
    return all(torch.equal(larger[name], tensor) for name, tensor in smaller.items())


@pytest.mark.parametrize("part", ["align_weight", "weighting", "con_mask"])
def test_each_part_of_openfl_matters(part: str) -> None:
    """Otherwise the test above would say nothing."""
    off: dict[str, Any] = {"align_weight": 0.0, "weighting": "uniform", "con_mask": "conf"}
    on = {"align_weight": 0.5, "weighting": "reliability", "con_mask": "dual"}
    base = {**off, "align_weight": 0.5} if part == "weighting" else off
    ends = []
    for options in (base, {**base, part: on[part]}):
        parts = parts_of(**options)
        state = setup_of(parts)
        ends.append(parts.method.aggregate(state, ups_of(parts, state), site_of(parts, 1)).weights)
    assert not equal_weights(*ends)


def test_the_average_of_fedssb_ema_watches_without_touching(tmp_path: Path) -> None:
    plain, watched = (parts_of("server", SHORT, name) for name in ("fedssb", "fedssb-ema"))
    one, other = run_toy(plain, tmp_path / "plain"), run_toy(watched, tmp_path / "watched")
    for mine, theirs in zip(one.exchanges, other.exchanges, strict=True):
        assert equal_weights(mine.down.weights, theirs.down.weights)
    state = final_state(watched, tmp_path / "watched")
    assert equal_weights(state.weights, one.weights)
    assert equal_weights(state.average, other.weights)
    assert not equal_weights(one.weights, other.weights)
    for line, beside in zip(one.rounds, other.rounds, strict=True):
        assert beside["metrics"]["current.accuracy"] == line["metrics"]["accuracy"]


# What a client reports


@pytest.mark.parametrize("statistic", ["gated", "all", "all_pre"])
@pytest.mark.parametrize("view", ["strong", "weak", "both"])
def test_the_reported_alignment(statistic: str, view: str) -> None:
    """Against loops over every sample of every step, with the network as it was in that step."""
    parts = parts_of("server", {"local": {"epochs": 3}}, statistic=statistic, align_view=view)
    place, data = place_of(parts), parts.scenario.client(1)
    down = parts.method.broadcast(setup_of(parts))
    place.net.load(down.weights)
    visit = Visit(0, 1, 1)
    local: Any = parts.method.prepare(place.net, down, data, None, visit)
    plain = seen(place.net, data.views.plain(data.images[data.unlabelled]))
    label, confident, known, _ = reference.masks(plain[0], plain[1], 0.6, 0.45, 0.5)
    gated = [a and b for a, b in zip(confident, known, strict=True)]
    pivots = array(down.pivots)
    total, count = 0.0, 0

    def watched(net: Net, batch: Batch) -> Loss:
        nonlocal total, count
        where = batch.unlabelled.position.tolist()
        here, open_ = [label[i] for i in where], [gated[i] for i in where]
        chosen = ["weak", "strong"] if view == "both" else [view]
        values = [
            reference.alignments(seen(net, getattr(batch.unlabelled, name))[2], pivots, here, open_, 0.5)
            for name in chosen
        ]
        for sample, gate in enumerate(open_):
            if gate or statistic == "all":
                total += sum(value[sample] for value in values) / len(values)
                count += 1
        return parts.method.loss(net, batch, local.const)

    fitted = fit(place.net, batches(local.data, place.budget, visit), watched, place.optimiser._replace(lr=0.2))
    found = float(parts.method.report(place.net, local, fitted).alignment)
    if statistic == "all_pre":
        before = reference.alignments(plain[2], pivots, label, gated, 0.5)
        total, count = sum(before), len(before)
    assert sum(gated) >= 5
    expected = total / count
    if statistic != "gated":
        expected -= math.log(3) - 1 / 0.5
    assert found == pytest.approx(expected, rel=1e-3)
    assert found > 0


def test_the_reply_of_a_round_is_that_report() -> None:
    """One positive number, and the same from the real client."""
    parts = parts_of()
    reply = answered(parts, parts.method.broadcast(setup_of(parts)))
    assert reply.up.alignment.shape == ()
    assert float(reply.up.alignment) > 0
    assert float(reply.up.alignment) != pytest.approx(math.log(3), rel=1e-6)
    assert len(reply.up.directions) == 0


@pytest.mark.parametrize("statistic", ["gated", "all", "all_pre"])
@pytest.mark.parametrize("closed", [{"threshold": 1.0}, {"known_threshold": 1.0}])
def test_a_client_without_any_gated_image_reports_chance(statistic: str, closed: dict[str, float]) -> None:
    parts = parts_of(statistic=statistic, **closed)
    reply = answered(parts, parts.method.broadcast(setup_of(parts)))
    assert all(bool(torch.isfinite(value).all()) for value in to_arrays(reply.up).values())
    assert reply.record.pseudo is not None
    assert not reply.record.pseudo.used.any()
    assert reply.record.terms["consistency"] == 0.0
    if statistic == "gated":
        assert float(reply.up.alignment) == pytest.approx(math.log(3), rel=1e-6)
    else:
        assert float(reply.up.alignment) > 0


@pytest.mark.parametrize("distinct", [4, 5])
def test_few_gated_images_say_nothing_however_often_they_are_seen(distinct: int) -> None:
    parts = parts_of("server", {"local": {"epochs": 4}})
    state = setup_of(parts)
    net, data = place_of(parts).net, parts.scenario.client(1)
    net.load(state.weights)
    logits, ova, _ = seen(net, data.views.plain(data.images[data.unlabelled]))
    _, confident, known, _ = reference.masks(logits, ova, *GATES.values())
    gated = torch.tensor([a and b for a, b in zip(confident, known, strict=True)])
    chosen = torch.cat([data.unlabelled[gated][:distinct], data.unlabelled[~gated][:6]])
    assert len(chosen) == distinct + 6
    reply = answered(parts, parts.method.broadcast(state), data=data._replace(unlabelled=chosen))
    assert (float(reply.up.alignment) == pytest.approx(math.log(3), rel=1e-6)) == (distinct < 5)


def test_a_client_of_unknowns_only(tmp_path: Path) -> None:
    parts = parts_of()
    data, scenario = parts.scenario.client(1), parts.scenario
    truth = scenario.sealed.break_seal()
    unknown = data._replace(unlabelled=torch.nonzero((truth < 0) | (truth >= 3)).flatten()[:20])
    assert len(unknown.unlabelled) == 20
    state = setup_of(parts)
    reply = answered(parts, parts.method.broadcast(state), data=unknown)
    assert all(bool(torch.isfinite(value).all()) for value in to_arrays(reply.up).values())
    assert float(reply.up.alignment) > 0
    after = parts.method.aggregate(state, [reply.up, *ups_of(parts, state)[:2]], site_of(parts, 1))
    assert all(bool(torch.isfinite(value).all()) for value in to_arrays(after).values())


@pytest.mark.parametrize("images", [2, 3, 9])
def test_a_client_with_very_few_images(images: int) -> None:
    parts = parts_of()
    data = parts.scenario.client(1)
    few = data._replace(unlabelled=data.unlabelled[:images])
    reply = answered(parts, parts.method.broadcast(setup_of(parts)), data=few)
    assert all(bool(torch.isfinite(value).all()) for value in to_arrays(reply.up).values())
    if images < 5:
        assert float(reply.up.alignment) == pytest.approx(math.log(3), rel=1e-6)


def test_a_client_with_labels_only() -> None:
    parts = parts_of("clients")
    state = setup_of(parts)
    state = parts.method.aggregate(state, ups_of(parts, state), site_of(parts, 1))
    assert bool(state.aligning)
    data = parts.scenario.client(1)
    labelled = data._replace(unlabelled=torch.empty(0, dtype=torch.int64))
    assert len(labelled.labelled) >= 2
    reply = answered(parts, parts.method.broadcast(state), data=labelled)
    assert float(reply.up.alignment) == pytest.approx(math.log(3), rel=1e-6)
    assert float(reply.up.samples) == len(labelled.labelled)
    assert len(reply.up.directions) == 3


# Aggregation


def test_a_round_in_which_no_client_passes(tmp_path: Path) -> None:
    outcome = run_toy(parts_of("server", SHORT, known_threshold=1.0), tmp_path / "run")
    for line in outcome.rounds[1:]:
        assert line["alignment"] == pytest.approx([math.log(3)] * 3, rel=1e-6)
        assert line["client_weights"] == pytest.approx([1 / 3] * 3, rel=1e-9)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in outcome.weights.values())


@pytest.mark.parametrize("weighting", ["reliability", "uniform"])
def test_the_mean_of_the_clients(weighting: str) -> None:
    """Eq. (2) on weights that the server then leaves alone."""
    parts = parts_of("server", {"server": {"finetune_epochs": 0}}, weighting=weighting, epsilon=0.2, most_trust=3.0)
    state = setup_of(parts)
    ups = ups_of(parts, state)
    site = site_of(parts, 1)
    claims = [float(up.alignment) for up in ups]
    assert len(set(claims)) == 4
    shares = reference.trust_shares(claims, 0.2, 3.0) if weighting == "reliability" else [0.25] * 4
    after = parts.method.aggregate(state, ups, site)
    assert site.notes["client_weights"] == pytest.approx(shares, rel=1e-6)
    assert site.notes["alignment"] == pytest.approx(claims)
    for name in ups[0].weights:
        expected = sum(share * array(up.weights[name]) for share, up in zip(shares, ups, strict=True))
        np.testing.assert_allclose(after.weights[name].numpy(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["openfl", "fedssb", "fedssb-ema"])
def test_without_trust_clients_count_alike_whatever_they_hold(name: str) -> None:
    """Clients of the toy are of one size; these are not, and one had nothing to learn from."""
    options = {"weighting": "uniform"} if name == "openfl" else {}
    parts = parts_of("server", {"server": {"finetune_epochs": 0}}, name, **options)
    state = setup_of(parts)
    held = zip(ups_of(parts, state), (10.0, 1.0, 500.0, 0.0), strict=True)
    ups = [up._replace(samples=torch.tensor(samples)) for up, samples in held]
    site = site_of(parts, 1)
    after = parts.method.aggregate(state, ups, site)
    assert site.notes["client_weights"] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.0])
    expected = sum(array(up.weights["classifier.weight"]) for up in ups[:3]) / 3
    np.testing.assert_allclose(after.weights["classifier.weight"].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_fedavg_of_table_3_weighs_by_images() -> None:
    parts = parts_of("server", {"server": {"finetune_epochs": 0}}, weighting="count")
    state = setup_of(parts)
    held = zip(ups_of(parts, state), (10.0, 1.0, 500.0, 0.0), strict=True)
    ups = [up._replace(samples=torch.tensor(samples)) for up, samples in held]
    site = site_of(parts, 1)
    after = parts.method.aggregate(state, ups, site)
    shares = [10 / 511, 1 / 511, 500 / 511, 0.0]
    assert site.notes["client_weights"] == pytest.approx(shares)
    expected = sum(share * array(up.weights["classifier.weight"]) for share, up in zip(shares, ups, strict=True))
    np.testing.assert_allclose(after.weights["classifier.weight"].numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["openfl", "fedssb", "fedssb-ema"])
def test_nobody_answered(name: str) -> None:
    """The received weights are kept, and the server still fine-tunes."""
    parts = parts_of(name=name)
    state = setup_of(parts)
    after = parts.method.aggregate(state, [], site_of(parts, 1))
    expected = site_of(parts, 1).fine_tune(state.weights, parts.method.server_loss)
    assert equal_weights(after.weights, expected)
    assert not equal_weights(after.weights, state.weights)


def lying(monkeypatch: pytest.MonkeyPatch, claim: float, client: int) -> None:
    """One client claims that its alignment is what it is not."""

    def lie(place: Workplace, task: Task, down: Any, data: ClientData) -> Reply:
        reply = client_round(place, task, down, data)
        if task.client != client:
            return reply
        return reply._replace(up=reply.up._replace(alignment=torch.tensor(claim)))

    monkeypatch.setattr("semifed.engines.worker.client_round", lie)


def claimed_run(parts: Parts, out: Path, monkeypatch: pytest.MonkeyPatch, claim: float) -> tuple[Outcome, Quiet]:
    lying(monkeypatch, claim, client=2)
    reporter = Quiet()
    return run_toy(parts, out, reporter=reporter), reporter


@pytest.mark.parametrize("claim", [-3e38, 3e38])
def test_no_claim_takes_over_or_breaks_a_round(claim: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of()
    outcome, reporter = claimed_run(parts, tmp_path / "run", monkeypatch, claim)
    assert reporter.warnings == []
    took_part = 0
    for line in outcome.rounds[1:]:
        shares = line["client_weights"]
        assert sum(shares) == pytest.approx(1.0)
        assert min(shares) >= 1 / 15 - 1e-9
        if 2 in line["clients"]:
            took_part += 1
            mild = [min(max(value, 0.0), 1e9) for value in line["alignment"]]
            assert shares == pytest.approx(reference.trust_shares(mild, 0.1, 5.0), rel=1e-6)
    assert took_part
    assert all(bool(torch.isfinite(tensor).all()) for tensor in outcome.weights.values())


def test_a_claim_that_is_no_number_costs_that_clients_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, reporter = claimed_run(parts_of("server", SHORT), tmp_path / "run", monkeypatch, math.nan)
    told = [failure for line in outcome.rounds for failure in line["failures"]]
    assert told
    assert {failure["client"] for failure in told} == {2}
    assert all("'alignment' holds NaN or infinity" in failure["reason"] for failure in told)
    assert len(reporter.warnings) == len(told)
    for line in outcome.rounds[1:]:
        assert 2 not in line["clients"]
        assert len(line["client_weights"]) == len(line["clients"]) == 3 - len(line["failures"])
    assert all(bool(torch.isfinite(tensor).all()) for tensor in outcome.weights.values())


def test_a_broken_update_is_refused_before_it_is_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(place: Workplace, task: Task, down: Any, data: ClientData) -> Reply:
        reply = client_round(place, task, down, data)
        if task.client != 2:
            return reply
        weights = {**reply.up.weights, "classifier.bias": torch.full((3,), math.nan)}
        return reply._replace(up=reply.up._replace(weights=weights))

    monkeypatch.setattr("semifed.engines.worker.client_round", broken)
    outcome = run_toy(parts_of("server", SHORT), tmp_path / "run")
    assert {failure["client"] for line in outcome.rounds for failure in line["failures"]} == {2}
    assert all(bool(torch.isfinite(tensor).all()) for tensor in outcome.weights.values())


@pytest.mark.parametrize("claim", [math.nan, math.inf, -math.inf, 0.0, -1.0, 3e38])
def test_what_clients_claim_meets_the_server(claim: float) -> None:
    """What is no number is refused at the door; should it pass all the same, it is as bad as can be."""
    parts = parts_of("server", {"server": {"finetune_epochs": 0}})
    state = setup_of(parts)
    ups = ups_of(parts, state)
    ups[2] = ups[2]._replace(alignment=torch.tensor(claim))
    fault = fault_of(ups[2], state.weights, place_of(parts).net.trained_names())
    assert fault == (None if math.isfinite(claim) else "'alignment' holds NaN or infinity")
    site = site_of(parts, 1)
    after = parts.method.aggregate(state, ups, site)
    assert all(bool(torch.isfinite(value).all()) for value in to_arrays(after).values())
    shares: Any = site.notes["client_weights"]
    assert min(shares) >= 1 / 20 - 1e-9
    assert shares[2] == (max(shares) if claim <= 0 else min(shares))


def test_a_share_below_its_own_inverse_has_no_meaning() -> None:
    with pytest.raises(UserError, match="most_trust"):
        parts_of(most_trust=0.5)
    assert parts_of(most_trust=1.0)


# Predictions


@pytest.mark.parametrize("name", ["openfl", "fedssb", "fedssb-ema"])
def test_predictions_are_the_classifiers_and_the_detectors(name: str) -> None:
    parts = parts_of(name=name)
    net = place_of(parts).net
    net.load(parts.method.delivered(setup_of(parts)))
    images = parts.scenario.client(1).views.plain(parts.scenario.dataset.x_test[:9])
    with torch.no_grad():
        answer = parts.method.predict(net, images)
        output: Output = net(images)
    assert torch.equal(answer.logits, output.logits)
    for k, decision, score in zip(
        output.logits.argmax(dim=1).tolist(),
        reference.decisions(array(output.heads["ova"])),
        answer.unknown,
        strict=True,
    ):
        assert float(score) == pytest.approx(math.exp(decision[k][0]), abs=1e-5)
