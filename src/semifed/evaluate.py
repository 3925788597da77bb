"""What the delivered model is worth, and how good the clients' pseudo-labels were: the only opener of the seal."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from semifed.client_round import ClientRecord
from semifed.data.client import outputs_of
from semifed.data.datasets import Dataset
from semifed.data.scenario import UNKNOWN, Scenario
from semifed.data.unseen import images_like
from semifed.discovery.gallery import Gallery
from semifed.errors import UserError
from semifed.methods import AnyMethod, finds_groups
from semifed.metrics import accuracy, aupr, auroc, fpr_at_tpr, oscr, overall_auroc, per_class_accuracy
from semifed.models.network import Output
from semifed.net import Net
from semifed.opinions import Labelled, compare_opinions, majority_classes
from semifed.payloads import Prediction
from semifed.predictions import BATCH, predictions
from semifed.prototypes import class_directions, class_sums
from semifed.wire import Weights

SCORE_BINS = 40
SHOWN_PER_CLASS = 60
SHOWN_UNKNOWN = 240
SHOWN_PER_GROUP = 16
SHOWN_ON_MAP = 1_000
DIGITS = 3


class Evaluation(NamedTuple):
    """One test of the delivered model."""

    metrics: dict[str, float]
    per_class: list[dict[str, Any]]
    known: Prediction
    unknown: Mapping[str, Prediction]  # "seen" for unknown classes of the same data, else by the name of the set
    discovery: dict[str, Any] | None = None  # groups among images of known and novel classes, where a method finds any

    @property
    def scores(self) -> dict[str, Any] | None:
        """Histograms of the unknown score and of the confidence, where unknowns were tested."""
        if not self.unknown:
            return None
        own = _histograms(self.known.unknown, {name: said.unknown for name, said in self.unknown.items()})
        sure = _histograms(_confidence(self.known), {name: _confidence(said) for name, said in self.unknown.items()})
        return {**own, "confidence": sure}

    def at_threshold(self, threshold: float | None) -> dict[str, Any]:
        """The share of known images it accepts and of unknown ones it rejects; None where there is nothing to say."""
        if threshold is None:
            return {"accepted_known": None, "rejected_unknown": None, "rejected_unseen": {}}
        rejected = {name: _share(said.unknown > threshold) for name, said in self.unknown.items()}
        seen = rejected.pop("seen", None)
        accepted = _share(self.known.unknown <= threshold)
        return {"accepted_known": accepted, "rejected_unknown": seen, "rejected_unseen": rejected}


def _refuse_as_unseen(name: str, dataset: Dataset) -> None:
    """The images of the run itself hold its known classes, and `seen` is what metrics call its unknown ones."""
    if name in ("seen", dataset.name, dataset.source):
        is_ = "what metrics call the run's own unknown classes" if name == "seen" else "the data set of the run"
        raise UserError(f"evaluate.unseen: '{name}' is {is_}; give a set of other classes, or another name")


class Evaluator:
    """Tests a model on known images, on the unknown classes of the same data, and on foreign images."""

    def __init__(
        self,
        scenario: Scenario,
        unseen: Sequence[str],
        seed: int,
        data: str | None,
        *,
        discover: str = "test",
        discover_images: int = 5_000,
    ) -> None:
        dataset = scenario.dataset
        self._scenario = scenario
        self._seed = seed
        if discover == "test":
            images, raw = dataset.x_test, dataset.y_test
        elif not scenario.holdings:
            raise UserError('evaluate.discover: the server of a federation sees no images of its clients; write "test"')
        else:
            held = torch.from_numpy(np.concatenate([own.unlabelled for own in scenario.holdings]))
            images, raw = dataset.x_train[held], dataset.y_train[held]
        chosen = _spread(torch.arange(len(images)), discover_images)
        self.grouped, self._grouped_classes = images[chosen], scenario.every_class(raw[chosen])
        none = np.empty(0, np.int64)  # a deployed server sees nobody's images
        taught = torch.from_numpy(np.concatenate([none, *(own.labelled for own in scenario.holdings)]))
        self._taught = _spread(taught, discover_images)
        known = scenario.test_labels != UNKNOWN
        if not bool(known.any()):
            raise UserError(
                f"dataset: {dataset.name} has no test images of known classes, so nothing could be measured"
            )
        self._known = dataset.x_test[known]
        self._truth = scenario.test_labels[known]
        for name in unseen:
            _refuse_as_unseen(name, dataset)
        known_test = dataset._replace(x_test=self._known)  # patches are those of known classes
        self._foreign = {name: images_like(name, known_test, seed=seed, data=data) for name in unseen}
        self._seen_unknown = dataset.x_test[~known]  # tested even where the clients hold none

    def test(
        self,
        method: AnyMethod,
        net: Net,
        weights: Weights,
        *,
        foreign: bool = True,
        elsewhere: Callable[[Weights, Tensor], Prediction | None] = lambda *_: None,
    ) -> Evaluation:
        """Load the weights and measure them; only accuracy and AUROC of seen unknowns where a glance is wanted.

        Other processes may be asked for the predictions: those of `elsewhere` are the same.
        """
        net.load(weights)

        def said_of(images: Tensor) -> Prediction:
            said = elsewhere(weights, images)
            return predictions(method, net, images, self._scenario.views.plain) if said is None else said

        known = said_of(self._known)
        if not bool(known.logits.isfinite().all()):
            raise UserError(
                "the model's predictions are no numbers: what clients delivered, or the rate, is too large; the round "
                "before is kept, and defence.steps bounds what a client can do"
            )
        label = known.logits.argmax(dim=1)
        unseen = self._foreign if foreign else {}
        images = {"seen": self._seen_unknown, **unseen} if len(self._seen_unknown) else unseen
        unknown = {name: said_of(some) for name, some in images.items()}
        metrics = {"accuracy": accuracy(label, self._truth)}
        if foreign:
            metrics |= _open_set_metrics(known, label == self._truth, unknown)
        elif "seen" in unknown:
            metrics["auroc_seen"] = auroc(known.unknown, unknown["seen"].unknown)
        groups = None
        if foreign and finds_groups(type(method)):
            groups = self._discovered(method, net)
            metrics |= groups.pop("metrics")
        return Evaluation(metrics, self._per_class(label), known, unknown, groups)

    def pseudo_labels(self, records: Sequence[ClientRecord]) -> dict[str, Any]:
        """How many unlabelled images were seen and used this round, and how good that choice and those labels are.

        `pseudo` counts over all clients, `gate` tells known images from unknown ones, `per_client` has an entry for
        each record, `opinions` compares the model in training with the received one where a method has asked them.
        Without any pseudo-label there is nothing but an empty `pseudo`.
        """
        if all(record.pseudo is None for record in records):
            return {"pseudo": {}}
        given = [self._labelled(record) for record in records]
        each = [_judged(one) for one in given]
        opinions = compare_opinions([one for one in given if one is not None])
        judged = _Judged(*(torch.cat(parts) for parts in zip(*each, strict=True)))
        known, used, count = judged.known, judged.used, int(judged.used.sum())
        return {
            "pseudo": {
                "seen": len(used),
                "used": count,
                "accuracy": _share(judged.correct[used]),
                "used_unknown": int((used & ~known).sum()),
            },
            "gate": {
                "pass_known": _share(used[known]),
                "pass_unknown": _share(used[~known]),
                "purity": _share(known[used]),
            },
            "per_client": {
                "client": [record.client for record in records],
                "correct": [int((one.used & one.correct).sum()) for one in each],
                "used": [int(one.used.sum()) for one in each],
                "seen": [len(one.used) for one in each],
            },
            **({"opinions": opinions} if opinions else {}),
        }

    @torch.no_grad()
    def said_of_one(self, net: Net) -> Output:
        """What a network says of one test image, for the shapes."""
        return self._outputs(net, self._known[:1])

    @torch.no_grad()
    def feature_map(self, net: Net, weights: Weights, pivots: Tensor | None) -> dict[str, Any]:
        """A few test images and the pivots (class means where the method has none) on two principal axes."""
        net.load(weights)
        classes = len(self._scenario.known)
        members = [(self._truth == label).nonzero()[:, 0] for label in range(classes)]
        shown = torch.cat([_spread(member, SHOWN_PER_CLASS) for member in members])
        strangers = _spread(torch.arange(len(self._seen_unknown)), SHOWN_UNKNOWN)
        images = torch.cat([self._known[shown], self._seen_unknown[strangers]])
        outputs = [net(self._scenario.views.plain(part)) for part in images.split(BATCH)]
        projected = "projection" in outputs[0].heads
        labels = self._truth[shown]
        if projected:  # directions are what alignment and pivots are made of
            vectors = F.normalize(torch.cat([output.heads["projection"] for output in outputs]), dim=1)
            means = class_directions(vectors[: len(shown)], labels, classes)
            own = pivots is not None and pivots.shape == means.shape
            centres = F.normalize(pivots if pivots is not None and own else means, dim=1)
        else:
            vectors, own = torch.cat([output.features for output in outputs]), False
            counts = torch.bincount(labels, minlength=classes)[:, None]
            centres = class_sums(vectors[: len(shown)], labels, classes) / counts
        axes, middle, explained = principal_axes(vectors)
        return {
            "space": "projection" if projected else "features",
            "names": self._scenario.class_names(),
            "points": _rounded((vectors.double() - middle) @ axes),
            "class": [*labels.tolist(), *[UNKNOWN] * len(strangers)],
            "pivots": _rounded((centres.double() - middle) @ axes),
            "pivots_are": "pivots of the method" if own else "class means of the images shown",
            "explained": [round(share, DIGITS) for share in explained],
        }

    @torch.no_grad()
    def _discovered(self, method: AnyMethod, net: Net) -> dict[str, Any]:
        """What the method finds among images of known and novel classes, and what it is worth."""
        from semifed.discovery.evaluation import confidence_histograms, described_groups, discovery_metrics

        beside, labels = self._held_back(net)
        gallery = Gallery(self._outputs(net, self.grouped), beside, labels, self._seed + 1)
        member = method.clusters(gallery)
        names = self._scenario.every_name()
        taught = self._scenario.dataset.x_train[self._taught]
        return {
            "metrics": discovery_metrics(member, gallery, self._grouped_classes),
            "classes": names,
            "known": len(self._scenario.known),
            "groups": described_groups(member, self._grouped_classes, names, gallery.images.features, SHOWN_PER_GROUP),
            "confidence": confidence_histograms(gallery, self._grouped_classes, self._outputs(net, taught), SCORE_BINS),
            "map": self._group_map(member, gallery.images.features),
        }

    @torch.no_grad()
    def labelled(self, net: Net, weights: Weights) -> Weights:
        """What the delivered model needs to know of the labelled images nobody trained on, to group others beside."""
        net.load(weights)
        said, labels = self._held_back(net)
        return {"features": said.features, "labels": labels}

    def _held_back(self, net: Net) -> tuple[Output, Tensor]:
        held = self._scenario.validation
        if held is None:
            return self._outputs(net, self.grouped[:0]), torch.empty(0, dtype=torch.int64)
        return self._outputs(net, held.images[held.labelled]), held.labels

    def _group_map(self, member: Tensor, features: Tensor) -> dict[str, Any]:
        shown = _spread(torch.arange(len(member)), SHOWN_ON_MAP)
        vectors = F.normalize(features[shown], dim=1)
        axes, middle, explained = principal_axes(vectors)
        return {
            "points": _rounded((vectors.double() - middle) @ axes),
            "group": _rank_by_size(member)[shown].tolist(),  # as the groups are listed
            "class": self._grouped_classes[shown].tolist(),
            "explained": [round(share, DIGITS) for share in explained],
        }

    def _outputs(self, net: Net, images: Tensor) -> Output:
        return outputs_of(net, images, torch.arange(len(images)), self._scenario.views.plain, BATCH)

    def _per_class(self, label: Tensor) -> list[dict[str, Any]]:
        names = self._scenario.class_names()
        counts = torch.bincount(self._truth, minlength=len(names)).tolist()
        shares = per_class_accuracy(label, self._truth, len(names))
        return [
            {"class": name, "accuracy": share, "count": count}
            for name, share, count in zip(names, shares, counts, strict=True)
        ]

    def _labelled(self, record: ClientRecord) -> Labelled | None:
        if record.pseudo is None:
            return None
        scenario = self._scenario
        # SAGE's protocol lists labelled images among the unlabelled: their labels are no pseudo-labels.
        pseudo = record.pseudo.at((scenario.labels[record.pseudo.position] == UNKNOWN).nonzero()[:, 0])
        own = scenario.labels[scenario.holdings[record.client].labelled]
        majority = None if pseudo.received is None else majority_classes(own, len(scenario.known))
        return Labelled(pseudo, scenario.sealed.break_seal()[pseudo.position], majority)


class _Judged(NamedTuple):
    """Unlabelled images a client gave labels to, beside the truth; all bool [n]."""

    used: Tensor
    known: Tensor
    correct: Tensor


def _judged(given: Labelled | None) -> _Judged:
    if given is None:
        nothing = torch.zeros(0, dtype=torch.bool)
        return _Judged(nothing, nothing, nothing)
    return _Judged(given.pseudo.used, given.truth != UNKNOWN, given.pseudo.label == given.truth)


def principal_axes(vectors: Tensor) -> tuple[Tensor, Tensor, list[float]]:
    """The two directions [d, 2] of largest variance, the mean [d], and the share of variance along each.

    The largest entry of a direction is positive: which way it points is otherwise an accident.
    """
    middle = vectors.double().mean(dim=0)
    _, lengths, directions = torch.linalg.svd(vectors.double() - middle, full_matrices=False)
    axes = F.pad(directions[:2], (0, 0, 0, 2 - len(directions[:2]))).T
    largest = axes.gather(0, axes.abs().argmax(dim=0, keepdim=True))
    variance = lengths.square()
    explained = (variance[:2] / variance.sum().clamp_min(1e-300)).tolist()
    return axes * torch.where(largest < 0, -1.0, 1.0), middle, explained


def _open_set_metrics(known: Prediction, correct: Tensor, unknown: Mapping[str, Prediction]) -> dict[str, float]:
    """The method's own score in full, beside it the AUROC of scores that every classifier has."""
    metrics: dict[str, float] = {}
    ours = _unknown_scores(known)
    theirs = {name: _unknown_scores(said) for name, said in unknown.items()}
    for prefix, score in ours.items():
        found = {name: auroc(score, scores[prefix]) for name, scores in theirs.items()}
        seen = found.pop("seen", None)
        if seen is not None:
            metrics[f"{prefix}auroc_seen"] = seen
        if seen is not None and not prefix:
            metrics["fpr95_seen"] = fpr_at_tpr(score, theirs["seen"][prefix])
            metrics["aupr_seen"] = aupr(score, theirs["seen"][prefix])
            metrics["oscr_seen"] = oscr(score, correct, theirs["seen"][prefix])
        if not prefix:
            metrics |= {f"auroc_unseen.{name}": value for name, value in found.items()}
        if seen is not None:
            metrics[f"{prefix}auroc_overall"] = overall_auroc(seen, list(found.values()))
    return metrics


