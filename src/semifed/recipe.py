"""A recipe: everything that decides a run's numbers, from TOML, checked before anything is written."""

import re
from collections.abc import Mapping
from dataclasses import asdict, fields
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
from semifed.override import tuples
from semifed.schedule import schedule_factor

if TYPE_CHECKING:  # a misspelt key is told at once, not after PyTorch is loaded
    from semifed.methods import AnyMethod

LARGEST = 2**31 - 1
MOST_CLIENTS = 1_000_000
MOST_WORKERS = 1_024
LARGEST_BATCH = 2**16
LARGEST_LAYER = 65_536
LARGEST_SIDE = 1_024  # pixels
WIDEST = 4_096  # channels of a layer; above, a network does not fit in a usual machine's memory
FASTEST = 1e6  # no learning rate, weight decay or norm above it is meant

Whole = Annotated[int, BeforeValidator(whole)]
Count = Annotated[Whole, Field(ge=0, le=LARGEST)]
AtLeastOne = Annotated[Whole, Field(ge=1, le=LARGEST)]
BatchSize = Annotated[Whole, Field(ge=1, le=LARGEST_BATCH)]
Positive = Annotated[float, Field(gt=0, le=FASTEST, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=FASTEST, allow_inf_nan=False)]
BatchNormKind = Literal["auto", "static", "tracked", "averaged", "local"]
Text = Annotated[str, Field(min_length=1), AfterValidator(printable)]


def _not_too_wide(head: str) -> str:
    if any(len(units) > 5 or int(units) > LARGEST_LAYER for units in re.findall(r"(?<![\d.])\d+(?![\d.])", head)):
        raise ValueError(f"{shown(head)} has a layer of more than {LARGEST_LAYER} units")
    return head


class Table(BaseModel):
    """A table of a recipe: unknown keys are mistakes, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class ScenarioTable(Table):
    """Where the labels are, which classes there are, how the data is spread."""

    labels: Literal["server", "clients", "some-clients"] = "clients"  # where they are
    classes: Literal["known", "open", "novel"] = "known"  # unlabelled ones; open: to be rejected, novel: to be found
    clients: Annotated[Whole, Field(ge=1, le=MOST_CLIENTS)] = 20
    partition: Text = "iid"  # iid, dirichlet, paired, balanced-dirichlet, shards; folders: as the data say
    alpha: Positive | None = None  # small is skewed; of shards: how many a client has; iid and folders need none
    labelled_per_class: AtLeastOne | None = None  # over all data; at clients these are among the unlabelled too (SAGE)
    labelled_fraction: Annotated[float, Field(gt=0, le=1)] | None = None  # of each client's known images (FedLPA)
    labelled_clients: AtLeastOne | None = None  # so many hold labels of all their known images, the others none
    known: tuple[Count | Text, ...] | None = None  # names of classes or their numbers from 0; else the next, or all
    known_count: AtLeastOne | None = None  # the first so many
    subset: AtLeastOne | None = None  # training images, every class in proportion; without it all
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of known images, held back at the server

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

    @property
    def labelled_share(self) -> float | None:
        """Of a client's known images, how many it has labels of, if it has any; None where nobody can say."""
        return {"clients": self.labelled_fraction, "some-clients": 1.0}.get(self.labels)


class ModelTable(Table):
    """The network."""

    name: Text = "cnn"  # semifed list models
    width: (
        Annotated[float, Field(gt=0, le=WIDEST / 128, allow_inf_nan=False)]
        | tuple[Annotated[Whole, Field(ge=1, le=WIDEST)], ...]
        | None
    ) = None  # of a network trained from scratch
    head: Annotated[Text, AfterValidator(_not_too_wide)] = "linear"  # or mlpN(hidden), cosine(temperature)
    weights: Text | None = None  # of a pretrained network: a word of its own, or where they lie
    input_size: Annotated[Whole, Field(ge=1, le=LARGEST_SIDE)] | None = None  # pixels it scales images to
    trainable: Literal["all", "last", "none"] | None = None  # what of it learns
    batchnorm: BatchNormKind = "auto"  # auto: static if the server has labels, else tracked
    precision: Literal["float32", "bfloat16"] = "float32"  # of what training steps compute; weights are float32
    heads: Mapping[str, Annotated[Text, AfterValidator(_not_too_wide)]] = {}  # sizes of heads a method asks for


