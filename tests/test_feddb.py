"""FedDB against loops, the optimiser its authors ran, SciPy's solver, and GPL and SAGE as its limits."""

import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch.nn import functional as F

from learnt import drifted_classifier, learnt_weights
from reference.losses import log_probabilities, mean_over_all, soft_cross_entropies
from semifed.assembly import Parts
from semifed.class_priors import debiased, nearest_mixture, settled_mixture, tracked_prior, unbiased_shares
from semifed.client_round import Reply as Answer
from semifed.client_round import Task, client_round
from semifed.data.client import Batch, Budget, ClientData, batches, step_count
from semifed.errors import UserError
from semifed.fit import Loss, fit
from semifed.methods.feddb import Const, FedDB, Reply
from semifed.net import Net
from semifed.payloads import Down, Local, Visit
from semifed.rng import torch_stream
from semifed.server_momentum import Moving
from semifed.targets import KAPPA
from toys import equal_weights, place_of, run_toy, site_of, toy_parts, toy_recipe

CLIENT = 1
Array = NDArray[np.float64]
rows_of_logits = st.lists(st.lists(st.floats(-6, 6), min_size=4, max_size=4), min_size=1, max_size=10)
seeds = st.integers(0, 10_000)


# Formulas


@given(rows_of_logits, st.lists(st.floats(-6, 6), min_size=4, max_size=4))
def test_debiased_undoes_a_prior(rows: list[list[float]], leaning: list[float]) -> None:
    """By Bayes' rule p(c|u) ∝ L(u|c) π_c: what is left without π is the likelihood."""
    likelihood = np.exp(np.array(rows))
    prior = np.exp(leaning) / np.exp(leaning).sum()
    posterior = likelihood * prior
    posterior /= posterior.sum(axis=1, keepdims=True)
    found = debiased(torch.from_numpy(posterior), torch.from_numpy(prior)).numpy()
    expected = likelihood / likelihood.sum(axis=1, keepdims=True)
    floored = prior >= 1e-6
    if floored.all():
        np.testing.assert_allclose(found, expected, rtol=1e-9)
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-12)


def test_a_class_the_model_never_names_is_not_divided_by_nothing() -> None:
    probabilities = torch.tensor([[0.6, 0.4, 0.0], [1e-7, 1.0, 0.0]])
    found = debiased(probabilities, torch.tensor([1e-9, 1.0, 0.0]))
    expected = [[0.6 / 1e-6, 0.4, 0.0], [0.1, 1.0, 0.0]]
    for row, numbers in zip(found.tolist(), expected, strict=True):
        assert row == pytest.approx([number / sum(numbers) for number in numbers], rel=1e-5)


@given(rows_of_logits, st.floats(0, 1))
def test_prior_after_a_batch(rows: list[list[float]], momentum: float) -> None:
    prior = [0.1, 0.2, 0.3, 0.4]
    expected = [momentum * share for share in prior]
    for row in rows:
        for c, value in enumerate(log_probabilities(row)):
            expected[c] += (1 - momentum) * math.exp(value) / len(rows)
    found = tracked_prior(torch.tensor(prior), torch.tensor(rows).softmax(dim=1), momentum)
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
    assert tracked_prior(torch.tensor(prior), torch.empty(0, 4), momentum).tolist() == torch.tensor(prior).tolist()


def priors_of(seed: int, clients: int | None = None) -> Array:
    rng = np.random.default_rng(seed)
    count, classes = clients or int(rng.integers(1, 10)), int(rng.integers(2, 9))
    found = rng.dirichlet(np.full(classes, rng.choice([0.1, 1.0])), size=count)
    if seed % 4 == 0 and count > 2:
        found[1] = found[0]  # then the minimiser is not unique
    return found


def distance(weight: Array, priors: Array) -> float:
    return float(((weight @ priors - 1 / priors.shape[1]) ** 2).sum())


@given(seeds)
@settings(max_examples=6)
def test_released_solver_against_the_optimiser_it_uses(seed: int) -> None:
    priors = torch.from_numpy(priors_of(seed))
    count, classes = priors.shape
    weight = torch.full((count, 1), 1 / count, dtype=torch.float64)
    for _ in range(100):
        moved = weight.clone().requires_grad_()
        sgd = torch.optim.SGD([moved], lr=1.0, momentum=0.9, weight_decay=0.9, nesterov=True)
        F.mse_loss((moved * priors).sum(dim=0), torch.full((classes,), 1 / classes, dtype=torch.float64)).backward()
        sgd.step()
        weight = moved.detach().softmax(dim=0)
    np.testing.assert_allclose(settled_mixture(priors).numpy(), weight[:, 0].numpy(), rtol=1e-9)


