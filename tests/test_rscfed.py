"""RSCFed against plain loops, explicit group models and a teacher that follows its student by hand."""

import copy
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reference.losses import log_probabilities
from semifed.aggregate import bounded_shares, capped_shares, claimed_counts, shares
from semifed.assembly import Parts
from semifed.client_round import Held, Task, client_round
from semifed.client_round import Reply as Answer
from semifed.data.client import Batch, Budget, ClientData, batches
from semifed.fit import Loss
from semifed.losses import squared_distance
from semifed.mean_teacher import Average, MeanTeacher, mean_teacher
from semifed.methods.rscfed import Phased, RSCFed, Taught
from semifed.net import Net
from semifed.payloads import Local, Visit
from semifed.pseudo import sharpened
from semifed.rng import torch_stream
from semifed.sub_consensus import Consensus, Member, content_order, distance_shares, model_distance, random_groups
from semifed.wire import Weights
from toys import equal_weights, place_of, run_toy, shaken, site_of, toy_parts, toy_recipe

CLIENT = 1
Array = NDArray[np.float64]
rows = st.lists(st.lists(st.floats(-8, 8, width=32), min_size=4, max_size=4), min_size=1, max_size=8)
anything = st.one_of(
    st.sampled_from([math.nan, math.inf, -math.inf, -3.0, 0.0, 1e300]), st.floats(1, 1e6), st.integers(0, 500)
)


# Formulas


@given(rows, st.floats(0.2, 2))
def test_sharpening(logits: list[list[float]], temperature: float) -> None:
    found = sharpened(torch.tensor(logits, dtype=torch.float64), temperature)
    for row, answer in zip(logits, found.tolist(), strict=True):
        raised = [math.exp(value) ** (1 / temperature) for value in log_probabilities(row)]
        assert answer == pytest.approx([value / sum(raised) for value in raised], rel=1e-9, abs=1e-12)


def test_sharpening_by_a_half_squares_the_odds() -> None:
    found = sharpened(torch.tensor([[0.2, 0.8]]).log(), 0.5)
    assert found.tolist()[0] == pytest.approx([0.04 / 0.68, 0.64 / 0.68])
    assert not sharpened(torch.zeros(1, 2, requires_grad=True), 0.5).requires_grad


@given(rows)
def test_squared_distance(logits: list[list[float]]) -> None:
    target = torch.tensor(logits, dtype=torch.float64).roll(1, dims=1).softmax(dim=1)
    found = squared_distance(torch.tensor(logits, dtype=torch.float64), target)
    for row, goal, answer in zip(logits, target.tolist(), found.tolist(), strict=True):
        by_hand = sum((math.exp(a) - b) ** 2 for a, b in zip(log_probabilities(row), goal, strict=True))
        assert answer == pytest.approx(by_hand, abs=1e-12)


def test_squared_distance_against_finite_differences() -> None:
    logits = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    target = torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.autograd.gradcheck(lambda x: squared_distance(x, target), logits)


