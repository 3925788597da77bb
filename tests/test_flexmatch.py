"""FlexMatch against counting by hand, and in the limits where it must become FixMatch or SAGE."""

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learnt import drifted_classifier, learnt_weights
from reference.losses import cross_entropies, log_probabilities, mean_over_all, soft_cross_entropies
from semifed.assembly import Parts
from semifed.client_round import Held, Reply, Task, client_round
from semifed.data.client import Batch, Budget, ClientData, batches
from semifed.errors import UserError
from semifed.methods.flexmatch import Const, FlexMatch, Selected
from semifed.net import Net
from semifed.payloads import Down, Visit
from semifed.pseudo import Curve, flexible_threshold, learning_effect, selected_after
from semifed.targets import KAPPA, opinion
from toys import Outcome, Quiet, equal_weights, place_of, run_toy, toy_parts, toy_recipe

CLIENT = 1
CLASSES = 3
records = st.lists(st.integers(-1, CLASSES - 1), max_size=30)


# Formulas


def effects_by_counting(selected: Sequence[int], warm_up: bool) -> list[Fraction]:
    counted = Counter(selected)
    if not warm_up:
        counted.pop(-1, None)
    largest = max(counted.values(), default=1)
    return [Fraction(counted[c], largest) for c in range(CLASSES)]


def thresholds_by_hand(effects: Sequence[float], threshold: float, curve: str) -> list[float]:
    shapes = {
        "convex": lambda beta: beta / (2 - beta),
        "linear": lambda beta: beta,
        "concave": lambda beta: math.log(beta + 1) / math.log(2),
    }
    return [threshold * shapes[curve](beta) for beta in effects]


@given(records, st.booleans())
def test_how_well_a_class_is_learnt(selected: list[int], warm_up: bool) -> None:
    found = learning_effect(torch.tensor(selected, dtype=torch.int64), CLASSES, warm_up=warm_up)
    known = any(label >= 0 for label in selected)
    expected = effects_by_counting(selected, warm_up) if known else [Fraction(0)] * CLASSES
    assert found.tolist() == pytest.approx([float(beta) for beta in expected], rel=1e-6)
    assert found.dtype == torch.float32
    if known and (not warm_up or -1 not in selected):
        assert float(found.max()) == 1.0, "the best learnt class keeps the whole threshold, to the bit"


def test_images_without_a_label_hold_the_thresholds_down_while_they_are_many() -> None:
    selected = torch.tensor([-1] * 6 + [0] * 3 + [1])
    assert learning_effect(selected, 3, warm_up=True).tolist() == pytest.approx([3 / 6, 1 / 6, 0])
    assert learning_effect(selected, 3, warm_up=False).tolist() == pytest.approx([1, 1 / 3, 0])


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=5), st.floats(0, 1), st.sampled_from(Curve.__args__))  # type: ignore[attr-defined]
def test_threshold_of_a_class(effects: list[float], threshold: float, curve: Curve) -> None:
    found = flexible_threshold(torch.tensor(effects), threshold, curve)
    assert found.tolist() == pytest.approx(thresholds_by_hand(effects, threshold, curve), rel=1e-5, abs=1e-7)
    ends = flexible_threshold(torch.tensor([0.0, 1.0]), threshold, curve)
    assert torch.equal(ends, torch.tensor([0.0, threshold])), "0 and the whole threshold, to the bit"


def test_the_convex_curve_is_the_lowest() -> None:
    effects = torch.linspace(0.05, 0.95, 19)
    convex, linear, concave = (flexible_threshold(effects, 0.95, curve) for curve in ("convex", "linear", "concave"))
    assert (convex < linear).all()
    assert (linear < concave).all()


@given(st.data())
def test_what_is_remembered_after_a_batch(data: st.DataObject) -> None:
    selected = data.draw(st.lists(st.integers(-1, 2), min_size=1, max_size=12))
    position = data.draw(st.permutations(range(len(selected))))[: data.draw(st.integers(0, len(selected)))]
    rows = data.draw(st.lists(st.permutations([0.9, 0.08, 0.02]), min_size=len(position), max_size=len(position)))
    sure = data.draw(st.lists(st.booleans(), min_size=len(position), max_size=len(position)))
    probabilities = torch.tensor(
        [row if yes else [0.5 * value + 0.5 / 3 for value in row] for row, yes in zip(rows, sure, strict=True)]
    ).reshape(len(position), 3)
    before = torch.tensor(selected)
    found = selected_after(before, torch.tensor(position, dtype=torch.int64), opinion(probabilities, 0.8))
    expected = list(selected)
    for index, row, yes in zip(position, rows, sure, strict=True):
        if yes:
            expected[index] = list(row).index(0.9)
    assert found.tolist() == expected
    assert before.tolist() == selected, "the memory of the step before is not written to"


