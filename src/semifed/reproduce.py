"""`semifed reproduce`: the papers' tables, ours beside theirs."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table

from semifed.errors import UserError, nearest
from semifed.execution import carry_out_all, refuse_failed, refuse_what_cannot_run, unfinished
from semifed.override import METHOD_KEYS, moves_numbers
from semifed.paper_tables import SCALES, Cell, PaperTable, paper_table, selected, table_names
from semifed.terminal import say, terminal

if TYPE_CHECKING:  # a misspelt table is told at once, not after PyTorch is loaded
    from semifed.recipe import Recipe
    from semifed.report.beside import Beside

NOT_TO_OVERRIDE = {
    **dict.fromkeys(METHOD_KEYS, "rows differ by it; choose some with --only"),
    "seed": "give seeds as --seeds 0,1,2",
}


class Asked(NamedTuple):
    """What the command line says beside the table's name."""

    overrides: Sequence[str]
    scale: str
    seeds: str
    only: Sequence[str]
    out: Path | None
    dry: bool
    markdown: Path | None
    csv: Path | None

    @property
    def changes(self) -> list[str]:
        """Overrides that may change a number."""
        return [text for text in self.overrides if moves_numbers(text.partition("=")[0].strip())]


class Planned(NamedTuple):
    """A run of a cell."""

    cell: Cell
    name: str  # of its directory
    recipe: "Recipe"
    arguments: Sequence[str]  # of `semifed run`

    @property
    def data_sets(self) -> set[str]:
        """What it trains and is tested on."""
        return {self.recipe.dataset, *self.recipe.evaluate.unseen}


@dataclass(frozen=True)
class Reproduction:
    """A table, or the cells of it that were chosen, and all runs it takes."""

    table: PaperTable
    asked: Asked
    cells: Sequence[Cell]
    runs: Sequence[Planned]
    out: Path
    missing: Mapping[str, str]  # data sets that are needed and not here, with a line on each

    def show(self, done: Collection[Planned]) -> None:
        """Print the table with what is done, and write it where it was asked for."""
        from semifed.durable import write_atomically
        from semifed.predict import write_csv

        beside = self._beside(done)
        beside.print(terminal())
        if self.asked.markdown is not None:
            write_atomically(self.asked.markdown, beside.markdown())
        if self.asked.csv is not None:
            write_csv(beside.records(), self.asked.csv)

    def _beside(self, done: Collection[Planned]) -> "Beside":
        from semifed.report.beside import Beside, lines_of

        finished = {cell: [self.out / run.name for run in done if run.cell is cell] for cell in self.cells}
        notes = [self._about()]
        if self.asked.scale == "mini" or self.asked.changes:
            what = "rounds, images, labels, network" if self.asked.scale == "mini" else "by the changes"
            notes.append(f"Another budget than the paper's ({what}): compare the order of rows, not the numbers.")
        if self.missing:
            notes.append(f"Not run for want of data: what needs {', '.join(self.missing)}.")
        seeds = len(self.runs) // len(self.cells)
        lines = lines_of(self.cells, self.table.metrics, finished)
        return Beside(self.table.title, lines, seeds, [*notes, *self.table.notes])

    def _about(self) -> str:
        """Scale, seeds and budget."""
        rounds: dict[tuple[str, int], set[int]] = {}
        for run in self.runs:
            rounds.setdefault((run.recipe.dataset, run.recipe.cohort_size), set()).add(run.recipe.rounds)
        budgets = [
            f"{dataset} {' to '.join(map(str, sorted({min(counts), max(counts)})))} rounds × {cohort} clients"
            for (dataset, cohort), counts in rounds.items()
        ]
        changed = f", changed by {' '.join(self.asked.changes)}" if self.asked.changes else ""
        return f"Scale {self.asked.scale}{changed}. Seeds {self.asked.seeds}. Budget: {'; '.join(budgets)}."


