"""FedLabel against plain loops, two trainings run one by one, and its limits."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.special
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from semifed.aggregate import sum_of_changes
from semifed.assembly import Parts
from semifed.client_round import Reply, Task, client_round
from semifed.data.client import Batch, ClientData, batches
from semifed.errors import UserError
from semifed.fit import Fitted, Loss, fit
from semifed.methods.fedlabel import FedLabel, Judges
from semifed.models.network import Output
from semifed.net import Net
from semifed.objectives import supervised
from semifed.payloads import Down
from semifed.pseudo import Certainty, PseudoLabels, ever_used, surer_opinion
from semifed.targets import KAPPA, Opinion, opinion
from semifed.wire import Weights
from toys import equal_weights, place_of, run_toy, shaken, toy_parts, toy_recipe

CLIENT = 1
LR = 0.05
Array = NDArray[np.float64]
logit_rows = st.lists(st.lists(st.floats(-6, 6, width=32), min_size=4, max_size=4), min_size=1, max_size=10)


# Formulas


def opinions(*tables: list[list[float]]) -> list[Opinion]:
    count = min(len(table) for table in tables)
    return [opinion(torch.tensor(table[:count], dtype=torch.float64).softmax(dim=1), 0.5) for table in tables]


@given(logit_rows, logit_rows, st.sampled_from(["variance", "confidence"]))
def test_the_surer_opinion_row_by_row(ours: list[list[float]], theirs: list[list[float]], certainty: Certainty) -> None:
    local, received = opinions(ours, theirs)
    found = surer_opinion(local, received, certainty)
    for row in range(len(local.label)):
        pair = [scipy.special.softmax(np.array(table[row])) for table in (ours, theirs)]
        h = [float(np.mean((p - p.mean()) ** 2)) if certainty == "variance" else float(p.max()) for p in pair]
        if math.isclose(h[0], h[1], rel_tol=1e-9, abs_tol=1e-12):
            continue
        best = 0 if h[0] > h[1] else 1
        np.testing.assert_allclose(found.surer.probabilities[row].numpy(), pair[best], rtol=1e-9)
        np.testing.assert_allclose(found.other.probabilities[row].numpy(), pair[1 - best], rtol=1e-9)
        assert int(found.surer.label[row]) == int((local, received)[best].label[row])
        assert bool(found.surer.sure[row]) == bool(pair[best].max() >= 0.5)
        same = int(local.label[row]) == int(received.label[row])
        assert float(found.ratio[row]) == pytest.approx(h[1 - best] / h[best] if same else 0.0, rel=1e-6)


@given(logit_rows, st.sampled_from(["variance", "confidence"]))
def test_equal_opinions_are_as_sure_as_each_other(rows: list[list[float]], certainty: Certainty) -> None:
    (local,) = opinions(rows)
    surer, other, ratio = surer_opinion(local, local, certainty)
    assert torch.equal(surer.probabilities, other.probabilities)
    assert torch.equal(ratio, torch.ones_like(ratio))


def test_opinions_that_prefer_nothing_are_equally_sure() -> None:
    (flat,) = opinions([[0.0] * 4])
    assert surer_opinion(flat, flat).ratio.tolist() == [1.0]


@given(st.integers(0, 99), st.integers(0, 3))
def test_changes_add_up(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    start, *ends = ({"a": rng.normal(size=(2, 3)), "b": rng.normal(size=4)} for _ in range(count + 1))
    as_weights = [{name: torch.from_numpy(array) for name, array in one.items()} for one in (start, *ends)]
    found = sum_of_changes(as_weights[0], as_weights[1:])
    for name, array in start.items():
        expected = array + sum(end[name] - array for end in ends)
        np.testing.assert_allclose(found[name].numpy(), expected, rtol=1e-12, atol=1e-12)


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=8), st.floats(-1e3, 1e3, width=32))
def test_no_change_adds_nothing_to_the_bit(values: list[float], shift: float) -> None:
    start, end = {"w": torch.tensor(values)}, {"w": torch.tensor(values) * 0.7 + shift}
    assert torch.equal(sum_of_changes(start, [start, end])["w"], end["w"])
    assert torch.equal(sum_of_changes(start, [end, start])["w"], end["w"])


def test_images_used_in_any_step() -> None:
    def labels(position: list[int], used: list[bool]) -> PseudoLabels:
        return PseudoLabels(torch.tensor(position), torch.zeros(len(position)), torch.tensor(used))

    assert ever_used([]).tolist() == []
    steps = [labels([4, 2, 7], [True, False, True]), labels([7, 2, 1], [False, False, True]), labels([4], [True])]
    assert ever_used(steps).tolist() == [1, 4, 7]


# One step


class World(NamedTuple):
    parts: Parts
    net: Net
    received: Net  # the same weights, in evaluation mode
    local: Net  # another model
    down: Down
    data: ClientData

    @property
    def method(self) -> FedLabel:
        assert isinstance(self.parts.method, FedLabel)
        return self.parts.method

    @property
    def budget(self) -> Any:
        return place_of(self.parts).budget

    def judges(self) -> Judges:
        return Judges(self.received.frozen(), self.local.frozen())

    def answer(self, data: ClientData | None = None) -> Reply:
        return client_round(place_of(self.parts), Task(1, CLIENT, LR, None), self.down, data or self.data)


def world(labels: str = "clients", **options: Any) -> World:
    """A client that has received weights in the middle of a run; its network is in training mode."""
    parts = toy_parts(toy_recipe("fedlabel", labels, {"method": options}, rounds=2))
    net, received, local = (place_of(parts).net for _ in range(3))
    data = parts.scenario.client(CLIENT)
    net.recalibrate(data.views.plain(data.images[data.unlabelled]))
    weights = decided(net.state(), 9)
    for each in (net, received):
        each.load(weights)
    local.load(decided(weights, 10))
    net.network.train()
    return World(parts, net, received, local, Down(weights), data)


def decided(weights: Weights, seed: int) -> Weights:
    """The same features with a classifier that names several classes, sure of some images and unsure of others."""
    shape = weights["classifier.weight"].shape
    return weights | {"classifier.weight": torch.randn(shape, generator=torch.Generator().manual_seed(seed))}


def first_batch(here: World) -> Batch:
    return next(batches(here.data, here.budget, (0, 1, CLIENT)))


def rows(logits: torch.Tensor) -> Array:
    probabilities: Array = scipy.special.softmax(logits.detach().double().numpy(), axis=1)
    return probabilities


class Seen(NamedTuple):
    """Probabilities of one batch: of the student on three views, of both judges on the weak one."""

    labelled: Array
    weak: Array
    strong: Array
    local: Array
    received: Array


def seen(here: World, batch: Batch) -> Seen:
    views = [batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong]
    student = here.net.network(torch.cat(views)).logits.split([len(view) for view in views])
    judged = [judge.network(batch.unlabelled.weak).logits for judge in (here.local, here.received)]
    return Seen(*map(rows, (*student, *judged)))


def kl(p: Array, q: Array) -> float:
    return float(scipy.special.rel_entr(p, q).sum())


def expected_terms(found: Seen, labels: list[int], threshold: float) -> tuple[float, float, float, int]:
    """Supervised, consistency and agreement by FedLabel's own rule, and how many images it uses."""
    supervised_ = -float(np.mean([math.log(p[label]) for p, label in zip(found.labelled, labels, strict=True)]))
    consistency = agreement = 0.0
    used = 0
    for weak, strong, own, theirs in zip(*found[1:], strict=True):
        best, rest = (own, theirs) if np.var(own) >= np.var(theirs) else (theirs, own)
        if best.max() <= threshold:
            continue
        used += 1
        consistency -= math.log(strong[best.argmax()])
        if rest.argmax() == best.argmax():
            agreement += np.var(rest) / np.var(best) * kl(rest, weak)
    count = len(found.weak)
    return supervised_, consistency / count, agreement / count, used


