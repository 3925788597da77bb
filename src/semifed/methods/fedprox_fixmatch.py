"""FedProx + FixMatch: local pseudo-labels, clients held near the received weights.

Sohn et al., FixMatch, NeurIPS 2020; Li et al., FedProx, MLSys 2020; as a baseline in SAGE, CVPR 2025.
"""

from dataclasses import dataclass
from typing import ClassVar

from semifed.data.client import Batch, ClientData
from semifed.fit import Loss
from semifed.losses import proximal
from semifed.method import Method, NonNegative, Share
from semifed.net import Net
from semifed.objectives import plus, semi_supervised
from semifed.payloads import Down, Local, Nothing, Received, Server, Up, Visit
from semifed.pseudo import confident_label


@dataclass(frozen=True, kw_only=True)
class FedProxFixMatch(Method[Server, Down, Up, Received]):
    """FixMatch with local pseudo-labels and FedProx's penalty."""

    title: ClassVar[str] = "FixMatch with local pseudo-labels, clients held near the received weights"

    threshold: Share = 0.95  # tau
    unlabelled_weight: NonNegative = 1.0  # lambda_u
    proximity: NonNegative = 0.001  # mu

    def prepare(
        self, net: Net, down: Down, data: ClientData, kept: Nothing | None, visit: Visit
    ) -> Local[Received, Nothing]:
        return Local(data, Received(down.weights), Nothing())

    def loss(self, net: Net, batch: Batch, const: Received) -> Loss:
        labelled, weak, strong = net.joint(batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong)
        label, sure = confident_label(weak.logits, self.threshold)
        fixmatch = semi_supervised(batch, labelled, strong, label, sure, self.unlabelled_weight)
        return plus(fixmatch, "proximity", self.proximity, proximal(net.named_parameters(), const.weights))
