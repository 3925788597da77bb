"""Runs side by side: one row for runs that differ in nothing but the seed, mean and deviation over those."""

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from semifed.override import moves_numbers
from semifed.recipe import with_later_keys
from semifed.report.figures import Point
from semifed.report.gap import CEILING, FLOOR, gap_caveat, gap_shares, gaps, refuse_unknown
from semifed.report.reach import AGAINST, Reach, first_reached, levels_of, reaches, refuse_lone_reference
from semifed.report.rundir_reader import Run, find_runs, read_run, unlike_images
from semifed.report.words import MISSING, headline_metric, in_reading_order, setting

if TYPE_CHECKING:
    from rich.console import Console

Settings = Mapping[str, Hashable]

OPINIONS = {  # diagnostics of pseudo-labels that tell scenarios apart (SAGE, Figs. 10 and 12), by key in `opinions`
    "local.entropy": "Entropy of the local model's predictions",
    "received.entropy": "Entropy of the received model's predictions",
    "gap.mean": "Gap of confidence, ΔC",
    "mixing.mean": "Say of the local model, λ",
}

# What a run is about. The other tables say how a method was trained, and belong to the row rather than its block.
_BLOCK_TABLES = ("", "scenario", "model")


class Spread(NamedTuple):
    """Mean and sample standard deviation (n - 1) over seeds; no deviation for one seed."""

    mean: float
    std: float | None
    n: int


@dataclass(frozen=True)
class Row:
    """Runs that are equal in everything but seed and engine."""

    method: str
    dataset: str
    differences: Mapping[str, str]  # the recipe keys that differ between rows, the method's name aside
    block: tuple[tuple[str, str], ...]  # the differences that say what the data and the budget are
    seeds: tuple[int, ...]
    metrics: Mapping[str, Spread]  # last evaluated round
    last10: Mapping[str, Spread]  # mean over the last ten evaluated rounds
    curves: Mapping[str, Sequence[Point]]
    seconds: Spread | None
    megabytes_up: Spread | None
    megabytes_down: Spread | None
    unfinished: str  # how far the runs came; empty if they ended
    target: float | None = None  # value of the headline metric that every row of the block reaches
    rounds_to_target: int | None = None
    behind_first: Spread | None = None  # headline metric against the first row of the block, seed by seed
    role: str = ""  # "floor" or "ceiling" of its block
    gap_share: Spread | None = None  # of the way from floor to ceiling in the headline metric, seed by seed
    opinions: Mapping[str, Sequence[Point]] = field(default_factory=dict)  # over rounds, by key as `local.entropy`
    reached: tuple[Reach, ...] = ()  # levels of the headline metric that were asked for
    compared_with: str = ""  # label of the row that its speed-ups refer to

    @property
    def label(self) -> str:
        """The method, with the settings that tell it from other rows of its block."""
        own = {key: value for key, value in self.differences.items() if not _names_block(key) and value != MISSING}
        return ", ".join([self.method, *(f"{key} {value}" for key, value in own.items())])


@dataclass(frozen=True)
class Comparison:
    """A table of rows, sorted by scenario and then by the headline metric."""

    rows: list[Row]
    keys: list[str]  # recipe keys that differ between rows, the method's name aside
    metrics: list[str]  # in reading order
    headline: str
    common: Mapping[str, Any]  # recipe of the first run
    notes: list[str] = field(default_factory=list)

    def table(self, console: "Console", *, all_metrics: bool = False) -> None:
        """Prints the table, leaving out the least important columns where the console is narrow."""
        from semifed.report.compare_terminal import print_further, print_table

        print_table(self, console, hint=not all_metrics)
        if all_metrics:
            print_further(self, console)

    def as_json(self) -> dict[str, Any]:
        """The whole comparison for programs; metrics are fractions, and what was not measured is null."""
        from semifed.report.compare_views import comparison_json

        return comparison_json(self)

    def write_html(self, path: Path) -> None:
        """Writes the table and learning curves as one HTML file that opens offline."""
        from semifed.report.compare_views import comparison_page
        from semifed.report.html import write_page

        write_page(path, comparison_page(self))


