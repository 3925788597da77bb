"""Persistent one-thread worker processes that act as clients, and between exchanges as testers and helpers.

Images and weights lie in shared memory; an order is a client's positions and a few numbers. The largest clients start
first; where many are left a worker has its next one waiting, so that it is never idle between two small ones.
"""

import multiprocessing as mp
import pickle
import signal
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as torch_mp
from torch import Tensor

from semifed.client_round import Reply, Task, Workplace
from semifed.data.client import ClientData
from semifed.data.views import Views
from semifed.engines.lessons import Learnt, Lesson, Slopes, view_name
from semifed.engines.packing import pack_held, unpack_held, unpack_record
from semifed.engines.shared_memory import Layout, SharedBuffer, Spool, in_shared_memory, read_buffer
from semifed.engines.worker import Answer, Crash, Exam, Order, serve
from semifed.errors import ClientFailure
from semifed.method import payload_types
from semifed.methods import AnyMethod
from semifed.payloads import Prediction
from semifed.predictions import BATCH, joined
from semifed.shared_passes import Said
from semifed.wire import Weights, from_arrays, to_arrays

ATTEMPTS = 2  # a client whose worker died is redone once
START_ATTEMPTS = 3  # workers that die before their first client, one after the other, are no accident
AHEAD = 1.0  # a client may wait behind another while what is left fills all workers so many times as long
LIGHT = 2**15 if sys.platform == "linux" else 0  # bytes of an order that surely fit in a pipe
Job = tuple[Task, ClientData]


class _Lost(NamedTuple):
    """An answer whose memory went with the worker, which died amid the next client."""


