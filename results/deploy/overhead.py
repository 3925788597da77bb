"""Seconds a round takes on each engine, by how many clients take part: what an engine costs beside the training.

    python results/deploy/overhead.py [10 100 1000] > table.md

Every client takes two steps on its share of FashionMNIST (60 images each of 1,000 clients). For each number of clients
the engines run one after the other, once; the first round and the last, which is tested, are left out, and the median
of the others is shown with its range.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SEMIFED = str(Path(sys.executable).with_name("semifed"))
RECIPE = [
    "sage/fashion-mini", "method=fedavg", "scenario.clients=1000", "scenario.partition=iid", "local.steps=2",
    "rounds=4", "evaluate.every=4", "scenario.labelled_per_class=1000",
]  # fmt: skip


def seconds(engine: str, clients: int, folder: Path) -> list[float]:
    """Of each round but the first and the last, in which the model is tested."""
    out = folder / f"{engine}-{clients}"
    command = [SEMIFED, "run", *RECIPE, f"clients_per_round={clients}", "--engine", engine, "--workers", "2"]
    subprocess.run([*command, "--out", str(out), "--quiet"], check=True, capture_output=True)
    records = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    return [record["seconds"] for record in records[2:-1]]


def main() -> None:
    """Print the table."""
    print("| clients a round | local, 2 workers | Flower's simulation, 2 workers | ratio |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for clients in map(int, sys.argv[1:] or ("10", "100", "1000")):
            found = {engine: seconds(engine, clients, Path(folder)) for engine in ("local", "flower")}
            cells = [f"{statistics.median(v):.2f} s ({min(v):.2f} to {max(v):.2f})" for v in found.values()]
            ratio = statistics.median(found["flower"]) / statistics.median(found["local"])
            print(f"| {clients} | {cells[0]} | {cells[1]} | {ratio:.1f} |", flush=True)


if __name__ == "__main__":
    main()
