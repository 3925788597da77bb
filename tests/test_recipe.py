"""Recipes: built-in ones, overrides, alternatives, and the resolved file of a run."""

import json
import tomllib
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from command import changes, flat, semifed, tiny_tables, written
from semifed import listing
from semifed.complaint import shown, shown_key
from semifed.errors import UserError, nearest
from semifed.override import parsed_value, split_values
from semifed.recipe import check_recipe
from semifed.recipe_file import left_behind, load_recipe, recipe_names
from semifed.schedule import schedule_factor


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return written(tmp_path / "tiny.toml", tiny_tables())


@pytest.mark.parametrize("name", recipe_names())
def test_every_built_in_recipe_is_valid_and_resolves_to_itself(name: str) -> None:
    loaded = load_recipe(name)
    assert check_recipe(tomllib.loads(loaded.to_toml())).plain() == loaded.plain()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("-2", -2),
        ("true", True),
        ("word", "word"),
        ("'quoted'", "quoted"),
        ('"3"', "3"),
        ("flip crop(4)", "flip crop(4)"),
        ("[1, 2]", [1, 2]),
        ("[]", []),
        ("[mnist, gaussian]", ["mnist", "gaussian"]),
        ("[mnist,3]", ["mnist", 3]),
        ("{a=1}", {"a": 1}),
        ("", ""),
        ("a=b", "a=b"),
        ("True", "True"),
        ("dir/set.npz", "dir/set.npz"),
    ],
)
def test_values_need_no_quotes(text: str, value: object) -> None:
    assert parsed_value(text) == value
    assert type(parsed_value(text)) is type(value)


@given(st.text(max_size=30))
def test_any_text_is_some_value(text: str) -> None:
    parsed_value(text)


@given(st.lists(st.text(alphabet="abc.19 ", min_size=1, max_size=5), min_size=1, max_size=5))
def test_plain_values_are_split_at_every_comma(words: list[str]) -> None:
    assert split_values(",".join(words)) == words


def test_later_overrides_win(recipe: str) -> None:
    assert load_recipe(recipe, ["local.lr=0.1", "local.lr=0.2"]).local.lr == 0.2


def test_a_method_by_name_drops_the_fields_of_the_other(recipe: str) -> None:
    switched = load_recipe(recipe, ["method=server-only"])
    assert dict(switched.method) == {"name": "server-only"}
    kept = load_recipe(recipe, ["method.unlabelled_weight=2"])
    assert dict(kept.method) == {"name": "fedfixmatch", "threshold": 0.1, "unlabelled_weight": 2}
    both = load_recipe(recipe, ["method=fixmatch-lpl", "method.threshold=0.7"])
    assert dict(both.method) == {"name": "fixmatch-lpl", "threshold": 0.7}


@pytest.mark.parametrize(
    ("overrides", "table", "gone", "here"),
    [
        (["local.epochs=2"], "local", "steps", "epochs"),
        (["scenario.labels=clients", "scenario.labelled_fraction=0.5"], "scenario", "labelled_per_class", "labels"),
        (["scenario.known=[1]"], "scenario", "known_count", "known"),
    ],
)
def test_an_override_takes_the_place_of_its_alternatives(
    tmp_path: Path, overrides: list[str], table: str, gone: str, here: str
) -> None:
    tables = tiny_tables()
    tables["scenario"]["known_count"] = 6
    plain = load_recipe(written(tmp_path / "a.toml", tables), overrides).plain()
    assert gone not in plain[table]
    assert here in plain[table]


def test_overrides_of_both_alternatives_contradict(recipe: str) -> None:
    with pytest.raises(UserError, match="give epochs or steps, not both"):
        load_recipe(recipe, ["local.steps=2", "local.epochs=2"])


