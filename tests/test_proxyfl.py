"""ProxyFL against plain loops, finite differences, and the methods it becomes in its limits."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from semifed.assembly import Parts, build_net
from semifed.client_round import Reply as Answer
from semifed.client_round import Task, client_round
from semifed.data.client import Batch, Budget, ClientData, batches
from semifed.errors import UserError
from semifed.fit import Course
from semifed.methods.proxyfl import Const, Known, ProxyFL, Reply
from semifed.models.network import Output
from semifed.net import Net
from semifed.payloads import Visit
from semifed.proxies import (
    Anchor,
    Pool,
    Rows,
    Tuning,
    _steps,
    category_sets,
    change,
    contrast,
    margin_of,
    pool_contrast,
    positive_shares,
    tuned,
    tuning_slope,
    updated_prior,
)
from semifed.recipe_file import load_recipe
from semifed.targets import opinion
from semifed.wire import size_in_bytes
from toys import equal_weights, place_of, run_toy, site_of, toy_parts, toy_recipe

CLIENT = 1
Array = NDArray[np.float64]
seeds = st.integers(0, 999)
AUTHORS = Tuning("on", 2000, 0.005, 0, "local", True)


def stream() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def clients_proxies(seed: int, clients: int = 4, classes: int = 5, width: int = 8, spread: float = 0.3) -> torch.Tensor:
    return noise(seed, classes, width) + spread * noise(seed + 1, clients, classes, width)


# Tuning


def margin_by_loop(rows: Array) -> float:
    nearest = [min(math.dist(one, other) for j, other in enumerate(rows) if j != i) for i, one in enumerate(rows)]
    return min(max(nearest), 100.0)


@given(seeds, st.floats(0.01, 40))
def test_margin(seed: int, size: float) -> None:
    rows = size * noise(seed, 5, 8)
    assert float(margin_of(rows)) == pytest.approx(margin_by_loop(rows.numpy()), rel=1e-9)


def test_one_class_has_the_widest_margin_and_no_slope() -> None:
    assert float(margin_of(torch.ones(1, 3))) == 100.0
    slope = tuning_slope(torch.ones(1, 3), torch.zeros(2, 1, 3), torch.arange(2), "local", 100.0)
    assert not slope.any()


def tuning_loss_by_loop(tuned_: Array, local: Array, pairs: list[int], anchor: Anchor, margin: float) -> float:
    classes = len(tuned_)
    total = 0.0
    for pair in pairs:
        m, c = divmod(pair, classes)
        if anchor == "local":
            distance = [math.dist(local[m][c], tuned_[k]) for k in range(classes)]
        else:
            distance = [math.dist(tuned_[c], local[m][k]) for k in range(classes)]
        distance[c] += margin
        total += distance[c] + math.log(sum(math.exp(-d) for d in distance))
    return total / len(pairs)


@given(seeds, st.sampled_from(["local", "global"]), st.sampled_from([0.0, 1.5]), st.booleans())
def test_the_slope_is_that_of_the_loss(seed: int, anchor: Anchor, margin: float, some: bool) -> None:
    local = clients_proxies(seed, clients=3, classes=4, width=3)
    here = local.mean(dim=0) + 0.1 * noise(seed + 2, 4, 3)
    pairs = torch.randperm(12, generator=torch.Generator().manual_seed(seed))[: 5 if some else 12]
    slope = tuning_slope(here, local, pairs, anchor, margin)
    for seed_ in range(3):
        way = noise(seed_, 4, 3)
        up, down = (
            tuning_loss_by_loop((here + by * way).numpy(), local.numpy(), pairs.tolist(), anchor, margin)
            for by in (1e-5, -1e-5)
        )
        assert (up - down) / 2e-5 == pytest.approx(float((slope * way).sum()), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("anchor", ["local", "global"])
@pytest.mark.parametrize("batch", [0, 4])
def test_tuning_lowers_the_loss(anchor: Anchor, batch: int) -> None:
    local = clients_proxies(0)
    average = local.mean(dim=0)
    after = tuned(average, list(local), AUTHORS._replace(anchor=anchor, batch=batch, steps=400), stream())
    margin = margin_by_loop(average.numpy())
    before, later = (
        tuning_loss_by_loop(rows.numpy(), local.numpy(), list(range(20)), anchor, margin) for rows in (average, after)
    )
    assert later < before - 0.01


def test_a_step_on_rows_is_a_step_down_the_slope_with_the_first_averages_margin() -> None:
    local = clients_proxies(1)
    here = local.mean(dim=0)
    margin = margin_of(here)
    by = Tuning("on", 3, 0.7, 20, "local", True)  # 20 are all pairs: shuffling them changes nothing
    after = tuned(here, list(local), by, stream())
    for _ in range(3):
        here = here - 0.7 * tuning_slope(here, local, torch.arange(20), "local", margin)
    torch.testing.assert_close(after, here)


def test_mini_batches_go_through_all_rows_before_any_comes_again() -> None:
    """With a tiny rate one epoch of mini-batches is one step on all rows; half an epoch is not."""
    local = clients_proxies(2)
    average = local.mean(dim=0)
    slope = tuning_slope(average, local, torch.arange(20), "local", margin_of(average))
    for steps, whole in ((5, True), (10, True), (3, False)):
        after = tuned(average, list(local), Tuning("on", steps, 1e-7, 4, "local", True), stream())
        moved = (average - after) / (1e-7 * steps)
        assert torch.allclose(moved, slope, rtol=1e-3, atol=1e-6) == whole


@pytest.mark.parametrize(
    ("clients", "classes", "width", "spread"), [(8, 10, 32, 0.3), (4, 10, 16, 1.0), (8, 40, 16, 0.5)]
)
def test_all_rows_at_once_end_where_the_authors_mini_batches_end(
    clients: int, classes: int, width: int, spread: float
) -> None:
    local = clients_proxies(3, clients, classes, width, spread) / math.sqrt(width)
    average = local.mean(dim=0)
    whole = tuned(average, list(local), AUTHORS._replace(steps=1000), stream())
    pieces = tuned(average, list(local), AUTHORS._replace(steps=1000, batch=4), stream())
    assert float((whole - pieces).norm()) < 0.05 * float((pieces - average).norm())
    assert float((whole - pieces).norm()) < 0.005 * float(pieces.norm())


@pytest.mark.parametrize(("classes", "epochs"), [(10, 100), (100, 10)])
def test_all_rows_at_once_take_as_many_steps_as_the_authors_have_epochs(classes: int, epochs: int) -> None:
    steps = list(_steps(8 * classes, classes, AUTHORS, stream()))
    assert len(steps) == epochs
    assert sum(rate for _, rate in steps) == pytest.approx(2000 * 0.005)
    assert all(len(pairs) == 8 * classes for pairs, _ in steps)


def test_tuning_is_mostly_a_longer_average() -> None:
    local = list(clients_proxies(4, 8, 10, 64) / 8)
    average = torch.stack(local).mean(dim=0)
    found = change(average, tuned(average, local, AUTHORS, stream()))
    assert found["proxy_scale"] > 1.1
    assert found["proxy_cosine"] > 0.99


def test_tuning_leaves_a_gross_outlier_aside() -> None:
    local = clients_proxies(4, 8, 10, 64) / 8
    local[0] = 3 * local[0].roll(3, dims=1)
    honest = local[1:].mean(dim=0)
    average = local.mean(dim=0)
    after = tuned(average, list(local), AUTHORS, stream())
    assert change(honest, average)["proxy_cosine"] < 0.95
    assert change(honest, after)["proxy_cosine"] > 0.98


def test_rescaled_proxies_have_the_length_of_the_tuned_and_point_where_the_average_does() -> None:
    local = list(clients_proxies(5).float())
    average = torch.stack(local).mean(dim=0)
    long = tuned(average, local, AUTHORS, stream())
    scaled = tuned(average, local, AUTHORS._replace(mode="rescale"), stream())
    assert float(scaled.norm()) == pytest.approx(float(long.norm()), rel=1e-6)
    assert scaled.dtype == average.dtype
    torch.testing.assert_close(scaled / scaled.norm(), average / average.norm())
    nothing = torch.zeros(3, 2)
    assert torch.isfinite(tuned(nothing, [nothing], AUTHORS._replace(mode="rescale"), stream())).all()


@pytest.mark.parametrize("by", [{"steps": 0}, {"lr": 0.0}, {"mode": "off"}, {"steps": 0, "batch": 4}])
def test_without_steps_the_average_stays(by: dict[str, Any]) -> None:
    local = clients_proxies(6).float()
    average = local.mean(dim=0)
    assert torch.equal(tuned(average, list(local), AUTHORS._replace(**by), stream()), average)
    assert torch.equal(tuned(average, [], AUTHORS, stream()), average)


@pytest.mark.parametrize("anchor", ["local", "global"])
def test_equal_clients_only_push_proxies_apart(anchor: Anchor) -> None:
    """The own proxy is where it should be: what is left of the slope points to the other classes' proxies."""
    here = noise(7, 3, 4)
    local = here.repeat(2, 1, 1)
    slope = tuning_slope(here, local, torch.arange(6), anchor, 0.5)
    for c in range(3):
        expected = np.zeros(4)
        for k in range(3):
            if k == c:
                continue
            apart = [math.dist(here[k], here[j]) for j in range(3)]
            if anchor == "global":
                apart = [math.dist(here[c], here[j]) for j in range(3)]
            own, other = (k, c) if anchor == "local" else (c, k)
            apart[own] += 0.5
            share = math.exp(-apart[other]) / sum(math.exp(-d) for d in apart)
            expected -= share * (here[c] - here[k]).numpy() / math.dist(here[c], here[k]) / 3
        np.testing.assert_allclose(slope[c].numpy(), expected, rtol=1e-6, atol=1e-9)
    far = 1000 * torch.eye(3, dtype=torch.float64)
    still = tuned(far, [far, far], AUTHORS._replace(margin=False, anchor=anchor), stream())
    torch.testing.assert_close(still, far)


