"""What `semifed list` shows."""

import re
from collections.abc import Iterable
from dataclasses import fields

from semifed.errors import UserError, nearest
from semifed.options import Option, options_of, tables_of
from semifed.recipe_file import recipe_names, recipe_tables, recipe_text

# Methods, data sets and networks are imported where they are listed: recipes are told without loading PyTorch.

Rows = list[dict[str, str]]
PLACEMENTS = ("server", "clients", "some-clients")


def methods(name: str = "") -> Rows:
    """Every method: what it is and where the labels may be; or the options of one."""
    from semifed.methods import method_class, method_names

    if name:
        return _rows(options_of(method_class(name)), "method.") or [{"name": "none", "what": f"{name} has no options"}]
    rows = []
    for name in method_names():
        kind = method_class(name)
        labels = ", ".join(place for place in PLACEMENTS if place not in kind.no_meaning)
        options = ", ".join(field.name for field in fields(kind)) or "none"
        rows.append({"name": name, "what": kind.title, "labels at": labels, "options": options})
    return rows


def keys(table: str = "") -> Rows:
    """Every key of a recipe, or those of one of its tables; a method's are its own."""
    from semifed.recipe import Recipe

    tables = tables_of(Recipe)
    if table and table not in tables:
        raise UserError(f"list: a recipe has no table '{table}'; {nearest(table, tables)}")
    own = [] if table else _rows([one for one in options_of(Recipe) if one.name != "method"], "")
    inner = [row for name, kind in tables.items() if table in ("", name) for row in _rows(options_of(kind), f"{name}.")]
    return own + inner


def _rows(options: list[Option], prefix: str) -> Rows:
    return [{**one._asdict(), "name": prefix + one.name} for one in options]


def datasets(data: str | None) -> Rows:
    """Every data set: found where, or how to get it."""
    from semifed.data.datasets import catalogue

    return [
        {"name": entry.name, "what": entry.summary, "found": entry.found or f"no: {entry.how}"}
        for entry in catalogue(data)
    ]


def models() -> Rows:
    """Every network."""
    from semifed.models.network import MODELS

    return [{"name": name, "what": text} for name, text in MODELS.items()]


def recipes(start: str = "") -> Rows:
    """Every built-in recipe whose name starts so, with the first line of its file."""
    named = [name for name in recipe_names() if name.startswith(start)]
    if not named:
        raise UserError(f"list: no recipe starts with '{start}'; {nearest(start, _beginnings(recipe_names()))}")
    rows = []
    for name in named:
        method = recipe_tables(name)["method"]["name"]
        rows.append({"name": name, "method": method, "what": recipe_text(name).splitlines()[0].lstrip("# ")})
    return rows


def folded(rows: Rows) -> Rows:
    """Rows of recipes in which the many of one table or figure of a paper are one row."""
    families: dict[str, Rows] = {}
    for row in rows:
        families.setdefault(_family(row["name"]), []).append(row)
    return [
        {
            "name": f"{family}-…",
            "method": ", ".join(sorted({row["method"] for row in members})),
            "what": f"{len(members)} recipes: semifed list recipes {family}",
        }
        if len(members) > 1
        else members[0]
        for family, members in families.items()
    ]


def _family(name: str) -> str:
    """A recipe's paper and table, or its whole name where it stands for itself."""
    found = re.match(r"[\w-]+/(table|fig|convergence|dirichlet)\d*", name)
    return found[0] if found else name


def _beginnings(names: Iterable[str]) -> list[str]:
    return sorted({part for name in names for part in (name, _family(name), name.partition("/")[0])})
