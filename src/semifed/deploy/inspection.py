"""What a method sends each way, tensor by tensor: found out by playing one step of one client on made-up images."""

from typing import NamedTuple

import torch

from semifed.assembly import Parts, assemble, build_workplace, optimiser
from semifed.client_round import Task, client_round
from semifed.data.client import Budget, ClientData
from semifed.models.backbones import Normalisation
from semifed.server import ServerSite
from semifed.wire import to_arrays

IMAGES = 64


class Sent(NamedTuple):
    """One array that travels."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


def what_travels(parts: Parts) -> tuple[list[Sent], list[Sent]]:
    """What goes to a client in a round, and what comes back."""
    recipe, scenario, method = parts.recipe, parts.scenario, parts.method
    net, _ = assemble(parts)
    shape, classes = tuple(scenario.dataset.x_train.shape[1:]), len(scenario.known)
    site = ServerSite(
        net, scenario.server, optimiser(recipe), batch=recipe.server.batch, warmup_epochs=0, finetune_epochs=0,
        rounds=recipe.rounds, seed=recipe.seed,
    )  # fmt: skip
    down = method.broadcast(method.setup(net.state(), site))
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (IMAGES, *shape), dtype=torch.uint8, generator=generator)
    labelled = torch.arange(0 if recipe.scenario.labels == "server" else IMAGES // 2)
    rest = torch.arange(len(labelled), IMAGES)
    data = ClientData(images, labelled, labelled % classes, rest, scenario.views)
    normalised = Normalisation(scenario.views.mean, scenario.views.std)
    place = build_workplace(recipe, shape, classes, normalised)
    place = place._replace(budget=Budget(None, 1, min(recipe.local.batch, IMAGES // 4), 1))
    reply = client_round(place, Task(1, 0, 1e-6, None), down, data)
    return _listed(down), _listed(reply.up)


def _listed(payload: object) -> list[Sent]:
    return [
        Sent(name, tuple(array.shape), str(array.dtype).removeprefix("torch."), array.numel() * array.element_size())
        for name, array in to_arrays(payload).items()
    ]
