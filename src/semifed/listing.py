"""What `semifed list` shows."""

from dataclasses import fields

from semifed.recipe_file import recipe_names, recipe_tables, recipe_text

# Methods, data sets and networks are imported where they are listed: recipes are told without loading PyTorch.

Rows = list[dict[str, str]]
PLACEMENTS = ("server", "clients", "some-clients")


def methods() -> Rows:
    """Every method: what it is and where the labels may be."""
    from semifed.methods import method_class, method_names

    rows = []
    for name in method_names():
        kind = method_class(name)
        labels = ", ".join(place for place in PLACEMENTS if place not in kind.no_meaning)
        options = ", ".join(field.name for field in fields(kind)) or "none"
        rows.append({"name": name, "what": kind.title, "labels at": labels, "options": options})
    return rows


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


def recipes() -> Rows:
    """Every built-in recipe, with the first line of its file."""
    rows = []
    for name in recipe_names():
        method = recipe_tables(name)["method"]["name"]
        rows.append({"name": name, "method": method, "what": recipe_text(name).splitlines()[0].lstrip("# ")})
    return rows
