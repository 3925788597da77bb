"""Shapes of what clients report, said in its types: whoever is elsewhere may send anything.

A field `counts: PerClass` must hold a number for each class, `Annotated[Tensor, Shaped("classes", "projection")]` a row
for each class as long as that head's output. Axes are sizes of the network, or fields of the method.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from torch import Tensor


class Shaped:
    """The shape of an array; a party that has nothing to tell may send an empty list if it is `optional`."""

    def __init__(self, *axes: str | int, optional: bool = False) -> None:
        self.axes, self.optional = axes, optional


class Sender:
    """The number of the client that reports."""


Scalar = Annotated[Tensor, Shaped()]
PerClass = Annotated[Tensor, Shaped("classes")]
ClientNumber = Annotated[Tensor, Shaped(), Sender]


class Asked(NamedTuple):
    """Who was sent what, and how large things are."""

    client: int
    down: Any
    sizes: Mapping[str, int]


def misshapen(update: Any, asked: Asked) -> str | None:
    """Why what an update holds beside weights and their count is not what its type says; None if it is.

    Maps of tensors must have the names and shapes of the map of that name that was sent.
    """
    return next(_faults(update, asked, ""), None)


def _faults(payload: Any, asked: Asked, path: str) -> Iterator[str]:
    own: Any = type(payload)
    for name, kind, notes in _fields(own):
        where, part = f"{path}{name}", getattr(payload, name)
        if where in ("weights", "samples"):
            continue
        if hasattr(kind, "_fields"):
            yield from _faults(part, asked, f"{where}/")
        elif get_origin(kind) is dict:
            yield from _unlike(part, getattr(asked.down, name, None), where)
        for note in notes:
            if isinstance(note, Shaped) and not _fits(part, note, asked.sizes):
                expected = ", ".join(map(str, note.axes))
                yield f"'{where}' is of shape {list(part.shape)}, expected [{expected}]"
            elif note is Sender and part.ndim == 0 and int(part) != asked.client:
                yield f"it speaks for client {int(part)}"


def _unlike(part: Mapping[str, Tensor], sent: Mapping[str, Tensor] | None, where: str) -> Iterator[str]:
    if sent is None:
        return
    for name in sorted(part.keys() ^ sent.keys()):
        yield f"'{where}/{name}' {'is missing' if name in sent else 'was never sent out'}"
    for name, array in part.items():
        if name in sent and array.shape != sent[name].shape:
            yield f"'{where}/{name}' is of shape {list(array.shape)}, expected {list(sent[name].shape)}"


def _fits(array: Tensor, shape: Shaped, sizes: Mapping[str, int]) -> bool:
    if shape.optional and array.shape == (0,):
        return True
    return tuple(array.shape) == tuple(sizes[axis] if isinstance(axis, str) else axis for axis in shape.axes)


@lru_cache
def _fields(kind: type) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Names, types and notes of a payload's fields."""
    hints = get_type_hints(kind, include_extras=True)
    return [
        (name, *((get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())))
        for name, hint in hints.items()
    ]
