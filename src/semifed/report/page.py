"""`report.html`: one run for a reader who has not seen the project."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from semifed.errors import UserError
from semifed.report import openset
from semifed.report.charts import pseudo_charts, round_chart, three_digits
from semifed.report.discovery import CONCEPTS, discovery_section, true_classes
from semifed.report.figures import Chart
from semifed.report.html import render, write_page
from semifed.report.opinions import opinion_charts
from semifed.report.partition import draw_partition
from semifed.report.rundir_reader import RoundLine, Run, finite, read_run
from semifed.report.words import (
    MISSING,
    budget_words,
    count,
    duration,
    headline_metric,
    in_reading_order,
    is_fraction,
    metric_meaning,
    metric_title,
    metric_value,
    scenario_words,
    setting,
    split_metric,
    traffic,
)

_CLASSES_SHOWN = 30
_CLASSES_AT_EACH_END = 10


class KeyFigure(NamedTuple):
    """A number worth reading first."""

    title: str
    value: str
    unit: str
    note: str


class ClassRow(NamedTuple):
    """Accuracy on the test images of one class."""

    name: str
    percent: str
    width: float  # of the bar, in percent
    images: str


class FailureRow(NamedTuple):
    """A reason clients gave nothing, and how often."""

    reason: str
    times: int
    clients: str
    rounds: str


def write_report(run: Path) -> Path:
    """Writes `report.html` into the run directory, from the files in it alone, and returns its path."""
    target = run / "report.html"
    write_page(target, report_page(read_run(run)))
    return target


def report_page(run: Run) -> str:
    """The report as HTML text."""
    lowest, highest, classes = _class_rows(run)
    return render(
        "report.html.j2",
        method=run.method,
        dataset=run.dataset,
        scenario=scenario_words(run.table("scenario")),
        budget=budget_words(run),
        unfinished=_unfinished_words(run),
        key_figures=_key_figures(run),
        best=_best_words(run),
        curves=_curves(run),
        last_rounds=_last_rounds(run),
        discovers=run.discovers,
        discovery=discovery_section(run),
        model_charts=openset.model_charts(run),
        steadiness=openset.steadiness(run),
        pseudo_charts=pseudo_charts(run),
        opinion_charts=opinion_charts(run),
        gate=openset.gate_chart(run),
        pivots=openset.pivot_chart(run),
        feature_map=openset.feature_map(run),
        trust=openset.trust_charts(run),
        partition=_partition(run),
        lowest=lowest,
        highest=highest,
        classes=classes,
        histograms=openset.histograms(run),
        score_table=openset.score_table(run),
        threshold=openset.threshold_words(run),
        failures=_failure_rows(run),
        asked=sum(line.client_count + len(line.failures) for line in run.rounds),
        settings=_settings(run.recipe),
        provenance=_provenance(run),
        versions=sorted((run.summary.get("versions") or {}).items()),
    )


def _unfinished_words(run: Run) -> str:
    if run.finished:
        return ""
    planned = "" if run.planned_rounds is None else f" of {count(run.planned_rounds)}"
    if run.last_round is None:
        return f"No round has been recorded yet{planned and f' (of {count(run.planned_rounds)} planned)'}."
    return f"The last recorded round is {run.last_round}{planned}. The numbers below are those so far, not a result."


def _key_figures(run: Run) -> list[KeyFigure]:
    headline = headline_metric(run.metrics)
    figures = []
    if run.evaluated or run.metrics:
        at = f"round {run.evaluated[-1].number}" if run.evaluated else "last round"
        tests = len(_last_tests(run)) or 10
        mean_of = f"mean of last {tests} tests" if tests > 1 else "the only test"
        unit = "%" if is_fraction(headline) else ""
        title = metric_title(headline)
        figures = [
            KeyFigure(title, metric_value(headline, run.metrics.get(headline)), unit, at),
            KeyFigure(title, metric_value(headline, run.metrics_last10.get(headline)), unit, mean_of),
        ]
        figures += [
            KeyFigure(metric_title(metric), metric_value(metric, run.metrics.get(metric)), "%", at)
            for metric in (("old", "new") if run.discovers else ("auroc_seen", "auroc_overall"))
            if metric in run.metrics
        ]
        if "clusters" in run.metrics:
            classes = true_classes(run)
            note = at if classes is None else f"for {count(classes)} true classes"
            found = metric_value("clusters", run.metrics["clusters"])
            figures.append(KeyFigure(metric_title("clusters"), found, "", note))
    seconds = run.total("seconds")
    speed = finite(run.summary.get("images_per_second"))
    images = run.total("images")
    if speed is None and images and seconds:
        speed = images / seconds
    up, down = traffic(run.total("bytes_up")), traffic(run.total("bytes_down"))
    return [
        *figures,
        KeyFigure("Sent by the clients", *_split_unit(up), f"{down} sent to them"),
        KeyFigure("Time", duration(seconds), "", f"{count(speed)} images a second" if speed else "of all rounds"),
    ]


def _split_unit(text: str) -> tuple[str, str]:
    number, _, unit = text.partition(" ")
    return number, unit


def _best_words(run: Run) -> str:
    best = run.summary.get("best") or {}
    metric, value, at = str(best.get("metric") or ""), finite(best.get("value")), finite(best.get("round"))
    if metric != headline_metric(run.metrics or (metric,)) or value is None or at is None:
        return ""
    unit = " %" if is_fraction(metric) else ""
    return f"{metric_title(metric)} {metric_value(metric, value)}{unit} after round {at:.0f}"


def _curves(run: Run) -> list[Chart]:
    metrics = _plain({metric for line in run.evaluated for metric in line.metrics})
    classes = true_classes(run)
    families: dict[str, list[str]] = {}
    for metric in metrics:
        families.setdefault(_family(metric), []).append(metric)
    charts = [
        round_chart(
            title,
            _family_note(members),
            [(_line_name(metric, members), metric) for metric in members],
            run.evaluated,
            lambda line, metric: line.metrics.get(metric),
            percent=is_fraction(members[0]),
            show=metric_value,
            room_for=[float(classes)] if members == ["clusters"] and classes else (),
        )
        for title, members in families.items()
    ]
    terms = list(dict.fromkeys(term for line in run.rounds for term in line.loss if term != CONCEPTS))
    trained = [line for line in run.rounds if line.loss]
    if terms:
        charts.append(
            round_chart(
                "Training loss",
                "terms of the loss, averaged over the steps of a round's clients",
                [(term, term) for term in terms],
                trained,
                lambda line, term: line.loss.get(term),
                percent=False,
                show=three_digits,
            )
        )
    return charts


def _plain(metrics: Iterable[str]) -> list[str]:
    """Those of the delivered model and its own score; the others have sections of their own."""
    return in_reading_order(metric for metric in metrics if not split_metric(metric)[0])


def _family(metric: str) -> str:
    if metric in ("all", "old", "new"):
        return "Accuracy of the groups"
    if metric.endswith("_balanced"):
        return "Balanced accuracy of the groups"
    if metric.startswith("auroc"):
        return "AUROC of the unknown score"
    if metric.startswith(("fpr", "aupr", "oscr")) or metric in ("nmi", "ari"):
        return "Further measures"
    return metric_title(metric)


def _line_name(metric: str, members: Sequence[str]) -> str:
    if len(members) == 1:
        return metric_title(metric)
    title = metric_title(metric)
    for start in ("AUROC, ", "Accuracy, ", "Balanced accuracy, "):
        title = title.removeprefix(start)
    return title


def _family_note(members: Sequence[str]) -> str:
    if members[0].startswith("auroc"):
        return metric_meaning("auroc_seen") if "auroc_seen" in members else metric_meaning("auroc_overall")
    return metric_meaning(members[0]) if len(members) == 1 or members[0] in ("all", "all_balanced") else ""


def _last_tests(run: Run) -> list[RoundLine]:
    """Those behind the mean of the last ten: the test before any training is none of them."""
    return [line for line in run.evaluated if line.number][-10:]


def _last_rounds(run: Run) -> dict[str, Any]:
    lines = _last_tests(run)
    metrics = _plain({metric for line in lines for metric in line.metrics})
    return {
        "metrics": [metric_title(metric) for metric in metrics],
        "rows": [
            (line.number, [metric_value(metric, line.metrics.get(metric)) for metric in metrics]) for line in lines
        ],
        "means": [metric_value(metric, run.metrics_last10.get(metric)) for metric in metrics],
    }


def _partition(run: Run) -> Markup | None:
    if not run.partition:
        return None
    try:
        drawing = draw_partition(run.partition, None)
    except UserError as error:
        raise UserError(f"{run.path}: {error}") from error
    return None if drawing is None else Markup(drawing)


def _class_rows(run: Run) -> tuple[list[ClassRow], list[ClassRow], list[ClassRow]]:
    """The lowest, the highest and all classes; the first two are empty where all fit on the page."""
    entries = [(entry, finite(entry.get("accuracy"))) for entry in run.summary.get("per_class") or ()]
    rows = {
        position: ClassRow(
            str(entry.get("class", MISSING)),
            metric_value("accuracy", accuracy),
            100 * min(1.0, max(0.0, accuracy or 0.0)),
            count(finite(entry.get("count"))),
        )
        for position, (entry, accuracy) in enumerate(entries)
    }
    everything = list(rows.values())
    if len(everything) <= _CLASSES_SHOWN:
        return [], [], everything
    ranked = [rows[position] for position in sorted(rows, key=lambda position: entries[position][1] or 0.0)]
    return ranked[:_CLASSES_AT_EACH_END], ranked[: -_CLASSES_AT_EACH_END - 1 : -1], everything


def _failure_rows(run: Run) -> list[FailureRow]:
    failures = [failure for line in run.rounds for failure in line.failures]
    return [
        FailureRow(
            reason,
            times,
            _listed(failure.client for failure in failures if failure.reason == reason),
            _listed(failure.round for failure in failures if failure.reason == reason),
        )
        for reason, times in Counter(failure.reason for failure in failures).most_common()
    ]


def _listed(numbers: Iterable[int], most: int = 12) -> str:
    distinct = sorted(set(numbers))
    more = f" and {len(distinct) - most} more" if len(distinct) > most else ""
    return ", ".join(map(str, distinct[:most])) + more


def _settings(recipe: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    plain = [(key, setting(value)) for key, value in recipe.items() if not isinstance(value, Mapping)]
    tables = [
        (name, [(key, setting(value)) for key, value in table.items()])
        for name, table in recipe.items()
        if isinstance(table, Mapping) and table
    ]
    return [("", plain), *tables] if plain else tables


def _provenance(run: Run) -> list[tuple[str, str]]:
    summary = run.summary
    workers = finite(summary.get("workers"))
    entries = [
        ("Machine", summary.get("machine")),
        ("Device", summary.get("device")),
        ("Worker processes", None if workers is None else count(workers)),
        ("Data hash", summary.get("data_hash")),
        ("Git revision", summary.get("git_revision")),
    ]
    return [(name, str(value)) for name, value in entries if value is not None]