# Category sets and the pool


def sets_by_loop(q: Array, sure: list[bool], prior: list[float], categories: str | int) -> list[set[int]]:
    found = []
    for row, certain in zip(q, sure, strict=True):
        ranked = sorted(range(len(row)), key=lambda c, row=row: -row[c])  # type: ignore[misc]
        if categories == "prior":
            wide = {c for c in range(len(row)) if row[c] > prior[c]}
        else:
            wide = set(ranked[: int(categories)])
        found.append({ranked[0]} if certain or not wide else wide)
    return found


@given(seeds, st.sampled_from(["prior", 1, 3, 9]))
def test_category_sets(seed: int, categories: Any) -> None:
    q, prior = (2 * noise(seed, 7, 5)).softmax(dim=1), noise(seed + 1, 5).softmax(dim=0)
    sure = noise(seed + 2, 7) > 0
    found = category_sets(q, sure, prior, categories)
    expected = sets_by_loop(q.numpy(), sure.tolist(), prior.tolist(), categories)
    assert [set(row.nonzero().flatten().tolist()) for row in found] == expected
    assert found.any(dim=1).all()
    assert (found[sure].sum(dim=1) == 1).all()


def test_an_image_that_is_exactly_as_likely_as_the_prior_says_has_a_set_all_the_same() -> None:
    prior = torch.tensor([0.2, 0.5, 0.3])
    found = category_sets(prior[None], torch.tensor([False]), prior, "prior")
    assert found.tolist() == [[False, True, False]]