class ViewsTable(Table):
    """What networks see of an image: steps of weak and strong augmentation."""

    weak: Text = "flip crop(4)"  # steps: flip, crop(pixels), randaugment(operations, strength), cutout(pixels); or none
    strong: Text = "flip crop(4) randaugment(2,10) cutout(16)"  # the same


class LocalTable(Table):
    """Training at a client within a round."""

    epochs: AtLeastOne | None = None  # over unlabelled images, or labelled ones if no others are used; 1 without steps
    steps: AtLeastOne | None = None  # of the optimiser, in place of epochs
    batch: BatchSize = 32
    unlabelled_ratio: AtLeastOne = 1  # unlabelled images for each labelled one of a batch
    lr: Positive = 0.03
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False
    weight_decay: NotNegative = 0.0
    weight_decay_on: Literal["all", "matrices"] = "all"  # matrices: neither on biases nor on what norms learn
    clip: Positive | None = None  # largest norm of a step's gradient
    schedule: Text = "constant"  # of the rates over rounds: constant, cosine(last share), hold(n) cosine(last share)
    keep_optimizer: bool = False  # a client's momentum stays from its last round

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

    warmup_epochs: Count = 0  # over its labels before the first round
    finetune_epochs: Count = 0  # over its labels after each round
    batch: BatchSize = 32
    lr: Positive | None = None  # without it local.lr


class EvaluateTable(Table):
    """When and on what the model is tested."""

    every: AtLeastOne = 1  # so many rounds, and after the last
    unseen: tuple[Text, ...] = ()  # data sets, .npz files, gaussian, uniform or patch-shuffle, of no known class
    accept: Annotated[float, Field(gt=0, lt=1)] = 0.95  # of known images, by the rejection threshold
    folds: Annotated[Whole, Field(ge=0, le=100)] = 5  # of the server's labels, held out in turn for the threshold
    discover: Literal["test", "unlabelled"] = "test"  # which images are grouped: test ones, or the clients' own
    discover_images: AtLeastOne = 5_000  # at most


class AttackTable(Table):
    """Simulated attackers among the clients."""

    kind: Literal["none", "sign-flip", "noise", "label-flip", "free-rider", "lie"] = "none"
    share: Annotated[float, Field(ge=0, le=1)] = 0.2  # of all clients
    scale: Positive = 1.0  # of sign-flip and noise, in lengths of an honest change


class DefenceTable(Table):
    """What is done to updates before a method sees them."""

    steps: Text = "none"  # clip(f), counts(f), median, trimmed(s), krum(s), multi-krum(s), in order

    @model_validator(mode="after")
    def _known(self) -> "DefenceTable":
        if self.steps != "none":
            from semifed.robust import defence

            defence(self.steps)
        return self


class PrivacyTable(Table):
    """Differential privacy of clients."""

    mode: Literal["none", "central", "local"] = "none"  # who adds the noise: the server or each client
    clip: Positive = 1.0  # largest norm of a client's change
    noise: NotNegative = 1.0  # standard deviation, in clips
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5


class EngineTable(Table):
    """Where clients run: decides the speed, not the numbers, but who is late, and last digits on a GPU."""

    name: Literal["local", "flower"] = "local"  # this machine's processes, or Flower's simulation
    workers: Annotated[Whole, Field(ge=0, le=MOST_WORKERS)] = 0  # processes of one thread; 0: one a core
    device: Literal["cpu", "cuda"] = "cpu"
    timeout: Positive | None = None  # seconds after which a client counts as failed
    graphs: bool = False  # replay the passes of training steps as CUDA graphs
    stems: Text | None = None  # directory where runs that draw the same views share what a frozen backbone says

    @model_validator(mode="after")
    def _one_process_on_a_gpu(self) -> "EngineTable":
        if self.device == "cpu":
            if self.graphs:
                raise ValueError("graphs: only a GPU replays passes; use engine.device=cuda, or leave it out")
            if self.stems is not None and self.name != "local":
                raise ValueError(f"stems: the clients of {self.name} keep nothing here; use engine.name=local")
            return self
        if self.stems is not None:
            raise ValueError("stems: a GPU computes them faster than a disk reads them; leave it out")
        if self.name != "local":
            raise ValueError(f"device: the engine {self.name} runs on the processor; use engine.name=local")
        if self.workers > 1:
            raise ValueError(f"workers: one process has the GPU to itself, not {self.workers}; use 1, or leave it out")
        if self.timeout is not None:
            raise ValueError("timeout: only worker processes can be stopped, and there is none beside a GPU")
        return self


