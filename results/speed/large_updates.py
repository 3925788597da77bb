"""Peers on clients that send 1.6 million weights each, and what their mean costs: eight minutes on two idle cores.

    python results/speed/large_updates.py [--turns 3] [--json results/speed/large_updates.json]
    python results/speed/tables.py results/speed/large_updates.json

One table of `semifed bench peers` by itself, and `semifed bench aggregation`: all that means of large models change.
"""

import argparse
import json
import tempfile
from pathlib import Path

from semifed.bench.aggregation import aggregation_cost
from semifed.bench.command import all_numbers
from semifed.bench.measuring import machine
from semifed.bench.peers import STEADY, compared, contestants
from semifed.bench.workload import FEDAVG_DENSE
from semifed.durable import write_atomically
from semifed.process import available_cores, settle


def main() -> None:
    """Measure, print and write."""
    asked = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    asked.add_argument("--turns", type=int, default=3)
    asked.add_argument("--json", type=Path)
    given = asked.parse_args()
    settle()
    about, workers = machine(), available_cores()
    tables = aggregation_cost(given.turns)
    with tempfile.TemporaryDirectory() as folder:
        tables.append(compared(FEDAVG_DENSE, Path(folder), given.turns, contestants(workers), STEADY))
    for table in tables:
        print(table.title, *(" | ".join(map(str, row)) for row in table.rows), sep="\n")
    if given.json is not None:
        write_atomically(given.json, json.dumps(all_numbers(about, given.turns, workers, tables), indent=1) + "\n")


if __name__ == "__main__":
    main()
