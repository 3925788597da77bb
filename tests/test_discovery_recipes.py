"""Recipes of category discovery: the paper's scale key by key, and the number of classes that methods are told."""

import math
from pathlib import Path
from typing import Any

import pytest

from semifed.assembly import optimiser, prepare_run
from semifed.methods.fed_simgcd import FedSimGCD
from semifed.methods.fedlpa import FedLPA
from semifed.recipe_file import load_recipe
from semifed.run import execute
from semifed.rundir import RunDirectory
from semifed.schedule import schedule_factor
from toys import Quiet, place_of, toy_dataset, toy_parts, toy_recipe

WARMUP, DISCOVERY = 20, 50


@pytest.mark.parametrize("alpha", [0.2, 0.05])
@pytest.mark.parametrize(("dataset", "known"), [("cifar10", 5), ("cifar100", 50)])
def test_recipes_at_the_papers_scale_say_what_the_specification_says(dataset: str, known: int, alpha: float) -> None:
    recipe = load_recipe(f"fedlpa/{dataset}-a{alpha:g}")
    assert recipe.dataset == dataset
    assert recipe.rounds == WARMUP + DISCOVERY
    assert recipe.cohort_size == recipe.scenario.clients == 5
    scenario = recipe.scenario
    assert (scenario.labels, scenario.classes, scenario.partition) == ("clients", "novel", "balanced-dirichlet")
    assert (scenario.alpha, scenario.known_count, scenario.labelled_fraction) == (alpha, known, 0.5)
    assert scenario.validation_fraction == 0.1
    assert (recipe.model.name, recipe.model.input_size, recipe.model.head) == ("vit", 224, "cosine")
    assert (recipe.evaluate.discover, recipe.evaluate.discover_images) == ("test", 10_000), "all of them"
    local = recipe.local
    assert (local.epochs, local.batch, local.unlabelled_ratio) == (1, 64, 1), "64 + 64 is a batch of 128"
    assert (local.lr, local.momentum, local.clip) == (0.1, 0.9, 10.0)
    assert (local.weight_decay, optimiser(recipe).spares_vectors) == (5e-5, True)
    assert not local.keep_optimizer
    for round_ in range(recipe.rounds):
        passed = max(round_ - WARMUP, 0)
        least = 1e-4
        rate = least + 0.5 * (0.1 - least) * (1 + math.cos(math.pi * passed / DISCOVERY))
        assert 0.1 * schedule_factor(local.schedule, round_, recipe.rounds) == pytest.approx(rate)
    method = recipe.build_method()
    assert isinstance(method, FedLPA)
    assert method.warmup_rounds == WARMUP
    assert (method.unsupervised_share, method.percentile, method.refresh) == (0.65, 50, 1)
    assert (method.divergence, method.prior_weight, method.smoothing) == ("kl", 0.5, 0.5)
    assert (method.supervised_temperature, method.unsupervised_temperature) == (0.07, 1.0)
    temperatures = method.student_temperature, method.first_teacher_temperature, method.teacher_temperature
    assert (*temperatures, method.teacher_rounds) == (0.1, 0.07, 0.04, 30)
    assert method.refine == "clique"
    assert 10 <= method.partners <= 20
    assert 0.5 <= method.least_similarity <= 0.6
    assert method.labelled_share == 0.5
    assert method.heads == {"projection": "mlp3(2048, 256, gelu)"}


@pytest.mark.parametrize("alpha", [0.2, 0.05])
def test_rows_without_a_recipe_are_reached_by_the_overrides_of_the_manual(alpha: float, tmp_path: Path) -> None:
    simgcd = ["method=fed-simgcd", "method.entropy_weight=4"]
    assert load_recipe(f"fedlpa/cifar100-a{alpha:g}", simgcd).build_method() == FedSimGCD(entropy_weight=4.0)
    ten = load_recipe(f"fedlpa/cifar10-a{alpha:g}", ["scenario.clients=10"])
    assert ten.cohort_size == ten.scenario.clients == 10
    pets = load_recipe(f"fedlpa/cifar10-a{alpha:g}", [f"dataset={tmp_path}", "scenario.known_count=19"])
    birds = load_recipe(f"fedlpa/cifar10-a{alpha:g}", [f"dataset={tmp_path}", "scenario.known=[1, 0, 7]"])
    assert (pets.scenario.known_count, birds.scenario.known) == (19, (1, 0, 7))


@pytest.mark.parametrize("method", ["fed-gcd", "fed-simgcd", "fed-agcl"])
def test_methods_that_need_it_are_told_how_many_novel_classes_there_are(method: str) -> None:
    many = toy_dataset(per_class=12, classes=12)
    parts = toy_parts(toy_recipe(method, "clients"), many)
    chosen: Any = parts.method
    assert chosen.novel == 12 - 3
    assert parts.recipe.plain()["method"]["novel"] == 9, "written out, it runs again as it is"
    said = toy_parts(toy_recipe(method, "clients", {"method": {"name": method, "novel": 2}}), many).method
    assert said.novel == 2  # type: ignore[attr-defined]
    if method == "fed-simgcd":
        rows = place_of(parts).net.state()["heads.novel.weight"]
        assert len(rows) == 9


def test_a_run_that_was_told_is_still_the_run_of_its_recipe(tmp_path: Path) -> None:
    recipe = load_recipe("fedlpa/digits-mini", ["method=fed-gcd", "rounds=1", "engine.workers=1"])
    summary = execute(prepare_run(recipe), tmp_path / "run", Quiet())
    assert summary["metrics"]["clusters"] == 10
    finished = RunDirectory(tmp_path / "run").finished(recipe)
    assert finished is not None
    assert finished["metrics"] == summary["metrics"]
    again = load_recipe(str(tmp_path / "run" / "recipe.toml"))
    assert RunDirectory(tmp_path / "run").finished(again) is not None
