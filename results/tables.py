"""Tables of `results/` from run directories: one CSV line a run, one Markdown line a method and scenario.

    python results/tables.py STEM --floor METHOD --ceiling METHOD --vary KEY --vary KEY [--add] RUNS...

writes STEM.csv (every run), STEM.curves.csv (metrics by round, mean over seeds) and prints the Markdown table.
KEY is a dotted path into the recipe, such as scenario.partition or scenario.alpha. A run is called by its method and
those of its fields that are not at their defaults: `openfl statistic=all`. Batch norm that was chosen
(`batchnorm=tracked`) and clients without unknown classes (`classes=known`) set runs apart where
they differ. Floor and ceiling are names of methods or such labels; the ceiling may deliver an average of its model
(`fedavg-sl ema=0.9`). The share of the gap is computed seed by seed, over the seeds that have floor and ceiling.
With --add the runs join those that STEM.csv and STEM.curves.csv hold, whose directories need not be kept.
With --reach 60,70 a second table tells after how many rounds the mean curve of the seeds reaches these percents: for
the first time, and in the mean of five tests, which no lucky round decides.
"""

import argparse
import csv
import json
import statistics
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from semifed.methods import method_class, method_names
from semifed.report.figures import Point
from semifed.report.gap import gap_caveat, gap_shares, gaps
from semifed.report.reach import first_reached

LABEL_BUDGETS = ("scenario.labelled_per_class", "scenario.labelled_fraction")  # all labels are open to the ceiling
METRICS = ("accuracy", "auroc_seen", "auroc_overall")
Scenario = tuple[Any, ...]
Curves = dict[str, dict[tuple[str, int], float]]  # by method and scenario, then by metric and round


@dataclass(frozen=True)
class Run:
    """What the tables need of a run."""

    path: Path
    recipe: dict[str, Any]
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    method: str
    extras: dict[str, Any]  # what its label says beside the method's name
    scenario: Scenario  # values of the varied keys
    reduced: Scenario  # the same without label budgets
    seed: int

    @property
    def label(self) -> str:
        """The method and what is special about this run of it."""
        return " ".join([self.method, *(f"{key}={shown(value)}" for key, value in self.extras.items())])

    @property
    def column(self) -> str:
        """What its curve is called."""
        return " ".join([self.label, *map(shown, self.scenario)])

    def value(self, metric: str, last: str = "metrics") -> float | None:
        """A metric of the last round, or its mean over the last ten tests ("metrics_last10")."""
        value: float | None = (self.summary.get(last) or {}).get(metric)
        return value


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the runs, write the files, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stem", type=Path)
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--floor", required=True)
    parser.add_argument("--ceiling")
    parser.add_argument("--vary", action="append", help="a key of the recipe; default dataset")
    parser.add_argument(
        "--metric", action="append", help="the first one counts for gains; default " + ", ".join(METRICS)
    )
    parser.add_argument(
        "--last-ten", action="store_true", help="gains by the mean of the last ten tests, where the rate is constant"
    )
    parser.add_argument("--reach", type=lambda text: [float(level) for level in text.split(",")], default=[])
    parser.add_argument("--add", action="store_true", help="keep the runs that STEM.csv has")
    asked = parser.parse_intermixed_args(arguments)
    vary: list[str] = asked.vary or ["dataset"]
    found = {path.resolve(): path.parent for root in asked.runs for path in sorted(root.rglob("summary.json"))}
    runs = [read(path, vary) for path in found.values()]
    if not asked.add:  # stored runs may differ in what these have in common
        runs = without_common(runs)
    earlier = earlier_runs(asked.stem.with_suffix(".csv"), vary) if asked.add else []
    curves = earlier_curves(asked.stem.with_suffix(".curves.csv")) if asked.add else {}
    runs += earlier
    if not runs:
        sys.exit("no finished run found")
    refuse_mixtures(runs)
    runs.sort(key=lambda run: (orderable(run.scenario), asked.ceiling in (run.method, run.label), run.label, run.seed))
    wanted = asked.metric or METRICS
    metrics = [name for name in wanted if any(run.value(name) is not None for run in runs)]
    counted = "metrics_last10" if asked.last_ten else "metrics"
    table = Table(runs, vary, metrics, asked.floor, asked.ceiling, counted)
    table.write_runs(asked.stem.with_suffix(".csv"))
    columns = table.curves(curves)
    table.write_curves(asked.stem.with_suffix(".curves.csv"), columns)
    table.print()
    if asked.reach:
        table.print_reach(columns, asked.reach)


