"""FedAvg + FixMatch with global pseudo-labels (GPL).

Sohn et al., FixMatch, NeurIPS 2020; as a federated baseline in SAGE, CVPR 2025 (arXiv 2503.13227).
"""

from dataclasses import dataclass
from typing import ClassVar

from semifed.data.client import Batch, ClientData
from semifed.fit import Loss
from semifed.method import Method, NonNegative, Share
from semifed.net import Net, Statistics
from semifed.objectives import semi_supervised
from semifed.payloads import Down, Local, Nothing, Server, Teacher, Up, Visit
from semifed.targets import Targets, asked


@dataclass(frozen=True, kw_only=True)
class FixMatchGPL(Method[Server, Down, Up, Teacher]):
    """The received model, frozen for the round, labels the weak view; the strong view must agree."""

    title: ClassVar[str] = "FixMatch at the clients, pseudo-labels from the received model"

    threshold: Share = 0.95  # tau
    unlabelled_weight: NonNegative = 1.0  # lambda_u
    soft: bool = False  # SAGE, Table 5: probabilities instead of one-hot labels
    statistics: Statistics = "averaged"  # by which the received model normalises; "batch": as the local one does

    def prepare(
        self, net: Net, down: Down, data: ClientData, kept: Nothing | None, visit: Visit
    ) -> Local[Teacher, Nothing]:
        return Local(data, Teacher(net.frozen(self.statistics)), Nothing())

    def loss(self, net: Net, batch: Batch, const: Teacher) -> Loss:
        # The weak views are in the pass for their batch-norm statistics: only the labels' source differs from LPL.
        labelled, _, strong = net.joint(batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong)
        received = asked(const.net(batch.unlabelled.weak), self.threshold)
        chosen = Targets(received.chosen(self.soft), received.sure, received=received)
        return semi_supervised(batch, labelled, strong, chosen, self.unlabelled_weight)