# The client


class World(NamedTuple):
    parts: Parts
    net: Net
    down: Down
    data: ClientData

    @property
    def method(self) -> FlexMatch:
        assert isinstance(self.parts.method, FlexMatch)
        return self.parts.method

    def answer(self, held: Held | None = None) -> Reply:
        return client_round(place_of(self.parts), Task(1, CLIENT, 0.05, held), self.down, self.data)


def world(labels: str = "clients", **options: Any) -> World:
    """A client that has received weights in the middle of a run; its network is in evaluation mode."""
    parts = toy_parts(toy_recipe("flexmatch", labels, {"method": options}, rounds=2))
    net = place_of(parts).net
    net.load(learnt_weights())
    return World(parts, net, Down(learnt_weights()), parts.scenario.client(CLIENT))


def logits_by_hand(net: Net, batch: Batch) -> list[np.ndarray[Any, Any]]:
    groups = [batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong]
    with torch.no_grad():
        logits = net.network(torch.cat(groups)).logits.double()
    return [part.numpy() for part in logits.split([len(group) for group in groups])]


def guess(row: np.ndarray[Any, Any]) -> tuple[int, float]:
    logs = log_probabilities(row.tolist())
    return logs.index(max(logs)), math.exp(max(logs))


def some_memory(data: ClientData) -> Selected:
    """As after a few rounds: a fifth of the images without a label, class 1 ahead, class 0 hardly learnt."""
    drawn = torch.rand(len(data.unlabelled), generator=torch.Generator().manual_seed(3))
    label = torch.where(drawn < 0.2, -1, torch.where(drawn < 0.65, 1, torch.where(drawn < 0.92, 2, 0)))
    return Selected(label, torch.tensor(data.checksum()))


def middle_confidence(here: World) -> float:
    batch = next(batches(here.data, Budget(1, None, 8), (0, 1, CLIENT)))
    here.net.network.train()
    confidence = [guess(row)[1] for row in logits_by_hand(here.net, batch)[1]]
    here.net.network.eval()
    return float(np.median(confidence))


@pytest.mark.parametrize("warm_up", [True, False])
@pytest.mark.parametrize("curve", ["convex", "linear", "concave"])
def test_steps_by_hand(curve: str, warm_up: bool) -> None:
    """Every step's mask, loss and memory by loops; the memory a batch leaves behind judges the next batch."""
    here = world(threshold=middle_confidence(world()), warm_up=warm_up, mapping=curve, unlabelled_weight=0.6)
    kept = some_memory(here.data)
    const = here.method.prepare(here.net, here.down, here.data, kept, Visit(0, 1, CLIENT)).const
    here.net.network.train()
    selected, threshold = kept.label.tolist(), here.method.threshold
    masks = []
    for batch in batches(here.data, Budget(2, None, 8), (0, 1, CLIENT)):
        labelled, weak, strong = logits_by_hand(here.net, batch)
        effects = [float(beta) for beta in effects_by_counting(selected, warm_up)]
        needed = thresholds_by_hand(effects, threshold, curve)
        guesses = [guess(row) for row in weak]
        used = [confidence >= needed[label] for label, confidence in guesses]
        labels = batch.labelled.labels.tolist()
        supervised = mean_over_all(cross_entropies(labelled, labels), [True] * len(labels))
        consistency = mean_over_all(cross_entropies(strong, [label for label, _ in guesses]), used)
        loss = here.method.loss(here.net, batch, const)
        assert loss.pseudo is not None
        assert loss.pseudo.used.tolist() == used
        assert loss.terms["consistency"].item() == pytest.approx(consistency, rel=1e-4)
        assert loss.value.item() == pytest.approx(supervised + 0.6 * consistency, rel=1e-4)
        for position, (label, confidence) in zip(batch.unlabelled.position.tolist(), guesses, strict=True):
            if confidence >= threshold:
                selected[position] = label
        const = loss.carry
        assert const.selected.label.tolist() == selected
        masks += used
    assert 0 < sum(masks) < len(masks)
    assert selected != kept.label.tolist()


def test_before_anything_is_sure_every_label_is_taken() -> None:
    here = world(threshold=1.0)
    answer = here.answer()
    assert answer.record.pseudo is not None
    assert answer.record.pseudo.used.all()
    assert (answer.held.kept.label == -1).all()