def pool_by_loop(unit: Array, sets: list[set[int]], positive: Array) -> list[float]:
    first = len(unit) - len(positive)
    losses = []
    for i, target in enumerate(positive):
        own = float(unit[first + i] @ target)
        others = [
            float(unit[first + i] @ unit[j])
            for j in range(len(unit))
            if not sets[first + i] & sets[j] and unit[first + i] @ unit[j] >= 1e-6
        ]
        losses.append(-math.log(math.exp(own) / (math.exp(own) + sum(map(math.exp, others)))))
    return losses


def random_pool(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    unit = torch.nn.functional.normalize(noise(seed, 9, 4), dim=1)
    sets = noise(seed + 1, 9, 3) > 0.3
    sets[torch.arange(9), torch.arange(9) % 3] = True
    return unit, sets, noise(seed + 2, 6, 4)


@given(seeds)
def test_pool_contrast(seed: int) -> None:
    unit, sets, positive = random_pool(seed)
    members = [set(row.nonzero().flatten().tolist()) for row in sets]
    expected = pool_by_loop(unit.numpy(), members, positive.numpy())
    np.testing.assert_allclose(pool_contrast(unit, sets, positive).numpy(), expected, rtol=1e-9, atol=1e-12)


def test_pool_contrast_slope() -> None:
    unit, sets, positive = random_pool(1)
    assert torch.autograd.gradcheck(
        lambda rows, goal: pool_contrast(rows, sets, goal), (unit.requires_grad_(), positive.requires_grad_())
    )


@given(seeds, st.randoms(use_true_random=False))
def test_the_order_of_rows_and_of_classes_does_not_matter(seed: int, random: Any) -> None:
    unit, sets, positive = random_pool(seed)
    plain = pool_contrast(unit, sets, positive)
    negatives, rows, classes = list(range(3)), list(range(6)), list(range(3))
    for order in (negatives, rows, classes):
        random.shuffle(order)
    whole = negatives + [3 + row for row in rows]
    mixed = pool_contrast(unit[whole], sets[whole][:, classes], positive[rows])
    torch.testing.assert_close(mixed, plain[rows])


def test_rows_that_may_all_be_the_same_have_no_negatives() -> None:
    unit, sets, positive = random_pool(2)
    sets[:, 0] = True
    assert pool_contrast(unit, sets, positive).tolist() == [0.0] * 6


def test_without_anyone_to_learn_the_pool_is_empty() -> None:
    unit, sets, positive = random_pool(2)
    assert pool_contrast(unit, sets, positive[:0]).shape == (0,)


def test_positives() -> None:
    sets = torch.tensor([[True, False, False], [True, True, False]])
    q = torch.tensor([[0.9, 0.1, 0.0], [0.5, 0.3, 0.2]])
    found = positive_shares(sets, torch.tensor([True, False]), q)
    assert found.tolist() == [[1.0, 0.0, 0.0], pytest.approx([0.5, 0.3, 0.0])]


# The prior


def test_prior_by_moving_average_of_pooled_counts_or_by_mean_of_shares() -> None:
    prior = torch.tensor([0.5, 0.25, 0.25])
    claims = [torch.tensor([8, 0, 0]), torch.tensor([1, 1, 0]), torch.tensor([0, 0, 0])]
    pooled = updated_prior(prior, claims, "ema", 0.9)
    torch.testing.assert_close(pooled, torch.tensor([0.45 + 0.09, 0.225 + 0.01, 0.225]))
    torch.testing.assert_close(updated_prior(prior, claims, "round", 0.9), torch.tensor([0.75, 0.25, 0.0]))


claimed = st.lists(
    st.lists(st.one_of(st.floats(width=32), st.just(0.0), st.just(math.nan), st.just(1e30)), min_size=2, max_size=4),
    max_size=4,
)


@given(claimed, st.sampled_from(["ema", "round"]), st.floats(0, 1))
def test_the_prior_stays_a_distribution_whatever_is_claimed(claims: list[list[float]], rule: Any, decay: float) -> None:
    prior = torch.tensor([0.2, 0.5, 0.3])
    after = updated_prior(prior, [torch.tensor(claim) for claim in claims], rule, decay)
    assert after.shape == prior.shape
    assert bool((after >= 0).all())
    assert float(after.double().sum()) == pytest.approx(1, abs=1e-6)
    heard = [c for c in claims if len(c) == 3 and any(0 < value < math.inf for value in c)]
    if not heard:
        assert torch.equal(after, prior)


def test_a_boaster_moves_a_moving_average_by_a_hundredth_and_a_round_by_its_one_voice() -> None:
    prior = torch.full((4,), 0.25)
    claims = [torch.tensor([0, 5, 5, 5])] * 9 + [torch.tensor([1e30, 0, 0, 0])]
    assert float(updated_prior(prior, claims, "ema", 0.99)[0]) <= 0.25 * 0.99 + 0.01 + 1e-6
    assert float(updated_prior(prior, claims, "round", 0.99)[0]) == pytest.approx(0.1)


# The client


class World(NamedTuple):
    parts: Parts
    net: Net
    down: Known
    data: ClientData

    @property
    def method(self) -> ProxyFL:
        assert isinstance(self.parts.method, ProxyFL)
        return self.parts.method


SURE = 0.8
PRIOR = torch.tensor([0.28, 0.35, 0.37])


def world(labels: str = "clients", local: dict[str, Any] | None = None, **options: Any) -> World:
    """A client whose received model has opinions of all kinds; its network is in evaluation mode."""
    parts = toy_parts(
        toy_recipe(
            "proxyfl", labels, {"method": options, "local": local or {}, "model": {"width": [8, 8, 16]}}, rounds=2
        )
    )
    net, data = place_of(parts).net, parts.scenario.client(CLIENT)
    net.recalibrate(data.views.plain(data.images[data.unlabelled]))
    features = data.plain_outputs(net).features
    spread = 0.5 * noise(11, 3, 16).float() / features.std(dim=0).clamp(min=0.1)
    net.load({"classifier.weight": spread, "classifier.bias": -spread @ features.mean(dim=0)})
    return World(parts, net, Known(net.state(), PRIOR), data)


def first_step(here: World) -> tuple[Batch, Const]:
    """The first batch of the client, with the network in training mode and moved on from what was received."""
    local = here.method.prepare(here.net, here.down, here.data, None, Visit(0, 1, CLIENT))
    moved = {name: tensor + 0.03 * noise(3, *tensor.shape) for name, tensor in here.net.named_parameters().items()}
    # Surer than the received model, so that their opinions on being sure differ too.
    here.net.load({name: tensor.detach() * (2 if "classifier" in name else 1) for name, tensor in moved.items()})
    batch = next(iter(batches(local.data, Budget(1, None, 8, 2), (0, 1, CLIENT))))
    here.net.network.train()
    return batch, local.const


def probabilities(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def loss_by_loop(here: World, batch: Batch) -> tuple[float, float, float]:
    """Supervised term, consistency and contrast, from two plain forward passes."""
    method, x, u = here.method, batch.labelled, batch.unlabelled
    with torch.no_grad():
        student: Output = here.net.network(torch.cat([x.weak, u.weak, u.strong]))
        frozen = place_of(here.parts).net
        frozen.load(here.down.weights)
        teacher = probabilities(frozen(torch.cat([x.weak, u.weak])).logits.double().numpy())
    log_p = np.log(probabilities(student.logits.double().numpy()))
    n, m, truth = len(x), len(u), x.labels.tolist()
    supervised = -float(np.mean([log_p[i][truth[i]] for i in range(n)]))
    q, p = teacher[n:], np.exp(log_p[n : n + m])
    sure = [bool(row.max() >= method.threshold) for row in q]
    if method.confidence == "either":
        sure = [one or bool(row.max() >= method.threshold) for one, row in zip(sure, p, strict=True)]
    consistency = -sum(log_p[n + m + i][q[i].argmax()] for i in range(m) if sure[i]) / m

    prior = PRIOR.double().tolist()
    if method.labelled_rows == "truth":
        known = [{label} for label in truth]
    else:
        certain = [bool(row.max() >= method.threshold) for row in teacher[:n]]
        known = sets_by_loop(teacher[:n], certain, prior, method.categories)
    unknown = sets_by_loop(q, sure, prior, method.categories)
    omega = here.net.network.state_dict()["classifier.weight"].double().numpy()
    features = student.features.double().numpy()
    if method.projections:
        state = {name: tensor.double().numpy() for name, tensor in here.net.network.state_dict().items()}
        features = features @ state["heads.embedding.weight"].T + state["heads.embedding.bias"]
        omega = omega @ state["heads.proxy_embedding.weight"].T
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    proxy = omega / np.linalg.norm(omega, axis=1, keepdims=True)
    weights = q if method.positive_weights == "global" else p
    positive = []
    for i in range(m):
        if sure[i]:
            positive.append(proxy[q[i].argmax()])
        else:
            positive.append(np.sum([weights[i][c] * proxy[c] for c in unknown[i]], axis=0))
    values = pool_by_loop(unit, known + unknown + unknown, np.array(positive + positive))
    high = [value for value, one in zip(values, sure + sure, strict=True) if one]
    low = [value for value, one in zip(values, sure + sure, strict=True) if not one]
    means = [sum(part) / max(len(part), 1) for part in ([values] if method.means == "one" else [high, low])]
    return supervised, consistency, sum(means)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"confidence": "received"},
    {"labelled_rows": "truth"},
    {"positive_weights": "local"},
    {"means": "separate"},
    {"projections": False},
    {"categories": 1},
    {"categories": 2},
    {
        "confidence": "received",
        "labelled_rows": "truth",
        "positive_weights": "local",
        "means": "separate",
        "projections": False,
    },
]


