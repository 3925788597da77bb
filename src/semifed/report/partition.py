"""Who holds what: the images of every client by class, as a bubble plot and as a table."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from semifed.errors import UserError, nearest
from semifed.report.html import write_page
from semifed.report.rundir_reader import finite
from semifed.report.svg import PALETTE, inline_svg, page_style
from semifed.report.words import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

_MOST_CLIENTS = 100  # columns that are still told apart across a page
_MOST_CLASSES = 60
_PAGE_WIDTH = 9.4  # inches
_MOST_CELLS = 3000  # bubbles of each kind: keeps the page small
_SIZES = 14  # steps of bubble diameter, so that equal bubbles share one shape in the file
_ROWS_SHOWN = 40
_UNLABELLED, _LABELLED = PALETTE["series-1"].light, PALETTE["series-2"].light


@dataclass(frozen=True)
class Holdings:
    """Images by class (rows) and client (columns), with what was left out to stay legible."""

    classes: Sequence[str]
    known: Sequence[bool]
    clients: Sequence[int]
    labelled: Sequence[Sequence[float]]  # [clients][classes]
    unlabelled: Sequence[Sequence[float]]  # [clients][classes]
    server: Sequence[float] | None  # [classes]
    client_count: int
    class_count: int

    @property
    def note(self) -> str:
        """What the plot leaves out, empty if nothing."""
        parts = []
        if len(self.clients) < self.client_count:
            parts.append(f"{len(self.clients)} of {count(self.client_count)} clients, evenly spaced")
        if len(self.classes) < self.class_count:
            parts.append(f"{count(self.class_count)} classes, neighbours added up")
        return "; ".join(parts)


class Bubbles(NamedTuple):
    """Images of one kind and how they are drawn: each kind fills its own range of sizes."""

    name: str
    columns: Sequence[float]
    images: Sequence[Sequence[float]]  # [columns][classes]
    colour: str
    filled: bool
    full: float  # diameter of the largest bubble, points

    @property
    def largest(self) -> float:
        """Most images in one cell."""
        return max((max(row) for row in self.images), default=0.0)

    def draw(self, axes: "Axes") -> None:
        """Draws a bubble wherever there are images; its area is their number."""
        largest = self.largest
        by_size: dict[int, list[tuple[float, int]]] = {}
        for column, row in zip(self.columns, self.images, strict=True):
            for position, number in enumerate(row):
                if number > 0:
                    size = max(1, round(_SIZES * math.sqrt(number / largest)))
                    by_size.setdefault(size, []).append((column, position))
        for size, places in sorted(by_size.items(), reverse=True):
            across, down = zip(*places, strict=True)
            _discs(axes, across, down, self.full * size / _SIZES, self.colour, filled=self.filled)


def draw_partition(partition: Mapping[str, Any], path: Path | None) -> str | None:
    """Bubble plot of classes (rows) by clients (columns): to a .png or .svg file, or as inline SVG if path is None."""
    if path is not None:
        refuse_other_pictures(path)
    holdings = _legible(_holdings(partition))
    with page_style():
        figure = _bubbles(holdings)
        if path is None:
            return inline_svg(figure, _description(holdings))
        drawn = BytesIO()
        figure.savefig(drawn, format=path.suffix[1:].lower(), dpi=200, facecolor=PALETTE["paper"].light)
    write_page(path, drawn.getvalue())
    return None


def refuse_other_pictures(path: Path) -> None:
    """A `UserError` for a name that does not end in what can be drawn."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise UserError(f"{path}: expected a name that ends in .png or .svg; {nearest(path.suffix, ('.png', '.svg'))}")


def partition_table(partition: Mapping[str, Any], console: "Console") -> None:
    """Table of clients: labelled and unlabelled images, classes held, share of unknowns; summarised for many."""
    from rich import box
    from rich.table import Table

    holdings = _holdings(partition)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    for heading in ("client", "labelled", "unlabelled", "classes held", "unknown %"):
        table.add_column(heading, justify="left" if heading == "client" else "right")
    if holdings.server is not None:
        held = sum(images > 0 for images in holdings.server)
        table.add_row("server", count(math.fsum(holdings.server)), "0", str(held), "0.0", end_section=True)
    rows = [_client_figures(holdings, client) for client in range(holdings.client_count)]
    whole = len(rows) <= _ROWS_SHOWN
    for client in range(len(rows)) if whole else (*range(5), None, *range(len(rows) - 5, len(rows))):
        cells = ["…"] * 5 if client is None else [str(client), *_cells(rows[client])]
        table.add_row(*cells, end_section=client == len(rows) - 1)
    if len(rows) > 1:
        for name, statistic in (("min", min), ("median", statistics.median), ("max", max)):
            table.add_row(name, *_cells([float(statistic(column)) for column in zip(*rows, strict=True)]))
    console.print(table)


