"""FedDure: two regulators at every client watch what its pseudo-labels do to its labelled images.

Bai et al., Combating Data Imbalances in Federated Semi-supervised Learning with Dual Regulators, AAAI 2024
(arXiv 2307.05358).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from semifed.data.client import Batch, ClientData
from semifed.fit import Course, Fitted, Loss
from semifed.losses import cross_entropy, masked_mean, mean, soft_cross_entropy
from semifed.method import ONLY_KNOWN, Method, NonNegative, Share
from semifed.net import FrozenNet, Net
from semifed.objectives import semi_supervised
from semifed.payloads import Down, Local, Nothing, Server, Up, Visit
from semifed.regulators import FineRegulator, adam_step, descended, fine_regulator, image_weights, leaves, slopes
from semifed.targets import Targets, local_or_sage_targets
from semifed.wire import Weights


class Regulators(NamedTuple):
    """What a step reads, and in its regulators leaves to the next one."""

    coarse: Weights  # phi, C-reg
    fine: FineRegulator  # w, F-reg
    received: FrozenNet | None  # asked with SAGE
    lr: float = 0.0  # eta, of the local model and of phi; known when training begins


@dataclass(frozen=True, kw_only=True)
class FedDure(Method[Server, Down, Up, Regulators]):
    """Pseudo-labels count by image, learnt so that a step on them helps on labels, and by how much it did."""

    title: ClassVar[str] = "pseudo-labels weighed by what a trial step on them does to the labelled images"
    no_meaning: ClassVar[Mapping[str, str]] = {
        **ONLY_KNOWN,
        "server": "its regulators learn from a client's labels; the nearest method that works is fixmatch-lpl",
    }

    unlabelled_weight: NonNegative = 1.0  # lambda_u
    regulator: Literal["meta", "none"] = "meta"  # F-reg; none: m = 1
    feedback_weight: NonNegative = 1.0  # of d; 0: without C-reg
    regulator_lr: NonNegative = 1e-3  # eta_w, of Adam; with F-reg, as its width
    hidden: Annotated[int, Field(ge=1)] = 128  # width of F-reg
    threshold: Share = 0.0  # tau without SAGE; the paper has none, its regulators stand in for a gate
    sage: bool = False  # SAGE's targets in place of the local model's labels
    sage_threshold: Share = 0.95  # tau with it

    def prepare(
        self, net: Net, down: Down, data: ClientData, kept: Nothing | None, visit: Visit
    ) -> Local[Regulators, Nothing]:
        coarse = {name: tensor.detach().clone() for name, tensor in net.named_parameters().items()}
        fine = fine_regulator(len(coarse[net.class_rows]), self.hidden, visit.stream("fine regulator"))
        return Local(data, Regulators(coarse, fine, net.frozen() if self.sage else None), Nothing())

    def train(self, net: Net, local: Local[Regulators, Nothing], course: Course) -> Fitted:
        return course.follow(net, local.data, self.loss, local.const._replace(lr=course.optimiser.lr))

    def loss(self, net: Net, batch: Batch, const: Regulators) -> Loss:
        labelled, weak, strong = net.joint(batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong)
        threshold = self.sage_threshold if self.sage else self.threshold
        chosen = local_or_sage_targets(weak, const.received, batch.unlabelled.weak, threshold)
        if len(batch.labelled) == 0 or not chosen.used.any():  # nothing to regulate by, or nothing to regulate
            return semi_supervised(batch, labelled, strong, chosen, self.unlabelled_weight)
        image, feedback, left = self._regulated(net, batch, chosen, const)
        weight = image + self.feedback_weight * feedback
        loss = semi_supervised(batch, labelled, strong, chosen, self.unlabelled_weight, weight)
        return loss._replace(measured={"image_weight": image[chosen.used], "feedback": feedback}, carry=left)

    def _regulated(
        self, net: Net, batch: Batch, chosen: Targets, const: Regulators
    ) -> tuple[Tensor, Tensor, Regulators]:
        """One step of both regulators: m [n], d, and what they are now; `net` only lends them its shape."""
        coarse, weights = leaves(const.coarse), leaves(const.fine.weights)
        logits = net.at(coarse, batch.unlabelled.strong).logits
        each, seen = soft_cross_entropy(logits, chosen.target), logits.detach().softmax(dim=1)

        def tried(image: Tensor, *, differentiable: bool = False) -> Weights:
            gradient = slopes(masked_mean(image * each, chosen.used), coarse, differentiable=differentiable)
            return descended(coarse, gradient, const.lr)

        def on_labels(at: Weights) -> Tensor:
            return mean(cross_entropy(net.at(at, batch.labelled.weak).logits, batch.labelled.labels))

        fine, image = const.fine, torch.ones_like(each)
        if self.regulator == "meta":  # w follows its effect on the labels through phi's step
            ahead = on_labels(tried(image_weights(weights, seen), differentiable=True))
            fine = adam_step(fine, slopes(ahead, weights), self.regulator_lr)
            image = image_weights(fine.weights, seen)
        after = leaves(tried(image))
        with torch.no_grad():
            feedback = on_labels(coarse) - on_labels(after)  # d > 0: the step on these pseudo-labels helped
        return image, feedback, const._replace(coarse=after, fine=fine)