def middling(found: Seen) -> float:
    """A threshold that about half of the surer opinions reach."""
    pairs = zip(found.local, found.received, strict=True)
    best = sorted(float(max(pair, key=np.var).max()) for pair in pairs)
    return (best[3] + best[4]) / 2


def test_one_step() -> None:
    here = world()
    batch = first_batch(here)
    found = seen(here, batch)
    threshold = middling(found)
    here = world(threshold=threshold, agreement_weight=1.7)
    loss = here.method.loss(here.net, batch, here.judges())
    parts = expected_terms(found, batch.labelled.labels.tolist(), threshold)
    assert 0 < parts[3] < len(batch.unlabelled)
    assert loss.pseudo is not None
    assert int(loss.pseudo.used.sum()) == parts[3]
    assert parts[2] > 1e-3
    for name, expected in zip(("supervised", "consistency", "agreement"), parts[:3], strict=True):
        assert loss.terms[name].item() == pytest.approx(expected, rel=1e-4), name
    assert loss.value.item() == pytest.approx(parts[0] + parts[1] + 1.7 * parts[2], rel=1e-4)


def test_both_models_label_some_images() -> None:
    """Otherwise the test above would not see a wrong choice."""
    here = world()
    found = seen(here, first_batch(here))
    local = np.var(found.local, axis=1) >= np.var(found.received, axis=1)
    same = found.local.argmax(axis=1) == found.received.argmax(axis=1)
    assert 0 < local.sum() < len(local)
    assert same.sum() > 0