@given(seeds, st.sampled_from([1.0, 1.3, 2.0, 5.0, 1e6]))
@settings(max_examples=40)
def test_exact_weights_against_scipy(seed: int, most: float) -> None:
    priors = priors_of(seed)
    count, classes = priors.shape
    found = nearest_mixture(torch.from_numpy(priors), most).numpy()
    low, high = 1 / (most * count), min(most / count, 1.0)
    assert found.sum() == pytest.approx(1, abs=1e-12)
    assert found.min() >= low - 1e-12
    assert found.max() <= high + 1e-12
    solved = minimize(
        lambda w: 1e3 * distance(w, priors),
        np.full(count, 1 / count),
        jac=lambda w: 2e3 * priors @ (w @ priors - 1 / classes),
        bounds=[(low, high)] * count,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
        options={"maxiter": 500, "ftol": 1e-13},
    )
    assert distance(found, priors) <= distance(solved.x, priors) + 1e-9
    # Karush, Kuhn, Tucker: no weight that may fall has a larger slope than one that may rise.
    slope = priors @ (found @ priors - 1 / classes)
    may_fall, may_rise = found > low + 1e-9, found < high - 1e-9
    if may_fall.any() and may_rise.any():
        assert slope[may_fall].max() <= slope[may_rise].min() + 1e-7


@given(seeds, st.sampled_from([2.0, 1e6]))
@settings(max_examples=25)
def test_exact_weights_do_not_depend_on_the_order(seed: int, most: float) -> None:
    priors = torch.from_numpy(priors_of(seed))
    order = torch.randperm(len(priors), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(
        nearest_mixture(priors[order], most), nearest_mixture(priors, most)[order], rtol=1e-4, atol=1e-5
    )


def test_two_clients_in_closed_form() -> None:
    for a, b in [(0.9, 0.3), (0.6, 0.1), (0.8, 0.7)]:
        found = nearest_mixture(torch.tensor([[a, 1 - a], [b, 1 - b]], dtype=torch.float64), 1e6)
        best = min(max((0.5 - b) / (a - b), 0.0), 1.0)  # w a + (1 - w) b = 1/2
        assert found.tolist() == pytest.approx([best, 1 - best], abs=1e-5)


def test_equally_good_weights_are_equal() -> None:
    same = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64).repeat(5, 1)
    assert nearest_mixture(same, 5.0).tolist() == pytest.approx([0.2] * 5)
    pairs = torch.tensor([[1.0, 0.0], [0.0, 1.0]] * 3, dtype=torch.float64)
    assert nearest_mixture(pairs, 5.0).tolist() == pytest.approx([1 / 6] * 6)


@pytest.mark.parametrize("seed", range(5))
def test_what_the_released_solver_misses(seed: int) -> None:
    """On skewed clients it stays within a few percent of equal weights; the minimiser is much nearer to uniform."""
    priors = np.random.default_rng(seed).dirichlet(np.full(10, 0.1), size=8)
    settled = settled_mixture(torch.from_numpy(priors)).numpy()
    exact = nearest_mixture(torch.from_numpy(priors), 1e6).numpy()
    equal = np.full(8, 1 / 8)
    assert np.abs(settled * 8 - 1).max() < 0.06
    assert distance(exact, priors) < 0.7 * distance(settled, priors) < 0.7 * distance(equal, priors)


def test_fifty_clients_are_no_burden() -> None:
    priors = torch.from_numpy(np.random.default_rng(0).dirichlet(np.full(100, 0.05), size=50))
    found = nearest_mixture(priors, 1e6)
    slope = priors @ (found @ priors - 0.01)
    assert float(slope[found > 1e-7].max() - slope.min()) < 1e-7


anything = st.one_of(
    st.floats(0, 1), st.floats(), st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300, -1e300])
)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(anything, min_size=3, max_size=3)), min_size=1, max_size=6),
    st.booleans(),
)
def test_no_claim_breaks_the_weights(clients: list[tuple[int, list[float]]], exact: bool) -> None:
    counts = [float(count) for count, _ in clients]
    found = unbiased_shares(counts, [torch.tensor(claim) for _, claim in clients], exact=exact, most=5.0)
    active = sum(count > 0 for count in counts) or len(counts)
    assert float(found.sum()) == pytest.approx(1, abs=1e-9)
    # The released solver's exponents lie within 0.71 + 1.9 · 2 / 3 of each other.
    least, largest = (1 / 5, 5.0) if exact else (math.exp(-2), math.exp(2))
    for count, share in zip(counts, found.tolist(), strict=True):
        if count or not any(counts):
            assert least / active - 1e-9 <= share <= min(largest / active, 1) + 1e-9
        else:
            assert share == 0


