"""A toy model that has learnt something: its labels are of several classes, and it is sure of some of them."""

from functools import cache

from semifed.wire import Weights
from toys import place_of, shaken, site_of, toy_parts, toy_recipe

SHARPER = 4.0  # a few steps make no model sure of anything


@cache
def _learnt() -> Weights:
    parts = toy_parts(toy_recipe("server-only", "server", {"server": {"warmup_epochs": 12, "lr": 0.02}}))
    weights = site_of(parts).warm_up(place_of(parts).net.state(), parts.method.server_loss)
    weights["classifier.weight"] *= SHARPER
    weights["classifier.bias"] *= SHARPER
    statistics = {name: tensor for name, tensor in weights.items() if "running_" in name}
    return weights | shaken(statistics)  # as of other clients: evaluation mode disagrees with training mode


def learnt_weights() -> Weights:
    """Weights of that model, a copy of one's own."""
    return {name: tensor.clone() for name, tensor in _learnt().items()}


def drifted_classifier() -> Weights:
    """What local training may make of its classifier: it names other classes now, less surely."""
    weights = learnt_weights()
    rows = {name: tensor for name, tensor in weights.items() if name.startswith("classifier.")}
    return {name: 0.7 * tensor.roll(-1, dims=0) + 0.3 * tensor for name, tensor in rows.items()}
