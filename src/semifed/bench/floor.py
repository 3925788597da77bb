"""Against the floor: one-thread processes that do the same optimiser steps on ready-made batches, and nothing else.

There are two: a bare loop of PyTorch's, and one whose batch norms compute by our kernels, as semifed's do.
The passes are not written down by hand: a real round of the kind that is measured is watched, and what it passed
through its networks within optimiser steps is done again on batches that already lie there. How near all of that is to
what the processor can do at all is told by large matrix products and convolutions, whichever are faster on it (their
libraries are those of two vendors), which the same processes do in the same turn.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from torch import Tensor

from semifed.assembly import Parts, assemble, workplace_of
from semifed.bench.measuring import Cell, Table, ratio, spread, take_turns
from semifed.bench.replaying import Replayer
from semifed.bench.rounds import RoundTime, run_rounds
from semifed.bench.watching import Trace, Watched
from semifed.bench.work import Work, watch_steady, work_in
from semifed.bench.workload import AGAINST_FLOOR, TESTS, Workload
from semifed.client_round import Workplace
from semifed.engines import Engine
from semifed.engines.local import LocalEngine

STEADY_ROUNDS = 2  # of a turn: the first one warms the processes up, the last one is tested
ROUNDS = STEADY_ROUNDS + 2
SIDE = 1024  # of the square matrices whose product shows what the processor can do
CHANNELS, PIXELS, IMAGES = 128, 32, 8  # of the convolution that does so too, with windows of 3 × 3
LARGE = {"matrix products": 2 * SIDE**3 / 1e9, "convolutions": 2 * 9 * IMAGES * PIXELS**2 * CHANNELS**2 / 1e9}  # GFLOP
TIMES = 24  # of each, half a second or so
GOALS = {"FixMatch": 0.90, "OpenFL": 0.85, "SAGE": 0.85}
WHERE = {
    "steps": "optimiser steps",
    "views": "views",
    "gates": "gates, reports",
    "rest": "losses, bookkeeping",
    "idle": "letters, idle workers",
    "server": "server",
}


class Measured(NamedTuple):
    """How a workload did."""

    watched: Watched
    work: Work
    floor: list[float]  # seconds of a round in PyTorch alone, by turn
    own_floor: list[float]  # the same with our kernels
    rounds: list[list[RoundTime]]  # the steady ones of each turn
    test: list[float]  # seconds of a test
    products: list[float]  # seconds that all processes take for a GFLOP of large products, by turn

    def whole(self) -> list[float]:
        """Seconds of a steady round, by turn."""
        return [spread([one.whole for one in rounds]).median for rounds in self.rounds]

    def where(self, workers: int) -> dict[str, float]:
        """Shares of the time of all workers."""
        steady = [one for rounds in self.rounds for one in rounds]
        paid = workers * sum(one.whole for one in steady)
        busy = sum(one.clients for one in steady) / paid
        return {
            **{kind: share * busy for kind, share in self.watched.shares.items()},
            "idle": workers * sum(one.exchange for one in steady) / paid - busy,
            "server": workers * sum(one.whole - one.exchange for one in steady) / paid,
        }


def against_floor(folder: Path, turns: int, workers: int, loads: Sequence[Workload] = AGAINST_FLOOR) -> list[Table]:
    """How much of the floor's speed is reached, and where the rest goes."""
    reached: list[Sequence[Cell]] = []
    parts: list[Sequence[Cell]] = []
    facts: dict[str, Any] = {}
    for load in loads:
        found = measure(load, folder, turns, workers)
        work, whole, where = found.work, found.whole(), found.where(workers)
        share, own_share = ratio(found.floor, whole), ratio(found.own_floor, whole)
        of_processor = ratio([one * work.gflop for one in found.products], whole)
        reached.append(
            (
                load.name,
                work.images,
                work.steps,
                work.passes,
                round(work.gflop),
                spread(found.floor).shown(),
                spread(whole).shown(),
                share.shown(),
                GOALS[load.name.partition(",")[0]],
                spread(found.own_floor).shown(),
                own_share.shown(),
                f"{work.images / spread(whole).median:,.0f}",
                of_processor.shown(),
            )
        )
        parts.append((load.name, *(f"{100 * where[kind]:.1f}" for kind in WHERE), spread(found.test).shown()))
        facts[load.name] = {
            "floor": found.floor,
            "rounds": [[one._asdict() for one in rounds] for rounds in found.rounds],
            "share": share._asdict(),
            "own_floor": found.own_floor,
            "own_share": own_share._asdict(),
            "products": found.products,
            "of_processor": of_processor._asdict(),
            "where": where,
            "test": found.test,
            "work": work._asdict(),
        }
    return [
        Table(
            "floor",
            f"Against the floor, {workers} one-thread processes each",
            "one round; the floor does its steps on ready batches: clients' spread evenly, then the server's passes",
            (
                *("workload", "images", "steps", "passes", "GFLOP"),
                *("floor, s", "semifed, s", "of its speed", "goal", "floor with our kernels, s", "of that one's"),
                *("images/s", "of large products' speed"),
            ),
            reached,
            facts,
            (
                f"The last column: floating-point operations a second of the whole round beside those of {SIDE} × "
                f"{SIDE} matrix products or of convolutions of {CHANNELS} channels, whichever are faster, in as many "
                "processes, turn by turn. Batch norm, pools, views and waiting have no such operations.",
            ),
        ),
        Table(
            "where",
            "Where the time of a round goes, percent of all workers' time",
            "the same rounds; the first four are clocked in one process and are shares of what the clients took",
            ("workload", *WHERE.values(), f"a test of {TESTS:,} images by all workers beside it, s"),
            parts,
        ),
    ]


