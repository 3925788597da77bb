"""A comparison in a terminal: as many columns as fit, the most telling ones first."""

from collections.abc import Sequence, Set
from itertools import compress, pairwise
from typing import TYPE_CHECKING

from semifed.report.compare import Comparison
from semifed.report.compare_views import (
    Column,
    columns,
    further_columns,
    metric_columns,
    naming_columns,
    reading_notes,
    subject_of,
)
from semifed.report.words import MISSING

if TYPE_CHECKING:
    from rich.console import Console

_GAP = 2  # blanks between columns of the terminal


def _numbered(comparison: Comparison, width: int) -> list[Column]:
    """What names the rows in a terminal: numbers in place of settings that would leave the metrics no room."""
    naming = naming_columns(comparison)
    if not comparison.keys or _total_width([*naming, *metric_columns(comparison, comparison.headline)]) <= width:
        return naming
    method, *_, seeds = naming
    return [Column("", "", [str(number) for number, _ in enumerate(comparison.rows, start=1)], True, 0), method, seeds]


def _settings_of_numbers(comparison: Comparison) -> list[str]:
    """What the numbers stand for."""
    return [
        f"{number}: " + ", ".join(f"{key} {value}" for key, value in row.differences.items() if value != MISSING)
        for number, row in enumerate(comparison.rows, start=1)
    ]


def print_table(comparison: Comparison, console: "Console", *, hint: bool = True) -> None:
    """The main table in a terminal, as many columns as fit, with notes on how to read it."""
    from rich.text import Text

    naming, spelt_out = _numbered(comparison, console.width), naming_columns(comparison)
    everything = [*naming, *columns(comparison)[len(spelt_out) :]]
    shown = fitting(everything, console.width)
    console.print(Text(subject_of(comparison), style="bold"))
    print_columns(shown, _block_ends(comparison), console)
    for line in _settings_of_numbers(comparison) if naming != spelt_out else []:
        console.print(Text(line))
    left_out = [column.heading.replace("\n", " ") for column in everything if column not in shown]
    notes = [*reading_notes(comparison, shown), *([f"No room for: {', '.join(left_out)}."] if left_out else [])]
    further = len(further_columns(comparison))
    if hint and further:
        notes.append(f"{further} further metric{'' if further == 1 else 's'}: semifed compare --all-metrics.")
    for note in notes:
        console.print(Text(note, style="dim"))


def print_further(comparison: Comparison, console: "Console") -> None:
    """All other metrics in a terminal, in as many tables as its width asks for."""
    naming, waiting = _numbered(comparison, console.width), further_columns(comparison)
    while waiting:
        fitting = 1
        while fitting < len(waiting) and _total_width([*naming, *waiting[: fitting + 1]]) <= console.width:
            fitting += 1
        console.print()
        print_columns([*naming, *waiting[:fitting]], _block_ends(comparison), console)
        waiting = waiting[fitting:]


def print_columns(shown: Sequence[Column], block_ends: Set[int], console: "Console") -> None:
    """A table in a terminal, with a gap below each row in `block_ends`; words are folded to fit, numbers never."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in shown:
        heading = Text(column.heading)
        if column.numeric:
            table.add_column(heading, justify="right", vertical="top", no_wrap=True, min_width=column.width)
        else:
            table.add_column(heading, vertical="top", overflow="fold")
    for position in range(len(shown[0].cells)):
        table.add_row(*(Text(column.cells[position]) for column in shown), end_section=position in block_ends)
    console.print(table)
    console.print()


def _block_ends(comparison: Comparison) -> set[int]:
    return {end for end, (row, below) in enumerate(pairwise(comparison.rows)) if below.block != row.block}


def fitting(everything: Sequence[Column], width: int) -> list[Column]:
    """The columns of the best ranks as far as they fit; none of a rank after one that had to lose a column."""
    shown = [column.rank == 0 for column in everything]
    for rank in sorted({column.rank for column in everything if column.rank > 0}):
        for place in [place for place, column in enumerate(everything) if column.rank == rank]:
            with_it = [*compress(everything, shown), everything[place]]
            shown[place] = _total_width(with_it) <= width
        if any(column.rank == rank and not kept for column, kept in zip(everything, shown, strict=True)):
            break
    return list(compress(everything, shown))


def _total_width(columns: Sequence[Column]) -> int:
    return sum(column.width + _GAP for column in columns) - _GAP
