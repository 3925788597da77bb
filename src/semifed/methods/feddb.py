"""FedDB: the model's lean to some classes is taken out of pseudo-labels and of the average.

Zhu et al., Estimating before Debiasing: A Bayesian Approach to Detaching Prior Bias in Federated Semi-Supervised
Learning, IJCAI 2024 (arXiv 2405.19789). The lean is the mean prediction on a client's unlabelled images (APP-U).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from semifed.class_priors import debiased, tracked_prior, unbiased_shares
from semifed.data.client import Batch, ClientData
from semifed.fit import Fitted, Loss
from semifed.method import AtLeastOne, Method, NonNegative, Share
from semifed.net import FrozenNet, Net
from semifed.objectives import semi_supervised
from semifed.payloads import Down, Local, Nothing, Visit
from semifed.pseudo import PseudoLabels
from semifed.server import ServerSite
from semifed.server_momentum import Moving, step_to_mean
from semifed.shapes import PerClass
from semifed.targets import Targets, opinion, sage_targets
from semifed.wire import Weights


class Reply(NamedTuple):
    """What travels back."""

    weights: Weights
    samples: Tensor
    prior: PerClass  # APP-U: the mean prediction of the model as the client trained it


class Received(NamedTuple):
    """The received model, where it is asked in each step."""

    net: FrozenNet
    prior: Tensor


class Const(NamedTuple):
    """The prior of the model in training as the step before left it, and who labels: the round's start or SAGE."""

    prior: Tensor
    label: Tensor  # [unlabelled], of the round's start
    received: Received | None  # SAGE


@dataclass(frozen=True, kw_only=True)
class FedDB(Method[Moving, Down, Reply, Const]):
    """Labels once a round by Bayes' rule with a uniform prior, and an average whose prior is near the uniform one."""

    title: ClassVar[str] = "pseudo-labels and average freed from the model's lean to some classes"

    threshold: Share = 0.95  # tau
    unlabelled_weight: NonNegative = 1.0  # of the cross entropy with pseudo-labels
    prior_momentum: Share = 0.5  # of the prior within a round
    aggregation: Literal["official", "exact"] = "official"  # the released solver, or the minimiser it looks for
    most_weight: AtLeastOne = 5.0  # "exact" alone: no client counts more than this many times, or less than its inverse
    server_momentum: Share = 0.0  # 0.5 in the authors' code
    sage: bool = False  # SAGE's targets of the local and the received model in each step, both debiased

    def setup(self, weights: Weights, site: ServerSite) -> Moving:
        return Moving(site.warm_up(weights, self.server_loss), {})

    def broadcast(self, server: Moving) -> Down:
        return Down(server.weights)

    def prepare(
        self, net: Net, down: Down, data: ClientData, kept: Nothing | None, visit: Visit
    ) -> Local[Const, Nothing]:
        seen = data.weak_outputs(net, visit.stream("gate")).logits.softmax(dim=1)
        uniform = torch.full(seen.shape[1:], 1 / seen.shape[1])
        prior = tracked_prior(uniform, seen, 0.0)
        given = opinion(debiased(seen, prior), self.threshold)
        if self.sage:
            return Local(data, Const(prior, given.label, Received(net.frozen(), prior)), Nothing())
        chosen = data._replace(unlabelled=data.unlabelled[given.sure])
        pseudo = PseudoLabels(torch.arange(len(given.label)), given.label, given.sure, received=given)
        return Local(chosen, Const(prior, given.label[given.sure], None), Nothing(), pseudo, data)

    def loss(self, net: Net, batch: Batch, const: Const) -> Loss:
        labelled, weak, strong = net.joint(batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong)
        predicted = weak.logits.detach().softmax(dim=1)
        if const.received is None:
            label = const.label[batch.unlabelled.position]
            chosen = Targets(label, torch.ones_like(label, dtype=torch.bool))
        else:
            theirs = const.received.net(batch.unlabelled.weak).logits.softmax(dim=1)
            local = opinion(debiased(predicted, const.prior), self.threshold)
            received = opinion(debiased(theirs, const.received.prior), self.threshold)
            chosen = sage_targets(local, received)
        loss = semi_supervised(batch, labelled, strong, chosen, self.unlabelled_weight)
        return loss._replace(carry=const._replace(prior=tracked_prior(const.prior, predicted, self.prior_momentum)))

    def report(self, net: Net, local: Local[Const, Nothing], fitted: Fitted) -> Reply:
        return Reply(net.trained(), fitted.samples(local.data), fitted.left.prior)

    def aggregate(self, server: Moving, ups: Sequence[Reply], site: ServerSite) -> Moving:
        counts, priors = [float(up.samples) for up in ups], [up.prior for up in ups]
        share = unbiased_shares(counts, priors, exact=self.aggregation == "exact", most=self.most_weight)
        moved = step_to_mean(server, ups, site, share, self.server_momentum)
        return moved._replace(weights=site.fine_tune(moved.weights, self.server_loss))
