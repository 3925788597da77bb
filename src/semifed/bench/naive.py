"""Federated FixMatch as the papers' own code is written.

It is the baseline it is: every image is opened and augmented by Pillow on its own, every client of every round gets new
data loaders, an optimiser and deep copies of the model, whose maps lie channel by channel as PyTorch makes them, all in
one process.
"""

import copy
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from semifed.assembly import Parts
from semifed.bench.pillow_views import PillowViews
from semifed.bench.plain_loop import Job, Lap, StepViews, average, new_network, train
from semifed.data.client import ClientData
from semifed.process import settle
from semifed.rng import Key, numpy_stream, stream_seed, torch_stream

LAYOUT = torch.contiguous_format  # of maps, where nobody asks for another


def naive_rounds(parts: Parts, steady: int) -> Lap:
    """Some rounds of the naive loop, and one before them."""
    settle()  # as semifed's turn leaves this process: whoever comes first must not matter
    began = perf_counter()
    job, recipe = Job.of(parts), parts.recipe
    network = new_network(parts, LAYOUT)
    steps = images = 0
    marks = [perf_counter()]
    for round_ in range(steady + 1):
        chosen = numpy_stream("naive", round_).choice(recipe.scenario.clients, recipe.cohort_size, replace=False)
        states, counts = [], []
        for client in chosen.tolist():
            data = parts.scenario.client(client)
            own = copy.deepcopy(network)
            done = train_naively(own, data, job, round_, client)
            states.append(copy.deepcopy(own.state_dict()))
            counts.append(data.image_count)
            steps, images = steps + done[0], images + done[1]
        network.load_state_dict(average(states, counts))
        marks.append(perf_counter())
    return Lap.between(began, marks, steps, images)


def train_naively(network: nn.Module, data: ClientData, job: Job, *address: Key) -> tuple[int, int]:
    """A client's round with new data loaders, image by image, and PyTorch's SGD; how many steps and images it were."""
    sgd = torch.optim.SGD(network.parameters(), **job.sgd)  # type: ignore[arg-type]
    return train(network, loaded(data, job, *address), job, sgd)


def loaded(data: ClientData, job: Job, *address: Key) -> Iterator[StepViews]:
    """A client's steps from two new data loaders; labelled images are repeated until they fill every batch."""
    order, views = torch_stream("naive", *address), PillowViews(data.views, stream_seed("naive", *address))
    wanted = job.steps * job.labelled
    repeated = torch.arange(len(data.labelled)).repeat(-(-wanted // len(data.labelled)))[:wanted]
    with_label = LabelledImages(data.images, data.labelled[repeated], data.labels[repeated], views)
    labelled: Any = iter(DataLoader(with_label, job.labelled, shuffle=True, num_workers=0, generator=order))
    if not job.unlabelled:
        nothing = torch.empty(0)
        yield from (StepViews(images, labels, nothing, nothing) for images, labels in labelled)
        return
    without = UnlabelledImages(data.images, data.unlabelled, views)
    loader: DataLoader[Any] = DataLoader(without, job.unlabelled, shuffle=True, num_workers=0, generator=order)
    unlabelled = iter(loader)
    for _ in range(job.steps):
        try:
            weak, strong = next(unlabelled)
        except StopIteration:
            unlabelled = iter(loader)
            weak, strong = next(unlabelled)
        images, labels = next(labelled)
        yield StepViews(images, labels, weak, strong)


class LabelledImages(Dataset[tuple[Tensor, int]]):
    """Weak views and labels, image by image."""

    def __init__(self, images: Tensor, positions: Tensor, labels: Tensor, views: PillowViews) -> None:
        self._images, self._positions, self._labels, self._views = images, positions, labels.tolist(), views

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._views.weak(self._images[self._positions[index]]), self._labels[index]


class UnlabelledImages(Dataset[tuple[Tensor, Tensor]]):
    """A weak and a strong view, image by image."""

    def __init__(self, images: Tensor, positions: Tensor, views: PillowViews) -> None:
        self._images, self._positions, self._views = images, positions, views

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self._images[self._positions[index]]
        return self._views.weak(image), self._views.strong(image)
