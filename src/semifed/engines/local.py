"""Clients on this machine: in this process, or in persistent one-thread worker processes.

Replies are put in client order, so the result does not depend on the number of workers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from semifed.client_round import Held, Reply, Task, Workplace, too_few_images
from semifed.data.scenario import Scenario
from semifed.engines.pool import Job, Pool
from semifed.engines.shared_memory import Spool
from semifed.engines.worker import attempt
from semifed.errors import ClientFailure
from semifed.held import HeldStore
from semifed.method import payload_types
from semifed.net import HOME
from semifed.payloads import Prediction
from semifed.predictions import BATCH
from semifed.process import available_cores
from semifed.shared_passes import Helpers
from semifed.wire import Weights, from_arrays, to_arrays


class LocalEngine:
    """Runs clients in this process (one worker) or in a pool."""

    def __init__(
        self, build: Callable[[], Workplace], scenario: Scenario, workers: int = 0, timeout: float | None = None
    ) -> None:
        self.left: dict[int, int] = {}
        self._held: dict[int, Held] = {}  # what clients were left with in this round; of earlier ones it is on disk
        self._round: int | None = None
        self._store: HeldStore | None = None
        self._scenario = scenario
        self._place = build()
        device = self._place.net.device
        self.workers = workers or (available_cores() if device == HOME else 1)
        self._images = scenario.dataset.x_train.to(device)  # on a GPU they stay there, and views are drawn there
        self._pool: Pool | None = None
        if self.workers > 1 or timeout is not None:  # only another process can be stopped when it takes too long
            self._pool = Pool(build, scenario.dataset.x_train, self.workers, timeout)

    def begin(self, run: str | None, store: HeldStore) -> None:
        """What clients hold is read from where each round's checkpoint left it; without a store it stays in memory."""
        self._store = store

    def ask(
        self, round_: int, lr: float, clients: Sequence[int], down: Any, own: Mapping[int, Any] | None = None
    ) -> list[Reply | ClientFailure]:
        """One round of the given clients, each starting from what it held."""
        if round_ != self._round and self._store is not None:
            self._held.clear()
        self._round = round_
        answers: dict[int, Reply | ClientFailure] = {}
        jobs: list[Job] = []
        for client in clients:
            data = self._scenario.client(client)._replace(images=self._images)
            if reason := too_few_images(data):
                answers[client] = ClientFailure(client, reason)
            else:
                jobs.append((Task(round_, client, lr, self._held_by(client)), data))
        if self._pool is not None:
            answers |= self._pool.run(jobs, down, own or {}, self._place.method)
        else:
            spool = Spool()
            for task, data in jobs:
                answer = attempt(self._place, task, (own or {}).get(task.client, down), data)
                if isinstance(answer, Reply):
                    kept = from_arrays(type(answer.up), spool.keep(to_arrays(answer.up)))
                    answer = answer._replace(up=kept)
                answers[task.client] = answer
        return [answers[client] for client in clients]

    def accept(self, round_: int, replies: Sequence[Reply]) -> None:
        """Remember what these clients hold."""
        for reply in replies:
            if reply.held is not None:
                self._held[reply.record.client] = reply.held
            self.left[reply.record.client] = round_

    def resume(self, left: Mapping[int, int]) -> None:
        """Go on from what a checkpoint holds."""
        self.left = dict(left)

    def _held_by(self, client: int) -> Held | None:
        if client in self._held or self._store is None or client not in self.left:
            return self._held.get(client)
        *_, kept_type = payload_types(self._place.method)
        return self._store.load(client, self.left[client], kept_type)

    def predict(self, weights: Weights, images: Tensor) -> Prediction | None:
        """By all workers at once, where there are several and more images than one of them takes at a time."""
        if self._pool is None or self.workers == 1 or len(images) <= BATCH:
            return None
        return self._pool.predict(weights, images, self._scenario.views)

    def helpers(self) -> Helpers | None:
        """The workers, where there are several."""
        return None if self._pool is None or self.workers == 1 else self._pool

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()
