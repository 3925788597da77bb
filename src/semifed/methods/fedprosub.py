"""FedProSub: ProSub (ECCV 2024) with labels at the server, as OpenFL federates it (appendix A.1).

The prototypes of the known classes span a subspace of the features; the part of an image's features within it
says how known the image is. Two Beta distributions make that a probability, from which each step draws a mask.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from semifed.beta_mixture import BetaMixture, fitted_shapes, initial_mixture, known_probability, mean_mixture, refitted
from semifed.data.client import Batch, ClientData
from semifed.fit import Fitted, Loss
from semifed.losses import cosine_distance, cross_entropy, masked_mean, mean, subspace_separation
from semifed.method import Method, NonNegative, Share, averaged
from semifed.models.heads import SUBSPACE_BASIS
from semifed.net import Net
from semifed.objectives import plus, supervised, together
from semifed.payloads import Local, Nothing, Prediction, Visit, outside
from semifed.prototypes import ClassTotals, class_means, class_totals, subspace_basis, subspace_score
from semifed.pseudo import PseudoLabels, confident_label
from semifed.server import ServerSite
from semifed.wire import Weights


class State(NamedTuple):
    """What the server remembers; the basis of the subspace is among the weights."""

    weights: Weights
    prototypes: Tensor  # c_k [classes, d]; zeros for a class nobody told of yet
    mixture: BetaMixture


class Sent(NamedTuple):
    """What travels to a client."""

    weights: Weights
    mixture: BetaMixture


class Reply(NamedTuple):
    """What travels back."""

    weights: Weights
    samples: Tensor
    mixture: BetaMixture
    totals: ClassTotals  # of features; empty unless the client holds labels


class Judged(NamedTuple):
    """The client's mixture, and what the received model and it say of each unlabelled image, once a round."""

    mixture: BetaMixture
    chance: Tensor  # P_id
    label: Tensor
    sure: Tensor  # bool


@dataclass(frozen=True, kw_only=True)
class FedProSub(Method[State, Sent, Reply, Judged]):
    """FixMatch and feature prediction, on images drawn as known by their place in the subspace of prototypes."""

    title: ClassVar[str] = "ProSub with labels at the server: known or unknown by the subspace of class prototypes"
    heads: ClassVar[Mapping[str, str]] = {"predictor": "linear(features)", "subspace": "subspace"}
    unknown_score: ClassVar[str] = "1 - cosine to the subspace of class prototypes"

    threshold: Share = 0.95  # tau
    consistency_weight: NonNegative = 1.0  # w_pl
    subspace_weight: NonNegative = 1.0  # w_sub
    similarity_weight: NonNegative = 5.0  # w_s
    prior: Share = 0.5  # pi
    floor: NonNegative = 0.1  # of P_id: scores that neither distribution expects count as unknown

    def setup(self, weights: Weights, site: ServerSite) -> State:
        nothing = torch.zeros_like(weights[SUBSPACE_BASIS].T)
        return self._state(site.warm_up(weights, self.server_loss), nothing, initial_mixture(), site)

    def broadcast(self, server: State) -> Sent:
        return Sent(server.weights, server.mixture)

    def prepare(
        self, net: Net, down: Sent, data: ClientData, kept: Nothing | None, visit: Visit
    ) -> Local[Judged, Nothing]:
        said, mixture = data.plain_outputs(net), down.mixture
        score = said.heads["subspace"]  # all 0 before there is a subspace: then only L_us is left
        if down.weights[SUBSPACE_BASIS].any():
            mixture = refitted(mixture, data.labelled_outputs(net).heads["subspace"], score, self.prior)
        # Asked of the scores it was fitted to: those under batch statistics in a step say nothing of known or unknown.
        chance = known_probability(score, mixture, self.prior, self.floor)
        return Local(data, Judged(mixture, chance, *confident_label(said.logits, self.threshold)), Nothing())

    def loss(self, net: Net, batch: Batch, const: Judged) -> Loss:
        own = supervised(net, batch)  # L_xe, 0 unless the client holds labels
        if len(batch.unlabelled) == 0:
            return own
        weak, strong = net(batch.unlabelled.weak), net(batch.unlabelled.strong)
        at = batch.unlabelled.position
        known = torch.rand(len(at), generator=batch.unlabelled.stream("mask")) < const.chance[at]  # M ~ P_id
        label = const.label[at]
        pseudo = PseudoLabels(at, label, known & const.sure[at])
        similarity = mean(cosine_distance(strong.heads["predictor"], weak.features.detach()))  # L_us
        loss = Loss(self.similarity_weight * similarity, {"similarity": similarity}, pseudo=pseudo)
        consistency = masked_mean(cross_entropy(strong.logits, label), pseudo.used)  # L_xep
        loss = plus(loss, "consistency", self.consistency_weight, consistency)
        loss = plus(
            loss, "subspace", self.subspace_weight, mean(subspace_separation(weak.heads["subspace"], known))
        )  # L_sub
        return together(own, loss)

    def report(self, net: Net, local: Local[Judged, Nothing], fitted: Fitted) -> Reply:
        data, (logits, features, _) = local.data, local.data.labelled_outputs(net)
        totals = class_totals(features, data.labels, logits.shape[1])
        return Reply(net.trained(), fitted.samples(data), local.const.mixture, totals)

    def aggregate(self, server: State, ups: Sequence[Reply], site: ServerSite) -> State:
        weights = site.fine_tune(averaged(server.weights, ups, site), self.server_loss)
        mixture = mean_mixture([up.mixture for up in ups]) if ups else server.mixture
        return self._state(weights, class_means([up.totals for up in ups], server.prototypes), mixture, site)

    def _state(self, weights: Weights, prototypes: Tensor, mixture: BetaMixture, site: ServerSite) -> State:
        """The state before the next round; a server with labels has its own prototypes and known scores."""
        seen = site.outputs(weights)
        if seen is not None and site.labelled is not None:
            prototypes = class_means([class_totals(seen.features, site.labelled.labels, len(prototypes))], prototypes)
            scores = subspace_score(seen.features, subspace_basis(prototypes))
            mixture = mixture._replace(known=fitted_shapes(scores, torch.ones_like(scores), mixture.known))
        site.note(beta_known=mixture.known.tolist(), beta_unknown=mixture.unknown.tolist())
        return State(weights | {SUBSPACE_BASIS: subspace_basis(prototypes)}, prototypes, mixture)

    def predict(self, net: Net, images: Tensor) -> Prediction:
        return outside(net(images))
