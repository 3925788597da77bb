"""Federated FixMatch in plain PyTorch: the pieces that users of a framework write themselves."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semifed.assembly import Parts, build_net
from semifed.data.client import ClientData
from semifed.methods.fixmatch_lpl import FixMatchLPL


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
    """What one step of FixMatch sees."""

    labelled: Tensor  # weak views, float32 [n, c, h, w]
    labels: Tensor  # [n]
    weak: Tensor  # [m, c, h, w]
    strong: Tensor


class Job(NamedTuple):
    """The numbers of a recipe that a plain training loop reads."""

    steps: int
    labelled: int  # images a step
    unlabelled: int
    threshold: float
    sgd: dict[str, float]

    @classmethod
    def of(cls, parts: Parts) -> "Job":
        """From a recipe with FixMatch and a number of steps."""
        local, method = parts.recipe.local, parts.method
        if not isinstance(method, FixMatchLPL) or local.steps is None:
            raise ValueError("plain loops are written for fixmatch-lpl with local.steps")
        sgd = {"lr": local.lr, "momentum": local.momentum, "weight_decay": local.weight_decay}
        return cls(local.steps, local.batch, local.batch * local.unlabelled_ratio, method.threshold, sgd)


def new_network(parts: Parts) -> nn.Module:
    """The network of a recipe: everyone trains the same one, in the memory format that is quick here."""
    shape = parts.scenario.dataset.x_train.shape[1:]
    network: nn.Module = build_net(parts.recipe, parts.method, shape, len(parts.scenario.known)).network
    return network


def fixmatch_loss(network: nn.Module, seen: StepViews, threshold: float) -> Tensor:
    """FixMatch's loss with the local model's labels, one pass over all views."""
    logits = network(torch.cat([seen.labelled, seen.weak, seen.strong])).logits
    own, weak, strong = logits.split([len(seen.labelled), len(seen.weak), len(seen.strong)])
    confidence, label = weak.detach().softmax(dim=1).max(dim=1)
    sure = (confidence >= threshold).float()
    consistency = (F.cross_entropy(strong, label, reduction="none") * sure).mean()
    loss: Tensor = F.cross_entropy(own, seen.labels) + consistency
    return loss


def train(network: nn.Module, batches: Iterator[StepViews], job: Job) -> tuple[int, int]:
    """A client's training as most people write it; how many steps and images it were."""
    network.train()
    sgd = torch.optim.SGD(network.parameters(), **job.sgd)  # type: ignore[arg-type]
    steps = images = 0
    for seen in batches:
        loss = fixmatch_loss(network, seen, job.threshold)
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


def batchwise(data: ClientData, job: Job, generator: torch.Generator) -> Iterator[StepViews]:
    """A client's steps with semifed's views of whole batches: what is left to compare is the engine."""
    unlabelled = _passes(len(data.unlabelled), job.unlabelled, generator)
    for _ in range(job.steps):
        chosen = torch.randint(len(data.labelled), (job.labelled,), generator=generator)
        without = data.images[data.unlabelled[next(unlabelled)]]
        yield StepViews(
            data.views.weak(data.images[data.labelled[chosen]], generator),
            data.labels[chosen],
            data.views.weak(without, generator),
            data.views.strong(without, generator),
        )


def _passes(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    while True:
        yield from torch.randperm(count, generator=generator).split(size)
