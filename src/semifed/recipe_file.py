"""Recipe files: built-in ones and the user's, what they extend, and overrides from the command line."""

import tomllib
from collections.abc import Sequence, Set
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from semifed.complaint import shown, shown_key
from semifed.errors import UserError
from semifed.override import METHOD_KEYS, parsed_value
from semifed.recipe import Recipe, check_recipe

ALTERNATIVES = (
    {"local.epochs", "local.steps"},
    {"scenario.known", "scenario.known_count"},
    {"scenario.labelled_per_class", "scenario.labelled_fraction", "scenario.labelled_clients"},
)


@cache
def recipe_names() -> tuple[str, ...]:
    """The built-in recipes."""
    root = files("semifed") / "recipes"
    top = Path(str(root))
    return tuple(sorted(path.relative_to(top).with_suffix("").as_posix() for path in top.rglob("*.toml")))


def load_recipe(name: str, overrides: Sequence[str] = (), *, for_training: bool = True) -> Recipe:
    """A built-in recipe by name, or a TOML file, with KEY=VALUE overrides by dotted path.

    An override takes the place of its alternatives in the file: `local.steps=5` where the recipe counts epochs.
    """
    try:
        tables = recipe_tables(name)
        _drop_alternatives(tables, {override.partition("=")[0].strip() for override in overrides})
        # The method first: its fields may stand before or after it on the command line.
        for override in sorted(overrides, key=lambda text: text.partition("=")[0].strip() not in METHOD_KEYS):
            _apply(tables, override)
        return check_recipe(tables, for_training=for_training)
    except RecursionError:
        raise UserError(f"recipe {shown_key(name)} is nested too deeply") from None


def left_behind(name: str, chosen: Recipe, overrides: Sequence[str] = ()) -> list[str]:
    """Options of the recipe's own method that the chosen one has too, but at a value nobody gave: easily overlooked.

    A recipe's threshold may suit its budget; another method would be compared with it at its paper's.
    """
    own = recipe_tables(name).get("method")
    other = chosen.plain()["method"]
    if not isinstance(own, dict) or own.get("name") == other["name"]:
        return []
    given = {override.partition("=")[0].strip() for override in overrides}
    return [
        f"method.{key}: {shown(value)} in the recipe is for {own.get('name')}; {other['name']} runs with "
        f"{shown(other[key])} (method.{key}={shown(value)} compares like with like)"
        for key, value in own.items()
        if key != "name" and key in other and other[key] != value and f"method.{key}" not in given
    ]


def idle(chosen: Recipe, overrides: Sequence[str]) -> list[str]:
    """Keys that were given on the command line and do nothing beside the others."""
    given = {override.partition("=")[0].strip() for override in overrides}
    scenario = chosen.scenario
    off = {
        "privacy.": (chosen.privacy.mode == "none", "privacy.mode = 'none', and nothing is private"),
        "attack.": (chosen.attack.kind == "none", "attack.kind = 'none'"),
        "server.warmup_epochs": (scenario.labels != "server", f"scenario.labels = '{scenario.labels}'"),
        "server.finetune_epochs": (scenario.labels != "server", f"scenario.labels = '{scenario.labels}'"),
        "scenario.alpha": (scenario.partition in ("iid", "folders"), f"scenario.partition = '{scenario.partition}'"),
    }
    return [
        f"{key} does nothing with {why}"
        for key in sorted(given - {"privacy.mode", "attack.kind"})
        for prefix, (nothing, why) in off.items()
        if nothing and key.startswith(prefix)
    ]


def recipe_text(name: str) -> str:
    """The TOML text of a built-in recipe."""
    return (files("semifed") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")


def recipe_tables(name: str) -> dict[str, Any]:
    """The tables of a recipe, laid over those of the recipe it `extends`, and so on; their values are not checked."""
    layers = [_read(name)]
    visited = {Path(name).resolve()}
    while (base := layers[-1].pop("extends", None)) is not None:
        try:
            name = _base_name(base, beside=name)
            layers.append(_read(name))
            if Path(name).resolve() in visited:
                raise UserError(f"{shown(base)} leads back to itself")
        except UserError as error:
            raise UserError(f"extends: {error}") from None
        visited.add(Path(name).resolve())
    tables = layers.pop()
    for layer in reversed(layers):
        tables = _laid_over(tables, layer)
    return tables


def _base_name(base: object, beside: str) -> str:
    """What a recipe extends: a built-in one, or a file as seen from the recipe's own."""
    if not isinstance(base, str):
        raise UserError(f"{shown(base)} is not text")
    if base in recipe_names():
        return base
    if not base.endswith(".toml"):
        raise _no_recipe(base)
    return str(Path(beside).parent / base)


def _laid_over(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Both recipes in one: what the second says takes the place of the first's, as an override would."""
    given = {f"{name}.{key}" for name, table in own.items() if isinstance(table, dict) for key in table}
    _drop_alternatives(base, given)
    old, new = base.get("method"), own.get("method")
    if isinstance(old, dict) and isinstance(new, dict) and new.get("name") not in (None, old.get("name")):
        del base["method"]  # another method brings its own defaults
    return _merged(base, own)


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    return base | {
        key: _merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        for key, value in own.items()
    }


def _drop_alternatives(tables: dict[str, Any], given: Set[str]) -> None:
    """Remove what newly given keys stand in for: epochs where steps are given."""
    for alternatives in ALTERNATIVES:
        if given & alternatives:
            for key in alternatives - given:
                table, _, leaf = key.partition(".")
                if isinstance(tables.get(table), dict):
                    tables[table].pop(leaf, None)


def _no_recipe(name: str) -> UserError:
    close = get_close_matches(name.lower(), recipe_names(), n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'?" if close else "'semifed list recipes' shows them"
    return UserError(f"there is no recipe {shown(name)}; {hint} (or give a .toml file)")


def _read(name: str) -> dict[str, Any]:
    """One recipe file as it is."""
    if name in recipe_names():
        return tomllib.loads(recipe_text(name))
    path = Path(name)
    try:
        if path.suffix != ".toml" and not path.exists():
            raise _no_recipe(name)
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"recipe {shown_key(name)} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"recipe {shown_key(name)} cannot be read: it is no text") from None
    except ValueError as error:  # TOML's own complaint, a number too long, or a name no file can have
        raise UserError(f"recipe {shown_key(name)} is not valid TOML: {error}") from None
    if isinstance(tables.get("method"), str):
        tables["method"] = {"name": tables["method"]}
    return tables


def _apply(tables: dict[str, Any], override: str) -> None:
    key, found, text = override.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not found or not all(path):
        raise UserError(f"{shown(override)} is no override; write KEY=VALUE, e.g. local.lr=0.03")
    if path == ["extends"]:
        raise UserError("extends: belongs in a recipe file; on the command line, name the other recipe itself")
    value = parsed_value(text.strip())
    if ".".join(path) in METHOD_KEYS and isinstance(value, str):
        current = tables.get("method")
        if not isinstance(current, dict) or current.get("name") != value:  # another method brings its own defaults
            tables["method"] = {"name": value}
        return
    table: Any = tables
    for depth, name in enumerate(path[:-1]):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            part = shown_key(".".join(path[: depth + 1]))
            raise UserError(f"{shown_key('.'.join(path))}: '{part}' is a value, not a table")
    table[path[-1]] = value
