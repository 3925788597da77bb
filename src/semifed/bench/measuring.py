"""Times that can be compared: contestants take turns, and ratios are taken inside a turn.

A machine's speed drifts within minutes, so a number of seconds says little; that one of two neighbours took half as
long as the other says much.
"""

import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch

import semifed
from semifed.kernels import who_normalises
from semifed.kernels.averages import who_adds
from semifed.process import available_cores, processor
from semifed.rundir import git_revision

Cell = str | int | float | None


class Spread(NamedTuple):
    """A few measurements of one thing."""

    median: float
    low: float
    high: float

    def shown(self, digits: int = 2) -> str:
        """The median with its range.

        >>> Spread(1.5, 1.25, 2.0).shown()
        '1.50 (1.25 to 2.00)'
        """
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


@dataclass(frozen=True)
class Table:
    """One part of the benchmark: what was done, and what was seen."""

    name: str  # in the JSON file
    title: str
    work: str  # what everyone in the table did
    header: Sequence[str]
    rows: list[Sequence[Cell]]
    facts: dict[str, Any] = field(default_factory=dict)  # raw numbers, for the JSON file
    notes: Sequence[str] = ()


def spread(values: Sequence[float]) -> Spread:
    """Median and range."""
    return Spread(statistics.median(values), min(values), max(values))


def take_turns(contestants: Mapping[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Seconds of each contestant in each turn; who goes first changes from turn to turn, so that nobody always does."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(contestants[name]())
    return seconds


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """How many times as long one took as the other, turn by turn.

    >>> ratio([2.0, 3.0, 8.0], [1.0, 1.0, 2.0])
    Spread(median=3.0, low=2.0, high=4.0)
    """
    return spread([one / other for one, other in zip(numerator, denominator, strict=True)])


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "processor": processor(),
        "cores": available_cores(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "batch norm": who_normalises(),
        "means": who_adds(),
        "semifed": semifed.__version__,
        "revision": git_revision(),
        **{name: found for name in ("flwr", "ray", "pfl", "kornia", "pillow") if (found := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
