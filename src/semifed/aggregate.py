"""How the server makes one model out of many."""

from collections.abc import Sequence

import torch
from torch import Tensor

from semifed.wire import Weights


def shares(counts: Sequence[float] | Tensor) -> Tensor:
    """Counts scaled to sum to 1 (float64); all-zero counts give equal shares."""
    values = torch.as_tensor(counts, dtype=torch.float64)
    total = values.sum()
    return values / total if total > 0 else torch.full_like(values, 1 / max(len(values), 1))


def weighted_mean(models: Sequence[Weights], weight: Tensor) -> Weights:
    """Σ_k weight_k · model_k for weights that sum to 1, added in the given order in float64.

    Float64 keeps the mean of equal models equal to them, bit for bit.
    """
    return {
        name: _as_type(
            sum(
                (model[name].double() * share for model, share in zip(models[1:], weight[1:].tolist(), strict=True)),
                start=models[0][name].double() * float(weight[0]),
            ),
            models[0][name].dtype,
        )
        for name in models[0]
    }


def _as_type(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Counters are rounded, not cut: the mean of equal ones may come out a hair below them."""
    return (value if dtype.is_floating_point else value.round()).to(dtype)
