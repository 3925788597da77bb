"""The papers' tables as data: numbers that papers print twice agree, and every cell is a recipe that can run."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from semifed.errors import UserError
from semifed.methods import method_names
from semifed.paper_tables import SCALES, Cell, PaperTable, paper_table, selected, table_names
from semifed.recipe_file import load_recipe, recipe_names
from semifed.report.words import is_fraction

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
EVERY = table_names()
each_table = pytest.mark.parametrize("name", EVERY)


@cache
def resolved(recipe: str, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    return load_recipe(recipe, overrides).plain()


def run_of(cell: Cell) -> dict[str, Any]:
    return resolved(cell.recipe, cell.overrides)


def both_scales(name: str) -> list[Cell]:
    table = paper_table(name)
    return [cell for scale in SCALES for cell in table.cells[scale]]


def theirs(name: str, row: str, metric: str = "accuracy") -> list[str]:
    """A row's numbers, setting by setting."""
    return [cell.theirs[metric].mean for cell in paper_table(name).cells["paper"] if cell.row == row]


def values(name: str, row: str, metric: str = "accuracy") -> list[float]:
    return [float(text) for text in theirs(name, row, metric)]


@each_table
def test_every_cell_is_a_recipe_of_a_method_that_exists(name: str) -> None:
    for cell in both_scales(name):
        assert cell.method in method_names()
        assert run_of(cell)["method"]["name"] == cell.method


@each_table
def test_numbers_are_percents(name: str) -> None:
    table = paper_table(name)
    assert all(is_fraction(metric) for metric in table.metrics)
    numbers = [number for cell in table.cells["paper"] for number in cell.theirs.values()]
    assert any(number.mean for number in numbers)
    for number in numbers:
        assert re.fullmatch(r"(\d+\.\d{1,2})?", number.mean), number
        assert re.fullmatch(r"(\d+\.\d)?", number.std), number
        assert number.mean or not number.std
        assert all(0 <= float(text) <= 100 for text in number if text)


@each_table
def test_rows_are_unique_and_so_are_their_runs(name: str) -> None:
    for cells in paper_table(name).cells.values():
        assert len({(cell.setting, cell.row.lower()) for cell in cells}) == len(cells)
        runs = [run_of(cell) for cell in cells]
        assert all(run not in runs[:place] for place, run in enumerate(runs))


@each_table
def test_at_the_papers_scale_rows_are_recipes_of_that_paper(name: str) -> None:
    for cell in paper_table(name).cells["paper"]:
        assert cell.recipe in recipe_names()
        assert cell.recipe.startswith(f"{name.partition('/')[0]}/")


@each_table
def test_a_mini_asks_the_question_of_the_papers_cell(name: str) -> None:
    table = paper_table(name)
    papers = {(cell.setting, cell.row): cell for cell in table.cells["paper"]}
    for cell in table.cells["mini"]:
        small, large = run_of(cell), run_of(papers[cell.setting, cell.row])
        assert cell.recipe.endswith("-mini")
        assert small["dataset"] == large["dataset"]
        assert small["method"]["name"] == large["method"]["name"]
        for key in ("labels", "classes", "partition"):
            assert small["scenario"][key] == large["scenario"][key]
        if large["scenario"]["partition"] != "iid":
            assert small["scenario"]["alpha"] == large["scenario"]["alpha"]


@each_table
def test_every_setting_has_a_floor_and_a_ceiling(name: str) -> None:
    expected = {"floor"} if name.startswith("fedlpa/") else {"floor", "ceiling"}  # no bound of discovery from above
    for cells in paper_table(name).cells.values():
        for setting in {cell.setting for cell in cells}:
            roles = [cell.role for cell in cells if cell.setting == setting and cell.role]
            assert sorted(roles) == sorted(expected)


def test_every_recipe_of_a_table_is_a_cell_of_it() -> None:
    for recipe in recipe_names():
        if found := re.match(r"(\w+/table\d+)-", recipe):
            table = paper_table(found[1])
            assert any(run_of(cell) == resolved(recipe) for cell in table.cells["paper"]), recipe


