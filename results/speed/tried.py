"""Cheap ideas for quicker steps, measured beside what is used: at most four minutes on an idle core.

    python results/speed/tried.py [--turns 5] [--seconds 0.3] [--compile] [--json results/speed/tried.json]
    python results/speed/tables.py results/speed/tried.json

Ways take turns, ratios are taken inside a turn. Images are noise in the shapes of FashionMNIST and CIFAR-10, networks,
batches and views those of the benchmark's FixMatch, one thread. `--compile` takes a minute and a half more.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.sgd import sgd

from semifed.assembly import Parts, workplace_of
from semifed.bench.command import all_numbers
from semifed.bench.measuring import Cell, Table, machine, ratio, spread, take_turns
from semifed.bench.workload import FIXMATCH_CNN, FIXMATCH_RESNET, OPENFL_CNN, SAGE_NETWORK, Workload
from semifed.data.client import batches
from semifed.durable import write_atomically
from semifed.fit import Descent, Optimiser
from semifed.models.batchnorm import use_kernels
from semifed.net import FrozenNet, Net
from semifed.process import settle

TESTED = 512  # images that a test looks at together
TOGETHER = 8  # steps whose views a teacher could be asked about at once
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the unlabelled images that pass the gate
USED = "as used: "
LOADS = (FIXMATCH_CNN, FIXMATCH_RESNET)
FURTHER = (OPENFL_CNN, SAGE_NETWORK)  # networks on which only whole passes are measured
Way = Callable[[], object]


def ways_of(load: Workload, folder: Path, compiled: bool) -> Iterator[tuple[str, dict[str, Way], int]]:
    """Each question with the ways to do it, what is used first, and how many steps one call of a way does."""
    parts = load.parts(folder)
    place = workplace_of(parts)()
    net, local = place.net, parts.recipe.local
    labelled, weak, strong = (_noise(share * local.batch, load) for share in (1, *[local.unlabelled_ratio] * 2))
    whole = strong if load == OPENFL_CNN else torch.cat([labelled, weak, strong])  # OpenFL has a pass for each view
    yield f"a pass of {len(whole)} images", _kernels(net, whole, learns=False), 1
    yield f"a pass of {len(whole)} images, forwards and backwards", _kernels(net, whole, learns=True), 1
    if load in FURTHER:
        return
    net.train(False)
    yield "a teacher's pass", _without_gradient(net, weak), 1
    yield "a teacher's passes of several steps, a step", _together(net.frozen(), len(weak), load), TOGETHER
    yield f"a test's pass of {TESTED} images", _without_gradient(net, _noise(TESTED, load)), 1
    net.train(True)
    yield "the optimiser's step", _updates(net, place.optimiser), 1
    two_views: dict[str, Way] = {
        f"{USED}one pass of both": lambda: _learn(net, *(said.logits for said in net.joint(weak, strong))),
        "a pass each (other statistics)": lambda: _learn(net, net(weak).logits, net(strong).logits),
    }
    yield "two views, forwards and backwards", two_views, 1
    yield "the passes of a step", _masked(net, labelled, weak, strong), 1
    yield "views of a step", _views(parts), local.steps or 1
    if compiled:
        quick: Any = torch.compile(net.network)
        begun = perf_counter()
        _learn(net, quick(whole).logits)
        first = f"torch.compile ({perf_counter() - begun:.0f} s before the first; other bits)"
        both: dict[str, Way] = {
            f"{USED}not compiled": lambda: _learn(net, net.network(whole).logits),
            first: lambda: _learn(net, quick(whole).logits),
        }
        yield "the pass of a step, compiled", both, 1


def _noise(images: int, load: Workload) -> Tensor:
    drawn = torch.randn(images, *load.shape, generator=torch.Generator().manual_seed(images))
    return drawn.contiguous(memory_format=torch.channels_last)


def _learn(net: Net, *logits: Tensor) -> None:
    """Gradients, as a step takes them."""
    for parameter in net.learners().values():
        parameter.grad = None
    torch.stack([one.square().mean() for one in logits]).sum().backward()


def _kernels(net: Net, images: Tensor, *, learns: bool) -> dict[str, Way]:
    """By kernels of our own and by PyTorch's: the same bits."""
    plain = net.twin()
    use_kernels(plain.network, False)

    def passed(net: Net) -> Way:
        net.train(learns)

        def step() -> None:
            with torch.set_grad_enabled(learns):
                said = net(images).logits
            if learns:
                _learn(net, said)

        return step

    return {f"{USED}batch norm by own kernels": passed(net), "batch norm by PyTorch's": passed(plain)}


