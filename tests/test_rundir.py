"""Run directories: refused, claimed, damaged, on full disks and without permission."""

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command import assert_same_weights, leftovers, semifed, tiny_tables, written
from semifed.assembly import prepare_run
from semifed.durable import write_atomically
from semifed.errors import UserError
from semifed.recipe import Recipe, check_recipe
from semifed.recipe_file import load_recipe
from semifed.run import execute
from semifed.rundir import RunDirectory, finite, json_line, summary
from toys import Quiet


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return written(tmp_path / "tiny.toml", {**tiny_tables(), "rounds": 3})


@pytest.fixture
def checked() -> Recipe:
    return check_recipe(tiny_tables())


def full_disk(after: int) -> Callable[[int], None]:
    """`os.fsync` on a disk that is full after so many files."""
    calls = iter(range(10_000))

    def fsync(descriptor: int) -> None:
        if next(calls) >= after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return fsync


def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "file"
    write_atomically(path, "old")
    monkeypatch.setattr(os, "fsync", full_disk(0))
    with pytest.raises(UserError, match="deep/file cannot be written: No space left on device"):
        write_atomically(path, b"new")
    assert path.read_text() == "old"
    assert [child.name for child in path.parent.iterdir()] == ["file"]


def test_a_file_system_that_cannot_sync_directories_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems refuse it; the file is in place then."""
    synced = os.fsync

    def picky(opened: int) -> None:
        if stat.S_ISDIR(os.fstat(opened).st_mode):
            raise OSError(22, "Invalid argument")
        synced(opened)

    monkeypatch.setattr(os, "fsync", picky)
    write_atomically(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"


@pytest.mark.parametrize("after", [0, 1, 2, 5, 9, 16, 24])
def test_a_full_disk_keeps_what_was_finished(
    capsys: pytest.CaptureFixture[str], recipe: str, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk(after))
        outcome = semifed(capsys, "run", recipe, "--out", "deep/run")
    assert outcome.code == 2
    assert "cannot be written: No space left on device" in outcome.err
    assert "deep/run/" in outcome.err
    printed = sum(line.startswith("round ") for line in outcome.out.splitlines())
    begun = Path("deep/run/recipe.toml").exists()
    if not begun:
        assert not Path("deep").exists()
    assert leftovers(Path()) == []
    assert semifed(capsys, "run", recipe, "--out", "deep/run", "-q", *(["--resume"] if begun else [])).code == 0
    rounds = [json.loads(line)["round"] for line in Path("deep/run/rounds.jsonl").read_text().splitlines()]
    assert rounds == [0, 1, 2, 3]
    assert printed <= 3


def test_a_full_disk_amid_a_line_of_rounds(
    capsys: pytest.CaptureFixture[str], recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_a_line(self: RunDirectory, record: dict[str, Any]) -> None:
        with open(self.path / "rounds.jsonl", "a") as file:
            file.write(json_line(record)[:20] if record["round"] == 2 else json_line(record))
        if record["round"] == 2:
            raise UserError("full")

    assert semifed(capsys, "run", recipe, "--out", "whole", "-q").code == 0
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "append_round", half_a_line)
        assert semifed(capsys, "run", recipe, "--out", "run", "-q").code == 2
    assert semifed(capsys, "run", recipe, "--out", "run", "-q", "--resume").code == 0
    assert_same_weights(Path("run"), Path("whole"))
    lines = [json.loads(line) for line in Path("run/rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2, 3]
    assert all(line["clients"] for line in lines[1:])


def test_rounds_that_cannot_be_appended(tmp_path: Path, checked: Recipe) -> None:
    rundir = RunDirectory(tmp_path / "run")
    rundir.open(checked, resume=False)
    (tmp_path / "run" / "rounds.jsonl").mkdir()
    with pytest.raises(UserError, match=r"rounds\.jsonl cannot be written: Is a directory"):
        rundir.append_round({"round": 1})


@pytest.mark.parametrize("failing", [errno.EACCES, errno.EROFS])
def test_a_directory_that_may_not_be_made(
    capsys: pytest.CaptureFixture[str], recipe: str, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    def refused(self: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        raise OSError(failing, os.strerror(failing), str(self))

    monkeypatch.setattr(Path, "mkdir", refused)
    outcome = semifed(capsys, "run", recipe, "--out", "deep/run")
    assert outcome.code == 2
    assert outcome.err == f"error: --out deep/run cannot be used: {os.strerror(failing)}\n"


@pytest.mark.parametrize(
    ("out", "message"),
    [("tiny.toml", "--out tiny.toml is a file"), ("tiny.toml/run", "Not a directory"), ("full", "not empty")],
)
def test_places_where_no_run_can_be(capsys: pytest.CaptureFixture[str], recipe: str, out: str, message: str) -> None:
    Path("full").mkdir()
    Path("full/thesis.tex").write_text("years of work")
    outcome = semifed(capsys, "run", recipe, "--out", out)
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert sorted(path.name for path in Path().iterdir()) == ["full", "tiny.toml"]


def test_resuming_where_there_is_no_run(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    for out in ("absent", "tiny.toml"):
        outcome = semifed(capsys, "run", recipe, "--out", out, "--resume")
        assert outcome.code == 2
        assert outcome.err == f"error: {out} holds no run to resume (no recipe.toml)\n"
    assert not Path("absent").exists()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("local.lr=0.5", "local.lr = 0.03, now it is 0.5"),
        ("rounds=9", "rounds = 3, now it is 9"),
        ("scenario.alpha=2", "scenario.alpha = absent, now it is 2"),
        ("method.threshold=0.2", "method.threshold = 0.1, now it is 0.2"),
        ("method=server-only", "method.name = 'fedfixmatch', now it is 'server-only'"),
        ("model.width=[2,2,2]", "model.width = [2, 3, 4], now it is [2, 2, 2]"),
    ],
)
def test_a_resumed_run_keeps_its_recipe(
    capsys: pytest.CaptureFixture[str], recipe: str, checked: Recipe, override: str, told: str
) -> None:
    started = check_recipe({**tiny_tables(), "rounds": 3})
    rundir = RunDirectory(Path("run"))
    rundir.open(started, resume=False)
    rundir.close()
    outcome = semifed(capsys, "run", recipe, "--out", "run", "--resume", override)
    assert outcome.code == 2
    assert f"run was started with {told}" in outcome.err
    assert "another --out" in outcome.err


@pytest.mark.parametrize(
    ("table", "usual", "other"),
    [
        ("model", {"precision": "float32"}, {"precision": "bfloat16"}),
        ("method", {"name": "sage", "statistics": "averaged"}, {"name": "sage", "statistics": "batch"}),
    ],
)
def test_a_key_that_came_later_is_at_its_default_in_older_runs(
    table: str, usual: dict[str, str], other: dict[str, str], tmp_path: Path
) -> None:
    def recipe(keys: dict[str, str]) -> Recipe:
        tables = tiny_tables()
        own = keys if table == "method" else {**tables[table], **keys}
        return check_recipe({**tables, table: own})

    rundir = RunDirectory(tmp_path / "run")
    rundir.open(recipe(usual), resume=False)
    rundir.close()
    stored = tmp_path / "run" / "recipe.toml"
    text = stored.read_text()
    key = list(usual)[-1]
    line = f'{key} = "{usual[key]}"\n'
    assert line in text
    stored.write_text(text.replace(line, ""))
    rundir.open(recipe(usual), resume=True)
    rundir.close()
    told = rf"was started with {table}\.{key} = '{usual[key]}', now it is '{other[key]}'"
    with pytest.raises(UserError, match=told):
        rundir.open(recipe(other), resume=True)


def test_only_what_moves_no_number_may_change(tmp_path: Path, checked: Recipe) -> None:
    rundir = RunDirectory(tmp_path / "run")
    rundir.open(checked, resume=False)
    rundir.close()
    changed = {"engine": {"workers": 2, "timeout": 9.0}, "data": str(tmp_path), "min_clients": 0}
    other = check_recipe({**tiny_tables(), **changed})
    rundir.open(other, resume=True)


def test_two_processes_cannot_write_one_run(tmp_path: Path, checked: Recipe) -> None:
    first, second = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "run")
    first.open(checked, resume=False)
    with pytest.raises(UserError, match="another process is running in"):
        second.open(checked, resume=True)
    first.close()
    second.open(checked, resume=True)


def test_a_process_killed_before_its_first_file_was_whole(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    Path("run").mkdir()
    Path("run/recipe.toml.partial").write_text("dataset = ")
    assert semifed(capsys, "run", recipe, "--out", "run", "-q").code == 0
    assert leftovers(Path("run")) == []


def test_resuming_a_finished_run_changes_nothing_but_the_report(
    capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    assert semifed(capsys, "run", recipe, "--out", "run", "-q").code == 0
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*") if path.is_file()}
    outcome = semifed(capsys, "run", recipe, "--out", "run", "--resume")
    assert outcome.code == 0
    assert "run is finished already" in outcome.out
    assert "fedfixmatch after round 3: accuracy" in outcome.out
    after = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*") if path.is_file()}
    assert {path.name for path in before if before[path] != after[path]} <= {"report.html"}
    assert before.keys() == after.keys()
    assert semifed(capsys, "run", recipe, "--out", "run", "--resume", "-q").out == ""


@pytest.mark.parametrize("damaged", ["recipe.toml", "checkpoint/round-000002.safetensors", "checkpoint/kept"])
def test_damaged_files_are_named(capsys: pytest.CaptureFixture[str], recipe: str, damaged: str) -> None:
    with pytest.raises(KeyboardInterrupt):  # in round 3 the others of what clients kept are needed
        execute(prepare_run(load_recipe(recipe)), Path("run"), Quiet(stop_after=2))
    path = Path("run") / damaged
    for each in path.rglob("*.safetensors") if path.is_dir() else [path]:
        each.write_bytes(b"\xff\x00 not what it was")
    outcome = semifed(capsys, "run", recipe, "--out", "run", "--resume")
    assert outcome.code == 2
    assert f"{path}" in outcome.err
    assert " is damaged" in outcome.err
    assert "Traceback" not in outcome.err


def test_strange_files_in_the_checkpoint_are_not_rounds(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    assert semifed(capsys, "run", recipe, "--out", "run", "-q").code == 0
    Path("run/checkpoint/round-backup.safetensors").write_text("mine")
    Path("run/summary.json").unlink()
    assert semifed(capsys, "run", recipe, "--out", "run", "--resume", "-q").code == 0


def test_the_lines_of_a_damaged_rounds_file_that_can_be_read(tmp_path: Path) -> None:
    rundir = RunDirectory(tmp_path)
    assert rundir.rounds() == []
    good = [{"round": number, "metrics": {}} for number in range(3)]
    lines = [json_line(line).encode() for line in good]
    (tmp_path / "rounds.jsonl").write_bytes(
        lines[0] + b'{"round": 1, "met\n' + b"\xff\xfe\n" + b"[3]\n" + lines[1] + lines[2] + b'{"rou'
    )
    assert rundir.rounds() == good
    rundir.truncate_rounds(1, good[1])
    assert rundir.rounds() == good[:2]
    rundir.truncate_rounds(2, good[2])
    assert rundir.rounds() == good
    rundir.truncate_rounds(None, None)
    assert rundir.rounds() == []


def test_numbers_that_are_none_become_null() -> None:
    content = {"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": (float("-inf"), "nan")}, "e": True}
    assert finite(content) == {"a": None, "b": [None, 1.5], "c": {"d": [None, "nan"]}, "e": True}
    assert json.loads(json_line(content))["b"] == [None, 1.5]


def test_the_headline_leaves_out_the_state_before_the_first_exchange(checked: Recipe) -> None:
    cost = {"seconds": 1.0, "images": 10, "bytes_up": 2, "bytes_down": 3}
    rounds = [{"round": number, "metrics": {"accuracy": value}, **cost} for number, value in enumerate((0.9, 0.2, 0.4))]
    found = summary(checked, rounds, {})
    assert found["metrics"] == {"accuracy": 0.4}
    assert found["metrics_last10"] == {"accuracy": pytest.approx(0.3)}
    assert found["best"]["round"] == 2
    assert (found["bytes_up"], found["images_per_second"]) == (6, 10.0)
    rounds[2]["metrics"] = {"accuracy": 0.4, "auroc_seen": 0.8}  # a later release tests more than the run began with
    assert summary(checked, rounds, {})["metrics_last10"] == {"accuracy": pytest.approx(0.3)}