def test_the_resolved_recipe_writes_out_the_defaults_of_the_method(recipe: str) -> None:
    plain = load_recipe(recipe).plain()
    assert plain["method"] == {"name": "fedfixmatch", "threshold": 0.1, "unlabelled_weight": 1.0}
    assert plain["model"]["width"] == [2, 3, 4]
    assert "alpha" not in plain["scenario"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounds": "ten"}, "rounds: 'ten' is not a whole number"),
        ({"rounds": 3.5}, "rounds: 3.5 is not a whole number"),
        ({"rounds": True}, "rounds: true is not a whole number"),
        ({"rounds": [1]}, "rounds: [1] is not a whole number"),
        ({"rounds": 0}, "rounds: 0 is out of range: it must be at least 1"),
        ({"seed": -1}, "seed: -1 is out of range: it must be at least 0"),
        ({"local": {"lr": float("nan")}}, "local.lr: nan is not a finite number"),
        ({"local": {"lr": "0.1"}}, "local.lr: '0.1' is not a number"),
        ({"local": {"momentum": 1}}, "local.momentum: 1 is out of range: it must be less than 1"),
        ({"local": {"keep_optimizer": "yes"}}, "local.keep_optimizer: 'yes' is neither true nor false"),
        ({"model": {"width": "wide"}}, "model.width: 'wide' is neither a number nor a list in [ ]"),
        ({"model": {"width": [1, "a", 3]}}, "model.width: 'a' is not a whole number"),
        ({"model": {"width": [1, 0, 3]}}, "model.width: 0 is out of range: it must be at least 1"),
        ({"evaluate": {"unseen": "gaussian"}}, "evaluate.unseen: 'gaussian' is not a list in [ ]"),
        ({"evaluate": {"unseen": [3]}}, "evaluate.unseen: 3 is not text"),
        ({"views": 3}, "views: 3 is not a table with the keys weak, strong"),
        ({"views": {"weak": ""}}, "views.weak: '' is empty"),
        ({"views": {"weak": "a\nb"}}, "views.weak: 'a\\nb' holds characters that cannot be printed"),
        ({"dataset": None}, "dataset: None is not text"),
        ({"scenario": {"known": [1.5]}}, "scenario.known: 1.5 is neither a whole number nor text"),
        ({"scenario": {"known": ["cat", -1]}}, "scenario.known: -1 is out of range: it must be at least 0"),
        ({"engine": {"device": "gpu"}}, "engine.device: there is no 'gpu'; use 'cpu' or 'cuda'"),
        ({"scenario": {"labels": "sever"}}, "scenario.labels: there is no 'sever'; did you mean 'server'?"),
        (
            {"scenario": {"clients": 2}},
            "scenario.labelled_per_class: labels = 'clients' needs exactly "
            "labelled_per_class or labelled_fraction, found none of them",
        ),
        ({"modle": {}}, "modle: unknown key; did you mean 'model'?"),
        ({"model": {"nme": 1}}, "model.nme: unknown key; did you mean 'name'?"),
    ],
)
def test_messages_say_what_is_wrong_in_plain_words(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        check_recipe({**tiny_tables(), **change})
    assert str(error.value) == message


def test_values_and_keys_are_shown_on_one_short_line() -> None:
    assert shown({"a": 1}) == "a table"
    assert shown([{"a": 1}, "b", True]) == "[{...}, 'b', true]"
    assert len(shown("x" * 10_000)) <= 60
    assert len(shown(list(range(10_000)))) <= 60
    assert "bits" in shown(10**5000)
    assert "\n" not in shown("a\nb")
    assert shown_key("local") == "local"
    assert shown_key("a\nb") == "'a\\nb'"
    assert shown_key("") == "''"


def test_the_nearest_name_or_all_of_them() -> None:
    assert nearest("metods", ["methods", "models"]) == "did you mean 'methods'?"
    assert nearest("QuickStart", ["quickstart"]) == "did you mean 'quickstart'?"
    assert nearest("zzz", ["b", "a"]) == "valid: a, b"
    assert nearest("x", []) == "nothing may stand here"


@given(st.integers(1, 50), st.data())
def test_a_cosine_falls_from_one_to_its_end(rounds: int, data: st.DataObject) -> None:
    end = data.draw(st.floats(0, 1))
    text = f"cosine({end!r})"
    factors = [schedule_factor(text, round_, rounds) for round_ in range(rounds + 1)]
    assert factors[0] == pytest.approx(1)
    assert factors[-1] == pytest.approx(end)
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(factors))


