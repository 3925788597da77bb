"""`semifed reproduce` on a toy table of tiny runs: what it runs, keeps, shows and refuses."""

import csv
import json
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command import semifed, surroundings, tiny_tables, written
from semifed import paper_tables
from semifed.data import datasets
from semifed.paper_tables import Cell, Printed
from semifed.report import Spread
from semifed.report.beside import Beside, Line

TOY = """
[rows]
"server-only" = { method = "server-only", role = "floor" }
"Fed Fix" = { method = "fedfixmatch", options = "method.threshold={threshold}" }
"all labels" = { method = "fedavg-sl", role = "ceiling", mini = "method.ema=0.5" }
"endless" = { method = "fedfixmatch", mini = "rounds=100000" }

[table1]
title = "Toy, Table 1"
metrics = ["accuracy"]
notes = ["A toy."]

[table1.settings]
"digits-iid" = { mini = "tiny.toml", paper = "tiny.toml local.lr=0.01", threshold = "0.2" }

[table1.theirs]
"server-only" = ""
"Fed Fix" = "90.10±1.5"
"all labels" = "–"

[table2]
title = "Toy, Table 2"
metrics = ["accuracy"]

[table2.settings]
"digits-iid" = { mini = "tiny.toml", threshold = "0.2" }
"cifar10-iid" = { mini = "tiny.toml dataset=cifar10 evaluate.unseen=[svhn]", paper = "tiny.toml", threshold = "0.2" }

[table2.theirs]
"server-only" = "50.0 40.0"
"Fed Fix" = "60.0 70.0"

[table3]
title = "Toy, Table 3"
metrics = ["accuracy"]

[table3.settings]
"digits-iid" = { mini = "tiny.toml" }

[table3.theirs]
"server-only" = "50.0"
"endless" = "60.0"

[table4]
title = "Toy, Table 4"
metrics = ["accuracy"]

[table4.settings]
"digits-iid" = { paper = "tiny.toml" }

[table4.theirs]
"server-only" = "50.0"
"""


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place with a toy paper, and without any data set but digits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SEMIFED_DATA", raising=False)
    monkeypatch.setattr(datasets, "SYSTEM_PLACE", str(tmp_path / "nothing"))
    monkeypatch.setattr(paper_tables, "TABLES", tmp_path / "tables")
    Path("tables").mkdir()
    Path("tables/toy.toml").write_text(TOY)
    learning = {"server": {"warmup_epochs": 5, "finetune_epochs": 2, "lr": 0.1}, "model": {"width": [8, 8, 8]}}
    written(tmp_path / "tiny.toml", {**tiny_tables(), "rounds": 2, "evaluate": {"every": 1, "folds": 0}, **learning})


def summary(run: str) -> dict[str, float]:
    found = json.loads((Path(run) / "summary.json").read_text())
    return {"last": 100 * found["metrics"]["accuracy"], "ten": 100 * found["metrics_last10"]["accuracy"]}


def test_a_table_is_shown_run_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ("--seeds", "0,1", "--only", "server-only", "--only", "Fed Fix")
    arguments = ("reproduce", "toy/table1", *chosen, "--csv", "t.csv", "--markdown", "t.md")
    first = semifed(capsys, *arguments)
    assert first.code == 0, first.err
    assert first.out.count("Toy, Table 1\n") == 2  # before and after
    assert re.search(r"Fed Fix +90\.10 ± 1\.5 +– +– +–\n", first.out)
    assert "Another budget than the paper's" in first.out
    assert "Scale mini. Seeds 0,1. Budget: digits 2 rounds × 3 clients." in first.out
    assert "A toy." in first.out

    out = Path("reproduce/toy-table1-mini")
    assert {path.name for path in out.iterdir()} == {
        f"digits-iid-{row}-seed{seed}" for row in ("server-only", "Fed_Fix") for seed in (0, 1)
    }
    runs = [summary(f"{out}/digits-iid-Fed_Fix-seed{seed}") for seed in (0, 1)]
    last, ten = [run["last"] for run in runs], [run["ten"] for run in runs]
    assert last != ten
    rows = {line["row"]: line for line in csv.DictReader(Path("t.csv").read_text().splitlines())}
    ours = rows["Fed Fix"]
    assert (ours["method"], ours["theirs"], ours["theirs_std"], ours["seeds"]) == ("fedfixmatch", "90.10", "1.5", "2")
    assert float(ours["ours"]) == pytest.approx(statistics.fmean(last), abs=0.01)
    assert float(ours["ours_std"]) == pytest.approx(statistics.stdev(last), abs=0.01)
    assert float(ours["last10"]) == pytest.approx(statistics.fmean(ten), abs=0.01)
    assert float(ours["difference"]) == pytest.approx(statistics.fmean(last) - 90.10, abs=0.01)
    assert (rows["server-only"]["role"], rows["server-only"]["theirs"], rows["server-only"]["difference"]) == (
        *("floor", ""),
        "",
    )
    shown = f"{statistics.fmean(last):.1f} ± {statistics.stdev(last):.1f}"
    assert f"| digits-iid | Fed Fix | 90.10 ± 1.5 | {shown} |" in Path("t.md").read_text()
    assert shown in first.out

    assert "threshold = 0.2" in (out / "digits-iid-Fed_Fix-seed0" / "recipe.toml").read_text()
    before = (out / "digits-iid-Fed_Fix-seed0" / "summary.json").stat().st_mtime_ns
    again = semifed(capsys, *arguments)
    assert again.out.count("Toy, Table 1\n") == 1  # nothing was missing
    assert "[1/" not in again.out
    more = semifed(capsys, "reproduce", "toy/table1", "--seeds", "0,1,2", "--only", "fed fix")
    assert more.code == 0, more.err
    assert more.out.count("finished before") == 2
    assert "(2 of 3)" in more.out  # in the table before the third run
    assert (out / "digits-iid-Fed_Fix-seed0" / "summary.json").stat().st_mtime_ns == before

    other = semifed(capsys, "reproduce", "toy/table1", "rounds=1")
    assert other.code == 2
    assert "was started with rounds = 2, now it is 1" in other.err