def test_sages_targets_replace_the_choice() -> None:
    here = world()
    batch = first_batch(here)
    found = seen(here, batch)
    threshold = middling(found)
    here = world(sage_threshold=threshold, sage=True)  # beta is FedLabel's own, and is not read here
    consistency = agreement = 0.0
    used = []
    for weak, strong, own, theirs in zip(*found[1:], strict=True):
        share = math.exp(-KAPPA * abs(own.max() - theirs.max())) if own.max() >= threshold else 0.0
        target = share * np.eye(3)[own.argmax()] + (1 - share) * np.eye(3)[theirs.argmax()]
        used.append(own.max() >= threshold or theirs.max() >= threshold)
        if used[-1]:
            consistency -= float(target @ np.log(strong))
            if own.argmax() == theirs.argmax():
                best, rest = (own, theirs) if np.var(own) >= np.var(theirs) else (theirs, own)
                agreement += np.var(rest) / np.var(best) * kl(rest, weak)
    loss = here.method.loss(here.net, batch, here.judges())
    assert loss.pseudo is not None
    assert loss.pseudo.used.tolist() == used
    assert loss.terms["consistency"].item() == pytest.approx(consistency / len(used), rel=1e-3)
    assert loss.terms["agreement"].item() == pytest.approx(agreement / len(used), rel=1e-3)
    plain = world(threshold=threshold)
    assert loss.terms["consistency"].item() != pytest.approx(
        plain.method.loss(plain.net, batch, plain.judges()).terms["consistency"].item(), rel=1e-3
    )


def test_with_sage_either_model_opens_the_gate_of_the_agreement_too() -> None:
    """The opinion of greater variance need not be the one whose largest probability reaches the threshold."""
    here = world(sage=True, sage_threshold=0.52)
    batch = first_batch(here)
    count = len(batch.unlabelled)

    def saying(*probabilities: float) -> Any:
        return lambda images: Output(torch.tensor([probabilities]).log().repeat(count, 1), torch.empty(count, 0), {})

    own, theirs = np.array([0.5, 0.49, 0.01]), np.array([0.55, 0.225, 0.225])
    assert np.var(own) > np.var(theirs)
    found = seen(here, batch)
    loss = here.method.loss(here.net, batch, Judges(saying(*theirs), saying(*own)))
    expected = np.mean([np.var(theirs) / np.var(own) * kl(theirs, weak) for weak in found.weak])
    assert loss.terms["agreement"].item() == pytest.approx(expected, rel=1e-4)


