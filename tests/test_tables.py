"""`results/tables.py`: what stands in `results/` is what the run directories say."""

import csv
import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

SCRIPT = Path(__file__).parents[1] / "results" / "tables.py"
main = runpy.run_path(str(SCRIPT))["main"]


def write_run(path: Path, method: str, seed: int, accuracy: float, *, minutes: float = 2, **changes: Any) -> None:
    tables: dict[str, Any] = {
        "dataset": "digits",
        "seed": seed,
        "scenario": {"classes": "open", "partition": "dirichlet", "alpha": 0.1, **changes.get("scenario", {})},
        "model": {"batchnorm": "auto", **changes.get("model", {})},
        "method": {"name": method, **changes.get("fields", {})},
        "engine": {"workers": seed},
    }
    tables["scenario"] = {key: value for key, value in tables["scenario"].items() if value is not None}
    metrics = {"accuracy": accuracy, "auroc_seen": accuracy / 2, "current.accuracy": 0.1}
    summary = {
        "method": method,
        "metrics": metrics,
        "metrics_last10": {
            "accuracy": changes.get("ten", accuracy - 0.01),
            "auroc_seen": 0.25,
            "current.accuracy": 0.125,
            "other": 0.5,
        },
        "seconds": 60 * minutes,
        "bytes_up": 5,
    }
    lines = [{"round": 0, "metrics": {"accuracy": 0.2}}, {"round": 1, "metrics": {}}, {"round": 2, "metrics": metrics}]
    path.mkdir(parents=True)
    (path / "recipe.toml").write_text(tomli_w.dumps(tables))
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "rounds.jsonl").write_text("\n".join(map(json.dumps, lines)))


def write_runs(top: Path, method: str, ends: dict[int, float], **changes: Any) -> None:
    for seed, end in ends.items():
        write_run(top / str(len(list(top.glob("*")))), method, seed, end, **changes)


