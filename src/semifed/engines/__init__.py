"""Where clients run. An engine knows nothing of methods; methods know nothing of engines."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from semifed.client_round import Held, Reply
from semifed.errors import ClientFailure


class Engine(Protocol):
    """One exchange with clients, and what they hold between rounds."""

    held: dict[int, Held]  # by client; the round loop enters what came with an accepted reply

    def ask(
        self, round_: int, lr: float, clients: Sequence[int], down: Any, own: Mapping[int, Any] | None = None
    ) -> list[Reply | ClientFailure]:
        """Replies in the order of `clients`; those named in `own` receive that in place of the broadcast."""

    def close(self) -> None:
        """End whatever was started."""
