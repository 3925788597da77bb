"""Each method against its formula, and in the limits where it must become another one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reference import losses as reference
from semifed.assembly import Parts
from semifed.client_round import Held, Reply, Task, client_round
from semifed.data.client import Batch, batches
from semifed.fit import Loss, fit
from semifed.losses import cross_entropy, mean
from semifed.net import Net
from semifed.payloads import Down, Nothing, Received, Visit
from toys import equal_weights, place_of, run_toy, site_of, toy_parts, toy_recipe

FIXMATCH = ("fixmatch-lpl", "fixmatch-gpl", "fedfixmatch", "fedprox-fixmatch")


def parts_of(method: str, labels: str = "clients", local: dict[str, Any] | None = None, **options: Any) -> Parts:
    changes: dict[str, dict[str, Any]] = {"method": options, "local": local or {}}
    if labels == "clients":
        changes["scenario"] = {"labelled_per_class": 6}
    return toy_parts(toy_recipe(method, labels, changes, rounds=2))


def down_of(parts: Parts) -> Down:
    """Weights as they may be in the middle of a run: statistics included, far from the initial ones."""
    place = place_of(parts)
    state = place.net.state()
    generator = torch.Generator().manual_seed(5)
    noisy = {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator).abs() for name, tensor in state.items()
    }
    return Down(noisy)


def trained(parts: Parts, client: int = 1, labels_down: Down | None = None) -> Reply:
    down = labels_down or down_of(parts)
    return client_round(place_of(parts), Task(1, client, 0.05, None), down, parts.scenario.client(client))


def first_step(parts: Parts) -> tuple[Net, Batch, Any, Down]:
    """The network in training mode, the first batch and the constants of client 1, as `client_round` makes them."""
    place, down, data = place_of(parts), down_of(parts), parts.scenario.client(1)
    place.net.load(down.weights)
    local = parts.method.prepare(place.net, down, data, None, Visit(0, 1, 0))
    batch = next(batches(local.data, place.budget, (0, 1, 1)))
    place.net.network.train()
    return place.net, batch, local.const, down


def gradients(net: Net, loss: Loss) -> dict[str, torch.Tensor]:
    net.network.zero_grad()
    loss.value.backward()
    return {name: value.grad.clone() for name, value in net.named_parameters().items() if value.grad is not None}


def logits_by_hand(net: Net, batch: Batch, with_weak: bool) -> list[np.ndarray[Any, Any]]:
    groups = [batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong]
    if not with_weak:
        del groups[1]
    sizes = [len(group) for group in groups]
    with torch.no_grad():
        logits = net.network(torch.cat(groups)).logits.double()
    return [part.numpy() for part in logits.split(sizes)]


def parts_of_loss(loss: Loss) -> tuple[float, ...]:
    return loss.value.item(), loss.terms["supervised"].item(), loss.terms["consistency"].item()


@pytest.mark.parametrize("threshold", [0.0, 0.36, 0.42, 1.0])
def test_local_pseudo_labels(threshold: float) -> None:
    parts = parts_of("fixmatch-lpl", threshold=threshold, unlabelled_weight=0.6)
    net, batch, const, _ = first_step(parts)
    labelled, weak, strong = logits_by_hand(net, batch, with_weak=True)
    expected = reference.fixmatch(labelled, batch.labelled.labels.tolist(), weak, strong, threshold, 0.6)
    loss = parts.method.loss(net, batch, const)
    assert [loss.value.item(), *(term.item() for term in loss.terms.values())] == pytest.approx(
        list(expected), rel=1e-4
    )


@pytest.mark.parametrize("threshold", [0.0, 0.36, 0.42, 1.0])
def test_global_pseudo_labels(threshold: float) -> None:
    parts = parts_of("fixmatch-gpl", threshold=threshold, unlabelled_weight=0.6)
    net, batch, const, down = first_step(parts)
    labelled, _, strong = logits_by_hand(net, batch, with_weak=True)
    received = place_of(parts).net
    received.load(down.weights)  # in evaluation mode
    weak = received(batch.unlabelled.weak).logits.detach().double().numpy()
    expected = reference.fixmatch(labelled, batch.labelled.labels.tolist(), weak, strong, threshold, 0.6)
    fit(net, [batch] * 2, lambda net, batch: parts.method.loss(net, batch, const), place_of(parts).optimiser)
    net.load(down.weights)
    net.network.train()
    loss = parts.method.loss(net, batch, const)  # the teacher has not learnt anything in these two steps
    assert [loss.value.item(), *(term.item() for term in loss.terms.values())] == pytest.approx(
        list(expected), rel=1e-4
    )


@pytest.mark.parametrize("statistics", ["averaged", "batch"])
@pytest.mark.parametrize("soft", [False, True])
def test_global_pseudo_labels_soft_and_by_the_statistics_of_the_batch(statistics: str, soft: bool) -> None:
    parts = parts_of("fixmatch-gpl", threshold=0.0, soft=soft, statistics=statistics)
    net, batch, const, down = first_step(parts)
    _, _, strong = logits_by_hand(net, batch, with_weak=True)
    received = place_of(parts).net
    received.load(down.weights)
    received.network.train(statistics == "batch")
    with torch.no_grad():
        weak = received(batch.unlabelled.weak).logits.double()
    target = weak.softmax(dim=1).numpy() if soft else np.eye(weak.shape[1])[weak.argmax(dim=1)]
    expected = -np.mean(
        [t @ np.array(reference.log_probabilities(s.tolist())) for t, s in zip(target, strong, strict=True)]
    )
    assert parts.method.loss(net, batch, const).terms["consistency"].item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("threshold", [0.0, 0.36, 0.42])
def test_pseudo_labels_once_a_round(threshold: float) -> None:
    parts = parts_of("fedfixmatch", threshold=threshold, unlabelled_weight=0.6)
    net, batch, const, down = first_step(parts)
    labelled, strong = logits_by_hand(net, batch, with_weak=False)
    received = place_of(parts).net
    received.load(down.weights)
    plain = received(batch.unlabelled.plain).logits.detach().double().numpy()
    expected = reference.fixmatch(labelled, batch.labelled.labels.tolist(), plain, strong, threshold, 0.6)
    loss = parts.method.loss(net, batch, const)
    assert [loss.value.item(), *(term.item() for term in loss.terms.values())] == pytest.approx(
        list(expected), rel=1e-4
    )


@pytest.mark.parametrize("method", ["fixmatch-lpl", "fixmatch-gpl", "fedfixmatch"])
def test_only_confident_images_count_and_the_mean_is_over_all(method: str) -> None:
    """With the threshold in the middle of the batch's confidences, whichever network and view they come from."""
    net, batch, _, down = first_step(parts_of(method, threshold=0.0))
    received = place_of(parts_of(method)).net
    received.load(down.weights)
    labelled, *_, strong = logits_by_hand(net, batch, with_weak=method != "fedfixmatch")
    if method == "fixmatch-lpl":
        guessing = logits_by_hand(net, batch, with_weak=True)[1]
    else:
        view = batch.unlabelled.weak if method == "fixmatch-gpl" else batch.unlabelled.plain
        guessing = received(view).logits.detach().double().numpy()
    confidence = np.sort([np.exp(max(reference.log_probabilities(row.tolist()))) for row in guessing])
    threshold = float(confidence[3:5].mean())
    assert len(confidence) == 8
    parts = parts_of(method, threshold=threshold, unlabelled_weight=0.6)
    net, batch, const, _ = first_step(parts)
    loss = parts.method.loss(net, batch, const)
    assert loss.pseudo is not None
    assert int(loss.pseudo.used.sum()) == 4
    labels = batch.labelled.labels.tolist()
    expected = reference.fixmatch(labelled, labels, guessing, strong, threshold, 0.6)
    assert parts_of_loss(loss) == pytest.approx(expected, rel=1e-4)


