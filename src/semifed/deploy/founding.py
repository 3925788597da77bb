"""Founding a federation: everything its parties need, written into one directory."""

import os
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tomli_w
from cryptography.hazmat.primitives import serialization
from jinja2 import Environment, StrictUndefined
from PIL import Image
from torch import Tensor

from semifed import __version__
from semifed.assembly import prepare_run
from semifed.data.scenario import UNKNOWN, Scenario
from semifed.deploy.certificates import client_key, new_authority, private_pem, server_certificate
from semifed.deploy.consortium import CLIENT, CONSORTIUM, PLAIN_NAME, RECIPE, refuse_odd_names
from semifed.errors import UserError
from semifed.methods import finds_groups
from semifed.recipe import Recipe, check_recipe

SECRET = 0o600
AN_HOUR = 3_600.0  # no round waits longer for a client that was sent a letter


class Agreement(NamedTuple):
    """What the parties have agreed on before anything is written."""

    recipe: Recipe
    address: str  # host:port at which clients reach the server
    port: int  # of Flower's SuperLink, on the loopback address of the server's machine
    members: Sequence[str]  # names of the clients
    classes: Sequence[str]
    image: tuple[int, int, int]
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


def found(directory: Path, agreement: Agreement) -> None:
    """Write the folders of server, clients and authority."""
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"{directory} is not empty; choose another directory")
    host = _host(agreement.address)
    if len(set(agreement.members)) < len(agreement.members):
        raise UserError("clients: every client needs a name of its own")
    for name in agreement.members:
        if re.fullmatch(PLAIN_NAME, name) is None:
            raise UserError(f"clients: '{name}' cannot name a folder; use letters, digits, dots, dashes")
    refuse_odd_names(agreement.classes)
    server, authority = (directory / "server").absolute(), new_authority(f"semifed {host}")
    certificate = server_certificate(authority, [host, "localhost", "127.0.0.1"])
    ca = authority.certificate.public_bytes(serialization.Encoding.PEM)
    keys = {name: client_key() for name in agreement.members}
    agreement = agreement._replace(recipe=_for_a_federation(agreement.recipe))
    facts = {**agreement._asdict(), **_recipe_facts(agreement.recipe)}

    _write(directory / "README.md", filled("README.md", **facts))
    _write(directory / "authority" / "ca.key", private_pem(authority.key), secret=True)
    _write(server / RECIPE, agreement.recipe.to_toml())
    _write(server / CONSORTIUM, tomli_w.dumps(_consortium(agreement, {n: k.public.decode() for n, k in keys.items()})))
    _write(server / "tls" / "ca.crt", ca)
    _write(server / "tls" / "server.crt", certificate.public)
    _write(server / "tls" / "server.key", certificate.private, secret=True)
    _write(server / "app" / "pyproject.toml", filled("app_pyproject.toml"))
    _write(server / "app" / "semifed_app.py", filled("semifed_app.py"))
    _write(server / "semifed-server.service", filled("semifed-server.service"))
    for name in ("labelled", "test"):
        (server / "data" / name).mkdir(parents=True)
    for number, name in enumerate(agreement.members):
        own = directory / "clients" / name
        _write(own / CLIENT, tomli_w.dumps({"server": agreement.address, "number": number, "share": "nothing"}))
        _write(own / "key", keys[name].private, secret=True)
        _write(own / "key.pub", keys[name].public + b"\n")
        _write(own / "ca.crt", ca)
        _write(own / "semifed-client.service", filled("semifed-client.service", name=name))
        for kind in ("labelled", "unlabelled"):
            (own / "data" / kind).mkdir(parents=True)


def sample_agreement(recipe: Recipe, address: str, port: int) -> Agreement:
    """An agreement that fits a recipe's own data set, for a trial with images everyone has."""
    scenario = prepare_run(recipe).scenario
    members = [f"client-{number}" for number in range(recipe.scenario.clients)]
    channels, height, width = scenario.dataset.x_train.shape[1:]
    return Agreement(
        recipe,
        address,
        port,
        members,
        scenario.class_names(),
        (channels, height, width),
        scenario.views.mean,
        scenario.views.std,
    )


