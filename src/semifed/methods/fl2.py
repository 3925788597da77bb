"""(FL)² (NeurIPS 2024): SemiFL's frame with thresholds that fit the client and sharpness-aware consistency.

The received model's mean confidence at a client sets its thresholds, class by class. Very confident images must
keep their prediction when the weights are moved where their loss grows fastest (ASAM). Clients the model is less
sure of count more in the average.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from semifed.aggregate import doubtful_shares
from semifed.data.client import Batch, ClientData
from semifed.fit import Fitted, Loss
from semifed.losses import asam_offsets, cross_entropy, kl_divergence, masked_mean, mean
from semifed.method import Method, NonNegative, Share
from semifed.net import Net
from semifed.objectives import supervised, together
from semifed.payloads import Down, Local, Nothing, Visit
from semifed.pseudo import PseudoLabels, adaptive_label, confident_label
from semifed.server import ServerSite
from semifed.server_momentum import Moving, step_to_mean
from semifed.shapes import Scalar
from semifed.wire import Weights


class Reply(NamedTuple):
    """What travels back."""

    weights: Weights
    samples: Tensor
    confidence: Scalar  # tau_g, the received model's mean confidence at the client; 0 without unlabelled images


class Kept(NamedTuple):
    """The images a client trains on this round, and what is known of them."""

    label: Tensor
    sure: Tensor  # bool: of the high-confidence part
    confidence: Tensor  # tau_g


@dataclass(frozen=True, kw_only=True)
class FL2(Method[Moving, Down, Reply, Kept]):
    """Client-specific adaptive thresholds, sharpness-aware consistency, learning-status-aware averaging."""

    title: ClassVar[str] = "SemiFL's frame with adaptive thresholds and sharpness-aware consistency"

    threshold: Share = 0.95  # of the high-confidence part; which images are kept adapts itself
    radius: NonNegative = 0.1  # rho
    floor: NonNegative = 0.01  # eta, what ASAM adds to the size of theta
    server_momentum: Share = 0.5  # beta_g of SemiFL

    def setup(self, weights: Weights, site: ServerSite) -> Moving:
        return Moving(site.warm_up(weights, self.server_loss), {})

    def broadcast(self, server: Moving) -> Down:
        return Down(server.weights)

    def prepare(
        self, net: Net, down: Down, data: ClientData, kept: Nothing | None, visit: Visit
    ) -> Local[Kept, Nothing]:
        logits = data.weak_outputs(net, visit.stream("gate")).logits
        label, used, confidence = adaptive_label(logits)
        _, sure = confident_label(logits, self.threshold)
        given = PseudoLabels(torch.arange(len(label)), label, used)
        chosen = data._replace(unlabelled=data.unlabelled[used])
        whole = data if len(data.labelled) else None  # labels are passed over however few images are kept
        return Local(chosen, Kept(label[used], sure[used], confidence), Nothing(), given, whole)

    def loss(self, net: Net, batch: Batch, const: Kept) -> Loss:
        own = supervised(net, batch)  # 0 unless the client holds labels
        at = batch.unlabelled.position
        if len(at) == 0:
            return own
        label, sure = const.label[at], const.sure[at]
        logits = net(batch.unlabelled.strong).logits
        each = cross_entropy(logits, label)
        consistency = mean(each)
        sharpness = torch.zeros(())  # stays 0 without a high-confidence image: there is no direction to move in
        if sure.any():
            gradient = net.gradient(masked_mean(each, sure))
            offsets = asam_offsets(net.named_parameters(), gradient, self.radius, self.floor)
            moved = net.shifted(offsets, batch.unlabelled.strong).logits
            sharpness = masked_mean(kl_divergence(logits.detach().softmax(dim=1), moved), sure)
        return together(own, Loss(consistency + sharpness, {"consistency": consistency, "sharpness": sharpness}))

    def report(self, net: Net, local: Local[Kept, Nothing], fitted: Fitted) -> Reply:
        return Reply(net.trained(), fitted.samples(local.data), local.const.confidence)

    def aggregate(self, server: Moving, ups: Sequence[Reply], site: ServerSite) -> Moving:
        confidence = [float(up.confidence) for up in ups]
        site.note(confidence=confidence)
        share = doubtful_shares([float(up.samples) for up in ups], confidence)
        moved = step_to_mean(server, ups, site, share, self.server_momentum)
        return moved._replace(weights=site.fine_tune(moved.weights, self.server_loss))
