"""A client's part of a round: the one function every engine calls."""

from collections.abc import Mapping
from time import perf_counter
from typing import Any, NamedTuple

import torch

from semifed.adversary import Attack, corrupted, poisoned
from semifed.data.client import Budget, ClientData
from semifed.fit import Course, Optimiser
from semifed.methods import AnyMethod
from semifed.net import Net
from semifed.payloads import Visit
from semifed.privacy import Privacy, private_update
from semifed.pseudo import PseudoLabels
from semifed.wire import Weights, from_arrays, to_arrays

FEWEST_IMAGES = 2  # batch statistics of a single image say nothing


class Workplace(NamedTuple):
    """What a process needs to act as any client."""

    method: AnyMethod
    net: Net
    budget: Budget
    optimiser: Optimiser
    keep_optimizer: bool
    seed: int
    attack: Attack | None = None  # simulated
    privacy: Privacy | None = None


class Held(NamedTuple):
    """What a client keeps from round to round."""

    kept: Any  # the method's Kept
    momentum: Weights
    private: Weights  # parts of the network that never leave the client (FedBN)


class Task(NamedTuple):
    """One client's order for one round."""

    round: int
    client: int
    lr: float
    held: Held | None


class ClientRecord(NamedTuple):
    """What the simulation may know of a client's round; none of it travels on a real network."""

    client: int
    steps: int
    images: int
    terms: dict[str, float]
    pseudo: PseudoLabels | None  # positions are those of the shared images
    seconds: float
    measured: Mapping[str, tuple[float, float]] = {}  # sum and number of what is no term of the loss


class Reply(NamedTuple):
    """A client's answer."""

    up: Any  # the method's Up
    held: Held | None  # None where it stays with the client
    record: ClientRecord


def too_few_images(data: ClientData) -> str | None:
    """Why a client cannot train at all."""
    if max(len(data.labelled), len(data.unlabelled)) >= FEWEST_IMAGES:  # nobody lists an image twice
        return None
    held = data.image_count
    if held < FEWEST_IMAGES:
        return f"it holds {held} image{'' if held == 1 else 's'}, training needs {FEWEST_IMAGES}"
    return None


def client_round(place: Workplace, task: Task, down: Any, data: ClientData) -> Reply:
    """Receive, prepare, train, report."""
    started = perf_counter()
    if left_over := set(place.net.state_names()) - set(down.weights):
        raise TypeError(
            f"the broadcast lacks '{min(left_over)}': a client may not train on what another one left behind"
        )
    place.net.load(down.weights)
    kept, momentum, private = task.held if task.held is not None else (None, None, {})
    place.net.load(private)
    attack = place.attack if place.attack is not None and task.client in place.attack.clients else None
    if attack is not None:
        data = poisoned(data, attack)
    with torch.no_grad():
        visit = Visit(place.seed, task.round, task.client)
        local = place.method.prepare(place.net, down, data, kept, visit)
    optimiser = place.optimiser._replace(lr=task.lr)
    course = Course(place.budget, visit, optimiser, momentum if place.keep_optimizer else None)
    fitted = place.method.train(place.net, local, course)
    with torch.no_grad():
        up = place.method.report(place.net, local, fitted)
        left = place.method.keep(place.net, local, fitted.left)
        if attack is not None:
            up = corrupted(up, down.weights, attack, visit)
        if place.privacy is not None and place.privacy.mode == "local":
            up = private_update(up, down.weights, place.privacy)
    record = ClientRecord(
        task.client,
        fitted.steps,
        fitted.images,
        fitted.terms,
        _last_labels(fitted.pseudo, local.data) if local.pseudo is None else _last_labels([local.pseudo], data),
        perf_counter() - started,
        {name: (float(total), float(number)) for name, (total, number) in fitted.measured.items()},
    )
    return Reply(up, Held(left, fitted.momentum if place.keep_optimizer else {}, place.net.private()), record)


def _last_labels(pseudo: list[PseudoLabels], data: ClientData) -> PseudoLabels | None:
    """The last label each unlabelled image was given in this round."""
    if not pseudo:
        return None
    given = [to_arrays(part) for part in pseudo]
    # An opinion that only one stage of the training has is no opinion on all images: it is left out.
    shared = set.intersection(*(set(arrays) for arrays in given))
    whole = {name: torch.cat([arrays[name] for arrays in given]) for name in shared}
    position = whole["position"]
    last = torch.full((len(data.unlabelled),), -1).scatter_reduce(0, position, torch.arange(len(position)), "amax")
    chosen = last[last >= 0]
    labels = from_arrays(PseudoLabels, {name: array[chosen] for name, array in whole.items()})
    return labels._replace(position=data.unlabelled[labels.position])
