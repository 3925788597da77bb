"""What one party holds, and the batches its training loop draws from it."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol
from zlib import crc32

import torch
from torch import Tensor

from semifed.data.views import Step, Views
from semifed.models.network import Output
from semifed.models.stem_cache import StemCache
from semifed.rng import Key, torch_stream

IN_ONE_GO = 2**20  # values of pixels whose views are computed together; more are no faster
BATCH_OF_LARGE = 64  # images that a network with large maps looks at together: 512 would need gigabytes
SMALLEST_TAIL = 8  # a shorter last batch of an epoch is dropped: its batch statistics would be noise


class ClientData(NamedTuple):
    """One party's images, as positions in the shared store; true labels of unlabelled images are not here."""

    images: Tensor  # uint8 [all, c, h, w], shared by all parties
    labelled: Tensor  # int64 positions
    labels: Tensor  # int64 [labelled], known classes 0..K-1
    unlabelled: Tensor  # int64 positions
    views: Views  # how networks see the images
    classes: Tensor | None = None  # int64 [unlabelled], true ones, novel classes after the known; for oracles alone

    def on(self, device: torch.device) -> "ClientData":
        """The same with its own images on that device, where views of them are then drawn."""
        if device == self.images.device:
            return self
        own, first = torch.cat([self.labelled, self.unlabelled]), len(self.labelled)
        images, labelled, unlabelled = self.images[own].to(device), torch.arange(first), torch.arange(first, len(own))
        return self._replace(images=images, labelled=labelled, unlabelled=unlabelled)

    @property
    def image_count(self) -> int:
        """Distinct images held: SAGE's protocol lists labelled images among the unlabelled ones too."""
        if len(self.labelled) == 0 or len(self.unlabelled) == 0:
            return len(self.labelled) + len(self.unlabelled)
        return int(torch.unique(torch.cat([self.labelled, self.unlabelled])).numel())

    def checksum(self) -> int:
        """Of the unlabelled images in their order: whoever keeps something of each must notice that they changed."""
        return crc32(self.images[self.unlabelled].cpu().numpy().data)

    def apart(self) -> "ClientData":
        """Without unlabelled images that are labelled, too: what groups images may not see one of them twice."""
        return self._replace(unlabelled=self.unlabelled[~torch.isin(self.unlabelled, self.labelled)])

    def plain_outputs(self, net: "Classifies") -> Output:
        """What the network says of all unlabelled images, un-augmented."""
        return self._plain(net, self.unlabelled)

    def weak_outputs(self, net: "Classifies", generator: torch.Generator) -> Output:
        """What the network says of one weak view of each unlabelled image."""
        return outputs_of(net, self.images, self.unlabelled, lambda raw: self.views.weak(raw, generator))

    def labelled_outputs(self, net: "Classifies") -> Output:
        """What the network says of all labelled images, un-augmented."""
        return self._plain(net, self.labelled)

    def _plain(self, net: "Classifies", positions: Tensor) -> Output:
        # Un-augmented images are looked at in every round, and what a frozen stem says of them never changes.
        stems: StemCache | None = getattr(net, "stems", None)
        if stems is None or not len(positions):
            return outputs_of(net, self.images, positions, self.views.plain)
        if not stems.worth_it(lambda: self.views.plain(self.images[positions[:1]])):
            return outputs_of(net, self.images, positions, self.views.plain, BATCH_OF_LARGE)
        learnt: KeepsStems = net  # type: ignore[assignment]
        return outputs_of(
            lambda chunk: learnt.after_stem(
                stems.maps(chunk, lambda places: self.views.plain(self.images[chunk[places]]))
            ),
            positions,
            torch.arange(len(positions)),
            lambda chunk: chunk,
        )


class KeepsStems(Protocol):
    """A network with a frozen part."""

    def after_stem(self, maps: Tensor, /) -> Output:
        """What the rest makes of what the frozen part says."""


class Classifies(Protocol):
    """A network that can be asked."""

    def __call__(self, images: Tensor, /) -> Output:
        """Logits, features and further heads."""


@torch.no_grad()
def outputs_of(
    net: Classifies, images: Tensor, positions: Tensor, view: Callable[[Tensor], Tensor], batch: int = 512
) -> Output:
    """What a network says of one view of the images at the given positions, a batch at a time."""
    chunks = positions.split(batch) or (positions,)
    parts = [net(view(images[chunk])) for chunk in chunks]
    heads = {name: torch.cat([part.heads[name] for part in parts]) for name in parts[0].heads}
    return Output(torch.cat([part.logits for part in parts]), torch.cat([part.features for part in parts]), heads)


