"""What training steps in bfloat16 save on this processor: the same rounds in both precisions, in turn."""

from collections.abc import Callable, Sequence
from pathlib import Path

from semifed.bench.measuring import Cell, Table, ratio, spread, take_turns
from semifed.bench.rounds import run_rounds
from semifed.bench.work import work_of
from semifed.bench.workload import AGAINST_FLOOR, Workload
from semifed.process import computes_bfloat16

PRECISIONS = ("float32", "bfloat16")
ROUNDS = 4  # of a turn: the first one warms the processes up, the last one is tested


def lower_precision(folder: Path, turns: int, workers: int, loads: Sequence[Workload] = AGAINST_FLOOR) -> list[Table]:
    """How long rounds take in single precision and in bfloat16."""
    able = computes_bfloat16("cpu")
    rows: list[Sequence[Cell]] = []
    seconds: dict[str, dict[str, list[float]]] = {}
    counted: dict[str, dict[str, float]] = {}
    for load in loads if able else ():
        found = take_turns({name: _rounds(load, folder, workers, name) for name in PRECISIONS}, turns)
        seconds[load.name] = found
        both = [spread(found[name]).shown() for name in PRECISIONS]
        work = work_of(load, folder)
        counted[load.name] = work._asdict()
        done = (f"{work.images:,}", work.passes, round(work.gflop))
        rows.append((load.name, *done, *both, ratio(found["float32"], found["bfloat16"]).shown()))
    return [
        Table(
            "precision",
            f"Training steps in bfloat16, {workers} one-thread processes",
            "a steady round of the real loop; weights, tests and statistics are in single precision in both",
            ("workload", "images", "passes", "GFLOP", "float32, s", "bfloat16, s", "times as fast"),
            rows,
            {"seconds": seconds, "work": counted},
            () if able else ("this processor cannot compute in bfloat16",),
        )
    ]


def _rounds(load: Workload, folder: Path, workers: int, precision: str) -> Callable[[], float]:
    def run() -> float:
        often = f"evaluate.every={ROUNDS}"
        parts = load.parts(folder, f"rounds={ROUNDS}", often, f"model.precision={precision}")
        return spread([one.whole for one in run_rounds(parts, workers).rounds[1:-1]]).median

    return run
