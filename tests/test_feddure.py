"""FedDure's regulators against networks that are really moved and put back, finite differences and other optimisers."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from semifed.assembly import Parts
from semifed.client_round import Reply, Task, client_round
from semifed.data.client import Batch, Budget, ClientData, batches
from semifed.errors import UserError
from semifed.fit import Course, Loss, Optimiser
from semifed.methods.feddure import FedDure, Regulators
from semifed.net import Net
from semifed.payloads import Down, Visit
from semifed.regulators import FineRegulator, adam_step, descended, fine_regulator, image_weights, slopes
from semifed.targets import Targets
from semifed.wire import Weights
from toys import equal_weights, place_of, run_toy, shaken, toy_parts, toy_recipe

CLIENT = 1
LR = 0.05


# Formulas


@settings(max_examples=20)
@given(st.integers(0, 999), st.integers(1, 6), st.integers(1, 5))
def test_the_weight_of_an_image_neuron_by_neuron(seed: int, classes: int, hidden: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    w = fine_regulator(classes, hidden, generator).weights
    rows = torch.rand(7, classes, generator=generator).softmax(dim=1)
    expected = []
    for row in rows.double().tolist():
        total = float(w["output.bias"][0])
        for unit in range(hidden):
            into = float(w["hidden.bias"][unit])
            for k in range(classes):
                into += float(w["hidden.weight"][unit, k]) * row[k]
            total += float(w["output.weight"][0, unit]) * max(into, 0.0)
        expected.append(1 / (1 + np.exp(-total)))
    np.testing.assert_allclose(image_weights(w, rows).numpy(), expected, rtol=1e-5)


def test_a_regulator_starts_as_a_linear_layer_does() -> None:
    fine = fine_regulator(10, 4000, torch.Generator().manual_seed(0))
    for name, inputs in (("hidden.weight", 10), ("hidden.bias", 10), ("output.weight", 4000)):
        bound = inputs**-0.5
        assert float(fine.weights[name].abs().max()) == pytest.approx(bound, rel=1e-2)
        assert float(fine.weights[name].std()) == pytest.approx(bound / 3**0.5, rel=0.05)
    assert image_weights(fine.weights, torch.eye(10)).sub(0.5).abs().max() < 0.4
    again = fine_regulator(10, 4000, torch.Generator().manual_seed(0))
    assert equal_weights(again.weights, fine.weights)
    assert fine.steps == 0
    assert not any(bool(part.any()) for memory in (fine.first, fine.second) for part in memory.values())


@settings(max_examples=20)
@given(st.integers(0, 999), st.floats(1e-4, 0.5))
def test_steps_of_adam(seed: int, lr: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    fine = fine_regulator(3, 4, generator)
    fine = FineRegulator(*({n: t.double() for n, t in part.items()} for part in fine[:3]), 0)
    theirs = {name: tensor.clone().requires_grad_() for name, tensor in fine.weights.items()}
    optimiser = torch.optim.Adam(theirs.values(), lr=lr)
    for _ in range(4):
        gradient = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in theirs.items()}
        gradient = {name: slope.double() for name, slope in gradient.items()}
        for name, tensor in theirs.items():
            tensor.grad = gradient[name]
        optimiser.step()
        fine = adam_step(fine, gradient, lr)
    for name, tensor in theirs.items():
        torch.testing.assert_close(fine.weights[name], tensor.detach(), rtol=1e-6, atol=1e-7)


def test_a_step_through_which_gradients_flow() -> None:
    """For L = c Σ w⁴, w' = w − lr ∂L/∂w, the slope of Σ w' by c is −lr Σ 4 w³."""
    weights = {"a": torch.tensor([1.0, -2.0]).requires_grad_(), "unused": torch.ones(1).requires_grad_()}
    scale = torch.tensor(0.5, requires_grad=True)
    moved = descended(weights, slopes(scale * (weights["a"] ** 4).sum(), weights, differentiable=True), 0.1)
    assert moved["a"].tolist() == pytest.approx([1 - 0.1 * 0.5 * 4, -2 + 0.1 * 0.5 * 32])
    assert moved["unused"].tolist() == [1.0]
    (slope,) = torch.autograd.grad(moved["a"].sum(), scale)
    assert float(slope) == pytest.approx(-0.1 * (4 - 32))


# A step at a client


class World(NamedTuple):
    parts: Parts
    net: Net
    down: Down
    data: ClientData
    const: Regulators
    batch: Batch

    @property
    def method(self) -> FedDure:
        assert isinstance(self.parts.method, FedDure)
        return self.parts.method

    def double(self) -> "World":
        """The same in double precision, with the views already drawn."""
        self.net.network.double()
        for samples in self.batch:
            for view in ("weak", "strong"):
                vars(samples)[view] = getattr(samples, view).double()

        def doubled(weights: Weights) -> Weights:
            return {name: tensor.double() for name, tensor in weights.items()}

        fine = self.const.fine
        fine = FineRegulator(doubled(fine.weights), doubled(fine.first), doubled(fine.second), 0)
        return self._replace(const=self.const._replace(coarse=doubled(self.const.coarse), fine=fine))


def parts_of(method: str, labels: str = "clients", **options: Any) -> Parts:
    scenario = {"labelled_per_class": 6} if labels == "clients" else {}
    return toy_parts(toy_recipe(method, labels, {"method": options, "scenario": scenario}, rounds=2))


def world(**options: Any) -> World:
    """A client in the middle of a run with its first batch; phi is no longer where the local model is."""
    parts = parts_of("feddure", **{"threshold": 0.0, **options})
    net = place_of(parts).net
    down = Down(shaken(net.state()))
    net.load(down.weights)
    data = parts.scenario.client(CLIENT)
    with torch.no_grad():
        const = parts.method.prepare(net, down, data, None, Visit(0, 1, CLIENT)).const
    batch = next(batches(data, place_of(parts).budget, (0, 1, CLIENT)))
    generator = torch.Generator().manual_seed(8)
    phi = {name: t + 0.1 * torch.randn(t.shape, generator=generator) for name, t in const.coarse.items()}
    net.network.train()
    return World(parts, net, down, data, const._replace(coarse=phi, lr=0.7), batch)


def labels_of(here: World) -> torch.Tensor:
    """The local model's labels of the batch, from a pass that leaves it as it was."""
    views = [here.batch.labelled.weak, here.batch.unlabelled.weak, here.batch.unlabelled.strong]
    logits = copy.deepcopy(here.net)(torch.cat(views)).logits
    return logits[len(views[0]) : len(views[0]) + len(views[1])].argmax(dim=1)


