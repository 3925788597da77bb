"""Curves, histograms and scatter plots as inline SVG; matplotlib is imported when the first one is drawn."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from markupsafe import Markup

from semifed.report.svg import PALETTE, SERIES_COUNT, inline_svg, page_style, series_colour

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

_WIDTH, _HEIGHT = 3.9, 2.25  # inches; scaled to the column by the page
_DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1.6), (1.2, 1.4), (6, 1.5, 1.2, 1.5))
_MARKERS_UP_TO = 25
_STEPS = [1, 2, 5, 10]
MARKS = {"dot": "o", "square": "s", "triangle": "^", "diamond": "D", "star": "*"}


class Point(NamedTuple):
    """A value at a round; `low` and `high` bound the seeds where there are several, None breaks the line."""

    round: int
    value: float | None
    low: float | None = None
    high: float | None = None


class Series(NamedTuple):
    """A line of a chart; `style` picks its colour, and its dashes from the ninth on."""

    name: str
    points: Sequence[Point]
    style: int


class LegendEntry(NamedTuple):
    """What the page writes beside a chart for one of its lines."""

    name: str
    colour: str  # name of a CSS variable
    dash: int
    value: str
    mark: str = ""  # shape of a point, empty for a line


class Cloud(NamedTuple):
    """Points of one kind, in a colour and shape of their own."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str  # name of a colour of the page
    mark: str = "dot"


class Chart(NamedTuple):
    """A figure with the words around it."""

    title: str
    note: str
    svg: Markup
    legend: Sequence[LegendEntry]


def legend(series: Series, value: str) -> LegendEntry:
    """The legend of a series, with the value it ends at."""
    return LegendEntry(
        series.name, f"series-{series.style % SERIES_COUNT + 1}", series.style // SERIES_COUNT % len(_DASHES), value
    )


def cloud_legend(cloud: Cloud, value: str) -> LegendEntry:
    """The legend of a cloud of points."""
    return LegendEntry(cloud.name, cloud.colour, 0, value, cloud.mark)


def line_chart(series: Sequence[Series], description: str, *, percent: bool, beside: Sequence[Series] = ()) -> str:
    """Values against rounds, fractions in percent; the axis has room for the series of charts beside this one."""
    from matplotlib.ticker import MaxNLocator

    scale = 100.0 if percent else 1.0
    longest = max(len(line.points) for line in series)
    with page_style():
        figure, axes = _chart()
        for line in reversed(series):  # the first, which matters most, lies on top
            _draw_line(axes, line, scale, marked=longest <= _MARKERS_UP_TO)
        _make_room(axes, [*series, *beside], scale)
        _round_axis(axes, last=max(point.round for line in series for point in line.points))
        if percent:
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, -2.0), min(high, 102.0))
            axes.yaxis.set_major_formatter("{x:g} %")
        else:
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
            if all(point.value is None or float(point.value).is_integer() for line in series for point in line.points):
                axes.yaxis.set_major_locator(MaxNLocator(5, integer=True, steps=_STEPS, min_n_ticks=1))
        return inline_svg(figure, description)


def histogram(edges: Sequence[float], counts: Mapping[str, Sequence[float]], description: str, *, axis: str) -> str:
    """Shares of images over a score, one outline a test set; the first is the known classes."""
    with page_style():
        figure, axes = _chart()
        for position, values in enumerate(counts.values()):
            total = math.fsum(values)
            shares = [100 * value / total if total else 0.0 for value in values]
            axes.stairs(shares, edges, fill=True, color=series_colour(position), alpha=0.16, linewidth=0)
            axes.stairs(shares, edges, color=series_colour(position), linewidth=1.3)
        # Trained models are sure of most images: on a plain scale their one high bar would hide all others.
        axes.set_yscale("function", functions=(_signed_root, _signed_square))
        axes.set_ylim(bottom=0)
        highest = axes.get_ylim()[1]
        axes.set_yticks([share for share in (0, 1, 5, 20, 50, 100) if share <= highest])
        axes.margins(x=0.01)
        axes.yaxis.set_major_formatter("{x:g} %")
        axes.set_xlabel(axis, loc="right", labelpad=1)
        return inline_svg(figure, description)


