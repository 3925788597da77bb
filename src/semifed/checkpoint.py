"""The last finished round on disk: complete or not there at all.

`round-000012.safetensors` holds the server's state and the round's record; renaming it into place is what
finishes the round. What clients keep lies beside it, one file a client, written only when it changed.
"""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from semifed.client_round import Held
from semifed.errors import UserError
from semifed.payloads import Nothing
from semifed.wire import from_arrays, to_arrays

PARTIAL = ".partial"


class Finished(NamedTuple):
    """A finished round as read back."""

    round: int
    server: Any
    record: dict[str, Any]
    held: dict[int, Held]


class Checkpoint:
    """The directory `checkpoint/` of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(self, round_: int, server: Any, record: dict[str, Any], changed: dict[int, Held]) -> None:
        """Finish a round; an interruption at any moment leaves this round or the one before."""
        for client, held in changed.items():
            # An empty Kept is not the same as none: only a method without any writes no file.
            if held.momentum or held.private or not isinstance(held.kept, Nothing):
                write_atomically(self._kept(client, round_), _packed(to_arrays(held), {}))
        text = {"round": str(round_), "record": json.dumps(record)}
        write_atomically(self._file(round_), _packed(to_arrays(server), text))
        self._prune(round_, changed)

    def load(self, server_type: type, kept_type: type) -> Finished | None:
        """The last finished round, or None before the first."""
        rounds = [int(path.stem[6:]) for path in self.directory.glob("round-*.safetensors") if path.stem[6:].isdigit()]
        if not rounds:
            return None
        last = max(rounds)
        path = self._file(last)
        try:
            with safe_open(path, "pt") as opened:
                record = json.loads(opened.metadata()["record"])
                arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            server: Any = from_arrays(server_type, arrays)
            held = {}
            for client, round_ in self._newest_kept(last).items():
                path = self._kept(client, round_)
                held[client] = _held(load_file(path), kept_type)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged and cannot be resumed from: {error}") from None
        return Finished(last, server, record, held)

    def _file(self, round_: int) -> Path:
        return self.directory / f"round-{round_:06d}.safetensors"

    def _kept(self, client: int, round_: int) -> Path:
        return self.directory / "kept" / f"{client:06d}" / f"{round_:06d}.safetensors"

    def _newest_kept(self, last: int) -> dict[int, int]:
        newest: dict[int, int] = {}
        for path in sorted((self.directory / "kept").glob("*/*.safetensors")):
            if int(path.stem) <= last:
                newest[int(path.parent.name)] = int(path.stem)
        return newest

    def _prune(self, round_: int, changed: Iterable[int]) -> None:
        for path in self.directory.glob("round-*.safetensors*"):
            if path != self._file(round_):
                path.unlink()
        for client in changed:
            for path in self._kept(client, round_).parent.glob("*"):
                if path != self._kept(client, round_):
                    path.unlink()


def _held(arrays: dict[str, Tensor], kept_type: type) -> Held:
    kept, *weights = (
        {name.removeprefix(f"{part}/"): a for name, a in arrays.items() if name.startswith(f"{part}/")}
        for part in Held._fields
    )
    return Held(from_arrays(kept_type, kept), *weights)


def _packed(arrays: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    # A server may hold one tensor twice (a moving average before its first round); the format wants each its own.
    return save({name: array.clone(memory_format=torch.contiguous_format) for name, array in arrays.items()}, metadata)


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file so that it is either the old one or the whole new one, also after a power cut."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise not_written(path, error) from None


def not_written(path: Path, error: OSError) -> UserError:
    """A full disk or a missing permission, in words."""
    return UserError(f"{path} cannot be written: {error.strerror or error}; what was finished before is kept")
