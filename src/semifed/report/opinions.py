"""Pictures of two models that label the same images: the client's own and the one it received."""

from collections.abc import Callable, Sequence

from markupsafe import Markup

from semifed.report.charts import Lines, as_percent, round_chart, three_digits
from semifed.report.figures import Chart, Series, histogram, legend
from semifed.report.rundir_reader import RoundLine, Run
from semifed.report.words import count

_SIDES = (("local model", "local"), ("received model", "received"))
_STANDINGS = (("all images", "mean"), ("local majority classes", "majority"), ("local minority classes", "minority"))
_SURE = (
    ("both models", "both_sure"),
    ("only the local model", "only_local_sure"),
    ("only the received model", "only_received_sure"),
)
_RANKINGS = (
    ("local labels among the received model's classes", "local_ranks"),
    ("received labels among the local model's classes", "received_ranks"),
)

Value = Callable[[RoundLine, str], float | None]


def opinion_charts(run: Run) -> list[Chart]:
    """Labels of both models over rounds, how far they agree, and how sure they are; a single model only its entropy."""
    rounds = [line for line in run.rounds if line.opinions]
    both = any({"local", "received"} <= line.opinions.keys() for line in rounds)
    entropies = [
        _chart("Entropy of predictions", "mean over images, in nats", _SIDES, rounds, _of_table("entropy")),
        _chart(
            "Entropy of labels",
            "of how often each class is named, by client, in nats",
            _SIDES,
            rounds,
            _of_table("class_entropy"),
        ),
    ]
    found = [*_labels(rounds), *_discrepancy(rounds), *_agreement(rounds), *entropies] if both else entropies
    return [chart for chart in found if chart is not None]


def _labels(rounds: Sequence[RoundLine]) -> list[Chart | None]:
    lines = (*_SIDES, ("both together, as used", "used"))

    def sure(line: RoundLine, key: str) -> float | None:
        if key != "used":
            return line.opinions.get(key, {}).get("sure")
        return line.pseudo.get("used")

    def accuracy(line: RoundLine, key: str) -> float | None:
        return line.pseudo.get("accuracy") if key == "used" else line.opinions.get(key, {}).get("accuracy")

    return [
        _chart("Images with a sure label", "a round", lines, rounds, sure, show=lambda _, value: count(value)),
        _chart("Sure labels that are right", "in percent", lines, rounds, accuracy, percent=True, show=as_percent),
        *(
            _chart(title, note, _SURE, rounds, _of_table(quantity), percent=True, show=as_percent)
            for title, note, quantity in (
                ("Images by who is sure of them", "in percent of those seen", "share"),
                ("Right labels by who is sure", "of the labels in use, in percent", "given"),
            )
        ),
    ]


def _discrepancy(rounds: Sequence[RoundLine]) -> list[Chart | None]:
    def part(name: str) -> Value:
        return lambda line, key: line.opinions.get(name, {}).get(key)

    of = "where the local model is sure"
    return [
        _chart("Gap of confidence, ΔC", of, _STANDINGS, rounds, part("gap"), room_for=(0.0,)),
        _chart("Say of the local model, λ", of, _STANDINGS, rounds, part("mixing"), room_for=(0.0, 1.0)),
    ]


def _agreement(rounds: Sequence[RoundLine]) -> list[Chart | None]:
    lines = (
        ("all images: both name one class", "same"),
        ("sure local labels the received model names too", "local_ranks"),
        ("sure received labels the local model names too", "received_ranks"),
    )

    def share(line: RoundLine, key: str) -> float | None:
        if key == "same":
            return line.opinions.get("agreement", {}).get(key)
        counts = line.ranks.get(key, ())
        return counts[0] / sum(counts) if sum(counts) else None

    return [_chart("Agreement", "in percent", lines, rounds, share, percent=True, show=as_percent), _rank_chart(rounds)]


def _rank_chart(rounds: Sequence[RoundLine]) -> Chart | None:
    """SAGE's Fig. 8, of the last round that has any sure label of both models."""
    last = next((line for line in reversed(rounds) if all(sum(line.ranks.get(key, ())) for _, key in _RANKINGS)), None)
    if last is None:
        return None
    counts = {name: last.ranks[key] for name, key in _RANKINGS}
    places = max(map(len, counts.values()))
    padded = {name: [*own, *[0.0] * (places - len(own))] for name, own in counts.items()}
    edges = [place + 0.5 for place in range(places + 1)]
    ends = [f"{100 * own[0] / sum(own):.1f}" for own in padded.values()]
    spoken = "; ".join(f"{name} first in {end} percent" for name, end in zip(padded, ends, strict=True))
    description = f"Place of each model's sure labels among the other's classes in round {last.number}: {spoken}."
    return Chart(
        "Place of a label in the other model's ranking",
        f"sure labels of round {last.number}; numbers are those at the first place, in percent",
        Markup(histogram(edges, padded, description, axis=f"place ({places}: or later)")),
        [legend(Series(name, (), style), end) for style, (name, end) in enumerate(zip(padded, ends, strict=True))],
    )


def _of_table(quantity: str) -> Value:
    return lambda line, table: line.opinions.get(table, {}).get(quantity)


def _chart(
    title: str,
    note: str,
    lines: Lines,
    rounds: Sequence[RoundLine],
    value_of: Value,
    *,
    percent: bool = False,
    show: Callable[[str, float | None], str] = three_digits,
    room_for: Sequence[float] = (),
) -> Chart | None:
    """The lines that have a value somewhere; None if there is none."""
    present = [(name, key) for name, key in lines if any(value_of(line, key) is not None for line in rounds)]
    if not present:
        return None
    return round_chart(title, note, present, rounds, value_of, percent=percent, show=show, room_for=room_for)
