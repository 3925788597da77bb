"""FedSSB + R-EMA: FedSSB whose server also averages its model over rounds (OpenFL, Table 4).

Clients receive and train the same model as in FedSSB; the average never leaves the server and is what is delivered.
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
from semifed.payloads import DETECTOR_SCORE, Averaged, Down, Local, Nothing, Prediction, Up, Visit, detected
from semifed.pseudo import Gates, gates
from semifed.server import ServerSite
from semifed.wire import Weights


@dataclass(frozen=True, kw_only=True)
class FedSSBEMA(Method[Averaged, Down, Up, Gates]):
    """FedSSB with a round-wise moving average."""

    title: ClassVar[str] = "FedSSB with a moving average over rounds at the server"
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
    ema: Share = 0.9  # alpha

    def setup(self, weights: Weights, site: ServerSite) -> Averaged:
        warm = site.warm_up(weights, self.server_loss)
        return Averaged(warm, warm)

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

    def aggregate(self, server: Averaged, ups: Sequence[Up], site: ServerSite) -> Averaged:
        mean = averaged(server.weights, ups, site, equal_shares([float(up.samples) for up in ups]))
        weights = site.fine_tune(mean, self.server_loss)
        # Statistics belong to the weights they were computed with: the average gets its own.
        return Averaged(weights, site.recalibrated(site.averaged(server.average, weights, self.ema)))

    def server_loss(self, net: Net, batch: Batch) -> Loss:
        return open_set_supervised(net, batch.labelled, self.detector_weight, strong_too=self.strong_cross_entropy)[0]

    def delivered(self, server: Averaged) -> Weights:
        return server.average

    def also_tested(self, server: Averaged) -> Mapping[str, Weights]:
        return {"current": server.weights}

    def predict(self, net: Net, images: Tensor) -> Prediction:
        return detected(net(images))
