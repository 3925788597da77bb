"""A delivered model at work: it needs nothing of its run but the directory `model`."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from semifed.complaint import complaint
from semifed.data.client import outputs_of
from semifed.data.image_folder import IMAGE_SUFFIXES, image_files, read_image
from semifed.data.scenario import UNKNOWN, UNKNOWN_NAME
from semifed.data.views import Views
from semifed.discovery.gallery import Gallery
from semifed.durable import write_atomically
from semifed.errors import UserError
from semifed.methods import AnyMethod, finds_groups, method_class, method_names
from semifed.models.backbones import Normalisation
from semifed.models.network import Output, build_network
from semifed.net import Net
from semifed.predictions import BATCH
from semifed.recipe import ModelTable

LABELLED = "labelled.safetensors"
FAULTS_TOLD = 3

Size = Annotated[int, Field(ge=1, le=2**16)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Image(BaseModel):
    channels: Size
    size: tuple[Size, Size]  # height, width


class Description(BaseModel):
    """The content of model.json, as far as predictions need it."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    model: ModelTable
    architecture: dict[str, Any] = {}  # of a pretrained backbone, beyond the keys of its model
    heads: dict[str, str]
    method: dict[str, Any]
    image: _Image
    classes: Annotated[tuple[str, ...], Field(min_length=1)]
    mean: tuple[Number, ...]
    std: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...]
    threshold: Number | None  # None: nothing is rejected


class Decision(NamedTuple):
    """What is decided of n images: `semifed predict` puts it into words, `semifed export` into a graph."""

    probabilities: Tensor  # [n, known classes]
    unknown: Tensor  # [n], larger = more unknown
    label: Tensor  # int64 [n], a known class, or -1 for unknown


def decided(probabilities: Tensor, unknown: Tensor, threshold: float | None) -> Decision:
    """The most probable class, or unknown above the threshold."""
    label = probabilities.argmax(dim=1)
    if threshold is not None:
        # In double precision, as the threshold was found: rounding may not move an image across it.
        label = torch.where(unknown.double() > threshold, UNKNOWN, label)
    return Decision(probabilities, unknown, label)


class Answer(NamedTuple):
    """What the model says of one image."""

    image: Path
    label: str  # a class, or "unknown"
    confidence: float  # the largest probability among the known classes
    unknown_score: float


class Member(NamedTuple):
    """One image and where it belongs."""

    image: Path
    group: int  # from 0, the largest first; -1: in none
    label: str  # the known class it looks most like
    confidence: float


class Seen(NamedTuple):
    """Files as a model sees them."""

    images: Tensor  # uint8 [n, c, h, w]
    paths: list[Path]  # of these
    faults: list[UserError]  # of the others, which are no images or no longer whole


class Labelled(NamedTuple):
    """Images with labels that the model groups others beside: what is known of them is not more than this."""

    features: Tensor  # [m, features]
    labels: Tensor  # [m], known classes


class Model:
    """A delivered model, loaded."""

    def __init__(self, description: Description, method: AnyMethod, net: Net, labelled: Labelled) -> None:
        self.description = description
        self.method = method
        self.net = net
        self._labelled = labelled
        self._views = Views((), (), description.mean, description.std)

    @property
    def rejects(self) -> bool:
        """Whether it can call an image unknown."""
        return self.description.threshold is not None

    def answers(self, paths: Sequence[Path]) -> Iterator[Answer | UserError]:
        """One for each image file, in their order, or what is wrong with it; a few are in memory at a time."""
        for start in range(0, len(paths), BATCH):
            seen = self.see(paths[start : start + BATCH])
            said = self.said_of(seen.images) if seen.paths else []
            yield from (Answer(path, *answer) for path, answer in zip(seen.paths, said, strict=True))
            yield from seen.faults

    def said_of(self, images: Tensor) -> list[tuple[str, float, float]]:
        """Label, confidence and unknown score of images uint8 [n, c, h, w] that have the model's size."""
        probabilities, unknown, labels = self.decision_of(images)
        classes = self.description.classes
        names = [UNKNOWN_NAME if label == UNKNOWN else classes[label] for label in labels.tolist()]
        return list(zip(names, probabilities.amax(dim=1).tolist(), unknown.tolist(), strict=True))

    @torch.no_grad()
    def decision_of(self, images: Tensor) -> Decision:
        """The same in numbers."""
        return self.decision(self._views.plain(images))

    def decision(self, views: Tensor) -> Decision:
        """The same of images that are normalised already."""
        said = self.method.predict(self.net, views)
        return decided(said.probabilities, said.unknown, self.description.threshold)

    @torch.no_grad()
    def groups(self, images: Tensor) -> Tensor:
        """Which of them belong together, [n], whether their class has a name or not; -1 for those in no group."""
        if not self.sorts_images:
            finders = ", ".join(name for name in method_names() if finds_groups(method_class(name)))
            raise UserError(f"{self.method_name} looks for no groups; train one of: {finders}")
        said = outputs_of(self.net, images, torch.arange(len(images)), self._views.plain, BATCH)
        features, labels = self._labelled
        beside = Output(self.net.classify(features), features, {})
        return self.method.clusters(Gallery(said, beside, labels, seed=1))

    @property
    def sorts_images(self) -> bool:
        """Whether it can be asked for groups."""
        return finds_groups(type(self.method))

    @property
    def misses_labels(self) -> bool:
        """Whether it was to group images beside labelled ones, and came without any."""
        return self.method.groups_by_labels() and not len(self._labelled.labels)

    @property
    def method_name(self) -> str:
        """What it was trained by."""
        return str(self.description.method["name"])

    def see(self, paths: Sequence[Path]) -> Seen:
        """The images of files, in the model's size; one that cannot be read takes nothing from the others."""
        channels, size = self.description.image.channels, self.description.image.size
        seen = Seen(torch.empty(0, channels, *size, dtype=torch.uint8), [], [])
        pixels = []
        for path in paths:
            try:
                pixels.append(read_image(path, size, grey=channels == 1))
            except UserError as fault:
                seen.faults.append(fault)
            else:
                seen.paths.append(path)
        return seen._replace(images=torch.from_numpy(np.stack(pixels))) if pixels else seen


