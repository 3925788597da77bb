"""Server momentum, as SemiFL and (FL)² have it: the clients' mean is a direction to move in, not the next model."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from semifed.aggregate import momentum_step
from semifed.method import averaged
from semifed.payloads import Update
from semifed.server import ServerSite
from semifed.wire import Weights


class Moving(NamedTuple):
    """A server that moves its model with momentum."""

    weights: Weights
    velocity: Weights  # of the parameters; empty before the first step


def step_to_mean(server: Moving, ups: Sequence[Update], site: ServerSite, share: Tensor, momentum: float) -> Moving:
    """One step towards the clients' mean; none, not even by momentum, if no client had anything to learn from."""
    if not any(float(up.samples) for up in ups):
        return server
    mean = averaged(server.weights, ups, site, share)
    # Batch-norm statistics, where clients send any, are the mean's: momentum could make a variance negative.
    learnt = {name: mean[name] for name in site.net.learners()}
    weights, velocity = momentum_step(server.weights, learnt, server.velocity, momentum)
    return Moving(mean | {name: weights[name] for name in learnt}, velocity)
