"""SemiFL (NeurIPS 2022, arXiv 2106.01432): labels at the server, FixMatch and mixup at the clients, server momentum.

The received model labels a client's images once a round. Confident images are learnt from strong views (FIX);
each is also mixed with any image of the client and the label that one got, confident or not (MIX).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from semifed.aggregate import equal_shares
from semifed.data.client import Batch, ClientData
from semifed.fit import Loss
from semifed.losses import cross_entropy, mean, mixed_cross_entropy
from semifed.method import Method, NonNegative, Share, Temperature
from semifed.net import Net
from semifed.objectives import supervised, together
from semifed.payloads import Down, Local, Nothing, Up, Visit
from semifed.pseudo import PseudoLabels, confident_label
from semifed.rng import beta
from semifed.server import ServerSite
from semifed.server_momentum import Moving, step_to_mean
from semifed.wire import Weights


class Labelled(NamedTuple):
    """All images of the client with the labels of this round: what MIX is drawn from."""

    data: ClientData
    label: Tensor  # of every unlabelled image
    fixed: Tensor  # positions of the confident ones among them, in the order of FIX


@dataclass(frozen=True, kw_only=True)
class SemiFL(Method[Moving, Down, Up, Labelled]):
    """Fix and mix at the clients, momentum and fine-tuning at the server."""

    title: ClassVar[str] = "FixMatch with mixup at the clients, momentum and fine-tuning at the server"

    threshold: Share = 0.95  # tau
    mix_weight: NonNegative = 1.0  # lambda of the mix loss
    mix_concentration: Temperature = 0.75  # alpha of the Beta distribution
    server_momentum: Share = 0.5  # beta_g
    gate_view: Literal["weak", "plain"] = "weak"  # what the labelling model sees

    def setup(self, weights: Weights, site: ServerSite) -> Moving:
        return Moving(site.warm_up(weights, self.server_loss), {})

    def broadcast(self, server: Moving) -> Down:
        return Down(server.weights)

    def prepare(
        self, net: Net, down: Down, data: ClientData, kept: Nothing | None, visit: Visit
    ) -> Local[Labelled, Nothing]:
        plain = self.gate_view == "plain"
        seen = data.plain_outputs(net) if plain else data.weak_outputs(net, visit.stream("gate"))
        label, sure = confident_label(seen.logits, self.threshold)
        fixed = sure.nonzero().flatten()
        given = PseudoLabels(torch.arange(len(label)), label, sure)
        fix = data._replace(unlabelled=data.unlabelled[fixed])
        whole = data if len(data.labelled) else None  # labels are passed over however few images are sure
        return Local(fix, Labelled(data, label, fixed), Nothing(), given, whole)

    def loss(self, net: Net, batch: Batch, const: Labelled) -> Loss:
        own = supervised(net, batch)  # 0 unless the client holds labels
        fixed = batch.unlabelled
        if len(fixed) == 0:
            return own
        label = const.label[const.fixed[fixed.position]]
        consistency = mean(cross_entropy(net(fixed.strong).logits, label))
        stream = fixed.stream("mix")
        share = beta(self.mix_concentration, stream)  # lambda: one a batch, and not max(lambda, 1 - lambda)
        other = torch.randint(len(const.label), (len(fixed),), generator=stream)
        partner = const.data.views.weak(const.data.images[const.data.unlabelled[other]], stream)
        mixed = net(share * fixed.weak + (1 - share) * partner).logits
        mix = mean(mixed_cross_entropy(mixed, label, const.label[other], share))
        return together(own, Loss(consistency + self.mix_weight * mix, {"consistency": consistency, "mix": mix}))

    def aggregate(self, server: Moving, ups: Sequence[Up], site: ServerSite) -> Moving:
        share = equal_shares([float(up.samples) for up in ups])  # clients without a confident image are left out
        moved = step_to_mean(server, ups, site, share, self.server_momentum)
        return moved._replace(weights=site.fine_tune(moved.weights, self.server_loss))
