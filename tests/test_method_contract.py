"""What every method must keep, in every placement of labels it does not refuse."""

import copy
from dataclasses import FrozenInstanceError, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from reference.batchnorm import cnn_statistics
from semifed.assembly import Parts, build_workplace
from semifed.client_round import ClientRecord, Held, Reply, Task, client_round
from semifed.data.client import Batch, ClientData
from semifed.data.scenario import Sealed
from semifed.engines.local import LocalEngine
from semifed.errors import ClientFailure, UserError
from semifed.fit import Diverged, Loss
from semifed.method import Method, payload_types
from semifed.methods import finds_groups, method_class, method_names
from semifed.net import Net
from semifed.objectives import supervised
from semifed.payloads import Down, Local, Server, Up, Visit
from semifed.recipe import Recipe
from semifed.run import RoundLoop
from semifed.wire import from_arrays, to_arrays
from toys import (
    PLACEMENTS,
    Outcome,
    Quiet,
    equal_weights,
    meaningful,
    run_toy,
    toy_dataset,
    toy_parts,
    toy_recipe,
)

FIRST = dict(reversed(meaningful()))  # where the labels of a method usually are
every_case = pytest.mark.parametrize(
    ("method", "labels"),
    [
        # The fast suite sees every method where its labels usually are, the whole suite wherever they may be.
        pytest.param(method, labels, marks=() if labels == FIRST[method] else pytest.mark.slow)
        for method, labels in meaningful()
    ],
    ids=lambda word: word,
)
every_method = pytest.mark.parametrize("method", method_names())


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> "Straight":
    """The undisturbed run of each case with one worker, computed once."""
    return Straight(tmp_path_factory.mktemp("straight"))


class Straight:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.of = cache(self._of)

    def _of(self, method: str, labels: str) -> Outcome:
        return run_toy(toy_parts(toy_recipe(method, labels)), self._directory / f"{method}-{labels}")


@every_case
def test_training_moves_the_weights(method: str, labels: str, straight: Straight) -> None:
    start = build_workplace(toy_parts(toy_recipe(method, labels)).recipe, (1, 8, 8), 3).net.state()
    moved = not equal_weights(straight.of(method, labels).weights, start)
    assert moved == (method != "untrained")


