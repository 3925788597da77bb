"""What the delivered model is worth, and how good the clients' pseudo-labels were: the only opener of the seal."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from semifed.client_round import ClientRecord
from semifed.data.scenario import UNKNOWN, Scenario
from semifed.data.unseen import images_like
from semifed.methods import AnyMethod
from semifed.metrics import accuracy, aupr, auroc, fpr_at_tpr, overall_auroc, per_class_accuracy
from semifed.net import Net
from semifed.payloads import Prediction
from semifed.wire import Weights

BATCH = 512
SCORE_BINS = 40


class Evaluation(NamedTuple):
    """One test of the delivered model."""

    metrics: dict[str, float]
    per_class: list[dict[str, Any]]
    scores: dict[str, Any] | None  # histograms of the unknown score, where unknowns were tested


class Evaluator:
    """Tests a model on known images, on the unknown classes of the same data, and on foreign images."""

    def __init__(self, scenario: Scenario, classes: str, unseen: Sequence[str], seed: int, data: str | None) -> None:
        dataset = scenario.dataset
        self._scenario = scenario
        known = scenario.test_labels != UNKNOWN
        self._known = dataset.x_test[known]
        self._truth = scenario.test_labels[known]
        known_test = dataset._replace(x_test=self._known)  # patches are those of known classes
        self._foreign = {name: images_like(name, known_test, seed=seed, data=data) for name in unseen}
        self._seen_unknown = dataset.x_test[~known] if classes != "known" else dataset.x_test[:0]

    def test(self, method: AnyMethod, net: Net, weights: Weights, *, foreign: bool = True) -> Evaluation:
        """Load the weights and measure them; without foreign images where only a glance is wanted."""
        net.load(weights)
        known = self._predict(method, net, self._known)
        label = known.probabilities.argmax(dim=1)
        metrics = {"accuracy": accuracy(label, self._truth)}
        names = self._scenario.class_names()
        counts = torch.bincount(self._truth, minlength=len(names)).tolist()
        per_class = [
            {"class": name, "accuracy": share, "count": count}
            for name, share, count in zip(
                names, per_class_accuracy(label, self._truth, len(names)), counts, strict=True
            )
        ]
        unknown: dict[str, Tensor] = {}
        if len(self._seen_unknown):
            unknown["seen"] = self._predict(method, net, self._seen_unknown).unknown
            metrics["auroc_seen"] = auroc(known.unknown, unknown["seen"])
            metrics["fpr95_seen"] = fpr_at_tpr(known.unknown, unknown["seen"])
            metrics["aupr_seen"] = aupr(known.unknown, unknown["seen"])
        for name, images in self._foreign.items() if foreign else ():
            unknown[name] = self._predict(method, net, images).unknown
            metrics[f"auroc_unseen.{name}"] = auroc(known.unknown, unknown[name])
        if "auroc_seen" in metrics and foreign:
            unseen = [metrics[f"auroc_unseen.{name}"] for name in self._foreign]
            metrics["auroc_overall"] = overall_auroc(metrics["auroc_seen"], unseen)
        return Evaluation(metrics, per_class, _histograms(known.unknown, unknown) if unknown else None)

    def pseudo_label_quality(self, records: Sequence[ClientRecord]) -> dict[str, float | int | None]:
        """How many unlabelled images were seen and used this round, and how many of those labels are right."""
        labelled = [record.pseudo for record in records if record.pseudo is not None]
        if not labelled:
            return {}
        position = torch.cat([part.position for part in labelled])
        label = torch.cat([part.label for part in labelled])
        used = torch.cat([part.used for part in labelled])
        really = self._scenario.labels[position] == UNKNOWN  # SAGE's protocol lists labelled images here too
        position, label, used = position[really], label[really], used[really]
        truth = self._scenario.sealed.break_seal()[position]
        count = int(used.sum())
        return {
            "seen": len(position),
            "used": count,
            "accuracy": accuracy(label[used], truth[used]) if count else None,
            "used_unknown": int((used & (truth == UNKNOWN)).sum()),
        }

    def rejection_threshold(self, method: AnyMethod, net: Net, weights: Weights, accept: float) -> float | None:
        """The unknown score below which the given share of the server's labelled images lies; None without them."""
        server = self._scenario.server
        if server is None:
            return None
        net.load(weights)
        scores = self._predict(method, net, server.images[server.labelled]).unknown
        return float(np.quantile(scores.numpy().astype(np.float64), accept))

    @torch.no_grad()
    def _predict(self, method: AnyMethod, net: Net, images: Tensor) -> Prediction:
        parts = [method.predict(net, self._scenario.views.plain(part)) for part in images.split(BATCH)]
        return Prediction(*(torch.cat(values) for values in zip(*parts, strict=True)))


def _histograms(known: Tensor, unknown: dict[str, Tensor]) -> dict[str, Any]:
    everything = torch.cat([known, *unknown.values()]).numpy().astype(np.float64)
    edges = np.linspace(everything.min(), max(everything.max(), everything.min() + 1e-9), SCORE_BINS + 1)

    def counts(scores: Tensor) -> list[int]:
        return np.histogram(scores.numpy().astype(np.float64), edges)[0].tolist()  # type: ignore[no-any-return]

    return {
        "bins": edges.tolist(),
        "known": counts(known),
        "sets": {name: counts(scores) for name, scores in unknown.items()},
    }
