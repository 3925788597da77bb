"""What it costs the server to make one model out of a cohort's, in time and in memory beside the models themselves."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

import torch
from torch import Tensor

from semifed.aggregate import shares, weighted_mean
from semifed.bench.measuring import Cell, Table, ratio, spread, take_turns
from semifed.kernels import averages
from semifed.payloads import Up
from semifed.robust import absurd
from semifed.wire import Weights, all_finite

COHORT = 100
# A CNN 32-64-128 whose first linear layer holds most of the weights, as it usually does: 1.5 million in all.
SHAPES: tuple[tuple[int, ...], ...] = (
    (32, 3, 3, 3),
    (32,),
    (64, 32, 3, 3),
    (64,),
    (128, 64, 3, 3),
    (128,),
    (1100, 1152),
    (1100,),
    (100, 1100),
    (100,),
)

Aggregate = Callable[[Sequence[Weights], Tensor], Weights]


def mean_by_pytorch(models: Sequence[Weights], weight: Tensor) -> Weights:
    """semifed's where there is no C compiler."""
    with patch.object(averages, "weighted_sum", return_value=None):
        return weighted_mean(models, weight)


def stacked_mean(models: Sequence[Weights], weight: Tensor) -> Weights:
    """As it is often written: all clients' tensors side by side, then their weighted sum."""
    return {
        name: (torch.stack([model[name] for model in models]) * weight.to(tensor.dtype).view(-1, *[1] * tensor.ndim))
        .sum(dim=0)
        .to(tensor.dtype)
        for name, tensor in models[0].items()
    }


def running_mean(models: Sequence[Weights], weight: Tensor) -> Weights:
    """One pass over the models in float32: as few operations as there can be, but rounded at every client."""
    total = {name: tensor * float(weight[0]) for name, tensor in models[0].items()}
    for model, share in zip(models[1:], weight[1:].tolist(), strict=True):
        for name, tensor in model.items():
            total[name].add_(tensor, alpha=share)
    return total


WAYS: Mapping[str, Aggregate] = {
    "semifed": weighted_mean,
    "semifed without its kernels": mean_by_pytorch,
    "torch.stack, weighted sum": stacked_mean,
    "running sum in float32": running_mean,
}


def aggregation_cost(turns: int, cohort: int = COHORT, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Table]:
    """What the mean of a cohort costs, and what it costs to look at each of its models before."""
    torch.set_num_threads(1)
    models, weight = cohort_of(cohort, shapes)
    return [_of_means(turns, models, weight, shapes), _of_checks(turns, models)]


def _of_means(turns: int, models: Sequence[Weights], weight: Tensor, shapes: Sequence[tuple[int, ...]]) -> Table:
    """Seconds, extra memory and error."""
    cohort = len(models)
    seconds = take_turns({name: _timed(partial(way, models, weight)) for name, way in WAYS.items()}, turns)
    error = {name: _largest_error(way(models, weight), models, weight) for name, way in WAYS.items()}
    memory = {name: extra_memory(name, cohort, shapes) for name in WAYS}
    held = sum(tensor.nbytes for model in models for tensor in model.values())
    parameters = sum(math.prod(shape) for shape in shapes)
    rows: list[Sequence[Cell]] = [
        (
            name,
            spread(seconds[name]).shown(3),
            ratio(seconds[name], seconds["semifed"]).shown(),
            None if memory[name] is None else f"{_megabytes(memory[name] or 0):.0f} MB",
            f"{error[name]:.1e}",
        )
        for name in WAYS
    ]
    return Table(
        "aggregation",
        "Aggregation",
        f"The weighted mean of {cohort} models of {parameters:,} float32 parameters each,"
        f" {_megabytes(held):.0f} MB in all, on one core.",
        ("way", "seconds", "times semifed's", "memory beside the models", "largest error"),
        rows,
        {
            "cohort": cohort,
            "parameters": parameters,
            "bytes_held": held,
            "seconds": seconds,
            "extra_bytes": memory,
            "largest_error": error,
        },
        (
            "semifed adds in float64, so that the mean of equal models is that model, bit for bit; its kernels give "
            "PyTorch's bits.",
        ),
    )


def _of_checks(turns: int, models: Sequence[Weights]) -> Table:
    """Seconds before a mean."""
    received = {name: torch.zeros_like(tensor) for name, tensor in models[0].items()}
    updates = [Up(model, torch.tensor(1.0)) for model in models]

    def sizes_by_pytorch() -> None:
        with patch.object(averages, "squared_distance", return_value=None):
            absurd(updates, received)

    ways: dict[str, Callable[[], object]] = {
        "is every number one": lambda: [all_finite(model.values()) for model in models],
        "is no change beyond belief": lambda: absurd(updates, received),
        "the same without kernels": sizes_by_pytorch,
    }
    seconds = take_turns({name: _timed(way) for name, way in ways.items()}, turns)
    return Table(
        "aggregation: checks",
        "Checks before aggregation",
        f"What the server asks about the same {len(models)} models, on one core.",
        ("question", "seconds"),
        [(name, spread(taken).shown(3)) for name, taken in seconds.items()],
        {"seconds": seconds},
        (),
    )


def cohort_of(count: int, shapes: Sequence[tuple[int, ...]]) -> tuple[list[Weights], Tensor]:
    """Models of random weights, and each one's share."""
    generator = torch.Generator().manual_seed(0)
    models = [
        {str(index): torch.randn(shape, generator=generator) for index, shape in enumerate(shapes)}
        for _ in range(count)
    ]
    return models, shares(torch.rand(count, generator=generator, dtype=torch.float64))


def extra_memory(way: str, cohort: int, shapes: Sequence[tuple[int, ...]]) -> int | None:
    """Bytes by which the peak of a fresh process rises above the models it holds; None where no kernel tells."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(_rise, way, cohort, tuple(shapes)).result()


def _rise(way: str, cohort: int, shapes: tuple[tuple[int, ...], ...]) -> int | None:
    torch.set_num_threads(1)
    few, share = cohort_of(2, shapes[:2])
    WAYS[way](few, share)  # what torch loads at the first call is no part of the mean
    models, weight = cohort_of(cohort, shapes)
    before = peak_memory()
    WAYS[way](models, weight)
    after = peak_memory()
    return None if before is None or after is None else after - before


def peak_memory(process: int | str = "self") -> int | None:
    """Most bytes a process ever had in memory, torch's included."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def peak_memory_below() -> int | None:
    """Peaks of all processes that this one started, directly or not, added up."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = status.read_text().splitlines()
        except OSError:  # it ended meanwhile
            continue
        parents[int(status.parent.name)] = next(int(line.split()[1]) for line in lines if line.startswith("PPid:"))
    if not parents:
        return None
    below = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return sum(peak_memory(process) or 0 for process in below - {os.getpid()})


def _timed(work: Callable[[], object]) -> Callable[[], float]:
    def seconds() -> float:
        started = perf_counter()
        work()
        return perf_counter() - started

    return seconds


def _largest_error(mean: Weights, models: Sequence[Weights], weight: Tensor) -> float:
    """The largest difference from the mean in float64."""
    differences = []
    for name, found in mean.items():
        exact = torch.zeros(found.shape, dtype=torch.float64)
        for model, share in zip(models, weight.tolist(), strict=True):
            exact.add_(model[name].double(), alpha=share)
        differences.append(float((found.double() - exact).abs().max()))
    return max(differences)


def _megabytes(size: int) -> float:
    return size / 1e6
