"""Heads on the features: classifier, one-vs-all detector, projection, subspace; and the words for them."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import init

from semifed.errors import UserError, nearest
from semifed.prototypes import subspace_score

SUBSPACE_BASIS = "heads.subspace.basis"  # its name among the weights of a network

_KINDS = ("linear", "mlp", "cosine", "ova", "projection", "subspace")
_CLASS_FORMS = ("linear", "mlp2(256)", "mlp3(1024)", "cosine", "cosine(0.1)")
_VECTOR_FORMS = (
    "128",
    "linear(128)",
    "linear(128, no-bias)",
    "linear(features)",
    "mlp2(256, 128)",
    "mlp3(1024, 128)",
    "mlp3(2048, 256, gelu)",
)
DINO_FEATURES = 768  # of its ViT-B/16; hidden layers of its head have 2048 units
_COSINE_TEMPERATURE = 0.1  # of SimGCD


class HeadSpec(NamedTuple):
    """What a head computes from the features, before their number and the number of classes are known.

    kind: "linear", "mlp" and "cosine" give logits [n, classes], "ova" [n, 2, classes], "projection" [n, outputs],
    "subspace" [n].
    hidden: widths of the hidden layers, each followed by ReLU; None is one layer as wide as the features.
    outputs: a number, or "features" for as many as there are features.
    gelu: hidden layers are followed by GELU instead, and all layers drawn as in DINO's head.
    temperature: what cosines are divided by.
    """

    kind: str
    hidden: tuple[int, ...] | None = ()
    outputs: int | Literal["features"] | None = None
    bias: bool = True
    gelu: bool = False
    temperature: float = _COSINE_TEMPERATURE


class Cosine(nn.Module):
    """Cosines between the features and a row a class, over a temperature (the classifier of SimGCD and FedLPA).

    Only the direction of a row counts, but its length stays in the stored weight, as in SimGCD's weight norm with a
    fixed gain: it grows as SGD moves the row, which slows the turning down, and a mean over clients leans towards
    those whose row has moved, or has been moved before, the most.
    """

    def __init__(self, features: int, classes: int, temperature: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, features))
        self.temperature = temperature

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Random directions of length about 1/√3, whatever the number of features: SimGCD's rows keep PyTorch's draw.

        N(0, 0.02²), which SimGCD gives all other layers of its head, would have the same directions. The length
        is what makes the first steps large or small: a step turns a row by its size over the squared length.
        """
        bound = self.weight.shape[1] ** -0.5
        init.uniform_(self.weight, -bound, bound, generator=generator)

    def forward(self, features: Tensor) -> Tensor:
        """Logits between −1/temperature and 1/temperature."""
        return F.linear(F.normalize(features), F.normalize(self.weight)) / self.temperature

    def extra_repr(self) -> str:
        """What `print(network)` shows of this layer."""
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, temperature={self.temperature}"


