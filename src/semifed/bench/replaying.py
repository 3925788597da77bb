"""The optimiser steps of a watched round, done again on batches that already lie there."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from semifed.bench.watching import Trace
from semifed.client_round import Workplace
from semifed.fit import Descent
from semifed.models.batchnorm import use_kernels
from semifed.models.network import Output
from semifed.process import settle


class Replayer:
    """Does the steps of a trace on batches of noise that already lie there."""

    def __init__(self, place: Workplace, shape: Sequence[int], phases: Sequence[Trace]) -> None:
        settle()
        self._net, self._optimiser, self._phases = place.net, place.optimiser, phases
        self._teacher = place.net.frozen()
        generator = torch.Generator().manual_seed(0)
        self._ready = {
            size: torch.randn(size, *shape, generator=generator).contiguous(memory_format=torch.channels_last)
            for size in {one.images for trace in phases for step in trace for one in step}
        }

    def replay(self, phase: int, *, kernels: bool = False) -> None:
        """All steps of a phase, by PyTorch alone or with kernels of our own."""
        for net in (self._net, self._teacher):
            use_kernels(net.network, kernels)
        self._net.network.train()
        # The formula that training uses: with PyTorch's class around it the floor could be beaten.
        descent = Descent(self._net.learners(), self._optimiser)
        for step in self._phases[phase]:
            for one in step:
                if not one.learns:
                    self._teacher(self._ready[one.images])
            losses = [_any_loss(self._net(self._ready[one.images])) for one in step if one.learns]
            descent.forget()
            torch.stack(losses).sum().backward()
            descent.step(self._optimiser.lr)


def _any_loss(output: Output) -> Tensor:
    """Something whose gradient reaches every weight."""
    labels = torch.zeros(len(output.logits), dtype=torch.int64)
    return F.cross_entropy(output.logits, labels) + sum(head.square().mean() for head in output.heads.values())
