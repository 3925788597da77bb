"""Sweeps: names of their runs, mistakes found before the first run starts, and resuming."""

import json
from pathlib import Path

import pytest

from command import assert_same_weights, semifed, tiny_tables, written
from semifed.errors import UserError
from semifed.sweep import grid


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return written(tmp_path / "tiny.toml", {**tiny_tables(), "rounds": 2})


def names(recipe: str, *axes: str, seeds: str = "0") -> list[str]:
    return [name for name, _ in grid(recipe, axes, seeds)]


def test_a_run_is_named_by_its_method_and_what_varies(recipe: str) -> None:
    assert names(recipe) == ["fedfixmatch-seed0"]
    assert names(recipe, "local.lr=0.1", seeds="0,1") == ["fedfixmatch-seed0", "fedfixmatch-seed1"]
    assert names(recipe, "local.lr=0.1,1e-3", "method=server-only,fedfixmatch") == [
        "server-only-lr=0.1-seed0",
        "fedfixmatch-lr=0.1-seed0",
        "server-only-lr=1e-3-seed0",
        "fedfixmatch-lr=1e-3-seed0",
    ]
    assert names(recipe, "model.width=[1,2,3],[2, 2, 2]") == [
        "fedfixmatch-width=_1_2_3_-seed0",
        "fedfixmatch-width=_2_2_2_-seed0",
    ]
    assert names(recipe, "views.weak=crop(1),flip crop(1)") == [
        "fedfixmatch-weak=crop_1_-seed0",
        "fedfixmatch-weak=flip_crop_1_-seed0",
    ]


def test_a_method_by_its_full_key_is_the_same_axis(recipe: str) -> None:
    assert grid(recipe, ["method.name=server-only,fedfixmatch"], "0") == grid(
        recipe, ["method=server-only,fedfixmatch"], "0"
    )
    with pytest.raises(UserError, match="this axis is given 2 times"):
        grid(recipe, ["method.name=server-only", "method=fedfixmatch"], "0")


def test_two_keys_with_one_last_word_are_named_in_full(recipe: str) -> None:
    assert names(recipe, "local.lr=0.1,0.2", "server.lr=0.3,0.4")[0] == "fedfixmatch-local.lr=0.1-server.lr=0.3-seed0"


def test_the_recipes_hold_the_values_of_their_names(recipe: str) -> None:
    for name, loaded in grid(recipe, ["local.lr=0.1,0.2"], "3,4"):
        assert name == f"fedfixmatch-lr={loaded.local.lr}-seed{loaded.seed}"


@pytest.mark.parametrize(
    ("axes", "seeds", "message"),
    [
        (["local.lr"], "0", "'local.lr' is no axis"),
        (["local.lr="], "0", "is no axis"),
        (["=1,2"], "0", "is no axis"),
        (["seed=0,1"], "0", "--seeds 0,1"),
        (["local.lr=0.1,0.1"], "0", "share the directory fedfixmatch-lr=0.1-seed0"),
        (["views.weak=crop(1),crop[1]"], "0", "share the directory|views.weak"),
        (["local.lr=0.1", "local.lr=0.2"], "0", "this axis is given 2 times"),
        (["local.lr=0.1,fast"], "0", "local.lr: 'fast' is not a number"),
        (["local.rl=0.1,0.2"], "0", "did you mean 'lr'?"),
        ([], "0,x", "--seeds: '0,x'"),
        ([], "", "--seeds: ''"),
        ([], "0,0", "share the directory fedfixmatch-seed0"),
        ([], "-1", "seed: -1 is out of range"),
    ],
)
def test_mistakes_in_axes_and_seeds(recipe: str, axes: list[str], seeds: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(").replace("?", r"\?")):
        grid(recipe, axes, seeds)


@pytest.mark.parametrize("axis", ["scenario.labelled_per_class=2,9999", "model.width=[2,2,2],[2,2]", "rounds=1,0"])
def test_a_bad_axis_fails_before_the_first_run(capsys: pytest.CaptureFixture[str], recipe: str, axis: str) -> None:
    outcome = semifed(capsys, "sweep", recipe, axis, "--out", "grid")
    assert outcome.code == 2
    assert axis.partition("=")[0] in outcome.err
    assert not Path("grid").exists()


@pytest.mark.slow
def test_a_sweep_keeps_finished_runs_resumes_others_and_refuses_foreign_ones(
    capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    arguments = ("sweep", recipe, "local.lr=0.05,0.1", "--out", "grid")
    first = semifed(capsys, *arguments)
    assert first.code == 0
    assert "finished before" not in first.out
    assert Path("grid/compare.html").exists()
    untouched = Path("grid/fedfixmatch-lr=0.05-seed0/rounds.jsonl")
    before = untouched.stat().st_mtime_ns

    interrupted = Path("grid/fedfixmatch-lr=0.1-seed0")
    reference = Path("reference")
    interrupted.rename(reference)
    assert semifed(capsys, "run", recipe, "local.lr=0.1", "--out", str(interrupted), "-q").code == 0
    (interrupted / "summary.json").unlink()
    second = semifed(capsys, *arguments)
    assert second.code == 0
    assert second.out.count("finished before") == 1
    assert untouched.stat().st_mtime_ns == before
    assert json.loads((interrupted / "summary.json").read_text())["rounds"] == 2
    assert_same_weights(interrupted, reference)

    third = semifed(capsys, "sweep", recipe, "local.lr=0.05,0.1", "rounds=3", "--out", "grid")
    assert third.code == 2
    assert "was started with rounds = 2, now it is 3" in third.err


def test_a_run_that_fails_does_not_keep_the_others_from_running(
    capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    axes = (
        "local.lr=1e6,0.05",
        "server.lr=0.05",
        "method.threshold=0",
        "local.steps=9",
        "local.weight_decay=1",
        "rounds=1",
    )
    for _ in range(2):  # it is tried again, and again nothing else waits for it
        outcome = semifed(capsys, "sweep", recipe, *axes, "--out", "grid")
        assert outcome.code == 2
        assert "failed: round 1: only 0 of" in outcome.out
        assert outcome.err == "error: 1 of 2 runs failed: fedfixmatch-local.lr=1e6-seed0\n"
        assert Path("grid/fedfixmatch-local.lr=0.05-seed0/summary.json").exists()
        assert Path("grid/compare.html").exists()
    alone = semifed(capsys, "sweep", recipe, "local.lr=1e6", *axes[1:], "--out", "lost")
    assert alone.code == 2
    assert "1 of 1 runs failed" in alone.err


def test_a_floor_that_could_not_be_trained_does_not_hide_the_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wild = {"lr": 1e6, "steps": 9, "batch": 16, "weight_decay": 1.0}
    tables = {**tiny_tables(), "rounds": 1, "local": wild, "server": {"lr": 0.05}}
    recipe = written(tmp_path / "wild.toml", {**tables, "method": {"name": "fedfixmatch", "threshold": 0}})
    words = ("--floor", "fedfixmatch", "--reach", "50", "--against", "fedfixmatch", "--out", "grid")
    outcome = semifed(capsys, "sweep", recipe, "method=fedfixmatch,server-only", *words)
    assert outcome.code == 2
    assert outcome.err == "error: 1 of 2 runs failed: fedfixmatch-seed0\n"
    assert "server-only" in Path("grid/compare.html").read_text()
