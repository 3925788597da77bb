"""The command `semifed bench`: which parts, what it prints, what it writes."""

import json
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from command import semifed
from semifed.bench import aggregation, command
from semifed.bench.aggregation import aggregation_cost
from semifed.bench.measuring import Table
from semifed.bench.workload import FIXMATCH_CNN
from semifed.errors import UserError

SCRIPT = Path(__file__).parents[1] / "results" / "speed" / "tables.py"


@pytest.fixture(autouse=True)
def _small_cohort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "aggregation_cost", partial(aggregation_cost, cohort=2, shapes=((3, 2), (2,))))


def without_measuring(monkeypatch: pytest.MonkeyPatch, *tables: Table) -> list[int]:
    """The part scaling comes to these tables at once; how often it was asked for."""
    asked: list[int] = []

    def scaling(folder: Path, turns: int, workers: int) -> list[Table]:
        asked.append(turns)
        return list(tables)

    monkeypatch.setattr(command, "scaling", scaling)
    return asked


def lines_of(file: Path) -> list[str]:
    """What the script makes of a file of numbers."""
    measured: dict[str, Any] = json.loads(file.read_text())
    return list(runpy.run_path(str(SCRIPT))["tables"](measured))


def test_a_part_that_does_not_exist_is_named() -> None:
    with pytest.raises(UserError, match="bench has no part 'flor'; did you mean 'floor'"):
        command.bench(["flor"], turns=1, workers=1, file=None, plots=None)


def test_more_workers_than_cores_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "available_cores", lambda: 2)
    with pytest.raises(UserError, match="--workers: 3 processes would wait for each other on 2 cores; 2 at most"):
        command.bench(["aggregation"], turns=1, workers=3, file=None, plots=None)


@pytest.mark.slow
def test_numbers_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "bench.json"
    command.bench(["aggregation"], turns=2, workers=1, file=file, plots=tmp_path / "plots")
    printed = capsys.readouterr().out
    assert "Aggregation" in printed
    assert "torch.stack" in printed
    written = json.loads(file.read_text())
    assert written["turns"] == 2
    assert written["machine"]["torch"]
    rows = written["parts"]["aggregation"]["rows"]
    assert rows[0]["way"] == "semifed"
    assert len(written["parts"]["aggregation"]["facts"]["seconds"]["semifed"]) == 2


def test_the_command_measures_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregation, "extra_memory", lambda way, cohort, shapes: 10**6)  # it would start processes
    file = tmp_path / "bench.json"
    done = semifed(capsys, "bench", "aggregation", "--turns", "2", "--workers", "1", "--json", str(file))
    assert (done.code, done.err) == (0, "")
    assert "torch.stack" in done.out
    written = json.loads(file.read_text())
    assert written["workers"] == 1
    assert written["machine"]["semifed"]
    assert "revision" in written["machine"]
    part = written["parts"]["aggregation"]
    assert all(list(row) == part["header"] for row in part["rows"])
    told = lines_of(file)
    assert f"| {' | '.join(part['header'])} |" in told
    assert f"- {part['notes'][0]}" in told


def test_a_part_without_rows_is_a_table_without_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as bfloat16 on a processor that has none."""
    without_measuring(monkeypatch, Table("empty", "Nothing", "no work", ("a", "b"), [], notes=("there is a reason",)))
    file = tmp_path / "bench.json"
    command.bench(["scaling"], turns=1, workers=1, file=file, plots=None)
    assert json.loads(file.read_text())["parts"]["empty"]["header"] == ["a", "b"]
    assert lines_of(file)[1:] == ["", "### Nothing", "no work", "", "", "- there is a reason"]


@pytest.mark.parametrize("file", sorted(SCRIPT.parent.glob("*.json")), ids=lambda path: path.stem)
def test_stored_numbers_can_be_printed(file: Path) -> None:
    assert any(line.startswith("|---") for line in lines_of(file))


def test_what_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = without_measuring(monkeypatch)
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "below"
    bench = partial(command.bench, ["scaling"], turns=1, workers=1)
    with pytest.raises(UserError, match=r"--json: .*file cannot be written"):
        bench(file=below, plots=None)
    with pytest.raises(UserError, match=r"--json: .* is a folder; name a file"):
        bench(file=tmp_path, plots=None)
    with pytest.raises(UserError, match=r"--plots: .*below cannot be written"):
        bench(file=None, plots=below)
    assert not asked


def test_plots_are_drawn_after_each_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_measuring(
        monkeypatch,
        Table("scaling-images", "", "", (), [], {"images_a_client": [1, 2], "runs": 2 * [[{"rounds": [1.0]}]]}),
    )

    def fails(turns: int) -> list[Table]:
        assert (tmp_path / "plots" / "scaling-images.png").exists()
        raise UserError("a later part fails")

    monkeypatch.setattr(command, "aggregation_cost", fails)
    with pytest.raises(UserError, match="later"):
        command.bench(["scaling", "aggregation"], turns=1, workers=1, file=None, plots=tmp_path / "plots")
    assert "plot:" in capsys.readouterr().out


def test_a_part_without_plots_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "view_speed", lambda folder, turns: [])
    command.bench(["views"], turns=1, workers=1, file=None, plots=tmp_path / "plots")
    assert "no plots: of all parts only scaling has any" in capsys.readouterr().out
    assert not (tmp_path / "plots").exists()


def test_ideas_are_measured_beside_what_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    tried = runpy.run_path(str(SCRIPT.with_name("tried.py")))
    small = FIXMATCH_CNN._replace(overrides=(*FIXMATCH_CNN.overrides, "model.width=[2,3,4]"), images=1000, tests=20)
    table = tried["measured"](turns=2, seconds=0.0, compiled=False, loads=[small])
    assert all(len(row) == len(table.header) for row in table.rows)
    first = [row for row in table.rows if row[4] is None]
    assert [str(row[2]).startswith("as used") for row in first] == [True] * 9
    assert len({row[0] for row in table.rows}) == 9
    assert all(len(row["seconds"]) == 2 for row in table.facts["rows"])
    assert len(capsys.readouterr().out.splitlines()) == len(table.rows)
