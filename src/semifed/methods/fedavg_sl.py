"""FedAvg-SL: federated averaging with the true labels of all known images, the ceiling of every table.

Methods that deliver a moving average over rounds are to be compared with a ceiling that does so too: `ema`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from semifed.data.client import Batch
from semifed.fit import Loss
from semifed.method import Method, Share, averaged
from semifed.net import Net
from semifed.objectives import supervised
from semifed.payloads import Averaged, Down, Nothing, Up
from semifed.server import ServerSite
from semifed.wire import Weights


@dataclass(frozen=True, kw_only=True)
class FedAvgSL(Method[Averaged, Down, Up]):
    """FedAvg in a scenario that labels every image of a known class."""

    title: ClassVar[str] = "the ceiling: federated averaging with all labels"
    opens_labels: ClassVar[bool] = True

    ema: Share = 0.0  # decay of the delivered average over rounds; 0 delivers the last round's model

    def setup(self, weights: Weights, site: ServerSite) -> Averaged:
        warm = site.warm_up(weights, self.server_loss)
        return Averaged(warm, warm)

    def loss(self, net: Net, batch: Batch, const: Nothing) -> Loss:
        return supervised(net, batch)

    def aggregate(self, server: Averaged, ups: Sequence[Up], site: ServerSite) -> Averaged:
        weights = site.fine_tune(averaged(server.weights, ups, site), self.server_loss)
        if not self.ema:
            return Averaged(weights, weights)
        return Averaged(weights, site.recalibrated(site.averaged(server.average, weights, self.ema)))

    def delivered(self, server: Averaged) -> Weights:
        return server.average

    def also_tested(self, server: Averaged) -> Mapping[str, Weights]:
        return {"current": server.weights} if self.ema else {}
