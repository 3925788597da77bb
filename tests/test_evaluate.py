"""The evaluator against predictions that are known beforehand, counted again by hand."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semifed.assembly import build_workplace
from semifed.client_round import ClientRecord
from semifed.data.datasets import Dataset
from semifed.data.scenario import Scenario
from semifed.evaluate import Evaluator
from semifed.method import Method
from semifed.net import Net
from semifed.payloads import Prediction
from semifed.pseudo import PseudoLabels
from toys import toy_dataset, toy_parts, toy_recipe


@dataclass(frozen=True, kw_only=True)
class ReadsPixels(Method):
    """Says what is written in the first two pixels: the class, and how unknown the image is."""

    def predict(self, net: Net, images: Tensor) -> Prediction:
        raw = ((images * 0.25 + 0.5) * 255).round()
        label = raw[:, 0, 0, 0].long()
        return Prediction(torch.nn.functional.one_hot(label, 3).float(), raw[:, 0, 0, 1])


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


def evaluation_of(dataset: Dataset, classes: str = "open", unseen: tuple[str, ...] = ()) -> Any:
    recipe = toy_recipe("fixmatch-lpl", "server", {"scenario": {"classes": classes}})
    parts = toy_parts(recipe, dataset)
    place = build_workplace(recipe, (1, 8, 8), 3)
    evaluator = Evaluator(parts.scenario, classes, unseen, 0, None)
    return evaluator.test(ReadsPixels(), place.net, place.net.state())


@pytest.mark.parametrize("seed", range(3))
def test_metrics_of_known_predictions(seed: int) -> None:
    dataset, labels, scores = random_answers(seed)
    truth = dataset.y_test.numpy()
    known = truth < 3
    evaluation = evaluation_of(dataset)
    right = labels[known] == truth[known]
    assert evaluation.metrics["accuracy"] == pytest.approx(right.mean())
    wins = [(u > k) + 0.5 * (u == k) for u in scores[~known].tolist() for k in scores[known].tolist()]
    assert evaluation.metrics["auroc_seen"] == pytest.approx(np.mean(wins))
    accepting = next(t for t in range(13) if (scores[known] <= t).mean() >= 0.95)
    assert evaluation.metrics["fpr95_seen"] == pytest.approx((scores[~known] <= accepting).mean())
    assert evaluation.metrics["auroc_overall"] == evaluation.metrics["auroc_seen"]
    for index, row in enumerate(evaluation.per_class):
        mine = truth == index
        assert row["class"] == f"class {index}"
        assert row["count"] == mine.sum()
        assert row["accuracy"] == pytest.approx((labels[mine] == index).mean())
    assert sum(evaluation.scores["known"]) == known.sum()
    assert sum(evaluation.scores["sets"]["seen"]) == (~known).sum()


def test_unknown_classes_are_not_tested_in_a_closed_set() -> None:
    dataset, labels, _ = random_answers(0)
    evaluation = evaluation_of(dataset, classes="known")
    truth = dataset.y_test.numpy()
    assert set(evaluation.metrics) == {"accuracy"}
    assert evaluation.metrics["accuracy"] == pytest.approx((labels == truth)[truth < 3].mean())
    assert evaluation.scores is None


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
        Evaluator(parts.scenario, "open", ("gaussian", "uniform"), 0, None)
        .test(Bright(), place.net, place.net.state())
        .metrics
    )
    unseen = (metrics["auroc_unseen.gaussian"] + metrics["auroc_unseen.uniform"]) / 2
    assert metrics["auroc_overall"] == pytest.approx((metrics["auroc_seen"] + unseen) / 2)


def test_the_weights_under_test_are_loaded() -> None:
    recipe = toy_recipe("fixmatch-lpl", "server")
    parts = toy_parts(recipe)
    place = build_workplace(recipe, (1, 8, 8), 3)
    constant = {name: torch.zeros_like(tensor) for name, tensor in place.net.state().items()}
    constant["classifier.bias"] = torch.tensor([0.0, 5.0, 0.0])
    evaluation = Evaluator(parts.scenario, "open", (), 0, None).test(parts.method, place.net, constant)
    assert [row["accuracy"] for row in evaluation.per_class] == [0.0, 1.0, 0.0]


def record_of(client: int, pseudo: PseudoLabels | None) -> ClientRecord:
    return ClientRecord(client, 1, 1, {}, pseudo, 0.0)


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
    found = Evaluator(scenario, "open", (), 0, None).pseudo_label_quality([*records, record_of(9, None)])
    # SAGE's protocol puts labelled images among the unlabelled: their labels are no pseudo-labels to be proud of.
    rows = [row for client in clients for row in client if int(scenario.labels[row[0]]) == -1]
    if not clients:
        assert found == {}
        return
    truth = scenario.sealed.break_seal().tolist()
    used = [(label, truth[position]) for position, label, use in rows if use]
    right = sum(label == true for label, true in used)
    assert found["seen"] == len(rows)
    assert found["used"] == len(used)
    assert found["used_unknown"] == sum(true == -1 for _, true in used)
    assert found["accuracy"] == (pytest.approx(right / len(used)) if used else None)


@pytest.mark.parametrize("accept", [0.5, 0.8, 0.95])
def test_the_threshold_accepts_the_share_asked_for(accept: float) -> None:
    recipe = toy_recipe("fixmatch-lpl", "server", {"scenario": {"labelled_per_class": 50}})
    dataset = toy_dataset(per_class=60)
    generator = torch.Generator().manual_seed(0)
    scores = torch.randperm(len(dataset.y_train), generator=generator) * 255 // len(dataset.y_train)
    parts = toy_parts(recipe, dataset._replace(x_train=written(dataset.x_train, 0 * dataset.y_train, scores)))
    place = build_workplace(recipe, (1, 8, 8), 3)
    evaluator = Evaluator(parts.scenario, "open", (), 0, None)
    threshold = evaluator.rejection_threshold(ReadsPixels(), place.net, place.net.state(), accept)
    assert parts.scenario.server is not None
    own = scores[parts.scenario.server.labelled].numpy()
    assert threshold is not None
    assert (own <= threshold).mean() == pytest.approx(accept, abs=2 / len(own))


def test_no_threshold_without_labels_at_the_server() -> None:
    parts = toy_parts(toy_recipe("fixmatch-lpl", "clients"))
    place = build_workplace(parts.recipe, (1, 8, 8), 3)
    evaluator = Evaluator(parts.scenario, "open", (), 0, None)
    assert evaluator.rejection_threshold(parts.method, place.net, place.net.state(), 0.9) is None


def test_shuffled_patches_are_those_of_known_classes() -> None:
    scenario = scenario_of()
    evaluator = Evaluator(scenario, "open", ("patch-shuffle",), 0, None)
    known = scenario.dataset.x_test[scenario.test_labels >= 0]
    assert torch.equal(evaluator._foreign["patch-shuffle"].flatten(1).sort().values, known.flatten(1).sort().values)
