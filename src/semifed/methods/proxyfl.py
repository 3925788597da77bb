"""ProxyFL: A Proxy-Guided Framework for Federated Semi-Supervised Learning, CVPR 2026 (arXiv 2602.21078)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from semifed import proxies
from semifed.data.client import Batch, ClientData
from semifed.fit import Course, Fitted, Loss
from semifed.method import Method, NonNegative, Share, averaged
from semifed.net import FrozenNet, Net
from semifed.objectives import semi_supervised, together
from semifed.payloads import Local, Nothing, Visit
from semifed.server import ServerSite
from semifed.shapes import PerClass
from semifed.targets import asked, opinion, targets
from semifed.wire import Weights


class Known(NamedTuple):
    """What the server remembers and sends."""

    weights: Weights
    prior: Tensor  # P_G(Y) [classes]


class Reply(NamedTuple):
    """What travels back; counts are of labels and accepted pseudo-labels in the last local epoch."""

    weights: Weights
    samples: Tensor
    counts: PerClass


class Const(NamedTuple):
    """What the loss reads, and the counts of the last steps, as many as an epoch has."""

    net: FrozenNet
    prior: Tensor
    epoch: int = 0
    counts: tuple[Tensor, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProxyFL(Method[Known, Known, Reply, Const]):
    """Classifier rows are proxies of classes, tuned at the server (GPT) and pooled with features at clients (ICPL)."""

    title: ClassVar[str] = "classifier rows as class proxies: tuned at the server, contrasted with all images"
    heads: ClassVar[Mapping[str, str]] = proxies.HEADS

    threshold: Share = 0.95  # tau
    unlabelled_weight: NonNegative = 1.0  # alpha
    contrast_weight: NonNegative = 1.0  # beta; 0 is without ICPL
    categories: Literal["prior"] | proxies.AtLeastOne = "prior"  # xi, eq. (3); k is ICPL-Top-k of Table 4
    confidence: Literal["either", "received"] = "either"  # the paper: received
    labelled_rows: Literal["prediction", "truth"] = "prediction"  # the paper: truth
    positive_weights: Literal["global", "local"] = "global"  # of eq. (6); the paper: local
    means: Literal["one", "separate"] = "one"  # the paper: those of sure and unsure rows, added
    projections: bool = True  # the heads; the paper: none
    tuning: Literal["on", "rescale", "off"] = "on"  # "rescale" takes the length of the tuned proxies alone
    tuning_steps: proxies.Count = 2000  # Q M C / b; this and the next four count unless tuning is off
    tuning_lr: NonNegative = 0.005  # of SGD on the proxies
    tuning_batch: proxies.Count = 0  # b; the authors' 4 ends at the same proxies
    anchor: Literal["local", "global"] = "local"  # of eq. (2); the paper: global
    margin: bool = True  # the paper: none
    prior: Literal["ema", "round"] = "ema"  # the paper: round
    prior_decay: Share = 0.99  # of "ema"
    weigh: Literal["images", "learnt"] = "images"  # a client counts by all it holds, or by what really taught it

    def needed_heads(self) -> Mapping[str, str]:
        return self.heads if self.projections and self.contrast_weight else {}

    def setup(self, weights: Weights, site: ServerSite) -> Known:
        classes = proxies.class_count(site.net, compared=self.contrast_weight > 0)
        return Known(site.warm_up(weights, self.server_loss), torch.full((classes,), 1 / classes))

    def broadcast(self, server: Known) -> Known:
        return server

    def prepare(
        self, net: Net, down: Known, data: ClientData, kept: Nothing | None, visit: Visit
    ) -> Local[Const, Nothing]:
        return Local(data, Const(net.frozen(), down.prior), Nothing())

    def train(self, net: Net, local: Local[Const, Nothing], course: Course) -> Fitted:
        return course.follow(net, local.data, self.loss, local.const._replace(epoch=course.epoch(local.data)))

    def loss(self, net: Net, batch: Batch, const: Const) -> Loss:
        (known, unlabelled), labels = batch, batch.labelled.labels
        views = net.joint(known.weak, unlabelled.weak, unlabelled.strong)
        local, received = asked(views[1], self.threshold), asked(const.net(unlabelled.weak), self.threshold)
        chosen = targets(local, received, trust=self.confidence, mixing=0.0)
        loss = semi_supervised(batch, views[0], views[2], chosen, self.unlabelled_weight)
        if self.contrast_weight and len(unlabelled):
            truth = self.labelled_rows == "truth"
            seen = F.one_hot(labels, len(const.prior)) if truth else const.net(known.weak).logits.softmax(dim=1)
            weights = (received if self.positive_weights == "global" else local).probabilities
            rows = proxies.Rows(opinion(seen.float(), self.threshold), received._replace(sure=chosen.used), weights)
            contrast = proxies.contrast(net, views, rows, proxies.Pool(const.prior, self.categories, self.means))
            loss = together(Loss(self.contrast_weight * contrast, {"contrast": contrast}), loss)
        counts = torch.cat([labels, received.label[chosen.used]]).bincount(minlength=len(const.prior))
        return loss._replace(carry=const._replace(counts=(*const.counts, counts)[-const.epoch :]))

    def report(self, net: Net, local: Local[Const, Nothing], fitted: Fitted) -> Reply:
        count = fitted.samples if self.weigh == "images" else fitted.learnt
        return Reply(net.trained(), count(local.data), torch.stack(fitted.left.counts).sum(dim=0))

    def aggregate(self, server: Known, ups: Sequence[Reply], site: ServerSite) -> Known:
        weights, name = averaged(server.weights, ups, site), site.net.class_rows
        local = [up.weights[name] for up in ups if up.samples > 0]
        by = proxies.Tuning(self.tuning, self.tuning_steps, self.tuning_lr, self.tuning_batch, self.anchor, self.margin)
        tuned = proxies.tuned(weights[name], local, by, site.stream("proxies"))
        prior = proxies.updated_prior(server.prior, [up.counts for up in ups], self.prior, self.prior_decay)
        site.note(prior=prior.tolist(), **proxies.change(weights[name], tuned))
        return Known(site.fine_tune(weights | {name: tuned}, self.server_loss), prior)
