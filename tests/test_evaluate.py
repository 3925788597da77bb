"""The evaluator against predictions that are known beforehand, counted again by hand."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax, logsumexp
from torch import Tensor

from semifed.assembly import build_workplace
from semifed.client_round import ClientRecord, Reply
from semifed.data.datasets import Dataset
from semifed.data.scenario import Scenario
from semifed.engines.local import LocalEngine
from semifed.errors import ClientFailure, UserError
from semifed.evaluate import Evaluation, Evaluator, principal_axes
from semifed.method import Method
from semifed.net import Net
from semifed.payloads import Prediction
from semifed.pseudo import PseudoLabels
from semifed.run import execute
from semifed.rundir import RunDirectory
from toys import Quiet, toy_dataset, toy_parts, toy_recipe


@dataclass(frozen=True, kw_only=True)
class ReadsPixels(Method):
    """Says what is written in the first two pixels: the class, and how unknown the image is."""

    def predict(self, net: Net, images: Tensor) -> Prediction:
        raw = ((images * 0.25 + 0.5) * 255).round()
        label = raw[:, 0, 0, 0].long()
        return Prediction(torch.nn.functional.one_hot(label.clamp(max=2), 3).float(), raw[:, 0, 0, 1])


def written(images: Tensor, labels: Tensor, scores: Tensor) -> Tensor:
    images = images.clone()
    images[:, 0, 0, 0], images[:, 0, 0, 1] = labels.to(torch.uint8), scores.to(torch.uint8)
    return images


def dataset_with(labels: Tensor, scores: Tensor) -> Dataset:
    dataset = toy_dataset(per_class=60)
    return dataset._replace(x_test=written(dataset.x_test, labels, scores))


def random_answers(seed: int) -> tuple[Dataset, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    generator = torch.Generator().manual_seed(seed)
    count = len(toy_dataset(per_class=60).y_test)
    labels = torch.randint(0, 3, (count,), generator=generator)
    scores = torch.randint(0, 12, (count,), generator=generator)
    return dataset_with(labels, scores), labels.numpy(), scores.numpy()


def evaluation_of(dataset: Dataset, classes: str = "open", unseen: tuple[str, ...] = ()) -> Evaluation:
    recipe = toy_recipe("fixmatch-lpl", "server", {"scenario": {"classes": classes}})
    parts = toy_parts(recipe, dataset)
    place = build_workplace(recipe, (1, 8, 8), 3)
    evaluator = Evaluator(parts.scenario, unseen, 0, None)
    return evaluator.test(ReadsPixels(), place.net, place.net.state())


def test_a_server_that_sees_no_images_of_clients_cannot_group_them() -> None:
    scenario = toy_parts(toy_recipe("fixmatch-lpl", "server"), toy_dataset()).scenario._replace(holdings=[])
    with pytest.raises(UserError, match=r'^evaluate.discover: the server .* write "test"$'):
        Evaluator(scenario, (), 0, None, discover="unlabelled")


def wins(known: Any, unknown: Any) -> float:
    """AUROC by comparing every pair."""
    above = np.subtract.outer(np.asarray(unknown), np.asarray(known))
    return float(np.mean((above > 0) + 0.5 * (above == 0)))


@pytest.mark.parametrize("seed", range(3))
def test_metrics_of_known_predictions(seed: int) -> None:
    dataset, labels, scores = random_answers(seed)
    truth = dataset.y_test.numpy()
    known = truth < 3
    evaluation = evaluation_of(dataset)
    right = labels[known] == truth[known]
    assert evaluation.metrics["accuracy"] == pytest.approx(right.mean())
    assert evaluation.metrics["auroc_seen"] == pytest.approx(wins(scores[known], scores[~known]))
    both = [r * ((u > k) + 0.5 * (u == k)) for u in scores[~known] for r, k in zip(right, scores[known], strict=True)]
    assert evaluation.metrics["oscr_seen"] == pytest.approx(np.mean(both))
    accepting = next(t for t in range(13) if (scores[known] <= t).mean() >= 0.95)
    assert evaluation.metrics["fpr95_seen"] == pytest.approx((scores[~known] <= accepting).mean())
    assert evaluation.metrics["auroc_overall"] == evaluation.metrics["auroc_seen"]
    for index, row in enumerate(evaluation.per_class):
        mine = truth == index
        assert row["class"] == f"class {index}"
        assert row["count"] == mine.sum()
        assert row["accuracy"] == pytest.approx((labels[mine] == index).mean())
    histograms = evaluation.scores
    assert histograms is not None
    for one in (histograms, histograms["confidence"]):
        assert sum(one["known"]) == known.sum()
        assert sum(one["sets"]["seen"]) == (~known).sum()


def test_unknown_classes_are_tested_even_where_clients_hold_none() -> None:
    dataset, labels, scores = random_answers(0)
    metrics = evaluation_of(dataset, classes="known").metrics
    truth = dataset.y_test.numpy()
    assert metrics["accuracy"] == pytest.approx((labels == truth)[truth < 3].mean())
    assert metrics["auroc_seen"] == pytest.approx(wins(scores[truth < 3], scores[truth >= 3]))


def test_nothing_is_said_of_unknowns_where_there_are_none() -> None:
    dataset, _, _ = random_answers(0)
    kept = dataset.y_test < 3
    evaluation = evaluation_of(dataset._replace(x_test=dataset.x_test[kept], y_test=dataset.y_test[kept]))
    assert set(evaluation.metrics) == {"accuracy"}
    assert evaluation.scores is None
    assert evaluation.at_threshold(4.0)["rejected_unknown"] is None


def test_without_test_images_of_known_classes_nothing_could_be_measured() -> None:
    dataset, _, _ = random_answers(0)
    unknown = dataset.y_test >= 3
    with pytest.raises(UserError, match="has no test images of known classes, so nothing could be measured"):
        evaluation_of(dataset._replace(x_test=dataset.x_test[unknown], y_test=dataset.y_test[unknown]))


def test_a_class_without_test_images_is_said(tmp_path: Path) -> None:
    dataset = toy_dataset()
    kept = dataset.y_test != 1
    recipe = toy_recipe("fixmatch-lpl", "server", rounds=1)
    told = Quiet()
    execute(
        toy_parts(recipe, dataset._replace(x_test=dataset.x_test[kept], y_test=dataset.y_test[kept])), tmp_path, told
    )
    assert "there are no test images of class 1: accuracy says nothing of them" in told.warnings


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("seen", "what metrics call the run's own unknown classes"),
        ("toys", "the data set of the run"),
        ("folder:pictures", "the data set of the run"),
    ],
)
def test_the_own_images_of_a_run_are_not_unseen(name: str, told: str) -> None:
    with pytest.raises(UserError, match=f"^evaluate.unseen: '{name}' is {told}; give a set of other classes"):
        evaluation_of(toy_dataset()._replace(name="toys", source="folder:pictures"), unseen=(name,))


@dataclass(frozen=True, kw_only=True)
class Spoken(Method):
    """Logits made of an image's first pixels, and an unknown score of its own."""

    def predict(self, net: Net, images: Tensor) -> Prediction:
        return Prediction(4 * images[:, 0, 0, :3], images[:, 0, 0, 3])


