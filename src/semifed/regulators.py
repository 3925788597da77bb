"""FedDure's regulators: a second network that tries a step out, and a small one that weighs each image of it."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from semifed.wire import Weights

BETAS = (0.9, 0.999)  # Adam's
EPSILON = 1e-8


class FineRegulator(NamedTuple):
    """F-reg: a perceptron from the probabilities of an image to its weight, and Adam's memory of its slopes."""

    weights: Weights
    first: Weights  # moving mean of the slopes
    second: Weights  # of their squares
    steps: int


def fine_regulator(classes: int, hidden: int, generator: torch.Generator) -> FineRegulator:
    """An untrained one, drawn from U(±1/√inputs) as linear layers are."""

    def drawn(*shape: int, inputs: int) -> Tensor:
        return torch.empty(shape).uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)

    weights = {
        "hidden.weight": drawn(hidden, classes, inputs=classes),
        "hidden.bias": drawn(hidden, inputs=classes),
        "output.weight": drawn(1, hidden, inputs=hidden),
        "output.bias": drawn(1, inputs=hidden),
    }
    nothing = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    return FineRegulator(weights, nothing, nothing, 0)


def image_weights(weights: Mapping[str, Tensor], probabilities: Tensor) -> Tensor:
    """m = sigmoid(W₂ relu(W₁ p + b₁) + b₂) for each row of probabilities [n, classes], [n]."""
    hidden = F.relu(F.linear(probabilities, weights["hidden.weight"], weights["hidden.bias"]))
    return F.linear(hidden, weights["output.weight"], weights["output.bias"])[:, 0].sigmoid()


def leaves(weights: Mapping[str, Tensor]) -> Weights:
    """The same numbers without their history, for gradients to be taken at."""
    return {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}


def slopes(value: Tensor, weights: Mapping[str, Tensor], *, differentiable: bool = False) -> Weights:
    """The gradient by name; the graph behind the value stays. `differentiable`: it can be differentiated once more."""
    found = torch.autograd.grad(
        value, list(weights.values()), retain_graph=True, create_graph=differentiable, materialize_grads=True
    )
    return dict(zip(weights, found, strict=True))


def descended(weights: Mapping[str, Tensor], gradient: Mapping[str, Tensor], lr: float) -> Weights:
    """w − lr · gradient as new tensors, through which gradients flow back."""
    return {name: tensor - lr * gradient[name] for name, tensor in weights.items()}


def adam_step(regulator: FineRegulator, gradient: Weights, lr: float) -> FineRegulator:
    """The regulator after one step of Adam."""
    steps = regulator.steps + 1
    (decay, square_decay) = BETAS
    first = {name: torch.lerp(slope, regulator.first[name], decay) for name, slope in gradient.items()}
    second = {name: torch.lerp(slope**2, regulator.second[name], square_decay) for name, slope in gradient.items()}
    weights = {
        name: tensor
        - lr * (first[name] / (1 - decay**steps)) / ((second[name] / (1 - square_decay**steps)).sqrt() + EPSILON)
        for name, tensor in regulator.weights.items()
    }
    return FineRegulator(weights, first, second, steps)
