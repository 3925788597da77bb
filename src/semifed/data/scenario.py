"""Who holds which images and labels: the three questions of a scenario, answered for one data set and seed."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from semifed.data.client import ClientData
from semifed.data.datasets import Dataset
from semifed.data.partition import partition
from semifed.data.views import Views
from semifed.errors import UserError, nearest
from semifed.rng import numpy_stream

Positions = NDArray[np.int64]
UNKNOWN = -1
UNKNOWN_NAME = "unknown"  # what predictions call an image that is rejected


class ScenarioSettings(Protocol):
    """The table [scenario] of a recipe."""

    @property
    def labels(self) -> str: ...
    @property
    def classes(self) -> str: ...
    @property
    def clients(self) -> int: ...
    @property
    def partition(self) -> str: ...
    @property
    def alpha(self) -> float | None: ...
    @property
    def labelled_per_class(self) -> int | None: ...
    @property
    def labelled_fraction(self) -> float | None: ...
    @property
    def labelled_clients(self) -> int | None: ...
    @property
    def known(self) -> Sequence[int | str] | None: ...
    @property
    def known_count(self) -> int | None: ...
    @property
    def subset(self) -> int | None: ...
    @property
    def validation_fraction(self) -> float: ...


class Sealed:
    """True classes of all training images; training never sees them, only the evaluator breaks the seal."""

    def __init__(self, truth: Tensor) -> None:
        self._truth = truth

    def break_seal(self) -> Tensor:
        """Known class 0..K-1 or -1 for each training image."""
        return self._truth


class Holding(NamedTuple):
    """Positions of one client's images."""

    labelled: Positions
    unlabelled: Positions


class Scenario(NamedTuple):
    """Everything a run needs to know about its data."""

    dataset: Dataset
    known: tuple[int, ...]  # raw classes in the order of the model's outputs
    views: Views
    server: ClientData | None
    holdings: list[Holding]
    labels: Tensor  # known class of labelled positions, -1 elsewhere
    sealed: Sealed
    test_labels: Tensor  # known class or -1
    validation: ClientData | None = None  # labelled images nobody trains on, kept at the server
    open_classes: bool = False  # clients are told the true classes of their unlabelled images: for oracles alone

    def client(self, index: int) -> ClientData:
        """One client's data."""
        held = self.holdings[index]
        labelled, unlabelled = torch.from_numpy(held.labelled), torch.from_numpy(held.unlabelled)
        classes = self.every_class(self.dataset.y_train[unlabelled]) if self.open_classes else None
        return ClientData(self.dataset.x_train, labelled, self.labels[labelled], unlabelled, self.views, classes)

    def every_class(self, raw: Tensor) -> Tensor:
        """Raw classes numbered anew: the known ones as the model's outputs, then the others."""
        others = [index for index in range(len(self.dataset.classes)) if index not in self.known]
        return torch.tensor([*self.known, *others]).argsort()[raw]

    def every_name(self) -> list[str]:
        """Names of all classes, numbered as by `every_class`."""
        others = [name for index, name in enumerate(self.dataset.classes) if index not in self.known]
        return [*self.class_names(), *others]

    def class_names(self) -> list[str]:
        """Names of the known classes in the order of the model's outputs."""
        return [self.dataset.classes[raw] for raw in self.known]


