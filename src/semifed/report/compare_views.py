"""A comparison as columns and words, for the browser, and as plain numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from markupsafe import Markup

from semifed.report.compare import OPINIONS, Comparison, Row, Spread
from semifed.report.figures import Chart, Series, legend, line_chart
from semifed.report.html import render
from semifed.report.reach import Reach
from semifed.report.words import (
    MAIN_METRICS,
    MISSING,
    brief_duration,
    count,
    is_fraction,
    metric_title,
    metric_value,
    scenario_words,
    signed,
    split_metric,
)

_SHORT = {
    "clusters": "groups",
    "all_balanced": "all\nbalanced",
    "old_balanced": "old\nbalanced",
    "new_balanced": "new\nbalanced",
    "auroc_seen": "AUROC\nseen",
    "auroc_overall": "AUROC\noverall",
    "fpr95_seen": "FPR95\nseen",
    "aupr_seen": "AUPR\nseen",
    "oscr_seen": "OSCR\nseen",
}


class Column(NamedTuple):
    """A column of the comparison; those of the highest rank give way first in a narrow terminal."""

    heading: str
    meaning: str
    cells: Sequence[str]
    numeric: bool
    rank: int

    @property
    def width(self) -> int:
        """Characters it takes in a terminal."""
        return max(len(line) for text in (self.heading, *self.cells) for line in text.split("\n"))


def columns(comparison: Comparison) -> list[Column]:
    """The columns of the main table in reading order."""
    rows, headline = comparison.rows, comparison.headline
    found = naming_columns(comparison)
    for metric in comparison.metrics:
        if metric not in MAIN_METRICS:
            continue
        found += metric_columns(comparison, metric)
        if metric == headline and any(row.role for row in rows):
            meaning = f"share of the way from floor to ceiling in {metric_title(headline)}, in percent, seed by seed"
            found.append(Column("gap\nclosed", meaning, [_gap_cell(row) for row in rows], True, 1))
        if metric == headline and any(row.behind_first for row in rows):
            cells = [_first_or_difference(row) for row in rows]
            meaning = f"{metric_title(headline)} minus that of the first row of the block, seed by seed"
            found.append(Column("vs\nfirst", meaning, cells, True, 2))
    found += _reach_columns(rows, headline)
    found += _cost_columns(rows, headline)
    return found


def further_columns(comparison: Comparison) -> list[Column]:
    """The metrics that have no place in the main table: other models, other scores, further measures."""
    return [
        column
        for metric in comparison.metrics
        if metric not in MAIN_METRICS
        for column in metric_columns(comparison, metric)
    ]


def naming_columns(comparison: Comparison) -> list[Column]:
    """What names the rows: the method, the settings that differ, the number of seeds."""
    rows = comparison.rows
    found = [Column("method", "", [row.method + (" †" if row.unfinished else "") for row in rows], False, 0)]
    for key in comparison.keys:
        cells = [row.differences[key] for row in rows]
        numeric = all(_is_number(cell) or cell == MISSING for cell in cells)
        found.append(Column(key.replace(".", ".\n", 1), "", cells, numeric, 0))
    found.append(Column("seeds", "", [str(len(row.seeds)) for row in rows], True, 0))
    return found


def comparison_page(comparison: Comparison) -> str:
    """The comparison as HTML text."""
    rows = comparison.rows
    starts = [position > 0 and rows[position - 1].block != row.block for position, row in enumerate(rows)]
    everything, further = columns(comparison), further_columns(comparison)
    return render(
        "compare.html.j2",
        subject=subject_of(comparison),
        columns=everything,
        further=[*naming_columns(comparison), *further] if further else [],
        row_count=len(rows),
        starts_block=starts,
        notes=reading_notes(comparison, everything),
        panels=_panels(comparison),
    )


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain numbers and words; metrics are fractions, and what was not measured is null."""
    rows = []
    for row in comparison.rows:
        plain = {
            item.name: _plain(getattr(row, item.name))
            for item in fields(row)
            if item.name not in ("curves", "opinions")
        }
        rows.append({"label": row.label, **plain, "block": dict(row.block)})
    return {"headline": comparison.headline, "rows": rows, "notes": comparison.notes}


