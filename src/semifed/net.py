"""A network as a method sees it: call it on images, ask for a frozen copy, read or load its weights.

A network may live on another device. Only this module knows: images travel there, what it says of them comes back, with
its gradient, and so do weights that are read. What methods compute of it are a few numbers an image.

The passes of training steps may be computed in bfloat16. Only this module knows that too: weights stay in single
precision, so do answers, and whatever is no step of training (tests, gates, statistics) is computed in it.
"""

import copy
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from semifed.errors import UserError
from semifed.graphs import Graphs
from semifed.models.batchnorm import BatchNorm, frozen_names, recalibrate, set_batchnorm
from semifed.models.heads import Cosine
from semifed.models.network import Network, Output
from semifed.models.stem_cache import StemCache
from semifed.shared_passes import Helpers, shared_features
from semifed.wire import Weights

HOME = torch.device("cpu")  # where methods compute
Statistics = Literal["averaged", "batch"]
STEM_BYTES = 2**29  # of frozen maps that a process keeps; images beyond are computed again


class Net:
    """One network with its weights; in evaluation mode everywhere but inside the training loop."""

    helpers: Helpers | None = None  # idle processes that may take over some passes of a training step

    def __init__(
        self,
        network: Network,
        batchnorm: str,
        device: torch.device = HOME,
        precision: torch.dtype = torch.float32,
        *,
        graphs: bool = False,
    ) -> None:
        self.network = network.to(memory_format=torch.channels_last).to(device)  # type: ignore[call-overload]
        self.batchnorm = batchnorm
        self.device = device
        self.precision = precision
        set_batchnorm(self.network, "static" if batchnorm == "static" else "tracked")
        self.network.eval()
        # Weights only ever change in place, so the names and tensors of `state_dict` need to be gathered but once.
        self._tensors: Weights = self.network.state_dict(keep_vars=True)
        normalising = [name for name, layer in network.named_modules() if isinstance(layer, BatchNorm)]
        self._frozen = frozen_names(network)
        self._batchnorm = [name for name in self.state_names() if name.rpartition(".")[0] in normalising]
        self._buffers = {name for name, _ in network.named_buffers()} - self._frozen
        self._layers = list(network.modules())
        self._learners = {name: one for name, one in network.named_parameters() if name not in self._frozen}
        self.stems = StemCache(self.stem, STEM_BYTES) if self._frozen else None
        self._graphs = Graphs(self.network.backbone) if graphs else None
        single = precision == torch.float32 and device == HOME
        self._shareable = single and batchnorm == "static" and not self._frozen  # views know nothing of each other

    def __call__(self, images: Tensor) -> Output:
        """Logits, features and further heads of a batch of normalised images."""
        with self._computing():
            if self._graphs is None or not (self.network.training and torch.is_grad_enabled()):
                return _home(self.network(images.to(self.device)))
            features = self._graphs.features(self.network.stem(images.to(self.device)))
            return _home(self.network.after_backbone(features))

    def next_step(self) -> None:
        """A step of training begins: nobody asks for gradients of the passes before it any more."""
        if self._graphs is not None:
            self._graphs.next_step()

    def stem(self, images: Tensor) -> Tensor:
        """What training never changes about a batch of normalised images: it may be kept from round to round."""
        maps: Tensor = self.network.stem(images.to(self.device))
        return maps.to(HOME)

    def after_stem(self, maps: Tensor) -> Output:
        """What the network says of images, given their stem."""
        with self._computing():
            return _home(self.network.after_stem(maps.to(self.device)))

    def joint(self, *groups: Tensor) -> list[Output]:
        """One forward pass over several groups of images, which so share their batch-norm statistics."""
        sizes = [len(group) for group in groups]
        whole = self(torch.cat(groups))
        logits, features = whole.logits.split(sizes), whole.features.split(sizes)
        heads = {name: value.split(sizes) for name, value in whole.heads.items()}
        return [
            Output(logits[i], features[i], {name: parts[i] for name, parts in heads.items()}) for i in range(len(sizes))
        ]

    def each(self, *views: Tensor) -> list[Output]:
        """One forward pass for each view, normalised by its own statistics; by helpers where there are any."""
        learning = self.network.training and torch.is_grad_enabled()
        if self.helpers is None or not self._shareable or not learning or len(views) < 2 or not all(map(_usual, views)):
            return [self(view) for view in views]
        features = shared_features(self.helpers, self.network.backbone, self.features, views)
        return [self.network.after_backbone(one) for one in features]

    def features(self, images: Tensor) -> Tensor:
        """What the backbone says of a batch of normalised images."""
        said: Tensor = self.network.backbone(images)
        return said

    def head(self, name: str, features: Tensor) -> Tensor:
        """One further head on given features, such as detached ones."""
        with self._computing():
            output: Tensor = self.network.heads[name](features.to(self.device))
        return _answer(output)

    def classify(self, features: Tensor) -> Tensor:
        """The classifier alone, on given features."""
        with self._computing():
            logits: Tensor = self.network.classifier(features.to(self.device))
        return _answer(logits)

    def shifted(self, offsets: Mapping[str, Tensor], images: Tensor) -> Output:
        """What the network would say with its parameters moved by constant offsets; gradients reach the parameters."""
        moved = {name: self.network.get_parameter(name) + part for name, part in self._there(offsets).items()}
        with self._computing():
            return _home(functional_call(self.network, moved, (images.to(self.device),)))

    def at(self, weights: Mapping[str, Tensor], images: Tensor) -> Output:
        """What the network would say with other weights; gradients reach these, and nothing of its own changes.

        Weights that are not named are its own. While training, batch-norm statistics track in the given buffers.
        """
        buffers = {name: buffer.clone() for name, buffer in self.network.named_buffers()}
        given = {**buffers, **self._there(weights)}
        with self._computing():
            return _home(functional_call(self.network, given, (images.to(self.device),)))

    def twin(self) -> "Net":
        """A second network of the same shape and weights, to be trained beside this one."""
        return Net(self._copy(), self.batchnorm, self.device, self.precision, graphs=self._graphs is not None)

    @property
    def class_rows(self) -> str:
        """The name of the classifier's last weights, a row a class: ProxyFL's proxies."""
        matrices = [name for name, tensor in self.network.classifier.named_parameters() if tensor.ndim > 1]
        return f"classifier.{matrices[-1]}"

    @property
    def temperature(self) -> float:
        """What the classifier's cosines are divided by."""
        classifier = self.network.classifier
        assert isinstance(classifier, Cosine), "only cosines have a temperature"
        return classifier.temperature

    def frozen(self, statistics: Statistics = "averaged") -> "FrozenNet":
        """A copy of the network as it is now, without gradients: a teacher.

        It normalises by the statistics it has, or by those of the batch it is asked about.
        """
        copied = self._copy()
        if statistics == "batch":
            set_batchnorm(copied, "static")  # looks at batches and remembers nothing of them
        return FrozenNet(copied.train(statistics == "batch"), self.device, self.precision)

    def train(self, mode: bool) -> None:
        """Enter or leave training: `Module.train` without looking for the layers again."""
        for layer in self._layers:
            layer.training = mode

    def learners(self) -> dict[str, nn.Parameter]:
        """What the optimiser moves, by name, where the network is."""
        return self._learners.copy()

    def named_parameters(self) -> dict[str, Tensor]:
        """What training moves, for a loss to compare: gradients reach the network."""
        return {name: one.to(HOME) for name, one in self.learners().items()}

    def parameter(self, name: str) -> Tensor:
        """One of them."""
        found: Tensor = self.network.get_parameter(name)
        return found.to(HOME)

    def gradient(self, value: Tensor) -> Weights:
        """The gradient of a value by each parameter it depends on; the value can still be differentiated."""
        if self._graphs is not None:  # its replay wrote over what a second gradient would need
            raise UserError("engine.graphs: this method takes two gradients of one pass; set engine.graphs=false")
        learners = self.learners()
        slopes = torch.autograd.grad(value, list(learners.values()), retain_graph=True, allow_unused=True)
        return {name: slope.to(HOME) for name, slope in zip(learners, slopes, strict=True) if slope is not None}

    def state(self) -> Weights:
        """A copy of all weights but the frozen ones, batch-norm statistics included."""
        return self._weights(self.state_names())

    def frozen_weights(self) -> Weights:
        """A copy of what nobody trains: every party builds it from the recipe, and it never travels."""
        return self._weights(sorted(self._frozen))

    def trained(self) -> Weights:
        """A copy of the weights that training may have changed."""
        return self._weights(self.trained_names())

    def state_names(self) -> list[str]:
        """Names of all weights but the frozen ones."""
        return [name for name in self._tensors if name not in self._frozen]

    def trained_names(self) -> list[str]:
        """Names of the weights that clients train and send: no static statistics, nothing private."""
        match self.batchnorm:
            case "static":
                unsent = self._buffers
            case "local":
                unsent = self._buffers | set(self._batchnorm)
            case _:
                unsent = self._buffers - set(self._batchnorm)
        return [name for name in self.state_names() if name not in unsent]

    def statistics_names(self) -> list[str]:
        """Names of what batch norm normalises by outside training."""
        return [name for name in self._batchnorm if name in self._buffers]

    def private(self) -> Weights:
        """What never leaves a client: with "local" batch norm (FedBN) all of those layers."""
        if self.batchnorm != "local":
            return {}
        return self._weights(self._batchnorm)

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Take over the given weights; all names must be known, missing ones stay as they are."""
        for name, tensor in weights.items():
            self._tensors[name].copy_(tensor)

    def recalibrate(self, images: Tensor) -> None:
        """Set the batch-norm statistics to those of the given images."""
        recalibrate(self.network, images.to(self.device))

    def _computing(self) -> AbstractContextManager[object]:
        return computing(self.device, self.precision if self.network.training else torch.float32)

    def _weights(self, names: Iterable[str]) -> Weights:
        # Weights travel and are compared row by row, whatever layout the network computes in.
        rows = torch.contiguous_format
        return {name: self._tensors[name].detach().to(HOME, copy=True, memory_format=rows) for name in names}

    def _there(self, weights: Mapping[str, Tensor]) -> Weights:
        return {name: tensor.to(self.device) for name, tensor in weights.items()}

    def _copy(self) -> Network:
        """A copy that shares what is frozen: for a large pretrained network that is nearly everything."""
        own = self.network.state_dict(keep_vars=True)
        copied: Network = copy.deepcopy(self.network, {id(own[name]): own[name] for name in self._frozen})
        return copied


class FrozenNet:
    """A network that only answers: the teacher of training steps, and computed as they are."""

    def __init__(self, network: Network, device: torch.device = HOME, precision: torch.dtype = torch.float32) -> None:
        self.network = network.requires_grad_(False)
        self._device = device
        self._precision = precision

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Output:
        """Outputs without gradient."""
        with computing(self._device, self._precision):
            return _home(self.network(images.to(self._device)))

    @torch.no_grad()
    def at(self, weights: Mapping[str, Tensor], images: Tensor) -> Output:
        """What it would answer with other weights."""
        given = {name: tensor.to(self._device) for name, tensor in weights.items()}
        with computing(self._device, self._precision):
            return _home(functional_call(self.network, given, (images.to(self._device),)))


def _usual(view: Tensor) -> bool:
    """A layout that helpers keep; statistics of a single image may be those of other images."""
    return len(view) > 1 and view.is_contiguous(memory_format=torch.channels_last)


def computing(device: torch.device, precision: torch.dtype) -> AbstractContextManager[object]:
    """Products and convolutions in the given precision, sums that need more in single."""
    return nullcontext() if precision == torch.float32 else torch.autocast(device.type, precision)


def _home(output: Output) -> Output:
    heads = {name: _answer(said) for name, said in output.heads.items()}
    return Output(_answer(output.logits), _answer(output.features), heads)


def _answer(said: Tensor) -> Tensor:
    return said.to(HOME, torch.promote_types(said.dtype, torch.float32))