def load_model(run: Path) -> Model:
    """The model of a finished run; UserError if it is missing or damaged."""
    if not run.is_dir():
        raise UserError(f"{run}: no such directory; expected one written by `semifed run`")
    described, stored = run / "model" / "model.json", run / "model" / "model.safetensors"
    for path in (described, stored):
        if not path.is_file():
            raise UserError(f"{run}: no model in it ({path.relative_to(run)} is missing); is the run finished?")
    description = _description(described)
    try:
        method, net = _built(description, load_file(stored), stored)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{stored} is damaged: {error}") from None
    except UserError as error:
        raise UserError(f"{described} is damaged: {error}") from None
    return Model(description, method, net, _labelled(run / "model" / LABELLED, net, len(description.classes)))


def _labelled(path: Path, net: Net, classes: int) -> Labelled:
    """The labelled images a model brings along; none where it has no use for them, or nobody hands them on."""
    width = net.network.backbone.features
    if not path.is_file():
        return Labelled(torch.empty(0, width), torch.empty(0, dtype=torch.int64))
    try:
        found = Labelled(**load_file(path))
    except (SafetensorError, OSError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    features, labels = found
    fits = features.shape == (len(labels), width) and features.dtype == torch.float32 and labels.ndim == 1
    if not fits or labels.dtype != torch.int64 or not bool(((labels >= 0) & (labels < classes)).all()):
        raise UserError(f"{path} is damaged: expected {width} features and a known class for each image")
    return found


def _description(path: Path) -> Description:
    try:
        text = path.read_text(encoding="utf-8")
        description = Description.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = first["msg"] if first["type"] == "json_invalid" or not first["loc"] else complaint(error, Description)
        raise UserError(f"{path} is damaged: {problem}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is damaged: it is no text") from None
    channels = description.image.channels
    if channels not in (1, 3):
        raise UserError(f"{path}: the model wants images of {channels} channels; files can be read with 1 or 3")
    if not len(description.mean) == len(description.std) == channels:
        raise UserError(f"{path} is damaged: mean and std must have a number for each of {channels} channels")
    return description


def _built(description: Description, weights: dict[str, Tensor], path: Path) -> tuple[AnyMethod, Net]:
    options = dict(description.method)
    try:
        method = method_class(str(options.pop("name", "")))(**options)
    except TypeError as error:
        raise UserError(f"method: {error}") from None
    network = build_network(
        description.model.name,
        channels=description.image.channels,
        size=description.image.size,
        classes=len(description.classes),
        width=description.model.width,
        head=description.model.head,
        further=description.heads,
        weights=description.model.weights,
        input_size=description.model.input_size,
        trainable=description.model.trainable,
        normalised=Normalisation(description.mean, description.std),
        architecture=description.architecture,
        generator=torch.Generator(),
    )
    net = Net(network, "tracked")  # evaluation reads the stored statistics, whoever wrote them
    expected = {name: tensor.shape for name, tensor in (net.state() | net.frozen_weights()).items()}
    if expected != {name: tensor.shape for name, tensor in weights.items()}:
        raise UserError(f"it describes another network than the one in {path.name}")
    net.load(weights)
    return method, net


def images_of(arguments: Sequence[Path]) -> list[Path]:
    """The image files given, and those in the folders given."""
    found: list[Path] = []
    for path in arguments:
        if path.is_dir():
            inside = image_files(path)
            if not inside:
                raise UserError(f"{path}: no images in this folder ({', '.join(sorted(IMAGE_SUFFIXES))})")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise UserError(f"{path}: no such image or folder")
    return found


def write_csv(rows: Sequence[NamedTuple], path: Path) -> None:
    """One line for each image or number, of which there is at least one."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(rows[0]._fields)
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode(errors="surrogateescape"))  # file names may be of any bytes


def refuse_unreadable(faults: Sequence[UserError], images: int) -> None:
    """Tell what could not be read, after all else has been told."""
    if faults:
        told = "; ".join(map(str, faults[:FAULTS_TOLD]))
        more = f"; and {len(faults) - FAULTS_TOLD} more" if len(faults) > FAULTS_TOLD else ""
        raise UserError(f"{told}{more}" if images == len(faults) == 1 else f"left out of {images} images: {told}{more}")
