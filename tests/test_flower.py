"""Flower as an engine: the same numbers as on one machine, and what happens when clients fail."""

import json
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from local_grid import LocalGrid, run_simulation
from semifed.assembly import Parts, assemble, prepare_run
from semifed.client_round import Held, Reply
from semifed.data.client import ClientData
from semifed.engines import flower, flower_engine, letters
from semifed.engines.flower import FlowerEngine
from semifed.engines.flower_simulation import simulated_client
from semifed.engines.letters import Letter, Setting, answer, order, reply_of
from semifed.errors import ClientFailure, UserError
from semifed.held import HeldStore
from semifed.methods import method_names
from semifed.net import Net
from semifed.payloads import Down
from semifed.recipe import Recipe, check_recipe
from semifed.run import _mean_terms, execute
from test_golden import recipe_tables
from toys import Quiet, equal_weights

KEEPS_STATE = "flexmatch"


def recipe_of(method: str, engine: str = "flower", **changes: Any) -> Recipe:
    tables = recipe_tables(method)
    return check_recipe({**tables, "rounds": 2, "engine": {"name": engine, "workers": 1}, **changes})


def run_of(recipe: Recipe, out: Path, *, resume: bool = False) -> dict[str, Any]:
    return execute(prepare_run(recipe), out, Quiet(), resume=resume)


