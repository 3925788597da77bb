"""FedOpenMatch-style: a detector that leaves the features alone, and agreement of raw logits (ICLR 2026, 5UrPAW3uI1).

Written from secondary sources, its abstract and notes about it: neither the paper's text nor code was at hand, and
the card says what is a guess. Labels and masks are fixed once a round by the received model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from semifed.aggregate import equal_shares
from semifed.data.client import Batch, ClientData
from semifed.fit import Loss
from semifed.losses import (
    cross_entropy,
    logit_consistency,
    masked_mean,
    mean,
    ova_hardest_negative,
    ova_positive,
    prior_adjusted,
    pseudo_negatives,
    pseudo_positives,
)
from semifed.method import Method, NonNegative, Share, averaged
from semifed.models.network import Output
from semifed.net import Net
from semifed.objectives import mean_over, together
from semifed.payloads import DETECTOR_SCORE, Down, Local, Nothing, Prediction, Server, Up, Visit, detected
from semifed.pseudo import Gates, PseudoLabels, gates, surely_of_class
from semifed.server import ServerSite


class Frozen(NamedTuple):
    """The round's labels and masks, by position in the client's unlabelled images."""

    gates: Gates
    positive: Tensor  # [n, classes] bool, the detector is sure that the image is of that class


@dataclass(frozen=True, kw_only=True)
class FedOpenMatch(Method[Server, Down, Up, Frozen]):
    """One-vs-all detection on detached features with logits adjusted for their K − 1 negatives to one positive."""

    title: ClassVar[str] = "FedOpenMatch-style (secondary source): a detector that leaves the features alone"
    heads: ClassVar[Mapping[str, str]] = {"ova": "mlp2(256)"}
    unknown_score: ClassVar[str] = DETECTOR_SCORE

    threshold: Share = 0.95  # tau_in
    known_threshold: Share = 0.5  # the detector calls the image known
    positive_threshold: Share = 0.95  # the detector learns "known" from itself
    negative_threshold: Share = 0.99  # and "unknown", as in FedSSB
    adjustment: NonNegative = 1.0  # omega
    logit_weight: NonNegative = 0.03  # lambda

    def prepare(
        self, net: Net, down: Down, data: ClientData, kept: Nothing | None, visit: Visit
    ) -> Local[Frozen, Nothing]:
        seen = data.plain_outputs(net)
        masks = gates(seen, self.threshold, self.known_threshold, self.negative_threshold)
        return Local(data, Frozen(masks, surely_of_class(seen.heads["ova"], self.positive_threshold)), Nothing())

    def loss(self, net: Net, batch: Batch, const: Frozen) -> Loss:
        own = self.server_loss(net, batch)  # 0 unless the client holds labels
        if len(batch.unlabelled) == 0:
            return own
        at = batch.unlabelled.position
        here, positive = const.gates.at(at), const.positive[at]
        weak, strong = net(batch.unlabelled.weak), net(batch.unlabelled.strong)
        weak_ova, strong_ova = self._detector(net, weak), self._detector(net, strong)
        terms = {
            "consistency": masked_mean(cross_entropy(strong.logits, here.label), here.dual),
            "detector": mean(pseudo_positives(strong_ova, positive) + pseudo_negatives(strong_ova, here.negative)),
            # The adjustment is the same on both views and falls out of their difference.
            "logits": mean(logit_consistency(weak.logits, strong.logits) + logit_consistency(weak_ova, strong_ova)),
        }
        value = terms["consistency"] + terms["detector"] + self.logit_weight * terms["logits"]
        return together(own, Loss(value, terms, pseudo=PseudoLabels(at, here.label, here.dual)))

    def _detector(self, net: Net, output: Output) -> Tensor:
        """One-vs-all logits for training: adjusted, and without a gradient to the features."""
        return prior_adjusted(net.head("ova", output.features.detach()), self.adjustment)

    def aggregate(self, server: Server, ups: Sequence[Up], site: ServerSite) -> Server:
        mean_model = averaged(server.weights, ups, site, equal_shares([float(up.samples) for up in ups]))
        return Server(site.fine_tune(mean_model, self.server_loss))

    def server_loss(self, net: Net, batch: Batch) -> Loss:
        labelled, labels = batch.labelled, batch.labelled.labels
        if len(labelled) == 0:
            return Loss(torch.zeros(()), {})
        views = net.each(labelled.weak, labelled.strong)
        detectors = [self._detector(net, view) for view in views]
        cross = mean_over([cross_entropy(view.logits, labels) for view in views])
        negative = mean_over([ova_hardest_negative(detector, labels) for detector in detectors])
        detector = mean(ova_positive(detectors[0], labels)) + negative
        return Loss(cross + detector, {"supervised": cross, "labelled_detector": detector})

    def predict(self, net: Net, images: Tensor) -> Prediction:
        return detected(net(images))