def _signed_root(share: "NDArray[np.float64]") -> "NDArray[np.float64]":
    import numpy as np

    return np.sign(share) * np.sqrt(np.abs(share))


def _signed_square(root: "NDArray[np.float64]") -> "NDArray[np.float64]":
    import numpy as np

    return np.sign(root) * np.square(root)


def scatter(clouds: Sequence[Cloud], description: str, *, across: str, up: str) -> str:
    """One quantity against another, a point a sample."""
    from matplotlib.ticker import MaxNLocator

    with page_style():
        figure, axes = _chart()
        for cloud in clouds:
            _draw_cloud(axes, cloud, size=3.4, alpha=0.65)
        axes.xaxis.set_major_locator(MaxNLocator(7, steps=_STEPS))
        axes.set_xlabel(across, loc="right", labelpad=1)
        axes.text(0, 1.01, up, transform=axes.transAxes, color=PALETTE["quiet"].light, va="bottom")
        return inline_svg(figure, description)


def flat_map(clouds: Sequence[Cloud], landmarks: Sequence[Cloud], description: str) -> str:
    """Points on a map without scales, landmarks large on top of them."""
    from matplotlib.figure import Figure

    with page_style():
        figure = Figure(figsize=(_WIDTH, _WIDTH))
        axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(True)
        for cloud in clouds:
            _draw_cloud(axes, cloud, size=3.2, alpha=0.55)
        for cloud in landmarks:
            _draw_cloud(axes, cloud, size=11.0, alpha=1.0, edge=PALETTE["ink"].light)
        axes.margins(0.06)
        return inline_svg(figure, description)


def _draw_cloud(axes: "Axes", cloud: Cloud, *, size: float, alpha: float, edge: str = "none") -> None:
    axes.plot(
        [x for x, _ in cloud.points],
        [y for _, y in cloud.points],
        linestyle="none",
        marker=MARKS[cloud.mark],
        markersize=size,
        markerfacecolor=PALETTE[cloud.colour].light,
        markeredgecolor=edge,
        markeredgewidth=0.0 if edge == "none" else 0.8,
        alpha=alpha,
    )


def _chart() -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(_WIDTH, _HEIGHT))
    axes = figure.add_axes((0.105, 0.17, 0.875, 0.79))
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
    return figure, axes


def _draw_line(axes: "Axes", line: Series, scale: float, *, marked: bool) -> None:
    colour = series_colour(line.style)
    rounds = [point.round for point in line.points]
    drawn = [math.nan if point.value is None else scale * point.value for point in line.points]
    axes.plot(
        rounds,
        drawn,
        color=colour,
        linewidth=1.5,
        dashes=_DASHES[line.style // SERIES_COUNT % len(_DASHES)] or (None, None),
        marker="o" if marked else None,
        markersize=2.6,
        solid_capstyle="round",
    )
    band = [
        (point.round, scale * point.low, scale * point.high)
        for point in line.points
        if point.low is not None and point.high is not None
    ]
    if band:
        at, low, high = zip(*band, strict=True)
        axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)


def _make_room(axes: "Axes", series: Sequence[Series], scale: float) -> None:
    points = [point for line in series for point in line.points]
    values = [value for point in points for value in (point.value, point.low, point.high) if value is not None]
    if values:
        axes.update_datalim([(points[0].round, scale * value) for value in (min(values), max(values))], updatex=False)
        axes.autoscale_view()


def _round_axis(axes: "Axes", last: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=_STEPS))
    axes.set_xlim(
        -0.02 * max(last, 1), 1.02 * max(last, 1)
    )  # from round 0 in every chart, so that they can be read together
    axes.set_xlabel("round", loc="right", labelpad=1, color=PALETTE["quiet"].light)