def measure(load: Workload, folder: Path, turns: int, workers: int) -> Measured:
    """The floor and semifed, turn by turn."""
    watched = watch_steady(load, folder, ROUNDS)
    rounds: list[list[RoundTime]] = []
    test: list[float] = []

    parts = load.parts(folder, f"rounds={ROUNDS}", f"evaluate.every={ROUNDS}")
    workplace = workplace_of(parts)

    def ours() -> float:
        _, *steady, _ = run_rounds(parts, workers).rounds
        rounds.append(steady)
        with closing(LocalEngine(workplace, parts.scenario, workers)) as engine:
            test.append(seconds_of_a_test(parts, engine))
        return spread([one.whole for one in steady]).median

    phases = [[watched.clients[one::workers], _share(watched.server, one, workers)] for one in range(workers)]
    with _replaying(workplace, load.shape, phases) as crew:

        def floor(kernels: bool) -> float:
            return spread([crew.steps(kernels) for _ in range(STEADY_ROUNDS + 1)][1:]).median

        floors = {"floor": partial(floor, False), "own floor": partial(floor, True)}
        seconds = take_turns({**floors, "semifed": ours, "products": crew.products}, turns)
    work = work_in(watched, load, folder)
    return Measured(watched, work, seconds["floor"], seconds["own floor"], rounds, test, seconds["products"])


def _share(server: Trace, one: int, workers: int) -> Trace:
    """One process's part of the server's steps, which wait for the clients': of the passes of each step so many."""
    parts = (step[one::workers] for step in server)
    return tuple(part for part in parts if any(each.learns for each in part))


def seconds_of_a_test(parts: Parts, engine: Engine) -> float:
    """What `evaluate.every` asks for of one model, by the engine's processes; a test before it warms them up."""
    net, evaluator = assemble(parts)
    for _ in range(2):
        started = perf_counter()
        evaluator.test(parts.method, net, net.state(), elsewhere=engine.predict)
        took = perf_counter() - started
    return took


class _Crew(NamedTuple):
    """Processes that do what they are told, all at once."""

    pipes: Sequence[Connection]
    phases: int

    def steps(self, kernels: bool) -> float:
        """Phase after phase; how long it took."""
        return sum(self._all((phase, kernels)) for phase in range(self.phases))

    def products(self) -> float:
        """Large products; how long a GFLOP of the faster ones took."""
        return min(self._all(kind) / (len(self.pipes) * TIMES * gflop) for kind, gflop in LARGE.items())

    def _all(self, order: tuple[int, bool] | str) -> float:
        started = perf_counter()
        for pipe in self.pipes:
            pipe.send(order)
        for pipe in self.pipes:
            pipe.recv()
        return perf_counter() - started


@contextmanager
def _replaying(
    build: Callable[[], Workplace], shape: Sequence[int], phases: Sequence[Sequence[Trace]]
) -> Iterator[_Crew]:
    """A process for each list of phases."""
    context = mp.get_context("spawn")
    pipes, processes = [], []
    try:
        for own in phases:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, build, shape, own), daemon=True)
            process.start()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()  # it is ready
        yield _Crew(pipes, len(phases[0]))
    finally:
        for process in processes:
            process.kill()
            process.join()


def _serve(pipe: Connection, build: Callable[[], Workplace], shape: Sequence[int], phases: Sequence[Trace]) -> None:
    replayer = Replayer(build(), shape, phases)
    large = large_products()
    pipe.send("ready")
    while True:
        order: tuple[int, bool] | str = pipe.recv()
        if isinstance(order, str):
            for _ in range(TIMES):
                large[order]()
        else:
            phase, kernels = order
            replayer.replay(phase, kernels=kernels)
        pipe.send("done")


def large_products() -> dict[str, Callable[[], Tensor]]:
    """What shows how fast a processor is, by both libraries that PyTorch computes with."""
    left, right = torch.randn(2, SIDE, SIDE).unbind()
    maps = torch.randn(IMAGES, CHANNELS, PIXELS, PIXELS).contiguous(memory_format=torch.channels_last)
    windows = torch.randn(CHANNELS, CHANNELS, 3, 3).contiguous(memory_format=torch.channels_last)
    return {"matrix products": lambda: left @ right, "convolutions": lambda: torch.conv2d(maps, windows, padding=1)}