def test_online_the_model_in_training_is_the_local_one() -> None:
    here = world(mode="online", threshold=0.0, agreement_weight=1.7)
    batch = first_batch(here)
    found = seen(here, batch)
    parts = expected_terms(found._replace(local=found.weak), batch.labelled.labels.tolist(), 0.0)
    loss = here.method.loss(here.net, batch, Judges(here.received.frozen(), None))
    assert loss.value.item() == pytest.approx(parts[0] + parts[1] + 1.7 * parts[2], rel=1e-4)
    reply = here.answer()
    assert reply.record.terms["agreement"] > 0
    assert reply.record.steps == len(list(batches(here.data, here.budget, (0, 1, CLIENT))))


def test_certainty_may_be_the_largest_probability() -> None:
    here = world(certainty="confidence", threshold=0.0)
    batch = first_batch(here)
    found = seen(here, batch)
    expected = 0.0
    for weak, _, own, theirs in zip(*found[1:], strict=True):
        best, rest = (own, theirs) if own.max() >= theirs.max() else (theirs, own)
        expected += rest.max() / best.max() * kl(rest, weak) if rest.argmax() == best.argmax() else 0.0
    loss = here.method.loss(here.net, batch, here.judges())
    assert loss.terms["agreement"].item() == pytest.approx(expected / len(found.weak), rel=1e-4)


def test_the_slope_is_that_of_fixed_targets() -> None:
    """Nothing flows into the labels: the slope is that of the printed formula with constants in their place."""
    here = world(threshold=0.0, agreement_weight=0.6, mode="online")
    batch = first_batch(here)
    views = [batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong]
    student = here.net.network(torch.cat(views)).logits.split([len(view) for view in views])
    own, theirs = (
        student[1].detach().softmax(1),
        here.received.network(batch.unlabelled.weak).logits.detach().softmax(1),
    )
    local = own.var(dim=1) >= theirs.var(dim=1)
    best, rest = torch.where(local[:, None], own, theirs), torch.where(local[:, None], theirs, own)
    weight = rest.var(dim=1) / best.var(dim=1) * (best.argmax(1) == rest.argmax(1))
    apart = torch.nn.functional.kl_div(student[1].log_softmax(1), rest, reduction="none").sum(1)
    value = (
        torch.nn.functional.cross_entropy(student[0], batch.labelled.labels)
        + torch.nn.functional.cross_entropy(student[2], best.argmax(1))
        + 0.6 * (weight * apart).mean()
    )
    parameters = list(here.net.named_parameters().values())
    expected = torch.autograd.grad(value, parameters)
    loss = here.method.loss(here.net, batch, Judges(here.received.frozen(), None))
    for slope, other in zip(torch.autograd.grad(loss.value, parameters), expected, strict=True):
        torch.testing.assert_close(slope, other, rtol=1e-3, atol=1e-5)


def test_judges_get_no_gradient() -> None:
    here = world(threshold=0.0)
    judges = here.judges()
    here.method.loss(here.net, first_batch(here), judges).value.backward()
    for judge in judges:
        assert judge is not None
        assert all(not p.requires_grad and p.grad is None for p in judge.network.parameters())


# A round


def without_labels(data: ClientData) -> ClientData:
    return data._replace(labelled=data.labelled[:0], labels=data.labels[:0])


