"""Local training: the one loop in which gradients are taken, for clients and server alike."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from semifed.data.client import Batch, Budget, ClientData, Samples, batches, epoch_length, step_count
from semifed.net import HOME, Net
from semifed.pseudo import PseudoLabels, ever_used
from semifed.rng import Key
from semifed.wire import Weights


class Loss(NamedTuple):
    """What one step minimises, and what it is made of."""

    value: Tensor  # scalar; without gradient where there is nothing to learn from, and then no step is taken
    terms: Mapping[str, Tensor]  # scalars, averaged over the steps and reported
    sums: Mapping[str, Tensor] = {}  # added up over the steps and given to `report`
    pseudo: PseudoLabels | None = None  # for diagnostics only; never sent
    carry: Any = None  # what the next step reads in place of `const`, where the paper's loss has a memory
    rate: float = 1.0  # share of the learning rate this step takes; unlike a factor of the value, clipping leaves it
    measured: Mapping[str, Tensor] = {}  # values of any number that are no terms: reported as the mean of all there are


class Optimiser(NamedTuple):
    """Plain SGD with its usual options."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip: float | None = None  # largest norm of the whole gradient
    spares_vectors: bool = False  # no weight decay on biases, factors and offsets of norms


class Fitted(NamedTuple):
    """What a run of the loop leaves behind, beside the network's new weights."""

    steps: int
    steps_taken: int  # those that had something to learn from
    images: int
    terms: dict[str, float]
    sums: dict[str, Tensor]
    pseudo: list[PseudoLabels]
    momentum: Weights
    left: Any = None  # what the last step left behind, see `Loss.carry`
    measured: Mapping[str, Tensor] = {}  # [2] each: sum and number of the values

    def samples(self, data: ClientData) -> Tensor:
        """How many images stand behind what was learnt from the data: none where there was nothing to learn from."""
        return torch.tensor(float(data.image_count if self.steps_taken else 0))

    def learnt(self, data: ClientData) -> Tensor:
        """How many images really taught something: those with a label, and those whose pseudo-label was ever used."""
        taught = torch.cat([data.labelled, data.unlabelled[ever_used(self.pseudo)]])
        return torch.tensor(float(len(taught.unique()) if self.steps_taken else 0))

    def then(self, later: "Fitted") -> "Fitted":
        """Two stages of a round as one: whatever is counted or summed adds up, memory is that of the later one."""
        return Fitted(
            self.steps + later.steps,
            self.steps_taken + later.steps_taken,
            self.images + later.images,
            _added(self.terms, later.terms),
            _added(self.sums, later.sums),
            self.pseudo + later.pseudo,
            later.momentum,
            later.left,
            _added(self.measured, later.measured),
        )


class Diverged(ArithmeticError):
    """The loss is no number any more."""


