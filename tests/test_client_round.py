"""A client's part of a round: what it carries from step to step, keeps from round to round and never sends."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from semifed.assembly import Parts
from semifed.client_round import Held, Reply, Task, client_round
from semifed.data.client import Batch, ClientData
from semifed.fit import Fitted, Loss
from semifed.method import Method
from semifed.net import Net
from semifed.objectives import supervised
from semifed.payloads import Down, Local, Server, Up, Visit
from semifed.recipe import Recipe
from toys import Outcome, Quiet, equal_weights, place_of, run_toy, site_of, toy_parts, toy_recipe

# Loss.carry and Method.keep


class Count(NamedTuple):
    """Steps of a client, over all of its rounds."""

    steps: Tensor


@dataclass(frozen=True, kw_only=True)
class Counts(Method[Server, Down, Up, Count, Count]):
    """Each step reads what the step before left behind, and the last one is kept; its loss shrinks with the count."""

    title: ClassVar[str] = "a method that counts"

    def prepare(self, net: Net, down: Down, data: ClientData, kept: Count | None, visit: Visit) -> Local[Count, Count]:
        start = kept or Count(torch.tensor(0))
        return Local(data, start, start)

    def loss(self, net: Net, batch: Batch, const: Count) -> Loss:
        value, terms, *_ = supervised(net, batch)
        return Loss(value / (1 + const.steps), {**terms, "count": const.steps}, carry=Count(const.steps + 1))

    def report(self, net: Net, local: Local[Count, Count], fitted: Fitted) -> Up:
        assert local.kept.steps == local.const.steps, "what was prepared is not touched"
        return Up(net.trained(), torch.tensor(float(fitted.steps)))

    def keep(self, net: Net, local: Local[Count, Count], const: Count) -> Count:
        return const


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Parts:
    recipe = toy_recipe("fedavg", "clients", {"local": {"epochs": 2}})
    monkeypatch.setattr(Recipe, "build_method", lambda self: Counts())
    return Parts(recipe, Counts(), toy_parts(recipe).scenario)


def test_steps_are_counted_within_and_across_rounds(counting: Parts) -> None:
    place, data = place_of(counting), counting.scenario.client(1)
    down = Down(place.net.state())
    first = client_round(place, Task(1, 1, 0.05, None), down, data)
    steps = first.record.steps
    assert steps > 1
    assert int(first.held.kept.steps) == steps
    assert first.record.terms["count"] == pytest.approx((steps - 1) / 2)  # 0, 1, 2, ...
    second = client_round(place, Task(2, 1, 0.05, first.held), down, data)
    assert int(second.held.kept.steps) == 2 * steps
    assert second.record.terms["count"] == pytest.approx(steps + (steps - 1) / 2)
    assert int(first.held.kept.steps) == steps
    other = client_round(place, Task(2, 2, 0.05, None), down, counting.scenario.client(2))
    assert int(other.held.kept.steps) == other.record.steps


def test_counts_survive_an_interruption(counting: Parts, tmp_path: Path) -> None:
    whole = run_toy(counting, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run_toy(counting, tmp_path / "parts", reporter=Quiet(stop_after=2))
    resumed = run_toy(counting, tmp_path / "parts", resume=True)
    assert equal_weights(resumed.weights, whole.weights)
    steps: dict[int, int] = {}
    for exchange in whole.exchanges:
        for answer in exchange.answers:
            assert isinstance(answer, Reply)
            client = answer.record.client
            steps[client] = steps.get(client, 0) + answer.record.steps
            assert int(answer.held.kept.steps) == steps[client]
    last = {
        a.record.client: int(a.held.kept.steps) for e in resumed.exchanges for a in e.answers if isinstance(a, Reply)
    }
    assert last.items() <= steps.items()


# Layers of batch norm that stay at home, as in FedBN.


LOCAL = {"model": {"batchnorm": "local"}, "server": {"finetune_epochs": 0}}


def normalising(names: Any) -> set[str]:
    return {name for name in names if "norms." in name}


def test_local_layers_are_not_sent_and_not_averaged() -> None:
    parts = toy_parts(toy_recipe("fedfixmatch", "server", LOCAL))
    place = place_of(parts)
    start = place.net.state()
    replies = [
        client_round(place, Task(1, client, 0.05, None), Down(start), parts.scenario.client(client))
        for client in (0, 1)
    ]
    for reply in replies:
        assert set(reply.up.weights) == set(start) - normalising(start)
        assert set(reply.held.private) == normalising(start)
        assert any(not torch.equal(reply.held.private[name], start[name]) for name in normalising(start))
    after = parts.method.aggregate(Server(start), [reply.up for reply in replies], site_of(parts, 1))
    for name in start:
        assert torch.equal(after.weights[name], start[name]) == (name in normalising(start))


def test_a_known_client_goes_on_with_its_own_layers_and_a_new_one_with_the_servers() -> None:
    parts = toy_parts(toy_recipe("fedfixmatch", "server", LOCAL))
    place, data = place_of(parts), parts.scenario.client(1)
    start = place.net.state()
    first = client_round(place, Task(1, 1, 0.05, None), Down(start), data)
    moved = {name: tensor + 0.25 for name, tensor in start.items()}
    # Without a learning rate scale and shift show what the training began with.
    affine = [name for name in normalising(start) if "running_" not in name]
    known = client_round(place, Task(2, 1, 0.0, first.held), Down(moved), data)
    new = client_round(place, Task(2, 1, 0.0, None), Down(moved), data)
    for name in affine:
        assert torch.equal(known.held.private[name], first.held.private[name])
        assert torch.equal(new.held.private[name], moved[name])
        assert not torch.equal(first.held.private[name], start[name])
    for name in known.up.weights:
        assert torch.equal(known.up.weights[name], moved[name])


@pytest.mark.parametrize("method", ["fedfixmatch", "openfl"])
@pytest.mark.slow
def test_private_layers_survive_an_interruption_and_any_number_of_workers(method: str, tmp_path: Path) -> None:
    def parts(workers: int) -> Parts:
        return toy_parts(toy_recipe(method, "server", {**LOCAL, "engine": {"workers": workers}}, rounds=3))

    whole = run_toy(parts(1), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run_toy(parts(1), tmp_path / "parts", reporter=Quiet(stop_after=2))
    resumed = run_toy(parts(2), tmp_path / "parts", resume=True)
    assert equal_weights(resumed.weights, whole.weights)
    pairs = zip(held_at_the_end(resumed, 3).items(), held_at_the_end(whole, 3).items(), strict=True)
    for (client, one), (same, other) in pairs:
        assert client == same
        assert one.private
        assert equal_weights(one.private, other.private)


def held_at_the_end(outcome: Outcome, round_: int) -> dict[int, Held]:
    (exchange,) = (one for one in outcome.exchanges if one.round == round_)
    return {answer.record.client: answer.held for answer in exchange.answers if isinstance(answer, Reply)}


def test_a_server_with_labels_trains_local_layers_of_its_own() -> None:
    """They are what clients never seen before start from, and what the delivered model is tested with."""
    parts = toy_parts(toy_recipe("fedfixmatch", "server", LOCAL))
    state = parts.method.setup(place_of(parts).net.state(), site_of(parts, 0))
    start = place_of(parts).net.state()
    assert all(not torch.equal(state.weights[name], start[name]) for name in normalising(start))


# Tracked statistics with labels at the server: the ablation without static batch norm


@pytest.mark.parametrize("method", ["fedfixmatch", "openfl"])
def test_tracked_statistics_travel_and_are_averaged(method: str) -> None:
    changes = {"model": {"batchnorm": "tracked"}, "server": {"finetune_epochs": 0}}
    if method == "openfl":
        changes["method"] = {"weighting": "uniform"}
    parts = toy_parts(toy_recipe(method, "server", changes))
    site = site_of(parts, 0)
    state: Any = parts.method.setup(site.net.state(), site)
    place = place_of(parts)
    down = parts.method.broadcast(state)
    ups = [client_round(place, Task(1, c, 0.05, None), down, parts.scenario.client(c)).up for c in range(3)]
    statistics = {name for name in state.weights if "running_" in name}
    assert statistics <= set(ups[0].weights)
    site.round = 1
    after = parts.method.aggregate(state, ups, site)
    shares: Any = site.notes["client_weights"]
    for name in statistics:
        expected = sum(share * up.weights[name].double().numpy() for share, up in zip(shares, ups, strict=True))
        np.testing.assert_allclose(after.weights[name].numpy(), expected, rtol=1e-5, atol=1e-6)


# The ceiling that averages too, and the others


@pytest.mark.parametrize(
    ("method", "labels", "options"),
    [
        ("openfl", "server", {"threshold": 0.36, "known_threshold": 0.4, "align_after": 0.0}),
        ("openfl", "some-clients", {"align_after": 0.0}),
        ("fedssb-ema", "server", {}),
        ("fedavg-sl", "clients", {"ema": 0.8}),
    ],
)
@pytest.mark.slow
def test_averages_and_pivots_survive_an_interruption_and_any_number_of_workers(
    method: str, labels: str, options: dict[str, Any], tmp_path: Path
) -> None:
    def parts(workers: int) -> Parts:
        changes: dict[str, dict[str, Any]] = {"method": options, "engine": {"workers": workers}}
        return toy_parts(toy_recipe(method, labels, changes, rounds=3))

    whole = run_toy(parts(1), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run_toy(parts(2), tmp_path / "parts", reporter=Quiet(stop_after=1))
    resumed = run_toy(parts(1), tmp_path / "parts", resume=True)
    assert equal_weights(resumed.weights, whole.weights)
    assert [{**line, "seconds": 0} for line in resumed.rounds] == [{**line, "seconds": 0} for line in whole.rounds]
