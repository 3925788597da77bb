"""The command from outside: help, lists, pipes, quiet, names of run directories, exit codes."""

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from command import Outcome, assert_same_weights, process, semifed, surroundings, tiny_tables, written
from semifed.progress import Bar, Lines
from semifed.recipe_file import recipe_names

LISTS = ("methods", "datasets", "models", "recipes")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return written(tmp_path / "tiny.toml", {**tiny_tables(), "rounds": 2})


def is_plain(text: str) -> bool:
    return all(character.isprintable() or character == "\n" for character in text)


@pytest.mark.parametrize("what", LISTS)
def test_lists_are_tables_for_people_and_json_for_programs(capsys: pytest.CaptureFixture[str], what: str) -> None:
    every = ["q"] if what == "recipes" else []  # without a beginning, the recipes of one table are one line
    table = semifed(capsys, "list", what, *every)
    assert table.code == 0
    assert is_plain(table.out)
    rows = json.loads(semifed(capsys, "list", what, *every, "--json").out)
    assert rows
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        assert row["name"] in table.out
        assert all(isinstance(value, str) and value for value in row.values())


@pytest.mark.parametrize("columns", ["60", "30", "200"])
def test_lists_fit_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    outcome = semifed(capsys, "list", "recipes")
    assert outcome.code == 0
    assert max(map(len, outcome.out.splitlines())) <= int(columns)


def test_recipes_of_one_table_are_one_line_until_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    short = semifed(capsys, "list", "recipes").out
    assert "sage/table3-…" in short
    assert "4 recipes: semifed list recipes sage/table3" in " ".join(short.split())
    assert "sage/table3-cifar100-cpg" not in short
    assert "sage/fashion-mini" in short
    long = semifed(capsys, "list", "recipes", "sage/table3").out
    assert [line.split()[0] for line in long.splitlines() if line.startswith("sage/")] == [
        "sage/table3-cifar100-cdsc",
        "sage/table3-cifar100-cpg",
        "sage/table3-cinic10-cdsc",
        "sage/table3-cinic10-cpg",
    ]
    assert len(json.loads(semifed(capsys, "list", "recipes", "--json").out)) == len(recipe_names())


def test_a_misspelt_beginning_of_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = semifed(capsys, "list", "recipes", "sage/tabel3")
    assert outcome == Outcome(2, "", "error: list: no recipe starts with 'sage/tabel3'; did you mean 'sage/table3'?\n")
    outcome = semifed(capsys, "list", "models", "sage")
    assert outcome == Outcome(
        2, "", "error: list: models are listed all at once; 'sage' goes with methods, recipes and keys\n"
    )


def test_a_misspelt_list(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = semifed(capsys, "list", "metods")
    assert outcome == Outcome(2, "", "error: list: there are no 'metods'; did you mean 'methods'?\n")


def test_version_help_and_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert semifed(capsys, "--version").out.strip() == "0.1.0"
    for arguments in (["--help"], ["-h"], ["run", "--help"], ["sweep", "-h"]):
        outcome = semifed(capsys, *arguments)
        assert outcome.code == 0
        assert "Usage: semifed" in outcome.out
    assert "Usage: semifed" in "".join(semifed(capsys)[1:])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["rnu"], "No such command 'rnu'. Did you mean 'run'? See 'semifed --help'."),
        (["run"], "Missing argument 'RECIPE'. See 'semifed run --help'."),
        (
            ["run", "quickstart", "--sed", "1"],
            "No such option '--sed'. Did you mean '--seed'? See 'semifed run --help'.",
        ),
        (
            ["run", "quickstart", "--seed", "x"],
            "Invalid value for '--seed': 'x' is not a valid integer. See 'semifed run --help'.",
        ),
    ],
)
def test_a_wrong_use_is_told_in_a_line(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    assert semifed(capsys, *arguments) == Outcome(2, "", f"error: {told}\n")


def test_help_and_first_mistakes_do_not_load_pytorch() -> None:
    for arguments in (["--help"], ["run", "--help"], ["list", "recipes"], ["run", "quickstart", "rouds=3"]):
        program = (
            f"import sys; sys.argv = ['semifed', *{arguments!r}]\n"
            "from semifed.cli import main\n"
            "try: main()\nexcept SystemExit: pass\n"
            "assert 'torch' not in sys.modules"
        )
        subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, env=surroundings(), timeout=120
        )


