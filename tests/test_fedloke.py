"""FedLoKe against plain loops, two networks trained by hand, and its limits; what a client keeps must survive."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.nn import functional as F

from semifed.assembly import Parts
from semifed.checkpoint import Checkpoint
from semifed.client_round import Held, Reply, Task, client_round
from semifed.data.client import Batch, ClientData, batches
from semifed.errors import UserError
from semifed.losses import entropy
from semifed.methods.fedloke import FedLoKe, Pair, Personal, Ramped
from semifed.net import Net
from semifed.payloads import Up
from semifed.pseudo import low_entropy_opinion
from semifed.schedule import ramp_up
from semifed.targets import KAPPA
from semifed.wire import Weights
from toys import Quiet, equal_weights, place_of, run_toy, site_of, toy_parts, toy_recipe

CLIENT = 1
LR = 0.05
Array = NDArray[np.float64]
logit_rows = st.lists(st.lists(st.floats(-9, 9, width=32), min_size=4, max_size=4), min_size=1, max_size=10)


# Formulas


@given(logit_rows)
def test_entropy(rows: list[list[float]]) -> None:
    p = scipy.special.softmax(np.array(rows), axis=1)
    p[0] = np.eye(4)[2]  # 0 log 0 is 0
    np.testing.assert_allclose(entropy(torch.from_numpy(p)).numpy(), scipy.stats.entropy(p, axis=1), atol=1e-12)


@given(logit_rows, st.floats(0, 1.5))
def test_an_opinion_is_sure_below_the_threshold(rows: list[list[float]], threshold: float) -> None:
    p = torch.tensor(rows, dtype=torch.float64).softmax(dim=1).requires_grad_()
    found = low_entropy_opinion(p, threshold)
    assert not found.probabilities.requires_grad
    for row, sure, label in zip(p.tolist(), found.sure.tolist(), found.label.tolist(), strict=True):
        height = -sum(value * math.log(value) for value in row)
        if abs(height - threshold) > 1e-9:
            assert sure == (height < threshold)
        assert row[label] == max(row)


def test_the_ramp() -> None:
    assert [ramp_up(t, 200) for t in (1, 50, 200, 500)] == [1 / 200, 0.25, 1.0, 1.0]
    assert ramp_up(1, 0.0) == 1.0


# One step


class World(NamedTuple):
    parts: Parts
    net: Net
    personal: Net
    down: Ramped
    data: ClientData

    @property
    def method(self) -> FedLoKe:
        assert isinstance(self.parts.method, FedLoKe)
        return self.parts.method

    @property
    def held(self) -> Held:
        return Held(Personal(self.personal.state()), {}, {})

    def pair(self) -> Pair:
        return Pair(self.personal, float(self.down.ramp))

    def answer(self, data: ClientData | None = None, held: Held | None = None) -> Reply:
        return client_round(place_of(self.parts), Task(1, CLIENT, LR, held), self.down, data or self.data)


def world(labels: str = "clients", ramp: float = 0.6, **options: Any) -> World:
    """A client that has received weights in the middle of a run and keeps a network that differs from it."""
    parts = toy_parts(toy_recipe("fedloke", labels, {"method": options}, rounds=2))
    net, personal = place_of(parts).net, place_of(parts).net
    data = parts.scenario.client(CLIENT)
    net.recalibrate(data.views.plain(data.images[data.unlabelled]))
    weights = decided(net.state(), 9)
    net.load(weights)
    personal.load(decided({name: tensor * 1.1 for name, tensor in weights.items()}, 10))
    return World(parts, net, personal, Ramped(weights, torch.tensor(ramp)), data)


def decided(weights: Weights, seed: int) -> Weights:
    """The same features with a classifier that names several classes, sure of some images and unsure of others."""
    shape = weights["classifier.weight"].shape
    return weights | {"classifier.weight": torch.randn(shape, generator=torch.Generator().manual_seed(seed))}


def in_training(here: World) -> World:
    here.net.network.train()
    here.personal.network.train()
    return here


def first_batch(here: World) -> Batch:
    return next(batches(here.data, place_of(here.parts).budget, (0, 1, CLIENT)))


def logits_of(net: Net, *views: torch.Tensor) -> list[torch.Tensor]:
    return list(net.network(torch.cat(views)).logits.split([len(view) for view in views]))


def rows(logits: torch.Tensor) -> Array:
    probabilities: Array = scipy.special.softmax(logits.detach().double().numpy(), axis=1)
    return probabilities


class Seen(NamedTuple):
    """Probabilities of one batch: of labelled images, weak and strong views of unlabelled ones."""

    labelled: Array
    weak: Array
    strong: Array


def seen(here: World, batch: Batch) -> tuple[Seen, Seen]:
    """What the shared and the personal network say; the shared one sees strong views of labelled images."""
    u = batch.unlabelled
    shared = logits_of(here.net, batch.labelled.uncut, u.weak, u.strong)
    personal = logits_of(here.personal, batch.labelled.weak, u.weak, u.strong)
    return Seen(*map(rows, shared)), Seen(*map(rows, personal))


def middling(*found: Seen) -> float:
    """A threshold that about half of all entropies are below."""
    heights = np.sort(np.concatenate([scipy.stats.entropy(one.weak, axis=1) for one in found]))
    return float(heights[7:9].mean())


def taught(student: Seen, teacher: Seen, labels: list[int], threshold: float) -> tuple[float, float, list[bool]]:
    """Supervised term and cross entropy to the teacher's soft labels, which is KL plus their entropy."""
    own = -float(np.mean([math.log(p[label]) for p, label in zip(student.labelled, labels, strict=True)]))
    sure = [float(scipy.stats.entropy(p)) < threshold for p in teacher.weak]
    apart = [
        float(scipy.special.rel_entr(p, q).sum() + scipy.stats.entropy(p))
        for p, q in zip(teacher.weak, student.strong, strict=True)
    ]
    return own, sum(value for value, used in zip(apart, sure, strict=True) if used) / len(sure), sure


