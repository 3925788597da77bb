"""(FL)² against plain loops, a network whose weights are really moved, and finite differences."""

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.special
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.nn import functional as F

from command import semifed
from reference.losses import log_probabilities
from semifed.aggregate import doubtful_shares
from semifed.assembly import Parts
from semifed.client_round import Reply as Answer
from semifed.client_round import Task, client_round
from semifed.data.client import Batch, Budget, ClientData, batches
from semifed.fit import Loss, fit
from semifed.losses import asam_offsets, cross_entropy, kl_divergence, mean
from semifed.methods.fl2 import FL2, Kept, Reply
from semifed.net import Net
from semifed.payloads import Down, Local, Visit
from semifed.pseudo import adaptive_label
from semifed.rng import torch_stream
from semifed.server_momentum import Moving
from toys import equal_weights, place_of, run_toy, shaken, site_of, toy_parts, toy_recipe

CLIENT = 1
Array = NDArray[np.float64]
logit_rows = st.lists(st.lists(st.floats(-8, 8, width=32), min_size=4, max_size=4), min_size=1, max_size=12)


# Formulas


def thresholds_by_loop(rows: Sequence[Sequence[float]]) -> tuple[list[int], list[float], list[float], float]:
    """Labels, confidences, the threshold of each image's class, and the mean confidence."""
    probabilities = [[math.exp(value) for value in log_probabilities(list(row))] for row in rows]
    confidence = [max(row) for row in probabilities]
    label = [row.index(max(row)) for row in probabilities]
    level = sum(confidence) / len(rows)
    named = [sum(row[k] for row in probabilities) / len(rows) for k in range(len(rows[0]))]
    return label, confidence, [level * named[k] / max(named) for k in label], level


@example([[0.0, 3.566293954849243, 3.566293954849243, 0.0]])  # c · c / c is larger than c by a bit
@given(logit_rows)
def test_adaptive_threshold(rows: list[list[float]]) -> None:
    label, confidence, needed, level = thresholds_by_loop(rows)
    found, used, tau = adaptive_label(torch.tensor(rows))
    assert float(tau) == pytest.approx(level, rel=1e-5)
    assert used.any(), "the most confident image always passes"
    for index in range(len(rows)):
        row = rows[index]
        if sum(value == max(row) for value in row) == 1:
            assert int(found[index]) == label[index]
            if abs(confidence[index] - needed[index]) > 1e-6:
                assert bool(used[index]) == (confidence[index] >= needed[index])


def test_images_all_alike_are_all_kept() -> None:
    _, used, level = adaptive_label(torch.tensor([[0.1, 0.7, -0.3]]).repeat(37, 1))
    assert used.all()
    assert float(level) == pytest.approx(float(torch.tensor([0.1, 0.7, -0.3]).softmax(0).max()))


def test_no_images_no_threshold() -> None:
    label, used, level = adaptive_label(torch.zeros(0, 3))
    assert (label.shape, used.shape, used.dtype, float(level)) == ((0,), (0,), torch.bool, 0.0)


def test_a_class_seldom_named_needs_less() -> None:
    rare = [[0.0, 1.2]]
    rows = torch.tensor([[3.0, 0.0]] * 9 + rare)
    label, used, level = adaptive_label(rows)
    assert label.tolist() == [0] * 9 + [1]
    assert float(rows[9].softmax(0).max()) < float(level)
    assert used.all()


@given(logit_rows, logit_rows)
def test_kl_divergence(rows: list[list[float]], others: list[list[float]]) -> None:
    count = min(len(rows), len(others))
    reference = scipy.special.softmax(np.array(rows[:count]), axis=1)
    reference[0] = np.eye(4)[1]  # 0 log 0 is 0
    p = scipy.special.softmax(np.array(others[:count]), axis=1)
    found = kl_divergence(torch.from_numpy(reference), torch.tensor(others[:count], dtype=torch.float64))
    np.testing.assert_allclose(found.numpy(), scipy.special.rel_entr(reference, p).sum(axis=1), rtol=1e-9, atol=1e-10)


