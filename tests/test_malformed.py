"""A thousand recipes that are wrong: each is refused in a line or two that name the key, and nothing is written."""

import random
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from command import Outcome, semifed, tiny_tables, written
from semifed import assembly
from semifed.data.datasets import load
from semifed.recipe import Recipe
from semifed.rundir import RunDirectory


class Ready(Exception):
    """The recipe passed every check: the next thing would be to write."""


@pytest.fixture(autouse=True)
def nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that would start raises `Ready` instead; digits are read once."""

    def ready(self: RunDirectory, recipe: Recipe, *, resume: bool) -> None:
        raise Ready

    monkeypatch.setattr(RunDirectory, "open", ready)
    monkeypatch.setattr(assembly, "load", cache(load))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return written(tmp_path / "tiny.toml", tiny_tables())


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, names: str | None = None) -> str:
    """The complaint about a command that must fail."""
    before = sorted(Path().rglob("*"))
    try:
        outcome = semifed(capsys, "run", *arguments)
    except Ready:
        pytest.fail(f"accepted: {arguments}")
    check_complaint(outcome, arguments)
    assert sorted(Path().rglob("*")) == before, arguments
    if names is not None:
        assert names in outcome.err, (arguments, outcome.err)
    return outcome.err


def check_complaint(outcome: Outcome, about: object) -> None:
    assert outcome.code == 2, (about, outcome)
    assert outcome.out == "", about
    assert outcome.err.startswith("error: "), (about, outcome.err)
    lines = outcome.err.rstrip("\n").split("\n")
    assert len(lines) <= 2, (about, outcome.err)
    assert "Traceback" not in outcome.err, about
    for leaked in ("Input should", "input should", "valid dictionary", "pydantic", "NoneType"):
        assert leaked not in outcome.err, (about, outcome.err)


def survives(capsys: pytest.CaptureFixture[str], *arguments: str) -> bool:
    """Whether a command whose fate is open was refused; it must be refused well."""
    try:
        outcome = semifed(capsys, "run", *arguments)
    except Ready:
        return False
    check_complaint(outcome, arguments)
    return True


def keys(table: type[BaseModel] = Recipe, prefix: str = "") -> list[tuple[str, Any]]:
    """Every key of a recipe that holds a value, with its type."""
    found: list[tuple[str, Any]] = []
    for name, field in table.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found += keys(kind, f"{prefix}{name}.")
        elif name != "method":
            found.append((prefix + name, kind))
    return found


KEYS = keys()
TABLES = [name for name, field in Recipe.model_fields.items() if not any(name == key for key, _ in KEYS)]
WRONG: dict[type, list[str]] = {
    int: ["ten", "3.5", "true", "[1]", "[]", "{a=1}", '""', '"3"', "nan", "inf", "1979-05-27", "ü", "-1", "1e30"],
    float: ["fast", "true", "[1.0]", "{a=1}", '""', '"0.1"', "nan", "inf", "-inf", "-1", "1e300", "٣"],
    bool: ["yes", "1", "0", "[true]", "{a=1}", '"true"', "nan"],
    str: ["3", "0.5", "true", "['a']", "{a=1}", '""', '"a\\u0000b"', '"a\\nb"', f'"{"x" * 5000}"', "1979-05-27"],
    Mapping: ["word", "3", "true", "[]", '""', "{ova=3}", "{ova=''}"],
    tuple: ["word", "3", "true", "{a=1}", "[[1]]", "[{a=1}]", "[nan]"],
}


def plain_kind(kind: Any) -> type:
    """The type under annotations and unions; a union of a number and a list counts as a list."""
    if get_origin(kind) in (Union, UnionType):
        return [plain_kind(part) for part in get_args(kind) if part is not type(None)][-1]
    if get_origin(kind) is Literal:
        return str
    if hasattr(kind, "__metadata__"):
        return plain_kind(get_args(kind)[0])
    plain: type = get_origin(kind) or kind
    return plain


def misspelt(rng: random.Random, word: str) -> str:
    letters = list(word)
    where = rng.randrange(len(letters))
    match rng.randrange(4):
        case 0:
            letters[where] = rng.choice("abcdefghijklmnopqrstuvwxyz_-")
        case 1:
            letters.insert(where, rng.choice("abcdefghijklmnopqrstuvwxyz"))
        case 2 if len(letters) > 2:
            del letters[where]
        case _:
            letters[where : where + 2] = reversed(letters[where : where + 2])
    return "".join(letters)


def test_misspelt_keys_at_every_depth_are_told_with_the_nearest_name(
    capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    rng = random.Random(1)
    paths = {key.split(".")[0] for key, _ in KEYS} | {key for key, _ in KEYS} | {"method.threshold", "method"}
    valid = {part for path in paths for part in path.split(".")} | {"name"}
    hints: Counter[bool] = Counter()
    count = 0
    while count < 400:
        path = rng.choice(sorted(paths)).split(".")
        which = rng.randrange(len(path))
        wrong = misspelt(rng, path[which])
        if wrong in valid or wrong.strip("-") != wrong:
            continue
        right, path[which] = path[which], wrong
        complaint = refused(capsys, recipe, f"{'.'.join(path)}=3", names=f"{'.'.join(path[: which + 1])}: unknown key")
        hints[f"did you mean '{right}'?" in complaint] += 1
        count += 1
    assert hints[True] > 0.9 * count, hints


@pytest.mark.slow
def test_values_of_the_wrong_type_or_out_of_range_name_their_key(
    capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    count = 0
    for key, kind in KEYS:
        for value in WRONG[plain_kind(kind)]:
            if key == "model.width" and value == "3":
                continue  # a factor: refused by the cnn, accepted by the residual networks
            refused(capsys, recipe, f"{key}={value}", names=f"{key}:")
            count += 1
    assert count > 300


def test_a_value_where_a_table_belongs_and_a_table_where_a_value_belongs(
    capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    for table in TABLES:
        for value in ("3", "[]", "true", '""'):
            refused(capsys, recipe, f"{table}={value}", names=f"{table}")
    for key, _ in KEYS:
        refused(capsys, recipe, f"{key}.inner=3", names=key)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["local.epochs=1", "local.steps=2"], "local.epochs: give epochs or steps"),
        (["scenario.known=[0,1]", "scenario.known_count=3"], "scenario.known: give known or known_count"),
        (
            ["scenario.labels=clients", "method=fixmatch-lpl", "model.batchnorm=static"],
            "model.batchnorm: static statistics need labels at the server",
        ),
        (
            ["scenario.labels=clients", "method=fixmatch-lpl", "model.batchnorm=averaged"],
            "model.batchnorm: without labels the server trains nothing, and averaged is tracked; use that",
        ),
        (["clients_per_round=7"], "clients_per_round: 7 is more than the 6 clients"),
        (["min_clients=4"], "min_clients: 4 is more than the 3 clients of a round"),
        (["scenario.labelled_clients=2"], "scenario.labelled_per_class: labels = 'server' needs"),
        (["scenario.labels=some-clients"], "scenario.labelled_clients: labels = 'some-clients' needs"),
        (["scenario.labels=clients", "scenario.labelled_clients=2"], "labelled_per_class or labelled_fraction"),
        (
            ["scenario.labels=some-clients", "scenario.labelled_clients=9", "method=fixmatch-lpl"],
            "scenario.labelled_clients: 9 of 6 clients",
        ),
        (["scenario.partition=dirichlet"], "scenario.alpha"),
        (["scenario.partition=shards", "scenario.alpha=1.5"], "scenario.alpha: found 1.5"),
        (["scenario.partition=dirichlt", "scenario.alpha=1"], "did you mean 'dirichlet'?"),
        (["scenario.partition=folders"], "scenario.partition=folders"),
        (["scenario.classes=open"], "scenario.classes=open needs classes that are not known"),
        (["scenario.known=[0,99]"], "scenario.known: [0, 99]"),
        (["scenario.known=[1,1]"], "scenario.known: [1, 1]"),
        (["scenario.known=[]"], "scenario.known"),
        (["scenario.known_count=11"], "scenario.known_count: 11"),
        (["scenario.labelled_per_class=500"], "scenario.labelled_per_class: 500"),
        (["scenario.subset=3"], "scenario.labelled_per_class"),
        (["scenario.classes=novel", "scenario.known_count=6"], "scenario.classes=novel has no meaning"),
        (["method=fedavg"], "scenario.labels=server has no meaning for fedavg"),
        (["method=fedfixmach"], "did you mean 'fedfixmatch'?"),
        (["method={threshold=0.5}"], "method.name: this key is missing"),
        (["method.name=7"], "method.name: 7 is not text"),
        (["method.treshold=0.5"], "method.treshold: unknown key; did you mean 'threshold'?"),
        (["method.threshold=1.5"], "method.threshold: 1.5 is out of range"),
        (["method.threshold=true"], "method.threshold: true is not a number"),
        (["method=server-only", "method.threshold=1"], "server-only has no options"),
        (["local.schedule=cosin"], "local.schedule: 'cosin'"),
        (["local.schedule=cosine(2)"], "local.schedule"),
        (["local.nesterov=true", "local.momentum=0"], "local.nesterov"),
        (["model.name=resnet9"], "did you mean 'resnet8'?"),
        (["model.width=3"], "model.width"),
        (["model.width=[1,2]"], "model.width"),
        (["model.width=[]"], "model.width"),
        (["model.width=[1,2,99999]"], "model.width: 99999 is out of range"),
        (["model.name=resnet8", "model.width=0.3"], "model.width"),
        (["model.head=mlp1(3)"], "model.head"),
        (["model.head=mlp2(99999999)"], "model.head"),
        (["views.weak=flp"], "did you mean 'flip'?"),
        (["views.weak=crop(8)"], "crop(8)"),
        (["views.strong=cutout"], "views.strong"),
        (["views.strong=randaugment(2,99)"], "views.strong"),
        (["evaluate.unseen=[gausian]"], "did you mean 'gaussian'?"),
        (["evaluate.unseen=[nowhere.npz]"], "nowhere.npz"),
        (["dataset=digit"], "did you mean 'digits'?"),
        (["dataset=absent.npz"], "absent.npz"),
        (["data=absent"], "data = 'absent'"),
        (["engine.name=loca"], "use 'local' or 'flower'"),
        (["rounds"], "'rounds' is no override"),
        (["=3"], "'=3' is no override"),
        (["local..lr=3"], "is no override"),
        (["rou\nds=3"], "'rou\\nds': unknown key"),
        (["rounds=" + "1" * 5000], "rounds"),
        (["rounds=" + "[" * 20000], "rounds"),
    ],
)
def test_contradictions_and_unknown_names(
    capsys: pytest.CaptureFixture[str], recipe: str, overrides: list[str], names: str
) -> None:
    refused(capsys, recipe, *overrides, names=names)


def test_missing_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for key in ("dataset", "rounds", "scenario", "method"):
        tables = tiny_tables()
        del tables[key]
        refused(capsys, written(tmp_path / "cut.toml", tables), names=f"{key}: this key is missing")


def test_files_that_are_no_recipes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    binary, broken, folder = tmp_path / "binary.toml", tmp_path / "broken.toml", tmp_path / "folder.toml"
    binary.write_bytes(bytes(range(256)))
    broken.write_text("rounds = = 3")
    folder.mkdir()
    (tmp_path / "empty.toml").write_text("")
    (tmp_path / "deep.toml").write_text("rounds = " + "[" * 20000)
    refused(capsys, str(binary), names="binary.toml cannot be read: it is no text")
    refused(capsys, str(broken), names="broken.toml is not valid TOML")
    refused(capsys, str(folder), names="folder.toml cannot be read: Is a directory")
    refused(capsys, "empty.toml", names="this key is missing")
    refused(capsys, "deep.toml", names="deep.toml is nested too deeply")
    refused(capsys, "absent.toml", names="absent.toml cannot be read: No such file")
    refused(capsys, "quickstrt", names="did you mean 'quickstart'?")
    refused(capsys, "", names="recipe '' cannot be read")
    refused(capsys, "x" * 5000 + ".toml", names="File name too long")
    refused(capsys, "x" * 5000, names="File name too long")
    refused(capsys, "nul\0l.toml", names="null byte")


def test_an_unreadable_file(capsys: pytest.CaptureFixture[str], recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, encoding: str | None = None) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", denied)
    refused(capsys, recipe, names="tiny.toml cannot be read: Permission denied")


def test_damaged_recipes_are_refused_or_run_but_never_crash(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Random characters of a good file are changed: what is left may even be valid."""
    rng = random.Random(2)
    good = Path(written(tmp_path / "good.toml", tiny_tables())).read_text()
    noise = "\"'[]{}=.,#\n\t \\0123456789-+eExyzü\u202e\ufeff"
    fates: Counter[bool] = Counter()
    for _ in range(150):
        text = list(good)
        for _ in range(rng.randint(1, 4)):
            where = rng.randrange(len(text))
            text[where : where + rng.randint(0, 3)] = rng.choice(noise)
        damaged = tmp_path / "damaged.toml"
        damaged.write_text("".join(text), encoding="utf-8")
        # Digits are inserted too: the damage must not ask for a million clients or images.
        fates[survives(capsys, str(damaged), "scenario.clients=6", "scenario.subset=120", "local.batch=8")] += 1
    assert fates[True] > 60, fates