def test_rows_are_those_the_handbook_gives() -> None:
    text = PAGE.read_text(encoding="utf-8").split("### Other rows")[1].split("###")[0]
    cells = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ") and "`" in line]
    handbook = {row.strip(): tuple(overrides.split("`")[1].split()) for row, overrides in cells}
    own = "ProxyFL"
    for table, base in (("sage/table1", "sage/table1-cifar10-a0.1"), ("sage/table8", "sage/table8-cifar10-a0.1")):
        rows = {cell.row: cell for cell in paper_table(table).cells["paper"] if cell.setting == "cifar10-a0.1"}
        assert rows.keys() == handbook.keys() - {own} | {"SAGE"}
        for row in rows.keys() - {"SAGE"}:
            assert run_of(rows[row]) == resolved(base, handbook[row])


def test_the_handbook_counts_the_rows_of_every_table() -> None:
    told = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = line.split("|")
        if len(cells) == 6 and re.fullmatch(r"[\d /,]+", cells[2]):
            told |= dict(zip(re.findall(r"`(.*?)`", cells[1]), cells[2].split(","), strict=True))
    counts = {name: [len(paper_table(name).cells[scale]) for scale in SCALES] for name in EVERY}
    assert {name: [int(count) for count in text.split("/")] for name, text in told.items()} == counts


@pytest.mark.parametrize(("ours", "repeated"), [("proxyfl/table1", "sage/table1"), ("proxyfl/table6", "sage/table8")])
def test_proxyfl_repeats_sages_rows_and_adds_its_own(ours: str, repeated: str) -> None:
    before = {(cell.setting, cell.row): cell for cell in paper_table(repeated).cells["paper"]}
    for cell in paper_table(ours).cells["paper"]:
        if cell.row != "ProxyFL":
            same = before.pop((cell.setting, cell.row))
            assert run_of(cell) == run_of(same)
            assert cell.theirs == same.theirs or cell.role == "ceiling"
    assert not before


# Numbers that papers print twice, or as the difference of two others.


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("sage/table1", "2.45 2.00 1.59 3.3 3.61 3.68 0.98 0.78 0.46 2.92 2.37 1.79"),
        ("sage/table8", "1.31 0.84 0.59 2.23 2.51 2.78 0.42 0.14 0.09 1.30 0.88 0.95"),
    ],
)
def test_the_printed_lead_of_sage_is_that_over_the_best_other_row(name: str, printed: str) -> None:
    rows = {cell.row for cell in paper_table(name).cells["paper"]} - {"SAGE", "FedAvg-SL"}
    best = [max(column) for column in zip(*(values(name, row) for row in rows), strict=True)]
    leads = [ours - other for ours, other in zip(values(name, "SAGE"), best, strict=True)]
    assert leads == pytest.approx([float(text) for text in printed.split()], abs=1e-6)


@pytest.mark.parametrize(
    ("host", "printed"),
    [
        ("FixMatch", "4.86 6.15 6.51 3.39 2.91 3.40"),
        ("FlexMatch", "-0.07 0.02 0.27 40.78 38.67 33.36"),
        ("FedDure", "5.86 5.14 5.05 1.09 0.62 0.12"),
        ("FedDB", "-0.10 0.16 0.29 -0.05 0.16 0.28"),
    ],
)
def test_the_printed_gains_of_table_4(host: str, printed: str) -> None:
    before, after = values("sage/table4", host), values("sage/table4", f"{host}+SAGE")
    if host == "FedDB":
        assert before[-1] == 94.14  # a misprint: Table 1 and the gain say otherwise
        before[-1] = values("sage/table1", "FedDB")[8]
    gains = [new - old for old, new in zip(before, after, strict=True)]
    assert gains == pytest.approx([float(text) for text in printed.split()], abs=1e-6)


def test_the_printed_gains_of_reliability_aware_averaging() -> None:
    gains = [
        round(new - old, 1)
        for metrics in zip(
            *(
                zip(values("openfl/table3", "FedAvg", metric), values("openfl/table3", "RAA", metric), strict=True)
                for metric in ("accuracy", "auroc_overall")
            ),
            strict=True,
        )
        for old, new in metrics
    ]
    assert gains == [5.9, 0.7, 2.8, 1.2, 0.7, -0.4, 0.6, 1.6, 0.9, 2.8]


