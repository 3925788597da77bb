"""The same rounds by semifed, by Flower's simulation, by pfl-research, and by the naive loop of the papers' code."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from semifed.assembly import Parts
from semifed.bench.measuring import Cell, Table, ratio, spread, take_turns
from semifed.bench.naive import naive_rounds
from semifed.bench.plain_loop import Job, Lap
from semifed.bench.rounds import run_rounds
from semifed.bench.work import work_of
from semifed.bench.workload import FEDAVG_DENSE, FIXMATCH_CNN, MANY_SMALL, SAGE_NETWORK, Workload

STEADY = 2  # rounds of a turn that count
NAIVE_CLIENTS = ", naive clients"
NOTES = (
    "A round's seconds are the median of a turn's steady rounds: the first round of each turn and whatever comes "
    "before it (workers, Ray) are left out and are in the JSON file. Ratios are taken turn by turn.",
    "semifed's rounds are those of its real round loop, checkpoints included; nobody else writes any.",
    "Flower's and pfl's clients are plain PyTorch loops on semifed's batches and views (of many steps in one go) with "
    "its SGD, in processes that keep freed memory as its own do: what is left to compare are engines, and our kernels "
    "for batch norm beside PyTorch's own in the same network.",
    "The rows of naive clients are Flower and pfl with the naive loop's clients, whose processes give freed memory "
    "back: what a user of theirs runs who takes over a paper's code.",
    "Maps lie channels last, which is quick on processors, but for naive clients and the naive loop: these leave them "
    "as PyTorch makes them.",
    "Flower's client app builds its network for each message, as Flower's own examples do; its process keeps the data.",
    "pfl trains one client after the other in one process; several processes must be started by torchrun. It does not "
    "average the statistics of batch norm, which are no parameters, so it has a little less to do.",
    "Only an idle machine compares engines of several processes: Linux may share busy cores between sessions, of which "
    "some engines start their own.",
    "The naive loop augments image by image with Pillow, makes new data loaders, an optimiser of PyTorch's and deep "
    "copies for each client, and runs in one process; loader processes would need cores of their own.",
)


class Contestant(NamedTuple):
    """One row of the table."""

    name: str
    cores: int
    rounds: Callable[[Parts, int], Lap]  # so many steady ones
    needs: tuple[str, ...] = ()  # packages
    install: str = ""

    def installed(self) -> bool:
        """Whether it can run here."""
        return all(find_spec(package) is not None for package in self.needs)


def against_peers(folder: Path, turns: int, workers: int) -> list[Table]:
    """Clients that train for seconds, where networks decide, many that train for moments, where engines do, many with
    large networks, where what is sent counts too; and a paper's own network beside the naive loop alone."""
    everyone = contestants(workers)
    tables = [compared(load, folder, turns, everyone, STEADY) for load in (FIXMATCH_CNN, MANY_SMALL, FEDAVG_DENSE)]
    code_alone = [one for one in everyone if not one.needs]
    return [*tables, compared(SAGE_NETWORK, folder, turns, code_alone, STEADY)]


def compared(workload: Workload, folder: Path, turns: int, everyone: Sequence[Contestant], steady: int) -> Table:
    """Contestants on one workload, semifed first."""
    parts = workload.parts(folder)
    laps: dict[str, list[Lap]] = {one.name: [] for one in everyone}

    def turn(one: Contestant) -> float:
        laps[one.name].append(one.rounds(parts, steady))
        return statistics.median(laps[one.name][-1].seconds)

    seconds = take_turns({one.name: partial(turn, one) for one in everyone if one.installed()}, turns)
    ours = [one.name for one in everyone if one.name.startswith("semifed")]
    job, work = Job.of(parts), work_of(workload, folder)
    done = {name: [(lap.steps, lap.images) for lap in told] for name, told in laps.items() if told}
    unlike = [name for name, counts in done.items() if set(counts) != set(done[ours[0]])]
    return Table(
        name=f"peers: {workload.name}",
        title=f"Against peers on the same work: {workload.name}",
        work=(
            f"a round of {parts.recipe.cohort_size} clients, {job.steps} steps each of {job.labelled} labelled "
            f"{f'and up to {job.unlabelled} unlabelled images, weak and strong' if job.unlabelled else 'images, weak'} "
            f"views: {work.told()}; one thread a process"
        ),
        header=("contestant", "cores", "seconds a round", *(f"{name}: times as fast" for name in ours)),
        rows=[_row(one, seconds, ours) for one in everyone],
        facts={
            "work": work._asdict(),
            **{
                name: {"seconds": seconds[name], **_columns(told), "ratios": _ratios(seconds, name, ours)}
                for name, told in laps.items()
                if told
            },
        },
        notes=(*NOTES, *(f"{name} did another number of steps or images: its row does not count." for name in unlike)),
    )


