"""The parts of the benchmark, one after the other; tables as they come, all numbers in one file."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from semifed.bench.aggregation import aggregation_cost
from semifed.bench.floor import against_floor
from semifed.bench.measuring import Table, machine
from semifed.bench.peers import against_peers
from semifed.bench.plots import draw
from semifed.bench.precision import lower_precision
from semifed.bench.scaling import scaling
from semifed.bench.views import view_speed
from semifed.durable import write_atomically
from semifed.errors import UserError, nearest
from semifed.process import available_cores

WIDE = 160  # columns of a log, which nobody resizes
PARTS = ("floor", "peers", "scaling", "precision", "views", "aggregation")
PLOTTED = frozenset({"scaling"})


def bench(parts: Sequence[str], *, turns: int, workers: int, file: Path | None, plots: Path | None) -> None:
    """Measure the parts that are asked for, all if none is."""
    for part in parts:
        if part not in PARTS:
            raise UserError(f"bench has no part '{part}'; {nearest(part, PARTS)}")
    if workers > (cores := available_cores()):
        raise UserError(f"--workers: {workers} processes would wait for each other on {cores} cores; {cores} at most")
    wanted = parts or PARTS
    if file is not None:
        _refuse_unwritable("--json", file.parent, file)
    drawn = plots is not None and not PLOTTED.isdisjoint(wanted)
    if plots is not None and drawn:
        _refuse_unwritable("--plots", plots)
    torch.set_num_threads(1)
    workers = workers or cores
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    about = machine()
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), highlight=False)
    if plots is not None and not drawn:
        console.print(f"no plots: of all parts only {', '.join(sorted(PLOTTED))} has any", highlight=False)
    tables: list[Table] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs: dict[str, Callable[[], list[Table]]] = {
            "floor": lambda: against_floor(folder, turns, workers),
            "peers": lambda: against_peers(folder, turns, workers),
            "scaling": lambda: scaling(folder, turns, workers),
            "precision": lambda: lower_precision(folder, turns, workers),
            "views": lambda: view_speed(folder, turns),
            "aggregation": lambda: aggregation_cost(turns),
        }
        for part in wanted:
            found = jobs[part]()
            tables += found
            for table in found:
                _show(console, table)
            if file is not None:  # after each part: a long benchmark may be stopped
                write_atomically(file, json.dumps(all_numbers(about, turns, workers, tables), indent=1) + "\n")
            if plots is not None and part in PLOTTED:
                for path in draw(found, plots):
                    console.print(f"plot: {path}", highlight=False)


def _refuse_unwritable(option: str, folder: Path, file: Path | None = None) -> None:
    """A `UserError` before an hour of measurements, not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{option}: {folder} cannot be written: {error.strerror or error}") from None
    if file is not None and file.is_dir():
        raise UserError(f"{option}: {file} is a folder; name a file")


def _show(console: Console, table: Table) -> None:
    shown = RichTable(title=table.title, caption=table.work, box=box.SIMPLE_HEAD, title_justify="left")
    for place, name in enumerate(table.header):
        shown.add_column(name, justify="left" if place == 0 else "right")
    for row in table.rows:
        shown.add_row(*("–" if cell is None else f"{cell:g}" if isinstance(cell, float) else str(cell) for cell in row))
    console.print(shown)
    for note in table.notes:
        console.print(f"  {note}", highlight=False)


def all_numbers(about: dict[str, Any], turns: int, workers: int, tables: Sequence[Table]) -> dict[str, Any]:
    """The content of the file."""
    return {
        "machine": about,
        "turns": turns,
        "workers": workers,
        "parts": {
            table.name: {
                "title": table.title,
                "work": table.work,
                "header": list(table.header),
                "rows": [dict(zip(table.header, row, strict=True)) for row in table.rows],
                "notes": list(table.notes),
                "facts": table.facts,
            }
            for table in tables
        },
    }
