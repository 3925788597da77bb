"""What Ctrl-C and SIGTERM do."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def when_told_to_end(act: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Both call `act` with their number, and afterwards do what they did before."""
    before = {number: signal.signal(number, act) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
