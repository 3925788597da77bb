"""Differential privacy of clients: changes are clipped, noise is added, and an accountant says what that is worth.

`central`: the server, which is trusted, clips every change and adds noise to their mean; whoever sees the models of all
rounds learns little about any one client. `local`: every client does so with its own change before it is sent, and
trusts nobody. Both protect all that a client holds, not single images.

What is added or removed is a whole client in exchange for another one (replace-one), since cohorts have a fixed size: a
sum of changes clipped to C then moves by 2 C at most, and the accountant is told half the noise multiplier.
"""

import math
import secrets
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from semifed.errors import UserError
from semifed.wire import Weights

Mode = Literal["none", "central", "local"]


class Privacy(NamedTuple):
    """The setting of a run."""

    mode: Mode
    clip: float  # C, largest norm of a client's change
    noise: float  # standard deviation of the noise, in clips
    delta: float


def refuse_further_numbers(method: str, fields: Sequence[str]) -> None:
    """A guarantee for the weights is none for what a method reports beside them."""
    further = [name for name in fields if name not in ("weights", "samples")]
    if further:
        raise UserError(
            f"privacy: {method} also sends {', '.join(further)}, which no noise would cover; methods that send weights "
            "alone can be private (semifed deploy inspect RECIPE tells)"
        )


def system_noise(deviation: float, shape: Sequence[int]) -> Tensor:
    """Normal noise from a generator that the operating system's source of randomness has seeded.

    Seeds of a run must not decide it: whoever knows them could subtract it. It is as exact as floating point.
    """
    generator = np.random.Generator(np.random.PCG64DXSM(secrets.randbits(128)))
    return torch.from_numpy(generator.normal(0.0, deviation, tuple(shape)))


def private_update(up: Any, received: Weights, privacy: Privacy) -> Any:
    """A client's own protection: its clipped change plus noise. The count it reports is one for all."""
    change = clipped_change(up.weights, received, privacy.clip)
    noisy = {name: part + system_noise(privacy.noise * privacy.clip, part.shape) for name, part in change.items()}
    return up._replace(weights=_moved(up.weights, received, noisy), samples=torch.ones_like(up.samples))


def private_mean(updates: Sequence[Any], received: Weights, privacy: Privacy, cohort: int) -> list[Any]:
    """The mean of the clipped changes over the whole cohort plus noise, as the update of every client.

    Clients that failed count as no change, so that the number of those who answered tells nothing.
    """
    total: dict[str, Tensor] = {}
    for one in updates:  # one change at a time: a cohort may be larger than memory
        for name, part in clipped_change(one.weights, received, privacy.clip).items():
            total[name] = total[name].add_(part) if name in total else part
    deviation = privacy.noise * privacy.clip / cohort
    mean = {name: part / cohort + system_noise(deviation, part.shape) for name, part in total.items()}
    moved = _moved(updates[0].weights, received, mean) if updates else {}
    return [one._replace(weights=moved, samples=torch.ones(())) for one in updates]


def clipped_change(weights: Weights, received: Weights, most: float) -> dict[str, Tensor]:
    """The change of all weights that are no counters, scaled to a norm of at most `most` (float64)."""
    change = {
        name: tensor.double() - received[name].double()
        for name, tensor in weights.items()
        if tensor.dtype.is_floating_point
    }
    norm = float(torch.linalg.vector_norm(torch.cat([part.flatten() for part in change.values()])))
    factor = min(1.0, most / norm) if norm > 0 else 1.0
    return {name: part * factor for name, part in change.items()}


def spent(privacy: Privacy, *, clients: int, cohort: int, rounds: int, visits: int) -> float:
    """ε at the setting's δ after so many rounds; `visits` is how often the busiest client took part."""
    dp, accountant = _accounting()
    if privacy.noise == 0:
        return math.inf
    moved = dp.GaussianDpEvent(privacy.noise / 2)  # replace-one: the sum moves by twice the clip
    ledger = accountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    if privacy.mode == "local":
        ledger.compose(moved, visits)
    elif cohort < clients:
        ledger.compose(dp.SampledWithoutReplacementDpEvent(clients, cohort, moved), rounds)
    else:
        ledger.compose(moved, rounds)
    return float(ledger.get_epsilon(privacy.delta))


def _accounting() -> tuple[Any, Any]:
    try:
        import dp_accounting
        from dp_accounting.rdp import RdpAccountant
    except ImportError:
        raise UserError("privacy needs an accountant: pip install 'semifed[privacy]'") from None
    return dp_accounting, RdpAccountant


def _moved(weights: Weights, received: Weights, change: dict[str, Tensor]) -> Weights:
    """The received weights after a change; counters stay, and noise makes no variance negative."""
    moved = {}
    for name, tensor in weights.items():
        value = received[name].double() + change[name] if name in change else received[name]
        moved[name] = (value.clamp(min=0) if name.endswith("running_var") else value).to(tensor.dtype)
    return moved
