"""FedProSub: its subspace, its mixture and its losses against second computations; what travels and what is saved."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from scipy import stats
from torch import Tensor

from reference import beta_mixture as reference
from reference import losses as reference_losses
from semifed import beta_mixture
from semifed.assembly import Parts, assemble, build_workplace, prepare_run
from semifed.beta_mixture import (
    BetaMixture,
    fitted_shapes,
    initial_mixture,
    known_probability,
    mean_mixture,
    refitted,
)
from semifed.client_round import Reply, Task, client_round
from semifed.data.client import Batch, batches
from semifed.errors import UserError
from semifed.losses import cosine_distance, subspace_separation
from semifed.methods import method_class
from semifed.methods.fedprosub import FedProSub, Judged, Sent, State
from semifed.models.heads import SUBSPACE_BASIS
from semifed.models.network import Network, build_network
from semifed.net import Net
from semifed.payloads import Visit
from semifed.prototypes import ClassTotals, class_means, class_totals, subspace_basis, subspace_score
from semifed.recipe_file import load_recipe
from semifed.run import RoundLoop
from toys import Outcome, equal_weights, place_of, run_toy, toy_dataset, toy_parts, toy_recipe

SHAPES = st.floats(0.5, 60)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pair(a: float, b: float) -> Tensor:
    return torch.tensor([a, b], dtype=torch.float64)


# --------------------------------------------------------------------------------- the subspace


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(5, 9))
def test_the_score_is_the_cosine_with_the_projection(seed: int, classes: int, features: int) -> None:
    prototypes, h = drawn(seed, classes, features), drawn(seed + 1, 6, features)
    score = subspace_score(h, subspace_basis(prototypes))
    c = prototypes.double().numpy().T
    projection = c @ np.linalg.solve(c.T @ c, c.T)  # onto the span, without any basis
    for row, found in zip(h.double().numpy(), score.tolist(), strict=True):
        shadow = projection @ row
        cosine = row @ shadow / (np.linalg.norm(row) * np.linalg.norm(shadow))
        assert found == pytest.approx(cosine, abs=1e-4)
        assert 0 <= found <= 1


def test_the_basis_is_orthonormal_and_spans_the_prototypes() -> None:
    prototypes = drawn(3, 4, 9)
    basis = subspace_basis(prototypes)
    assert basis.shape == (9, 4)
    assert basis.is_contiguous()
    torch.testing.assert_close(basis.T @ basis, torch.eye(4), atol=1e-6, rtol=0)
    torch.testing.assert_close(subspace_score(prototypes, basis), torch.ones(4))


def test_nearly_parallel_prototypes_still_span_their_space() -> None:
    prototypes = 1000 + drawn(4, 5, 16)
    basis = subspace_basis(prototypes)
    torch.testing.assert_close(basis.T @ basis, torch.eye(5), atol=1e-6, rtol=0)
    exact = prototypes.double().numpy().T
    projector = exact @ np.linalg.solve(exact.T @ exact, exact.T)
    np.testing.assert_allclose((basis @ basis.T).numpy(), projector, atol=1e-6)


def test_a_class_without_a_prototype_adds_no_direction() -> None:
    some = drawn(5, 3, 8)
    with_gap = torch.stack([torch.zeros(8), some[0], some[1], torch.zeros(8), some[2]])
    basis = subspace_basis(with_gap)
    assert basis[:, [0, 3]].abs().max() == 0
    h = drawn(6, 10, 8)
    torch.testing.assert_close(subspace_score(h, basis), subspace_score(h, subspace_basis(some)))


def test_without_a_basis_every_score_is_zero_and_so_is_its_gradient() -> None:
    features = torch.cat([drawn(0, 4, 8), torch.zeros(1, 8)]).requires_grad_()
    score = subspace_score(features, subspace_basis(torch.zeros(3, 8)))
    assert score.tolist() == [0.0] * 5
    score.sum().backward()
    assert features.grad is not None
    assert features.grad.abs().max() == 0


def test_features_of_zero_score_zero() -> None:
    assert subspace_score(torch.zeros(2, 8), subspace_basis(drawn(0, 3, 8))).tolist() == [0.0, 0.0]


def test_the_gradient_is_that_of_a_constant_projection_and_turns_features_only() -> None:
    """ProSub stops the gradient at the projection; the result must not depend on it."""
    basis, known = subspace_basis(drawn(1, 3, 8)), torch.tensor([True, False, True, False])
    ours, stopped = (drawn(2, 4, 8).requires_grad_() for _ in range(2))
    subspace_separation(subspace_score(ours, basis), known).sum().backward()
    shadow = (stopped @ basis @ basis.T).detach()
    values = [
        (1 - 2 * float(m)) * (h / h.norm() * (s / s.norm())).sum()
        for m, h, s in zip(known, stopped, shadow, strict=True)
    ]
    torch.stack(values).sum().backward()
    assert ours.grad is not None
    assert stopped.grad is not None
    torch.testing.assert_close(ours.grad, stopped.grad)
    assert ours.grad.norm(dim=1).min() > 1e-3
    assert (ours.grad * ours.detach()).sum(dim=1).abs().max() < 1e-6  # orthogonal to the features
    moved = subspace_score(ours.detach() - 0.01 * ours.grad, basis) - subspace_score(ours.detach(), basis)
    assert (moved > 0).tolist() == known.tolist()


@given(st.integers(0, 10**6), st.integers(0, 6))
def test_separation_and_distance_in_loops(seed: int, count: int) -> None:
    one, other, score = drawn(seed, count, 4), drawn(seed + 1, count, 4), drawn(seed + 2, count).sigmoid()
    known = drawn(seed + 3, count) > 0
    distances = []
    for left, right in zip(one.double().tolist(), other.double().tolist(), strict=True):
        inner = sum(a * b for a, b in zip(left, right, strict=True))
        distances.append(1 - inner / (math.hypot(*left) * math.hypot(*right)))
    assert cosine_distance(one, other).tolist() == pytest.approx(distances, abs=1e-5)
    expected = [-u if m else u for u, m in zip(score.tolist(), known.tolist(), strict=True)]
    assert subspace_separation(score, known).tolist() == pytest.approx(expected)


def test_prototypes_are_means_over_all_parties_and_absent_classes_keep_theirs() -> None:
    features, labels = drawn(7, 9, 4), torch.tensor([0, 0, 2, 2, 2, 0, 2, 0, 2])
    before = drawn(8, 4, 4)
    parties = [slice(0, 4), slice(4, 4), slice(4, 9)]
    totals = [class_totals(features[part], labels[part], 4) for part in parties]
    assert totals[1].sums.numel() == totals[1].counts.numel() == 0
    means = class_means(totals, before)
    for label in range(4):
        rows = [row for row, own in zip(features.double().numpy(), labels.tolist(), strict=True) if own == label]
        expected = np.mean(rows, axis=0) if rows else before[label].numpy()
        np.testing.assert_allclose(means[label].numpy(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(class_means([totals[1]], before), before)


# ---------------------------------------------------------------------------------- the mixture


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), SHAPES, SHAPES, SHAPES, SHAPES, st.floats(0.05, 0.95))
def test_probability_of_being_known(
    scores: list[float], a1: float, b1: float, a2: float, b2: float, prior: float
) -> None:
    mixture = BetaMixture(pair(a1, b1), pair(a2, b2))
    for floor in (0.1, 1e-8):
        found = known_probability(torch.tensor(scores, dtype=torch.float64), mixture, prior, floor)
        expected = [reference.known_probability(u, (a1, b1), (a2, b2), prior, floor) for u in scores]
        assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_the_floor_takes_unexpected_scores_for_unknown() -> None:
    sharp = BetaMixture(pair(900, 100), pair(100, 900))
    score = torch.tensor([0.6])  # nearer to the known ones, but neither distribution reaches it
    assert known_probability(score, sharp, 0.5, 0.0).item() > 0.999
    assert known_probability(score, sharp, 0.5, 0.1).item() < 1e-6


@pytest.mark.parametrize(("a", "b"), [(10.0, 2.0), (2.0, 10.0), (0.5, 0.5), (200.0, 4.0)])
def test_moments_recover_the_shapes_of_samples(a: float, b: float) -> None:
    sample = stats.beta.rvs(a, b, size=40_000, random_state=1)
    found = fitted_shapes(torch.tensor(sample), torch.ones(len(sample)), pair(1, 1))
    np.testing.assert_allclose(found.numpy(), [a, b], rtol=0.04)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 1)), min_size=2, max_size=10))
def test_weighted_moments_in_loops(pairs: list[tuple[float, float]]) -> None:
    scores, weights = [u for u, _ in pairs], [w for _, w in pairs]
    found = fitted_shapes(*torch.tensor([scores, weights], dtype=torch.float64), pair(1, 1))
    mean, variance = reference.weighted_moments(scores, weights)
    assert found.tolist() == pytest.approx(reference.shapes_of(mean, variance), rel=1e-5, abs=1e-8)


def test_too_sharp_a_fit_keeps_its_mean() -> None:
    found = fitted_shapes(torch.tensor([0.98, 0.98, 0.98]), torch.ones(3), pair(1, 1))
    assert found.max() == 1e3
    assert (found[0] / found.sum()).item() == pytest.approx(0.98, rel=1e-5)


@pytest.mark.parametrize("scores", [[0.0, 1.0], [0.0, 0.0], [1.0, 1.0], [0.5]])
def test_shapes_stay_within_bounds(scores: list[float]) -> None:
    found = fitted_shapes(torch.tensor(scores), torch.ones(len(scores)), pair(1, 1))
    assert found.min() >= 1e-2
    assert found.max() <= 1e3


def test_nothing_to_fit_leaves_the_shapes() -> None:
    assert fitted_shapes(torch.empty(0), torch.empty(0), pair(3, 4)).tolist() == [3, 4]
    assert fitted_shapes(torch.rand(4), torch.zeros(4), pair(3, 4)).tolist() == [3, 4]


def test_labelled_scores_count_as_known_and_unlabelled_ones_by_responsibility() -> None:
    start = BetaMixture(pair(8, 3), pair(3, 6))
    labelled, unlabelled = [0.9, 0.7], [0.2, 0.5, 0.55, 0.8, 0.95]
    found = refitted(start, torch.tensor(labelled), torch.tensor(unlabelled), 0.4)
    r = [reference.known_probability(u, (8, 3), (3, 6), 0.4, 1e-8) for u in unlabelled]
    known = reference.weighted_moments(labelled + unlabelled, [1.0, 1.0, *r])
    unknown = reference.weighted_moments(unlabelled, [1 - share for share in r])
    assert found.known.tolist() == pytest.approx(reference.shapes_of(*known), rel=1e-5)
    assert found.unknown.tolist() == pytest.approx(reference.shapes_of(*unknown), rel=1e-5)


def test_repeated_refits_find_two_separate_groups() -> None:
    known = stats.beta.rvs(30, 3, size=3_000, random_state=2)
    unknown = stats.beta.rvs(6, 9, size=3_000, random_state=3)
    mixture, scores = initial_mixture(), torch.tensor(np.concatenate([known, unknown]))
    for _ in range(60):
        mixture = refitted(mixture, torch.empty(0).double(), scores, 0.5)
    np.testing.assert_allclose(mixture.known.numpy(), [30, 3], rtol=0.15)
    np.testing.assert_allclose(mixture.unknown.numpy(), [6, 9], rtol=0.15)


def test_everyone_counts_the_same_in_the_mean_and_claims_are_bounded() -> None:
    one, other = BetaMixture(pair(10, 2), pair(2, 10)), BetaMixture(pair(20, 4), pair(4, 2))
    assert [part.tolist() for part in mean_mixture([one, other])] == [[15, 3], [3, 6]]
    wild = mean_mixture([BetaMixture(pair(1e9, 1e8), pair(-5, 0))])
    assert all(float(part.min()) >= 1e-2 and float(part.max()) <= 1e3 for part in wild)
    assert [part.tolist() for part in beta_mixture.initial_mixture()] == [[10, 2], [2, 10]]


# --------------------------------------------------------------------------- the heads it needs


def network(further: dict[str, Any], classes: int = 3, width: tuple[int, int, int] = (4, 4, 8)) -> Network:
    generator = torch.Generator().manual_seed(0)
    return build_network(
        "cnn", channels=1, size=(8, 8), classes=classes, width=width, further=further, generator=generator
    )


def test_the_subspace_starts_empty_and_draws_no_random_number() -> None:
    plain, more = (network(heads).state_dict() for heads in ({"z": 5}, {"z": 5, "subspace": "subspace"}))
    assert more[SUBSPACE_BASIS].shape == (8, 3)
    assert more[SUBSPACE_BASIS].abs().max() == 0
    assert set(more) - set(plain) == {SUBSPACE_BASIS}
    assert all(torch.equal(plain[name], more[name]) for name in plain)


def test_the_head_gives_the_score_of_its_features() -> None:
    net = Net(network({"subspace": "subspace"}), "tracked")
    basis = subspace_basis(drawn(0, 3, 8))
    net.load({SUBSPACE_BASIS: basis})
    first, second = net.joint(drawn(1, 4, 1, 8, 8), drawn(2, 3, 1, 8, 8))
    assert (first.heads["subspace"].shape, second.heads["subspace"].shape) == ((4,), (3,))
    projection = basis @ basis.T
    expected = (second.features @ projection).norm(dim=1) / second.features.norm(dim=1)
    torch.testing.assert_close(second.heads["subspace"], expected)


@pytest.mark.parametrize("form", ["linear(features)", "linear(features, no-bias)", "mlp2(6, features)"])
def test_a_head_may_have_as_many_outputs_as_features(form: str) -> None:
    output = network({"predictor": form})(torch.zeros(2, 1, 8, 8))
    assert output.heads["predictor"].shape == output.features.shape


@pytest.mark.parametrize("batchnorm", ["static", "tracked", "local"])
def test_the_basis_is_part_of_the_model_but_never_uploaded(batchnorm: str) -> None:
    net = Net(network(dict(FedProSub.heads)), batchnorm)
    assert SUBSPACE_BASIS in net.state_names()
    assert SUBSPACE_BASIS not in net.trained_names()
    assert SUBSPACE_BASIS not in net.private()
    assert SUBSPACE_BASIS not in net.named_parameters()
    assert "heads.predictor.weight" in net.trained_names()


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ({"subspace": "64"}, ["model.heads.subspace", "no size to set", "leave this key out"]),
        ({"subspace": "linear(64)"}, ["model.heads.subspace", "no size to set"]),
        ({"predictor": "linear(64)"}, ["model.heads.predictor", "linear(features)", "'linear(64)'"]),
        ({"predictor": "64"}, ["model.heads.predictor", "as many outputs as there are features"]),
        ({"predictor": "linear(feature)"}, ["model.heads.predictor", "linear(features)"]),
    ],
)
def test_sizes_a_recipe_cannot_set(heads: dict[str, str], words: list[str]) -> None:
    recipe = toy_recipe("fedprosub", "server", {"model": {"heads": heads}})
    with pytest.raises(UserError) as caught:
        build_workplace(recipe, (1, 8, 8), 3)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_more_classes_than_features_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    recipe = toy_recipe("fedprosub", "server", {"model": {"width": [4, 4, 2]}})
    parts = toy_parts(recipe)
    with pytest.raises(UserError, match=r"model.width: .* each of 3 classes needs as many features.* has 2"):
        assemble(parts)
    with pytest.raises(UserError, match=r"model.width"):
        run_toy(parts, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------- a client's step


def parts_of(labels: str, **options: Any) -> Parts:
    return toy_parts(toy_recipe("fedprosub", labels, {"method": options}, rounds=3))


def sent_of(parts: Parts, *, subspace: bool = True) -> Sent:
    state = place_of(parts).net.state()
    noisy = {name: value + 0.1 * drawn(5, *value.shape).abs() for name, value in state.items()}
    basis = subspace_basis(drawn(6, 3, 8)) if subspace else torch.zeros(8, 3)
    return Sent(noisy | {SUBSPACE_BASIS: basis}, BetaMixture(pair(6, 3), pair(4, 4)))


def first_step(parts: Parts, down: Sent) -> tuple[Net, Batch, Judged]:
    place, data = place_of(parts), parts.scenario.client(1)
    place.net.load(down.weights)
    local = parts.method.prepare(place.net, down, data, None, Visit(0, 1, 1))
    batch = next(batches(local.data, place.budget, (0, 1, 1)))
    place.net.network.train()
    return place.net, batch, local.const


@pytest.mark.parametrize("labels", ["server", "clients"])
def test_the_loss_in_loops(labels: str) -> None:
    options = {"consistency_weight": 0.7, "subspace_weight": 0.6, "similarity_weight": 3.0, "prior": 0.6, "floor": 0.05}
    parts = parts_of(labels, threshold=0.36, **options)
    down = sent_of(parts)
    net, batch, const = first_step(parts, down)
    net.network.eval()
    received = parts.scenario.client(1).plain_outputs(net)  # labels and gate are the received model's, once a round
    net.network.train()
    loss = parts.method.loss(net, batch, const)
    with torch.no_grad():
        weak, strong = net(batch.unlabelled.weak), net(batch.unlabelled.strong)
        cross = net(batch.labelled.weak).logits.double().numpy() if len(batch.labelled) else np.empty((0, 3))
    count = len(batch.unlabelled)
    q = down.weights[SUBSPACE_BASIS].double().numpy()
    g = net.network.get_parameter("heads.predictor.weight").detach().double().numpy()
    bias = net.network.get_parameter("heads.predictor.bias").detach().double().numpy()
    chances = torch.rand(count, generator=batch.unlabelled.stream("mask")).tolist()
    shapes = [(float(part[0]), float(part[1])) for part in const.mixture]
    consistency = separation = similarity = 0.0
    drawn_known = []
    for i, at in enumerate(batch.unlabelled.position.tolist()):
        plain = received.features[at].double().numpy()
        then = float(np.linalg.norm(q @ (q.T @ plain)) / max(np.linalg.norm(plain), 1e-9))
        known = chances[i] < reference.known_probability(then, shapes[0], shapes[1], 0.6, 0.05)
        drawn_known.append(known)
        h, other = weak.features[i].double().numpy(), strong.features[i].double().numpy()
        u = float(np.linalg.norm(q @ (q.T @ h)) / max(np.linalg.norm(h), 1e-9))  # a toy's features may be all 0
        separation += (1 - 2 * known) * u / count
        foretold = g @ other + bias
        similarity += (1 - float(foretold @ h / np.linalg.norm(foretold) / max(np.linalg.norm(h), 1e-9))) / count
        log_p = reference_losses.log_probabilities(received.logits[at].double().tolist())
        if known and math.exp(max(log_p)) >= 0.36:
            guess = log_p.index(max(log_p))
            consistency -= reference_losses.log_probabilities(strong.logits[i].double().tolist())[guess] / count
    supervised = sum(reference_losses.cross_entropies(cross, batch.labelled.labels.tolist())) / max(len(cross), 1)
    assert 0 < sum(drawn_known) < count
    assert consistency > 0
    found = {name: value.item() for name, value in loss.terms.items()}
    expected = {"consistency": consistency, "subspace": separation, "similarity": similarity}
    if labels == "clients":
        expected["supervised"] = supervised
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    total = supervised + 0.7 * consistency + 0.6 * separation + 3.0 * similarity
    assert loss.value.item() == pytest.approx(total, rel=1e-3)


def test_the_weak_view_is_moved_by_separation_alone() -> None:
    """Feature prediction compares with constant features: it alone gives the weak view no gradient."""
    parts = parts_of("server", subspace_weight=0.0, consistency_weight=0.0)
    net, batch, const = first_step(parts, sent_of(parts))
    gradients = []
    for frozen in (False, True):
        net.network.zero_grad()
        if frozen:
            with torch.no_grad():
                target = net(batch.unlabelled.weak).features
            value = 5 * cosine_distance(net(batch.unlabelled.strong).heads["predictor"], target).mean()
        else:
            value = parts.method.loss(net, batch, const).value
        value.backward()
        weight = net.network.get_parameter("backbone.convs.0.weight")
        assert weight.grad is not None
        gradients.append(weight.grad.clone())
    torch.testing.assert_close(*gradients)


def test_the_mask_follows_the_probability() -> None:
    """Over many steps, images are drawn as known as often as P_id says; each step draws anew."""
    parts = parts_of("server", threshold=0.0)
    net, _, const = first_step(parts, sent_of(parts))
    net.network.eval()
    drawn_known = expected = 0.0
    used = []
    data, budget = parts.scenario.client(1), place_of(parts).budget._replace(epochs=None, steps=60)
    for batch in batches(data, budget, (0, 1, 1)):
        with torch.no_grad():
            loss = parts.method.loss(net, batch, const)
        score = data.plain_outputs(net).heads["subspace"][batch.unlabelled.position]
        assert loss.pseudo is not None
        used.append(tuple(loss.pseudo.used.tolist()))
        drawn_known += float(loss.pseudo.used.sum())
        expected += float(known_probability(score, const.mixture, 0.5, 0.1).sum())
    total = sum(len(mask) for mask in used)
    assert 0.1 * total < expected < 0.9 * total
    assert abs(drawn_known - expected) < 4 * math.sqrt(total) / 2
    assert len(set(used)) > 20


def test_labels_are_those_of_the_received_model() -> None:
    parts = parts_of("server")
    net, _, const = first_step(parts, sent_of(parts))
    moved = net.state()
    net.load({name: value + 0.5 for name, value in moved.items() if name != SUBSPACE_BASIS})
    data = parts.scenario.client(1)
    batch = next(batches(data, place_of(parts).budget, (0, 1, 1)))
    pseudo = parts.method.loss(net, batch, const).pseudo
    assert pseudo is not None
    assert torch.equal(pseudo.label, const.label[batch.unlabelled.position])


@pytest.mark.parametrize("labels", ["server", "clients"])
def test_without_a_subspace_only_features_are_foretold(labels: str) -> None:
    parts = parts_of(labels, threshold=0.0)
    down = sent_of(parts, subspace=False)
    net, batch, const = first_step(parts, down._replace(mixture=initial_mixture()))
    assert equal_mixtures(const.mixture, initial_mixture())
    loss = parts.method.loss(net, batch, const)
    assert loss.terms["consistency"].item() == loss.terms["subspace"].item() == 0.0
    loss.value.backward()
    assert all(bool(p.grad.isfinite().all()) for p in net.named_parameters().values() if p.grad is not None)


def equal_mixtures(one: BetaMixture, other: BetaMixture) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


@pytest.mark.parametrize("labels", ["server", "clients"])
def test_a_client_refits_both_distributions_once_and_reports_them(labels: str) -> None:
    parts = parts_of(labels)
    down, data = sent_of(parts), parts.scenario.client(1)
    reply: Reply = client_round(place_of(parts), Task(1, 1, 0.05, None), down, data)
    received = place_of(parts).net
    received.load(down.weights)
    unlabelled = data.plain_outputs(received).heads["subspace"].double().tolist()
    labelled = data.labelled_outputs(received).heads["subspace"].double().tolist()
    r = [reference.known_probability(u, (6, 3), (4, 4), 0.5, 1e-8) for u in unlabelled]
    known = reference.weighted_moments(labelled + unlabelled, [1.0] * len(labelled) + r)
    unknown = reference.weighted_moments(unlabelled, [1 - share for share in r])
    assert reply.up.mixture.known.tolist() == pytest.approx(reference.shapes_of(*known), rel=1e-4)
    assert reply.up.mixture.unknown.tolist() == pytest.approx(reference.shapes_of(*unknown), rel=1e-4)
    assert SUBSPACE_BASIS not in reply.up.weights
    assert bool(len(reply.up.totals.counts)) == (labels == "clients") == bool(len(reply.up.totals.sums))


# -------------------------------------------------------------------------------------- the server


def state_of(parts: Parts) -> tuple[State, RoundLoop]:
    loop = RoundLoop(parts, place_of(parts).net, *[None] * 4)  # type: ignore[arg-type]
    return parts.method.setup(loop.site.net.state(), loop.site), loop


def assert_state_of_servers_images(state: State, parts: Parts) -> None:
    held = parts.scenario.server
    assert held is not None
    net = place_of(parts).net
    net.load(state.weights)
    output = held.labelled_outputs(net)
    features, labels = output.features.double().numpy(), held.labels.tolist()
    means = np.stack([np.mean([f for f, y in zip(features, labels, strict=True) if y == k], axis=0) for k in range(3)])
    np.testing.assert_allclose(state.prototypes.numpy(), means, rtol=1e-4, atol=1e-5)
    projection = means.T @ np.linalg.pinv(means.T)
    scores = np.linalg.norm(features @ projection, axis=1) / np.linalg.norm(features, axis=1)
    np.testing.assert_allclose(output.heads["subspace"].numpy(), scores, atol=1e-4)
    shapes = reference.shapes_of(*reference.weighted_moments(scores.tolist(), [1.0] * len(scores)))
    np.testing.assert_allclose(state.mixture.known.numpy(), shapes, rtol=2e-2)


def test_the_server_takes_prototypes_and_known_scores_from_its_plain_images() -> None:
    parts = parts_of("server")
    state, loop = state_of(parts)
    assert_state_of_servers_images(state, parts)
    assert state.mixture.unknown.tolist() == [2, 10]
    down = parts.method.broadcast(state)
    replies = [client_round(place_of(parts), Task(1, c, 0.05, None), down, parts.scenario.client(c)) for c in (0, 2)]
    after = parts.method.aggregate(state, [reply.up for reply in replies], loop.site)
    assert_state_of_servers_images(after, parts)
    unknown = np.mean([reply.up.mixture.unknown.numpy() for reply in replies], axis=0)
    np.testing.assert_allclose(after.mixture.unknown.numpy(), unknown)
    assert not torch.equal(after.weights[SUBSPACE_BASIS], state.weights[SUBSPACE_BASIS])


def test_clients_with_labels_report_what_prototypes_are_made_of() -> None:
    parts = parts_of("clients")
    state, loop = state_of(parts)
    assert state.weights[SUBSPACE_BASIS].abs().max() == 0
    down = parts.method.broadcast(state)
    sums, counts, replies = np.zeros((3, 8)), np.zeros(3), []
    for client in (0, 1, 3):
        place, data = place_of(parts), parts.scenario.client(client)
        replies.append(client_round(place, Task(1, client, 0.05, None), down, data))
        features = data.labelled_outputs(place.net).features.double().numpy()  # the network as training left it
        for row, label in zip(features, data.labels.tolist(), strict=True):
            sums[label] += row
            counts[label] += 1
    after = parts.method.aggregate(state, [reply.up for reply in replies], loop.site)
    seen = counts > 0
    np.testing.assert_allclose(after.prototypes.numpy()[seen], (sums[seen].T / counts[seen]).T, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after.weights[SUBSPACE_BASIS], subspace_basis(after.prototypes))
    assert equal_mixtures(after.mixture, initial_mixture())
    silent = [reply.up._replace(totals=ClassTotals(torch.empty(0), torch.empty(0))) for reply in replies]
    later = parts.method.aggregate(after, silent, loop.site)
    assert torch.equal(later.prototypes, after.prototypes)


# ------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module", params=["server", "clients"])
def quick(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Parts, Outcome]:
    changes = ["method=fedprosub", "rounds=3", "clients_per_round=4", "local.epochs=1", "server.warmup_epochs=15"]
    parts = prepare_run(load_recipe("quickstart", [*changes, f"scenario.labels={request.param}", "engine.workers=1"]))
    out = tmp_path_factory.mktemp("quick") / "run"
    return out, parts, run_toy(parts, out)


@pytest.mark.slow
def test_quickstart_runs(quick: tuple[Path, Parts, Outcome]) -> None:
    _, parts, outcome = quick
    assert len(outcome.rounds) == 4
    at_server = parts.recipe.scenario.labels == "server"
    for line in outcome.rounds:
        assert line["failures"] == []
        assert all(1e-2 <= shape <= 1e3 for shape in line["beta_known"] + line["beta_unknown"])
        if at_server:
            assert line["metrics"]["accuracy"] > 0.6
            assert line["metrics"]["auroc_seen"] > 0.6
            assert line["round"] == 0 or line["pseudo"]["used"] > 0
    assert outcome.rounds[-1]["beta_unknown"] != [2, 10]
    if not at_server:
        assert outcome.rounds[0]["metrics"]["auroc_seen"] == 0.5  # no subspace yet: every score is the same
        assert outcome.rounds[1]["pseudo"]["used"] == 0
    basis = outcome.weights[SUBSPACE_BASIS]
    torch.testing.assert_close(basis.T @ basis, torch.eye(6), atol=1e-5, rtol=0)
    for exchange in outcome.exchanges:
        for answer in exchange.answers:
            assert isinstance(answer, Reply)
            assert SUBSPACE_BASIS not in answer.up.weights


@pytest.mark.slow
def test_the_saved_model_gives_the_same_score_without_the_run(quick: tuple[Path, Parts, Outcome]) -> None:
    out, parts, outcome = quick
    images = parts.scenario.views.plain(parts.scenario.dataset.x_test[:40])
    net, _ = assemble(parts)
    net.load(outcome.weights)
    with torch.no_grad():
        expected = parts.method.predict(net, images)
    described = json.loads((out / "model" / "model.json").read_text())
    saved = build_network(
        described["model"]["name"],
        channels=described["image"]["channels"],
        size=tuple(described["image"]["size"]),
        classes=len(described["classes"]),
        width=described["model"]["width"],
        further=described["heads"],
        generator=torch.Generator(),
    )
    saved.load_state_dict(load_file(out / "model" / "model.safetensors"))
    kind = method_class(described["method"].pop("name"))
    with torch.no_grad():
        found = kind(**described["method"]).predict(Net(saved, net.batchnorm), images)
    assert torch.equal(found.unknown, expected.unknown)
    assert torch.equal(found.logits, expected.logits)
    assert found.unknown.std() > 0
    assert equal_weights(net.state(), Net(saved, net.batchnorm).state())


def test_a_missing_class_at_the_clients_costs_no_run(tmp_path: Path) -> None:
    changes = {"scenario": {"labelled_clients": 1, "partition": "dirichlet", "alpha": 0.1}}
    recipe = toy_recipe("fedprosub", "some-clients", changes, rounds=2, clients_per_round=4)
    outcome = run_toy(toy_parts(recipe, toy_dataset()), tmp_path / "run")
    assert all(bool(value.isfinite().all()) for value in outcome.weights.values())
