"""Against the floor: one-thread processes that do the same optimiser steps on ready-made batches, and nothing else.

The passes are not written down by hand: a real round is watched, and what it passed through its networks within
optimiser steps is done again on batches that already lie there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from semifed.assembly import Parts, assemble, workplace_of
from semifed.bench.measuring import Cell, Table, ratio, spread, take_turns
from semifed.bench.rounds import RoundTime, run_rounds
from semifed.bench.watching import Trace, Watched, watch
from semifed.bench.workload import AGAINST_FLOOR, TESTS, Workload
from semifed.client_round import Workplace
from semifed.fit import Descent
from semifed.models.network import Output
from semifed.process import settle

STEADY_ROUNDS = 2  # of a turn: the first one warms the processes up, the last one is tested
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
    gflop: float  # of a round
    floor: list[float]  # seconds of a round, by turn
    rounds: list[list[RoundTime]]  # the steady ones of each turn
    test: list[float]  # seconds of a test

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
        steps = len(found.watched.clients) + len(found.watched.server)
        images, whole, where = found.rounds[0][0].images, found.whole(), found.where(workers)
        share = ratio(found.floor, whole)
        reached.append(
            (
                load.name,
                images,
                steps,
                round(found.gflop),
                spread(found.floor).shown(),
                spread(whole).shown(),
                share.shown(),
                GOALS[load.name.partition(",")[0]],
                f"{images / spread(whole).median:,.0f}",
            )
        )
        parts.append((load.name, *(f"{100 * where[kind]:.1f}" for kind in WHERE), spread(found.test).shown()))
        facts[load.name] = {
            "floor": found.floor,
            "rounds": [[one._asdict() for one in rounds] for rounds in found.rounds],
            "share": share._asdict(),
            "where": where,
            "test": found.test,
            "gflop": found.gflop,
        }
    return [
        Table(
            "floor",
            f"Against the floor, {workers} one-thread processes each",
            "one round; the floor does its steps on ready batches: the clients' evenly spread, then the server's",
            ("workload", "images", "steps", "GFLOP", "floor, s", "semifed, s", "of its speed", "goal", "images/s"),
            reached,
            facts,
        ),
        Table(
            "where",
            "Where the time of a round goes, percent of all workers' time",
            "the same rounds; the first four are clocked in one process and are shares of what the clients took",
            ("workload", *WHERE.values(), f"a test of {TESTS:,} images beside it, s"),
            parts,
        ),
    ]


def measure(load: Workload, folder: Path, turns: int, workers: int) -> Measured:
    """The floor and semifed, turn by turn."""
    watched = watch(load.parts(folder, "rounds=1", "evaluate.every=1"))
    rounds: list[list[RoundTime]] = []
    test: list[float] = []

    def ours() -> float:
        count = STEADY_ROUNDS + 2
        parts = load.parts(folder, f"rounds={count}", f"evaluate.every={count}")
        _, *steady, _ = run_rounds(parts, workers).rounds
        middle = spread([one.whole for one in steady]).median
        rounds.append(steady)
        test.append(seconds_of_a_test(parts))
        return middle

    # The server's steps wait for the clients' and cannot be shared out, so they are one process's in the floor too.
    phases = [[watched.clients[one::workers], watched.server if one == 0 else ()] for one in range(workers)]
    workplace = workplace_of(load.parts(folder))
    with _replaying(workplace, load.shape, phases) as replay:

        def floor() -> float:
            return spread([replay() for _ in range(STEADY_ROUNDS + 1)][1:]).median

        seconds = take_turns({"floor": floor, "semifed": ours}, turns)
    steps = (*watched.clients, *watched.server)
    replayer = Replayer(workplace(), load.shape, [steps])
    with FlopCounterMode(display=False) as counter:
        replayer.replay(0)
    return Measured(watched, counter.get_total_flops() / 1e9, seconds["floor"], rounds, test)


def seconds_of_a_test(parts: Parts) -> float:
    """What `evaluate.every` asks for, in the server's process."""
    net, evaluator = assemble(parts)
    started = perf_counter()
    evaluator.test(parts.method, net, net.state())
    return perf_counter() - started


class Replayer:
    """Does the steps of a trace on batches of noise that already lie there."""

    def __init__(self, place: Workplace, shape: Sequence[int], phases: Sequence[Trace]) -> None:
        settle()
        self._net, self._optimiser, self._phases = place.net, place.optimiser, phases
        self._teacher = place.net.frozen()
        generator = torch.Generator().manual_seed(0)
        self._ready = {
            size: torch.randn(size, *shape, generator=generator).contiguous(memory_format=torch.channels_last)
            for size in {one.images for trace in phases for step in trace for one in step}
        }

    def replay(self, phase: int) -> None:
        """All steps of a phase."""
        self._net.network.train()
        # The formula that training uses: with PyTorch's class around it the floor could be beaten.
        descent = Descent(self._net.learners(), self._optimiser)
        for step in self._phases[phase]:
            for one in step:
                if not one.learns:
                    self._teacher(self._ready[one.images])
            losses = [_any_loss(self._net(self._ready[one.images])) for one in step if one.learns]
            descent.forget()
            torch.stack(losses).sum().backward()
            descent.step(self._optimiser.lr)


def _any_loss(output: Output) -> Tensor:
    """Something whose gradient reaches every weight."""
    labels = torch.zeros(len(output.logits), dtype=torch.int64)
    return F.cross_entropy(output.logits, labels) + sum(head.square().mean() for head in output.heads.values())


@contextmanager
def _replaying(
    build: Callable[[], Workplace], shape: Sequence[int], phases: Sequence[Sequence[Trace]]
) -> Iterator[Callable[[], float]]:
    """A process for each list of phases; the call has all of them do phase after phase, and says how long it took."""
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

        def replay() -> float:
            started = perf_counter()
            for phase in range(len(phases[0])):
                for pipe in pipes:
                    pipe.send(phase)
                for pipe in pipes:
                    pipe.recv()
            return perf_counter() - started

        yield replay
    finally:
        for process in processes:
            process.kill()
            process.join()


def _serve(pipe: Connection, build: Callable[[], Workplace], shape: Sequence[int], phases: Sequence[Trace]) -> None:
    replayer = Replayer(build(), shape, phases)
    pipe.send("ready")
    while True:
        replayer.replay(pipe.recv())
        pipe.send("done")