def test_kl_divergence_has_its_least_value_and_no_slope_at_the_reference() -> None:
    logits = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    value = kl_divergence(logits.detach().softmax(dim=1), logits)
    (slope,) = torch.autograd.grad(value.sum(), logits)
    assert float(value.detach().abs().max()) < 1e-12
    assert float(slope.abs().max()) < 1e-12


def tensors(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"kernel": (2, 1, 3, 3), "scale": (4,), "matrix": (3, 4)}
    weights = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    curvature = {n: torch.rand(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    return weights, {name: curvature[name] * tensor for name, tensor in weights.items()}  # slope of Σ a w² / 2


def operator(weights: dict[str, torch.Tensor], floor: float) -> dict[str, Array]:
    return {
        name: np.ones(tensor.shape) if name == "scale" else np.abs(tensor.numpy()) + floor
        for name, tensor in weights.items()
    }


@given(st.integers(0, 999), st.floats(0, 2), st.floats(0, 1))
def test_ascent_number_by_number(seed: int, radius: float, floor: float) -> None:
    weights, slopes = tensors(seed)
    size = operator(weights, floor)
    squares = 0.0
    for name, slope in slopes.items():
        for g, d in zip(slope.flatten().tolist(), size[name].ravel().tolist(), strict=True):
            squares += (d * g) ** 2
    found = asam_offsets(weights, slopes, radius, floor)
    for name, slope in slopes.items():
        expected = [
            radius * d * d * g / math.sqrt(squares)
            for g, d in zip(slope.flatten().tolist(), size[name].ravel().tolist(), strict=True)
        ]
        np.testing.assert_allclose(found[name].flatten().numpy(), expected, rtol=1e-9, atol=1e-15)


def test_no_other_step_of_that_size_climbs_higher() -> None:
    """ε maximises ⟨g, ε⟩ over ‖ε / D‖ = ρ, which is what ASAM asks for."""
    weights, slopes = tensors(3)
    size = operator(weights, 0.01)

    def climb(offsets: dict[str, Array]) -> float:
        return sum(float((slopes[name].numpy() * offset).sum()) for name, offset in offsets.items())

    def length(offsets: dict[str, Array]) -> float:
        return math.sqrt(sum(float(((offset / size[name]) ** 2).sum()) for name, offset in offsets.items()))

    best = {name: offset.numpy() for name, offset in asam_offsets(weights, slopes, 0.1, 0.01).items()}
    assert length(best) == pytest.approx(0.1)
    rng = np.random.default_rng(0)
    for spread in [1e-3, 1e-2, 0.1, 1.0] * 50:
        other = {name: offset + spread * rng.normal(size=offset.shape) * size[name] for name, offset in best.items()}
        other = {name: offset * 0.1 / length(other) for name, offset in other.items()}
        assert climb(other) <= climb(best)


def test_on_a_flat_spot_nothing_moves() -> None:
    weights, _ = tensors(0)
    still = asam_offsets(weights, {name: torch.zeros_like(tensor) for name, tensor in weights.items()}, 0.5, 0.01)
    assert all(not bool(offset.any()) for offset in still.values())


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), min_size=1, max_size=6))
def test_shares_of_doubt(clients: list[tuple[int, float]]) -> None:
    doubts = [(1 - confidence) if count else 0.0 for count, confidence in clients]
    active = [float(count > 0) for count, _ in clients]
    found = doubtful_shares(*(list(map(float, column)) for column in zip(*clients, strict=True)))
    base = doubts if sum(doubts) > 0 else active if sum(active) else [1.0] * len(clients)
    np.testing.assert_allclose(found.numpy(), np.array(base) / sum(base), rtol=1e-12)


def test_no_claim_buys_more_than_full_doubt() -> None:
    found = doubtful_shares([1.0] * 4, [0.0, -1e9, math.nan, 7.0])
    assert found.tolist() == [0.5, 0.5, 0.0, 0.0]


# The client


