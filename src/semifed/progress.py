"""What a run shows while it runs: a live bar on a terminal, plain lines otherwise."""

from collections.abc import Mapping
from time import monotonic
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

WIDE = 120  # columns that have room for everything
WIDE_BAR, NARROW_BAR = 40, 5
FRAME = 28  # columns of the word, the count, the time left and the gaps


class Reporter(Protocol):
    """Told about each finished round."""

    def started(self, first: int, rounds: int) -> None:
        """Before the first round of this process."""

    def finished_round(self, record: Mapping[str, Any]) -> None:
        """After each round."""

    def warn(self, text: str) -> None:
        """Something the user should know."""

    def ended(self) -> None:
        """After the last round, or when the run stops early."""


class Silent:
    """Says nothing but warnings."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def started(self, first: int, rounds: int) -> None:
        """Nothing."""

    def finished_round(self, record: Mapping[str, Any]) -> None:
        """Nothing."""

    def warn(self, text: str) -> None:
        """A line that stands out."""
        self._console.print(f"[yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)

    def ended(self) -> None:
        """Nothing."""


class Lines(Silent):
    """A line a round, for logs and files."""

    def started(self, first: int, rounds: int) -> None:
        """Remember how far there is to go."""
        self._rounds, self._began, self._first = rounds, monotonic(), first

    def finished_round(self, record: Mapping[str, Any]) -> None:
        """Round, loss, metrics, speed and time left."""
        done = record["round"] - self._first
        left = (monotonic() - self._began) / done * (self._rounds - record["round"]) if done else 0
        self._console.print(
            f"round {record['round']:>4}/{self._rounds}  {_facts(record)}  {left:.0f} s left",
            highlight=False,
            soft_wrap=True,
        )


class Bar(Silent):
    """A live bar."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bar = Progress(
            TextColumn("round"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=NARROW_BAR if console.width < WIDE else WIDE_BAR),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            console=console,
        )
        self._latest: Mapping[str, Any] = {}

    def started(self, first: int, rounds: int) -> None:
        """Show the bar."""
        self._task = self._bar.add_task("", total=rounds, completed=first, facts="")
        self._bar.start()

    def finished_round(self, record: Mapping[str, Any]) -> None:
        """Move the bar; the last known metrics stay in view."""
        metrics = record["metrics"] or self._latest.get("metrics", {})
        self._latest = {**record, "metrics": metrics}
        # How far the run is matters more than the last of its numbers.
        room = self._console.width - NARROW_BAR - FRAME if self._console.width < WIDE else WIDE
        facts = _facts(self._latest, room)
        self._bar.update(self._task, completed=record["round"], facts=facts)

    def ended(self) -> None:
        """Leave the bar as it is."""
        self._bar.stop()


def _facts(record: Mapping[str, Any], room: int | None = None) -> str:
    """Loss, metrics and speed, as many of them as there is room for."""
    parts = []
    if record["loss"].get("total") is not None:  # JSON's word for an overflow
        parts.append(f"loss {record['loss']['total']:.3f}")
    for key in ("accuracy", "auroc_seen"):
        if record["metrics"].get(key) is not None:
            parts.append(f"{key} {record['metrics'][key]:.3f}")
    if record["seconds"] and record["images"]:
        parts.append(f"{record['images'] / record['seconds']:,.0f} images/s")
    while room is not None and parts and len("  ".join(parts)) > room:
        parts.pop()
    return "  ".join(parts)
