"""Recipes at OpenFL's scale, key by key against what the paper says, typed in here a second time."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from command import changes
from semifed.assembly import assemble, prepare_run
from semifed.data.sources import CATALOGUE
from semifed.recipe_file import load_recipe, recipe_names

SUPERCLASSES = """
    beaver dolphin otter seal whale
    aquarium_fish flatfish ray shark trout
    orchid poppy rose sunflower tulip
    bottle bowl can cup plate
    apple mushroom orange pear sweet_pepper
    clock keyboard lamp telephone television
    bed chair couch table wardrobe
    bee beetle butterfly caterpillar cockroach
    bear leopard lion tiger wolf
    bridge castle house road skyscraper
    cloud forest mountain plain sea
    camel cattle chimpanzee elephant kangaroo
    fox porcupine possum raccoon skunk
    crab lobster snail spider worm
    baby boy girl man woman
    crocodile dinosaur lizard snake turtle
    hamster mouse rabbit shrew squirrel
    maple_tree oak_tree palm_tree pine_tree willow_tree
    bicycle bus motorcycle pickup_truck train
    lawn_mower rocket streetcar tank tractor"""
COARSE = {fine: coarse for coarse, line in enumerate(SUPERCLASSES.split("\n")[1:]) for fine in line.split()}
FINE = sorted(COARSE)  # CIFAR-100 numbers its fine classes in alphabetical order


class Row(NamedTuple):
    """What the paper says of a row of Table 1; the learning rate falls from `lr` to `end`."""

    dataset: str
    known: list[str]
    labels: int  # in all
    rounds: int
    warmup: int
    lr: float
    end: float
    server_batch: int
    client_batch: int
    unseen: set[str]  # those that have a name here
    parameters: int


ANIMALS = ["bird", "cat", "deer", "dog", "frog", "horse"]
CLOTHES = ["T-shirt", "trouser", "pullover", "dress", "coat", "shirt"]
SEEN_FROM_10, SEEN_FROM_100 = {"cifar100", "svhn", "gaussian"}, {"cifar10", "svhn", "gaussian"}
FIRST_11, FIRST_16 = ([fine for fine in FINE if COARSE[fine] <= last] for last in (10, 15))
ROWS = {
    "cifar10-lb120": Row("cifar10", ANIMALS, 120, 2500, 500, 0.01, 0.001, 30, 32, SEEN_FROM_10, 3_881_186),
    "cifar10-lb240": Row("cifar10", ANIMALS, 240, 2500, 500, 0.01, 0.001, 30, 32, SEEN_FROM_10, 3_881_186),
    "cifar100-55-45": Row("cifar100", FIRST_11, 2200, 2500, 500, 0.03, 0.005, 100, 64, SEEN_FROM_100, 4_031_861),
    "cifar100-80-20": Row("cifar100", FIRST_16, 3200, 2500, 500, 0.03, 0.005, 100, 64, SEEN_FROM_100, 4_108_736),
    "fashion": Row(
        *("fashion-mnist", CLOTHES, 240, 1100, 300, 0.01, 0.001, 30, 32),
        unseen={"digits", "gaussian", "uniform", "patch-shuffle"},
        parameters=162_802,
    ),
}
PARTITIONS = {"iid": None, "dir0.3": 0.3, "dir0.1": 0.1}
CELLS = [(row, partition) for row in ROWS for partition in PARTITIONS]


def test_superclasses_are_those_of_cifar100() -> None:
    assert len(COARSE) == 100
    assert list(CATALOGUE["cifar100"].classes) == FINE
    assert [len(known) for known in (FIRST_11, FIRST_16)] == [55, 80]
    unknown = [number for number, fine in enumerate(FINE) if fine not in FIRST_16]
    assert unknown == [8, 13, 36, 41, 47, 48, 50, 52, 56, 58, 59, 65, 69, 74, 80, 81, 85, 89, 90, 96]


@pytest.mark.parametrize(("name", "partition"), CELLS)
def test_every_cell_of_table_1_has_the_papers_settings(name: str, partition: str) -> None:
    recipe, row, alpha = load_recipe(f"openfl/table1-{name}-{partition}"), ROWS[name], PARTITIONS[partition]
    scenario, local, server = recipe.scenario, recipe.local, recipe.server
    assert (recipe.dataset, recipe.rounds) == (row.dataset, row.rounds)
    assert (scenario.labels, scenario.classes, scenario.subset) == ("server", "open", None)
    assert (scenario.clients, recipe.clients_per_round) == (100, 10)
    assert (scenario.partition, scenario.alpha) == ("iid" if alpha is None else "dirichlet", alpha)
    classes = CATALOGUE[row.dataset].classes
    assert [classes[number] for number in scenario.known or ()] == row.known
    assert (scenario.labelled_per_class or 0) * len(row.known) == row.labels

    assert (local.epochs, local.steps, local.batch, local.unlabelled_ratio) == (5, None, row.client_batch, 1)
    assert (local.lr, local.momentum, local.weight_decay) == (row.lr, 0.9, 5e-4)
    assert local.schedule.startswith("cosine(")
    assert float(local.schedule[7:-1]) * row.lr == pytest.approx(row.end, rel=1e-4)
    assert (local.nesterov, local.clip, local.keep_optimizer) == (True, 1.0, False)  # those of SemiFL; not in the paper
    assert (server.warmup_epochs, server.finetune_epochs, server.batch, server.lr) == (
        row.warmup,
        3,
        row.server_batch,
        None,
    )
    assert set(recipe.evaluate.unseen) == row.unseen
    assert recipe.batchnorm == "static"


@pytest.mark.parametrize(("name", "partition"), CELLS)
def test_every_cell_of_table_1_has_the_papers_method(name: str, partition: str) -> None:
    method = load_recipe(f"openfl/table1-{name}-{partition}").plain()["method"]
    paper = {"name": "openfl", "threshold": 0.95, "known_threshold": 0.9, "align_weight": 0.5, "ema": 0.9}
    ssb = {"entropy_weight": 0.1, "negative_weight": 1.0, "consistency_weight": 1.0, "detector_weight": 1.0}
    many = name.startswith("cifar100")
    ours = {
        "socr_weight": 1.0 if many else 0.5,
        "negative_threshold": 0.99,
        "temperature": 0.25 if many else 0.5,
        "align_after": 0.1 if name == "fashion" else 0.2,
        "weighting": "reliability",
        "pivots_from": "ema",
        "contrast_weight": 0.0,
    }
    expected = paper | ssb | ours
    assert {key: method[key] for key in expected} == expected


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few noisy images of every class under the names of the real sets."""
    place = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for name in ("cifar10", "cifar100", "svhn", "fashion-mnist"):
        source = CATALOGUE[name]
        arrays = {}
        for part, each in (("train", 44), ("test", 2)):
            labels = np.repeat(np.arange(len(source.classes)), each)
            arrays[f"y_{part}"] = labels
            arrays[f"x_{part}"] = rng.integers(0, 256, (len(labels), *source.geometry), dtype=np.uint8)
        np.savez(place / f"{name}.npz", **arrays)
    return place


