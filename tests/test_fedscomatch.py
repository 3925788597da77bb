"""FedSCOMatch: losses and masks against loops, and the queue that a client takes from round to round."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reference import losses as reference
from semifed.assembly import Parts, build_workplace, prepare_run
from semifed.client_round import Reply, Task, Workplace, client_round
from semifed.data.client import Batch, Samples, batches
from semifed.fit import Loss
from semifed.methods.fedscomatch import CAPACITY, Const, FedSCOMatch, Memory
from semifed.net import Net
from semifed.payloads import Down, Visit
from semifed.pseudo import closed_label, known_confidence, open_label, ratio_threshold, sure_counts
from semifed.recipe_file import load_recipe
from semifed.run import execute
from toys import Outcome, Quiet, equal_weights, run_toy, toy_parts, toy_recipe

KNOWN = 3  # classes of the toy


def probabilities(row: Tensor) -> list[float]:
    return [math.exp(value) for value in reference.log_probabilities(row.double().tolist())]


def drawn_logits(seed: int, count: int, classes: int, scale: float = 4.0) -> Tensor:
    return scale * torch.randn(count, classes + 1, generator=torch.Generator().manual_seed(seed))


def open_by_hand(logits: Tensor, tau: float, tau_ood: float) -> tuple[list[int], list[bool]]:
    targets, used = [], []
    for row in map(probabilities, logits):
        target = row.index(max(row))
        unknown = target == len(row) - 1
        targets.append(target)
        used.append(max(row) >= (tau_ood if unknown else tau))
    return targets, used


def closed_by_hand(logits: Tensor, tau: float) -> tuple[list[int], list[bool]]:
    targets, used = [], []
    for row in logits:
        among_known, among_all = probabilities(row[:-1]), probabilities(row)
        targets.append(among_known.index(max(among_known)))
        used.append(max(among_known) >= tau and among_all[-1] < max(among_all))
    return targets, used


cases = given(st.integers(0, 10**6), st.integers(0, 12), st.integers(2, 6), st.sampled_from([0.5, 0.8, 0.95]))


@cases
def test_open_stream(seed: int, count: int, classes: int, tau: float) -> None:
    logits = drawn_logits(seed, count, classes)
    for tau_ood in (0.3, 0.75, 0.99):
        label, used = open_label(logits, tau, torch.tensor(tau_ood))
        assert (label.tolist(), used.tolist()) == open_by_hand(logits, tau, tau_ood)


@cases
def test_close_stream(seed: int, count: int, classes: int, tau: float) -> None:
    logits = drawn_logits(seed, count, classes)
    label, used = closed_label(logits, tau)
    assert (label.tolist(), used.tolist()) == closed_by_hand(logits, tau)


def test_the_close_stream_asks_its_own_images_among_the_known_classes() -> None:
    """Sure among the known, doubtful among all: of use to the close stream only. Called unknown: of use to neither."""
    doubtful, unknown = [5.0, 0.0, 0.0, 4.0], [5.0, 0.0, 0.0, 5.5]
    logits = torch.tensor([doubtful, unknown])
    assert closed_label(logits, 0.95)[1].tolist() == [True, False]
    assert open_label(logits, 0.95, torch.tensor(0.95))[1].tolist() == [False, False]


@cases
def test_what_the_open_stream_takes_as_known_the_close_stream_takes_too(
    seed: int, count: int, classes: int, tau: float
) -> None:
    logits = drawn_logits(seed, count, classes)
    (open_target, open_used), (target, used) = open_label(logits, tau, torch.tensor(0.75)), closed_label(logits, tau)
    as_known = open_used & (open_target < classes)
    assert bool(used[as_known].all())
    assert torch.equal(open_target[as_known], target[as_known])


@cases
def test_scores_and_counts(seed: int, count: int, classes: int, tau: float) -> None:
    logits = drawn_logits(seed, count, classes)
    rows = [probabilities(row) for row in logits]
    np.testing.assert_allclose(known_confidence(logits).numpy(), [max(row[:-1]) for row in rows], rtol=1e-5)
    known = sum(1 for row in rows if max(row) > tau and row.index(max(row)) < classes)
    unknown = sum(1 for row in rows if max(row) > tau and row.index(max(row)) == classes)
    assert sure_counts(logits, tau).tolist() == [known, unknown]


@pytest.mark.parametrize(
    ("known", "unknown", "expected"),
    [(10, 0, 0.75), (10, 8, 0.76), (10, 9, 0.855), (10, 10, 0.95), (1, 50, 0.95), (0, 0, 0.95), (0, 7, 0.95)],
)
def test_unknown_threshold(known: int, unknown: int, expected: float) -> None:
    found = ratio_threshold(torch.tensor([known, unknown]), 0.95, 0.75, 0.95)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(expected, rel=1e-6)


def parts_of(labels: str = "server", local: dict[str, Any] | None = None, **options: Any) -> Parts:
    changes: dict[str, dict[str, Any]] = {"method": options, "local": local or {}}
    if labels == "clients":
        changes["scenario"] = {"labelled_per_class": 6}
    return toy_parts(toy_recipe("fedscomatch", labels, changes))


def place_of(parts: Parts) -> Workplace:
    """A network that names each of the K + 1 classes for some of the client's images, and is not always sure."""
    place, data = build_workplace(parts.recipe, (1, 8, 8), KNOWN), parts.scenario.client(1)
    images = data.views.plain(data.images[data.unlabelled])
    place.net.recalibrate(images)
    state = place.net.state()
    place.net.load({name: 4 * state[name] for name in ("classifier.weight", "heads.unknown.weight")})
    with torch.no_grad():
        output = place.net(images)
    level = output.heads["unknown"].mean()
    place.net.load({"classifier.bias": state["classifier.bias"] - output.logits.mean(dim=0) + level})
    return place


