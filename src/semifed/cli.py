"""The command `semifed`."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from click.exceptions import NoArgsIsHelpError, UsageError
from rich.console import Console
from rich.table import Table

from semifed import __version__
from semifed.deploy.commands import app as deploy
from semifed.errors import UserError, nearest
from semifed.execution import (
    carry_out,
    carry_out_all,
    leaving_at_once,
    refuse_failed,
    refuse_what_cannot_run,
    unfinished,
)
from semifed.model_commands import discover, export, predict
from semifed.terminal import say, say_once, terminal

if TYPE_CHECKING:  # nothing that loads PyTorch: --help and most mistakes are answered at once
    from semifed.recipe import Recipe

app = typer.Typer(
    suggest_commands=False,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Federated learning when labels are scarce, clients are many, and some classes have no name yet.",
)

app.add_typer(deploy, name="deploy")

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A built-in name (semifed list recipes) or a TOML file.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Dotted paths into the recipe, e.g. local.lr=0.03.")
]

Floor = Annotated[
    str | None, typer.Option(metavar="METHOD", help="0 % of the gap that methods close; default server-only.")
]
Ceiling = Annotated[str | None, typer.Option(metavar="METHOD", help="100 % of that gap; default fedavg-sl.")]
Reach = Annotated[str | None, typer.Option(metavar="70,80", help="Count the rounds to these accuracies, in percent.")]
Against = Annotated[
    str | None, typer.Option(metavar="METHOD", help="What --reach's speed-ups refer to; default fixmatch-lpl.")
]


@app.command()
def run(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The run directory; default runs/RECIPE/METHOD-seedN.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    engine: Annotated[str | None, typer.Option(metavar="local|flower", help="Where clients run.")] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes; 0 = one a core.")] = None,
    seed: Annotated[int | None, typer.Option(help="The run's seed.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say only what went wrong.")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write every round for TensorBoard, to OUT/tensorboard.")
    ] = False,
) -> None:
    """Run a recipe: train, test, and write a run directory."""
    from semifed.recipe_file import idle, left_behind, load_recipe

    options = {"engine.name": engine, "engine.workers": workers, "seed": seed}
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    loaded = load_recipe(recipe, [*(overrides or ()), *given])
    if not quiet:
        say_once([*left_behind(recipe, loaded, overrides or ()), *idle(loaded, overrides or ())])
    out = out or _default_out(recipe, loaded)
    result = carry_out(loaded, out, resume=resume, quiet=quiet, tensorboard=tensorboard)
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
    floor: Floor = None,
    ceiling: Ceiling = None,
    reach: Reach = None,
    against: Against = None,
) -> None:
    """Run a grid of recipes; finished runs are kept, interrupted ones resumed. Ends in a comparison."""
    from semifed.sweep import grid

    out = out or Path("runs") / _stem(recipe)
    runs = grid(recipe, axes or (), seeds, floor=floor, ceiling=ceiling, reach=reach, against=against)
    from semifed.recipe_file import idle, left_behind
    from semifed.report import compare_runs

    say_once(
        line for _, loaded in runs for line in (*left_behind(recipe, loaded, axes or ()), *idle(loaded, axes or ()))
    )
    waiting = unfinished(runs, out)
    refuse_what_cannot_run([loaded for name, loaded in runs if name in waiting])
    failed = carry_out_all(runs, waiting, out)
    made = {out / name: str(loaded.method["name"]) for name, loaded in runs if name not in failed}
    if not made:
        refuse_failed(failed, runs)
    # What all runs of a method were to be compared with is not there if all of them failed; the others still are.
    floor, ceiling, against = (name if name in made.values() else None for name in (floor, ceiling, against))
    comparison = compare_runs(list(made), floor=floor, ceiling=ceiling, reach=reach, against=against)
    comparison.table(terminal())
    comparison.write_html(out / "compare.html")
    say(f"curves: {out / 'compare.html'}")
    refuse_failed(failed, runs)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run directories, or directories of runs.")],
    html: Annotated[Path | None, typer.Option(help="Write the table and learning curves to this file.")] = None,
    floor: Floor = None,
    ceiling: Ceiling = None,
    reach: Reach = None,
    against: Against = None,
    all_metrics: Annotated[bool, typer.Option("--all-metrics", help="Print every metric that was measured.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: print this instead of the table.")] = False,
) -> None:
    """Put runs side by side: mean ± std where only the seed differs."""
    from semifed.report import compare_runs

    comparison = compare_runs(runs, floor=floor, ceiling=ceiling, reach=reach, against=against)
    if as_json:
        print(json.dumps(comparison.as_json(), indent=2))
    else:
        comparison.table(terminal(), all_metrics=all_metrics)
    if html is not None:
        comparison.write_html(html)
        if not as_json:
            say(f"written: {html}")


for command in (predict, discover, export):
    app.command()(command)


@app.command()
def partition(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the bubble plot (.png or .svg).")] = None,
) -> None:
    """Show who holds what, before any training."""
    from semifed.recipe_file import load_recipe

    loaded = load_recipe(recipe, overrides or (), for_training=False)
    from semifed.assembly import prepare_run
    from semifed.data.scenario import class_counts
    from semifed.report import draw_partition, partition_table
    from semifed.report.partition import refuse_other_pictures

    if out is not None:  # before data are loaded
        refuse_other_pictures(out)
    counts = class_counts(prepare_run(loaded).scenario)
    partition_table(counts, terminal())
    if out is not None:
        draw_partition(counts, out)
        say(f"drawn: {out}")


@app.command(name="list")
def list_(
    what: Annotated[str, typer.Argument(metavar="methods|datasets|models|recipes|keys")],
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]", help="Options of this method; recipes whose names start so; keys of this table."
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    data: Annotated[str | None, typer.Option(help="Where to look for data sets.")] = None,
) -> None:
    """List what there is."""
    from semifed import listing

    tables: dict[str, Callable[[], listing.Rows]] = {
        "methods": lambda: listing.methods(name),
        "datasets": lambda: listing.datasets(data),
        "models": listing.models,
        "recipes": lambda: listing.recipes(name),
        "keys": lambda: listing.keys(name),
    }
    if what not in tables:
        raise UserError(f"list: there are no {what!r}; {nearest(what, tables)}")
    if name and what in ("datasets", "models"):
        raise UserError(f"list: {what} are listed all at once; '{name}' goes with methods, recipes and keys")
    rows = tables[what]()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if what == "recipes" and not name:
        rows = listing.folded(rows)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in rows[0]:
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    terminal().print(table, highlight=False, markup=False)


@app.command()
def bench(
    parts: Annotated[list[str] | None, typer.Argument(metavar="[PART]...")] = None,
    file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers to this file.")] = None,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw how cost scales into this folder.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="How often contestants take turns.")] = 3,
    workers: Annotated[int, typer.Option(min=0, help="Worker processes; 0 = one a core.")] = 0,
) -> None:
    """Speed on this machine, against the floor and the peers that are installed; needs no data, takes a while.

    The parts are floor, peers, scaling, precision, views and aggregation; all of them if none is named.
    """
    from semifed.bench.command import bench as measure

    measure(parts or [], turns=turns, workers=workers, file=file, plots=plots)


@app.command()
def reproduce(
    table: Annotated[
        str, typer.Argument(metavar="[TABLE]", help="Such as sage/table1; left out: shows them.")
    ] = "list",
    overrides: Overrides = None,
    scale: Annotated[str, typer.Option(metavar="mini|paper", help="Small recipes, or the paper's.")] = "mini",
    seeds: Annotated[str, typer.Option(help="Seeds, e.g. 0,1,2.")] = "0",
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Rows, methods or settings; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where the runs go; default reproduce/PAPER-TABLE-SCALE.")] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes; 0 = one a core.")] = None,
    dry: Annotated[bool, typer.Option("--dry", help="Run nothing: show what is there and what would be run.")] = False,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table as a page.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table for programs.")] = None,
) -> None:
    """The papers' tables, ours beside theirs: runs what is missing, keeps what is finished."""
    from semifed import reproduce as command

    if table == "list":
        command.list_tables()
        return
    given = [*(overrides or ()), *([] if workers is None else [f"engine.workers={workers}"])]
    chosen = [name.strip() for names in only or () for name in names.split(",")]
    command.reproduce(table, command.Asked(given, scale, seeds, chosen, out, dry, markdown, csv))


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Federated learning when labels are scarce, clients are many, and some classes have no name yet."""
    if show:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point: 0 done, 2 the user's mistake in a line or two, 1 our fault with a traceback."""
    try:
        with leaving_at_once():
            sys.exit(app(standalone_mode=False))
    except UserError as error:
        _complain(str(error))
    except NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "semifed"
        _complain(f"{error.format_message()} See '{command} --help'.")
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # a file that cannot be read or written is the machine's state, not our fault
        if error.filename is None:
            raise
        _complain(f"{error.filename}: {error.strerror}")


def _complain(text: str) -> None:
    from rich.markup import escape

    Console(stderr=True).print(f"[red]error:[/] {escape(text)}", highlight=False, soft_wrap=True)
    sys.exit(2)


def _say_result(result: dict[str, Any], out: Path) -> None:
    from semifed.report.words import split_metric

    own = {key: value for key, value in result["metrics"].items() if value is not None and not split_metric(key)[0]}
    shown = "  ".join(f"{key} {value:.4f}" for key, value in own.items())
    say(f"{result['method']} after round {result['rounds']}: {shown}")
    say(f"report: {out / 'report.html'}")


def _default_out(recipe: str, loaded: "Recipe") -> Path:
    return Path("runs") / _stem(recipe) / f"{loaded.method['name']}-seed{loaded.seed}"


def _stem(recipe: str) -> Path:
    from semifed.recipe_file import recipe_names

    return Path(recipe) if recipe in recipe_names() else Path(Path(recipe).stem)