def read(path: Path, vary: Sequence[str]) -> Run:
    """One finished run."""
    recipe = tomllib.loads((path / "recipe.toml").read_text())
    summary = json.loads((path / "summary.json").read_text())
    method = dict(recipe["method"])
    name = str(method.pop("name"))
    extras = {key: value for key, value in deviations(name, method).items() if f"method.{key}" not in vary}
    if "model.batchnorm" not in vary and (chosen := lookup(recipe, "model.batchnorm")) not in (None, "auto"):
        extras["batchnorm"] = chosen
    if "scenario.classes" not in vary and lookup(recipe, "scenario.classes") == "known":
        extras["classes"] = "known"
    return Run(
        path=path,
        recipe=recipe,
        summary=summary,
        rounds=[json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()],
        method=name,
        extras=extras,
        scenario=tuple(lookup(recipe, key) for key in vary),
        reduced=tuple(lookup(recipe, key) for key in vary if key not in LABEL_BUDGETS),
        seed=int(recipe.get("seed", 0)),
    )


def earlier_runs(path: Path, vary: Sequence[str]) -> list[Run]:
    """The runs of a table written before: their ends without their rounds."""
    found = []
    with open(path, newline="") as file:
        for line in csv.DictReader(file):
            names = [key for key in line if key not in ("method", "seed", "seconds", "bytes_up", *vary)]
            values = {key: float(line[key]) for key in names if line[key]}
            ten = {key.removesuffix("_last10"): value for key, value in values.items() if key.endswith("_last10")}
            last = {key: value for key, value in values.items() if not key.endswith("_last10")}
            name, *extras = line["method"].split(" ")
            found.append(
                Run(
                    path=path,
                    recipe={},
                    summary={
                        "metrics": last,
                        "metrics_last10": ten,
                        "seconds": float(line["seconds"]),
                        "bytes_up": int(line["bytes_up"]),
                    },
                    rounds=[],
                    method=name,
                    extras=dict(extra.split("=", 1) for extra in extras),
                    scenario=tuple(read_back(line[key]) for key in vary),
                    reduced=tuple(read_back(line[key]) for key in vary if key not in LABEL_BUDGETS),
                    seed=int(line["seed"]),
                )
            )
    return found


def earlier_curves(path: Path) -> Curves:
    """The curves written before, means over the seeds of then."""
    curves: Curves = {}
    with open(path, newline="") as file:
        for line in csv.DictReader(file):
            cell = line.pop("metric"), int(line.pop("round"))
            for column, value in line.items():
                if value:
                    curves.setdefault(column, {})[cell] = float(value)
    return curves


def read_back(text: str) -> Any:
    """A value of a recipe from what `shown` made of it."""
    try:
        return None if text == shown(None) else float(text)
    except ValueError:
        return text


def without_common(runs: list[Run]) -> list[Run]:
    """Batch norm and classes leave the labels where all runs agree in them."""
    for key in ("batchnorm", "classes"):
        if len({run.extras.get(key) for run in runs}) == 1:
            runs = [
                replace(run, extras={name: value for name, value in run.extras.items() if name != key}) for run in runs
            ]
    return runs


def deviations(name: str, method: dict[str, Any]) -> dict[str, Any]:
    """The fields of a method table that are not at the defaults of today's method."""
    if name not in method_names():
        return {}
    defaults = {field.name: field.default for field in fields(method_class(name))}
    return {key: value for key, value in method.items() if value != defaults.get(key)}


def lookup(recipe: dict[str, Any], key: str) -> Any:
    """A value by its dotted path; None where the recipe has none."""
    value: Any = recipe
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return tuple(value) if isinstance(value, list) else value


