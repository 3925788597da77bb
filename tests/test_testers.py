"""Tests spread over workers: the numbers of one process, whoever dies meanwhile."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from semifed.assembly import Parts, assemble, workplace_of
from semifed.client_round import Workplace
from semifed.engines.local import LocalEngine
from semifed.methods import finds_groups, method_class
from semifed.methods.fedfixmatch import FedFixMatch
from semifed.net import Net
from semifed.payloads import Prediction
from semifed.predictions import BATCH, predictions
from semifed.wire import Weights
from toys import meaningful, place_of, shaken, toy_parts, toy_recipe

COUNT = 3 * BATCH + 50  # two workers take two batches each, the last of them a short one
OF_ITS_OWN = sorted(  # methods whose prediction is no plain classifier's
    {name for name, _ in meaningful() if "predict" in vars(method_class(name)) and not finds_groups(method_class(name))}
)


def toy(method: str) -> Parts:
    return toy_parts(toy_recipe(method, next(labels for name, labels in meaningful() if name == method)))


def images_of(parts: Parts) -> Tensor:
    shape = parts.scenario.dataset.x_train.shape[1:]
    return torch.randint(0, 256, (COUNT, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def expected(parts: Parts, weights: Weights, images: Tensor) -> Prediction:
    net = place_of(parts).net
    net.load(weights)
    return predictions(parts.method, net, images, parts.scenario.views.plain)


def assert_same(one: Prediction | None, other: Prediction) -> None:
    assert one is not None
    assert torch.equal(one.logits, other.logits)
    assert torch.equal(one.unknown, other.unknown)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", *OF_ITS_OWN])
def test_workers_say_what_one_process_says(method: str) -> None:
    parts = toy(method)
    images = images_of(parts)
    first = shaken(place_of(parts).net.state())
    engine = LocalEngine(workplace_of(parts), parts.scenario, workers=2)
    try:
        for weights in (first, shaken(first)):  # the second time, what was shared before is written over
            assert_same(engine.predict(weights, images), expected(parts, weights, images))
        assert_same(engine.predict(first, images[: BATCH + 1]), expected(parts, first, images[: BATCH + 1]))
        assert engine.predict(first, images[:BATCH]) is None, "a single batch is not worth a letter"
    finally:
        engine.close()


def test_one_process_asks_nobody() -> None:
    parts = toy("fedavg")
    engine = LocalEngine(workplace_of(parts), parts.scenario, workers=1)
    assert engine.predict(place_of(parts).net.state(), images_of(parts)) is None
    engine.close()


def test_the_evaluator_takes_what_is_said_elsewhere() -> None:
    parts = toy("fedfixmatch")
    net, evaluator = assemble(parts)
    weights = net.state()
    asked: list[int] = []

    def everything_is_class_one(given: Weights, images: Tensor) -> Prediction:
        assert given is weights
        asked.append(len(images))
        logits = torch.zeros(len(images), len(parts.scenario.known))
        logits[:, 1] = 1
        return Prediction(logits, torch.zeros(len(images)))

    said = evaluator.test(parts.method, net, weights, elsewhere=everything_is_class_one)
    truth = parts.scenario.test_labels
    assert sum(asked) == len(truth)
    assert said.metrics["accuracy"] == pytest.approx(float((truth[truth >= 0] == 1).float().mean()))
    here = evaluator.test(parts.method, net, weights)
    nobody = evaluator.test(parts.method, net, weights, elsewhere=lambda given, images: None)
    assert nobody.metrics == here.metrics != said.metrics


@dataclass(frozen=True, kw_only=True)
class Mortal(FedFixMatch):
    """FedFixMatch whose predictions end or fail as often as files in a directory say."""

    marks: str

    def predict(self, net: Net, images: Tensor) -> Prediction:
        for mark in sorted(os.listdir(self.marks)):
            if mark == "wrong":
                raise ArithmeticError("the prediction is wrong")
            Path(self.marks, mark).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().predict(net, images)


@dataclass(frozen=True)
class MortalWorkplace:
    """Builds the workplace of such a method in any process."""

    parts: Parts
    marks: str

    def __call__(self) -> Workplace:
        return workplace_of(self.parts)()._replace(method=Mortal(marks=self.marks))


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[tuple[LocalEngine, Parts, Path]]:
    parts = toy("fedfixmatch")
    engine = LocalEngine(MortalWorkplace(parts, str(tmp_path)), parts.scenario, workers=2)
    yield engine, parts, tmp_path
    engine.close()


@pytest.mark.slow
def test_a_worker_that_dies_amid_a_test_is_replaced(mortal: tuple[LocalEngine, Parts, Path]) -> None:
    engine, parts, marks = mortal
    weights, images = shaken(place_of(parts).net.state()), images_of(parts)
    (marks / "once").touch()
    assert_same(engine.predict(weights, images), expected(parts, weights, images))
    assert not list(marks.iterdir())
    assert engine._pool is not None
    os.kill(engine._pool._workers[0].process.pid, signal.SIGKILL)  # type: ignore[arg-type]
    assert_same(engine.predict(weights, images), expected(parts, weights, images))


@pytest.mark.slow
def test_a_test_that_kills_every_worker_ends_the_run(mortal: tuple[LocalEngine, Parts, Path]) -> None:
    engine, parts, marks = mortal
    for number in range(8):
        (marks / str(number)).touch()
    with pytest.raises(RuntimeError, match="its worker process died 2 times"):
        engine.predict(place_of(parts).net.state(), images_of(parts))


@pytest.mark.slow
def test_an_error_of_ours_is_told_with_where_it_was(mortal: tuple[LocalEngine, Parts, Path]) -> None:
    engine, parts, marks = mortal
    (marks / "wrong").touch()
    with pytest.raises(RuntimeError, match=r"(?s)a test failed:.*in predict.*the prediction is wrong"):
        engine.predict(place_of(parts).net.state(), images_of(parts))