@pytest.mark.parametrize("text", ["", "cos", "cosine()", "cosine(2)", "cosine(-0.1)", "cosine(nan)", "cosine(1e)"])
def test_other_schedules_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="schedule"):
        schedule_factor(text, 0, 1)


def test_the_order_of_overrides_does_not_matter() -> None:
    overrides = ["method=fixmatch-lpl", "method.threshold=0.5", "rounds=3"]
    recipes = [load_recipe("quickstart", order) for order in permutations(overrides)]
    assert all(recipe == recipes[0] for recipe in recipes)
    assert recipes[0].method == {"name": "fixmatch-lpl", "threshold": 0.5}


def test_naming_the_recipes_own_method_keeps_its_fields() -> None:
    assert load_recipe("sage/fashion-mini", ["method=sage"]).method["threshold"] == 0.8
    assert "threshold" not in load_recipe("sage/fashion-mini", ["method=fixmatch-lpl"]).method


def test_the_name_of_the_method_as_a_key_switches_the_method_too() -> None:
    for overrides in (["rounds=3", "method=fixmatch-lpl"], ["method=fixmatch-lpl", "method.unlabelled_weight=2"]):
        spelt_out = [text.replace("method=", "method.name=") for text in overrides]
        for order in (spelt_out, spelt_out[::-1]):
            asked = load_recipe("sage/fashion-mini", order)
            assert asked.plain() == load_recipe("sage/fashion-mini", overrides).plain()
    assert load_recipe("sage/fashion-mini", ["method.name=sage"]).method["threshold"] == 0.8
    with pytest.raises(UserError, match=r"method\.name"):
        load_recipe("sage/fashion-mini", ["method.name=3"])


def test_an_option_of_the_recipes_method_that_another_one_has_too_is_told() -> None:
    other = load_recipe("sage/fashion-mini", ["method=fixmatch-lpl"])
    assert left_behind("sage/fashion-mini", other) == [
        "method.threshold: 0.8 in the recipe is for sage; fixmatch-lpl runs with 0.95 "
        "(method.threshold=0.8 compares like with like)"
    ]
    same = load_recipe("sage/fashion-mini", ["method=fixmatch-lpl", "method.threshold=0.8"])
    assert left_behind("sage/fashion-mini", same) == []
    assert left_behind("sage/fashion-mini", other, ["method.threshold=0.95"]) == [], "it was given on purpose"
    assert left_behind("sage/fashion-mini", load_recipe("sage/fashion-mini", ["method=fedavg"])) == []
    assert left_behind("sage/fashion-mini", load_recipe("sage/fashion-mini")) == []


