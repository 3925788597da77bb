"""A network as a method sees it: call it on images, ask for a frozen copy, read or load its weights."""

import copy

import torch
from torch import Tensor, nn

from semifed.models.batchnorm import recalibrate, set_batchnorm
from semifed.models.network import Network, Output
from semifed.wire import Weights


class Net:
    """One network with its weights; in evaluation mode everywhere but inside the training loop."""

    def __init__(self, network: Network, batchnorm: str) -> None:
        self.network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.batchnorm = batchnorm
        set_batchnorm(self.network, batchnorm)
        self.network.eval()
        self._buffers = {name for name, _ in network.named_buffers()}

    def __call__(self, images: Tensor) -> Output:
        """Logits, features and further heads of a batch of normalised images."""
        output: Output = self.network(images)
        return output

    def joint(self, *groups: Tensor) -> list[Output]:
        """One forward pass over several groups of images, which so share their batch-norm statistics."""
        sizes = [len(group) for group in groups]
        whole = self(torch.cat(groups))
        logits, features = whole.logits.split(sizes), whole.features.split(sizes)
        heads = {name: value.split(sizes) for name, value in whole.heads.items()}
        return [
            Output(logits[i], features[i], {name: parts[i] for name, parts in heads.items()}) for i in range(len(sizes))
        ]

    def frozen(self) -> "FrozenNet":
        """A copy of the network as it is now, in evaluation mode and without gradients: a teacher."""
        return FrozenNet(copy.deepcopy(self.network))

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """What the optimiser moves, by name."""
        return dict(self.network.named_parameters())

    def state(self) -> Weights:
        """A copy of all weights, batch-norm statistics included."""
        return {
            name: tensor.detach().clone(memory_format=torch.contiguous_format)
            for name, tensor in self.network.state_dict().items()
        }

    def trained(self) -> Weights:
        """A copy of the weights that training may have changed."""
        state = self.state()
        return {name: state[name] for name in self.trained_names()}

    def state_names(self) -> list[str]:
        """Names of all weights."""
        return list(self.network.state_dict())

    def trained_names(self) -> list[str]:
        """Names of the weights that training may change: all but static batch-norm statistics."""
        return [name for name in self.state_names() if self.batchnorm != "static" or name not in self._buffers]

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Take over the given weights; all names must be known, missing ones stay as they are."""
        own = self.network.state_dict()
        for name, tensor in weights.items():
            own[name].copy_(tensor)

    def recalibrate(self, images: Tensor) -> None:
        """Set the batch-norm statistics to those of the given images."""
        recalibrate(self.network, images)


class FrozenNet:
    """A network that only answers."""

    def __init__(self, network: Network) -> None:
        self._network = network.eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Output:
        """Outputs in evaluation mode, no gradient."""
        output: Output = self._network(images)
        return output