def compare_runs(
    runs: Sequence[Path],
    *,
    floor: str | None = None,
    ceiling: str | None = None,
    reach: str | None = None,
    against: str | None = None,
) -> Comparison:
    """Compares run directories, or those found below directories; UserError names a path without a readable run.

    Where runs of a floor and a ceiling are among them, by method or label, rows say how much of the gap they close.
    `reach` are percentages: rows say when they reach them, and how much sooner than the row `against` of their block.
    """
    levels = levels_of(reach)
    refuse_lone_reference(against, reach)
    read = [read_run(path) for path in find_runs(runs)]
    groups: dict[Hashable, list[Run]] = {}
    notes = []
    for run in read:
        # An interrupted run must not move the mean of finished ones, nor one of other images: each has its own row.
        alike = (frozenset(_compared(run.recipe).items()), run.finished, run.images)
        group = groups.setdefault(alike, [])
        if any(run.seed == other.seed for other in group):
            notes.append(f"left out, same recipe and seed as another run: {run.path}")
        else:
            group.append(run)
    members = list(groups.values())
    settings = [_compared(group[0].recipe) for group in members]
    keys = differing_keys(settings)
    rows = [_row(group, own, keys) for group, own in zip(members, settings, strict=True)]
    metrics = in_reading_order({metric for row in rows for metric in (*row.metrics, *row.last10)})
    headline = headline_metric(metrics)
    by_seed = {id(row): group for row, group in zip(rows, members, strict=True)}
    order = {id(row): _sort_key(row, own, keys, headline) for row, own in zip(rows, settings, strict=True)}
    rows.sort(key=lambda row: order[id(row)])
    finished = _with_block_columns(rows, by_seed, headline)
    finished, caveats = _with_gap(finished, [by_seed[id(row)] for row in rows], headline, floor, ceiling)
    finished, missing = _with_reach(finished, [by_seed[id(row)] for row in rows], headline, levels, against)
    return Comparison(
        finished, keys, metrics, headline, read[0].recipe, [*unlike_images(read), *caveats, *missing, *notes]
    )


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean and sample deviation of the values that exist; None if none does."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    return Spread(
        math.fsum(present) / len(present), statistics.stdev(present) if len(present) > 1 else None, len(present)
    )


def differing_keys(groups: Sequence[Settings]) -> list[str]:
    """Dotted keys that tell groups apart, dataset and scenario first.

    Fields of a table with a `name` are compared only among groups with that name: SAGE's threshold is no
    difference to FedAvg, which has none. The same goes for tables that only some methods bring.
    """
    keys = dict.fromkeys(key for group in groups for key in group)
    found = [key for key in keys if key != "method.name" and _differs(key, groups)]
    ranks = {"": 1, "scenario": 2, "model": 3, "method": 4}
    return sorted(found, key=lambda key: (key != "dataset", ranks.get(_table(key), 5)))


def _differs(key: str, groups: Sequence[Settings]) -> bool:
    table = _table(key)
    everywhere = all(any(_table(other) == table for other in group) for group in groups)
    seen: dict[Hashable, Hashable] = {}
    for group in groups:
        name = None if key == f"{table}.name" else group.get(f"{table}.name")
        peers = (name, None if everywhere else group.get("method.name"))
        if seen.setdefault(peers, group.get(key)) != group.get(key):
            return True
    return False


def _table(key: str) -> str:
    return key.rpartition(".")[0].partition(".")[0]


def _names_block(key: str) -> bool:
    return _table(key) in _BLOCK_TABLES


def _compared(recipe: Mapping[str, Any]) -> dict[str, Hashable]:
    """The recipe as dotted keys, without what may differ between seeds of one row."""
    return {key: value for key, value in _flat(with_later_keys(recipe)) if key != "seed" and moves_numbers(key)}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Hashable]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _hashable(value)


def _hashable(value: Any) -> Hashable:
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), _hashable(inner)) for key, inner in value.items()))
    if isinstance(value, list):
        return tuple(_hashable(inner) for inner in value)
    return value if isinstance(value, Hashable) else str(value)


