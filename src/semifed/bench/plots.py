"""Pictures of the scaling tables, medians with the range of their turns; other tables have none."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from semifed.bench.measuring import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (4.6, 3.3)  # inches of one panel
_INK, _FAINT, _SECOND = "#1f5fa8", "#9a9a9a", "#c4622d"
_MOST_MEMORY = 4.0  # GB that a run of any number of clients has to live with


def draw(tables: Sequence[Table], folder: Path) -> list[Path]:
    """One PNG for each scaling table, in the order of the tables."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for table in tables:
        if table.name not in _PANELS:
            continue
        panels = _PANELS[table.name]
        figure = Figure(figsize=(_SIZE[0] * len(panels), _SIZE[1]), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)
        for axis, panel in zip(axes[0], panels, strict=True):
            panel(axis, table.facts)
            axis.spines[["top", "right"]].set_visible(False)
            for direction in (axis.xaxis, axis.yaxis):
                if direction.get_scale() == "log":  # 1,000 reads better than a power of ten
                    direction.set_major_formatter(lambda value, _: f"{value:,g}")
                    direction.set_minor_formatter(lambda value, _: "")
        path = folder / f"{table.name}.png"
        figure.savefig(path, dpi=150)
        drawn.append(path)
    return drawn


Turns = Sequence[Sequence[float]]  # point by point, what each turn found


def _turns(facts: dict[str, Any], value: Callable[[dict[str, Any]], float | None]) -> Turns:
    """A value in each turn, point by point; what no kernel told is no number."""
    return [[float("nan") if (found := value(run)) is None else found for run in runs] for runs in facts["runs"]]


def _medians(turns: Turns) -> list[float]:
    return [median(values) for values in turns]


def _round_seconds(run: dict[str, Any]) -> float:
    return float(median(run["rounds"]))


def _clients_time(axis: "Axes", facts: dict[str, Any]) -> None:
    _line(axis, facts["clients"], _turns(facts, _round_seconds), "one round", _INK)
    _line(axis, facts["clients"], _turns(facts, lambda run: run["start"]), "before the first round", _SECOND, "s")
    axis.set(xscale="log", yscale="log", xlabel="clients in total", ylabel="seconds")
    # Room for flat lines to look flat, and for the legend between them.
    low, high = axis.get_ylim()
    axis.set_ylim(low / 3, high * 6)
    axis.legend(frameon=False, loc="upper left")


def _clients_memory(axis: "Axes", facts: dict[str, Any]) -> None:
    _line(axis, facts["clients"], _turns(facts, lambda run: _gigabytes(run["own_memory"])), "server", _INK)
    whole = _turns(facts, lambda run: _gigabytes(run["all_memory"]))
    _line(axis, facts["clients"], whole, "with its workers", _SECOND, "s")
    axis.axhline(_MOST_MEMORY, color=_FAINT, linestyle="--")
    axis.text(facts["clients"][0], _MOST_MEMORY * 1.02, "4 GB", color=_FAINT, va="bottom")
    axis.set(xscale="log", xlabel="clients in total", ylabel="peak memory, GB")
    axis.set_ylim(0, max(_MOST_MEMORY, *_medians(whole)) * 1.2)
    axis.legend(frameon=False, loc="upper right", ncols=2)


def _participants(axis: "Axes", facts: dict[str, Any]) -> None:
    _proportional(axis, facts["participants"], _turns(facts, _round_seconds), "clients a round")


def _images(axis: "Axes", facts: dict[str, Any]) -> None:
    _proportional(axis, facts["images_a_client"], _turns(facts, _round_seconds), "images a client")


def _workers(axis: "Axes", facts: dict[str, Any]) -> None:
    counts, gains = facts["workers"], facts["times_as_fast"]
    middle = [gain["median"] for gain in gains]
    reach = [[gain["median"] - gain["low"] for gain in gains], [gain["high"] - gain["median"] for gain in gains]]
    axis.plot(counts, counts, color=_FAINT, linestyle="--", label="ideal", zorder=1)
    axis.errorbar(counts, middle, yerr=reach, color=_INK, marker="o", capsize=3, label="measured, with its range")
    axis.set(xlabel="workers", ylabel="times as fast as one", xticks=counts, xlim=(0.8, max(counts) + 0.2))
    axis.set_ylim(0, max(*counts, *(gain["high"] for gain in gains), 1) * 1.25)
    axis.legend(frameon=False, loc="upper left")


def _width(axis: "Axes", facts: dict[str, Any]) -> None:
    operations = [facts["operations_a_step"][name] / 1e9 for name in facts["width"]]
    taken = _turns(facts, lambda run: 1000 * _round_seconds(run) / facts["steps_a_round"])
    _line(axis, operations, taken, "", _INK)
    for name, x, y in zip(facts["width"], operations, _medians(taken), strict=True):
        axis.annotate(
            f"{name}: {y:.0f} ms", (x, y), xytext=(-8, 4), textcoords="offset points", ha="right", va="bottom"
        )
    axis.set(xscale="log", yscale="log", xlabel="GFLOP a step", ylabel="ms a step")
    axis.margins(y=0.2)
    axis.set_xlim(operations[0] / 25, operations[-1] * 2)  # room for the first label


def _width_speed(axis: "Axes", facts: dict[str, Any]) -> None:
    operations = [facts["operations_a_step"][name] / 1e9 for name in facts["width"]]
    _line(axis, operations, [facts["gflops_reached"][name] for name in facts["width"]], "", _INK)
    axis.set(xscale="log", xlabel="GFLOP a step", ylabel="GFLOP/s reached on one core")
    axis.set_ylim(bottom=0)
    axis.margins(x=0.2)


def _proportional(axis: "Axes", counts: Sequence[int], seconds: Turns, what: str) -> None:
    """Seconds against a count that they should grow with, beside what the largest count would make of the others."""
    axis.plot([0, counts[-1]], [0, median(seconds[-1])], color=_FAINT, linestyle="--", label="proportional", zorder=1)
    _line(axis, counts, seconds, "measured", _INK)
    axis.set(xlabel=what, ylabel="seconds a round", xticks=[0, *counts])
    axis.set_xlim(left=0)
    axis.set_ylim(0, max(map(max, seconds)) * 1.25)
    axis.legend(frameon=False, loc="upper left")


def _line(axis: "Axes", x: Sequence[float], turns: Turns, label: str, colour: str, marker: str = "o") -> None:
    """Medians, each with a bar from the smallest to the largest of its turns."""
    middle = _medians(turns)
    below = [centre - min(values) for centre, values in zip(middle, turns, strict=True)]
    above = [max(values) - centre for centre, values in zip(middle, turns, strict=True)]
    named = label or None
    axis.errorbar(x, middle, yerr=[below, above], capsize=3, zorder=2, color=colour, marker=marker, label=named)


def _gigabytes(size: int | None) -> float | None:
    return None if size is None else size / 1e9


_PANELS: dict[str, tuple[Callable[["Axes", dict[str, Any]], None], ...]] = {
    "scaling-clients": (_clients_time, _clients_memory),
    "scaling-participants": (_participants,),
    "scaling-workers": (_workers,),
    "scaling-images": (_images,),
    "scaling-width": (_width, _width_speed),
}