class Samples:
    """Images of one batch; each view is drawn from its own random stream when first asked for.

    Batches `beside` it, of the steps around its own, have the same view computed in the same go: what each of them gets
    is the same, but a few hundred images at once cost a third of what they cost a batch at a time.
    """

    def __init__(self, raw: Tensor, position: Tensor, labels: Tensor, views: Views, address: tuple[Key, ...]) -> None:
        self.raw = raw  # uint8 [n, c, h, w]
        self.position = position  # [n], into the party's labelled or unlabelled images
        self.labels = labels  # [n], empty for unlabelled images
        self.beside: Sequence[Samples] = (self,)
        self._views = views
        self._address = address
        self._ready: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self.raw)

    @property
    def looked_at(self) -> bool:
        """Whether any view was drawn: labels-only methods never look at unlabelled images."""
        return bool({"plain", "weak", "weak_again", "strong", "strong_again", "uncut", "flipped"} & vars(self).keys())

    @cached_property
    def plain(self) -> Tensor:
        """The images as they are, normalised."""
        return self._views.plain(self.raw)

    @cached_property
    def weak(self) -> Tensor:
        """The weakly augmented view."""
        return self._drawn(self._views.weak_steps, "weak")

    @cached_property
    def weak_again(self) -> Tensor:
        """A second weakly augmented view."""
        return self._drawn(self._views.weak_steps, "weak again")

    @cached_property
    def strong(self) -> Tensor:
        """The strongly augmented view."""
        return self._drawn(self._views.strong_steps, "strong")

    @cached_property
    def strong_again(self) -> Tensor:
        """A second strongly augmented view."""
        return self._drawn(self._views.strong_steps, "strong again")

    @cached_property
    def uncut(self) -> Tensor:
        """A strongly augmented view of which nothing is cut out: a label should still be seen in it."""
        return self._drawn(self._views.uncut_steps, "uncut")

    @cached_property
    def flipped(self) -> Tensor:
        """The second weak view of the SSB family: a random horizontal flip only."""
        return self._drawn(self._views.flip_steps, "flipped")

    def stream(self, purpose: str) -> torch.Generator:
        """A random stream of this step."""
        return torch_stream(*self._address, purpose)

    def _drawn(self, steps: tuple[Step, ...], purpose: str) -> Tensor:
        if purpose not in self._ready:
            streams = [one.stream(purpose) for one in self.beside]
            views = self._views.several(steps, [one.raw for one in self.beside], streams)
            for one, view in zip(self.beside, views, strict=True):
                one._ready[purpose] = view
        return self._ready.pop(purpose)


class Batch(NamedTuple):
    """What one step of training sees; either part may be empty."""

    labelled: Samples
    unlabelled: Samples


class Budget(NamedTuple):
    """How long one party trains: so many passes over its data, or so many steps."""

    epochs: int | None
    steps: int | None
    batch: int  # labelled images a step, or all of them where nothing is unlabelled
    unlabelled_ratio: int = 1  # unlabelled images a step = batch * ratio


def batches(data: ClientData, budget: Budget, address: tuple[Key, ...]) -> Iterator[Batch]:
    """The steps of one party's training; an epoch is one pass over the unlabelled data, if there are any.

    Labelled images come in shuffled passes one after the other, so a small labelled set fills every batch.
    """
    leading, size = _leading(data, budget)
    if len(leading) == 0:
        return
    order = _epochs(len(leading), size, torch_stream(*address, "order"))
    labelled = _endless(len(data.labelled), budget.batch, torch_stream(*address, "labelled"))
    nothing = torch.empty(0, dtype=torch.int64)
    count = step_count(data, budget)
    for steps in _in_a_row(count, size * data.images[0].numel()):
        chosen = [next(order) for _ in steps]
        with_label, without = chosen, [nothing] * len(steps)
        if len(data.unlabelled):
            with_label, without = [next(labelled) if len(data.labelled) else nothing for _ in steps], chosen
        yield from map(
            Batch,
            _samples(data, data.labelled, with_label, data.labels, [(*address, step, "labelled") for step in steps]),
            _samples(data, data.unlabelled, without, nothing, [(*address, step, "unlabelled") for step in steps]),
        )


def _in_a_row(steps: int, values: int) -> Iterator[range]:
    """Steps whose views are computed together, given how many values of pixels one of them sees."""
    together = max(1, IN_ONE_GO // values)
    return (range(start, min(start + together, steps)) for start in range(0, steps, together))


def _samples(
    data: ClientData, held: Tensor, positions: Sequence[Tensor], labels: Tensor, addresses: Sequence[tuple[Key, ...]]
) -> list[Samples]:
    """The batches of steps in a row."""
    raw = data.images[held[torch.cat(list(positions))]].split([len(position) for position in positions])
    samples = [
        Samples(images, position, labels[position] if len(labels) else labels, data.views, address)
        for images, position, address in zip(raw, positions, addresses, strict=True)
    ]
    for one in samples:
        one.beside = samples
    return samples


def step_count(data: ClientData, budget: Budget) -> int:
    """How many steps a budget has for a party that holds these data."""
    return budget.steps if budget.steps is not None else (budget.epochs or 0) * epoch_length(data, budget)


def epoch_length(data: ClientData, budget: Budget) -> int:
    """Steps in one of the epochs above."""
    leading, size = _leading(data, budget)
    return steps_per_epoch(len(leading), size)


def _leading(data: ClientData, budget: Budget) -> tuple[Tensor, int]:
    """The images an epoch passes over, and how many of them a step sees."""
    if len(data.unlabelled):
        return data.unlabelled, budget.batch * budget.unlabelled_ratio
    return data.labelled, budget.batch


def steps_per_epoch(count: int, size: int) -> int:
    """Batches in one pass over so many images."""
    return len(_cuts(count, size))


def _cuts(count: int, size: int) -> list[tuple[int, int]]:
    cuts = [(start, min(start + size, count)) for start in range(0, count, size)]
    if len(cuts) > 1 and cuts[-1][1] - cuts[-1][0] < min(SMALLEST_TAIL, size):
        cuts.pop()
    return cuts


def _epochs(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    while True:
        order = torch.randperm(count, generator=generator)
        for start, end in _cuts(count, size):
            yield order[start:end]


def _endless(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    pending = torch.empty(0, dtype=torch.int64)
    while True:
        while len(pending) < size:
            pending = torch.cat([pending, torch.randperm(count, generator=generator)])
        yield pending[:size]
        pending = pending[size:]
