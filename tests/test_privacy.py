"""Differential privacy: clipping and means in loops, noise as large as told, ε against a second computation."""

import json
import math
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from semifed.assembly import prepare_run
from semifed.client_round import Reply
from semifed.errors import ClientFailure, UserError
from semifed.payloads import Up
from semifed.privacy import Privacy, clipped_change, private_mean, private_update, spent, system_noise
from semifed.recipe import check_recipe
from semifed.run import execute
from semifed.wire import Weights
from test_flower import model_of, rounds_of
from test_golden import recipe_tables
from toys import Quiet, equal_weights

RECEIVED: Weights = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[0.5]]), "n": torch.tensor(3)}


def update(a: list[float], b: float, samples: float = 5.0) -> Up:
    weights = {"a": RECEIVED["a"] + torch.tensor(a), "b": RECEIVED["b"] + b, "n": torch.tensor(8)}
    return Up(weights, torch.tensor(samples))


def flat(weights: Weights) -> np.ndarray:
    return np.concatenate([weights["a"].double().numpy(), weights["b"].double().numpy().ravel()])


def test_a_change_is_clipped_over_all_weights_together() -> None:
    change = clipped_change(update([3.0, 0.0], 4.0).weights, RECEIVED, 2.0)
    np.testing.assert_allclose(change["a"], [1.2, 0.0], rtol=1e-6)
    np.testing.assert_allclose(change["b"], [[1.6]], rtol=1e-6)
    assert set(change) == {"a", "b"}  # counters carry no change
    small = clipped_change(update([0.3, 0.0], 0.4).weights, RECEIVED, 2.0)
    np.testing.assert_allclose(small["a"], [0.3, 0.0], rtol=1e-6)
    still = clipped_change(RECEIVED, RECEIVED, 2.0)
    assert float(still["a"].abs().sum()) == 0.0


def test_the_mean_in_loops_where_there_is_no_noise() -> None:
    changes = [([3.0, 0.0], 4.0), ([0.3, 0.1], 0.0), ([0.0, -9.0], 0.0)]
    updates = [update(a, b) for a, b in changes]
    expected = np.zeros(3)
    for a, b in changes:
        row = np.array([*a, b])
        expected += row * min(1.0, 2.0 / np.sqrt((row**2).sum()))
    found = private_mean(updates, RECEIVED, Privacy("central", 2.0, 0.0, 1e-5), cohort=4)  # one did not answer
    for one in found:
        np.testing.assert_allclose(flat(one.weights) - flat(RECEIVED), expected / 4, rtol=1e-5, atol=1e-7)
        assert int(one.weights["n"]) == 3
        assert float(one.samples) == 1.0
        assert one.weights is found[0].weights  # not a copy for each of a large cohort
    assert private_mean([], RECEIVED, Privacy("central", 2.0, 0.0, 1e-5), cohort=4) == []


def test_a_client_clips_its_own_change_and_tells_no_count() -> None:
    found = private_update(update([3.0, 0.0], 4.0), RECEIVED, Privacy("local", 2.0, 0.0, 1e-5))
    np.testing.assert_allclose(flat(found.weights) - flat(RECEIVED), [1.2, 0.0, 1.6], rtol=1e-5)
    assert int(found.weights["n"]) == 3
    assert float(found.samples) == 1.0


def test_noise_is_as_large_as_told_and_never_the_same() -> None:
    one, two = (system_noise(0.7, (200, 200)) for _ in range(2))
    assert float(one.std()) == pytest.approx(0.7, rel=0.02)
    assert float(one.mean()) == pytest.approx(0.0, abs=0.02)
    assert float(torch.corrcoef(torch.stack([one.flatten(), two.flatten()]))[0, 1]) == pytest.approx(0.0, abs=0.03)


def test_noise_of_the_mean_and_of_a_client() -> None:
    start: Weights = {"w": torch.zeros(300, 300)}
    still = [Up({"w": torch.zeros(300, 300)}, torch.tensor(1.0))] * 5
    mean = private_mean(still, start, Privacy("central", 2.0, 3.0, 1e-5), cohort=10)[0]
    assert float(mean.weights["w"].std()) == pytest.approx(2.0 * 3.0 / 10, rel=0.02)
    alone = private_update(still[0], start, Privacy("local", 2.0, 3.0, 1e-5))
    assert float(alone.weights["w"].std()) == pytest.approx(6.0, rel=0.02)


def renyi_epsilon(multiplier: float, times: int, delta: float) -> float:
    """ε of repeated Gaussian noise from its Rényi divergence α / 2σ², by the conversion of Canonne et al. (2020)."""
    best = math.inf
    for alpha in np.concatenate([1 + np.arange(1, 100) / 10, np.arange(11, 64), [128, 256, 512, 1024]]):
        divergence = times * alpha / (2 * multiplier**2)
        best = min(best, divergence + math.log1p(-1 / alpha) - math.log(delta * alpha) / (alpha - 1))
    return best


