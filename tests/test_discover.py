"""`semifed discover` on real digits written as image files."""

import csv
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load, load_file, save
from sklearn.datasets import load_digits

from command import semifed
from semifed.assembly import assemble, prepare_run
from semifed.discovery.gallery import Gallery
from semifed.metrics import hungarian_accuracy
from semifed.predict import load_model
from semifed.recipe_file import load_recipe
from semifed.run import execute
from toys import Quiet


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "pixels"
    recipe = load_recipe("fedlpa/digits-mini", ["method=untrained", "rounds=1", "engine.workers=1"])
    execute(prepare_run(recipe), out, Quiet())
    return out


@pytest.fixture(scope="module")
def pile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pile")
    digits = load_digits()
    for number, (image, digit) in enumerate(zip(digits.images[:400], digits.target, strict=False)):
        Image.fromarray((image * 255 / 16).astype(np.uint8)).save(folder / f"{number:03}-{digit}.png")
    return folder


def test_images_of_ten_classes_fall_into_groups(
    run: Path, pile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = semifed(
        capsys,
        "discover",
        str(run),
        str(pile),
        "--csv",
        str(tmp_path / "groups.csv"),
        "--sheets",
        str(tmp_path / "sheets"),
    )
    assert outcome.code == 0, outcome.err
    with open(tmp_path / "groups.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 400
    group = np.array([int(line["group"]) for line in lines])
    digit = np.array([int(Path(line["image"]).stem[-1]) for line in lines])
    assert hungarian_accuracy(group, digit, 5).all > 0.6
    sizes = np.bincount(group[group >= 0])
    assert (np.diff(sizes) <= 0).all(), "the largest group is the first"
    sheets = sorted((tmp_path / "sheets").glob("*.png"))
    assert len(sheets) == len(sizes)
    with Image.open(sheets[0]) as picture:
        assert picture.height >= 40
    assert f"written: {tmp_path / 'sheets'}" in outcome.out


def test_a_file_that_is_no_image_takes_no_group_from_the_others(
    run: Path, pile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.png").write_text("no image")
    table = tmp_path / "groups.csv"
    outcome = semifed(capsys, "discover", str(run), str(tmp_path / "broken.png"), str(pile), "--csv", str(table))
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: left out of 401 images: {tmp_path / 'broken.png'}: not a readable image")
    assert semifed(capsys, "discover", str(run), str(pile), "--csv", str(tmp_path / "whole.csv")).code == 0
    assert table.read_bytes() == (tmp_path / "whole.csv").read_bytes()
    alone = semifed(capsys, "discover", str(run), str(tmp_path / "broken.png"))
    assert (alone.code, alone.out) == (2, "")
    assert "broken.png: not a readable image" in alone.err


@pytest.fixture(scope="module", params=["untrained", "fed-gcd", "fed-agcl"])
def short_run(request: pytest.FixtureRequest, run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "untrained":
        return run
    out = tmp_path_factory.mktemp("runs") / str(request.param)
    recipe = load_recipe("fedlpa/digits-mini", [f"method={request.param}", "rounds=1", "engine.workers=1"])
    execute(prepare_run(recipe), out, Quiet())
    return out


@pytest.mark.parametrize("count", [1, 2, 3])
def test_hardly_any_images(short_run: Path, pile: Path, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    few = [str(path) for path in sorted(pile.iterdir())[:count]]
    outcome = semifed(capsys, "discover", str(short_run), *few)
    assert outcome.code == 0, outcome.err


def test_fewer_classes_among_the_tested_images_than_labelled_ones(tmp_path: Path) -> None:
    few = ["method=untrained", "rounds=1", "engine.workers=1", "evaluate.discover_images=4"]
    summary = execute(prepare_run(load_recipe("fedlpa/digits-mini", few)), tmp_path / "run", Quiet())
    assert 0 <= summary["metrics"]["kmeans.all"] <= 1


def test_a_model_that_looks_for_no_groups_says_which_do(
    run: Path, pile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    assert semifed(capsys, "run", "quickstart", "method=server-only", "rounds=1", "--out", str(other)).code == 0
    outcome = semifed(capsys, "discover", str(other), str(pile))
    assert outcome.code == 2
    assert "server-only looks for no groups; train one of: fed-agcl, fed-gcd, fed-simgcd, fedlpa" in outcome.err


def test_without_infomap_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "infomap", None)
    outcome = semifed(capsys, "run", "fedlpa/digits-mini", "--out", str(tmp_path / "run"))
    assert outcome.code == 2
    assert outcome.err.strip() == "error: category discovery needs infomap: pip install 'semifed[discovery]'"
    assert not (tmp_path / "run").exists()


# With labelled images


def some_of(pile: Path) -> list[str]:
    return [str(path) for path in sorted(pile.iterdir())[:120]]


def test_without_labelled_images_fedlpa_plus_and_kmeans_do_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for method in (["method.inference=graph+labels"], ["method=fed-gcd"], ["method=fed-agcl"]):
        asked = [*method, "scenario.validation_fraction=0", "--out", str(tmp_path / "run")]
        outcome = semifed(capsys, "run", "fedlpa/digits-mini", *asked)
        assert outcome.code == 2
        assert outcome.err.startswith("error: scenario.validation_fraction: fed")
        assert "set it above 0" in outcome.err
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["fed-gcd", "fedlpa"])
def test_a_delivered_model_groups_beside_the_labelled_images_of_its_run(
    method: str, tmp_path: Path, pile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plus = ["method.inference=graph+labels", "method.warmup_rounds=1"] if method == "fedlpa" else []
    recipe = load_recipe("fedlpa/digits-mini", [f"method={method}", *plus, "rounds=1", "engine.workers=1"])
    parts = prepare_run(recipe)
    run = tmp_path / "run"
    execute(parts, run, Quiet())
    stored = load((run / "model" / "labelled.safetensors").read_bytes())
    held = parts.scenario.validation
    assert held is not None
    assert torch.equal(stored["labels"], held.labels)
    # The adapter's features are what a plain pass over these images says, and nothing else of them is kept.
    net, _ = assemble(parts)
    net.load(load_file(run / "model" / "model.safetensors"))
    with torch.no_grad():
        said = net(parts.scenario.views.plain(held.images[held.labelled]))
    torch.testing.assert_close(stored["features"], said.features)
    assert set(stored) == {"features", "labels"}

    model = load_model(shutil.copytree(run, tmp_path / "copied"))
    images = model.see([Path(path) for path in some_of(pile)]).images
    with torch.no_grad():
        shown = net(parts.scenario.views.plain(images))
    expected = parts.method.clusters(Gallery(shown, said, held.labels, seed=1))
    assert hungarian_accuracy(model.groups(images).numpy(), expected.numpy(), 5).all > 0.97, "but for rounding"
    outcome = semifed(capsys, "discover", str(run), *some_of(pile))
    assert outcome.code == 0
    assert "labelled.safetensors" not in outcome.out

    (run / "model" / "labelled.safetensors").write_bytes(b"no tensors")
    outcome = semifed(capsys, "discover", str(run), *some_of(pile))
    assert outcome.code == 2
    assert "labelled.safetensors is damaged" in outcome.err
    for damage in ({"labels": held.labels + 5}, {"features": said.features[1:]}, {"more": held.labels}):
        (run / "model" / "labelled.safetensors").write_bytes(save({**stored, **damage}))
        assert "labelled.safetensors is damaged" in semifed(capsys, "discover", str(run), *some_of(pile)).err
    (run / "model" / "labelled.safetensors").unlink()
    outcome = semifed(capsys, "discover", str(run), *some_of(pile))
    assert outcome.code == 0
    assert "grouped without the help of labelled ones" in " ".join(outcome.out.split())


def test_a_model_that_has_no_use_for_labelled_images_brings_none(run: Path) -> None:
    assert not (run / "model" / "labelled.safetensors").exists()
