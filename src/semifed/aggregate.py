"""How the server makes one model out of many."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from semifed.kernels import averages
from semifed.wire import SMALL, Weights

FEWEST_GATED = 5  # a mean over fewer samples says nothing of a client
MOST_IMAGES = 1e9  # no client holds more, whatever it claims
HOPELESS = 1e-12  # clients this much less trusted than the best are alike: no claim may stretch the scale further


def shares(counts: Sequence[float] | Tensor) -> Tensor:
    """Counts scaled to sum to 1 (float64); all-zero counts give equal shares."""
    values = torch.as_tensor(counts, dtype=torch.float64)
    total = values.sum()
    return values / total if total > 0 else torch.full_like(values, 1 / max(len(values), 1))


def equal_shares(counts: Sequence[float]) -> Tensor:
    """The same share for everyone who has anything to tell."""
    return shares([float(count > 0) for count in counts])


def doubtful_shares(counts: Sequence[float], confidence: Sequence[float]) -> Tensor:
    """(FL)²'s weights, 1 − τ_g scaled to sum to 1, of those who have anything to tell; equal if none of them doubts.

    Whatever a client claims, its τ_g counts as lying between 0 and 1; what is no number counts as 1.
    """
    claimed = torch.as_tensor(confidence, dtype=torch.float64).nan_to_num(nan=1.0).clamp(0, 1)
    active = torch.as_tensor(counts, dtype=torch.float64) > 0
    doubt = (1 - claimed) * active
    return shares(doubt) if doubt.sum() > 0 else equal_shares(counts)


def weighted_mean(models: Sequence[Weights], weight: Tensor) -> Weights:
    """Σ_k weight_k · model_k for weights that sum to 1, added in the given order in float64.

    Float64 keeps the mean of equal models equal to them, bit for bit.
    """
    share, first = weight.tolist(), models[0]
    plain = [name for name, tensor in first.items() if tensor.dtype == torch.float32 and tensor.is_contiguous()]
    small = [name for name in plain if first[name].numel() <= SMALL]
    mean = {name: _weighted_sum_of_large([model[name] for model in models], share) for name in first.keys() - small}
    if small:  # one sum for all of them: a network has dozens, and a sum costs its calls rather than its numbers
        rows = (torch.cat([model[name].flatten() for name in small]) for model in models)
        parts = _weighted_sum(rows, share).split([first[name].numel() for name in small])
        mean |= {name: part.view(first[name].shape) for name, part in zip(small, parts, strict=True)}
    return {name: mean[name] for name in first}


def _weighted_sum_of_large(tensors: Sequence[Tensor], share: Sequence[float]) -> Tensor:
    summed = averages.weighted_sum(tensors, share)
    return _weighted_sum(tensors, share) if summed is None else summed


def _weighted_sum(tensors: Iterable[Tensor], share: Sequence[float]) -> Tensor:
    """Two float64 tensors are all that is held beside the given ones, however many these are."""
    others = iter(tensors)
    first = next(others)
    total = first.double() * share[0]
    term = torch.empty_like(total)
    for tensor, factor in zip(others, share[1:], strict=True):
        # Not add_(tensor, alpha=factor): rounding once instead of twice would change the last bit.
        total.add_(term.copy_(tensor).mul_(factor))
    return _as_type(total, first.dtype)


def reliability_shares(losses: Sequence[float], epsilon: float, most: float) -> Tensor:
    """OpenFL's eq. (2), 1 / (loss + ε) scaled to sum to 1, no client above `most` or below 1/`most` of an equal share.

    Whatever a client claims, its share stays positive and bounded: negative losses count as 0, what is no number
    as infinitely bad. The paper's factor κ cancels.
    """
    claimed = torch.as_tensor(losses, dtype=torch.float64).nan_to_num(nan=torch.inf, posinf=torch.inf)
    trust = 1 / (claimed.clamp(min=0) + epsilon)
    count = max(len(trust), 1)
    return bounded_shares(trust, 1 / (most * count), most / count)


def claimed_counts(counts: Sequence[float]) -> Tensor:
    """What clients say they hold, as far as it can be believed: negative numbers and what is none count as 0."""
    return torch.as_tensor(counts, dtype=torch.float64).nan_to_num(nan=0.0, posinf=MOST_IMAGES).clamp(0, MOST_IMAGES)


def capped_shares(counts: Sequence[float], most: float) -> Tensor:
    """Counts scaled to sum to 1, no client above `most` equal shares of those who have anything to tell (CBAFed)."""
    claimed = claimed_counts(counts)
    active = claimed > 0
    if not active.any():
        return shares(claimed)
    weight = torch.zeros_like(claimed)
    weight[active] = bounded_shares(claimed[active], 0.0, most / int(active.sum()))
    return weight


def bounded_shares(trust: Tensor, low: float, high: float) -> Tensor:
    """Shares in proportion to trust and summing to 1, but none below `low` or above `high`; equal if there is none."""
    if not trust.sum() > 0:
        return shares(torch.ones(len(trust)))
    trust = trust.clamp(min=float(trust.max()) * HOPELESS)

    def bounded(scale: float) -> Tensor:
        return (trust * scale).clamp(low, high)

    below, above = 0.0, high / float(trust.min())
    for _ in range(100):  # the sum grows with the scale: halve the bracket until it is exact
        middle = (below + above) / 2
        below, above = (middle, above) if float(bounded(middle).sum()) < 1 else (below, middle)
    return shares(bounded(above))


def alignment_level(total: Tensor, count: Tensor, classes: int, temperature: float, *, shift: bool) -> Tensor:
    """A client's mean alignment loss; chance level, log K, where fewer than five samples stand behind it.

    Over samples that passed no gate the loss may be negative; `shift` measures it from its least value log K − 1/T.
    """
    chance = torch.tensor(math.log(classes))
    level = total / count if int(count) >= FEWEST_GATED else chance
    return (level - chance + 1 / temperature if shift else level).float()


def moving_average(old: Weights, new: Weights, decay: float) -> Weights:
    """decay · old + (1 − decay) · new for every weight (R-EMA); 0 gives the new, 1 the old ones exactly."""
    return {name: old[name] * decay + tensor * (1 - decay) for name, tensor in new.items()}


def sum_of_changes(start: Weights, ends: Sequence[Weights]) -> Weights:
    """start + Σ (end − start) for every weight of the start (FedLabel); an end that equals it adds nothing."""
    return {
        name: _as_type(sum((end[name].double() - tensor for end in ends), start=tensor.double()), tensor.dtype)
        for name, tensor in start.items()
    }


def momentum_step(received: Weights, mean: Weights, velocity: Weights, momentum: float) -> tuple[Weights, Weights]:
    """SemiFL's server: v ← momentum · v + (received − mean); the new weights are received − v, and v."""
    moved = {name: momentum * velocity.get(name, 0.0) + (received[name] - tensor) for name, tensor in mean.items()}
    return received | {name: received[name] - step for name, step in moved.items()}, moved


def _as_type(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Counters are rounded, not cut: the mean of equal ones may come out a hair below them."""
    return (value if dtype.is_floating_point else value.round()).to(dtype)