def test_one_step() -> None:
    here = in_training(world())
    batch = first_batch(here)
    shared, personal = seen(here, batch)
    threshold = middling(shared, personal)
    here = in_training(world(entropy_threshold=threshold))
    labels = batch.labelled.labels.tolist()
    ours, theirs = taught(shared, personal, labels, threshold), taught(personal, shared, labels, threshold)
    assert ours[2] != theirs[2]
    assert 0 < sum(ours[2]) < 8
    loss = here.method.loss(here.net, batch, here.pair())
    assert loss.pseudo is not None
    assert loss.pseudo.used.tolist() == ours[2], "the personal network labels for the shared one"
    assert loss.pseudo.label.tolist() == personal.weak.argmax(axis=1).tolist()
    expected = {
        "supervised": ours[0],
        "consistency": ours[1],
        "personal_supervised": theirs[0],
        "personal_consistency": theirs[1],
    }
    assert {name: term.item() for name, term in loss.terms.items()} == pytest.approx(expected, rel=1e-4)
    whole = ours[0] + theirs[0] + 0.6 * (ours[1] + theirs[1])
    assert loss.value.item() == pytest.approx(whole, rel=1e-4)


def test_each_network_learns_from_the_other_one_and_nothing_flows_back() -> None:
    here = in_training(world(entropy_threshold=1.09))
    batch = first_batch(here)
    u, labels = batch.unlabelled, batch.labelled.labels
    pairs = [(here.net, batch.labelled.uncut), (here.personal, batch.labelled.weak)]
    outputs = [logits_of(net, labelled, u.weak, u.strong) for net, labelled in pairs]
    soft = [output[1].detach().softmax(dim=1) for output in outputs]
    expected = []
    for index, (net, _) in enumerate(pairs):
        target = soft[1 - index]
        sure = -(target * target.log()).sum(dim=1) < 1.09
        apart = F.kl_div(outputs[index][2].log_softmax(dim=1), target, reduction="none").sum(dim=1)
        value = F.cross_entropy(outputs[index][0], labels) + 0.6 * (apart * sure).mean()
        expected.append(torch.autograd.grad(value, list(net.named_parameters().values())))
    loss = here.method.loss(here.net, batch, here.pair())
    for (net, _), slopes in zip(pairs, expected, strict=True):
        found = torch.autograd.grad(loss.value, list(net.named_parameters().values()), retain_graph=True)
        for slope, other in zip(found, slopes, strict=True):
            torch.testing.assert_close(slope, other, rtol=1e-3, atol=1e-5)


def test_with_sage_both_learn_the_same_mixture() -> None:
    here = in_training(world())
    batch = first_batch(here)
    shared, personal = seen(here, batch)
    threshold = middling(shared, personal)
    here = in_training(world(entropy_threshold=threshold, sage=True))
    used, towards = [], []
    for own, theirs in zip(personal.weak, shared.weak, strict=True):
        sure = [float(scipy.stats.entropy(p)) < threshold for p in (own, theirs)]
        share = math.exp(-KAPPA * abs(own.max() - theirs.max())) if sure[0] else 0.0
        used.append(any(sure))
        towards.append(share * own + (1 - share) * theirs)
    loss = here.method.loss(here.net, batch, here.pair())
    assert loss.pseudo is not None
    assert loss.pseudo.used.tolist() == used
    for name, student in (("consistency", shared), ("personal_consistency", personal)):
        each = [-float(t @ np.log(q)) for t, q in zip(towards, student.strong, strict=True)]
        expected = sum(value for value, counts in zip(each, used, strict=True) if counts) / len(used)
        assert loss.terms[name].item() == pytest.approx(expected, rel=1e-3)