def test_a_dry_run_says_commands_that_make_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("reproduce", "toy/table1", "rounds=1", "--only", "server-only,Fed Fix", "--out", "o p", "--dry")
    first = semifed(capsys, *arguments, "--workers", "1")
    assert first.code == 0, first.err
    assert not Path("o p").exists()
    assert "2 of 2 runs to do, 2 rounds in all; nothing was run." in first.out
    assert "Scale mini, changed by rounds=1." in first.out  # workers change no number
    commands = [shlex.split(line) for line in first.out.splitlines() if line.startswith("semifed run")]
    assert len(commands) == 2
    assert semifed(capsys, *commands[1][1:], "-q").code == 0
    second = semifed(capsys, *arguments)
    assert re.search(r"Fed Fix +90\.10 ± 1\.5 +\d+\.\d +\d+\.\d +−\d+\.\d\n", second.out)
    assert "1 of 2 runs to do" in second.out
    run = Path("o p/digits-iid-Fed_Fix-seed0")
    (run / "summary.json").unlink()
    third = semifed(capsys, *arguments)
    assert "2 of 2 runs to do" in third.out
    assert third.out.count("--resume") == 1


def test_a_row_has_its_own_options_at_each_scale(capsys: pytest.CaptureFixture[str]) -> None:
    def command(*arguments: str) -> str:
        said = semifed(capsys, "reproduce", "toy/table1", "--only", "all labels", "--dry", *arguments).out
        return next(line for line in said.splitlines() if line.startswith("semifed run"))

    name = "digits-iid-all_labels-seed0"
    assert command() == (
        f"semifed run tiny.toml method=fedavg-sl method.ema=0.5 seed=0 --out reproduce/toy-table1-mini/{name}"
    )
    assert command("--scale", "paper") == (
        f"semifed run tiny.toml local.lr=0.01 method=fedavg-sl seed=0 --out reproduce/toy-table1-paper/{name}"
    )


