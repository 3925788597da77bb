"""The run directory: everything needed to resume, compare, predict and audit."""

import json
import math
import platform
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

import semifed
from semifed.checkpoint import Checkpoint, write_atomically
from semifed.errors import UserError
from semifed.recipe import Recipe
from semifed.wire import Weights


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = Checkpoint(path / "checkpoint")

    def open(self, recipe: Recipe, *, resume: bool) -> None:
        """Start a run here, or check that this is the run to be resumed."""
        stored = self.path / "recipe.toml"
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--out {self.path} is a file, not a directory")
        if resume:
            if not stored.exists():
                raise UserError(f"{self.path} holds no run to resume (no recipe.toml)")
            _refuse_change(tomllib.loads(stored.read_text()), recipe.plain(), self.path)
            return
        if self.path.exists() and any(self.path.iterdir()):
            hint = "continue it with --resume, or" if stored.exists() else "it is not empty:"
            raise UserError(f"{self.path} is already there; {hint} choose another --out")
        write_atomically(stored, recipe.to_toml())

    def truncate_rounds(self, last: int | None, record: Mapping[str, Any] | None) -> None:
        """Make rounds.jsonl end with the last finished round."""
        kept = [line for line in self.rounds() if last is not None and line["round"] <= last]
        if record is not None and (not kept or kept[-1]["round"] != last):
            kept.append(dict(record))
        text = "".join(json_line(line) for line in kept)
        write_atomically(self.path / "rounds.jsonl", text)

    def append_round(self, record: Mapping[str, Any]) -> None:
        """One more line in rounds.jsonl."""
        with open(self.path / "rounds.jsonl", "a") as file:
            file.write(json_line(record))

    def rounds(self) -> list[dict[str, Any]]:
        """The finished rounds; an incomplete last line, left by a crash, is not one."""
        path = self.path / "rounds.jsonl"
        if not path.exists():
            return []
        lines = []
        for text in path.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                break
        return lines

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """A JSON file of the directory."""
        write_atomically(self.path / name, json.dumps(finite(content), indent=2, allow_nan=False) + "\n")

    def write_model(self, weights: Weights, description: Mapping[str, Any]) -> None:
        """The delivered model, which loads without the run."""
        arrays = {name: tensor.contiguous() for name, tensor in weights.items()}
        write_atomically(self.path / "model" / "model.safetensors", save(arrays))
        self.write_json("model/model.json", description)


def summary(recipe: Recipe, rounds: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The content of summary.json: the headline is the last round and the mean of the last ten tests."""
    tested = [line for line in rounds if line["metrics"]]
    last = tested[-1]["metrics"] if tested else {}
    ten = [line["metrics"] for line in tested[-10:]]
    best = max(tested, key=lambda line: line["metrics"]["accuracy"] or -math.inf, default=None)
    seconds = sum(line["seconds"] for line in rounds)
    images = sum(line["images"] for line in rounds)
    return {
        "method": recipe.method["name"],
        "dataset": recipe.dataset,
        "seed": recipe.seed,
        "rounds": recipe.rounds,
        "metrics": last,
        "metrics_last10": {
            key: float(np.mean([line[key] for line in ten]))
            for key in last
            if all(line[key] is not None for line in ten)
        },
        "best": best
        and {
            "round": best["round"],
            "metric": "accuracy",
            "value": best["metrics"]["accuracy"],
            "note": "best test round, not a result",
        },
        "bytes_up": sum(line["bytes_up"] for line in rounds),
        "bytes_down": sum(line["bytes_down"] for line in rounds),
        "seconds": seconds,
        "images_per_second": images / seconds if seconds else 0.0,
        **facts,
        "versions": {
            "semifed": semifed.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "git_revision": _git_revision(),
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} thread a process",
    }


def json_line(content: Mapping[str, Any]) -> str:
    """One line of JSON; numbers that are none become null."""
    return json.dumps(finite(content), allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """The same content with NaN and infinity as None: JSON has no word for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value


def _refuse_change(stored: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    """A resumed run must be the same run; only the engine, which cannot change a number, may differ."""
    old, new = _flat(stored), _flat(wanted)
    for key in sorted(set(old) | set(new)):
        if not key.startswith("engine.") and old.get(key) != new.get(key):
            raise UserError(
                f"{path} was started with {key} = {old.get(key, 'absent')}, now it is {new.get(key, 'absent')}: "
                "a resumed run keeps its recipe; choose another --out for a new one"
            )


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat


def _git_revision() -> str | None:
    """The revision of the checkout the package runs from, with a mark if files were changed."""
    here = Path(sys.modules["semifed"].__file__ or ".").parent
    try:
        revision = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return revision.stdout.strip() or None if revision.returncode == 0 else None
