"""How much of the way from a floor to a ceiling a method goes, seed by seed."""

import statistics
from collections.abc import Iterable, Mapping

from semifed.errors import UserError, nearest

FLOOR, CEILING = "server-only", "fedavg-sl"
SMALL_GAP = 0.08  # below it, differences between seeds are as large as those between methods

BySeed = Mapping[int, float]


def gaps(floor: BySeed, ceiling: BySeed) -> dict[int, float]:
    """Ceiling minus floor, for every seed that has both."""
    return {seed: ceiling[seed] - floor[seed] for seed in sorted(floor.keys() & ceiling.keys())}


def gap_shares(own: BySeed, floor: BySeed, ceiling: BySeed) -> dict[int, float]:
    """(own - floor) / (ceiling - floor) for every seed that has all three and a ceiling above its floor."""
    return {
        seed: (own[seed] - floor[seed]) / gap for seed, gap in gaps(floor, ceiling).items() if gap > 0 and seed in own
    }


def gap_caveat(between: Mapping[int, float]) -> str:
    """What a reader of the shares has to know of the gap they are shares of; empty if nothing."""
    if not between:
        return "floor and ceiling have no seed in common, so there are no shares"
    mean = statistics.fmean(between.values())
    upside_down = [seed for seed, gap in between.items() if gap <= 0]
    if len(upside_down) == len(between):
        return "the ceiling is not above the floor, so there are no shares"
    found = []
    if mean < SMALL_GAP:
        found.append(f"floor and ceiling are only {100 * mean:.1f} points apart, too little to rank methods by shares")
    if upside_down:
        seeds = ", ".join(map(str, upside_down))
        found.append(f"left out, as the ceiling is not above the floor: seed {seeds}")
    return "; ".join(found)


def refuse_unknown(option: str, name: str | None, present: Iterable[str]) -> None:
    """A floor or ceiling that was asked for by name has to be among the methods."""
    names = sorted(set(present))
    if name is not None and name not in names:
        raise UserError(f"{option}: there is no run of {name!r}; {nearest(name, names)}")