def test_msp_and_energy_beside_the_score_of_the_method() -> None:
    dataset = toy_dataset(per_class=60)
    recipe = toy_recipe("fixmatch-lpl", "server")
    parts = toy_parts(recipe, dataset)
    place = build_workplace(recipe, (1, 8, 8), 3)
    evaluator = Evaluator(parts.scenario, ("gaussian", "uniform"), 0, None)
    metrics = evaluator.test(Spoken(), place.net, place.net.state()).metrics

    def scores(images: Tensor) -> dict[str, Any]:
        pixels = (images.numpy()[:, 0, 0, :4] / 255 - 0.5) / 0.25
        logits = 4 * pixels[:, :3]
        return {
            "": pixels[:, 3],
            "msp.": 1 - np.exp(log_softmax(logits, axis=1)).max(axis=1),
            "energy.": -logsumexp(logits, axis=1),
        }

    truth = dataset.y_test.numpy()
    known, seen = scores(dataset.x_test[truth < 3]), scores(dataset.x_test[truth >= 3])
    unseen = [scores(images) for images in evaluator._foreign.values()]
    for prefix in ("", "msp.", "energy."):
        expected = wins(known[prefix], seen[prefix])
        foreign = [wins(known[prefix], some[prefix][:400]) for some in unseen]
        assert metrics[f"{prefix}auroc_seen"] == pytest.approx(expected, abs=1e-6)
        # the sets are large: a part of them tells enough
        assert metrics[f"{prefix}auroc_overall"] == pytest.approx((expected + np.mean(foreign)) / 2, abs=0.03)
    assert len({round(metrics[f"{prefix}auroc_seen"], 6) for prefix in ("", "msp.", "energy.")}) == 3
    assert {key for key in metrics if "unseen" in key} == {"auroc_unseen.gaussian", "auroc_unseen.uniform"}
    assert set(metrics) == {
        *("accuracy", "auroc_seen", "fpr95_seen", "aupr_seen", "oscr_seen", "auroc_overall"),
        *("auroc_unseen.gaussian", "auroc_unseen.uniform"),
        *("msp.auroc_seen", "msp.auroc_overall", "energy.auroc_seen", "energy.auroc_overall"),
    }


