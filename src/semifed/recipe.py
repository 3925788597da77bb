"""A recipe: everything that decides a run's numbers, from TOML, checked before anything is written."""

import re
import tomllib
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, fields
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from semifed.complaint import complaint, printable, shown, shown_key, whole
from semifed.errors import UserError, nearest
from semifed.override import parsed_value, tuples
from semifed.schedule import schedule_factor

if TYPE_CHECKING:  # a misspelt key is told at once, not after PyTorch is loaded
    from semifed.methods import AnyMethod

LARGEST = 2**31 - 1
MOST_CLIENTS = 1_000_000
MOST_WORKERS = 1_024
LARGEST_BATCH = 2**16
LARGEST_LAYER = 65_536
WIDEST = 4_096  # channels of a layer; above, a network does not fit in a usual machine's memory
ALTERNATIVES = (
    {"local.epochs", "local.steps"},
    {"scenario.known", "scenario.known_count"},
    {"scenario.labelled_per_class", "scenario.labelled_fraction", "scenario.labelled_clients"},
)
FASTEST = 1e6  # no learning rate, weight decay or norm above it is meant

Whole = Annotated[int, BeforeValidator(whole)]
Count = Annotated[Whole, Field(ge=0, le=LARGEST)]
AtLeastOne = Annotated[Whole, Field(ge=1, le=LARGEST)]
BatchSize = Annotated[Whole, Field(ge=1, le=LARGEST_BATCH)]
Positive = Annotated[float, Field(gt=0, le=FASTEST, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=FASTEST, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1), AfterValidator(printable)]


def _not_too_wide(head: str) -> str:
    if any(len(units) > 5 or int(units) > LARGEST_LAYER for units in re.findall(r"\d+", head)):
        raise ValueError(f"{shown(head)} has a layer of more than {LARGEST_LAYER} units")
    return head


