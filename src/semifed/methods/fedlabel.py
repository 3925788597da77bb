"""FedLabel: the surer of two models, the client's own and the received one, labels an image.

Cho, Joshi, Dimitriadis, Local or Global: Selective Knowledge Assimilation for Federated Learning with Limited Labels,
ICCV 2023 (arXiv 2307.08809).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from pydantic import PositiveInt

from semifed.aggregate import shares, sum_of_changes, weighted_mean
from semifed.data.client import Batch, ClientData
from semifed.fit import Course, Fitted, Loss
from semifed.losses import kl_divergence, masked_mean
from semifed.method import Method, NonNegative, Share
from semifed.net import FrozenNet, Net
from semifed.objectives import plus, semi_supervised, supervised
from semifed.payloads import Down, Local, Nothing, Server, Up, Visit
from semifed.pseudo import Certainty, surer_opinion
from semifed.targets import Targets, asked, sage_targets


class Judges(NamedTuple):
    """The models that may label."""

    received: FrozenNet  # w
    local: FrozenNet | None  # w_L; None asks the model in training


@dataclass(frozen=True, kw_only=True)
class FedLabel(Method[Server, Down, Up, Judges]):
    """One model learns the labels; with the received one it teaches a second, and both changes are sent."""

    title: ClassVar[str] = "the surer of the local and the received model labels, the other one is listened to"

    threshold: Share = 0.4  # beta
    agreement_weight: NonNegative = 1.0  # lambda_0
    certainty: Certainty = "variance"  # h
    mode: Literal["two_stage", "online"] = "two_stage"  # online: one loop, the model in training is the local one
    label_steps: Literal["same"] | PositiveInt = "same"  # tau of eq. (1) with two stages; as many as the second
    sage: bool = False  # SAGE's targets in place of eqs. (3) and (4)
    sage_threshold: Share = 0.95  # tau with it

    def prepare(
        self, net: Net, down: Down, data: ClientData, kept: Nothing | None, visit: Visit
    ) -> Local[Judges, Nothing]:
        return Local(data, Judges(net.frozen(), None), Nothing())

    def train(self, net: Net, local: Local[Judges, Nothing], course: Course) -> Fitted:
        data, judges = local.data, local.const
        if self.mode == "online":
            return course.follow(net, data, self.loss, judges)
        start = net.state()
        steps = None if self.label_steps == "same" else self.label_steps
        # An epoch is one over the unlabelled images here too, though nobody looks at them: the stages are equally long.
        first = course.follow(
            net, data, lambda net, batch, _: supervised(net, batch), None, stage="labels", steps=steps
        )  # eq. (1)
        learnt = net.state()
        judges = judges._replace(local=net.frozen())
        net.load(start)
        unlabelled = data._replace(labelled=data.labelled[:0], labels=data.labels[:0])
        second = course.follow(net, unlabelled, self.loss, judges)  # eq. (9)
        ends = [learnt, net.state()]
        # Two changes of a variance may sum up to a negative one: batch-norm statistics are the mean over all steps.
        statistics = weighted_mean(ends, shares([first.steps_taken, second.steps_taken]))
        net.load(statistics | sum_of_changes({name: start[name] for name in net.learners()}, ends))
        return first.then(second)

    def loss(self, net: Net, batch: Batch, const: Judges) -> Loss:
        labelled, weak, strong = net.joint(batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong)
        own = weak if const.local is None else const.local(batch.unlabelled.weak)
        threshold = self.sage_threshold if self.sage else self.threshold
        local, received = asked(own, threshold), asked(const.received(batch.unlabelled.weak), threshold)
        surer, other, ratio = surer_opinion(local, received, self.certainty)  # eqs. (3) and (7)
        chosen = Targets(surer.label, surer.sure, local, received)  # eq. (4)
        if self.sage:
            chosen = sage_targets(local, received)
        loss = semi_supervised(batch, labelled, strong, chosen, 1.0)  # eq. (5)
        agreement = masked_mean(ratio * kl_divergence(other.probabilities, weak.logits), chosen.used)
        return plus(loss, "agreement", self.agreement_weight, agreement)  # eqs. (6) and (8)

    def report(self, net: Net, local: Local[Judges, Nothing], fitted: Fitted) -> Up:
        return Up(net.trained(), fitted.learnt(local.data))  # r_k