def contestants(workers: int) -> list[Contestant]:
    """Everyone, semifed first."""
    flower, pfl = "pip install 'semifed[flower]'", "pip install 'pfl[pytorch]==0.6.0'"
    several = [Contestant(_plural("semifed, {} worker", workers), workers, partial(semifed_rounds, workers=workers))]
    alone = Contestant("semifed, 1 worker", 1, partial(semifed_rounds, workers=1))
    return [
        *(several if workers > 1 else []),
        alone,
        *(
            Contestant(
                _plural("Flower simulation, {} Ray actor", workers) + clients,
                workers,
                partial(_flower_rounds, workers=workers, naive=bool(clients)),
                ("flwr", "ray"),
                flower,
            )
            for clients in ("", NAIVE_CLIENTS)
        ),
        *(
            Contestant(
                _plural("pfl-research, {} process", processes) + clients,
                processes,
                partial(_pfl_rounds, processes=processes, naive=bool(clients)),
                ("pfl",),
                pfl,
            )
            for processes in sorted({workers, 1}, reverse=True)
            for clients in (("", NAIVE_CLIENTS) if processes == workers else ("",))
        ),
        Contestant("naive loop", 1, naive_rounds),
    ]


def _plural(text: str, number: int) -> str:
    ending = "" if number == 1 else "es" if text.endswith("s") else "s"
    return text.format(number) + ending


def _row(one: Contestant, seconds: Mapping[str, Sequence[float]], ours: Sequence[str]) -> list[Cell]:
    if one.name not in seconds:
        return [one.name, one.cores, f"not installed: {one.install}", *(None for _ in ours)]
    shown = [None if name == one.name else ratio(seconds[one.name], seconds[name]).shown() for name in ours]
    return [one.name, one.cores, spread(seconds[one.name]).shown(), *shown]


def _ratios(seconds: Mapping[str, Sequence[float]], name: str, ours: Sequence[str]) -> dict[str, Any]:
    return {own: ratio(seconds[name], seconds[own])._asdict() for own in ours if own != name}


def _columns(laps: Sequence[Lap]) -> dict[str, list[Any]]:
    """All turns, field by field."""
    names = {"seconds": "steady_rounds", "first": "first_round", "steps": "steps_a_round", "images": "images_a_round"}
    return {names.get(field, field): [getattr(lap, field) for lap in laps] for field in Lap._fields}


def semifed_rounds(parts: Parts, steady: int, workers: int) -> Lap:
    """Some rounds of semifed's own loop, one before them, and one after them that is tested."""
    count = steady + 2
    tests = parts.recipe.evaluate.model_copy(update={"every": count})
    recipe = parts.recipe.model_copy(update={"rounds": count, "evaluate": tests})
    run = run_rounds(replace(parts, recipe=recipe), workers)
    first, *middle, _ = run.rounds
    return Lap([one.whole for one in middle], first.whole, run.start_up, first.steps, first.images)


def _flower_rounds(parts: Parts, steady: int, workers: int, naive: bool) -> Lap:
    from semifed.bench.plain_flower import flower_rounds  # Flower is optional

    return flower_rounds(parts, steady, workers, naive=naive)


def _pfl_rounds(parts: Parts, steady: int, processes: int, naive: bool) -> Lap:
    from semifed.bench import plain_pfl  # pfl is optional

    if processes > 1:
        return plain_pfl.torchrun_rounds(parts, steady, processes, naive=naive)
    return plain_pfl.pfl_rounds(parts, steady, naive=naive)