class Table(BaseModel):
    """A table of a recipe: unknown keys are mistakes, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class ScenarioTable(Table):
    """Where the labels are, which classes there are, how the data is spread."""

    labels: Literal["server", "clients", "some-clients"] = "clients"
    classes: Literal["known", "open", "novel"] = "known"
    clients: Annotated[Whole, Field(ge=1, le=MOST_CLIENTS)] = 20
    partition: Text = "iid"
    alpha: Positive | None = None
    labelled_per_class: AtLeastOne | None = None
    labelled_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    labelled_clients: AtLeastOne | None = None
    known: tuple[Count, ...] | None = None
    known_count: AtLeastOne | None = None
    subset: AtLeastOne | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "ScenarioTable":
        from semifed.data.partition import KINDS

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
            needed = " or ".join(wanted)
            found = " and ".join(given) or "none of them"
            raise ValueError(f"{wanted[0]}: labels = '{self.labels}' needs exactly {needed}, found {found}")
        if self.labelled_clients is not None and self.labelled_clients > self.clients:
            raise ValueError(f"labelled_clients: {self.labelled_clients} of {self.clients} clients cannot be labelled")
        return self


class ModelTable(Table):
    """The network."""

    name: Text = "cnn"
    width: (
        Annotated[float, Field(gt=0, le=WIDEST / 128, allow_inf_nan=False)]
        | tuple[Annotated[Whole, Field(ge=1, le=WIDEST)], ...]
        | None
    ) = None
    head: Annotated[Text, AfterValidator(_not_too_wide)] = "linear"
    batchnorm: Literal["auto", "static", "tracked", "local"] = "auto"
    heads: Mapping[str, Annotated[Text, AfterValidator(_not_too_wide)]] = {}  # sizes of heads a method asks for


class ViewsTable(Table):
    """What networks see of an image: steps of weak and strong augmentation."""

    weak: Text = "flip crop(4)"
    strong: Text = "flip crop(4) randaugment(2,10) cutout(16)"


class LocalTable(Table):
    """Training at a client within a round."""

    epochs: AtLeastOne | None = None
    steps: AtLeastOne | None = None
    batch: BatchSize = 32
    unlabelled_ratio: AtLeastOne = 1
    lr: Positive = 0.03
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False
    weight_decay: NotNegative = 0.0
    clip: Positive | None = None
    schedule: Text = "constant"
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
    batch: BatchSize = 32
    lr: Positive | None = None


class EvaluateTable(Table):
    """When and on what the model is tested."""

    every: AtLeastOne = 1
    unseen: tuple[Text, ...] = ()
    accept: Annotated[float, Field(gt=0, lt=1)] = 0.95


class EngineTable(Table):
    """Where clients run: decides the speed, never the numbers."""

    name: Literal["local"] = "local"
    workers: Annotated[Whole, Field(ge=0, le=MOST_WORKERS)] = 0
    device: Literal["cpu"] = "cpu"
    timeout: Positive | None = None


class Recipe(Table):
    """One run, fully described."""

    dataset: Text
    data: Text | None = None
    rounds: AtLeastOne
    seed: Count = 0
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

    def build_method(self) -> "AnyMethod":
        """The method with its hyper-parameters."""
        from semifed.methods import method_class

        options = dict(self.method)
        if "name" not in options:
            raise UserError("method.name: this key is missing")
        name = options.pop("name")
        if not isinstance(name, str):
            raise UserError(f"method.name: {shown(name)} is not text")
        kind = method_class(name)
        hints = get_type_hints(kind, include_extras=True)
        valid = [field.name for field in fields(kind)]
        for key, value in options.items():
            if key not in valid:
                hint = nearest(key, valid) if valid else f"{name} has no options"
                raise UserError(f"method.{shown_key(key)}: unknown key; {hint}")
            try:
                options[key] = TypeAdapter(hints[key]).validate_python(value, strict=True)
            except ValidationError as error:
                raise UserError(complaint(error, prefix=f"method.{key}")) from None
        built: AnyMethod = kind(**options)
        return built

    def refuse_meaningless(self) -> None:
        """A method may have no meaning in a scenario: the error names the reason and the nearest that works."""
        reasons = self.build_method().no_meaning
        for key, chosen in (("labels", self.scenario.labels), ("classes", self.scenario.classes)):
            if chosen in reasons:
                raise UserError(f"scenario.{key}={chosen} has no meaning for {self.method['name']}: {reasons[chosen]}")

    def plain(self) -> dict[str, Any]:
        """The recipe as nested tables without absent keys, the method's defaults written out."""
        tables: dict[str, Any] = self.model_dump(exclude_none=True, mode="json")
        tables["method"] = {"name": self.method["name"]} | asdict(self.build_method())
        return tables

    def to_toml(self) -> str:
        """The resolved recipe, which runs again as it is."""
        return tomli_w.dumps(self.plain())


@cache
def recipe_names() -> tuple[str, ...]:
    """The built-in recipes."""
    root = files("semifed") / "recipes"
    top = Path(str(root))
    return tuple(sorted(path.relative_to(top).with_suffix("").as_posix() for path in top.rglob("*.toml")))


def load_recipe(name: str, overrides: Sequence[str] = (), *, for_training: bool = True) -> Recipe:
    """A built-in recipe by name, or a TOML file, with KEY=VALUE overrides by dotted path.

    An override takes the place of its alternatives in the file: `local.steps=5` where the recipe counts epochs.
    """
    try:
        tables = recipe_tables(name)
        _drop_alternatives(tables, {override.partition("=")[0].strip() for override in overrides})
        # The method first: its fields may stand before or after it on the command line.
        for override in sorted(overrides, key=lambda text: text.partition("=")[0].strip() != "method"):
            _apply(tables, override)
        return check_recipe(tables, for_training=for_training)
    except RecursionError:
        raise UserError(f"recipe {shown_key(name)} is nested too deeply") from None


def check_recipe(tables: Mapping[str, Any], *, for_training: bool = True) -> Recipe:
    """The recipe of nested tables, or a `UserError` that names the key.

    Looking at a scenario does not need a method that can train in it: `for_training=False`.
    """
    try:
        recipe = Recipe.model_validate(tuples(dict(tables)))
    except ValidationError as error:
        raise UserError(complaint(error, Recipe)) from None
    if for_training:
        recipe.refuse_meaningless()
    else:
        recipe.build_method()
    return recipe


