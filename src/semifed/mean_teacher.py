"""The mean teacher: a network whose weights are the moving average of its student's over the steps of training."""

from typing import NamedTuple

import torch
from torch import Tensor

from semifed.aggregate import moving_average
from semifed.models.network import Output
from semifed.net import FrozenNet, Net
from semifed.wire import Weights


class Average(NamedTuple):
    """A teacher between the rounds of its client."""

    weights: Weights  # none before its first step
    steps: Tensor  # how many steps of the student it is the average of


class MeanTeacher(NamedTuple):
    """A teacher while its student trains."""

    net: FrozenNet
    weights: Weights
    steps: int
    behind: bool = False  # whether the student has made a step since

    def __call__(self, images: Tensor) -> Output:
        """Its outputs, in evaluation mode and without gradient."""
        return self.net.at(self.weights, images)

    def caught_up(self, student: Net, decay: float) -> "MeanTeacher":
        """The teacher after its student's last step: the mean of all steps, a moving average once there are enough."""
        if not self.behind:
            return self
        weights = moving_average(self.weights, student.state(), min(1 - 1 / (self.steps + 1), decay))
        return self._replace(weights=weights, steps=self.steps + 1, behind=False)

    def kept(self) -> Average:
        """What its client keeps of it."""
        return Average(self.weights, torch.tensor(self.steps))


def mean_teacher(student: Net, kept: Average | None) -> MeanTeacher:
    """The teacher that was kept, or a new one that is as its student.

    Where nobody tracks statistics (static batch norm), those it could have are of other weights: it takes the batch's.
    """
    net = student.frozen("batch" if student.batchnorm == "static" else "averaged")
    if kept is None or not kept.weights:
        return MeanTeacher(net, student.state(), 0)
    return MeanTeacher(net, kept.weights, int(kept.steps))
