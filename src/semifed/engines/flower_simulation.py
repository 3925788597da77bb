"""Flower's simulation on Ray: our round loop as its server app, and nodes that act as any client."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from semifed.engines.flower import FlowerEngine, client_app  # it tells Flower to keep quiet before that is imported

# isort: split
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from semifed.assembly import prepare_run
from semifed.data.scenario import Scenario
from semifed.engines.letters import Letter, Setting, answer
from semifed.errors import UserError
from semifed.held import HeldStore
from semifed.methods import AnyMethod

START_ATTEMPTS = 3  # of Ray, on a busy machine
T = TypeVar("T")


@lru_cache(maxsize=1)
def _scenario(setting: Setting) -> Scenario:
    """A simulated client takes its part of the data itself; all of a process share them."""
    return prepare_run(setting.parsed()).scenario


def simulated_client(store: str) -> ClientApp:
    """The app that acts as any client of a simulation; what they hold lies in one directory."""

    def act(letter: Letter, context: Context) -> Letter:
        data = _scenario(Setting.of(letter.facts)).client(int(context.node_config["partition-id"]))
        return answer(letter, data, HeldStore(Path(store)), share="all")

    return client_app(act)


def simulate(
    rounds: Callable[[FlowerEngine], T],
    setting: Setting,
    method: AnyMethod,
    *,
    clients: int,
    workers: int,
    timeout: float | None,
    store: Path,
) -> T:
    """Run the round loop as a server app of a Flower simulation, with so many one-thread workers."""
    from flwr import simulation  # it loads Ray, which only simulations need

    outcome: list[T] = []
    failure: list[BaseException] = []
    over = threading.Event()
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        watched: Any = _Watched(grid, over)
        try:
            while len(list(watched.get_node_ids())) < clients:  # nodes register while the server app starts
                time.sleep(0.1)
            outcome.append(rounds(FlowerEngine(watched, setting, method, timeout=timeout, share="all")))
        except BaseException as error:  # Flower would print it and go on
            failure.append(error)

    os.environ["OMP_NUM_THREADS"] = "1"
    logging.getLogger("flwr").setLevel(logging.ERROR)  # our own lines tell how far a run is
    backend: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    with ray_started(workers):
        try:
            run_simulated(simulation.run_simulation, app, simulated_client(str(store)), clients, backend)
        finally:
            over.set()
    if failure:
        raise failure[0]
    if not outcome:
        raise UserError("Flower's simulation ended before its first round")
    return outcome[0]


class _Watched:
    """A grid that says when its simulation is over: the server app's thread would wait for its clients for ever."""

    def __init__(self, grid: Grid, over: threading.Event) -> None:
        self._grid, self._over = grid, over

    def __getattr__(self, name: str) -> Any:
        if self._over.is_set():
            raise UserError("Flower's simulation ended before the run did")
        return getattr(self._grid, name)


@contextmanager
def ray_started(workers: int) -> Iterator[None]:
    """Ray with so many workers, ended afterwards. Flower would start it itself, once, and Ray gives up after 30 s."""
    import ray

    told_to_end = signal.getsignal(signal.SIGTERM)
    path = os.pathsep.join(sys.path)  # workers find what this process finds
    for left in reversed(range(START_ATTEMPTS)):
        try:
            ray.init(
                num_cpus=workers,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"env_vars": {"PYTHONPATH": path}},
            )
            break
        except Exception as error:
            ray.shutdown()
            if not left:
                raise UserError(f"Ray, which Flower's simulation runs on, does not start: {error}") from None
    if threading.current_thread() is threading.main_thread():  # else Ray did not touch it
        signal.signal(signal.SIGTERM, told_to_end)  # Ray's own would wait for the server app's thread
    try:
        yield
    finally:
        ray.shutdown()


def run_simulated(run: Callable[..., None], app: ServerApp, client: ClientApp, clients: int, backend: Any) -> None:
    """Flower's simulation of a server app and its clients, on the Ray that was started."""
    try:
        run(app, client, clients, backend_config=backend)
    except RuntimeError as error:
        raise UserError(f"Flower's simulation did not work: {_first_cause(error)}") from None


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
