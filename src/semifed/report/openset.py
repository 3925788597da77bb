"""Pictures of open-set runs: gates, pivots, trust in clients, and known against unknown images."""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from markupsafe import Markup

from semifed.report.charts import as_percent, round_chart, three_digits
from semifed.report.figures import MARKS, Chart, Cloud, Series, cloud_legend, flat_map, histogram, legend, scatter
from semifed.report.rundir_reader import Reliability, RoundLine, Run, finite, listed
from semifed.report.words import beside_words, count, metric_title, metric_value, split_metric

_MOST_POINTS = 2000  # of a scatter plot; rounds in between are left out of the picture, not of the numbers
_CLASS_COLOURS = 7  # the eighth is the grey of unknown images
_CLASS_MARKS = [mark for mark in MARKS if mark != "star"]
_COMPARED = ("accuracy", "auroc_seen", "auroc_overall")
_GATE = (
    "The gate",
    (
        ("known images let through, of all known", "pass_known"),
        ("unknown images let through, of all unknown", "pass_unknown"),
        ("known, of all let through", "purity"),
        ("right, of all pseudo-labels used", "accuracy"),
    ),
)
_DISCOVERY_GATE = (
    "Identified as of a known class",
    (
        ("known images identified, of all known", "pass_known"),
        ("novel images identified by mistake, of all novel", "pass_unknown"),
        ("known, of all identified", "purity"),
        ("identified as the right class, of all identified", "accuracy"),
    ),
)


class SmallTable(NamedTuple):
    """A few numbers, each row with a name."""

    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    note: str


def gate_chart(run: Run) -> Chart | None:
    """What the gate lets through, and how far that can be trusted; in discovery, what is taken for a known class."""
    title, lines = _DISCOVERY_GATE if run.discovers else _GATE

    def share(line: RoundLine, key: str) -> float | None:
        return line.pseudo.get(key) if key == "accuracy" else line.gate.get(key)

    if not any(line.gate.get("pass_unknown") is not None for line in run.rounds):
        return None  # where nothing is unknown, the section on pseudo-labels has said it all
    rounds = [line for line in run.rounds if any(value is not None for value in line.gate.values())]
    present = [(name, key) for name, key in lines if any(share(line, key) is not None for line in rounds)]
    if not present:
        return None
    return round_chart(title, "shares in percent", present, rounds, share, percent=True, show=as_percent)


def pivot_chart(run: Run) -> Chart | None:
    """How spread the pivots are."""
    measured = [line for line in run.rounds if line.pivot_norm is not None]
    if not measured:
        return None
    return round_chart(
        "Length of the mean pivot",
        "of pivots of length 1",
        [("length of the mean", "")],
        measured,
        lambda line, _: line.pivot_norm,
        percent=False,
        show=three_digits,
        room_for=(0.0, 1.0),
    )


def feature_map(run: Run) -> Chart | None:
    """Test images where the network puts them, with what stands for their classes among them."""
    features = run.features
    names = [str(name) for name in listed(features, "names")]
    members: dict[int, list[tuple[float, float]]] = {-1: []}
    for label, value in zip(listed(features, "class"), listed(features, "points"), strict=False):
        if point := pair_of(value):
            members.setdefault(label if label in range(len(names)) else -1, []).append(point)
    unknown = Cloud("unknown classes", members.pop(-1), "series-8")
    clouds = [_class_cloud(label, names[label], members[label]) for label in sorted(members)]
    legends = [cloud for cloud in (*clouds, unknown) if cloud.points]
    if not legends:
        return None
    centres = [(label, pair_of(value)) for label, value in enumerate(listed(features, "pivots"))]
    stars = [_class_cloud(label, "", [centre])._replace(mark="star") for label, centre in centres if centre]
    entries = [cloud_legend(cloud, image_words(len(cloud.points))) for cloud in legends]
    if stars:
        what = str(features.get("pivots_are") or "pivots of the method")
        entries.append(cloud_legend(Cloud(what, (), "ink", "star"), ""))
    described = ", ".join(f"{cloud.name} ({count(len(cloud.points))})" for cloud in legends)
    return Chart(
        "Test images",
        map_note(features),
        # Unknown images first: they must not hide the classes.
        Markup(flat_map([unknown, *clouds], stars, f"Map of the features of {described}.")),
        entries,
    )


def image_words(number: float) -> str:
    """So many images."""
    return f"{count(number)} image{'' if number == 1 else 's'}"


def map_note(features: Mapping[str, Any]) -> str:
    """What a map is a map of, and how much of it two axes show."""
    spaces = {"projection": "directions of the projection's outputs", "features": "inputs of the classifier"}
    explained = [finite(share) for share in listed(features, "explained")]
    known = math.fsum(share for share in explained if share is not None)
    flattened = f"two principal axes with {100 * known:.0f} % of the variance" if known else "in two dimensions"
    return ", ".join(part for part in (spaces.get(str(features.get("space"))), flattened) if part)