def method_of(parts: Parts) -> FedSCOMatch:
    assert isinstance(parts.method, FedSCOMatch)
    return parts.method


def first_step(parts: Parts, memory: Memory | None = None) -> tuple[Net, Batch, Const]:
    place, data = place_of(parts), parts.scenario.client(1)
    down = Down(place.net.state())
    local = method_of(parts).prepare(place.net, down, data, memory, Visit(0, 1, 1))
    batch = next(batches(local.data, place.budget, (0, 1, 1)))
    place.net.network.train()
    return place.net, batch, local.const


def full_queue(parts: Parts, length: int = 12, tau_ood: float = 0.4) -> Memory:
    data = parts.scenario.client(1)
    generator = torch.Generator().manual_seed(3)
    position = torch.randint(0, len(data.unlabelled), (length,), generator=generator)
    scores, checksum = torch.rand(length, generator=generator), torch.tensor(data.checksum())
    return Memory(position, scores, torch.tensor(tau_ood), checksum=checksum)


def with_unknown(net: Net, groups: list[Tensor]) -> list[Tensor]:
    """K + 1 logits of groups that share one pass, computed from features and the bare matrices of both heads."""
    with torch.no_grad():
        features = net.network.backbone(torch.cat(groups)).double()
        state = {name: tensor.double() for name, tensor in net.state().items()}
        known = features @ state["classifier.weight"].T + state["classifier.bias"]
        logits = torch.cat([known, features @ state["heads.unknown.weight"].T], dim=1)
    return list(logits.split([len(group) for group in groups]))


def queued_views(batch: Batch, const: Const, size: int) -> tuple[Tensor, list[float]]:
    """The images a step draws from the queue, looked up one by one, and the scores they came with."""
    data, memory = const
    stream = batch.unlabelled.stream("queue")
    order = torch.randperm(len(memory.position), generator=stream).tolist()[:size]
    images = torch.stack([data.images[int(data.unlabelled[int(memory.position[entry])])] for entry in order])
    return data.views.weak(images, stream), [float(memory.score[entry]) for entry in order]


@pytest.mark.parametrize("open_weak", [False, True])
@pytest.mark.parametrize("labels", ["server", "clients"])
@pytest.mark.parametrize("tau", [0.6, 0.8])
def test_loss(labels: str, tau: float, open_weak: bool) -> None:
    parts = parts_of(labels, threshold=tau, open_weak=open_weak)
    net, batch, const = first_step(parts, full_queue(parts))
    loss = method_of(parts).loss(net, batch, const)
    queued, scores = queued_views(batch, const, len(batch.labelled) or len(batch.unlabelled))
    groups = [batch.labelled.weak, queued, batch.unlabelled.weak, batch.unlabelled.strong]
    labelled, unknown, weak, strong = (part.numpy() for part in with_unknown(net, groups))
    targets, used = open_by_hand(torch.tensor(weak), tau, 0.4)
    streams = [*reference.cross_entropies(weak, targets)] if open_weak else []
    streams += reference.cross_entropies(strong, targets)
    closed, closed_used = closed_by_hand(torch.tensor(weak), tau)
    expected = {
        "supervised": reference.mean_over_all(
            reference.cross_entropies(labelled, batch.labelled.labels.tolist()), [True] * len(labelled)
        ),
        "queue": reference.mean_over_all(
            reference.cross_entropies(unknown, [KNOWN] * len(unknown)), [score < tau for score in scores]
        ),
        "open": reference.mean_over_all(streams, used * (2 if open_weak else 1)),
        "close": reference.mean_over_all(reference.cross_entropies(strong[:, :KNOWN], closed), closed_used),
    }
    assert {name: term.item() for name, term in loss.terms.items()} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert loss.value.item() == pytest.approx(sum(expected.values()), rel=1e-4)
    assert min(expected["queue"], expected["open"], expected["close"]) > 0
    assert 0 < sum(used) < len(used), "the masks must matter"
    assert 0 < sum(closed_used) < len(closed_used)
    assert closed_used != used
    assert 0 < sum(score < tau for score in scores) < len(scores), "the mask of the queue must matter"
    assert loss.pseudo is not None
    assert torch.equal(loss.pseudo.position, batch.unlabelled.position)
    assert (loss.pseudo.label.tolist(), loss.pseudo.used.tolist()) == (closed, closed_used)