def file(path: Path, **tables: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    return written(path, tables)


CHANGES = (
    {"rounds": 7},
    {"rounds": 7, "seed": 3},
    {"local": {"epochs": 2}},
    {"local": {"lr": 0.5, "batch": 4}},
    {"scenario": {"known": [1, 2], "classes": "open"}},
    {"scenario": {"labels": "clients", "labelled_fraction": 0.5}},
    {"model": {"width": [4, 4, 4]}},
    {"model": {"heads": {"ova": "linear"}}},
    {"evaluate": {"unseen": ["uniform"]}},
    {"method": "server-only"},
    {"method": {"threshold": 0.7}},
    {"method": {"name": "openfl", "ema": 0.5}},
)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_extending_a_recipe_is_overriding_it(tmp_path: Path, change: dict[str, Any]) -> None:
    base = file(tmp_path / "base.toml", **tiny_tables())
    child = load_recipe(file(tmp_path / "child.toml", extends="base.toml", **change))
    texts = []
    for key, value in change.items():
        named = isinstance(value, dict) and "name" in value  # a method with options: its name is an override too
        texts += [f"{key}={value['name']}"] if named else []
        leaves = flat({key: value}).items()
        texts += [f"{leaf}={text if isinstance(text, str) else json.dumps(text)}" for leaf, text in leaves]
    assert child == load_recipe(base, texts)


def test_a_recipe_with_no_change_of_its_own_is_the_extended_one(tmp_path: Path) -> None:
    assert load_recipe(file(tmp_path / "same.toml", extends="quickstart")) == load_recipe("quickstart")


def test_tables_are_merged_and_lists_replaced(tmp_path: Path) -> None:
    base = "openfl/table1-cifar10-lb240-iid"
    mine = file(
        tmp_path / "mine.toml", extends=base, model={"heads": {"ova": "linear"}}, evaluate={"unseen": ["uniform"]}
    )
    assert changes(base, mine) == {"model.heads.ova": "linear", "evaluate.unseen": ["uniform"]}


def test_files_are_found_from_where_they_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file(tmp_path / "bases" / "first.toml", **tiny_tables())
    file(tmp_path / "bases" / "second.toml", extends="first.toml", rounds=5, seed=5)
    third = file(tmp_path / "own" / "third.toml", extends="../bases/second.toml", rounds=6)
    (tmp_path / "elsewhere").mkdir()
    for where in ("elsewhere", "own", "bases"):
        monkeypatch.chdir(tmp_path / where)
        loaded = load_recipe(third, ["local.lr=0.25"])
        assert (loaded.rounds, loaded.seed, loaded.local.lr, loaded.local.batch) == (6, 5, 0.25, 8)
    monkeypatch.chdir(tmp_path)
    assert load_recipe("own/third.toml").rounds == 6


def test_the_example_of_the_handbook_is_a_recipe(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
    example = tmp_path / "example.toml"
    example.write_text(page.split("```toml\n")[1].split("```")[0], encoding="utf-8")
    assert changes("openfl/table1-cifar10-lb240-dir0.3", str(example)) == {
        "rounds": 300,
        "model.name": "resnet8",
        "evaluate.unseen": ["gaussian", "pictures/unseen.npz"],
    }


def test_a_long_chain_needs_no_deep_stack(tmp_path: Path) -> None:
    file(tmp_path / "0.toml", **tiny_tables())
    for depth in range(1, 1500):
        (tmp_path / f"{depth}.toml").write_text(f'extends = "{depth - 1}.toml"\nseed = {depth}\n')
    assert load_recipe(str(tmp_path / "1499.toml")).seed == 1499


@pytest.mark.parametrize("name", ["openfl/table1-cifar100-80-20-dir0.1", "openfl/table4-cifar100-fedssb-ema-iid"])
def test_the_resolved_file_stands_alone(tmp_path: Path, name: str) -> None:
    text = load_recipe(name).to_toml()
    assert "extends" not in tomllib.loads(text)
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    assert load_recipe(str(path)) == check_recipe(load_recipe(name).plain())
    assert changes(name, str(path)) == {}


def test_both_alternatives_in_an_extending_file_contradict(tmp_path: Path) -> None:
    mine = file(tmp_path / "mine.toml", extends="quickstart", local={"epochs": 1, "steps": 1})
    with pytest.raises(UserError, match="give epochs or steps, not both"):
        load_recipe(mine)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends = 3", "extends: 3 is not text"),
        ("extends = true", "extends: true is not text"),
        ("extends = ['quickstart']", "extends: ['quickstart'] is not text"),
        ("extends = {name = 'quickstart'}", "extends: a table is not text"),
        ("extends = ''", "extends: there is no recipe ''; 'semifed list recipes' shows them"),
        ("extends = 'quickstrt'", "extends: there is no recipe 'quickstrt'; did you mean 'quickstart'?"),
        ("extends = 'openfl/table1-fashion-dir0.2'", "did you mean 'openfl/table1-fashion-dir0.3'?"),
        ("extends = 'a\\nb'", "extends: there is no recipe 'a\\\\nb'"),
        ("extends = 'absent.toml'", "absent.toml cannot be read: No such file"),
        ('extends = "nul\\u0000l.toml"', "extends: recipe"),
        ("extends = 'broken.toml'", "broken.toml is not valid TOML"),
        ("extends = 'binary.toml'", "binary.toml cannot be read: it is no text"),
        ("extends = 'folder.toml'", "folder.toml cannot be read: Is a directory"),
        ("extends = 'loop.toml'", "loop.toml cannot be read: Too many levels"),
        ("extends = 'wrong.toml'", "extends: 5 is not text"),
        ("extends = 'mine.toml'", "extends: 'mine.toml' leads back to itself"),
        ("extends = './../here/mine.toml'", "leads back to itself"),
        ("extends = 'back.toml'", "extends: '../here/mine.toml' leads back to itself"),
        ("extends = 'deep.toml'\n" + ".".join("a" * 3000) + " = 1", "mine.toml is nested too deeply"),
        ("extends = 'quickstart'\nrouds = 3", "rouds: unknown key; did you mean 'rounds'?"),
        ("extends = 'quickstart'\nlocal = 3", "local: 3 is not a table"),
        ("extends = 'quickstart'\nmethod = 3", "method: 3 is not a table"),
        ("extends = 'quickstart'\nmethod = {}\nrounds = {a = 1}", "rounds: a table is not a whole number"),
        ("extends = 'quickstart'\n[method]\nname = 3", "method.name: 3 is not text"),
        ("extends = 'quickstart'\n[method]\nextends = 'openfl'", "method.extends: unknown key"),
    ],
)
def test_wrong_bases_are_refused_in_a_line_that_names_the_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    here = tmp_path / "here"
    (here / "folder.toml").mkdir(parents=True)
    (here / "broken.toml").write_text("rounds = = 3")
    (here / "binary.toml").write_bytes(bytes(range(256)))
    (here / "loop.toml").symlink_to(here / "loop.toml")
    (here / "wrong.toml").write_text("extends = 5")
    (here / "back.toml").write_text("extends = '../here/mine.toml'")
    (here / "deep.toml").write_text(".".join("a" * 3000) + " = 1")
    (here / "mine.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    outcome = semifed(capsys, "run", "here/mine.toml")
    assert (outcome.code, outcome.out) == (2, ""), outcome
    assert outcome.err.startswith("error: ")
    assert message in outcome.err
    assert outcome.err.count("\n") <= 2
    assert sorted(tmp_path.rglob("*")) == before


def test_a_base_cannot_be_given_on_the_command_line(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    outcome = semifed(capsys, "run", recipe, "extends=quickstart")
    assert outcome.code == 2
    assert outcome.err.startswith("error: extends: belongs in a recipe file")


def test_a_misspelt_recipe_that_ends_in_a_number_gets_a_hint() -> None:
    with pytest.raises(UserError, match=r"did you mean 'openfl/table1-fashion-dir0\.3'\?"):
        load_recipe("openfl/table1-fashon-dir0.3")


def test_listed_recipes_name_the_method_they_inherit() -> None:
    rows = {row["name"]: row for row in listing.recipes()}
    assert rows["openfl/table2-cifar10-ema0"]["method"] == "openfl"
    assert rows["openfl/table4-cifar10-fedssb-iid"]["method"] == "fedssb"
    for name, row in rows.items():
        assert row["method"] == load_recipe(name).method["name"]
        assert len(row["what"]) > 30, name
    assert len({row["what"] for row in rows.values()}) == len(rows)