def _plain(value: Any) -> Any:
    if isinstance(value, Spread | Reach):
        return value._asdict()
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def reading_notes(comparison: Comparison, shown: Sequence[Column]) -> list[str]:
    """What the numbers of the shown columns are, and which runs need a caveat."""
    headings = [column.heading.replace("\n", " ") for column in shown]
    rows = comparison.rows
    several = any(len(row.seeds) > 1 for row in rows)
    notes = [
        "Metrics in percent after the last round; last 10: mean of the last ten tests."
        + (" Mean ± sample standard deviation over seeds." if several else "")
    ]
    if "groups" in headings:
        notes.append("all, old, new: images in the group of their class, of all, known and novel ones; groups: number.")
    if "gap closed" in headings:
        ends = {role: next(row.label for row in rows if row.role == role) for role in ("floor", "ceiling")}
        notes.append(
            f"gap closed: share of the way from the floor ({ends['floor']}) to the ceiling ({ends['ceiling']}) in "
            f"{comparison.headline}, in percent, seed by seed."
        )
    if "vs first" in headings:
        notes.append(f"vs first: {comparison.headline} minus that of the first row of the block, seed by seed.")
    if reached := [heading for heading in headings if heading.startswith(("to ", "rounds to"))]:
        name = "rounds to" if "rounds to" in reached else "to"
        notes.append(f"{name} N %: first round in which the mean {comparison.headline} of the seeds reaches it.")
    if any(heading.startswith("reach ") for heading in headings):
        references = dict.fromkeys(row.compared_with for row in rows if row.compared_with)
        speedup = f"; ×: how many times sooner than {', '.join(references)}" if references else ""
        notes.append(f"reach N %: first round in which the mean {comparison.headline} of the seeds is there{speedup}.")
    notes += [f"† unfinished, {row.unfinished}: {row.label}" for row in rows if row.unfinished]
    return notes + comparison.notes


def spread_text(metric: str, value: Spread | None, expected: int) -> str:
    """`81.2 ± 0.5`; says over how many seeds where some have no value."""
    if value is None:
        return MISSING
    text = metric_value(metric, value.mean)
    if value.std is not None:
        # The deviation of a count is no count.
        text += f" ± {metric_value(metric, value.std) if is_fraction(metric) else f'{value.std:.2g}'}"
    return text if value.n == expected else f"{text} ({value.n} of {expected})"


def metric_columns(comparison: Comparison, metric: str) -> list[Column]:
    """A metric after the last round, the headline also in the mean of the last ten tests."""
    rows = comparison.rows
    last = [spread_text(metric, row.metrics.get(metric), len(row.seeds)) for row in rows]
    headline = metric == comparison.headline
    rank = 1 if headline else {"auroc_seen": 2, "auroc_overall": 3, "old": 2, "new": 2, "clusters": 1}.get(metric, 7)
    prefix, plain = split_metric(metric)
    heading = _SHORT.get(plain, plain.replace("auroc_unseen.", "AUROC\n"))
    if prefix:
        heading = f"{prefix}\n{heading}"
    found = [Column(heading, metric_title(metric), last, True, rank)]
    if headline:
        mean = [spread_text(metric, row.last10.get(metric), len(row.seeds)) for row in rows]
        found.append(Column("last 10", f"{metric_title(metric)}, mean of the last ten tests", mean, True, 1))
    return found


def _cost_columns(rows: Sequence[Row], headline: str) -> list[Column]:
    found = []
    targets = {row.target for row in rows}
    if targets - {None}:
        shared = len(targets) == 1
        cells = [_target_cell(row, shared) for row in rows]
        heading = f"to {_percent(rows[0].target)}" if shared else "rounds to"
        found.append(
            Column(heading, f"Rounds until {metric_title(headline)} reaches a value all rows reach", cells, True, 4)
        )
    seconds = [brief_duration(row.seconds.mean if row.seconds else None) for row in rows]
    found.append(Column("time", "Mean time of a run", seconds, True, 5))
    for heading, name in (("MB up", "megabytes_up"), ("MB down", "megabytes_down")):
        amounts: list[Spread | None] = [getattr(row, name) for row in rows]
        cells = [MISSING if amount is None else _three_digits(amount.mean) for amount in amounts]
        found.append(Column(heading.replace(" ", "\n"), f"Mean traffic of a run, {heading}", cells, True, 6))
    return found


