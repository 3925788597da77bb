"""Rounds of a workload through the real round loop, with a clock on the exchange with the clients."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from rich.console import Console
from torch import Tensor

from semifed.assembly import Parts, workplace_of
from semifed.client_round import Reply
from semifed.engines import Engine
from semifed.engines.local import LocalEngine
from semifed.errors import ClientFailure
from semifed.held import HeldStore
from semifed.payloads import Prediction
from semifed.progress import Silent
from semifed.run import execute
from semifed.shared_passes import Helpers
from semifed.wire import Weights


class RoundTime(NamedTuple):
    """Where one round's seconds went."""

    whole: float
    exchange: float  # until all clients had answered
    clients: float  # what their own rounds took, added up
    steps: int
    images: int


class Run(NamedTuple):
    """A run on the clock."""

    start_up: float  # seconds before its first round
    rounds: list[RoundTime]


class Clock(Silent):
    """Notes when each round ended, its checkpoint included."""

    def __init__(self) -> None:
        super().__init__(Console(stderr=True))
        self.marks: list[float] = []

    def started(self, first: int, rounds: int) -> None:
        """Here begins the first round."""
        self.marks.append(perf_counter())

    def finished_round(self, record: Mapping[str, Any]) -> None:
        """Here ends a round."""
        self.marks.append(perf_counter())


class TimedEngine:
    """An engine that notes how long its clients took, and what they did."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.left = engine.left
        self.exchanges: list[tuple[float, float, int, int]] = []

    def begin(self, run: str | None, store: HeldStore) -> None:
        """Passed on."""
        self._engine.begin(run, store)

    def ask(
        self, round_: int, lr: float, clients: Sequence[int], down: Any, own: Mapping[int, Any] | None = None
    ) -> list[Reply | ClientFailure]:
        """The engine's answers."""
        started = perf_counter()
        answers = self._engine.ask(round_, lr, clients, down, own)
        took = perf_counter() - started
        records = [answer.record for answer in answers if isinstance(answer, Reply)]
        busy, steps, images = (sum(getattr(one, key) for one in records) for key in ("seconds", "steps", "images"))
        self.exchanges.append((took, busy, steps, images))
        return answers

    def accept(self, round_: int, replies: Sequence[Reply]) -> None:
        """Passed on."""
        self._engine.accept(round_, replies)
        self.left = self._engine.left

    def resume(self, left: Mapping[int, int]) -> None:
        """Passed on."""
        self._engine.resume(left)
        self.left = self._engine.left

    def predict(self, weights: Weights, images: Tensor) -> Prediction | None:
        """Passed on."""
        return self._engine.predict(weights, images)

    def helpers(self) -> Helpers | None:
        """Passed on."""
        return self._engine.helpers()

    def close(self) -> None:
        """Passed on."""
        self._engine.close()


def run_rounds(parts: Parts, workers: int, timed: Callable[[Engine], TimedEngine] = TimedEngine) -> Run:
    """A whole run; its last round is tested, if the recipe asks for no other."""
    began, clock = perf_counter(), Clock()
    engine = timed(LocalEngine(workplace_of(parts), parts.scenario, workers))
    try:
        with tempfile.TemporaryDirectory() as folder:
            execute(parts, Path(folder) / "run", clock, engine=engine)
    finally:
        engine.close()
    whole = (later - earlier for earlier, later in pairwise(clock.marks))
    rounds = [RoundTime(seconds, *exchange) for seconds, exchange in zip(whole, engine.exchanges, strict=True)]
    return Run(clock.marks[0] - began, rounds)