def _without_gradient(net: Net, images: Tensor) -> dict[str, Way]:
    def asked(context: Callable[[], AbstractContextManager[object]]) -> Way:
        def ask() -> None:
            with context():
                net.network(images)

        return ask

    return {f"{USED}no_grad": asked(torch.no_grad), "inference_mode": asked(torch.inference_mode)}


def _together(teacher: FrozenNet, images: int, load: Workload) -> dict[str, Way]:
    """A teacher stays as it is for a round: it could be asked about the weak views of many steps at once."""
    views = _noise(TOGETHER * images, load)
    return {
        f"{USED}step by step": lambda: [teacher(part) for part in views.split(images)],
        f"{TOGETHER} steps in one go": lambda: teacher(views),
    }


def _updates(net: Net, options: Optimiser) -> dict[str, Way]:
    """The same gradients applied again and again, each way to weights of its own."""
    gradients = [torch.randn_like(one) * 1e-3 for one in net.learners().values()]

    def own() -> dict[str, nn.Parameter]:
        made = {name: nn.Parameter(one.detach().clone()) for name, one in net.learners().items()}
        for parameter, gradient in zip(made.values(), gradients, strict=True):
            parameter.grad = gradient
        return made

    def by_formula(parameters: Sequence[Tensor], slopes: Sequence[Tensor], *, fused: bool = False) -> Way:
        buffers: list[Tensor | None] = [None] * len(parameters)

        @torch.no_grad()
        def step() -> None:
            sgd(
                list(parameters),
                list(slopes),
                buffers,
                foreach=False,
                fused=fused,
                lr=options.lr,
                momentum=options.momentum,
                nesterov=options.nesterov,
                weight_decay=options.weight_decay,
                dampening=0.0,
                maximize=False,
            )

        return step

    def flat() -> Way:
        """One tensor of all weights; gradients come one by one and have to be gathered."""
        whole, slope = (torch.cat([one.detach().flatten() for one in many]) for many in (own().values(), gradients))
        places = [
            place.view_as(one)
            for place, one in zip(slope.split([one.numel() for one in gradients]), gradients, strict=True)
        ]
        move = by_formula([whole], [slope])

        def step() -> None:
            torch._foreach_copy_(places, gradients)
            move()

        return step

    descent = Descent(own(), options)
    usual = torch.optim.SGD(
        own().values(),
        options.lr,
        options.momentum,
        weight_decay=options.weight_decay,
        nesterov=options.nesterov,
        foreach=True,
    )
    return {
        f"{USED}the formula, tensors together (foreach)": lambda: descent.step(options.lr),
        "PyTorch's class, tensors together (foreach)": usual.step,
        "fused (other bits)": by_formula(list(own().values()), gradients, fused=True),
        "one flat tensor, gradients gathered": flat(),
        "tensor by tensor": by_formula(list(own().values()), gradients),
    }


