"""FedOpenMatch-style: losses and masks against loops; the detector really leaves the features alone."""

import math
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
from semifed.client_round import Task, Workplace, client_round
from semifed.data.client import Batch, batches
from semifed.losses import logit_consistency, prior_adjusted, pseudo_positives
from semifed.methods.fedopenmatch import FedOpenMatch, Frozen
from semifed.models.network import Output
from semifed.net import Net
from semifed.payloads import Down, Visit
from semifed.pseudo import surely_of_class
from semifed.recipe_file import load_recipe
from semifed.run import execute
from toys import Quiet, run_toy, toy_parts, toy_recipe

KNOWN = 3  # classes of the toy
OPTIONS: dict[str, Any] = {
    "threshold": 0.45,
    "known_threshold": 0.5,
    "positive_threshold": 0.6,
    "negative_threshold": 0.55,
    "adjustment": 0.7,
    "logit_weight": 0.3,
}


def drawn(seed: int, *shape: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def log_decision(ova: Tensor, omega: float = 0.0) -> list[list[tuple[float, float]]]:
    """For each sample and class the logarithms of (unknown, known), from logits moved by the priors."""
    classes = ova.shape[2]
    found = []
    for sample in ova.double().tolist():
        row = []
        for k in range(classes):
            unknown = sample[0][k] + omega * math.log((classes - 1) / classes)
            known = sample[1][k] + omega * math.log(1 / classes)
            one, other = reference.log_probabilities([unknown, known])
            row.append((one, other))
        found.append(row)
    return found


def squared(one: Tensor, other: Tensor) -> list[float]:
    found = []
    for left, right in zip(one.double().flatten(1).tolist(), other.double().flatten(1).tolist(), strict=True):
        found.append(sum((a - b) ** 2 for a, b in zip(left, right, strict=True)) / len(left))
    return found


cases = given(st.integers(0, 10**6), st.integers(0, 7), st.integers(2, 6))


@cases
def test_pseudo_positives(seed: int, count: int, classes: int) -> None:
    ova, positive = drawn(seed, count, 2, classes), drawn(seed + 1, count, classes) > 0
    expected = [
        sum(-decision[k][1] for k in range(classes) if marked[k])
        for decision, marked in zip(log_decision(ova), positive.tolist(), strict=True)
    ]
    np.testing.assert_allclose(pseudo_positives(ova, positive).numpy(), expected, rtol=1e-4, atol=1e-5)


@cases
def test_adjusted_decisions(seed: int, count: int, classes: int) -> None:
    ova = drawn(seed, count, 2, classes)
    for omega in (0.0, 0.5, 2.0):
        found = prior_adjusted(ova, omega).log_softmax(dim=1).permute(0, 2, 1)  # [n, classes, 2]
        expected = np.array(log_decision(ova, omega)).reshape(count, classes, 2)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_the_adjustment_by_numbers() -> None:
    moved = prior_adjusted(torch.zeros(1, 2, 4), 1.0).softmax(dim=1)
    np.testing.assert_allclose(moved[0].numpy(), [[0.75] * 4, [0.25] * 4], rtol=1e-6)
    assert torch.equal(prior_adjusted(torch.ones(1, 2, 1), 3.0), torch.ones(1, 2, 1))


def test_training_on_adjusted_logits_leaves_the_logits_themselves_unbiased() -> None:
    """The best constant detector of one positive to K − 1 negatives is undecided before adjustment."""
    classes = 5
    logits = torch.zeros(1, 2, 1, requires_grad=True)
    value = torch.zeros(())
    for label in range(classes):
        log_phi = prior_adjusted(logits.expand(1, 2, classes), 1.0).log_softmax(dim=1)[0, :, 0]
        value = value - log_phi[1 if label == 0 else 0] / classes
    value.backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.zeros(1, 2, 1), atol=1e-6, rtol=0)