def values_of(here: World) -> tuple[float, float, float]:
    batch, const = first_step(here)
    terms = here.method.loss(here.net, batch, const).terms
    return terms["supervised"].item(), terms["consistency"].item(), terms["contrast"].item()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "authors")
def test_the_loss_number_by_number(options: dict[str, Any]) -> None:
    here = world(threshold=SURE, contrast_weight=0.7, unlabelled_weight=0.6, **options)
    batch, const = first_step(here)
    loss = here.method.loss(here.net, batch, const)
    assert loss.pseudo is not None
    assert 0 < int(loss.pseudo.used.sum()) < len(batch.unlabelled), "both sure and unsure rows are needed"
    expected = loss_by_loop(here, batch)
    found = [loss.terms[name].item() for name in ("supervised", "consistency", "contrast")]
    assert found == pytest.approx(expected, rel=1e-4)
    assert loss.value.item() == pytest.approx(expected[0] + 0.6 * expected[1] + 0.7 * expected[2], rel=1e-4)


def test_every_option_changes_the_loss() -> None:
    plain = values_of(world(threshold=SURE))
    for options in OPTIONS[1:]:
        assert values_of(world(threshold=SURE, **options)) != pytest.approx(plain, rel=1e-5), options


def test_gradients_reach_backbone_heads_and_proxies_but_no_teacher() -> None:
    here = world(threshold=SURE)
    batch, const = first_step(here)
    views = here.net.joint(batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong)
    q = opinion(const.net(batch.unlabelled.weak).logits.softmax(dim=1), 0.5)
    seen = opinion(const.net(batch.labelled.weak).logits.softmax(dim=1), 0.5)
    contrast(here.net, views, Rows(seen, q, q.probabilities), Pool(PRIOR, "prior", "one")).backward()
    reached = {name for name, tensor in here.net.named_parameters().items() if tensor.grad is not None}
    assert reached == set(here.net.named_parameters()) - {"classifier.bias"}
    assert all(tensor.grad is None for tensor in const.net.network.parameters())


