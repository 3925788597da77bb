"""Labels a model gives itself: what they are and which of them to trust."""

from typing import NamedTuple

from torch import Tensor

from semifed.models.network import Output


class PseudoLabels(NamedTuple):
    """Labels given to a batch of unlabelled images, for training and for the evaluator's diagnostics."""

    position: Tensor  # [n] into the client's unlabelled images
    label: Tensor  # [n]
    used: Tensor  # [n] bool


def confident_label(logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The most probable class of each sample, and whether its probability reaches the threshold."""
    confidence, label = logits.detach().softmax(dim=1).max(dim=1)
    return label, confidence >= threshold


def known_score(ova: Tensor, label: Tensor) -> Tensor:
    """φ^known of the given class for one-vs-all logits [n, 2, classes], [n]: SSB's score of being known."""
    return ova.softmax(dim=1)[:, 1].gather(1, label[:, None])[:, 0]


class Gates(NamedTuple):
    """What a detector with a classifier thinks of unlabelled images: OpenFL's gates and SSB's masks."""

    label: Tensor  # [n], the most probable class
    confident: Tensor  # [n] bool, its probability reaches tau_ID
    known: Tensor  # [n] bool, the detector's φ^known of it reaches eta_ID
    negative: Tensor  # [n, classes] bool, the detector is sure that the image is not of that class

    @property
    def dual(self) -> Tensor:
        """OpenFL's dual gate: confident and known."""
        return self.confident & self.known

    def at(self, position: Tensor) -> "Gates":
        """The gates of some of the images."""
        return Gates(*(part[position] for part in self))


def gates(output: Output, threshold: float, known_threshold: float, negative_threshold: float) -> Gates:
    """Gates of all images a network was asked about; it must have the head "ova"."""
    label, confident = confident_label(output.logits, threshold)
    phi = output.heads["ova"].detach().softmax(dim=1)
    known = known_score(output.heads["ova"].detach(), label) >= known_threshold
    return Gates(label, confident, known, phi[:, 0] >= negative_threshold)