def recipe_text(name: str) -> str:
    """The TOML text of a built-in recipe."""
    return (files("semifed") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")


def recipe_tables(name: str) -> dict[str, Any]:
    """The tables of a recipe, laid over those of the recipe it `extends`, and so on; their values are not checked."""
    layers = [_read(name)]
    visited = {Path(name).resolve()}
    while (base := layers[-1].pop("extends", None)) is not None:
        try:
            name = _base_name(base, beside=name)
            layers.append(_read(name))
            if Path(name).resolve() in visited:
                raise UserError(f"{shown(base)} leads back to itself")
        except UserError as error:
            raise UserError(f"extends: {error}") from None
        visited.add(Path(name).resolve())
    tables = layers.pop()
    for layer in reversed(layers):
        tables = _laid_over(tables, layer)
    return tables


def _base_name(base: object, beside: str) -> str:
    """What a recipe extends: a built-in one, or a file as seen from the recipe's own."""
    if not isinstance(base, str):
        raise UserError(f"{shown(base)} is not text")
    if base in recipe_names():
        return base
    if not base.endswith(".toml"):
        raise _no_recipe(base)
    return str(Path(beside).parent / base)


def _laid_over(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Both recipes in one: what the second says takes the place of the first's, as an override would."""
    given = {f"{name}.{key}" for name, table in own.items() if isinstance(table, dict) for key in table}
    _drop_alternatives(base, given)
    old, new = base.get("method"), own.get("method")
    if isinstance(old, dict) and isinstance(new, dict) and new.get("name") not in (None, old.get("name")):
        del base["method"]  # another method brings its own defaults
    return _merged(base, own)


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    return base | {
        key: _merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        for key, value in own.items()
    }


def _drop_alternatives(tables: dict[str, Any], given: Set[str]) -> None:
    """Remove what newly given keys stand in for: epochs where steps are given."""
    for alternatives in ALTERNATIVES:
        if given & alternatives:
            for key in alternatives - given:
                table, _, leaf = key.partition(".")
                if isinstance(tables.get(table), dict):
                    tables[table].pop(leaf, None)


def _no_recipe(name: str) -> UserError:
    close = get_close_matches(name.lower(), recipe_names(), n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'?" if close else "'semifed list recipes' shows them"
    return UserError(f"there is no recipe {shown(name)}; {hint} (or give a .toml file)")


def _read(name: str) -> dict[str, Any]:
    """One recipe file as it is."""
    if name in recipe_names():
        return tomllib.loads(recipe_text(name))
    path = Path(name)
    try:
        if path.suffix != ".toml" and not path.exists():
            raise _no_recipe(name)
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"recipe {shown_key(name)} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"recipe {shown_key(name)} cannot be read: it is no text") from None
    except ValueError as error:  # TOML's own complaint, a number too long, or a name no file can have
        raise UserError(f"recipe {shown_key(name)} is not valid TOML: {error}") from None
    if isinstance(tables.get("method"), str):
        tables["method"] = {"name": tables["method"]}
    return tables


def _apply(tables: dict[str, Any], override: str) -> None:
    key, found, text = override.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not found or not all(path):
        raise UserError(f"{shown(override)} is no override; write KEY=VALUE, e.g. local.lr=0.03")
    if path == ["extends"]:
        raise UserError("extends: belongs in a recipe file; on the command line, name the other recipe itself")
    value = parsed_value(text.strip())
    if path == ["method"] and isinstance(value, str):
        current = tables.get("method")
        if not isinstance(current, dict) or current.get("name") != value:  # another method brings its own defaults
            tables["method"] = {"name": value}
        return
    table: Any = tables
    for depth, name in enumerate(path[:-1]):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            part = shown_key(".".join(path[: depth + 1]))
            raise UserError(f"{shown_key('.'.join(path))}: '{part}' is a value, not a table")
    table[path[-1]] = value