@cases
def test_logit_consistency(seed: int, count: int, classes: int) -> None:
    for shape in ((count, classes), (count, 2, classes)):
        one, other = drawn(seed, *shape), drawn(seed + 1, *shape)
        np.testing.assert_allclose(logit_consistency(one, other).numpy(), squared(one, other), rtol=1e-4)


def test_logit_consistency_pulls_both_views() -> None:
    one, other = drawn(0, 3, 4).requires_grad_(), drawn(1, 3, 4).requires_grad_()
    logit_consistency(one, other).sum().backward()
    assert one.grad is not None
    assert other.grad is not None
    torch.testing.assert_close(one.grad, (one - other).detach() / 2)
    torch.testing.assert_close(one.grad, -other.grad)


@cases
def test_surely_of_class(seed: int, count: int, classes: int) -> None:
    ova = drawn(seed, count, 2, classes)
    expected = [[math.exp(known) >= 0.8 for _, known in row] for row in log_decision(ova)]
    assert surely_of_class(ova, 0.8).tolist() == expected


def parts_of(labels: str = "server", **options: Any) -> Parts:
    changes: dict[str, dict[str, Any]] = {"method": {**OPTIONS, **options}}
    if labels == "clients":
        changes["scenario"] = {"labelled_per_class": 6}
    return toy_parts(toy_recipe("fedopenmatch", labels, changes))


def place_of(parts: Parts) -> Workplace:
    """A network whose outputs on the client's images are spread around zero: it is sure of some and not of others."""
    place, data = build_workplace(parts.recipe, (1, 8, 8), KNOWN), parts.scenario.client(1)
    images = data.views.plain(data.images[data.unlabelled])
    place.net.recalibrate(images)
    state = place.net.state()
    last = {"classifier": "classifier", "ova": "heads.ova.layers.2"}
    place.net.load({f"{name}.weight": 4 * state[f"{name}.weight"] for name in last.values()})
    output = says(place.net, images)
    means = {"classifier": output.logits.mean(dim=0), "ova": output.heads["ova"].mean(dim=0).flatten()}
    place.net.load({f"{name}.bias": state[f"{name}.bias"] - means[key] for key, name in last.items()})
    return place


def method_of(parts: Parts) -> FedOpenMatch:
    assert isinstance(parts.method, FedOpenMatch)
    return parts.method


def first_step(parts: Parts) -> tuple[Net, Batch, Frozen]:
    place, data = place_of(parts), parts.scenario.client(1)
    local = method_of(parts).prepare(place.net, Down(place.net.state()), data, None, Visit(0, 1, 1))
    batch = next(batches(local.data, place.budget, (0, 1, 1)))
    place.net.network.train()
    return place.net, batch, local.const


def says(net: Net, images: Tensor) -> Output:
    with torch.no_grad():
        output: Output = net.network(images)
    return output


def supervised_by_hand(net: Net, batch: Batch, omega: float) -> tuple[float, float]:
    """Cross entropy and detector loss on labels: both views, one hardest class each, positives of the weak view."""
    if len(batch.labelled) == 0:
        return 0.0, 0.0
    labels = batch.labelled.labels.tolist()
    cross, hardest, own = [], [], []
    for number, view in enumerate((batch.labelled.weak, batch.labelled.strong)):
        output = says(net, view)
        cross += reference.cross_entropies(output.logits.double().numpy(), labels)
        for row, label in zip(log_decision(output.heads["ova"], omega), labels, strict=True):
            hardest.append(max(-row[k][0] for k in range(KNOWN) if k != label))
            if number == 0:
                own.append(-row[label][1])
    return float(np.mean(cross)), float(np.mean(own) + np.mean(hardest))