class World(NamedTuple):
    parts: Parts
    net: Net
    down: Down
    data: ClientData

    @property
    def method(self) -> FL2:
        assert isinstance(self.parts.method, FL2)
        return self.parts.method

    def prepare(self) -> Local[Kept, Any]:
        with torch.no_grad():
            return self.method.prepare(self.net, self.down, self.data, None, Visit(0, 1, CLIENT))


def world(labels: str = "server", **options: Any) -> World:
    """A client that has received weights in the middle of a run; its network is in evaluation mode."""
    parts = toy_parts(toy_recipe("fl2", labels, {"method": options}, rounds=2))
    net = place_of(parts).net
    noisy = shaken(net.state())
    net.load(noisy)
    return World(parts, net, Down(noisy), parts.scenario.client(CLIENT))


def answer_of(here: World) -> Answer:
    return client_round(place_of(here.parts), Task(1, CLIENT, 0.05, None), here.down, here.data)


def half_sure() -> tuple[World, Batch, Kept]:
    """The first batch of a client of whose images some are of the high-confidence part."""
    seen = gate_logits(world()).softmax(dim=1).max(dim=1).values
    here = world(threshold=float(seen.quantile(0.6)))
    local = here.prepare()
    batch = next(iter(batches(local.data, Budget(1, None, 8), (0, 1, CLIENT))))
    sure = local.const.sure[batch.unlabelled.position]
    assert 0 < int(sure.sum()) < len(sure)
    here.net.network.train()
    return here, batch, local.const


def gate_logits(here: World) -> torch.Tensor:
    view = here.data.views.weak(here.data.images[here.data.unlabelled], torch_stream(0, 1, CLIENT, "gate"))
    return torch.cat([here.net(image[None]).logits.detach() for image in view])


def test_kept_images_and_what_is_reported_of_them() -> None:
    here = world()
    label, confidence, needed, level = thresholds_by_loop(gate_logits(here).double().tolist())
    local = here.prepare()
    kept = [index for index in range(len(label)) if confidence[index] >= needed[index]]
    assert 0 < len(kept) < len(label)
    assert local.data.unlabelled.tolist() == here.data.unlabelled[kept].tolist()
    assert local.const.label.tolist() == [label[index] for index in kept]
    assert local.const.sure.tolist() == [confidence[index] >= here.method.threshold for index in kept]
    answer = answer_of(here)
    assert float(answer.up.confidence) == pytest.approx(level, rel=1e-5)
    assert float(answer.up.samples) == len(kept)
    pseudo = answer.record.pseudo
    assert pseudo is not None
    assert pseudo.position.tolist() == here.data.unlabelled.tolist(), "left-out images are seen, not used"
    assert pseudo.label.tolist() == label
    assert pseudo.used.nonzero().flatten().tolist() == kept


def slopes_of(net: Net, value: torch.Tensor) -> dict[str, torch.Tensor]:
    parameters = net.named_parameters()
    found = torch.autograd.grad(value, list(parameters.values()))
    return dict(zip(parameters, found, strict=True))


def test_the_loss_is_that_of_a_network_whose_weights_are_moved_and_put_back() -> None:
    here, batch, const = half_sure()
    at = batch.unlabelled.position
    label, sure, strong = const.label[at], const.sure[at], batch.unlabelled.strong
    still, moved = copy.deepcopy(here.net), copy.deepcopy(here.net)
    logits = still(strong).logits
    climbing = slopes_of(still, F.cross_entropy(logits[sure], label[sure]))  # its length does not matter
    size = {
        n: p.detach().abs() + 0.01 if p.dim() > 1 else torch.ones_like(p) for n, p in still.named_parameters().items()
    }
    length = math.sqrt(sum(float(((size[n] * g).double() ** 2).sum()) for n, g in climbing.items()))
    with torch.no_grad():
        for name, parameter in moved.named_parameters().items():
            parameter.add_(0.1 * size[name] ** 2 * climbing[name] / length)
    held = still(strong).logits.detach().softmax(dim=1)
    apart = F.kl_div(moved(strong).logits.log_softmax(dim=1), held, reduction="none").sum(dim=1)
    sharpness = (apart * sure).sum() / len(sure)
    fixed = F.cross_entropy(still(strong).logits, label)
    first, second = slopes_of(still, fixed), slopes_of(moved, sharpness)
    loss = here.method.loss(here.net, batch, const)
    assert loss.value.item() == pytest.approx(fixed.item() + sharpness.item(), rel=1e-5)
    assert loss.terms["consistency"].item() == pytest.approx(fixed.item(), rel=1e-5)
    assert loss.terms["sharpness"].item() == pytest.approx(sharpness.item(), rel=1e-3)
    assert sharpness.item() > 1e-5
    for name, slope in slopes_of(here.net, loss.value).items():
        torch.testing.assert_close(slope, first[name] + second[name], rtol=1e-3, atol=1e-6)
        assert float(second[name].abs().max()) > 0


