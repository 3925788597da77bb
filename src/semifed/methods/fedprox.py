"""FedProx: federated averaging that holds clients near the received weights.

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from semifed.data.client import Batch, ClientData
from semifed.fit import Loss
from semifed.losses import proximal
from semifed.method import CLIENT_LABELS, Method, NonNegative
from semifed.net import Net
from semifed.objectives import plus, supervised
from semifed.payloads import Down, Local, Nothing, Received, Server, Up, Visit


@dataclass(frozen=True, kw_only=True)
class FedProx(Method[Server, Down, Up, Received]):
    """FedAvg on the clients' labels with a penalty on leaving the received weights."""

    title: ClassVar[str] = "labels only, clients held near the received weights"
    no_meaning: ClassVar[Mapping[str, str]] = CLIENT_LABELS

    proximity: NonNegative = 0.001  # mu

    def prepare(
        self, net: Net, down: Down, data: ClientData, kept: Nothing | None, visit: Visit
    ) -> Local[Received, Nothing]:
        return Local(data, Received(net.state()), Nothing())

    def loss(self, net: Net, batch: Batch, const: Received) -> Loss:
        drift = proximal(net.named_parameters(), const.weights)  # eq. 2
        return plus(supervised(net, batch), "proximity", self.proximity, drift)