def _unknown_scores(said: Prediction) -> dict[str, Tensor]:
    """By the prefix of their metrics; all grow with unknown-ness."""
    return {
        "": said.unknown,
        "msp.": 1 - _confidence(said),  # Hendrycks and Gimpel 2017
        "energy.": -said.logits.logsumexp(dim=1),  # Liu et al. 2020, temperature 1
    }


def _confidence(said: Prediction) -> Tensor:
    return said.probabilities.max(dim=1).values


def _histograms(known: Tensor, unknown: Mapping[str, Tensor]) -> dict[str, Any]:
    everything = torch.cat([known, *unknown.values()]).numpy().astype(np.float64)
    edges = np.linspace(everything.min(), max(everything.max(), everything.min() + 1e-9), SCORE_BINS + 1)

    def counts(scores: Tensor) -> list[int]:
        return np.histogram(scores.numpy().astype(np.float64), edges)[0].tolist()  # type: ignore[no-any-return]

    return {
        "bins": edges.tolist(),
        "known": counts(known),
        "sets": {name: counts(scores) for name, scores in unknown.items()},
    }


def _share(flags: Tensor) -> float | None:
    return float(flags.double().mean()) if len(flags) else None


def _spread(positions: Tensor, most: int) -> Tensor:
    """At most so many of them, evenly from first to last: test images often lie sorted by class."""
    count = min(len(positions), most)
    return positions[torch.arange(count) * len(positions) // max(count, 1)]


def _rank_by_size(member: Tensor) -> Tensor:
    """Groups numbered from the largest, in the order of `described_groups`; -1 stays."""
    names, sizes = member[member >= 0].unique(return_counts=True)
    rank = torch.full((int(member.max()) + 2,), -1)
    rank[names[sizes.argsort(descending=True, stable=True)]] = torch.arange(len(names))
    return rank[member]


def _rounded(points: Tensor) -> list[list[float]]:
    return np.round(points.numpy(), DIGITS).tolist()  # type: ignore[no-any-return]