class Descent:
    """Plain SGD's steps of one network.

    The formula is PyTorch's. Its optimiser class does the same, but spends a third of the time again around each
    step, and imports a compiler that takes as long as PyTorch itself.
    """

    def __init__(self, learners: Mapping[str, nn.Parameter], optimiser: Optimiser) -> None:
        self.momentum: Weights = {}
        self._learners = learners
        self._optimiser = optimiser

    def forget(self) -> None:
        """No gradient yet."""
        for parameter in self._learners.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move the parameters that have a gradient."""
        options = self._optimiser
        if options.clip is not None:
            torch.nn.utils.clip_grad_norm_(self._learners.values(), options.clip)
        moved = {name: one for name, one in self._learners.items() if one.grad is not None}
        if not options.spares_vectors:
            return self._move(moved, lr, options.weight_decay)
        vectors = {name: one for name, one in moved.items() if one.ndim < 2}
        self._move({name: one for name, one in moved.items() if name not in vectors}, lr, options.weight_decay)
        self._move(vectors, lr, 0.0)

    def _move(self, moved: Mapping[str, nn.Parameter], lr: float, weight_decay: float) -> None:
        options = self._optimiser
        buffers = [self.momentum.get(name) for name in moved]
        sgd(
            list(moved.values()),
            [one.grad for one in moved.values() if one.grad is not None],
            buffers,
            foreach=True,
            lr=lr,
            momentum=options.momentum,
            nesterov=options.nesterov,
            weight_decay=weight_decay,
            dampening=0.0,
            maximize=False,
        )
        self.momentum |= {name: one for name, one in zip(moved, buffers, strict=True) if one is not None}


def fit(
    net: Net,
    steps: Iterable[Batch],
    loss: Callable[[Net, Batch], Loss],
    optimiser: Optimiser,
    momentum: Weights | None = None,
    beside: Sequence[Net] = (),
) -> Fitted:
    """Train the network in place, one optimiser step a batch; it is back in evaluation mode afterwards.

    Networks `beside` it are trained by the same loss, each with its own gradient, clipping and momentum.
    """
    descents = [Descent(each.learners(), optimiser) for each in (net, *beside)]
    descents[0].momentum = {name: buffer.to(net.device, copy=True) for name, buffer in (momentum or {}).items()}
    step_count = steps_taken = image_count = 0
    terms: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    measured: dict[str, Tensor] = {}
    counted: list[Samples] = []
    pseudo = []
    for each in (net, *beside):
        each.train(True)
    try:
        for batch in steps:
            for each in (net, *beside):
                each.next_step()
            result = loss(net, batch)
            if not bool(torch.isfinite(result.value)):
                raise Diverged(f"the loss became {result.value.item()} in step {step_count + 1}")
            if result.value.requires_grad:
                for descent in descents:
                    descent.forget()
                result.value.backward()
                for descent in descents:
                    descent.step(result.rate * optimiser.lr)
                steps_taken += 1
            step_count += 1
            seen = [part for part in batch if part.looked_at]
            image_count += sum(len(part) for part in seen if part not in counted)  # steps in a row may share a batch
            counted = seen
            _add(terms, {"total": result.value, **result.terms})
            _add(sums, result.sums)
            _add(measured, {name: _sum_and_number(values) for name, values in result.measured.items()})
            if result.pseudo is not None:
                pseudo.append(result.pseudo)
    finally:
        for each in (net, *beside):
            each.train(False)
    return Fitted(
        step_count,
        steps_taken,
        image_count,
        {name: float(value) / step_count for name, value in terms.items()},
        sums,
        pseudo,
        {name: buffer.to(HOME) for name, buffer in descents[0].momentum.items()},
        measured=measured,
    )


def _add(totals: dict[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        totals[name] = totals[name] + value.detach() if name in totals else value.detach()


def _sum_and_number(values: Tensor) -> Tensor:
    return torch.stack([values.sum().double(), torch.tensor(values.numel(), dtype=torch.float64)])


def _added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {**one, **other, **{name: one[name] + other[name] for name in one if name in other}}


class Course(NamedTuple):
    """One client's training in one round: how long it is, where its randomness comes from, how steps are made."""

    budget: Budget
    address: tuple[Key, ...]
    optimiser: Optimiser
    momentum: Weights | None  # of this client's last round, if it keeps any

    def epoch(self, data: ClientData) -> int:
        """How many steps one pass over the data has."""
        return epoch_length(data, self.budget)

    def steps(self, data: ClientData) -> int:
        """How many steps the recipe's budget has for a client that holds these data."""
        return step_count(data, self.budget)

    def follow(
        self,
        net: Net,
        data: ClientData,
        loss: Callable[[Net, Batch, Any], Loss],
        const: Any,
        *,
        stage: str = "",
        steps: int | None = None,
        times: int = 1,
        beside: Sequence[Net] = (),
        after: Callable[[int], None] = lambda _: None,
    ) -> Fitted:
        """Train by a loss that reads `const`, or what its last step left in place of it.

        A second `stage` of a round draws other batches, and its first steps have no momentum; `steps` replaces the
        recipe's budget; `times` is how many steps in a row see the same batch; `after` every step it is called with
        their number.
        """
        left = const

        def step(net: Net, batch: Batch) -> Loss:
            nonlocal left
            result = loss(net, batch, left)
            left = left if result.carry is None else result.carry
            return result

        budget = self.budget if steps is None else self.budget._replace(steps=steps)
        drawn = batches(data, budget, (*self.address, stage) if stage else self.address)

        def told() -> Iterator[Batch]:
            for count, batch in enumerate(chain.from_iterable([batch] * times for batch in drawn), start=1):
                yield batch  # the loop comes back for the next batch when this one's step is done
                after(count)

        fitted = fit(net, told(), step, self.optimiser, None if stage else self.momentum, beside)
        return fitted._replace(left=left)
