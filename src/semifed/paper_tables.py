"""The papers' tables: their numbers as printed, and the recipes to run beside them."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from semifed.errors import UserError, nearest

TABLES = Path(str(files("semifed") / "tables"))
SCALES = ("mini", "paper")


class Printed(NamedTuple):
    """A number of a paper, digit by digit; empty where the paper, or what we have of it, gives none."""

    mean: str = ""
    std: str = ""

    @property
    def value(self) -> float | None:
        """What it says, in percent."""
        return float(self.mean) if self.mean else None

    def __str__(self) -> str:
        return f"{self.mean} ± {self.std}" if self.std else self.mean


@dataclass(frozen=True)
class Cell:
    """A row of a table in one setting: what the paper says, and what is run beside it."""

    setting: str
    row: str
    role: str  # "floor", "ceiling", or empty
    method: str
    recipe: str
    overrides: tuple[str, ...]
    theirs: Mapping[str, Printed] = field(hash=False)  # by metric

    @property
    def label(self) -> str:
        """The row's name, and what it is there for."""
        return f"{self.row} ({self.role})" if self.role else self.row


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper."""

    name: str  # such as sage/table1
    title: str
    metrics: tuple[str, ...]
    notes: tuple[str, ...]
    cells: Mapping[str, tuple[Cell, ...]]  # by scale; those of a setting follow one another


def table_names() -> list[str]:
    """The tables of all papers."""
    papers = sorted(path.stem for path in TABLES.glob("*.toml"))
    return [f"{paper}/{name}" for paper in papers for name, part in _read(paper).items() if _is_table(part)]


def paper_table(name: str) -> PaperTable:
    """A table by its name, `<paper>/<table>`."""
    names = table_names()
    if name not in names:
        close = get_close_matches(name.lower(), names, n=1, cutoff=0.5)
        hint = f"did you mean '{close[0]}'?" if close else "'semifed reproduce' shows them"
        raise UserError(f"there is no table '{name}'; {hint}")
    part, theirs = _part(name), _theirs(name)
    rows, settings, metrics = _rows(name.partition("/")[0]), part["settings"], tuple(part["metrics"])
    numbers = {row: _numbers(text, len(settings), metrics) for row, text in theirs.items()}
    cells = {
        scale: tuple(
            _cell(scale, setting, row, rows[row], settings[setting], numbers[row][position])
            for position, setting in enumerate(settings)
            if scale in settings[setting]
            for row in theirs
        )
        for scale in SCALES
    }
    return PaperTable(name, part["title"], metrics, tuple(part.get("notes", ())), cells)


def selected(table: PaperTable, scale: str, names: Sequence[str]) -> list[Cell]:
    """The cells of the named rows (also by method) and settings (also by how they start); all where none is named."""
    cells = table.cells[scale]
    rows: set[str] = set()
    settings: set[str] = set()
    for name in names:
        named, placed = _called(name, cells)
        if not named and not placed:
            raise UserError(f"--only: {_not_called(name, table, scale)}")
        rows |= named
        settings |= placed
    return [cell for cell in cells if (not rows or cell.row in rows) and (not settings or cell.setting in settings)]


def _called(name: str, cells: Sequence[Cell]) -> tuple[set[str], set[str]]:
    """Rows and settings of that name."""
    name = name.lower()
    rows = {cell.row for cell in cells if cell.row.lower() == name} or {c.row for c in cells if c.method == name}
    return rows, {cell.setting for cell in cells if f"{cell.setting}-".startswith(f"{name}-")}


def _not_called(name: str, table: PaperTable, scale: str) -> str:
    if any(any(_called(name, cells)) for cells in table.cells.values()):
        return f"'{name}' of {table.name} has no row at {scale} scale"
    valid = {cell.row for cell in table.cells[scale]}
    for cell in table.cells[scale]:
        valid |= {cell.setting, cell.setting.partition("-")[0]}
    spelt = {one.lower(): one for one in valid}
    close = get_close_matches(name.lower(), spelt, n=1, cutoff=0.5)
    hint = f"did you mean '{spelt[close[0]]}'?" if close else nearest(name, valid)
    return f"no row or setting of {table.name} is called '{name}'; {hint}"


def _read(paper: str) -> dict[str, Any]:
    return tomllib.loads((TABLES / f"{paper}.toml").read_text(encoding="utf-8"))


def _is_table(part: object) -> bool:
    return isinstance(part, dict) and "settings" in part


def _part(name: str) -> dict[str, Any]:
    paper, _, table = name.partition("/")
    part: dict[str, Any] = _read(paper)[table]
    return part


def _rows(paper: str) -> dict[str, dict[str, str]]:
    content = _read(paper)
    own: dict[str, dict[str, str]] = content["rows"]
    return (_rows(content["rows_from"]) if "rows_from" in content else {}) | own


def _theirs(name: str) -> dict[str, str]:
    """Rows and their numbers; a paper may repeat another's table before it adds its own rows."""
    part = _part(name)
    own: dict[str, str] = part["theirs"]
    return (_theirs(part["theirs_from"]) if "theirs_from" in part else {}) | own


def _numbers(text: str, count: int, metrics: Sequence[str]) -> list[dict[str, Printed]]:
    """Of every setting the numbers by metric.

    >>> _numbers("38.9±9.7/45.3 –/50.0", 2, ["accuracy", "auroc_overall"])[1]["auroc_overall"].mean
    '50.0'
    """
    if not text:
        return [dict.fromkeys(metrics, Printed())] * count
    cells = text.split()
    if len(cells) != count:
        raise ValueError(f"{len(cells)} numbers for {count} settings: {text}")
    return [dict(zip(metrics, map(_printed, cell.split("/")), strict=True)) for cell in cells]


def _printed(text: str) -> Printed:
    return Printed() if text == "–" else Printed(*text.split("±"))


def _cell(
    scale: str,
    setting: str,
    row: str,
    made: Mapping[str, str],
    place: Mapping[str, str],
    theirs: Mapping[str, Printed],
) -> Cell:
    recipe, *further = place[scale].split()
    own = f"{made.get('options', '')} {made.get(scale, '')}".format(**place).split()
    overrides = (*further, f"method={made['method']}", *own)
    return Cell(setting, row, made.get("role", ""), made["method"], recipe, overrides, theirs)
