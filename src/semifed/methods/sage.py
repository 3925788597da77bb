"""SAGE: semi-supervised aggregation with globally enhanced ensemble pseudo-labels.

Liu et al., Mind the Gap: Confidence Discrepancy Can Guide Federated Semi-Supervised Learning Across Pseudo-Mismatch,
CVPR 2025 (arXiv 2503.13227).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from semifed.data.client import Batch, ClientData
from semifed.fit import Fitted, Loss
from semifed.method import Method, NonNegative, Share
from semifed.net import Net, Statistics
from semifed.objectives import semi_supervised
from semifed.payloads import Down, Local, Nothing, Server, Teacher, Up, Visit
from semifed.targets import KAPPA, Trust, asked, confidence_gap, gap_mixing, targets


@dataclass(frozen=True, kw_only=True)
class SAGE(Method[Server, Down, Up, Teacher]):
    """Local and received model label together; the gap of their confidence corrects the local label softly."""

    title: ClassVar[str] = "local and global pseudo-labels together, corrected by the gap of their confidence"

    threshold: Share = 0.95  # tau
    unlabelled_weight: NonNegative = 1.0  # lambda_u
    kappa: NonNegative = KAPPA  # kappa*, of the gap's mixing
    collaborative: bool = True  # CPG, eq. (1): the received model's sure labels count where the local model is unsure
    # CDSC, eqs. (2)-(6): the gap mixes both labels where the local model is sure. A number is Fig. 5's constant lambda,
    # and 1 leaves the local label alone: without CDSC.
    mixing: Literal["gap"] | Share = "gap"  # CDSC, eq. (6): lambda from the gap of confidences, or a fixed one
    soft: bool = False  # Table 5: probabilities instead of one-hot labels
    statistics: Statistics = "averaged"  # by which the received model normalises; "batch": as the local one does
    weigh: Literal["images", "learnt"] = "images"  # a client counts by all it holds, or by what really taught it

    def prepare(
        self, net: Net, down: Down, data: ClientData, kept: Nothing | None, visit: Visit
    ) -> Local[Teacher, Nothing]:
        return Local(data, Teacher(net.frozen(self.statistics)), Nothing())

    def loss(self, net: Net, batch: Batch, const: Teacher) -> Loss:
        labelled, weak, strong = net.joint(batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong)
        local, received = asked(weak, self.threshold), asked(const.net(batch.unlabelled.weak), self.threshold)
        share = gap_mixing(confidence_gap(local, received), self.kappa) if self.mixing == "gap" else self.mixing
        trust: Trust = "either" if self.collaborative else "local"
        chosen = targets(local, received, trust=trust, mixing=share, soft=self.soft)
        return semi_supervised(batch, labelled, strong, chosen, self.unlabelled_weight)  # eqs. (7)-(9)

    def report(self, net: Net, local: Local[Teacher, Nothing], fitted: Fitted) -> Up:
        count = fitted.samples if self.weigh == "images" else fitted.learnt
        return Up(net.trained(), count(local.data))
