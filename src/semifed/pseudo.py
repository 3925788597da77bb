"""Labels a model gives itself: what they are and which of them to trust."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from semifed.losses import entropy
from semifed.models.network import Output
from semifed.targets import Opinion, opinion
from semifed.wire import from_arrays, to_arrays


class PseudoLabels(NamedTuple):
    """Labels given to a batch of unlabelled images, for training and for the evaluator's diagnostics."""

    position: Tensor  # [n] into the client's unlabelled images
    label: Tensor  # [n]
    used: Tensor  # [n] bool
    local: Opinion | None = None  # of the model in training; the last three for diagnostics only
    received: Opinion | None = None  # of the received model
    mixing: Tensor | None = None  # [n], the local model's say where it is sure

    def at(self, which: Tensor) -> "PseudoLabels":
        """Those of some of the images, by index or mask."""
        return from_arrays(PseudoLabels, {name: array[which] for name, array in to_arrays(self).items()})


def confident_label(logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The most probable class of each sample, and whether its probability reaches the threshold."""
    confidence, label = logits.detach().softmax(dim=1).max(dim=1)
    return label, confidence >= threshold


def sharpened(logits: Tensor, temperature: float) -> Tensor:
    """p^(1/T) scaled to sum to 1, [n, classes] (MixMatch, RSCFed); it carries no gradient."""
    return (logits.detach().log_softmax(dim=1) / temperature).softmax(dim=1)


def adaptive_label(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(FL)²'s labels of all images of a client, whether each is kept, and the client's mean confidence τ_g.

    An image is kept if its probability reaches τ_g · p̃_k / max p̃ of its class k, with p̃ the mean prediction:
    classes the model seldom names have a lower threshold. Without images τ_g is 0.
    """
    probabilities = logits.detach().double().softmax(dim=1)
    confidence, label = probabilities.max(dim=1)
    level = confidence.sum() / max(len(confidence), 1)
    named = probabilities.sum(dim=0)
    needed = level * (named / named.max())[label]
    return label, confidence >= needed * (1 - 1e-12), level.float()  # rounding may not turn away the most confident one


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


Curve = Literal["convex", "linear", "concave"]  # from how well a class is learnt to its share of the threshold


def learning_effect(selected: Tensor, classes: int, *, warm_up: bool) -> Tensor:
    """FlexMatch's β, [classes]: how many images have a class as last sure label, relative to the commonest class.

    `selected` holds that label of every image, −1 where there is none yet. With `warm_up` the images without one are
    a class too, so no β is large before many images have a label. All are 0 while none has.
    """
    counts = torch.bincount(selected + 1, minlength=classes + 1)
    commonest = (counts if warm_up else counts[1:]).max()
    return counts[1:] / commonest.clamp(min=1)


def flexible_threshold(effect: Tensor, threshold: float, mapping: Curve) -> Tensor:
    """FlexMatch's threshold of each class, τ M(β), [classes]; 0 for a class not learnt yet, τ for the best learnt."""
    share = {"convex": effect / (2 - effect), "linear": effect, "concave": torch.log2(1 + effect)}[mapping]
    return threshold * share


def selected_after(selected: Tensor, position: Tensor, local: Opinion) -> Tensor:
    """The last sure labels of all images after a batch, from its opinion at the full threshold of all classes."""
    after = selected.clone()
    after[position[local.sure]] = local.label[local.sure]
    return after


def ever_used(given: Sequence[PseudoLabels]) -> Tensor:
    """Positions of the images whose label was used in any of the steps."""
    used = [part.position[part.used] for part in given]
    return torch.unique(torch.cat(used)) if used else torch.empty(0, dtype=torch.int64)


def low_entropy_opinion(probabilities: Tensor, threshold: float) -> Opinion:
    """An opinion of probabilities [n, classes] that is sure where their entropy is below a threshold (FedLoKe)."""
    return opinion(probabilities, 0.0)._replace(sure=entropy(probabilities.detach()) < threshold)


Certainty = Literal["variance", "confidence"]


class Preference(NamedTuple):
    """FedLabel's choice between two opinions on a batch."""

    surer: Opinion  # s*
    other: Opinion  # s^-*, the discarded one
    ratio: Tensor  # [n], how sure the other one is compared with the surer; 0 where they name different classes


def surer_opinion(local: Opinion, received: Opinion, certainty: Certainty = "variance") -> Preference:
    """For each image the opinion of the greater h: variance of its probabilities over classes, or the largest of them.

    Two opinions that prefer nothing (h = 0) are as sure as each other.
    """
    ours, theirs = (
        _variance(each.probabilities) if certainty == "variance" else each.confidence for each in (local, received)
    )
    first = ours >= theirs
    low, high = torch.minimum(ours, theirs), torch.maximum(ours, theirs)
    ratio = torch.where(high > 0, low / high, 1.0) * (local.label == received.label)
    return Preference(_picked(first, local, received), _picked(~first, local, received), ratio)


def _variance(rows: Tensor) -> Tensor:
    """Of each row; unlike torch's it has no complaint about a batch without rows."""
    return (rows - rows.mean(dim=1, keepdim=True)).square().mean(dim=1)


def _picked(first: Tensor, one: Opinion, other: Opinion) -> Opinion:
    """Image by image, the first opinion where told so, else the second."""
    return Opinion(
        *(torch.where(first if a.ndim == 1 else first[:, None], a, b) for a, b in zip(one, other, strict=True))
    )