def _client_figures(holdings: Holdings, client: int) -> list[float]:
    labelled, unlabelled = holdings.labelled[client], holdings.unlabelled[client]
    both = [first + second for first, second in zip(labelled, unlabelled, strict=True)]
    unknown = math.fsum(images for images, known in zip(both, holdings.known, strict=True) if not known)
    total = math.fsum(both)
    held = float(sum(images > 0 for images in both))
    return [math.fsum(labelled), math.fsum(unlabelled), held, 100 * unknown / total if total else 0.0]


def _cells(figures: Sequence[float]) -> list[str]:
    labelled, unlabelled, held, unknown = figures
    return [count(labelled), count(unlabelled), f"{held:g}", f"{unknown:.1f}"]


def _holdings(partition: Mapping[str, Any]) -> Holdings:
    classes = [str(name) for name in partition.get("classes") or ()]
    known = [bool(flag) for flag in partition.get("known") or ()] or [True] * len(classes)
    labelled, unlabelled = partition.get("labelled") or (), partition.get("unlabelled") or ()
    client_count = max(len(labelled), len(unlabelled))

    def row(rows: Sequence[Sequence[object]], client: int) -> list[float]:
        images = rows[client] if client < len(rows) else ()
        return [finite(number) or 0.0 for number in images] or [0.0] * len(classes)

    server = partition.get("server")
    holdings = Holdings(
        classes=classes,
        known=known,
        clients=range(client_count),
        labelled=[row(labelled, client) for client in range(client_count)],
        unlabelled=[row(unlabelled, client) for client in range(client_count)],
        server=None if server is None else [finite(number) or 0.0 for number in server],
        client_count=client_count,
        class_count=len(classes),
    )
    rows = [known, *holdings.labelled, *holdings.unlabelled, *([] if holdings.server is None else [holdings.server])]
    if not classes or any(len(numbers) != len(classes) for numbers in rows):
        raise UserError("partition.json: expected 'classes', and one count per class in every row of the other keys")
    return holdings


