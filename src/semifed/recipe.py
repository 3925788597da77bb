"""A recipe: everything that decides a run's numbers, from TOML, checked before anything is written."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from semifed.data.partition import KINDS
from semifed.errors import UserError, nearest
from semifed.methods import AnyMethod, method_class
from semifed.schedule import schedule_factor

Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Table(BaseModel):
    """A table of a recipe: unknown keys are mistakes, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ScenarioTable(Table):
    """Where the labels are, which classes there are, how the data is spread."""

    labels: Literal["server", "clients", "some-clients"] = "clients"
    classes: Literal["known", "open", "novel"] = "known"
    clients: AtLeastOne = 20
    partition: str = "iid"
    alpha: Positive | None = None
    labelled_per_class: AtLeastOne | None = None
    labelled_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    labelled_clients: AtLeastOne | None = None
    known: tuple[Count, ...] | None = None
    known_count: AtLeastOne | None = None
    subset: AtLeastOne | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "ScenarioTable":
        if self.partition not in (*KINDS, "folders"):
            raise ValueError(
                f"partition: there is no '{self.partition}'; {nearest(self.partition, (*KINDS, 'folders'))}"
            )
        if self.alpha is None and self.partition not in ("iid", "folders"):
            raise ValueError(f"alpha: partition '{self.partition}' needs it")
        if self.known is not None and self.known_count is not None:
            raise ValueError("known: give known or known_count, not both")
        wanted = {
            "server": ["labelled_per_class"],
            "clients": ["labelled_per_class", "labelled_fraction"],
            "some-clients": ["labelled_clients"],
        }[self.labels]
        every = ["labelled_per_class", "labelled_fraction", "labelled_clients"]
        given = [name for name in every if getattr(self, name) is not None]
        if len(given) != 1 or given[0] not in wanted:
            raise ValueError(
                f"{wanted[0]}: labels = '{self.labels}' needs exactly {' or '.join(wanted)}, found {given or 'none'}"
            )
        if self.labelled_clients is not None and self.labelled_clients > self.clients:
            raise ValueError(f"labelled_clients: {self.labelled_clients} of {self.clients} clients cannot be labelled")
        return self


class ModelTable(Table):
    """The network."""

    name: str = "cnn"
    width: float | tuple[AtLeastOne, ...] | None = None
    head: str = "linear"
    batchnorm: Literal["auto", "static", "tracked"] = "auto"


class ViewsTable(Table):
    """What networks see of an image: steps of weak and strong augmentation."""

    weak: str = "flip crop(4)"
    strong: str = "flip crop(4) randaugment(2,10) cutout(16)"


class LocalTable(Table):
    """Training at a client within a round."""

    epochs: AtLeastOne | None = None
    steps: AtLeastOne | None = None
    batch: AtLeastOne = 32
    unlabelled_ratio: AtLeastOne = 1
    lr: Positive = 0.03
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False
    weight_decay: NotNegative = 0.0
    clip: Positive | None = None
    schedule: str = "constant"
    keep_optimizer: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> "LocalTable":
        if self.epochs is not None and self.steps is not None:
            raise ValueError("epochs: give epochs or steps, not both")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov: needs a momentum above 0")
        schedule_factor(self.schedule, 0, 1)
        return self


class ServerTable(Table):
    """Training at the server, where it holds labels."""

    warmup_epochs: Count = 0
    finetune_epochs: Count = 0
    batch: AtLeastOne = 32
    lr: Positive | None = None


class EvaluateTable(Table):
    """When and on what the model is tested."""

    every: AtLeastOne = 1
    unseen: tuple[str, ...] = ()
    accept: Annotated[float, Field(gt=0, lt=1)] = 0.95


class EngineTable(Table):
    """Where clients run: decides the speed, never the numbers."""

    name: Literal["local"] = "local"
    workers: Count = 0
    device: Literal["cpu"] = "cpu"
    timeout: Positive | None = None


