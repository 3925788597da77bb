"""What methods exchange and remember: the tuples of the contract that need no more than weights."""

from typing import Generic, NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import TypeVar

from semifed.data.client import ClientData
from semifed.models.network import Output
from semifed.net import FrozenNet
from semifed.pseudo import PseudoLabels, known_score
from semifed.rng import torch_stream
from semifed.wire import Weights


class Server(NamedTuple):
    """What the server remembers from round to round."""

    weights: Weights


class Averaged(NamedTuple):
    """A server that averages its model over rounds."""

    weights: Weights  # in training
    average: Weights  # over rounds; never leaves the server


class Down(NamedTuple):
    """What travels to a client."""

    weights: Weights


class Up(NamedTuple):
    """What travels back."""

    weights: Weights
    samples: Tensor  # how many images stand behind the weights


class Nothing(NamedTuple):
    """No state."""


class Received(NamedTuple):
    """The weights a client received, for its loss to compare with."""

    weights: Weights


class Teacher(NamedTuple):
    """The received network, frozen, for the loss to ask."""

    net: FrozenNet


class Visit(NamedTuple):
    """One client's part of one round, as an address for random streams."""

    seed: int
    round: int
    client: int

    def stream(self, purpose: str) -> torch.Generator:
        """A random stream of this client and round."""
        return torch_stream(*self, purpose)


class HasWeights(Protocol):
    """Any server state: it holds the weights of the model in training."""

    @property
    def weights(self) -> Weights:
        """By name."""


class Update(HasWeights, Protocol):
    """Any reply of a client."""

    @property
    def samples(self) -> Tensor:
        """How many images stand behind the weights."""


C = TypeVar("C", default=Nothing)
K = TypeVar("K", default=Nothing)


class Local(NamedTuple, Generic[C, K]):
    """A client's round: data to train on, what the loss may read, what is kept for this client's next round."""

    data: ClientData
    const: C
    kept: K
    pseudo: PseudoLabels | None = None  # labels given before training to the images `prepare` got; for diagnostics only
    whole: ClientData | None = None  # where `data` is what a gate left: all, by which epochs are counted


class Prediction(NamedTuple):
    """What the delivered model says of images."""

    logits: Tensor  # [n, known classes]
    unknown: Tensor  # [n], the method's own score, grows with unknown-ness

    @property
    def probabilities(self) -> Tensor:
        """Of the known classes, [n, known classes]."""
        return self.logits.softmax(dim=1)


DETECTOR_SCORE = "1 - known score of the named class's detector"


def detected(output: Output) -> Prediction:
    """SSB's answer: the classifier names the class, the detector of that class says how unknown it is."""
    score = known_score(output.heads["ova"], output.logits.argmax(dim=1))
    return Prediction(output.logits, 1 - score)


def outside(output: Output) -> Prediction:
    """ProSub's answer: an image is as unknown as its features lie outside the subspace of the known classes."""
    return Prediction(output.logits, 1 - output.heads["subspace"])
