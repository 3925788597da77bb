"""What a recipe stands for: method, data, network and tests, put together before anything is written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from semifed.adversary import Attack, attackers, refuse_idle
from semifed.client_round import Workplace
from semifed.data.client import Budget
from semifed.data.datasets import Dataset, load
from semifed.data.scenario import Scenario, build_scenario
from semifed.data.views import Views
from semifed.discovery.communities import infomap_class
from semifed.errors import UserError, nearest
from semifed.evaluate import Evaluator
from semifed.fit import Optimiser
from semifed.method import payload_types
from semifed.methods import AnyMethod, finds_groups, method_class, method_names
from semifed.models.backbones import Normalisation
from semifed.models.network import build_network
from semifed.models.stem_store import StemStore
from semifed.net import Net
from semifed.privacy import Privacy, refuse_further_numbers, spent
from semifed.process import computes_bfloat16
from semifed.recipe import Recipe
from semifed.rng import torch_stream


@dataclass(frozen=True)
class Parts:
    """What a recipe stands for: method, data, and how to build the network."""

    recipe: Recipe
    method: AnyMethod
    scenario: Scenario


def prepare_run(recipe: Recipe, dataset: Dataset | None = None) -> Parts:
    """Load data unless it is given, spread it, and check that the recipe can run, without writing anything."""
    method = recipe.build_method()
    _, _, report, _ = payload_types(method)
    refuse_idle(
        recipe.attack.kind,
        recipe.attack.share,
        recipe.scenario.clients,
        labels=recipe.scenario.labels,
        reports=getattr(report, "_fields", ()),
    )
    dataset = dataset or load(recipe.dataset, recipe.data)
    if not len(dataset.x_train):
        raise UserError(f"dataset: {recipe.dataset} has no training images (it can serve in evaluate.unseen)")
    if dataset.x_train.min() == dataset.x_train.max():
        raise UserError(
            f"dataset: all training images of {recipe.dataset} are of one colour; 16-bit pixels are divided by 256, "
            "so what uses few of these bits comes out black"
        )
    views = Views.parse(recipe.views.weak, recipe.views.strong, mean=dataset.mean, std=dataset.std)
    scenario = build_scenario(dataset, recipe.scenario, views, recipe.seed, **opened(method))
    return told_parts(recipe, scenario)


def told_parts(recipe: Recipe, scenario: Scenario) -> Parts:
    """The same with the number of novel classes written out, where a method cannot do without and is given none."""
    if getattr(recipe.build_method(), "novel", None) == 0:
        novel = len(scenario.dataset.classes) - len(scenario.known)
        recipe = recipe.model_copy(update={"method": {**recipe.method, "novel": novel}})
    return Parts(recipe, recipe.build_method(), scenario)


def opened(method: AnyMethod) -> dict[str, bool]:
    """What a bound may see that methods may not, as options of `build_scenario`."""
    return {"all_labels": method.opens_labels, "open_classes": method.opens_classes()}


def build_net(
    recipe: Recipe,
    method: AnyMethod,
    shape: Sequence[int],
    classes: int,
    normalised: Normalisation | None = None,
    stems: str | None = None,
) -> Net:
    """The network of a recipe with its initial weights; a pretrained one must know how images are normalised.

    What its frozen part says is kept in the directory `stems`, if one is given.
    """
    channels, height, width = shape
    network = build_network(
        recipe.model.name,
        channels=channels,
        size=(height, width),
        classes=classes,
        width=recipe.model.width,
        head=recipe.model.head,
        further=further_heads(recipe, method),
        weights=recipe.model.weights,
        input_size=recipe.model.input_size,
        trainable=recipe.model.trainable,
        normalised=normalised,
        generator=torch_stream(recipe.seed, "initial weights"),
    )
    precision = {"float32": torch.float32, "bfloat16": torch.bfloat16}[recipe.model.precision]
    device = torch.device(recipe.engine.device)
    net = Net(network, recipe.batchnorm, device, precision, graphs=recipe.engine.graphs)
    if stems is not None:
        if not (frozen := net.frozen_weights()):
            raise UserError(f"engine.stems: nothing of {recipe.model.name} is frozen; leave it out")
        told = repr((recipe.model.name, recipe.model.input_size, recipe.model.trainable, normalised))
        try:
            Path(stems).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"engine.stems: {stems} cannot be written: {error.strerror}") from None
        network.stems = StemStore(Path(stems), frozen, told)
    return net


def further_heads(recipe: Recipe, method: AnyMethod) -> dict[str, str]:
    """The further heads a method asks for, in the sizes the recipe gives; a recipe serves methods without them too."""
    own = method.needed_heads()
    if strangers := [name for name in recipe.model.heads if name not in own]:  # to know all heads takes all methods
        asked = {name for kind in map(method_class, method_names()) for name in kind.heads}
        for name in strangers:
            if name not in asked:
                raise UserError(f"model.heads.{name}: no method asks for such a head; {nearest(name, sorted(asked))}")
    return {name: recipe.model.heads.get(name, size) for name, size in own.items()}


def build_workplace(
    recipe: Recipe,
    shape: Sequence[int],
    classes: int,
    normalised: Normalisation | None = None,
    stems: str | None = None,
) -> Workplace:
    """What each process needs to act as a client; only its own machine may say where it keeps `stems`."""
    method = recipe.build_method()
    local = recipe.local
    return Workplace(
        method,
        build_net(recipe, method, shape, classes, normalised, stems),
        Budget(None if local.steps else local.epochs or 1, local.steps, local.batch, local.unlabelled_ratio),
        optimiser(recipe),
        local.keep_optimizer,
        recipe.seed,
        _attack(recipe, classes),
        privacy_of(recipe, method),
    )


def workplace_of(parts: Parts) -> Callable[[], Workplace]:
    """How each process of a simulation builds its own."""
    scenario = parts.scenario
    normalised = Normalisation(scenario.views.mean, scenario.views.std)
    shape = tuple(scenario.dataset.x_train.shape[1:])
    return partial(build_workplace, parts.recipe, shape, len(scenario.known), normalised, parts.recipe.engine.stems)


def _attack(recipe: Recipe, classes: int) -> Attack | None:
    if recipe.attack.kind == "none":
        return None
    drawn = attackers(recipe.seed, recipe.scenario.clients, recipe.attack.share)
    return Attack(recipe.attack.kind, drawn, recipe.attack.scale, classes)


def privacy_of(recipe: Recipe, method: AnyMethod) -> Privacy | None:
    """The protection a recipe asks for, if its method can have any."""
    asked = recipe.privacy
    if asked.mode == "none":
        return None
    _, _, up_type, _ = payload_types(method)
    refuse_further_numbers(str(recipe.method["name"]), getattr(up_type, "_fields", ()))
    if asked.mode == "central" and recipe.defence.steps != "none":
        raise UserError(
            "privacy.mode: after a defence one client moves the updates of others, which the noise for one does not "
            'cover; defence.steps = "none", or privacy.mode = "local"'
        )
    return Privacy(asked.mode, asked.clip, asked.noise, asked.delta)


def assemble(parts: Parts) -> tuple[Net, Evaluator]:
    """The network and the tests of a run: whatever does not fit the data fails here, before anything is written."""
    recipe, scenario = parts.recipe, parts.scenario
    refuse_what_is_missing(recipe)
    images = scenario.dataset.x_train
    tests = recipe.evaluate
    evaluator = Evaluator(
        scenario,
        tests.unseen,
        recipe.seed,
        recipe.data,
        discover=tests.discover,
        discover_images=tests.discover_images,
    )
    if finds_groups(type(parts.method)):
        infomap_class()
    if parts.method.groups_by_labels() and scenario.validation is None:
        raise UserError(
            f"scenario.validation_fraction: {recipe.method['name']} groups images beside labelled ones that nobody "
            "trains on, and none are held back; set it above 0, to 0.1 for example"
        )
    privacy = privacy_of(recipe, parts.method)
    if privacy is not None:
        spent(
            privacy, clients=2, cohort=1, rounds=1, visits=1
        )  # a missing accountant is told before anything is written
    normalised = Normalisation(scenario.views.mean, scenario.views.std)
    net = build_net(recipe, parts.method, images.shape[1:], len(scenario.known), normalised, recipe.engine.stems)
    for view in (scenario.views.weak, scenario.views.strong):
        view(images[:2], torch_stream(0))
    return net, evaluator


def refuse_what_is_missing(recipe: Recipe) -> None:
    """A `UserError` where this machine lacks the device or the arithmetic that a recipe asks for."""
    device = recipe.engine.device
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("engine.device: PyTorch finds no GPU here; use 'cpu', or install PyTorch's build for your GPU")
    if recipe.model.precision == "bfloat16" and not computes_bfloat16(device):
        raise UserError(f"model.precision: bfloat16 does not work on the {device} here; use float32")


def optimiser(recipe: Recipe) -> Optimiser:
    """The clients' optimiser, which the server uses too."""
    local = recipe.local
    spares_vectors = local.weight_decay_on == "matrices"
    return Optimiser(local.lr, local.momentum, local.nesterov, local.weight_decay, local.clip, spares_vectors)
