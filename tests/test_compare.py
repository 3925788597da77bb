"""`semifed compare`: grouping over seeds, means and deviations, and tables that say what they show."""

import io
import json
import re
from html.parser import HTMLParser
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from command import semifed
from semifed.errors import UserError
from semifed.report import Comparison, Row, compare_runs
from semifed.report.compare import differing_keys, spread
from semifed.report.compare_terminal import fitting
from semifed.report.compare_views import Column
from semifed.report.figures import Point
from semifed.report.gap import gap_caveat, gap_shares, gaps
from semifed.report.reach import Reach, first_reached, levels_of, reaches

Curve = list[float | None]


def write_run(
    path: Path,
    method: str = "sage",
    seed: int = 0,
    curve: Curve | None = None,
    *,
    finished: bool = True,
    metrics: dict[str, float | None] | None = None,
    fields: dict[str, float] | None = None,
    images: str = "",
    **tables: Any,
) -> Path:
    """A run tested after every round, with accuracy as in the curve and the other metrics constant."""
    accuracy: Curve = [0.5, 0.6, 0.7] if curve is None else curve
    recipe: dict[str, Any] = {
        "dataset": "digits",
        "rounds": len(accuracy) - 1 if finished else 50,
        "seed": seed,
        "scenario": {"labels": "clients", "classes": "known", "clients": 10, "partition": "dirichlet", "alpha": 0.1},
        "method": {"name": method, **(fields or {})},
        "local": {"lr": 0.03},
        "engine": {"name": "local", "workers": 2},
    }
    for name, value in tables.items():
        recipe[name] = {**recipe.get(name, {}), **value} if isinstance(value, dict) else value
    path.mkdir(parents=True)
    (path / "recipe.toml").write_text(tomli_w.dumps(recipe), encoding="utf-8")
    every = [{"accuracy": value, **(metrics or {})} for value in accuracy]
    lines = [{"round": number, "metrics": own, "bytes_up": 2e6, "seconds": 3.0} for number, own in enumerate(every)]
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if finished:
        last = {key: [own[key] for own in every[-10:]] for key in every[-1]}
        means = {key: None if None in own else np.mean(np.array(own, dtype=float)) for key, own in last.items()}
        summary = {
            "metrics": every[-1],
            "metrics_last10": means,
            "best": {"round": 1, "metric": "accuracy", "value": 0.999},
            "bytes_up": 2_500_000 + seed,
            "bytes_down": 7_000_000,
            "seconds": 60.0 + seed,
            **({"data_hash": images} if images else {}),
        }
        (path / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return path


def printed(comparison: Comparison, width: int = 100, *, all_metrics: bool = False) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    comparison.table(console, all_metrics=all_metrics)
    return console.export_text()


def page(comparison: Comparison, tmp_path: Path) -> str:
    comparison.write_html(tmp_path / "compare.html")
    return (tmp_path / "compare.html").read_text(encoding="utf-8")


def only(comparison: Comparison) -> Row:
    assert len(comparison.rows) == 1
    return comparison.rows[0]


def test_runs_of_other_images_are_not_averaged(tmp_path: Path) -> None:
    """A recipe says where images lie, not what they are: a file may have been replaced between two seeds."""
    for seed, images in enumerate(["one", "one", "another"]):
        write_run(tmp_path / f"run{seed}", seed=seed, images=images)
    write_run(tmp_path / "begun", seed=3, finished=False)
    comparison = compare_runs([tmp_path])
    assert sorted(row.seeds for row in comparison.rows) == [(0, 1), (2,), (3,)]
    told = f"not the same images behind dataset = digits: {tmp_path / 'run0'}, {tmp_path / 'run2'}; rows of one and of"
    assert [note for note in comparison.notes if note.startswith(told)] == comparison.notes
    assert "not the same images" in printed(comparison)
    alike = compare_runs([tmp_path / "run0", tmp_path / "run1"])
    assert only(alike).seeds == (0, 1)
    assert not alike.notes


def test_mean_and_deviation_over_seeds(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    curves = rng.uniform(0.4, 0.9, (3, 15))
    for seed, curve in enumerate(curves):
        write_run(tmp_path / f"run{seed}", seed=seed, curve=curve.tolist(), metrics={"auroc_seen": 0.9 + seed / 100})
    comparison = compare_runs([tmp_path])
    row = only(comparison)
    last, last10 = curves[:, -1], curves[:, -10:].mean(1)
    assert row.seeds == (0, 1, 2)
    assert row.metrics["accuracy"] == pytest.approx((last.mean(), last.std(ddof=1), 3))
    assert row.last10["accuracy"] == pytest.approx((last10.mean(), last10.std(ddof=1), 3))
    assert row.metrics["auroc_seen"] == pytest.approx((0.91, 0.01, 3))
    assert row.seconds == pytest.approx((61.0, 1.0, 3))
    assert row.megabytes_up == pytest.approx((2.500001, 1e-6, 3))
    text = printed(comparison)
    assert f"{100 * last.mean():.1f} ± {100 * last.std(ddof=1):.1f}" in text
    assert f"{100 * last10.mean():.1f} ± {100 * last10.std(ddof=1):.1f}" in text
    assert "91.0 ± 1.0" in text
    assert "1m 01s" in text
    assert "99.9" not in text  # the best test round is no result


def test_the_deviation_of_a_number_of_groups_is_rounded(tmp_path: Path) -> None:
    for seed, groups in enumerate((10.0, 12.0, 12.0)):
        write_run(tmp_path / str(seed), "fedlpa", seed, metrics={"all": 0.5, "clusters": groups})
    assert "11.33 ± 1.2" in printed(compare_runs([tmp_path]), 200)


def test_one_seed_has_no_deviation(tmp_path: Path) -> None:
    comparison = compare_runs([write_run(tmp_path / "run")])
    assert only(comparison).metrics["accuracy"].std is None
    assert "±" not in printed(comparison)
    assert re.search(r"sage\s+1\s+70\.0\s+60\.0\s", printed(comparison))


@given(st.lists(st.one_of(st.none(), st.floats(-1e3, 1e3)), max_size=8))
def test_spread_is_numpys(values: list[float | None]) -> None:
    present = np.array([value for value in values if value is not None])
    found = spread(values)
    if not present.size:
        assert found is None
        return
    assert found is not None
    assert found.n == present.size
    assert found.mean == pytest.approx(present.mean(), abs=1e-9)
    assert found.std == (None if present.size == 1 else pytest.approx(present.std(ddof=1), abs=1e-9))


def test_seed_engine_and_the_place_of_images_do_not_split_a_row(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0, engine={"workers": 1}, data="/elsewhere")
    write_run(tmp_path / "b", seed=1, engine={"name": "flower", "timeout": 9.0})
    write_run(tmp_path / "c", seed=2, local={"lr": 0.1})
    comparison = compare_runs([tmp_path])
    assert comparison.keys == ["local.lr"]
    assert sorted((row.differences["local.lr"], row.seeds) for row in comparison.rows) == [
        ("0.03", (0, 1)),
        ("0.1", (2,)),
    ]


def test_runs_are_found_at_any_depth_and_once(tmp_path: Path) -> None:
    first = write_run(tmp_path / "x" / "y" / "z" / "run", seed=0)
    write_run(first / "inner", seed=5)  # part of that run, not another
    write_run(tmp_path / "x" / "run", seed=1)
    write_run(tmp_path / "x" / ".trash" / "run", seed=2)
    (tmp_path / "x" / "recipe.toml").write_text("rounds = 1\n", encoding="utf-8")  # a recipe that was never run
    assert only(compare_runs([tmp_path, first, tmp_path / "x"])).seeds == (0, 1)


def test_paths_without_runs_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "good")
    with pytest.raises(UserError, match="empty: no run found"):
        compare_runs([tmp_path / "good", tmp_path / "empty"])
    with pytest.raises(UserError, match="missing: no such directory"):
        compare_runs([tmp_path / "missing"])
    with pytest.raises(UserError, match="nothing to compare"):
        compare_runs([])
    (tmp_path / "good" / "summary.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"good.summary\.json"):
        compare_runs([tmp_path])


def test_same_seed_twice_counts_once_and_is_told(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=3)
    write_run(tmp_path / "b", seed=3, engine={"workers": 1})
    comparison = compare_runs([tmp_path])
    assert only(comparison).seeds == (3,)
    assert "same recipe and seed" in printed(comparison, 200)
    assert str(tmp_path / "b") in comparison.notes[0]


def test_fields_of_one_method_are_no_difference_to_another(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "sage", fields={"kappa": 13.9})
    write_run(tmp_path / "b", "fedavg")
    write_run(tmp_path / "c", "fedlpa", fields={"prior": 1}, discovery={"depth": 2})
    assert compare_runs([tmp_path]).keys == []
    write_run(tmp_path / "d", "sage", fields={"kappa": 20.0})
    write_run(tmp_path / "e", "fedlpa", fields={"prior": 1}, discovery={"depth": 3})
    comparison = compare_runs([tmp_path])
    assert comparison.keys == ["method.kappa", "discovery.depth"]
    assert {row.label for row in comparison.rows} >= {"fedavg", "sage, method.kappa 13.9"}
    assert len({row.label for row in comparison.rows}) == 5


def test_presence_of_a_key_is_a_difference() -> None:
    groups = [{"scenario.fraction": 0.1, "a": 1}, {"scenario.per_class": 40, "a": 1.0}]
    assert sorted(differing_keys(groups)) == ["scenario.fraction", "scenario.per_class"]


def test_rows_are_sorted_by_scenario_then_accuracy(tmp_path: Path) -> None:
    for alpha in (10.0, 0.5, 2.0):
        for method, end in (("low", 0.6), ("high", 0.8), ("middle", 0.7)):
            write_run(tmp_path / f"{method}{alpha}", method, curve=[0.1, end], scenario={"alpha": alpha})
    comparison = compare_runs([tmp_path])
    assert [(row.differences["scenario.alpha"], row.method) for row in comparison.rows] == [
        (alpha, method) for alpha in ("0.5", "2", "10") for method in ("high", "middle", "low")
    ]
    assert comparison.keys == ["scenario.alpha"]


def test_settings_of_training_stay_in_the_block(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "sage", curve=[0.1, 0.6], local={"lr": 0.1})
    write_run(tmp_path / "b", "fedavg", curve=[0.1, 0.7], local={"lr": 0.01})
    comparison = compare_runs([tmp_path])
    assert [row.label for row in comparison.rows] == ["fedavg, local.lr 0.01", "sage, local.lr 0.1"]
    assert comparison.rows[0].block == comparison.rows[1].block == ()
    assert comparison.rows[1].behind_first == pytest.approx((-0.1, None, 1))


def test_rounds_to_a_common_accuracy(tmp_path: Path) -> None:
    write_run(tmp_path / "a0", "slow", seed=0, curve=[0.1, 0.3, 0.58, 0.58])
    write_run(tmp_path / "a1", "slow", seed=1, curve=[0.1, 0.5, 0.78, 0.78])
    write_run(tmp_path / "b0", "fast", seed=0, curve=[0.4, 0.8, 0.8, 0.8])
    comparison = compare_runs([tmp_path])
    fast, slow = comparison.rows
    # mean of the slow one over its tests: (0.1 + 0.4 + 0.68 + 0.68) / 4 = 0.465
    assert fast.target == slow.target == 0.46
    assert (fast.rounds_to_target, slow.rounds_to_target) == (1, 2)
    assert "to 46 %" in printed(comparison)


def test_whole_percents_are_not_lost_to_rounding(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "one", curve=[0.58, 0.58])
    write_run(tmp_path / "b", "two", curve=[0.6, 0.6])
    assert {row.target for row in compare_runs([tmp_path]).rows} == {0.58}
    assert {row.rounds_to_target for row in compare_runs([tmp_path]).rows} == {0}


def test_difference_to_the_first_is_paired_by_seed(tmp_path: Path) -> None:
    first, second = np.array([0.9, 0.8, 0.7]), np.array([0.85, 0.77, 0.69])
    for seed in range(3):
        write_run(tmp_path / f"a{seed}", "first", seed=seed, curve=[0.1, first[seed]])
        write_run(tmp_path / f"b{seed}", "second", seed=seed, curve=[0.1, second[seed]])
    write_run(tmp_path / "b9", "second", seed=9, curve=[0.1, 0.2])
    comparison = compare_runs([tmp_path])
    assert comparison.rows[0].behind_first is None
    difference = second - first
    assert comparison.rows[1].behind_first == pytest.approx((difference.mean(), difference.std(ddof=1), 3))
    assert "−3.0 ± 2.0" in printed(comparison, 140)


def test_unfinished_runs_stand_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0, curve=[0.5] * 51)
    write_run(tmp_path / "b", seed=1, curve=[0.1, 0.2], finished=False)
    write_run(tmp_path / "c", seed=2, curve=[0.1, 0.2, 0.3], finished=False)
    comparison = compare_runs([tmp_path])
    assert [(row.seeds, row.unfinished) for row in comparison.rows] == [((0,), ""), ((1, 2), "round 1–2 of 50")]
    assert comparison.rows[1].metrics["accuracy"].mean == pytest.approx(0.25)
    assert comparison.rows[1].behind_first is None
    assert comparison.rows[0].target is None
    text = printed(comparison)
    assert "sage †" in text
    assert "† unfinished, round 1–2 of 50: sage" in text
    assert comparison.rows[1].megabytes_up == pytest.approx((5.0, np.std([4, 6], ddof=1), 2))


def test_null_metrics_are_told_and_not_averaged_away(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "sage", seed=0, curve=[0.5, 0.8])
    write_run(tmp_path / "b", "sage", seed=1, curve=[0.5, None])
    write_run(tmp_path / "c", "gone", seed=0, curve=[None, None])
    comparison = compare_runs([tmp_path])
    assert [row.method for row in comparison.rows] == ["sage", "gone"]
    assert comparison.rows[0].metrics["accuracy"] == (0.8, None, 1)
    assert "accuracy" not in comparison.rows[1].metrics
    assert comparison.rows[0].curves["accuracy"][1].value is None
    text = printed(comparison, 120)
    assert "80.0 (1 of 2)" in text
    assert re.search(r"gone\s+1\s+–\s+–", text)
    assert "80.0 (1 of 2)" in page(comparison, tmp_path)


def many(tmp_path: Path) -> Comparison:
    metrics: dict[str, float | None] = {f"auroc_{name}": 0.9 for name in ("seen", "unseen.mnist", "overall")}
    for method in ("openfl", "fedfixmatch", "server-only"):
        for alpha in (0.1, 1.0):
            for seed in (0, 1):
                curve: Curve = [0.5, 0.6 + seed / 100]
                path = tmp_path / f"{method}{alpha}{seed}"
                write_run(path, method, seed, curve, scenario={"alpha": alpha}, metrics=metrics)
    return compare_runs([tmp_path])


@pytest.mark.parametrize("width", [80, 100, 140])
def test_table_fits_the_terminal_and_keeps_what_matters(tmp_path: Path, width: int) -> None:
    text = printed(many(tmp_path), width)
    rows = [line for line in text.splitlines() if line.startswith(("openfl", "fedfixmatch", "server-only"))]
    assert len(rows) == 6
    assert all(len(line) <= width for line in text.splitlines())
    assert all(line.count("±") >= 3 for line in rows)  # accuracy, last 10, AUROC of seen unknowns
    assert sum(line.count("±") >= 4 for line in rows) >= 4  # all but the first of a block: the difference to it
    assert ("No room for:" in text) is (width < 140)
    assert "digits: Labels at the clients; known classes only; Dirichlet over 10 clients. 12 runs" in " ".join(
        text.split()
    )


def test_a_rank_loses_no_more_columns_than_it_must() -> None:
    """*old* and *new* had left a narrow table together with the one column beside them that was too wide."""
    named = [("method", 0, 10), ("old", 2, 6), ("wide", 2, 30), ("new", 2, 6), ("seconds", 3, 3), ("all", 1, 6)]
    everything = [Column(name, name, ["x" * width], True, rank) for name, rank, width in named]

    def headings(width: int) -> list[str]:
        return [column.heading for column in fitting(everything, width)]

    assert headings(100) == [name for name, _, _ in named]
    assert headings(40) == ["method", "old", "new", "all"]  # nothing of a later rank, though it would fit
    assert headings(27) == ["method", "old", "all"]
    assert headings(5) == ["method"]


def test_very_different_recipes_leave_the_numbers_room(tmp_path: Path) -> None:
    """Twelve settings in columns of their own had pushed out the method and every metric."""
    unlike: dict[str, Any] = {"labels": "server", "clients": 100, "partition": "iid", "labelled_per_class": 40}
    local = {"lr": 0.01, "clip": 1.0, "momentum": 0.9, "batch": 128, "weight_decay": 5e-4, "steps": 30}
    further: dict[str, float | None] = {"msp.auroc_seen": 0.8}
    write_run(tmp_path / "a", "openfl", scenario=unlike, local=local, clients_per_round=10, metrics=further)
    write_run(tmp_path / "b", "sage", curve=[0.1, 0.9])
    comparison = compare_runs([tmp_path])
    text = printed(comparison, 80, all_metrics=True)
    first = text.splitlines().index(next(line for line in text.splitlines() if "accuracy" in line))
    assert all(word in text for word in ("70.0", "90.0", "openfl", "sage"))
    assert "No room for: accuracy" not in text
    assert [line.split()[:2] for line in text.splitlines()[first + 2 :] if line.strip()][:2] == [
        [str(number), row.method] for number, row in enumerate(comparison.rows, start=1)
    ]
    flowing = " ".join(text.split())
    for number, row in enumerate(comparison.rows, start=1):
        told = ", ".join(f"{key} {value}" for key, value in row.differences.items() if value != "–")
        assert f"{number}: {told}" in flowing
    wide = printed(comparison, 400)
    assert "1: " not in wide
    assert "clients_per_round" in wide


def test_very_narrow_terminal_still_prints(tmp_path: Path) -> None:
    assert "openfl" in printed(many(tmp_path), 24).replace("\n", "")


class Balanced(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.cells: list[list[str]] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("th", "td"):
            self.cells[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("th", "td"):
            self.cells[-1][-1] += " ".join(data.split())


def test_page_has_the_table_and_a_chart_per_scenario(tmp_path: Path) -> None:
    comparison = many(tmp_path)
    html = page(comparison, tmp_path)
    parsed = Balanced(html)
    tables = [list(own) for _, own in groupby(parsed.cells, key=len)]
    (heading, *rows), (further, *others) = tables
    assert heading[:5] == ["method", "scenario. alpha", "seeds", "accuracy", "last 10"]
    assert {"AUROC seen", "AUROC overall"} <= set(heading)
    assert further == ["method", "scenario. alpha", "seeds", "AUROC mnist"]
    assert len(rows) == len(others) == 6
    assert rows[0][1:4] == ["0.1", "2", "60.5 ± 0.7"]
    assert others[0][1:] == ["0.1", "2", "90.0 ± 0.0"]
    assert parsed.tags.count("svg") == 3 * 2  # accuracy and two AUROCs, in two scenarios
    assert len(re.findall(r"<h3>scenario.alpha 0\.1</h3>", html)) == 3
    assert re.search(r"https?://|<script|<link|@import", html) is None
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["compare.html"]


def test_charts_of_one_scenario_stand_together_under_their_metric(tmp_path: Path) -> None:
    write_run(tmp_path / "a", metrics={"auroc_seen": 0.9})
    html = page(compare_runs([tmp_path]), tmp_path)
    assert re.findall(r"<h3>(.*?)</h3>", html) == ["Accuracy", "AUROC, seen unknowns"]
    assert html.count('class="charts"') == 1


def test_charts_beside_each_other_share_the_axis(tmp_path: Path) -> None:
    write_run(tmp_path / "a", curve=[0.1, 0.2], scenario={"alpha": 0.1})
    write_run(tmp_path / "b", curve=[0.8, 0.9], scenario={"alpha": 1.0})
    charts = re.findall(r"<svg.*?</svg>", page(compare_runs([tmp_path]), tmp_path), flags=re.DOTALL)
    ticks = [re.findall(r">(\d+ %)<", chart) for chart in charts]
    assert len(ticks) == 2
    assert ticks[0] == ticks[1]
    assert {"20 %", "80 %"} <= set(ticks[0])


def test_a_method_keeps_its_colour_and_the_ninth_is_dashed(tmp_path: Path) -> None:
    for number in range(10):
        for alpha in (0.1, 1.0):
            # reversed ranking in the second scenario
            end = 0.5 + (number if alpha == 0.1 else -number) / 100
            write_run(tmp_path / f"{number}{alpha}", f"m{number}", curve=[0.1, end], scenario={"alpha": alpha})
    html = page(compare_runs([tmp_path]), tmp_path)
    entries = re.findall(r'swatch (dash-\d)" style="--line: var\(--(series-\d)\)"[^>]*></span>(m\d)', html)
    assert len(entries) == 20
    styles = {name: (dash, colour) for dash, colour, name in entries}
    assert len(set(entries)) == 10
    assert len(set(styles.values())) == 10
    assert styles["m0"] == ("dash-1", "series-2")  # last of ten in the first scenario


def test_band_spans_the_seeds(tmp_path: Path) -> None:
    for seed, curve in enumerate([[0.1, 0.5, 0.6], [0.3, 0.6, 0.9], [0.2, 0.7, 0.6]]):
        write_run(tmp_path / str(seed), seed=seed, curve=list(curve))
    points = only(compare_runs([tmp_path])).curves["accuracy"]
    assert points[2] == pytest.approx((2, 0.7, 0.6, 0.9))
    assert points[0] == pytest.approx((0, 0.2, 0.1, 0.3))


def test_names_are_escaped_in_page_and_terminal(tmp_path: Path) -> None:
    name = "<script>[red]x[/red]&</script>"
    write_run(tmp_path / "a", name, dataset=name, scenario={"labels": name})
    comparison = compare_runs([tmp_path])
    html = page(comparison, tmp_path)
    assert "script" not in Balanced(html).tags
    assert "&lt;script&gt;[red]x[/red]&amp;&lt;/script&gt;" in html
    assert "[red]x[/red]" in printed(comparison)


def test_novel_classes_are_ranked_by_accuracy_over_all(tmp_path: Path) -> None:
    for method, over_all in (("low", 0.5), ("high", 0.7)):
        path = write_run(tmp_path / method, method)
        metrics = {"new": 0.4, "all": over_all, "old": 0.8, "clusters": 13.0}
        lines = [{"round": number, "metrics": metrics} for number in range(3)]
        (path / "rounds.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        (path / "summary.json").write_text(
            json.dumps({"metrics": metrics, "metrics_last10": metrics}), encoding="utf-8"
        )
    comparison = compare_runs([tmp_path])
    assert comparison.headline == "all"
    assert [row.method for row in comparison.rows] == ["high", "low"]
    assert comparison.metrics == ["all", "old", "new", "clusters"]
    assert re.search(r"high\s+1\s+70\.0\s+70\.0\s+80\.0\s+40\.0", printed(comparison, 80))
    assert "svg" in Balanced(page(comparison, tmp_path)).tags


BySeed = dict[int, float]


def write_runs(top: Path, method: str, ends: BySeed, **changes: Any) -> None:
    for seed, end in ends.items():
        name = "-".join([method, *(f"{key}{value}" for key, value in changes.items()), str(seed)])
        write_run(top / re.sub(r"\W", "_", name), method, seed, [0.1, end], **changes)


def by_method(comparison: Comparison) -> dict[str, Row]:
    return {row.method: row for row in comparison.rows}


def test_share_of_the_gap_is_paired_by_seed(tmp_path: Path) -> None:
    floor, ceiling, own = np.array([0.5, 0.6]), np.array([0.9, 0.8]), np.array([0.6, 0.75])
    write_runs(tmp_path, "server-only", dict(enumerate(floor)))
    write_runs(tmp_path, "fedavg-sl", {**dict(enumerate(ceiling)), 7: 0.99})
    write_runs(tmp_path, "sage", {**dict(enumerate(own)), 8: 0.2})
    comparison = compare_runs([tmp_path])
    rows = by_method(comparison)
    shares = (own - floor) / (ceiling - floor)  # 25 % and 75 %; of the means it would be 42 %
    assert rows["sage"].gap_share == pytest.approx((shares.mean(), shares.std(ddof=1), 2))
    assert {row.method: row.role for row in comparison.rows} == {
        "server-only": "floor",
        "fedavg-sl": "ceiling",
        "sage": "",
    }
    text = printed(comparison, 140)
    assert re.search(r"sage\s+3\s.*\s50 ± 35 \(2 of 3\)\s", text)
    assert re.search(r"server-only\s+2\s.*\sfloor\s", text)
    assert "from the floor (server-only) to the ceiling (fedavg-sl) in accuracy" in " ".join(text.split())
    cells = Balanced(page(comparison, tmp_path)).cells
    column = cells[0].index("gap closed")
    assert {row[0]: row[column] for row in cells[1:4]} == {
        "sage": "50 ± 35 (2 of 3)",
        "server-only": "floor",
        "fedavg-sl": "ceiling",
    }


@given(*(st.dictionaries(st.integers(0, 5), st.floats(0, 1), max_size=6) for _ in range(3)))
def test_shares_are_those_of_a_loop(own: BySeed, floor: BySeed, ceiling: BySeed) -> None:
    expected = {}
    for seed in range(6):
        if seed in own and seed in floor and seed in ceiling and ceiling[seed] > floor[seed]:
            expected[seed] = (own[seed] - floor[seed]) / (ceiling[seed] - floor[seed])
    assert gap_shares(own, floor, ceiling) == expected
    assert gap_shares(ceiling, floor, ceiling) == dict.fromkeys(gap_shares(ceiling, floor, ceiling), 1.0)


@pytest.mark.parametrize(
    ("floor", "ceiling", "said"),
    [
        ({0: 0.5, 1: 0.5}, {0: 0.6, 1: 0.7}, ""),
        ({0: 0.5}, {0: 0.579}, "floor and ceiling are only 7.9 points apart, too little to rank methods by shares"),
        ({0: 0.5}, {0: 0.5}, "the ceiling is not above the floor, so there are no shares"),
        ({0: 0.5}, {1: 0.9}, "floor and ceiling have no seed in common, so there are no shares"),
        ({0: 0.5, 1: 0.5}, {0: 0.9, 1: 0.4}, "left out, as the ceiling is not above the floor: seed 1"),
    ],
)
def test_what_a_gap_is_worth(floor: BySeed, ceiling: BySeed, said: str) -> None:
    assert gap_caveat(gaps(floor, ceiling)) == said


def test_floor_and_ceiling_belong_to_their_scenario(tmp_path: Path) -> None:
    ends = {0.1: {"server-only": 0.2, "sage": 0.3, "fedavg-sl": 0.6}, 1.0: {"server-only": 0.6, "sage": 0.65}}
    for alpha, own in ends.items():
        for method, end in own.items():
            write_runs(tmp_path, method, {0: end}, scenario={"alpha": alpha})
    write_runs(tmp_path, "sage", {0: 0.7}, scenario={"partition": "iid"})
    write_runs(tmp_path, "server-only", {0: 0.68}, scenario={"partition": "iid"})
    write_runs(tmp_path, "fedavg-sl", {0: 0.72}, scenario={"partition": "iid"})
    comparison = compare_runs([tmp_path])
    found = {
        (row.differences["scenario.partition"], row.differences["scenario.alpha"]): row.gap_share
        for row in comparison.rows
        if row.method == "sage"
    }
    assert found == {
        ("dirichlet", "0.1"): pytest.approx((0.25, None, 1)),
        ("dirichlet", "1"): None,
        ("iid", "0.1"): pytest.approx((0.5, None, 1)),
    }
    text = " ".join(printed(comparison, 160).split())
    assert "gap closed at scenario.partition iid, scenario.alpha 0.1: floor and ceiling are only 4.0 points" in text
    assert text.count("points apart") == 1


def test_floor_and_ceiling_can_be_chosen(tmp_path: Path) -> None:
    for method, end in (("fedavg", 0.4), ("sage", 0.7), ("server-only", 0.3), ("fedavg-sl", 0.8)):
        write_runs(tmp_path, method, {0: end})
    write_runs(tmp_path, "sage", {0: 0.6}, fields={"kappa": 2.0})
    write_runs(tmp_path, "sage", {0: 0.5}, fields={"kappa": 1.0})
    chosen = compare_runs([tmp_path], floor="fedavg", ceiling="sage, method.kappa 2")
    assert {row.label: row.role for row in chosen.rows if row.role} == {
        "fedavg": "floor",
        "sage, method.kappa 2": "ceiling",
    }
    shares = {row.label: row.gap_share.mean for row in chosen.rows if row.gap_share}
    assert shares["sage, method.kappa 1"] == pytest.approx(0.5)
    assert shares["server-only"] == pytest.approx(-0.5)
    assert "−50" in printed(chosen, 140)
    with pytest.raises(UserError, match="--floor: there is no run of 'fedawg'; did you mean 'fedavg'"):
        compare_runs([tmp_path], floor="fedawg")
    with pytest.raises(UserError, match="--ceiling: there is no run of"):
        compare_runs([tmp_path], ceiling="nothing")


def test_of_several_ceilings_the_strongest_counts(tmp_path: Path) -> None:
    write_runs(tmp_path, "server-only", {0: 0.2, 1: 0.2})
    write_runs(tmp_path, "fedavg-sl", {0: 0.6, 1: 0.6}, fields={"ema": 0.0})
    write_runs(tmp_path, "fedavg-sl", {0: 0.7, 1: 0.7}, fields={"ema": 0.9})
    write_runs(tmp_path, "fedavg-sl", {0: 0.9}, fields={"ema": 0.99})  # one seed only
    roles = {row.label: row.role for row in compare_runs([tmp_path]).rows}
    assert [label for label, role in roles.items() if role == "ceiling"] == ["fedavg-sl, method.ema 0.9"]


def test_without_both_ends_there_is_no_gap(tmp_path: Path) -> None:
    write_runs(tmp_path, "server-only", {0: 0.2})
    write_runs(tmp_path, "sage", {0: 0.4})
    assert "gap" not in printed(compare_runs([tmp_path]), 160)
    assert "no block has finished runs of both" in printed(compare_runs([tmp_path], floor="server-only"), 160)
    write_run(tmp_path / "half", "fedavg-sl", 0, [0.1, 0.9], finished=False)
    assert not any(row.role for row in compare_runs([tmp_path]).rows)


def test_other_models_and_scores_fill_a_table_of_their_own(tmp_path: Path) -> None:
    metrics: dict[str, float | None] = {
        "auroc_seen": 0.9,
        "auroc_overall": 0.91,
        "current.accuracy": 0.123,
        "msp.auroc_seen": 0.456,
        "energy.auroc_unseen.mnist": 0.789,
        "fpr95_seen": 0.234,
    }
    write_run(tmp_path / "a", "sage", metrics=metrics)
    comparison = compare_runs([tmp_path])
    brief = printed(comparison, 120)
    assert {"91.0", "90.0"} <= set(brief.split())
    assert not {"12.3", "45.6", "78.9", "23.4"} & set(brief.split())
    assert "4 further metrics: semifed compare --all-metrics." in brief
    for width in (40, 120):
        whole = printed(comparison, width, all_metrics=True)
        assert {"12.3", "45.6", "78.9", "23.4"} <= set(whole.split())
        assert "further metrics" not in whole
    tables = [list(own) for _, own in groupby(Balanced(page(comparison, tmp_path)).cells, key=len)]
    assert not {"12.3", "45.6"} & set(tables[0][1])
    assert {"12.3", "45.6", "78.9", "23.4"} <= set(tables[1][1])
    assert "current accuracy" in tables[1][0]


def test_the_command_takes_floor_and_ceiling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for method, end in (("fedavg", 0.4), ("sage", 0.5), ("fedavg-sl", 0.8)):
        write_runs(tmp_path / "runs", method, {0: end})
    arguments = ("compare", str(tmp_path / "runs"), "--floor", "fedavg", "--html", str(tmp_path / "c.html"))
    outcome = semifed(capsys, *arguments)
    assert outcome.code == 0
    assert "gap closed: share of the way from the floor (fedavg)" in " ".join(outcome.out.split())
    assert '<td class="number">25</td>' in (tmp_path / "c.html").read_text(encoding="utf-8")
    wrong = semifed(capsys, "compare", str(tmp_path / "runs"), "--ceiling", "fedavgsl")
    assert wrong.code == 2
    assert "did you mean 'fedavg-sl'?" in wrong.err


def test_a_sweep_refuses_a_foreign_floor_before_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("sweep", "quickstart", "method=fedfixmatch,openfl", "--out", str(tmp_path / "g"))
    outcome = semifed(capsys, *arguments, "--floor", "server-only")
    assert outcome.code == 2
    assert "--floor: there is no run of 'server-only'" in outcome.err
    assert not (tmp_path / "g").exists()


# Rounds to given accuracies, and the speed-up against a reference


def point_curve(values: Curve) -> list[Point]:
    return [Point(number, value) for number, value in enumerate(values)]


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=12),
    st.lists(st.floats(0, 1), min_size=1, max_size=12),
    st.lists(st.floats(0.01, 1), min_size=1, max_size=3),
)
def test_rounds_and_speedup_are_those_of_a_loop(own: Curve, other: Curve, levels: list[float]) -> None:
    def rounds(curve: Curve, level: float) -> int | None:
        for number, value in enumerate(curve):
            if value is not None and value + 1e-12 >= level:
                return number
        return None

    for found, level in zip(reaches(point_curve(own), levels, point_curve(other)), levels, strict=True):
        mine, theirs = rounds(own, level), rounds(other, level)
        assert (found.level, found.round) == (level, mine)
        assert found.speedup == (pytest.approx(theirs / mine) if mine and theirs else None)
    assert all(one.speedup is None for one in reaches(point_curve(own), levels, None))


def test_gaps_in_a_curve_are_passed_over() -> None:
    assert first_reached(point_curve([0.1, None, 0.6, None, 0.9]), 0.5) == 2
    assert first_reached([], 0.5) is None


def speed_runs(top: Path) -> None:
    """LPL reaches 60 % in round 4 by its mean, SAGE in round 2; FedAvg never does."""
    for seed, shift in enumerate((-0.02, 0.02)):
        for method, curve in (
            ("fixmatch-lpl", [0.1, 0.3, 0.5, 0.55, 0.6, 0.72]),
            ("sage", [0.1, 0.55, 0.65, 0.7, 0.8, 0.85]),
            ("fedavg", [0.1, 0.2, 0.3, 0.35, 0.4, 0.45]),
        ):
            write_run(top / f"{method}-{seed}", method, seed, [value + shift for value in curve])


def test_levels_that_were_asked_for_stay_in_a_narrow_terminal(tmp_path: Path) -> None:
    for method, curve in (("fixmatch-lpl", [0.1, 0.5, 0.7]), ("sage", [0.1, 0.65, 0.7])):
        for seed in (0, 1):
            write_run(tmp_path / f"{method}{seed}", method, seed, curve)
    text = printed(compare_runs([tmp_path], reach="60,70"), 80)
    assert "1 ×2.00" in text
    assert "reach" not in text.partition("No room for:")[2]


def test_speedup_refers_to_the_mean_curve_of_the_reference(tmp_path: Path) -> None:
    speed_runs(tmp_path)
    comparison = compare_runs([tmp_path], reach="70,50.5,60")
    rows = by_method(comparison)
    levels = [0.505, 0.6, 0.7]
    assert rows["sage"].reached == tuple(map(Reach, levels, (1, 2, 3), (3.0, 2.0, 5 / 3)))
    assert rows["fixmatch-lpl"].reached == tuple(map(Reach, levels, (3, 4, 5), (1.0, 1.0, 1.0)))
    assert rows["fedavg"].reached == tuple(Reach(level, None) for level in levels)
    assert {row.compared_with for row in comparison.rows} == {"fixmatch-lpl"}
    text = " ".join(printed(comparison, 140).split())
    assert "2 ×2.00" in text
    assert "3 ×1.67" in text
    assert "reach N %: first round in which the mean accuracy of the seeds is there; ×: how many times sooner" in text
    html = page(comparison, tmp_path)
    assert '<td class="number">1 ×3.00</td>' in html
    assert ">reach\n50.5 %</th>" in html
    slower = compare_runs([tmp_path], reach="60", against="sage")
    assert by_method(slower)["fixmatch-lpl"].reached == (Reach(0.6, 4, 0.5),)


def test_without_levels_nothing_is_counted(tmp_path: Path) -> None:
    speed_runs(tmp_path)
    comparison = compare_runs([tmp_path])
    assert all(row.reached == () and row.compared_with == "" for row in comparison.rows)
    assert "reach N %" not in printed(comparison, 140)


def test_each_block_has_its_own_reference(tmp_path: Path) -> None:
    for alpha, late in ((0.1, [0.1, 0.2, 0.3, 0.7]), (1.0, [0.1, 0.7, 0.7, 0.7])):
        scenario = {"alpha": alpha}
        write_run(tmp_path / f"lpl{alpha}", "fixmatch-lpl", curve=[*late], scenario=scenario)
        write_run(tmp_path / f"sage{alpha}", "sage", curve=[0.1, 0.7, 0.7, 0.7], scenario=scenario)
    write_run(tmp_path / "alone", "sage", curve=[0.1, 0.7], scenario={"alpha": 10.0}, rounds=1)
    found = {
        row.differences["scenario.alpha"]: row
        for row in compare_runs([tmp_path], reach="65").rows
        if row.method == "sage"
    }
    assert [found[alpha].reached[0].speedup for alpha in ("0.1", "1", "10")] == [3.0, 1.0, None]


def test_no_reference_is_told(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "sage")
    comparison = compare_runs([tmp_path], reach="60")
    assert only(comparison).reached == (Reach(0.6, 1),)
    assert "No speed-up: no block has a finished run of fixmatch-lpl." in printed(comparison)


@pytest.mark.parametrize("text", ["", "70,", "seventy", "0", "101", "-5", "nan", "inf"])
def test_levels_are_percentages(text: str) -> None:
    with pytest.raises(UserError, match="--reach"):
        levels_of(text)


def test_json_holds_what_the_table_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speed_runs(tmp_path / "runs")
    outcome = semifed(capsys, "compare", str(tmp_path / "runs"), "--reach", "60", "--json")
    assert outcome.code == 0
    found = json.loads(outcome.out)
    assert found["headline"] == "accuracy"
    rows = {row["label"]: row for row in found["rows"]}
    assert [row["method"] for row in found["rows"]] == ["sage", "fixmatch-lpl", "fedavg"]
    assert rows["sage"]["reached"] == [{"level": 0.6, "round": 2, "speedup": 2.0}]
    assert rows["fedavg"]["reached"] == [{"level": 0.6, "round": None, "speedup": None}]
    assert rows["sage"]["compared_with"] == "fixmatch-lpl"
    assert rows["sage"]["metrics"]["accuracy"] == {
        "mean": pytest.approx(0.85),
        "std": pytest.approx(0.04 / 2**0.5),
        "n": 2,
    }
    assert rows["sage"]["seeds"] == [0, 1]


def test_the_command_takes_reach_and_against(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speed_runs(tmp_path / "runs")
    runs = str(tmp_path / "runs")
    outcome = semifed(
        capsys, "compare", runs, "--reach", "50,60", "--against", "fedavg", "--html", str(tmp_path / "c.html")
    )
    assert outcome.code == 0
    assert "reach\n60 %" in (tmp_path / "c.html").read_text(encoding="utf-8")
    for arguments, said in (
        (("--reach", "60", "--against", "fedavgg"), "did you mean 'fedavg'?"),
        (("--against", "fedavg"), "add --reach 70,80"),
        (("--reach", "much"), "is no list of percentages"),
    ):
        wrong = semifed(capsys, "compare", runs, *arguments)
        assert wrong.code == 2
        assert said in wrong.err


@pytest.mark.parametrize(("option", "value"), [("--reach", "seventy"), ("--against", "fixmatch-lpl")])
def test_a_sweep_refuses_what_its_comparison_cannot_use_before_it_trains(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = semifed(capsys, "sweep", "quickstart", "--out", str(tmp_path / "g"), option, value)
    assert outcome.code == 2
    assert option in outcome.err
    assert not (tmp_path / "g").exists()
    foreign = semifed(capsys, "sweep", "quickstart", "--out", str(tmp_path / "g"), "--reach", "70", "--against", "sage")
    assert "--against: there is no run of 'sage'" in foreign.err


def test_entropies_and_gaps_are_drawn_by_scenario(tmp_path: Path) -> None:
    """SAGE's Figs. 10 and 12: the same lines for every alpha, in charts with one axis."""
    for alpha in (0.1, 1.0):
        for seed in (0, 1):
            run = write_run(tmp_path / f"s{alpha}-{seed}", "sage", seed, scenario={"alpha": alpha})
            lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
            for line in lines[1:]:
                line["opinions"] = {
                    "local": {"entropy": alpha + seed},
                    "received": {"entropy": None},
                    "gap": {"mean": 0.25},
                }
            (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        write_run(tmp_path / f"f{alpha}", "fedavg", scenario={"alpha": alpha})
    comparison = compare_runs([tmp_path])
    rows = {(row.method, row.differences["scenario.alpha"]): row for row in comparison.rows}
    curve = rows["sage", "0.1"].opinions["local.entropy"]
    assert [(point.round, point.low, point.high) for point in curve] == [(1, 0.1, 1.1), (2, 0.1, 1.1)]
    assert [point.value for point in curve] == pytest.approx([0.6, 0.6])
    assert rows["sage", "1"].opinions.keys() == {"local.entropy", "gap.mean"}
    assert rows["fedavg", "1"].opinions == {}
    html = page(comparison, tmp_path)
    assert html.count("<h3>Entropy of the local model&#39;s predictions</h3>") == 1
    assert "sage <b>0.6</b>" in html
    assert "sage <b>1.5</b>" in html
    assert "received model" not in html
    assert "opinions" not in comparison.as_json()["rows"][0]
