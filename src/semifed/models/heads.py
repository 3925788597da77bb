"""Heads on the features: classifier, one-vs-all detector, projection, subspace; and the words for them."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from semifed.errors import UserError, nearest
from semifed.prototypes import subspace_score

SUBSPACE_BASIS = "heads.subspace.basis"  # its name among the weights of a network

_KINDS = ("linear", "mlp", "ova", "projection", "subspace")
_CLASS_FORMS = ("linear", "mlp2(256)", "mlp3(1024)")
_VECTOR_FORMS = ("128", "linear(128)", "linear(128, no-bias)", "linear(features)", "mlp2(256, 128)", "mlp3(1024, 128)")


class HeadSpec(NamedTuple):
    """What a head computes from the features, before their number and the number of classes are known.

    kind: "linear" and "mlp" give logits [n, classes], "ova" [n, 2, classes], "projection" [n, outputs],
    "subspace" [n].
    hidden: widths of the hidden layers, each followed by ReLU; None is one layer as wide as the features.
    outputs: a number, or "features" for as many as there are features.
    """

    kind: str
    hidden: tuple[int, ...] | None = ()
    outputs: int | Literal["features"] | None = None
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


class Subspace(nn.Module):
    """How much of the features lies in the subspace of the known classes, [n] in [0, 1] (ProSub).

    The basis is set, not trained; it is a part of the model all the same, so that the model alone can be asked.
    """

    basis: Tensor  # [features, classes], orthonormal columns; zeros before it is known and for classes without data

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("basis", torch.empty(features, classes))

    def reset(self) -> None:
        """No subspace yet: every score is 0."""
        self.basis.zero_()

    def forward(self, features: Tensor) -> Tensor:
        """Scores of a batch of features."""
        return subspace_score(features, self.basis)


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
    """Read the description of a further head by its name: "ova", "subspace", any other name for a vector of outputs.

    "ova" takes the forms of a classifier; "linear" is then bias-free as in OpenMatch. Vectors take "M"
    (features - features - M, the projection of SSB and IOMatch), "linear(M)", "linear(M, no-bias)" or
    "mlpN(H, M)"; in the last three M may be "features". A "predictor" foretells features, so its M must be that.
    "subspace" has no size.
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
    if name == "subspace":
        if text != "subspace":
            raise UserError(f"{key}: a subspace has one direction a class and no size to set; leave this key out")
        return HeadSpec("subspace")
    spec = _vector_spec(text, key)
    if name == "predictor" and spec.outputs != "features":
        raise UserError(
            f"{key}: a predictor has as many outputs as there are features; "
            f"write 'linear(features)' or 'mlpN(hidden, features)', not '{text}'"
        )
    return spec


def _vector_spec(text: str, key: str) -> HeadSpec:
    words = text.replace(" ", "")
    if re.fullmatch(r"[1-9]\d*", words):
        return HeadSpec("projection", None, int(words))
    if match := re.fullmatch(r"linear\(([1-9]\d*|features)(,no-bias)?\)", words):
        return HeadSpec("projection", (), _outputs(match[1]), bias=match[2] is None)
    if match := re.fullmatch(r"mlp([2-9])\(([1-9]\d*),([1-9]\d*|features)\)", words):
        return HeadSpec("projection", (int(match[2]),) * (int(match[1]) - 1), _outputs(match[3]))
    raise UserError(
        f"{key}: expected a number of outputs M, 'linear(M)' or 'mlpN(hidden, M)', not '{text}'; "
        + nearest(text, _VECTOR_FORMS)
    )


def _outputs(word: str) -> int | Literal["features"]:
    return "features" if word == "features" else int(word)


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
            return _stack([features, *hidden, features if spec.outputs == "features" else spec.outputs], spec.bias)
        case "subspace":
            if classes > features:
                raise UserError(
                    f"model.width: a subspace with a direction for each of {classes} classes needs as many features, "
                    f"this network has {features}"
                )
            return Subspace(features, classes)
        case kind:
            raise UserError(f"{key}: head kind '{kind}' is unknown; {nearest(kind, _KINDS)}")


def _stack(sizes: Sequence[int], bias: bool) -> nn.Linear | nn.Sequential:
    """Linear layers through `sizes` with ReLU between; a single one stays bare, for its `.weight`."""
    layers: list[nn.Module] = [nn.Linear(sizes[0], sizes[1], bias)]
    for wide, narrow in pairwise(sizes[1:]):
        layers += [nn.ReLU(inplace=True), nn.Linear(wide, narrow, bias)]
    first = layers[0]
    return first if len(layers) == 1 and isinstance(first, nn.Linear) else nn.Sequential(*layers)