def test_a_client_without_confident_images_sends_nothing_new_and_counts_nothing() -> None:
    parts = parts_of("fedfixmatch", "server", threshold=1.0)
    down = down_of(parts)
    reply = trained(parts, labels_down=down)
    assert float(reply.up.samples) == 0.0
    assert all(torch.equal(tensor, down.weights[name]) for name, tensor in reply.up.weights.items())


def test_the_teacher_gets_no_gradient() -> None:
    net, batch, const, _ = first_step(parts := parts_of("fixmatch-gpl", threshold=0.0))
    parts.method.loss(net, batch, const).value.backward()
    for parameter in const.net.network.parameters():
        assert parameter.grad is None
        assert not parameter.requires_grad


def test_fedprox_penalty() -> None:
    parts = parts_of("fedprox", proximity=0.3)
    net, batch, const, down = first_step(parts)
    moved = {name: tensor + 0.01 for name, tensor in down.weights.items()}
    net.load(moved)
    loss = parts.method.loss(net, batch, const)
    names = list(net.named_parameters())
    distance = reference.squared_distance(
        [moved[name].double().numpy() for name in names], [down.weights[name].double().numpy() for name in names]
    )
    assert loss.terms["proximity"].item() == pytest.approx(distance / 2, rel=1e-4)
    assert loss.value.item() == pytest.approx(loss.terms["supervised"].item() + 0.3 * distance / 2, rel=1e-4)


