"""Labels a model gives itself: what they are and which of them to trust."""

from typing import NamedTuple

import torch
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


def adaptive_label(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(FL)²'s labels of all images of a client, whether each is kept, and the client's mean confidence τ_g.

    An image is kept if its probability reaches τ_g · p̃_k / max p̃ of its class k, with p̃ the mean prediction:
    classes the model seldom names have a lower threshold. Without images τ_g is 0.
    """
    probabilities = logits.detach().double().softmax(dim=1)
    confidence, label = probabilities.max(dim=1)
    level = confidence.sum() / max(len(confidence), 1)
    named = probabilities.sum(dim=0)
    return label, confidence >= (level * named / named.max())[label], level.float()


def known_score(ova: Tensor, label: Tensor) -> Tensor:
    """φ^known of the given class for one-vs-all logits [n, 2, classes], [n]: SSB's score of being known."""
    return ova.softmax(dim=1)[:, 1].gather(1, label[:, None])[:, 0]


def open_label(logits: Tensor, threshold: float, unknown_threshold: Tensor) -> tuple[Tensor, Tensor]:
    """SCOMatch's open stream: the most probable of K + 1 classes, the last of them "unknown", and whether to use it.

    Its probability must reach the threshold of its kind.
    """
    confidence, label = logits.detach().softmax(dim=1).max(dim=1)
    unknown = label == logits.shape[1] - 1
    return label, torch.where(unknown, confidence >= unknown_threshold, confidence >= threshold)


def closed_label(logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """SCOMatch's close stream: the most probable of the first K classes of K + 1, and whether to use it.

    Its probability among the K must reach the threshold, and "unknown" may not be the most probable of all.
    """
    label, sure = confident_label(logits[:, :-1], threshold)
    return label, sure & (logits.detach().argmax(dim=1) < logits.shape[1] - 1)


def known_confidence(logits: Tensor) -> Tensor:
    """The largest probability of a known class among K + 1, [n]: SCOMatch queues the images where it is smallest."""
    return logits.detach().softmax(dim=1)[:, :-1].max(dim=1).values


def sure_counts(logits: Tensor, threshold: float) -> Tensor:
    """How many images of a batch are surely known, and how many surely unknown, by the softmax over K + 1, [2]."""
    confidence, label = logits.detach().softmax(dim=1).max(dim=1)
    unknown = label[confidence > threshold] == logits.shape[1] - 1
    return torch.stack([(~unknown).sum(), unknown.sum()])


def ratio_threshold(sure: Tensor, threshold: float, least: float, most: float) -> Tensor:
    """SCOMatch's τ_ood from the counts of surely known and surely unknown images: τ · unknown / known within bounds.

    It is `most` where nothing is surely known.
    """
    known, unknown = sure.tolist()
    return torch.tensor(min(max(threshold * unknown / known, least), most) if known else most)


def surely_of_class(ova: Tensor, threshold: float) -> Tensor:
    """The classes whose one-vs-all detector is sure that the image is of them, [n, classes] bool."""
    return ova.detach().softmax(dim=1)[:, 1] >= threshold


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