def _reach_columns(rows: Sequence[Row], headline: str) -> list[Column]:
    """For every level that was asked for the rounds to it, with the speed-up behind them where there is one."""
    found = []
    for position, level in enumerate([one.level for one in rows[0].reached]):
        cells = [_reach_cell(row.reached[position]) for row in rows]
        meaning = f"First round in which the mean {metric_title(headline)} of the seeds reaches {100 * level:g} %"
        if any(row.compared_with for row in rows):
            meaning += ", and how many times sooner than the reference"
        found.append(Column(f"reach\n{100 * level:g} %", meaning, cells, True, 1))  # it was asked for
    return found


def _reach_cell(reached: Reach) -> str:
    if reached.round is None:
        return MISSING
    return str(reached.round) if reached.speedup is None else f"{reached.round} ×{reached.speedup:.2f}"


def _target_cell(row: Row, shared: bool) -> str:
    if row.target is None:
        return MISSING
    reached = MISSING if row.rounds_to_target is None else str(row.rounds_to_target)
    return reached if shared else f"{_percent(row.target)}: {reached}"


def _percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.0f} %"


def _first_or_difference(row: Row) -> str:
    if row.behind_first is None:
        return ""
    text = signed(100 * row.behind_first.mean)
    return text if row.behind_first.std is None else f"{text} ± {100 * row.behind_first.std:.1f}"


def _gap_cell(row: Row) -> str:
    if row.role or row.gap_share is None:
        return row.role or MISSING
    text = f"{100 * row.gap_share.mean:.0f}".replace("-", "−")
    if row.gap_share.std is not None:
        text += f" ± {100 * row.gap_share.std:.0f}"
    paired = row.gap_share.n
    return text if paired == len(row.seeds) else f"{text} ({paired} of {len(row.seeds)})"


def _three_digits(amount: float) -> str:
    return count(amount) if amount >= 99.5 else f"{amount:.3g}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def subject_of(comparison: Comparison) -> str:
    """What all rows have in common, as far as words exist for it."""
    differing = {key.removeprefix("scenario.") for key in comparison.keys if key.startswith("scenario.")}
    scenario = comparison.common.get("scenario") or {}
    words = scenario_words({key: value for key, value in scenario.items() if key not in differing})
    dataset = "" if "dataset" in comparison.keys else comparison.rows[0].dataset
    runs = sum(len(row.seeds) for row in comparison.rows)
    about = ": ".join(part for part in (dataset, words) if part)
    return f"{about}{'. ' if about else ''}{runs} run{'' if runs == 1 else 's'}"


def _panels(comparison: Comparison) -> list[tuple[str, list[Chart]]]:
    """Learning curves by metric: a chart for each block, all with the same axis; one group if there is one block."""
    labels = dict.fromkeys(row.label for row in comparison.rows)
    styles = {label: position for position, label in enumerate(labels)}
    wanted = (comparison.headline, "old", "new", "clusters", "auroc_seen", "auroc_overall")
    titles = {metric: metric_title(metric) for metric in wanted if metric in comparison.metrics} | OPINIONS
    panels = []
    for metric, title in titles.items():
        by_block: dict[tuple[tuple[str, str], ...], list[Series]] = {}
        for row in comparison.rows:
            curve = (row.opinions if metric in OPINIONS else row.curves).get(metric)
            if curve:
                by_block.setdefault(row.block, []).append(Series(row.label, curve, styles[row.label]))
        everything = [line for lines in by_block.values() for line in lines]
        charts = [_panel(metric, title, block, lines, everything) for block, lines in by_block.items()]
        if charts:
            panels.append((title, charts))
    if all(len(charts) == 1 for _, charts in panels):
        together = [charts[0]._replace(title=title, note=charts[0].title) for title, charts in panels]
        return [("", together)] if together else []
    return panels


def _panel(
    metric: str, title: str, block: Sequence[tuple[str, str]], lines: Sequence[Series], everything: Sequence[Series]
) -> Chart:
    about = ", ".join(f"{key} {value}" for key, value in block)
    ends = [metric_value(metric, line.points[-1].value) for line in lines]
    unit = " percent" if is_fraction(metric) else ""
    spoken = "; ".join(f"{line.name} ends at {end}{unit}" for line, end in zip(lines, ends, strict=True))
    description = f"{title} against rounds{f', {about}' if about else ''}: {spoken}."
    return Chart(
        about,
        "",
        Markup(line_chart(lines, description, percent=is_fraction(metric), beside=everything)),
        [legend(line, end) for line, end in zip(lines, ends, strict=True)],
    )