def model_of(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


def rounds_of(out: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (out / "rounds.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flwr.simulation.run_simulation", run_simulation)
    monkeypatch.setattr("semifed.engines.flower_simulation.ray_started", lambda workers: nullcontext())


SOON = ("fedavg", KEEPS_STATE, "fedmatch")  # the others take their time


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize(
    "method", [name if name in SOON else pytest.param(name, marks=pytest.mark.slow) for name in method_names()]
)
def test_flower_gives_the_same_numbers(method: str, tmp_path: Path) -> None:
    for engine in ("local", "flower"):
        run_of(recipe_of(method, engine), tmp_path / engine)
    assert equal_weights(model_of(tmp_path / "local"), model_of(tmp_path / "flower"))
    assert rounds_of(tmp_path / "local") == rounds_of(tmp_path / "flower")


@pytest.mark.slow
@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("method", [KEEPS_STATE, "fedlpa"])
@pytest.mark.parametrize("engines", [("flower", "flower"), ("flower", "local"), ("local", "flower")])
def test_a_run_goes_on_with_either_engine(
    method: str, engines: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    run_of(recipe_of(method, "local", rounds=4), whole)
    original = LocalGrid.send_and_receive
    first, second = (recipe_of(method, engine, rounds=4) for engine in engines)

    class Cut(Quiet):
        def finished_round(self, record: Any) -> None:
            if record["round"] == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(prepare_run(first), halves, Cut())
    monkeypatch.setattr(LocalGrid, "send_and_receive", original)
    run_of(second, halves, resume=True)
    assert equal_weights(model_of(whole), model_of(halves))


class World:
    """An engine over a local grid, outside a run."""

    def __init__(
        self, tmp_path: Path, method: str = KEEPS_STATE, timeout: float | None = None, *, keys: bool = False
    ) -> None:
        self.parts: Parts = prepare_run(recipe_of(method, clients_per_round=4))
        scenario = self.parts.scenario
        shape = tuple(scenario.dataset.x_train.shape[1:])
        self.setting = Setting(
            self.parts.recipe.to_toml(), shape, tuple(scenario.class_names()), scenario.views.mean, scenario.views.std
        )
        self.store = HeldStore(tmp_path / "kept")
        self.net: Net = assemble(self.parts)[0]
        self.grid = LocalGrid(simulated_client(str(tmp_path / "kept")), 4)
        self.grid.keys = {node: b"key of %d" % client for node, client in self.grid.client_of.items()} if keys else {}
        held = {client: self.grid.keys[node] for node, client in self.grid.client_of.items()} if keys else None
        self.engine = FlowerEngine(self.grid, self.setting, self.parts.method, timeout=timeout, keys=held)

    def ask(self, round_: int, clients: tuple[int, ...] = (0, 1, 2, 3)) -> list[Reply | ClientFailure]:
        return self.engine.ask(round_, 0.05, clients, Down(self.net.state()))

    def accepted(self, round_: int) -> list[Reply]:
        replies = [one for one in self.ask(round_) if isinstance(one, Reply)]
        self.engine.accept(round_, replies)
        return replies


def reasons(answers: list[Reply | ClientFailure]) -> dict[int, str]:
    return {one.client: one.reason for one in answers if isinstance(one, ClientFailure)}


def test_replies_come_in_the_order_of_the_clients(tmp_path: Path) -> None:
    here = World(tmp_path)
    clients = [one.record.client for one in here.ask(1, (3, 0, 2)) if isinstance(one, Reply)]
    assert clients == [3, 0, 2]


def test_a_node_is_asked_who_it_is_once(tmp_path: Path) -> None:
    here = World(tmp_path)
    here.ask(1, (0, 1))
    here.ask(2, (0, 2))
    assert sorted(client for kind, client in here.grid.asked if kind == "query.who") == [0, 1, 2, 3]


def test_a_client_that_is_not_connected_is_a_failure(tmp_path: Path) -> None:
    here = World(tmp_path)
    here.grid.gone = {1}
    assert reasons(here.ask(1)) == {1: "it is not connected"}
    here.grid.gone = set()
    assert reasons(here.ask(2)) == {}


def test_a_silent_client_is_not_addressed_again_until_it_says_who_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower, "QUESTION_SECONDS", 0.3)
    here = World(tmp_path, timeout=0.5)
    here.ask(1)
    here.grid.silent = {2}
    assert reasons(here.ask(2)) == {2: "no answer within 0.5 s"}
    here.grid.asked.clear()
    assert reasons(here.ask(3)) == {2: "it is not connected"}
    assert ("query.who", 2) in here.grid.asked
    assert ("train.letter", 2) not in here.grid.asked
    here.grid.silent = set()
    assert reasons(here.ask(4)) == {}


def test_a_client_that_raises_is_a_failure_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = World(tmp_path)
    original = letters.client_round

    def broken(place: Any, task: Any, down: Any, data: ClientData) -> Reply:
        if task.client == 3:
            raise MemoryError("no room")
        return original(place, task, down, data)

    monkeypatch.setattr(letters, "client_round", broken)
    found = reasons(here.ask(1))
    assert list(found) == [3]
    assert "MemoryError" in found[3]
    assert "no room" in found[3]
    monkeypatch.setattr(letters, "client_round", original)
    assert reasons(here.ask(2)) == {}


def kept(here: World, client: int, round_: int) -> Held:
    from semifed.method import payload_types

    held = here.store.load(client, round_, payload_types(here.parts.method)[3])
    assert held is not None
    return held


def test_a_refused_client_goes_on_from_before(tmp_path: Path) -> None:
    here = World(tmp_path)
    here.accepted(1)
    before = kept(here, 0, 1)
    here.ask(2)  # nothing of it is accepted
    assert here.engine.left == dict.fromkeys(range(4), 1)
    again = here.ask(2)
    assert equal_weights(letters.to_arrays(kept(here, 0, 1)), letters.to_arrays(before))
    first = {one.record.client: one for one in here.ask(2) if isinstance(one, Reply)}
    for one in again:
        assert isinstance(one, Reply)
        assert equal_weights(one.up.weights, first[one.record.client].up.weights)


def test_what_can_be_needed_again_stays_on_disk(tmp_path: Path) -> None:
    here = World(tmp_path)
    for round_ in (1, 2, 3):
        here.accepted(round_)
    # Round 3 is not checkpointed yet, as far as a client knows: it may have to be repeated from the end of round 2.
    assert sorted(path.stem for path in here.store.path(0, 1).parent.iterdir()) == ["000002", "000003"]


def a_letter(here: World, tmp_path: Path) -> Letter:
    from semifed.client_round import Task

    asked = order(here.setting, "run", Task(1, 0, 0.05, None), Down(here.net.state()), left=-1, finished=-1)
    data = here.parts.scenario.client(0)
    return answer(asked, data, HeldStore(tmp_path / "other"))


def test_a_letter_tells_nothing_but_what_the_method_reports(tmp_path: Path) -> None:
    here = World(tmp_path)
    letter = a_letter(here, tmp_path)
    assert set(letter.facts) == {"round", "seconds"}
    names = {f"up/weights/{name}" for name in here.net.trained_names()} | {"up/samples"}
    assert set(letter.arrays) == names


def test_odd_letters_are_refused(tmp_path: Path) -> None:
    here = World(tmp_path)
    letter, method = a_letter(here, tmp_path), here.parts.method
    assert isinstance(reply_of(letter, 0, 1, method), Reply)
    late = reply_of(letter, 0, 2, method)
    assert late == ClientFailure(0, "its answer was refused: it is for round 1")
    stranger = Letter({**letter.arrays, "up/secret": torch.zeros(1)}, letter.facts)
    assert reply_of(stranger, 0, 1, method) == ClientFailure(
        0, "its update was refused: unexpected array 'secret' for Up"
    )
    lacking = Letter({name: a for name, a in letter.arrays.items() if name != "up/samples"}, letter.facts)
    assert reply_of(lacking, 0, 1, method) == ClientFailure(0, "its update was refused: array 'samples' is missing")
    noisy = reply_of(Letter({}, {"round": 1, "failed": "\x1b[2J" + "no" * 10_000_000}), 0, 1, method)
    assert isinstance(noisy, ClientFailure)
    assert noisy.reason.isprintable()
    assert len(noisy.reason) < 400


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"steps": float("inf")}, "it tells of counts that nobody has"),
        ({"images": float("nan")}, "it tells of counts that nobody has"),
        ({"steps": "9" * 400}, "it tells of counts that nobody has"),
        ({"images": "9" * 400}, "it tells of counts that nobody has"),
        ({"images": 10**12}, "it tells of counts that nobody has"),
        ({"images": 1.79e308}, "it tells of counts that nobody has"),
        ({"terms": ["loss"] * 1000, "term_values": [0.0] * 1000}, "it tells of terms that no loss has"),
        ({"terms": ["l" * 1000], "term_values": [0.0]}, "it tells of terms that no loss has"),
    ],
)
def test_facts_that_cannot_be_are_refused(facts: dict[str, Any], told: str, tmp_path: Path) -> None:
    here = World(tmp_path)
    letter = a_letter(here, tmp_path)
    found = reply_of(Letter(letter.arrays, letter.facts | facts), 0, 1, here.parts.method)
    assert found == ClientFailure(0, f"its update was refused: {told}")


