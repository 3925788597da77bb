"""Clients elsewhere, reached by Flower: the only module that knows it.

The round loop is ours; Flower carries letters. Clients are addressed by their stable number, which a node says when
it is asked; Flower's own node ids are random. Replies are put in client order, so nothing depends on who was first.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

# Nothing is told to anyone unasked: before Flower or Ray are imported.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from semifed.assembly import prepare_run
from semifed.client_round import Held, Reply, Task
from semifed.data.scenario import Scenario
from semifed.engines.letters import NEVER, Letter, Setting, answer, order, reply_of
from semifed.errors import ClientFailure
from semifed.held import HeldStore
from semifed.methods import AnyMethod

LETTER, WHO = "letter", "who"
QUESTION_SECONDS = 60.0  # a node that does not say who it is within this time is asked again in the next round
T = TypeVar("T")


class FlowerEngine:
    """Asks the nodes of a grid; each of them is one client."""

    def __init__(self, grid: Grid, setting: Setting, method: AnyMethod, timeout: float | None) -> None:
        self.left: dict[int, int] = {}
        self._round = NEVER
        self._finished: dict[int, int] = {}  # `left` when this round began, that is at the last checkpoint
        self._grid, self._setting, self._method, self._timeout = grid, setting, method, timeout
        self._client_of: dict[int, int] = {}  # by node id

    def ask(
        self, round_: int, lr: float, clients: Sequence[int], down: Any, own: Mapping[int, Any] | None = None
    ) -> list[Reply | ClientFailure]:
        """A letter to each of the clients that are there, and their answers."""
        if round_ != self._round:
            self._round, self._finished = round_, dict(self.left)
        node_of = self._nodes()
        answers: dict[int, Reply | ClientFailure] = {
            client: ClientFailure(client, "it is not connected") for client in clients if client not in node_of
        }
        records: dict[int, ArrayRecord] = {}  # the broadcast is packed once
        messages = []
        for client in clients:
            if client in answers:
                continue
            task = Task(round_, client, lr, None)
            payload = (own or {}).get(client, down)
            letter = order(
                self._setting,
                task,
                payload,
                left=self.left.get(client, NEVER),
                finished=self._finished.get(client, NEVER),
            )
            if id(payload) not in records:
                records[id(payload)] = _array_record(letter.arrays)
            content = RecordDict({"arrays": records[id(payload)], "facts": ConfigRecord(letter.facts)})
            messages.append(
                Message(content, dst_node_id=node_of[client], message_type=f"train.{LETTER}", group_id=str(round_))
            )
        for reply in self._grid.send_and_receive(messages, timeout=self._timeout):
            client = self._client_of.get(reply.metadata.src_node_id, NEVER)
            if client in clients:
                answers[client] = self._read(reply, client, round_)
        silent = f"no answer within {self._timeout:g} s" if self._timeout else "no answer"
        for client in clients:
            if client not in answers:
                answers[client] = ClientFailure(client, silent)
                self._client_of.pop(node_of[client])  # it must say who it is before it is addressed again
        return [answers[client] for client in clients]

    def accept(self, round_: int, replies: Sequence[Reply]) -> None:
        """These clients go on from this round."""
        self.left.update({reply.record.client: round_ for reply in replies})

    def resume(self, left: Mapping[int, int], held: Mapping[int, Held]) -> None:
        """Clients hold what they need themselves."""
        self.left = dict(left)

    def close(self) -> None:
        """The grid is not ours to close."""

    def _read(self, reply: Message, client: int, round_: int) -> Reply | ClientFailure:
        if reply.has_error():
            return ClientFailure(client, f"Flower reports error {reply.error.code}: {reply.error.reason}")
        return reply_of(_letter(reply), client, round_, self._method)

    def _nodes(self) -> dict[int, int]:
        """Node ids by client; nodes that are new or did not answer say who they are first."""
        present = set(self._grid.get_node_ids())
        self._client_of = {node: client for node, client in self._client_of.items() if node in present}
        asked = [
            Message(RecordDict(), dst_node_id=node, message_type=f"query.{WHO}")
            for node in sorted(present - self._client_of.keys())
        ]
        if asked:
            for reply in self._grid.send_and_receive(asked, timeout=QUESTION_SECONDS):
                if not reply.has_error():
                    said: Any = reply.content["who"]
                    self._client_of[reply.metadata.src_node_id] = int(said["client"])
        return {client: node for node, client in self._client_of.items()}


def _array_record(arrays: Mapping[str, torch.Tensor]) -> ArrayRecord:
    return ArrayRecord({name: Array(array.detach().numpy()) for name, array in arrays.items()})


def _letter(message: Message) -> Letter:
    arrays: Any = message.content["arrays"]
    facts: Any = message.content["facts"]
    return Letter({name: torch.from_numpy(array.numpy().copy()) for name, array in arrays.items()}, dict(facts))


def _message(letter: Letter, to: Message) -> Message:
    content = RecordDict({"arrays": _array_record(letter.arrays), "facts": ConfigRecord(letter.facts)})
    return Message(content, reply_to=to)


@lru_cache(maxsize=1)
def _scenario(setting: Setting) -> Scenario:
    """A simulated client takes its part of the data itself; all of a process share them."""
    return prepare_run(setting.parsed()).scenario


def simulated_client(store: str) -> ClientApp:
    """The app that acts as any client of a simulation; what they hold lies in one directory."""
    app = ClientApp()

    @app.query(WHO)
    def who(message: Message, context: Context) -> Message:
        content = RecordDict({"who": ConfigRecord({"client": int(context.node_config["partition-id"])})})
        return Message(content, reply_to=message)

    @app.train(LETTER)
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        letter = _letter(message)
        client = int(context.node_config["partition-id"])
        data = _scenario(Setting.of(letter.facts)).client(client)
        return _message(answer(letter, data, HeldStore(Path(store)), share_records=True), message)

    return app


def simulate(
    rounds: Callable[[FlowerEngine], T],
    setting: Setting,
    method: AnyMethod,
    *,
    clients: int,
    workers: int,
    timeout: float | None,
    store: Path,
) -> T:
    """Run the round loop as a server app of a Flower simulation, with so many one-thread workers."""
    from flwr import simulation

    outcome: list[T] = []
    failure: list[BaseException] = []
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        while len(list(grid.get_node_ids())) < clients:  # nodes register while the server app starts
            time.sleep(0.1)
        try:
            outcome.append(rounds(FlowerEngine(grid, setting, method, timeout)))
        except BaseException as error:  # Flower would print it and go on
            failure.append(error)

    os.environ["OMP_NUM_THREADS"] = "1"
    logging.getLogger("flwr").setLevel(logging.ERROR)  # our own lines tell how far a run is
    backend: Any = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": workers, "log_to_driver": False},
    }
    simulation.run_simulation(app, simulated_client(str(store)), clients, backend_config=backend)
    if failure:
        raise failure[0]
    return outcome[0]
