"""FedAvg + FlexMatch: FixMatch with local labels, whose threshold is lower for classes learnt less well.

Zhang et al., FlexMatch, NeurIPS 2021 (arXiv 2110.08263); as a federated baseline in SAGE, CVPR 2025 (arXiv 2503.13227).
How well a class is learnt is counted by each client on its own images, over all rounds it takes part in.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from semifed.data.client import Batch, ClientData
from semifed.fit import Loss
from semifed.method import Method, NonNegative, Share
from semifed.net import FrozenNet, Net
from semifed.objectives import semi_supervised
from semifed.payloads import Down, Local, Server, Up, Visit
from semifed.pseudo import Curve, flexible_threshold, learning_effect, selected_after
from semifed.targets import asked, local_or_sage_targets


class Selected(NamedTuple):
    """What a client remembers of its unlabelled images."""

    label: Tensor  # [unlabelled], the last label each got with full confidence, −1 before the first
    checksum: Tensor  # of these images


class Const(NamedTuple):
    """The memory as the step before left it, and the received model where it is asked too."""

    selected: Selected
    received: FrozenNet | None


@dataclass(frozen=True, kw_only=True)
class FlexMatch(Method[Server, Down, Up, Const, Selected]):
    """Curriculum pseudo-labels: a class few images were surely given to is accepted with less confidence."""

    title: ClassVar[str] = "FixMatch at the clients with a threshold for each class, lower for classes learnt less well"

    threshold: Share = 0.95  # tau
    unlabelled_weight: NonNegative = 1.0  # lambda
    warm_up: bool = True  # images without a sure label count as a class when beta is scaled
    mapping: Curve = "convex"  # M
    least_effect: Share = 0.0  # lower limit of beta; 1 is FixMatch with local labels
    reset: bool = False  # each round starts with an empty memory
    sage: bool = False  # SAGE's targets of the local and the received model, both judged by the thresholds of classes

    def prepare(
        self, net: Net, down: Down, data: ClientData, kept: Selected | None, visit: Visit
    ) -> Local[Const, Selected]:
        checksum = torch.tensor(data.checksum())
        if kept is None or self.reset or not torch.equal(kept.checksum, checksum):  # other images than last time
            kept = Selected(torch.full((len(data.unlabelled),), -1), checksum)
        return Local(data, Const(kept, net.frozen() if self.sage else None), kept)

    def loss(self, net: Net, batch: Batch, const: Const) -> Loss:
        labelled, weak, strong = net.joint(batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong)
        selected = const.selected.label
        effect = learning_effect(selected, weak.logits.shape[1], warm_up=self.warm_up).clamp(min=self.least_effect)
        needed = flexible_threshold(effect, self.threshold, self.mapping)
        chosen = local_or_sage_targets(weak, const.received, batch.unlabelled.weak, needed)
        loss = semi_supervised(batch, labelled, strong, chosen, self.unlabelled_weight)
        # This batch was judged by what was known before it.
        after = selected_after(selected, batch.unlabelled.position, asked(weak, self.threshold))
        return loss._replace(carry=const._replace(selected=const.selected._replace(label=after)))

    def keep(self, net: Net, local: Local[Const, Selected], const: Const) -> Selected:
        return const.selected