def model(seed: int, size: float = 1.0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {"kernel": size * torch.randn(2, 3, generator=generator), "bias": size * torch.randn(3, generator=generator)}


def test_distance_is_the_sum_of_the_tensors_norms() -> None:
    one, other = model(0), model(1)
    by_hand = 0.0
    for name in one:
        squares = [(a - b) ** 2 for a, b in zip(one[name].flatten().tolist(), other[name].flatten().tolist())]  # noqa: B905
        by_hand += math.sqrt(sum(squares))
    assert model_distance(one, other) == pytest.approx(by_hand, rel=1e-6)
    assert model_distance(one, one) == 0.0
    whole = math.sqrt(sum(float(((one[name] - other[name]) ** 2).sum()) for name in one))
    assert model_distance(one, other) > whole, "not the norm of all weights together"
    statistics = {**one, "running_mean": torch.full((3,), 100.0)}
    assert model_distance(statistics, other) == model_distance(one, other), "only what the other names"


def released_weights(
    counts: Sequence[float],
    distances: Sequence[float],
    labelled: Sequence[bool],
    scales: tuple[float, float],
    by: float,
) -> Array:
    """n_k exp(−s d_k / n_k), times `by` for clients with labels, with the authors' s."""
    scale = scales[1] if any(labelled) else scales[0]
    raw = [
        n / sum(counts) * math.exp(-scale * d / n) * (by if has else 1.0)
        for n, d, has in zip(counts, distances, labelled, strict=True)
    ]
    return np.array(raw) / sum(raw)


@given(st.lists(st.tuples(st.integers(1, 900), st.floats(0, 3), st.booleans()), min_size=1, max_size=7))
def test_shares_of_distance_are_the_authors_where_no_bound_is_met(clients: list[tuple[int, float, bool]]) -> None:
    counts, distances, labelled = (
        [n for n, _, _ in clients],
        [d for _, d, _ in clients],
        [has for _, _, has in clients],
    )
    middle = sorted(counts)[(len(counts) - 1) // 2]
    expected = released_weights(counts, distances, labelled, (2.0 * middle, 0.5 * middle), 6.0)
    favour = torch.where(torch.tensor(labelled), 6.0, 1.0)
    found = distance_shares(list(map(float, counts)), distances, favour, 0.5 if any(labelled) else 2.0, 1e9)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-8)


@settings(max_examples=40)
@given(st.lists(st.tuples(anything, anything, st.booleans()), min_size=1, max_size=7), st.floats(1, 8))
def test_whatever_clients_claim_shares_are_bounded(clients: list[tuple[float, float, bool]], most: float) -> None:
    counts, distances, labelled = ([one[part] for one in clients] for part in range(3))
    favour = torch.where(torch.tensor(labelled), 6.0, 1.0)
    found = distance_shares(counts, distances, favour, 1.4, most)
    assert float(found.sum()) == pytest.approx(1.0, abs=1e-9)
    active = torch.tensor([not math.isnan(n) and n > 0 for n in counts])
    if not active.any():
        assert found.tolist() == pytest.approx([1 / len(counts)] * len(counts))
        return
    equal = 1 / int(active.sum())
    assert not found[~active].any()
    assert float(found[active].min()) >= equal / most * (1 - 1e-6)
    assert float(found[active].max()) <= equal * most * (1 + 1e-6)


def test_the_order_of_distances_is_that_of_shares() -> None:
    found = distance_shares([300.0] * 4, [0.0, 0.5, 1.0, math.nan], torch.ones(4), 1.4, 5.0)
    assert found.tolist() == sorted(found.tolist(), reverse=True)
    assert distance_shares([100.0, 300.0], [9.0, 0.1], torch.ones(2), 0.0, 10.0).tolist() == pytest.approx([0.25, 0.75])


@settings(max_examples=40)
@given(st.lists(anything, min_size=1, max_size=8), st.floats(1, 8))
def test_capped_counts(counts: list[float], most: float) -> None:
    found = capped_shares(counts, most)
    assert float(found.sum()) == pytest.approx(1.0, abs=1e-9)
    plain = shares(claimed_counts(counts))
    active = claimed_counts(counts) > 0
    if not active.any():
        torch.testing.assert_close(found, plain)
        return
    cap = most / int(active.sum())
    assert not found[~active].any()
    assert bool((found[active] > 0).all())
    assert float(found.max()) <= cap * (1 + 1e-6)
    if float(plain.max()) <= cap:
        torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-15)


def test_what_is_no_count_counts_as_nothing() -> None:
    assert claimed_counts([math.nan, -math.inf, -2.0, 5.0, math.inf]).tolist() == [0, 0, 0, 5, 1e9]


def test_bounded_shares_by_hand() -> None:
    trust = torch.tensor([8.0, 1.0, 1.0], dtype=torch.float64)
    assert bounded_shares(trust, 0.0, 0.5).tolist() == pytest.approx([0.5, 0.25, 0.25])
    assert bounded_shares(trust, 0.2, 1.0).tolist() == pytest.approx([0.6, 0.2, 0.2])
    assert bounded_shares(trust, 0.0, 1.0).tolist() == pytest.approx([0.8, 0.1, 0.1])


@given(st.integers(1, 12), st.floats(0.05, 1), st.integers(0, 50))
def test_groups(count: int, share: float, seed: int) -> None:
    members = [3 * k for k in range(count)]
    groups = random_groups(members, share, 3, torch.Generator().manual_seed(seed))
    assert len(groups) == 3
    for group in groups:
        assert len(group) == len(set(group)) == math.ceil(round(share * count, 6))
        assert set(group) <= set(members)
    assert random_groups([], share, 3, torch.Generator()) == []