@pytest.mark.parametrize("labels", ["server", "clients"])
@pytest.mark.parametrize("omega", [0.0, 0.7])
def test_loss(labels: str, omega: float) -> None:
    parts = parts_of(labels, adjustment=omega)
    net, batch, const = first_step(parts)
    loss = method_of(parts).loss(net, batch, const)
    plain = says(place_of(parts).net, batch.unlabelled.plain)  # as received: training has moved no statistics yet
    weak, strong = says(net, batch.unlabelled.weak), says(net, batch.unlabelled.strong)
    guesses, used, detector = [], [], []
    decided = log_decision(strong.heads["ova"], omega)
    for row, raw, on_strong in zip(plain.logits, log_decision(plain.heads["ova"]), decided, strict=True):
        probabilities = [math.exp(value) for value in reference.log_probabilities(row.double().tolist())]
        guess = probabilities.index(max(probabilities))
        guesses.append(guess)
        used.append(max(probabilities) >= 0.45 and math.exp(raw[guess][1]) >= 0.5)
        value = 0.0
        for (unknown, known), (log_unknown, log_known) in zip(raw, on_strong, strict=True):
            value -= log_known if math.exp(known) >= 0.6 else 0.0
            value -= log_unknown if math.exp(unknown) >= 0.55 else 0.0
        detector.append(value)
    strong_terms = reference.cross_entropies(strong.logits.double().numpy(), guesses)
    pairs = zip(squared(weak.logits, strong.logits), squared(weak.heads["ova"], strong.heads["ova"]), strict=True)
    expected = {
        "consistency": reference.mean_over_all(strong_terms, used),
        "detector": float(np.mean(detector)),
        "logits": float(np.mean([classes + ova for classes, ova in pairs])),
    }
    cross, labelled_detector = supervised_by_hand(net, batch, omega)
    if labels == "clients":
        expected |= {"supervised": cross, "labelled_detector": labelled_detector}
    assert {name: term.item() for name, term in loss.terms.items()} == pytest.approx(expected, rel=1e-3)
    whole = expected["consistency"] + expected["detector"] + 0.3 * expected["logits"] + cross + labelled_detector
    assert loss.value.item() == pytest.approx(whole, rel=1e-3)
    assert loss.pseudo is not None
    assert (loss.pseudo.label.tolist(), loss.pseudo.used.tolist()) == (guesses, used)
    assert 0 < sum(used) < len(used), "the gate must matter"
    assert bool(const.positive.any())
    assert bool(const.gates.negative.any())


def test_server_loss() -> None:
    parts = parts_of()
    server, place = parts.scenario.server, place_of(parts)
    assert server is not None
    batch = next(batches(server, place.budget, (0, "server")))
    place.net.network.train()
    loss = method_of(parts).server_loss(place.net, batch)
    cross, detector = supervised_by_hand(place.net, batch, 0.7)
    assert loss.value.item() == pytest.approx(cross + detector, rel=1e-4)
    assert {name: term.item() for name, term in loss.terms.items()} == pytest.approx(
        {"supervised": cross, "labelled_detector": detector}, rel=1e-4
    )


def reached(net: Net, term: Tensor) -> set[str]:
    """The parameters that a term moves."""
    parameters = net.named_parameters()
    slopes = torch.autograd.grad(term, list(parameters.values()), retain_graph=True, allow_unused=True)
    return {
        name for name, slope in zip(parameters, slopes, strict=True) if slope is not None and bool(slope.abs().sum())
    }


def test_the_detector_moves_nothing_but_itself() -> None:
    parts = parts_of("clients")
    net, batch, const = first_step(parts)
    loss = method_of(parts).loss(net, batch, const)
    detector = {name for name in net.named_parameters() if name.startswith("heads.ova.")}
    assert len(detector) == 4
    assert reached(net, loss.terms["detector"]) == detector
    assert reached(net, loss.terms["labelled_detector"]) == detector
    classifier = reached(net, loss.terms["supervised"])
    assert classifier
    assert not classifier & detector
    assert any(name.startswith("backbone.") for name in classifier)
    assert reached(net, loss.terms["consistency"]) <= classifier