def test_steps_that_were_not_taken_do_not_count(tmp_path: Path) -> None:
    here = World(tmp_path)
    letter = a_letter(here, tmp_path)
    facts = {"steps": -3, "images": -1, "terms": ["own"], "term_values": [2.0]}
    found = reply_of(Letter(letter.arrays, letter.facts | facts), 0, 1, here.parts.method)
    assert isinstance(found, Reply)
    assert (found.record.steps, found.record.images) == (0, 0)
    assert _mean_terms([found.record]) == {"own": 0.0}


def test_a_client_that_sends_anything_costs_its_own_update_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = World(tmp_path)
    original = here.grid.app

    def odd(message: Any, context: Any) -> Any:
        reply = original(message, context)
        client = context.node_config["partition-id"]
        if message.metadata.message_type.startswith("train"):
            if client == 1:
                del reply.content["arrays"]
            if client == 2:
                reply.content["facts"]["seconds"] = "long"
            if client == 3:
                reply.content["facts"]["term_values"] = [1.0]
        return reply

    monkeypatch.setattr(here.grid, "app", odd)
    found = reasons(here.ask(1))
    assert list(found) == [1, 2, 3]
    assert found[1] == "its answer was refused: it cannot be read (KeyError)"
    assert found[2].startswith("its update was refused: could not convert string to float")
    assert found[3].startswith("its update was refused: zip()")


