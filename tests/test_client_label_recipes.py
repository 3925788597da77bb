"""Recipes with labels at the clients, key by key against what SAGE and ProxyFL say, typed in here a second time."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from command import changes, semifed
from semifed.assembly import build_net
from semifed.data.datasets import Dataset
from semifed.data.scenario import Scenario, build_scenario
from semifed.data.sources import CATALOGUE
from semifed.data.views import Views
from semifed.recipe import Recipe
from semifed.recipe_file import load_recipe, recipe_names

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"


class Row(NamedTuple):
    """What SAGE and its authors' code say of a data set."""

    counts: list[int]  # training images of each class
    labelled: int  # of each class, where the paper says 10 %
    rounds: int
    held: tuple[int, int]  # images of a client: with labels at 10 %, and in all
    parameters: int  # of ResNet-8 x4
    proxyfl: int  # the same with ProxyFL's two heads


SVHN = [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659]
ROWS = {
    "cifar10": Row([5000] * 10, 500, 300, (250, 2500), 1_227_594, 1_358_922),
    "cifar100": Row([500] * 100, 50, 500, (250, 2500), 1_250_724, 1_382_052),
    "svhn": Row(SVHN, 460, 150, (230, 3662), 1_227_594, 1_358_922),
    "cinic10": Row([9000] * 10, 900, 400, (450, 4500), 1_227_594, 1_358_922),
}
ALPHAS = {"a0.1": 0.1, "a0.5": 0.5, "a1": 1.0}
TIMES = {"table1": 1, "table8": 2}  # labels, counted in those of 10 %
CELLS = [(table, data, alpha) for table in TIMES for data in ROWS for alpha in ALPHAS]


@pytest.mark.parametrize(("table", "data", "alpha"), CELLS)
def test_every_cell_has_sages_settings(table: str, data: str, alpha: str) -> None:
    recipe, row = load_recipe(f"sage/{table}-{data}-{alpha}"), ROWS[data]
    scenario, local = recipe.scenario, recipe.local
    assert (recipe.dataset, recipe.rounds) == (data, row.rounds)
    assert (scenario.labels, scenario.classes, scenario.subset) == ("clients", "known", None)
    assert (scenario.clients, recipe.clients_per_round) == (20, 8)
    assert (scenario.partition, scenario.alpha) == ("paired", ALPHAS[alpha])
    assert scenario.labelled_per_class == TIMES[table] * row.labelled
    assert (recipe.model.name, recipe.model.width, recipe.model.head) == ("resnet8", 4, "linear")
    assert recipe.views.weak == "flip crop(4)"
    assert recipe.views.strong == "flip crop(4) randaugment(2,10) cutout(16)"
    assert (local.epochs, local.batch, local.unlabelled_ratio) == (None, 128, 2)
    assert local.steps == 5 * (sum(row.counts) // 20 // 128)
    assert (local.lr, local.momentum, local.weight_decay) == (0.1, 0.9, 1e-4)
    assert (local.nesterov, local.clip, local.keep_optimizer, local.schedule) == (False, None, False, "constant")
    assert (recipe.batchnorm, recipe.evaluate.every) == ("tracked", 1)


@pytest.mark.parametrize(("table", "data", "alpha"), CELLS)
def test_every_cell_has_sages_method(table: str, data: str, alpha: str) -> None:
    method = load_recipe(f"sage/{table}-{data}-{alpha}").plain()["method"]
    assert method.pop("kappa") == pytest.approx(-np.log(0.5) / 0.05)  # eq. 18
    assert method == {
        "name": "sage",
        "threshold": 0.95,
        "unlabelled_weight": 1.0,
        "collaborative": True,
        "mixing": "gap",
        "soft": False,
        "statistics": "averaged",
        "weigh": "images",
    }


def spread(recipe: Recipe, counts: list[int]) -> Scenario:
    """The recipe's scenario for so many images of each class; nobody looks at their one pixel."""
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    pixels = torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8)
    names = tuple(map(str, range(len(counts))))
    dataset = Dataset(recipe.dataset, pixels, labels, pixels[:0], labels[:0], names, (0.5,), (0.25,), "here")
    views = Views.parse("none", "none", mean=(0.5,), std=(0.25,))
    return build_scenario(dataset, recipe.scenario, views, recipe.seed)


