"""What clients hold from round to round, on disk: one file for each client and the round it was left in.

A round may be repeated after an interruption, and an update may be refused: the client then goes on from an earlier
round's end, so that file stays until a later one is known to count.
"""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from semifed.client_round import Held
from semifed.durable import packed, write_atomically, write_together
from semifed.errors import UserError
from semifed.payloads import Nothing
from semifed.wire import from_arrays, to_arrays


class HeldStore:
    """The directory `kept/` of a run, or of one party's part in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(self, client: int, round_: int, held: Held) -> None:
        """What a client leaves a round with, whole or not at all: it may be asked again in this round."""
        if _worth_keeping(held):
            write_atomically(self.path(client, round_), packed(to_arrays(held), {}))

    def save_all(self, round_: int, held: Mapping[int, Held]) -> None:
        """What clients leave a round with that is not finished yet: nobody reads it before."""
        write_together(
            (self.path(client, round_), packed(to_arrays(one), {}))
            for client, one in held.items()
            if _worth_keeping(one)
        )

    def load(self, client: int, round_: int, kept_type: type) -> Held | None:
        """What a client left a round with, or None if it had nothing to remember."""
        path = self.path(client, round_)
        try:
            return _held(load_file(path), kept_type) if path.exists() else None
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged and cannot be resumed from: {error}") from None

    def forget_before(self, client: int, round_: int) -> None:
        """Delete what can never be gone back to."""
        directory = self.path(client, round_).parent
        if directory.is_dir():
            for path in directory.glob("*.safetensors*"):
                if path.name < f"{round_:06d}":
                    path.unlink(missing_ok=True)

    def path(self, client: int, round_: int) -> Path:
        """The file of a client and round."""
        return self.directory / f"{client:06d}" / f"{round_:06d}.safetensors"


def _worth_keeping(held: Held) -> bool:
    """An empty Kept is not the same as none: only a method without any has nothing to remember."""
    return bool(held.momentum or held.private) or not isinstance(held.kept, Nothing)


def _held(arrays: dict[str, Tensor], kept_type: type) -> Held:
    kept, *weights = (
        {name.removeprefix(f"{part}/"): a for name, a in arrays.items() if name.startswith(f"{part}/")}
        for part in Held._fields
    )
    return Held(from_arrays(kept_type, kept), *weights)
