"""What it costs that clients keep something from round to round: two minutes on two idle cores.

    python results/speed/kept.py [--turns 3] [--json results/speed/kept.json]
    python results/speed/tables.py results/speed/kept.json

Fifty clients of two steps in the real round loop, checkpoints included. What they keep is brought to disk together, or,
as it was before, file by file.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

from semifed.bench.command import all_numbers
from semifed.bench.measuring import Table, machine, ratio, spread, take_turns
from semifed.bench.rounds import run_rounds
from semifed.bench.workload import MANY_SMALL
from semifed.client_round import Held
from semifed.durable import write_atomically
from semifed.held import HeldStore
from semifed.process import available_cores, settle

STEADY = 6  # rounds of a turn that count
KEPT = {
    "nothing (FixMatch)": (),
    "labels of its images (FlexMatch)": ("method=flexmatch",),
    "its momentum (FixMatch, local.keep_optimizer)": ("local.keep_optimizer=true",),
}
Manner = Callable[[], AbstractContextManager[object]]


def _file_by_file(store: HeldStore, round_: int, held: Mapping[int, Held]) -> None:
    for client, one in held.items():
        store.save(client, round_, one)


MANNERS: dict[str, Manner] = {
    "together": nullcontext,
    "file by file": partial(patch.object, HeldStore, "save_all", _file_by_file),
}


def seconds_a_round(folder: Path, workers: int, overrides: tuple[str, ...], manner: Manner) -> float:
    """The median of some rounds, the first and the tested last left out."""
    count = STEADY + 2
    parts = MANY_SMALL.parts(folder, *overrides, f"rounds={count}", f"evaluate.every={count}")
    with manner():
        return statistics.median(one.whole for one in run_rounds(parts, workers).rounds[1:-1])


def main() -> None:
    """Measure, print and write."""
    asked = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    asked.add_argument("--turns", type=int, default=3)
    asked.add_argument("--json", type=Path)
    given = asked.parse_args()
    settle()
    about, workers = machine(), available_cores()
    with tempfile.TemporaryDirectory() as folder:
        seconds = take_turns(
            {
                f"{kept}, {manner}": partial(seconds_a_round, Path(folder), workers, overrides, how)
                for kept, overrides in KEPT.items()
                for manner, how in MANNERS.items()
            },
            given.turns,
        )
    nothing = next(iter(seconds.values()))
    table = Table(
        name="kept",
        title="What clients keep from round to round",
        work=f"50 clients a round, 2 steps of 8 labelled and up to 16 unlabelled images each, {workers} workers",
        header=("a client keeps, brought to disk", "seconds a round", "times that of nothing"),
        rows=[[name, spread(own).shown(), ratio(own, nothing).shown()] for name, own in seconds.items()],
        facts={name: {"seconds": own} for name, own in seconds.items()},
    )
    print(table.title, *(" | ".join(map(str, row)) for row in table.rows), sep="\n")
    if given.json is not None:
        write_atomically(given.json, json.dumps(all_numbers(about, given.turns, workers, [table]), indent=1) + "\n")


if __name__ == "__main__":
    main()
