"""How much work a round of a workload is: a number of seconds says nothing without it."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torch.utils.flop_counter import FlopCounterMode

from semifed.assembly import workplace_of
from semifed.bench.replaying import Replayer
from semifed.bench.watching import Watched, watch
from semifed.bench.workload import Workload


class Work(NamedTuple):
    """What a steady round does, clients and server together."""

    images: int  # that the clients' steps drew
    steps: int  # of optimisers
    passes: int  # calls of networks within them, those of teachers too
    views: int  # images that went through networks in these passes
    gflop: float  # of these passes, backwards too

    def told(self) -> str:
        """The work in a line.

        >>> Work(480, 10, 20, 1120, 12.34).told()
        '480 images drawn, 20 passes of 1,120 views in 10 steps, 12.3 GFLOP'
        """
        return (
            f"{self.images:,} images drawn, {self.passes:,} passes of {self.views:,} views in {self.steps:,} steps, "
            f"{self.gflop:,.1f} GFLOP"
        )


@cache
def work_of(load: Workload, folder: Path) -> Work:
    """Of a steady round, which is watched for it."""
    return work_in(watch_steady(load, folder), load, folder)


def watch_steady(load: Workload, folder: Path, rounds: int = 4) -> Watched:
    """The second of a few rounds: some methods do in their first, or in a run of one, what they never do again."""
    return watch(load.parts(folder, f"rounds={rounds}", f"evaluate.every={rounds}"), round_=2)


def work_in(watched: Watched, load: Workload, folder: Path) -> Work:
    """Of a round that was watched; steps of a kind are computed once."""
    steps = (*watched.clients, *watched.server)
    kinds = Counter(steps)
    replayer = Replayer(workplace_of(load.parts(folder))(), load.shape, [(step,) for step in kinds])
    operations = 0
    for phase, count in enumerate(kinds.values()):
        with FlopCounterMode(display=False) as counter:
            replayer.replay(phase)
        operations += count * counter.get_total_flops()
    passes = [one for step in steps for one in step]
    return Work(watched.images, len(steps), len(passes), sum(one.images for one in passes), operations / 1e9)