def test_slope_against_finite_differences() -> None:
    """In double precision, with the offsets and the reference held fixed, as the method treats them."""
    here, batch, const = half_sure()
    at = batch.unlabelled.position
    label, sure, strong = const.label[at], const.sure[at], batch.unlabelled.strong.double()
    here.net.network.double()
    vars(batch.unlabelled)["strong"] = strong  # the cached view
    parameters = here.net.named_parameters()
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    logits = here.net(strong).logits
    climbing = slopes_of(here.net, (cross_entropy(logits, label) * sure).mean())
    offsets = asam_offsets(start, climbing, 0.1, 0.01)
    held = here.net(strong).logits.detach().softmax(dim=1)

    @torch.no_grad()
    def value(direction: dict[str, torch.Tensor], by: float) -> float:
        def at_(extra: float) -> torch.Tensor:
            for name, parameter in parameters.items():
                parameter.copy_(start[name] + by * direction[name] + extra * offsets[name])
            return here.net(strong).logits

        fixed = cross_entropy(at_(0.0), label).mean()
        return float(fixed + (kl_divergence(held, at_(1.0)) * sure).mean())

    slopes = slopes_of(here.net, here.method.loss(here.net, batch, const).value)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        direction = {n: torch.randn(t.shape, generator=generator, dtype=torch.float64) for n, t in start.items()}
        difference = (value(direction, 1e-6) - value(direction, -1e-6)) / 2e-6
        expected = sum(float((slopes[name] * direction[name]).sum()) for name in start)
        assert difference == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_without_a_high_confidence_image_nothing_is_moved() -> None:
    here = world(threshold=1.0)
    local = here.prepare()
    batch = next(iter(batches(local.data, Budget(1, None, 8), (0, 1, CLIENT))))
    here.net.network.train()
    loss = here.method.loss(here.net, batch, local.const)
    assert float(loss.terms["sharpness"]) == 0.0
    label = local.const.label[batch.unlabelled.position]
    plain = slopes_of(here.net, F.cross_entropy(here.net(batch.unlabelled.strong).logits, label))
    for name, slope in slopes_of(here.net, loss.value).items():
        torch.testing.assert_close(slope, plain[name])


def test_a_radius_of_zero_is_consistency_alone() -> None:
    here = world(radius=0.0)
    answer = answer_of(here)
    assert answer.record.terms["sharpness"] == pytest.approx(0.0, abs=1e-6)
    local, place = here.prepare(), place_of(here.parts)
    place.net.load(here.down.weights)

    def consistency(net: Net, batch: Batch) -> Loss:
        goal = local.const.label[batch.unlabelled.position]
        return Loss(mean(cross_entropy(net(batch.unlabelled.strong).logits, goal)), {})

    fit(place.net, batches(local.data, place.budget, (0, 1, CLIENT)), consistency, place.optimiser._replace(lr=0.05))
    for name, tensor in answer.up.weights.items():
        torch.testing.assert_close(tensor, place.net.state()[name], rtol=1e-4, atol=1e-5)
    assert not equal_weights(answer.up.weights, answer_of(world(radius=0.5)).up.weights)


