"""What unlabelled images are trained towards, from two opinions: of the model in training and of the received one.

One function carries SAGE, its ablations and ProxyFL's unlabelled loss; FixMatch with local or with global labels is
its limit where one opinion counts:

    target = λ δ_local + (1 − λ) δ_received where the local model is sure, else δ_received;
    used   = one, the other or either of them is sure.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from semifed.models.network import Output

KAPPA = 13.862943611198906  # SAGE's κ*: a gap in confidence of 0.05 halves the local model's say
LEAST = 1e-6  # SAGE keeps ΔC and λ above it

Trust = Literal["local", "received", "either"]


class Opinion(NamedTuple):
    """What one model thinks of a batch; nothing in it carries a gradient."""

    probabilities: Tensor  # [n, classes]
    label: Tensor  # [n]
    confidence: Tensor  # [n], the probability of that label
    sure: Tensor  # [n] bool

    def chosen(self, soft: bool) -> Tensor:
        """The label as a target [n, classes]: one-hot, or the probabilities as they are."""
        return self.probabilities if soft else F.one_hot(self.label, self.probabilities.shape[1]).float()


class Targets(NamedTuple):
    """What a batch of unlabelled images is trained towards."""

    target: Tensor  # [n] labels or [n, classes] shares
    used: Tensor  # [n] bool
    local: Opinion | None = None  # the last three for diagnostics
    received: Opinion | None = None
    mixing: Tensor | None = None  # λ [n]

    @property
    def label(self) -> Tensor:
        """The class the target favours, [n]."""
        return self.target if self.target.ndim == 1 else self.target.argmax(dim=1)


def opinion(probabilities: Tensor, threshold: float | Tensor) -> Opinion:
    """Labels of a batch from probabilities [n, classes]; sure where the label's probability reaches the threshold.

    A threshold may be one number for all classes or one for each.
    """
    probabilities = probabilities.detach()
    confidence, label = probabilities.max(dim=1)
    limit = threshold[label] if isinstance(threshold, Tensor) else threshold
    return Opinion(probabilities, label, confidence, confidence >= limit)


def asked(output: Output, threshold: float | Tensor) -> Opinion:
    """The opinion a network's output holds."""
    return opinion(output.logits.softmax(dim=1), threshold)


def confidence_gap(local: Opinion, received: Opinion) -> Tensor:
    """SAGE's ΔC = |c_local − c_received|, kept within [1e-6, 1], [n] (eq. 2)."""
    return ((local.confidence - received.confidence).abs() + LEAST).clamp(LEAST, 1)


def gap_mixing(gap: Tensor, kappa: float) -> Tensor:
    """SAGE's λ = exp(−κ ΔC), kept within [1e-6, 1], [n] (eq. 3)."""
    return torch.exp(-kappa * gap).clamp(LEAST, 1)


def targets(local: Opinion, received: Opinion, *, trust: Trust, mixing: float | Tensor, soft: bool = False) -> Targets:
    """Targets of a batch from both opinions: λ = 1 is the local model's say, λ = 0 the received one's."""
    share = torch.as_tensor(mixing).to(local.confidence).expand(len(local.label))
    mixed = share[:, None] * local.chosen(soft) + (1 - share[:, None]) * received.chosen(soft)
    target = torch.where(local.sure[:, None], mixed, received.chosen(soft))
    used = {"local": local.sure, "received": received.sure, "either": local.sure | received.sure}[trust]
    return Targets(target, used, local, received, share)


def sage_targets(local: Opinion, received: Opinion, *, soft: bool = False) -> Targets:
    """SAGE's targets: either model may be sure, and the gap of their confidence decides whose counts (eqs. 1-6)."""
    share = gap_mixing(confidence_gap(local, received), KAPPA)
    return targets(local, received, trust="either", mixing=share, soft=soft)


def local_or_sage_targets(
    weak: Output, teacher: Callable[[Tensor], Output] | None, images: Tensor, threshold: float | Tensor
) -> Targets:
    """FixMatch's targets by the local model's output; with a teacher, asked on the same images, SAGE's of both."""
    local = asked(weak, threshold)
    if teacher is None:
        return Targets(local.chosen(soft=False), local.sure, local=local)
    return sage_targets(local, asked(teacher(images), threshold))
