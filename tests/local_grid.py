"""A grid without Ray or network: the real Flower apps, one message after the other, and faults on demand.

It leans on a private part of Flower, the identity every message needs, and on nothing else.
"""

import warnings
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer imports names that the newest click is about to drop
    from flwr.app import Context, Error, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.proto.node_pb2 import NodeInfo
    from flwr.serverapp import Grid, ServerApp
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity

    import semifed.engines.flower  # noqa: F401  it tells Flower to keep quiet before anything of it is loaded

RAISED = 2  # Flower's code for an app that raised


class LocalGrid(Grid):
    """Nodes with ids that tell nothing, answering in reverse order."""

    def __init__(self, app: ClientApp, clients: int) -> None:
        self.app = app
        self.client_of = {900 - 7 * (client * 5 % 11) - 100 * client % 83: client for client in range(clients)}
        assert len(self.client_of) == clients
        self.contexts = {
            node: Context(1, node, {"partition-id": client, "num-partitions": clients}, RecordDict(), {})
            for node, client in self.client_of.items()
        }
        self.keys: dict[int, bytes] = {}  # by node
        self.gone: set[int] = set()  # clients that are not connected
        self.silent: set[int] = set()  # connected, but they never answer
        self.replies: dict[str, Message] = {}
        self.asked: list[tuple[str, int]] = []  # type of message and client
        TaskIdentity.run_id = TaskIdentity.task_id = 1
        TaskIdentity.node_id = 1

    def node_of(self, client: int) -> int:
        return next(node for node, held in self.client_of.items() if held == client)

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        return [node for node, client in self.client_of.items() if client not in self.gone]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, public_key=self.keys.get(node, b"")) for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in reversed(list(messages)):
            names.append(str(uuid4()))
            message.metadata.__dict__["_message_id"] = names[-1]
            node = message.metadata.dst_node_id
            self.asked.append((message.metadata.message_type, self.client_of[node]))
            if self.client_of[node] in self.silent:
                continue
            try:
                self.replies[names[-1]] = self.app(message, self.contexts[node])
            except Exception as error:
                self.replies[names[-1]] = Message(Error(RAISED, repr(error)), reply_to=message)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(name) for name in message_ids if name in self.replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def run_simulation(
    server_app: ServerApp, client_app: ClientApp, num_supernodes: int, backend_config: Any = None
) -> None:
    """In place of Flower's own."""
    context = Context(1, 1, {}, RecordDict(), {})
    server_app(LocalGrid(client_app, num_supernodes), context)


def run_app(server_app: ServerApp, grid: LocalGrid, told: dict[str, Any]) -> None:
    """A server app over a grid, with the settings of a run."""
    server_app(grid, Context(1, 1, {}, RecordDict(), {"resume": False, **told}))