VALID = [
    ["rounds=1e3"],
    ["rounds=1"],
    ["seed=0"],
    ["seed=2147483647"],
    ["min_clients=0"],
    ["local.epochs=2"],
    ["local.lr=1e-3"],
    ["local.lr=1"],
    ["local.momentum=0"],
    ["local.clip=0.5"],
    ["local.schedule=cosine"],
    ["local.schedule=cosine(0)"],
    ["local.keep_optimizer=false"],
    ["local.batch=1"],
    ["scenario.subset=99999"],
    ["scenario.clients=500"],
    ["scenario.partition=iid", "scenario.alpha=3"],
    ["scenario.partition=dirichlet", "scenario.alpha=0.001"],
    ["scenario.partition=paired", "scenario.alpha=1e5"],
    ["scenario.partition=shards", "scenario.alpha=2"],
    ["scenario.known=[9,3]"],
    ["scenario.known_count=1"],
    ["scenario.classes=open", "scenario.known_count=6"],
    ["scenario.labels=clients", "method=fixmatch-lpl"],
    ["scenario.labels=clients", "scenario.labelled_fraction=1", "method=fedavg"],
    ["scenario.labels=some-clients", "scenario.labelled_clients=6", "method=fixmatch-gpl"],
    ["method=fedavg-sl"],
    ["method=server-only", "server.lr=0.1"],
    ["method.threshold=0"],
    ["method.threshold=1"],
    ["model.name=resnet8", "model.width=0.5"],
    ["model.name=resnet8", "model.width=1"],
    ["model.width=[1,1,1]"],
    ["model.head=mlp2(8)"],
    ["model.batchnorm=tracked"],
    ["views.weak=none", "views.strong=flip crop(7) randaugment(2,10) cutout(99)"],
    ["evaluate.unseen=[]"],
    ["evaluate.unseen=[gaussian, patch-shuffle]"],
    ['evaluate.unseen=["uniform"]'],
    ["evaluate.accept=0.5"],
    ["engine.timeout=0.5"],
    ["engine.workers=0"],
]


@pytest.mark.parametrize("overrides", VALID, ids=" ".join)
def test_what_is_valid_is_accepted(capsys: pytest.CaptureFixture[str], recipe: str, overrides: list[str]) -> None:
    with pytest.raises(Ready):
        semifed(capsys, "run", recipe, *overrides)


def test_the_method_may_be_a_name_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(Ready):
        semifed(capsys, "run", written(tmp_path / "short.toml", {**tiny_tables(), "method": "fedfixmatch"}))