def test_an_answer_that_will_be_refused_is_no_reason_not_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 1 sends NaN, 2 and 3 are away: with two wanted, it is 2 that the round waits for."""
    here = World(tmp_path)
    monkeypatch.setattr(flower, "WAITING_SECONDS", 0.0)
    original, told = here.grid.app, []

    def broken(message: Any, context: Any) -> Any:
        reply = original(message, context)
        if message.metadata.message_type.startswith("train") and context.node_config["partition-id"] == 1:
            arrays = reply.content["arrays"]
            for name, array in arrays.items():
                arrays[name] = type(array)(np.asarray(array.numpy() * np.float32(np.nan)))
        return reply

    def heard(line: str) -> None:
        told.append(line)
        here.grid.gone = {3} if len(told) == 1 else set()

    monkeypatch.setattr(here.grid, "app", broken)
    here.grid.gone = {2, 3}
    here.engine = FlowerEngine(here.grid, here.setting, here.parts.method, least=2, patience=60.0, say=heard)
    answers = here.ask(1)
    assert told == ["round 1: 1 of 4 clients, waiting for more"]
    assert reasons(answers) == {3: "it is not connected"}


def test_a_node_that_does_not_say_who_it_is_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = World(tmp_path)
    original = here.grid.app

    def mute(message: Any, context: Any) -> Any:
        reply = original(message, context)
        if message.metadata.message_type.startswith("query") and context.node_config["partition-id"] == 2:
            del reply.content["who"]
        return reply

    monkeypatch.setattr(here.grid, "app", mute)
    assert reasons(here.ask(1)) == {2: "it is not connected"}


def test_whose_answer_it_is_follows_from_the_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender's number within a reply is written by whoever sends it: client 1 signs as client 2."""
    here = World(tmp_path, keys=True)
    honest = {one.record.client: one.up for one in here.ask(1) if isinstance(one, Reply)}
    original = here.grid.app

    def forging(message: Any, context: Any) -> Any:
        reply = original(message, context)
        if context.node_config["partition-id"] == 1:
            reply.metadata.__dict__["_src_node_id"] = here.grid.node_of(2)
            reply.metadata.__dict__["_reply_to_message_id"] = "another"
        return reply

    monkeypatch.setattr(here.grid, "app", forging)
    found = {one.record.client: one.up for one in here.ask(1) if isinstance(one, Reply)}
    assert found.keys() == honest.keys()
    assert all(equal_weights(found[client].weights, honest[client].weights) for client in honest)
    assert not equal_weights(honest[1].weights, honest[2].weights)


@pytest.mark.parametrize("kind", ["train", "query"])
def test_a_reply_that_cannot_be_unpacked_costs_its_sender_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    here = World(tmp_path, keys=True)
    pulled = here.grid.pull_messages

    def unpacking(names: Any) -> Any:
        replies = list(pulled(names))
        for reply in replies:
            spoilt = reply.metadata.src_node_id == here.grid.node_of(1)
            if spoilt and reply.metadata.message_type.startswith(kind):
                raise KeyError("arraychunk_ids")
        return replies

    monkeypatch.setattr(here.grid, "pull_messages", unpacking)
    told = "its answer was refused: it cannot be unpacked (KeyError)" if kind == "train" else "it is not connected"
    assert reasons(here.ask(1)) == {1: told}


def test_a_server_that_cannot_be_reached_is_no_fault_of_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = World(tmp_path, keys=True)

    def unreachable(names: Any) -> Any:
        raise httpx.ConnectError("connection refused")

    monkeypatch.setattr(here.grid, "pull_messages", unreachable)
    with pytest.raises(httpx.ConnectError):
        here.ask(1)


