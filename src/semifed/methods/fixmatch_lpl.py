"""FedAvg + FixMatch with local pseudo-labels (LPL).

Sohn et al., FixMatch, NeurIPS 2020; as a federated baseline in SAGE, CVPR 2025 (arXiv 2503.13227).
"""

from dataclasses import dataclass
from typing import ClassVar

from semifed.data.client import Batch
from semifed.fit import Loss
from semifed.method import Method, NonNegative, Share
from semifed.net import Net
from semifed.objectives import semi_supervised
from semifed.payloads import Nothing
from semifed.targets import Targets, asked


@dataclass(frozen=True, kw_only=True)
class FixMatchLPL(Method):
    """The model in training labels the weak view; where it is confident, the strong view must agree."""

    title: ClassVar[str] = "FixMatch at the clients, pseudo-labels from the local model"

    threshold: Share = 0.95  # tau
    unlabelled_weight: NonNegative = 1.0  # lambda_u
    soft: bool = False  # SAGE, Table 5: probabilities instead of one-hot labels

    def loss(self, net: Net, batch: Batch, const: Nothing) -> Loss:
        labelled, weak, strong = net.joint(batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong)
        local = asked(weak, self.threshold)
        chosen = Targets(local.chosen(self.soft), local.sure, local=local)
        return semi_supervised(batch, labelled, strong, chosen, self.unlabelled_weight)
