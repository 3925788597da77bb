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
    """What `features` says of each view, by helpers if they can; gradients reach the backbone's parameters."""
    learners: Weights = {name: one for name, one in backbone.named_parameters() if one.requires_grad}
    with torch.no_grad():
        said = helpers.features(learners, views)
    if said is None:
        return list(map(features, views))
    told = (helpers, features, list(views), said, list(learners), *learners.values())
    known: tuple[Tensor, ...] = _Shared.apply(*told)  # type: ignore[no-untyped-call]
    return list(known)


class _Shared(torch.autograd.Function):
    """Passes that helpers have made; gradients that one of them lost are computed here."""

    @staticmethod
    def forward(
        ctx: Any,
        helpers: Helpers,
        features: Callable[[Tensor], Tensor],
        views: list[Tensor],
        said: Said,
        names: list[str],
        *learners: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.helpers, ctx.features, ctx.views, ctx.names, ctx.ticket = helpers, features, views, names, said.ticket
        ctx.save_for_backward(*learners)
        return tuple(said.features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        told = ctx.helpers.gradients(ctx.ticket, slopes)
        learners = ctx.saved_tensors
        by_view = (
            [_gradient(ctx.features, learners, *one) for one in zip(ctx.views, slopes, strict=True)]
            if told is None
            else [[one[name] for name in ctx.names] for one in told]
        )
        # One process takes gradients of the last view first, and adds them up as they come.
        totals = [reduce(torch.add, parts) for parts in zip(*reversed(by_view), strict=True)]
        return (None, None, None, None, None, *totals)


def _gradient(
    features: Callable[[Tensor], Tensor], learners: Sequence[Tensor], view: Tensor, slope: Tensor
) -> Sequence[Tensor]:
    with torch.enable_grad():
        return torch.autograd.grad(features(view), learners, slope)
