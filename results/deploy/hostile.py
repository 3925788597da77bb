"""The table of attackers and defences from run directories.

    python results/deploy/hostile.py STEM RUNS...

writes STEM.csv, one line a run, and prints accuracy and AUROC of seen unknowns (where there are any) by method, attack,
share of attackers and defence; the mean over seeds. In brackets: the current model, where an average is delivered.
"""

import csv
import json
import statistics
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any


def read(run: Path) -> dict[str, Any]:
    """What the table needs of a run."""
    recipe = tomllib.loads((run / "recipe.toml").read_text())
    metrics = json.loads((run / "summary.json").read_text())["metrics"]
    attack = recipe["attack"]
    return {
        "method": recipe["method"]["name"],
        "attack": attack["kind"] + (f" × {attack['scale']:g}" if attack["kind"] in ("sign-flip", "noise") else ""),
        "share": 0.0 if attack["kind"] == "none" else attack["share"],
        "defence": recipe["defence"]["steps"] or "none",
        "seed": recipe["seed"],
        "accuracy": metrics["accuracy"],
        "auroc_seen": metrics.get("auroc_seen", "") if recipe["scenario"]["classes"] == "open" else "",
        "current.accuracy": metrics.get("current.accuracy", ""),
        "current.auroc_seen": metrics.get("current.auroc_seen", ""),
    }


def main() -> None:
    """Read the runs, write the file, print the tables."""
    stem, *paths = sys.argv[1:]
    rows = sorted((read(Path(path)) for path in paths), key=lambda row: [str(value) for value in row.values()])
    with open(f"{stem}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    cells: dict[tuple[str, str, float], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        cells[row["method"], row["attack"], row["share"]][row["defence"]].append(row)
    for method in sorted({row["method"] for row in rows}):
        used = {row["defence"] for row in rows if row["method"] == method}
        defences = sorted(used, key=lambda name: (name != "none", name))
        print(f"\n| {method}: attack | attackers, % | " + " | ".join(defences) + " |")
        print("|---|---|" + "---|" * len(defences))
        for (own, attack, share), by in cells.items():
            if own == method:
                shown = [cell(by[name]) for name in defences]
                print(f"| {attack} | {100 * share:.0f} | " + " | ".join(shown) + " |")


def cell(rows: list[dict[str, Any]]) -> str:
    """Accuracy, and AUROC where there is one."""
    parts = []
    for key in ("accuracy", "auroc_seen", "current.accuracy", "current.auroc_seen"):
        values = [100 * float(row[key]) for row in rows if row[key] != ""]
        parts += [f"{statistics.mean(values):.1f}"] if values else []
    return " / ".join(parts[:2]) + (f" ({' / '.join(parts[2:])})" if parts[2:] else "")


if __name__ == "__main__":
    main()
