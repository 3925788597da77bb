"""Local training: the one loop in which gradients are taken, for clients and server alike."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from semifed.data.client import Batch
from semifed.net import Net
from semifed.pseudo import PseudoLabels
from semifed.wire import Weights


class Loss(NamedTuple):
    """What one step minimises, and what it is made of."""

    value: Tensor  # scalar; without gradient where there is nothing to learn from, and then no step is taken
    terms: Mapping[str, Tensor]  # scalars, averaged over the steps and reported
    sums: Mapping[str, Tensor] = {}  # added up over the steps and given to `report`
    pseudo: PseudoLabels | None = None  # for diagnostics only; never sent
    carry: Any = None  # what the next step reads in place of `const`, where the paper's loss has a memory


class Optimiser(NamedTuple):
    """Plain SGD with its usual options."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip: float | None = None  # largest norm of the whole gradient


class Fitted(NamedTuple):
    """What a run of the loop leaves behind, beside the network's new weights."""

    steps: int
    steps_taken: int  # those that had something to learn from
    images: int
    terms: dict[str, float]
    sums: dict[str, Tensor]
    pseudo: list[PseudoLabels]
    momentum: Weights


class Diverged(ArithmeticError):
    """The loss is no number any more."""


def fit(
    net: Net,
    steps: Iterable[Batch],
    loss: Callable[[Net, Batch], Loss],
    optimiser: Optimiser,
    momentum: Weights | None = None,
) -> Fitted:
    """Train the network in place, one optimiser step a batch; it is back in evaluation mode afterwards."""
    parameters = net.named_parameters()
    sgd = torch.optim.SGD(
        parameters.values(),
        lr=optimiser.lr,
        momentum=optimiser.momentum,
        nesterov=optimiser.nesterov,
        weight_decay=optimiser.weight_decay,
        foreach=True,
    )
    for name, buffer in (momentum or {}).items():
        sgd.state[parameters[name]]["momentum_buffer"] = buffer.clone()
    step_count = steps_taken = image_count = 0
    terms: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    pseudo = []
    net.network.train()
    try:
        for batch in steps:
            result = loss(net, batch)
            if not bool(torch.isfinite(result.value)):
                raise Diverged(f"the loss became {result.value.item()} in step {step_count + 1}")
            if result.value.requires_grad:
                sgd.zero_grad()
                result.value.backward()
                if optimiser.clip is not None:
                    torch.nn.utils.clip_grad_norm_(parameters.values(), optimiser.clip)
                sgd.step()
                steps_taken += 1
            step_count += 1
            image_count += sum(len(part) for part in batch if part.looked_at)
            _add(terms, {"total": result.value, **result.terms})
            _add(sums, result.sums)
            if result.pseudo is not None:
                pseudo.append(result.pseudo)
    finally:
        net.network.eval()
    return Fitted(
        step_count,
        steps_taken,
        image_count,
        {name: float(value) / step_count for name, value in terms.items()},
        sums,
        pseudo,
        {
            name: sgd.state[parameter]["momentum_buffer"]
            for name, parameter in parameters.items()
            if sgd.state[parameter].get("momentum_buffer") is not None
        },
    )


def _add(totals: dict[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        totals[name] = totals[name] + value.detach() if name in totals else value.detach()