class Recipe(Table):
    """One run, fully described."""

    dataset: str
    data: str | None = None
    rounds: AtLeastOne
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    clients_per_round: AtLeastOne | None = None
    min_clients: Count = 1
    scenario: ScenarioTable
    model: ModelTable = ModelTable()
    views: ViewsTable = ViewsTable()
    method: Mapping[str, Any]
    local: LocalTable = LocalTable()
    server: ServerTable = ServerTable()
    evaluate: EvaluateTable = EvaluateTable()
    engine: EngineTable = EngineTable()

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        if self.clients_per_round is not None and self.clients_per_round > self.scenario.clients:
            raise ValueError(
                f"clients_per_round: {self.clients_per_round} is more than the {self.scenario.clients} clients"
            )
        if self.min_clients > self.cohort_size:
            raise ValueError(f"min_clients: {self.min_clients} is more than the {self.cohort_size} clients of a round")
        if self.model.batchnorm == "static" and self.scenario.labels != "server":
            raise ValueError(
                "model.batchnorm: static statistics need labels at the server to be computed on; use tracked"
            )
        return self

    @property
    def cohort_size(self) -> int:
        """How many clients take part in a round."""
        return self.clients_per_round or self.scenario.clients

    @property
    def batchnorm(self) -> str:
        """Static statistics where the server has images to compute them on, tracked ones otherwise."""
        if self.model.batchnorm != "auto":
            return self.model.batchnorm
        return "static" if self.scenario.labels == "server" else "tracked"

    def build_method(self) -> AnyMethod:
        """The method with its hyper-parameters."""
        options = dict(self.method)
        kind = method_class(str(options.pop("name", "")))
        valid = [field.name for field in fields(kind)]
        for key in options:
            if key not in valid:
                hint = nearest(key, valid) if valid else f"{self.method['name']} has no options"
                raise UserError(f"method.{key}: unknown key; {hint}")
        try:
            built: AnyMethod = TypeAdapter(kind).validate_python(options)
        except ValidationError as error:
            raise UserError(_told(error, "method")) from None
        for key, value in (("labels", self.scenario.labels), ("classes", self.scenario.classes)):
            if value in built.no_meaning:
                raise UserError(
                    f"scenario.{key}={value} has no meaning for {self.method['name']}: {built.no_meaning[value]}"
                )
        return built

    def plain(self) -> dict[str, Any]:
        """The recipe as nested tables without absent keys, the method's defaults written out."""
        tables: dict[str, Any] = self.model_dump(exclude_none=True, mode="json")
        tables["method"] = {"name": self.method["name"]} | asdict(self.build_method())
        return tables

    def to_toml(self) -> str:
        """The resolved recipe, which runs again as it is."""
        return tomli_w.dumps(self.plain())


def recipe_names() -> list[str]:
    """The built-in recipes."""
    root = files("semifed") / "recipes"
    top = Path(str(root))
    return sorted(path.relative_to(top).with_suffix("").as_posix() for path in top.rglob("*.toml"))


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A built-in recipe by name, or a TOML file, with KEY=VALUE overrides by dotted path."""
    tables = _read(name)
    for override in overrides:
        _apply(tables, override)
    return check_recipe(tables)


def check_recipe(tables: Mapping[str, Any]) -> Recipe:
    """The recipe of nested tables, or a `UserError` that names the key."""
    try:
        recipe = Recipe.model_validate(dict(tables))
    except ValidationError as error:
        raise UserError(_told(error)) from None
    recipe.build_method()
    return recipe


def recipe_text(name: str) -> str:
    """The TOML text of a built-in recipe."""
    return (files("semifed") / "recipes" / f"{name}.toml").read_text()


def _read(name: str) -> dict[str, Any]:
    if name in recipe_names():
        return tomllib.loads(recipe_text(name))
    path = Path(name)
    if not path.suffix and not path.exists():
        raise UserError(f"there is no recipe '{name}'; {nearest(name, recipe_names())} (or give a .toml file)")
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"recipe {name} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"recipe {name} is not valid TOML: {error}") from None


def _apply(tables: dict[str, Any], override: str) -> None:
    key, found, text = override.partition("=")
    path = key.strip().split(".")
    if not found or not all(path):
        raise UserError(f"'{override}' is no override; write KEY=VALUE, e.g. local.lr=0.03")
    value = _value(text.strip())
    if path == ["method"] and isinstance(value, str):
        tables["method"] = {"name": value}
        return
    for depth, name in enumerate(path[:-1]):
        tables = tables.setdefault(name, {})
        if not isinstance(tables, dict):
            raise UserError(f"{key}: '{'.'.join(path[: depth + 1])}' is a value, not a table")
    tables[path[-1]] = value


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _told(error: ValidationError, prefix: str = "") -> str:
    """The first complaint in words: key, what is wrong, the nearest valid name."""
    first = error.errors(include_url=False)[0]
    path = [prefix] if prefix else []
    path += [str(part) for part in first["loc"] if not (isinstance(part, str) and "[" in part)]
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        return f"{key}: unknown key; {nearest(path[-1], _keys(path[:-1]))}"
    if first["type"] == "missing":
        return f"{key}: this key is missing"
    if first["type"] == "value_error":
        inner = str(first["ctx"]["error"])
        return f"{key}.{inner}" if key else inner
    if first["type"] == "literal_error":
        return f"{key}: '{first['input']}' is none of {first['ctx']['expected']}"
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"{key or 'recipe'}: {message} (found {first['input']!r})"


def _keys(path: Sequence[str]) -> list[str]:
    table: type[BaseModel] = Recipe
    for name in path:
        kind = table.model_fields[name].annotation if name in table.model_fields else None
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return []
        table = kind
    return list(table.model_fields)
