"""Interrupted runs: at every write, by kill -9, Ctrl-C and SIGTERM; what is resumed ends in the same weights."""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from subprocess import Popen

import pytest
from rich.console import Console

from command import (
    assert_same_weights,
    group,
    leftovers,
    process,
    semifed,
    started,
    tiny_tables,
    written,
)
from semifed import durable, held
from semifed.assembly import Parts, prepare_run
from semifed.errors import UserError
from semifed.progress import Silent
from semifed.recipe import check_recipe
from semifed.run import execute
from semifed.rundir import RunDirectory

PATIENCE = 120.0  # seconds: the machine may be busy


class Killed(BaseException):
    """Nothing catches it: the process is as good as dead."""


@pytest.fixture(scope="module")
def parts() -> Parts:
    return prepare_run(check_recipe({**tiny_tables(), "rounds": 2}))


def run(parts: Parts, out: Path, *, resume: bool = False) -> None:
    execute(parts, out, Silent(Console(stderr=True)), resume=resume)


def rounds_of(out: Path) -> list[int]:
    return [line["round"] for line in RunDirectory(out).rounds()]


@pytest.mark.slow
def test_a_run_killed_at_any_write_is_resumed_to_the_same_end(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dies before and after each rename in turn, until there is no rename left to die at."""
    whole = tmp_path / "whole"
    run(parts, whole)
    rename = os.replace

    def dying(at: int, after: bool) -> Callable[[Path, Path], None]:
        calls = iter(range(10_000))

        def replace(source: Path, target: Path) -> None:
            dies = next(calls) == at
            if dies and not after:
                raise Killed
            rename(source, target)
            if dies:
                raise Killed

        return replace

    for moment in range(1000):
        out = tmp_path / f"{moment}"
        try:
            with monkeypatch.context() as patch:
                patch.setattr(os, "replace", dying(moment // 2, after=moment % 2 == 1))
                run(parts, out)
            break
        except Killed:
            run(parts, out, resume=(out / "recipe.toml").exists())
        assert_same_weights(out, whole)
        assert rounds_of(out) == [0, 1, 2]
        assert leftovers(out) == []
    assert moment > 20


def test_a_run_killed_amid_what_clients_keep_goes_on_from_the_round_before(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(parts, tmp_path / "whole")
    out = tmp_path / "run"

    def killed(files: Iterable[tuple[Path, bytes]]) -> None:
        given = list(files)
        if given and given[0][0].stem == "000002":
            path, content = given[0]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content[: len(content) // 2])
            raise Killed
        durable.write_together(given)

    with monkeypatch.context() as patch:
        patch.setattr(held, "write_together", killed)
        with pytest.raises(Killed):
            run(parts, out)
    assert rounds_of(out) == [0, 1]
    run(parts, out, resume=True)
    assert_same_weights(out, tmp_path / "whole")


def test_a_run_killed_between_the_checkpoint_and_its_line_loses_no_round(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(parts, tmp_path / "whole")

    def killed(self: RunDirectory, record: dict[str, object]) -> None:
        raise Killed

    out = tmp_path / "run"
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(RunDirectory, "append_round", killed)
            with pytest.raises(Killed):
                run(parts, out, resume=out.exists())
    run(parts, out, resume=True)
    assert rounds_of(out) == [0, 1, 2]
    assert_same_weights(out, tmp_path / "whole")
    whole, again = (json.loads((path / "summary.json").read_text()) for path in (tmp_path / "whole", out))
    for key in ("metrics", "metrics_last10", "bytes_up", "bytes_down", "data_hash", "per_class"):
        assert whole[key] == again[key]


def test_missing_lines_and_stray_parts_do_not_hinder(parts: Parts, tmp_path: Path) -> None:
    run(parts, tmp_path / "whole")
    out = tmp_path / "run"
    run(parts, out)
    (out / "rounds.jsonl").unlink()
    (out / "summary.json").unlink()
    for stray in ("recipe.toml.partial", "checkpoint/round-000009.safetensors.partial", ".report.html.1.partial"):
        (out / stray).write_text("half of")
    run(parts, out, resume=True)
    assert rounds_of(out) == [2]
    assert leftovers(out) == []
    assert_same_weights(out, tmp_path / "whole")


def test_a_run_does_not_go_on_with_other_images(parts: Parts, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(parts, out)
    (out / "summary.json").unlink()
    dataset = parts.scenario.dataset
    other = parts.scenario._replace(dataset=dataset._replace(y_train=(dataset.y_train + 1) % 10))
    with pytest.raises(UserError, match="was started with other images than digits has now: a resumed run keeps"):
        run(replace(parts, scenario=other), out, resume=True)
    (out / "data.json").unlink()  # as in runs of before
    run(parts, out, resume=True)


@pytest.mark.slow
def test_the_rounds_of_another_number_of_workers_go_on(parts: Parts, tmp_path: Path) -> None:
    """Two rounds with one worker, two with another number: as four with one."""
    four = prepare_run(check_recipe({**tiny_tables(), "rounds": 4}))
    run(four, tmp_path / "whole")
    out = tmp_path / "run"

    class StopAfterTwo(Silent):
        def finished_round(self, record: object) -> None:
            if isinstance(record, dict) and record["round"] == 2:
                raise Killed

    with pytest.raises(Killed):
        execute(four, out, StopAfterTwo(Console(stderr=True)))
    pooled = prepare_run(check_recipe({**tiny_tables(), "rounds": 4, "engine": {"workers": 2}}))
    run(pooled, out, resume=True)
    assert_same_weights(out, tmp_path / "whole")
    assert rounds_of(out) == [0, 1, 2, 3, 4]


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(0.02)


def begins_to_load(running: "Popen[str]") -> None:
    """The interpreter is up and the command at work: pydantic is loaded with the recipe."""

    def loaded() -> bool:
        try:
            return "pydantic_core" in Path(f"/proc/{running.pid}/maps").read_text()
        except OSError:
            return True

    wait_for(loaded, "the command's start")


def begins_rounds(running: "Popen[str]", out: Path, beyond: int) -> None:
    """A round was finished that was not there before, or the run ended."""

    def further() -> bool:
        return running.poll() is not None or max(rounds_of(out), default=-1) > beyond

    wait_for(further, "a round")


def printed_rounds(text: str) -> int:
    """The last round that a line said was finished."""
    numbers = [int(line.split()[1].split("/")[0]) for line in text.splitlines() if line.startswith("round ")]
    return max(numbers, default=-1)


def long_recipe(path: Path, rounds: int) -> str:
    return written(path / "long.toml", {**tiny_tables(), "rounds": rounds})


def stop(
    recipe: str, out: Path, workers: int, number: int, delay: float, *, amid_rounds: bool, whole_group: bool = False
) -> tuple[int, str]:
    """Start or resume, send a signal after a while, and check what is left behind; exit code and messages."""
    before = max(rounds_of(out), default=-1)
    begun = ["--resume"] if (out / "recipe.toml").exists() else []
    with started("run", recipe, "--out", str(out), "--workers", str(workers), *begun, cwd=out.parent) as running:
        begins_to_load(running)
        if amid_rounds:
            begins_rounds(running, out, before)
        time.sleep(delay)
        if running.poll() is None:
            os.killpg(running.pid, number) if whole_group else os.kill(running.pid, number)
        # Workers hold the pipes open: both end only when all of them are gone.
        printed, complaints = running.communicate(timeout=PATIENCE)
        wait_for(lambda: group(running.pid) == [], "the end of all workers")
        code = running.returncode
    after = max(rounds_of(out), default=-1)
    assert after >= before
    assert after >= printed_rounds(printed)
    assert "Traceback" not in complaints
    return code, complaints


def resumed_to_the_end(recipe: str, out: Path, rounds: int) -> None:
    begun = ["--resume"] if (out / "recipe.toml").exists() else []
    outcome = process("run", recipe, "--out", str(out), "-q", *begun, cwd=out.parent)
    assert outcome.code == 0, outcome
    assert outcome.err == ""
    assert rounds_of(out) == list(range(rounds + 1))
    assert leftovers(out) == []


@pytest.mark.slow
def test_ctrl_c_amid_a_round(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = long_recipe(tmp_path, 100_000)
    code, complaints = stop(recipe, tmp_path / "run", 1, signal.SIGINT, 0.1, amid_rounds=True)
    assert code == 130
    assert complaints == f"stopped; finished rounds are kept: go on with --resume --out {tmp_path / 'run'}\n"
    assert len(rounds_of(tmp_path / "run")) > 0
    assert semifed(capsys, "run", recipe, "--out", str(tmp_path / "run"), "--resume", "rounds=5").code == 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_ten_kills_at_random_moments(capsys: pytest.CaptureFixture[str], tmp_path: Path, seed: int) -> None:
    rounds = 150
    recipe = long_recipe(tmp_path, rounds)
    assert semifed(capsys, "run", recipe, "--out", str(tmp_path / "whole"), "-q").code == 0
    rng = random.Random(seed)
    out = tmp_path / "run"
    for kill in range(10):
        stop(recipe, out, 1 + kill % 2, signal.SIGKILL, rng.uniform(0, 0.4), amid_rounds=rng.random() < 0.8)
    resumed_to_the_end(recipe, out, rounds)
    assert_same_weights(out, tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_simulation_of_flowers_ends_when_told(number: signal.Signals, tmp_path: Path) -> None:
    """Ray takes SIGTERM over, and Flower's server app waits in a thread that outlives the main one."""
    recipe, out = long_recipe(tmp_path, 100_000), tmp_path / "run"
    with started("run", recipe, "engine.name=flower", "--out", str(out), "-q", cwd=tmp_path) as running:
        begins_rounds(running, out, 0)
        running.send_signal(number)
        _, told = running.communicate(timeout=60)
    assert running.returncode == 128 + number
    assert told == f"stopped; finished rounds are kept: go on with --resume --out {out}\n"


@pytest.mark.slow
def test_ctrl_c_and_sigterm_at_random_moments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rounds = 150
    recipe = long_recipe(tmp_path, rounds)
    assert semifed(capsys, "run", recipe, "--out", str(tmp_path / "whole"), "-q").code == 0
    rng = random.Random(7)
    out = tmp_path / "run"
    codes = []
    for turn in range(9):
        number = signal.SIGINT if turn % 3 else signal.SIGTERM
        amid_rounds = turn % 2 == 1
        # Before the first round: imports, data, the fork server and its workers, within a few seconds.
        delay = rng.uniform(0, 0.2) if amid_rounds else rng.uniform(0, 3)
        code, _ = stop(recipe, out, 2, number, delay, amid_rounds=amid_rounds, whole_group=True)
        assert code in (0, 128 + number)
        codes.append(code)
    resumed_to_the_end(recipe, out, rounds)
    assert_same_weights(out, tmp_path / "whole")
    assert codes.count(0) <= 3  # most of them were stopped before the end