def test_a_pool_without_negatives_is_nothing_to_learn_from() -> None:
    here = world(threshold=SURE)
    batch, _ = first_step(here)
    views = here.net.joint(batch.labelled.weak, batch.unlabelled.weak, batch.unlabelled.strong)
    alike = opinion(torch.tensor([[0.4, 0.5, 0.1]]).repeat(len(batch.unlabelled), 1), 0.5)
    seen = opinion(torch.tensor([[0.4, 0.5, 0.1]]).repeat(len(batch.labelled), 1), 0.5)
    value = contrast(here.net, views, Rows(seen, alike, alike.probabilities), Pool(PRIOR, "prior", "one"))
    assert float(value) == 0.0
    assert not value.requires_grad


def answer_of(here: World) -> Answer:
    return client_round(place_of(here.parts), Task(1, CLIENT, 0.05, None), here.down, here.data)


def test_a_client_without_labels_learns_from_the_pool_alone() -> None:
    """And without it, where no label is trusted, not at all."""
    learnt = answer_of(world("server", threshold=1.0))
    assert float(learnt.up.samples) > 0
    assert learnt.record.terms["contrast"] > 0
    assert learnt.record.terms["consistency"] == 0
    assert learnt.up.counts.tolist() == [0, 0, 0]
    here = world("server", threshold=1.0, contrast_weight=0.0)
    idle = answer_of(here)
    assert float(idle.up.samples) == 0
    assert all(torch.equal(tensor, here.down.weights[name]) for name, tensor in idle.up.weights.items())


