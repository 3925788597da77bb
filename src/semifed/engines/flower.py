"""Clients elsewhere, reached by Flower: this module, `flower_mail` and `flower_simulation` alone know it.

The round loop is ours; Flower carries letters. Clients are addressed by their stable number, which a node says when
it is asked; Flower's own node ids are random. Replies are put in client order, so nothing depends on who was first.
"""

import hashlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

# Nothing is told to anyone unasked: before Flower or Ray are imported.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import torch
from flwr.app import DEFAULT_TTL, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from rich.console import Console

from semifed.client_round import Reply, Task
from semifed.data.site import read_site
from semifed.data.views import Views
from semifed.deploy.certificates import public_pem
from semifed.deploy.consortium import read_client, read_consortium, server_parts
from semifed.engines.flower_mail import array_record, letter_of, message_of, replies
from semifed.engines.letters import NEVER, Letter, Setting, Share, answer, failed, order, reply_of
from semifed.errors import ClientFailure, UserError, legible
from semifed.held import HeldStore
from semifed.methods import AnyMethod
from semifed.payloads import Prediction
from semifed.process import settle
from semifed.progress import Lines
from semifed.report import write_report
from semifed.run import execute, setting_of
from semifed.shared_passes import Helpers
from semifed.wire import Weights, fault_of

LETTER, WHO = "letter", "who"
RAISED = 2  # Flower's code for an app that raised: it would raise again
WAITING_SECONDS = 5.0  # between two looks for clients that come back
LETTER_SECONDS = 30 * 24 * 3600.0  # a letter without a time limit; Flower's own, 12 hours, would end a slow round
QUESTION_SECONDS = 60.0  # a node that does not say who it is within this time is asked again in the next round


def _credible(answer: Reply | ClientFailure, down: Any) -> bool:
    """Whether an answer may count: one that will be refused is no reason not to wait for others."""
    try:
        return isinstance(answer, Reply) and fault_of(answer.up, down.weights, answer.up.weights) is None
    except Exception:  # whatever a client sends may cost its own update, nothing else
        return False


