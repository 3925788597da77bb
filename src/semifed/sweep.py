"""Grids of recipes."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import product

from semifed.complaint import shown
from semifed.errors import UserError
from semifed.override import METHOD_KEYS, split_values
from semifed.recipe import Recipe
from semifed.recipe_file import load_recipe
from semifed.report.gap import refuse_unknown
from semifed.report.reach import levels_of, refuse_lone_reference

Axis = tuple[str, list[str]]


def grid(
    recipe: str,
    axes: Sequence[str],
    seeds: str,
    *,
    floor: str | None = None,
    ceiling: str | None = None,
    reach: str | None = None,
    against: str | None = None,
) -> list[tuple[str, Recipe]]:
    """Every combination of the axes (KEY=A,B,C) and seeds, each with a directory name of its own.

    What the comparison at the end could not use is refused here, before hours of training.
    """
    levels_of(reach)
    refuse_lone_reference(against, reach)
    parsed = [_axis(text) for text in axes]
    for key, count in Counter(key for key, _ in parsed).items():
        if count > 1:
            raise UserError(f"{key}: this axis is given {count} times; put its values in one, {key}=A,B,C")
    chosen_seeds = seeds_of(seeds)
    ends = Counter(key.rpartition(".")[2] for key, _ in parsed)
    runs: dict[str, Recipe] = {}
    for values in product(*(values for _, values in parsed)):
        point = [(key, value) for (key, _), value in zip(parsed, values, strict=True)]
        words = []
        for (key, value), (_, choices) in zip(point, parsed, strict=True):
            short = key.rpartition(".")[2]
            if len(choices) > 1 and key != "method":
                words.append(f"{short if ends[short] == 1 else key}={value}")
        for seed in chosen_seeds:
            loaded = load_recipe(recipe, [*(f"{key}={value}" for key, value in point), f"seed={seed}"])
            name = directory_name(str(loaded.method["name"]), *words, f"seed{seed}")
            if name in runs:
                raise UserError(f"two runs of this sweep would share the directory {name}; give each value once")
            runs[name] = loaded
    methods = {str(loaded.method["name"]) for loaded in runs.values()}
    refuse_unknown("--floor", floor, methods)
    refuse_unknown("--ceiling", ceiling, methods)
    refuse_unknown("--against", against, methods)
    return list(runs.items())


def directory_name(*words: str) -> str:
    """What a run is called by, in signs that need no quotes."""
    return "-".join(re.sub(r"[^\w.=+-]+", "_", word) for word in words)


def _axis(text: str) -> Axis:
    key, found, values = text.partition("=")
    key, choices = key.strip(), [value.strip() for value in split_values(values)]
    key = "method" if key in METHOD_KEYS else key
    if not found or not key or not choices:
        raise UserError(f"{shown(text)} is no axis; write KEY=A,B,C")
    if key == "seed":
        raise UserError(f"seed: give seeds as --seeds {values or '0,1,2'}")
    return key, choices


def seeds_of(text: str) -> list[int]:
    """The seeds of --seeds."""
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise UserError(f"--seeds: {shown(text)} is no list of whole numbers like 0,1,2") from None