def test_a_client_with_labels_alone_is_supervised() -> None:
    here = world()
    bare = here._replace(data=here.data._replace(unlabelled=here.data.unlabelled[:0]))
    answer = answer_of(bare)
    assert "contrast" not in answer.record.terms
    assert answer.record.terms["supervised"] > 0
    assert answer.up.counts.tolist() == here.data.labels.bincount(minlength=3).tolist(), "an epoch sees each label once"


@pytest.mark.parametrize("budget", [{"epochs": 3}, {"steps": 11}, {"steps": 2}])
def test_counts_are_those_of_the_last_epoch_or_of_as_many_last_steps(budget: dict[str, int]) -> None:
    here = world(
        local={"epochs": None, "unlabelled_ratio": 1, **budget} if "steps" in budget else budget, threshold=SURE
    )
    place = place_of(here.parts)
    visit = Visit(0, 1, CLIENT)
    local = here.method.prepare(here.net, here.down, here.data, None, visit)
    course = Course(place.budget, visit, place.optimiser, None)
    fitted = here.method.train(here.net, local, course)
    up = here.method.report(here.net, local, fitted)
    epoch = course.epoch(here.data)
    drawn = list(batches(here.data, place.budget, visit))
    assert epoch > 2
    last = min(epoch, len(drawn))
    expected = [0, 0, 0]
    for batch, labels in list(zip(drawn, fitted.pseudo, strict=True))[-last:]:
        for label in [*batch.labelled.labels.tolist(), *labels.label[labels.used].tolist()]:
            expected[label] += 1
    assert up.counts.tolist() == expected
    assert up.counts.tolist() == answer_of(here).up.counts.tolist()


