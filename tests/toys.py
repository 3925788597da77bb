"""A tiny federated world for tests: images that can be learnt in a second, and runs that are watched."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from semifed.assembly import Parts, build_workplace, opened, told_parts
from semifed.client_round import Reply, Workplace
from semifed.data.datasets import Dataset
from semifed.data.scenario import build_scenario
from semifed.data.views import Views
from semifed.engines.local import LocalEngine
from semifed.errors import ClientFailure
from semifed.methods import method_class, method_names
from semifed.recipe import Recipe, check_recipe
from semifed.run import RoundLoop, execute
from semifed.rundir import RunDirectory
from semifed.server import ServerSite
from semifed.wire import Weights

PLACEMENTS = ("server", "clients", "some-clients")
LABELS = {
    "server": {"labelled_per_class": 4},
    "clients": {"labelled_per_class": 4},
    "some-clients": {"labelled_clients": 2},
}


def labels_of(place: str, regime: str) -> dict[str, Any]:
    """How many labels there are: where classes are novel, none of the labelled images may be unlabelled too."""
    return {"labelled_fraction": 0.5} if (place, regime) == ("clients", "novel") else LABELS[place]


def meaningful() -> list[tuple[str, str]]:
    """Every method in every placement of labels it does not refuse."""
    return [
        (name, labels)
        for name in method_names()
        for labels in PLACEMENTS
        if labels not in method_class(name).no_meaning
    ]


def toy_dataset(*, per_class: int = 20, classes: int = 5, size: int = 8, channels: int = 1, seed: int = 0) -> Dataset:
    """A noisy pattern for each class, of which a quarter as many are for testing."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(0, 256, (classes, channels, size, size), generator=generator)

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.arange(classes).repeat(count)
        noise = torch.randint(0, 256, (len(labels), channels, size, size), generator=generator)
        return ((2 * patterns[labels] + noise) // 3).to(torch.uint8), labels

    mean, std = (0.5,) * channels, (0.25,) * channels
    names = tuple(f"class {index}" for index in range(classes))
    train, test = draw(per_class), draw(max(per_class // 4, 1))
    return Dataset("toy", *train, *test, classes=names, mean=mean, std=std, source="")


def toy_recipe(method: str, labels: str, changes: Mapping[str, Mapping[str, Any]] | None = None, **top: Any) -> Recipe:
    """Four clients of which three take part; `changes` are merged into the tables of that name."""
    kind = method_class(method)
    # An untrained model is never 0.95 sure: the pseudo-label path must be walked all the same.
    asked = {field.name for field in fields(kind)}
    opened = {"threshold": 0.4, "sage_threshold": 0.4, "entropy_threshold": 1.08}
    options = {key: value for key, value in opened.items() if key in asked}
    regime = next(name for name in ("open", "known", "novel") if name not in kind.no_meaning)
    # DINO's head has four million weights.
    small = {"projection": "mlp3(8, 4, gelu)"} if "2048" in kind.heads.get("projection", "") else {}
    if "warmup_rounds" in asked:
        options["warmup_rounds"] = 2
    head = next(name for name in ("linear", "cosine") if name not in kind.no_meaning)
    held_back = {"validation_fraction": 0.1} if regime == "novel" else {}
    budget = labels_of(labels, regime)
    tables: dict[str, Any] = {
        "dataset": "toy",
        "rounds": 4,
        "clients_per_round": 3,
        "scenario": {"labels": labels, "classes": regime, "clients": 4, "known_count": 3, **held_back, **budget},
        "model": {"name": "cnn", "width": [4, 4, 8], "head": head, "heads": small},
        "views": {"weak": "flip crop(1)", "strong": "flip crop(1) cutout(3)"},
        "method": {"name": method, **options},
        "local": {"epochs": 1, "batch": 8, "lr": 0.05, "weight_decay": 1e-3, "clip": 2.0, "schedule": "cosine(0.1)"},
        "server": {"warmup_epochs": 2, "finetune_epochs": 1, "batch": 8},
        "evaluate": {"folds": 2},  # each costs a warm-up
        "engine": {"workers": 1},
        **top,
    }
    for table, values in (changes or {}).items():
        tables[table] = {**tables.get(table, {}), **values}
    return check_recipe(tables)


def toy_parts(recipe: Recipe, dataset: Dataset | None = None) -> Parts:
    """What `prepare_run` makes of a recipe, with images from memory."""
    dataset = dataset or toy_dataset()
    views = Views.parse(recipe.views.weak, recipe.views.strong, mean=dataset.mean, std=dataset.std)
    method = recipe.build_method()
    return told_parts(recipe, build_scenario(dataset, recipe.scenario, views, recipe.seed, **opened(method)))


def place_of(parts: Parts) -> Workplace:
    """What a process needs to act as a client of the toy images."""
    return build_workplace(parts.recipe, (1, 8, 8), 3)


def site_of(parts: Parts, round_: int = 0) -> ServerSite:
    """The server's workplace in a round."""
    site = RoundLoop(parts, place_of(parts).net, *[None] * 4).site  # type: ignore[arg-type]
    site.round = round_
    return site


def shaken(weights: Weights) -> Weights:
    """Weights as they may be in the middle of a run: statistics included, far from the initial ones."""
    generator = torch.Generator().manual_seed(5)
    return {name: t + 0.1 * torch.randn(t.shape, generator=generator).abs() for name, t in weights.items()}


class Exchange(NamedTuple):
    """What went out in one exchange, and what came back."""

    round: int
    clients: list[int]
    down: Any
    answers: list[Reply | ClientFailure]
    own: Mapping[int, Any]  # what single clients got in place of it


class Outcome(NamedTuple):
    """What a run left behind."""

    weights: Weights
    rounds: list[dict[str, Any]]
    summary: dict[str, Any]
    exchanges: list[Exchange]


class Quiet:
    """A reporter that keeps warnings, and can pull the plug after a round."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.warnings: list[str] = []
        self._stop_after = stop_after

    def stage(self, name: str, done: int, total: int) -> None:
        """Nothing."""

    def started(self, first: int, rounds: int) -> None:
        """Nothing."""

    def finished_round(self, record: Mapping[str, Any]) -> None:
        """Stop the run as Ctrl-C would."""
        if record["round"] == self._stop_after:
            raise KeyboardInterrupt

    def warn(self, text: str) -> None:
        """Keep it."""
        self.warnings.append(text)

    def ended(self) -> None:
        """Nothing."""


def run_toy(parts: Parts, out: Path, *, resume: bool = False, reporter: Quiet | None = None) -> Outcome:
    """Execute a run and note every exchange with the clients."""
    exchanges: list[Exchange] = []

    class Watched(LocalEngine):
        def ask(
            self, round_: int, lr: float, clients: Sequence[int], down: Any, own: Mapping[int, Any] | None = None
        ) -> list[Reply | ClientFailure]:
            answers = super().ask(round_, lr, clients, down, own)
            exchanges.append(Exchange(round_, list(clients), down, answers, own or {}))
            return answers

    with patch("semifed.run.LocalEngine", Watched):
        summary = execute(parts, out, reporter or Quiet(), resume=resume)
    return Outcome(load_file(out / "model" / "model.safetensors"), RunDirectory(out).rounds(), summary, exchanges)


def stored_vit(folder: Path) -> Path:
    """A transformer of two blocks, stored as its library stores them; dropout must be left aside."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.3,
        attention_probs_dropout_prob=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.ViTModel(config, add_pooling_layer=False)
        for parameter in model.parameters():
            parameter.data.normal_(0.0, 0.3)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return folder


def equal_weights(one: Weights, other: Weights) -> bool:
    """Whether two maps hold the same names and the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
