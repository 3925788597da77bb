"""FedSSB: SSB's classifier and one-vs-all detector with labels at the server (ICCV 2023, federated by OpenFL).

Masks are fixed once a round by the received model. The classifier learns every confident image, even one that
looks unknown; the detector learns from its entropy, the agreement of two weak views, and sure negatives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from semifed.aggregate import equal_shares
from semifed.data.client import Batch, ClientData
from semifed.fit import Loss
from semifed.method import Method, NonNegative, Share, averaged
from semifed.net import Net
from semifed.objectives import OpenSetWeights, open_set_supervised, ssb_loss
from semifed.payloads import DETECTOR_SCORE, Down, Local, Nothing, Prediction, Server, Up, Visit, detected
from semifed.pseudo import Gates, gates
from semifed.server import ServerSite


@dataclass(frozen=True, kw_only=True)
class FedSSB(Method[Server, Down, Up, Gates]):
    """FixMatch for the classifier, one-vs-all detection beside it."""

    title: ClassVar[str] = "SSB with labels at the server: FixMatch and a one-vs-all detector of unknowns"
    heads: ClassVar[Mapping[str, str]] = {"ova": "mlp2(256)"}
    unknown_score: ClassVar[str] = DETECTOR_SCORE

    threshold: Share = 0.95  # tau
    negative_threshold: Share = 0.99  # tau_neg
    consistency_weight: NonNegative = 1.0  # of FixMatch's loss
    detector_weight: NonNegative = 1.0  # lambda_od, at the server and at clients
    entropy_weight: NonNegative = 0.1  # lambda_em
    socr_weight: NonNegative = 0.5  # lambda_SOCR
    negative_weight: NonNegative = 1.0  # lambda_neg
    strong_cross_entropy: bool = True  # strong views of labelled images in the cross entropy too

    def prepare(
        self, net: Net, down: Down, data: ClientData, kept: Nothing | None, visit: Visit
    ) -> Local[Gates, Nothing]:
        masks = gates(data.plain_outputs(net), self.threshold, 0.0, self.negative_threshold)
        return Local(data, masks, Nothing())

    def loss(self, net: Net, batch: Batch, const: Gates) -> Loss:
        weights = OpenSetWeights(
            self.consistency_weight, self.detector_weight, self.entropy_weight, self.socr_weight, self.negative_weight
        )
        return ssb_loss(net, batch, self.server_loss(net, batch), const, weights)

    def aggregate(self, server: Server, ups: Sequence[Up], site: ServerSite) -> Server:
        mean = averaged(server.weights, ups, site, equal_shares([float(up.samples) for up in ups]))
        return Server(site.fine_tune(mean, self.server_loss))

    def server_loss(self, net: Net, batch: Batch) -> Loss:
        return open_set_supervised(net, batch.labelled, self.detector_weight, strong_too=self.strong_cross_entropy)[0]

    def predict(self, net: Net, images: Tensor) -> Prediction:
        return detected(net(images))