def build_scenario(
    dataset: Dataset,
    settings: ScenarioSettings,
    views: Views,
    seed: int,
    *,
    all_labels: bool = False,
    open_classes: bool = False,
) -> Scenario:
    """Spread a data set over server and clients.

    `all_labels` hands out every known label (the ceiling), `open_classes` tells clients what their unlabelled images
    are (the oracles of category discovery).
    """
    known = _known_classes(dataset, settings)
    if UNKNOWN_NAME in (names := [dataset.classes[raw] for raw in known]):
        raise UserError(
            f"scenario.known: class {known[names.index(UNKNOWN_NAME)]} of {dataset.name} is called '{UNKNOWN_NAME}', "
            "as images are that a model rejects; give it another name, or leave it out of the known classes"
        )
    to_known = np.full(len(dataset.classes), UNKNOWN)
    to_known[list(known)] = np.arange(len(known))
    raw = dataset.y_train.numpy()
    truth = to_known[raw]
    pool = _pool(raw, truth, settings, seed)
    if not len(pool):
        raise UserError(f"dataset '{dataset.name}' has no training images left for this scenario")

    held_out = _held_out(pool, truth, settings, seed)
    pool = np.setdiff1d(pool, held_out)
    server_labelled: Positions | None = None
    if settings.labels == "server":
        server_labelled = _labelled_per_class(pool, truth, known, settings, dataset, seed)
        rest = np.setdiff1d(pool, server_labelled)
        holdings = [Holding(rest[:0], part) for part in _spread(rest, dataset, settings, seed, "unlabelled")]
    elif settings.labels == "clients" and settings.labelled_per_class is not None:
        # SAGE's protocol: both pools are spread independently, and labelled images are among the unlabelled too.
        chosen = _labelled_per_class(pool, truth, known, settings, dataset, seed)
        with_labels = _spread(chosen, dataset, settings, seed, "labelled")
        without = _spread(np.setdiff1d(pool, chosen), dataset, settings, seed, "unlabelled")
        holdings = [Holding(own, np.concatenate([other, own])) for own, other in zip(with_labels, without, strict=True)]
    else:
        parts = _spread(pool, dataset, settings, seed, "all")
        holdings = _label_within(parts, truth, settings, seed)

    if all_labels:
        holdings = [_all_known(held, truth) for held in holdings]
    labels = torch.full((len(raw),), UNKNOWN)
    for held in holdings:
        labels[held.labelled] = torch.from_numpy(truth[held.labelled])

    def at_server(positions: Positions | None) -> ClientData | None:
        if positions is None or not len(positions):
            return None
        labels[positions] = torch.from_numpy(truth[positions])
        held = torch.from_numpy(positions)
        return ClientData(dataset.x_train, held, labels[held], held[:0], views)

    return Scenario(
        dataset,
        known,
        views,
        at_server(server_labelled),
        holdings,
        labels,
        Sealed(torch.from_numpy(truth)),
        torch.from_numpy(to_known[dataset.y_test.numpy()]),
        at_server(held_out),
        open_classes,
    )


def class_counts(scenario: Scenario) -> dict[str, object]:
    """Who holds what, counted by raw class: the content of partition.json."""
    raw = scenario.dataset.y_train.numpy()
    classes = len(scenario.dataset.classes)
    labelled = [held.labelled for held in scenario.holdings]
    with_label = np.zeros(len(raw), dtype=bool)
    with_label[np.concatenate([*labelled, np.empty(0, np.int64)])] = True
    # SAGE's protocol lists labelled images among a client's unlabelled ones too.
    unlabelled = [held.unlabelled[~with_label[held.unlabelled]] for held in scenario.holdings]

    def count(parts: Sequence[Positions]) -> list[list[int]]:
        # All parts in one go: a hundred thousand clients are counted in a moment.
        owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        held = raw[np.concatenate([*parts, np.empty(0, np.int64)])]
        counted = np.bincount(owner * classes + held, minlength=len(parts) * classes)
        return counted.reshape(len(parts), classes).tolist()

    return {
        "classes": list(scenario.dataset.classes),
        "known": [index in scenario.known for index in range(classes)],
        "labelled": count(labelled),
        "unlabelled": count(unlabelled),
        "server": None if scenario.server is None else count([scenario.server.labelled.numpy()])[0],
    }


def _known_classes(dataset: Dataset, settings: ScenarioSettings) -> tuple[int, ...]:
    total = len(dataset.classes)
    if settings.known is not None:
        known = sorted(_class_number(named, dataset) for named in settings.known)
        if len(set(known)) < len(known) or not known or known[0] < 0 or known[-1] >= total:
            raise UserError(f"scenario.known: {list(settings.known)} must be different classes from 0 to {total - 1}")
    else:
        count = total if settings.known_count is None else settings.known_count
        if not 1 <= count <= total:
            raise UserError(f"scenario.known_count: {count} is not between 1 and the {total} classes of {dataset.name}")
        known = list(range(count))
    if settings.classes != "known" and len(known) == total:
        raise UserError(
            f"scenario.classes={settings.classes} needs classes that are not known: "
            f"give fewer than {total} in scenario.known or scenario.known_count"
        )
    return tuple(known)


def _class_number(named: int | str, dataset: Dataset) -> int:
    if isinstance(named, int):
        return named
    if named not in dataset.classes:
        raise UserError(f"scenario.known: {dataset.name} has no class '{named}'; {nearest(named, dataset.classes)}")
    return dataset.classes.index(named)


