"""What TensorBoard's own reader finds in the events of a run is what `rounds.jsonl` holds."""

import json
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from command import semifed, tiny_tables, written
from semifed.report.events import curves


def read(run: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}


def expected(run: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for line in (run / "rounds.jsonl").read_text().splitlines():
        record = json.loads(line)
        for table in ("loss", "metrics"):
            for key, value in record[table].items():
                if value is not None:
                    found.setdefault(f"{table}/{key}", []).append((record["round"], value))
        found.setdefault("seconds", []).append((record["round"], record["seconds"]))
    return found


def assert_complete(run: Path) -> None:
    said = read(run)
    for name, points in expected(run).items():
        assert said[name] == [(step, pytest.approx(value, rel=1e-6)) for step, value in points], name


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return written(tmp_path / "recipe.toml", tiny_tables() | {"evaluate": {"every": 2, "folds": 0}})


def test_every_number_of_every_round_is_there(capsys: pytest.CaptureFixture[str], tmp_path: Path, recipe: str) -> None:
    run = tmp_path / "run"
    assert semifed(capsys, "run", recipe, "--out", str(run), "--quiet", "--tensorboard").code == 0
    assert_complete(run)
    assert [step for step, _ in read(run)["metrics/accuracy"]] == [0, 2, 4]


def test_a_run_that_is_finished_gets_its_events_afterwards_and_never_twice(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, recipe: str
) -> None:
    run = tmp_path / "run"
    assert semifed(capsys, "run", recipe, "--out", str(run), "--quiet").code == 0
    assert not (run / "tensorboard").exists()
    for _ in range(2):
        assert semifed(capsys, "run", recipe, "--out", str(run), "--quiet", "--resume", "--tensorboard").code == 0
        assert_complete(run)


def test_a_resumed_run_has_one_curve_without_gaps(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    arguments = ("run", recipe, "--out", str(run), "--quiet", "--tensorboard")
    with monkeypatch.context() as patch:
        patch.setattr("semifed.run.RoundLoop._finish", lambda *_: 1 / 0)  # all rounds are done, the summary is not
        with pytest.raises(ZeroDivisionError):
            semifed(capsys, *arguments)
    kept = (run / "rounds.jsonl").read_text().splitlines()
    assert len(kept) == 5
    assert semifed(capsys, *arguments, "--resume").code == 0
    assert_complete(run)


def test_lists_words_and_what_was_not_measured_are_no_curves() -> None:
    record = {"round": 3, "lr": 0.1, "clients": [1], "gate": {"purity": None, "of": {"a": 2}}, "note": "x"}
    assert dict(curves(record)) == {"lr": 0.1, "gate/of/a": 2.0}


def test_without_the_package_one_line_names_the_extra(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    said = semifed(capsys, "run", recipe, "--out", str(tmp_path / "run"), "--tensorboard")
    assert said.code == 2
    assert said.err == "error: --tensorboard needs the package: pip install 'semifed[tensorboard]'\n"
    assert not (tmp_path / "run").exists()
