"""The methods, one file each, found by file name: `fixmatch-lpl` lives in `fixmatch_lpl.py`."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from semifed.errors import UserError, nearest
from semifed.method import Method

AnyMethod = Method[Any, Any, Any, Any, Any]


def method_names() -> list[str]:
    """All methods, in alphabetical order."""
    return sorted(module.name.replace("_", "-") for module in iter_modules(__path__))


def finds_groups(kind: type[AnyMethod]) -> bool:
    """Whether a method is one of category discovery."""
    return kind.clusters is not Method.clusters


def method_class(name: str) -> type[AnyMethod]:
    """The class of a method by its name."""
    if name not in method_names():
        raise UserError(f"method.name: there is no method '{name}'; {nearest(name, method_names())}")
    module = import_module(f"{__name__}.{name.replace('-', '_')}")
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Method) and value.__module__ == module.__name__
    ]
    return own[0]
