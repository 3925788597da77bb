"""Training steps in bfloat16: weights, answers and tests stay in single precision, and every method can do it."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from semifed.assembly import assemble
from semifed.client_round import Reply
from semifed.engines.letters import workplace
from semifed.errors import UserError
from semifed.models.network import build_network
from semifed.net import Net
from semifed.process import computes_bfloat16
from semifed.run import setting_of
from semifed.wire import to_arrays
from toys import Outcome, equal_weights, meaningful, run_toy, toy_parts, toy_recipe


@pytest.fixture(scope="module")
def able() -> None:
    """Some virtual machines name instructions that end the process: what computes cannot be tested there."""
    if not computes_bfloat16("cpu"):
        pytest.skip("this processor ends processes that compute in bfloat16")


computes = pytest.mark.usefixtures("able")
LOWER = {"model": {"precision": "bfloat16"}}


def twins() -> tuple[Net, Net]:
    """The same network in single precision and in bfloat16."""

    def net(precision: torch.dtype) -> Net:
        generator = torch.Generator().manual_seed(0)
        further = {"side": 5}
        network = build_network(
            "resnet8", channels=3, size=(16, 16), classes=4, width=1.0, further=further, generator=generator
        )
        return Net(network, "tracked", precision=precision)

    return net(torch.float32), net(torch.bfloat16)


def images() -> Tensor:
    return torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@computes
def test_steps_are_rounded_and_nothing_else_is() -> None:
    single, lower = twins()
    assert torch.equal(single(images()).logits, lower(images()).logits)
    for net in (single, lower):
        net.network.train()
    exact, rounded = single(images()), lower(images())
    for said, close in (
        (exact.logits, rounded.logits),
        (exact.features, rounded.features),
        (exact.heads["side"], rounded.heads["side"]),
    ):
        assert close.dtype == torch.float32
        assert not torch.equal(said, close)
        assert (said - close).norm() < 0.02 * said.norm()  # eight binary digits a product


@computes
def test_gradients_reach_weights_in_single_precision_and_point_the_same_way() -> None:
    slopes = []
    for net in twins():
        net.network.train()
        net(images()).logits.square().mean().backward()
        slopes.append(
            torch.cat([parameter.grad.flatten() for parameter in net.learners().values() if parameter.grad is not None])
        )
    exact, rounded = slopes
    assert rounded.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=0) > 0.99


@computes
def test_teachers_and_other_ways_to_ask_are_rounded_too() -> None:
    single, lower = twins()
    exact, rounded = single.frozen()(images()).logits, lower.frozen()(images()).logits
    assert rounded.dtype == torch.float32
    assert not torch.equal(exact, rounded)
    assert not torch.equal(
        single.frozen().at(single.state(), images()).logits, lower.frozen().at(lower.state(), images()).logits
    )
    features = single(images()).features.detach()
    for net in (single, lower):
        net.network.train()
    nowhere = {name: torch.zeros_like(tensor) for name, tensor in single.named_parameters().items()}
    ways: list[Any] = [
        lambda net: net.classify(features),
        lambda net: net.head("side", features),
        lambda net: net.at(net.state(), images()).logits,
        lambda net: net.shifted(nowhere, images()).logits,
        lambda net: net.after_stem(net.stem(images())).logits,
    ]
    for way in ways:
        exact, rounded = way(single), way(lower)
        assert rounded.dtype == torch.float32
        assert not torch.equal(exact, rounded)
        torch.testing.assert_close(exact, rounded, rtol=0.05, atol=0.05)
    assert lower.twin().precision == torch.bfloat16


def run_in(precision: str, method: str, labels: str, out: Path, **changes: Any) -> Outcome:
    tables = {"model": {"precision": precision}, "local": {"keep_optimizer": True}, **changes}
    return run_toy(toy_parts(toy_recipe(method, labels, tables, rounds=2)), out)


@computes
@pytest.mark.slow
@pytest.mark.parametrize(("method", "labels"), meaningful())
def test_every_method_trains_in_it(method: str, labels: str, tmp_path: Path) -> None:
    outcome = run_in("bfloat16", method, labels, tmp_path / "lower")
    assert not any(record["failures"] for record in outcome.rounds)
    replies = [answer for exchange in outcome.exchanges for answer in exchange.answers if isinstance(answer, Reply)]
    leaves = [tensor for reply in replies for part in (reply.up, reply.held) for tensor in to_arrays(part).values()]
    assert leaves or method == "server-only"
    assert all(tensor.dtype != torch.bfloat16 for tensor in leaves)


@computes
def test_it_changes_numbers_but_not_with_the_number_of_workers(tmp_path: Path) -> None:
    single = run_in("float32", "sage", "clients", tmp_path / "single")
    one = run_in("bfloat16", "sage", "clients", tmp_path / "one", engine={"workers": 1})
    two = run_in("bfloat16", "sage", "clients", tmp_path / "two", engine={"workers": 2})
    assert not equal_weights(single.weights, one.weights)
    assert equal_weights(one.weights, two.weights)


def test_a_processor_that_cannot_is_told_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, returncode=-4)  # killed by an illegal instruction

    parts = toy_parts(toy_recipe("fedavg", "clients", LOWER))
    computes_bfloat16.cache_clear()
    monkeypatch.setattr(subprocess, "run", dies)
    complaint = re.escape("model.precision: bfloat16 does not work on the cpu here; use float32")
    try:
        with pytest.raises(UserError, match=complaint):
            assemble(parts)
        with pytest.raises(UserError, match=complaint):  # a client elsewhere has a processor of its own
            workplace(setting_of(parts))
    finally:
        computes_bfloat16.cache_clear()
