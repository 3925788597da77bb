"""FedMatch against a client whose two parts are really two sets of weights, and against helpers found by hand."""

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.special
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import functional_call
from torch.nn import functional as F

from semifed.assembly import Parts
from semifed.client_round import Reply as Answer
from semifed.client_round import Task, client_round
from semifed.data.client import Batch, ClientData, batches
from semifed.decomposition import (
    Decomposed,
    Member,
    absolute_sum,
    elected_label,
    helper_divergence,
    kernels,
    nobody,
    noise_image,
    squared_gap,
)
from semifed.methods.fedmatch import FedMatch, Reply, Sent, State
from semifed.net import Net
from semifed.payloads import Visit
from semifed.wire import Weights, size_in_bytes
from toys import Quiet, equal_weights, place_of, run_toy, shaken, site_of, toy_parts, toy_recipe

CLIENT = 1
LR = 0.05


# Formulas


@given(st.integers(0, 999), st.integers(0, 4), st.integers(1, 6), st.integers(2, 5))
def test_the_election(seed: int, helpers: int, images: int, classes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    said = torch.rand(1 + helpers, images, classes, generator=generator)
    label = elected_label(said[0], said[1:])
    for image in range(images):
        votes = [0] * classes
        for model in said[:, image].tolist():
            votes[model.index(max(model))] += 1
        assert int(label[image]) == votes.index(max(votes)), "of equals the first class wins"


@given(st.integers(0, 999), st.integers(1, 3))
def test_the_divergence_from_helpers(seed: int, helpers: int) -> None:
    rng = np.random.default_rng(seed)
    said, logits = rng.dirichlet(np.ones(4), size=(helpers, 5)), rng.normal(size=(5, 4))
    p = scipy.special.softmax(logits, axis=1)
    expected = [np.mean([scipy.special.rel_entr(said[h, i], p[i]).sum() for h in range(helpers)]) for i in range(5)]
    found = helper_divergence(torch.from_numpy(said), torch.from_numpy(logits))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)


def test_without_helpers_nobody_diverges() -> None:
    assert helper_divergence(torch.empty(0, 3, 4), torch.randn(3, 4)).tolist() == [0.0, 0.0, 0.0]


