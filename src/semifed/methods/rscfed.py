"""RSCFed: random groups of clients agree on sub-consensus models, whose mean is the next one.

Liang et al., RSCFed: Random Sampling Consensus Federated Semi-Supervised Learning, CVPR 2022 (arXiv 2203.13993).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from semifed.data.client import Batch, ClientData
from semifed.data.views import Views
from semifed.fit import Fitted, Loss
from semifed.losses import mean, squared_distance
from semifed.mean_teacher import Average, MeanTeacher, mean_teacher
from semifed.method import AtLeastOne, Method, NonNegative, Share, Temperature, averaged
from semifed.net import Net
from semifed.objectives import supervised, together
from semifed.payloads import Local, Visit
from semifed.pseudo import PseudoLabels, sharpened
from semifed.schedule import opening
from semifed.server import ServerSite
from semifed.sub_consensus import Consensus, Member
from semifed.wire import Weights


class Phased(NamedTuple):
    """What the server remembers, and what travels to a client."""

    weights: Weights
    labels_only: Tensor  # bool: whether the coming round is one of the warm-up


class Taught(NamedTuple):
    """What the loss reads of a client's mean teacher."""

    teacher: MeanTeacher
    views: Views


@dataclass(frozen=True, kw_only=True)
class RSCFed(Method[Phased, Phased, Member, Taught, Average]):
    """A mean teacher where labels are missing; clients near the agreement of their random group count more."""

    title: ClassVar[str] = "mean teacher at the clients, mean of random groups in which nearer clients count more"

    unlabelled_weight: NonNegative = 0.02  # lambda_u
    temperature: Temperature = 0.5  # of sharpening
    decay: Share = 0.999  # of the teacher
    keep_teacher: bool = True  # from round to round; else it starts anew from the received weights
    groups: PositiveInt = 3  # M
    group_share: Annotated[float, Field(gt=0, le=1)] = 0.5  # K of all clients, 5 of 10 in the paper
    distance_scale: NonNegative = 1.4  # in a group without labels: the authors' 10,000 over 7,326 images a client
    labelled_distance_scale: NonNegative = 0.014  # in one with labels: their 100
    labelled_weight: AtLeastOne = 6.0  # how much more a client with labels counts
    most_trust: AtLeastOne = 6.0  # no client of a group has more than so many equal shares, or less than its inverse
    warmup: Share = 0.1  # of the rounds learn from labels alone, unless the server has trained on its own

    def setup(self, weights: Weights, site: ServerSite) -> Phased:
        return self._next(site.warm_up(weights, self.server_loss), site)

    def broadcast(self, server: Phased) -> Phased:
        return server

    def prepare(
        self, net: Net, down: Phased, data: ClientData, kept: Average | None, visit: Visit
    ) -> Local[Taught, Average]:
        teacher = mean_teacher(net, kept if self.keep_teacher else None)
        # Warm-up leaves images out, not steps.
        seen = data._replace(unlabelled=data.unlabelled[:0]) if down.labels_only else data
        return Local(seen, Taught(teacher, data.views), kept or Average({}, torch.tensor(0)), whole=data)

    def loss(self, net: Net, batch: Batch, const: Taught) -> Loss:
        own = supervised(net, batch)
        unlabelled = batch.unlabelled
        if len(unlabelled) == 0 or self.unlabelled_weight == 0:
            return own
        teacher = const.teacher.caught_up(net, self.decay)
        target = sharpened(teacher(unlabelled.weak).logits, self.temperature)
        other_view = const.views.weak(unlabelled.raw, unlabelled.stream("weak again"))
        consistency = mean(squared_distance(net(other_view).logits, target))
        given = PseudoLabels(unlabelled.position, target.argmax(dim=1), torch.ones(len(target), dtype=torch.bool))
        taught = Loss(self.unlabelled_weight * consistency, {"consistency": consistency}, pseudo=given)
        return together(own, taught)._replace(carry=const._replace(teacher=teacher._replace(behind=True)))

    def report(self, net: Net, local: Local[Taught, Average], fitted: Fitted) -> Member:
        return Member(net.trained(), fitted.samples(local.data), torch.tensor(len(local.data.labelled) > 0))

    def keep(self, net: Net, local: Local[Taught, Average], const: Taught) -> Average:
        taught = self.keep_teacher and const.teacher.behind
        return const.teacher.caught_up(net, self.decay).kept() if taught else local.kept

    def aggregate(self, server: Phased, ups: Sequence[Member], site: ServerSite) -> Phased:
        scales = self.distance_scale, self.labelled_distance_scale
        rule = Consensus(self.groups, self.group_share, *scales, self.labelled_weight, self.most_trust)
        # Of parameters only: batch-norm statistics are of another size; and of what clients send of them.
        learners = site.net.learners()
        names = [name for name in site.net.trained_names() if name in learners]
        weight = rule.shares(ups, names, site.stream("groups"))
        weights = averaged(server.weights, ups, site, weight)
        return self._next(site.fine_tune(weights, self.server_loss), site)

    def _next(self, weights: Weights, site: ServerSite) -> Phased:
        labels_only = site.labelled is None and site.round < opening(self.warmup, site.rounds)
        return Phased(weights, torch.tensor(labels_only))
