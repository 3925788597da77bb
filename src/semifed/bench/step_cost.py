"""What one step of FixMatch costs: its images, its views, its floating-point operations."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from semifed.assembly import workplace_of
from semifed.bench.workload import Workload
from semifed.client_round import Reply
from semifed.engines.local import LocalEngine
from semifed.errors import ClientFailure
from semifed.progress import Silent
from semifed.run import execute


class StepCost(NamedTuple):
    """What a step of FixMatch is made of."""

    parameters: int
    operations: int  # of floating point, forwards and backwards
    images: int  # that a step draws
    views: int  # of its one pass: weak ones of all images, strong ones of those without a label

    def told(self) -> str:
        """The work of a step in a line."""
        return f"a step draws {self.images} images, one pass of {self.views} views, {self.operations / 1e9:.2f} GFLOP"


class _CountingEngine(LocalEngine):
    """Counts what its clients compute."""

    operations = 0

    def ask(
        self, round_: int, lr: float, clients: Sequence[int], down: Any, own: Mapping[int, Any] | None = None
    ) -> list[Reply | ClientFailure]:
        """The engine's answers."""
        with FlopCounterMode(display=False) as counter:
            answers = super().ask(round_, lr, clients, down, own)
        self.operations += counter.get_total_flops()
        return answers


def step_cost(workload: Workload, folder: Path, steps: int, *settings: str) -> StepCost:
    """A client is trained for so many steps, and what it computes is counted."""
    parts = workload.parts(folder, *settings, "rounds=1", f"local.steps={steps}", "clients_per_round=1")
    workplace = workplace_of(parts)
    engine = _CountingEngine(workplace, parts.scenario, 1)
    with tempfile.TemporaryDirectory() as place:
        execute(parts, Path(place) / "run", Silent(Console(stderr=True)), engine=engine)
    parameters = sum(weight.numel() for weight in workplace().net.network.parameters())
    labelled = parts.recipe.local.batch
    unlabelled = labelled * parts.recipe.local.unlabelled_ratio
    return StepCost(parameters, engine.operations // steps, labelled + unlabelled, labelled + 2 * unlabelled)
