"""What a round does inside: its passes, step by step, and what its clients spend their time on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from time import perf_counter
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from semifed.assembly import Parts
from semifed.bench.rounds import TimedEngine, run_rounds
from semifed.client_round import Reply
from semifed.data.views import Views
from semifed.engines import Engine
from semifed.errors import ClientFailure
from semifed.fit import Descent
from semifed.models.network import Network

KINDS = ("steps", "views", "gates")  # what a client's time is sorted into; the rest are losses and bookkeeping


class Pass(NamedTuple):
    """One call of a network within an optimiser step."""

    images: int
    learns: bool  # gradients flow back


Trace = tuple[tuple[Pass, ...], ...]  # the passes of each step


class Watched(NamedTuple):
    """What one round did in one process."""

    clients: Trace  # all of them, one after the other
    server: Trace
    images: int  # that the clients' steps drew
    shares: Mapping[str, float]  # of the clients' time, by kind, and "rest"


def watch(parts: Parts, round_: int) -> Watched:
    """Run the recipe in this process until the end of a round, and write down what that round does.

    The rounds before it do whatever a process does only once.
    """
    watcher = _Watcher(round_)
    with watcher.watching(type(parts.method)), suppress(_SeenEnoughError):
        run_rounds(parts, 1, watcher.engine)
    _, whole, _, images = watcher.exchanges[round_ - 1]
    shares = {kind: seconds / whole for kind, seconds in watcher.seconds.items()}
    return Watched(
        tuple(watcher.steps["clients"]),
        tuple(watcher.steps["server"]),
        images,
        {**shares, "rest": 1 - sum(shares.values())},
    )


class _SeenEnoughError(Exception):
    """The rounds that follow are not watched and need not be run."""


class _Watcher:
    """Looks over the shoulder of the round loop."""

    def __init__(self, round_: int) -> None:
        self.exchanges: Sequence[tuple[float, float, int, int]] = ()
        self._wanted, self._round = round_, 0
        self.steps: dict[str, list[tuple[Pass, ...]]] = {"clients": [], "server": []}
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self._passes: list[Pass] = []
        self._place = "server"
        self._inside: str | None = None  # the kind that is being clocked

    def engine(self, engine: Engine) -> TimedEngine:
        """An engine that says when clients are at work."""
        watcher = self

        class Watching(TimedEngine):
            def ask(self, *order: Any, **more: Any) -> list[Reply | ClientFailure]:
                watcher._round += 1
                if watcher._round > watcher._wanted:
                    raise _SeenEnoughError
                watcher._now_at("clients")
                try:
                    return super().ask(*order, **more)
                finally:
                    watcher._now_at("server")

        watching = Watching(engine)
        self.exchanges = watching.exchanges
        return watching

    @contextmanager
    def watching(self, method: type) -> Iterator[None]:
        """Passes, steps and times are noted for a while."""
        clocked = [
            *((Views, view, "views") for view in ("several", "plain")),
            *((method, hook, "gates") for hook in ("prepare", "report", "keep")),
            (Network, "forward", "steps"),
            (torch.Tensor, "backward", "steps"),
            (Descent, "forget", "steps"),
            (Descent, "step", "steps"),
        ]
        with ExitStack() as at_the_end:
            at_the_end.callback(register_module_forward_pre_hook(self._note_pass).remove)
            at_the_end.enter_context(patch.object(Descent, "step", self._noted(Descent.step)))
            for owner, name, kind in clocked:
                at_the_end.enter_context(patch.object(owner, name, self._clocked(getattr(owner, name), kind)))
            yield

    def _now_at(self, place: str) -> None:
        self._place = place
        self._passes.clear()  # tests and calibration belong to no step

    def _note_pass(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, Network) and self._inside != "gates":
            self._passes.append(Pass(len(inputs[0]), module.training and torch.is_grad_enabled()))

    def _noted(self, step: Callable[..., None]) -> Callable[..., None]:
        @wraps(step)
        def noted(*given: Any) -> None:
            step(*given)
            if (
                self._passes and self._round == self._wanted
            ):  # networks that are trained together move one after the other
                self.steps[self._place].append(tuple(self._passes))
            self._passes.clear()

        return noted

    def _clocked(self, call: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @wraps(call)
        def clocked(*given: Any, **named: Any) -> Any:
            if self._round != self._wanted or self._place != "clients" or self._inside is not None:
                return call(*given, **named)
            self._inside = kind
            started = perf_counter()
            try:
                return call(*given, **named)
            finally:
                self.seconds[kind] += perf_counter() - started
                self._inside = None

        return clocked
