"""A delivered model as one ONNX graph: pixels in; probabilities, unknown score and label out, as `predict` has them.

The graph is asked about a few images before it is written: a file that disagrees with its model is worse than none.
"""

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from semifed import __version__
from semifed.data.views import channel_constants
from semifed.durable import write_atomically
from semifed.errors import UserError
from semifed.predict import Decision, Model, decided

INPUT = "images"
OPSET = 18  # the one PyTorch's exporter writes by itself; runtimes since 2023 read it
LARGEST = 2**31 - 2**24  # bytes of weights: an ONNX file ends at 2 GB, and the graph needs some room
TRIED = 5  # images; another number than the graph is drawn with, or a fixed batch would not be noticed
DRAWN_WITH = 2
TOLERATED = 0.01  # of probabilities and scores; rounding makes about 1e-6

DESCRIPTION = (
    "images: uint8 pixels [n, channels, height, width], grey or RGB, of this size. probabilities: of the classes, in"
    " their order. unknown: the score that grows with unknown-ness. label: the class, or -1 where the score is above"
    " the threshold. Classes (JSON), threshold (JSON), method and unknown_score are in the metadata."
)


class Written(NamedTuple):
    """What came of an export."""

    bytes: int
    difference: float  # between what graph and model say of the images they were tried on


class Judge(nn.Module):
    """All that `semifed predict` does to pixels."""

    scale: Tensor
    shift: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.network = model.net.network  # known as a part, or its weights would be constants without names
        self._model = model
        constants = channel_constants(model.description.mean, model.description.std)
        for name, values in zip(("scale", "shift"), constants, strict=True):
            self.register_buffer(name, values[:, None, None])

    def forward(self, images: Tensor) -> Decision:
        """What is said of uint8 images [n, c, h, w]."""
        # Not by `Views.plain`: it writes into memory it lays out itself, and a graph does not.
        return self._model.decision(torch.addcmul(self.shift, images.float(), self.scale))


def write_onnx(model: Model, path: Path) -> Written:
    """Write the graph of a model to a file."""
    onnx = _packages()
    if path.is_dir():
        raise UserError(f"--onnx {path} is a directory; expected the name of a file")
    if path.parent.exists() and not path.parent.is_dir():
        raise UserError(f"--onnx {path}: {path.parent} is a file, not a directory")
    size = sum(tensor.nbytes for tensor in model.net.network.state_dict().values())
    if size > LARGEST:
        raise UserError(f"this model has {size / 1e9:.1f} GB of weights, and an ONNX file holds at most 2 GB")
    trial = _trial(model)
    proto = _graph(model)
    _describe(proto, model)
    onnx.checker.check_model(proto, full_check=True)
    content: bytes = proto.SerializeToString(deterministic=True)
    difference = _difference(content, trial)
    if not difference <= TOLERATED:
        raise RuntimeError(f"the graph differs from its model by {difference:.3g}; {path} was not written")
    write_atomically(path, content)
    return Written(len(content), difference)


def _packages() -> Any:
    """The package onnx, once all that is needed is there."""
    try:
        import onnx
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"export needs the package {error.name}: pip install 'semifed[onnx]'") from None
    return onnx


@torch.no_grad()
def _graph(model: Model) -> Any:
    """The graph as an onnx.ModelProto."""
    image = model.description.image
    example = torch.zeros(DRAWN_WITH, image.channels, *image.size, dtype=torch.uint8)
    with _without_chatter():
        program = torch.onnx.export(
            Judge(model).eval(),
            (example,),
            input_names=[INPUT],
            output_names=list(Decision._fields),
            dynamic_shapes=({0: torch.export.Dim("n")},),
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    assert program is not None
    return program.model_proto


@contextmanager
def _without_chatter() -> Iterator[None]:
    """PyTorch's exporter warns of its own innards and of a torchvision nobody asked for."""
    registry = logging.getLogger("torch.onnx._internal.exporter._registration")
    before = registry.level
    registry.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        registry.setLevel(before)


def _describe(proto: Any, model: Model) -> None:
    """Tell who wrote the graph and what its outputs mean, and nothing of the machine it was written on."""
    graph = proto.graph
    for part in (proto, graph, *graph.node, *graph.initializer, *graph.value_info, *graph.input, *graph.output):
        part.ClearField("metadata_props")  # PyTorch notes the source line of every step, with its path
        part.ClearField("doc_string")
    graph.name = "semifed"
    proto.producer_name, proto.producer_version, proto.doc_string = "semifed", __version__, DESCRIPTION
    description = model.description
    facts = {
        "classes": json.dumps(description.classes, ensure_ascii=False),
        "threshold": json.dumps(description.threshold),
        "method": model.method_name,
        "unknown_score": model.method.unknown_score,
    }
    for key, value in facts.items():
        proto.metadata_props.add(key=key, value=value)


class _Trial(NamedTuple):
    """Images, and what the model says of them."""

    images: Tensor
    expected: Decision
    threshold: float | None


def _trial(model: Model) -> _Trial:
    image = model.description.image
    stream = torch.Generator().manual_seed(0)
    images = torch.randint(256, (TRIED, image.channels, *image.size), generator=stream, dtype=torch.uint8)
    expected = model.decision_of(images)
    if not all(torch.isfinite(numbers).all() for numbers in expected):
        raise UserError("this model answers with NaN, as one does whose training diverged: there is nothing to export")
    return _Trial(images, expected, model.description.threshold)


def _difference(content: bytes, trial: _Trial) -> float:
    """Between the graph's numbers and the model's at most; infinite if the graph's labels do not follow from them."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    said = Decision(*map(torch.from_numpy, session.run(list(Decision._fields), {INPUT: trial.images.numpy()})))
    if not torch.equal(said.label, decided(said.probabilities, said.unknown, trial.threshold).label):
        return float("inf")
    pairs = ((said.probabilities, trial.expected.probabilities), (said.unknown, trial.expected.unknown))
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