def fill_with_samples(directory: Path, recipe: Recipe) -> None:
    """Give every party of a founded federation the images that the recipe's scenario gives it."""
    scenario = prepare_run(recipe).scenario
    names, data = scenario.class_names(), scenario.dataset
    server = directory / "server" / "data"
    held = scenario.server or scenario.validation
    if held is not None:
        _save(server / "labelled", data.x_train[held.labelled], [names[label] for label in held.labels.tolist()])
    every = scenario.every_name()
    raw = scenario.every_class(data.y_test).tolist()
    _save(server / "test", data.x_test, [every[label] for label in raw])
    for number in range(recipe.scenario.clients):
        _fill_client(directory / "clients" / f"client-{number}" / "data", scenario, number)


def _fill_client(folder: Path, scenario: Scenario, number: int) -> None:
    held, names = scenario.client(number), scenario.class_names()
    assert UNKNOWN not in held.labels.tolist()
    _save(folder / "labelled", held.images[held.labelled], [names[label] for label in held.labels.tolist()])
    _save(folder / "unlabelled", held.images[held.unlabelled], None)


def _save(folder: Path, images: Tensor, classes: Sequence[str] | None) -> None:
    """Images as files without loss, numbered in their order."""
    for number, image in enumerate(images.numpy()):
        place = folder if classes is None else folder / classes[number]
        place.mkdir(parents=True, exist_ok=True)
        pixels = image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0))
        Image.fromarray(pixels).save(place / f"{number:07d}.png")


def _for_a_federation(recipe: Recipe) -> Recipe:
    """The recipe as far as it is about training: which images there are is decided by folders."""
    tables = recipe.plain()
    scenario = {key: value for key, value in tables["scenario"].items() if key not in ("alpha", "subset")}
    return check_recipe(
        {
            **tables,
            "dataset": "federation",
            "scenario": {**scenario, "partition": "folders"},
            # Foreign sets may not be where the server is, and the clients' own images never are.
            "evaluate": {**tables["evaluate"], "unseen": [], "discover": "test"},
            "engine": {"timeout": recipe.engine.timeout or AN_HOUR},
        }
    )


def _consortium(agreement: Agreement, keys: dict[str, str]) -> dict[str, object]:
    normal = {} if agreement.mean is None else {"mean": list(agreement.mean), "std": list(agreement.std or ())}
    members = [{"name": name, "key": keys[name]} for name in agreement.members]
    agreed = {
        "address": agreement.address,
        "port": agreement.port,
        "classes": list(agreement.classes),
        "image": list(agreement.image),
    }
    return {**agreed, **normal, "clients": members}


def _recipe_facts(recipe: Recipe) -> dict[str, object]:
    at_server = recipe.scenario.labels == "server" or recipe.build_method().groups_by_labels()
    facts = {"method": recipe.method["name"], "rounds": recipe.rounds, "labels": recipe.scenario.labels}
    to_install = {"version": __version__, "extras": ",".join(_extras(recipe))}
    return {**facts, **to_install, "labelled_at_server": at_server}


def _extras(recipe: Recipe) -> list[str]:
    """What to install of semifed beside its core, by the names of its extras."""
    groups = ["discovery"] if finds_groups(type(recipe.build_method())) else []
    network = {"efficientnet-lite0": ["efficientnet"], "vit": ["vit"]}.get(recipe.model.name, [])
    accountant = [] if recipe.privacy.mode == "none" else ["privacy"]
    return ["flower", *groups, *network, *accountant]


def _host(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"address: '{address}' is not of the form host:port")
    if not host.isascii():
        raise UserError(f"address: '{host}' is not ASCII; certificates name such hosts by their xn-- form")
    return host.strip("[]")


def filled(template: str, **facts: object) -> str:
    """A template of the package with its gaps filled."""
    text = files("semifed.deploy").joinpath("templates", template).read_text(encoding="utf-8")
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    return environment.from_string(text).render(**facts)


def _write(path: Path, content: str | bytes, *, secret: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with open(os.open(path, flags, SECRET if secret else 0o644), "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
