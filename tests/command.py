"""The command `semifed` for tests: in this process, or as a process that can be stopped and killed."""

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from semifed.recipe_file import load_recipe

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer imports names that the newest click is about to drop
    from semifed.cli import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def tiny_tables() -> dict[str, Any]:
    """Digits, six clients, a network of a few hundred weights: a round takes milliseconds."""
    return {
        "dataset": "digits",
        "rounds": 4,
        "clients_per_round": 3,
        "scenario": {"labels": "server", "clients": 6, "labelled_per_class": 2, "subset": 120},
        "model": {"name": "cnn", "width": [2, 3, 4]},
        "views": {"weak": "crop(1)", "strong": "crop(1) cutout(3)"},
        "method": {"name": "fedfixmatch", "threshold": 0.1},
        "local": {"steps": 1, "batch": 8, "keep_optimizer": True},
        "server": {"warmup_epochs": 1, "finetune_epochs": 1},
        "evaluate": {"every": 10, "folds": 0},
        "engine": {"workers": 1},
    }


def written(path: Path, tables: Mapping[str, Any]) -> str:
    """The tables as a recipe file."""
    path.write_text(tomli_w.dumps(tables))
    return str(path)


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested tables by dotted key."""
    leaves: dict[str, Any] = {}
    for key, value in tables.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def changes(one: str, other: str) -> dict[str, Any]:
    """What the second recipe says differently, None where it says nothing."""
    old, new = flat(load_recipe(one).plain()), flat(load_recipe(other).plain())
    return {key: new.get(key) for key in old | new if old.get(key) != new.get(key)}


def semifed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Outcome:
    """The command in this process."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["semifed", *arguments])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(bool(end.code))
    return Outcome(code, *capsys.readouterr())


def surroundings(**changes: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **changes}


def process(*arguments: str, cwd: Path, env: Mapping[str, str] | None = None) -> Outcome:
    """The command as a process of its own, to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "semifed", *arguments],
        cwd=cwd,
        env=env or surroundings(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@contextmanager
def started(*arguments: str, cwd: Path) -> Iterator["subprocess.Popen[str]"]:
    """The command as a process in a group of its own, which is gone at the end."""
    running = subprocess.Popen(
        [sys.executable, "-m", "semifed", *arguments],
        cwd=cwd,
        env=surroundings(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield running
    finally:
        if running.poll() is None:
            running.kill()
        running.communicate()


def group(leader: int) -> list[int]:
    """The living processes of a group; workers stay in the group of the command that started them."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except (OSError, ValueError):
                continue
            if int(pgrp) == leader and state != "Z":
                members.append(int(entry.name))
    return members


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def assert_same_weights(run: Path, other: Path) -> None:
    one, two = weights_of(run), weights_of(other)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def leftovers(run: Path) -> list[Path]:
    return [path for path in run.rglob("*") if "partial" in path.name]
