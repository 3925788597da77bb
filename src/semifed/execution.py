"""Runs that a command carries out: one, or many of which finished ones are kept and interrupted ones resumed."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from semifed.errors import UserError
from semifed.signals import when_told_to_end
from semifed.terminal import say, terminal

if TYPE_CHECKING:  # nothing that loads PyTorch: the command line is parsed before
    from semifed.recipe import Recipe

    Runs = Sequence[tuple[str, Recipe]]  # by the name of their directory


@contextmanager
def leaving_at_once(run: Path | None = None, *, go_on: str = "") -> Iterator[None]:
    """Ctrl-C and SIGTERM end the process where it stands, without a traceback, and say how to go on.

    Nothing needs to be put away: a finished round is on disk, and workers end when their parent does.
    """

    def leave(number: int, _: FrameType | None) -> None:
        if terminal().is_terminal:
            os.write(1, b"\x1b[?25h\n")  # the live bar hides the cursor
        kept = run is not None and (run / "recipe.toml").exists()
        text = f"stopped; finished rounds are kept: {go_on}" if kept else "stopped"
        os.write(2, f"{text}\n".encode())
        os._exit(128 + number)

    with when_told_to_end(leave):
        yield


def carry_out(
    recipe: "Recipe",
    out: Path,
    *,
    resume: bool,
    quiet: bool = False,
    pause: float = 0,
    tensorboard: bool = False,
    go_on: str = "",
) -> dict[str, Any]:
    """One run with its report, and its events if TensorBoard is to read them; its summary.

    Where there is no terminal, rounds that end within so many seconds `pause` of the last that was told are not.
    """
    from semifed.assembly import prepare_run
    from semifed.progress import Bar, Lines, Reporter, Silent
    from semifed.report import write_report
    from semifed.report.events import Events
    from semifed.run import execute
    from semifed.rundir import RunDirectory

    console = terminal()
    reporter: Reporter = (
        Silent(Console(stderr=True)) if quiet else Bar(console) if console.is_terminal else Lines(console, pause=pause)
    )
    events = Events(reporter, out) if tensorboard else None
    result = RunDirectory(out).finished(recipe) if resume else None
    if result is not None and not quiet:
        say(f"{out} is finished already")
    if result is not None and events is not None:
        events.write_finished_rounds()
        events.ended()
    if result is None:
        with leaving_at_once(out, go_on=go_on or f"go on with --resume --out {out}"):
            result = execute(prepare_run(recipe), out, events or reporter, resume=resume)
    write_report(out)
    return result


def carry_out_all(runs: "Runs", waiting: Mapping[str, bool], out: Path) -> list[str]:
    """One run after the other, those that wait; the names of those that could not be finished."""
    from semifed.report import write_report

    failed = []
    for number, (name, recipe) in enumerate(runs, 1):
        state = "" if name in waiting else ": finished before"
        say(f"[{number}/{len(runs)}] {name}{state}")
        if name in waiting:
            try:
                carry_out(recipe, out / name, resume=waiting[name], pause=60, go_on="give the same command again")
            except UserError as error:  # the others may go well
                say(f"failed: {error}")
                failed.append(name)
        elif not (out / name / "report.html").exists():
            write_report(out / name)
    return failed


def refuse_failed(failed: "Sequence[str]", runs: "Runs") -> None:
    """What is shown of the others is not all that was asked for."""
    if failed:
        raise UserError(f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}")


def unfinished(runs: "Runs", out: Path) -> dict[str, bool]:
    """The runs that are still to do, and whether they were begun; a directory with another run is refused."""
    from semifed.rundir import RunDirectory

    waiting = {}
    for name, recipe in runs:
        begun = (out / name / "recipe.toml").exists()
        if not begun or RunDirectory(out / name).finished(recipe) is None:
            waiting[name] = begun
    return waiting


def refuse_what_cannot_run(recipes: "Sequence[Recipe]") -> None:
    """Put each together once, whatever its seed: a mistake is told before the first of them trains for hours."""
    from semifed.assembly import assemble, prepare_run
    from semifed.data.datasets import load

    checked: list[Recipe] = []
    dataset, source = None, None
    for recipe in recipes:
        alike = recipe.model_copy(update={"seed": 0})
        if alike in checked:
            continue
        if source != (recipe.dataset, recipe.data):  # those of a table's setting follow one another
            dataset, source = load(recipe.dataset, recipe.data), (recipe.dataset, recipe.data)
        assemble(prepare_run(recipe, dataset))
        checked.append(alike)
