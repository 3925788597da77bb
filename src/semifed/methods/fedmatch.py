"""FedMatch (ICLR 2021, arXiv 2006.12097): labels move one part of the weights, unlabelled images the other.

Clients lend each other the unsupervised parts; the models these make vote on pseudo-labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field
from torch import Tensor

from semifed import decomposition
from semifed.aggregate import equal_shares, weighted_mean
from semifed.data.client import Batch, ClientData
from semifed.decomposition import Member, Members, PsiWeights, Working
from semifed.fit import Course, Fitted, Loss
from semifed.method import Ask, Method, NonNegative, Share, averaged
from semifed.net import Net
from semifed.objectives import supervised
from semifed.payloads import Local, Nothing, Visit
from semifed.server import ServerSite
from semifed.wire import Weights

Count = Annotated[int, Field(ge=1)]


class State(NamedTuple):
    """What the server remembers."""

    weights: Weights  # theta = sigma + psi
    psi: Weights
    members: Members


class Sent(NamedTuple):
    """What travels to a client."""

    weights: Weights
    psi: Weights
    helpers: Weights  # psi_h [H, ...] of the clients nearest to it; mostly none


class Reply(NamedTuple):
    """What travels back."""

    weights: Weights
    samples: Tensor
    member: Member


@dataclass(frozen=True, kw_only=True)
class FedMatch(Method[State, Sent, Reply, Working]):
    """Labels move sigma alone; confident images, labelled by vote with two similar clients, move psi alone."""

    title: ClassVar[str] = "weights in a supervised and an unsupervised part; similar clients vote on pseudo-labels"

    threshold: Share = 0.75  # tau
    supervised_weight: NonNegative = 10.0  # lambda_s
    consistency_weight: NonNegative = 0.01  # lambda_a
    agreement_weight: NonNegative = 0.01  # lambda_ICCS
    sparsity_weight: NonNegative = 1e-4  # lambda_L1
    attraction_weight: NonNegative = 10.0  # lambda_L2
    psi_rate: NonNegative = 0.1  # psi's learning rate as a share of local.lr
    psi_share: Share = 0.2  # psi = 0.2 sigma at first
    helper_count: Count = 2  # H
    helper_interval: Count = 10  # rounds

    def setup(self, weights: Weights, site: ServerSite) -> State:
        psi = {name: self.psi_share * tensor for name, tensor in decomposition.kernels(weights).items()}
        whole = weights | {name: weights[name] + part for name, part in psi.items()}
        nobody = decomposition.nobody(psi, len(weights[site.net.class_rows]))
        return State(site.warm_up(whole, self.server_loss), psi, nobody)  # the server's labels move sigma

    def broadcast(self, server: State) -> Sent:
        return Sent(server.weights, server.psi, {})

    def round(self, server: State, ask: Ask[Sent, Reply], site: ServerSite) -> State:
        down = self.broadcast(server)

        def with_helpers(client: int) -> Sent:
            return down._replace(helpers=server.members.helpers(client, self.helper_count))

        return self.aggregate(server, ask(down, None if site.round % self.helper_interval else with_helpers), site)

    def prepare(
        self, net: Net, down: Sent, data: ClientData, kept: Nothing | None, visit: Visit
    ) -> Local[Working, Nothing]:
        return Local(data, decomposition.working(net, data, down.psi, down.helpers, visit), Nothing())

    def train(self, net: Net, local: Local[Working, Nothing], course: Course) -> Fitted:
        # Momentum and weight decay would move the part whose turn it is not.
        plain = course.optimiser._replace(momentum=0.0, nesterov=False, weight_decay=0.0)
        return course._replace(optimiser=plain, momentum=None).follow(net, local.data, self.loss, local.const, times=2)

    def loss(self, net: Net, batch: Batch, const: Working) -> Loss:
        parts = const.parts.settled(net.named_parameters())
        if parts.turn == "sigma":
            loss = supervised(net, batch)
            loss = loss._replace(value=self.supervised_weight * loss.value)
        else:
            weights = PsiWeights(
                self.consistency_weight, self.agreement_weight, self.sparsity_weight, self.attraction_weight
            )
            helpers = const.helpers[:, batch.unlabelled.position]
            loss = decomposition.psi_objective(net, batch.unlabelled, parts.sigma, helpers, self.threshold, weights)
            loss = loss._replace(rate=self.psi_rate)
        terms = {name: 2 * term for name, term in loss.terms.items()}  # reported as means over both kinds of steps
        left = const._replace(parts=parts.passed(taken=loss.value.requires_grad))
        return loss._replace(terms=terms, carry=left)

    def report(self, net: Net, local: Local[Working, Nothing], fitted: Fitted) -> Reply:
        return Reply(net.trained(), fitted.samples(local.data), fitted.left.told(net))

    def aggregate(self, server: State, ups: Sequence[Reply], site: ServerSite) -> State:
        share = equal_shares([float(up.samples) for up in ups])
        weights = site.fine_tune(averaged(server.weights, ups, site, share), self.server_loss)
        psi = weighted_mean([up.member.psi for up in ups], share) if any(up.samples > 0 for up in ups) else server.psi
        return State(weights, psi, server.members.joined_by([up.member for up in ups]))