def test_the_memory_is_by_position_and_holds_what_was_sure_last() -> None:
    """In one epoch each image is seen once: its entry is the local label if that was sure, else what was there."""
    here = world(threshold=middle_confidence(world()))
    before = some_memory(here.data)
    answer = here.answer(Held(before, {}, {}))
    seen = answer.record.pseudo
    assert seen is not None
    assert seen.local is not None
    place = {int(image): index for index, image in enumerate(here.data.unlabelled)}
    expected = before.label.tolist()
    for image, label, confidence in zip(seen.position.tolist(), seen.local.label, seen.local.confidence, strict=True):
        if float(confidence) >= here.method.threshold:
            expected[place[image]] = int(label)
    assert answer.held.kept.label.tolist() == expected
    assert expected != before.label.tolist()


def test_a_memory_changes_the_round_unless_it_is_reset() -> None:
    threshold = middle_confidence(world())
    held = Held(some_memory(world().data), {}, {})
    kept, fresh = world(threshold=threshold).answer(held), world(threshold=threshold).answer()
    assert not equal_weights(kept.up.weights, fresh.up.weights)
    reset = world(threshold=threshold, reset=True).answer(held)
    assert equal_weights(reset.up.weights, fresh.up.weights)
    assert torch.equal(reset.held.kept.label, fresh.held.kept.label)


@pytest.mark.parametrize("change", ["one more", "another order"])
def test_a_memory_of_other_images_is_forgotten(change: str) -> None:
    """A deployed client reads its folder anew in every round."""
    here = world(threshold=middle_confidence(world()))
    images = here.data.unlabelled
    then = here.data._replace(unlabelled=images[:-1] if change == "one more" else images.flip(0))
    late, fresh = here.answer(Held(some_memory(then), {}, {})), here.answer()
    assert equal_weights(late.up.weights, fresh.up.weights)
    assert torch.equal(late.held.kept.label, fresh.held.kept.label)


def last_memories(outcome: Outcome) -> dict[int, list[int]]:
    memories = {}
    for exchange in outcome.exchanges:
        for answer in exchange.answers:
            assert isinstance(answer, Reply)
            memories[answer.record.client] = answer.held.kept.label.tolist()
    return memories