def test_a_mute_node_is_not_waited_for_where_nobody_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "QUESTION_SECONDS", 0.3)
    here = World(tmp_path)
    here.grid.silent = {3}
    for round_ in (1, 2, 3):
        assert reasons(here.ask(round_, (0, 1, 2))) == {}
    assert here.grid.asked.count(("query.who", 3)) == 1
    assert reasons(here.ask(4)) == {3: "it is not connected"}
    assert here.grid.asked.count(("query.who", 3)) == 2


def test_a_client_whose_number_was_put_right_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = World(tmp_path, keys=True)
    node = here.grid.node_of(1)
    context = here.grid.contexts[node]
    context.node_config["partition-id"] = 3
    assert reasons(here.ask(1)) == {1: "it is not connected"}
    context.node_config["partition-id"] = 1
    assert reasons(here.ask(2)) == {}
    here.grid.keys[node] = b"nobody's"
    here.engine._client_of.clear()
    assert reasons(here.ask(3)) == {1: "it is not connected"}
    here.grid.asked.clear()
    here.ask(4)
    assert ("query.who", 1) not in here.grid.asked  # a stranger's word does not improve


def test_without_flower_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "semifed.engines.flower", raising=False)
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    with pytest.raises(UserError, match=r"pip install 'semifed\[flower\]'"):
        flower_engine()


def test_ray_that_does_not_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def late(**_: Any) -> None:
        asked.append(1)
        raise RuntimeError("the node timed out")

    monkeypatch.setattr("ray.init", late)
    with pytest.raises(UserError, match="Ray, which Flower's simulation runs on, does not start: the node timed out"):
        run_of(recipe_of("fedavg"), tmp_path / "out")
    assert len(asked) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's and Flower's own
def test_flowers_simulation_gives_the_same_numbers(tmp_path: Path) -> None:
    for engine in ("local", "flower"):
        run_of(recipe_of("openfl", engine), tmp_path / engine)
    assert equal_weights(model_of(tmp_path / "local"), model_of(tmp_path / "flower"))
    assert rounds_of(tmp_path / "local") == rounds_of(tmp_path / "flower")


def test_the_server_app_of_a_simulation_that_ends_early_ends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def half(app: Any, client: Any, clients: int, **_: Any) -> None:
        grid = LocalGrid(client, clients)
        grid.silent = set(range(clients))  # the backend is gone, nobody answers any more
        threads.append(threading.Thread(target=app, args=(grid, grid.contexts[grid.node_of(0)]), daemon=True))
        threads[0].start()
        while not grid.asked:
            time.sleep(0.01)
        raise RuntimeError("the backend fell over")

    monkeypatch.setattr("flwr.simulation.run_simulation", half)
    monkeypatch.setattr("semifed.engines.flower_simulation.ray_started", lambda workers: nullcontext())
    with pytest.raises(UserError, match="Flower's simulation did not work: the backend fell over"):
        run_of(recipe_of("fedavg"), tmp_path / "out")
    threads[0].join(timeout=30)
    assert not threads[0].is_alive()


@pytest.mark.parametrize(("timeout", "least"), [(None, 7 * 24 * 3600), (100_000.0, 100_000)])
def test_a_letter_lives_as_long_as_it_is_waited_for(timeout: float | None, least: float, tmp_path: Path) -> None:
    here = World(tmp_path, timeout=timeout)
    lives = []
    original = here.grid.app

    def noting(message: Any, context: Any) -> Any:
        lives.append((message.metadata.message_type, message.metadata.ttl))
        return original(message, context)

    here.grid.app = noting
    here.ask(1)
    assert min(ttl for kind, ttl in lives if kind.startswith("train")) >= least


def test_a_simulation_that_does_not_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("Ending simulation.") from RuntimeError("Ray timed out")

    monkeypatch.setattr("flwr.simulation.run_simulation", broken)
    monkeypatch.setattr("semifed.engines.flower_simulation.ray_started", lambda workers: nullcontext())
    with pytest.raises(UserError, match="Flower's simulation did not work: Ray timed out"):
        run_of(recipe_of("fedavg"), tmp_path / "out")
