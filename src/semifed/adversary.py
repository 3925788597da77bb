"""Simulated attackers: clients that send something else than what they learnt, or learn from wrong labels.

They show what defences are worth. The attackers of a run are drawn once, and act in every round they are asked.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from semifed.data.client import ClientData
from semifed.errors import UserError
from semifed.payloads import Visit
from semifed.rng import numpy_stream
from semifed.wire import Weights

Kind = Literal["none", "sign-flip", "noise", "label-flip", "free-rider", "lie"]


class Attack(NamedTuple):
    """What attackers do, and who they are."""

    kind: Kind
    clients: frozenset[int]
    scale: float
    classes: int


def refuse_idle(kind: Kind, share: float, clients: int, *, labels: str, reports: Sequence[str]) -> None:
    """An attack that changes nothing would make any defence look perfect; `reports`: what updates hold."""
    if kind == "none":
        return
    if not round(share * clients):
        raise UserError(f"attack.share: {share:g} of {clients} clients is nobody; {1 / clients:.2g} is one of them")
    if kind == "label-flip" and labels == "server":
        raise UserError("attack.kind: no client holds a label that could be flipped; sign-flip works without")
    if kind == "lie" and not set(reports) - {"weights", "samples"}:
        raise UserError("attack.kind: this method's clients report nothing to lie about; sign-flip needs weights alone")


def attackers(seed: int, clients: int, share: float) -> frozenset[int]:
    """That share of all clients, rounded."""
    drawn = numpy_stream(seed, "attackers").choice(clients, round(share * clients), replace=False)
    return frozenset(drawn.tolist())


def poisoned(data: ClientData, attack: Attack) -> ClientData:
    """Label flip: class k is called K − 1 − k. Without labels at the clients there is nothing to flip."""
    return data._replace(labels=attack.classes - 1 - data.labels) if attack.kind == "label-flip" else data


def corrupted(up: Any, received: Weights, attack: Attack, visit: Visit) -> Any:
    """What an attacker sends in place of its update.

    `sign-flip`: the negative change, times the scale. `noise`: a normal change of the same length, times the scale.
    `free-rider`: what it received, and the claim to stand for as many images. `lie`: the update itself with every
    further number it reports set to zero: the best there is where a method weighs clients by a loss they report.
    """
    weights: Weights = up.weights
    if attack.kind == "sign-flip":
        return up._replace(weights=_moved(weights, received, lambda change: -attack.scale * change))
    if attack.kind == "noise":
        generator = visit.stream("attack")
        change = torch.cat([(weights[name] - received[name]).flatten().double() for name in _floats(weights)])
        spread = float(change.square().mean().sqrt())

        def noise(change: Tensor) -> Tensor:
            return attack.scale * spread * torch.randn(change.shape, generator=generator, dtype=torch.float64)

        return up._replace(weights=_moved(weights, received, noise))
    if attack.kind == "free-rider":
        return up._replace(weights={name: received[name].clone() for name in weights})
    if attack.kind == "lie":
        numbers = {
            name: torch.zeros_like(value)
            for name, value in up._asdict().items()
            if isinstance(value, Tensor) and value.ndim == 0 and name != "samples"
        }
        return up._replace(**numbers)
    return up


def _floats(weights: Weights) -> list[str]:
    return [name for name, tensor in weights.items() if tensor.dtype.is_floating_point]


def _moved(weights: Weights, received: Weights, by: Any) -> Weights:
    moved = {
        name: (received[name].double() + by(weights[name].double() - received[name].double())).to(weights[name].dtype)
        for name in _floats(weights)
    }
    return weights | moved
