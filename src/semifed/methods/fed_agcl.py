"""AGCL-style: clients contrast their images with Gaussians of local groups and of groups merged at the server.

Pu et al., Federated Generalized Category Discovery, CVPR 2024 (arXiv 2305.14107). Only its abstract and a
reimplementation by others were at hand: the grouping at the server and all weights are ours, so this is not AGCL.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from semifed.data.client import Batch, ClientData
from semifed.discovery.gallery import Gallery
from semifed.discovery.gaussians import (
    Mixture,
    fitted_mixture,
    gaussian_contrast,
    local_groups,
    log_densities,
    merged_mixture,
)
from semifed.discovery.inference import gcd_clusters
from semifed.discovery.objectives import (
    ONLY_NOVEL,
    PROJECTION,
    contrast,
    equal_mean,
    then_classify,
    two_views,
    unit,
)
from semifed.fit import Course, Fitted, Loss
from semifed.losses import mean
from semifed.method import Method, NonNegative, Share, Temperature
from semifed.net import Net
from semifed.payloads import Local, Nothing, Server, Visit
from semifed.server import ServerSite
from semifed.wire import Weights


class Associated(NamedTuple):
    """The model and the groups of all clients; what a client receives, too."""

    weights: Weights
    groups: Mixture


class Reply(NamedTuple):
    """What travels back."""

    weights: Weights
    samples: Tensor
    groups: Mixture


class Const(NamedTuple):
    """Groups of the client's own images and of all clients, and which of them an unlabelled image belongs to."""

    local: Mixture
    member: Tensor  # [unlabelled]
    shared: Mixture
    shared_member: Tensor  # [unlabelled]; empty before any were merged


@dataclass(frozen=True, kw_only=True)
class FedAGCL(Method[Associated, Associated, Reply, Const]):
    """GCD's contrast, and one with Gaussians of groups that FINCH finds at a client and merges at the server."""

    title: ClassVar[str] = "AGCL-style: contrast with Gaussians of local groups, associated at the server"
    no_meaning: ClassVar[Mapping[str, str]] = ONLY_NOVEL
    heads: ClassVar[Mapping[str, str]] = {"projection": PROJECTION}

    unsupervised_share: Share = 0.65  # of the contrast without labels; the rest is that with labels
    supervised_temperature: Temperature = 0.05  # of the contrast with labels
    unsupervised_temperature: Temperature = 0.07  # of that without
    group_weight: NonNegative = 1.0  # of the contrast with local groups (GCL)
    shared_weight: NonNegative = 1.0  # with those of all clients; 0: GCL alone
    margin: NonNegative = 0.3  # by which a point's distance to its own Gaussian is made larger
    most_groups: Annotated[int, Field(ge=1)] = 64  # the largest, that a client tells of
    novel: Annotated[int, Field(ge=0)] | Literal["searched"] = 0  # classes, for k-means at the end, as FedAvg + GCD's

    def setup(self, weights: Weights, site: ServerSite) -> Associated:
        return Associated(weights, Mixture(torch.empty(0, 0), torch.empty(0, 0), torch.empty(0)))  # no groups yet

    def broadcast(self, server: Associated) -> Associated:
        return server

    def prepare(
        self, net: Net, down: Associated, data: ClientData, kept: Nothing | None, visit: Visit
    ) -> Local[Const, Nothing]:
        labelled, unlabelled = data.labelled_outputs(net), data.plain_outputs(net)
        points = unit(torch.cat([labelled.heads["projection"], unlabelled.heads["projection"]]))
        labels = torch.cat([data.labels, torch.full((len(data.unlabelled),), -1)])
        member = local_groups(points, labels, labelled.logits.shape[1])
        local, shared = fitted_mixture(points, member), down.groups.present
        own = member[len(data.labels) :]
        # A group belongs to the Gaussian of all clients in which its middle is most likely.
        associated = log_densities(local.mean, shared).argmax(dim=1)[own] if len(shared.images) else own[:0]
        return Local(data, Const(local, own, shared, associated), Nothing())

    def train(self, net: Net, local: Local[Const, Nothing], course: Course) -> Fitted:
        return then_classify(course.follow(net, local.data, self.loss, local.const), net, local.data, course)

    def loss(self, net: Net, batch: Batch, const: Const) -> Loss:
        seen = two_views(net, batch)
        apart = contrast(seen, self.supervised_temperature, self.unsupervised_temperature)
        points, position = unit(seen.unlabelled.heads["projection"]), batch.unlabelled.position.repeat(2)
        groups = mean(gaussian_contrast(points, const.member[position], const.local, self.margin))
        shared = torch.zeros(())
        if len(const.shared_member):
            shared = mean(gaussian_contrast(points, const.shared_member[position], const.shared, self.margin))
        grouped = self.group_weight * groups + self.shared_weight * shared
        share = self.unsupervised_share
        value = share * apart.unsupervised + (1 - share) * apart.supervised + grouped
        terms = {"contrast": apart.unsupervised, "supervised_contrast": apart.supervised}
        return Loss(value, {**terms, "groups": groups, "shared_groups": shared})

    def report(self, net: Net, local: Local[Const, Nothing], fitted: Fitted) -> Reply:
        return Reply(net.trained(), fitted.samples(local.data), local.const.local.padded(self.most_groups))

    def aggregate(self, server: Associated, ups: Sequence[Reply], site: ServerSite) -> Associated:
        if not ups:
            return server
        weights = equal_mean(Server(server.weights), ups, site).weights
        return Associated(weights, merged_mixture([up.groups for up in ups], self.most_groups))

    def clusters(self, gallery: Gallery) -> Tensor:
        return gcd_clusters(gallery, self.novel)

    def groups_by_labels(self) -> bool:
        return True
