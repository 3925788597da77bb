"""CBAFed: labels fixed at the start of a round, by thresholds that balance what the classes are learnt from.

Li, Li, Wang, Class Balanced Adaptive Pseudo Labeling for Federated Semi-Supervised Learning, CVPR 2023.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from pydantic import PositiveInt
from torch import Tensor

from semifed.aggregate import capped_shares, moving_average
from semifed.class_balance import Demand, Given, balanced_demand, no_labels, pooled_frequencies
from semifed.data.client import Batch, ClientData
from semifed.fit import Course, Fitted, Loss
from semifed.losses import cross_entropy, mean
from semifed.method import AtLeastOne, Method, NonNegative, Share, averaged
from semifed.net import Net
from semifed.objectives import supervised, together
from semifed.payloads import Local, Nothing, Visit
from semifed.pseudo import PseudoLabels
from semifed.residual import residual_connection
from semifed.schedule import opening
from semifed.server import ServerSite
from semifed.shapes import PerClass
from semifed.wire import Weights


class State(NamedTuple):
    """What the server remembers."""

    weights: Weights
    record: Weights  # of the last connection
    frequency: Tensor  # of the classes among labels and accepted pseudo-labels [classes]
    labels_only: Tensor  # bool: whether the coming round is one of the warm-up


class Sent(NamedTuple):
    """What travels to a client."""

    weights: Weights
    demand: Demand


class Reply(NamedTuple):
    """What travels back."""

    weights: Weights
    samples: Tensor
    counts: PerClass  # labels and accepted pseudo-labels


@dataclass(frozen=True, kw_only=True)
class CBAFed(Method[State, Sent, Reply, Given]):
    """Class-balanced thresholds, labels fixed for a round, residual connections of weights."""

    title: ClassVar[str] = "labels fixed for a round by class-balanced thresholds, residual connections of weights"

    threshold: Share = 0.84  # T_base
    most_threshold: Share = 0.95  # T_upper
    rare: NonNegative = 0.03  # T_lower; 0.1 is the mean of all classes
    connect_every: PositiveInt = 5  # rounds between connections at the server
    persistence: Share = 0.5  # how much of the record stays in one
    local_connect_every: PositiveInt = 5  # epochs between connections at a client with labels
    local_persistence: Share = 0.8  # how much of a client's record stays in one
    most_trust: AtLeastOne = 5.0  # equal shares a client may have, whatever it claims
    warmup: Share = 0.1  # of the rounds learn from labels alone, unless the server has trained on its own

    def setup(self, weights: Weights, site: ServerSite) -> State:
        weights = site.warm_up(weights, self.server_loss)
        classes = len(weights[site.net.class_rows])
        frequency = pooled_frequencies([], site.labelled, torch.full((classes,), 1 / classes), self.most_trust)
        return State(weights, weights, frequency, torch.tensor(self._opening(site) > 0))

    def broadcast(self, server: State) -> Sent:
        if server.labels_only:
            return Sent(server.weights, no_labels(server.frequency))
        return Sent(server.weights, balanced_demand(server.frequency, self.threshold, self.most_threshold, self.rare))

    def prepare(
        self, net: Net, down: Sent, data: ClientData, kept: Nothing | None, visit: Visit
    ) -> Local[Given, Nothing]:
        asked = data if down.demand.attainable else data._replace(unlabelled=data.unlabelled[:0])
        given = down.demand.labels(asked.weak_outputs(net, visit.stream("gate")).logits, data.labels)
        pseudo = PseudoLabels(torch.arange(len(given.label)), given.label, given.used)
        chosen = asked._replace(unlabelled=asked.unlabelled[given.used])
        return Local(chosen, given, Nothing(), pseudo, data)

    def loss(self, net: Net, batch: Batch, const: Given) -> Loss:
        own = supervised(net, batch)
        if len(batch.unlabelled) == 0:
            return own
        label = const.label[const.used][batch.unlabelled.position]
        given = mean(cross_entropy(net(batch.unlabelled.weak).logits, label))
        return together(own, Loss(given, {"given": given}))

    def train(self, net: Net, local: Local[Given, Nothing], course: Course) -> Fitted:
        persistence = self.local_persistence if len(local.data.labelled) else 0.0
        whole = local.whole or local.data  # the gate does not decide how long a client trains
        connect = residual_connection(net, course.epoch(whole), self.local_connect_every, persistence)
        return course.follow(net, local.data, self.loss, local.const, steps=course.steps(whole), after=connect)

    def report(self, net: Net, local: Local[Given, Nothing], fitted: Fitted) -> Reply:
        return Reply(net.trained(), fitted.samples(local.data), local.const.counts)

    def aggregate(self, server: State, ups: Sequence[Reply], site: ServerSite) -> State:
        weights = averaged(server.weights, ups, site, capped_shares([float(up.samples) for up in ups], self.most_trust))
        since = site.round - self._opening(site)
        due = since > 0 and since % self.connect_every == 0
        if due:
            weights = moving_average(server.record, weights, self.persistence)
        weights = site.fine_tune(weights, self.server_loss)
        frequency = pooled_frequencies([up.counts for up in ups], site.labelled, server.frequency, self.most_trust)
        site.note(class_frequency=frequency.tolist())
        return State(weights, weights if due or since <= 0 else server.record, frequency, torch.tensor(since < 0))

    def _opening(self, site: ServerSite) -> int:
        return 0 if site.labelled is not None else opening(self.warmup, site.rounds)