def after_a_step(here: World, weight: torch.Tensor) -> tuple[Net, float]:
    """A network with phi's weights that has really taken the step, and the loss on the labels before it."""
    phi = copy.deepcopy(here.net)
    phi.load(here.const.coarse)
    x, y = here.batch.labelled.weak, here.batch.labelled.labels
    before = float(F.cross_entropy(copy.deepcopy(phi)(x).logits.detach(), y))
    optimiser = torch.optim.SGD(phi.named_parameters().values(), lr=here.const.lr)
    each = F.cross_entropy(phi(here.batch.unlabelled.strong).logits, labels_of(here), reduction="none")
    (weight * each).mean().backward()
    optimiser.step()
    return phi, before


def on_labels(net: Net, here: World) -> float:
    return float(F.cross_entropy(net(here.batch.labelled.weak).logits.detach(), here.batch.labelled.labels))


def weights_of_images(here: World, weights: Weights) -> torch.Tensor:
    phi = copy.deepcopy(here.net)
    phi.load(here.const.coarse)
    return image_weights(weights, phi(here.batch.unlabelled.strong).logits.detach().softmax(dim=1)).detach()


def test_the_meta_gradient_against_finite_differences() -> None:
    here = world().double()
    left = here.method.loss(here.net, here.batch, here.const).carry
    found = {name: mean / 0.1 for name, mean in left.fine.first.items()}  # Adam's mean after its first step
    weights = here.const.fine.weights

    def value(direction: Weights, by: float) -> float:
        moved = {name: tensor + by * direction[name] for name, tensor in weights.items()}
        return on_labels(after_a_step(here, weights_of_images(here, moved))[0], here)

    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        direction = {n: torch.randn(t.shape, generator=generator, dtype=torch.float64) for n, t in weights.items()}
        difference = (value(direction, 1e-5) - value(direction, -1e-5)) / 2e-5
        expected = sum(float((found[name] * direction[name]).sum()) for name in weights)
        assert abs(expected) > 1e-4
        assert difference == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("regulator", ["meta", "none"])