def _row(group: Sequence[Run], own: Settings, keys: Sequence[str]) -> Row:
    metrics = in_reading_order({metric for run in group for metric in run.metrics})
    megabytes = {
        name: spread(None if (total := run.total(name)) is None else total / 1e6 for run in group)
        for name in ("bytes_up", "bytes_down")
    }
    return Row(
        method=group[0].method,
        dataset=group[0].dataset,
        differences={key: setting(own.get(key)) for key in keys},
        block=tuple((key, setting(own.get(key))) for key in keys if _names_block(key)),
        seeds=tuple(sorted(run.seed for run in group)),
        metrics=_spreads(metrics, [run.metrics for run in group]),
        last10=_spreads(metrics, [run.metrics_last10 for run in group]),
        curves={metric: _curve([_metric(run, metric) for run in group]) for metric in metrics},
        opinions=_opinion_curves(group),
        seconds=spread(run.total("seconds") for run in group),
        megabytes_up=megabytes["bytes_up"],
        megabytes_down=megabytes["bytes_down"],
        unfinished="" if group[0].finished else _progress(group),
    )


def _spreads(metrics: Sequence[str], values: Sequence[Mapping[str, float | None]]) -> dict[str, Spread]:
    found = {metric: spread(own.get(metric) for own in values) for metric in metrics}
    return {metric: value for metric, value in found.items() if value is not None}


def _progress(group: Sequence[Run]) -> str:
    reached = sorted({run.last_round or 0 for run in group})
    rounds = str(reached[0]) if len(reached) == 1 else f"{reached[0]}–{reached[-1]}"
    planned = group[0].planned_rounds
    return f"round {rounds}" + ("" if planned is None else f" of {planned}")


def _metric(run: Run, metric: str) -> dict[int, float | None]:
    return {line.number: line.metrics.get(metric) for line in run.evaluated}


def _opinion_curves(group: Sequence[Run]) -> dict[str, list[Point]]:
    """How sure both models are of their labels and how far they agree; empty where a method asks neither."""
    found = {}
    for key in OPINIONS:
        part, _, name = key.partition(".")
        curve = _curve(
            [
                {line.number: line.opinions.get(part, {}).get(name) for line in run.rounds if line.opinions}
                for run in group
            ]
        )
        if any(point.value is not None for point in curve):
            found[key] = curve
    return found


def _curve(by_run: Sequence[Mapping[int, float | None]]) -> list[Point]:
    """Mean and range over seeds, at the rounds in which every seed was tested."""
    common = sorted(set.intersection(*(set(values) for values in by_run)))
    points = []
    for number in common:
        values = [own[number] for own in by_run]
        present = [value for value in values if value is not None]
        if len(present) < len(values):
            points.append(Point(number, None))
        elif len(present) == 1:
            points.append(Point(number, present[0]))
        else:
            points.append(Point(number, math.fsum(present) / len(present), min(present), max(present)))
    return points


def _sort_key(row: Row, own: Settings, keys: Sequence[str], headline: str) -> tuple[Any, ...]:
    block = tuple(_orderable(own.get(key)) for key in keys if _names_block(key))
    reached = row.metrics.get(headline)
    return block, bool(row.unfinished), -reached.mean if reached else math.inf, row.method, row.label


def _orderable(value: Hashable) -> tuple[int, float, str]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return 0, float(value), ""
    return 1, 0.0, setting(value)


def _with_block_columns(rows: Sequence[Row], runs: Mapping[int, Sequence[Run]], headline: str) -> list[Row]:
    """Adds what only a row's neighbours define: the common target, and the distance to the first row."""
    complete = []
    for row in rows:
        block = [other for other in rows if other.block == row.block]
        ended = [other for other in block if not other.unfinished]
        target = _common_target(ended, headline) if len(ended) > 1 else None
        first = block[0]
        complete.append(
            replace(
                row,
                target=target,
                rounds_to_target=None if target is None else first_reached(row.curves.get(headline, ()), target),
                behind_first=None
                if row is first or row.unfinished or first.unfinished
                else _paired_difference(runs[id(row)], runs[id(first)], headline),
            )
        )
    return complete