# Limits


def plain_parts(method: str, **options: Any) -> Parts:
    return toy_parts(toy_recipe(method, "clients", {"method": options}, rounds=2))


OFF: dict[str, Any] = {"contrast_weight": 0.0, "tuning": "off"}


def test_without_its_two_parts_and_by_the_received_model_it_is_fixmatch_gpl(tmp_path: Path) -> None:
    ours = run_toy(plain_parts("proxyfl", **OFF, confidence="received"), tmp_path / "ours")
    theirs = run_toy(plain_parts("fixmatch-gpl"), tmp_path / "theirs")
    assert equal_weights(ours.weights, theirs.weights)


def test_without_its_two_parts_it_is_sage_with_the_received_models_say(tmp_path: Path) -> None:
    ours = run_toy(plain_parts("proxyfl", **OFF), tmp_path / "ours")
    theirs = run_toy(plain_parts("sage", mixing=0.0), tmp_path / "theirs")
    assert equal_weights(ours.weights, theirs.weights)


def test_no_steps_of_tuning_are_no_tuning(tmp_path: Path) -> None:
    off, none, on = (
        run_toy(plain_parts("proxyfl", **options), tmp_path / name)
        for name, options in (("off", {"tuning": "off"}), ("none", {"tuning_steps": 0}), ("on", {}))
    )
    assert equal_weights(off.weights, none.weights)
    assert not equal_weights(off.weights, on.weights)
    assert off.rounds[1]["proxy_scale"] == 1.0
    assert on.rounds[1]["proxy_scale"] != 1.0


# The server


def replies(here: World, counts: tuple[float, ...]) -> list[Reply]:
    names = here.net.trained_names()
    return [
        Reply(
            {n: here.down.weights[n] + 0.1 * noise(seed, *here.down.weights[n].shape).float() for n in names},
            torch.tensor(count),
            torch.tensor([4, 0, 6]),
        )
        for seed, count in enumerate(counts)
    ]


def test_one_round_of_the_server_by_hand() -> None:
    here = world()
    ups, site = replies(here, (30.0, 10.0)), site_of(here.parts)
    after = here.method.aggregate(here.down, ups, site)
    for name in here.net.trained_names():
        average = 0.75 * ups[0].weights[name].double() + 0.25 * ups[1].weights[name].double()
        if name != "classifier.weight":
            torch.testing.assert_close(after.weights[name], average.float())
    rows = [up.weights["classifier.weight"] for up in ups]
    average = 0.75 * rows[0] + 0.25 * rows[1]
    torch.testing.assert_close(after.weights["classifier.weight"], tuned(average, rows, AUTHORS, stream()))
    torch.testing.assert_close(after.prior, 0.99 * PRIOR + 0.01 * torch.tensor([0.4, 0.0, 0.6]))
    assert site.notes["prior"] == after.prior.tolist()
    assert here.method.broadcast(after) == after


