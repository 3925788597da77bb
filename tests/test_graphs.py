"""CUDA graphs, as far as a machine without a GPU can tell: when passes are recorded, and that no number changes.

The stand-in for PyTorch's recorder has the faults of the real one: warm-up passes move statistics, a replay writes over
what the one before it left for its gradient, and a second gradient of a replay is wrong.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pretended import pretended_gpu
from semifed import graphs
from semifed.data.client import Batch, Budget, batches
from semifed.errors import UserError
from semifed.fit import Loss, Optimiser, fit
from semifed.graphs import Graphs
from semifed.models.network import build_network
from semifed.net import Net
from test_device import run_on, told
from toys import equal_weights, toy_parts, toy_recipe


class Recorder:
    """In place of `torch.cuda.make_graphed_callables`."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []  # that were recorded
        self.replays = 0
        self.fails = False

    def __call__(self, module: nn.Module, sample: tuple[Tensor], *, allow_unused_input: bool) -> nn.Module:
        self.shapes.append(tuple(sample[0].shape))
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        place, recorder, eager = sample[0], self, module.forward
        for _ in range(3):
            eager(place)
        left: list[Tensor] = []  # by the last replay, for its gradient
        weights = tuple(module.parameters())

        class Replay(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, images: Tensor, *weights: Tensor) -> Tensor:
                place.copy_(images)
                with torch.enable_grad():
                    left[:] = [eager(place)]
                recorder.replays += 1
                return left[0].detach()

            @staticmethod
            @once_differentiable  # type: ignore[untyped-decorator]
            def backward(ctx: Any, gradient: Tensor) -> Any:
                said = left.pop()  # a second time there is nothing left
                learn = [one for one in weights if one.requires_grad]
                found = iter(torch.autograd.grad(said, learn, gradient, allow_unused=allow_unused_input))
                return None, *(next(found) if one.requires_grad else None for one in weights)

        module.forward = lambda images: Replay.apply(images, *weights)  # type: ignore[method-assign]
        return module


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", made)
    monkeypatch.setattr(graphs, "OFTEN", 2)
    return made


def net(*, recorded: bool, batchnorm: str = "tracked") -> Net:
    generator = torch.Generator().manual_seed(0)
    network = build_network(
        "cnn", channels=1, size=(8, 8), classes=3, width=(2, 3, 4), further={"side": "2"}, generator=generator
    )
    return Net(network, batchnorm, graphs=recorded)


