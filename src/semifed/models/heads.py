"""Heads on the features: classifier, one-vs-all detector, projection; and the words for them."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor, nn

from semifed.errors import UserError, nearest

_KINDS = ("linear", "mlp", "ova", "projection")
_CLASS_FORMS = ("linear", "mlp2(256)", "mlp3(1024)")
_VECTOR_FORMS = ("128", "linear(128)", "linear(128, no-bias)", "mlp2(256, 128)", "mlp3(1024, 128)")


class HeadSpec(NamedTuple):
    """What a head computes from the features, before their number and the number of classes are known.

    kind: "linear" and "mlp" give logits [n, classes], "ova" [n, 2, classes], "projection" [n, outputs].
    hidden: widths of the hidden layers, each followed by ReLU; None is one layer as wide as the features.
    """

    kind: str
    hidden: tuple[int, ...] | None = ()
    outputs: int | None = None
    bias: bool = True


class OneVsAll(nn.Module):
    """A two-way detector per class: [n, 2, classes], index 0 unknown and 1 known, as in OpenMatch and SSB."""

    def __init__(self, layers: nn.Module, classes: int) -> None:
        super().__init__()
        self.layers = layers
        self.classes = classes

    def forward(self, features: Tensor) -> Tensor:
        """Two logits per class."""
        pairs: Tensor = self.layers(features)
        return pairs.reshape(-1, 2, self.classes)


def class_head_spec(text: str, key: str) -> HeadSpec:
    """Read "linear" or "mlpN(H)": N linear layers, so N-1 hidden ones, of H units each."""
    words = text.replace(" ", "")
    if words == "linear":
        return HeadSpec("linear")
    if match := re.fullmatch(r"mlp([2-9])\(([1-9]\d*)\)", words):
        return HeadSpec("mlp", (int(match[2]),) * (int(match[1]) - 1))
    raise UserError(
        f"{key}: expected 'linear' or 'mlpN(hidden)' with N of 2 to 9 layers, not '{text}'; "
        + nearest(text, _CLASS_FORMS)
    )


def further_head_spec(name: str, value: str | int | HeadSpec) -> HeadSpec:
    """Read the description of a further head by its name: "ova", or any other name for a vector of outputs.

    "ova" takes the forms of a classifier; "linear" is then bias-free as in OpenMatch. Vectors take "M"
    (features - features - M, the projection of SSB and IOMatch), "linear(M)", "linear(M, no-bias)" or
    "mlpN(H, M)".
    """
    key = f"model.heads.{name}"
    if not name.isidentifier() or hasattr(nn.ModuleDict, name):
        raise UserError(f"{key}: '{name}' cannot name a head; use a word such as 'ova' or 'projection'")
    if isinstance(value, HeadSpec):
        return value
    text = str(value)
    if name == "ova":
        hidden = class_head_spec(text, key).hidden
        return HeadSpec("ova", hidden, bias=bool(hidden))
    words = text.replace(" ", "")
    if re.fullmatch(r"[1-9]\d*", words):
        return HeadSpec("projection", None, int(words))
    if match := re.fullmatch(r"linear\(([1-9]\d*)(,no-bias)?\)", words):
        return HeadSpec("projection", (), int(match[1]), bias=match[2] is None)
    if match := re.fullmatch(r"mlp([2-9])\(([1-9]\d*),([1-9]\d*)\)", words):
        return HeadSpec("projection", (int(match[2]),) * (int(match[1]) - 1), int(match[3]))
    raise UserError(
        f"{key}: expected a number of outputs M, 'linear(M)' or 'mlpN(hidden, M)', not '{text}'; "
        + nearest(text, _VECTOR_FORMS)
    )


def build_head(spec: HeadSpec, *, features: int, classes: int, key: str) -> nn.Module:
    """The module of a head; its parameters are not initialised for use."""
    hidden = (features,) if spec.hidden is None else spec.hidden
    match spec.kind:
        case "linear" | "mlp":
            return _stack([features, *hidden, classes], spec.bias)
        case "ova":
            return OneVsAll(_stack([features, *hidden, 2 * classes], spec.bias), classes)
        case "projection":
            if spec.outputs is None:
                raise UserError(f"{key}: a projection needs its number of outputs")
            return _stack([features, *hidden, spec.outputs], spec.bias)
        case kind:
            raise UserError(f"{key}: head kind '{kind}' is unknown; {nearest(kind, _KINDS)}")


def _stack(sizes: Sequence[int], bias: bool) -> nn.Linear | nn.Sequential:
    """Linear layers through `sizes` with ReLU between; a single one stays bare, for its `.weight`."""
    layers: list[nn.Module] = [nn.Linear(sizes[0], sizes[1], bias)]
    for wide, narrow in pairwise(sizes[1:]):
        layers += [nn.ReLU(inplace=True), nn.Linear(wide, narrow, bias)]
    first = layers[0]
    return first if len(layers) == 1 and isinstance(first, nn.Linear) else nn.Sequential(*layers)
