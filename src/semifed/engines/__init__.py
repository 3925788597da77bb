"""Where clients run. An engine knows nothing of methods; methods know nothing of engines."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

from semifed.client_round import Reply
from semifed.errors import ClientFailure, UserError
from semifed.held import HeldStore
from semifed.payloads import Prediction
from semifed.shared_passes import Helpers
from semifed.wire import Weights


class Engine(Protocol):
    """Exchanges with clients, which go on from what they held at the end of their last round that counted."""

    left: dict[int, int]  # by client, that round; for the checkpoint

    def begin(self, run: str | None, store: HeldStore) -> None:
        """Before any exchange: by which name clients elsewhere find what they hold of the run, where those here do."""

    def ask(
        self, round_: int, lr: float, clients: Sequence[int], down: Any, own: Mapping[int, Any] | None = None
    ) -> list[Reply | ClientFailure]:
        """Replies in the order of `clients`; those named in `own` receive that in place of the broadcast."""

    def accept(self, round_: int, replies: Sequence[Reply]) -> None:
        """These replies count. A refused one does not: its client goes on from before."""

    def resume(self, left: Mapping[int, int]) -> None:
        """Go on where a checkpoint was written: from which round's end."""

    def predict(self, weights: Weights, images: Tensor) -> Prediction | None:
        """What its processes, idle between rounds, make of test images; None where there is nobody to ask."""

    def helpers(self) -> Helpers | None:
        """The same processes, for passes of the server's training; None where there are none."""

    def close(self) -> None:
        """End whatever was started."""


def flower_engine(module: str = "flower") -> Any:
    """A module that speaks to Flower, or a `UserError` that says how to install it."""
    try:
        return import_module(f"semifed.engines.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("flwr", "ray"):
            raise
        raise UserError("the engine flower needs Flower: pip install 'semifed[flower]'") from None
