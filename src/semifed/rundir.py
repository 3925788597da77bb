"""The run directory: everything needed to resume, compare, predict and audit."""

import fcntl
import json
import math
import os
import platform
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

import semifed
from semifed.checkpoint import Checkpoint
from semifed.complaint import shown
from semifed.durable import PARTIAL, write_atomically
from semifed.errors import UserError, not_written
from semifed.override import moves_numbers
from semifed.recipe import Recipe, with_later_keys
from semifed.wire import Weights


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = Checkpoint(path / "checkpoint")
        self._lock: int | None = None

    def open(self, recipe: Recipe, *, resume: bool) -> None:
        """Start a run here, or check that this is the run to be resumed; no other process may write here then."""
        try:
            if resume:
                self._refuse_another_run(recipe)
                self._claim()
                self._remove_partial_files()
            else:
                self._refuse_what_is_there()
                self._begin(recipe)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise UserError(f"--out {self.path} cannot be used: {error.strerror or error}") from None
            raise

    def close(self) -> None:
        """Let other processes write here."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def finished(self, recipe: Recipe) -> dict[str, Any] | None:
        """The summary of this recipe's run, if it is finished; a run of another recipe is refused."""
        self._refuse_another_run(recipe)
        return self.read_json("summary.json")

    def _refuse_another_run(self, recipe: Recipe) -> None:
        stored = self.path / "recipe.toml"
        try:
            tables = tomllib.loads(stored.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{self.path} holds no run to resume (no recipe.toml)") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{stored} is damaged, so the run cannot be resumed: {error}") from None
        _refuse_change(with_later_keys(tables), recipe.plain(), self.path)

    def _refuse_what_is_there(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--out {self.path} is a file, not a directory")
        if (self.path / "recipe.toml").exists():
            raise UserError(f"{self.path} already holds a run; continue it with --resume, or choose another --out")
        # A process that was killed before its first file was whole leaves a part of it.
        if self.path.exists() and any(child.suffix != PARTIAL for child in self.path.iterdir()):
            raise UserError(f"{self.path} is there already and not empty; choose another --out")

    def _begin(self, recipe: Recipe) -> None:
        made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._claim()
            write_atomically(self.path / "recipe.toml", recipe.to_toml())
        except (OSError, UserError):
            for directory in made:
                with suppress(OSError):
                    directory.rmdir()
            raise

    def _claim(self) -> None:
        """Held until the process ends, however it ends."""
        lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UserError(f"another process is running in {self.path}; wait for it or choose another --out") from None
        except OSError:  # some network file systems have no locks
            os.close(lock)
            return
        self._lock = lock

    def _remove_partial_files(self) -> None:
        for path in self.path.rglob(f"*{PARTIAL}"):
            path.unlink(missing_ok=True)

    def truncate_rounds(self, last: int | None, record: Mapping[str, Any] | None) -> None:
        """Make rounds.jsonl end with the last finished round."""
        kept = [line for line in self.rounds() if last is not None and line["round"] <= last]
        if record is not None and (not kept or kept[-1]["round"] != last):
            kept.append(dict(record))
        text = "".join(json_line(line) for line in kept)
        write_atomically(self.path / "rounds.jsonl", text)

    def append_round(self, record: Mapping[str, Any]) -> None:
        """One more line in rounds.jsonl."""
        path = self.path / "rounds.jsonl"
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json_line(record))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise not_written(path, error) from None

    def rounds(self) -> list[dict[str, Any]]:
        """The finished rounds; an incomplete last line, left by a crash, is not one."""
        path = self.path / "rounds.jsonl"
        if not path.exists():
            return []
        lines = []
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict) and "round" in line:
                    lines.append(line)
        return lines

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """A JSON file of the directory."""
        write_atomically(self.path / name, json.dumps(finite(content), indent=2, allow_nan=False) + "\n")

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the directory; None where it has none, or a damaged one."""
        try:
            content: dict[str, Any] = json.loads((self.path / name).read_text())
        except (OSError, ValueError):
            return None
        return content

    def write_bytes(self, name: str, content: bytes) -> None:
        """Any other file of the directory."""
        (self.path / name).parent.mkdir(exist_ok=True)
        write_atomically(self.path / name, content)

    def write_model(self, weights: Weights, description: Mapping[str, Any], labelled: Weights | None = None) -> None:
        """The delivered model, which loads without the run, and the labelled images it groups others beside."""
        for name, tensors in (("model", weights), ("labelled", labelled)):
            if tensors is not None:
                arrays = {key: tensor.contiguous() for key, tensor in tensors.items()}
                write_atomically(self.path / "model" / f"{name}.safetensors", save(arrays))
        self.write_json("model/model.json", description)


def summary(recipe: Recipe, rounds: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The content of summary.json: the headline is the last round and the mean of the last ten tests."""
    tested = [line for line in rounds if line["metrics"] and line["round"] > 0]  # round 0 is before any exchange
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
            if all(line.get(key) is not None for line in ten)  # a run may have begun before a test was thought of
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
        "git_revision": git_revision(),
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
    """A resumed run must be the same run; only what decides no number may differ."""
    old, new = _flat(stored), _flat(wanted)
    if new.get("method.novel") == 0:  # left to the data, which have told it since
        new["method.novel"] = old.get("method.novel")
    for key in sorted(set(old) | set(new)):
        if moves_numbers(key) and old.get(key) != new.get(key):
            raise UserError(
                f"{path} was started with {key} = {_or_absent(old, key)}, now it is {_or_absent(new, key)}: "
                "a resumed run keeps its recipe; choose another --out for a new one"
            )


def _or_absent(flat: Mapping[str, Any], key: str) -> str:
    return shown(flat[key]) if key in flat else "absent"


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat


def git_revision() -> str | None:
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