def list_tables() -> None:
    """Print every table with its rows at each scale."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("table", no_wrap=True)
    for scale in SCALES:
        shown.add_column(scale, justify="right")
    shown.add_column("what", overflow="fold")
    for name in table_names():
        table = paper_table(name)
        shown.add_row(name, *(str(len(table.cells[scale])) for scale in SCALES), table.title)
    terminal().print(shown, highlight=False, markup=False)
    say("mini, paper: how many rows it has at that scale, over all settings. Each is a run a seed.")


def reproduce(name: str, asked: Asked) -> None:
    """Show the table with what is there, run what is missing, show it again."""
    table = paper_table(name)
    cells = _cells(table, asked)
    runs = _planned(cells, asked)
    out = asked.out or Path("reproduce") / f"{name.replace('/', '-')}-{asked.scale}"
    waiting = unfinished([(run.name, run.recipe) for run in runs], out)
    missing = _missing_data([run for run in runs if run.name in waiting])
    plan = Reproduction(table, asked, cells, runs, out, missing)
    done = [run for run in runs if run.name not in waiting]
    to_do = [run for run in runs if run.name in waiting and not run.data_sets & missing.keys()]
    plan.show(done)
    for line in missing.values():
        say(line)
    if asked.dry:
        _say_what_would_run(to_do, waiting, plan)
    elif waiting and not to_do:
        raise UserError("nothing of it can be run without these data sets (--only chooses rows and settings)")
    elif to_do:
        refuse_what_cannot_run([run.recipe for run in to_do])
        able = [run for run in runs if run in done or run in to_do]
        named = [(run.name, run.recipe) for run in able]
        failed = carry_out_all(named, waiting, out)
        plan.show([run for run in able if run.name not in failed])
        refuse_failed(failed, named)
    for path in (asked.markdown, asked.csv):
        if path is not None:
            say(f"written: {path}")


def _cells(table: PaperTable, asked: Asked) -> list[Cell]:
    if asked.scale not in SCALES:
        raise UserError(f"--scale: there is no '{asked.scale}'; {nearest(asked.scale, SCALES)}")
    if not table.cells[asked.scale]:
        others = " and ".join(f"--scale {scale} has {len(cells)}" for scale, cells in table.cells.items() if cells)
        raise UserError(f"{table.name} has no row at {asked.scale} scale: no small recipe asks its question; {others}")
    return selected(table, asked.scale, asked.only)


def _planned(cells: Sequence[Cell], asked: Asked) -> list[Planned]:
    from semifed.recipe_file import load_recipe
    from semifed.sweep import directory_name, seeds_of

    for override in asked.overrides:
        if reason := NOT_TO_OVERRIDE.get(override.partition("=")[0].strip()):
            raise UserError(f"{override}: {reason}")
    seeds = seeds_of(asked.seeds)
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds: {asked.seeds} has a seed twice")
    runs = []
    for cell in cells:
        for seed in seeds:
            overrides = [*cell.overrides, *asked.overrides, f"seed={seed}"]
            try:
                recipe = load_recipe(cell.recipe, overrides)
            except UserError as error:
                raise UserError(f"{cell.setting}, {cell.row}: {error}") from None
            name = directory_name(cell.setting, cell.row, f"seed{seed}")
            runs.append(Planned(cell, name, recipe, [cell.recipe, *overrides]))
    return runs


def _missing_data(runs: Sequence[Planned]) -> dict[str, str]:
    from semifed.data.datasets import catalogue

    absent = {
        entry.name: entry.how
        for data in {run.recipe.data for run in runs}
        for entry in catalogue(data)
        if entry.found is None
    }
    needing = {name: sum(name in run.data_sets for run in runs) for name in absent}
    return {
        name: f"data set '{name}' is missing: {count} {'runs' if count > 1 else 'run'} left out. "
        f"How to get it: {absent[name]}"
        for name, count in needing.items()
        if count
    }


def _say_what_would_run(to_do: Sequence[Planned], waiting: Mapping[str, bool], plan: Reproduction) -> None:
    for run in to_do:
        further = ["--resume"] if waiting[run.name] else []
        say(shlex.join(["semifed", "run", *run.arguments, "--out", str(plan.out / run.name), *further]))
    rounds = sum(run.recipe.rounds for run in to_do)
    say(f"{len(to_do)} of {len(plan.runs)} runs to do, {rounds:,} rounds in all; nothing was run.")