def test_fedprox_starts_in_the_direction_of_fedavg() -> None:
    prox, plain = parts_of("fedprox", proximity=5.0), parts_of("fedavg")
    net, batch, const, _ = first_step(prox)
    assert isinstance(const, Received)
    ours = gradients(net, prox.method.loss(net, batch, const))
    theirs = gradients(net, plain.method.loss(net, batch, Nothing()))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name])


def test_fedprox_holds_clients_nearer() -> None:
    def drift(proximity: float) -> float:
        parts = parts_of("fedprox", proximity=proximity)
        down = down_of(parts)
        reply = trained(parts, labels_down=down)
        return sum(float(((reply.up.weights[name] - down.weights[name]) ** 2).sum()) for name in reply.up.weights)

    assert drift(5.0) < drift(0.0)


@pytest.mark.parametrize("labels", ["clients", "some-clients"])
@pytest.mark.parametrize(("held", "free"), [("fedprox", "fedavg"), ("fedprox-fixmatch", "fixmatch-lpl")])
def test_no_proximity_is_no_proximity(held: str, free: str, labels: str, tmp_path: Path) -> None:
    """Also at clients without labels, where there is nothing to learn and weight decay must not act alone."""
    one = run_toy(parts_of(held, labels, proximity=0.0), tmp_path / "held")
    other = run_toy(parts_of(free, labels), tmp_path / "free")
    assert equal_weights(one.weights, other.weights)


@pytest.mark.parametrize("method", FIXMATCH)
def test_without_unlabelled_weight_fixmatch_is_supervised_training_of_the_same_pass(method: str) -> None:
    options: dict[str, Any] = {"threshold": 0.0, "unlabelled_weight": 0.0}
    if method == "fedprox-fixmatch":
        options["proximity"] = 0.0
    parts = parts_of(method, **options)
    with_weak = method != "fedfixmatch"
    place, down, data = place_of(parts), down_of(parts), parts.scenario.client(1)
    place.net.load(down.weights)

    def labels_only(net: Net, batch: Batch) -> Loss:
        views = [batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong]
        whole = torch.cat(views if with_weak else [views[0], views[2]])
        value = mean(cross_entropy(net(whole).logits[: len(batch.labelled)], batch.labelled.labels))
        return Loss(value, {})

    fit(place.net, batches(data, place.budget, (0, 1, 1)), labels_only, place.optimiser._replace(lr=0.05))
    for name, tensor in trained(parts).up.weights.items():
        torch.testing.assert_close(tensor, place.net.state()[name], rtol=1e-5, atol=1e-6)


def test_the_source_of_labels_is_all_that_separates_local_from_global() -> None:
    replies = [trained(parts_of(method, unlabelled_weight=0.0)) for method in ("fixmatch-lpl", "fixmatch-gpl")]
    assert equal_weights(replies[0].up.weights, replies[1].up.weights)
    replies = [trained(parts_of(method, threshold=0.0)) for method in ("fixmatch-lpl", "fixmatch-gpl")]
    assert not equal_weights(replies[0].up.weights, replies[1].up.weights)


@pytest.mark.parametrize("method", ["fixmatch-lpl", "fixmatch-gpl"])
def test_an_unreachable_threshold_is_a_weight_of_zero(method: str) -> None:
    never, unweighted = trained(parts_of(method, threshold=1.0)), trained(parts_of(method, unlabelled_weight=0.0))
    assert never.record.pseudo is not None
    assert not never.record.pseudo.used.any()
    assert equal_weights(never.up.weights, unweighted.up.weights)


def test_fedavg_ignores_what_unlabelled_images_show() -> None:
    parts = parts_of("fedavg")
    scenario = parts.scenario
    labelled = np.concatenate([held.labelled for held in scenario.holdings])
    blank = torch.zeros_like(scenario.dataset.x_train)
    blank[labelled] = scenario.dataset.x_train[labelled]
    other = Parts(parts.recipe, parts.method, scenario._replace(dataset=scenario.dataset._replace(x_train=blank)))
    assert equal_weights(trained(parts).up.weights, trained(other).up.weights)


