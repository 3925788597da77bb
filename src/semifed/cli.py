"""The command `semifed`."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from semifed import __version__
from semifed.errors import UserError, nearest

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Federated learning when labels are scarce, clients are many, and some classes have no name yet.",
)
console = Console()
errors = Console(stderr=True)

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A built-in name (semifed list recipes) or a TOML file.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Dotted paths into the recipe, e.g. local.lr=0.03.")
]


@app.command()
def run(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The run directory; default runs/RECIPE/METHOD-seedN.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    engine: Annotated[str | None, typer.Option(help="Where clients run.")] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes; 0 = one a core.")] = None,
    seed: Annotated[int | None, typer.Option(help="The run's seed.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say only what went wrong.")] = False,
) -> None:
    """Run a recipe: train, test, and write a run directory."""
    from semifed.recipe import load_recipe

    options = {"engine.name": engine, "engine.workers": workers, "seed": seed}
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    loaded = load_recipe(recipe, [*(overrides or ()), *given])
    out = out or _default_out(recipe, loaded)
    result = _execute(loaded, out, resume=resume, quiet=quiet)
    if not quiet:
        _say_result(result, out)


@app.command()
def sweep(
    recipe: RecipeName,
    axes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=A,B,C]...", help="Values to combine; lists in [..] count as one."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, e.g. 0,1,2.")] = "0",
    out: Annotated[Path | None, typer.Option(help="Where the runs go; default runs/RECIPE.")] = None,
) -> None:
    """Run a grid of recipes; finished runs are kept, interrupted ones resumed. Ends in a comparison."""
    from semifed.report import compare_runs
    from semifed.sweep import grid

    out = out or Path("runs") / _stem(recipe)
    runs = grid(recipe, axes or (), seeds)
    for number, (name, loaded) in enumerate(runs, 1):
        path = out / name
        if (path / "summary.json").exists():
            console.print(f"[{number}/{len(runs)}] {name}: finished before", highlight=False, markup=False)
            continue
        console.print(f"[{number}/{len(runs)}] {name}", highlight=False, markup=False)
        _execute(loaded, path, resume=(path / "recipe.toml").exists(), quiet=not console.is_terminal)
    comparison = compare_runs([out / name for name, _ in runs])
    comparison.table(console)
    comparison.write_html(out / "compare.html")
    console.print(f"curves: {out / 'compare.html'}", highlight=False)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run directories, or directories of runs.")],
    html: Annotated[Path | None, typer.Option(help="Write the table and learning curves to this file.")] = None,
) -> None:
    """Put runs side by side: mean ± std where only the seed differs."""
    from semifed.report import compare_runs

    comparison = compare_runs(runs)
    comparison.table(console)
    if html is not None:
        comparison.write_html(html)
        console.print(f"written: {html}", highlight=False)


@app.command()
def partition(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the bubble plot (.png or .svg).")] = None,
) -> None:
    """Show who holds what, before any training."""
    from semifed.data.scenario import class_counts
    from semifed.recipe import load_recipe
    from semifed.report import draw_partition, partition_table
    from semifed.run import prepare_run

    counts = class_counts(prepare_run(load_recipe(recipe, overrides or ())).scenario)
    partition_table(counts, console)
    if out is not None:
        draw_partition(counts, out)
        console.print(f"drawn: {out}", highlight=False)


@app.command(name="list")
def list_(
    what: Annotated[str, typer.Argument(metavar="methods|datasets|models|recipes")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    data: Annotated[str | None, typer.Option(help="Where to look for data sets.")] = None,
) -> None:
    """List what there is."""
    from semifed import listing

    tables = {
        "methods": listing.methods,
        "datasets": lambda: listing.datasets(data),
        "models": listing.models,
        "recipes": listing.recipes,
    }
    if what not in tables:
        raise UserError(f"list: there are no '{what}'; {nearest(what, tables)}")
    rows = tables[what]()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in rows[0]:
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table, highlight=False, markup=False)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Federated learning when labels are scarce, clients are many, and some classes have no name yet."""
    if show:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point: 0 done, 2 the user's mistake in a line or two, 1 our fault with a traceback."""
    try:
        app()
    except UserError as error:
        errors.print(f"[red]error:[/] {_escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _execute(recipe: Any, out: Path, *, resume: bool, quiet: bool) -> dict[str, Any]:
    from semifed.progress import Bar, Lines, Silent
    from semifed.report import write_report
    from semifed.run import execute, prepare_run

    reporter = Silent(errors) if quiet else Bar(console) if console.is_terminal else Lines(console)
    try:
        result = execute(prepare_run(recipe), out, reporter, resume=resume)
    except KeyboardInterrupt:
        errors.print(f"stopped; the last finished round is kept: add --resume to continue {out}", highlight=False)
        sys.exit(130)
    write_report(out)
    return result


def _say_result(result: dict[str, Any], out: Path) -> None:
    shown = "  ".join(f"{key} {value:.4f}" for key, value in result["metrics"].items() if value is not None)
    console.print(f"{result['method']} after round {result['rounds']}: {shown}", highlight=False, soft_wrap=True)
    console.print(f"report: {out / 'report.html'}", highlight=False, soft_wrap=True)


def _default_out(recipe: str, loaded: Any) -> Path:
    return Path("runs") / _stem(recipe) / f"{loaded.method['name']}-seed{loaded.seed}"


def _stem(recipe: str) -> Path:
    path = Path(recipe)
    return Path(path.stem) if path.suffix == ".toml" else path


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
