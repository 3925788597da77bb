"""No training: what the features of the network, as it is given, are worth on their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from semifed.data.client import Batch
from semifed.discovery.gallery import Gallery
from semifed.discovery.guided import GraphSettings
from semifed.discovery.inference import graph_clusters
from semifed.discovery.objectives import ONLY_NOVEL
from semifed.fit import Loss
from semifed.method import Method
from semifed.net import Net
from semifed.payloads import Nothing


@dataclass(frozen=True, kw_only=True)
class Untrained(Method):
    """Clients have nothing to learn from, so the initial weights stay; Infomap groups their features."""

    title: ClassVar[str] = "no training: Infomap on the features of the given network, a floor of discovery"
    no_meaning: ClassVar[Mapping[str, str]] = ONLY_NOVEL

    def loss(self, net: Net, batch: Batch, const: Nothing) -> Loss:
        return Loss(torch.zeros(()), {})

    def clusters(self, gallery: Gallery) -> Tensor:
        return graph_clusters(gallery, GraphSettings(), with_labels=False)
