"""Data sets of the hub: written by the library itself, as it would have downloaded them, and read by `hub:`."""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from command import process, surroundings, tiny_tables, written
from semifed.data.datasets import load
from semifed.data.hub import HubName
from semifed.errors import UserError

GREY, RED = Image.new("L", (4, 6), 7), Image.new("RGB", (4, 6), (200, 0, 0))


def hub_set(images: list[Image.Image], labels: Any, feature: Any, **columns: Any) -> datasets.Dataset:
    features = {"img": datasets.Image(), "label": feature}
    features |= {name: datasets.Value("string") for name in columns}
    return datasets.Dataset.from_dict({"img": images, "label": labels, **columns}, features=datasets.Features(features))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five training and two test images of two named classes, two of them held by Zoe."""
    named = datasets.ClassLabel(names=["cat", "dog"])
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (5, 3, 3), dtype=np.uint8)) for _ in range(7)]
    parts = {
        "train": hub_set(images[:5], [0, 1, 1, 0, 1], named, who=["Zoe", "Al", "Zoe", "Al", "Bo"]),
        "validation": hub_set(images[5:], [1, 0], named, who=["Al", "Al"]),
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "pets")
    return tmp_path / "pets"


def test_images_labels_and_names_are_those_of_the_set(folder: Path) -> None:
    read = load(f"hub:{folder}")
    rng = np.random.default_rng(0)
    first = rng.integers(0, 256, (5, 3, 3), dtype=np.uint8)
    np.testing.assert_array_equal(read.x_train[0].numpy(), first.transpose(2, 0, 1))
    assert read.y_train.tolist() == [0, 1, 1, 0, 1]
    assert read.y_test.tolist() == [1, 0]  # the split is called validation
    assert read.classes == ("cat", "dog")
    assert read.owner is None


def test_a_column_says_who_holds_an_image(folder: Path) -> None:
    read = load(f"hub:{folder}?owner=who")
    assert read.owner is not None
    assert read.owner.tolist() == [2, 0, 2, 0, 1]  # Al, Bo, Zoe


def test_splits_can_be_named(folder: Path) -> None:
    assert len(load(f"hub:{folder}?train=validation&test=train").x_test) == 5


def test_a_fifth_is_held_out_where_there_is_one_split(tmp_path: Path) -> None:
    pictures = [Image.new("L", (3, 3), shade) for shade in range(20)]
    whole = hub_set(pictures, [0] * 10 + [1] * 10, datasets.ClassLabel(names=["dark", "light"]), who=list("ab") * 10)
    datasets.DatasetDict(train=whole).save_to_disk(tmp_path / "whole")
    read = load(f"hub:{tmp_path / 'whole'}?owner=who")
    assert read.y_test.tolist() == [0, 0, 1, 1]
    shades = read.x_train[:, 0, 0, 0].tolist()
    assert sorted([*shades, *read.x_test[:, 0, 0, 0].tolist()]) == list(range(20))
    assert read.owner is not None
    assert read.owner.tolist() == [shade % 2 for shade in shades]  # they stay with their images


def test_sizes_and_colours_become_one_and_plain_values_become_classes(tmp_path: Path) -> None:
    number = datasets.Value("int64")
    train = hub_set([GREY, RED.resize((9, 9)), GREY], [10, 2, 2], number)
    datasets.DatasetDict(train=train, test=hub_set([GREY], [10], number)).save_to_disk(tmp_path / "mixed")
    read = load(f"hub:{tmp_path / 'mixed'}?label=label")
    assert read.x_train.shape == (3, 3, 6, 6)
    assert read.x_train[0].unique().tolist() == [7]
    assert read.x_train[1][0].unique().tolist() == [200]
    assert read.classes == ("2", "10")  # in the order of numbers, not of letters
    assert read.y_train.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("behind", "told"),
    [
        ("?test=holdout", "expected the splits train and holdout, found train, validation"),
        ("?label=labl", "there is no column 'labl': did you mean 'label'?"),
        ("?image=label", "the column 'label' holds no images but ClassLabel"),
        ("?colour=img", "unknown 'colour': valid: config, image, label, owner, test, train"),
        ("?label", "expected key=value&key=value behind '?', found 'label'"),
    ],
)
def test_what_is_not_there_is_told(folder: Path, behind: str, told: str) -> None:
    with pytest.raises(UserError) as error:
        load(f"hub:{folder}{behind}")
    assert str(error.value) == f"hub:{folder}{behind}: {told}"


def test_two_columns_of_labels_are_a_question(tmp_path: Path) -> None:
    fine, coarse = datasets.ClassLabel(names=["cat", "dog", "oak"]), datasets.ClassLabel(names=["animal", "plant"])
    features = datasets.Features({"img": datasets.Image(), "fine": fine, "coarse": coarse})
    part = datasets.Dataset.from_dict({"img": [RED], "fine": [2], "coarse": [1]}, features=features)
    datasets.DatasetDict(train=part, test=part).save_to_disk(tmp_path / "two")
    with pytest.raises(
        UserError, match=r"which of the columns fine, coarse holds the label\? say so: .*\?label=COLUMN"
    ):
        load(f"hub:{tmp_path / 'two'}")
    assert load(f"hub:{tmp_path / 'two'}?label=fine").classes == ("cat", "dog", "oak")


def test_a_damaged_image_is_told_in_a_line(tmp_path: Path) -> None:
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    broken = {"bytes": b"no image at all", "path": None}
    part = datasets.Dataset.from_dict({"img": [broken], "label": [0]}, features=features)
    datasets.DatasetDict(train=part, test=part).save_to_disk(tmp_path / "broken")
    with pytest.raises(UserError, match=r"^hub:.*broken: not a readable image \("):
        load(f"hub:{tmp_path / 'broken'}")


@pytest.mark.parametrize(("options", "column"), [("", "label"), ("?owner=who", "who")])
def test_a_row_without_a_value_is_told(tmp_path: Path, options: str, column: str) -> None:
    labels, owners = ([0, None, 1], ["a", "b", "c"]) if column == "label" else ([0, 1, 1], ["a", None, "c"])
    part = hub_set([GREY] * 3, labels, datasets.ClassLabel(names=["cat", "dog"]), who=owners)
    datasets.DatasetDict(train=part, test=part).save_to_disk(tmp_path / "gap")
    with pytest.raises(UserError, match=f"^hub:.*gap.*: row 1 has nothing in the column '{column}'$"):
        load(f"hub:{tmp_path / 'gap'}{options}")


def test_a_name_is_needed() -> None:
    with pytest.raises(UserError, match="expected the name of a data set"):
        HubName.parse("hub:?label=x")


def test_without_the_library_one_line_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'semifed\[hub\]'"):
        load(f"hub:{folder}")


@pytest.mark.slow  # processes of their own, which load the library
def test_a_run_trains_on_a_set_of_the_hub_and_one_that_cannot_be_had_is_told_in_a_line(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    names = datasets.ClassLabel(names=list("0123456789"))
    pictures = [Image.fromarray(np.rint(image * (255 / 16)).astype(np.uint8)) for image in digits.images[:400]]
    parts = {
        "train": hub_set(pictures[:300], digits.target[:300], names, writer=[f"w{i % 6}" for i in range(300)]),
        "test": hub_set(pictures[300:], digits.target[300:400], names, writer=["w0"] * 100),
    }
    (tmp_path / "digits").mkdir()
    for name, part in parts.items():
        part.to_parquet(tmp_path / "digits" / f"{name}.parquet")
    env = surroundings(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "home"))
    tables = tiny_tables() | {"dataset": f"hub:{tmp_path / 'digits'}?owner=writer"}
    del tables["scenario"]["subset"]
    tables["scenario"]["partition"] = "folders"
    recipe = written(tmp_path / "recipe.toml", tables)
    trained = process("run", recipe, "--out", "run", "--quiet", cwd=tmp_path, env=env)
    assert trained.code == 0, trained.err
    held = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert len(held["unlabelled"]) == 6
    assert sum(map(sum, held["unlabelled"])) == 300 - 20  # but the server's two of each class
    assert (tmp_path / "run" / "summary.json").is_file()
    missing = process("run", recipe, "dataset=hub:nobody/nothing", cwd=tmp_path, env=env)
    assert missing.code == 2
    assert missing.err.startswith("error: hub:nobody/nothing: could not be loaded: ")
    assert missing.err.count("\n") == 1
