"""FedAvg + SimGCD: one classifier for known and novel classes, averaged like everything else.

Wen et al., Parametric Classification for Generalized Category Discovery: A Baseline Study, ICCV 2023. Row 7 of one
client's novel classes has nothing to do with row 7 of another's: what averaging does to them is the point of it here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from semifed.data.client import Batch, ClientData
from semifed.discovery.gallery import Gallery
from semifed.discovery.objectives import (
    ONLY_COSINES,
    PROJECTION,
    contrast,
    equal_mean,
    prior_alignment,
    self_distillation,
    sharpening,
    two_views,
)
from semifed.fit import Loss
from semifed.losses import cross_entropy, mean
from semifed.method import AtLeastOne, Method, NonNegative, Share, Temperature
from semifed.models.network import Output
from semifed.net import Net
from semifed.payloads import Down, Local, Nothing, Prediction, Server, Up, Visit
from semifed.server import ServerSite


class Sharpening(NamedTuple):
    """The student's temperature over the teacher's, in this round."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class FedSimGCD(Method[Server, Down, Up, Sharpening]):
    """Cross entropy, self-distillation between two views and a uniform prior over all classes, named or not."""

    title: ClassVar[str] = "a classifier with rows for novel classes, self-distilled and averaged"
    no_meaning: ClassVar[Mapping[str, str]] = ONLY_COSINES
    heads: ClassVar[Mapping[str, str]] = {"projection": PROJECTION, "novel": "cosine(5)"}
    unknown_score: ClassVar[str] = "probability of all novel classes together"

    novel: Annotated[int, Field(ge=0)] = 0  # classes beside the known ones; 0: as many as the data have
    unsupervised_share: Share = 0.65  # lambda
    entropy_weight: NonNegative = 1.0  # epsilon: 1 on CIFAR-10, 4 on CIFAR-100, 2 on CUB
    teacher_temperature: Temperature = 0.04  # at the end
    first_teacher_temperature: Temperature = 0.07  # in the first round
    teacher_rounds: AtLeastOne = 30.0  # from the first to the last temperature
    supervised_temperature: Temperature = 0.07  # of the contrast with labels
    unsupervised_temperature: Temperature = 1.0  # of that without

    def needed_heads(self) -> Mapping[str, str]:
        return {**self.heads, "novel": f"cosine({self.novel})"}

    def prepare(
        self, net: Net, down: Down, data: ClientData, kept: Nothing | None, visit: Visit
    ) -> Local[Sharpening, Nothing]:
        temperatures = net.temperature, self.first_teacher_temperature, self.teacher_temperature
        return Local(data, Sharpening(sharpening(visit.round, self.teacher_rounds, *temperatures)), Nothing())

    def loss(self, net: Net, batch: Batch, const: Sharpening) -> Loss:
        seen = two_views(net, batch)
        apart = contrast(seen, self.supervised_temperature, self.unsupervised_temperature)
        labelled = every_logit(seen.labelled)
        named = mean(cross_entropy(labelled, seen.labels))
        # Labelled images are distilled too: views of one image must lie half a batch apart in each part.
        parts = [part for part in (labelled, every_logit(seen.unlabelled)) if len(part)]
        alike = mean(torch.cat([self_distillation(part, const.factor) for part in parts]))
        together = torch.cat(parts)
        uniform = torch.full((together.shape[1],), 1 / together.shape[1])
        even = prior_alignment(together, uniform, "kl")
        share = self.unsupervised_share
        unsupervised = alike + self.entropy_weight * even + apart.unsupervised
        value = share * unsupervised + (1 - share) * (named + apart.supervised)
        terms = {"supervised": named, "distillation": alike, "prior": even}
        return Loss(value, {**terms, "contrast": apart.unsupervised, "supervised_contrast": apart.supervised})

    def aggregate(self, server: Server, ups: Sequence[Up], site: ServerSite) -> Server:
        return equal_mean(server, ups, site)

    def predict(self, net: Net, images: Tensor) -> Prediction:
        said = net(images)
        known = said.logits.shape[1]
        return Prediction(said.logits, every_logit(said).softmax(dim=1)[:, known:].sum(dim=1))

    def clusters(self, gallery: Gallery) -> Tensor:
        return every_logit(gallery.images).argmax(dim=1)


def every_logit(said: Output) -> Tensor:
    """Logits of known classes and of the rows for novel ones, [n, known + novel]."""
    return torch.cat([said.logits, said.heads["novel"]], dim=1)
