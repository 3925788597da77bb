"""Grids of recipes."""

import re
from collections.abc import Sequence
from itertools import product

from semifed.errors import UserError
from semifed.recipe import Recipe, load_recipe


def grid(recipe: str, axes: Sequence[str], seeds: str) -> list[tuple[str, Recipe]]:
    """Every combination of the axes (KEY=A,B,C) and seeds, each with a directory name."""
    choices = []
    for axis in axes:
        key, found, values = axis.partition("=")
        if not found:
            raise UserError(f"'{axis}' is no axis; write KEY=A,B,C")
        choices.append([(key, value) for value in split_values(values)])
    try:
        chosen_seeds = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise UserError(f"--seeds: '{seeds}' is no list of whole numbers like 0,1,2") from None
    runs = []
    for combination in product(*choices):
        for seed in chosen_seeds:
            loaded = load_recipe(recipe, [f"{key}={value}" for key, value in combination] + [f"seed={seed}"])
            varied = [(key, value) for (key, value), axis in zip(combination, choices, strict=True) if len(axis) > 1]
            words = [value if key == "method" else f"{key.split('.')[-1]}={value}" for key, value in varied]
            name = "-".join(re.sub(r"[^\w.=+-]+", "_", word) for word in [*words, f"seed{seed}"])
            runs.append((name, loaded))
    return runs


def split_values(text: str) -> list[str]:
    """Split at commas that are not inside brackets or quotes.

    >>> split_values("0.1,[16, 32],'a,b'")
    ['0.1', '[16, 32]', "'a,b'"]
    """
    return re.findall(r"(?:\[[^\]]*\]|\([^)]*\)|'[^']*'|\"[^\"]*\"|[^,])+", text)