@pytest.mark.parametrize("table", TIMES)
@pytest.mark.parametrize("data", ROWS)
def test_steps_are_five_epochs_of_what_the_clients_hold(table: str, data: str) -> None:
    recipe, row = load_recipe(f"sage/{table}-{data}-a0.1"), ROWS[data]
    assert sum(row.counts) == CATALOGUE[data].images[0]
    assert len(row.counts) == len(CATALOGUE[data].classes)
    holdings = spread(recipe, row.counts).holdings
    labelled, all_images = row.held
    assert {len(held.labelled) for held in holdings} == {TIMES[table] * labelled}
    assert {len(held.unlabelled) for held in holdings} <= {all_images, all_images + 1}
    assert all(np.isin(held.labelled, held.unlabelled).all() for held in holdings)
    assert {5 * (len(held.unlabelled) // 128) for held in holdings} == {recipe.local.steps}


def parameters(recipe: Recipe) -> int:
    source = CATALOGUE[recipe.dataset]
    net = build_net(recipe, recipe.build_method(), source.geometry, len(source.classes))
    return sum(weight.numel() for weight in net.network.parameters())


@pytest.mark.parametrize("data", ROWS)
def test_the_network_has_the_authors_size(data: str) -> None:
    assert parameters(load_recipe(f"sage/table1-{data}-a0.1")) == ROWS[data].parameters


@pytest.mark.parametrize("data", ROWS)
def test_a_dirichlet_over_all_clients_is_more_skewed(data: str) -> None:
    paired, over_all = f"sage/table1-{data}-a0.1", f"sage/dirichlet-{data}"
    assert changes(paired, over_all) == {"scenario.partition": "dirichlet"}

    def classes_in_use(name: str) -> float:
        """exp of the entropy of a client's classes, on average."""
        scenario = spread(load_recipe(name), ROWS[data].counts)
        truth = scenario.sealed.break_seal().numpy()
        entropies = []
        for held in scenario.holdings:
            share = np.bincount(truth[held.unlabelled]) / len(held.unlabelled)
            entropies.append(-(share[share > 0] * np.log(share[share > 0])).sum())
        return float(np.exp(np.mean(entropies)))

    assert classes_in_use(over_all) < 0.6 * classes_in_use(paired)


def sage_ablations() -> dict[str, tuple[str, dict[str, Any]]]:
    """SAGE's other tables and figures: the cell of Table 1 each differs from, and in what."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for data in ("cifar100", "cinic10"):
        found[f"table3-{data}-cpg"] = f"table1-{data}-a0.1", {"method.mixing": 1.0}
        found[f"table3-{data}-cdsc"] = f"table1-{data}-a0.1", {"method.collaborative": False}
    for text in ("0", "0.2", "0.4", "0.6", "0.8", "1"):
        found[f"fig5-cifar100-lambda{text}"] = "table1-cifar100-a0.1", {"method.mixing": float(text)}
    for kappa in (2, 4, 6, 8, 10, 12, 14):
        found[f"fig14-cifar100-kappa{kappa}"] = "table1-cifar100-a1", {"method.kappa": kappa}
    found["table5-cifar100-sage-soft"] = "table1-cifar100-a0.1", {"method.soft": True}
    found["convergence-cifar100"] = "table1-cifar100-a0.1", {"rounds": 600}
    return found


@pytest.mark.parametrize("name", sorted(sage_ablations()))
def test_an_ablation_of_sage_differs_from_table_1_in_one_key(name: str) -> None:
    base, difference = sage_ablations()[name]
    assert changes(f"sage/{base}", f"sage/{name}") == difference


def test_the_slowest_baseline_has_rounds_enough_to_converge() -> None:
    to_half = {"LPL": (562, 546, 527), "GPL": (524, 419, 390), "FedLabel": (429, 366, 341), "FedDure": (542, 552, 450)}
    assert load_recipe("sage/convergence-cifar100").rounds > max(max(rounds) for rounds in to_half.values())


PLUGIN = {"flexmatch": {}, "feddure": {}, "feddb": {"aggregation": "official", "server_momentum": 0.0}}


@pytest.mark.parametrize("data", ["cifar100", "svhn"])
@pytest.mark.parametrize("method", PLUGIN)
def test_table_4_puts_sage_into_another_method(data: str, method: str) -> None:
    base, name = f"sage/table1-{data}-a0.1", f"sage/table4-{data}-{method}"
    options = load_recipe(name).plain()["method"]
    assert options["name"] == method
    assert options["sage"] is True
    assert PLUGIN[method].items() <= options.items()
    assert all(key.startswith("method.") for key in changes(base, name))


@pytest.mark.parametrize(("method", "further"), [("fixmatch-lpl", {}), ("fixmatch-gpl", {"statistics": "averaged"})])
def test_table_5_makes_labels_soft(method: str, further: dict[str, str]) -> None:
    base, name = "sage/table1-cifar100-a0.1", f"sage/table5-cifar100-{method}-soft"
    options = load_recipe(name).plain()["method"]
    assert options == {"name": method, "threshold": 0.95, "unlabelled_weight": 1.0, "soft": True} | further
    assert all(key.startswith("method.") for key in changes(base, name))


PASSES = {"cifar10": 100, "cifar100": 10, "svhn": 100, "cinic10": 100}  # Q, over the proxies of a round's clients


@pytest.mark.parametrize("data", ROWS)
def test_proxyfl_is_sages_cell_with_another_method(data: str) -> None:
    recipe, row = load_recipe(f"proxyfl/table1-{data}"), ROWS[data]
    assert all(key.startswith("method.") for key in changes(f"sage/table1-{data}-a0.1", f"proxyfl/table1-{data}"))
    method = recipe.plain()["method"]
    proxies = 8 * len(row.counts)
    assert method["tuning_steps"] * method["tuning_batch"] == PASSES[data] * proxies
    paper = {"threshold": 0.95, "unlabelled_weight": 1.0, "contrast_weight": 1.0, "tuning_lr": 0.005}
    code = {"tuning_batch": 4, "projections": True, "margin": True, "prior": "ema", "prior_decay": 0.99}
    expected = {"name": "proxyfl", "tuning": "on", "categories": "prior"} | paper | code
    assert {key: method[key] for key in expected} == expected
    assert parameters(recipe) == row.proxyfl


def proxyfl_ablations() -> dict[str, tuple[str, dict[str, Any]]]:
    """ProxyFL's other tables: the recipe of its Table 1 each differs from, and in what."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for data, row in ROWS.items():
        base = f"proxyfl/table1-{data}"
        found[f"table6-{data}"] = base, {"scenario.labelled_per_class": 2 * row.labelled}
        found[f"table2-{data}-gpt"] = base, {"method.contrast_weight": 0}
        found[f"table2-{data}-icpl"] = base, {"method.tuning": "off"}
        for count in (1, 5):
            found[f"table4-{data}-icpl-top{count}"] = base, {"method.tuning": "off", "method.categories": count}
    found["convergence-cifar100"] = "proxyfl/table1-cifar100", {"rounds": 600}
    return found


@pytest.mark.parametrize("name", sorted(proxyfl_ablations()))
def test_an_ablation_of_proxyfl_differs_from_table_1_in_its_part(name: str) -> None:
    base, difference = proxyfl_ablations()[name]
    assert changes(base, f"proxyfl/{name}") == difference


@pytest.mark.parametrize("data", ROWS)
@pytest.mark.parametrize("method", ["lpl", "gpl"])
def test_without_a_threshold_every_image_counts(data: str, method: str) -> None:
    name = f"proxyfl/table4-{data}-{method}-all"
    expected = load_recipe(f"sage/table1-{data}-a0.1", [f"method=fixmatch-{method}", "method.threshold=0"])
    assert load_recipe(name).plain() == expected.plain()


def documented_rows() -> dict[str, list[str]]:
    """The overrides by row that the handbook gives."""
    table = PAGE.read_text(encoding="utf-8").split("### Other rows")[1].split("###")[0]
    cells = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ") and "`" in line]
    return {row.strip(): overrides.split("`")[1].split() for row, overrides in cells}


# The paper: 0.95 for all but FlexMatch, whose thresholds lie below it. The authors' options.py: FedProx's 0.001,
# FedLabel's 1 and all of FedMatch, with a threshold of 0.75.
CONSTANTS: dict[str, dict[str, Any]] = {
    "FedAvg": {"name": "fedavg"},
    "FedProx": {"name": "fedprox", "proximity": 0.001},
    "FedAvg-SL": {"name": "fedavg-sl", "ema": 0.0},
    "FixMatch-LPL": {"name": "fixmatch-lpl", "threshold": 0.95, "unlabelled_weight": 1.0, "soft": False},
    "FixMatch-GPL": {"name": "fixmatch-gpl", "threshold": 0.95, "unlabelled_weight": 1.0, "soft": False},
    "FedProx+FixMatch": {"name": "fedprox-fixmatch", "threshold": 0.95, "proximity": 0.001, "sage": False},
    "FedAvg+FlexMatch": {"name": "flexmatch", "threshold": 0.95, "sage": False},
    "FedMatch": {
        "name": "fedmatch",
        "threshold": 0.75,
        "supervised_weight": 10,
        "agreement_weight": 0.01,
        "sparsity_weight": 1e-4,
        "attraction_weight": 10,
        "helper_count": 2,
    },
    "FedLabel": {"name": "fedlabel", "threshold": 0.95, "agreement_weight": 1, "sage": False},
    "FedLoke": {"name": "fedloke", "sage": False},
    "FedDure": {"name": "feddure", "threshold": 0.95, "sage": False},
    "FedDB": {"name": "feddb", "threshold": 0.95, "server_momentum": 0, "sage": False},
    "ProxyFL": {"name": "proxyfl"},
}


def test_the_handbook_has_every_row_of_the_papers_tables() -> None:
    assert list(documented_rows()) == list(CONSTANTS)


@pytest.mark.parametrize("data", ROWS)
@pytest.mark.parametrize("row", CONSTANTS)
def test_other_rows_of_the_tables_have_their_constants(row: str, data: str) -> None:
    for table in TIMES:
        base, ours = f"sage/{table}-{data}-a0.1", load_recipe(f"sage/{table}-{data}-a0.1", documented_rows()[row])
        assert CONSTANTS[row].items() <= ours.plain()["method"].items()
        assert ours.plain() | {"method": {}} == load_recipe(base).plain() | {"method": {}}


MINIS = {
    "sage/fashion-mini": ("sage", "clients", 0.8),
    "sage/cifar10-mini": ("sage", "clients", 0.8),
    "sage/svhn-mini": ("sage", "clients", 0.95),
    "sage/fashion-server-mini": ("sage", "server", 0.8),
    "proxyfl/fashion-server-mini": ("proxyfl", "server", 0.8),
}


@pytest.mark.parametrize("name", MINIS)
def test_minis_have_a_threshold_that_fits_their_budget(name: str) -> None:
    recipe = load_recipe(name)
    assert (recipe.method["name"], recipe.scenario.labels, recipe.method["threshold"]) == MINIS[name]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few noisy images of every class under the names of the real sets."""
    place = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for name in ("cifar10", "svhn", "fashion-mnist"):
        arrays: dict[str, Any] = {}
        for part, each in (("train", 120), ("test", 2)):
            labels = np.repeat(np.arange(10), each)
            arrays[f"y_{part}"] = labels
            arrays[f"x_{part}"] = rng.integers(0, 256, (len(labels), *CATALOGUE[name].geometry), dtype=np.uint8)
        np.savez(place / f"{name}.npz", **arrays)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("name", MINIS)
def test_minis_run(capsys: pytest.CaptureFixture[str], data: Path, tmp_path: Path, name: str) -> None:
    short = ["rounds=1", "clients_per_round=2", "local.steps=2", "server.warmup_epochs=1", "server.finetune_epochs=1"]
    run = tmp_path / "run"
    outcome = semifed(capsys, "run", name, f"data={data}", *short, "engine.workers=1", "--out", str(run))
    assert outcome.code == 0, outcome.err
    assert (run / "report.html").is_file()


def test_no_recipe_of_the_papers_is_left_out_here() -> None:
    table4 = {f"table4-{name}-{method}" for name in ("cifar100", "svhn") for method in PLUGIN}
    table5 = {f"table5-cifar100-{method}-soft" for method in ("fixmatch-lpl", "fixmatch-gpl")}
    cells = {f"{table}-{name}-{alpha}" for table, name, alpha in CELLS}
    sage = cells | table4 | table5 | set(sage_ablations()) | {f"dirichlet-{name}" for name in ROWS}
    all_images = {f"table4-{name}-{short}-all" for name in ROWS for short in ("lpl", "gpl")}
    proxyfl = {f"table1-{name}" for name in ROWS} | all_images | set(proxyfl_ablations())
    expected = {f"sage/{name}" for name in sage} | {f"proxyfl/{name}" for name in proxyfl}
    papers = ("table", "fig", "convergence", "dirichlet")
    folders = {"sage", "proxyfl"}
    parts = {name: name.partition("/") for name in recipe_names()}
    found = {name for name, (folder, _, rest) in parts.items() if folder in folders and rest.startswith(papers)}
    assert found == expected