def _masked(net: Net, labelled: Tensor, weak: Tensor, strong: Tensor) -> dict[str, Way]:
    """All images in one pass, or labels given first and only images that passed the gate looked at again.

    What is left out no longer shares its batch's statistics: results change.
    """
    truth = torch.zeros(len(labelled), dtype=torch.int64)

    def loss(own: Tensor, sure: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(own, truth) + F.cross_entropy(sure, label, reduction="sum") / len(weak)

    def whole() -> None:
        own, seen, all_of_them = net.joint(labelled, weak, strong)
        loss(own.logits, all_of_them.logits, seen.logits.detach().argmax(dim=1)).backward()

    def left_out(share: float) -> Way:
        kept = round(share * len(strong))

        def step() -> None:
            with torch.no_grad():
                label = net(weak).logits.argmax(dim=1)
            own, sure = net.joint(labelled, strong[:kept])
            loss(own.logits, sure.logits, label[:kept]).backward()

        return step

    return {
        f"{USED}one pass of {len(labelled)} + {len(weak)} + {len(strong)} images": whole,
        **{f"labels first, then the {share:.0%} of strong views that pass": left_out(share) for share in SHARES},
    }


def _views(parts: Parts) -> dict[str, Way]:
    data, place = parts.scenario.client(0), workplace_of(parts)()

    def drawn(grouped: bool) -> Way:
        addresses = count()

        def steps() -> None:
            for batch in batches(data, place.budget, ("tried", next(addresses))):
                for part in () if grouped else batch:
                    part.beside = (part,)
                assert len(batch.labelled.weak) + len(batch.unlabelled.weak) + len(batch.unlabelled.strong)

        return steps

    return {f"{USED}of many steps in one go": drawn(True), "step by step": drawn(False)}


class Row(NamedTuple):
    """One way to do something."""

    what: str
    network: str
    way: str
    seconds: list[float]  # by turn
    used: list[float]  # those of what is used

    def cells(self) -> tuple[Cell, ...]:
        """As the table shows it."""
        times = None if self.seconds is self.used else ratio(self.seconds, self.used).shown()
        return self.what, self.network, self.way, spread([1000 * one for one in self.seconds]).shown(3), times


def compared(what: str, network: str, ways: dict[str, Way], steps: int, turns: int, seconds: float) -> list[Row]:
    """All ways to do something, each of them for so many seconds a turn."""
    for way in ways.values():
        way()
    begun = perf_counter()
    next(iter(ways.values()))()
    times = max(1, round(seconds / (perf_counter() - begun)))  # the same number for all ways

    def timed(way: Way) -> Callable[[], float]:
        def run() -> float:
            begun = perf_counter()
            for _ in range(times):
                way()
            return (perf_counter() - begun) / times / steps

        return run

    taken = take_turns({name: timed(way) for name, way in ways.items()}, turns)
    used = next(iter(taken.values()))
    return [Row(what, network, name, own, used) for name, own in taken.items()]


def measured(turns: int, seconds: float, compiled: bool, loads: Sequence[Workload] = (*LOADS, *FURTHER)) -> Table:
    """All questions on all networks; rows are printed as they come."""
    settle()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for load in loads:
            for what, ways, steps in ways_of(load, Path(folder), compiled):
                rows += compared(what, load.name.partition(", ")[2], ways, steps, turns, seconds)
                for row in rows[-len(ways) :]:
                    print(*(cell or "–" for cell in row.cells()), sep=" | ", flush=True)
    return Table(
        "tried",
        "Ideas for quicker steps, beside what is used",
        "random images, one thread; a step of FixMatch has 16 labelled and 32 unlabelled images, weak and strong views",
        ("what", "network", "way", "ms", "times as used"),
        [row.cells() for row in rows],
        {"rows": [{"what": one.what, "network": one.network, "way": one.way, "seconds": one.seconds} for one in rows]},
        (
            "Below 1 is quicker than what is used. Where images are left out, or views pass one by one, batch norm "
            "sees other batches, and results change; fused and compiled arithmetic rounds differently.",
        ),
    )


def main() -> None:
    """Measure, print and write."""
    asked = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    asked.add_argument("--turns", type=int, default=5)
    asked.add_argument("--seconds", type=float, default=0.3, help="of one way in one turn")
    asked.add_argument("--compile", action="store_true", help="torch.compile too; it takes a minute and a half")
    asked.add_argument("--json", type=Path)
    given = asked.parse_args()
    settle()
    about = machine()
    table = measured(given.turns, given.seconds, given.compile)
    if given.json is not None:
        write_atomically(given.json, json.dumps(all_numbers(about, given.turns, 1, [table]), indent=1) + "\n")


if __name__ == "__main__":
    main()