def test_a_glance_is_accuracy_and_seen_unknowns() -> None:
    parts = toy_parts(toy_recipe("fixmatch-lpl", "server"))
    place = build_workplace(parts.recipe, (1, 8, 8), 3)
    evaluator = Evaluator(parts.scenario, ("gaussian",), 0, None)
    glance = evaluator.test(Spoken(), place.net, place.net.state(), foreign=False)
    whole = evaluator.test(Spoken(), place.net, place.net.state())
    assert glance.metrics == {key: whole.metrics[key] for key in ("accuracy", "auroc_seen")}


def test_each_image_is_predicted_once() -> None:
    seen: list[int] = []

    class Counting(Spoken):
        def predict(self, net: Net, images: Tensor) -> Prediction:
            seen.append(len(images))
            return Prediction(images[:, 0, 0, :3], images[:, 0, 0, 3])

    parts = toy_parts(toy_recipe("fixmatch-lpl", "server"), toy_dataset(per_class=1200))
    place = build_workplace(parts.recipe, (1, 8, 8), 3)
    evaluation = Evaluator(parts.scenario, (), 0, None).test(Counting(), place.net, place.net.state())
    assert sum(seen) == len(parts.scenario.test_labels) == 1500
    assert len(seen) > 10
    assert torch.equal(
        evaluation.known.unknown,
        Spoken().predict(place.net, parts.scenario.views.plain(known_test_images(parts.scenario))).unknown,
    )


def known_test_images(scenario: Scenario) -> Tensor:
    return scenario.dataset.x_test[scenario.test_labels >= 0]


def test_what_a_threshold_does() -> None:
    dataset, _, scores = random_answers(2)
    known = dataset.y_test.numpy() < 3
    evaluation = evaluation_of(dataset)
    for threshold in range(-1, 13):
        found = evaluation.at_threshold(float(threshold))
        assert found["accepted_known"] == pytest.approx((scores[known] <= threshold).mean())
        assert found["rejected_unknown"] == pytest.approx((scores[~known] > threshold).mean())
    nothing = evaluation.at_threshold(None)
    assert nothing == {"accepted_known": None, "rejected_unknown": None, "rejected_unseen": {}}


def test_histograms_count_every_image_where_it_belongs() -> None:
    dataset, _, scores = random_answers(1)
    known = dataset.y_test.numpy() < 3
    found = evaluation_of(dataset, unseen=("uniform",)).scores
    assert found is not None
    edges = found["bins"]
    for index, count in enumerate(found["known"]):
        last = index == len(found["known"]) - 1
        inside = [edges[index] <= s and (s < edges[index + 1] or last) for s in scores[known]]
        assert count == sum(inside)
    assert set(found["sets"]) == set(found["confidence"]["sets"]) == {"seen", "uniform"}
    confidence = np.exp(1) / (np.exp(1) + 2)  # one logit is 1, the others 0
    assert found["confidence"]["bins"][0] == pytest.approx(confidence)


def test_perfect_and_useless_models() -> None:
    truth = toy_dataset(per_class=60).y_test
    perfect = evaluation_of(dataset_with(truth.clamp(max=2), (truth >= 3) * 9)).metrics
    assert (perfect["accuracy"], perfect["auroc_seen"], perfect["fpr95_seen"]) == (1.0, 1.0, 0.0)
    useless = evaluation_of(dataset_with(torch.zeros_like(truth), torch.full_like(truth, 4))).metrics
    assert (useless["accuracy"], useless["auroc_seen"]) == (pytest.approx(1 / 3), 0.5)


def test_foreign_images_have_a_score_of_their_own() -> None:
    dataset, _, _ = random_answers(1)
    small = dataset._replace(x_test=dataset.x_test[:20], y_test=dataset.y_test[:20])

    class Bright(ReadsPixels):
        def predict(self, net: Net, images: Tensor) -> Prediction:
            return Prediction(torch.ones(len(images), 3) / 3, images.mean(dim=(1, 2, 3)))

    recipe = toy_recipe("fixmatch-lpl", "server")
    parts = toy_parts(recipe, small)
    place = build_workplace(recipe, (1, 8, 8), 3)
    metrics = (
        Evaluator(parts.scenario, ("gaussian", "uniform"), 0, None).test(Bright(), place.net, place.net.state()).metrics
    )
    unseen = (metrics["auroc_unseen.gaussian"] + metrics["auroc_unseen.uniform"]) / 2
    assert metrics["auroc_overall"] == pytest.approx((metrics["auroc_seen"] + unseen) / 2)