def images(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def learn(net: Net, *passes: Tensor) -> dict[str, Tensor | None]:
    """One step's passes and their gradients."""
    net.next_step()
    sum((net(one).logits.square().mean() for one in passes), torch.zeros(())).backward()
    found = {name: None if one.grad is None else one.grad.clone() for name, one in net.learners().items()}
    for one in net.learners().values():
        one.grad = None
    return found


def test_a_shape_is_recorded_once_and_only_where_it_comes_often(recorder: Recorder) -> None:
    student = net(recorded=True)
    student.train(True)
    for step in range(6):
        learn(student, images(5, step))
        assert recorder.replays == max(0, step - 1)
    assert recorder.shapes == [(5, 1, 8, 8)]
    learn(student, images(4))
    learn(student, images(4))
    assert len(recorder.shapes) == 1  # twice is not often
    learn(student, images(4))
    assert recorder.shapes == [(5, 1, 8, 8), (4, 1, 8, 8)]


@pytest.mark.parametrize("batchnorm", ["tracked", "static", "local"])
def test_gradients_and_statistics_are_those_of_usual_passes(batchnorm: str, recorder: Recorder) -> None:
    """Of three passes in a step two have one shape, and both are needed until the step's gradient is taken."""
    usual, replayed = net(recorded=False, batchnorm=batchnorm), net(recorded=True, batchnorm=batchnorm)
    for each in (usual, replayed):
        each.train(True)
    for step in range(5):
        passes = images(6, step), images(6, 100 + step), images(4, 200 + step)
        expected, found = learn(usual, *passes), learn(replayed, *passes)
        for name, gradient in expected.items():
            other = found[name]
            assert (gradient is None) == (other is None), name  # the head that nobody asks learns nothing
            assert gradient is None or other is None or torch.equal(gradient, other)
        assert equal_weights(usual.state(), replayed.state())
    assert recorder.shapes == [(6, 1, 8, 8), (6, 1, 8, 8), (4, 1, 8, 8)]
    assert recorder.replays == 3 * 3
    assert any(gradient is None for gradient in expected.values())


def test_other_weights_in_the_same_tensors_are_seen(recorder: Recorder) -> None:
    """As when the next client's weights are loaded."""
    usual, replayed = net(recorded=False), net(recorded=True)
    others = {name: 0.5 * tensor for name, tensor in usual.state().items()}
    for each in (usual, replayed):
        each.train(True)
        for _ in range(4):
            learn(each, images(5))
        each.load(others)
    assert recorder.replays
    expected, found = learn(usual, images(5)), learn(replayed, images(5))
    assert all(one is None or torch.equal(one, found[name]) for name, one in expected.items())  # type: ignore[arg-type]


def test_what_cannot_be_recorded_is_computed_as_usual_and_tried_once(recorder: Recorder) -> None:
    recorder.fails = True
    usual, replayed = net(recorded=False), net(recorded=True)
    for each in (usual, replayed):
        each.train(True)
        for step in range(6):
            learn(each, images(5, step))
    assert len(recorder.shapes) == 1
    assert recorder.replays == 0
    assert equal_weights(usual.state(), replayed.state())


def test_only_passes_that_learn_are_recorded(recorder: Recorder) -> None:
    student = net(recorded=True)
    for _ in range(5):
        student.next_step()
        student(images(5))  # in evaluation: tests and gates
        student.frozen()(images(5))
    student.train(True)
    for _ in range(5):
        student.next_step()
        with torch.no_grad():
            student(images(5))
        student(images(5).requires_grad_())  # a gradient by the image
        student.at(student.state(), images(5))
    assert recorder.shapes == []


def test_a_network_keeps_so_many_graphs_and_no_more(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST", 1)
    student = net(recorded=True)
    student.train(True)
    for _ in range(5):
        learn(student, images(5), images(4))
    assert recorder.shapes == [(5, 1, 8, 8)]


def test_a_twin_has_graphs_of_its_own(recorder: Recorder) -> None:
    student = net(recorded=True)
    student.train(True)
    for _ in range(4):
        learn(student, images(5))
    twin = student.twin()
    twin.train(True)
    before = recorder.replays
    learn(twin, images(5))
    assert recorder.replays == before
    assert isinstance(twin._graphs, Graphs)
    assert twin._graphs is not student._graphs


def test_two_gradients_of_a_pass_are_refused(recorder: Recorder) -> None:
    student = net(recorded=True)
    with pytest.raises(UserError, match=r"engine\.graphs: this method takes two gradients"):
        student.gradient(student(images(5)).logits.sum())


def test_the_loop_says_when_a_step_begins(recorder: Recorder) -> None:
    """Otherwise every step's pass would count as one more of the first step, and none would be recorded."""
    data = toy_parts(toy_recipe("fixmatch-lpl", "clients")).scenario.client(0)

    def drawn() -> Iterator[Batch]:
        return batches(data, Budget(None, 6, 4), ("steps",))

    def loss(net: Net, batch: Batch) -> Loss:
        return Loss(net(batch.labelled.weak).logits.square().mean(), {})

    fitted = []
    for recorded in (False, True):
        student = net(recorded=recorded)
        fit(student, drawn(), loss, Optimiser(0.1, momentum=0.9))
        fitted.append(student.state())
    assert len(recorder.shapes) == 1
    assert recorder.replays == 4
    assert equal_weights(*fitted)


@pytest.mark.parametrize(
    ("method", "labels"),
    [("fixmatch-lpl", "clients"), ("openfl", "clients"), ("openfl", "server"), ("fedprox", "clients")],
)
def test_a_run_with_graphs_says_what_one_without_says(
    method: str, labels: str, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "OFTEN", 0)
    here = run_on("cpu", method, labels, tmp_path / "cpu")
    with pretended_gpu(monkeypatch):
        there = run_on("cuda", method, labels, tmp_path / "cuda", {"engine": {"device": "cuda", "graphs": True}})
    assert recorder.replays
    assert equal_weights(here.weights, there.weights)
    assert told(here) == told(there)


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ({"engine": {"graphs": True}}, "engine.graphs: only a GPU replays passes; use engine.device=cuda"),
        (
            {"engine": {"graphs": True, "device": "cuda"}, "model": {"precision": "bfloat16"}},
            "engine.graphs: passes are recorded in single precision; use model.precision=float32",
        ),
    ],
)
def test_where_there_can_be_no_graphs(tables: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=re.escape(complaint)):
        toy_recipe("fedavg", "clients", tables)