@pytest.mark.parametrize(("name", "partition"), CELLS)
def test_every_cell_of_table_1_can_be_put_together(data: Path, name: str, partition: str) -> None:
    recipe, row = load_recipe(f"openfl/table1-{name}-{partition}", [f"data={data}"]), ROWS[name]
    parts = prepare_run(recipe)
    net, _ = assemble(parts)
    assert sum(weight.numel() for weight in net.network.parameters()) == row.parameters
    assert parts.scenario.class_names() == row.known
    assert parts.scenario.server is not None
    assert len(parts.scenario.server.labelled) == row.labels
    held = np.concatenate([holding.unlabelled for holding in parts.scenario.holdings])
    assert len(held) == len(set(held.tolist())) == 44 * len(CATALOGUE[row.dataset].classes) - row.labels


def ablations() -> dict[str, tuple[str, dict[str, Any]]]:
    """The other tables and figures: the cell of Table 1 each differs from, and in what."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for short, base in (("cifar10", "table1-cifar10-lb240"), ("cifar100", "table1-cifar100-80-20")):
        for text in ("0", "0.95", "0.9", "0.85"):
            decay = {} if text == "0.9" else {"method.ema": float(text)}
            found[f"table2-{short}-ema{text}"] = f"{base}-dir0.3", decay
        found[f"table2-{short}-current-pivots"] = f"{base}-dir0.3", {"method.pivots_from": "current"}
    for row in ROWS:
        found[f"table3-{row}-fedavg"] = f"table1-{row}-dir0.3", {"method.weighting": "count"}
    for short, base in (("cifar10", "table1-cifar10-lb240-dir0.3"), ("cifar100", "table1-cifar100-55-45-dir0.1")):
        for text in ("0", "0.1", "0.5", "1"):
            weight = {} if text == "0.5" else {"method.align_weight": float(text)}
            found[f"fig4-{short}-align{text}"] = base, weight
        for text in ("0.5", "0.7", "0.9", "0.95"):
            gate = {} if text == "0.9" else {"method.known_threshold": float(text)}
            found[f"fig4-{short}-known{text}"] = base, gate
    return found


@pytest.mark.parametrize("name", sorted(ablations()))
def test_an_ablation_differs_from_table_1_in_one_key_at_most(name: str) -> None:
    base, difference = ablations()[name]
    assert changes(f"openfl/{base}", f"openfl/{name}") == difference


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("method", ["fedssb", "fedssb-ema"])
@pytest.mark.parametrize(
    ("short", "row", "socr"), [("cifar10", "cifar10-lb240", 0.5), ("cifar100", "cifar100-80-20", 1.0)]
)
def test_table_4_changes_nothing_but_the_method(short: str, row: str, socr: float, method: str, partition: str) -> None:
    name, base = f"openfl/table4-{short}-{method}-{partition}", f"openfl/table1-{row}-{partition}"
    ours, openfl = load_recipe(name).plain()["method"], load_recipe(base).plain()["method"]
    assert ours["socr_weight"] == socr
    assert {key: value for key, value in ours.items() if openfl[key] != value} == {"name": method}
    assert all(key.startswith("method.") for key in changes(base, name))


def test_semifl_keeps_its_own_schedule() -> None:
    assert {
        key: value
        for key, value in changes("openfl/table1-cifar10-lb240-iid", "openfl/semifl-original-cifar10").items()
        if not key.startswith("method.")
    } == {
        "rounds": 800,
        "model.head": "linear",
        "local.batch": 10,
        "local.lr": 0.03,
        "local.schedule": "cosine",
        "local.keep_optimizer": True,
        "server.warmup_epochs": 0,
        "server.finetune_epochs": 5,
        "server.batch": 10,
    }


def test_no_recipe_of_openfl_is_left_out_here() -> None:
    cells = {f"table1-{row}-{partition}" for row, partition in CELLS}
    table4 = {
        f"table4-{short}-{method}-{partition}"
        for short in ("cifar10", "cifar100")
        for method in ("fedssb", "fedssb-ema")
        for partition in PARTITIONS
    }
    small = {"cifar10-mini", "fashion-mini", "fashion-mini-central", "fashion-mini-closed"}
    every = {name.removeprefix("openfl/") for name in recipe_names() if name.startswith("openfl/")}
    assert every == cells | table4 | set(ablations()) | small | {"semifl-original-cifar10"}