@given(st.integers(0, 999))
def test_penalties_number_by_number(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sigma = {"a": rng.normal(size=(2, 3)), "b": rng.normal(size=(1, 2, 2))}
    psi = {name: rng.normal(size=array.shape) for name, array in sigma.items()}
    ours, theirs = ({name: torch.from_numpy(array) for name, array in part.items()} for part in (sigma, psi))
    size = gap = 0.0
    for name in sigma:
        for one, other in zip(sigma[name].ravel().tolist(), psi[name].ravel().tolist(), strict=True):
            size, gap = size + abs(other), gap + (one - other) ** 2
    assert float(absolute_sum(theirs)) == pytest.approx(size)
    assert float(squared_gap(ours, theirs)) == pytest.approx(gap)


@pytest.mark.parametrize("moved", ["sigma", "psi", None])
def test_one_part_takes_the_change_and_the_other_keeps_its_bits(moved: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    sigma, psi, whole = ({"w": torch.randn(4, 5, generator=generator)} for _ in range(3))
    before = Decomposed(sigma, psi, moved=moved)
    after = before.settled(whole)
    assert equal_weights(after.sigma, sigma) == (moved != "sigma")
    assert equal_weights(after.psi, psi) == (moved != "psi")
    if moved:
        torch.testing.assert_close(after.sigma["w"] + after.psi["w"], whole["w"])
    assert after.settled({"w": whole["w"] + 1}) == after, "what was settled once is settled"


def test_turns() -> None:
    first = Decomposed({}, {})
    second = first.passed(taken=True)
    third = second.passed(taken=False)
    assert [(each.turn, each.moved) for each in (first, second, third)] == [
        ("sigma", None),
        ("psi", "sigma"),
        ("sigma", None),
    ]


def test_noise_looks_like_noise() -> None:
    image = noise_image((3, 64, 64), torch.Generator().manual_seed(0))
    assert (image.dtype, tuple(image.shape)) == (torch.uint8, (1, 3, 64, 64))
    assert float((image == 0).float().mean()) == pytest.approx(scipy.special.ndtr(-124.5 / 125), abs=0.02)
    assert float(image.float().median()) == pytest.approx(125, abs=4)


# Members


def member(client: int, embedding: list[float], mark: float) -> Member:
    return Member(torch.tensor(client), {"w": torch.full((2, 2), mark)}, torch.tensor(embedding))


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(-3, 3, width=16), st.floats(-3, 3, width=16)), max_size=12))
def test_helpers_are_the_nearest_others(told: list[tuple[int, float, float]]) -> None:
    members = nobody({"w": torch.zeros(2, 2)}, 2)
    known: dict[int, tuple[float, float]] = {}
    for client, x, y in told:
        members = members.joined_by([member(client, [x, y], 100.0 * client)])
        known[client] = (x, y)
    assert members.client.tolist() == sorted(known)
    assert members.embedding.tolist() == [list(known[client]) for client in sorted(known)]
    for client in range(10):
        found = members.helpers(client, 2)
        if client not in known or len(known) == 1:
            assert found == {}
            continue
        marks = [int(psi[0, 0]) // 100 for psi in found["w"]]
        others = [other for other in sorted(known) if other != client]
        apart = {other: np.hypot(*np.subtract(known[other], known[client])) for other in others}
        assert client not in marks
        assert len(set(marks)) == len(marks) == min(2, len(others))
        assert [apart[mark] for mark in marks] == pytest.approx(sorted(apart.values())[:2], abs=1e-3)


def test_a_member_that_tells_again_replaces_what_it_told() -> None:
    members = nobody({"w": torch.zeros(2, 2)}, 1).joined_by([member(7, [1.0], 1.0), member(2, [2.0], 2.0)])
    again = members.joined_by([member(7, [9.0], 3.0)])
    assert again.client.tolist() == [2, 7]
    assert again.embedding.tolist() == [[2.0], [9.0]]
    assert again.psi["w"][:, 0, 0].tolist() == [2.0, 3.0]
    assert members.joined_by([]) is members
    assert members.embedding.tolist() == [[2.0], [1.0]]


# The client


class World(NamedTuple):
    parts: Parts
    net: Net
    down: Sent
    data: ClientData

    @property
    def method(self) -> FedMatch:
        assert isinstance(self.parts.method, FedMatch)
        return self.parts.method

    def answer(self) -> Answer:
        return client_round(place_of(self.parts), Task(1, CLIENT, LR, None), self.down, self.data)


def world(labels: str = "clients", helpers: int = 2, local: dict[str, Any] | None = None, **options: Any) -> World:
    """A client that has received weights, psi and helpers in the middle of a run."""
    changes: dict[str, Any] = {"method": options, "local": {"momentum": 0.9, "clip": 1e6, **(local or {})}}
    if labels == "clients":
        changes["scenario"] = {"labelled_per_class": 6}
    parts = toy_parts(toy_recipe("fedmatch", labels, changes, rounds=2))
    net = place_of(parts).net
    whole = shaken(net.state())
    net.load(whole)
    generator = torch.Generator().manual_seed(3)

    def drawn(tensor: torch.Tensor, count: tuple[int, ...] = ()) -> torch.Tensor:
        return 0.3 * torch.randn((*count, *tensor.shape), generator=generator)

    psi = {name: drawn(tensor) for name, tensor in kernels(whole).items()}
    lent = {name: drawn(tensor, (helpers,)) for name, tensor in psi.items()} if helpers else {}
    return World(parts, net, Sent(whole, psi, lent), parts.scenario.client(CLIENT))


class TwoParts(NamedTuple):
    """What a client ends with when sigma and psi are two sets of weights with a gradient each."""

    whole: Weights
    psi: Weights


def by_hand(here: World) -> TwoParts:
    net, method = here.net, here.method
    lent = [
        {n: here.down.weights[n] - here.down.psi[n] + psi[h] for n, psi in here.down.helpers.items()} for h in (0, 1)
    ]
    net.network.eval()
    plain = here.data.views.plain(here.data.images[here.data.unlabelled])
    with torch.no_grad():
        said = [functional_call(net.network, model, (plain,)).logits.softmax(dim=1) for model in lent]
    rest = {n: p.detach().clone() for n, p in net.named_parameters().items() if n not in here.down.psi}
    sigma = {n: here.down.weights[n] - psi for n, psi in here.down.psi.items()}
    psi = dict(here.down.psi)
    buffers = dict(net.network.named_buffers())
    net.network.train()

    def logits(of: Weights, images: torch.Tensor) -> torch.Tensor:
        return functional_call(net.network, {**buffers, **of}, (images,)).logits

    budget = place_of(here.parts).budget
    for batch in batches(here.data, budget, (0, 1, CLIENT)):
        learnt = {n: t.clone().requires_grad_() for n, t in {**sigma, **rest}.items()}
        whole = {n: t + psi[n] if n in psi else t for n, t in learnt.items()}
        loss = 10.0 * F.cross_entropy(logits(whole, batch.labelled.weak), batch.labelled.labels)
        slopes = torch.autograd.grad(loss, list(learnt.values()))
        moved = {n: (t - LR * g).detach() for (n, t), g in zip(learnt.items(), slopes, strict=True)}
        sigma, rest = {n: moved[n] for n in sigma}, {n: moved[n] for n in rest}

        free = {n: t.clone().requires_grad_() for n, t in psi.items()}
        whole = {**rest, **{n: sigma[n] + t for n, t in free.items()}}
        own, strong = logits(whole, torch.cat([batch.unlabelled.plain, batch.unlabelled.strong])).chunk(2)
        sure = own.softmax(dim=1).max(dim=1).values >= method.threshold
        assert sure.any()
        opinions = [model[batch.unlabelled.position] for model in said]
        votes = sum(F.one_hot(each.argmax(dim=1), 3) for each in (own, *opinions))
        assert isinstance(votes, torch.Tensor)
        label = votes.argmax(dim=1)
        spread = [F.kl_div(own.log_softmax(dim=1), each, reduction="none").sum(dim=1)[sure].mean() for each in opinions]
        loss = 0.3 * F.cross_entropy(strong[sure], label[sure]) + 0.7 * (spread[0] + spread[1]) / 2
        loss = loss + 0.02 * torch.cat([t.flatten() for t in free.values()]).abs().sum()
        loss = loss + 2.0 * sum(((sigma[n] - t) ** 2).sum() for n, t in free.items())
        slopes = torch.autograd.grad(loss, list(free.values()))
        psi = {n: (t - 0.5 * LR * g).detach() for (n, t), g in zip(free.items(), slopes, strict=True)}
    net.network.eval()
    return TwoParts({**rest, **{n: sigma[n] + psi[n] for n in psi}, **buffers}, psi)


HEAVY = {  # every term matters
    "consistency_weight": 0.3,
    "agreement_weight": 0.7,
    "sparsity_weight": 0.02,
    "attraction_weight": 2.0,
    "psi_rate": 0.5,
    "threshold": 0.4,
}


def test_a_round_is_that_of_two_sets_of_weights() -> None:
    here = world(**HEAVY)
    answer = here.answer()
    assert answer.record.pseudo is not None
    assert 0 < int(answer.record.pseudo.used.sum()) < len(answer.record.pseudo.used)
    expected = by_hand(here)
    for name, tensor in answer.up.weights.items():
        torch.testing.assert_close(tensor, expected.whole[name], rtol=1e-4, atol=1e-5, msg=name)
    for name, tensor in answer.up.member.psi.items():
        torch.testing.assert_close(tensor, expected.psi[name], rtol=1e-4, atol=1e-5, msg=name)
        assert not torch.equal(tensor, here.down.psi[name])
    here.net.load({name: tensor.detach() for name, tensor in expected.whole.items()})
    said = here.net(here.method.prepare(here.net, here.down, here.data, None, Visit(0, 1, 0)).const.noise).logits
    torch.testing.assert_close(answer.up.member.embedding, said.detach().softmax(dim=1)[0], rtol=1e-3, atol=1e-4)
    assert int(answer.up.member.client) == CLIENT
    assert answer.record.terms["agreement"] > 0


@pytest.mark.parametrize("option", [*HEAVY, "supervised_weight"])
def test_every_weight_makes_a_difference(option: str) -> None:
    value = {**HEAVY, "supervised_weight": 10.0}[option]
    ours, theirs = world(**HEAVY).answer(), world(**{**HEAVY, option: 0.9 * value}).answer()
    assert not equal_weights(ours.up.member.psi, theirs.up.member.psi)


def alternating(here: World, count: int) -> list[tuple[Decomposed, Weights]]:
    """Both parts and all parameters before each of so many steps of one batch, and at the end."""
    method, net = here.method, here.net
    const = method.prepare(net, here.down, here.data, None, Visit(0, 1, CLIENT)).const
    batch: Batch = next(batches(here.data, place_of(here.parts).budget, (0, 1, CLIENT)))
    net.network.train()
    seen = []
    for _ in range(count):
        loss = method.loss(net, batch, const)
        seen.append((loss.carry.parts, {name: t.detach().clone() for name, t in net.named_parameters().items()}))
        const = loss.carry
        for parameter in net.named_parameters().values():
            parameter.grad = None
        if loss.value.requires_grad:
            loss.value.backward()
            torch.optim.SGD(net.named_parameters().values(), lr=LR * loss.rate).step()
    whole = {name: tensor.detach().clone() for name, tensor in net.named_parameters().items()}
    return [*seen, (const.parts.settled(net.named_parameters()), whole)]


def test_supervised_steps_leave_psi_and_others_sigma_bit_by_bit() -> None:
    seen = alternating(world(**HEAVY), 6)
    for step, ((before, whole), (after, then)) in enumerate(pairwise(seen)):
        supervised = step % 2 == 0
        assert equal_weights(before.psi, after.psi) == supervised
        assert equal_weights(before.sigma, after.sigma) == (not supervised)
        rest = [name for name in whole if name not in before.psi]
        assert rest
        still = all(torch.equal(whole[name], then[name]) for name in rest)
        assert still == (not supervised), "biases and batch norm are of sigma"
        for name in after.psi:
            torch.testing.assert_close(after.sigma[name] + after.psi[name], then[name], rtol=0, atol=1e-6)


def test_psi_is_drawn_to_sigma_at_a_known_pace() -> None:
    """Of the penalties alone, σ − ψ shrinks by 1 − 2 lr rate λ_L2 a step."""
    options = {**HEAVY, "consistency_weight": 1e-9, "agreement_weight": 0.0, "sparsity_weight": 0.0}
    here = world("clients", **{**options, "supervised_weight": 0.0, "threshold": 0.0})
    (start, _), *_, (end, _) = alternating(here, 6)
    for name in start.psi:
        gap = (start.sigma[name] - start.psi[name]) * (1 - 2 * LR * 0.5 * 2.0) ** 3
        torch.testing.assert_close(end.sigma[name] - end.psi[name], gap, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("local", [{"momentum": 0.0}, {"weight_decay": 0.0}, {"nesterov": True}])
def test_momentum_and_weight_decay_have_no_part_in_it(local: dict[str, Any]) -> None:
    assert equal_weights(world(**HEAVY).answer().up.weights, world(local=local, **HEAVY).answer().up.weights)
    kept = world(local={"keep_optimizer": True}, **HEAVY).answer()
    assert kept.held.momentum == {}


def test_nobody_confident_moves_no_psi() -> None:
    answer = world(**{**HEAVY, "threshold": 1.0}).answer()
    assert equal_weights(answer.up.member.psi, world(**HEAVY).down.psi)
    here = world("server", **{**HEAVY, "threshold": 1.0})
    answer = here.answer()
    assert float(answer.up.samples) == 0.0
    assert all(torch.equal(tensor, here.down.weights[name]) for name, tensor in answer.up.weights.items())


@pytest.mark.parametrize(("helpers", "agreement"), [(2, 0.0), (0, 0.7)])
def test_penalties_alone_are_nothing_to_learn_from(helpers: int, agreement: float) -> None:
    options = {**HEAVY, "consistency_weight": 0.0, "agreement_weight": agreement}
    here = world("server", helpers, **options)
    answer = here.answer()
    assert answer.record.pseudo is not None
    assert answer.record.pseudo.used.any()
    assert float(answer.up.samples) == 0.0
    assert all(torch.equal(tensor, here.down.weights[name]) for name, tensor in answer.up.weights.items())
    heard = world("server", 2, **{**options, "agreement_weight": 0.7}).answer()
    assert float(heard.up.samples) > 0


@pytest.mark.parametrize("clip", [1e-3, 1e6])
def test_psi_has_its_own_rate_whether_gradients_are_clipped_or_not(clip: float) -> None:
    def moved(rate: float) -> Weights:
        here = world("server", local={"clip": clip, "epochs": None, "steps": 1}, **{**HEAVY, "psi_rate": rate})
        return {name: psi - here.down.psi[name] for name, psi in here.answer().up.member.psi.items()}

    slow, fast = moved(0.1), moved(1.0)
    for name, change in fast.items():
        assert float(change.abs().max()) > 0
        torch.testing.assert_close(10 * slow[name], change, rtol=1e-2, atol=5e-6)


def test_without_labels_psi_alone_moves() -> None:
    here = world("server", **HEAVY)
    answer = here.answer()
    assert float(answer.up.samples) == here.data.image_count
    for name, tensor in answer.up.weights.items():
        assert torch.equal(tensor, here.down.weights[name]) == (name not in here.down.psi)
    for name, psi in answer.up.member.psi.items():
        sigma = here.down.weights[name] - here.down.psi[name]
        torch.testing.assert_close(answer.up.weights[name] - sigma, psi)


def test_a_client_without_unlabelled_images_moves_sigma_alone() -> None:
    here = world(**HEAVY)
    data = here.data._replace(unlabelled=here.data.unlabelled[:0])
    answer = here._replace(data=data).answer()
    assert equal_weights(answer.up.member.psi, here.down.psi)
    assert not torch.equal(answer.up.weights["classifier.weight"], here.down.weights["classifier.weight"])
    assert answer.record.terms.keys() == {"total", "supervised"}


def test_terms_are_means_over_the_steps_that_have_them() -> None:
    here = world(**HEAVY)
    net, data = here.net, here.data
    place = place_of(here.parts)
    batch = next(batches(data, place.budget, (0, 1, CLIENT)))
    net.network.train()
    expected = F.cross_entropy(net(batch.labelled.weak).logits, batch.labelled.labels)
    one = place._replace(budget=place.budget._replace(epochs=None, steps=1))
    answer = client_round(one, Task(1, CLIENT, LR, None), here.down, data)
    assert answer.record.steps == 2
    assert answer.record.terms["supervised"] == pytest.approx(expected.item(), rel=1e-5)


# The server


def test_the_start() -> None:
    here = world()
    site = site_of(here.parts)
    initial = site.net.state()
    state = here.method.setup(initial, site)
    for name, tensor in initial.items():
        if tensor.ndim > 1:
            torch.testing.assert_close(state.psi[name], 0.2 * tensor)
            torch.testing.assert_close(state.weights[name], 1.2 * tensor)
        else:
            assert name not in state.psi
            assert torch.equal(state.weights[name], tensor)
    assert len(state.members.client) == 0


def replies(here: World, samples: list[float]) -> list[Reply]:
    generator = torch.Generator().manual_seed(1)
    names = here.net.trained_names()
    found = []
    for client, count in enumerate(samples):
        whole = {n: torch.rand(here.down.weights[n].shape, generator=generator) for n in names}
        psi = {n: torch.rand(t.shape, generator=generator) for n, t in here.down.psi.items()}
        told = Member(torch.tensor(client), psi, torch.rand(3, generator=generator))
        found.append(Reply(whole, torch.tensor(count), told))
    return found


def test_both_parts_are_averaged_evenly_over_those_who_learnt() -> None:
    here = world()
    state = State(here.down.weights, here.down.psi, nobody(here.down.psi, 3))
    ups = replies(here, [40.0, 3.0, 0.0])
    after = here.method.aggregate(state, ups, site_of(here.parts, 1))
    for name in ups[0].weights:
        torch.testing.assert_close(after.weights[name], (ups[0].weights[name] + ups[1].weights[name]) / 2)
    for name in here.down.psi:
        torch.testing.assert_close(after.psi[name], (ups[0].member.psi[name] + ups[1].member.psi[name]) / 2)
        assert torch.equal(after.members.psi[name][2], ups[2].member.psi[name])
    silent = here.method.aggregate(after, [], site_of(here.parts, 2))
    assert equal_weights(silent.psi, after.psi)
    assert equal_weights(silent.weights, after.weights)


def test_labels_of_the_server_move_sigma() -> None:
    here = world("server")
    state = State(here.down.weights, here.down.psi, nobody(here.down.psi, 3))
    ups = replies(here, [1.0, 1.0])
    after = here.method.aggregate(state, ups, site_of(here.parts, 1))
    for name in here.down.psi:
        torch.testing.assert_close(after.psi[name], (ups[0].member.psi[name] + ups[1].member.psi[name]) / 2)
        whole = (ups[0].weights[name] + ups[1].weights[name]) / 2
        assert float((after.weights[name] - whole).abs().max()) > 1e-4


# Whole runs


def toy(labels: str = "clients", workers: int = 1) -> Parts:
    changes = {"method": {"helper_interval": 2, "agreement_weight": 1.0}, "engine": {"workers": workers}}
    return toy_parts(toy_recipe("fedmatch", labels, changes))


@pytest.mark.parametrize("labels", ["clients", "server", "some-clients"])
def test_every_second_round_clients_get_the_parts_of_the_two_most_like_them(labels: str, tmp_path: Path) -> None:
    outcome = run_toy(toy(labels), tmp_path / "run")
    last: dict[int, Member] = {}
    for exchange in outcome.exchanges:
        due = exchange.round % 2 == 0
        assert set(exchange.own) == (set(exchange.clients) if due else set())
        assert exchange.down.helpers == {}
        for client, sent in exchange.own.items():
            others = [other for other in last if other != client] if client in last else []
            apart = {other: float((last[other].embedding - last[client].embedding).norm()) for other in others}
            nearest = sorted(others, key=lambda other: apart[other])[:2]
            assert len(next(iter(sent.helpers.values()), [])) == len(nearest)
            for row, other in enumerate(nearest):
                assert equal_weights({n: psi[row] for n, psi in sent.helpers.items()}, last[other].psi)
        for answer in exchange.answers:
            assert isinstance(answer, Answer)
            last[answer.record.client] = answer.up.member
            assert int(answer.up.member.client) == answer.record.client
    assert [line["loss"]["agreement"] > 0 for line in outcome.rounds[1:]] == [False, True, False, True]
    for line, exchange in zip(outcome.rounds[1:], outcome.exchanges, strict=True):
        letters = [exchange.own.get(client, exchange.down) for client in exchange.clients]
        assert line["bytes_down"] == sum(map(size_in_bytes, letters))


@pytest.mark.slow
def test_two_workers_and_a_resumed_run_give_the_same_bits(tmp_path: Path) -> None:
    alone = run_toy(toy(), tmp_path / "one")
    pooled = run_toy(toy(workers=2), tmp_path / "two")
    assert equal_weights(alone.weights, pooled.weights)
    assert [{**line, "seconds": 0} for line in alone.rounds] == [{**line, "seconds": 0} for line in pooled.rounds]
    with pytest.raises(KeyboardInterrupt):
        run_toy(toy(), tmp_path / "parts", reporter=Quiet(stop_after=3))
    assert equal_weights(run_toy(toy(), tmp_path / "parts", resume=True).weights, alone.weights)


def test_the_noise_is_the_same_for_all() -> None:
    here = world()
    visits = [Visit(0, 1, 0), Visit(0, 7, 3), Visit(1, 1, 0)]
    noise = [here.method.prepare(here.net, here.down, here.data, None, visit).const.noise for visit in visits]
    assert torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0], noise[2])
