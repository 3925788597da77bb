"""Federated FixMatch and FedAvg in plain PyTorch: the pieces that users of a framework write themselves.

Where a comparison is to show engines, what engines do not decide is semifed's: batches, views of many steps computed in
one go, and the formula of SGD. The naive loop has none of that.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semifed.assembly import Parts, build_net
from semifed.data.client import Budget, ClientData, batches
from semifed.fit import Descent, Optimiser
from semifed.methods.fedavg import FedAvg
from semifed.methods.fixmatch_lpl import FixMatchLPL
from semifed.models.batchnorm import use_kernels
from semifed.rng import Key


class Lap(NamedTuple):
    """A few rounds of one contestant."""

    seconds: list[float]  # of each steady round
    first: float  # seconds of the first round, which is not a steady one
    start_up: float  # seconds before it
    steps: int  # optimiser steps of all clients, in a round
    images: int  # labelled and unlabelled ones these steps drew, in a round

    @classmethod
    def between(cls, began: float, marks: Sequence[float], steps: int, images: int) -> "Lap":
        """From the clock: when the contestant began, was ready, and ended each round; the counts are those of all.

        >>> Lap.between(1.0, [3.0, 7.0, 8.0, 9.5], steps=30, images=90)
        Lap(seconds=[1.0, 1.5], first=4.0, start_up=2.0, steps=10, images=30)
        """
        first, *steady = [later - earlier for earlier, later in pairwise(marks)]
        rounds = len(marks) - 1
        return cls(steady, first, marks[0] - began, steps // rounds, images // rounds)


class StepViews(NamedTuple):
    """What one step sees; FedAvg nothing but labelled images."""

    labelled: Tensor  # weak views, float32 [n, c, h, w]
    labels: Tensor  # [n]
    weak: Tensor  # [m, c, h, w]
    strong: Tensor


class Job(NamedTuple):
    """The numbers of a recipe that a plain training loop reads."""

    steps: int
    labelled: int  # images a step
    unlabelled: int  # none: FedAvg
    threshold: float  # of FixMatch
    sgd: dict[str, float]

    @classmethod
    def of(cls, parts: Parts) -> "Job":
        """From a recipe with FixMatch or FedAvg and a number of steps."""
        local, method = parts.recipe.local, parts.method
        if local.steps is None:
            raise ValueError("plain loops are written for local.steps")
        sgd = {"lr": local.lr, "momentum": local.momentum, "weight_decay": local.weight_decay}
        if isinstance(method, FixMatchLPL):
            return cls(local.steps, local.batch, local.batch * local.unlabelled_ratio, method.threshold, sgd)
        if type(method) is FedAvg:
            return cls(local.steps, local.batch, 0, 1.0, sgd)
        raise ValueError("plain loops are written for fixmatch-lpl and fedavg")


def new_network(parts: Parts, layout: torch.memory_format = torch.channels_last) -> nn.Module:
    """The network of a recipe: everyone trains the same one, unless told otherwise in the layout that is quick here.

    It computes by PyTorch's own kernels, as any other network that is written in PyTorch.
    """
    shape = parts.scenario.dataset.x_train.shape[1:]
    network: nn.Module = build_net(parts.recipe, parts.method, shape, len(parts.scenario.known)).network
    use_kernels(network, False)
    return network.to(memory_format=layout)  # type: ignore[call-overload, no-any-return]


def step_loss(network: nn.Module, seen: StepViews, job: Job) -> Tensor:
    """FixMatch's loss with the local model's labels, one pass over all views, or FedAvg's."""
    if not job.unlabelled:
        return F.cross_entropy(network(seen.labelled).logits, seen.labels)
    logits = network(torch.cat([seen.labelled, seen.weak, seen.strong])).logits
    own, weak, strong = logits.split([len(seen.labelled), len(seen.weak), len(seen.strong)])
    confidence, label = weak.detach().softmax(dim=1).max(dim=1)
    sure = (confidence >= job.threshold).float()
    consistency = (F.cross_entropy(strong, label, reduction="none") * sure).mean()
    loss: Tensor = F.cross_entropy(own, seen.labels) + consistency
    return loss


class Steps(Protocol):
    """What a training loop needs of an optimiser."""

    def zero_grad(self) -> None:
        """No gradient yet."""

    def step(self) -> None:
        """Move the parameters."""


class QuickSGD:
    """The SGD of semifed's own loop in the shape of PyTorch's class, for loops that are to differ by their engine."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        learners = {str(number): one for number, one in enumerate(parameters)}
        self._descent = Descent(learners, Optimiser(lr, momentum, weight_decay=weight_decay))
        self._lr = lr

    def zero_grad(self) -> None:
        """No gradient yet."""
        self._descent.forget()

    def step(self) -> None:
        """Move the parameters."""
        self._descent.step(self._lr)


def train(network: nn.Module, seen_by_steps: Iterator[StepViews], job: Job, sgd: Steps) -> tuple[int, int]:
    """A client's training as most people write it; how many steps and images it were."""
    network.train()
    steps = images = 0
    for seen in seen_by_steps:
        loss = step_loss(network, seen, job)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        steps += 1
        images += len(seen.labelled) + len(seen.weak)
    return steps, images


def average(states: Sequence[Mapping[str, Tensor]], images: Sequence[int]) -> dict[str, Tensor]:
    """FedAvg over a list of state dicts, by image counts."""
    total = sum(images)
    shares = [count / total for count in images]
    return {
        name: sum((share * state[name] for share, state in zip(shares, states, strict=True)), torch.tensor(0.0))
        for name in states[0]
    }


def batchwise(data: ClientData, job: Job, *address: Key) -> Iterator[StepViews]:
    """A client's steps with semifed's batches and views: what is left to compare is the engine."""
    budget = Budget(None, job.steps, job.labelled, max(1, job.unlabelled // job.labelled))
    nothing = torch.empty(0)
    for labelled, unlabelled in batches(data, budget, address):
        weak, strong = (unlabelled.weak, unlabelled.strong) if job.unlabelled else (nothing, nothing)
        yield StepViews(labelled.weak, labelled.labels, weak, strong)