def _legible(holdings: Holdings) -> Holdings:
    groups = _class_groups(holdings.known, most=_MOST_CLASSES)
    most = min(_MOST_CLIENTS, max(1, _MOST_CELLS // len(groups)))
    number = holdings.client_count
    shown = range(number) if number <= most else [position * (number - 1) // (most - 1) for position in range(most)]

    def added_up(row: Sequence[float]) -> list[float]:
        return [math.fsum(row[position] for position in group) for group in groups]

    return Holdings(
        classes=[
            holdings.classes[group[0]] + (f" … {holdings.classes[group[-1]]}" if len(group) > 1 else "")
            for group in groups
        ],
        known=[holdings.known[group[0]] for group in groups],
        clients=list(shown),
        labelled=[added_up(holdings.labelled[client]) for client in shown],
        unlabelled=[added_up(holdings.unlabelled[client]) for client in shown],
        server=None if holdings.server is None else added_up(holdings.server),
        client_count=number,
        class_count=holdings.class_count,
    )


def _class_groups(known: Sequence[bool], most: int) -> list[list[int]]:
    """Classes with the unknown ones last; neighbours of one kind share a row where there are too many."""
    size = math.ceil(len(known) / most)
    while True:
        groups = []
        for kind in (True, False):
            members = [position for position, flag in enumerate(known) if flag is kind]
            groups += [members[start : start + size] for start in range(0, len(members), size)]
        if len(groups) <= max(most, 2):
            return groups
        size += 1


def _description(holdings: Holdings) -> str:
    labelled = math.fsum(map(math.fsum, holdings.labelled))
    unknown = sum(not known for known in holdings.known)
    where = "; the server's labelled images stand in a column of their own" if holdings.server is not None else ""
    return (
        f"Bubble plot of {count(holdings.client_count)} clients by {count(holdings.class_count)} classes, "
        f"{'some' if unknown else 'none'} of them unknown; the area of a bubble is a number of images; "
        f"{'labelled and unlabelled' if labelled else 'unlabelled'} images at the clients{where}."
    )


def _bubbles(holdings: Holdings) -> "Figure":
    from matplotlib.figure import Figure

    row_count, column_count = len(holdings.classes), len(holdings.clients)
    names = [_shortened(name) for name in holdings.classes]
    left = 0.2 + 0.064 * max(map(len, names))
    right, top, bottom = (0.1 if all(holdings.known) else 0.62), 0.52, 0.36
    server_width = 0.0 if holdings.server is None else 0.62
    pitch = min(0.26, (_PAGE_WIDTH - left - right - server_width) / max(column_count, 1))  # inches a client
    row_pitch = min(0.26, max(0.13, 7.0 / row_count))
    # The server's column, in units of a client's column, left of client 0.
    server_at = -0.5 - 0.6 * server_width / pitch
    first = -0.7 - server_width / pitch
    plot_width = pitch * (column_count - 0.3 - first)
    width, height = max(left + plot_width + right, 4.6), top + row_pitch * row_count + bottom
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes(
        (left / width, bottom / height, plot_width / width, row_pitch * row_count / height),
        xlim=(first, column_count - 0.3),
        ylim=(row_count - 0.5, -0.5),
    )
    axes.set_yticks(range(row_count), names)
    axes.grid(axis="y", alpha=0.7)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    _client_axis(axes, holdings, pitch, server_at)
    _mark_unknown(axes, holdings)

    # Diameters in points. Neighbours may overlap a little: the largest bubbles are rare, and one sees through them.
    full = 72 * min(1.1 * row_pitch, 1.9 * pitch)
    # Labelled images are rings, so that neither kind hides the other.
    columns = range(column_count)
    kinds = [
        Bubbles("unlabelled", columns, holdings.unlabelled, _UNLABELLED, True, full),
        Bubbles("labelled", columns, holdings.labelled, _LABELLED, False, 0.9 * full),
    ]
    if holdings.server is not None:
        kinds.append(Bubbles("labelled, server", [server_at], [holdings.server], _LABELLED, False, 40 * row_pitch))
    for kind in kinds:
        kind.draw(axes)
    _size_legend(figure, [kind for kind in kinds if kind.largest > 0], holdings.note)
    return figure


def _shortened(name: str, longest: int = 26) -> str:
    return name if len(name) <= longest else name[: longest - 1] + "…"


def _client_axis(axes: "Axes", holdings: Holdings, pitch: float, server_at: float) -> None:
    column_count = len(holdings.clients)
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100) if step * pitch >= 0.22 or step == 100)
    places = [float(place) for place in range(0, column_count, every)]
    labels = [str(holdings.clients[int(place)]) for place in places]
    if holdings.server is not None:
        places, labels = [server_at, *places], ["server", *labels]
    axes.set_xticks(places, labels)
    axes.set_xlabel("client", loc="right", labelpad=1)


def _mark_unknown(axes: "Axes", holdings: Holdings) -> None:
    unknown = [position for position, known in enumerate(holdings.known) if not known]
    if not unknown:
        return
    axes.axhspan(unknown[0] - 0.5, unknown[-1] + 0.5, color=PALETTE["quiet"].light, alpha=0.1, linewidth=0, zorder=0)
    for position, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True):
        if not holdings.known[int(position)]:
            label.set_fontstyle("italic")
    axes.annotate(
        "unknown",
        (1, (unknown[0] + unknown[-1]) / 2),
        xycoords=("axes fraction", "data"),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontstyle="italic",
        color=PALETTE["quiet"].light,
    )


def _discs(
    axes: "Axes", across: Sequence[float], down: Sequence[float], diameter: float, colour: str, *, filled: bool
) -> None:
    line = 0.0 if filled else min(1.1, max(0.7, diameter / 6))
    axes.plot(
        across,
        down,
        linestyle="none",
        marker="o",
        markersize=max(1.2, diameter - line),
        color=colour,
        alpha=0.6 if filled else 1.0,
        markerfacecolor=colour if filled else "none",
        markeredgewidth=line,
        clip_on=False,
    )


def _size_legend(figure: "Figure", kinds: Sequence[Bubbles], note: str) -> None:
    width, height = figure.get_size_inches()
    page = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height))
    page.set_axis_off()
    at, line = 0.12, height - 0.2
    quiet = PALETTE["quiet"].light
    for kind in kinds:
        page.text(at, line, kind.name, va="center_baseline")
        at += 0.1 + 0.058 * len(kind.name)
        for number in [kind.largest] if len(kind.images) == 1 else _round_numbers(kind.largest):
            diameter = kind.full * math.sqrt(number / kind.largest)
            _discs(page, [at + diameter / 144], [line], diameter, kind.colour, filled=kind.filled)
            at += diameter / 72 + 0.05
            page.text(at, line, count(number), va="center_baseline", color=quiet)
            at += 0.1 + 0.066 * len(count(number))
        at += 0.16
    page.text(at - 0.12, line, "images", va="center_baseline", color=quiet)
    page.text(0.12, 0.06, note, va="baseline", color=quiet)


def _round_numbers(largest: float) -> list[float]:
    """Up to three sizes for the legend, of the form 1, 2 or 5 times a power of ten."""
    steps = [factor * 10.0**power for power in range(9) for factor in (1, 2, 5)]
    below = [step for step in steps if step <= largest]
    if not below:
        return [largest]
    return below[-1:] if len(below) < 4 else [below[-4], below[-1]]
