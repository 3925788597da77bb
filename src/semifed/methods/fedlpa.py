"""FedLPA: clients discover concepts in their own images and align predictions with how often they found each.

Local Prior Alignment for Heterogeneous Federated Generalized Category Discovery, NeurIPS 2025. Equations (5)-(8) are
known from the appendix alone; what had to be reconstructed is an option, argued in the card.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from semifed.data.client import Batch, ClientData
from semifed.discovery.communities import infomap_class
from semifed.discovery.gallery import Gallery
from semifed.discovery.guided import GraphSettings, local_concepts, true_classes, true_concepts, true_members
from semifed.discovery.inference import graph_clusters
from semifed.discovery.objectives import (
    ONLY_COSINES,
    PROJECTION,
    contrast,
    equal_mean,
    prior_alignment,
    self_distillation,
    sharpening,
    smoothed_prior,
    then_classify,
    two_views,
    unit,
)
from semifed.fit import Course, Fitted, Loss
from semifed.losses import cross_entropy, mean
from semifed.method import AtLeastOne, Method, NonNegative, Share, Temperature
from semifed.net import Net
from semifed.payloads import Down, Local, Server, Up, Visit
from semifed.server import ServerSite

Number = Annotated[int, Field(ge=0)]


class Found(NamedTuple):
    """What a client discovered among its images; it never leaves the client."""

    member: Tensor  # [unlabelled], concept of each image; -1: none
    prior_member: Tensor  # [unlabelled], the same unless an oracle tells
    prototypes: Tensor  # [concepts, features], unit rows, fixed until the next refresh
    round: Tensor  # of the refresh; 0: nothing found yet
    checksum: Tensor  # of the unlabelled images it is of; 0 where every round finds anew


class Const(NamedTuple):
    """What the loss reads."""

    found: Found
    warming: bool
    sharpening: float  # student's over teacher's temperature
    measured: dict[str, Tensor]  # once a client, [2] each: sum and number of the values


@dataclass(frozen=True, kw_only=True)
class FedLPA(Method[Server, Down, Up, Const, Found]):
    """Contrastive warm-up, then self-distillation over local concepts whose batch prior it must meet."""

    title: ClassVar[str] = "local concepts by Infomap, and predictions aligned with their local prior"
    no_meaning: ClassVar[Mapping[str, str]] = ONLY_COSINES
    heads: ClassVar[Mapping[str, str]] = {"projection": PROJECTION}

    warmup_rounds: Number = 20  # without concepts
    unsupervised_share: Share = 0.65  # lambda
    percentile: Annotated[float, Field(ge=0, le=100)] = 50.0  # P
    bandwidth: Share = 0.0  # of the density of confidences; 0: Scott's rule
    density: Literal["plain", "logit"] = "plain"  # of the confidences or of their logits
    refresh: Annotated[int, Field(ge=1)] = 1  # R, rounds
    prior_weight: NonNegative = 0.5  # epsilon
    divergence: Literal["kl", "jsd", "kl_fwd"] = "kl"  # of predictions and prior; kl_fwd: of prior and predictions
    smoothing: NonNegative = 0.5  # delta
    prior: Literal["concepts", "uniform", "oracle"] = "concepts"  # uniform: SimGCD's assumption
    concepts: Literal["found", "oracle"] = "found"  # oracle: the true classes, a bound
    refine: Literal["clique", "reweight", "cut", "none"] = "clique"  # what identified images do to the graph
    partners: Number = 20  # links a node gains within its class, "clique" alone
    neighbours: Number = 0  # k at a client; 0: from the size of the labelled classes
    class_size: Literal["typical", "median"] = "typical"  # of a labelled image's class in the mean, or over classes
    smallest_concept: Annotated[int, Field(ge=1)] = 3  # images of a module that is one; k2 + 1
    final_neighbours: Number = 0  # k among the images that are grouped at the end; 0: by a rule
    least_similarity: Share = 0.5  # tau_f
    labelled_share: Share = 0.0  # of a class's images: the labelled ones tell its size; 0: the scenario's
    outliers: Literal["nearest", "none"] = "nearest"  # join the nearest concept, or none
    student_temperature: Temperature = 0.1  # of the predictions that learn
    teacher_temperature: Temperature = 0.04  # at the end
    first_teacher_temperature: Temperature = 0.07  # in the first round of discovery
    teacher_rounds: AtLeastOne = 30.0  # from the first to the last temperature
    supervised_temperature: Temperature = 0.07  # of the contrast with labels
    unsupervised_temperature: Temperature = 1.0  # of that without
    inference: Literal["graph", "graph+labels"] = "graph"  # with the server's labelled images: FedLPA+

    def opens_classes(self) -> bool:
        return "oracle" in (self.prior, self.concepts)

    @property
    def graph(self) -> GraphSettings:
        """How a graph is made of images."""
        return GraphSettings(**{name: getattr(self, name) for name in GraphSettings._fields})

    def prepare(self, net: Net, down: Down, data: ClientData, kept: Found | None, visit: Visit) -> Local[Const, Found]:
        infomap_class()  # a client without it learns so now, not after the warm-up
        nothing = torch.empty(0, dtype=torch.int64)
        found = kept or Found(nothing, nothing, torch.empty(0, 0), torch.tensor(0), torch.tensor(0))
        warming, pseudo, measured = visit.round <= self.warmup_rounds, None, {}
        # A client that missed its turn refreshes when it is back, and so does one with other images than then.
        checksum = torch.tensor(data.checksum() if self.refresh > 1 else 0)
        due = visit.round - int(found.round) >= self.refresh or not torch.equal(found.checksum, checksum)
        if due and not warming:
            if self.concepts == "oracle":
                concepts = true_concepts(net, data)
            else:
                guided = local_concepts(net, data, self.graph, self.labelled_share, self.outliers, visit)
                concepts, pseudo, measured = guided.concepts, guided.pseudo, guided.measured
            counted = true_members(concepts.member, true_classes(data)) if self.prior == "oracle" else concepts.member
            member, counted = (each[len(data.labelled) :] for each in (concepts.member, counted))
            found = Found(member, counted, concepts.prototypes, torch.tensor(visit.round), checksum)
        temperatures = self.student_temperature, self.first_teacher_temperature, self.teacher_temperature
        factor = sharpening(max(visit.round - self.warmup_rounds, 1), self.teacher_rounds, *temperatures)
        return Local(data, Const(found, warming, factor, measured), found, pseudo)

    def train(self, net: Net, local: Local[Const, Found], course: Course) -> Fitted:
        fitted = course.follow(net, local.data, self.loss, local.const)
        if local.const.warming:
            return then_classify(fitted, net, local.data, course)
        concepts = torch.tensor([float(len(local.const.found.prototypes)), 1.0])
        return fitted._replace(measured={"concepts": concepts, **local.const.measured})

    def loss(self, net: Net, batch: Batch, const: Const) -> Loss:
        seen = two_views(net, batch)
        apart = contrast(seen, self.supervised_temperature, self.unsupervised_temperature)  # Eqs. (5), (6)
        share = self.unsupervised_share
        terms = {"contrast": apart.unsupervised, "supervised_contrast": apart.supervised}
        if const.warming:
            return Loss(share * apart.unsupervised + (1 - share) * apart.supervised, terms)
        named = mean(cross_entropy(seen.labelled.logits, seen.labels))
        alike, aligned = self._alignment(seen.unlabelled.features, batch.unlabelled.position, const)
        unsupervised = alike + self.prior_weight * aligned + apart.unsupervised
        value = share * unsupervised + (1 - share) * (named + apart.supervised)  # Eq. (8)
        terms |= {"supervised": named, "distillation": alike, "prior": aligned}
        return Loss(value, terms)

    def _alignment(self, features: Tensor, position: Tensor, const: Const) -> tuple[Tensor, Tensor]:
        """L_SD and D(p̄, π) of Eq. (7); both 0 where fewer than two concepts leave nothing to tell apart."""
        found = const.found
        member, prior_member = found.member[position], found.prior_member[position]
        inside = (member >= 0) & (prior_member >= 0)
        count = len(found.prototypes)
        if count < 2 or not inside.any():
            return torch.zeros(()), torch.zeros(())
        logits = unit(features[inside.repeat(2)]) @ found.prototypes.T / self.student_temperature
        prior = smoothed_prior(prior_member[inside], count, self.smoothing)
        prior = torch.full((count,), 1 / count) if self.prior == "uniform" else prior
        return mean(self_distillation(logits, const.sharpening)), prior_alignment(logits, prior, self.divergence)

    def aggregate(self, server: Server, ups: Sequence[Up], site: ServerSite) -> Server:
        return equal_mean(server, ups, site)

    def clusters(self, gallery: Gallery) -> Tensor:
        settings = self.graph._replace(neighbours=self.final_neighbours)
        return graph_clusters(gallery, settings, with_labels=self.groups_by_labels())

    def groups_by_labels(self) -> bool:
        return self.inference == "graph+labels"
