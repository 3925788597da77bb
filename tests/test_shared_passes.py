"""Passes of the server's training shared out over workers: the numbers of one process, whoever dies meanwhile."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from semifed.assembly import Parts, workplace_of
from semifed.engines.lessons import Lesson, Slopes
from semifed.engines.local import LocalEngine
from semifed.engines.pool import Pool
from semifed.fit import Descent, Optimiser
from semifed.net import Net
from semifed.shared_passes import Said
from semifed.wire import Weights
from toys import equal_weights, run_toy, shaken, toy_dataset, toy_parts, toy_recipe

NETWORKS = {"cnn": [4, 8, 8], "resnet8": 1, "dense-cnn": [8]}


class Twin:
    """Helpers in this process; they may be lost."""

    def __init__(self, net: Net, lost: Sequence[str] = ()) -> None:
        self.asked: list[str] = []
        self._net, self._lost = net.twin(), lost
        self._passes: list[Tensor] = []

    def features(self, weights: Weights, views: Sequence[Tensor]) -> Said | None:
        self.asked.append("features")
        if "features" in self._lost:
            return None
        self._net.load({f"backbone.{name}": tensor for name, tensor in weights.items()})
        self._net.train(True)
        with torch.enable_grad():
            self._passes = [self._net.features(view) for view in views]
        return Said([one.detach() for one in self._passes], len(self.asked))

    def gradients(self, ticket: int, slopes: Sequence[Tensor]) -> list[Weights] | None:
        self.asked.append("gradients")
        if "gradients" in self._lost:
            return None
        learners = dict(self._net.network.backbone.named_parameters())
        return [
            dict(zip(learners, torch.autograd.grad(one, list(learners.values()), slope), strict=True))
            for one, slope in zip(self._passes, slopes, strict=True)
        ]


def toy(network: str = "cnn", method: str = "openfl", workers: int = 2, channels: int = 1) -> Parts:
    model = {"name": network, "width": NETWORKS[network]}
    recipe = toy_recipe(method, "server", {"model": model, "engine": {"workers": workers}})
    return toy_parts(recipe, toy_dataset(channels=channels))


def views_of(count: int, channels: int = 1, seed: int = 0, size: int = 6) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    views = [torch.randn(size, channels, 8, 8, generator=drawn) for _ in range(count)]
    return [view.contiguous(memory_format=torch.channels_last) for view in views]


def trained(net: Net, steps: Sequence[Sequence[Tensor]]) -> Weights:
    """Weights after a few clipped steps, which feel the last bit of every gradient."""
    descent = Descent(net.learners(), Optimiser(0.1, momentum=0.9, clip=0.5))
    net.train(True)
    for views in steps:
        said = net.each(*views)
        descent.forget()
        (torch.cat([one.heads["ova"].flatten(1) for one in said]).square().mean() + said[0].logits.sum()).backward()
        descent.step(0.1)
    net.train(False)
    return net.state()


def steps_of(channels: int = 1) -> list[list[Tensor]]:
    """The batches grow, so that what is shared must; the last ones are fewer views."""
    sizes = [(4, 6), (4, 9), (4, 3), (2, 9), (3, 9)]
    return [views_of(count, channels, seed, size) for seed, (count, size) in enumerate(sizes)]


@pytest.mark.parametrize("lost", [(), ("features",), ("gradients",)])
def test_the_steps_are_those_of_one_process(lost: tuple[str, ...]) -> None:
    alone, helped = (workplace_of(toy())().net for _ in range(2))
    helpers = helped.helpers = Twin(helped, lost)
    assert equal_weights(trained(alone, steps_of()), trained(helped, steps_of()))
    assert helpers.asked == (["features"] if lost == ("features",) else ["features", "gradients"]) * len(steps_of())


def test_where_helpers_give_up_every_view_is_looked_at_once() -> None:
    net = workplace_of(toy())().net
    net.helpers = Twin(net, ("features",))
    with patch.object(net, "features", side_effect=net.features) as looked:
        trained(net, steps_of())
    assert looked.call_count == sum(map(len, steps_of()))


def test_helpers_are_asked_only_where_views_know_nothing_of_each_other() -> None:
    static, tracked = workplace_of(toy())().net, workplace_of(toy_parts(toy_recipe("openfl", "clients")))().net
    for net in (static, tracked):
        net.helpers = Twin(net)
    net = static
    net.each(*views_of(2))  # in evaluation
    net.train(True)
    with torch.no_grad():
        net.each(*views_of(2))
    net.each(*views_of(1))
    net.each(*views_of(2, size=1))
    net.each(*(view[:, :, ::2] for view in views_of(2)))  # not as views usually lie
    tracked.train(True)
    tracked.each(*views_of(2))
    for one in (static, tracked):
        assert isinstance(one.helpers, Twin)
        assert not one.helpers.asked
    net.each(*views_of(2))
    assert isinstance(net.helpers, Twin)
    assert net.helpers.asked == ["features"]
    half = Net(net.network, "static", precision=torch.bfloat16)
    half.helpers = Twin(net)
    half.train(True)
    half.each(*views_of(2))
    assert not half.helpers.asked


@pytest.fixture(scope="module", params=[(name, workers) for name in NETWORKS for workers in (2, 3)], ids=str)
def crew(request: pytest.FixtureRequest) -> Iterator[tuple[Parts, LocalEngine]]:
    name, workers = request.param
    parts = toy(name, channels=3 if name == "resnet8" else 1)
    with closing(LocalEngine(workplace_of(parts), parts.scenario, workers)) as engine:
        yield parts, engine


@pytest.mark.slow
def test_workers_give_the_bits_of_one_process(crew: tuple[Parts, LocalEngine]) -> None:
    parts, engine = crew
    channels = parts.scenario.dataset.x_train.shape[1]
    alone, helped = (workplace_of(parts)().net for _ in range(2))
    first = shaken(alone.state())
    for net in (alone, helped):
        net.load(first)
    helped.helpers = engine.helpers()
    with patch.object(Pool, "gradients", autospec=True, side_effect=Pool.gradients) as asked:
        assert equal_weights(trained(alone, steps_of(channels)), trained(helped, steps_of(channels)))
    assert asked.call_count == len(steps_of())


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 2])  # in the first one the others hand over what they share
@pytest.mark.parametrize("when", ["features", "gradients"])
def test_a_worker_that_dies_costs_time_alone(when: str, call: int) -> None:
    parts = toy()
    alone, helped = (workplace_of(parts)().net for _ in range(2))
    with closing(LocalEngine(workplace_of(parts), parts.scenario, 2)) as engine:
        pool = helped.helpers = engine.helpers()
        assert isinstance(pool, Pool)
        asked, usual = [], getattr(pool, when)

        def fatal(*given: object) -> object:
            asked.append(len(asked))
            if len(asked) == call:
                os.kill(pool._workers[1].process.pid, signal.SIGKILL)  # type: ignore[arg-type]
            return usual(*given)

        with patch.object(pool, when, fatal):
            assert equal_weights(trained(alone, steps_of()), trained(helped, steps_of()))
        assert len(asked) == len(steps_of())
        assert all(worker.process.is_alive() for worker in pool._workers)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["features", "gradients"])
def test_workers_that_keep_dying_are_asked_no_more(when: str) -> None:
    parts = toy()
    alone, helped = (workplace_of(parts)().net for _ in range(2))
    with closing(LocalEngine(workplace_of(parts), parts.scenario, 2)) as engine:
        pool = helped.helpers = engine.helpers()
        assert isinstance(pool, Pool)
        killed, usual = [], pool._together

        def fatal(orders: Any) -> Any:
            if isinstance(orders[0], {"features": Lesson, "gradients": Slopes}[when]):
                killed.append(pool._workers[0].process.pid)
                os.kill(killed[-1], signal.SIGKILL)
            return usual(orders)

        with patch.object(pool, "_together", fatal):
            assert equal_weights(trained(alone, steps_of()), trained(helped, steps_of()))
        assert len(killed) == 3 < len(steps_of())


@pytest.mark.slow
def test_gradients_of_forgotten_views_are_computed_here() -> None:
    parts = toy()
    alone, helped = (workplace_of(parts)().net for _ in range(2))
    with closing(LocalEngine(workplace_of(parts), parts.scenario, 2)) as engine:
        helped.helpers = engine.helpers()
        found = []
        for net in (alone, helped):
            net.train(True)
            first, second = (net.each(*views_of(2, seed=seed)) for seed in (1, 2))
            first[1].logits.sum().backward()
            second[0].logits.sum().backward()
            found.append({name: one.grad for name, one in net.learners().items() if one.grad is not None})
        for name, slope in found[0].items():
            torch.testing.assert_close(found[1][name], slope)


@pytest.mark.slow
def test_an_error_of_a_pass_is_told_with_where_it_was() -> None:
    parts = toy()
    net = workplace_of(parts)().net
    with closing(LocalEngine(workplace_of(parts), parts.scenario, 2)) as engine:
        net.helpers = engine.helpers()
        net.train(True)
        with pytest.raises(RuntimeError, match=r"(?s)a pass of the server's training failed:.*in look"):
            net.each(*views_of(2, channels=5))


def test_one_process_has_no_helpers() -> None:
    parts = toy(workers=1)
    with closing(LocalEngine(workplace_of(parts), parts.scenario, 1)) as engine:
        assert engine.helpers() is None


@pytest.mark.slow
@pytest.mark.parametrize(("method", "channels"), [("openfl", 3), ("fedopenmatch", 1)])
def test_a_run_with_helpers_is_the_run_without(method: str, channels: int, tmp_path: Path) -> None:
    alone = run_toy(toy(method=method, workers=1, channels=channels), tmp_path / "alone")
    with patch.object(Pool, "features", autospec=True, side_effect=Pool.features) as asked:
        helped = run_toy(toy(method=method, channels=channels), tmp_path / "helped")
    assert asked.call_count > 0
    assert equal_weights(alone.weights, helped.weights)
