"""`semifed export`: the graph, asked by onnxruntime, against what `semifed predict` says of the same images."""

import csv
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image

from command import Outcome, leftovers, semifed
from semifed import export
from semifed.errors import UserError
from semifed.method import Method
from semifed.methods import finds_groups, method_class, method_names
from semifed.models import efficientnet
from semifed.models.backbones import Normalisation, ZeroLinear
from semifed.models.batchnorm import BatchNorm
from semifed.models.heads import SUBSPACE_BASIS
from semifed.models.network import build_network
from semifed.net import Net
from semifed.predict import Decision, load_model
from semifed.prototypes import subspace_basis
from semifed.rundir import RunDirectory
from toys import stored_vit, toy_dataset

CLASSES = ("cat, tame", "Löwe", "狐", "dog")
OUTPUTS = list(Decision._fields)


class Case(NamedTuple):
    """A method with a network to export."""

    method: str
    model: dict[str, Any]
    channels: int = 1
    size: tuple[int, int] = (8, 8)
    rejects: bool = True


CNN = {"name": "cnn", "width": [4, 4, 8]}
EFFICIENTNET = {"name": "efficientnet-lite0", "input_size": 32, "weights": "random", "trainable": "last"}
CASES = {
    "hidden layer": Case("fedfixmatch", CNN | {"head": "mlp2(6)"}, channels=3, size=(8, 10)),
    "detector, areas of unequal size": Case("openfl", {"name": "resnet8", "width": 0.25, "input_size": 5}),
    "one more class, areas of equal size": Case("fedscomatch", CNN | {"input_size": 4}),
    "subspace": Case("fedprosub", CNN),
    "dense": Case("fedfixmatch", {"name": "dense-cnn", "width": [6]}, channels=3, size=(8, 10)),
}
SMALLEST = Case("fed-simgcd", {"name": "adapter", "width": [6], "head": "cosine"}, channels=3)
SLOW = {
    "pretrained, smaller": Case("fedavg", EFFICIENTNET, size=(40, 52), rejects=False),
    "wide": Case("fedssb", {"name": "wrn-28-2", "width": 0.25}),
    "transformer, larger": Case("fedlpa", {"name": "vit", "input_size": 24, "head": "cosine"}, channels=3),
}
each_case = pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()),
    ],
)


def pictures(case: Case, count: int = 24) -> torch.Tensor:
    """Noisy patterns, so that neighbouring pixels differ and no two images look alike."""
    side = max(case.size)
    drawn = toy_dataset(per_class=count, channels=case.channels, size=side).x_train
    return drawn[:count, :, : case.size[0], : case.size[1]]


