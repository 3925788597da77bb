"""What a worker does while the server trains: passes of views through the backbone, and their gradients."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from semifed.engines.shared_memory import Layout, SharedBuffer, read_buffer
from semifed.net import Net
from semifed.wire import Weights


class Lesson(NamedTuple):
    """Views to be passed through the backbone in a step of training, and its weights: all by name."""

    memory: Tensor | None  # the shared buffer, when the worker has not seen it yet
    layout: Layout
    views: int


class Slopes(NamedTuple):
    """Gradients of the features of these views, as NumPy arrays: the worker answers with those of weights."""

    slopes: Sequence[Any]


class Learnt(NamedTuple):
    """Where these lie."""

    memory: Tensor | None  # the worker's shared buffer, when it is a new one
    layouts: list[Layout]  # of each view


class Pupil:
    """The worker's side."""

    def __init__(self, net: Net) -> None:
        self._net = net
        self._learners = dict(net.network.backbone.named_parameters())
        self._memory, self._layout = torch.empty(0, dtype=torch.uint8), Layout()
        self._given: Weights = {}
        self._passes: list[Tensor] = []  # features, with all that their gradients need
        self._gradients = SharedBuffer()

    def look(self, lesson: Lesson) -> list[Any]:
        """Features of the views as NumPy arrays; the passes are remembered."""
        if lesson.memory is not None or lesson.layout != self._layout:
            self._memory, self._layout = self._memory if lesson.memory is None else lesson.memory, lesson.layout
            self._given = read_buffer(self._memory, self._layout)
        with torch.no_grad():
            for name, one in self._learners.items():
                one.copy_(self._given[name])
        self._net.train(True)
        rows = [self._given[view_name(view)] for view in range(lesson.views)]
        views = [view.contiguous(memory_format=torch.channels_last) for view in rows]  # as they lay at the server
        self._passes = [self._net.features(view) for view in views]
        self._net.train(False)
        return [features.detach().numpy() for features in self._passes]

    def learn(self, order: Slopes) -> Learnt:
        """Gradients of the weights, view by view."""
        learners = self._learners
        found = [
            dict(zip(learners, torch.autograd.grad(features, list(learners.values()), slope), strict=True))
            for features, slope in zip(self._passes, map(torch.from_numpy, order.slopes), strict=True)
        ]
        self._passes = []
        layouts, fresh = self._gradients.write(*found)
        return Learnt(self._gradients.memory if fresh else None, layouts)


def view_name(view: int) -> str:
    """What a view is called in a lesson; no weight has such a name."""
    return f"view {view}"
