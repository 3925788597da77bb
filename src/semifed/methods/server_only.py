"""Server-only: the floor of every table with labels at the server. No client is asked for anything."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from semifed.data.client import Batch
from semifed.fit import Loss
from semifed.method import ONLY_KNOWN, Ask, Method
from semifed.net import Net
from semifed.objectives import supervised
from semifed.payloads import Down, Nothing, Server, Up
from semifed.server import ServerSite


@dataclass(frozen=True, kw_only=True)
class ServerOnly(Method):
    """The server trains on its own labels, with the same warm-up and fine-tuning as every other method."""

    title: ClassVar[str] = "the floor: the server's labels alone, clients unused"
    no_meaning: ClassVar[Mapping[str, str]] = {
        **ONLY_KNOWN,
        **dict.fromkeys(
            ("clients", "some-clients"), "the server holds no labels; the nearest method that works is fedavg"
        ),
    }

    def loss(self, net: Net, batch: Batch, const: Nothing) -> Loss:
        return supervised(net, batch)

    def round(self, server: Server, ask: Ask[Down, Up], site: ServerSite) -> Server:
        return Server(site.fine_tune(server.weights, self.server_loss))