@every_method
@pytest.mark.slow
def test_two_workers_give_the_bits_of_one(method: str, straight: Straight, tmp_path: Path) -> None:
    labels = FIRST[method]
    parts = toy_parts(toy_recipe(method, labels, {"engine": {"workers": 2}}))
    pooled = run_toy(parts, tmp_path / "run")
    alone = straight.of(method, labels)
    assert equal_weights(pooled.weights, alone.weights)
    for one, other in zip(pooled.rounds, alone.rounds, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
@every_case
def test_any_number_of_workers_gives_the_bits_of_one(
    method: str, labels: str, workers: int, straight: Straight, tmp_path: Path
) -> None:
    parts = toy_parts(toy_recipe(method, labels, {"engine": {"workers": workers}}))
    assert equal_weights(run_toy(parts, tmp_path / "run").weights, straight.of(method, labels).weights)


@pytest.mark.slow
def test_workers_do_not_change_kept_momentum(tmp_path: Path) -> None:
    changes = {"local": {"keep_optimizer": True}}
    alone = run_toy(toy_parts(toy_recipe("fixmatch-lpl", "clients", changes)), tmp_path / "one")
    pooled = run_toy(
        toy_parts(toy_recipe("fixmatch-lpl", "clients", {**changes, "engine": {"workers": 3}})), tmp_path / "three"
    )
    forgetful = run_toy(toy_parts(toy_recipe("fixmatch-lpl", "clients")), tmp_path / "forgetful")
    assert equal_weights(alone.weights, pooled.weights)
    assert not equal_weights(alone.weights, forgetful.weights)


@every_case
def test_a_client_does_not_see_who_was_there_before(method: str, labels: str) -> None:
    parts = toy_parts(toy_recipe(method, labels))
    shape, classes = (1, 8, 8), 3
    server = setup_state(parts)
    down = parts.method.broadcast(server)

    def reply(client: int, after: list[int]) -> Reply:
        place = build_workplace(parts.recipe, shape, classes)
        for other in after:
            client_round(place, Task(1, other, 0.05, None), down, parts.scenario.client(other))
        return client_round(place, Task(1, client, 0.05, None), down, parts.scenario.client(client))

    before = to_arrays(copy.deepcopy(down))
    alone, later = reply(2, []), reply(2, [0, 3])
    assert equal_weights(to_arrays(alone.up), to_arrays(later.up))
    assert equal_weights(to_arrays(alone.held), to_arrays(later.held))
    assert comparable(alone.record) == comparable(later.record)
    assert equal_weights(before, to_arrays(down)), "a client changed what the server sent"


def odd_clients(data: ClientData) -> dict[str, ClientData]:
    """A client as it may be in real life: hardly anything is there, or not what one expects."""
    one_class = data.labels == data.labels[0]
    no_label = data._replace(labelled=data.labelled[:0], labels=data.labels[:0])
    return {
        "no label": no_label,
        "labels of one class": data._replace(labelled=data.labelled[one_class], labels=data.labels[one_class]),
        "one label, one image": data._replace(
            labelled=data.labelled[:1], labels=data.labels[:1], unlabelled=data.unlabelled[:1]
        ),
        "more labels than images": data._replace(unlabelled=data.unlabelled[:2]),
        "labels only": data._replace(unlabelled=data.unlabelled[:0]),
        "one image without a label": no_label._replace(unlabelled=data.unlabelled[:1]),
    }


GATES = {"threshold": 1.0, "sage_threshold": 1.0, "entropy_threshold": 0.0}  # what nobody passes


def odd_cases() -> list[tuple[str, dict[str, float]]]:
    """Every method with labels at the clients, with SAGE too where it takes it; gates open as in all toys, and shut."""
    methods = [method for method, labels in meaningful() if labels == "clients"]
    shut = {
        name: {key: GATES[key] for key in GATES if key in {field.name for field in fields(method_class(name))}}
        for name in methods
    }
    cases = [(name, {}) for name in methods] + [(name, gates) for name, gates in shut.items() if gates]
    hosts = {name for name in methods if "sage" in {field.name for field in fields(method_class(name))}}
    return cases + [(name, {"sage": True, **gates}) for name, gates in cases if name in hosts]


@pytest.mark.parametrize(("method", "gates"), odd_cases())
def test_odd_clients_answer_twice_and_can_be_averaged(method: str, gates: dict[str, float]) -> None:
    more = {} if finds_groups(method_class(method)) else {"labelled_per_class": 6}
    parts = toy_parts(toy_recipe(method, "clients", {"scenario": more, "method": gates}))
    place = build_workplace(parts.recipe, (1, 8, 8), 3)
    loop = RoundLoop(parts, build_workplace(parts.recipe, (1, 8, 8), 3).net, *[None] * 4)  # type: ignore[arg-type]
    server = parts.method.setup(loop.site.net.state(), loop.site)
    down = parts.method.broadcast(server)
    answers = {}
    for name, data in odd_clients(parts.scenario.client(1)).items():
        first = client_round(place, Task(1, 1, 0.05, None), down, data)
        second = client_round(place, Task(2, 1, 0.05, first.held), down, data)
        for reply in (first, second):
            assert finite(reply.up), name
        answers[name] = second.up
    for ups in ([answers["one image without a label"]], list(answers.values()), []):
        loop.site.round += 1
        before, server = server, parts.method.aggregate(server, ups, loop.site)
        assert finite(server)
        if not any(float(up.samples) > 0 for up in ups):
            assert equal_weights(server.weights, before.weights), "nobody learnt anything"


def finite(payload: object) -> bool:
    return all(bool(torch.isfinite(part.float()).all()) for part in to_arrays(payload).values())


def comparable(record: ClientRecord) -> object:
    pseudo = {name: array.tolist() for name, array in to_arrays(record.pseudo).items()}
    return record._replace(pseudo=None, seconds=0.0), pseudo


def setup_state(parts: Parts) -> Server:
    loop = RoundLoop(parts, build_workplace(parts.recipe, (1, 8, 8), 3).net, *[None] * 4)  # type: ignore[arg-type]
    state: Server = parts.method.setup(loop.site.net.state(), loop.site)
    return state


@every_case
def test_the_order_of_replies_changes_nothing(method: str, labels: str) -> None:
    parts = toy_parts(toy_recipe(method, labels))
    down = parts.method.broadcast(setup_state(parts))
    clients = [0, 1, 2, 3]
    turned = [2, 0, 3, 1]

    def ask(order: list[int]) -> dict[int, Reply | ClientFailure]:
        engine = LocalEngine(lambda: build_workplace(parts.recipe, (1, 8, 8), 3), parts.scenario, workers=1)
        return dict(zip(order, engine.ask(1, 0.05, order, down), strict=True))

    usual, unusual = ask(clients), ask(turned)
    ups = []
    for client in clients:
        one, other = usual[client], unusual[client]
        assert isinstance(one, Reply)
        assert isinstance(other, Reply)
        assert one.record.client == other.record.client == client
        assert equal_weights(to_arrays(one.up), to_arrays(other.up))
        ups.append(one.up)

    def aggregated(order: list[int]) -> Server:
        loop = RoundLoop(parts, build_workplace(parts.recipe, (1, 8, 8), 3).net, *[None] * 4)  # type: ignore[arg-type]
        state: Server = parts.method.aggregate(setup_state(parts), [ups[client] for client in order], loop.site)
        return state

    ordered, mixed = aggregated(clients).weights, aggregated(turned).weights
    for name in ordered:  # only the rounding of the sum may differ
        torch.testing.assert_close(ordered[name], mixed[name], rtol=1e-4, atol=1e-5)


@every_case
def test_interrupted_and_resumed_is_uninterrupted(method: str, labels: str, straight: Straight, tmp_path: Path) -> None:
    parts = toy_parts(toy_recipe(method, labels))
    with pytest.raises(KeyboardInterrupt):
        run_toy(parts, tmp_path / "run", reporter=Quiet(stop_after=2))
    resumed = run_toy(parts, tmp_path / "run", resume=True)
    whole = straight.of(method, labels)
    assert equal_weights(resumed.weights, whole.weights)
    assert [{**line, "seconds": 0} for line in resumed.rounds] == [{**line, "seconds": 0} for line in whole.rounds]
    assert {exchange.round for exchange in resumed.exchanges} <= {3, 4}
    assert resumed.summary["metrics"] == whole.summary["metrics"]


@pytest.mark.parametrize("nesterov", [False, True])
def test_resume_keeps_momentum_to_the_bit(nesterov: bool, tmp_path: Path) -> None:
    recipe = toy_recipe("fedavg", "clients", {"local": {"keep_optimizer": True, "nesterov": nesterov}})
    parts = toy_parts(recipe)
    whole = run_toy(parts, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run_toy(parts, tmp_path / "parts", reporter=Quiet(stop_after=2))
    resumed = run_toy(parts, tmp_path / "parts", resume=True)
    assert equal_weights(resumed.weights, whole.weights)


class Memory(NamedTuple):
    """What the method below keeps: its rounds, and the weights it had at the end of the first."""

    rounds: Tensor
    seen: Tensor
    anchor: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Remembers(Method[Server, Down, Up, Memory, Memory]):
    """Pulls a client to the mean of all models it ever received: only right if what is kept survives."""

    title: ClassVar[str] = "a method with a memory"

    def prepare(
        self, net: Net, down: Down, data: ClientData, kept: Memory | None, visit: Visit
    ) -> Local[Memory, Memory]:
        if kept is None:
            kept = Memory(torch.tensor(0), torch.zeros(4, dtype=torch.bool), down.weights)
        rounds = kept.rounds + 1
        names = [name for name, tensor in down.weights.items() if name in net.named_parameters()]
        anchor = {name: kept.anchor[name] + (down.weights[name] - kept.anchor[name]) / rounds for name in names}
        seen = kept.seen.clone()
        seen[int(rounds) % 4] = True
        memory = Memory(rounds, seen, anchor)
        return Local(data, memory, memory)

    def loss(self, net: Net, batch: Batch, const: Memory) -> Loss:
        value, terms, *_ = supervised(net, batch)
        pull = sum(
            (((tensor - const.anchor[name]) ** 2).sum() for name, tensor in net.named_parameters().items()),
            start=torch.zeros(()),
        )
        return Loss(value + 0.1 * pull, {**terms, "pull": pull})


def test_resume_brings_back_what_clients_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = toy_recipe("fedavg", "clients", {"local": {"keep_optimizer": True}})
    parts = toy_parts(recipe)
    monkeypatch.setattr(Recipe, "build_method", lambda self: Remembers())
    parts = Parts(recipe, Remembers(), parts.scenario)
    whole = run_toy(parts, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run_toy(parts, tmp_path / "parts", reporter=Quiet(stop_after=2))
    resumed = run_toy(parts, tmp_path / "parts", resume=True)
    assert equal_weights(resumed.weights, whole.weights)
    last: dict[int, Held] = {}
    for exchange in whole.exchanges:
        for answer in exchange.answers:
            assert isinstance(answer, Reply)
            last[answer.record.client] = answer.held
    counts = np.bincount([client for exchange in whole.exchanges for client in exchange.clients], minlength=4)
    assert [int(last[client].kept.rounds) for client in range(4)] == counts.tolist()
    assert max(counts) > min(counts), "the toy must draw clients unevenly"


@every_case
def test_a_run_leaves_the_method_as_it_was(method: str, labels: str) -> None:
    parts = toy_parts(toy_recipe(method, labels))
    before = copy.deepcopy(vars(parts.method))
    state = setup_state(parts)
    place = build_workplace(parts.recipe, (1, 8, 8), 3)
    assert place.method == parts.method
    reply = client_round(
        place._replace(method=parts.method),
        Task(1, 0, 0.05, None),
        parts.method.broadcast(state),
        parts.scenario.client(0),
    )
    loop = RoundLoop(parts, place.net, *[None] * 4)  # type: ignore[arg-type]
    parts.method.aggregate(state, [reply.up], loop.site)
    assert vars(parts.method) == before
    assert is_dataclass(parts.method)
    for field in fields(parts.method):
        with pytest.raises(FrozenInstanceError):
            setattr(parts.method, field.name, None)


@every_case
def test_payloads_travel_as_their_declared_types(method: str, labels: str) -> None:
    parts = toy_parts(toy_recipe(method, labels))
    server_type, down_type, up_type, kept_type = payload_types(parts.method)
    state = setup_state(parts)
    down = parts.method.broadcast(state)
    place = build_workplace(parts.recipe, (1, 8, 8), 3)
    reply = client_round(place, Task(1, 1, 0.05, None), down, parts.scenario.client(1))
    for value, kind in (
        (state, server_type),
        (down, down_type),
        (reply.up, up_type),
        (reply.held.kept, kept_type),
    ):
        assert type(value) is kind
        arrays = to_arrays(value)
        back = from_arrays(kind, arrays)
        assert equal_weights(to_arrays(back), arrays)


@every_case
def test_bytes_are_those_of_the_arrays_that_travelled(method: str, labels: str, straight: Straight) -> None:
    outcome = straight.of(method, labels)
    for line in outcome.rounds:
        up = down = 0
        for exchange in outcome.exchanges:
            if exchange.round == line["round"]:
                for client in exchange.clients:
                    sent = to_arrays(exchange.own.get(client, exchange.down))
                    down += sum(array.numpy().nbytes for array in sent.values())
                for answer in exchange.answers:
                    assert isinstance(answer, Reply)
                    up += sum(array.numpy().nbytes for array in to_arrays(answer.up).values())
        assert (line["bytes_up"], line["bytes_down"]) == (up, down)
    assert outcome.summary["bytes_up"] == sum(line["bytes_up"] for line in outcome.rounds)
    assert outcome.summary["bytes_down"] == sum(line["bytes_down"] for line in outcome.rounds)


@every_case
def test_batch_norm_statistics_travel_only_when_tracked(method: str, labels: str, straight: Straight) -> None:
    parameters = set(build_workplace(toy_parts(toy_recipe(method, labels)).recipe, (1, 8, 8), 3).net.named_parameters())
    for exchange in straight.of(method, labels).exchanges:
        for answer in exchange.answers:
            assert isinstance(answer, Reply)
            statistics = [name for name in answer.up.weights if "running_" in name]
            assert bool(statistics) == (labels != "server")
            assert parameters <= set(answer.up.weights)


@every_method
def test_a_refused_scenario_names_the_nearest_that_works(method: str) -> None:
    refused = method_class(method).no_meaning
    usable = FIRST[method]
    for key, values in (("labels", PLACEMENTS), ("classes", ("known", "open", "novel"))):
        for value in values:
            changes = {"scenario": {"labels": usable, key: value}}
            if key == "labels" and value in refused:
                with pytest.raises(UserError, match=f"scenario.labels={value} has no meaning for {method}") as raised:
                    toy_recipe(method, value)
                key, _, proposed = str(raised.value).rsplit(" ", 1)[-1].rpartition("=")
                if key:
                    assert toy_recipe(method, proposed), "the proposal must work"
                else:
                    assert value not in method_class(proposed).no_meaning, "the proposal must work"
            elif key == "classes" and value in refused:
                with pytest.raises(UserError, match=f"scenario.classes={value} has no meaning for {method}") as raised:
                    toy_recipe(method, usable, changes)
                proposed = str(raised.value).rsplit("=", 1)[-1]
                assert toy_recipe(method, usable, {"scenario": {"classes": proposed}})


honest_cases = pytest.mark.parametrize(
    ("method", "labels"),
    [case for case in meaningful() if not method_class(case[0]).opens_labels],
    ids=lambda word: word,
)


@honest_cases
@pytest.mark.slow
def test_true_labels_of_unlabelled_images_cannot_matter(
    method: str, labels: str, straight: Straight, tmp_path: Path
) -> None:
    parts = toy_parts(toy_recipe(method, labels))
    scenario = parts.scenario
    hidden = torch.nonzero(scenario.labels < 0).flatten()
    order = hidden[torch.randperm(len(hidden), generator=torch.Generator().manual_seed(1))]
    raw, truth = scenario.dataset.y_train.clone(), scenario.sealed.break_seal().clone()
    raw[hidden], truth[hidden] = raw[order], truth[order]
    assert (truth != scenario.sealed.break_seal()).sum() > len(hidden) // 3
    shuffled = scenario._replace(dataset=scenario.dataset._replace(y_train=raw), sealed=Sealed(truth))
    outcome = run_toy(Parts(parts.recipe, parts.method, shuffled), tmp_path / "run")
    assert equal_weights(outcome.weights, straight.of(method, labels).weights)


@every_method
def test_static_statistics_are_those_of_the_servers_plain_images(method: str, straight: Straight) -> None:
    if "server" in method_class(method).no_meaning:
        return
    outcome = straight.of(method, "server")
    scenario = toy_parts(toy_recipe(method, "server")).scenario
    assert scenario.server is not None
    raw = scenario.dataset.x_train[scenario.server.labelled].numpy().astype(np.float64)
    plain = (raw / 255 - 0.5) / 0.25
    delivered = [exchange.down.weights for exchange in outcome.exchanges] + [outcome.weights]
    for weights in delivered:
        for name, expected in cnn_statistics(weights, plain).items():
            np.testing.assert_allclose(weights[name].numpy(), expected, rtol=2e-4, atol=2e-5, err_msg=name)


@every_method
def test_static_statistics_do_not_move_at_a_client(method: str) -> None:
    if "server" in method_class(method).no_meaning:
        return
    parts = toy_parts(toy_recipe(method, "server"))
    down = parts.method.broadcast(setup_state(parts))
    place = build_workplace(parts.recipe, (1, 8, 8), 3)
    client_round(place, Task(1, 1, 0.05, None), down, parts.scenario.client(1))
    after = place.net.state()
    statistics = [name for name in down.weights if "running_" in name]
    assert statistics
    assert all(torch.equal(after[name], down.weights[name]) for name in statistics)


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name, labels in meaningful() if labels == "server"])
def test_batch_norm_may_stay_at_the_clients(method: str, tmp_path: Path) -> None:
    recipe = toy_recipe(method, "server", {"model": {"batchnorm": "local"}, "evaluate": {"folds": 0}}, rounds=2)
    outcome = run_toy(toy_parts(recipe), tmp_path / "run")
    answers = [answer for exchange in outcome.exchanges for answer in exchange.answers]
    assert len(answers) == (0 if method == "server-only" else 6)
    for answer in answers:
        assert isinstance(answer, Reply)
        assert answer.held.private
        assert not answer.held.private.keys() & answer.up.weights.keys()
    assert all(bool(torch.isfinite(tensor).all()) for tensor in outcome.weights.values())


def test_a_refused_update_costs_only_that_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = toy_parts(toy_recipe("fedavg", "clients"))
    spoil(monkeypatch, rounds={1}, client=parts_cohort(parts)[0])
    reporter = Quiet()
    outcome = run_toy(parts, tmp_path / "run", reporter=reporter)
    assert [len(line["failures"]) for line in outcome.rounds[1:]] == [1, 0, 0, 0]
    assert "NaN" in outcome.rounds[1]["failures"][0]["reason"]
    no_threshold, left_out = reporter.warnings
    assert "will call nothing unknown" in no_threshold
    assert "was left out" in left_out
    assert "NaN" in left_out
    assert all(bool(torch.isfinite(tensor).all()) for tensor in outcome.weights.values())


def test_a_refused_update_leaves_no_trace_in_what_the_client_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a client that failed once is lost for good, and a resumed run differs from an unbroken one."""
    parts = toy_parts(toy_recipe("fedavg", "clients", {"local": {"keep_optimizer": True}}, clients_per_round=4))
    spoil(monkeypatch, rounds={2}, client=1)
    whole = run_toy(parts, tmp_path / "whole")
    assert [[failure["client"] for failure in line["failures"]] for line in whole.rounds[1:]] == [[], [1], [], []]
    with pytest.raises(KeyboardInterrupt):
        run_toy(parts, tmp_path / "parts", reporter=Quiet(stop_after=2))
    resumed = run_toy(parts, tmp_path / "parts", resume=True)
    assert equal_weights(resumed.weights, whole.weights)


def parts_cohort(parts: Parts) -> list[int]:
    loop = RoundLoop(parts, build_workplace(parts.recipe, (1, 8, 8), 3).net, *[None] * 4)  # type: ignore[arg-type]
    return loop._cohort(1)


def spoil(monkeypatch: pytest.MonkeyPatch, rounds: set[int], client: int) -> None:
    """Make one client's training end in NaN weights and NaN momentum in the given rounds."""
    healthy = client_round

    def spoiled(place: object, task: Task, down: object, data: ClientData) -> Reply:
        reply = healthy(place, task, down, data)  # type: ignore[arg-type]
        if task.client != client or task.round not in rounds:
            return reply
        broken = {name: tensor * torch.nan for name, tensor in reply.up.weights.items()}
        momentum = {name: tensor * torch.nan for name, tensor in reply.held.momentum.items()}
        return reply._replace(up=reply.up._replace(weights=broken), held=reply.held._replace(momentum=momentum))

    monkeypatch.setattr("semifed.engines.worker.client_round", spoiled)


def test_too_few_clients_end_the_run_with_their_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverging(place: object, task: Task, down: object, data: ClientData) -> Reply:
        raise Diverged("the loss became nan in step 1")

    parts = toy_parts(toy_recipe("fedavg", "clients", min_clients=3))
    monkeypatch.setattr("semifed.engines.worker.client_round", diverging)
    expected = r"round 1: only 0 of 3 clients delivered, min_clients is 3.*client \d: the loss became nan in step 1"
    with pytest.raises(UserError, match=expected):
        run_toy(parts, tmp_path / "run")


def test_clients_with_fewer_than_two_images_are_left_out(tmp_path: Path) -> None:
    recipe = toy_recipe(
        "fixmatch-lpl",
        "clients",
        {"scenario": {"subset": 15, "clients": 14, "labelled_per_class": 1}},
        clients_per_round=14,
        rounds=1,
        min_clients=0,
    )
    reporter = Quiet()
    outcome = run_toy(toy_parts(recipe, toy_dataset()), tmp_path / "run", reporter=reporter)
    assert outcome.rounds[1]["failures"]
    assert "will call nothing unknown" in reporter.warnings[0]
    assert "fewer than 2 images" in reporter.warnings[1]


def test_a_broadcast_that_lacks_weights_is_refused() -> None:
    """Otherwise a client would train on what the process's last client left behind."""
    parts = toy_parts(toy_recipe("fedavg", "clients"))
    place = build_workplace(parts.recipe, (1, 8, 8), 3)
    weights = place.net.state()
    weights.pop("classifier.bias")
    with pytest.raises(TypeError, match=r"lacks 'classifier.bias'"):
        client_round(place, Task(1, 0, 0.05, None), Down(weights), parts.scenario.client(0))