def test_the_memory_survives_rounds_and_a_resumed_run(tmp_path: Path) -> None:
    parts = toy_parts(toy_recipe("flexmatch", "clients", {"method": {"threshold": 0.8}}, rounds=4))
    whole = run_toy(parts, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run_toy(parts, tmp_path / "parts", reporter=Quiet(stop_after=2))
    resumed = run_toy(parts, tmp_path / "parts", resume=True)
    later = {exchange.round for exchange in resumed.exchanges}
    assert later == {3, 4}
    for client, memory in last_memories(resumed).items():
        assert memory == last_memories(whole)[client]
    filled: dict[int, list[int]] = {}
    for exchange in whole.exchanges:  # what once had a label never loses it
        for answer in exchange.answers:
            assert isinstance(answer, Reply)
            now = answer.held.kept.label.tolist()
            before = filled.get(answer.record.client, [-1] * len(now))
            assert all(new >= 0 for new, old in zip(now, before, strict=True) if old >= 0)
            filled[answer.record.client] = now
    assert any(-1 in memory and max(memory) >= 0 for memory in filled.values())
    forgetful = run_toy(
        toy_parts(toy_recipe("flexmatch", "clients", {"method": {"threshold": 0.8, "reset": True}}, rounds=4)),
        tmp_path / "forgetful",
    )
    assert not equal_weights(forgetful.weights, whole.weights)


# Limits


@pytest.mark.parametrize(
    ("labels", "curve"), [("server", "linear"), ("clients", "convex"), ("some-clients", "concave")]
)
def test_with_beta_one_it_is_fixmatch_with_local_labels(labels: str, curve: str, tmp_path: Path) -> None:
    options = {"threshold": 0.8, "least_effect": 1.0, "mapping": curve}
    ours = run_toy(toy_parts(toy_recipe("flexmatch", labels, {"method": options}, rounds=2)), tmp_path / "flex")
    plain = {"threshold": 0.8}
    fixed = run_toy(toy_parts(toy_recipe("fixmatch-lpl", labels, {"method": plain}, rounds=2)), tmp_path / "lpl")
    assert equal_weights(ours.weights, fixed.weights)
    used = [line["pseudo"]["used"] for line in ours.rounds[1:]]
    assert used == [line["pseudo"]["used"] for line in fixed.rounds[1:]]
    assert 0 < sum(used) < sum(line["pseudo"]["seen"] for line in ours.rounds[1:])
    free = {"threshold": 0.8, "mapping": curve}
    other = run_toy(toy_parts(toy_recipe("flexmatch", labels, {"method": free}, rounds=2)), tmp_path / "free")
    assert not equal_weights(other.weights, fixed.weights)


@pytest.mark.parametrize("labels", ["server", "some-clients"])
def test_with_beta_one_and_sage_it_is_sage(labels: str, tmp_path: Path) -> None:
    options = {"threshold": 0.8, "least_effect": 1.0, "sage": True}
    ours = run_toy(toy_parts(toy_recipe("flexmatch", labels, {"method": options}, rounds=2)), tmp_path / "flex")
    theirs = run_toy(toy_parts(toy_recipe("sage", labels, {"method": {"threshold": 0.8}}, rounds=2)), tmp_path / "sage")
    assert equal_weights(ours.weights, theirs.weights)


def test_sage_judges_both_models_by_the_thresholds_of_classes() -> None:
    here = world(threshold=middle_confidence(world()), sage=True, mapping="concave")
    kept = some_memory(here.data)
    const = here.method.prepare(here.net, here.down, here.data, kept, Visit(0, 1, CLIENT)).const
    received = place_of(here.parts).net
    received.load(here.down.weights)
    here.net.load(drifted_classifier())
    here.net.network.train()
    needed = thresholds_by_hand(
        [float(beta) for beta in effects_by_counting(kept.label.tolist(), True)], here.method.threshold, "concave"
    )
    branches = Counter[str]()
    for batch in batches(here.data, Budget(1, None, 8), (0, 1, CLIENT)):
        _, weak, strong = logits_by_hand(here.net, batch)
        theirs = received(batch.unlabelled.weak).logits.detach().double().numpy()
        rows, used = [], []
        for mine, other in zip(weak, theirs, strict=True):
            (label, confidence), (its_label, its_confidence) = guess(mine), guess(other)
            sure, its_sure = confidence >= needed[label], its_confidence >= needed[its_label]
            share = min(max(math.exp(-KAPPA * min(abs(confidence - its_confidence) + 1e-6, 1)), 1e-6), 1)
            row = [0.0] * CLASSES
            row[label] += share if sure else 0.0
            row[its_label] += 1 - share if sure else 1.0
            rows.append(row)
            used.append(sure or its_sure)
            branches[f"{sure} {its_sure}"] += 1
            branches["sure of another class"] += sure and label != its_label
            branches["sure by its class alone"] += not sure and its_sure and its_confidence < here.method.threshold
        loss = here.method.loss(here.net, batch, const)  # always judged by the same memory
        assert loss.pseudo is not None
        assert loss.pseudo.used.tolist() == used
        expected = mean_over_all(soft_cross_entropies(strong, np.array(rows)), used)
        assert loss.terms["consistency"].item() == pytest.approx(expected, rel=1e-4)
    assert min(branches.values()) > 0, branches
    assert len(branches) >= 5, branches


def test_only_the_local_model_is_remembered() -> None:
    """With SAGE too the memory follows the local model's sure labels."""
    alone, asked = (world(threshold=middle_confidence(world()), sage=sage) for sage in (False, True))
    batch = next(batches(alone.data, Budget(1, None, 8), (0, 1, CLIENT)))
    memories = []
    for here in (alone, asked):
        const = here.method.prepare(here.net, here.down, here.data, None, Visit(0, 1, CLIENT)).const
        here.net.network.train()
        carry = here.method.loss(here.net, batch, const).carry
        assert isinstance(carry, Const)
        memories.append(carry.selected.label.tolist())
    assert memories[0] == memories[1]
    assert set(memories[0]) != {-1}


# Corners


def test_a_client_with_nothing_to_learn_from_counts_nothing() -> None:
    here = world("server", threshold=1.0, least_effect=1.0)
    answer = here.answer()
    assert float(answer.up.samples) == 0.0
    assert all(torch.equal(tensor, here.down.weights[name]) for name, tensor in answer.up.weights.items())
    assert (answer.held.kept.label == -1).all()


@pytest.mark.parametrize("sage", [False, True])
def test_a_client_with_labels_alone_learns_them(sage: bool) -> None:
    here = world(sage=sage)
    alone = here._replace(data=here.data._replace(unlabelled=here.data.unlabelled[:0]))
    answer = alone.answer()
    assert len(answer.held.kept.label) == 0
    assert answer.record.terms["consistency"] == 0.0
    assert answer.record.terms["supervised"] > 0
    assert float(answer.up.samples) == len(here.data.labelled)


def test_an_unknown_curve_is_named() -> None:
    with pytest.raises(UserError, match=r"method\.mapping.*convex"):
        toy_recipe("flexmatch", "clients", {"method": {"mapping": "convx"}})