def test_labels_at_the_client_are_learnt_too() -> None:
    terms = answer_of(world("clients")).record.terms
    assert terms.keys() == {"total", "supervised", "consistency", "sharpness"}
    assert terms["total"] == pytest.approx(terms["supervised"] + terms["consistency"] + terms["sharpness"], rel=1e-4)
    here = world("clients")
    answer = answer_of(here._replace(data=here.data._replace(unlabelled=here.data.unlabelled[:0])))
    assert answer.record.terms.keys() == {"total", "supervised"}
    assert float(answer.up.confidence) == 0.0, "a client with labels alone counts in full"


# The server


def test_three_rounds_of_the_server_by_hand() -> None:
    here = world("clients")  # no labels at the server: nothing is fine-tuned
    site = site_of(here.parts)
    parameters = list(site.net.named_parameters())
    server = Moving(here.down.weights, {})
    w = {name: here.down.weights[name].double().numpy() for name in parameters}
    v = {name: np.zeros_like(w[name]) for name in parameters}
    generator = torch.Generator().manual_seed(1)
    confidence = (0.9, 0.4, 0.1)
    for _ in range(3):
        models = [
            {n: torch.rand(server.weights[n].shape, generator=generator) for n in site.net.trained_names()}
            for _ in confidence
        ]
        counts = (40.0, 10.0, 0.0)  # the third had nothing to learn from
        ups = [
            Reply(model, torch.tensor(count), torch.tensor(tau))
            for model, count, tau in zip(models, counts, confidence, strict=True)
        ]
        server = here.method.aggregate(server, ups, site)
        assert site.notes["client_weights"] == pytest.approx([0.1 / 0.7, 0.6 / 0.7, 0.0])
        for name in parameters:
            middle = (0.1 * models[0][name].double().numpy() + 0.6 * models[1][name].double().numpy()) / 0.7
            v[name] = 0.5 * v[name] + (w[name] - middle)
            w[name] = w[name] - v[name]
    for name in parameters:
        np.testing.assert_allclose(server.weights[name].numpy(), w[name], rtol=1e-4, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(server.velocity[name].numpy(), v[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("count", [0, 2])
def test_nobody_active_means_fine_tuning_only(count: int) -> None:
    here = world()
    server = Moving(here.down.weights, {name: torch.ones_like(t) for name, t in here.net.named_parameters().items()})
    silent = Reply({n: here.down.weights[n] for n in here.net.trained_names()}, torch.tensor(0.0), torch.tensor(0.5))
    after = here.method.aggregate(server, [silent] * count, site_of(here.parts))
    expected = site_of(here.parts).fine_tune(server.weights, here.method.server_loss)
    assert equal_weights(after.weights, expected)
    assert equal_weights(after.velocity, server.velocity)


def test_a_run_notes_confidence_and_counts_by_doubt(tmp_path: Path) -> None:
    outcome = run_toy(world().parts, tmp_path / "run")
    for line in outcome.rounds[1:]:
        doubt = 1 - np.array(line["confidence"])
        np.testing.assert_allclose(line["client_weights"], doubt / doubt.sum(), rtol=1e-6)
        assert line["pseudo"]["seen"] > line["pseudo"]["used"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["server", "clients"])
def test_quickstart(labels: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    overrides = ("method=fl2", f"scenario.labels={labels}", "rounds=3", "local.epochs=1", "engine.workers=1")
    threshold = {"server": 0.7, "clients": 0.18}[labels]  # three rounds make nobody 0.95 sure
    smaller = ("server.warmup_epochs=20", "clients_per_round=4", "evaluate.every=3", f"method.threshold={threshold}")
    outcome = semifed(capsys, "run", "quickstart", *overrides, *smaller, "--out", str(out), "--quiet")
    assert outcome.code == 0, outcome.err
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in rounds] == [0, 1, 2, 3]
    for line in rounds[1:]:
        assert line["pseudo"]["used"] > 0
        assert line["loss"]["sharpness"] > 0
        assert ("supervised" in line["loss"]) == (labels == "clients")
    assert rounds[-1]["metrics"]["accuracy"] > (0.4 if labels == "server" else 0.1)  # chance is 1/6
