"""FedProx + FixMatch: local pseudo-labels, clients held near the received weights; SAGE as a plug-in.

Sohn et al., FixMatch, NeurIPS 2020; Li et al., FedProx, MLSys 2020; as a baseline in SAGE, CVPR 2025.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from semifed.data.client import Batch, ClientData
from semifed.fit import Loss
from semifed.losses import proximal
from semifed.method import Method, NonNegative, Share
from semifed.net import FrozenNet, Net
from semifed.objectives import plus, semi_supervised
from semifed.payloads import Down, Local, Nothing, Server, Up, Visit
from semifed.targets import local_or_sage_targets
from semifed.wire import Weights


class Const(NamedTuple):
    """What is fixed for the round at a client."""

    weights: Weights  # at the start of the round
    teacher: FrozenNet | None  # the received network, where SAGE asks it


@dataclass(frozen=True, kw_only=True)
class FedProxFixMatch(Method[Server, Down, Up, Const]):
    """FixMatch with local pseudo-labels and FedProx's penalty."""

    title: ClassVar[str] = "FixMatch with local pseudo-labels, clients held near the received weights"

    threshold: Share = 0.95  # tau
    unlabelled_weight: NonNegative = 1.0  # lambda_u
    proximity: NonNegative = 0.001  # mu
    sage: bool = False  # SAGE, Table 4: its targets in place of the local ones

    def prepare(
        self, net: Net, down: Down, data: ClientData, kept: Nothing | None, visit: Visit
    ) -> Local[Const, Nothing]:
        return Local(data, Const(net.state(), net.frozen() if self.sage else None), Nothing())

    def loss(self, net: Net, batch: Batch, const: Const) -> Loss:
        labelled, weak, strong = net.joint(batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong)
        chosen = local_or_sage_targets(weak, const.teacher, batch.unlabelled.weak, self.threshold)
        fixmatch = semi_supervised(batch, labelled, strong, chosen, self.unlabelled_weight)
        return plus(fixmatch, "proximity", self.proximity, proximal(net.named_parameters(), const.weights))
