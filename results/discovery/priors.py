"""How near FedLPA's priors are to the truth, from the checkpoints of run directories.

    python results/discovery/priors.py FILE.csv [--add] RUNS...

At the last refresh a client holds concepts, and the share of its unlabelled images in each is the prior that its
predictions are aligned with. To compare it with the true shares of classes, a concept counts for the class that most
of its images are of; n images of C classes then give (count + 1/2) / (n + C/2) on both sides. Columns, each a mean
over the clients: KL(true ‖ concepts); KL(true ‖ uniform), were all concepts equally frequent as SimGCD assumes; `pure`,
the share of images that are of their concept's class; `largest`, the share of the most frequent class; concepts and
classes.
"""

import csv
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from table import earlier, run_identity

from semifed.assembly import prepare_run
from semifed.checkpoint import Checkpoint
from semifed.method import payload_types
from semifed.recipe_file import load_recipe

MEASURES = ("kl_concepts", "kl_uniform", "pure", "largest", "concepts", "classes")
Counts = NDArray[np.float64]


def compared(member: NDArray[np.int64], classes: NDArray[np.int64], class_count: int) -> dict[str, float]:
    """What a client's concepts say of the frequency of classes; images in no concept (-1) do not count."""
    inside = member >= 0
    table = np.zeros((member.max() + 1, class_count))
    np.add.at(table, (member[inside], classes[inside]), 1)
    majority = np.eye(class_count)[table.argmax(1)]  # concepts x classes
    images = table.sum()
    true = smoothed(table.sum(0))
    return {
        "kl_concepts": divergence(true, smoothed(table.sum(1) @ majority)),
        "kl_uniform": divergence(true, smoothed(np.full(len(table), images / len(table)) @ majority)),
        "pure": float((table * majority).sum() / images),
        "largest": float(table.sum(0).max() / images),
        "concepts": float(len(table)),
        "classes": float(np.count_nonzero(table.sum(0))),
    }


def smoothed(counts: Counts) -> Counts:
    """Shares, half an image of each class added."""
    shares: Counts = (counts + 0.5) / (counts.sum() + 0.5 * len(counts))
    return shares


def divergence(p: Counts, q: Counts) -> float:
    """KL(p ‖ q) in nats."""
    return float((p * np.log(p / q)).sum())


def read(run: Path) -> dict[str, Any]:
    """The means over the clients of a run."""
    recipe = load_recipe(str(run / "recipe.toml"))
    parts = prepare_run(recipe)
    server, _, _, kept = payload_types(parts.method)
    checkpoint = Checkpoint(run / "checkpoint")
    last = checkpoint.load(server)
    if last is None:
        sys.exit(f"{run} has no checkpoint")
    raw = parts.scenario.dataset.y_train.numpy()
    held = {client: checkpoint.store.load(client, round_, kept) for client, round_ in sorted(last.left.items())}
    clients = [
        compared(one.kept.member.numpy(), raw[parts.scenario.holdings[client].unlabelled], raw.max() + 1)
        for client, one in held.items()
        if one is not None and (one.kept.member >= 0).any()
    ]
    means = {key: statistics.fmean(client[key] for client in clients) for key in MEASURES}
    return run_identity(recipe.plain()) | means


def main() -> None:
    """Read the runs, write the file, print a line a method and scenario."""
    file, *paths = sys.argv[1:]
    rows = earlier(Path(file)) if "--add" in paths else []
    rows += [read(Path(path)) for path in paths if path != "--add"]
    rows.sort(key=lambda row: (row["dataset"], row["spread"], row["method"], row["seed"]))
    with open(file, "w", newline="") as out:
        writer = csv.DictWriter(out, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows({key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()} for row in rows)
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["dataset"], row["spread"], row["method"]].append(row)
    print(
        "| data | α | method | seeds | KL(true ‖ concepts) | KL(true ‖ uniform) | pure | largest | concepts | classes |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for names, own in groups.items():
        means = [statistics.fmean(row[key] for row in own) for key in MEASURES]
        shown = [*(f"{mean:.2f}" for mean in means[:4]), *(f"{mean:.1f}" for mean in means[4:])]
        print("| " + " | ".join([*names, str(len(own)), *shown]) + " |")


if __name__ == "__main__":
    main()
