"""Passes of several views within a training step, shared out over processes that are idle meanwhile.

While the server trains, the processes that act as clients have nothing to do. Where each view is normalised by its own
statistics and none are tracked, its pass through the backbone needs nothing of the other views: helpers compute passes
and their gradients, heads and loss stay here. The numbers are those of one process, bit for bit.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from semifed.wire import Weights


class Said(NamedTuple):
    """What helpers say of some views."""

    features: list[Tensor]  # of each view
    ticket: int  # by which their gradients can be asked for


class Helpers(Protocol):
    """Processes with a network of the same kind."""

    def features(self, weights: Weights, views: Sequence[Tensor]) -> Said | None:
        """What a backbone with these weights says of each view, in training; None where one of them was lost."""

    def gradients(self, ticket: int, slopes: Sequence[Tensor]) -> list[Weights] | None:
        """Of the weights, view by view, given those of features; None as above, and of views that are forgotten."""


def shared_features(
    helpers: Helpers, backbone: nn.Module, features: Callable[[Tensor], Tensor], views: Sequence[Tensor]
) -> list[Tensor]:
    """What `features` says of each view, by helpers; gradients reach the backbone's parameters."""
    learners = {name: one for name, one in backbone.named_parameters() if one.requires_grad}
    asked = (helpers, features, list(views), list(learners), *learners.values())
    said: tuple[Tensor, ...] = _Shared.apply(*asked)  # type: ignore[no-untyped-call]
    return list(said)


class _Shared(torch.autograd.Function):
    """A pass of each view; whatever a lost helper had is computed here."""

    @staticmethod
    def forward(
        ctx: Any,
        helpers: Helpers,
        features: Callable[[Tensor], Tensor],
        views: list[Tensor],
        names: list[str],
        *learners: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.helpers, ctx.features, ctx.views, ctx.names = helpers, features, views, names
        ctx.save_for_backward(*learners)
        said = helpers.features(dict(zip(names, learners, strict=True)), views)
        ctx.ticket = None if said is None else said.ticket
        return tuple(map(features, views) if said is None else said.features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        told = None if ctx.ticket is None else ctx.helpers.gradients(ctx.ticket, slopes)
        learners = ctx.saved_tensors
        by_view = (
            [_gradient(ctx.features, learners, *one) for one in zip(ctx.views, slopes, strict=True)]
            if told is None
            else [[one[name] for name in ctx.names] for one in told]
        )
        # One process takes gradients of the last view first, and adds them up as they come.
        totals = [reduce(torch.add, parts) for parts in zip(*reversed(by_view), strict=True)]
        return (None, None, None, None, *totals)


def _gradient(
    features: Callable[[Tensor], Tensor], learners: Sequence[Tensor], view: Tensor, slope: Tensor
) -> Sequence[Tensor]:
    with torch.enable_grad():
        return torch.autograd.grad(features(view), learners, slope)