def _common_target(rows: Sequence[Row], headline: str) -> float | None:
    """A whole percent that every row reaches, by its mean over the last ten tests."""
    means = [row.last10[headline].mean for row in rows if headline in row.last10]
    if len(means) < len(rows):
        return None
    # 0.58 * 100 is 57.99…: without the nudge the floor would lose a percent.
    return math.floor(100 * min(means) + 1e-9) / 100


def _paired_difference(runs: Sequence[Run], first: Sequence[Run], headline: str) -> Spread | None:
    reference = {run.seed: run.metrics.get(headline) for run in first}
    differences = []
    for run in runs:
        here, there = run.metrics.get(headline), reference.get(run.seed)
        if here is not None and there is not None:
            differences.append(here - there)
    return spread(differences)


def _with_gap(
    rows: Sequence[Row], runs: Sequence[Sequence[Run]], headline: str, floor: str | None, ceiling: str | None
) -> tuple[list[Row], list[str]]:
    """Adds the share of the gap between the floor and the ceiling of each block, and what to know of these gaps."""
    names = [name for row in rows for name in (row.method, row.label)]
    refuse_unknown("--floor", floor, names)
    refuse_unknown("--ceiling", ceiling, names)
    complete, caveats = list(rows), []
    for block in dict.fromkeys(row.block for row in rows):
        inside = [number for number, row in enumerate(rows) if row.block == block and not row.unfinished]
        by_seed = {number: _values(runs[number], headline) for number in inside}
        low = _reference(floor or FLOOR, rows, by_seed)
        high = _reference(ceiling or CEILING, rows, by_seed)
        if low is None or high is None or low == high:
            continue
        for number in inside:
            share = spread(gap_shares(by_seed[number], by_seed[low], by_seed[high]).values())
            role = {low: "floor", high: "ceiling"}.get(number, "")
            complete[number] = replace(rows[number], role=role, gap_share=None if role else share)
        if caveat := gap_caveat(gaps(by_seed[low], by_seed[high])):
            about = ", ".join(f"{key} {value}" for key, value in block)
            caveats.append(f"gap closed{f' at {about}' if about else ''}: {caveat}.")
    if (floor or ceiling) and not any(row.role for row in complete):
        caveats.append(
            f"No row is put between {floor or FLOOR} and {ceiling or CEILING}: no block has finished runs of both."
        )
    return complete, caveats


def _with_reach(
    rows: Sequence[Row], runs: Sequence[Sequence[Run]], headline: str, levels: Sequence[float], against: str | None
) -> tuple[list[Row], list[str]]:
    """Adds the rounds to each level and the speed-up against the reference of the row's block, if it has one."""
    refuse_unknown("--against", against, [name for row in rows for name in (row.method, row.label)])
    if not levels:
        return list(rows), []
    complete = []
    for row in rows:
        inside = [number for number, other in enumerate(rows) if other.block == row.block and not other.unfinished]
        found = _reference(against or AGAINST, rows, {number: _values(runs[number], headline) for number in inside})
        curve = None if found is None else rows[found].curves.get(headline, ())
        reached = reaches(row.curves.get(headline, ()), levels, curve)
        complete.append(replace(row, reached=reached, compared_with="" if found is None else rows[found].label))
    if any(row.compared_with for row in complete):
        return complete, []
    return complete, [f"No speed-up: no block has a finished run of {against or AGAINST}."]


def _values(runs: Sequence[Run], headline: str) -> dict[int, float]:
    return {run.seed: value for run in runs if (value := run.metrics.get(headline)) is not None}


def _reference(name: str, rows: Sequence[Row], by_seed: Mapping[int, Mapping[int, float]]) -> int | None:
    """The row of that name; of several, the one with most seeds and then the strongest, which flatters nobody."""
    named = [number for number in by_seed if name in (rows[number].method, rows[number].label) and by_seed[number]]
    return max(
        named, key=lambda number: (len(by_seed[number]), statistics.fmean(by_seed[number].values())), default=None
    )
