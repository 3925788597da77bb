"""Tables of category discovery from run directories.

    python results/discovery/table.py STEM [--add] RUNS...

writes STEM.csv, one line a run, with --add beside the lines that are there already, and prints one Markdown line for
each method and scenario, mean ± deviation over seeds, percent. A method's own groups stand beside those that Infomap
finds in its features (`infomap`), Infomap with the server's labelled images (`plus`: FedLPA+) and k-means that is told
the number of classes (`k-means`). `purity`, the share of known images among the identified, is the mean of the last
ten rounds, `purity_first` that of the first ten in which images are identified. `sure.taught`, `sure.labelled`,
`sure.known` and `sure.novel` are the median confidences of the classifier of known classes after the last round: of
the clients' labelled images, of the server's, which nobody trained on, of unlabelled ones of known classes and of novel
ones (empty, as `purity_first`, in lines written before they were counted).
"""

import csv
import json
import statistics
import sys
import tomllib
from collections import defaultdict
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from semifed.methods import method_class

GROUPINGS = {"": "own", "infomap.": "infomap", "plus.": "plus", "kmeans.": "kmeans"}
PARTS = ("all", "old", "new")
IDENTITY = ("dataset", "epochs", "spread", "method", "seed")
FIRST_TOLD = ("prior_weight", "prior", "concepts", "refine", "divergence")
# The first two are the scenario's, the others the recipe's; no warm-up at all is told.
NOT_TOLD = ("labelled_share", "novel", "warmup_rounds", "teacher_rounds")
TEACHER_ROUNDS = {"fedlpa": (15, 8), "fed-simgcd": (30,)}  # of the recipes: digits and FashionMNIST, CIFAR-10
ROUNDS = (35, 20)  # of the recipes: digits and FashionMNIST's pixels, pretrained features
DIGITS_RATE, RATE = 0.1, 0.03  # of the recipes


def run_identity(recipe: dict[str, Any]) -> dict[str, Any]:
    """What tells a run from others: data, spread, method with what is special about it, length, seed."""
    method, scenario = recipe["method"], recipe["scenario"]
    defaults = {field.name: field.default for field in fields(method_class(method["name"]))}
    keys = sorted(defaults, key=lambda key: FIRST_TOLD.index(key) if key in FIRST_TOLD else len(FIRST_TOLD))
    special = [
        f"{key}={method[key]}"
        for key in keys
        if key not in NOT_TOLD and method.get(key, defaults[key]) != defaults[key]
    ]
    if method["name"] == "fedlpa" and method["warmup_rounds"] == 0:
        special.append("warmup_rounds=0")
        if recipe["rounds"] not in ROUNDS:  # without warm-up a run of the usual length discovers for longer
            special.append(f"rounds={recipe['rounds']}")
    if (told := method.get("teacher_rounds")) and told not in TEACHER_ROUNDS[method["name"]]:
        special.append(f"teacher_rounds={told:g}")
    dataset = recipe["dataset"].rpartition("/")[2].removesuffix(".npz")
    if (rate := recipe["local"].get("lr", RATE)) != (DIGITS_RATE if dataset.startswith("digits") else RATE):
        special.append(f"lr={rate:g}")
    if scenario.get("known"):  # another split than the first classes and the others
        special.append("known=" + ",".join(map(str, scenario["known"])))
    steps = recipe["local"].get("steps")
    spread = scenario["partition"] if scenario["partition"] in ("iid", "folders") else f"{scenario['alpha']:g}"
    return {
        "dataset": dataset,
        "spread": spread,
        "method": " ".join([method["name"], *special]),
        "epochs": f"{steps} steps" if steps else str(recipe["local"].get("epochs", 1)),
        "seed": recipe["seed"],
    }


def read(run: Path) -> dict[str, Any]:
    """What the tables need of a run."""
    recipe = tomllib.loads((run / "recipe.toml").read_text())
    summary = json.loads((run / "summary.json").read_text())
    records = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    gates = [record["gate"] for record in records[-10:] if record.get("gate")]
    first = [record["gate"] for record in records if record.get("gate")][:10]
    concepts = [record["loss"]["concepts"] for record in records[-10:] if "concepts" in record["loss"]]
    metrics = summary["metrics"]
    row = run_identity(recipe) | {
        "clusters": metrics["clusters"],
        "nmi": metrics["nmi"],
        "accuracy": metrics["accuracy"],
        "purity": statistics.mean(gate["purity"] for gate in gates) if gates else "",
        "purity_first": statistics.mean(gate["purity"] for gate in first) if first else "",
        "pass_known": statistics.mean(gate["pass_known"] for gate in gates) if gates else "",
        "concepts": statistics.mean(concepts) if concepts else "",
        "seconds": summary["seconds"],
    }
    described = json.loads((run / "discovery.json").read_text())["confidence"]
    row |= {f"sure.{kind}": median(described["bins"], counts) for kind, counts in described["counts"].items()}
    return row | {f"{name}.{part}": metrics.get(f"{p}{part}", "") for p, name in GROUPINGS.items() for part in PARTS}


def median(bins: list[float], counts: list[int]) -> float | str:
    """Of values that were counted between neighbouring bins, as if they lay evenly there; empty if there are none."""
    half, below = sum(counts) / 2, 0
    for (low, high), count in zip(pairwise(bins), counts, strict=True):
        if count and below + count >= half:
            return low + (high - low) * (half - below) / count
        below += count
    return ""


def earlier(path: Path) -> list[dict[str, Any]]:
    """The runs of a table written before."""
    words = ("dataset", "spread", "method", "epochs")
    with open(path, newline="") as file:
        return [
            {key: value if key in words or not value else float(value) for key, value in line.items()}
            | {"seed": int(line["seed"])}
            for line in csv.DictReader(file)
        ]


def cell(rows: list[dict[str, Any]], key: str) -> str:
    """Mean and deviation of a share, in percent."""
    values = [100 * row[key] for row in rows if row[key] != ""]
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def main() -> None:
    """Read the runs, write the file, print the table."""
    stem, *paths = sys.argv[1:]
    rows = earlier(Path(f"{stem}.csv")) if "--add" in paths else []
    rows += [read(Path(path)) for path in paths if path != "--add"]
    rows.sort(key=lambda row: (row["dataset"], row["epochs"], row["spread"], row["method"], row["seed"]))
    twice = [two for one, two in pairwise(rows) if all(one[key] == two[key] for key in IDENTITY)]
    if twice:
        sys.exit("the same run twice: " + ", ".join(str(twice[0][key]) for key in IDENTITY))
    with open(f"{stem}.csv", "w", newline="") as file:
        columns = max(rows, key=len)  # rows of an older table may lack some
        writer = csv.DictWriter(file, fieldnames=list(columns))
        writer.writeheader()
        writer.writerows({key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()} for row in rows)
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["epochs"], row["spread"], row["method"]].append(row)
    heads = ["epochs", "α", "method", "seeds", "all", "old", "new", "groups"]
    heads += [f"{name}: all / new" for name in ("infomap", "plus", "k-means")]
    print("| " + " | ".join(heads) + " |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for (epochs, spread, method), own in groups.items():
        beside = [f"{cell(own, f'{name}.all')} / {cell(own, f'{name}.new')}" for name in ("infomap", "plus", "kmeans")]
        parts = [cell(own, f"own.{part}") for part in PARTS]
        clusters = f"{statistics.mean(row['clusters'] for row in own):.1f}"
        print(" | ".join(["| " + str(epochs), str(spread), method, str(len(own)), *parts, clusters, *beside]) + " |")


if __name__ == "__main__":
    main()
