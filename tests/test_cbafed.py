"""CBAFed against plain loops: thresholds, labels, connections of weights, and what the server gathers."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.losses import log_probabilities
from semifed.assembly import Parts
from semifed.class_balance import Demand, Given, balanced_demand, class_counts, no_labels, pooled_frequencies
from semifed.client_round import Reply as Answer
from semifed.client_round import Task, client_round
from semifed.data.client import Budget, ClientData, batches, epoch_length
from semifed.data.views import Views
from semifed.fit import Course, Optimiser
from semifed.losses import cross_entropy
from semifed.methods.cbafed import CBAFed, Reply, Sent, State
from semifed.net import Net
from semifed.payloads import Down, Local, Visit
from semifed.residual import residual_connection
from semifed.rng import torch_stream
from semifed.schedule import opening
from semifed.wire import Weights
from toys import Outcome, equal_weights, place_of, run_toy, shaken, site_of, toy_parts, toy_recipe

CLIENT = 1
UNIFORM = torch.full((3,), 1 / 3)
shares_of_classes = st.lists(st.floats(0, 1), min_size=2, max_size=12).filter(lambda row: sum(row) > 0.1)
claims = st.one_of(st.sampled_from([math.nan, math.inf, -5.0, 1e300]), st.integers(0, 400).map(float))


# Formulas


def demanded(frequency: Sequence[float], base: float, most: float, rare: float) -> tuple[list[float], list[bool]]:
    """T_c = min(r_c + base − std(r), most) with r_c = frequency_c · C / 10, number by number."""
    relative = [share * len(frequency) / 10 for share in frequency]
    middle = sum(relative) / len(relative)
    spread = math.sqrt(sum((value - middle) ** 2 for value in relative) / (len(relative) - 1))
    return [min(value + base - spread, most) for value in relative], [value < rare for value in relative]


@given(shares_of_classes, st.floats(0.3, 0.9))
def test_thresholds(raw: list[float], base: float) -> None:
    frequency = [value / sum(raw) for value in raw]
    threshold, rare = demanded(frequency, base, 0.95, 0.03)
    found = balanced_demand(torch.tensor(frequency, dtype=torch.float64), base, 0.95, 0.03)
    assert found.threshold.tolist() == pytest.approx(threshold, abs=1e-9)
    assert found.rare.tolist() == rare


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_balanced_classes_need_the_same_whatever_their_number(classes: int) -> None:
    found = balanced_demand(torch.full((classes,), 1 / classes), 0.84, 0.95, 0.03)
    assert found.threshold.tolist() == pytest.approx([0.94] * classes, abs=1e-4)
    assert not found.rare.any()


def test_a_frequent_class_needs_more_than_a_rare_one_but_no_more_than_the_cap() -> None:
    frequency = torch.tensor([0.55, 0.2, 0.2, 0.04, 0.01])
    found = balanced_demand(frequency, 0.84, 0.95, 0.03)
    assert found.threshold.tolist() == sorted(found.threshold.tolist(), reverse=True)
    assert float(found.threshold[0]) == pytest.approx(0.95)
    assert found.rare.tolist() == [False, False, False, True, True]


def test_one_class_has_no_spread_and_no_second() -> None:
    found = balanced_demand(torch.ones(1), 0.84, 0.95, 0.03)
    assert found.threshold.tolist() == pytest.approx([0.94])
    given_ = found.labels(torch.zeros(3, 1), torch.zeros(2, dtype=torch.int64))
    assert given_.used.all()
    assert given_.counts.tolist() == [5]


logit_rows = st.lists(st.lists(st.integers(-40, 40), min_size=4, max_size=4, unique=True), min_size=1, max_size=12)


@given(
    logit_rows, st.lists(st.floats(0.2, 0.99), min_size=4, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4)
)
def test_labels(raw: list[list[int]], threshold: list[float], rare: list[bool]) -> None:
    rows = [[value / 8 for value in row] for row in raw]
    own = [0, 3, 3]
    found = Demand(torch.tensor(threshold), torch.tensor(rare)).labels(torch.tensor(rows), torch.tensor(own))
    counts = [own.count(c) for c in range(4)]
    for k, row in enumerate(rows):
        probabilities = [math.exp(value) for value in log_probabilities(row)]
        first, second = sorted(range(4), key=lambda c: -probabilities[c])[:2]
        if abs(probabilities[first] - threshold[first]) < 1e-5:
            return
        sure = probabilities[first] >= threshold[first]
        used = sure or rare[second]
        label = first if sure or not rare[second] else second
        assert (int(found.label[k]), bool(found.used[k])) == (label, used)
        counts[label] += used
    assert found.counts.tolist() == counts


def test_no_label_passes_the_warm_up() -> None:
    found = no_labels(UNIFORM).labels(100 * torch.eye(3), torch.tensor([1]))
    assert not found.used.any()
    assert found.counts.tolist() == [0, 1, 0]


def test_labels_of_no_images() -> None:
    found = balanced_demand(UNIFORM, 0.4, 0.95, 0.03).labels(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    assert (len(found.label), len(found.used), found.counts.tolist()) == (0, 0, [0, 0, 0])


@given(st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=1, max_size=6))
def test_frequencies_are_those_of_all_labels_together(counts: list[list[int]]) -> None:
    total = np.array(counts).sum(axis=0)
    found = pooled_frequencies([torch.tensor(row).float() for row in counts], None, UNIFORM, 1e6)
    expected = total / total.sum() if total.sum() else UNIFORM.numpy()
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5)


@settings(max_examples=50)
@given(st.lists(st.lists(claims, min_size=3, max_size=3), min_size=1, max_size=6))
def test_whatever_is_claimed_frequencies_are_shares(counts: list[list[float]]) -> None:
    found = pooled_frequencies([torch.tensor(row) for row in counts], None, UNIFORM, 5.0)
    assert float(found.sum()) == pytest.approx(1.0, abs=1e-5)
    assert bool((found >= 0).all())
    demand = balanced_demand(found, 0.84, 0.95, 0.03)
    assert bool(torch.isfinite(demand.threshold).all())
    assert float(demand.threshold.max()) <= 0.95 + 1e-6


def test_a_liar_moves_frequencies_no_more_than_its_share() -> None:
    honest = [torch.tensor([30.0, 30.0, 30.0])] * 9
    found = pooled_frequencies([*honest, torch.tensor([1e12, 0.0, 0.0])], None, UNIFORM, 2.0)
    assert found.tolist() == pytest.approx([0.2 + 0.8 / 3, 0.8 / 3, 0.8 / 3], abs=1e-5)
    strange = [torch.tensor([4.0, 4.0]), torch.tensor([[1.0, 1.0, 1.0]])]
    assert torch.equal(pooled_frequencies(strange, None, UNIFORM, 2.0), UNIFORM), "counts of other classes say nothing"


def test_the_servers_labels_count_too() -> None:
    scenario = toy_parts(toy_recipe("cbafed", "server")).scenario
    assert scenario.server is not None
    own = class_counts(scenario.server.labels, 3)
    assert own.tolist() == [4, 4, 4]
    found = pooled_frequencies([torch.tensor([12.0, 0.0, 0.0])], scenario.server, UNIFORM, 1e6)
    assert found.tolist() == pytest.approx([16 / 24, 4 / 24, 4 / 24])


@given(st.floats(0, 1), st.integers(1, 3000))
def test_opening_rounds(share: float, rounds: int) -> None:
    found = opening(share, rounds)
    assert 0 <= found <= rounds
    assert found - 1 < share * rounds + 1e-5
    assert found > share * rounds - 1e-5


# The client


class World(NamedTuple):
    parts: Parts
    net: Net
    down: Sent
    data: ClientData

    @property
    def method(self) -> CBAFed:
        assert isinstance(self.parts.method, CBAFed)
        return self.parts.method

    def prepare(self) -> Local[Given, Any]:
        with torch.no_grad():
            return self.method.prepare(self.net, self.down, self.data, None, Visit(0, 1, CLIENT))


def world(labels: str = "server", local: dict[str, Any] | None = None, **options: Any) -> World:
    """A client that has received weights in the middle of a run, and thresholds that some of its images reach."""
    parts = toy_parts(toy_recipe("cbafed", labels, {"method": options, "local": local or {}}, rounds=2))
    net = place_of(parts).net
    noisy = shaken(net.state())
    net.load(noisy)
    data = parts.scenario.client(CLIENT)
    confidence = gate_logits(net, data).softmax(dim=1).max(dim=1).values
    demand = Demand(confidence.quantile(0.4).repeat(3), torch.zeros(3, dtype=torch.bool))
    return World(parts, net, Sent(noisy, demand), data)


def gate_logits(net: Net, data: ClientData) -> torch.Tensor:
    """What the received network says of the views it labels, one image at a time."""
    view = data.views.weak(data.images[data.unlabelled], torch_stream(0, 1, CLIENT, "gate"))
    with torch.no_grad():
        return torch.cat([net(image[None]).logits for image in view])


def answer_of(here: World) -> Answer:
    return client_round(place_of(here.parts), Task(1, CLIENT, 0.05, None), here.down, here.data)


def test_labels_are_those_of_the_received_model_and_stay_for_the_round() -> None:
    here = world("clients")
    expected = here.down.demand.labels(gate_logits(here.net, here.data), here.data.labels)
    kept = expected.used.nonzero().flatten()
    assert 0 < len(kept) < len(expected.label)
    local = here.prepare()
    assert local.data.unlabelled.tolist() == here.data.unlabelled[kept].tolist()
    answer = answer_of(here)
    assert answer.up.counts.tolist() == expected.counts.tolist()
    assert float(expected.counts.sum()) == len(here.data.labels) + len(kept)
    assert float(answer.up.samples) == len(set(local.data.labelled.tolist()) | set(local.data.unlabelled.tolist()))
    pseudo = answer.record.pseudo
    assert pseudo is not None
    assert pseudo.label.tolist() == expected.label.tolist()
    assert pseudo.used.tolist() == expected.used.tolist()


def test_the_loss_by_hand() -> None:
    here = world("clients")
    local = here.prepare()
    batch = next(iter(batches(local.data, Budget(1, None, 8), (0, 1, CLIENT))))
    here.net.network.train()
    with torch.no_grad():
        said = here.net(batch.labelled.weak).logits.tolist()
        weak = here.net(batch.unlabelled.weak).logits.tolist()
    accepted = local.const.label[local.const.used].tolist()
    goals = [accepted[k] for k in batch.unlabelled.position.tolist()]
    own = np.mean([-log_probabilities(row)[y] for row, y in zip(said, batch.labelled.labels.tolist(), strict=True)])
    given_ = np.mean([-log_probabilities(row)[y] for row, y in zip(weak, goals, strict=True)])
    loss = here.method.loss(here.net, batch, local.const)
    assert loss.value.item() == pytest.approx(own + given_, rel=1e-4)
    assert loss.terms["given"].item() == pytest.approx(given_, rel=1e-4)


def test_nothing_accepted_and_no_labels_is_nothing_to_learn_from() -> None:
    here = world()
    here = here._replace(down=here.down._replace(demand=no_labels(UNIFORM)))
    answer = answer_of(here)
    assert float(answer.up.samples) == 0
    assert answer.up.counts.tolist() == [0, 0, 0]
    assert equal_weights(answer.up.weights, {name: here.down.weights[name] for name in answer.up.weights})


def test_a_single_accepted_image_can_be_learnt() -> None:
    here = world()
    chosen = here.prepare().const.used.nonzero()[0]
    answer = answer_of(here._replace(data=here.data._replace(unlabelled=here.data.unlabelled[chosen])))
    assert answer.record.pseudo is not None
    assert answer.record.pseudo.used.tolist() == [True]
    assert float(answer.up.samples) == 1
    start = here.down.weights["classifier.weight"]
    assert not torch.equal(answer.up.weights["classifier.weight"], start)
    assert torch.isfinite(answer.up.weights["classifier.weight"]).all()


@pytest.mark.parametrize("kept", [0, 3, None])
def test_the_gate_does_not_decide_how_long_a_client_trains(kept: int | None) -> None:
    here = world("clients")
    sureness = gate_logits(here.net, here.data).softmax(dim=1).max(dim=1).values.sort(descending=True).values
    needed = {0: torch.tensor(1.0), 3: (sureness[2] + sureness[3]) / 2, None: torch.tensor(0.0)}[kept]
    demand = Demand(needed.repeat(3), torch.zeros(3, dtype=torch.bool))
    here = here._replace(down=here.down._replace(demand=demand))
    assert len(here.prepare().data.unlabelled) == (len(sureness) if kept is None else kept)
    plain = toy_parts(toy_recipe("fixmatch-lpl", "clients", rounds=2))
    task, down = Task(1, CLIENT, 0.05, None), Down(here.down.weights)
    steps = client_round(place_of(plain), task, down, plain.scenario.client(CLIENT)).record.steps
    assert steps > 1
    assert answer_of(here).record.steps == steps


def test_nobody_looks_at_unlabelled_images_in_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    here = world("clients")
    asked: list[int] = []
    weak = Views.weak

    def counted(views: Views, raw: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        asked.append(len(raw))
        return weak(views, raw, generator)

    monkeypatch.setattr(Views, "weak", counted)
    assert len(here.prepare().data.unlabelled) > 0
    assert sum(asked) == len(here.data.unlabelled)
    asked.clear()
    warm = here._replace(down=here.down._replace(demand=no_labels(UNIFORM)))
    local = warm.prepare()
    assert sum(asked) == 0
    assert len(local.data.unlabelled) == 0
    assert local.const.counts.tolist() == class_counts(here.data.labels, 3).tolist()


@pytest.mark.parametrize(("labels", "epochs"), [("clients", 6), ("clients", 5), ("server", 6)])
def test_local_connection(labels: str, epochs: int) -> None:
    """The same training without connections, its weights noted after each epoch; the first connection by hand."""
    quick = {"epochs": epochs, "batch": 16}
    here = world(labels, quick, local_connect_every=2)
    unconnected = world(labels, quick, local_connect_every=100)
    local, place = here.prepare(), place_of(here.parts)
    epoch = epoch_length(here.data, place.budget)
    course = Course(place.budget, (0, 1, CLIENT), place.optimiser._replace(lr=0.05), None)
    noted: dict[int, Weights] = {}
    place.net.load(here.down.weights)
    course.follow(
        place.net,
        local.data,
        here.method.loss,
        local.const,
        steps=epochs * epoch,
        after=lambda step: noted.update({step: place.net.state()}),
    )
    assert max(noted) == epochs * epoch
    connected = course._replace(budget=place.budget._replace(epochs=3))  # up to the first connection
    place.net.load(here.down.weights)
    here.method.train(place.net, local, connected)
    found = place.net.state()
    for name, tensor in found.items():
        plain = noted[3 * epoch][name]
        expected = 0.8 * noted[epoch][name] + 0.2 * plain if labels == "clients" else plain
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)
    whole = answer_of(unconnected).up.weights
    assert equal_weights(whole, {name: noted[epochs * epoch][name] for name in whole})
    assert equal_weights(answer_of(here).up.weights, whole) == (labels == "server")


def test_connections_follow_the_record() -> None:
    net = world().net
    start = net.state()["classifier.weight"]
    connect = residual_connection(net, 2, 3, 0.8)
    value, record = 0.0, 0.0
    for step in range(1, 21):
        net.load({"classifier.weight": net.state()["classifier.weight"] + 1})
        value += 1
        connect(step)
        if step == 2:
            record = value
        elif step in (8, 14, 20):  # an epoch has two steps: after the first and every three more
            record = value = 0.8 * record + 0.2 * value
        torch.testing.assert_close(net.state()["classifier.weight"] - start, torch.full_like(start, value))


def test_steps_are_counted_for_whoever_asks() -> None:
    here = world("clients")
    local, told = here.prepare(), list[int]()
    course = Course(Budget(None, 5, 8), (0, 1, CLIENT), Optimiser(0.01), None)
    fitted = course.follow(here.net, local.data, here.method.loss, local.const, after=told.append)
    assert told == [1, 2, 3, 4, 5]
    assert fitted.steps == 5
    assert course.epoch(local.data) == sum(1 for _ in batches(local.data, Budget(1, None, 8), (0,)))


# The server


def replies(site_names: Sequence[str], weights: Weights, counts: Sequence[Sequence[float]], seed: int) -> list[Reply]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Reply(
            {n: torch.rand(weights[n].shape, generator=generator) for n in site_names},
            torch.tensor(float(sum(row))),
            torch.tensor(row),
        )
        for row in counts
    ]


def test_seven_rounds_of_the_server_by_hand() -> None:
    """Two rounds of warm-up (0.25 of 8), then a connection every second round."""
    options = {"warmup": 0.25, "connect_every": 2, "most_trust": 1e6, "persistence": 0.7}
    parts = toy_parts(toy_recipe("cbafed", "clients", {"method": options}, rounds=8))
    method = parts.method
    assert isinstance(method, CBAFed)
    site = site_of(parts)
    state = method.setup(shaken(site.net.state()), site)
    assert bool(state.labels_only)
    counts = [[8.0, 1.0, 1.0], [20.0, 0.0, 10.0], [0.0, 0.0, 0.0]]
    names = site.net.trained_names()
    record = {name: state.weights[name].double().numpy() for name in names}
    for round_ in range(1, 8):
        sent = method.broadcast(state)
        assert bool((sent.demand.threshold > 1).all()) == (round_ <= 2)
        site = site_of(parts, round_)
        ups = replies(names, state.weights, counts, round_)
        state = method.aggregate(state, ups, site)
        mean = {
            name: 0.25 * ups[0].weights[name].double().numpy() + 0.75 * ups[1].weights[name].double().numpy()
            for name in names
        }
        if round_ in (4, 6):
            mean = {name: 0.7 * record[name] + 0.3 * mean[name] for name in names}
        if round_ in (1, 2, 4, 6):
            record = mean
        for name in names:
            np.testing.assert_allclose(state.weights[name].numpy(), mean[name], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(state.record[name].numpy(), record[name], rtol=1e-4, atol=1e-5)
        assert state.frequency.tolist() == pytest.approx([0.7, 0.025, 0.275], abs=1e-6)
        assert site.notes["client_weights"] == pytest.approx([0.25, 0.75, 0.0])
    threshold, rare = demanded([0.7, 0.025, 0.275], 0.4, 0.95, 0.03)
    last = method.broadcast(state).demand
    assert last.threshold.tolist() == pytest.approx(threshold, abs=1e-5)
    assert last.rare.tolist() == rare == [False, True, False]


def test_nobody_answers_and_nothing_changes() -> None:
    here = world("clients")
    state = State(here.down.weights, here.down.weights, torch.tensor([0.5, 0.3, 0.2]), torch.tensor(False))
    after = here.method.aggregate(state, [], site_of(here.parts, 2))
    assert equal_weights(after.weights, state.weights)
    assert torch.equal(after.frequency, state.frequency)


def test_a_client_that_claims_too_much_is_capped() -> None:
    here = world("clients")
    state = State(here.down.weights, here.down.weights, UNIFORM, torch.tensor(False))
    site = site_of(here.parts, 2)
    ups = replies(site.net.trained_names(), here.down.weights, [[10.0, 10.0, 10.0]] * 9 + [[1e9, 0.0, 0.0]], 0)
    after = here.method.aggregate(state, ups, site)
    assert site.notes["client_weights"] == pytest.approx([0.5 / 9] * 9 + [0.5], abs=1e-6)
    assert after.frequency.tolist() == pytest.approx([0.5 + 0.5 / 3, 0.5 / 3, 0.5 / 3], abs=1e-5)


# Runs


def run(labels: str, tmp_path: Path, method: str = "cbafed", **options: Any) -> Outcome:
    changes = {"method": options, "scenario": {"classes": "known"}}
    return run_toy(toy_parts(toy_recipe(method, labels, changes)), tmp_path / method)


def test_warm_up_to_the_end_is_fedavg_of_labels(tmp_path: Path) -> None:
    ours = run("some-clients", tmp_path, warmup=1.0, most_trust=1e6)
    plain = run("some-clients", tmp_path, "fedavg")
    assert [line["pseudo"]["seen"] for line in ours.rounds[1:]] == [0] * 4
    for name, tensor in plain.weights.items():
        torch.testing.assert_close(ours.weights[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_run_with_labels_at_the_server_starts_at_once_from_its_labels(tmp_path: Path) -> None:
    outcome = run("server", tmp_path)
    first = outcome.exchanges[0].down.demand
    threshold, rare = demanded([1 / 3] * 3, 0.4, 0.95, 0.03)
    assert first.threshold.tolist() == pytest.approx(threshold, abs=1e-5)
    assert first.rare.tolist() == rare
    for line in outcome.rounds[1:]:
        assert line["pseudo"]["used"] > 0
        assert sum(line["class_frequency"]) == pytest.approx(1.0, abs=1e-5)
    assert outcome.rounds[-1]["loss"].keys() == {"total", "given"}


def test_weights_come_from_what_was_accepted(tmp_path: Path) -> None:
    outcome = run("some-clients", tmp_path, most_trust=1e6)
    for exchange, line in zip(outcome.exchanges, outcome.rounds[1:], strict=True):
        told = np.array([float(answer.up.counts.sum()) for answer in exchange.answers])  # type: ignore[union-attr]
        np.testing.assert_allclose(line["client_weights"], told / told.sum(), rtol=1e-6, atol=1e-9)


def test_cross_entropy_of_given_labels_falls(tmp_path: Path) -> None:
    """Within a round, on the labels that were fixed at its start."""
    here = world(local={"epochs": 4})
    local = here.prepare()
    images = here.data.views.plain(here.data.images[local.data.unlabelled])
    goal = local.const.label[local.const.used]
    place = place_of(here.parts)
    with torch.no_grad():
        before = float(cross_entropy(here.net(images).logits, goal).mean())
    client_round(place, Task(1, CLIENT, 0.05, None), here.down, here.data)
    with torch.no_grad():
        after = float(cross_entropy(place.net(images).logits, goal).mean())
    assert after < before
