"""What crosses a boundary (network, process, disk): typed tuples as named arrays, and back.

A payload is a NamedTuple whose fields are tensors, maps from names to tensors, or further such tuples; `None`
is allowed where the type says so. The type is known on both sides, so only named arrays travel.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

Weights = dict[str, Tensor]
SMALL = 2**15  # numbers of an array that is worked on together with others: alone its calls cost more than its numbers
T = TypeVar("T")


def to_arrays(value: object, prefix: str = "") -> dict[str, Tensor]:
    """Every tensor of a payload under its path, e.g. ``weights/backbone.conv1.weight``."""
    if value is None:
        return {}
    if isinstance(value, Tensor):
        return {prefix: value}
    if isinstance(value, Mapping):
        parts: Iterable[tuple[str, object]] = value.items()
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = zip(value._fields, value, strict=True)
    else:
        raise TypeError(
            f"{prefix or 'payload'}: a {type(value).__name__} cannot travel; use tensors, maps or NamedTuples"
        )
    arrays: dict[str, Tensor] = {}
    for name, part in parts:
        if "/" in name:
            raise TypeError(f"{prefix or 'payload'}: the name '{name}' holds a '/'")
        arrays |= to_arrays(part, f"{prefix}/{name}" if prefix else name)
    return arrays


def from_arrays(kind: type[T], arrays: Mapping[str, Tensor]) -> T:
    """The payload of the given type from its named arrays; a foreign or missing name is a ``ValueError``."""
    value, used = _restore(kind, arrays, "")
    if surplus := sorted(set(arrays) - used):
        raise ValueError(f"unexpected array '{surplus[0]}' for {kind.__name__}")
    return value  # type: ignore[no-any-return]


def _restore(kind: Any, arrays: Mapping[str, Tensor], path: str) -> tuple[Any, set[str]]:
    if kind is Tensor:
        if path not in arrays:
            raise ValueError(f"array '{path}' is missing")
        return arrays[path], {path}
    if (inner := _inside_optional(kind)) is not None:
        present = any(name == path or name.startswith(path + "/") for name in arrays)
        return _restore(inner, arrays, path) if present else (None, set())
    if get_origin(kind) is dict:
        inside = {name[len(path) + 1 :]: name for name in arrays if name.startswith(path + "/")}
        return {short: arrays[name] for short, name in inside.items()}, set(inside.values())
    if not hasattr(kind, "_fields"):
        raise TypeError(f"'{path}': {kind} cannot travel")
    used: set[str] = set()
    fields = {}
    for name, hint in _hints(kind).items():
        fields[name], taken = _restore(hint, arrays, f"{path}/{name}" if path else name)
        used |= taken
    return kind(**fields), used


@lru_cache
def _inside_optional(kind: Any) -> Any:
    """T of a type T | None; None for any other."""
    options = get_args(kind)
    return next(part for part in options if part is not NoneType) if NoneType in options else None


@lru_cache
def _hints(kind: type) -> dict[str, Any]:
    """Types of a payload's fields; looking them up takes longer than all else about a small one."""
    return get_type_hints(kind)


def size_in_bytes(value: object) -> int:
    """How many bytes of numbers a payload holds."""
    return sum(array.numel() * array.element_size() for array in to_arrays(value).values())


def fault_of(update: object, sent: Weights, expected: Iterable[str]) -> str | None:
    """Why a client's update may not enter an average: names, shapes or types that do not fit, numbers that are none.

    `sent` are the weights the client received, `expected` the names it had to send back.
    """
    arrays = to_arrays(update)
    weights = {name.removeprefix("weights/"): array for name, array in arrays.items() if name.startswith("weights/")}
    if missing := sorted(set(expected) - set(weights)):
        return f"weights named '{missing[0]}' are missing"
    for name, tensor in weights.items():
        if name not in sent:
            return f"weights named '{name}' were never sent out"
        if tensor.shape != sent[name].shape or tensor.dtype != sent[name].dtype:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            return f"'{name}' is {found}, expected {sent[name].dtype} {list(sent[name].shape)}"
    for name, array in arrays.items():
        if array.is_complex():
            return f"'{name.removeprefix('weights/')}' holds complex numbers"
    if not all_finite(arrays.values()):
        for name, array in arrays.items():
            if not bool(torch.isfinite(array).all()):
                return f"'{name.removeprefix('weights/')}' holds NaN or infinity"
    for name, tensor in weights.items():
        if name.endswith("running_var") and bool((tensor < 0).any()):
            return f"'{name}' is a variance and holds negative numbers"
    samples = arrays.get("samples")
    if samples is not None and samples.ndim != 0:
        return f"'samples' is of shape {list(samples.shape)}, not a count"
    if samples is not None and samples.dtype != torch.float32:
        return f"'samples' is {samples.dtype}, expected {torch.float32}"
    if samples is not None and float(samples) < 0:
        return f"'samples' is {float(samples):g}, not a count"
    if surplus := sorted(set(weights) - set(expected)):
        return f"weights named '{surplus[0]}' were not asked for"
    return None


def all_finite(arrays: Iterable[Tensor]) -> bool:
    """Whether no number is infinite or none: never true where one is."""
    parts = [array.flatten() for array in arrays]
    large = [part for part in parts if part.numel() > SMALL]
    small = [part for part in parts if part.numel() <= SMALL]
    sums = [part.sum() for part in (*large, *([torch.cat(small)] if small else []))]
    return all(math.isfinite(float(total)) for total in sums)


def odd_ones_out(updates: Sequence[object]) -> list[str | None]:
    """For each update, why what it holds beside weights is shaped unlike that of most others; None if it is not.

    A method knows the shapes of its further parts if anyone does (`semifed.shapes`), and clients cannot be asked; an
    empty list is always right where others have more than one number. Where as many say one thing as another, nobody is
    believed.
    """
    parts = [
        {name: array for name, array in to_arrays(update).items() if not name.startswith("weights/")}
        for update in updates
    ]
    told = Counter((name, _kind(array)) for part in parts for name, array in part.items() if array.numel())
    kinds: dict[str, list[tuple[int, str]]] = {}
    for (name, kind), count in told.most_common():
        kinds.setdefault(name, []).append((count, kind))

    def fault(name: str, array: Tensor) -> str | None:
        (most, usual), *others = kinds.get(name, [(0, _kind(array))])
        if array.shape == (0,) and not usual.endswith("[]"):
            return None
        if _kind(array) != usual:
            return f"'{name}' is {_kind(array)}, that of most others {usual}"
        if others and others[0][0] == most:
            return f"'{name}' is {usual}, that of as many others {others[0][1]}"
        return None

    return [next(filter(None, (fault(name, array) for name, array in part.items())), None) for part in parts]


def _kind(array: Tensor) -> str:
    return f"{array.dtype} {list(array.shape)}"
