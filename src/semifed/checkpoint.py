"""The last finished round on disk: complete or not there at all.

`round-000012.safetensors` holds the server's state and the round's record; renaming it into place is what
finishes the round. What clients keep lies beside it, one file a client, written only when it changed; the round's file
says which of them count.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from semifed.client_round import Held
from semifed.durable import packed, write_atomically
from semifed.errors import UserError
from semifed.held import HeldStore
from semifed.wire import from_arrays, to_arrays

_LEFT = "/left"  # clients and rounds [2, n]; no part of a payload has such a name


class Finished(NamedTuple):
    """A finished round as read back."""

    round: int
    server: Any
    record: dict[str, Any]
    left: dict[int, int]  # by client, the round whose end it goes on from


class Checkpoint:
    """The directory `checkpoint/` of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = HeldStore(directory / "kept")

    def save(
        self,
        round_: int,
        server: Any,
        record: dict[str, Any],
        left: Mapping[int, int],
        changed: Mapping[int, Held],
    ) -> None:
        """Finish a round; an interruption at any moment leaves this round or the one before.

        `left` tells the round whose end each client goes on from, `changed` what clients now hold, unless they wrote it
        themselves.
        """
        self.store.save_all(round_, changed)
        text = {"round": str(round_), "record": json.dumps(record)}
        # Numbers, not text: a hundred thousand clients may have taken part.
        columns = [torch.from_numpy(np.fromiter(side, np.int64, len(left))) for side in (left, left.values())]
        write_atomically(self._file(round_), packed(to_arrays(server) | {_LEFT: torch.stack(columns)}, text))
        for path in self.directory.glob("round-*.safetensors*"):
            if path != self._file(round_):
                path.unlink()
        for client, last in left.items():
            if last == round_:
                self.store.forget_before(client, round_)

    def load(self, server_type: type) -> Finished | None:
        """The last finished round, or None before the first."""
        rounds = [int(path.stem[6:]) for path in self.directory.glob("round-*.safetensors") if path.stem[6:].isdigit()]
        if not rounds:
            return None
        last = max(rounds)
        path = self._file(last)
        try:
            with safe_open(path, "pt") as opened:
                metadata = opened.metadata()
                record = json.loads(metadata["record"])
                arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            left = dict(zip(*arrays.pop(_LEFT).tolist(), strict=True))
            server: Any = from_arrays(server_type, arrays)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged and cannot be resumed from: {error}") from None
        return Finished(last, server, record, left)

    def _file(self, round_: int) -> Path:
        return self.directory / f"round-{round_:06d}.safetensors"
