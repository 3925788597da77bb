"""Category discovery from a shipped recipe to its table: what a whole run finds, and how runs become lines."""

import csv
import json
import runpy
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import tomli_w

from semifed.assembly import prepare_run
from semifed.recipe_file import load_recipe
from semifed.run import execute
from toys import Quiet

SCRIPTS = Path(__file__).parents[1] / "results" / "discovery"
main = runpy.run_path(str(SCRIPTS / "table.py"))["main"]


@pytest.mark.slow
def test_a_run_on_digits_finds_the_classes_nobody_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Specification 7.4: bounds that a broken part would break, none on who is ahead of whom."""
    parts = prepare_run(load_recipe("fedlpa/digits-mini", ["seed=1"]))
    execute(parts, tmp_path / "run", Quiet())
    metrics = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    rounds = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    classes = len(parts.scenario.dataset.classes)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        priors = runpy.run_path(str(SCRIPTS / "priors.py"))["read"](tmp_path / "run")
    assert metrics["all"] > 0.6, "chance is a tenth"
    assert metrics["new"] > 0.6, "also where no label ever was"
    assert metrics["plus.all"] > 0.6
    assert metrics["accuracy"] > 0.85, "the classifier of known classes"
    assert classes / 2 <= metrics["clusters"] <= 2 * classes
    assert metrics["kmeans.clusters"] == classes, "which is told their number"

    late = rounds[-5:]
    held = [len(parts.scenario.dataset.y_train[holding.unlabelled].unique()) for holding in parts.scenario.holdings]
    found = statistics.mean(record["loss"]["concepts"] for record in late)
    assert statistics.mean(held) / 2 <= found <= 2 * statistics.mean(held)
    assert priors["classes"] == statistics.mean(held), "the concepts of the checkpoint are those of the same images"
    assert priors["concepts"] == rounds[-1]["loss"]["concepts"]
    assert priors["pure"] > 0.7
    for record in late:
        assert record["gate"]["purity"] > 0.7, "a third of the unlabelled images are of known classes"
        assert record["gate"]["pass_known"] > 4 * record["gate"]["pass_unknown"]


def write_run(
    path: Path,
    seed: int,
    found: float,
    purity: tuple[float, ...] = (0.5, 0.5),
    lr: float = 0.1,
    rounds: int = 35,
    **fields: Any,
) -> None:
    method = {"name": "fedlpa", "warmup_rounds": 10, **fields}
    recipe = {
        "dataset": "digits",
        "rounds": rounds,
        "seed": seed,
        "scenario": {"partition": "balanced-dirichlet", "alpha": 0.2},
        "method": method,
        "local": {"epochs": 1, "lr": lr},
    }
    metrics = {"all": found, "old": found, "new": found, "clusters": 12, "nmi": 0.5, "accuracy": 0.9}
    metrics |= {"infomap.all": found, "infomap.new": found}
    summary = {"metrics": metrics, "seconds": 3.0}
    records: list[dict[str, Any]] = [{"loss": {}}] * 3  # of warm-up
    records += [
        {"loss": {"concepts": 8 + 2 * (number % 2)}, "gate": {"purity": share, "pass_known": 0.25}}
        for number, share in enumerate(purity)
    ]
    path.mkdir()
    (path / "recipe.toml").write_text(tomli_w.dumps(recipe))
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "rounds.jsonl").write_text("\n".join(map(json.dumps, records)))
    counts = {"labelled": [0, 0, 0, 4], "known": [0, 2, 0, 2], "novel": [0, 0, 0, 0]}
    confidence = {"bins": [0.0, 0.25, 0.5, 0.75, 1.0], "counts": counts}
    (path / "discovery.json").write_text(json.dumps({"confidence": confidence}))


def table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> list[list[str]]:
    """The printed lines, cell by cell."""
    monkeypatch.setattr("sys.argv", ["table.py", *map(str, arguments)])
    main()
    lines = capsys.readouterr().out.splitlines()[2:]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]


def test_other_rates_and_teachers_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "usual", 0, 0.5, teacher_rounds=15.0)
    write_run(tmp_path / "slow", 0, 0.6, lr=0.02)
    write_run(tmp_path / "other recipe's", 0, 0.8, lr=0.03)
    write_run(tmp_path / "late", 0, 0.7, teacher_rounds=25.0)
    write_run(tmp_path / "cold", 0, 0.4, warmup_rounds=0)
    write_run(tmp_path / "cold and as short", 0, 0.3, rounds=25, warmup_rounds=0)
    lines = table(monkeypatch, capsys, tmp_path / "table", *(path for path in tmp_path.iterdir()))
    assert {line[2]: line[4] for line in lines} == {
        "fedlpa": "50.0",
        "fedlpa lr=0.02": "60.0",
        "fedlpa lr=0.03": "80.0",
        "fedlpa teacher_rounds=25": "70.0",
        "fedlpa warmup_rounds=0": "40.0",
        "fedlpa warmup_rounds=0 rounds=25": "30.0",
    }


def test_later_runs_join_a_table_whose_runs_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stem, first, second, other = (tmp_path / name for name in ("table", "first", "second", "other"))
    write_run(first, 0, 0.5)
    write_run(second, 1, 0.7)
    write_run(other, 0, 0.4, refine="none")
    before = table(monkeypatch, capsys, stem, first)
    assert before == [["1", "0.2", "fedlpa", "1", "50.0", "50.0", "50.0", "12.0", "50.0 / 50.0", "/", "/"]]

    shutil.rmtree(first)
    after = table(monkeypatch, capsys, stem, "--add", second, other)
    assert [line[2:5] for line in after] == [["fedlpa", "2", "60.0 ± 14.1"], ["fedlpa refine=none", "1", "40.0"]]
    rows = list(csv.DictReader(stem.with_suffix(".csv").read_text().splitlines()))
    assert [(row["method"], row["seed"], row["own.all"]) for row in rows] == [
        ("fedlpa", "0", "0.5"),
        ("fedlpa", "1", "0.7"),
        ("fedlpa refine=none", "0", "0.4"),
    ]
    assert {(float(row["concepts"]), float(row["purity"]), float(row["pass_known"])) for row in rows} == {
        (9, 0.5, 0.25)
    }

    sure = [tuple(row[f"sure.{kind}"] for kind in ("labelled", "known", "novel")) for row in rows]
    assert sure == [("0.875", "0.5", "")] * 3  # the middle of the last quarter; the end of the second; nobody's
    again = table(monkeypatch, capsys, stem, "--add")
    assert again == after, "nothing is lost by reading it again"


def test_purity_is_told_for_the_first_and_the_last_rounds_of_discovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stem, before, after = (tmp_path / name for name in ("table", "before", "after"))
    write_run(before, 0, 0.5)
    write_run(after, 1, 0.5, purity=(0.9,) * 10 + (0.1,) * 5 + (0.6,) * 10)
    table(monkeypatch, capsys, stem, before)
    lines = stem.with_suffix(".csv").read_text().splitlines()
    place = lines[0].split(",").index("purity_first")
    older = [",".join(cell for at, cell in enumerate(line.split(",")) if at != place) for line in lines]
    stem.with_suffix(".csv").write_text("\n".join(older))  # as it was written when there was no such column
    table(monkeypatch, capsys, stem, "--add", after)
    rows = list(csv.DictReader(stem.with_suffix(".csv").read_text().splitlines()))
    assert [(row["purity_first"], row["purity"]) for row in rows] == [("", "0.5"), ("0.9", "0.6")]


def test_the_same_run_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stem, run, copy = (tmp_path / name for name in ("table", "run", "copy"))
    write_run(run, 0, 0.5)
    write_run(copy, 0, 0.5)
    table(monkeypatch, capsys, stem, run)
    written = stem.with_suffix(".csv").read_text()
    with pytest.raises(SystemExit, match=r"the same run twice: digits, 1, 0\.2, fedlpa, 0"):
        table(monkeypatch, capsys, stem, "--add", copy)
    assert stem.with_suffix(".csv").read_text() == written


def test_a_prior_is_compared_with_the_truth_by_the_classes_of_its_concepts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five images of class 0 in two concepts, three of class 1 in one with one of class 2; the last is in none."""
    with monkeypatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        compared = runpy.run_path(str(SCRIPTS / "priors.py"))["compared"]
    member, classes = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, -1]), np.array([0, 0, 0, 0, 0, 1, 1, 1, 2, 2])
    found = compared(member, classes, 3)
    true = [5.5 / 10.5, 3.5 / 10.5, 1.5 / 10.5]
    concepts = [5.5 / 10.5, 4.5 / 10.5, 0.5 / 10.5]
    uniform = [6.5 / 10.5, 3.5 / 10.5, 0.5 / 10.5]  # two of three concepts are of class 0
    assert found["kl_concepts"] == pytest.approx(scipy.stats.entropy(true, concepts))
    assert found["kl_uniform"] == pytest.approx(scipy.stats.entropy(true, uniform))
    assert found["pure"] == pytest.approx(8 / 9)
    assert found["largest"] == pytest.approx(5 / 9)
    assert (found["concepts"], found["classes"]) == (3, 3)
