"""`results/diagnostics.py`: what the pages say of pseudo-labels can be read in a file beside them."""

import csv
import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli_w

SCRIPT = Path(__file__).parents[1] / "results" / "diagnostics.py"
main = runpy.run_path(str(SCRIPT))["main"]


def line_of(number: int, **changes: Any) -> dict[str, Any]:
    opinions = {"gap": {"mean": number / 100, "majority": None}, "agreement": {"local_ranks": [3, 1, 0, number]}}
    pseudo = {"seen": 200, "used": 2 * number, "accuracy": 0.5 if number else None}
    return {"round": number, "loss": {"total": 1.0 + number}, "pseudo": pseudo, "opinions": opinions, **changes}


def write_run(path: Path, method: str, alpha: float, lines: list[dict[str, Any]]) -> None:
    recipe = {
        "dataset": "digits",
        "seed": 3,
        "scenario": {"classes": "known", "alpha": alpha},
        "method": {"name": method, "threshold": 0.5},
    }
    path.mkdir()
    (path / "recipe.toml").write_text(tomli_w.dumps(recipe))
    (path / "summary.json").write_text("{}")
    (path / "rounds.jsonl").write_text("\n".join(map(json.dumps, lines)))


def table(stem: Path, *arguments: object) -> list[dict[str, str]]:
    main([str(stem), "--vary", "scenario.alpha", *map(str, arguments)])
    return list(csv.DictReader(stem.with_suffix(".diagnostics.csv").read_text().splitlines()))


def test_ten_rounds_are_a_line_of_means(tmp_path: Path) -> None:
    write_run(tmp_path / "run", "sage", 0.1, [line_of(number) for number in range(13)])
    first, second = table(tmp_path / "out", tmp_path / "run")
    assert [first[key] for key in ("method", "scenario.alpha", "seed", "rounds")] == [
        "sage threshold=0.5",
        "0.1",
        "3",
        "1-10",
    ]
    assert second["rounds"] == "11-12"
    assert float(first["pseudo.used"]) == pytest.approx(0.055), "mean of 1 to 10 %; round 0 trains nobody"
    assert float(second["pseudo.used"]) == pytest.approx(0.115)
    assert float(second["opinions.gap.mean"]) == pytest.approx(0.115)
    assert float(second["opinions.agreement.local_ranks.first"]) == pytest.approx((3 / 15 + 3 / 16) / 2, abs=1e-4)
    assert float(second["opinions.agreement.local_ranks.first_two"]) == pytest.approx((4 / 15 + 4 / 16) / 2, abs=1e-4)
    assert float(first["loss.total"]) == pytest.approx(6.5)
    assert "opinions.gap.majority" not in first, "never measured"


def test_rounds_without_labels_count_nowhere(tmp_path: Path) -> None:
    empty = line_of(2, pseudo={"seen": 0, "used": 0, "accuracy": None}, opinions=None)
    write_run(tmp_path / "run", "sage", 0.1, [line_of(1), empty, line_of(3)])
    (only,) = table(tmp_path / "out", tmp_path / "run")
    assert float(only["pseudo.used"]) == pytest.approx(0.02)
    assert float(only["opinions.gap.mean"]) == pytest.approx(0.02)


def test_later_runs_join_and_none_comes_twice(tmp_path: Path) -> None:
    write_run(tmp_path / "one", "sage", 1.0, [line_of(number) for number in range(1, 22)])
    write_run(tmp_path / "two", "fixmatch-gpl", 1.0, [line_of(1, opinions={})])
    before = table(tmp_path / "out", tmp_path / "one")
    assert [line["rounds"] for line in before] == ["1-10", "11-20", "21-21"]
    after = table(tmp_path / "out", "--add", tmp_path / "two")
    assert [line["method"] for line in after] == ["fixmatch-gpl threshold=0.5"] + ["sage threshold=0.5"] * 3
    assert [{key: line[key] for key in before[0]} for line in after[1:]] == before
    written = (tmp_path / "out.diagnostics.csv").read_text()
    shutil.copytree(tmp_path / "two", tmp_path / "copy")
    with pytest.raises(SystemExit, match=r"the same run twice: fixmatch-gpl threshold=0\.5, 1, 3, 1-1"):
        table(tmp_path / "out", "--add", tmp_path / "copy")
    assert (tmp_path / "out.diagnostics.csv").read_text() == written
