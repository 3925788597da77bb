"""A worker process: what it is told, what it answers, and how it acts as one client after the other."""

import multiprocessing as mp
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor

from semifed.client_round import ClientRecord, Reply, Task, Workplace, client_round
from semifed.data.client import ClientData
from semifed.data.views import Views
from semifed.engines.lessons import Lesson, Pupil, Slopes
from semifed.engines.packing import PackedHeld, pack_held, pack_record, unpack_held
from semifed.engines.shared_memory import Layout, SharedBuffer, read_buffer
from semifed.errors import ClientFailure, UserError
from semifed.fit import Diverged
from semifed.method import payload_types
from semifed.predictions import predictions
from semifed.process import settle
from semifed.wire import from_arrays, to_arrays


class Order(NamedTuple):
    """A client to be; positions are NumPy so that they are copied, not shared."""

    task: Task  # without what is held
    held: PackedHeld | None
    labelled: Any
    labels: Any
    unlabelled: Any
    classes: Any
    views: Views
    down: Tensor | None  # the shared buffer, when it is a new one
    layout: Layout


class Answer(NamedTuple):
    """What a worker writes back."""

    up: Tensor | None  # the worker's shared buffer, when it is a new one
    turn: int  # which of its two buffers
    layout: Layout
    held: PackedHeld
    record: ClientRecord  # its tensors as NumPy arrays


class Exam(NamedTuple):
    """Images a model is tested on, and its weights; all tensors are shared."""

    images: Tensor
    views: Views
    weights: Tensor
    layout: Layout


class Crash(NamedTuple):
    """An error that is no client's fault: raised again in the parent."""

    text: str
    for_user: bool  # the machine's or the recipe's: a line that says what to do, no traceback

    @classmethod
    def of(cls, error: Exception) -> "Crash":
        """The error that is being handled."""
        if isinstance(error, UserError):
            return cls(str(error), for_user=True)
        return cls("".join(traceback.format_exception(error)), for_user=False)

    def error(self, what: str) -> Exception:
        """The same in the parent, with what failed."""
        return UserError(self.text) if self.for_user else RuntimeError(f"{what}:\n{self.text}")


class Ready(NamedTuple):
    """A worker's first word: from here on its clients' time counts."""


def attempt(place: Workplace, task: Task, down: Any, data: ClientData) -> Reply | ClientFailure:
    """A client's round, or why it came to nothing."""
    try:
        return client_round(place, task, down, data)
    except Diverged as error:
        return ClientFailure(task.client, str(error))


class _Actor:
    """Any client, and between rounds a tester."""

    def __init__(self, place: Workplace, images: Tensor) -> None:
        self._place = place
        self._images = images
        _, self._down_type, _, self._kept_type = payload_types(place.method)
        self._ups, self._turn = (SharedBuffer(), SharedBuffer()), 0  # one may still be read while the other is written
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._layout: Layout | None = None
        self._down: Any = None
        self._pupil = Pupil(place.net)

    def answer(self, order: Order | Exam | Lesson | Slopes) -> Any:
        """Whatever is asked."""
        match order:
            case Order():
                return self.train(order)
            case Exam():
                return self.test(order)
            case Lesson():
                return self._pupil.look(order)
            case Slopes():
                return self._pupil.learn(order)

    def train(self, order: Order) -> Answer | ClientFailure:
        """A client's round."""
        if order.down is not None or order.layout != self._layout:  # else it is read where the last client read it
            self._memory, self._layout = self._memory if order.down is None else order.down, order.layout
            self._down = from_arrays(self._down_type, read_buffer(self._memory, self._layout))
        held = None if order.held is None else unpack_held(order.held, self._kept_type)
        labelled, labels, unlabelled = map(torch.from_numpy, (order.labelled, order.labels, order.unlabelled))
        told = None if order.classes is None else torch.from_numpy(order.classes)
        data = ClientData(self._images, labelled, labels, unlabelled, order.views, told)
        reply = attempt(self._place, order.task._replace(held=held), self._down, data)
        if isinstance(reply, ClientFailure):
            return reply
        self._turn = 1 - self._turn
        up = self._ups[self._turn]
        (written,), fresh = up.write(to_arrays(reply.up))
        assert reply.held is not None, "only clients elsewhere keep what they hold to themselves"
        memory = up.memory if fresh else None
        return Answer(memory, self._turn, written, pack_held(reply.held), pack_record(reply.record))

    def test(self, exam: Exam) -> tuple[Any, ...]:
        """A prediction as NumPy arrays."""
        place = self._place
        place.net.load(read_buffer(exam.weights, exam.layout))
        said = predictions(place.method, place.net, exam.images, exam.views.plain)
        return tuple(part.numpy() for part in said)


def serve(pipe: Connection, build: Callable[[], Workplace], images: Tensor) -> None:
    """A worker's life: answer orders until the pipe closes or the parent dies, even amid a client."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # also where the fork server was there before us
    sys.excepthook = _unless_orphaned
    Thread(target=_end_with_parent, daemon=True).start()
    settle()
    try:
        actor = _Actor(build(), images)
    except Exception as error:
        pipe.send(Crash.of(error))
        return
    pipe.send(Ready())
    while True:
        try:
            order: Order | Exam | Lesson | Slopes = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer: Any = actor.answer(order)
        except Exception as error:
            answer = Crash.of(error)
        try:
            pipe.send(answer)
        except OSError:
            return


def _end_with_parent() -> None:
    parent = mp.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _unless_orphaned(*error: Any) -> None:
    """A parent that leaves while it fetches shared memory is no fault of ours to tell of."""
    parent = mp.parent_process()
    if parent is None or not wait([parent.sentinel], 0.5):
        sys.__excepthook__(*error)