class Tables:
    """Runs the script and reads back what it printed and wrote."""

    def __init__(self, top: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.top, self._capsys = top, capsys

    def make(self, *arguments: str, floor: str = "server-only", ceiling: str = "fedavg-sl") -> list[dict[str, str]]:
        stem = self.top.parent / "out"
        main([str(stem), str(self.top), "--floor", floor, "--ceiling", ceiling, *arguments])
        self.text = self._capsys.readouterr().out
        lines = [line.split("|")[1:-1] for line in self.text.split("\n\n")[0].splitlines() if line.startswith("| ")]
        titles, *rows = [[cell.strip() for cell in line] for line in lines]
        self.csv = list(csv.DictReader(stem.with_suffix(".csv").read_text().splitlines()))
        self.curves = list(csv.DictReader(stem.with_suffix(".curves.csv").read_text().splitlines()))
        return [dict(zip(titles, row, strict=True)) for row in rows]


@pytest.fixture
def tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Tables:
    (tmp_path / "runs").mkdir()
    return Tables(tmp_path / "runs", capsys)


def closed(rows: list[dict[str, str]], *keys: str) -> dict[tuple[str, ...], str]:
    return {tuple(row[key] for key in (*keys, "method")): row["gap closed, %"] for row in rows}


def test_one_line_a_method_and_scenario(tables: Tables) -> None:
    floor, ceiling, own = np.array([0.4, 0.6]), np.array([0.8, 0.8]), np.array([0.5, 0.75])
    write_runs(tables.top, "server-only", dict(enumerate(floor)))
    write_runs(tables.top, "fedavg-sl", dict(enumerate(ceiling)))
    write_runs(tables.top, "openfl", dict(enumerate(own)), minutes=4.5)
    write_runs(tables.top, "openfl", {0: 0.7}, scenario={"partition": "iid", "alpha": None})
    rows = tables.make("--vary", "scenario.partition", "--vary", "scenario.alpha")
    shares = 100 * (own - floor) / (ceiling - floor)
    gains = 100 * (own - floor)
    assert rows[0] == {
        "scenario.partition": "dirichlet",
        "scenario.alpha": "0.1",
        "method": "openfl",
        "seeds": "2",
        "accuracy, last round": f"{100 * own.mean():.1f} ± {100 * own.std(ddof=1):.1f}",
        "accuracy, last ten tests": f"{100 * own.mean() - 1:.1f} ± {100 * own.std(ddof=1):.1f}",
        "auroc_seen, last round": f"{50 * own.mean():.1f} ± {50 * own.std(ddof=1):.1f}",
        "auroc_seen, last ten tests": "25.0 ± 0.0",
        "gain over server-only": f"{gains.mean():+.1f} ± {gains.std(ddof=1):.1f}",
        "gap closed, %": f"{shares.mean():.0f} ± {shares.std(ddof=1):.0f}",
        "minutes": "4.5",
    }
    order = [(row["scenario.partition"], row["scenario.alpha"], row["method"]) for row in rows]
    assert order == [
        ("dirichlet", "0.1", "openfl"),
        ("dirichlet", "0.1", "server-only"),
        ("dirichlet", "0.1", "fedavg-sl"),
        ("iid", "–", "openfl"),
    ]
    assert [row["gap closed, %"] for row in rows[1:]] == ["", "100 ± 0", ""]


def test_gains_may_be_those_of_the_last_ten_tests(tables: Tables) -> None:
    write_runs(tables.top, "server-only", {0: 0.4}, ten=0.5)
    write_runs(tables.top, "fedavg-sl", {0: 0.9}, ten=0.7)
    write_runs(tables.top, "openfl", {0: 0.45}, ten=0.6)
    assert closed(tables.make())[("openfl",)] == "10"
    row = tables.make("--last-ten")[0]
    assert (row["method"], row["gain over server-only"], row["gap closed, %"]) == ("openfl", "+10.0", "50")


def test_what_pairs_is_used(tables: Tables) -> None:
    write_runs(tables.top, "server-only", {0: 0.2, 1: 0.2, 2: 0.2})
    write_runs(tables.top, "fedavg-sl", {1: 0.6})
    write_runs(tables.top, "openfl", {0: 0.9, 1: 0.3, 2: 0.9})
    (row,) = [row for row in tables.make() if row["method"] == "openfl"]
    assert row["gap closed, %"] == "25 (1 of 3 seeds)"
    assert row["gain over server-only"].startswith("+50.0")


def test_scenarios_do_not_lend_each_other_a_ceiling(tables: Tables) -> None:
    for alpha, ceiling in ((0.1, 0.6), (10.0, 0.8), (2.0, None)):
        write_runs(tables.top, "server-only", {0: 0.4}, scenario={"alpha": alpha})
        write_runs(tables.top, "openfl", {0: 0.5}, scenario={"alpha": alpha})
        if ceiling:
            write_runs(tables.top, "fedavg-sl", {0: ceiling}, scenario={"alpha": alpha})
    found = closed(tables.make("--vary", "scenario.alpha"), "scenario.alpha")
    assert [found[alpha, "openfl"] for alpha in ("0.1", "2", "10")] == ["50", "", "25"]
    assert [key[0] for key in found] == ["0.1"] * 3 + ["2"] * 2 + ["10"] * 3


def test_a_ceiling_with_all_labels_serves_every_budget(tables: Tables) -> None:
    for budget, floor in ((20, 0.4), (100, 0.6)):
        write_runs(tables.top, "fedavg", {0: floor}, scenario={"labelled_per_class": budget})
        write_runs(tables.top, "sage", {0: 0.7}, scenario={"labelled_per_class": budget})
    write_runs(tables.top, "fedavg-sl", {0: 0.8}, scenario={"labelled_per_class": 100})
    rows = tables.make("--vary", "scenario.labelled_per_class", floor="fedavg")
    found = closed(rows, "scenario.labelled_per_class")
    assert (found["20", "sage"], found["100", "sage"]) == ("75", "50")


def test_labels_tell_variants_apart(tables: Tables) -> None:
    write_runs(tables.top, "openfl", {0: 0.5}, fields={"statistic": "gated", "threshold": 0.95})
    write_runs(tables.top, "openfl", {0: 0.6}, fields={"statistic": "all", "threshold": 0.9})
    write_runs(tables.top, "fedssb", {0: 0.6}, model={"batchnorm": "tracked"})
    write_runs(tables.top, "fedssb", {0: 0.6}, scenario={"classes": "known"})
    write_runs(tables.top, "server-only", {0: 0.4})
    write_runs(tables.top, "fedavg-sl", {0: 0.8}, fields={"ema": 0.9})
    found = closed(tables.make())
    assert found == {
        ("fedavg-sl ema=0.9",): "100",
        ("fedssb batchnorm=tracked",): "50",
        ("fedssb classes=known",): "50",
        ("openfl",): "25",
        ("openfl statistic=all threshold=0.9",): "50",
        ("server-only",): "",
    }
    assert {row["method"] for row in tables.csv} == {label for (label,) in found}
    varied = closed(tables.make("--vary", "method.statistic", "--vary", "method.threshold"), "method.statistic")
    assert ("all", "openfl") in varied  # what has a column of its own leaves the label


def test_what_all_runs_share_is_not_in_their_labels(tables: Tables) -> None:
    for method, end in (("fedavg", 0.4), ("sage", 0.5), ("fedavg-sl", 0.8)):
        write_runs(tables.top, method, {0: end}, scenario={"classes": "known"}, model={"batchnorm": "tracked"})
    assert closed(tables.make(floor="fedavg")) == {("fedavg",): "", ("sage",): "25", ("fedavg-sl",): "100"}


def test_of_two_ceilings_the_stronger_counts(tables: Tables) -> None:
    write_runs(tables.top, "server-only", {0: 0.2})
    write_runs(tables.top, "openfl", {0: 0.5})
    write_runs(tables.top, "fedavg-sl", {0: 0.6})
    write_runs(tables.top, "fedavg-sl", {0: 0.8}, fields={"ema": 0.9})
    assert closed(tables.make())["openfl",] == "50"
    assert closed(tables.make(ceiling="openfl"))["fedavg-sl",] == "133"


def test_small_and_negative_gaps_are_told(tables: Tables) -> None:
    for alpha, ceiling in ((0.1, 0.45), (1.0, 0.3), (5.0, 0.9)):
        write_runs(tables.top, "server-only", {0: 0.4}, scenario={"alpha": alpha})
        write_runs(tables.top, "fedavg-sl", {0: ceiling}, scenario={"alpha": alpha})
    rows = tables.make("--vary", "scenario.alpha")
    assert "Gap at 0.1: floor and ceiling are only 5.0 points apart" in tables.text
    assert "Gap at 1: the ceiling is not above the floor" in tables.text
    assert "Gap at 5" not in tables.text
    assert closed(rows, "scenario.alpha")["1", "fedavg-sl"] == ""


def test_runs_that_differ_in_silence_are_refused(tables: Tables) -> None:
    write_runs(tables.top, "openfl", {0: 0.5})
    write_runs(tables.top, "openfl", {0: 0.6}, scenario={"alpha": 1.0})
    with pytest.raises(SystemExit, match=r"give --vary for what they differ in: scenario\.alpha$"):
        tables.make()
    assert len(tables.make("--vary", "scenario.alpha")) == 2


def test_files_hold_every_run_and_round(tables: Tables) -> None:
    write_runs(tables.top, "openfl", {0: 0.5, 1: 0.6})
    tables.make()
    assert [(row["seed"], row["accuracy"], row["current.accuracy"]) for row in tables.csv] == [
        ("0", "0.5000", "0.1000"),
        ("1", "0.6000", "0.1000"),
    ]
    assert [row["accuracy_last10"] for row in tables.csv] == ["0.4900", "0.5900"]
    assert [row["current.accuracy_last10"] for row in tables.csv] == ["0.1250", "0.1250"]
    assert "other_last10" not in tables.csv[0], "nobody asked for it"
    assert [(row["metric"], row["round"], row["openfl digits"]) for row in tables.curves] == [
        ("accuracy", "0", "0.2000"),
        ("accuracy", "2", "0.5500"),
        ("auroc_seen", "2", "0.2750"),
    ]


def test_runs_may_join_those_of_an_earlier_table(tables: Tables) -> None:
    write_runs(tables.top, "server-only", {0: 0.4, 1: 0.3})
    write_runs(tables.top, "fedavg-sl", {0: 0.8, 1: 0.7}, fields={"ema": 0.9})
    write_runs(tables.top, "openfl", {0: 0.5, 1: 0.6, 2: 0.9})
    arguments = ("--vary", "scenario.partition", "--vary", "scenario.alpha")
    together = tables.make(*arguments)
    lines, curves = tables.csv, tables.curves
    late = [path for path in sorted(tables.top.iterdir()) if 'name = "openfl"' in (path / "recipe.toml").read_text()]
    late[0].rename(tables.top.parent / "elsewhere")  # seed 0 joins the others later
    tables.make(*arguments)
    shutil.rmtree(tables.top)
    (tables.top.parent / "elsewhere").rename(tables.top)
    assert tables.make(*arguments, "--add") == together
    assert (tables.csv, tables.curves) == (lines, curves)
    with pytest.raises(SystemExit, match=r"out\.csv already has openfl, seed 0, which .*runs would add"):
        tables.make(*arguments, "--add")


def test_what_all_joining_runs_have_in_common_still_sets_them_apart(tables: Tables) -> None:
    write_run(tables.top / "a", "openfl", 0, 0.9)
    tables.make()
    shutil.rmtree(tables.top / "a")
    write_run(tables.top / "b", "openfl", 0, 0.7, model={"batchnorm": "averaged"})
    assert [row["method"] for row in tables.make("--add")] == ["openfl", "openfl batchnorm=averaged"]


def test_rounds_to_a_level_by_one_test_and_by_five_in_a_row(tables: Tables) -> None:
    write_run(tables.top / "a", "openfl", 0, 0.9)
    accuracies = [0.1, 0.2, 0.6, 0.2, 0.4, 0.6, 0.7, 0.8]  # of rounds 0 to 7; touches 60 early by luck
    lines = [{"round": number, "metrics": {"accuracy": value}} for number, value in enumerate(accuracies)]
    (tables.top / "a" / "rounds.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows = []
    for add in ((), ("--add",)):
        if add:
            shutil.rmtree(tables.top / "a")  # curves of an earlier table serve as well
        tables.make("--reach", "20,50,60,95", *add)
        rows.append(tables.text.splitlines()[-1])
    windows = np.convolve(accuracies[1:], np.ones(5) / 5, "valid")  # rounds 5, 6, 7
    assert windows.tolist() == pytest.approx([0.4, 0.5, 0.54])
    assert rows == ["| digits | openfl | 1 | 1 / 5 | 2 / 6 | 2 / – | – / – |"] * 2
