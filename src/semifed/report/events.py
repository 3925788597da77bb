"""The rounds of a run as TensorBoard reads them."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from semifed.errors import UserError
from semifed.progress import Reporter

FOLDER = "tensorboard"  # in the run directory


class Events:
    """Passes everything on to another reporter and writes each number of a round for TensorBoard.

    `rounds.jsonl` is the truth: what it holds when a process starts is written anew, so that a resumed run has one
    curve without gaps, and rounds that were lost in a crash are not in it twice.
    """

    def __init__(self, told_too: Reporter, run: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("--tensorboard needs the package: pip install 'semifed[tensorboard]'") from None
        self._make_writer = SummaryWriter
        self._told_too, self._run = told_too, run
        self._writer: SummaryWriter | None = None

    def started(self, first: int, rounds: int) -> None:
        """Begin with the rounds that are there."""
        self.write_finished_rounds()
        self._told_too.started(first, rounds)

    def write_finished_rounds(self) -> None:
        """All of `rounds.jsonl`, in place of events written before."""
        shutil.rmtree(self._run / FOLDER, ignore_errors=True)
        self._writer = self._make_writer(str(self._run / FOLDER))
        for line in (self._run / "rounds.jsonl").read_text().splitlines():
            self._write(json.loads(line))

    def finished_round(self, record: Mapping[str, Any]) -> None:
        """One more point on every curve."""
        self._write(record)
        self._told_too.finished_round(record)

    def stage(self, name: str, done: int, total: int) -> None:
        """Not for TensorBoard."""
        self._told_too.stage(name, done, total)

    def warn(self, text: str) -> None:
        """Not for TensorBoard."""
        self._told_too.warn(text)

    def ended(self) -> None:
        """All that was written is on disk."""
        if self._writer is not None:
            self._writer.close()
        self._told_too.ended()

    def _write(self, record: Mapping[str, Any]) -> None:
        assert self._writer is not None, "started() comes first"
        for name, value in curves(record):
            self._writer.add_scalar(name, value, record["round"])
        self._writer.flush()


def curves(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a round by name, `metrics/accuracy`; lists, words and what could not be measured are left out."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from curves(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and key != "round":
            yield prefix + key, float(value)
