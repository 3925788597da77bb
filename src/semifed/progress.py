"""What a run shows while it runs: a live bar on a terminal, plain lines otherwise."""

from collections.abc import Mapping
from time import monotonic
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

WIDE = 120  # columns that have room for everything
WIDE_BAR, NARROW_BAR = 40, 5
FRAME = 28  # columns of the word, the count, the time left and the gaps
STAGE_PAUSE = 10  # seconds between lines about one stage


class Reporter(Protocol):
    """Told about each finished round, and about the server's training before and after all of them."""

    def stage(self, name: str, done: int, total: int) -> None:
        """So far is what takes time outside of rounds: the warm-up, models for the threshold."""

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

    def stage(self, name: str, done: int, total: int) -> None:
        """Nothing."""

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
    """A line a round, for logs and files; or one in so many seconds, and one at the end."""

    def __init__(self, console: Console, *, pause: float = 0) -> None:
        super().__init__(console)
        self._pause = pause
        self._said = self._stage_said = monotonic()

    def stage(self, name: str, done: int, total: int) -> None:
        """Where it takes long."""
        if monotonic() - self._stage_said >= max(self._pause, STAGE_PAUSE):
            self._stage_said = monotonic()
            self._console.print(f"{name} {done}/{total}", highlight=False, soft_wrap=True)

    def started(self, first: int, rounds: int) -> None:
        """Remember how far there is to go."""
        self._rounds, self._began, self._first = rounds, monotonic(), first

    def finished_round(self, record: Mapping[str, Any]) -> None:
        """Round, loss, metrics, speed and time left."""
        if monotonic() - self._said < self._pause and record["round"] < self._rounds:
            return
        self._said = monotonic()
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
            TextColumn("{task.description}"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=NARROW_BAR if console.width < WIDE else WIDE_BAR),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            console=console,
        )
        self._latest: Mapping[str, Any] = {}
        self._stages: dict[str, TaskID] = {}

    def stage(self, name: str, done: int, total: int) -> None:
        """A bar of its own, which goes when all is done."""
        if name not in self._stages:
            self._stages[name] = self._bar.add_task(name, total=total, facts="")
            self._bar.start()
        self._bar.update(self._stages[name], completed=done)
        if done == total:
            self._bar.remove_task(self._stages.pop(name))

    def started(self, first: int, rounds: int) -> None:
        """Show the bar."""
        self._task = self._bar.add_task("round", total=rounds, completed=first, facts="")
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
