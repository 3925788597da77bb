"""`semifed predict` on real digits written as image files, against the network asked directly."""

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from command import Outcome, process, semifed, surroundings, tiny_tables, weights_of
from semifed.assembly import build_net, prepare_run
from semifed.errors import UserError
from semifed.payloads import Prediction
from semifed.predict import images_of, load_model
from semifed.recipe import check_recipe
from semifed.recipe_file import load_recipe
from semifed.run import execute
from toys import Quiet

SHOWN = 60


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; the model learns enough to accept some images and reject others."""
    home = tmp_path_factory.mktemp("home")
    tables = tiny_tables()
    tables["scenario"] |= {"classes": "open", "known_count": 6, "labelled_per_class": 5}
    tables |= {"rounds": 1, "method": {"name": "openfl"}, "server": {"warmup_epochs": 20}}
    tables |= {"model": {"name": "cnn", "width": [4, 8, 8]}, "evaluate": {"accept": 0.8}}
    execute(prepare_run(check_recipe(tables)), home / "run", Quiet())
    return home / "run"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first test images of digits as PNG files, in folders by true class."""
    folder = tmp_path_factory.mktemp("digits")
    dataset = prepare_run(load_recipe("quickstart")).scenario.dataset
    for index, (image, label) in enumerate(zip(dataset.x_test[:SHOWN], dataset.y_test[:SHOWN], strict=True)):
        (folder / str(int(label))).mkdir(exist_ok=True)
        Image.fromarray(image[0].numpy()).save(folder / str(int(label)) / f"{index:03}.png")
    (folder / "notes.txt").write_text("not an image")
    return folder


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """Nothing but the model of the run."""
    shutil.copytree(run / "model", tmp_path / "alone" / "model")
    return tmp_path / "alone"


def asked_directly(run: Path) -> Prediction:
    recipe = load_recipe(str(run / "recipe.toml"))
    parts = prepare_run(recipe)
    net = build_net(recipe, parts.method, (1, 8, 8), 6)
    net.load(weights_of(run))
    with torch.no_grad():
        return parts.method.predict(net, parts.scenario.views.plain(parts.scenario.dataset.x_test[:SHOWN]))


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def described(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "model" / "model.json").read_text())
    return content


def rewritten(run: Path, content: object) -> None:
    (run / "model" / "model.json").write_text(json.dumps(content))


def complaint(outcome: Outcome) -> str:
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert len(outcome.err.splitlines()) <= 2, outcome.err
    return outcome.err


def test_the_model_alone_says_of_files_what_the_network_says_of_the_images(
    capsys: pytest.CaptureFixture[str], run: Path, copied: Path, digits: Path, tmp_path: Path
) -> None:
    outcome = semifed(capsys, "predict", str(copied), str(digits), "--csv", str(tmp_path / "said.csv"))
    assert outcome.code == 0, outcome
    said = {Path(row["image"]).stem: row for row in rows_of(tmp_path / "said.csv")}
    assert sorted(said) == [f"{index:03}" for index in range(SHOWN)]
    direct = asked_directly(run)
    threshold, classes = described(run)["threshold"], described(run)["classes"]
    labels = []
    for index, (logits, score) in enumerate(zip(direct.logits.numpy(), direct.unknown.tolist(), strict=True)):
        row = said[f"{index:03}"]
        odds = np.exp(logits - logits.max())
        assert float(row["confidence"]) == pytest.approx(odds.max() / odds.sum(), abs=1e-5)
        assert float(row["unknown_score"]) == pytest.approx(score, abs=1e-5)
        assert row["label"] == ("unknown" if score > threshold else classes[int(logits.argmax())])
        labels.append(row["label"])
    assert "unknown" in labels
    assert len(set(labels)) > 2


