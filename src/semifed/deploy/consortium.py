"""The two files that describe a federation: `consortium.toml` at the server, `client.toml` at each client."""

import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import torch
from pydantic import Field, ValidationError, model_validator

from semifed.assembly import Parts, told_parts
from semifed.complaint import complaint
from semifed.data.client import ClientData
from semifed.data.datasets import Dataset, moments
from semifed.data.image_folder import image_files
from semifed.data.scenario import UNKNOWN, Scenario, Sealed
from semifed.data.site import decoded, read_site
from semifed.data.views import Views
from semifed.errors import UserError
from semifed.override import tuples
from semifed.recipe import Positive, Table, Text, Whole
from semifed.recipe_file import load_recipe

CONSORTIUM, CLIENT, RECIPE = "consortium.toml", "client.toml", "recipe.toml"
A_DAY = 86_400.0
MIDDLE, SPREAD = (0.5,), (0.25,)  # of pixels of nobody's images in particular
PLAIN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # it names folders and files
Side = Annotated[Whole, Field(ge=1, le=4096)]
T = TypeVar("T", bound=Table)


def refuse_odd_names(classes: Sequence[str]) -> None:
    """Classes are folders at every party, and their places in the list are what a model says."""
    for name in classes:
        if not name.isprintable() or name != name.strip() or name.startswith(".") or set(name) & set("/\\"):
            raise UserError(f"classes: {name!r} cannot name a folder; rename it without slashes and outer blanks")
    if twice := [name for name, count in Counter(classes).items() if count > 1]:
        raise UserError(f"classes: '{twice[0]}' is there twice")


class Member(Table):
    """A client as the server knows it; its number is its place in the list."""

    name: Annotated[str, Field(pattern=PLAIN_NAME)]
    key: Text  # its public key, one line as OpenSSH writes it


class Consortium(Table):
    """What all parties have agreed on."""

    address: Text  # host:port at which clients reach the server
    classes: Annotated[tuple[Text, ...], Field(min_length=1)]  # in the order of the model's outputs
    image: tuple[Side, Side, Side]  # channels, height, width that every image is brought to
    mean: tuple[float, ...] | None = None  # of pixels in [0, 1]; absent: those of the server's labelled images
    std: tuple[Positive, ...] | None = None
    port: Annotated[Whole, Field(ge=1, le=65_535)] = 8000  # of Flower, on the loopback address of the server's machine
    patience: Positive = A_DAY  # seconds a round waits for min_clients
    clients: Annotated[tuple[Member, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _folders(self) -> "Consortium":
        refuse_odd_names(self.classes)
        return self


class Client(Table):
    """What a client decides for itself."""

    server: Text  # host:port
    number: Annotated[Whole, Field(ge=0)]
    data: Text = "data"  # folders, relative to this file
    state: Text = "state"
    share: Literal["nothing", "losses"] = "nothing"  # beside what the method reports


def read_consortium(folder: Path) -> Consortium:
    """The server's file."""
    return _read(folder / CONSORTIUM, Consortium)


def read_client(folder: Path) -> Client:
    """A client's file."""
    return _read(folder / CLIENT, Client)


def server_parts(folder: Path) -> Parts:
    """What the recipe and the server's own images stand for; the clients' images are elsewhere."""
    consortium = read_consortium(folder)
    recipe = load_recipe(str(folder / RECIPE), [])
    method = recipe.build_method()
    if method.opens_labels or method.opens_classes():
        raise UserError(f"{recipe.method['name']} needs labels that no client has: it is a bound, for simulations only")
    if recipe.scenario.clients != len(consortium.clients):
        raise UserError(
            f"{folder / RECIPE}: scenario.clients is {recipe.scenario.clients}, "
            f"{CONSORTIUM} lists {len(consortium.clients)} clients"
        )
    test, raw, names = _test_images(folder / "data" / "test", consortium)
    own = None
    if recipe.scenario.labels == "server" or method.groups_by_labels():
        why = "labels = 'server'" if recipe.scenario.labels == "server" else str(recipe.method["name"])
        plain = Views.parse("none", "none", mean=MIDDLE * consortium.image[0], std=SPREAD * consortium.image[0])
        own = read_site(folder / "data", consortium.classes, consortium.image, plain)
        own = own._replace(unlabelled=own.unlabelled[:0])
        if not len(own.labelled):
            raise UserError(f"{folder / 'data' / 'labelled'}: {why} needs images there, found none")
    mean, std = _normal(consortium, own)
    views = Views.parse(recipe.views.weak, recipe.views.strong, mean=mean, std=std)
    own = None if own is None else own._replace(views=views)
    images = own.images[own.labelled] if own is not None else test[:0]
    labels = own.labels if own is not None else raw[:0]
    dataset = Dataset(folder.resolve().name, images, labels, test, raw, names, mean, std, str(folder))
    known = tuple(range(len(consortium.classes)))
    test_labels = torch.where(raw < len(known), raw, UNKNOWN)
    trained_on, held_back = (own, None) if recipe.scenario.labels == "server" else (None, own)
    sealed = Sealed(labels)
    scenario = Scenario(dataset, known, views, trained_on, [], labels, sealed, test_labels, held_back)
    parts = told_parts(recipe, scenario)
    if parts.recipe.method.get("novel") == 0:
        raise UserError(
            f"{folder / RECIPE}: set method.novel, the number of classes without a name that the clients may hold: "
            f"{folder / 'data' / 'test'} has no folder of any"
        )
    return parts


def _normal(consortium: Consortium, own: ClientData | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of pixels: as agreed, or of images that may be learnt from, or anyone's; never of tests."""
    if consortium.mean is not None and consortium.std is not None:
        return consortium.mean, consortium.std
    if own is not None:
        return moments(own.images[own.labelled].numpy())
    return MIDDLE * consortium.image[0], SPREAD * consortium.image[0]


def _test_images(folder: Path, consortium: Consortium) -> tuple[torch.Tensor, torch.Tensor, tuple[str, ...]]:
    """Images, classes and their names: the known ones and then all other folders, which hold unknowns."""
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    children = [path for path in inside if path.is_dir() and not path.name.startswith(".") and image_files(path)]
    others = [path.name for path in children if path.name not in consortium.classes]
    names = (*consortium.classes, *others)
    files = [(path, names.index(child.name)) for child in children for path in image_files(child)]
    if not any(label < len(consortium.classes) for _, label in files):
        raise UserError(f"{folder}: expected test images of the known classes, a folder a class, found none")
    files.sort(key=lambda pair: (pair[0].name, pair[1]))
    images = decoded([path for path, _ in files], consortium.image)
    return images, torch.tensor([label for _, label in files]), names


def _read(path: Path, kind: type[T]) -> T:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; `semifed deploy init` writes it") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: {error}") from None
    try:
        return kind.model_validate(tuples(tables))
    except ValidationError as error:
        raise UserError(f"{path}: {complaint(error, kind)}") from None