class FlowerEngine:
    """Asks the nodes of a grid; each of them is one client.

    With `keys` a node is believed to be a client only if it holds that client's key. Where fewer than `least` clients
    answer, the missing ones are asked again when they are back, for `patience` seconds.
    """

    def __init__(
        self,
        grid: Grid,
        setting: Setting,
        method: AnyMethod,
        *,
        run: str = "simulation",
        timeout: float | None = None,
        keys: Mapping[int, bytes] | None = None,
        least: int = 0,
        patience: float = 0.0,
        share: Share = "losses",
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.left: dict[int, int] = {}
        self._round = NEVER
        self._finished: dict[int, int] = {}  # `left` when this round began, that is at the last checkpoint
        self._grid, self._setting, self._method, self._run = grid, setting, method, run
        self._timeout = timeout
        # Flower reckons with the clocks of both machines, which may differ by hours.
        self._lifetime = LETTER_SECONDS if timeout is None else timeout + DEFAULT_TTL
        self._keys, self._least, self._patience = keys, least, patience
        self._share, self._say = share, say
        self._client_of: dict[int, int] = {}  # by node id
        self._refused: set[int] = set()  # node ids

    def begin(self, run: str | None, store: HeldStore) -> None:
        """Letters name this run; clients have stores of their own."""
        self._run = self._run if run is None else run

    def ask(
        self, round_: int, lr: float, clients: Sequence[int], down: Any, own: Mapping[int, Any] | None = None
    ) -> list[Reply | ClientFailure]:
        """A letter to each of the clients that are there, and their answers."""
        if round_ != self._round:
            self._round, self._finished = round_, dict(self.left)
        letters = {
            client: order(
                self._setting,
                self._run,
                Task(round_, client, lr, None),
                (own or {}).get(client, down),
                left=self.left.get(client, NEVER),
                finished=self._finished.get(client, NEVER),
            )
            for client in clients
        }
        until = time.monotonic() + self._patience
        answers, absent = self._exchange(round_, letters)
        told = -1
        while absent and time.monotonic() < until:
            there = sum(_credible(one, (own or {}).get(client, down)) for client, one in answers.items())
            if there >= min(self._least, len(clients)):
                break
            if there != told:
                self._say(f"round {round_}: {there} of {len(clients)} clients, waiting for more")
            told = there
            time.sleep(WAITING_SECONDS)
            later, absent = self._exchange(round_, {client: letters[client] for client in absent})
            answers |= later
        return [answers[client] for client in clients]

    def accept(self, round_: int, replies: Sequence[Reply]) -> None:
        """These clients go on from this round."""
        self.left.update({reply.record.client: round_ for reply in replies})

    def resume(self, left: Mapping[int, int]) -> None:
        """Clients hold what they need themselves."""
        self.left = dict(left)

    def predict(self, weights: Weights, images: torch.Tensor) -> Prediction | None:
        """Nobody: clients get no test images."""

    def helpers(self) -> Helpers | None:
        """Nobody: labels stay at the server."""

    def close(self) -> None:
        """The grid is not ours to close."""

    def _exchange(
        self, round_: int, letters: Mapping[int, Letter]
    ) -> tuple[dict[int, Reply | ClientFailure], list[int]]:
        """The answers, and which clients were not there to give one: those are worth another letter."""
        node_of = self._nodes(letters.keys())
        answers: dict[int, Reply | ClientFailure] = {
            client: ClientFailure(client, "it is not connected") for client in letters if client not in node_of
        }
        asked = {client: letter for client, letter in letters.items() if client in node_of}
        records: dict[tuple[int, ...], ArrayRecord] = {}  # what is sent to many is packed once
        messages = {}
        for client, letter in asked.items():
            same = tuple(map(id, letter.arrays.values()))
            if same not in records:
                records[same] = array_record(letter.arrays)
            content = RecordDict({"arrays": records[same], "facts": ConfigRecord(letter.facts)})
            messages[client] = Message(
                content, node_of[client], f"train.{LETTER}", ttl=self._lifetime, group_id=str(round_)
            )
        absent = list(answers)
        for client, reply in replies(self._grid, messages, self._timeout, strangers=self._keys is not None):
            answers[client] = self._read(reply, client, round_)
            if isinstance(reply, Message) and reply.has_error() and reply.error.code != RAISED:
                absent.append(client)
        for client in asked:
            if client not in answers:
                answers[client] = ClientFailure(client, f"no answer within {self._timeout or 0:g} s")
                absent.append(client)
                self._client_of.pop(node_of[client])  # it must say who it is before it is addressed again
        return answers, absent

    def _read(self, reply: Message | Exception, client: int, round_: int) -> Reply | ClientFailure:
        if isinstance(reply, Exception):
            return ClientFailure(client, f"its answer was refused: it cannot be unpacked ({type(reply).__name__})")
        if reply.has_error():
            return ClientFailure(client, f"Flower reports error {reply.error.code}: {legible(reply.error.reason)}")
        try:
            letter = letter_of(reply)
        except Exception as error:  # whatever a client sends may cost its own update, nothing else
            return ClientFailure(client, f"its answer was refused: it cannot be read ({type(error).__name__})")
        if letter.facts.get("anew") is True:
            self._say(f"client {client} has lost what it held: it begins anew")
        return reply_of(letter, client, round_, self._method, share=self._share)

    def _nodes(self, wanted: Collection[int]) -> dict[int, int]:
        """Node ids by client; where one is wanted that is not known, nodes that did not yet say who they are do so."""
        present = {node.node_id: bytes(node.public_key) for node in self._grid.get_nodes()}
        self._client_of = {node: client for node, client in self._client_of.items() if node in present}
        self._refused &= present.keys()
        unknown = sorted(present.keys() - self._client_of.keys() - self._refused)
        if set(wanted) <= set(self._client_of.values()):  # a mute node is not waited for in every round
            unknown = []
        asked = {node: Message(RecordDict(), dst_node_id=node, message_type=f"query.{WHO}") for node in unknown}
        for node, reply in replies(self._grid, asked, QUESTION_SECONDS, strangers=self._keys is not None):
            try:
                if isinstance(reply, Exception):
                    raise reply
                said: Any = reply.content["who"]
                self._introduce(node, int(said["client"]), present[node])
            except Exception as error:  # an error reply has no content
                self._say(f"a node does not say who it is ({type(error).__name__})")
        return {client: node for node, client in self._client_of.items()}

    def _introduce(self, node: int, client: int, key: bytes) -> None:
        """Believe a node that it is a client, if it holds the client's key and nobody else is that client."""
        if self._keys is not None and self._keys.get(client) != key:
            if key not in self._keys.values():  # else its operator may yet correct its number
                self._refused.add(node)
            self._say(f"a node says it is client {client}, but its key is another one's: it is not believed")
        elif client in self._client_of.values():
            self._refused.add(node)
            self._say(f"a second node says it is client {client}: it is not asked")
        else:
            self._client_of[node] = client


def _who(message: Message, context: Context) -> Message:
    """A node says which client it is."""
    content = RecordDict({"who": ConfigRecord({"client": int(context.node_config["partition-id"])})})
    return Message(content, reply_to=message)


def client_app(act: Callable[[Letter, Context], Letter]) -> ClientApp:
    """A node's app: it says who it is, and answers letters."""
    app = ClientApp()
    app.query(WHO)(_who)

    @app.train(LETTER)
    def train(message: Message, context: Context) -> Message:
        settle()
        return message_of(act(letter_of(message), context), message)

    return app


def deployed_client() -> ClientApp:
    """The app of a node that is one client, with its images in a folder of its own."""

    def act(letter: Letter, context: Context) -> Letter:
        try:
            return _answered(letter, Path(str(context.node_config["folder"])))
        except Exception as error:  # its text may name files and stays here
            if isinstance(error, UserError):
                print(f"error: {error}", file=sys.stderr)
            else:
                traceback.print_exc()
            reason = f"it could not train ({type(error).__name__}; its own log tells more)"
            return failed(letter.facts["round"], reason)

    return client_app(act)


def _answered(letter: Letter, folder: Path) -> Letter:
    client, setting = read_client(folder), Setting.of(letter.facts)
    if letter.facts["client"] != client.number:
        raise UserError(f"a letter for client {letter.facts['client']} came to client {client.number}")
    recipe, state = setting.parsed(), folder / client.state
    views = Views.parse(recipe.views.weak, recipe.views.strong, mean=setting.mean, std=setting.std)
    cache = state / "images.safetensors"
    data = read_site(folder / client.data, setting.names, setting.shape, views, cache=cache)
    if recipe.scenario.labels == "server":
        data = data._replace(labelled=data.labelled[:0], labels=data.labels[:0])
    if recipe.scenario.classes == "novel":
        data = data.apart()
    run = str(letter.facts["run"])
    if not run.isalnum():
        raise UserError("a letter names a run that could lie anywhere on this machine: it is not answered")
    return answer(letter, data, HeldStore(state / "kept" / run), share=client.share)


def _place_of(out: Path) -> str:
    """What clients know runs by that were begun before these had names."""
    return hashlib.sha256(str(out.absolute()).encode()).hexdigest()[:16]


def deployed_server() -> ServerApp:
    """The app of the server: its recipe, its images, our round loop over the nodes that are there."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settle()
        told = context.run_config
        folder, out = Path(str(told["folder"])), Path(str(told["out"]))
        console = Console(no_color=True, width=160)
        try:
            consortium, parts = read_consortium(folder), server_parts(folder)
            reporter = Lines(console)
            engine = FlowerEngine(
                grid,
                setting_of(parts),
                parts.method,
                run=_place_of(out),
                timeout=parts.recipe.engine.timeout,
                keys={number: public_pem(member.key) for number, member in enumerate(consortium.clients)},
                least=parts.recipe.min_clients,
                patience=consortium.patience,
                say=reporter.warn,
            )
            execute(parts, out, reporter, resume=bool(told["resume"]), engine=engine)
            write_report(out)
        except UserError as error:
            console.print(f"error: {error}", markup=False, highlight=False)
            raise SystemExit(2) from None

    return app
