"""FedLoKe: beside the shared network every client trains one of its own, and the two teach each other.

Zhang et al., Non-IID always Bad? Semi-Supervised Heterogeneous Federated Learning with Local Knowledge Enhancement,
CIKM 2023 (doi 10.1145/3583780.3614991).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from semifed.aggregate import moving_average
from semifed.data.client import Batch, ClientData
from semifed.fit import Course, Fitted, Loss
from semifed.method import Method, NonNegative, Share, averaged
from semifed.net import Net
from semifed.objectives import semi_supervised
from semifed.payloads import Local, Up, Visit
from semifed.pseudo import low_entropy_opinion
from semifed.schedule import ramp_up
from semifed.server import ServerSite
from semifed.targets import Targets, sage_targets
from semifed.wire import Weights


class Ramped(NamedTuple):
    """What the server remembers, and what travels to a client."""

    weights: Weights  # theta_G
    ramp: Tensor  # r_t, how much unlabelled images count in the coming round


class Personal(NamedTuple):
    """The network a client keeps to itself."""

    weights: Weights  # theta_L; none before the first round


class Pair(NamedTuple):
    """What the shared network is trained with."""

    personal: Net
    ramp: float


@dataclass(frozen=True, kw_only=True)
class FedLoKe(Method[Ramped, Ramped, Up, Pair, Personal]):
    """Where the personal network is sure, the shared one learns its soft labels, and the other way round."""

    title: ClassVar[str] = "a personal network at every client and the shared one teach each other soft labels"

    persistence: Share = 0.9  # mu, how much of the personal network survives a download
    entropy_threshold: NonNegative = 0.1  # delta, in nats
    ramp: Share = 0.4  # T_u as a share of all rounds
    sage: bool = False  # both learn SAGE's mixture of the two soft labels

    def setup(self, weights: Weights, site: ServerSite) -> Ramped:
        return self._before(site.warm_up(weights, self.server_loss), site)

    def broadcast(self, server: Ramped) -> Ramped:
        return server

    def prepare(
        self, net: Net, down: Ramped, data: ClientData, kept: Personal | None, visit: Visit
    ) -> Local[Pair, Personal]:
        personal = net.twin()
        if kept is not None:
            personal.load(moving_average(kept.weights, net.state(), self.persistence))
        return Local(data, Pair(personal, float(down.ramp)), kept or Personal({}))

    def train(self, net: Net, local: Local[Pair, Personal], course: Course) -> Fitted:
        return course.follow(net, local.data, self.loss, local.const, beside=[local.const.personal])

    def loss(self, net: Net, batch: Batch, const: Pair) -> Loss:
        plain, unlabelled = batch.labelled, batch.unlabelled
        shared, shared_weak, shared_strong = net.joint(plain.uncut, unlabelled.weak, unlabelled.strong)
        own, own_weak, own_strong = const.personal.joint(plain.weak, unlabelled.weak, unlabelled.strong)
        local, received = (
            low_entropy_opinion(output.logits.softmax(dim=1), self.entropy_threshold)
            for output in (own_weak, shared_weak)
        )
        if self.sage:
            for_shared = for_own = sage_targets(local, received, soft=True)
        else:
            for_shared = Targets(local.probabilities, local.sure, local, received)
            for_own = Targets(received.probabilities, received.sure, local, received)
        # KL(target || p) up to the target's entropy, which has no gradient. Each loss is without gradient where its
        # network has nothing to learn from: what the other one learns must not bring weight decay to it.
        ours = semi_supervised(batch, shared, shared_strong, for_shared, const.ramp)
        theirs = semi_supervised(batch, own, own_strong, for_own, const.ramp)
        return Loss(
            ours.value + theirs.value,
            {**ours.terms, **{f"personal_{name}": term for name, term in theirs.terms.items()}},
            {"shared_steps": torch.tensor(int(ours.value.requires_grad))},
            ours.pseudo,
        )

    def report(self, net: Net, local: Local[Pair, Personal], fitted: Fitted) -> Up:
        samples = local.data.image_count if int(fitted.sums.get("shared_steps", 0)) else 0
        return Up(net.trained(), torch.tensor(float(samples)))

    def keep(self, net: Net, local: Local[Pair, Personal], const: Pair) -> Personal:
        return Personal(const.personal.state())

    def aggregate(self, server: Ramped, ups: Sequence[Up], site: ServerSite) -> Ramped:
        return self._before(site.fine_tune(averaged(server.weights, ups, site), self.server_loss), site)

    def _before(self, weights: Weights, site: ServerSite) -> Ramped:
        """The state before the next round."""
        return Ramped(weights, torch.tensor(ramp_up(site.round + 1, self.ramp * site.rounds)))