def _pool(raw: Positions, truth: Positions, settings: ScenarioSettings, seed: int) -> Positions:
    """The training images in play: a stratified subset if asked for, without unknowns in a closed set."""
    pool: Positions = np.arange(len(raw))
    if settings.classes == "known":
        pool = pool[truth[pool] != UNKNOWN]
    if settings.subset is None or settings.subset >= len(pool):
        return pool
    rng = numpy_stream(seed, "scenario", "subset")
    shuffled = rng.permutation(pool)
    # The n-th image of each class comes before the (n+1)-th of any class, so a prefix is stratified.
    rank = np.empty(len(shuffled), dtype=np.int64)
    for label in np.unique(raw[shuffled]):
        members = np.flatnonzero(raw[shuffled] == label)
        rank[members] = np.arange(len(members)) * len(shuffled) // len(members)
    return np.sort(shuffled[np.argsort(rank, kind="stable")[: settings.subset]])


def _held_out(pool: Positions, truth: Positions, settings: ScenarioSettings, seed: int) -> Positions:
    """Known images with labels that nobody trains on (FedLPA+)."""
    knowns = pool[truth[pool] != UNKNOWN]
    rng = numpy_stream(seed, "scenario", "validation")
    return np.sort(rng.permutation(knowns)[: round(settings.validation_fraction * len(knowns))])


def _labelled_per_class(
    pool: Positions, truth: Positions, known: Sequence[int], settings: ScenarioSettings, dataset: Dataset, seed: int
) -> Positions:
    count = settings.labelled_per_class or 0
    rng = numpy_stream(seed, "scenario", "labels")
    chosen = []
    for label, raw in enumerate(known):
        members = pool[truth[pool] == label]
        if len(members) < count:
            raise UserError(
                f"scenario.labelled_per_class: {count} labels wanted, but {dataset.name} has only {len(members)} "
                f"training images of class {raw} ({dataset.classes[raw]}) in this scenario"
            )
        chosen.append(rng.permutation(members)[:count])
    return np.sort(np.concatenate(chosen))


def _spread(
    positions: Positions, dataset: Dataset, settings: ScenarioSettings, seed: int, purpose: str
) -> list[Positions]:
    if settings.partition == "folders":
        if dataset.owner is None:
            raise UserError(f"scenario.partition=folders: {dataset.name} does not say which client holds which image")
        owners = int(dataset.owner.max()) + 1
        if owners != settings.clients:
            raise UserError(
                f"scenario.clients: {settings.clients} given, {dataset.name} has images of {owners} clients"
            )
        owner = dataset.owner.numpy()[positions]
        return [positions[owner == client] for client in range(settings.clients)]
    labels = dataset.y_train.numpy()[positions]
    rng = numpy_stream(seed, "scenario", "partition", purpose)
    parts = partition(settings.partition, labels, settings.clients, alpha=settings.alpha, rng=rng)
    return [positions[part] for part in parts]


def _label_within(parts: list[Positions], truth: Positions, settings: ScenarioSettings, seed: int) -> list[Holding]:
    """Labels for a share of every client's known images (FedLPA), or for all known images of some clients."""
    rng = numpy_stream(seed, "scenario", "labels")
    if settings.labels == "some-clients":
        lucky = set(rng.choice(len(parts), settings.labelled_clients, replace=False).tolist())
        share = [1.0 if client in lucky else 0.0 for client in range(len(parts))]
    else:
        share = [settings.labelled_fraction or 0.0] * len(parts)
    holdings = []
    for part, fraction in zip(parts, share, strict=True):
        knowns = part[truth[part] != UNKNOWN]
        labelled = np.sort(rng.permutation(knowns)[: round(fraction * len(knowns))])
        holdings.append(Holding(labelled, np.setdiff1d(part, labelled)))
    if not any(len(held.labelled) for held in holdings):
        most = max(int((truth[part] != UNKNOWN).sum()) for part in parts)
        if settings.labels == "some-clients":
            raise UserError(
                f"scenario.labelled_clients: the {settings.labelled_clients} that were drawn hold no image of a known "
                "class, so nobody has a label; give more, or another seed"
            )
        raise UserError(
            f"scenario.labelled_fraction: {settings.labelled_fraction:g} leaves nobody a label, for no client holds "
            f"more than {most} images of known classes; {1 / max(most, 1):.2g} gives that one a label"
        )
    return holdings


def _all_known(held: Holding, truth: Positions) -> Holding:
    everything = np.union1d(held.labelled, held.unlabelled)
    return Holding(everything[truth[everything] != UNKNOWN], everything[:0])
