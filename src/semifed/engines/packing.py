"""What a worker process writes beside its update, as NumPy arrays: these are copied through the pipe, not shared."""

from typing import Any

import torch

from semifed.client_round import ClientRecord, Held
from semifed.pseudo import PseudoLabels
from semifed.wire import from_arrays, to_arrays

PackedHeld = tuple[dict[str, Any], ...]  # as in `Held`


def pack_held(held: Held) -> PackedHeld:
    """What a client keeps."""
    parts = (to_arrays(held.kept), held.momentum, held.private)
    return tuple({name: array.numpy() for name, array in part.items()} for part in parts)


def unpack_held(packed: PackedHeld, kept_type: type) -> Held:
    """The same as tensors again."""
    kept, *weights = ({name: torch.from_numpy(array) for name, array in part.items()} for part in packed)
    return Held(from_arrays(kept_type, kept), *weights)


def pack_record(record: ClientRecord) -> ClientRecord:
    """What a client's round was like."""
    if record.pseudo is None:
        return record
    packed: Any = {name: array.numpy() for name, array in to_arrays(record.pseudo).items()}
    return record._replace(pseudo=packed)


def unpack_record(record: ClientRecord) -> ClientRecord:
    """The same as tensors again."""
    if record.pseudo is None:
        return record
    packed: Any = record.pseudo
    arrays = {name: torch.from_numpy(array) for name, array in packed.items()}
    return record._replace(pseudo=from_arrays(PseudoLabels, arrays))
