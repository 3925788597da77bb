"""The contract: a method is a frozen dataclass of its paper's hyper-parameters and a few pure hooks.

The defaults are federated averaging, `loss` is the only hook a method must write; what crosses a hook is a NamedTuple.

>>> @dataclass(frozen=True, kw_only=True)
... class LabelsOnly(Method):
...     def loss(self, net, batch, const):
...         return supervised(net, batch)
>>> [kind.__name__ for kind in payload_types(LabelsOnly())]
['Server', 'Down', 'Up', 'Nothing']
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Protocol, get_args, get_origin

from pydantic import Field
from torch import Tensor
from typing_extensions import TypeVar

from semifed.aggregate import shares, weighted_mean
from semifed.data.client import Batch, ClientData
from semifed.discovery.gallery import Gallery
from semifed.fit import Course, Fitted, Loss
from semifed.net import Net
from semifed.objectives import supervised
from semifed.payloads import Down, HasWeights, Local, Nothing, Prediction, Server, Up, Update, Visit
from semifed.server import ServerSite
from semifed.wire import Weights

Share = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Temperature = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AtLeastOne = Annotated[float, Field(ge=1, allow_inf_nan=False)]

ONLY_KNOWN = {"novel": "it names no new classes (fedlpa, fed-gcd do); the nearest that works is scenario.classes=open"}
CLIENT_LABELS = {
    **ONLY_KNOWN,
    "server": "no client holds a label; the nearest method that works is server-only",
}

S = TypeVar("S", bound=HasWeights, default=Server)
D = TypeVar("D", default=Down)
U = TypeVar("U", bound=Update, default=Up)
C = TypeVar("C", default=Nothing)
K = TypeVar("K", default=Nothing)
D_in = TypeVar("D_in", contravariant=True)
U_out = TypeVar("U_out", covariant=True)


class Ask(Protocol[D_in, U_out]):
    """One exchange with this round's clients."""

    def __call__(self, down: D_in, /, own: Callable[[int], D_in] | None = None) -> Sequence[U_out]:
        """Replies in client order, without the clients that failed; `own` is what a client gets in place of `down`."""


@dataclass(frozen=True, kw_only=True)
class Method(Generic[S, D, U, C, K]):
    """Federated averaging without a loss: the ground every method stands on."""

    title: ClassVar[str] = ""  # one line for `semifed list methods`
    no_meaning: ClassVar[Mapping[str, str]] = ONLY_KNOWN  # scenario.labels, .classes or model.head, and why
    opens_labels: ClassVar[bool] = False  # a ceiling: trains on the true labels of all known images
    heads: ClassVar[Mapping[str, str]] = {}  # further heads the network must have
    unknown_score: ClassVar[str] = "1 - largest probability"  # what `predict` says beside the logits

    def needed_heads(self) -> Mapping[str, str]:
        """Which of `heads` this configuration builds, by default all."""
        return self.heads

    def opens_classes(self) -> bool:
        """An oracle's configuration: clients are told what their unlabelled images are."""
        return False

    def setup(self, weights: Weights, site: ServerSite) -> S:
        """Server, once: the state before the first round."""
        return Server(site.warm_up(weights, self.server_loss))  # type: ignore[return-value]

    def broadcast(self, server: S) -> D:
        """Server, each round: what the clients receive."""
        return Down(server.weights)  # type: ignore[return-value]

    def prepare(self, net: Net, down: D, data: ClientData, kept: K | None, visit: Visit) -> Local[C, K]:
        """Client, once a round, with the received network in evaluation mode."""
        return Local(data, Nothing(), Nothing())  # type: ignore[arg-type]

    def loss(self, net: Net, batch: Batch, const: C) -> Loss:
        """Client, each step: what is minimised."""
        raise TypeError(f"{type(self).__name__} must write its loss")

    def train(self, net: Net, local: Local[C, K], course: Course) -> Fitted:
        """Client, once a round: one loop over `loss`; only a paper with several stages or networks replaces it."""
        steps = course.steps(local.whole or local.data)  # a gate does not decide how long
        return course.follow(net, local.data, self.loss, local.const, steps=steps)

    def report(self, net: Net, local: Local[C, K], fitted: Fitted) -> U:
        """Client, once a round: what the server receives; a client that had nothing to learn from weighs nothing."""
        return Up(net.trained(), fitted.samples(local.data))  # type: ignore[return-value]

    def keep(self, net: Net, local: Local[C, K], const: C) -> K:
        """Client, once a round: what it keeps for its next one; `const` is what the last step left behind."""
        return local.kept

    def aggregate(self, server: S, ups: Sequence[U], site: ServerSite) -> S:
        """Server, each round: mean of the clients by image count, then training on the server's labels."""
        weights = averaged(server.weights, ups, site)
        return Server(site.fine_tune(weights, self.server_loss))  # type: ignore[return-value]

    def server_loss(self, net: Net, batch: Batch) -> Loss:
        """Server, each step on its own labels, if it has any."""
        return supervised(net, batch)

    def round(self, server: S, ask: Ask[D, U], site: ServerSite) -> S:
        """One round as seen from the server; replaced for several exchanges, or where clients get different things."""
        return self.aggregate(server, ask(self.broadcast(server)), site)

    def delivered(self, server: S) -> Weights:
        """The weights that are evaluated and handed to the user."""
        return server.weights

    def also_tested(self, server: S) -> Mapping[str, Weights]:
        """Weights tested beside the delivered ones, by the prefix of their metrics."""
        return {}

    def centres(self, server: S) -> Tensor | None:
        """What stands for each class in the space of projections, for the picture of it; None where nothing does."""
        return None

    def predict(self, net: Net, images: Tensor) -> Prediction:
        """Logits of the known classes and an unknown score, by default one minus the largest probability."""
        logits = net(images).logits
        return Prediction(logits, 1 - logits.softmax(dim=1).max(dim=1).values)

    def clusters(self, gallery: Gallery) -> Tensor:
        """Groups [n] among images of known and novel classes, -1 for none; only written by methods of discovery."""
        raise TypeError(f"{type(self).__name__} does not look for groups")

    def groups_by_labels(self) -> bool:
        """Whether `clusters` reads the gallery's labelled images: a run must hold some, its model brings them along."""
        return False


def averaged(received: Weights, ups: Sequence[Update], site: ServerSite, weight: Tensor | None = None) -> Weights:
    """The clients' mean, by image count or the given shares; the received weights if nobody has learnt anything."""
    if not any(float(up.samples) > 0 for up in ups):
        return received
    if weight is None:
        weight = shares([float(up.samples) for up in ups])
    site.note(client_weights=weight.tolist())
    return received | weighted_mean([up.weights for up in ups], weight)


def payload_types(method: Method[Any, Any, Any, Any, Any]) -> tuple[type, type, type, type]:
    """The types of a method's Server, Down, Up and Kept, from the bases of its class."""
    bases = getattr(type(method), "__orig_bases__", ())
    named = next((get_args(base) for base in bases if get_origin(base) is Method), ())
    defaults: tuple[Any, ...] = (Server, Down, Up, Nothing, Nothing)
    server, down, up, _, kept = named + defaults[len(named) :]
    return server, down, up, kept