def test_gradients_do_not_flow_through_targets() -> None:
    """With weak views as targets only, the loss has the gradient of cross entropy with those targets as constants."""
    parts = parts_of(threshold=0.4)
    net, batch, const = first_step(parts, full_queue(parts))
    loss = method_of(parts).loss(net, batch, const)
    head = net.named_parameters()["heads.unknown.weight"]
    (found,) = torch.autograd.grad(loss.terms["open"], head, retain_graph=True)
    queued, _ = queued_views(batch, const, len(batch.unlabelled))
    groups = [batch.labelled.weak, queued, batch.unlabelled.weak, batch.unlabelled.strong]
    features = net.network.backbone(torch.cat(groups)).detach()[-len(batch.unlabelled) :]
    *_, weak, strong = with_unknown(net, groups)
    targets, used = open_by_hand(weak, 0.4, 0.4)
    expected = np.zeros(features.shape[1])
    for row, target, use, feature in zip(strong, targets, used, features, strict=True):
        expected += use * reference.softmax_gradient(row.numpy(), target)[KNOWN] * feature.double().numpy()
    np.testing.assert_allclose(found[0].numpy(), expected / len(strong), rtol=1e-3, atol=1e-6)


def test_a_queue_shorter_than_a_batch_is_not_used_yet() -> None:
    parts = parts_of(threshold=0.9)
    size = 8
    for length, drawn in ((size - 1, False), (size, True)):
        memory = full_queue(parts, length)._replace(score=torch.zeros(length))
        net, batch, const = first_step(parts, memory)
        assert len(batch.unlabelled) == size
        assert (method_of(parts).loss(net, batch, const).terms["queue"].item() > 0) == drawn


def test_a_batch_larger_than_any_queue_still_uses_it() -> None:
    parts = parts_of(threshold=0.9)
    memory = full_queue(parts, CAPACITY)._replace(score=torch.zeros(CAPACITY))
    net, batch, const = first_step(parts, memory)
    data = const.data
    position = torch.arange(CAPACITY + 44) % len(data.unlabelled)
    images = data.images[data.unlabelled[position]]
    wide = Samples(images, position, torch.empty(0, dtype=torch.int64), data.views, (0, "wide"))
    loss = method_of(parts).loss(net, Batch(batch.labelled, wide), const)
    assert loss.terms["queue"].item() > 0
    assert len(loss.carry.memory.position) == CAPACITY


def test_without_anything_sure_there_is_no_step_but_the_queue_grows() -> None:
    parts = parts_of(threshold=1.0, unknown_threshold=1.0, least_unknown_threshold=1.0)
    net, batch, const = first_step(parts)
    loss = method_of(parts).loss(net, batch, const)
    assert not loss.value.requires_grad
    assert len(loss.carry.memory.position) == len(const.memory.position) + 1


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3])
def test_an_empty_queue_is_filled_with_the_least_known_images(share: float) -> None:
    parts = parts_of(first_share=share)
    net, _, const = first_step(parts)
    net.network.eval()
    data, memory = const
    (logits,) = with_unknown(net, [data.views.plain(data.images[data.unlabelled])])
    scores = [max(probabilities(row)[:-1]) for row in logits]
    count = max(1, int(share * len(scores)))
    least = sorted(range(len(scores)), key=lambda position: scores[position])[:count]
    assert memory.position.tolist() == least[::-1]
    np.testing.assert_allclose(memory.score.numpy(), [scores[position] for position in least[::-1]], rtol=1e-4)
    assert float(memory.unknown_threshold) == pytest.approx(0.95)


def test_a_kept_queue_is_taken_as_it_is() -> None:
    parts = parts_of()
    kept = full_queue(parts)
    _, _, const = first_step(parts, kept)
    assert const.memory is kept