@pytest.mark.parametrize("exact", [True, False])
def test_claims_that_are_no_distribution(exact: bool) -> None:
    """Each counts as the distribution next to it."""

    def weights(*claims: list[float]) -> list[float]:
        honest = [[0.7, 0.2, 0.1], [0.5, 0.4, 0.1]]
        told = [torch.tensor(claim) for claim in (*honest, *claims)]
        found: list[float] = unbiased_shares([1.0] * len(told), told, exact=exact, most=5.0).tolist()
        return found

    assert weights([-3.0, 0.5, 0.5]) == pytest.approx(weights([0.0, 0.5, 0.5]))
    assert weights([math.nan, 0.5, 0.5]) == pytest.approx(weights([0.0, 0.5, 0.5]))
    assert weights([0.2, 0.4, 0.2]) == pytest.approx(weights([0.25, 0.5, 0.25]))
    assert weights([math.inf, 0.0, 0.0]) == pytest.approx(weights([1.0, 0.0, 0.0]))
    uniform = weights([1 / 3] * 3)
    for nothing in ([0.0] * 3, [math.nan] * 3, [-1.0] * 3, [], [0.5, 0.5]):
        assert weights(nothing) == pytest.approx(uniform)
    assert unbiased_shares([1.0, 1.0], [torch.empty(0)] * 2, exact=exact, most=5.0).tolist() == [0.5, 0.5]
    assert unbiased_shares([], [], exact=exact, most=5.0).tolist() == []


def test_a_false_claim_buys_at_most_the_bound() -> None:
    """Whoever claims the uniform prior would get everything from the plain minimiser."""
    skewed = [torch.tensor([0.9, 0.05, 0.05])] * 9
    told = [*skewed, torch.full((3,), 1 / 3)]
    assert float(unbiased_shares([1.0] * 10, told, exact=True, most=1e6)[-1]) == pytest.approx(1, abs=1e-4)
    assert float(unbiased_shares([1.0] * 10, told, exact=True, most=3.0)[-1]) == pytest.approx(0.3)
    assert float(unbiased_shares([1.0] * 10, told, exact=False, most=3.0)[-1]) < 0.16


# The client


class World(NamedTuple):
    parts: Parts
    net: Net
    down: Down
    data: ClientData

    @property
    def method(self) -> FedDB:
        assert isinstance(self.parts.method, FedDB)
        return self.parts.method

    def prepare(self) -> Local[Const, Any]:
        with torch.no_grad():
            return self.method.prepare(self.net, self.down, self.data, None, Visit(0, 1, CLIENT))

    def budget(self) -> Budget:
        """That of the recipe, in steps."""
        budget = place_of(self.parts).budget
        return budget._replace(epochs=None, steps=step_count(self.data, budget))

    def answer(self, budget: Budget | None = None) -> Answer:
        place = place_of(self.parts)
        place = place._replace(budget=budget or place.budget)
        return client_round(place, Task(1, CLIENT, 0.05, None), self.down, self.data)


def world(labels: str = "clients", views: dict[str, str] | None = None, method: str = "feddb", **options: Any) -> World:
    """A client that has received a model that has learnt something; its network is in evaluation mode."""
    changes: dict[str, dict[str, Any]] = {"method": {"threshold": 0.6, **options}, "views": views or {}}
    parts = toy_parts(toy_recipe(method, labels, changes, rounds=2))
    net = place_of(parts).net
    net.load(learnt_weights())
    return World(parts, net, Down(learnt_weights()), parts.scenario.client(CLIENT))


def gate_probabilities(here: World) -> list[list[float]]:
    view = here.data.views.weak(here.data.images[here.data.unlabelled], torch_stream(0, 1, CLIENT, "gate"))
    logits = torch.cat([here.net(image[None]).logits.detach() for image in view]).double()
    return [[math.exp(value) for value in log_probabilities(row)] for row in logits.tolist()]