@pytest.mark.parametrize(("noise", "rounds"), [(4.0, 10), (10.0, 50), (2.0, 1)])
def test_epsilon_without_sampling_by_a_second_way(noise: float, rounds: int) -> None:
    expected = renyi_epsilon(noise / 2, rounds, 1e-5)
    everyone = spent(Privacy("central", 1.0, noise, 1e-5), clients=8, cohort=8, rounds=rounds, visits=rounds)
    alone = spent(Privacy("local", 1.0, noise, 1e-5), clients=80, cohort=8, rounds=1000, visits=rounds)
    assert everyone == pytest.approx(expected, rel=0.01)
    assert alone == pytest.approx(everyone)


def test_epsilon_falls_with_noise_and_with_the_share_of_clients() -> None:
    def central(noise: float, cohort: int, rounds: int = 20) -> float:
        setting = Privacy("central", 1.0, noise, 1e-5)
        return spent(setting, clients=1000, cohort=cohort, rounds=rounds, visits=rounds)

    assert central(4.0, 10) < central(2.0, 10) < central(2.0, 100) < central(2.0, 1000)
    assert central(2.0, 10, rounds=20) < central(2.0, 10, rounds=40)
    assert math.isinf(central(0.0, 10))


def test_epsilon_of_cohorts_that_are_drawn() -> None:
    """Each round counts, whoever was in it; what drawing gains lies between a share of all and nothing."""

    def central(visits: int, *, cohort: int = 10) -> float:
        return spent(Privacy("central", 1.0, 2.0, 1e-5), clients=1000, cohort=cohort, rounds=200, visits=visits)

    assert central(6) == central(200) == pytest.approx(1.75, abs=0.01)
    dp = pytest.importorskip("dp_accounting")
    rdp = pytest.importorskip("dp_accounting.rdp")
    ledger = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    one_round = dp.SampledWithoutReplacementDpEvent(1000, 10, dp.GaussianDpEvent(1.0))
    for _ in range(200):
        ledger.compose(one_round)
    assert central(6) == pytest.approx(ledger.get_epsilon(1e-5))
    # Everybody in every round: nothing is drawn, and again it is rounds that count.
    assert central(3, cohort=1000) == pytest.approx(renyi_epsilon(1.0, 200, 1e-5), rel=0.01)


def run_with(out: Path, method: str, **privacy: Any) -> Path:
    recipe = check_recipe({**recipe_tables(method), "rounds": 2, "privacy": privacy})
    execute(prepare_run(recipe), out, Quiet())
    return out


@pytest.mark.parametrize("mode", ["central", "local"])
def test_a_private_run_says_what_it_is_worth(mode: str, tmp_path: Path) -> None:
    one, two = (run_with(tmp_path / name, "fedavg", mode=mode, noise=2.0, clip=0.5) for name in ("one", "two"))
    told = json.loads((one / "summary.json").read_text())["privacy"]
    assert told["mode"] == mode
    assert 0 < told["epsilon"] < 100
    visits = Counter(client for record in rounds_of(one) for client in record["clients"])
    if told["mode"] == "central":
        known = renyi_epsilon(told["noise"] / 2, max(visits.values()), told["delta"])
        assert told["epsilon_known_cohorts"] == pytest.approx(known, rel=0.02)
    else:
        assert "epsilon_known_cohorts" not in told
    assert told["delta"] == 1e-5
    assert not equal_weights(model_of(one), model_of(two))  # seeds do not decide the noise


def test_what_a_refused_update_told_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every client is asked twice and refused once: its second update left it all the same."""
    half = cycle([(0, 1), (2, 3)])

    def refuse(answers: list[Reply], down: Any) -> list[Reply | ClientFailure]:
        refused = next(half)
        return [ClientFailure(one.record.client, "refused") if one.record.client in refused else one for one in answers]

    monkeypatch.setattr("semifed.run.believable", refuse)
    recipe = {**recipe_tables("fedavg"), "rounds": 2, "clients_per_round": 4, "privacy": {"mode": "local", "noise": 2}}
    told = execute(prepare_run(check_recipe(recipe)), tmp_path / "out", Quiet())["privacy"]
    assert told["epsilon"] == pytest.approx(renyi_epsilon(2 / 2, 2, told["delta"]), rel=0.02)


def test_a_defence_before_the_noise_is_refused(tmp_path: Path) -> None:
    recipe = check_recipe({**recipe_tables("fedavg"), "privacy": {"mode": "central"}, "defence": {"steps": "median"}})
    with pytest.raises(UserError, match=r'^privacy.mode: after a defence .* defence.steps = "none", or privacy'):
        execute(prepare_run(recipe), tmp_path / "out", Quiet())
    assert not (tmp_path / "out").exists()


def test_methods_that_report_more_than_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="openfl also sends alignment, directions, which no noise would cover"):
        run_with(tmp_path / "out", "openfl", mode="central")
    assert not (tmp_path / "out").exists()