def test_the_table_and_the_file_agree(run: Path, digits: Path, tmp_path: Path) -> None:
    folder = next(path for path in sorted(digits.iterdir()) if path.is_dir())
    shutil.copytree(folder, tmp_path / "some")
    outcome = process("predict", str(run), "some", "--csv", "said.csv", cwd=tmp_path)
    assert (outcome.code, outcome.err) == (0, "")
    header, *lines, last = outcome.out.splitlines()
    assert header.split() == ["image", "label", "confidence", "unknown", "score"]
    assert last == "written: said.csv"
    rows = rows_of(tmp_path / "said.csv")
    assert len(rows) == len(lines) == len(list((tmp_path / "some").iterdir()))
    for line, row in zip(lines, rows, strict=True):
        image, label, confidence, score = line.split()
        assert (image, label) == (row["image"], row["label"])
        assert float(confidence) == pytest.approx(float(row["confidence"]), abs=5e-4)
        assert float(score) == pytest.approx(float(row["unknown_score"]), rel=1e-3)


def test_files_and_folders_in_the_order_given(run: Path, digits: Path) -> None:
    one, other = sorted(digits.rglob("*.png"))[3], digits / "1"
    assert images_of([other, one]) == [*sorted(other.iterdir()), one]
    answers = list(load_model(run).answers([one, one]))
    assert answers[0] == answers[1]


def test_colour_and_size_are_brought_to_the_models(run: Path, digits: Path, tmp_path: Path) -> None:
    first = min(digits.rglob("*.png"))
    image = Image.open(first)
    image.convert("RGB").save(tmp_path / "colour.png")
    large = image.resize((24, 30), Image.Resampling.NEAREST)
    large.save(tmp_path / "large.png")
    large.resize((8, 8), Image.Resampling.BILINEAR).save(tmp_path / "small.png")
    image.convert("P").save(tmp_path / "palette.gif")
    others = [tmp_path / name for name in ("colour.png", "palette.gif", "large.png", "small.png")]
    said = [answer[1:] for answer in load_model(run).answers([first, *others])]
    assert said[0] == said[1] == said[2]
    assert said[3] == said[4]


def test_a_model_without_threshold_names_every_image_and_says_so_once(
    capsys: pytest.CaptureFixture[str], copied: Path, digits: Path, tmp_path: Path
) -> None:
    rewritten(copied, described(copied) | {"threshold": None})
    outcome = semifed(capsys, "predict", str(copied), str(digits), "--csv", str(tmp_path / "said.csv"))
    assert outcome.code == 0
    assert outcome.out.count("calls nothing unknown") == 1
    assert {row["label"] for row in rows_of(tmp_path / "said.csv")} <= set(described(copied)["classes"])


def test_an_image_at_the_threshold_is_accepted(copied: Path, digits: Path) -> None:
    image = min(digits.rglob("*.png"))
    (answer,) = load_model(copied).answers([image])
    rewritten(copied, described(copied) | {"threshold": answer.unknown_score})
    assert next(load_model(copied).answers([image])).label != "unknown"
    rewritten(copied, described(copied) | {"threshold": np.nextafter(answer.unknown_score, -1)})
    assert next(load_model(copied).answers([image])).label == "unknown"


def test_what_is_not_there(capsys: pytest.CaptureFixture[str], run: Path, digits: Path, tmp_path: Path) -> None:
    image = str(min(digits.rglob("*.png")))
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nrest is missing")
    (tmp_path / "text.png").write_text("no image at all")
    whole = Path(image).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    cases = {
        (str(tmp_path / "nowhere"), image): "nowhere: no such directory",
        (image, image): "no such directory",
        (str(tmp_path / "empty"), image): "no model in it (model/model.json is missing); is the run finished?",
        (str(run), str(tmp_path / "nothing.png")): "nothing.png: no such image or folder",
        (str(run), str(tmp_path / "empty")): "empty: no images in this folder",
        (str(run), str(tmp_path / "broken.png")): "broken.png: not a readable image",
        (str(run), str(tmp_path / "text.png")): "text.png: not a readable image",
        (str(run), str(tmp_path / "cut.png")): "cut.png: not a readable image",
        (str(run), image, "--csv", str(tmp_path / "text.png" / "said.csv")): "said.csv cannot be written",
    }
    for arguments, message in cases.items():
        outcome = semifed(capsys, "predict", *arguments)
        if "--csv" in arguments:
            outcome = outcome._replace(out="")  # the table was printed before
        assert message in complaint(outcome)
    assert semifed(capsys, "predict", str(run)).code == 2