# A round


def test_what_persists_of_the_personal_network() -> None:
    for share in (0.0, 0.7, 1.0):
        here = world(persistence=share)
        with torch.no_grad():
            local = here.method.prepare(here.net, here.down, here.data, Personal(here.personal.state()), None)  # type: ignore[arg-type]
        found = local.const.personal.state()
        for name, tensor in here.personal.state().items():
            old, new = tensor.double().numpy(), here.down.weights[name].double().numpy()
            np.testing.assert_allclose(found[name].numpy(), share * old + (1 - share) * new, rtol=1e-5, atol=1e-6)
        assert any("running_var" in name for name in found)


def test_without_persistence_the_personal_network_starts_as_the_received_one() -> None:
    """μ = 0: whatever a client kept, it is forgotten; and so it is at its first visit."""
    here = world(persistence=0.0)
    with torch.no_grad():
        local = here.method.prepare(here.net, here.down, here.data, Personal(here.personal.state()), None)  # type: ignore[arg-type]
    assert equal_weights(local.const.personal.state(), here.net.state())
    kept, fresh = here.answer(held=here.held), here.answer()
    assert equal_weights(kept.up.weights, fresh.up.weights)
    assert equal_weights(kept.held.kept.weights, fresh.held.kept.weights)
    stubborn = world(persistence=0.9)
    assert not equal_weights(stubborn.answer(held=here.held).up.weights, stubborn.answer().up.weights)


def by_hand(here: World) -> tuple[Net, Net]:
    """A client's round with an optimiser for each network."""
    place = place_of(here.parts)
    nets = [here.net.twin(), here.net.twin()]
    old, new = here.personal.state(), here.net.state()
    nets[1].load(
        {name: here.method.persistence * old[name] + (1 - here.method.persistence) * new[name] for name in new}
    )
    momentum, decay, clip = place.optimiser.momentum, place.optimiser.weight_decay, place.optimiser.clip
    sgds = [torch.optim.SGD(n.network.parameters(), lr=LR, momentum=momentum, weight_decay=decay) for n in nets]
    for net in nets:
        net.network.train()
    for batch in batches(here.data, place.budget, (0, 1, CLIENT)):
        u = batch.unlabelled
        outputs = [
            logits_of(net, x, u.weak, u.strong)
            for net, x in zip(nets, (batch.labelled.uncut, batch.labelled.weak), strict=True)
        ]
        soft = [output[1].detach().softmax(dim=1) for output in outputs]
        for index, sgd in enumerate(sgds):
            target = soft[1 - index]
            sure = -(target * target.log()).sum(dim=1) < here.method.entropy_threshold
            apart = F.kl_div(outputs[index][2].log_softmax(dim=1), target, reduction="none").sum(dim=1)
            value = F.cross_entropy(outputs[index][0], batch.labelled.labels)
            value = value + float(here.down.ramp) * (apart * sure).mean()
            sgd.zero_grad()
            value.backward()
            torch.nn.utils.clip_grad_norm_(nets[index].network.parameters(), clip)  # type: ignore[arg-type]
            sgd.step()
    return nets[0], nets[1]


def test_a_whole_round() -> None:
    here = world(persistence=0.7, entropy_threshold=0.9)
    shared, personal = by_hand(here)
    reply = here.answer(held=here.held)
    assert isinstance(reply.held.kept, Personal)
    for name, tensor in reply.up.weights.items():
        torch.testing.assert_close(tensor, shared.state()[name], rtol=1e-4, atol=1e-5)
    for name, tensor in reply.held.kept.weights.items():
        torch.testing.assert_close(tensor, personal.state()[name], rtol=1e-4, atol=1e-5)
    assert reply.record.terms["consistency"] > 0
    assert reply.record.terms["personal_consistency"] > 0


def test_a_client_with_nothing_to_learn_from_weighs_nothing_and_its_networks_stay() -> None:
    here = world("server", entropy_threshold=0.0)
    reply = here.answer(held=here.held)
    assert float(reply.up.samples) == 0.0
    assert all(torch.equal(tensor, here.down.weights[name]) for name, tensor in reply.up.weights.items())
    names = here.net.named_parameters()
    mixed = {n: 0.9 * here.personal.state()[n] + 0.1 * here.down.weights[n] for n in names}
    for name in names:
        torch.testing.assert_close(reply.held.kept.weights[name], mixed[name])