def test_missing_data_is_told_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = semifed(capsys, "reproduce", "toy/table2", "--only", "server-only")
    assert outcome.code == 0, outcome.err
    told = [line for line in outcome.out.splitlines() if line.startswith("data set")]
    assert [line.split(".")[0] for line in told] == [
        "data set 'cifar10' is missing: 1 run left out",
        "data set 'svhn' is missing: 1 run left out",
    ]
    assert outcome.out.index("data set 'svhn'") < outcome.out.index("[1/1] digits-iid-server-only-seed0")
    assert "Not run for want of data: what needs cifar10, svhn." in outcome.out
    assert [path.name for path in Path("reproduce/toy-table2-mini").iterdir()] == ["digits-iid-server-only-seed0"]

    nothing = semifed(capsys, "reproduce", "toy/table2", "--only", "cifar10")
    assert nothing.code == 2
    assert "data set 'cifar10' is missing: 2 runs left out" in nothing.out
    assert nothing.err.startswith("error: nothing of it can be run without these data sets")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["toy/tabel1"], "there is no table 'toy/tabel1'; did you mean 'toy/table1'?"),
        (["toy/table1", "--scale", "papr"], "--scale: there is no 'papr'; did you mean 'paper'?"),
        (["toy/table4"], "toy/table4 has no row at mini scale: no small recipe asks its question; --scale paper has 1"),
        (["toy/table1", "--only", "fedfx"], "is called 'fedfx'; did you mean 'Fed Fix'?"),
        (["toy/table1", "--seeds", "0,x"], "--seeds: '0,x' is no list of whole numbers"),
        (["toy/table1", "--seeds", "1,1"], "--seeds: 1,1 has a seed twice"),
        (["toy/table1", "method=openfl"], "method=openfl: rows differ by it; choose some with --only"),
        (["toy/table1", "seed=1"], "seed=1: give seeds as --seeds 0,1,2"),
        (["toy/table1", "rouds=1"], "digits-iid, server-only: rouds: unknown key; did you mean 'rounds'?"),
        (["toy/table1", "model.width=[2,2]"], "model.width: expected the channels"),
        (["toy/table1", "--csv", "tables/toy.toml/x.csv"], "x.csv cannot be written: "),
    ],
)
def test_a_mistake_is_told_before_anything_is_written(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    outcome = semifed(capsys, "reproduce", *arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.startswith("error: ")
    assert len(outcome.err.splitlines()) <= 2
    assert not Path("reproduce").exists()


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished(capsys: pytest.CaptureFixture[str]) -> None:
    program = (
        "import sys; from pathlib import Path; from semifed import paper_tables\n"
        "paper_tables.TABLES = Path('tables'); sys.argv = ['semifed', 'reproduce', 'toy/table3', '--out', 'kept']\n"
        "from semifed.cli import main; main()"
    )
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], text=True, env=surroundings(), **pipes) as running:  # type: ignore[call-overload]
        try:
            rounds = Path("kept/digits-iid-endless-seed0/rounds.jsonl")
            until = time.monotonic() + 120
            while not (rounds.exists() and rounds.read_text().count("\n") > 2):
                assert running.poll() is None
                assert time.monotonic() < until
                time.sleep(0.02)
            running.send_signal(signal.SIGINT)
            _, complaints = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 130
    assert complaints == "stopped; finished rounds are kept: give the same command again\n"
    after = semifed(capsys, "reproduce", "toy/table3", "--out", "kept", "--dry")
    assert re.search(r"server-only \(floor\) +50\.0 +\d+\.\d", after.out)
    assert "1 of 2 runs to do" in after.out
    assert "--resume" in after.out


@pytest.mark.parametrize("arguments", [[], ["list"]])
def test_tables_are_listed_with_their_rows(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    lines = semifed(capsys, "reproduce", *arguments).out.splitlines()
    assert lines[0].split() == ["table", "mini", "paper", "what"]
    rows = {line.split()[0]: line.split()[1:3] for line in lines[1:] if line.startswith("toy/")}
    assert rows == {
        "toy/table1": ["3", "3"],
        "toy/table2": ["4", "2"],
        "toy/table3": ["2", "0"],
        "toy/table4": ["0", "1"],
    }


def test_the_list_and_a_misspelt_table_do_not_load_pytorch() -> None:
    program = (
        "import sys\nfrom semifed.cli import main\n"
        "for name in ('list', 'sage/tabel1'):\n"
        "    sys.argv = ['semifed', 'reproduce', name]\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], env=surroundings(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        0,
        "error: there is no table 'sage/tabel1'; did you mean 'sage/table1'?\n",
    )


def line(row: str, theirs: str, last: float | None, ten: float | None, role: str = "", setting: str = "here") -> Line:
    def made(value: float | None) -> Spread | None:
        return None if value is None else Spread(value, None, 1)

    cell = Cell(setting, row, role, row, "recipe", (), {"accuracy": Printed(theirs)})
    return Line(cell, "accuracy", made(last), made(ten))


def order(*lines: Line) -> str:
    page = Beside("title", lines, 1, []).markdown()
    return next((text for text in page.splitlines() if text.startswith("- Pairs")), "")


def test_pairs_are_counted_within_a_setting_without_floor_and_ceiling() -> None:
    found = order(
        line("a", "50.0", 0.10, 0.30),
        line("b", "60.0", 0.30, 0.20),  # above a by the last round, below by the last ten
        line("c", "60.0", 0.20, 0.40),  # the paper does not tell it from b
        line("floor", "10.0", 0.90, 0.90, role="floor"),
        line("d", "70.0", None, None),
        line("e", "", 0.5, 0.5),
        line("f", "99.0", 0.05, 0.05, setting="there"),
    )
    assert found == (
        "- Pairs of rows in the paper's order, setting by setting: accuracy 2 of 2 by the last round, "
        "1 of 2 by the last ten tests."
    )
    assert order(line("a", "50.0", 0.1, 0.1), line("d", "70.0", None, None)) == ""


def test_the_difference_is_ours_after_the_last_round_minus_theirs() -> None:
    page = Beside("title", [line("a", "50.00", 0.4837, 0.6)], 1, ["a note"]).markdown()
    assert "| here | a | 50.00 | 48.4 | 60.0 | −1.6 |" in page
    assert page.endswith("- a note\n")
    assert line("a", "", 0.4, 0.4).difference is None


def test_a_row_that_is_not_run_is_no_zero() -> None:
    lines = [line("a", "50.00", None, None)]
    assert "| here | a | 50.00 | – | – | – |" in Beside("title", lines, 1, []).markdown()
    assert Beside("title", lines, 1, []).records()[0][7:] == (None, None, None, None, None, 0)
