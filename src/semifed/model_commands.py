"""Commands that put a delivered model to work: `semifed predict`, `discover` and `export`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from semifed.errors import UserError
from semifed.terminal import say, terminal

REJECTS_NOTHING = (
    "This model calls nothing unknown: its server held no labels to set a threshold with "
    "(scenario.validation_fraction gives it some)."
)
RunDirectory = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A finished run; only its model/ is used.")]


def predict(
    run: RunDirectory,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE_OR_FOLDER...", help="What to look at.")],
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table to this file too.")] = None,
) -> None:
    """Name the class of images, or call them unknown."""
    from semifed.predict import Answer, images_of, load_model, refuse_unreadable, write_csv

    model = load_model(run)
    said = list(model.answers(images_of(images)))
    answers = [one for one in said if isinstance(one, Answer)]
    faults = [one for one in said if isinstance(one, UserError)]
    if not answers:
        refuse_unreadable(faults, len(said))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("image", overflow="fold")
    table.add_column("label", overflow="fold")
    table.add_column("confidence", justify="right")
    table.add_column("unknown score", justify="right")
    for image, label, confidence, score in answers:
        name = str(image).encode(errors="replace").decode()  # of any bytes; a terminal takes text
        table.add_row(Text(name), Text(label), f"{confidence:.3f}", f"{score:.4g}")
    terminal().print(table, highlight=False, markup=False)
    if not model.rejects:
        say(REJECTS_NOTHING)
    if csv is not None:
        write_csv(answers, csv)
        say(f"written: {csv}")
    refuse_unreadable(faults, len(said))


def discover(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A finished run of a method of category discovery.")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE_OR_FOLDER...", help="What to sort into groups.")],
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every image with its group.")] = None,
    sheets: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a picture of every group.")] = None,
) -> None:
    """Sort images into groups, also those of classes nobody has named."""
    from semifed.discover import described, discovered
    from semifed.predict import images_of, load_model, refuse_unreadable, write_csv

    model = load_model(run)
    if model.misses_labels:
        say("This model came without model/labelled.safetensors: images are grouped without the help of labelled ones.")
    files = images_of(images)
    seen = model.see(files)
    if not seen.paths:
        refuse_unreadable(seen.faults, len(files))
    members = discovered(model, seen, sheets)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("group", "images", "confidence"):
        table.add_column(title, justify="right")
    table.add_column("looks most like", overflow="fold")
    for group in described(members):
        like = f"{group.looks_like} ({group.share:.0%})"
        table.add_row(str(group.number), str(group.images), f"{group.confidence:.2f}", Text(like))
    terminal().print(table, highlight=False, markup=False)
    if alone := sum(member.group < 0 for member in members):
        say(f"in no group: {alone}")
    say("A group of low confidence is likely to be a class without a name.")
    if csv is not None:
        write_csv(members, csv)
    for path in (csv, sheets):
        if path is not None:
            say(f"written: {path}")
    refuse_unreadable(seen.faults, len(files))


def export(
    run: RunDirectory,
    onnx: Annotated[Path, typer.Option("--onnx", metavar="FILE", help="Where to write the graph.")],
) -> None:
    """Write the model as one ONNX graph: pixels in; probabilities, unknown score and label out."""
    from semifed.export import write_onnx
    from semifed.predict import load_model

    model = load_model(run)
    written = write_onnx(model, onnx)
    if not model.rejects:
        say(REJECTS_NOTHING)
    if model.sorts_images:
        say("The graph names known classes only: groups are found among many images together, by semifed discover.")
    say(f"On random images the graph differs from semifed predict by at most {written.difference:.1g}.")
    say(f"written: {onnx} ({written.bytes / 1e6:.2f} MB)")