def test_a_client_whose_shared_network_learnt_nothing_weighs_nothing() -> None:
    """Its personal network is never sure, so it only learns itself; weight decay must not reach the shared one."""
    here = world("server", persistence=1.0, entropy_threshold=1.0)
    blank = here.personal.state() | {"classifier.weight": torch.zeros(3, 8), "classifier.bias": torch.zeros(3)}
    place = place_of(here.parts)
    assert place.optimiser.weight_decay > 0
    reply = client_round(place, Task(1, CLIENT, 1e-6, Held(Personal(blank), {}, {})), here.down, here.data)
    assert float(reply.up.samples) == 0.0
    assert all(torch.equal(tensor, here.down.weights[name]) for name, tensor in reply.up.weights.items())
    assert not torch.equal(reply.held.kept.weights["classifier.weight"], blank["classifier.weight"])


def test_labels_alone_are_enough() -> None:
    here = world()
    data = here.data._replace(unlabelled=here.data.unlabelled[:0])
    reply = here.answer(data, here.held)
    assert reply.record.terms["supervised"] > 0
    assert reply.record.terms["consistency"] == 0.0
    assert float(reply.up.samples) == len(data.labelled)


@pytest.mark.parametrize("labelled", [1, 2])
def test_clients_of_hardly_a_label(labelled: int) -> None:
    here = world()
    few = here.data._replace(labelled=here.data.labelled[:labelled], labels=here.data.labels[:labelled])
    for data in (few, here.data._replace(unlabelled=here.data.unlabelled[:2])):
        reply = here.answer(data, here.held)
        tensors = [*reply.up.weights.values(), *reply.held.kept.weights.values()]
        assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
        assert float(reply.up.samples) == data.image_count


# The server, and what clients keep


def test_the_ramp_travels() -> None:
    parts = toy_parts(toy_recipe("fedloke", "clients", {"method": {"ramp": 0.4}}, rounds=10))
    method, site = parts.method, site_of(parts)
    server = method.setup(site.net.state(), site)
    found = []
    for round_ in range(1, 11):
        site.round = round_
        down = method.broadcast(server)
        found.append(float(down.ramp))
        up = Up({name: server.weights[name] for name in site.net.trained_names()}, torch.tensor(1.0))
        server = method.aggregate(server, [up], site)
    assert found == pytest.approx([0.25, 0.5, 0.75, *[1.0] * 7])


def test_no_ramp_counts_unlabelled_images_in_full_from_the_start() -> None:
    parts = toy_parts(toy_recipe("fedloke", "clients", {"method": {"ramp": 0.0}}, rounds=10))
    site = site_of(parts)
    assert float(parts.method.setup(site.net.state(), site).ramp) == 1.0


@pytest.mark.parametrize("sage", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_clients_keep_survives_rounds_and_resume(sage: bool, tmp_path: Path) -> None:
    parts = toy_parts(toy_recipe("fedloke", "clients", {"method": {"sage": sage}}, rounds=3))
    whole = run_toy(parts, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run_toy(parts, tmp_path / "parts", reporter=Quiet(stop_after=1))
    resumed = run_toy(parts, tmp_path / "parts", resume=True)
    assert equal_weights(resumed.weights, whole.weights)
    last: dict[int, Weights] = {}
    for exchange in whole.exchanges:
        for answer in exchange.answers:
            assert isinstance(answer, Reply)
            last[answer.record.client] = answer.held.kept.weights
    for out in ("whole", "parts"):
        checkpoint = Checkpoint(tmp_path / out / "checkpoint")
        finished = checkpoint.load(Ramped)
        assert finished is not None
        assert finished.left.keys() == last.keys()
        for client, round_ in finished.left.items():
            held = checkpoint.store.load(client, round_, Personal)
            assert held is not None
            assert equal_weights(held.kept.weights, last[client])
    assert whole.rounds[-1]["pseudo"]["used"] > 0


def test_a_second_visit_starts_from_the_first() -> None:
    here = world()
    first = here.answer()
    again = here.answer(held=first.held)
    assert not equal_weights(again.held.kept.weights, first.held.kept.weights)
    assert not equal_weights(again.up.weights, first.up.weights)


@pytest.mark.parametrize(("key", "value"), [("persistence", 1.5), ("entropy_threshold", -1), ("ramp", 2)])
def test_mistakes_name_their_key(key: str, value: float) -> None:
    with pytest.raises(UserError, match=f"method.{key}"):
        toy_recipe("fedloke", "clients", {"method": {key: value}})
