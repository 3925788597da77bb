"""RSCFed's server: random groups of clients, and how much each client counts in the agreement of its group."""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from semifed.aggregate import bounded_shares, claimed_counts, shares, weighted_mean
from semifed.shapes import Scalar
from semifed.wire import Weights

FARTHEST = 1e30  # what is no distance counts as this one


class Member(NamedTuple):
    """What a client sends."""

    weights: Weights
    samples: Tensor
    labelled: Scalar  # bool: whether it holds labels


class Consensus(NamedTuple):
    """How clients agree."""

    groups: int
    group_share: float  # of the clients that are in a group
    scale: float  # of distances, in a group without labels
    labelled_scale: float  # in one with labels
    labelled_weight: float  # how much more a client with labels counts
    most: float  # equal shares a client may have in its group

    def shares(self, members: Sequence[Member], names: Collection[str], generator: torch.Generator) -> Tensor:
        """How much each client counts in the mean of the groups' models, by the distances of its named weights.

        A group's model is a mean, and so is that of the groups: together they are one mean of the clients' models.
        Clients that have nothing to tell are in no group; if none has, all count alike.
        """
        order = content_order([member.weights for member in members])
        active = [k for k in order if float(members[k].samples) > 0]
        weight = torch.zeros(len(members), dtype=torch.float64)
        for group in random_groups(active, self.group_share, self.groups, generator):
            weight[group] += self.group_shares([members[k] for k in group], names)
        return shares(weight)

    def group_shares(self, group: Sequence[Member], names: Collection[str]) -> Tensor:
        """How much each client counts in its group: less the farther it is from the group's plain mean."""
        models = [{name: member.weights[name] for name in names} for member in group]
        counts = [float(member.samples) for member in group]
        labelled = torch.tensor([bool(member.labelled) for member in group])
        middle = weighted_mean(models, shares(claimed_counts(counts)))
        distances = [model_distance(model, middle) for model in models]
        favour = torch.where(labelled, self.labelled_weight, 1.0)
        scale = self.labelled_scale if labelled.any() else self.scale
        return distance_shares(counts, distances, favour, scale, self.most)


def content_order(models: Sequence[Weights]) -> list[int]:
    """Positions of the models in an order of their own: who is drawn must not depend on who answered first."""
    return sorted(range(len(models)), key=lambda k: [models[k][name].numpy().tobytes() for name in sorted(models[k])])


def random_groups(members: Sequence[int], share: float, groups: int, generator: torch.Generator) -> list[list[int]]:
    """Groups of that share of the members, each drawn without replacement and apart from the others; none of nobody."""
    if not members:
        return []
    size = math.ceil(round(share * len(members), 6))
    return [[members[k] for k in torch.randperm(len(members), generator=generator)[:size]] for _ in range(groups)]


def model_distance(one: Weights, other: Weights) -> float:
    """Σ over the tensors of the other of ‖one − other‖."""
    return float(sum((one[name].double() - tensor.double()).norm() for name, tensor in other.items()))


def distance_shares(
    counts: Sequence[float], distances: Sequence[float], favour: Tensor, scale: float, most: float
) -> Tensor:
    """RSCFed's weights favour_k · n_k · exp(−scale · d_k · ñ / n_k), ñ the median n, scaled to sum to 1.

    Who has nothing to tell (n = 0) counts for nothing. Whatever the others claim, their shares stay within [1/`most`,
    `most`] of an equal one: what is no distance counts as the farthest.
    """
    claimed = claimed_counts(counts)
    active = claimed > 0
    if not active.any():
        return shares(claimed)
    known = torch.as_tensor(distances, dtype=torch.float64).nan_to_num(nan=FARTHEST, posinf=FARTHEST)
    held, far = claimed[active], known.clamp(0, FARTHEST)[active]
    trust = held.log() + favour.double()[active].log() - scale * far * held.median() / held
    count = len(held)
    weight = torch.zeros_like(claimed)
    weight[active] = bounded_shares((trust - trust.max()).exp(), 1 / (most * count), most / count)
    return weight