def test_predictions_that_are_no_numbers_are_told() -> None:
    recipe = toy_recipe("fixmatch-lpl", "server")
    parts, place = toy_parts(recipe), build_workplace(recipe, (1, 8, 8), 3)
    huge = {name: torch.full_like(tensor, 3e38) for name, tensor in place.net.state().items()}
    with pytest.raises(UserError, match=r"^the model's predictions are no numbers: .* defence.steps bounds"):
        Evaluator(parts.scenario, (), 0, None).test(parts.method, place.net, huge)


def test_the_weights_under_test_are_loaded() -> None:
    recipe = toy_recipe("fixmatch-lpl", "server")
    parts = toy_parts(recipe)
    place = build_workplace(recipe, (1, 8, 8), 3)
    constant = {name: torch.zeros_like(tensor) for name, tensor in place.net.state().items()}
    constant["classifier.bias"] = torch.tensor([0.0, 5.0, 0.0])
    evaluation = Evaluator(parts.scenario, (), 0, None).test(parts.method, place.net, constant)
    assert [row["accuracy"] for row in evaluation.per_class] == [0.0, 1.0, 0.0]


def record_of(client: int, pseudo: PseudoLabels | None) -> ClientRecord:
    return ClientRecord(client, 1, 1, {}, pseudo, 0.0)


@cache
def scenario_of() -> Scenario:
    return toy_parts(toy_recipe("fixmatch-lpl", "clients")).scenario


@given(st.lists(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 2), st.booleans()), max_size=9), max_size=3))
def test_pseudo_label_quality(clients: list[list[tuple[int, int, bool]]]) -> None:
    scenario = scenario_of()
    records = [
        record_of(
            index,
            PseudoLabels(
                torch.tensor([position for position, _, _ in rows], dtype=torch.int64),
                torch.tensor([label for _, label, _ in rows], dtype=torch.int64),
                torch.tensor([used for _, _, used in rows], dtype=torch.bool),
            ),
        )
        for index, rows in enumerate(clients)
    ]
    found = Evaluator(scenario, (), 0, None).pseudo_labels([*records, record_of(9, None)])
    if not clients:
        assert found == {"pseudo": {}}
        return
    truth = scenario.sealed.break_seal().tolist()
    # SAGE's protocol puts labelled images among the unlabelled: their labels are no pseudo-labels to be proud of.
    real = [[row for row in client if int(scenario.labels[row[0]]) == -1] for client in clients]
    rows = [(label, truth[position], use) for client in real for position, label, use in client]
    used = [(label, true) for label, true, use in rows if use]

    def share(part: list[bool]) -> Any:
        return pytest.approx(sum(part) / len(part)) if part else None

    assert found["pseudo"]["seen"] == len(rows)
    assert found["pseudo"]["used"] == len(used)
    assert found["pseudo"]["used_unknown"] == sum(true == -1 for _, true in used)
    assert found["pseudo"]["accuracy"] == share([label == true for label, true in used])
    assert found["gate"]["pass_known"] == share([use for _, true, use in rows if true >= 0])
    assert found["gate"]["pass_unknown"] == share([use for _, true, use in rows if true == -1])
    assert found["gate"]["purity"] == share([true >= 0 for _, true in used])
    assert found["per_client"] == {
        "client": [*range(len(clients)), 9],
        "seen": [*map(len, real), 0],
        "used": [*(sum(use for _, _, use in client) for client in real), 0],
        "correct": [*(sum(use and truth[at] == label for at, label, use in client) for client in real), 0],
    }


class Fails(LocalEngine):
    """Loses the reply of the second client of every round."""

    def ask(
        self, round_: int, lr: float, clients: Sequence[int], down: Any, own: Mapping[int, Any] | None = None
    ) -> list[Reply | ClientFailure]:
        answers = super().ask(round_, lr, clients, down, own)
        return [answers[0], ClientFailure(clients[1], "lost on the way"), *answers[2:]]