def stages(here: World, data: ClientData) -> tuple[Net, Net, Fitted, Fitted]:
    """Both trainings, each with a network of its own."""
    place = place_of(here.parts)
    optimiser = place.optimiser._replace(lr=LR)
    learning, guessing = here.received.twin(), here.received.twin()
    first = fit(learning, batches(data, here.budget, (0, 1, CLIENT, "labels")), supervised, optimiser)
    judges = Judges(here.received.frozen(), learning.frozen())

    def loss(net: Net, batch: Batch) -> Loss:
        return here.method.loss(net, batch, judges)

    second = fit(guessing, batches(without_labels(data), here.budget, (0, 1, CLIENT)), loss, optimiser)
    return learning, guessing, first, second


def test_the_reply_is_the_received_model_and_both_changes() -> None:
    here = world()
    learning, guessing, first, second = stages(here, here.data)
    assert 0 < first.steps_taken == first.steps == second.steps
    assert second.steps_taken > 0
    reply = here.answer()
    parameters = here.net.named_parameters()
    for name, tensor in reply.up.weights.items():
        start, one, two = (
            net[name].double().numpy() for net in (here.down.weights, learning.state(), guessing.state())
        )
        steps = (first.steps_taken, second.steps_taken)
        expected = one + two - start if name in parameters else np.average([one, two], axis=0, weights=steps)
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-5, atol=1e-6, err_msg=name)
        assert not np.allclose(one, start, atol=1e-5), name
        assert not np.allclose(two, start, atol=1e-5), name
    assert all(bool((tensor > 0).all()) for name, tensor in reply.up.weights.items() if "running_var" in name)
    assert reply.record.steps == first.steps + second.steps
    assert reply.record.images == first.images + second.images
    terms = reply.record.terms
    assert terms["supervised"] == pytest.approx(first.terms["supervised"], rel=1e-5)
    assert terms["agreement"] == pytest.approx(second.terms["agreement"], rel=1e-5)
    assert terms["total"] == pytest.approx(first.terms["total"] + second.terms["total"], rel=1e-5)


def test_without_labels_both_opinions_are_one_and_the_weight_is_lambda_0() -> None:
    here = world("server", threshold=0.0, agreement_weight=2.5)
    assert len(here.data.labelled) == 0
    reply = here.answer()

    def received_alone(net: Net, batch: Batch) -> Loss:
        weak, strong = net.joint(batch.unlabelled.weak, batch.unlabelled.strong)
        target = here.received(batch.unlabelled.weak).logits.detach().softmax(dim=1)
        apart = torch.nn.functional.kl_div(weak.logits.log_softmax(1), target, reduction="batchmean")
        return Loss(torch.nn.functional.cross_entropy(strong.logits, target.argmax(1)) + 2.5 * apart, {})

    alone = here.received.twin()
    optimiser = place_of(here.parts).optimiser._replace(lr=LR)
    fit(alone, batches(here.data, here.budget, (0, 1, CLIENT)), received_alone, optimiser)
    for name, tensor in reply.up.weights.items():
        torch.testing.assert_close(tensor, alone.state()[name], rtol=1e-4, atol=1e-6)
    _, guessing, first, second = stages(here, here.data)
    assert (first.steps_taken, second.steps_taken > 0) == (0, True)
    assert equal_weights(reply.up.weights, {name: guessing.state()[name] for name in reply.up.weights})


def test_without_unlabelled_images_only_the_labels_are_learnt() -> None:
    here = world()
    data = here.data._replace(unlabelled=here.data.unlabelled[:0])
    reply = here.answer(data)
    learning, _, first, second = stages(here, data)
    assert (first.steps_taken > 0, second.steps) == (True, 0)
    assert equal_weights(reply.up.weights, {name: learning.state()[name] for name in reply.up.weights})
    assert float(reply.up.samples) == len(data.labelled)
    assert reply.record.pseudo is None


def test_a_threshold_that_nothing_reaches_leaves_the_labels() -> None:
    here = world(threshold=1.0)
    reply = here.answer()
    learning, _, _, second = stages(here, here.data)
    assert second.steps > second.steps_taken == 0
    assert equal_weights(reply.up.weights, {name: learning.state()[name] for name in reply.up.weights})
    assert float(reply.up.samples) == len(here.data.labelled)