def test_what_both_regulators_say_and_become(regulator: str) -> None:
    here = world(regulator=regulator).double()
    loss = here.method.loss(here.net, here.batch, here.const)
    left = loss.carry
    if regulator == "meta":
        assert left.fine.steps == 1
        image = weights_of_images(here, left.fine.weights)  # weighed anew after w's step
        assert not torch.equal(image, weights_of_images(here, here.const.fine.weights))
    else:
        assert left.fine is here.const.fine
        image = torch.ones(len(here.batch.unlabelled), dtype=torch.float64)
    moved, before = after_a_step(here, image)
    feedback = before - on_labels(copy.deepcopy(moved), here)
    assert abs(feedback) > 1e-3
    assert loss.measured["image_weight"].tolist() == pytest.approx(image.tolist())
    assert loss.measured["feedback"].item() == pytest.approx(feedback)
    for name, parameter in moved.named_parameters().items():
        torch.testing.assert_close(left.coarse[name].detach(), parameter.detach())


def test_the_local_model_learns_the_weighed_labels() -> None:
    here = world(unlabelled_weight=0.6, feedback_weight=0.3).double()
    label, twin = labels_of(here), copy.deepcopy(here.net)
    loss = here.method.loss(here.net, here.batch, here.const)
    image = weights_of_images(here, loss.carry.fine.weights)
    moved, before = after_a_step(here, image)
    feedback = before - on_labels(copy.deepcopy(moved), here)
    x, y = here.batch.labelled.weak, here.batch.labelled.labels
    logits = twin(torch.cat([x, here.batch.unlabelled.weak, here.batch.unlabelled.strong])).logits
    strong = F.cross_entropy(logits[-len(label) :], label, reduction="none")
    fixed, regulated = F.cross_entropy(logits[: len(x)], y), (image * strong).mean() + 0.3 * feedback * strong.mean()
    (fixed + 0.6 * regulated).backward()
    assert loss.terms["supervised"].item() == pytest.approx(fixed.item())
    assert loss.terms["consistency"].item() == pytest.approx(regulated.item())
    loss.value.backward()
    for name, parameter in here.net.named_parameters().items():
        torch.testing.assert_close(parameter.grad, twin.named_parameters()[name].grad)
    assert equal_weights(here.net.state(), twin.state()), "the regulators' passes must not enter the statistics"


def test_a_step_on_right_labels_counts_for_them_and_on_wrong_ones_against() -> None:
    here = world(regulator="none")
    labels = here.batch.labelled.labels
    vars(here.batch.unlabelled)["strong"] = here.batch.labelled.weak

    def feedback(given: torch.Tensor, const: Regulators) -> tuple[float, Regulators]:
        chosen = Targets(F.one_hot(given, 3).float(), torch.ones(len(given), dtype=torch.bool))
        _, found, left = here.method._regulated(here.net, here.batch, chosen, const)
        return float(found), left

    const = here.const._replace(lr=0.05)
    for _ in range(10):
        helped, const = feedback(labels, const)
        assert helped > 0
    harmed, _ = feedback((labels + 1) % 3, const)
    assert harmed < 0