def test_a_queue_of_other_images_is_filled_anew() -> None:
    """A deployed client reads its folder in every round."""
    parts = parts_of()
    _, _, fresh = first_step(parts)
    _, _, const = first_step(parts, full_queue(parts)._replace(checksum=torch.tensor(1)))
    assert torch.equal(const.memory.position, fresh.memory.position)
    assert torch.equal(const.memory.checksum, fresh.memory.checksum)


def test_each_step_queues_the_image_that_looks_least_known() -> None:
    parts = parts_of()
    place = place_of(parts)
    net, _, const = first_step(parts)
    for batch in batches(const.data, place.budget, (0, 1, 1)):
        before = const.memory
        loss: Loss = method_of(parts).loss(net, batch, const)
        const = loss.carry
        size = len(batch.unlabelled)
        views = [batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong]
        if len(before.position) >= size:
            views.insert(1, queued_views(batch, Const(const.data, before), size)[0])
        scores = [max(probabilities(row)[:-1]) for row in with_unknown(net, views)[-2]]
        assert const.memory.position.tolist() == [
            *before.position.tolist(),
            int(batch.unlabelled.position[scores.index(min(scores))]),
        ]
        assert float(const.memory.score[-1]) == pytest.approx(min(scores), rel=1e-4)
        assert torch.equal(const.memory.score[:-1], before.score)


@pytest.mark.parametrize(("classes", "capacity"), [(3, 256), (32, 256), (40, 320)])
def test_the_oldest_leaves_a_full_queue(classes: int, capacity: int) -> None:
    memory = Memory(torch.empty(0, dtype=torch.int64), torch.empty(0), torch.tensor(0.95))
    queue: list[tuple[int, float]] = []
    for step in range(capacity + 40):
        logits, position = drawn_logits(step, 4, classes), torch.arange(4) + 10 * step
        memory = FedSCOMatch()._after(memory, position, logits, 1000)
        scores = [max(probabilities(row)[:-1]) for row in logits]
        queue.append((10 * step + scores.index(min(scores)), min(scores)))
        if len(queue) > capacity:
            queue.pop(0)
    assert memory.position.tolist() == [position for position, _ in queue]
    np.testing.assert_allclose(memory.score.numpy(), [score for _, score in queue], rtol=1e-4)
    assert len(queue) == capacity


@given(st.integers(0, 10**6), st.integers(1, 60))
def test_a_new_threshold_every_half_pass(seed: int, held: int) -> None:
    method = FedSCOMatch(threshold=0.7)
    memory = Memory(torch.empty(0, dtype=torch.int64), torch.empty(0), torch.tensor(0.95))
    tau_ood, known, unknown, seen = 0.95, 0, 0, 0
    for step in range(12):
        logits = drawn_logits(seed + step, 5, 3)
        memory = method._after(memory, torch.arange(5), logits, held)
        for row in map(probabilities, logits):
            if max(row) > 0.7:
                known, unknown = known + (row[3] < max(row)), unknown + (row[3] == max(row))
        seen += 5
        if seen >= held / 2:
            tau_ood = min(max(0.7 * unknown / known, 0.75), 0.95) if known else 0.95
            known = unknown = seen = 0
        assert float(memory.unknown_threshold) == pytest.approx(tau_ood, rel=1e-6)
        assert (memory.sure.tolist(), int(memory.seen)) == ([known, unknown], seen)


def test_the_server_learns_over_all_classes_and_never_names_unknown() -> None:
    parts = parts_of()
    server = parts.scenario.server
    assert server is not None
    place = place_of(parts)
    batch = next(batches(server, place.budget._replace(batch=6), (0, "server")))
    place.net.network.train()
    loss = method_of(parts).server_loss(place.net, batch)
    (logits,) = with_unknown(place.net, [batch.labelled.weak])
    assert logits.shape[1] == KNOWN + 1
    expected = np.mean(reference.cross_entropies(logits.numpy(), batch.labelled.labels.tolist()))
    assert loss.value.item() == pytest.approx(expected, rel=1e-4)
    loss.value.backward()
    gradient = place.net.named_parameters()["heads.unknown.weight"].grad
    features = place.net.network.backbone(batch.labelled.weak).detach().double().numpy()
    pushed = np.mean([probabilities(row)[-1] * feature for row, feature in zip(logits, features, strict=True)], axis=0)
    assert gradient is not None
    np.testing.assert_allclose(gradient[0].numpy(), pushed, rtol=1e-3, atol=1e-6)


