"""Labels a model gives itself: what they are and which of them to trust."""

from typing import NamedTuple

from torch import Tensor


class PseudoLabels(NamedTuple):
    """Labels given to a batch of unlabelled images, for training and for the evaluator's diagnostics."""

    position: Tensor  # [n] into the client's unlabelled images
    label: Tensor  # [n]
    used: Tensor  # [n] bool


def confident_label(logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The most probable class of each sample, and whether its probability reaches the threshold."""
    confidence, label = logits.detach().softmax(dim=1).max(dim=1)
    return label, confidence >= threshold