def test_diagnostics_by_client_stay_in_step_when_a_client_fails(tmp_path: Path) -> None:
    recipe = toy_recipe("openfl", "server", {"method": {"known_threshold": 0.1, "align_after": 0.0}}, rounds=3)
    with patch("semifed.run.LocalEngine", Fails):
        execute(toy_parts(recipe), tmp_path / "run", Quiet())
    rounds = RunDirectory(tmp_path / "run").rounds()
    assert "per_client" not in rounds[0]
    for line in rounds[1:]:
        assert len(line["failures"]) == 1
        assert line["per_client"]["client"] == line["clients"]
        assert len(line["clients"]) == len(line["alignment"]) == len(line["client_weights"]) == 2
        assert sum(line["per_client"]["used"]) == line["pseudo"]["used"]
        assert sum(line["per_client"]["seen"]) == line["pseudo"]["seen"] > 0
        right = round(line["pseudo"]["accuracy"] * line["pseudo"]["used"]) if line["pseudo"]["used"] else 0
        assert sum(line["per_client"]["correct"]) == right


@given(st.integers(2, 30), st.integers(1, 6), st.integers(0, 9))
def test_principal_axes_are_those_of_the_covariance(count: int, width: int, seed: int) -> None:
    vectors = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    axes, middle, explained = principal_axes(vectors)
    values, directions = np.linalg.eigh(np.cov(vectors.double().numpy().T, bias=True).reshape(width, width))
    assert middle.numpy() == pytest.approx(vectors.double().mean(dim=0).numpy())
    for index in range(min(2, width, count - 1)):
        found, expected = axes[:, index].numpy(), directions[:, -1 - index]
        assert abs(found @ expected) == pytest.approx(1, abs=1e-6)
        assert found[np.abs(found).argmax()] > 0
        assert explained[index] == pytest.approx(values[-1 - index] / values.sum())


@pytest.mark.parametrize("method", ["fedfixmatch", "openfl"])
def test_the_map_of_features(method: str, tmp_path: Path) -> None:
    parts = toy_parts(toy_recipe(method, "server"), toy_dataset(per_class=400))
    place = build_workplace(parts.recipe, (1, 8, 8), 3)
    evaluator = Evaluator(parts.scenario, (), 0, None)
    pivots = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)) if method == "openfl" else None
    found = evaluator.feature_map(place.net, place.net.state(), pivots)
    classes = np.array(found["class"])
    assert np.bincount(classes + 1).tolist() == [200, 60, 60, 60]
    assert found["names"] == ["class 0", "class 1", "class 2"]
    points, stars = np.array(found["points"]), np.array(found["pivots"])
    assert points.shape == (380, 2)
    assert stars.shape == (3, 2)
    assert np.abs(points.mean(axis=0)).max() < 1e-3
    if method == "openfl":
        assert found["space"] == "projection"
        assert found["pivots_are"] == "pivots of the method"
        again = evaluator.feature_map(place.net, place.net.state(), 7 * pivots if pivots is not None else None)
        assert again == found  # only the direction of a pivot means something
        assert evaluator.feature_map(place.net, place.net.state(), torch.empty(0))["pivots_are"].startswith("class")
    else:
        assert found["space"] == "features"
        assert found["pivots_are"] == "class means of the images shown"
        means = np.array([points[classes == label].mean(axis=0) for label in range(3)])
        assert stars == pytest.approx(means, abs=2e-3)


def test_the_files_at_the_end_of_a_run(tmp_path: Path) -> None:
    recipe = toy_recipe("openfl", "server", {"evaluate": {"unseen": ("uniform",), "accept": 0.8}}, rounds=1)
    summary = execute(toy_parts(recipe), tmp_path / "run", Quiet())
    stored = {
        name: json.loads((tmp_path / "run" / f"{name}.json").read_text())
        for name in ("summary", "scores", "features", "model/model")
    }
    assert stored["summary"]["threshold"] == summary["threshold"]
    assert summary["threshold"]["value"] == stored["model/model"]["threshold"]
    assert summary["threshold"]["accept"] == stored["model/model"]["accept"] == 0.8
    assert 0 <= summary["threshold"]["accepted_known"] <= 1
    assert set(summary["threshold"]["rejected_unseen"]) == {"uniform"}
    assert stored["model/model"]["calibrated_on"].startswith("the server's 12 labelled images")
    assert stored["features"]["pivots_are"] == "pivots of the method"
    assert len(stored["features"]["points"]) == len(stored["features"]["class"]) == 25
    assert len(stored["scores"]["confidence"]["bins"]) == 41


def test_shuffled_patches_are_those_of_known_classes() -> None:
    scenario = scenario_of()
    evaluator = Evaluator(scenario, ("patch-shuffle",), 0, None)
    known = scenario.dataset.x_test[scenario.test_labels >= 0]
    assert torch.equal(evaluator._foreign["patch-shuffle"].flatten(1).sort().values, known.flatten(1).sort().values)
