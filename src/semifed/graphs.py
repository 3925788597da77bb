"""Passes of training steps replayed as CUDA graphs: one launch in place of the hundreds that a small network takes.

What a graph replays is the trainable part of the backbone, for one shape of input. Classifier and heads stay as they
are: a head that a loss does not ask would get a gradient of zero from a graph, and weight decay would move it.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from semifed.models.backbones import Backbone

OFTEN = 10  # times a pass is computed as usual before it is worth recording: rare shapes never are
MOST = 16  # graphs of a network: each holds the maps of a whole pass

Place = tuple[torch.Size, torch.dtype, int]  # of the input, and how many passes of it came before in this step


class _Pass(nn.Module):
    """What is recorded: PyTorch replaces the `forward` of the module it is given, which must do for one shape only."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, maps: Tensor) -> Tensor:
        """Features."""
        return self.backbone.trainable_part(maps)


class Graphs:
    """The recorded passes of one network in training.

    A replay writes to the memory of the one before it. So the second pass of a shape within a step, which comes before
    the first one's gradient, has a graph of its own.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._replays: dict[Place, Callable[[Tensor], Tensor]] = {}
        self._seen: Counter[Place] = Counter()
        self._in_this_step: Counter[tuple[torch.Size, torch.dtype]] = Counter()

    def next_step(self) -> None:
        """The last step's gradients have been taken: its passes may be written over."""
        self._in_this_step.clear()

    def features(self, maps: Tensor) -> Tensor:
        """What the backbone says, by a graph where there is one."""
        if maps.requires_grad:
            return self._backbone.trainable_part(maps)
        kind = (maps.shape, maps.dtype)
        place = (*kind, self._in_this_step[kind])
        self._in_this_step[kind] += 1
        self._seen[place] += 1
        if self._seen[place] == OFTEN + 1 and len(self._replays) < MOST:
            self._replays[place] = self._recorded(maps)
        return self._replays.get(place, self._backbone.trainable_part)(maps)

    def _recorded(self, maps: Tensor) -> Callable[[Tensor], Tensor]:
        """A pass of such an input as a graph; as usual where it holds what cannot be recorded."""
        before = [buffer.clone() for buffer in self._backbone.buffers()]
        try:
            recorded: Any = torch.cuda.make_graphed_callables(
                _Pass(self._backbone), (maps.clone(),), allow_unused_input=True
            )
        except RuntimeError:
            recorded = self._backbone.trainable_part
        finally:
            # PyTorch warms up by passes of its own, which moved the statistics of batch norm. They are put back behind
            # autograd's back: passes of this step that still wait for their gradient do not mind, but it would.
            for buffer, value in zip(self._backbone.buffers(), before, strict=True):
                buffer.data.copy_(value)
        found: Callable[[Tensor], Tensor] = recorded
        return found