def test_images_that_do_not_pass_move_neither_regulator() -> None:
    here = world().double()
    used = torch.arange(len(here.batch.unlabelled)) < 3
    chosen = Targets(F.one_hot(labels_of(here), 3).double(), used)
    image, feedback, left = here.method._regulated(here.net, here.batch, chosen, here.const)
    other = Targets(torch.where(used[:, None], chosen.target, 1 / 3), used)
    again, same, after = here.method._regulated(here.net, here.batch, other, here.const)
    assert torch.equal(image, again)
    assert float(feedback) == float(same)
    assert equal_weights(left.coarse, after.coarse)
    assert not equal_weights(left.coarse, here.const.coarse)


def test_the_next_step_starts_where_the_regulators_are() -> None:
    here = world()
    first = here.method.loss(here.net, here.batch, here.const).carry
    second = here.method.loss(here.net, here.batch, first).carry
    apart = here.method.loss(here.net, here.batch, here.const._replace(fine=first.fine)).carry
    assert (first.fine.steps, second.fine.steps) == (1, 2)
    assert not equal_weights(second.coarse, first.coarse)
    assert not equal_weights(second.coarse, apart.coarse)
    assert second.lr == first.lr == 0.7


# Rounds at a client, and the limits


def trained(parts: Parts, data: ClientData | None = None, lr: float = LR) -> Reply:
    place = place_of(parts)
    down = Down(shaken(place.net.state()))
    return client_round(place, Task(1, CLIENT, lr, None), down, data or parts.scenario.client(CLIENT))


UNREGULATED = {"regulator": "none", "feedback_weight": 0.0}


@pytest.mark.parametrize("threshold", [0.0, 0.4])
def test_unregulated_it_is_fixmatch(threshold: float) -> None:
    ours = trained(parts_of("feddure", threshold=threshold, **UNREGULATED))
    theirs = trained(parts_of("fixmatch-lpl", threshold=threshold))
    assert equal_weights(ours.up.weights, theirs.up.weights)
    assert not equal_weights(ours.up.weights, trained(parts_of("feddure", threshold=threshold)).up.weights)


@pytest.mark.parametrize(
    "change", [{"regulator": "none"}, {"feedback_weight": 0.0}, {"hidden": 7}, {"sage": True, "sage_threshold": 0.0}]
)
def test_every_option_makes_a_difference(change: dict[str, Any]) -> None:
    plain = trained(parts_of("feddure", threshold=0.0))
    assert not equal_weights(plain.up.weights, trained(parts_of("feddure", threshold=0.0, **change)).up.weights)


def test_all_images_count_unless_a_threshold_is_set() -> None:
    assert (FedDure().threshold, FedDure().sage_threshold) == (0.0, 0.95)
    pseudo = trained(parts_of("feddure", threshold=0.0)).record.pseudo
    assert pseudo is not None
    assert pseudo.used.all()


@pytest.mark.parametrize("threshold", [0.0, 0.4])
def test_sage_as_a_plug_in_unregulated_is_sage(threshold: float) -> None:
    ours = trained(parts_of("feddure", threshold=0.9, sage=True, sage_threshold=threshold, **UNREGULATED))
    assert equal_weights(ours.up.weights, trained(parts_of("sage", threshold=threshold)).up.weights)


@pytest.mark.parametrize("sage", [True, False])
def test_a_client_without_labels_trains_as_fixmatch_or_sage(sage: bool) -> None:
    parts = parts_of("feddure", threshold=0.0, sage=sage, sage_threshold=0.0)
    data = parts.scenario.client(CLIENT)
    data = data._replace(labelled=data.labelled[:0], labels=data.labels[:0])
    ours = trained(parts, data)
    plain = parts_of("sage" if sage else "fixmatch-lpl", threshold=0.0)
    assert equal_weights(ours.up.weights, trained(plain, data).up.weights)
    assert "feedback" not in ours.record.measured