def debiased_by_loop(rows: list[list[float]], prior: list[float]) -> list[list[float]]:
    found = []
    for row in rows:
        lifted = [p / max(share, 1e-6) for p, share in zip(row, prior, strict=True)]
        found.append([value / sum(lifted) for value in lifted])
    return found


def test_labels_of_the_round() -> None:
    here = world()
    rows = gate_probabilities(here)
    prior = [sum(row[c] for row in rows) / len(rows) for c in range(3)]
    posterior = debiased_by_loop(rows, prior)
    label, confidence = [row.index(max(row)) for row in posterior], [max(row) for row in posterior]
    kept = [index for index, value in enumerate(confidence) if value >= 0.6]
    local = here.prepare()
    assert 0 < len(kept) < len(rows)
    assert label != [row.index(max(row)) for row in rows], "the prior must matter"
    assert local.const.prior.tolist() == pytest.approx(prior, rel=1e-5)
    assert local.data.unlabelled.tolist() == here.data.unlabelled[kept].tolist()
    assert local.const.label.tolist() == [label[index] for index in kept]
    record = here.answer().record.pseudo
    assert record is not None
    assert record.position.tolist() == here.data.unlabelled.tolist(), "left-out images are seen, not used"
    assert record.label.tolist() == label
    assert record.used.nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("momentum", [0.5, 0.9, 1.0])