def test_a_client_with_nothing_to_tell_does_not_pull_at_the_proxies() -> None:
    here = world()
    ups = replies(here, (30.0, 10.0, 0.0))
    with_idle = here.method.aggregate(here.down, ups, site_of(here.parts))
    without = here.method.aggregate(here.down, ups[:2], site_of(here.parts))
    assert equal_weights(with_idle.weights, without.weights)


def test_nobody_answered() -> None:
    here = world()
    after = here.method.aggregate(here.down, [], site_of(here.parts))
    assert equal_weights(after.weights, here.down.weights)
    assert torch.equal(after.prior, PRIOR)


def test_the_first_prior_is_uniform() -> None:
    here = world()
    assert here.method.setup(here.net.state(), site_of(here.parts)).prior.tolist() == pytest.approx([1 / 3] * 3)


# The network


@pytest.mark.parametrize("options", [{"projections": False}, {"contrast_weight": 0.0}])
def test_heads_that_are_not_used_are_not_built_and_not_sent(options: dict[str, Any]) -> None:
    bare, whole = world(**options), world()
    assert list(bare.net.network.heads) == []
    assert sorted(whole.net.network.heads) == ["embedding", "proxy_embedding"]
    more = size_in_bytes(answer_of(whole).up) - size_in_bytes(answer_of(bare).up)
    assert more == 4 * (16 * 16 + 16 + 16 * 16), "16 features: W_f with bias, W_p without"


def test_heads_have_the_authors_size() -> None:
    recipe = load_recipe("sage/table1-cifar10-a0.1", ["method=proxyfl"])
    net = build_net(recipe, recipe.build_method(), (3, 32, 32), 10)
    assert sum(tensor.numel() for tensor in net.network.parameters()) == 1_358_922


def test_a_network_whose_rows_and_features_cannot_be_compared_is_refused() -> None:
    deep = toy_parts(toy_recipe("proxyfl", "clients", {"model": {"head": "mlp2(6)"}}))
    with pytest.raises(UserError, match=r"model\.head: .*use 'linear'"):
        deep.method.setup(place_of(deep).net.state(), site_of(deep))
    uneven = toy_parts(toy_recipe("proxyfl", "clients", {"model": {"heads": {"embedding": "linear(5)"}}}))
    with pytest.raises(UserError, match=r"model\.heads\.proxy_embedding: its 8 outputs .* the 5 of"):
        uneven.method.setup(place_of(uneven).net.state(), site_of(uneven))


def test_a_deep_classifier_can_be_tuned_without_a_pool(tmp_path: Path) -> None:
    recipe = toy_recipe(
        "proxyfl", "clients", {"model": {"head": "mlp2(6)"}, "method": {"contrast_weight": 0.0}}, rounds=1
    )
    outcome = run_toy(toy_parts(recipe), tmp_path / "run")
    assert outcome.rounds[1]["proxy_scale"] != 1.0


@pytest.mark.parametrize(
    ("key", "value"), [("categories", 0), ("categories", "top"), ("tuning", True), ("tuning_steps", -1)]
)
def test_mistakes_name_their_key(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"method\.{key}"):
        toy_recipe("proxyfl", "clients", {"method": {key: value}})


@pytest.mark.parametrize(
    "options", [{"tuning": "rescale"}, {"tuning_batch": 4, "tuning_steps": 100, "anchor": "global"}, {"prior": "round"}]
)
def test_options_run(options: dict[str, Any], tmp_path: Path) -> None:
    outcome = run_toy(plain_parts("proxyfl", **options), tmp_path / "run")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in outcome.weights.values())
    assert sum(outcome.rounds[-1]["prior"]) == pytest.approx(1)
    assert outcome.rounds[-1]["loss"]["contrast"] > 0


def test_the_recipe_of_a_thousand_clients() -> None:
    recipe = load_recipe("proxyfl/fashion-1000")
    assert (recipe.scenario.clients, recipe.clients_per_round, recipe.method["name"]) == (1000, 20, "proxyfl")