def delivered(case: Case, run: Path) -> Path:
    """A run directory with nothing but a model, which says something else of every image."""
    kind = method_class(case.method)
    table = {"head": "linear"} | case.model
    heads = dict(kind.heads) | ({"projection": "mlp3(8, 4, gelu)"} if "projection" in kind.heads else {})
    mean, std = (0.4, 0.5, 0.6)[: case.channels], (0.2, 0.25, 0.3)[: case.channels]
    shape: dict[str, Any] = {"channels": case.channels, "size": case.size}
    keys = {key: value for key, value in table.items() if key != "name"}
    generator = torch.Generator().manual_seed(3)
    built = build_network(
        table["name"],
        **shape,
        **keys,
        classes=len(CLASSES),
        further=heads,
        normalised=Normalisation(mean, std),
        generator=generator,
    )
    net = Net(built, "tracked")
    for layer in built.modules():
        if isinstance(layer, BatchNorm) and layer.mode != "fixed":
            layer.weight.data.uniform_(0.5, 1.5, generator=generator)
            layer.bias.data.normal_(0, 0.5, generator=generator)
        if isinstance(layer, ZeroLinear):
            layer.weight.data.normal_(0, 0.2, generator=generator)
    weights = net.state()
    if SUBSPACE_BASIS in weights:
        net.load({SUBSPACE_BASIS: subspace_basis(torch.randn(weights[SUBSPACE_BASIS].T.shape, generator=generator))})
    views = (pictures(case) / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    net.recalibrate(views.to(memory_format=torch.channels_last))
    described = {
        "model": table,
        "architecture": built.backbone.architecture,
        "heads": heads,
        "method": {"name": case.method},
        "image": shape,
        "classes": CLASSES,
        "mean": mean,
        "std": std,
        "threshold": None,
    }
    weights = net.state() | net.frozen_weights()
    RunDirectory(run).write_model(weights, described)
    if case.rejects:
        scores = load_model(run).decision_of(pictures(case)).unknown
        RunDirectory(run).write_model(weights, described | {"threshold": in_the_middle(scores)})
    return run


def in_the_middle(scores: torch.Tensor) -> float:
    """A threshold that rejects half of the images and lies as far from any score as it can."""
    low, high = scores.double().sort().values[len(scores) // 2 - 1 :][:2].tolist()
    return float(low + high) / 2


def session_of(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def asked(path: Path, images: torch.Tensor) -> Decision:
    return Decision(*map(torch.from_numpy, session_of(path).run(OUTPUTS, {"images": images.numpy()})))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest model there is, for what does not depend on the network."""
    return delivered(SMALLEST, tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    export.write_onnx(load_model(run), run / "graph.onnx")
    return run / "graph.onnx"


@pytest.fixture
def tiny_efficientnet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of its seven stages, drawn instead of read: the whole takes ten seconds."""
    monkeypatch.setattr(efficientnet, "_STAGES", ((1, 3, 1, 1, 4), (2, 5, 2, 6, 6)))
    monkeypatch.setattr(efficientnet, "_STEM", 4)
    monkeypatch.setattr(efficientnet, "_HEAD", 16)


def assert_the_graph_agrees(graph: Path, case: Case, home: Path) -> None:
    images = pictures(case)
    expected = load_model(home).decision_of(images)
    assert expected.probabilities.amax(dim=1).median() < 0.99, "a model that is too sure tells nothing apart"
    assert len(set(expected.unknown.tolist())) == len(images)
    assert int((expected.label == -1).sum()) == (len(images) // 2 if case.rejects else 0)
    for count in (len(images), 7, 2, 1):
        said = asked(graph, images[:count])
        assert [part.dtype for part in said] == [torch.float32, torch.float32, torch.int64]
        torch.testing.assert_close(said.probabilities, expected.probabilities[:count], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(said.unknown, expected.unknown[:count], rtol=1e-4, atol=1e-6)
        assert torch.equal(said.label, expected.label[:count])


@pytest.mark.usefixtures("tiny_efficientnet")
@each_case
@pytest.mark.slow
def test_the_graph_says_what_predict_says(
    case: Case, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    if case.model["name"] == "vit":
        case.model["weights"] = str(stored_vit(tmp_path / "vit"))
    home, graph = delivered(case, tmp_path / "run"), tmp_path / "new folder" / "graph.onnx"
    with caplog.at_level(logging.WARNING):
        outcome = semifed(capfd, "export", str(home), "--onnx", str(graph))
    assert (outcome.code, outcome.err, caplog.records) == (0, "", [])
    assert_the_graph_agrees(graph, case, home)
    assert ("calls nothing unknown" in outcome.out) == (not case.rejects)
    assert ("semifed discover" in outcome.out) == finds_groups(method_class(case.method))


def test_every_score_that_a_method_has_is_among_the_cases() -> None:
    tried = {method_class(case.method).unknown_score for case in (SMALLEST, *CASES.values())}
    assert {method_class(name).unknown_score for name in method_names()} == tried


@pytest.mark.parametrize("name", method_names())
def test_a_method_with_a_score_of_its_own_names_it(name: str) -> None:
    kind = method_class(name)
    assert (kind.predict is not Method.predict) == (kind.unknown_score != Method.unknown_score)


def test_the_file_explains_itself(run: Path, exported: Path) -> None:
    onnx.checker.check_model(exported, full_check=True)
    session = session_of(exported)
    (given,) = session.get_inputs()
    assert (given.name, given.type, given.shape) == ("images", "tensor(uint8)", ["n", 3, 8, 8])
    outputs = {one.name: (one.type, one.shape) for one in session.get_outputs()}
    assert outputs == {
        "probabilities": ("tensor(float)", ["n", len(CLASSES)]),
        "unknown": ("tensor(float)", ["n"]),
        "label": ("tensor(int64)", ["n"]),
    }
    about = session.get_modelmeta()
    told = about.custom_metadata_map
    described = json.loads((run / "model" / "model.json").read_text())
    assert tuple(json.loads(told["classes"])) == CLASSES
    assert json.loads(told["threshold"]) == described["threshold"]
    assert told["method"] == "fed-simgcd"
    assert told["unknown_score"] == "probability of all novel classes together"
    assert about.producer_name == "semifed"
    assert "label" in about.description


def test_the_file_tells_nothing_of_the_machine(exported: Path) -> None:
    content = exported.read_bytes()
    assert b".py" not in content
    assert str(Path(export.__file__).parent).encode() not in content


@pytest.mark.slow
def test_the_same_model_makes_the_same_file(run: Path, exported: Path, tmp_path: Path) -> None:
    export.write_onnx(load_model(run), tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == exported.read_bytes()


def test_the_command_replaces_an_older_file_and_says_what_the_graph_leaves_out(
    run: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export, "_graph", lambda model: onnx.load(exported))
    there = tmp_path / "there.onnx"
    there.write_text("an older one")
    outcome = semifed(capsys, "export", str(run), "--onnx", str(there))
    assert outcome.code == 0
    assert there.read_bytes() == exported.read_bytes()
    assert leftovers(tmp_path) == []
    left_out, difference, written = outcome.out.splitlines()
    assert "semifed discover" in left_out
    assert float(difference.split()[-1].rstrip(".")) < 1e-5
    assert written == f"written: {there} ({there.stat().st_size / 1e6:.2f} MB)"


def test_files_go_the_same_way_through_graph_and_command(
    run: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_the_graph_agrees(exported, SMALLEST, run)
    images = pictures(SMALLEST)
    for index, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / f"{index:02}.png")
    assert semifed(capsys, "predict", str(run), str(tmp_path), "--csv", str(tmp_path / "said.csv")).code == 0
    with open(tmp_path / "said.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    said = asked(exported, images)
    assert [row["label"] for row in rows] == [(*CLASSES, "unknown")[index] for index in said.label]
    assert [float(row["confidence"]) for row in rows] == pytest.approx(said.probabilities.amax(1).tolist(), rel=1e-4)
    assert [float(row["unknown_score"]) for row in rows] == pytest.approx(said.unknown.tolist(), rel=1e-4)


def test_an_image_at_the_threshold_is_accepted_to_the_last_bit(exported: Path, tmp_path: Path) -> None:
    """In single precision the second threshold would be the first."""
    image = pictures(SMALLEST)[:1]
    score = asked(exported, image).unknown.double().item()
    proto = onnx.load(exported)
    (threshold,) = (one for one in proto.graph.initializer if one.data_type == onnx.TensorProto.DOUBLE)
    for value, rejected in ((score, False), (float(np.nextafter(score, -1)), True)):
        threshold.CopyFrom(onnx.numpy_helper.from_array(np.array(value), threshold.name))
        onnx.save(proto, tmp_path / "graph.onnx")
        assert (asked(tmp_path / "graph.onnx", image).label.item() == -1) == rejected


def test_without_a_threshold_the_metadata_say_null(run: Path, exported: Path, tmp_path: Path) -> None:
    proto, model = onnx.load(exported), load_model(run)
    model.description.threshold = None
    export._describe(proto, model)
    told = {one.key: one.value for one in proto.metadata_props}
    assert told["threshold"] == "null"


@pytest.mark.parametrize("change", ["weights", "labels"])
def test_a_graph_that_differs_from_its_model_is_not_written(
    run: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    proto = onnx.load(exported)
    if change == "weights":
        weight = max(proto.graph.initializer, key=lambda one: len(one.raw_data))
        weight.raw_data = (np.frombuffer(weight.raw_data, np.float32) * 1.5).tobytes()
    else:
        next(node for node in proto.graph.node if node.op_type == "ArgMax").op_type = "ArgMin"
    monkeypatch.setattr(export, "_graph", lambda model: proto)
    (tmp_path / "graph.onnx").write_text("an older one")
    with pytest.raises(RuntimeError, match="differs from its model"):
        export.write_onnx(load_model(run), tmp_path / "graph.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["graph.onnx"]
    assert (tmp_path / "graph.onnx").read_text() == "an older one"


def complaint(outcome: Outcome) -> str:
    assert (outcome.code, outcome.out) == (2, ""), outcome
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1, outcome.err
    return outcome.err


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_without_a_package_a_line_names_the_extra(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    told = complaint(semifed(capsys, "export", str(run), "--onnx", str(tmp_path / "graph.onnx")))
    assert f"needs the package {package}: pip install 'semifed[onnx]'" in told
    assert list(tmp_path.iterdir()) == []


def test_mistakes(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(home: Path, file: Path) -> str:
        return complaint(semifed(capsys, "export", str(home), "--onnx", str(file)))

    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    good = tmp_path / "graph.onnx"
    assert "nowhere: no such directory" in told(tmp_path / "nowhere", good)
    assert "no model in it (model/model.json is missing)" in told(tmp_path / "empty", good)
    assert "empty is a directory; expected the name of a file" in told(run, tmp_path / "empty")
    assert "Missing option '--onnx'" in semifed(capsys, "export", str(run)).err
    assert "file is a file, not a directory" in told(run, tmp_path / "file" / "graph.onnx")
    with monkeypatch.context() as patch:
        patch.setattr(export, "LARGEST", 1000)
        assert "GB of weights, and an ONNX file holds at most 2 GB" in told(run, good)
    assert not good.exists()


def test_a_model_that_answers_nan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(delivered(SMALLEST, tmp_path / "run"))
    model.net.load({"classifier.weight": torch.full((len(CLASSES), 192), torch.nan)})
    monkeypatch.setattr(export, "_graph", never("a model that says nothing need not be drawn"))
    with pytest.raises(UserError, match="training diverged"):
        export.write_onnx(model, tmp_path / "graph.onnx")


def never(reason: str) -> Callable[..., object]:
    return lambda *_: pytest.fail(reason)
