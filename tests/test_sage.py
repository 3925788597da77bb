"""SAGE against plain loops over images, and its limits: LPL without both parts, a plug-in that is SAGE itself."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from reference.losses import cross_entropies, log_probabilities, mean_over_all, soft_cross_entropies
from semifed.assembly import Parts
from semifed.client_round import Reply, Task, client_round
from semifed.data.client import Batch, batches
from semifed.errors import UserError
from semifed.fit import fit
from semifed.methods.sage import SAGE
from semifed.net import Net
from semifed.payloads import Down, Teacher, Visit
from toys import equal_weights, place_of, site_of, toy_parts, toy_recipe

CLIENT = 1
Array = NDArray[np.float64]


def parts_of(method: str = "sage", labels: str = "clients", **options: Any) -> Parts:
    return toy_parts(toy_recipe(method, labels, {"method": {"threshold": 0.5, **options}}))


def down_of(parts: Parts) -> Down:
    """A model in the middle of a run: of several opinions, some of them firm."""
    net = place_of(parts).net
    weights = 3 * net.state()["classifier.weight"]
    images = parts.scenario.views.plain(parts.scenario.dataset.x_train)
    net.recalibrate(images)
    with torch.no_grad():
        usual = net(images).features.mean(dim=0)
    net.load({"classifier.weight": weights, "classifier.bias": -weights @ usual})
    return Down(net.state())


def trained(parts: Parts, down: Down | None = None) -> Reply:
    data = parts.scenario.client(CLIENT)
    return client_round(place_of(parts), Task(1, CLIENT, 0.05, None), down or down_of(parts), data)


def first_step(parts: Parts) -> tuple[Net, Batch, Teacher, Net]:
    """The network in training mode after two other steps, a batch, the constants, and the received network."""
    place, down, data = place_of(parts), down_of(parts), parts.scenario.client(CLIENT)
    place.net.load(down.weights)
    local = parts.method.prepare(place.net, down, data, None, Visit(0, 1, CLIENT))
    batch, *rest = list(batches(local.data, place.budget, (0, 1, 1)))[:3]
    fit(place.net, rest, lambda net, other: parts.method.loss(net, other, local.const), place.optimiser)
    received = place_of(parts).net
    received.load(down.weights)
    place.net.network.train()
    return place.net, batch, local.const, received


def sage_by_loop(
    local: Array, received: Array, threshold: float, kappa: float, method: SAGE
) -> tuple[Array, list[bool]]:
    """Eqs. (1) to (6) for given logits, image by image."""
    targets, used = [], []
    for rows in zip(local.tolist(), received.tolist(), strict=True):
        (p_l, p_g) = ([math.exp(value) for value in log_probabilities(row)] for row in rows)
        c_l, c_g = max(p_l), max(p_g)
        gap = max(1e-6, min(1.0, abs(c_l - c_g) + 1e-6))
        share = max(1e-6, min(1.0, math.exp(-kappa * gap))) if method.mixing == "gap" else method.mixing
        target = np.zeros(len(p_l))
        for p, weight in ((p_l, share if c_l >= threshold else 0.0), (p_g, 1 - share if c_l >= threshold else 1.0)):
            target += weight * (np.array(p) if method.soft else np.eye(len(p))[p.index(max(p))])
        targets.append(target)
        used.append(c_l >= threshold or (method.collaborative and c_g >= threshold))
    return np.array(targets), used


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kappa": 2.0},
        {"collaborative": False},
        {"mixing": 1.0},
        {"mixing": 0.3, "kappa": 50.0},
        {"soft": True},
        {"collaborative": False, "mixing": 0.0, "soft": True},
        {"statistics": "batch"},
    ],
)
@pytest.mark.parametrize("threshold", [0.0, 0.42, 0.5])
def test_the_objective(threshold: float, options: dict[str, Any]) -> None:
    parts = parts_of(threshold=threshold, unlabelled_weight=0.6, **options)
    net, batch, const, teacher = first_step(parts)
    method: SAGE = parts.method  # type: ignore[assignment]
    views = [batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong]
    with torch.no_grad():
        whole = net.network(torch.cat(views)).logits.double()
        teacher.network.train(method.statistics == "batch")
        received = teacher(batch.unlabelled.weak).logits.double().numpy()
    labelled, weak, strong = (part.numpy() for part in whole.split([len(view) for view in views]))
    expected, used = sage_by_loop(weak, received, threshold, method.kappa, method)
    supervised = mean_over_all(cross_entropies(labelled, batch.labelled.labels.tolist()), [True] * len(labelled))
    consistency = mean_over_all(soft_cross_entropies(strong, expected), used)
    loss = method.loss(net, batch, const)
    found = [loss.value.item(), loss.terms["supervised"].item(), loss.terms["consistency"].item()]
    assert found == pytest.approx([supervised + 0.6 * consistency, supervised, consistency], rel=1e-4)
    assert loss.pseudo is not None
    assert loss.pseudo.used.tolist() == used
    assert any(used)


def test_all_cases_of_the_table_occur() -> None:
    """The other tests would hold for LPL too if both models thought alike."""
    given = trained(parts_of()).record.pseudo
    assert given is not None
    assert given.local is not None
    assert given.received is not None
    local, received = given.local.sure, given.received.sure
    for case in (local & ~received, received & ~local, local & received, ~local & ~received):
        assert case.any()
    assert (local & (given.local.label != given.received.label)).any()


def test_only_strong_views_and_labels_carry_the_gradient() -> None:
    net, batch, const, _ = first_step(parts := parts_of(threshold=0.3, unlabelled_weight=0.7))
    before = net.state()

    def slopes(value: torch.Tensor) -> dict[str, torch.Tensor]:
        net.network.zero_grad()
        value.backward()
        return {name: p.grad.clone() for name, p in net.named_parameters().items() if p.grad is not None}

    loss = parts.method.loss(net, batch, const)
    found = slopes(loss.value)
    assert loss.pseudo is not None
    assert loss.pseudo.local is not None
    assert loss.pseudo.received is not None
    method: SAGE = parts.method  # type: ignore[assignment]
    weak, received = (part.probabilities.double().log().numpy() for part in (loss.pseudo.local, loss.pseudo.received))
    target, used = sage_by_loop(weak, received, 0.3, method.kappa, method)
    net.load(before)
    net.network.train()
    sizes = [len(batch.labelled), len(batch.unlabelled), len(batch.unlabelled)]
    logits = net(torch.cat([batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong])).logits.split(sizes)
    constant = torch.from_numpy(target).float() * torch.tensor(used)[:, None]
    value = torch.nn.functional.cross_entropy(logits[0], batch.labelled.labels)
    value = value - 0.7 * (constant * logits[2].log_softmax(dim=1)).sum() / len(used)
    for name, slope in slopes(value).items():
        torch.testing.assert_close(found[name], slope, rtol=1e-4, atol=1e-6)
    assert all(p.grad is None and not p.requires_grad for p in const.net.network.parameters())


def test_without_both_parts_it_is_local_labels_to_the_bit() -> None:
    for soft in (False, True):
        bare = trained(parts_of(collaborative=False, mixing=1.0, soft=soft))
        local = trained(parts_of("fixmatch-lpl", soft=soft))
        assert equal_weights(bare.up.weights, local.up.weights)
        assert bare.record.terms == local.record.terms
    assert not equal_weights(bare.up.weights, trained(parts_of(soft=True)).up.weights)


def test_as_a_plug_in_without_proximity_it_is_itself() -> None:
    for labels in ("clients", "server"):
        plugged = trained(parts_of("fedprox-fixmatch", labels, sage=True, proximity=0.0))
        assert equal_weights(plugged.up.weights, trained(parts_of(labels=labels)).up.weights)
    held = trained(parts_of("fedprox-fixmatch", sage=True, proximity=5.0))
    assert held.record.terms["proximity"] > 0
    assert not equal_weights(held.up.weights, trained(parts_of()).up.weights)


def test_the_ends_of_kappa() -> None:
    assert equal_weights(trained(parts_of(kappa=0.0)).up.weights, trained(parts_of(mixing=1.0)).up.weights)
    steep, received = trained(parts_of(kappa=1e7)), trained(parts_of(mixing=0.0))
    for name, tensor in steep.up.weights.items():
        torch.testing.assert_close(tensor, received.up.weights[name], rtol=1e-3, atol=1e-4)


def test_each_part_changes_the_result() -> None:
    variants: list[dict[str, Any]] = [{}, {"collaborative": False}, {"mixing": 1.0}, {"soft": True}]
    replies = [trained(parts_of(**options)) for options in variants]
    for index, one in enumerate(replies):
        assert not any(equal_weights(one.up.weights, other.up.weights) for other in replies[:index])


def test_images_nobody_is_sure_of_weigh_nothing() -> None:
    never, unweighted = trained(parts_of(threshold=1.0)), trained(parts_of(unlabelled_weight=0.0))
    assert equal_weights(never.up.weights, unweighted.up.weights)
    alone = parts_of(labels="server", threshold=1.0)
    down = down_of(alone)
    reply = trained(alone, down)
    assert float(reply.up.samples) == 0
    assert all(torch.equal(tensor, down.weights[name]) for name, tensor in reply.up.weights.items())


@pytest.mark.parametrize("method", ["sage", "proxyfl"])
def test_a_client_may_weigh_as_many_images_as_taught_it(method: str) -> None:
    def answer(parts: Parts) -> Reply:
        state = parts.method.setup(down_of(parts).weights, site_of(parts))
        return trained(parts, parts.method.broadcast(state))

    usual, learnt = answer(parts_of(method)), answer(parts := parts_of(method, weigh="learnt"))
    assert equal_weights(usual.up.weights, learnt.up.weights), "training is the same"
    data, pseudo = parts.scenario.client(CLIENT), learnt.record.pseudo
    assert pseudo is not None
    taught = {*data.labelled.tolist(), *pseudo.position[pseudo.used].tolist()}
    everything = {*data.labelled.tolist(), *data.unlabelled.tolist()}
    assert len(data.labelled) < len(taught) < len(everything)
    assert float(learnt.up.samples) == len(taught)  # one epoch: each image is seen once
    assert float(usual.up.samples) == len(everything)
    unsure = answer(parts_of(method, "server", weigh="learnt", threshold=1.0))
    assert float(unsure.up.samples) == 0, "there are no labels, and nobody is sure of anything"


@pytest.mark.parametrize(
    ("options", "said"),
    [({"mixing": "gab"}, "mixing"), ({"mixing": 1.5}, "mixing"), ({"kappa": -1.0}, "kappa"), ({"kapa": 1.0}, "kapa")],
)
def test_mistakes_name_the_key(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        parts_of(**options)
