"""What a round costs as a federation grows: in clients, participants, workers, images and weights.

Every number comes from the real round loop, run into a temporary folder. The first round, in which processes warm up,
and the last, which is tested, do not count.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch

from semifed.assembly import workplace_of
from semifed.bench.aggregation import peak_memory, peak_memory_below
from semifed.bench.measuring import Cell, Spread, Table, ratio, spread, take_turns
from semifed.bench.rounds import Clock, TimedEngine
from semifed.bench.step_cost import step_cost
from semifed.bench.workload import FIXMATCH_CNN as WHOLE
from semifed.bench.workload import Workload
from semifed.engines.local import LocalEngine
from semifed.process import available_cores
from semifed.run import execute

STEADY_ROUNDS = 3
MANY_STEADY_ROUNDS = 12  # where a round is short
FEW_TESTS = 100
STEPS = 4
FIXMATCH_CNN = WHOLE._replace(tests=FEW_TESTS)  # no steady round is tested: tests would take longer than all rounds
BATCH = 32  # unlabelled images of a step
CLIENTS = (100, 1_000, 10_000, 100_000)
PARTICIPANTS = (5, 10, 20, 40)
IMAGES_A_CLIENT = (64, 128, 256, 512)
WIDTHS = ((8, 16, 32), (16, 32, 64), (32, 64, 128), (64, 128, 256))
IMAGES_AT_MOST_CLIENTS = 4  # two with a label and two without


class Run(NamedTuple):
    """What one run took, in seconds and bytes."""

    start: float  # until the first round
    rounds: list[float]  # steady ones, with their checkpoints
    trained: list[float]  # the part of them that rounds.jsonl tells: until the checkpoint
    end: float  # after the last round
    server_cpu: list[float]  # processor seconds of the server's process in the steady rounds
    exchange: list[float]  # the part of them until all clients had answered
    clients: list[float]  # what the clients themselves took, added up
    own_memory: int | None  # peak of the process that holds the server
    all_memory: int | None  # peaks of it and its workers, added up: images they share count in each

    @property
    def seconds(self) -> float:
        """Of a usual round."""
        return spread(self.rounds).median

    def idle(self, workers: int) -> float:
        """The share of the workers' time in a usual exchange that is no client's: letters, and waiting for the last."""
        busy = [own / (workers * whole) for own, whole in zip(self.clients, self.exchange, strict=True)]
        return 1 - spread(busy).median

    @property
    def bookkeeping(self) -> float:
        """Seconds of a usual round that rounds.jsonl does not tell."""
        return spread([whole - part for whole, part in zip(self.rounds, self.trained, strict=True)]).median


def scaling(folder: Path, turns: int, workers: int) -> list[Table]:
    """Cost against the number of clients, participants, workers, images a client, and weights."""
    torch.set_num_threads(1)
    return [
        *against_clients(folder, turns, workers),
        *against_participants(folder, turns, workers),
        *against_workers(folder, turns, workers),
        *against_images(folder, turns, workers),
        *against_width(folder, turns),
    ]


def against_clients(folder: Path, turns: int, workers: int, clients: Sequence[int] = CLIENTS) -> list[Table]:
    """The same images over more and more clients, as many of them a round as ever."""
    images = max(IMAGES_AT_MOST_CLIENTS * max(clients), 1000)
    # A client of the largest federation fills a batch, so that a step is the same work everywhere.
    workload = FIXMATCH_CNN._replace(images=images)
    common = (
        f"scenario.labelled_per_class={images // 20}",
        f"local.batch={IMAGES_AT_MOST_CLIENTS // 2}",
        "local.unlabelled_ratio=2",
        *_few_steps(workers, MANY_STEADY_ROUNDS),
    )
    workload.parts(folder)  # written once, before anybody is on the clock
    runs = _runs(
        {
            count: partial(_in_fresh_process, workload, folder, (*common, f"scenario.clients={count}"))
            for count in clients
        },
        turns,
    )
    rows: list[Sequence[Cell]] = [
        (
            f"{count:,}",
            _seconds(own).shown(3),
            _times(own, runs[clients[0]]).shown(),
            spread([1000 * spread(run.server_cpu).median for run in own]).shown(1),
            spread([1000 * run.bookkeeping for run in own]).shown(1),
            spread([run.start for run in own]).shown(1),
            spread([run.end for run in own]).shown(1),
            _gigabytes([run.own_memory for run in own]),
            _gigabytes([run.all_memory for run in own]),
        )
        for count, own in runs.items()
    ]
    header = (
        "clients",
        "s a round",
        f"times that of {clients[0]:,}",
        "CPU ms of the server's process",
        "ms for checkpoint and log",
        "s before round 1",
        "s after the last",
        "peak memory of the server",
        "with its workers",
    )
    return [
        Table(
            "scaling-clients",
            "Clients in total",
            f"{images:,} images of 28x28 over all clients, 10 clients a round, {STEPS} steps each, {workers} workers; "
            f"{step_cost(workload, folder, STEPS, *common, f'scenario.clients={clients[0]}').told()}.",
            header,
            rows,
            {"images": images, "workers": workers, **_facts("clients", runs)},
            ("Memory is added up over processes, so images that workers share count once for each of them.",),
        )
    ]


def against_participants(folder: Path, turns: int, workers: int, counts: Sequence[int] = PARTICIPANTS) -> list[Table]:
    """More clients a round: each should cost the same."""
    runs = _runs(
        {
            count: partial(_run, FIXMATCH_CNN, folder, (*_few_steps(workers), f"clients_per_round={count}"))
            for count in counts
        },
        turns,
    )
    rows: list[Sequence[Cell]] = [
        (
            count,
            _seconds(own).shown(3),
            spread([1000 * run.seconds / count for run in own]).shown(1),
            _times(own, runs[counts[0]]).shown(),
        )
        for count, own in runs.items()
    ]
    return [
        Table(
            "scaling-participants",
            "Participants",
            f"{FIXMATCH_CNN.name}, 100 clients, {STEPS} steps of {BATCH} unlabelled images, {workers} workers; "
            f"{step_cost(FIXMATCH_CNN, folder, STEPS).told()}.",
            ("clients a round", "s a round", "ms a client", f"times that of {counts[0]}"),
            rows,
            {"workers": workers, **_facts("participants", runs)},
        )
    ]


def against_workers(folder: Path, turns: int, workers: int, steps: int = 2 * STEPS) -> list[Table]:
    """The same rounds in more processes."""
    counts = range(1, max(1, min(workers, available_cores())) + 1)
    runs = _runs(
        {count: partial(_run, FIXMATCH_CNN, folder, (*_few_steps(count), f"local.steps={steps}")) for count in counts},
        turns,
    )
    alone = [run.seconds for run in runs[1]]
    gains = {count: ratio(alone, [run.seconds for run in own]) for count, own in runs.items()}
    rows: list[Sequence[Cell]] = [
        (
            count,
            _seconds(own).shown(3),
            gains[count].shown(),
            spread([spread(run.exchange).median for run in own]).shown(3),
            spread([spread(run.clients).median for run in own]).shown(3),
            spread([100 * run.idle(count) for run in own]).shown(1),
        )
        for count, own in runs.items()
    ]
    return [
        Table(
            "scaling-workers",
            "Workers",
            f"{FIXMATCH_CNN.name}, 10 of 100 clients a round, {steps} steps of {BATCH} unlabelled images; "
            f"{step_cost(FIXMATCH_CNN, folder, STEPS).told()}.",
            (
                *("workers", "s a round", "times as fast as one", "s until all clients had answered"),
                *("s of the clients themselves, added up", "percent of the workers' time between"),
            ),
            rows,
            {"times_as_fast": [gain._asdict() for gain in gains.values()], **_facts("workers", runs)},
        )
    ]


def against_images(folder: Path, turns: int, workers: int, counts: Sequence[int] = IMAGES_A_CLIENT) -> list[Table]:
    """One pass over more and more images a client."""
    runs = _runs(
        {
            count: partial(
                _run,
                FIXMATCH_CNN._replace(images=100 * count),
                folder,
                (*_few_steps(workers), f"local.steps={count // BATCH}"),
            )
            for count in counts
        },
        turns,
    )
    rows: list[Sequence[Cell]] = [
        (
            count,
            _seconds(own).shown(3),
            spread([10 * count / run.seconds for run in own]).shown(0),
            _times(own, runs[counts[0]]).shown(),
        )
        for count, own in runs.items()
    ]
    return [
        Table(
            "scaling-images",
            "Images a client",
            f"{FIXMATCH_CNN.name}, 10 of 100 clients a round, one pass over their images in steps of {BATCH},"
            f" {workers} workers; {step_cost(FIXMATCH_CNN, folder, STEPS).told()}.",
            ("images a client", "s a round", "images/s", f"times that of {counts[0]}"),
            rows,
            {"workers": workers, **_facts("images_a_client", runs)},
        )
    ]


def against_width(folder: Path, turns: int, widths: Sequence[Sequence[int]] = WIDTHS) -> list[Table]:
    """Larger and larger networks, on one core."""
    clients = 2
    shown = {"-".join(map(str, width)): f"model.width={list(width)}" for width in widths}
    common = (*_few_steps(1), f"clients_per_round={clients}")
    costs = {name: step_cost(FIXMATCH_CNN, folder, STEPS, setting) for name, setting in shown.items()}
    runs = _runs(
        {name: partial(_run, FIXMATCH_CNN, folder, (*common, setting)) for name, setting in shown.items()}, turns
    )
    rows: list[Sequence[Cell]] = []
    reached = {}
    for name, own in runs.items():
        cost = costs[name]
        reached[name] = [cost.operations * STEPS * clients / run.seconds / 1e9 for run in own]
        rows.append(
            (
                name,
                f"{cost.parameters:,}",
                f"{cost.operations / 1e9:.2f}",
                spread([1000 * run.seconds / (STEPS * clients) for run in own]).shown(1),
                spread(reached[name]).shown(1),
            )
        )
    return [
        Table(
            "scaling-width",
            "Size of the network",
            f"FixMatch, CNNs of growing width on 28x28 images, {clients} clients, {STEPS} steps each, one core; a step "
            f"draws {cost.images} images, one pass of {cost.views} views.",
            ("channels", "parameters", "GFLOP a step", "ms a step", "GFLOP/s"),
            rows,
            {
                "parameters": {name: cost.parameters for name, cost in costs.items()},
                "operations_a_step": {name: cost.operations for name, cost in costs.items()},
                "gflops_reached": reached,
                "steps_a_round": STEPS * clients,
                **_facts("width", runs),
            },
        )
    ]


def _few_steps(workers: int, steady: int = STEADY_ROUNDS) -> tuple[str, ...]:
    rounds = steady + 2
    return (f"rounds={rounds}", f"evaluate.every={rounds}", f"local.steps={STEPS}", f"engine.workers={workers}")


def _runs(contestants: Mapping[Any, Callable[[], Run]], turns: int) -> dict[Any, list[Run]]:
    """Every contestant's run of every turn."""
    runs: dict[Any, list[Run]] = {name: [] for name in contestants}

    def seconds(name: Any) -> float:
        runs[name].append(contestants[name]())
        return runs[name][-1].seconds

    take_turns({name: partial(seconds, name) for name in contestants}, turns)
    return runs


