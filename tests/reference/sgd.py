"""Stochastic gradient descent as Sutskever et al. and PyTorch's manual write it down, on flat float64 vectors."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Descent:
    """SGD with clipping of the whole gradient, weight decay, momentum and Nesterov's look-ahead."""

    def __init__(
        self,
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        clip: float | None,
        decayed_vectors: bool = True,
    ) -> None:
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self.weight_decay, self.clip, self.decayed_vectors = weight_decay, clip, decayed_vectors
        self.velocity: dict[str, Array] = {}

    def step(self, weights: dict[str, Array], gradients: dict[str, Array]) -> None:
        """Move the weights that have a gradient; the others are not even decayed."""
        if self.clip is not None:
            norm = float(np.sqrt(sum(float((gradient**2).sum()) for gradient in gradients.values())))
            shrink = min(1.0, self.clip / (norm + 1e-6))
            gradients = {name: gradient * shrink for name, gradient in gradients.items()}
        for name, gradient in gradients.items():
            decayed = weights[name].ndim > 1 or self.decayed_vectors
            direction = gradient + self.weight_decay * weights[name] if decayed else gradient
            if self.momentum:
                if name in self.velocity:
                    self.velocity[name] = self.momentum * self.velocity[name] + direction
                else:
                    self.velocity[name] = direction.copy()
                look_ahead = direction + self.momentum * self.velocity[name]
                direction = look_ahead if self.nesterov else self.velocity[name]
            weights[name] = weights[name] - self.lr * direction