@pytest.mark.parametrize("mode", ["two_stage", "online"])
def test_a_client_with_nothing_to_learn_from_weighs_nothing(mode: str) -> None:
    here = world("server", threshold=1.0, mode=mode)
    reply = here.answer()
    assert float(reply.up.samples) == 0.0
    assert all(torch.equal(tensor, here.down.weights[name]) for name, tensor in reply.up.weights.items())


@pytest.mark.parametrize("mode", ["two_stage", "online"])
def test_a_client_weighs_by_what_it_learnt_from(mode: str) -> None:
    """Labelled images and those that passed the gate in any step, each once."""
    here = world(mode=mode, threshold=0.7)
    reply = here.answer()
    assert reply.record.pseudo is not None
    passed = set(reply.record.pseudo.position[reply.record.pseudo.used].tolist())
    everything = set(here.data.labelled.tolist()) | set(here.data.unlabelled.tolist())
    expected = set(here.data.labelled.tolist()) | passed
    assert len(here.data.labelled) < len(expected) < len(everything)
    assert float(reply.up.samples) == len(expected)  # one epoch: each image is seen once


def test_steps_of_the_first_stage() -> None:
    same, five = world().answer(), world(label_steps=5).answer()
    half = same.record.steps // 2
    assert same.record.steps == 2 * half
    assert five.record.steps == half + 5
    assert not equal_weights(same.up.weights, five.up.weights)


@pytest.mark.parametrize("labelled", [1, 2])
def test_clients_of_hardly_a_label(labelled: int) -> None:
    here = world(threshold=0.0)
    few = here.data._replace(labelled=here.data.labelled[:labelled], labels=here.data.labels[:labelled])
    more_labels_than_images = here.data._replace(unlabelled=here.data.unlabelled[:2])
    for data in (few, more_labels_than_images):
        reply = here.answer(data)
        assert all(bool(torch.isfinite(tensor).all()) for tensor in reply.up.weights.values())
        assert reply.record.pseudo is not None
        images = {*data.labelled.tolist(), *reply.record.pseudo.position.tolist()}
        assert float(reply.up.samples) == len(images)


@pytest.mark.parametrize("batchnorm", ["local", "static"])
def test_batch_norm_that_stays_at_the_client(batchnorm: str) -> None:
    parts = toy_parts(toy_recipe("fedlabel", "server", {"model": {"batchnorm": batchnorm}}, rounds=2))
    place = place_of(parts)
    noisy = shaken(place.net.state())
    reply = client_round(place, Task(1, CLIENT, LR, None), Down(noisy), parts.scenario.client(CLIENT))
    assert not any("running_" in name for name in reply.up.weights)
    assert bool(reply.held.private) == (batchnorm == "local")
    state = place.net.state()
    assert all(torch.equal(tensor, state[name]) for name, tensor in {**reply.up.weights, **reply.held.private}.items())


@pytest.mark.parametrize("sage", [False, True])
def test_a_run_averages_by_what_clients_learnt_from(sage: bool, tmp_path: Path) -> None:
    outcome = run_toy(world(sage=sage).parts, tmp_path / "run")
    for exchange, line in zip(outcome.exchanges, outcome.rounds[1:], strict=True):
        counts = np.array([float(answer.up.samples) for answer in exchange.answers if isinstance(answer, Reply)])
        assert line["client_weights"] == pytest.approx((counts / counts.sum()).tolist())
        assert line["pseudo"]["used"] > 0


@pytest.mark.parametrize(
    ("key", "value"), [("mode", "both"), ("label_steps", 0), ("certainty", "entropy"), ("threshold", 1.5)]
)
def test_mistakes_name_their_key(key: str, value: object) -> None:
    with pytest.raises(UserError, match=f"method.{key}"):
        toy_recipe("fedlabel", "clients", {"method": {key: value}})