def test_agreement_of_the_detector_does_not_reach_the_features() -> None:
    """The gradient of the logits' term at the features is that of the classifier's half alone."""
    net, batch, const = first_step(parts := parts_of())
    loss = method_of(parts).loss(net, batch, const)
    backbone = {name: value for name, value in net.named_parameters().items() if name.startswith("backbone.")}
    found = torch.autograd.grad(loss.terms["logits"], list(backbone.values()))
    weak, strong = net(batch.unlabelled.weak), net(batch.unlabelled.strong)
    classifier_alone = ((weak.logits - strong.logits) ** 2).mean()
    expected = torch.autograd.grad(classifier_alone, list(backbone.values()), retain_graph=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    both = classifier_alone + ((weak.heads["ova"] - strong.heads["ova"]) ** 2).mean()
    tied = torch.autograd.grad(both, list(backbone.values()))
    assert not all(torch.allclose(one, other, rtol=1e-2) for one, other in zip(found, tied, strict=True))


def test_without_a_confident_image_or_agreement_a_client_trains_its_detector_only() -> None:
    """Weight decay is off: whatever moves, moves by a gradient."""
    parts = parts_of(threshold=1.0, logit_weight=0.0)
    place = place_of(parts)
    place = place._replace(optimiser=place.optimiser._replace(weight_decay=0.0))
    down = Down(place.net.state())
    reply = client_round(place, Task(1, 1, 0.05, None), down, parts.scenario.client(1))
    moved = {name for name, tensor in reply.up.weights.items() if not torch.equal(tensor, down.weights[name])}
    assert moved
    assert all(name.startswith("heads.ova.") for name in moved)


def test_the_adjustment_cancels_in_the_agreement_and_is_absent_in_prediction() -> None:
    terms, scores = [], []
    for omega in (0.0, 3.0):
        parts = parts_of(adjustment=omega)
        net, batch, const = first_step(parts)
        terms.append({name: term.item() for name, term in method_of(parts).loss(net, batch, const).terms.items()})
        net.network.eval()
        found = method_of(parts).predict(net, batch.unlabelled.plain)
        output = says(net, batch.unlabelled.plain)
        label = output.logits.argmax(dim=1).tolist()
        expected = [math.exp(row[k][0]) for row, k in zip(log_decision(output.heads["ova"]), label, strict=True)]
        np.testing.assert_allclose(found.unknown.detach().numpy(), expected, rtol=1e-3, atol=1e-6)
        scores.append(found.unknown)
    assert terms[0]["logits"] == pytest.approx(terms[1]["logits"], rel=1e-4)
    assert terms[0]["detector"] != pytest.approx(terms[1]["detector"], rel=1e-2)
    assert torch.equal(scores[0], scores[1])


def test_clients_count_alike_whatever_they_hold(tmp_path: Path) -> None:
    changes = {"scenario": {"partition": "dirichlet", "alpha": 0.5}}
    parts = toy_parts(toy_recipe("fedopenmatch", "server", changes, rounds=1))
    outcome = run_toy(parts, tmp_path / "run")
    held = {parts.scenario.client(client).image_count for client in outcome.exchanges[0].clients}
    assert len(held) > 1
    assert outcome.rounds[1]["client_weights"] == pytest.approx([1 / 3] * 3)


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["server", "clients"])
def test_quickstart(labels: str, tmp_path: Path) -> None:
    changes = ["clients_per_round=2", "local.epochs=1", "server.warmup_epochs=15", "engine.workers=1"]
    recipe = load_recipe("quickstart", ["method=fedopenmatch", f"scenario.labels={labels}", "rounds=3", *changes])
    summary = execute(prepare_run(recipe), tmp_path / "run", Quiet())
    assert summary["rounds"] == 3
    assert 0 <= summary["metrics"]["auroc_seen"] <= 1
    assert summary["metrics"]["accuracy"] > (0.7 if labels == "server" else 0.1)
