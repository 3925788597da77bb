"""FedAvg + GCD: contrastive learning at the clients, semi-supervised k-means at the end.

Vaze et al., Generalized Category Discovery, CVPR 2022, trained by federated averaging.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from semifed.data.client import Batch
from semifed.discovery.gallery import Gallery
from semifed.discovery.inference import gcd_clusters
from semifed.discovery.objectives import (
    ONLY_NOVEL,
    PROJECTION,
    contrast,
    equal_mean,
    then_classify,
    two_views,
)
from semifed.fit import Course, Fitted, Loss
from semifed.method import Method, Share, Temperature
from semifed.net import Net
from semifed.payloads import Down, Local, Nothing, Server, Up
from semifed.server import ServerSite


@dataclass(frozen=True, kw_only=True)
class FedGCD(Method[Server, Down, Up]):
    """Views of one image and of one class attract each other; groups are found by k-means, which is told how many."""

    title: ClassVar[str] = "contrast at the clients, then k-means that is told the number of classes"
    no_meaning: ClassVar[Mapping[str, str]] = ONLY_NOVEL
    heads: ClassVar[Mapping[str, str]] = {"projection": PROJECTION}

    unsupervised_share: Share = 0.65  # 1 - GCD's weight of the supervised contrast
    supervised_temperature: Temperature = 0.07  # of the contrast with labels
    unsupervised_temperature: Temperature = 1.0  # of that without
    # Classes beside the known ones: it cannot do without. 0: as many as the data have; "searched": by how well the
    # labelled ones are found.
    novel: Annotated[int, Field(ge=0)] | Literal["searched"] = 0  # classes, for k-means; 0: as many as the data have

    def train(self, net: Net, local: Local[Nothing, Nothing], course: Course) -> Fitted:
        fitted = course.follow(net, local.data, self.loss, local.const)
        # GCD has no classifier. This one moves nothing else, and tells how well known classes can be named.
        return then_classify(fitted, net, local.data, course)

    def loss(self, net: Net, batch: Batch, const: Nothing) -> Loss:
        apart = contrast(two_views(net, batch), self.supervised_temperature, self.unsupervised_temperature)
        share = self.unsupervised_share
        return Loss(
            share * apart.unsupervised + (1 - share) * apart.supervised,
            {"contrast": apart.unsupervised, "supervised_contrast": apart.supervised},
        )

    def aggregate(self, server: Server, ups: Sequence[Up], site: ServerSite) -> Server:
        return equal_mean(server, ups, site)

    def clusters(self, gallery: Gallery) -> Tensor:
        return gcd_clusters(gallery, self.novel)

    def groups_by_labels(self) -> bool:
        return True