def test_a_run_in_a_pipe_prints_plain_lines_and_writes_where_it_says(
    capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    outcome = semifed(capsys, "run", recipe)
    assert outcome.code == 0, outcome
    assert is_plain(outcome.out)
    lines = outcome.out.splitlines()
    assert lines[0].startswith("round    1/2")
    assert lines[1].startswith("round    2/2")
    assert lines[-1] == "report: runs/tiny/fedfixmatch-seed0/report.html"
    run = Path("runs/tiny/fedfixmatch-seed0")
    assert {path.name for path in run.iterdir()} == {
        "checkpoint",
        "features.json",
        "model",
        "data.json",
        "partition.json",
        "recipe.toml",
        "report.html",
        "rounds.jsonl",
        "summary.json",
    }
    again = semifed(capsys, "run", recipe)
    assert again.code == 2
    assert "already holds a run; continue it with --resume" in again.err


def test_the_default_directory_never_leaves_runs(
    capsys: pytest.CaptureFixture[str], recipe: str, tmp_path: Path
) -> None:
    bare = tmp_path / "elsewhere" / "bare"
    bare.parent.mkdir()
    bare.write_text(Path(recipe).read_text())
    assert semifed(capsys, "run", str(bare), "-q").code == 0
    assert Path("runs/bare/fedfixmatch-seed0/summary.json").exists()
    assert [path.name for path in bare.parent.iterdir()] == ["bare"]


def test_quiet_prints_nothing_and_options_reach_the_recipe(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    outcome = semifed(capsys, "run", recipe, "--quiet", "--seed", "5", "--out", "there", "--workers", "1")
    assert outcome == Outcome(0, "", "")
    assert "seed = 5" in Path("there/recipe.toml").read_text()


def test_the_recipe_of_a_run_directory_runs_again_with_the_same_weights(
    capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    assert semifed(capsys, "run", recipe, "-q", "--out", "one", "local.lr=1e-2").code == 0
    assert semifed(capsys, "run", "one/recipe.toml", "-q", "--out", "two").code == 0
    assert_same_weights(Path("one"), Path("two"))
    assert Path("one/recipe.toml").read_text() == Path("two/recipe.toml").read_text()


def test_training_that_diverges_at_the_server(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    explosive = ("server.lr=1e6", "local.weight_decay=1e6", "server.warmup_epochs=9")
    outcome = semifed(capsys, "run", recipe, "-q", *explosive, "--out", "x")
    assert outcome.code == 2
    assert "training at the server failed" in outcome.err
    assert "server.lr" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "quickstrt"], "did you mean 'quickstart'?"),
        (["run", "quickstart", "rounds=ten"], "rounds: 'ten' is not a whole number"),
        (["run", "quickstart", "rounds=3.5"], "rounds: 3.5 is not a whole number"),
        (["run", "quickstart", "seed=-1"], "seed: -1 is out of range"),
        (["run", "quickstart", "--seed", "-1"], "seed: -1 is out of range"),
        (["run", "quickstart", "--workers", "-2"], "engine.workers: -2 is out of range"),
        (["run", "quickstart", "--engine", "cloud"], "engine.name: there is no 'cloud'"),
        (["run", "quickstart", "local.lr=nan"], "local.lr: nan is not a finite number"),
        (["run", "quickstart", "scenario=3"], "scenario: 3 is not a table"),
        (["run", "absent.toml"], "absent.toml cannot be read"),
        (["run", "."], "recipe . cannot be read"),
        (["run", "quickstart", "rounds"], "'rounds' is no override"),
        (["sweep", "quickstart", "local.lr=fast,slow"], "local.lr: 'fast' is not a number"),
        (["partition", "quickstart", "scenario.clientz=3"], "did you mean 'clients'?"),
        (["list", "recipies"], "did you mean 'recipes'?"),
    ],
)
def test_mistakes_seen_from_outside(tmp_path: Path, arguments: list[str], message: str) -> None:
    outcome = process(*arguments, cwd=tmp_path)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "quickstart", "method=fedfixmach"], "did you mean 'fedfixmatch'?"),
        (["run", "quickstart", "views.weak=flp"], "did you mean 'flip'?"),
        (["run", "quickstart", "evaluate.unseen=[gausian]"], "did you mean 'gaussian'?"),
        (["run", "quickstart", "model.width=[1]"], "model.width"),
        (["run", "quickstart", "dataset=digit"], "did you mean 'digits'?"),
        (["sweep", "quickstart", "scenario.labelled_per_class=1,9999"], "scenario.labelled_per_class: 9999"),
    ],
)
def test_mistakes_that_need_the_data_seen_from_outside(tmp_path: Path, arguments: list[str], message: str) -> None:
    outcome = process(*arguments, cwd=tmp_path)
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.startswith("error: ")
    assert "Traceback" not in outcome.err
    assert list(tmp_path.iterdir()) == []


RECORD = {"round": 3, "loss": {"total": 0.5}, "metrics": {"accuracy": 0.25}, "seconds": 2.0, "images": 100}


def test_lines_tell_what_there_is_to_tell() -> None:
    console = Console(file=StringIO(), width=40)
    lines = Lines(console)
    lines.started(2, 10)
    lines.finished_round(RECORD)
    lines.finished_round({**RECORD, "round": 4, "loss": {"total": None}, "metrics": {"accuracy": None}, "images": 0})
    lines.finished_round({**RECORD, "round": 5, "loss": {}, "metrics": {}})
    lines.warn("client 3 was left out: 'w' is torch.float32 [bold]")
    assert isinstance(console.file, StringIO)
    first, second, third, warning = console.file.getvalue().splitlines()
    assert first.startswith("round    3/10  loss 0.500  accuracy 0.250  50 images/s  ")
    assert "loss" not in second
    assert "accuracy" not in second
    assert third.startswith("round    5/10  50 images/s")
    assert warning == "warning: client 3 was left out: 'w' is torch.float32 [bold]"