def test_broken_files_are_told_after_the_others_were_answered(
    capsys: pytest.CaptureFixture[str], run: Path, digits: Path, tmp_path: Path
) -> None:
    good = sorted(digits.rglob("*.png"))[:3]
    for number in range(5):
        (tmp_path / f"{number}.png").write_text("no image at all")
    outcome = semifed(
        capsys, "predict", str(run), str(tmp_path), *map(str, good), "--csv", str(tmp_path / "new" / "said.csv")
    )
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: left out of 8 images: {tmp_path / '0.png'}: not a readable image")
    assert outcome.err.count("not a readable image") == 3
    assert outcome.err.endswith("; and 2 more\n")
    assert [row["image"] for row in rows_of(tmp_path / "new" / "said.csv")] == [str(path) for path in good]
    assert all(path.name in outcome.out for path in good)


def test_names_of_any_bytes(run: Path, digits: Path, tmp_path: Path) -> None:
    name = b"caf\xe9.png"
    shutil.copy(min(digits.rglob("*.png")), os.fsencode(tmp_path) + b"/" + name)
    strict = {**surroundings(), "PYTHONIOENCODING": "utf-8:strict"}
    outcome = process("predict", str(run), ".", "--csv", "said.csv", cwd=tmp_path, env=strict)
    assert (outcome.code, outcome.err) == (0, "")
    assert "caf?.png" in outcome.out
    assert name in (tmp_path / "said.csv").read_bytes()


def test_a_damaged_model(capsys: pytest.CaptureFixture[str], copied: Path, digits: Path) -> None:
    arguments = ("predict", str(copied), str(min(digits.rglob("*.png"))))
    good = described(copied)
    path = copied / "model" / "model.json"
    broken: list[object] = [[], "text", 3, None, {}]
    needed = ("model", "heads", "method", "image", "classes", "mean", "std", "threshold")
    broken += [{key: value for key, value in good.items() if key != missing} for missing in needed]
    junk: list[Any] = ["x", [], {}, -1, [[1]], True, {"name": "fedsbs"}]
    broken += [good | {key: value} for key in needed for value in junk]
    broken += [good | {"classes": good["classes"][:5]}, good | {"image": {"channels": 2, "size": [8, 8]}}]
    broken += [good | {"model": good["model"] | {"width": [4, 8, 9]}}, good | {"mean": [0.1, 0.2]}]
    broken += [good | {"method": good["method"] | {"tau": 3}}, good | {"heads": {"ova": "big"}}]
    harmless = [good | {"threshold": -1}]
    for content in broken:
        rewritten(copied, content)
        if content in harmless:
            continue
        assert "model.json" in complaint(semifed(capsys, *arguments)), content
    for text in ('{"model": {', "\xff\xfe", "", '{"threshold": NaN}', "[" * 5000):
        path.write_bytes(text.encode("latin-1"))
        assert "model.json is damaged" in complaint(semifed(capsys, *arguments))
    rewritten(copied, good)
    stored = copied / "model" / "model.safetensors"
    whole = stored.read_bytes()
    for content in (b"", whole[:100], whole[:-10], b"x" * 500):
        stored.write_bytes(content)
        assert "model.safetensors" in complaint(semifed(capsys, *arguments))
    stored.unlink()
    assert "model/model.safetensors is missing" in complaint(semifed(capsys, *arguments))


def test_loading_from_python(run: Path) -> None:
    assert load_model(run).rejects
    with pytest.raises(UserError, match="no such directory"):
        load_model(run / "elsewhere")