class _Queue:
    """Clients still to be handed out, the largest first, and how many images they hold together."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = deque(sorted(jobs, key=lambda job: (-_size(job), job[0].client)))
        self.images = sum(map(_size, jobs))

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def first(self) -> Job:
        """Who is next."""
        return self._jobs[0]

    def drop_first(self) -> None:
        """It has been handed out."""
        self.images -= _size(self._jobs.popleft())

    def put_back(self, *jobs: Job) -> None:
        """They are next again, in this order."""
        self._jobs.extendleft(reversed(jobs))
        self.images += sum(map(_size, jobs))


class Pool:
    """Persistent workers; a dead one is replaced and its client redone once."""

    def __init__(self, build: Callable[[], Workplace], images: Tensor, workers: int, timeout: float | None) -> None:
        self._context = torch_mp.get_context("forkserver")
        mp.set_forkserver_preload(["semifed.run"])
        self._build = build
        self._images = in_shared_memory(images)
        self._timeout = timeout
        self._down = SharedBuffer()
        self._tested = SharedBuffer()
        self._lesson = SharedBuffer()
        self._stillborn = 0
        self._ticket = 0  # of the last lesson
        self._losses = 0  # lessons in a row in which a worker died
        _start_fork_server()
        self._workers = [self._start() for _ in range(workers)]

    def run(
        self, jobs: list[Job], down: Any, own: Mapping[int, Any], method: AnyMethod
    ) -> dict[int, Reply | ClientFailure]:
        """All jobs, largest client first."""
        _, _, up_type, kept_type = payload_types(method)
        (common, *others), fresh = self._down.write(to_arrays(down), *map(to_arrays, own.values()))
        layouts = defaultdict(lambda: common, zip(own, others, strict=True))
        if fresh:
            for worker in self._workers:
                worker.has_down = False
        queue = _Queue(jobs)
        deaths: Counter[int] = Counter()
        spool = Spool()
        answers: dict[int, Reply | ClientFailure] = {}
        while len(answers) < len(jobs):
            self._hand_out(queue, layouts)
            for worker in self._with_news():
                task, data = worker.take_job()
                answer = worker.answer()
                if isinstance(answer, Crash):
                    raise answer.error(f"client {task.client} failed in round {task.round}")
                self._stillborn = 0
                if isinstance(answer, Answer):
                    arrays = spool.keep_packed(worker.ups[answer.turn], answer.layout)
                    self._hand_out(queue, layouts)  # the worker need not wait until its answer is unpacked
                    held = unpack_held(answer.held, kept_type)
                    answers[task.client] = Reply(from_arrays(up_type, arrays), held, unpack_record(answer.record))
                elif isinstance(answer, ClientFailure):
                    answers[task.client] = answer
                elif answer is None and worker.process.is_alive():
                    answers[task.client] = ClientFailure(task.client, f"no answer within {self._timeout:g} s")
                    self._replace(worker, queue)
                else:
                    if isinstance(answer, _Lost) and worker.jobs:  # this client was done, the next one killed it
                        queue.put_back((task, data))
                        task, data = worker.take_job()
                    self._replace(worker, queue)
                    deaths[task.client] += 1
                    if deaths[task.client] < ATTEMPTS:
                        queue.put_back((task, data))
                    else:
                        reason = f"its worker process died {ATTEMPTS} times"
                        answers[task.client] = ClientFailure(task.client, reason)
        return answers

    def predict(self, weights: Weights, images: Tensor, views: Views) -> Prediction:
        """What a model says of images, each worker of some of them: whole batches, as one process would have them."""
        (layout,), _ = self._tested.write(weights)
        share = BATCH * -(-len(images) // (BATCH * len(self._workers)))
        parts = in_shared_memory(images).split(share)
        exams = [Exam(part, views, self._tested.memory, layout) for part in parts]
        for worker, exam in zip(self._workers, exams, strict=False):  # there may be fewer batches than workers
            worker.tell(exam)
        return joined([self._sat(number, exam) for number, exam in enumerate(exams)])

    def features(self, weights: Weights, views: Sequence[Tensor]) -> Said | None:
        """What the backbone says of views in training, each worker of some of them; None where one died."""
        if self._losses >= START_ATTEMPTS:  # it is no accident, and the run can do without
            return None
        parts = self._parts(views)
        named = [{view_name(number): view for number, view in enumerate(part)} for part in parts]
        layouts, fresh = self._lesson.write(*(weights | own for own in named))
        orders = []
        for number, worker in enumerate(self._workers):
            worker.has_lesson = worker.has_lesson and not fresh
            if number < len(parts):
                memory = None if worker.has_lesson else self._lesson.memory
                orders.append(Lesson(memory, layouts[number], len(parts[number])))
                worker.has_lesson = True
        self._ticket += 1
        if (said := self._together(orders)) is None:
            return None
        return Said([torch.from_numpy(features) for part in said for features in part], self._ticket)

    def gradients(self, ticket: int, slopes: Sequence[Tensor]) -> list[Weights] | None:
        """Of the weights of the views last asked about, given those of features; None where a worker died."""
        if ticket != self._ticket:
            return None
        self._ticket += 1  # workers forget
        told = self._together([Slopes([slope.numpy() for slope in part]) for part in self._parts(slopes)])
        if told is None:
            return None
        self._losses = 0  # a whole lesson
        found = zip(self._workers, told, strict=False)
        return [read_buffer(worker.gradients, layout) for worker, one in found for layout in one.layouts]

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.end()

    def _sat(self, number: int, exam: Exam) -> Prediction:
        """What came of an exam; where its worker died another one sits it again."""
        for _ in range(ATTEMPTS):
            worker = self._workers[number]
            wait([worker.pipe])
            answer = worker.answer()
            if isinstance(answer, Crash):
                raise answer.error("a test failed")
            if answer is not None:
                return Prediction(*map(torch.from_numpy, answer))
            self._replace(worker, _Queue([]))
            self._workers[number].tell(exam)
        raise RuntimeError(f"a test failed: its worker process died {ATTEMPTS} times")

    def _parts(self, views: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """As many each, one after the other."""
        share = -(-len(views) // len(self._workers))
        return [views[first : first + share] for first in range(0, len(views), share)]

    def _together(self, orders: Sequence[Lesson | Slopes]) -> list[Any] | None:
        """Answers of the first workers to an order each; None where one of them died, and then it is replaced."""
        asked = self._workers[: len(orders)]
        for worker, order in zip(asked, orders, strict=True):
            worker.tell(order)
        answers = []
        for worker in asked:  # all of them, whoever died: nobody's answer may lie there when the next order comes
            wait([worker.pipe])
            answer = worker.answer()
            if isinstance(answer, Crash):
                raise answer.error("a pass of the server's training failed")
            if answer is None or isinstance(answer, _Lost):
                self._replace(worker, _Queue([]))
            else:
                answers.append(answer)
        if len(answers) == len(asked):
            return answers
        self._losses += 1
        return None

    def _start(self) -> "_Worker":
        return _Worker(self._context, self._build, self._images)

    def _replace(self, worker: "_Worker", queue: _Queue) -> None:
        """A new worker; whom the old one had not come to waits for another."""
        worker.end()
        queue.put_back(*worker.jobs)
        self._workers[self._workers.index(worker)] = self._start()

    def _hand_out(self, queue: _Queue, layouts: Mapping[int, Layout]) -> None:
        """A client for every idle worker; where many are left, another one that it need not wait for."""
        for waiting, worker in product((0, 1), list(self._workers)):
            if queue and len(worker.jobs) == waiting and (not waiting or self._may_wait(queue, worker)):
                try:
                    worker.send(queue.first, self._down.memory, layouts[queue.first[0].client])
                    queue.drop_first()
                except (EOFError, OSError):  # it died while idle: no client is lost
                    if worker.jobs:  # but not this one; its silence will be noticed
                        continue
                    if not worker.ready:
                        self._stillborn += 1
                    if self._stillborn >= START_ATTEMPTS:
                        raise RuntimeError(f"{START_ATTEMPTS} worker processes died while starting") from None
                    self._replace(worker, queue)

    def _may_wait(self, queue: _Queue, worker: "_Worker") -> bool:
        """Whether the next client may be given to a busy worker: nobody else can take it from there."""
        size = _size(queue.first)
        lasts = AHEAD * len(self._workers) * (size + _size(worker.jobs[0]))
        return _light(queue.first) and queue.images - size >= lasts

    def _with_news(self) -> list["_Worker"]:
        """Busy workers that answered, died, or ran out of time; waits until there is one."""
        busy = [worker for worker in self._workers if worker.jobs]
        if not busy:  # all of them died while idle; waiting for nobody would last for ever
            return []
        if self._timeout is None:
            news = wait([worker.pipe for worker in busy])
            return [worker for worker in busy if worker.pipe in news]
        patience = min(worker.since for worker in busy) + self._timeout - time.monotonic()
        news = wait([worker.pipe for worker in busy], max(0.0, patience))
        now = time.monotonic()
        return [worker for worker in busy if worker.pipe in news or now >= worker.since + self._timeout]


class _Worker:
    """One process, the client it is busy with, and perhaps the next one."""

    def __init__(self, context: Any, build: Callable[[], Workplace], images: Tensor) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, build, images), daemon=True)
        self.process.start()
        theirs.close()
        self.ready = False
        self.has_down = self.has_lesson = False
        self.gradients = torch.empty(0, dtype=torch.uint8)
        self.ups = [torch.empty(0, dtype=torch.uint8)] * 2
        self.jobs: deque[Job] = deque()
        self.since = 0.0  # when it could begin with the first of them

    def send(self, job: Job, memory: Tensor, layout: Layout) -> None:
        """Give the worker a client to be."""
        self._await_start()
        task, data = job
        held = None if task.held is None else pack_held(task.held)
        positions = (data.labelled.numpy(), data.labels.numpy(), data.unlabelled.numpy())
        told = data.classes if data.classes is None else data.classes.numpy()
        buffer = None if self.has_down else memory
        order = Order(task._replace(held=None), held, *positions, told, data.views, buffer, layout)
        self.pipe.send(order)
        self.has_down = True
        if not self.jobs:
            self.since = time.monotonic()
        self.jobs.append(job)

    def tell(self, order: Exam | Lesson | Slopes) -> None:
        """Give an idle worker something else to do; if it is dead, its silence will be noticed."""
        with suppress(EOFError, OSError):
            self._await_start()
            self.pipe.send(order)

    def take_job(self) -> Job:
        """What it was busy with; it goes on with the next one, if it has any."""
        self.since = time.monotonic()
        return self.jobs.popleft()

    def answer(self) -> Any:
        """What it wrote, or None if it is dead or late."""
        try:
            written = self.pipe.recv_bytes() if self.pipe.poll() else None
        except (EOFError, OSError):
            self.process.join()
            return None
        try:
            answer: Any = None if written is None else pickle.loads(written)
        except (EOFError, OSError, mp.ProcessError):  # memory shared for the first time is fetched from the worker
            self.process.join()
            return _Lost()
        if isinstance(answer, Answer) and answer.up is not None:
            self.ups[answer.turn] = answer.up
        if isinstance(answer, Learnt) and answer.memory is not None:
            self.gradients = answer.memory
        return answer

    def _await_start(self) -> None:
        if not self.ready:
            first = self.pipe.recv()
            if isinstance(first, Crash):
                raise first.error("a worker process could not start")
            self.ready = True

    def end(self) -> None:
        """Stop the process, whatever it does: it holds nothing that is not here too."""
        self.pipe.close()
        self.process.kill()
        self.process.join()


def _size(job: Job) -> int:
    _, data = job
    return len(data.unlabelled) + len(data.labelled)


def _light(job: Job) -> bool:
    """Whether a pipe takes the order at once: nobody reads it while the worker is busy."""
    task, data = job
    parts = (data.labelled, data.labels, data.unlabelled, data.classes)
    positions = sum(part.nbytes for part in parts if part is not None)
    held = 0 if task.held is None else sum(array.nbytes for array in to_arrays(task.held).values())
    return held + positions <= LIGHT


def _start_fork_server() -> None:
    """Workers and the server they are forked from never see Ctrl-C, which goes to all processes of a terminal.

    A blocked signal stays blocked in whatever a process starts; here nothing else is started meanwhile.
    """
    resource_tracker.ensure_running()  # the fork server would start it, and that unblocks the signal
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
