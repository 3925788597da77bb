"""What a checked value did wrong, in plain words: the key, what was found, what would be right."""

import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from typing import Any

from pydantic import BaseModel, ValidationError

from semifed.errors import nearest

LONGEST = 60  # characters of a wrong value that are worth repeating
LONGEST_NAME = 300  # a key or file is what the message is about

_KINDS: Mapping[str, str] = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("string_type", "string_unicode", "string_sub_type"), "text"),
    **dict.fromkeys(("tuple_type", "list_type", "set_type"), "a list in [ ]"),
    **dict.fromkeys(("model_type", "dict_type", "mapping_type", "is_instance_of", "none_required"), "a table"),
}
_BOUNDS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def complaint(error: ValidationError, table: type[BaseModel] | None = None, prefix: str = "") -> str:
    """The first mistake: its key as a dotted path, what is wrong, and the nearest valid name or value."""
    found = error.errors(include_url=False)
    path = _path(found[0]["loc"], table)
    found = [one for one in found if _path(one["loc"], table) == path]
    # Of the branches of a union, the one that came furthest is the one that was meant.
    furthest = max(len(one["loc"]) for one in found)
    found = [one for one in found if len(one["loc"]) == furthest]
    first = found[0]
    key = ".".join(([prefix] if prefix else []) + [shown_key(part) for part in path])
    kind, value = first["type"], first["input"]
    if kind == "extra_forbidden":
        return f"{key}: unknown key; {nearest(path[-1], _keys(table, path[:-1]))}"
    if kind == "missing":
        return f"{key}: this key is missing"
    if kind in ("value_error", "assertion_error"):
        text = str(first["ctx"]["error"])
        # A check of a whole table names its key itself.
        return f"{key}: {text}" if path and not _is_table(table, path) else f"{key}.{text}" if key else text
    if kind == "literal_error":
        valid = re.findall(r"'([^']*)'", str(first["ctx"]["expected"]))
        hint = f"use {' or '.join(map(repr, valid))}" if len(valid) < 3 else nearest(str(value), valid)
        return f"{key}: there is no {shown(value)}; {hint}"
    wanted = list(dict.fromkeys(_KINDS.get(one["type"]) for one in found))  # several items may be wrong alike
    if len(wanted) > 1 and all(wanted):
        return f"{key}: {shown(value)} is neither {' nor '.join(str(name) for name in wanted)}"
    return f"{key or 'recipe'}: {shown(value)} {_fault(first, _keys(table, path))}"


def _fault(first: Any, keys: Sequence[str]) -> str:
    kind = first["type"]
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"is out of range: it must be {words} {first['ctx'][name]:.12g}"
    if kind.startswith("bool"):
        return "is neither true nor false"
    if kind == "finite_number":
        return "is not a finite number"
    if kind == "string_too_short":
        return "is empty"
    if kind in _KINDS:
        inside = f" with the keys {', '.join(keys)}" if _KINDS[kind] == "a table" and keys else ""
        return f"is not {_KINDS[kind]}{inside}"
    return f"is wrong: {first['msg'][0].lower()}{first['msg'][1:]}"


def shown(value: object) -> str:
    """A value as the user wrote it, shortened if it is long.

    >>> shown((1, True, "a")), shown({"b": 1}), shown("x" * 99)[-8:]
    ("[1, true, 'a']", 'a table', "xxxx...'")
    """
    if isinstance(value, Mapping):
        return "a table"
    text = _written(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]}...{text[-1]}"


def shown_key(key: str) -> str:
    """A key or file name as it is, or quoted and shortened if it would garble the message."""
    plain = key.isprintable() and key and len(key) <= LONGEST_NAME
    return key if plain else shown(key)


def _written(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() if abs(value) >= 10**LONGEST:  # Python refuses to write out the longest ones
            return f"a number of {value.bit_length()} bits"
        case list() | tuple():
            return "[" + ", ".join(_written(part) for part in value[:LONGEST]) + "]"
        case datetime() | date() | time():
            return str(value)
        case Mapping():
            return "{...}"
    return repr(value)


def _path(loc: Sequence[int | str], table: type[BaseModel] | None) -> list[str]:
    """The keys on the way to a mistake, without the branches of a union that pydantic adds."""
    path: list[str] = []
    inside: type[BaseModel] | None = table
    for depth, part in enumerate(loc):
        if depth == 0 or inside is not None:
            path.append(str(part))
            inside = _table_at(inside, str(part)) if inside is not None else None
    return path


def _keys(table: type[BaseModel] | None, path: Sequence[str]) -> list[str]:
    for name in path:
        table = _table_at(table, name)
    return list(table.model_fields) if table is not None else []


def _is_table(table: type[BaseModel] | None, path: Sequence[str]) -> bool:
    return bool(_keys(table, path))


def _table_at(table: type[BaseModel] | None, name: str) -> type[BaseModel] | None:
    field = table.model_fields.get(name) if table is not None else None
    kind = field.annotation if field is not None else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def whole(value: Any) -> Any:
    """1e3 is a whole number too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def printable(value: str) -> str:
    """Text that fits in a line; anything else is a mistake that would garble every message about it."""
    if not value.isprintable():
        raise ValueError(f"{shown(value)} holds characters that cannot be printed")
    if len(value) > 1000:
        raise ValueError(f"{shown(value)} is longer than 1000 characters")
    return value