def test_prediction() -> None:
    parts = parts_of()
    net, data = place_of(parts).net, parts.scenario.client(0)
    images = data.views.plain(data.images[:9])
    found = method_of(parts).predict(net, images)
    (logits,) = with_unknown(net, [images])
    np.testing.assert_allclose(found.logits.detach().numpy(), logits[:, :KNOWN].numpy(), rtol=1e-3, atol=1e-4)
    expected = [probabilities(row)[-1] for row in logits]
    np.testing.assert_allclose(found.unknown.detach().numpy(), expected, rtol=1e-3, atol=1e-6)


def memories(outcome: Outcome) -> list[tuple[int, int, int, Memory]]:
    """Round, client, steps and what the client kept, of every reply."""
    found = []
    for exchange in outcome.exchanges:
        for answer in exchange.answers:
            assert isinstance(answer, Reply)
            found.append((exchange.round, answer.record.client, answer.record.steps, answer.held.kept))
    return found


def same(one: Memory, other: Memory) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_toy(parts_of(), tmp_path_factory.mktemp("whole") / "run")


def test_the_queue_goes_on_from_round_to_round(whole: Outcome) -> None:
    last: dict[int, Memory] = {}
    returned = 0
    for _, client, steps, memory in memories(whole):
        if client in last:
            before = last[client]
            returned += 1
            assert len(memory.position) == len(before.position) + steps
            assert torch.equal(memory.position[: len(before.position)], before.position)
            assert torch.equal(memory.score[: len(before.score)], before.score)
        last[client] = memory
    assert returned > 4
    assert all(len(torch.unique(memory.position)) > 1 for memory in last.values())


def test_the_queue_survives_an_interruption(whole: Outcome, tmp_path: Path) -> None:
    parts = parts_of()
    with pytest.raises(KeyboardInterrupt):
        run_toy(parts, tmp_path / "run", reporter=Quiet(stop_after=2))
    shutil.copytree(tmp_path / "run", tmp_path / "robbed")
    shutil.rmtree(tmp_path / "robbed" / "checkpoint" / "kept")
    resumed = run_toy(parts, tmp_path / "run", resume=True)
    assert equal_weights(resumed.weights, whole.weights)
    rest = [entry for entry in memories(whole) if entry[0] > 2]
    assert [entry[:3] for entry in memories(resumed)] == [entry[:3] for entry in rest]
    assert all(same(one[3], other[3]) for one, other in zip(memories(resumed), rest, strict=True))
    robbed = run_toy(parts, tmp_path / "robbed", resume=True)
    assert not equal_weights(robbed.weights, whole.weights), "the queue must matter"


@pytest.mark.slow
def test_two_workers_keep_the_same_queues(whole: Outcome, tmp_path: Path) -> None:
    recipe = toy_recipe("fedscomatch", "server", {"engine": {"workers": 2}})
    pooled = run_toy(toy_parts(recipe), tmp_path / "run")
    assert equal_weights(pooled.weights, whole.weights)
    assert len(memories(pooled)) == len(memories(whole)) > 0
    assert all(same(one[3], other[3]) for one, other in zip(memories(pooled), memories(whole), strict=True))


def test_the_queue_never_leaves_the_client(whole: Outcome) -> None:
    for exchange in whole.exchanges:
        for answer in exchange.answers:
            assert isinstance(answer, Reply)
            assert answer.up._fields == ("weights", "samples")


def test_a_client_with_labels_only_learns_them_and_queues_nothing() -> None:
    parts = parts_of("clients")
    place, data = place_of(parts), parts.scenario.client(1)
    down, bare = Down(place.net.state()), data._replace(unlabelled=data.unlabelled[:0])
    reply = client_round(place, Task(1, 1, 0.05, None), down, bare)
    assert len(reply.held.kept.position) == 0
    assert set(reply.record.terms) == {"total", "supervised"}
    assert not equal_weights(reply.up.weights, {name: down.weights[name] for name in reply.up.weights})
    again = client_round(place, Task(2, 1, 0.05, reply.held), down, data)  # images have come since
    assert len(again.held.kept.position) == 1 + again.record.steps


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["server", "clients"])
def test_quickstart(labels: str, tmp_path: Path) -> None:
    changes = ["clients_per_round=2", "local.epochs=1", "server.warmup_epochs=15", "engine.workers=1"]
    recipe = load_recipe("quickstart", ["method=fedscomatch", f"scenario.labels={labels}", "rounds=3", *changes])
    summary = execute(prepare_run(recipe), tmp_path / "run", Quiet())
    assert summary["rounds"] == 3
    assert 0 <= summary["metrics"]["auroc_seen"] <= 1
    assert summary["metrics"]["accuracy"] > (0.7 if labels == "server" else 0.1)
