"""FedAvg on the clients' labels alone.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from semifed.data.client import Batch
from semifed.fit import Loss
from semifed.method import CLIENT_LABELS, Method
from semifed.net import Net
from semifed.objectives import supervised
from semifed.payloads import Nothing


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """Each client minimises cross entropy on its few labels; unlabelled images are not touched."""

    title: ClassVar[str] = "labels only: what federated averaging makes of the few labels"
    no_meaning: ClassVar[Mapping[str, str]] = CLIENT_LABELS

    def loss(self, net: Net, batch: Batch, const: Nothing) -> Loss:
        return supervised(net, batch)
