"""FedFixMatch: labels at the server, pseudo-labels fixed once a round by the received model.

The closed-set baseline of OpenFL (OpenReview QBTNpmtYmQ), on the frame of SemiFL (NeurIPS 2022): server
warm-up, alternate training, static batch norm. With labels at clients the supervised term moves to them.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from semifed.data.client import Batch, ClientData
from semifed.fit import Loss
from semifed.method import Method, NonNegative, Share
from semifed.net import Net
from semifed.objectives import semi_supervised
from semifed.payloads import Down, Local, Nothing, Server, Up, Visit
from semifed.pseudo import confident_label
from semifed.targets import Targets


class Labels(NamedTuple):
    """The round's pseudo-labels, by position in the client's unlabelled images."""

    label: Tensor
    sure: Tensor


@dataclass(frozen=True, kw_only=True)
class FedFixMatch(Method[Server, Down, Up, Labels]):
    """Clients learn the strong views of images the server's model is confident about."""

    title: ClassVar[str] = "FixMatch with labels at the server, pseudo-labels once a round"

    threshold: Share = 0.95  # tau
    unlabelled_weight: NonNegative = 1.0  # lambda_u

    def prepare(
        self, net: Net, down: Down, data: ClientData, kept: Nothing | None, visit: Visit
    ) -> Local[Labels, Nothing]:
        label, sure = confident_label(data.plain_outputs(net).logits, self.threshold)
        return Local(data, Labels(label, sure), Nothing())

    def loss(self, net: Net, batch: Batch, const: Labels) -> Loss:
        labelled, strong = net.joint(batch.labelled.weak, batch.unlabelled.strong)
        at = batch.unlabelled.position
        chosen = Targets(const.label[at], const.sure[at])
        return semi_supervised(batch, labelled, strong, chosen, self.unlabelled_weight)
