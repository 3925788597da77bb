"""Defences and attackers: each step against plain NumPy loops, and whole runs with hostile clients."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semifed.adversary import Attack, attackers, corrupted, poisoned
from semifed.assembly import prepare_run
from semifed.client_round import ClientRecord, Reply
from semifed.errors import UserError
from semifed.payloads import Down, Up, Visit
from semifed.recipe import check_recipe
from semifed.replies import checked
from semifed.robust import TOGETHER, absurd, change_norms, defence, krum_scores, refuse_idle, squared_distances
from semifed.run import execute
from semifed.wire import Weights
from test_flower import model_of, rounds_of
from test_golden import recipe_tables
from toys import Quiet, equal_weights, toy_dataset, toy_parts, toy_recipe

RECEIVED: Weights = {"w": torch.tensor([[1.0, -2.0], [0.5, 0.0]]), "n": torch.tensor(7)}


def update(change: list[float], samples: float = 10.0, counter: int = 9) -> Up:
    moved = RECEIVED["w"] + torch.tensor(change).view(2, 2)
    return Up({"w": moved, "n": torch.tensor(counter)}, torch.tensor(samples))


def random_updates(count: int, seed: int = 0) -> list[Up]:
    rng = np.random.default_rng(seed)
    return [update(row.tolist()) for row in rng.normal(size=(count, 4))]


def after(steps: str, updates: list[Up]) -> list[Up]:
    for step in defence(steps):
        updates = step(updates, RECEIVED)
    return updates


def rows(updates: list[Up]) -> np.ndarray:
    return np.stack([one.weights["w"].double().numpy().ravel() for one in updates])


def test_norms_in_loops() -> None:
    updates = random_updates(4)
    start = RECEIVED["w"].numpy().ravel()
    expected = [sum((row[i] - start[i]) ** 2 for i in range(4)) for row in rows(updates)]
    counter = (9 - 7) ** 2
    np.testing.assert_allclose(change_norms(updates, RECEIVED), np.sqrt(np.array(expected) + counter), rtol=1e-6)


@pytest.mark.parametrize("count", [3, 4, 7])
def test_the_median_is_numpys(count: int) -> None:
    updates = random_updates(count)
    np.testing.assert_allclose(
        rows(after("median", updates)), np.tile(np.median(rows(updates), axis=0), (count, 1)), rtol=1e-6
    )


@pytest.mark.parametrize(("share", "dropped"), [("0.1", 1), ("0.25", 2), ("0.4", 4)])
def test_the_trimmed_mean_in_loops(share: str, dropped: int) -> None:
    updates = random_updates(10)
    columns = rows(updates).T
    expected = [np.mean(sorted(column)[dropped : 10 - dropped]) for column in columns]
    np.testing.assert_allclose(rows(after(f"trimmed({share})", updates))[3], expected, rtol=1e-6)


@pytest.mark.parametrize("steps", ["median", "trimmed(0.2)"])
@pytest.mark.parametrize("count", [6, 7])
def test_large_weights_are_compared_in_parts(steps: str, count: int) -> None:
    """As many as are compared at once, one fewer, one more, and several times as many."""
    generator = torch.Generator().manual_seed(count)
    sizes = {"few": TOGETHER - 1, "as many": TOGETHER, "more": TOGETHER + 1, "most": 3 * TOGETHER + 5}
    updates = [
        Up({name: torch.randn(size, generator=generator) for name, size in sizes.items()}, torch.tensor(1.0))
        for _ in range(count)
    ]
    (step,) = defence(steps)
    found = step(updates, updates[0].weights)[0].weights
    for name in sizes:
        stack = np.sort(np.stack([one.weights[name].double().numpy() for one in updates]), axis=0)
        middle = np.median(stack, axis=0) if steps == "median" else stack[1:-1].mean(axis=0)
        np.testing.assert_allclose(found[name].numpy(), middle, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("hostile", [0, 1, 3])
def test_krums_scores_in_loops(hostile: int) -> None:
    models = np.random.default_rng(3).normal(size=(8, TOGETHER + 5))
    weights = [{"a": torch.from_numpy(row[:-3]), "b": torch.from_numpy(row[-3:]).view(1, 3)} for row in models]
    expected = []
    for i in range(8):
        distances = sorted(((models[i] - models[j]) ** 2).sum() for j in range(8) if j != i)
        expected.append(sum(distances[: 8 - hostile - 2]))
    np.testing.assert_allclose(krum_scores(squared_distances(weights), hostile), expected, rtol=1e-9)


def test_krum_leaves_out_the_far_ones() -> None:
    near = random_updates(8)
    far = [update([50.0, 50.0, 50.0, 50.0]), update([-60.0, 0.0, 0.0, 0.0])]
    assert [id(one) for one in after("multi-krum(0.2)", [far[0], *near, far[1]])] == [id(one) for one in near]
    (one,) = after("krum(0.2)", [far[0], *near, far[1]])
    assert any(one is other for other in near)


def test_clipping_shortens_the_longest_alone() -> None:
    updates = [update([1.0, 0, 0, 0], counter=7), update([0, 2.0, 0, 0], counter=7), update([0, 0, 8.0, 0], counter=7)]
    found = after("clip", updates)
    assert found[0] is updates[0]
    assert found[1] is updates[1]
    np.testing.assert_allclose(rows(found)[2] - RECEIVED["w"].numpy().ravel(), [0, 0, 2, 0], atol=1e-6)
    np.testing.assert_allclose(rows(after("clip(2)", updates))[2] - RECEIVED["w"].numpy().ravel(), [0, 0, 4, 0])


def test_clients_that_learnt_nothing_do_not_lower_the_limit() -> None:
    idle = [update([0.0] * 4, samples=0.0)] * 3
    found = after("clip", [*idle, update([1.0, 0, 0, 0], counter=7), update([2.0, 0, 0, 0], counter=7)])
    np.testing.assert_allclose(rows(found)[3:, 0] - float(RECEIVED["w"][0, 0]), [1, 1], atol=1e-6)


@given(st.lists(st.integers(1, 10**9), min_size=3, max_size=9), st.sampled_from(["counts", "counts(3)"]))
def test_claims_beyond_the_median_are_cut(claims: list[int], steps: str) -> None:
    """Whatever one client claims, a mean by counts listens to it as to a few usual ones at most."""
    updates = [update([1.0, 0, 0, 0], samples=float(claim)) for claim in claims]
    factor = 3 if "3" in steps else 1
    limit = factor * sorted(float(torch.tensor(float(claim))) for claim in claims)[(len(claims) - 1) // 2]
    found = [float(one.samples) for one in after(steps, updates)]
    assert found == pytest.approx([min(float(claim), limit) for claim in claims], rel=1e-6)
    assert all(torch.equal(a.weights["w"], b.weights["w"]) for a, b in zip(after(steps, updates), updates, strict=True))
    assert max(found) / sum(found) <= factor / (factor + len(claims) // 2) + 1e-6


def test_who_learnt_nothing_does_not_lower_the_usual_claim() -> None:
    idle = [update([0.0] * 4, samples=0.0)] * 4
    found = after("counts", [*idle, update([1.0, 0, 0, 0], samples=50.0), update([1.0, 0, 0, 0], samples=70.0)])
    assert [float(one.samples) for one in found] == [0.0] * 4 + [50.0, 50.0]
    assert after("counts", idle) == idle


@given(
    st.integers(3, 9),
    st.sampled_from(["clip", "counts", "median", "trimmed(0.2)", "krum", "multi-krum"]),
    st.integers(0, 99),
)
def test_equal_updates_stay_as_they_are(count: int, steps: str, seed: int) -> None:
    one = random_updates(1, seed)[0]
    for found in after(steps, [one] * count):
        assert equal_weights(found.weights, one.weights)


@pytest.mark.parametrize("steps", ["median", "trimmed(0.3)", "multi-krum(0.3)", "clip"])
def test_a_minority_cannot_move_a_defended_mean_far(steps: str) -> None:
    honest = random_updates(7)
    for size in (1e2, 1e4):
        hostile = [update([size] * 4) for _ in range(3)]
        mean = rows(after(steps, honest + hostile)).mean(axis=0)
        assert np.abs(mean - RECEIVED["w"].numpy().ravel()).max() < 5.0


def test_who_learnt_nothing_has_no_say() -> None:
    updates = [*random_updates(3), update([9.0, 9.0, 9.0, 9.0], samples=0.0)]
    np.testing.assert_allclose(rows(after("median", updates))[0], np.median(rows(updates[:3]), axis=0), rtol=1e-6)
    assert after("median", updates)[3] is updates[3]
    assert after("krum", updates[:2]) == updates[:2]  # nobody can tell who of two is right
    idle = [update([0.0] * 4, samples=0.0)] * 3
    for steps in ("median", "clip", "krum", "trimmed"):
        assert after(steps, idle) == idle


def test_sizes_beyond_belief_are_refused() -> None:
    updates = [*random_updates(4), update([1e4, 0, 0, 0])]
    faults = absurd(updates, RECEIVED)
    assert faults[:4] == [None] * 4
    assert "it changes the weights by 1e+04, most others by" in str(faults[4])
    assert absurd(updates[-2:], RECEIVED) == [None, None]  # of two nobody can tell
    assert absurd([], RECEIVED) == []


@pytest.mark.parametrize("size", [1e9, 1e25, 3e38])
def test_sizes_that_no_training_has_are_refused_whoever_else_answers(size: float) -> None:
    hostile, honest = update([size, 0, 0, 0]), random_updates(1)
    told = f"it changes the weights by {size:.3g}, which no training does"
    assert absurd([*honest, hostile], RECEIVED) == [None, told]
    assert absurd([hostile], RECEIVED) == [told]
    assert absurd([hostile] * 3, RECEIVED) == [told] * 3


@given(
    exponents=st.lists(st.integers(-30, 30), min_size=3, max_size=6),
    idle=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)
def test_a_rough_look_refuses_whom_exact_norms_refuse(exponents: list[int], idle: int, seed: int) -> None:
    drawn = np.random.default_rng(seed)
    received = {"w": torch.zeros(50), "v": torch.zeros(2, 3)}
    changes = [drawn.normal(size=56) * 10.0**exponent for exponent in exponents]
    updates = [
        Up(
            {"w": torch.tensor(change[:50], dtype=torch.float32), "v": torch.tensor(change[50:]).float().view(2, 3)},
            torch.tensor(float(place >= idle)),
        )
        for place, change in enumerate(changes)
    ]
    norms = [np.sqrt(sum(float(x) ** 2 for part in one.weights.values() for x in part.flatten())) for one in updates]
    learnt = sorted(norms[idle:])
    usual = learnt[(len(learnt) - 1) // 2]
    expected = [(len(learnt) >= 3 and norm > 100 * usual > 0) or norm > 1e8 for norm in norms]
    near = any(abs(norm / (100 * usual) - 1) < 1e-4 for norm in norms if usual > 0)
    near |= any(abs(norm / 1e8 - 1) < 1e-4 for norm in norms)
    assert near or [fault is not None for fault in absurd(updates, received)] == expected


@pytest.mark.parametrize(
    ("kind", "share", "method", "labels", "told"),
    [
        ("label-flip", 0.5, "fixmatch-lpl", "server", "no client holds a label that could be flipped"),
        ("lie", 0.5, "fixmatch-lpl", "clients", "report nothing to lie about"),
        ("sign-flip", 0.05, "fixmatch-lpl", "clients", "0.05 of 4 clients is nobody; 0.25 is one"),
    ],
)
def test_attacks_that_would_change_nothing_are_refused(
    kind: str, share: float, method: str, labels: str, told: str
) -> None:
    recipe = toy_recipe(method, labels, {"attack": {"kind": kind, "share": share}})
    with pytest.raises(UserError, match=told):
        prepare_run(recipe, toy_dataset())


def test_openfls_clients_have_something_to_lie_about() -> None:
    prepare_run(toy_recipe("openfl", "server", {"attack": {"kind": "lie", "share": 0.5}}), toy_dataset())


@pytest.mark.parametrize(
    ("text", "told"),
    [("medain", "did you mean 'median'"), ("trimmed(0.7)", "out of range"), ("clip(", "there is no 'clip('")],
)
def test_misspelt_defences_are_told(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told.replace("(", r"\(")):
        defence(text)


@pytest.mark.parametrize(
    ("steps", "clients", "told"),
    [
        ("trimmed(0.2)", 4, "trimmed(0.2) of 4 clients a round leaves nobody out; trimmed(0.25) would"),
        ("clip(1) trimmed", 7, "trimmed of 7 clients a round leaves nobody out; trimmed(0.15) would"),
        ("multi-krum", 3, "multi-krum of 3 clients a round leaves nobody out; multi-krum(0.34) would"),
        ("median", 2, "median needs 3 clients a round at least, there are 2"),
        ("krum(0.1)", 1, "krum(0.1) needs 3 clients a round at least, there are 1"),
    ],
)
def test_a_defence_that_keeps_nobody_out_is_refused(steps: str, clients: int, told: str) -> None:
    tables = {**recipe_tables("fedavg"), "clients_per_round": clients, "defence": {"steps": steps}}
    tables["scenario"] = {**tables["scenario"], "clients": 9}
    with pytest.raises(UserError, match=f"^defence.steps: {re.escape(told)}$"):
        check_recipe(tables)


@given(st.integers(3, 300), st.sampled_from(["trimmed", "multi-krum"]))
def test_the_share_that_is_proposed_keeps_somebody_out(clients: int, name: str) -> None:
    with pytest.raises(UserError) as refused:
        refuse_idle(defence(f"{name}(0)"), clients)
    proposed = str(refused.value).split("; ")[1].removesuffix(" would")
    refuse_idle(defence(proposed), clients)


@pytest.mark.parametrize(("share", "count", "left"), [("0.29", 100, 29), ("0.07", 100, 7), ("0.3", 10, 3)])
def test_a_share_of_clients_is_not_one_less_for_rounding(share: str, count: int, left: int) -> None:
    """0.29 times 100 is 28.999999999999996."""
    assert len(after(f"multi-krum({share})", random_updates(count))) == count - left


@pytest.mark.parametrize("steps", ["trimmed(0.2)", "multi-krum(0.2)"])
def test_a_round_that_clients_are_missing_from_is_still_defended(steps: str) -> None:
    """A fifth of five clients is one; of the three that answered it would be none."""
    refuse_idle(defence(steps), 5)
    updates = [update([0.1, 0.0, 0.0, 0.0]), update([0.2, 0.0, 0.0, 0.0]), update([9.0, 9.0, 9.0, 9.0])]
    expected = np.array([[1.2, -2.0, 0.5, 0.0]]) if steps.startswith("trimmed") else rows(updates[:2])
    np.testing.assert_allclose(np.unique(rows(after(steps, updates)), axis=0), np.unique(expected, axis=0), rtol=1e-6)
    two = rows(after("trimmed(0.2)", updates[:2]))  # of two nobody can tell who is wrong
    np.testing.assert_allclose(two[0], rows(updates[:2]).mean(axis=0), rtol=1e-6)


# Attackers


def attack(kind: Any, scale: float = 1.0) -> Attack:
    return Attack(kind, frozenset({1}), scale, 3)


def test_attackers_are_a_fixed_share_of_the_clients() -> None:
    found = attackers(0, 20, 0.3)
    assert len(found) == 6
    assert found == attackers(0, 20, 0.3)
    assert found != attackers(1, 20, 0.3)
    assert attackers(0, 20, 0.0) == frozenset()


def test_what_attackers_send() -> None:
    honest, visit = update([1.0, 2.0, 3.0, 4.0]), Visit(0, 1, 1)
    start = RECEIVED["w"].numpy().ravel()
    flipped = corrupted(honest, RECEIVED, attack("sign-flip", 2.0), visit)
    np.testing.assert_allclose(rows([flipped])[0] - start, [-2, -4, -6, -8], atol=1e-6)
    lazy = corrupted(honest, RECEIVED, attack("free-rider"), visit)
    assert equal_weights(lazy.weights, RECEIVED)
    assert float(lazy.samples) == 10.0
    noisy = corrupted(honest, RECEIVED, attack("noise", 3.0), visit)
    assert not equal_weights(noisy.weights, honest.weights)
    assert equal_weights(noisy.weights, corrupted(honest, RECEIVED, attack("noise", 3.0), visit).weights)
    assert not equal_weights(noisy.weights, corrupted(honest, RECEIVED, attack("noise", 3.0), Visit(0, 2, 1)).weights)


def test_noise_is_as_long_as_asked_for() -> None:
    big: Weights = {"w": torch.zeros(100, 100)}
    honest = Up({"w": torch.full((100, 100), 0.5)}, torch.tensor(1.0))
    noise = corrupted(honest, big, attack("noise", 4.0), Visit(0, 1, 1)).weights["w"]
    assert float(noise.square().mean().sqrt()) == pytest.approx(2.0, rel=0.05)


def test_a_lie_claims_the_best_of_what_a_method_believes() -> None:
    from semifed.methods.openfl import Reply

    honest = Reply(RECEIVED, torch.tensor(5.0), torch.tensor(1.7), torch.ones(3, 2))
    lie = corrupted(honest, RECEIVED, attack("lie"), Visit(0, 1, 1))
    assert float(lie.alignment) == 0.0
    assert float(lie.samples) == 5.0
    assert torch.equal(lie.directions, honest.directions)


def test_flipped_labels() -> None:
    data = toy_parts(toy_recipe("fedavg", "clients")).scenario.client(1)
    assert torch.equal(poisoned(data, attack("label-flip")).labels, 2 - data.labels)
    assert torch.equal(poisoned(data, attack("noise")).labels, data.labels)


# Whole runs


def run_with(out: Path, method: str = "fedavg", workers: int = 1, **tables: Any) -> Path:
    recipe = check_recipe({**recipe_tables(method), "rounds": 2, "engine": {"workers": workers}, **tables})
    execute(prepare_run(recipe), out, Quiet())
    return out


@pytest.mark.slow
@pytest.mark.parametrize("method", ["openfl", "sage", "proxyfl", "fedmatch", "fedlpa"])
@pytest.mark.parametrize("steps", ["clip median", "trimmed(0.34)", "multi-krum(0.34)"])
def test_every_defence_goes_with_every_kind_of_method(method: str, steps: str, tmp_path: Path) -> None:
    attacked = {"kind": "sign-flip", "share": 0.25, "scale": 3.0}
    out = run_with(tmp_path / "out", method, attack=attacked, defence={"steps": steps})
    assert all(torch.isfinite(tensor).all() for tensor in model_of(out).values())


@pytest.mark.slow
def test_the_order_of_a_clients_weights_means_nothing() -> None:
    """Whoever swaps two layers of one shape in order and content looked like all others to Krum."""
    received = {"one": torch.zeros(3), "two": torch.zeros(3)}
    weights = {"one": torch.ones(3), "two": -torch.ones(3)}
    swapped = {"two": torch.ones(3), "one": -torch.ones(3)}
    up = Up(swapped, torch.ones(()))
    told = Reply(up, None, ClientRecord(0, 1, 1, {}, None, 0.0))
    (answer,) = checked([told], Down(received), list(received), {})
    assert isinstance(answer, Reply)
    assert list(answer.up.weights) == list(received)
    honest = [Up(weights, torch.ones(())) for _ in range(4)]
    (chosen,) = defence("krum(0.2)")[0]([*honest, answer.up], received)
    assert torch.equal(chosen.weights["one"], torch.ones(3))


def test_attacks_do_not_depend_on_workers(tmp_path: Path) -> None:
    attacked = {"kind": "noise", "share": 0.5, "scale": 2.0}
    one, two = (run_with(tmp_path / str(n), workers=n, attack=attacked) for n in (1, 2))
    assert equal_weights(model_of(one), model_of(two))
    assert not equal_weights(model_of(one), model_of(run_with(tmp_path / "honest")))


def test_an_absurd_update_is_refused_and_counted(tmp_path: Path) -> None:
    attacked = {"kind": "sign-flip", "share": 0.25, "scale": 1e5}
    records = rounds_of(run_with(tmp_path / "out", attack=attacked, clients_per_round=4))
    (liar,) = attackers(0, 4, 0.25)
    for record in records[1:]:
        assert liar not in record["clients"]
        assert [failure["client"] for failure in record["failures"]] == [liar]
        assert "it changes the weights by" in record["failures"][0]["reason"]
