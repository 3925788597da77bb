"""A paper's table with our runs beside it: theirs, ours after the last round, ours over the last ten tests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from semifed.paper_tables import Cell, Printed
from semifed.report.compare import Spread, spread
from semifed.report.compare_terminal import print_columns
from semifed.report.compare_views import Column, spread_text
from semifed.report.rundir_reader import read_run
from semifed.report.words import MISSING, metric_title, signed

if TYPE_CHECKING:
    from rich.console import Console


class Line(NamedTuple):
    """A number of the paper and ours, of which there may be none yet."""

    cell: Cell
    metric: str
    ours: Spread | None
    last10: Spread | None

    @property
    def theirs(self) -> Printed:
        """As the paper prints it."""
        return self.cell.theirs[self.metric]

    @property
    def difference(self) -> float | None:
        """Ours after the last round minus theirs, in points."""
        if self.ours is None or self.theirs.value is None:
            return None
        return 100 * self.ours.mean - self.theirs.value


class Record(NamedTuple):
    """A line for programs, in percent."""

    setting: str
    row: str
    role: str
    method: str
    metric: str
    theirs: str
    theirs_std: str
    ours: float | None
    ours_std: float | None
    last10: float | None
    last10_std: float | None
    difference: float | None
    seeds: int


@dataclass(frozen=True)
class Beside:
    """A paper's table and ours."""

    title: str
    lines: Sequence[Line]  # of one metric after the other, and in it of one setting after the other
    seeds: int  # asked for
    notes: Sequence[str]

    def print(self, console: "Console") -> None:
        """The table in a terminal, with what a reader has to know of it."""
        from rich.text import Text

        parts = self._by_metric()
        console.print(Text(self.title, style="bold"))
        for metric, lines in parts.items():
            if len(parts) > 1:
                console.print(Text(metric_title(metric), style="bold"))
            ends = {end for end, (line, below) in enumerate(pairwise(lines)) if below.cell.setting != line.cell.setting}
            print_columns(self._columns(lines, said_once=True), ends, console)
        for note in self._all_notes():
            console.print(Text(note, style="dim"))

    def markdown(self) -> str:
        """The same as a page."""
        parts = self._by_metric()
        page = [f"# {self.title}"]
        for metric, lines in parts.items():
            columns = self._columns(lines, said_once=False)
            marks = ["---:" if column.numeric else "---" for column in columns]
            cells = zip(*(column.cells for column in columns), strict=True)
            rows = [[column.heading for column in columns], marks, *cells]
            page += [f"## {metric_title(metric)}"] if len(parts) > 1 else []
            page.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
        page.append("\n".join(f"- {note}" for note in self._all_notes()))
        return "\n\n".join(page) + "\n"

    def records(self) -> list[Record]:
        """The same for programs."""
        return [
            Record(
                *(line.cell.setting, line.cell.row, line.cell.role, line.cell.method, line.metric),
                *line.theirs,
                *_percents(line.ours),
                *_percents(line.last10),
                None if line.difference is None else round(line.difference, 2),
                0 if line.ours is None else line.ours.n,
            )
            for line in self.lines
        ]

    def _by_metric(self) -> dict[str, list[Line]]:
        return {metric: list(lines) for metric, lines in groupby(self.lines, lambda line: line.metric)}

    def _columns(self, lines: Sequence[Line], *, said_once: bool) -> list[Column]:
        settings = [line.cell.setting for line in lines]
        if said_once:
            settings = [name if name != before else "" for before, name in pairwise(["", *settings])]
        numbers: dict[str, Callable[[Line], str]] = {
            "theirs": lambda line: str(line.theirs) or MISSING,
            "ours": lambda line: spread_text(line.metric, line.ours, self.seeds),
            "last 10": lambda line: spread_text(line.metric, line.last10, self.seeds),
            "difference": lambda line: MISSING if line.difference is None else signed(line.difference),
        }
        return [
            Column("setting", "", settings, False, 0),
            Column("row", "", [line.cell.label for line in lines], False, 0),
            *(Column(heading, "", [cell(line) for line in lines], True, 0) for heading, cell in numbers.items()),
        ]

    def _all_notes(self) -> list[str]:
        reading = (
            "Percent. ours: after the last round; last 10: mean of the last ten tests; difference: ours minus theirs."
            + (" Mean ± sample standard deviation over seeds." if self.seeds > 1 else "")
        )
        return [reading, *self._order(), *self.notes]

    def _order(self) -> list[str]:
        """How many pairs of rows, floor and ceiling aside, stand as in the paper."""
        found = []
        for metric, lines in self._by_metric().items():
            last, ten = _pairs(lines, lambda line: line.ours), _pairs(lines, lambda line: line.last10)
            if last:
                by_last, by_ten = (f"{sum(told)} of {len(told)}" for told in (last, ten))
                found.append(f"{metric} {by_last} by the last round, {by_ten} by the last ten tests")
        return [f"Pairs of rows in the paper's order, setting by setting: {'; '.join(found)}."] if found else []


def lines_of(cells: Sequence[Cell], metrics: Sequence[str], finished: Mapping[Cell, Sequence[Path]]) -> list[Line]:
    """Every cell with the runs of it that are finished."""
    runs = {cell: [read_run(path) for path in finished.get(cell, ())] for cell in cells}
    return [
        Line(
            cell,
            metric,
            spread(run.metrics.get(metric) for run in runs[cell]),
            spread(run.metrics_last10.get(metric) for run in runs[cell]),
        )
        for metric in metrics
        for cell in cells
    ]


def _percents(value: Spread | None) -> tuple[float | None, float | None]:
    if value is None:
        return None, None
    return round(100 * value.mean, 2), None if value.std is None else round(100 * value.std, 2)


def _pairs(lines: Sequence[Line], ours: Callable[[Line], Spread | None]) -> list[bool]:
    """Of every two rows of a setting that both tables have and the paper tells apart: whether ours are in its order."""
    told = []
    for one, other in combinations([line for line in lines if not line.cell.role], 2):
        here, there, left, right = ours(one), ours(other), one.theirs.value, other.theirs.value
        if one.cell.setting != other.cell.setting or here is None or there is None or left is None or right is None:
            continue
        if left != right:
            told.append((here.mean - there.mean) * (left - right) > 0)
    return told