@pytest.mark.parametrize("labels", ["clients", "server", "some-clients"])
def test_the_ceiling_trains_on_every_known_image(labels: str) -> None:
    scenario = parts_of("fedavg-sl", labels).scenario
    truth = scenario.sealed.break_seal()
    hands = sum(len(held.labelled) for held in scenario.holdings)
    at_server = 0 if scenario.server is None else len(scenario.server.labelled)
    assert hands + at_server == int((truth >= 0).sum())
    assert all(len(held.unlabelled) == 0 for held in scenario.holdings)


def test_the_floor_asks_nobody(tmp_path: Path) -> None:
    outcome = run_toy(parts_of("server-only", "server"), tmp_path / "run")
    assert outcome.exchanges == []
    assert outcome.summary["bytes_up"] == outcome.summary["bytes_down"] == 0
    assert all(line["clients"] == [] for line in outcome.rounds)
    assert "server_loss" in outcome.rounds[1]


def test_the_reply_counts_every_image_once() -> None:
    parts = parts_of("fixmatch-lpl")
    held = parts.scenario.holdings[1]
    assert float(trained(parts).up.samples) == len(np.union1d(held.labelled, held.unlabelled))


def test_a_round_is_the_mean_of_its_clients_by_image_count(tmp_path: Path) -> None:
    outcome = run_toy(parts_of("fixmatch-lpl"), tmp_path / "run")
    replies = [answer for answer in outcome.exchanges[-1].answers if isinstance(answer, Reply)]
    counts = np.array([float(reply.up.samples) for reply in replies])
    for name, tensor in outcome.weights.items():
        stacked = np.stack([reply.up.weights[name].double().numpy() for reply in replies])
        expected = np.tensordot(counts / counts.sum(), stacked, axes=1)
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert outcome.rounds[-1]["client_weights"] == pytest.approx((counts / counts.sum()).tolist())


def test_a_rounds_loss_is_the_mean_over_all_steps_of_all_clients(tmp_path: Path) -> None:
    outcome = run_toy(parts_of("fixmatch-lpl", "some-clients"), tmp_path / "run")
    records = [answer.record for answer in outcome.exchanges[-1].answers if isinstance(answer, Reply)]
    steps = sum(record.steps for record in records)
    for name, value in outcome.rounds[-1]["loss"].items():
        expected = sum(record.terms[name] * record.steps for record in records) / steps
        assert value == pytest.approx(expected)
    assert outcome.rounds[-1]["images"] == sum(record.images for record in records)


@pytest.mark.parametrize(
    "method", ["fixmatch-lpl", "fixmatch-gpl", "sage", "flexmatch", "feddb", "fedprox-fixmatch", "proxyfl"]
)
def test_without_labels_and_without_a_weight_on_images_there_is_nothing_to_learn_from(method: str) -> None:
    options = {"unlabelled_weight": 0.0, "threshold": 0.0, **({"contrast_weight": 0.0} if method == "proxyfl" else {})}
    parts = parts_of(method, "server", **options)
    place = place_of(parts)
    place.net.load(down_of(parts).weights)
    site = site_of(parts)
    down = parts.method.broadcast(parts.method.setup(place.net.state(), site))
    reply = client_round(place, Task(1, 1, 0.05, None), down, parts.scenario.client(1))
    assert reply.record.steps > 0
    assert float(reply.up.samples) == 0.0
    for name, tensor in reply.up.weights.items():
        assert torch.equal(tensor, down.weights[name])


@pytest.mark.parametrize("method", ["fedprox", "fedprox-fixmatch"])
def test_private_batch_norm_is_not_pulled_to_the_servers(method: str) -> None:
    """At a rate of 0 the client stays where it started from: at no distance from it."""
    parts = parts_of(method)
    place, down = place_of(parts), down_of(parts)
    place = place._replace(net=Net(place.net.network, "local"))
    private = {name: tensor + 0.5 for name, tensor in place.net.private().items()}
    assert private
    task = Task(2, 1, 0.0, Held(Nothing(), {}, private))
    assert client_round(place, task, down, parts.scenario.client(1)).record.terms["proximity"] == 0.0