class DinoLinear(nn.Linear):
    """A linear layer drawn as in the heads of DINO, GCD and SimGCD."""

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Weights from N(0, 0.02²) in layers as wide as DINO's, from N(0, 1/inputs) in narrower ones; no bias.

        0.02 is about 1/√2048. Narrower layers with it would shrink their outputs from layer to layer, and the
        gradient of normalised outputs grows as they shrink: on digits a head of 256 units learnt nothing in 35 rounds.
        """
        inputs = self.weight.shape[1]
        init.trunc_normal_(self.weight, std=0.02 if inputs >= DINO_FEATURES else inputs**-0.5, generator=generator)
        if self.bias is not None:
            self.bias.zero_()


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
    """Read "linear", "cosine", "cosine(T)" with a temperature T, or "mlpN(H)" with N-1 hidden layers of H units."""
    words = text.replace(" ", "")
    if words == "linear":
        return HeadSpec("linear")
    if words == "cosine":
        return HeadSpec("cosine")
    if (match := re.fullmatch(r"cosine\((\d{0,3}\.?\d{1,9})\)", words)) and float(match[1]) > 0:
        return HeadSpec("cosine", temperature=float(match[1]))
    if match := re.fullmatch(r"mlp([2-9])\(([1-9]\d*)\)", words):
        return HeadSpec("mlp", (int(match[2]),) * (int(match[1]) - 1))
    raise UserError(
        f"{key}: expected 'linear', 'cosine(temperature)' or 'mlpN(hidden)' with N of 2 to 9 layers, not '{text}'; "
        + nearest(text, _CLASS_FORMS)
    )


def further_head_spec(name: str, value: str | int | HeadSpec) -> HeadSpec:
    """Read the description of a further head by its name: "ova", "subspace", any other name for a vector of outputs.

    "ova" takes the forms of a classifier; "linear" is then bias-free as in OpenMatch. Vectors take "M"
    (features - features - M, the projection of SSB and IOMatch), "linear(M)", "linear(M, no-bias)",
    "mlpN(H, M)" or "mlpN(H, M, gelu)"; in the last four M may be "features". A "predictor" foretells features, so
    its M must be that. "subspace" has no size.
    """
    key = f"model.heads.{name}"
    if not name.isidentifier() or hasattr(nn.ModuleDict, name):
        raise UserError(f"{key}: '{name}' cannot name a head; use a word such as 'ova' or 'projection'")
    if isinstance(value, HeadSpec):
        return value
    text = str(value)
    if name == "ova":
        spec = class_head_spec(text, key)
        if spec.kind == "cosine":
            raise UserError(f"{key}: a detector has no cosines; write 'linear' or 'mlpN(hidden)', not '{text}'")
        return HeadSpec("ova", spec.hidden, bias=bool(spec.hidden))
    if name == "novel":
        if not (match := re.fullmatch(r"cosine\(([1-9]\d*)\)", text.replace(" ", ""))):
            raise UserError(f"{key}: expected a row a novel class, 'cosine(5)' for five of them, not '{text}'")
        return HeadSpec("cosine", outputs=int(match[1]))
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
    if match := re.fullmatch(r"mlp([2-9])\(([1-9]\d*),([1-9]\d*|features)(,gelu)?\)", words):
        hidden = (int(match[2]),) * (int(match[1]) - 1)
        return HeadSpec("projection", hidden, _outputs(match[3]), gelu=match[4] is not None)
    raise UserError(
        f"{key}: expected a number of outputs M, 'linear(M)', 'mlpN(hidden, M)' or 'mlpN(hidden, M, gelu)', "
        f"not '{text}'; " + nearest(text, _VECTOR_FORMS)
    )


def _outputs(word: str) -> int | Literal["features"]:
    return "features" if word == "features" else int(word)


def build_head(spec: HeadSpec, *, features: int, classes: int, key: str) -> nn.Module:
    """The module of a head; its parameters are not initialised for use."""
    hidden = (features,) if spec.hidden is None else spec.hidden
    match spec.kind:
        case "linear" | "mlp":
            return _stack([features, *hidden, classes], spec.bias)
        case "cosine":
            return Cosine(features, spec.outputs if isinstance(spec.outputs, int) else classes, spec.temperature)
        case "ova":
            return OneVsAll(_stack([features, *hidden, 2 * classes], spec.bias), classes)
        case "projection":
            if spec.outputs is None:
                raise UserError(f"{key}: a projection needs its number of outputs")
            outputs = features if spec.outputs == "features" else spec.outputs
            return _stack([features, *hidden, outputs], spec.bias, spec.gelu)
        case "subspace":
            if classes > features:
                raise UserError(
                    f"model.width: a subspace with a direction for each of {classes} classes needs as many features, "
                    f"this network has {features}"
                )
            return Subspace(features, classes)
        case kind:
            raise UserError(f"{key}: head kind '{kind}' is unknown; {nearest(kind, _KINDS)}")


def _stack(sizes: Sequence[int], bias: bool, gelu: bool = False) -> nn.Linear | nn.Sequential:
    """Linear layers through `sizes` with ReLU or GELU between; a single one stays bare, for its `.weight`."""
    linear = DinoLinear if gelu else nn.Linear
    layers: list[nn.Module] = [linear(sizes[0], sizes[1], bias)]
    for wide, narrow in pairwise(sizes[1:]):
        layers += [nn.GELU() if gelu else nn.ReLU(inplace=True), linear(wide, narrow, bias)]
    first = layers[0]
    return first if len(layers) == 1 and isinstance(first, nn.Linear) else nn.Sequential(*layers)
