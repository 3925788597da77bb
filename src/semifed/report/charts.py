"""Charts with the words around them: values of a run against its rounds."""

from collections.abc import Callable, Sequence

from markupsafe import Markup

from semifed.report.figures import Chart, Point, Series, legend, line_chart
from semifed.report.rundir_reader import RoundLine, Run
from semifed.report.words import MISSING, count, metric_value

Lines = Sequence[tuple[str, str]]  # what a line is called, and the key of its values


def round_chart(
    title: str,
    note: str,
    lines: Lines,
    rounds: Sequence[RoundLine],
    value_of: Callable[[RoundLine, str], float | None],
    *,
    percent: bool,
    show: Callable[[str, float | None], str],
    room_for: Sequence[float] = (),
) -> Chart:
    """A line for each key; the legend says where it ends, and the axis reaches the values it has to have room for."""
    series = [
        Series(name, [Point(line.number, value_of(line, key)) for line in rounds], style)
        for style, (name, key) in enumerate(lines)
    ]
    beside = Series("", [Point(rounds[-1].number, value) for value in room_for], 0)
    ends = [show(key, value_of(rounds[-1], key)) for _, key in lines]
    unit = " percent" if percent else ""
    spoken = "; ".join(f"{line.name} {end}{unit}" for line, end in zip(series, ends, strict=True))
    description = f"{title} against rounds, up to round {rounds[-1].number}, where it is: {spoken}."
    return Chart(
        title,
        note,
        Markup(line_chart(series, description, percent=percent, beside=[beside] if room_for else [])),
        [legend(line, end) for line, end in zip(series, ends, strict=True)],
    )


def three_digits(_: str, value: float | None) -> str:
    """A number of any size for a legend."""
    return MISSING if value is None else f"{value:.3g}"


def as_percent(_: str, value: float | None) -> str:
    """A share for a legend."""
    return metric_value("accuracy", value)


def pseudo_charts(run: Run) -> list[Chart]:
    """How many unlabelled images were used, and how good their labels were."""
    rounds = [line for line in run.rounds if line.pseudo.get("seen") or line.pseudo.get("used")]
    if not rounds:
        return []

    def share(line: RoundLine, key: str) -> float | None:
        if key == "accuracy":
            return line.pseudo.get("accuracy")
        part, whole = {"used": ("used", "seen"), "used_unknown": ("used_unknown", "used")}[key]
        numerator, denominator = line.pseudo.get(part), line.pseudo.get(whole)
        return numerator / denominator if numerator is not None and denominator else None

    present = {key for line in rounds for key, value in line.pseudo.items() if value is not None}
    if all(line.gate and line.gate.get("pass_unknown") is None for line in rounds):
        present.discard("used_unknown")  # there are no unknown images
    counts = [("images seen", "seen"), ("used", "used"), ("used, but of unknown classes", "used_unknown")]
    shares = [
        ("used, of those seen", "used"),
        ("right, of those used", "accuracy"),
        ("of unknown classes, of those used", "used_unknown"),
    ]
    counts = [line for line in counts if line[1] in present]
    shares = [line for line in shares if line[1] in present]
    charts = [
        round_chart(
            "How many",
            "unlabelled images a round",
            counts,
            rounds,
            lambda line, key: line.pseudo.get(key),
            percent=False,
            show=lambda _, value: count(value),
        )
    ]
    if shares:
        charts.append(
            round_chart("How good", "shares in percent", shares, rounds, share, percent=True, show=as_percent)
        )
    return charts