class Clock:
    """Stands still between moments."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lines_can_be_far_apart_and_the_last_is_always_said(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, console = Clock(), Console(file=StringIO(), width=80)
    monkeypatch.setattr("semifed.progress.monotonic", clock)
    lines = Lines(console, pause=60)
    lines.started(0, 10)
    for round_ in range(1, 11):
        clock.now = 14.0 * round_
        lines.finished_round({**RECORD, "round": round_})
    assert isinstance(console.file, StringIO)
    assert [line.split()[1] for line in console.file.getvalue().splitlines()] == ["5/10", "10/10"]


def test_a_stage_says_how_far_it_is_where_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, console = Clock(), Console(file=StringIO(), width=80)
    monkeypatch.setattr("semifed.progress.monotonic", clock)
    lines = Lines(console)
    for epoch in range(1, 8):
        clock.now = 4.0 * epoch
        lines.stage("warm-up", epoch, 7)
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue() == "warm-up 3/7\nwarm-up 6/7\n"


def test_the_bar_of_a_stage_goes_when_it_is_done() -> None:
    console = Console(file=StringIO(), width=60, force_terminal=True, color_system=None)
    bar = Bar(console)
    bar.stage("warm-up", 1, 2)
    bar.stage("warm-up", 2, 2)
    bar.started(0, 10)
    bar.finished_round(RECORD)
    bar.ended()
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    assert "warm-up" in shown
    assert "warm-up" not in shown.rpartition("\n")[0].splitlines()[-1]
    assert "3/10" in shown


def test_a_pipe_sees_how_far_the_warm_up_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    monkeypatch.setattr("semifed.progress.STAGE_PAUSE", 0)
    outcome = semifed(capsys, "run", recipe, "rounds=1", "server.warmup_epochs=2", "evaluate.folds=2")
    assert outcome.code == 0, outcome
    stages = [line for line in outcome.out.splitlines() if line.startswith(("warm-up", "threshold"))]
    warmed = ["warm-up 1/2", "warm-up 2/2"]
    assert stages == [*warmed, *(f"threshold {epoch}/4" for epoch in range(1, 5))]


def test_keys_that_do_nothing_are_said(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    keys = ["privacy.noise=1", "attack.scale=2", "scenario.partition=iid", "scenario.alpha=0.1"]
    outcome = semifed(capsys, "run", recipe, "rounds=1", *keys)
    assert outcome.code == 0, outcome
    assert [line for line in outcome.out.splitlines() if "does nothing" in line] == [
        "note: attack.scale does nothing with attack.kind = 'none'",
        "note: privacy.noise does nothing with privacy.mode = 'none', and nothing is private",
        "note: scenario.alpha does nothing with scenario.partition = 'iid'",
    ]
    assert "does nothing" not in semifed(capsys, "run", recipe, "rounds=1", "attack.kind=sign-flip").out


def test_the_bar_keeps_the_last_metrics_and_shows_the_cursor_again() -> None:
    console = Console(file=StringIO(), width=60, force_terminal=True, color_system=None)
    bar = Bar(console)
    bar.ended()
    bar.started(0, 10)
    bar.finished_round(RECORD)
    bar.finished_round({**RECORD, "round": 4, "metrics": {}})
    bar.ended()
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    assert "4/10" in shown
    assert "0.250" in shown.rpartition("4/10")[2]
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_a_reader_that_goes_away_gets_no_traceback(tmp_path: Path) -> None:
    for arguments in ("list recipes", "list recipes --json", "--help"):
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, "wb") as closed:
            done = subprocess.run(
                [sys.executable, "-m", "semifed", *arguments.split()],
                stdout=closed,
                stderr=subprocess.PIPE,
                cwd=tmp_path,
                env=surroundings(),
                text=True,
                timeout=120,
            )
        assert done.stderr == ""
        assert done.returncode != 0


@pytest.mark.parametrize("classes", ["open", "novel"])
def test_who_holds_what_is_shown_for_every_regime(
    capsys: pytest.CaptureFixture[str], recipe: str, classes: str
) -> None:
    """Also where the recipe's method could not train: a look at the data needs no method."""
    regime = [f"scenario.classes={classes}", "scenario.known_count=6"]
    outcome = semifed(capsys, "partition", recipe, *regime, "--out", "pictures/who.png")
    assert outcome.code == 0
    assert Path("pictures/who.png").read_bytes().startswith(b"\x89PNG")
    clients = tiny_tables()["scenario"]["clients"]
    assert [line.split()[0] for line in outcome.out.splitlines() if line.strip()[:1].isdigit()] == [
        str(client) for client in range(clients)
    ]
    assert not list(Path().glob("runs*"))