def _class_cloud(label: int, name: str, points: Sequence[tuple[float, float]]) -> Cloud:
    mark = _CLASS_MARKS[label // _CLASS_COLOURS % len(_CLASS_MARKS)]
    return Cloud(name, points, f"series-{label % _CLASS_COLOURS + 1}", mark)


def pair_of(value: object) -> tuple[float, float] | None:
    """A point of the plane, None if it is no pair of numbers."""
    x, y = map(finite, value) if isinstance(value, list) and len(value) == 2 else (None, None)
    return None if x is None or y is None else (x, y)


def trust_charts(run: Run) -> list[Chart]:
    """Whether the alignment loss tells good clients from bad ones, and how many clients count in the average."""
    found = [_reliability_chart(run), _effective_chart(run)]
    return [chart for chart in found if chart is not None]


def within_round_correlation(rounds: Sequence[Sequence[Reliability]]) -> float | None:
    """Spearman's rank correlation of loss and correct labels, by round and then averaged; None if no round has one."""
    from scipy.stats import spearmanr

    found = []
    for clients in rounds:
        losses, correct = [one.alignment for one in clients], [one.correct for one in clients]
        if len(set(losses)) > 1 and len(set(correct)) > 1:  # undefined if one of the two never changes
            found.append(float(spearmanr(losses, correct).statistic))
    return statistics.fmean(found) if found else None


def _reliability_chart(run: Run) -> Chart | None:
    rounds = [line for line in run.rounds if line.reliability]
    if not rounds:
        return None
    middle = (len(rounds) + 1) // 2
    halves = [("early", rounds[:middle]), ("late", rounds[middle:])]
    clouds, entries = [], []
    every = math.ceil(sum(len(line.reliability) for line in rounds) / _MOST_POINTS)
    for position, (when, half) in enumerate(halves):
        if not half:
            continue
        points = [(one.correct, one.alignment) for line in half[::every] for one in line.reliability]
        span = f"{half[0].number}" if len(half) == 1 else f"{half[0].number} to {half[-1].number}"
        cloud = Cloud(f"{when} (round {span}): rank correlation", points, f"series-{position + 1}")
        clouds.append(cloud)
        entries.append(cloud_legend(cloud, _signed(within_round_correlation([line.reliability for line in half]))))
    overall = _signed(within_round_correlation([line.reliability for line in rounds]))
    return Chart(
        "Alignment loss and correct pseudo-labels",
        "a point for each client and round; look for a negative rank correlation, where a low loss means many correct "
        f"labels (Spearman, mean over rounds: {overall})",
        Markup(
            scatter(
                clouds,
                f"Alignment loss of clients against their number of correct pseudo-labels, rank correlation {overall}.",
                across="correct pseudo-labels of a client",
                up="its alignment loss",
            )
        ),
        entries,
    )


def _signed(value: float | None) -> str:
    return "undefined" if value is None else f"{value:+.2f}".replace("-", "−")


def effective_clients(weights: Sequence[float]) -> float | None:
    """How many equal clients would weigh as unevenly: (sum w)² / sum w²."""
    squares = math.fsum(weight * weight for weight in weights)
    return math.fsum(weights) ** 2 / squares if squares > 0 else None


def _effective_chart(run: Run) -> Chart | None:
    rounds = [line for line in run.rounds if line.client_weights]
    if all(len(set(line.client_weights)) == 1 for line in rounds):  # nothing to see where all count alike
        return None
    return round_chart(
        "Clients that count",
        "1 / Σ w² over the shares w in the average: near the number that took part, all count; near 1, one decides",
        [("effective number", "effective"), ("took part", "all")],
        rounds,
        lambda line, key: effective_clients(line.client_weights) if key == "effective" else len(line.client_weights),
        percent=False,
        show=three_digits,
        room_for=(0.0,),
    )


def other_models(run: Run) -> list[str]:
    """Prefixes of models tested beside the delivered one: those with an accuracy of their own."""
    metrics = dict.fromkeys(metric for line in run.evaluated for metric in line.metrics)
    return [prefix for prefix, plain in map(split_metric, metrics) if prefix and plain == "accuracy"]


def model_charts(run: Run) -> list[Chart]:
    """The delivered model beside the other ones that were tested."""
    charts = []
    for metric in _COMPARED:
        lines = [("delivered", metric)]
        for prefix in other_models(run):
            beside = f"{prefix}.{metric}"
            if any(beside in line.metrics for line in run.evaluated):
                lines.append((beside_words(prefix), beside))
        if len(lines) > 1:
            charts.append(
                round_chart(
                    metric_title(metric),
                    "",
                    lines,
                    run.evaluated,
                    lambda line, key: line.metrics.get(key),
                    percent=True,
                    show=metric_value,
                )
            )
    return charts


def step_deviation(values: Sequence[float | None]) -> float | None:
    """Sample standard deviation of the steps from one test to the next, over the last half of the tests."""
    late = values[len(values) // 2 :]
    steps = [after - before for before, after in pairwise(late) if before is not None and after is not None]
    return statistics.stdev(steps) if len(steps) > 1 else None


def steadiness(run: Run) -> SmallTable | None:
    """How much each tested model jumps from test to test."""
    models = ["", *other_models(run)]
    plain = [metric for metric in _COMPARED if any(metric in line.metrics for line in run.evaluated)]
    rows = []
    for prefix in models:
        keys = [f"{prefix}.{metric}" if prefix else metric for metric in plain]
        jumps = [step_deviation([line.metrics.get(key) for line in run.evaluated]) for key in keys]
        cells = [metric_value("accuracy", None) if jump is None else f"{100 * jump:.2f}" for jump in jumps]
        rows.append((beside_words(prefix) if prefix else "delivered", cells))
    if len(models) == 1 or len(run.evaluated) < 6:
        return None
    tests = len(run.evaluated) - len(run.evaluated) // 2
    note = f"Standard deviation of the steps between the last {tests} tests, in points"
    return SmallTable([metric_title(metric) for metric in plain], rows, note)


def histograms(run: Run) -> list[Chart]:
    """The unknown score and the confidence of test images, by test set."""
    confidence = run.scores.get("confidence")
    found = [
        _histogram(run.scores, "Unknown score of the test images", "unknown score"),
        _histogram(
            confidence if isinstance(confidence, Mapping) else {},
            "Confidence on the test images",
            "highest probability",
        ),
    ]
    return [chart for chart in found if chart is not None]


def _histogram(scores: Mapping[str, Any], title: str, axis: str) -> Chart | None:
    counts = {"known classes": listed(scores, "known")}
    for name, numbers in (scores.get("sets") or {}).items():
        counts["seen unknowns" if name == "seen" else f"unseen set {name}"] = numbers
    return score_histogram(listed(scores, "bins"), counts, title, axis)


def score_histogram(bins: Sequence[Any], counts: Mapping[str, Sequence[Any]], title: str, axis: str) -> Chart | None:
    """Shares of images over a score, an outline a set; None if no set has a number for each bin."""
    edges = [finite(edge) for edge in bins]
    complete = {
        name: [finite(number) or 0.0 for number in numbers]
        for name, numbers in counts.items()
        if len(numbers) == len(edges) - 1 and len(numbers) > 0
    }
    numbers = [edge for edge in edges if edge is not None]
    if not complete or len(numbers) != len(edges):
        return None
    totals = {name: math.fsum(values) for name, values in complete.items()}
    described = ", ".join(f"{name} ({image_words(total)})" for name, total in totals.items())
    return Chart(
        title,
        "share of each set in percent; the scale is stretched near 0 so that small shares are seen",
        Markup(histogram(numbers, complete, f"Histograms of the {axis}: {described}.", axis=axis)),
        [
            legend(Series(name, (), position), image_words(total))
            for position, (name, total) in enumerate(totals.items())
        ],
    )


def score_table(run: Run) -> SmallTable | None:
    """AUROC of the method's own score beside that of scores every classifier has."""
    plain = [metric for metric in ("auroc_seen", "auroc_overall") if metric in run.metrics]
    models = other_models(run)
    prefixes = dict.fromkeys(split_metric(metric)[0] for metric in run.metrics if split_metric(metric)[1] in plain)
    scores = [prefix for prefix in prefixes if prefix and prefix.partition(".")[0] not in models]
    if not scores:
        return None
    rows = []
    for prefix in ("", *scores):
        keys = [f"{prefix}.{metric}" if prefix else metric for metric in plain]
        cells = [metric_value(key, values.get(key)) for key in keys for values in (run.metrics, run.metrics_last10)]
        rows.append((beside_words(prefix) if prefix else "the method's own", cells))
    columns = [f"{metric_title(metric)},\n{when}" for metric in plain for when in ("last round", "last 10 tests")]
    return SmallTable(
        columns, rows, "AUROC in percent by the score that tells known from unknown: 50 is guessing, 100 is perfect"
    )


def threshold_words(run: Run) -> str:
    """Where the delivered model starts to say "unknown", and what that costs and gains on the test images."""
    stored = run.summary.get("threshold")
    told = stored if isinstance(stored, Mapping) else {}
    value, asked, accepted = (finite(told.get(key)) for key in ("value", "accept", "accepted_known"))
    if value is None or asked is None or accepted is None:
        return ""
    rejected = finite(told.get("rejected_unknown"))
    others = "" if rejected is None else f" and rejects {rejected:.1%} of the seen unknowns"
    return (
        f"The delivered model says \u201cunknown\u201d above a score of {value:.3g}, chosen on the server's labels "
        f"to accept {100 * asked:g}% of new known images. "
        f"Of the test images it accepts {accepted:.1%} of the known ones{others}."
    )