def test_a_round_by_hand(momentum: float) -> None:
    """Cross entropy on labels and on kept images, a mean over each; the prior follows the weak views of each step."""
    here = world(prior_momentum=momentum, unlabelled_weight=0.7)
    local, place = here.prepare(), place_of(here.parts)
    place.net.load(here.down.weights)
    prior = local.const.prior.double().numpy()

    def by_hand(net: Net, batch: Batch) -> Loss:
        nonlocal prior
        images = torch.cat([batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong])
        sizes = [len(batch.labelled), len(batch.unlabelled), len(batch.unlabelled)]
        labelled, weak, strong = net.network(images).logits.split(sizes)
        prior = momentum * prior + (1 - momentum) * weak.detach().double().softmax(dim=1).numpy().mean(axis=0)
        goal = local.const.label[batch.unlabelled.position]
        return Loss(F.cross_entropy(labelled, batch.labelled.labels) + 0.7 * F.cross_entropy(strong, goal), {})

    fit(place.net, batches(local.data, here.budget(), (0, 1, CLIENT)), by_hand, place.optimiser._replace(lr=0.05))
    answer = here.answer()
    for name, tensor in answer.up.weights.items():
        torch.testing.assert_close(tensor, place.net.state()[name], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(answer.up.prior.numpy(), prior, rtol=1e-4)
    moved = np.abs(prior - local.const.prior.numpy()).max()
    assert (moved > 1e-3) == (momentum < 1)
    everything = torch.cat([local.data.labelled, local.data.unlabelled]).unique()
    assert float(answer.up.samples) == len(everything)


def uniform_prior(prior: torch.Tensor, probabilities: torch.Tensor, momentum: float) -> torch.Tensor:
    return torch.full_like(prior, 1 / len(prior))


@pytest.mark.parametrize("labels", ["server", "clients"])
@pytest.mark.parametrize("threshold", [0.0, 0.6])
def test_with_a_uniform_prior_it_is_gpl_with_the_rounds_labels(
    threshold: float, labels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If weak views are the images themselves, GPL's labels do not change in the round either."""
    monkeypatch.setattr("semifed.methods.feddb.tracked_prior", uniform_prior)
    views = {"weak": "none"}
    here, gpl = world(labels, views, threshold=threshold), world(labels, views, "fixmatch-gpl", threshold=threshold)
    sure = torch.tensor([max(row) >= threshold for row in gate_probabilities(here)])
    assert sure.any()
    assert threshold == 0 or not sure.all()
    kept = gpl._replace(data=gpl.data._replace(unlabelled=gpl.data.unlabelled[sure]))
    ours, theirs = here.answer(), kept.answer(here.budget())
    assert equal_weights(ours.up.weights, theirs.up.weights)
    assert ours.record.terms == theirs.record.terms


def test_debiasing_changes_the_round() -> None:
    views = {"weak": "none"}
    biased, ours = world(views=views, method="fixmatch-gpl", threshold=0.0), world(views=views, threshold=0.0)
    assert not equal_weights(ours.answer().up.weights, biased.answer().up.weights)


def test_where_nothing_passes_only_labels_are_learnt() -> None:
    here = world(threshold=1.0)
    answer, place = here.answer(), place_of(here.parts)
    place.net.load(here.down.weights)
    alone = here.data._replace(unlabelled=here.data.unlabelled[:0])

    def labels_only(net: Net, batch: Batch) -> Loss:
        return Loss(F.cross_entropy(net(batch.labelled.weak).logits, batch.labelled.labels), {})

    fit(place.net, batches(alone, here.budget(), (0, 1, CLIENT)), labels_only, place.optimiser._replace(lr=0.05))
    for name, tensor in answer.up.weights.items():
        torch.testing.assert_close(tensor, place.net.state()[name], rtol=1e-5, atol=1e-6)
    assert torch.equal(answer.up.prior, here.prepare().const.prior), "that of the round's start"
    assert answer.record.terms["consistency"] == 0.0


@pytest.mark.parametrize("kept", [0, 3, None])
def test_the_gate_does_not_decide_how_long_a_client_trains(kept: int | None) -> None:
    rows = gate_probabilities(world())
    prior = [sum(row[c] for row in rows) / len(rows) for c in range(3)]
    sureness = sorted((max(row) for row in debiased_by_loop(rows, prior)), reverse=True)
    here = world(threshold={0: 1.0, 3: (sureness[2] + sureness[3]) / 2, None: 0.0}[kept])
    assert len(here.prepare().data.unlabelled) == (len(rows) if kept is None else kept)
    plain = world(method="fixmatch-lpl").answer().record.steps
    assert plain > 1
    assert here.answer().record.steps == plain
    assert here.answer(Budget(None, 5, 8)).record.steps == 5


@pytest.mark.parametrize("sage", [False, True])
def test_a_client_with_nothing_to_learn_from_counts_nothing(sage: bool) -> None:
    here = world("server", threshold=1.0, sage=sage)
    answer = here.answer()
    assert float(answer.up.samples) == 0.0
    assert all(torch.equal(tensor, here.down.weights[name]) for name, tensor in answer.up.weights.items())


@pytest.mark.parametrize("sage", [False, True])
def test_a_client_with_labels_alone_claims_no_lean(sage: bool) -> None:
    here = world(sage=sage)
    answer = here._replace(data=here.data._replace(unlabelled=here.data.unlabelled[:0])).answer()
    assert answer.up.prior.tolist() == pytest.approx([1 / 3] * 3)
    assert answer.record.terms["supervised"] > 0
    assert float(answer.up.samples) == len(here.data.labelled)


# With SAGE


def test_sage_mixes_debiased_opinions() -> None:
    here = world(sage=True, threshold=0.52)
    const = here.prepare().const
    received = place_of(here.parts).net
    received.load(here.down.weights)
    here.net.load(drifted_classifier())
    here.net.network.train()
    start, prior = const.prior.tolist(), const.prior.tolist()
    branches = Counter[str]()
    for batch in batches(here.data, Budget(1, None, 8), (0, 1, CLIENT)):
        groups = [batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong]
        with torch.no_grad():
            logits = here.net.network(torch.cat(groups)).logits.double().split([len(group) for group in groups])
            theirs = received(batch.unlabelled.weak).logits.double()
        mine = [[math.exp(value) for value in log_probabilities(row)] for row in logits[1].tolist()]
        other = [[math.exp(value) for value in log_probabilities(row)] for row in theirs.tolist()]
        targets, used = [], []
        for local, its in zip(debiased_by_loop(mine, prior), debiased_by_loop(other, start), strict=True):
            share = math.exp(-KAPPA * (abs(max(local) - max(its)) + 1e-6))
            share = min(max(share, 1e-6), 1)
            sure, its_sure = max(local) >= 0.52, max(its) >= 0.52
            row = [0.0] * 3
            row[local.index(max(local))] += share if sure else 0.0
            row[its.index(max(its))] += 1 - share if sure else 1.0
            targets.append(row)
            used.append(sure or its_sure)
            branches[f"{sure} {its_sure}"] += 1
            branches["sure of another class"] += sure and local.index(max(local)) != its.index(max(its))
        loss = here.method.loss(here.net, batch, const)
        assert loss.pseudo is not None
        assert loss.pseudo.used.tolist() == used
        expected = mean_over_all(soft_cross_entropies(logits[2].numpy(), np.array(targets)), used)
        assert loss.terms["consistency"].item() == pytest.approx(expected, rel=1e-3)
        prior = [0.5 * share + 0.5 * sum(row[c] for row in mine) / len(mine) for c, share in enumerate(prior)]
        const = loss.carry
        assert const.prior.tolist() == pytest.approx(prior, rel=1e-4)
        assert const.received is not None
        assert const.received.prior.tolist() == start
    assert min(branches.values()) > 0, branches
    assert len(branches) == 5, branches


def test_with_uniform_priors_and_sage_it_is_sage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semifed.methods.feddb.tracked_prior", uniform_prior)
    ours, theirs = world(sage=True).answer(), world(method="sage").answer()
    for name, tensor in ours.up.weights.items():  # p / (1/3), scaled to sum to 1, may round otherwise than p
        torch.testing.assert_close(tensor, theirs.up.weights[name], rtol=1e-4, atol=1e-6)
    assert ours.record.pseudo is not None
    assert theirs.record.pseudo is not None
    assert torch.equal(ours.record.pseudo.used, theirs.record.pseudo.used)


# The server


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("aggregation", ["official", "exact"])
def test_three_rounds_of_the_server_by_hand(aggregation: str, momentum: float) -> None:
    here = world(aggregation=aggregation, server_momentum=momentum)  # no labels there: nothing is fine-tuned
    site = site_of(here.parts)
    parameters = list(site.net.named_parameters())
    server = Moving(here.down.weights, {})
    w = {name: here.down.weights[name].double().numpy() for name in parameters}
    v = {name: np.zeros_like(w[name]) for name in parameters}
    generator = torch.Generator().manual_seed(1)
    priors = torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.4, 0.4], [1 / 3, 1 / 3, 1 / 3]])
    counts = (40.0, 10.0, 0.0)  # the third had nothing to learn from
    solver = settled_mixture if aggregation == "official" else lambda given: nearest_mixture(given, 5.0)
    first, second = solver(priors[:2].double()).tolist()
    for _ in range(3):
        models = [
            {n: torch.rand(server.weights[n].shape, generator=generator) for n in site.net.trained_names()}
            for _ in counts
        ]
        ups = [
            Reply(model, torch.tensor(count), prior) for model, count, prior in zip(models, counts, priors, strict=True)
        ]
        server = here.method.aggregate(server, ups, site)
        assert site.notes["client_weights"] == pytest.approx([first, second, 0.0])
        for name in parameters:
            middle = first * models[0][name].double().numpy() + second * models[1][name].double().numpy()
            v[name] = momentum * v[name] + (w[name] - middle)
            w[name] = w[name] - v[name]
    for name in parameters:
        np.testing.assert_allclose(server.weights[name].numpy(), w[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert abs(first - second) > (0.2 if aggregation == "exact" else 1e-4)


@pytest.mark.parametrize("count", [0, 2])
def test_nobody_active_means_fine_tuning_only(count: int) -> None:
    here = world("server", server_momentum=0.5)
    server = Moving(here.down.weights, {name: torch.ones_like(t) for name, t in here.net.named_parameters().items()})
    silent = Reply({n: here.down.weights[n] for n in here.net.trained_names()}, torch.tensor(0.0), torch.ones(3) / 3)
    after = here.method.aggregate(server, [silent] * count, site_of(here.parts))
    assert equal_weights(after.weights, site_of(here.parts).fine_tune(server.weights, here.method.server_loss))


def test_a_run_weighs_by_priors(tmp_path: Path) -> None:
    recipe = toy_recipe(
        "feddb", "clients", {"method": {"threshold": 0.35, "aggregation": "exact", "most_weight": 1.5}}, rounds=2
    )
    outcome = run_toy(toy_parts(recipe), tmp_path / "run")
    for exchange, line in zip(outcome.exchanges, outcome.rounds[1:], strict=True):
        ups = [answer.up for answer in exchange.answers if isinstance(answer, Answer)]
        priors = np.stack([up.prior.double().numpy() for up in ups])
        np.testing.assert_allclose(priors.sum(axis=1), 1, rtol=1e-5)
        weight = np.array(line["client_weights"])
        assert weight.min() >= 1 / 4.5 - 1e-9
        assert weight.max() <= 0.5 + 1e-9
        assert distance(weight, priors) <= distance(np.full(3, 1 / 3), priors)
        assert line["pseudo"]["seen"] >= line["pseudo"]["used"] > 0


def test_an_unknown_solver_is_named() -> None:
    with pytest.raises(UserError, match=r"method\.aggregation.*exact"):
        toy_recipe("feddb", "clients", {"method": {"aggregation": "exactly"}})