def refuse_mixtures(runs: Sequence[Run]) -> None:
    """Two runs in one cell of the table with one seed differ in something the table would hide."""
    seen: dict[tuple[Any, ...], Run] = {}
    for run in runs:
        first = seen.setdefault((run.label, run.scenario, run.seed), run)
        if first is not run and not (first.rounds and run.rounds):
            sys.exit(f"{run.path} already has {run.label}, seed {run.seed}, which {first.path} would add")
        if first is not run:
            old, new = flat(first.recipe), flat(run.recipe)
            keys = [key for key in sorted(old | new) if old.get(key) != new.get(key) and not key.startswith("engine.")]
            sys.exit(
                f"{first.path} and {run.path} would share a line and seed {run.seed}; "
                + (f"give --vary for what they differ in: {', '.join(keys)}" if keys else "they are the same run twice")
            )


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A recipe by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def orderable(scenario: Scenario) -> tuple[tuple[bool, float, str], ...]:
    """Numbers by size before words by alphabet."""
    numbers = [value if isinstance(value, int | float) and not isinstance(value, bool) else None for value in scenario]
    return tuple(
        (number is None, float(number or 0), shown(value)) for number, value in zip(numbers, scenario, strict=True)
    )


@dataclass(frozen=True)
class Table:
    """Runs in the order of the table, and what is asked of them."""

    runs: list[Run]
    vary: list[str]
    metrics: list[str]
    floor: str
    ceiling: str | None
    counted: str = "metrics"  # what of a run gains and gaps are computed from

    @property
    def main(self) -> str:
        """The metric of gains and gaps."""
        return self.metrics[0]

    def floors(self, scenario: Scenario) -> dict[int, float]:
        """The floor's result by seed."""
        return self._by_seed(run for run in self.runs if (run.label, run.scenario) == (self.floor, scenario))

    def ceilings(self, like: Run) -> dict[int, float]:
        """The ceiling's result by seed; of several variants, that with most seeds and then the strongest."""
        named = [
            run
            for run in self.runs
            if self.ceiling == run.label or (self.ceiling == run.method and run.extras.keys() <= {"ema"})
        ]
        here = [run for run in named if run.scenario == like.scenario]
        here = here or [run for run in named if run.reduced == like.reduced]
        variants = [
            self._by_seed(run for run in here if (run.label, run.scenario) == variant)
            for variant in dict.fromkeys((run.label, run.scenario) for run in here)
        ]
        return max(variants, key=lambda found: (len(found), statistics.fmean(found.values() or [0.0])), default={})

    def _by_seed(self, runs: Iterable[Run]) -> dict[int, float]:
        return {run.seed: value for run in runs if (value := run.value(self.main, self.counted)) is not None}

    def write_runs(self, path: Path) -> None:
        """Every run with all it measured."""
        everything = sorted({key for run in self.runs for key in run.summary["metrics"]})
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            # Also of what was tested beside the delivered model: an averaged ceiling is none for methods without.
            averaged = [*self.metrics, *(metric for metric in everything if metric.endswith(f".{self.main}"))]
            tens = [f"{metric}_last10" for metric in averaged]
            writer.writerow(["method", *self.vary, "seed", *everything, *tens, "seconds", "bytes_up"])
            for run in self.runs:
                last = [digits(run.value(metric)) for metric in everything]
                ten = [digits(run.value(metric, "metrics_last10")) for metric in averaged]
                cost = [f"{run.summary['seconds']:.1f}", run.summary["bytes_up"]]
                writer.writerow([run.label, *map(shown, run.scenario), run.seed, *last, *ten, *cost])

    def curves(self, earlier: Curves) -> Curves:
        """The metrics by round, mean over seeds, one column a method and scenario."""
        columns: dict[str, dict[tuple[str, int], list[float]]] = {}
        for run in self.runs:
            column = columns.setdefault(run.column, {})
            for line in run.rounds:
                for metric in self.metrics:
                    if (value := line["metrics"].get(metric)) is not None:
                        column.setdefault((metric, line["round"]), []).append(value)
            if not run.rounds:  # an earlier run: of its curve only the mean over the seeds of then is left
                for cell, value in earlier.get(run.column, {}).items():
                    column.setdefault(cell, []).append(value)
        return {
            name: {cell: statistics.fmean(found) for cell, found in column.items()} for name, column in columns.items()
        }

    def write_curves(self, path: Path, columns: Curves) -> None:
        """One line a metric and round."""
        cells = {cell for column in columns.values() for cell in column}
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["metric", "round", *columns])
            for metric, number in sorted(cells, key=lambda cell: (self.metrics.index(cell[0]), cell[1])):
                writer.writerow([metric, number, *(digits(own.get((metric, number))) for own in columns.values())])

    def print_reach(self, columns: Curves, levels: Sequence[float]) -> None:
        """Rounds to each level: the first test there / the first five tests in a row whose mean is there."""
        print("\n| " + " | ".join([*self.vary, "method", "seeds", *(f"{level:g}" for level in levels)]) + " |")
        print("|" + "---|" * (len(self.vary) + 2 + len(levels)))
        for scenario, label in dict.fromkeys((run.scenario, run.label) for run in self.runs):
            group = [run for run in self.runs if (run.scenario, run.label) == (scenario, label)]
            column = sorted(columns[group[0].column].items())
            curve = [Point(number, value) for (metric, number), value in column if metric == self.main and number > 0]
            fives = [(curve[place].round, curve[place - 4 : place + 1]) for place in range(4, len(curve))]
            steady = [Point(last, statistics.fmean(point.value or 0.0 for point in five)) for last, five in fives]
            cells = [
                " / ".join(str(first_reached(by, level / 100) or "–") for by in (curve, steady)) for level in levels
            ]
            print("| " + " | ".join([*map(shown, scenario), label, str(len(group)), *cells]) + " |")

    def print(self) -> None:
        """Mean and sample deviation over seeds, the gain over the floor and the share of the gap, seed by seed."""
        measured = [f"{metric}, {when}" for metric in self.metrics for when in ("last round", "last ten tests")]
        titles = [*self.vary, "method", "seeds", *measured, f"gain over {self.floor}", "gap closed, %", "minutes"]
        print("| " + " | ".join(titles) + " |")
        print("|" + "---|" * len(titles))
        notes: dict[str, None] = {}
        for scenario, label in dict.fromkeys((run.scenario, run.label) for run in self.runs):
            group = [run for run in self.runs if (run.scenario, run.label) == (scenario, label)]
            own, floor, ceiling = self._by_seed(group), self.floors(scenario), self.ceilings(group[0])
            is_floor = label == self.floor
            cells = [
                spread(run.value(metric, last) for run in group)
                for metric in self.metrics
                for last in ("metrics", "metrics_last10")
            ]
            gain = "" if is_floor else spread((own[seed] - floor[seed] for seed in own if seed in floor), "+")
            shares = {} if is_floor else gap_shares(own, floor, ceiling)
            closed = spread(shares.values(), decimals=0)
            if shares and len(shares) < len(group):
                closed += f" ({len(shares)} of {len(group)} seeds)"
            minutes = statistics.fmean(run.summary["seconds"] for run in group) / 60
            row = [*map(shown, scenario), label, str(len(group)), *cells, gain, closed, f"{minutes:.1f}"]
            print("| " + " | ".join(row) + " |")
            if floor and ceiling and (caveat := gap_caveat(gaps(floor, ceiling))):
                notes[f"{', '.join(map(shown, scenario))}: {caveat}."] = None
        for note in notes:
            print(f"\nGap at {note}")


def spread(values: Iterable[float | None], sign: str = "", decimals: int = 1) -> str:
    """Percent, plus or minus the sample standard deviation, of the values that exist."""
    present = [value for value in values if value is not None]
    if not present:
        return ""
    text = f"{100 * statistics.fmean(present):{sign}.{decimals}f}"
    return f"{text} ± {100 * statistics.stdev(present):.{decimals}f}" if len(present) > 1 else text


def digits(value: float | None) -> str:
    """A number of a CSV file."""
    return "" if value is None else f"{value:.4f}"


def shown(value: Any) -> str:
    """A value of a recipe."""
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