def test_every_group_is_as_likely() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = random_groups(range(5), 0.4, 4000, generator)
    expected = 4000 / math.comb(5, 2)
    for pair in itertools.combinations(range(5), 2):
        found = sum(set(group) == set(pair) for group in drawn)
        assert abs(found - expected) < 5 * math.sqrt(expected)


def test_content_decides_the_order() -> None:
    models = [model(seed) for seed in range(5)]
    order = content_order(models)
    assert sorted(order) == list(range(5))
    turned = [models[k] for k in (3, 1, 4, 0, 2)]
    assert [turned[k]["bias"].tolist() for k in content_order(turned)] == [models[k]["bias"].tolist() for k in order]


# The server


def members() -> list[Member]:
    held = [(300, True), (200, False), (500, False), (400, True), (100, False), (0, False), (250, False)]
    return [
        Member(model(seed, 0.3), torch.tensor(float(count)), torch.tensor(has))
        for seed, (count, has) in enumerate(held)
    ]


RULE = Consensus(3, 0.5, 0.05, 0.01, 6.0, 1e6)


def test_shares_are_those_of_the_mean_of_group_models() -> None:
    """The groups' models made one by one, with the authors' formula, then averaged."""
    everyone = members()
    active = [k for k in content_order([one.weights for one in everyone]) if float(everyone[k].samples) > 0]
    groups = random_groups(active, 0.5, 3, torch.Generator().manual_seed(4))
    assert len({frozenset(group) for group in groups}) > 1
    consensus = []
    for group in groups:
        counts = [float(everyone[k].samples) for k in group]
        labelled = [bool(everyone[k].labelled) for k in group]
        vectors = [
            np.concatenate([tensor.double().numpy().ravel() for tensor in everyone[k].weights.values()]) for k in group
        ]
        plain = sum(n * vector for n, vector in zip(counts, vectors, strict=True)) / sum(counts)
        far = [float(np.linalg.norm((v - plain)[:6]) + np.linalg.norm((v - plain)[6:])) for v in vectors]
        middle = sorted(counts)[(len(counts) - 1) // 2]
        weight = released_weights(counts, far, labelled, (0.05 * middle, 0.01 * middle), 6.0)
        consensus.append(sum(w * vector for w, vector in zip(weight, vectors, strict=True)))
    expected = np.mean(consensus, axis=0)
    found = RULE.shares(everyone, ["kernel", "bias"], torch.Generator().manual_seed(4))
    assert float(found.sum()) == pytest.approx(1.0)
    assert float(found[5]) == 0.0, "nothing to tell"
    together = sum(
        share * np.concatenate([t.double().numpy().ravel() for t in one.weights.values()])
        for share, one in zip(found.tolist(), everyone, strict=True)
    )
    np.testing.assert_allclose(together, expected, rtol=1e-6, atol=1e-8)


def test_who_answers_first_does_not_matter() -> None:
    everyone = members()
    order = [4, 2, 6, 0, 5, 1, 3]
    usual = RULE.shares(everyone, ["bias"], torch.Generator().manual_seed(4))
    turned = RULE.shares([everyone[k] for k in order], ["bias"], torch.Generator().manual_seed(4))
    torch.testing.assert_close(turned, usual[order])


def test_equal_models_and_one_group_are_plain_averaging() -> None:
    alike = [one._replace(weights=model(0), labelled=torch.tensor(False)) for one in members()]
    found = RULE._replace(groups=1, group_share=1.0).shares(alike, ["bias"], torch.Generator())
    torch.testing.assert_close(found, shares([float(one.samples) for one in alike]))


def test_labels_count_more_and_change_the_scale() -> None:
    pair = [one._replace(samples=torch.tensor(100.0)) for one in members()[:2]]
    both = RULE._replace(groups=1, group_share=1.0, scale=10.0, labelled_scale=0.0)
    with_labels = both.shares(pair, ["bias"], torch.Generator())
    assert with_labels.tolist() == pytest.approx([6 / 7, 1 / 7])
    three = [one._replace(labelled=torch.tensor(False)) for one in (*pair, pair[1])]
    without = both.shares(three, ["bias"], torch.Generator())
    assert float(without[0]) < 0.1, "far from the other two, and now distance counts"


def test_nobody_has_anything_to_tell() -> None:
    silent = [one._replace(samples=torch.tensor(0.0)) for one in members()[:3]]
    assert RULE.shares(silent, ["bias"], torch.Generator()).tolist() == pytest.approx([1 / 3] * 3)
    assert RULE.shares([], ["bias"], torch.Generator()).tolist() == []


# The client


class World(NamedTuple):
    parts: Parts
    net: Net
    down: Phased
    data: ClientData

    @property
    def method(self) -> RSCFed:
        assert isinstance(self.parts.method, RSCFed)
        return self.parts.method

    def prepare(self, kept: Average | None = None) -> Local[Taught, Average]:
        with torch.no_grad():
            return self.method.prepare(self.net, self.down, self.data, kept, Visit(0, 1, CLIENT))


def world(labels: str = "server", **options: Any) -> World:
    """A client that has received weights in the middle of a run."""
    parts = toy_parts(toy_recipe("rscfed", labels, {"method": options}, rounds=2))
    net = place_of(parts).net
    noisy = shaken(net.state())
    net.load(noisy)
    return World(parts, net, Phased(noisy, torch.tensor(False)), parts.scenario.client(CLIENT))


def answer_of(here: World, held: Held | None = None, round_: int = 1) -> Answer:
    return client_round(place_of(here.parts), Task(round_, CLIENT, 0.05, held), here.down, here.data)


def test_the_loss_by_hand() -> None:
    here = world("clients", unlabelled_weight=0.7)
    old = shaken(shaken(here.down.weights))
    local = here.prepare(Average(old, torch.tensor(5)))
    batch = next(iter(batches(local.data, Budget(1, None, 8), (0, 1, CLIENT))))
    teacher, student = copy.deepcopy(here.net), copy.deepcopy(here.net)
    teacher.load(old)
    with torch.no_grad():
        wise = teacher(batch.unlabelled.weak).logits.double().softmax(dim=1).numpy() ** 2
    wise /= wise.sum(axis=1, keepdims=True)
    student.network.train()
    with torch.no_grad():
        said = student(batch.labelled.weak).logits
        own = np.mean([-log_probabilities(r)[y] for r, y in zip(said.tolist(), batch.labelled.labels, strict=True)])
        again = here.data.views.weak(batch.unlabelled.raw, batch.unlabelled.stream("weak again"))
        probabilities = student(again).logits.double().softmax(dim=1).numpy()
    apart = np.mean(((probabilities - wise) ** 2).sum(axis=1))
    assert not torch.equal(again, batch.unlabelled.weak)
    here.net.network.train()
    loss = here.method.loss(here.net, batch, local.const)
    assert loss.terms["consistency"].item() == pytest.approx(apart, rel=1e-4)
    assert loss.value.item() == pytest.approx(own + 0.7 * apart, rel=1e-4)
    assert loss.pseudo is not None
    assert loss.pseudo.label.tolist() == wise.argmax(axis=1).tolist()
    assert loss.carry.teacher.behind


class Watched(NamedTuple):
    """A client's round: its student before and after each step, and the teacher that each step asked."""

    students: list[Weights]
    asked: list[Weights]
    answer: Answer


def watched(here: World, round_: int, held: Held | None) -> Watched:
    students: list[Weights] = []
    asked: list[Weights] = []

    class Noting(RSCFed):
        def loss(self, net: Net, batch: Batch, const: Taught) -> Loss:
            students.append(net.state())
            result = here.method.loss(net, batch, const)
            asked.append(result.carry.teacher.weights)
            return result

    place = place_of(here.parts)._replace(method=Noting(**vars(here.method)))
    answer = client_round(place, Task(round_, CLIENT, 0.05, held), here.down, here.data)
    return Watched([*students, place.net.state()], asked, answer)


@pytest.mark.parametrize(("decay", "rounds"), [(0.999, 2), (0.6, 1)])
def test_the_teacher_follows_every_step(decay: float, rounds: int) -> None:
    """Students noted after each step, then averaged by the recursion as it is written."""
    here = world(decay=decay, unlabelled_weight=50.0)
    held, teacher, count = None, dict(here.down.weights), 0
    for round_ in range(1, rounds + 1):
        students, asked, answer = watched(here, round_, held)
        assert len(students) > 2
        for step, student in enumerate(students[1:]):
            for name, tensor in asked[step].items():
                torch.testing.assert_close(tensor, teacher[name], rtol=1e-5, atol=1e-6)
            alpha = min(1 - 1 / (count + 1), decay)
            teacher = {name: alpha * teacher[name] + (1 - alpha) * student[name] for name in teacher}
            count += 1
        held = answer.held
        assert int(held.kept.steps) == count
        for name, tensor in held.kept.weights.items():
            torch.testing.assert_close(tensor, teacher[name], rtol=1e-5, atol=1e-6)
        assert not torch.allclose(teacher["classifier.weight"], students[-1]["classifier.weight"], atol=1e-6)


def test_a_teacher_answers_as_a_network_with_its_weights_in_evaluation_mode() -> None:
    here = world()
    weights = shaken(shaken(here.down.weights))
    here.net.network.train()
    teacher = MeanTeacher(here.net.frozen(), weights, 3)
    images = here.data.views.plain(here.data.images[:5])
    found = teacher(images)
    other = place_of(here.parts).net
    other.load(weights)
    with torch.no_grad():
        torch.testing.assert_close(found.logits, other(images).logits)
    assert not found.logits.requires_grad


@pytest.mark.parametrize("labels", ["server", "clients"])
def test_a_teacher_never_normalises_by_statistics_of_other_weights(labels: str) -> None:
    """With labels at the server no student tracks any: a teacher would mix those of models it never was."""
    here = world(labels)
    old = shaken(shaken(here.down.weights))
    other = {name: tensor + 1 if "running_" in name else tensor for name, tensor in old.items()}
    images = here.data.views.plain(here.data.images[:8])
    one, two = (mean_teacher(here.net, Average(weights, torch.tensor(5)))(images).logits for weights in (old, other))
    assert torch.equal(one, two) == (labels == "server")
    if labels == "server":
        student = copy.deepcopy(here.net)
        student.load(old)
        student.network.train()
        with torch.no_grad():
            torch.testing.assert_close(one, student(images).logits)


def test_a_teacher_catches_up_once_a_step() -> None:
    here = world()
    moved = MeanTeacher(here.net.frozen(), shaken(here.down.weights), 3, behind=True).caught_up(here.net, 0.9)
    again = moved.caught_up(here.net, 0.9)
    assert (moved.steps, again.steps, again.behind) == (4, 4, False)
    assert equal_weights(moved.weights, again.weights)


def test_a_teacher_that_is_not_kept_starts_as_its_student() -> None:
    old = Average(shaken(shaken(world().down.weights)), torch.tensor(9))
    kept, fresh = world().prepare(old), world(keep_teacher=False).prepare(old)
    assert equal_weights(kept.const.teacher.weights, old.weights)
    assert kept.const.teacher.steps == 9
    assert equal_weights(fresh.const.teacher.weights, world().down.weights)
    assert fresh.const.teacher.steps == 0
    assert equal_weights(mean_teacher(world().net, Average({}, torch.tensor(0))).weights, world().down.weights)
    answer = answer_of(world(keep_teacher=False))
    assert answer.held.kept.weights == {}


def test_a_client_with_labels_alone_keeps_no_teacher() -> None:
    here = world("clients")
    answer = answer_of(here._replace(data=here.data._replace(unlabelled=here.data.unlabelled[:0])))
    assert answer.record.terms.keys() == {"total", "supervised"}
    assert answer.held.kept.weights == {}
    assert bool(answer.up.labelled)


def test_without_weight_an_unlabelled_client_learns_nothing() -> None:
    here = world(unlabelled_weight=0.0)
    answer = answer_of(here)
    assert float(answer.up.samples) == 0
    assert not bool(answer.up.labelled)
    assert equal_weights(answer.up.weights, {name: here.down.weights[name] for name in answer.up.weights})


def test_in_the_warm_up_only_labels_are_learnt() -> None:
    here = world("clients")
    warm = here._replace(down=here.down._replace(labels_only=torch.tensor(True)))
    answer = answer_of(warm)
    assert answer.record.terms.keys() == {"total", "supervised"}
    assert answer.record.steps == answer_of(here).record.steps > 1, "images are left out, not steps"
    assert float(answer.up.samples) == len(here.data.labelled)
    nothing = warm._replace(data=here.data._replace(labelled=here.data.labelled[:0], labels=here.data.labels[:0]))
    assert float(answer_of(nothing).up.samples) == 0


# Runs


def test_warm_up_is_the_first_share_of_rounds_and_only_without_labels_at_the_server(tmp_path: Path) -> None:
    for labels, expected in (("some-clients", [True, True, False, False]), ("server", [False] * 4)):
        outcome = run_toy(toy_parts(toy_recipe("rscfed", labels, {"method": {"warmup": 0.3}})), tmp_path / labels)
        assert [bool(exchange.down.labels_only) for exchange in outcome.exchanges] == expected
        for line in outcome.rounds[1:]:
            assert sum(line["client_weights"]) == pytest.approx(1.0)


def test_one_group_of_all_without_distances_is_fedavg_of_labels(tmp_path: Path) -> None:
    options = {"warmup": 1.0, "groups": 1, "group_share": 1.0, "labelled_distance_scale": 0.0, "most_trust": 1e6}
    closed: dict[str, Any] = {"scenario": {"classes": "known"}}
    ours = run_toy(
        toy_parts(toy_recipe("rscfed", "some-clients", {**closed, "method": options}, rounds=2)), tmp_path / "a"
    )
    plain = run_toy(toy_parts(toy_recipe("fedavg", "some-clients", closed, rounds=2)), tmp_path / "b")
    for name, tensor in plain.weights.items():
        torch.testing.assert_close(ours.weights[name], tensor, rtol=1e-5, atol=1e-6)


def test_the_server_averages_by_the_rule_and_fine_tunes() -> None:
    here = world("server", labelled_weight=4.0, most_trust=9.0)
    site = site_of(here.parts, round_=3)
    names = site.net.trained_names()
    generator = torch.Generator().manual_seed(0)
    ups = [
        Member({n: torch.rand(here.down.weights[n].shape, generator=generator) for n in names}, torch.tensor(n), has)
        for n, has in ((40.0, torch.tensor(True)), (20.0, torch.tensor(False)), (30.0, torch.tensor(False)))
    ]
    after = here.method.aggregate(here.down, ups, site)
    rule = Consensus(3, 0.5, 1.4, 0.014, 4.0, 9.0)
    again = site_of(here.parts, round_=3)
    weight = rule.shares(ups, list(again.net.named_parameters()), again.stream("groups"))
    mixed = {
        name: sum(w * up.weights[name].double() for w, up in zip(weight.tolist(), ups, strict=True)).float()
        if name in names
        else here.down.weights[name]
        for name in here.down.weights
    }
    expected = again.fine_tune(mixed, here.method.server_loss)
    for name, tensor in expected.items():
        torch.testing.assert_close(after.weights[name], tensor, rtol=1e-4, atol=1e-5)
    assert not bool(after.labels_only)
    assert equal_weights(
        here.method.aggregate(here.down, [], site_of(here.parts, 3)).weights,
        site_of(here.parts, 3).fine_tune(here.down.weights, here.method.server_loss),
    )


def test_other_rounds_draw_other_groups() -> None:
    everyone, rule = members(), RULE._replace(most=3.0)
    drawn = [
        tuple(rule.shares(everyone, ["bias"], torch_stream(0, round_, "server", "groups")).tolist())
        for round_ in range(1, 6)
    ]
    assert len(set(drawn)) > 3


@settings(max_examples=30)
@given(st.lists(anything, min_size=2, max_size=5))
def test_liars_leave_the_mean_of_groups_bounded(counts: list[float]) -> None:
    everyone = [
        Member(model(seed), torch.tensor(float(count), dtype=torch.float64), torch.tensor(seed == 0))
        for seed, count in enumerate(counts)
    ]
    found = RULE._replace(most=3.0).shares(everyone, ["bias"], torch.Generator().manual_seed(1))
    assert bool(torch.isfinite(found).all())
    assert bool((found >= 0).all())
    assert float(found.sum()) == pytest.approx(1.0)
