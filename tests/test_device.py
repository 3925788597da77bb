"""Runs on a GPU, as far as a machine without one can tell: no tensor meets one of another device, no number changes."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pretended import OnGpu, pretended_gpu
from semifed.assembly import assemble
from semifed.data.client import Batch
from semifed.engines.local import LocalEngine
from semifed.errors import UserError
from semifed.fit import Loss
from semifed.methods.fixmatch_lpl import FixMatchLPL
from semifed.net import Net
from semifed.payloads import Down
from toys import Outcome, equal_weights, meaningful, place_of, run_toy, toy_dataset, toy_parts, toy_recipe


def run_on(
    device: str, method: str, labels: str, out: Path, changes: Mapping[str, Any] | None = None, channels: int = 1
) -> Outcome:
    tables = {"engine": {"device": device}, "local": {"keep_optimizer": True}, **(changes or {})}
    return run_toy(toy_parts(toy_recipe(method, labels, tables, rounds=2), toy_dataset(channels=channels)), out)


def told(outcome: Outcome) -> list[Any]:
    kept = ("loss", "metrics", "pseudo", "client_weights", "failures", "images")
    return [{key: record.get(key) for key in kept} for record in outcome.rounds]


@pytest.mark.parametrize(("method", "labels"), meaningful())
@pytest.mark.slow
def test_a_run_on_a_gpu_says_what_a_run_on_the_processor_says(
    method: str, labels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = run_on("cpu", method, labels, tmp_path / "cpu")
    with pretended_gpu(monkeypatch):
        there = run_on("cuda", method, labels, tmp_path / "cuda")
    assert equal_weights(here.weights, there.weights)
    assert told(here) == told(there)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedlpa", {"warmup_rounds": 1}),
        ("fedmatch", {"helper_interval": 1}),
        ("flexmatch", {"sage": True}),
        ("feddure", {"sage": True, "sage_threshold": 0.4}),
    ],
)
def test_what_two_rounds_would_not_come_to(
    method: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = run_on("cpu", method, "clients", tmp_path / "cpu", {"method": options})
    with pretended_gpu(monkeypatch):
        there = run_on("cuda", method, "clients", tmp_path / "cuda", {"method": options})
    assert equal_weights(here.weights, there.weights)
    assert told(here) == told(there)


@pytest.mark.parametrize("batchnorm", ["static", "tracked", "local"])
@pytest.mark.parametrize("strong", ["flip crop(1) randaugment(2,10) cutout(3)", "none"])
@pytest.mark.slow
def test_views_and_statistics_are_made_on_the_gpu(
    batchnorm: str, strong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {"model": {"batchnorm": batchnorm}, "views": {"strong": strong}}
    here = run_on("cpu", "fedfixmatch", "server", tmp_path / "cpu", tables, channels=3)
    with pretended_gpu(monkeypatch):
        there = run_on("cuda", "fedfixmatch", "server", tmp_path / "cuda", tables, channels=3)
    assert equal_weights(here.weights, there.weights)
    assert told(here) == told(there)


def test_images_and_network_stay_there_and_answers_come_home(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[type, type, type]] = []

    def loss(self: FixMatchLPL, net: Net, batch: Batch, const: Any) -> Loss:
        output = net(batch.unlabelled.strong)
        seen.append((type(batch.unlabelled.strong), type(next(iter(net.learners().values()))), type(output.logits)))
        return Loss(output.logits.square().mean(), {})

    monkeypatch.setattr(FixMatchLPL, "loss", loss)
    with pretended_gpu(monkeypatch):
        parts = toy_parts(toy_recipe("fixmatch-lpl", "clients", {"engine": {"device": "cuda", "workers": 0}}))
        engine = LocalEngine(lambda: place_of(parts), parts.scenario)
        replies = engine.ask(1, 0.1, [0, 1], Down(place_of(parts).net.state()))
    assert engine.workers == 1
    assert set(seen) == {(OnGpu, OnGpu, Tensor)}
    assert not any(isinstance(tensor, OnGpu) for reply in replies for tensor in reply.up.weights.values())  # type: ignore[union-attr]


def test_the_pretended_gpu_refuses_what_a_real_one_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_gpu(monkeypatch):
        there = torch.ones(3).to("cuda")
        assert (there * torch.tensor(2.0)).cpu().tolist() == [2.0] * 3  # a single number may lie anywhere
        assert there[torch.tensor([0, 2])].cpu().tolist() == [1.0] * 2
        with pytest.raises(RuntimeError, match="met one"):
            there + torch.ones(3)
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()


def test_without_a_gpu_a_run_says_so_before_it_writes_anything() -> None:
    parts = toy_parts(toy_recipe("fedavg", "clients", {"engine": {"device": "cuda"}}))
    with pytest.raises(UserError, match=r"engine\.device: PyTorch finds no GPU here; use 'cpu'"):
        assemble(parts)


@pytest.mark.parametrize(
    ("engine", "complaint"),
    [
        ({"workers": 2}, "engine.workers: one process has the GPU to itself, not 2; use 1, or leave it out"),
        ({"name": "flower"}, "engine.device: the engine flower runs on the processor; use engine.name=local"),
        ({"timeout": 5.0}, "engine.timeout: only worker processes can be stopped, and there is none beside a GPU"),
    ],
)
def test_what_a_gpu_run_cannot_have(engine: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=re.escape(complaint)):
        toy_recipe("fedavg", "clients", {"engine": {"workers": 0, "device": "cuda", **engine}})
