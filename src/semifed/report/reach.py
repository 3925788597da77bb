"""How many rounds a method needs for given accuracies, and how much faster that is than a reference."""

from collections.abc import Sequence
from typing import NamedTuple

from semifed.errors import UserError
from semifed.report.figures import Point

AGAINST = "fixmatch-lpl"  # what the papers' speed-ups refer to


class Reach(NamedTuple):
    """When the mean curve of a row's seeds first reaches a level."""

    level: float  # a fraction
    round: int | None  # None if it never does
    speedup: float | None = None  # rounds of the reference over own; None without a reference, or if one never does


def levels_of(text: str | None) -> list[float]:
    """Percentages such as `70,80` as fractions in rising order; none if nothing was asked for."""
    if text is None:
        return []
    try:
        levels = sorted({float(part) / 100 for part in text.split(",")})
    except ValueError:
        levels = []
    if not levels or not all(0 < level <= 1 for level in levels):  # also refuses NaN
        raise UserError(f"--reach: {text!r} is no list of percentages above 0 and up to 100; write 70,80")
    return levels


def refuse_lone_reference(against: str | None, reach: str | None) -> None:
    """A reference without levels would be ignored in silence."""
    if against is not None and reach is None:
        raise UserError(f"--against: {against!r} is a reference for levels, and none is given; add --reach 70,80")


def first_reached(curve: Sequence[Point], level: float) -> int | None:
    """The first round in which the curve is at the level or above it."""
    # A mean over seeds may miss the level by its last bit.
    return next((point.round for point in curve if point.value is not None and point.value >= level - 1e-12), None)


def reaches(curve: Sequence[Point], levels: Sequence[float], reference: Sequence[Point] | None) -> tuple[Reach, ...]:
    """Every level with its round, and with the speed-up where the reference reaches it too."""
    found = []
    for level in levels:
        own = first_reached(curve, level)
        theirs = None if reference is None else first_reached(reference, level)
        # A model that starts above the level needs no round: nothing is so many times faster than that.
        found.append(Reach(level, own, theirs / own if theirs and own else None))
    return tuple(found)