class _Clock(Clock):
    """Notes processor time too, and how much memory was used while the workers were still there."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self._rounds = rounds
        self.marks_cpu: list[float] = []
        self.records: list[float] = []
        self.workers_memory: int | None = None

    def started(self, first: int, rounds: int) -> None:
        """The first round begins."""
        super().started(first, rounds)
        self.marks_cpu.append(process_time())

    def finished_round(self, record: Mapping[str, Any]) -> None:
        """One more."""
        super().finished_round(record)
        self.marks_cpu.append(process_time())
        self.records.append(record["seconds"])
        if record["failures"]:
            raise RuntimeError(f"clients that should train were left out: {record['failures']}")
        if record["round"] == self._rounds:
            self.workers_memory = peak_memory_below()


def _run(workload: Workload, folder: Path, settings: Sequence[str]) -> Run:
    started = perf_counter()
    parts = workload.parts(folder, *settings)
    clock = _Clock(parts.recipe.rounds)
    with tempfile.TemporaryDirectory() as place:
        engine = TimedEngine(LocalEngine(workplace_of(parts), parts.scenario, parts.recipe.engine.workers))
        with closing(engine):
            execute(parts, Path(place) / "run", clock, engine=engine)
        ended = perf_counter()
    own = peak_memory()
    whole = None if own is None or clock.workers_memory is None else own + clock.workers_memory
    return Run(
        start=clock.marks[0] - started,
        rounds=_steady(clock.marks),
        trained=clock.records[1:-1],
        end=ended - clock.marks[-1],
        server_cpu=_steady(clock.marks_cpu),
        exchange=[took for took, *_ in engine.exchanges[1:-1]],
        clients=[busy for _, busy, *_ in engine.exchanges[1:-1]],
        own_memory=own,
        all_memory=whole,
    )


def _steady(marks: Sequence[float]) -> list[float]:
    """Lengths of all rounds but the first and the last."""
    return [end - begin for begin, end in pairwise(marks[1:-1])]


def _in_fresh_process(workload: Workload, folder: Path, settings: Sequence[str]) -> Run:
    """A process of its own, because peaks of memory never fall."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(_run, workload, folder, settings).result()


def _seconds(runs: Sequence[Run]) -> Spread:
    return spread([run.seconds for run in runs])


def _times(runs: Sequence[Run], others: Sequence[Run]) -> Spread:
    return ratio([run.seconds for run in runs], [run.seconds for run in others])


def _gigabytes(sizes: Sequence[int | None]) -> str | None:
    known = [size for size in sizes if size is not None]
    return f"{max(known) / 1e9:.2f} GB" if known else None


def _facts(name: str, runs: Mapping[Any, Sequence[Run]]) -> dict[str, Any]:
    """Raw numbers of every run, in the order of `name`."""
    return {name: list(runs), "runs": [[run._asdict() for run in own] for own in runs.values()]}