class Recipe(Table):
    """One run, fully described."""

    dataset: Text  # a name of semifed list datasets, an .npz, a folder of images, hub:NAME
    data: Text | None = None  # folder where named data sets are looked for first
    rounds: AtLeastOne
    seed: Count = 0
    clients_per_round: AtLeastOne | None = None  # without it all
    min_clients: Count = 1  # answers without which a round fails, or waits over a network
    scenario: ScenarioTable
    model: ModelTable = ModelTable()
    views: ViewsTable = ViewsTable()
    method: Mapping[str, Any]
    local: LocalTable = LocalTable()
    server: ServerTable = ServerTable()
    evaluate: EvaluateTable = EvaluateTable()
    attack: AttackTable = AttackTable()
    defence: DefenceTable = DefenceTable()
    privacy: PrivacyTable = PrivacyTable()
    engine: EngineTable = EngineTable()

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        if self.clients_per_round is not None and self.clients_per_round > self.scenario.clients:
            raise ValueError(
                f"clients_per_round: {self.clients_per_round} is more than the {self.scenario.clients} clients"
            )
        if self.min_clients > self.cohort_size:
            raise ValueError(f"min_clients: {self.min_clients} is more than the {self.cohort_size} clients of a round")
        if self.defence.steps != "none":
            from semifed.robust import defence, refuse_idle

            refuse_idle(defence(self.defence.steps), self.cohort_size)
        if self.engine.graphs and self.model.precision != "float32":
            raise ValueError("engine.graphs: passes are recorded in single precision; use model.precision=float32")
        if self.model.batchnorm == "static" and self.scenario.labels != "server":
            raise ValueError(
                "model.batchnorm: static statistics need labels at the server to be computed on; use tracked"
            )
        if self.model.batchnorm == "averaged" and self.scenario.labels != "server":
            raise ValueError(
                "model.batchnorm: without labels the server trains nothing, and averaged is tracked; use that"
            )
        if self.model.batchnorm == "local" and self.scenario.labels != "server":
            raise ValueError(
                "model.batchnorm: with local layers the server trains its own, for which it needs labels; use tracked"
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
        if "labelled_share" in valid and not options.get("labelled_share"):
            options["labelled_share"] = self.scenario.labelled_share or 0.0
        built: AnyMethod = kind(**options)
        return built

    def refuse_meaningless(self) -> None:
        """A method may have no meaning in a scenario: the error names the reason and the nearest that works."""
        reasons = self.build_method().no_meaning
        keys = {
            "scenario.labels": self.scenario.labels,
            "scenario.classes": self.scenario.classes,
            "model.head": re.split(r"\W|\d", self.model.head)[0],
        }
        for key, chosen in keys.items():
            if chosen in reasons:
                raise UserError(f"{key}={chosen} has no meaning for {self.method['name']}: {reasons[chosen]}")
        if self.scenario.classes == "novel" and self.scenario.labelled_per_class is not None:
            raise UserError(
                "scenario.labelled_per_class: its labelled images are among the unlabelled ones too, and in a graph of "
                "both each would be there twice; where classes are novel, give scenario.labelled_fraction"
            )
        given, share = self.method.get("labelled_share"), self.scenario.labelled_share
        if given and share and given != share:
            raise UserError(
                f"method.labelled_share: {given:g}, but clients have labels of {share:g} of their known images here, "
                f"and k would be wrong; leave it out, or set {share:g} (method.neighbours sets k itself)"
            )

    def plain(self) -> dict[str, Any]:
        """The recipe as nested tables without absent keys, the method's defaults written out."""
        tables: dict[str, Any] = self.model_dump(exclude_none=True, mode="json")
        tables["method"] = {"name": self.method["name"]} | asdict(self.build_method())
        return tables

    def to_toml(self) -> str:
        """The resolved recipe, which runs again as it is."""
        return tomli_w.dumps(self.plain())


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


def with_later_keys(tables: Mapping[str, Any]) -> dict[str, Any]:
    """A stored recipe with the keys that came after it at their defaults, which is how it ran.

    What is no recipe of today is given back as it is.
    """
    try:
        return check_recipe(tables, for_training=False).plain()
    except UserError:
        return dict(tables)
