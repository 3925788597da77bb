"""How good pseudo-labels were and how two models compare, from run directories: one CSV line a run and span of rounds.

    python results/diagnostics.py STEM --vary KEY [--add] RUNS...

writes STEM.diagnostics.csv: for every ten rounds of each run the means of what `rounds.jsonl` says of pseudo-labels
(share of the images seen that were used, share of these labelled rightly) and of the two models (`opinions`), under the
names that docs/rounds.md explains, and what the losses measured. Methods are called as in results/tables.py.
With --add the runs join those that the file holds.
"""

import argparse
import csv
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from tables import Run, flat, read, shown, without_common

SPAN = 10  # rounds


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the runs, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stem", type=Path)
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--vary", action="append", default=[])
    parser.add_argument("--add", action="store_true")
    asked = parser.parse_intermixed_args(arguments)
    path = asked.stem.with_suffix(".diagnostics.csv")
    lines: list[dict[str, Any]] = []
    if asked.add:
        with open(path, newline="") as file:
            lines += csv.DictReader(file)
    found = {summary.parent for root in asked.runs for summary in root.rglob("summary.json")}
    runs = without_common([read(run, asked.vary) for run in sorted(found)])
    lines += [line for run in runs for line in spans(run, asked.vary)]
    identity = ["method", *asked.vary, "seed", "rounds"]
    names = [tuple(str(line[key]) for key in identity) for line in lines]
    if twice := {name for name in names if names.count(name) > 1}:
        sys.exit("the same run twice: " + ", ".join(min(twice)))
    values = sorted({key for line in lines for key in line} - set(identity))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*identity, *values])
        writer.writeheader()
        writer.writerows(line for _, line in sorted(zip(names, lines, strict=True), key=lambda pair: _order(pair[0])))


def spans(run: Run, vary: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What ten rounds had in the mean, then the next ten."""
    rounds = [(line["round"], dict(measures(line))) for line in run.rounds if line["round"] > 0]
    for first in range(1, len(rounds) + 1, SPAN):
        last = min(first + SPAN - 1, len(rounds))
        own = [values for number, values in rounds if first <= number <= last]
        means = {
            key: f"{statistics.fmean(having):.4f}"
            for key in sorted({key for values in own for key in values})
            if (having := [values[key] for values in own if key in values])
        }
        address = dict(zip(vary, map(shown, run.scenario), strict=True))
        if means:
            yield {"method": run.label, **address, "seed": run.seed, "rounds": f"{first}-{last}", **means}


def measures(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of one round by name; counts become shares, and what was not measured is left out."""
    pseudo = line.get("pseudo") or {}
    if pseudo.get("seen"):
        yield "pseudo.used", pseudo["used"] / pseudo["seen"]
        if pseudo["accuracy"] is not None:
            yield "pseudo.accuracy", pseudo["accuracy"]
    told = {"opinions": line.get("opinions") or {}, "loss": line["loss"]}
    for key, value in flat(told).items():
        if isinstance(value, float):
            yield key, value
        elif key.endswith("_ranks") and sum(value):  # of sure labels of one model, where the other one ranks them
            yield f"{key}.first", value[0] / sum(value)
            yield f"{key}.first_two", sum(value[:2]) / sum(value)


def _order(name: tuple[str, ...]) -> tuple[Any, ...]:
    *run, rounds = name
    return (*run, int(rounds.partition("-")[0]))


if __name__ == "__main__":
    main()
