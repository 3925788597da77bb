"""The keys of recipes and methods for a reader, taken from the code: values, default, and the comment beside."""

import ast
import dataclasses
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

UNBOUNDED = 1e6  # limits from here on keep typing errors out; nobody plans by them


class Option(NamedTuple):
    """One key."""

    name: str
    values: str
    default: str  # as it is typed behind KEY=; "–" where there is none, "must be given" where it has to be
    what: str


def options_of(kind: type) -> list[Option]:
    """The options of a dataclass, or of a table of a recipe without the tables in it, in the order of its fields.

    >>> from semifed.recipe import PrivacyTable
    >>> options_of(PrivacyTable)[1]
    Option(name='clip', values='> 0', default='1', what="largest norm of a client's change")
    """
    hints, comments = get_type_hints(kind, include_extras=True), _comments(kind)
    return [
        Option(name, values_of(hints[name]), typed(default), comments.get(name, ""))
        for name, default in _defaults(kind)
        if not _is_table(hints[name])
    ]


def tables_of(kind: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The tables within a recipe by their names."""
    hints = get_type_hints(kind)
    return {name: hints[name] for name in kind.model_fields if _is_table(hints[name])}


def values_of(hint: Any) -> str:
    """What may be given, in words.

    >>> values_of(Literal["on", "off"]), values_of(bool | None), values_of(tuple[int, ...])
    ('on, off', 'true, false', 'list: whole')
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(map(str, inner))
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(values_of(one) for one in inner if one is not NoneType))
    if origin is Annotated:
        plain, limits = values_of(inner[0]), _range(inner[1:])
        return plain if not limits else limits if inner[0] is float else f"{plain}, {limits}"
    if origin is tuple:
        return f"list: {values_of(inner[0])}"
    if origin is not None and issubclass(origin, Mapping):
        return "table"
    return {bool: "true, false", int: "whole", float: "number", str: "text"}[hint]


def typed(default: object) -> str:
    """A default as it is typed on the command line."""
    if default is PydanticUndefined:
        return "must be given"
    if default is None or default in ({}, ()):
        return "–"
    return str(default).lower() if isinstance(default, bool) else f"{default:g}" if _short(default) else str(default)


def _short(default: object) -> bool:
    return isinstance(default, float) and float(f"{default:g}") == default


def _is_table(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)


def _defaults(kind: type[Any]) -> list[tuple[str, object]]:
    if issubclass(kind, BaseModel):
        return [(name, field.default) for name, field in kind.model_fields.items()]
    return [(field.name, field.default) for field in dataclasses.fields(kind)]


def _range(constraints: Iterable[Any]) -> str:
    """Pydantic's constraints in words: "0 to 1", "≥ 0", "> 0 and < 1"."""
    limits = [limit for one in constraints for limit in getattr(one, "metadata", [one])]
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = {name: getattr(limit, name) for limit in limits for name in signs if hasattr(limit, name)}
    if found.get("le", 0) >= UNBOUNDED:
        del found["le"]
    if set(found) == {"ge", "le"}:
        return f"{found['ge']:g} to {found['le']:g}"
    return " and ".join(f"{signs[name]} {limit:g}" for name, limit in found.items())


def _comments(kind: type) -> dict[str, str]:
    """The comment at the end of each field's line."""
    source = textwrap.dedent(inspect.getsource(kind))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    by_line = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef)
    return {
        node.target.id: by_line[node.end_lineno]
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno in by_line
    }
