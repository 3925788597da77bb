"""OpenFL: labels at the server, unknown classes among the clients' images (OpenReview QBTNpmtYmQ).

On FedSSB's losses it builds class pivots from a round-wise moving average of the server's model, aligns the
clients' doubly gated images with them, and trusts clients by the inverse of their alignment loss. Where labels
are at the clients, these report the directions that pivots are made of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from semifed.aggregate import FEWEST_GATED, alignment_level, equal_shares, reliability_shares, shares
from semifed.data.client import Batch, ClientData
from semifed.fit import Fitted, Loss
from semifed.losses import alignment, mean, supervised_contrastive
from semifed.method import AtLeastOne, Method, NonNegative, Share, Temperature, averaged
from semifed.net import Net
from semifed.objectives import OpenSetWeights, open_set_supervised, open_set_unsupervised, plus, together
from semifed.payloads import DETECTOR_SCORE, Local, Nothing, Prediction, Visit, detected
from semifed.prototypes import class_directions, mean_direction_norm, refreshed
from semifed.pseudo import Gates, gates
from semifed.server import ServerSite
from semifed.shapes import Scalar, Shaped
from semifed.wire import Weights


class State(NamedTuple):
    """What the server remembers."""

    weights: Weights
    average: Weights  # theta_EMA, never leaves the server
    pivots: Tensor  # mu [classes, m]; empty before anyone with labels has answered
    aligning: Tensor  # bool: the coming round is at or after T_align


class Sent(NamedTuple):
    """What travels to a client."""

    weights: Weights
    pivots: Tensor
    aligning: Tensor


class Reply(NamedTuple):
    """What travels back."""

    weights: Weights
    samples: Tensor
    alignment: Scalar  # the client's mean alignment loss, the one scalar of the paper
    directions: Annotated[Tensor, Shaped("classes", "projection", optional=True)]  # of clients that hold labels


class Const(NamedTuple):
    """What is fixed for the round at a client."""

    gates: Gates
    pivots: Tensor
    aligning: bool
    before: Tensor  # alignment loss of all images under the received model, for statistic = "all_pre"


@dataclass(frozen=True, kw_only=True)
class OpenFL(Method[State, Sent, Reply, Const]):
    """FedSSB with round-wise EMA, pivot alignment and reliability-aware aggregation."""

    title: ClassVar[str] = "pivots, dual-gated alignment and reliability-aware averaging against unknown classes"
    heads: ClassVar[Mapping[str, str]] = {"ova": "mlp2(256)", "projection": "128"}
    unknown_score: ClassVar[str] = DETECTOR_SCORE

    threshold: Share = 0.95  # tau_ID
    known_threshold: Share = 0.9  # eta_ID
    negative_threshold: Share = 0.99  # tau_neg
    consistency_weight: NonNegative = 1.0  # lambda_con
    detector_weight: NonNegative = 1.0  # lambda_od
    entropy_weight: NonNegative = 0.1  # lambda_em
    socr_weight: NonNegative = 0.5  # lambda_SOCR
    negative_weight: NonNegative = 1.0  # lambda_neg
    strong_cross_entropy: bool = True  # the server's, of strong views too
    align_weight: NonNegative = 0.5  # lambda_align
    align_after: Share = 0.1  # T_align as a share of all rounds
    temperature: Temperature = 0.5  # T
    ema: Share = 0.9  # alpha
    epsilon: Temperature = 0.1  # of eq. (2)
    most_trust: AtLeastOne = 5.0  # no client counts more than this many times, or less than its inverse
    con_mask: Literal["dual", "conf"] = "dual"  # of L_con: both gates, or confidence alone
    align_view: Literal["strong", "weak", "both"] = "strong"  # which views are aligned
    statistic: Literal["gated", "all", "all_pre"] = "gated"  # whose alignment losses count; all_pre: before training
    weighting: Literal["reliability", "uniform", "count"] = "reliability"  # "count" is FedAvg, by images
    pivots_from: Literal["ema", "current"] = "ema"  # the moving average, or the model in training
    ema_every: Literal["round", "epoch"] = "round"  # when the average moves; epoch: of fine-tuning
    contrast_weight: NonNegative = 0.0  # extension: supervised contrast of projections where the labels are

    def setup(self, weights: Weights, site: ServerSite) -> State:
        warm = site.warm_up(weights, self.server_loss)
        return self._state(warm, warm, torch.empty(0), site)

    def broadcast(self, server: State) -> Sent:
        return Sent(server.weights, server.pivots, server.aligning)

    def prepare(
        self, net: Net, down: Sent, data: ClientData, kept: Nothing | None, visit: Visit
    ) -> Local[Const, Nothing]:
        seen = data.plain_outputs(net)
        masks = gates(seen, self.threshold, self.known_threshold, self.negative_threshold)
        aligning = bool(down.aligning)
        before = torch.zeros(0)
        if aligning and self.statistic == "all_pre":
            own = self._labelled(data, data.labelled_outputs(net).heads["projection"], down.pivots)
            before = alignment(seen.heads["projection"], down.pivots, masks.label, masks.dual, self.temperature)
            before = torch.cat([before, own])
        return Local(data, Const(masks, down.pivots, aligning, before), Nothing())

    def loss(self, net: Net, batch: Batch, const: Const) -> Loss:
        own = self.server_loss(net, batch)  # 0 unless the client holds labels
        if len(batch.unlabelled) == 0:
            return own
        here = const.gates.at(batch.unlabelled.position)
        weights = OpenSetWeights(
            self.consistency_weight, self.detector_weight, self.entropy_weight, self.socr_weight, self.negative_weight
        )
        used = here.dual if self.con_mask == "dual" else here.confident
        unlabelled, views = open_set_unsupervised(net, batch.unlabelled, here, used, weights)
        if const.aligning:
            chosen = {"strong": views[2:], "weak": views[:1], "both": (views.weak, views.strong)}[self.align_view]
            projected = (view.heads["projection"] for view in chosen)
            each = [alignment(z, const.pivots, here.label, here.dual, self.temperature) for z in projected]  # eq. (1)
            values = torch.stack(each).mean(dim=0)
            counted = here.dual if self.statistic == "gated" else torch.ones_like(here.dual)
            unlabelled = plus(unlabelled, "align", self.align_weight, mean(values))
            unlabelled = unlabelled._replace(sums={"align": (values * counted).sum(), "count": counted.sum()})
        return together(own, unlabelled)

    def report(self, net: Net, local: Local[Const, Nothing], fitted: Fitted) -> Reply:
        const, data = local.const, local.data
        total, count = fitted.sums.get("align", torch.zeros(())), fitted.sums.get("count", torch.zeros(()))
        classes = const.gates.negative.shape[1]
        directions = torch.empty(0)
        if self.statistic == "all_pre":
            total, count = const.before.sum(), torch.tensor(len(const.before))
        elif self.statistic == "gated" and int(const.gates.dual.sum()) < FEWEST_GATED:
            total, count = torch.zeros(()), torch.zeros(())
        if len(data.labelled):
            projected = data.labelled_outputs(net).heads["projection"]
            directions = class_directions(projected, data.labels, classes)
            if const.aligning and self.statistic != "all_pre":
                total, count = total + self._labelled(data, projected, const.pivots).sum(), count + len(data.labels)
        level = alignment_level(total, count, classes, self.temperature, shift=self.statistic != "gated")
        return Reply(net.trained(), fitted.samples(data), level, directions)

    def _labelled(self, data: ClientData, projected: Tensor, pivots: Tensor) -> Tensor:
        """Eq. (1) of a client's labelled images: a label is a gate that cannot err."""
        return alignment(projected, pivots, data.labels, torch.ones(len(data.labels)), self.temperature)

    def aggregate(self, server: State, ups: Sequence[Reply], site: ServerSite) -> State:
        claimed = [float(up.alignment) for up in ups]
        samples = [float(up.samples) for up in ups]
        weight = shares(samples) if self.weighting == "count" else equal_shares(samples)
        if self.weighting == "reliability" and bool(server.aligning) and ups:
            trusted = reliability_shares(claimed, self.epsilon, self.most_trust)  # eq. (2)
            weight = shares(trusted * (equal_shares(samples) > 0))  # of those who learnt anything
        average = [server.average]

        def follow(weights: Weights) -> None:
            average[0] = site.averaged(average[0], weights, self.ema)

        mean_model = averaged(server.weights, ups, site, weight)
        weights = site.fine_tune(mean_model, self.server_loss, follow if self.ema_every == "epoch" else lambda _: None)
        if average[0] is server.average:  # once a round, also where the server trained no epoch
            follow(weights)
        directions = [up.directions for up in ups if len(up.directions)]
        # A client's word on a class counts once, whatever its length.
        total = sum((F.normalize(one, dim=1) for one in directions), start=torch.zeros(()))
        reported = refreshed(server.pivots, total) if directions else server.pivots
        site.note(alignment=claimed if bool(server.aligning) else [])
        return self._state(weights, site.recalibrated(average[0]), reported, site)

    def _state(self, weights: Weights, average: Weights, pivots: Tensor, site: ServerSite) -> State:
        """The server's state before the next round, with fresh pivots where the server has labels."""
        seen = site.outputs(average if self.pivots_from == "ema" else weights)
        if seen is not None and site.labelled is not None:
            pivots = class_directions(seen.heads["projection"], site.labelled.labels, seen.logits.shape[1])
        if len(pivots):
            site.note(pivot_norm=float(mean_direction_norm(pivots)))
        due = site.round >= round(self.align_after * site.rounds, 6) and len(pivots) > 0 and self.align_weight > 0
        return State(weights, average, pivots, torch.tensor(due))

    def server_loss(self, net: Net, batch: Batch) -> Loss:
        labelled = batch.labelled
        loss, views = open_set_supervised(net, labelled, self.detector_weight, strong_too=self.strong_cross_entropy)
        if self.contrast_weight and views:
            projected = torch.cat([view.heads["projection"] for view in views[:2]])
            contrast = mean(supervised_contrastive(projected, labelled.labels.repeat(2), self.temperature))
            loss = plus(loss, "contrast", self.contrast_weight, contrast)
        return loss

    def delivered(self, server: State) -> Weights:
        return server.average

    def also_tested(self, server: State) -> Mapping[str, Weights]:
        return {"current": server.weights}

    def centres(self, server: State) -> Tensor | None:
        return server.pivots if len(server.pivots) else None

    def predict(self, net: Net, images: Tensor) -> Prediction:
        return detected(net(images))
