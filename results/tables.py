"""Tables of `results/` from run directories: one CSV line a run, one Markdown line a method and scenario.

    python results/tables.py STEM --floor METHOD --ceiling METHOD --vary scenario.labelled_per_class RUNS...

writes STEM.csv (every run), STEM.curves.csv (accuracy by round, mean over seeds) and prints the Markdown table.
"""

import argparse
import csv
import json
import statistics
import tomllib
from pathlib import Path
from typing import Any


def main() -> None:
    """Read the runs, write the files, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stem", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--floor", required=True)
    parser.add_argument("--ceiling")
    parser.add_argument("--vary", default="dataset")
    parser.add_argument("--metric", default="accuracy")
    asked = parser.parse_args()
    runs = [read(path.parent, asked.vary) for root in asked.runs for path in sorted(root.rglob("summary.json"))]
    runs.sort(key=lambda run: (str(run["vary"]).zfill(9), run["method"], run["seed"]))
    metrics = sorted({key for run in runs for key in run["metrics"]})
    with open(asked.stem.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["method", asked.vary, "seed", *metrics, f"{asked.metric}_last10", "seconds", "bytes_up"])
        for run in runs:
            last = [f"{run['metrics'].get(key, float('nan')):.4f}" for key in metrics]
            ten = f"{run['metrics_last10'][asked.metric]:.4f}"
            writer.writerow(
                [run["method"], run["vary"], run["seed"], *last, ten, f"{run['seconds']:.1f}", run["bytes_up"]]
            )
    write_curves(runs, asked)
    print_table(runs, asked)


def read(path: Path, vary: str) -> dict[str, Any]:
    """What the tables need of one run; what does not depend on the varied key (the ceiling) is marked so."""
    summary: dict[str, Any] = json.loads((path / "summary.json").read_text())
    value: Any = tomllib.loads((path / "recipe.toml").read_text())
    for part in vary.split("."):
        value = value[part]
    rounds = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    return {**summary, "vary": value, "rounds": rounds}


def write_curves(runs: list[dict[str, Any]], asked: argparse.Namespace) -> None:
    """The metric by round, mean over seeds, one column a method and scenario."""
    columns: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        name = f"{run['method']} {run['vary']}"
        for line in run["rounds"]:
            if line["metrics"]:
                columns.setdefault(name, {}).setdefault(line["round"], []).append(line["metrics"][asked.metric])
    rounds = sorted({number for column in columns.values() for number in column})
    with open(asked.stem.with_suffix(".curves.csv"), "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["round", *columns])
        for number in rounds:
            means = [statistics.mean(column[number]) if number in column else None for column in columns.values()]
            writer.writerow([number, *("" if mean is None else f"{mean:.4f}" for mean in means)])


def print_table(runs: list[dict[str, Any]], asked: argparse.Namespace) -> None:
    """Mean and sample deviation over seeds, and the gain over the floor, seed by seed."""
    by_key = {(run["method"], run["vary"], run["seed"]): run for run in runs}
    ceiling = [run["metrics"][asked.metric] for run in runs if run["method"] == asked.ceiling]
    titles = [asked.vary, "method", "seeds", "last round", "last ten tests", f"gain over {asked.floor}", "gap closed"]
    print("| " + " | ".join(titles) + " |")
    print("|---|---|---|---|---|---|---|")
    groups = sorted({(run["vary"], run["method"]) for run in runs}, key=str)
    groups.sort(key=lambda group: (group[0] if isinstance(group[0], (int, float)) else 0, group[1] == asked.ceiling))
    for vary, method in groups:
        own = [run for run in runs if run["method"] == method and run["vary"] == vary]
        last = [run["metrics"][asked.metric] for run in own]
        ten = [run["metrics_last10"][asked.metric] for run in own]
        floors = [by_key.get((asked.floor, run["vary"], run["seed"])) for run in own]
        gains = [
            run["metrics"][asked.metric] - floor["metrics"][asked.metric]
            for run, floor in zip(own, floors, strict=True)
            if floor is not None and method != asked.floor
        ]
        room = (
            statistics.mean(ceiling) - statistics.mean(run["metrics"][asked.metric] for run in floors if run)
            if (ceiling and any(floors))
            else 0
        )
        closed = f"{statistics.mean(gains) / room:.0%}" if gains and room > 0.01 else ""
        print(f"| {vary} | {method} | {len(own)} | {spread(last)} | {spread(ten)} | {spread(gains, '+')} | {closed} |")


def spread(values: list[float], sign: str = "") -> str:
    """Percent with one decimal, plus or minus the sample standard deviation."""
    if not values:
        return ""
    text = f"{100 * statistics.mean(values):{sign}.1f}"
    return f"{text} ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else text


if __name__ == "__main__":
    main()