def test_a_client_without_unlabelled_images_or_with_nothing_sure_learns_its_labels() -> None:
    parts, plain = parts_of("feddure", threshold=0.0), parts_of("fixmatch-lpl", threshold=1.0)
    data = parts.scenario.client(CLIENT)
    alone = data._replace(unlabelled=data.unlabelled[:0])
    assert equal_weights(trained(parts, alone).up.weights, trained(plain, alone).up.weights)
    unsure = trained(parts_of("feddure", threshold=1.0))
    assert equal_weights(unsure.up.weights, trained(plain).up.weights)


@pytest.mark.parametrize("held", [1, 2])
def test_one_label_is_enough(held: int) -> None:
    parts = parts_of("feddure", threshold=0.0)
    data = parts.scenario.client(CLIENT)
    found = trained(parts, data._replace(labelled=data.labelled[:held], labels=data.labels[:held]))
    assert found.record.measured["image_weight"][0] > 0
    assert all(bool(torch.isfinite(tensor).all()) for tensor in found.up.weights.values())


def test_the_trial_steps_have_the_rate_of_the_round() -> None:
    """At a rate of 0 nothing is tried out, so d is 0."""
    assert trained(parts_of("feddure", threshold=0.0), lr=0.0).record.measured["feedback"][0] == 0.0
    assert trained(parts_of("feddure", threshold=0.0)).record.measured["feedback"][0] != 0.0


def test_diagnostics_are_means_over_what_is_regulated(tmp_path: Path) -> None:
    """Of a run in which some clients have no labels, and not all images of the others pass."""
    outcome = run_toy(parts_of("feddure", "some-clients", threshold=0.42), tmp_path / "run")
    for line, exchange in zip(outcome.rounds[1:], outcome.exchanges, strict=True):
        records = [answer.record for answer in exchange.answers if isinstance(answer, Reply)]
        regulated = [record for record in records if record.measured]
        for name in ("image_weight", "feedback"):
            total, number = (sum(record.measured[name][part] for record in regulated) for part in (0, 1))
            assert (name in line["loss"]) == (number > 0)
            assert line["loss"].get(name, 0.0) == pytest.approx(total / number if number else 0.0)


def test_a_step_that_is_not_regulated_and_an_image_that_does_not_pass_are_not_in_the_means() -> None:
    parts = parts_of("feddure", threshold=0.65)
    place, data = place_of(parts), parts.scenario.client(CLIENT)
    place.net.load(shaken(place.net.state()))
    local = parts.method.prepare(place.net, Down(place.net.state()), data, None, Visit(0, 1, CLIENT))
    used: list[int] = []

    def watched(net: Net, batch: Batch, const: Regulators) -> Loss:
        loss = parts.method.loss(net, batch, const)
        assert loss.pseudo is not None
        used.append(int(loss.pseudo.used.sum()))
        return loss

    course = Course(Budget(None, 12, 4), (0, 1, CLIENT), Optimiser(LR), None)
    fitted = course.follow(place.net, data, watched, local.const._replace(lr=LR))
    assert 0 in used
    assert 0 < sum(used) < 4 * len(used)
    assert int(fitted.measured["feedback"][1]) == sum(count > 0 for count in used)
    assert int(fitted.measured["image_weight"][1]) == sum(used)
    assert not {"feedback", "image_weight"} & fitted.terms.keys()


@pytest.mark.parametrize("sage", [True, False])
def test_the_received_model_is_held_for_sage_alone(sage: bool) -> None:
    assert (world(sage=sage).const.received is not None) == sage


def test_labels_at_the_server_alone_leave_nothing_to_regulate_by() -> None:
    with pytest.raises(UserError, match=r"scenario.labels=server .* fixmatch-lpl"):
        toy_recipe("feddure", "server")