@pytest.mark.parametrize(
    ("name", "row", "other", "same"),
    [
        ("sage/table3", "FixMatch-LPL", "sage/table1", "FixMatch-LPL"),
        ("sage/table3", "CPG+CDSC", "sage/table1", "SAGE"),
        ("sage/table4", "FixMatch+SAGE", "sage/table1", "SAGE"),
        ("sage/table4", "FlexMatch", "sage/table1", "FedAvg+FlexMatch"),
        ("sage/table4", "FedDure", "sage/table1", "FedDure"),
        ("sage/table5", "FixMatch-LPL", "sage/table1", "FixMatch-LPL"),
        ("sage/table5", "FixMatch-GPL", "sage/table1", "FixMatch-GPL"),
        ("sage/table5", "SAGE", "sage/table1", "SAGE"),
        ("proxyfl/table2", "FixMatch-GPL", "proxyfl/table1", "FixMatch-GPL"),
        ("proxyfl/table2", "GPT+ICPL", "proxyfl/table1", "ProxyFL"),
        ("proxyfl/table4", "ICPL", "proxyfl/table2", "ICPL"),
        ("openfl/table4", "SSB", "openfl/table1", "FedSSB"),
        ("openfl/table4", "OpenFL", "openfl/table1", "OpenFL"),
    ],
)
def test_a_row_that_stands_in_two_tables_is_the_same(name: str, row: str, other: str, same: str) -> None:
    def cells(table: str, of: str) -> dict[str, Cell]:
        return {cell.setting: cell for cell in paper_table(table).cells["paper"] if cell.row == of}

    here, there = cells(name, row), cells(other, same)
    assert here.keys() <= there.keys()
    for setting, cell in here.items():
        assert cell.theirs == there[setting].theirs
        assert run_of(cell) == run_of(there[setting])


def test_simgcd_has_the_entropy_weight_of_each_data_set() -> None:
    cells = [cell for cell in paper_table("fedlpa/table2").cells["paper"] if cell.method == "fed-simgcd"]
    weights = {cell.setting: run_of(cell)["method"]["entropy_weight"] for cell in cells}
    assert weights == {"cifar10-a0.2": 1, "cifar10-a0.05": 1, "cifar100-a0.2": 4, "cifar100-a0.05": 4}


def test_what_a_paper_does_not_give_is_empty() -> None:
    assert theirs("fedlpa/table2", "FedLPA", "all") == ["92.3", "", "53.6", ""]
    assert theirs("fedlpa/table2", "FedAvg+GCD", "new") == ["", "", "", ""]
    assert set(theirs("openfl/table1", "server-only")) == {""}
    spreads = [cell.theirs["accuracy"] for cell in paper_table("openfl/table1").cells["paper"] if cell.row == "SemiFL"]
    assert str(spreads[3]) == "50.3 ± 31.0"


# Choosing rows.


def chosen(*names: str, table: str = "sage/table1", scale: str = "mini") -> tuple[set[str], set[str]]:
    cells = selected(paper_table(table), scale, names)
    return {cell.row for cell in cells}, {cell.setting for cell in cells}


def test_rows_and_settings_are_chosen_by_name() -> None:
    every_row, every_setting = chosen()
    assert chosen("sage") == ({"SAGE"}, every_setting)
    assert chosen("flexmatch") == ({"FedAvg+FlexMatch"}, every_setting)  # by its method
    assert chosen("flexmatch", table="sage/table4")[0] == {"FlexMatch"}  # a row of that name goes before
    assert chosen("cifar10", scale="paper")[1] == {"cifar10-a0.1", "cifar10-a0.5", "cifar10-a1"}
    assert chosen("svhn-a1") == (every_row, {"svhn-a1"})
    assert chosen("FedAvg", "SAGE", "svhn-a1", "cifar10-a1") == ({"FedAvg", "SAGE"}, {"svhn-a1", "cifar10-a1"})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sgae", "is called 'sgae'; did you mean 'SAGE'?"),
        ("cifra10", "did you mean 'cifar10'?"),
        ("zzz", "valid: FedAvg, "),
        ("cifar100", "'cifar100' of sage/table1 has no row at mini scale"),
    ],
)
def test_a_name_that_chooses_nothing(name: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        chosen(name)


def test_a_misspelt_table() -> None:
    with pytest.raises(UserError, match=r"no table 'sage/tabel1'; did you mean 'sage/table1'\?"):
        paper_table("sage/tabel1")
    assert isinstance(paper_table("sage/table1"), PaperTable)
