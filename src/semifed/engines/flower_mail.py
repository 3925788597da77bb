"""Letters as messages of Flower's, and which message is answered by what."""

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from httpx import HTTPError

from semifed.engines.letters import Letter

PAUSE = 0.1  # seconds between two looks for answers of simulated clients
LONG_PAUSE = 0.5  # of clients elsewhere, which take seconds at least
PAUSE_EACH = 0.02  # for each of them that is waited for: a look at one is a request of its own


def array_record(arrays: Mapping[str, torch.Tensor]) -> ArrayRecord:
    """Tensors as Flower carries them."""
    return ArrayRecord({name: Array(array.detach().numpy()) for name, array in arrays.items()})


def letter_of(message: Message) -> Letter:
    """The letter in a message."""
    arrays: Any = message.content["arrays"]
    facts: Any = message.content["facts"]
    return Letter({name: torch.from_numpy(array.numpy().copy()) for name, array in arrays.items()}, dict(facts))


def message_of(letter: Letter, to: Message) -> Message:
    """A letter as the answer to a message."""
    content = RecordDict({"arrays": array_record(letter.arrays), "facts": ConfigRecord(letter.facts)})
    return Message(content, reply_to=to)


def replies(
    grid: Grid, messages: Mapping[int, Message], timeout: float | None, *, strangers: bool
) -> Iterator[tuple[int, Message | Exception]]:
    """What is answered in time, under the key of the message it answers; or how it could not be unpacked.

    Of `strangers` nothing is believed that they could write themselves.
    """
    if not messages:
        return
    pushed = set(grid.push_messages(list(messages.values())))
    names = {message.metadata.message_id: key for key, message in messages.items()}
    waiting = {name: key for name, key in names.items() if name in pushed}
    until = math.inf if timeout is None else time.monotonic() + timeout
    while waiting:
        for name, reply in _one_by_one(grid, list(waiting)) if strangers else _together(grid, list(waiting)):
            if name in waiting:
                yield waiting.pop(name), reply
        if not waiting or time.monotonic() >= until:
            return
        pause = max(LONG_PAUSE, len(waiting) * PAUSE_EACH) if strangers else PAUSE
        time.sleep(min(pause, max(until - time.monotonic(), 0.0)))


def _together(grid: Grid, names: list[str]) -> Iterator[tuple[str, Message]]:
    """Replies that are there, by what they themselves say they answer."""
    return ((reply.metadata.reply_to_message_id, reply) for reply in grid.pull_messages(names))


def _one_by_one(grid: Grid, names: list[str]) -> Iterator[tuple[str, Message | Exception]]:
    """The same by what each is pulled for: nobody answers for another, and what cannot be unpacked costs no other."""
    for name in names:
        try:
            found = list(grid.pull_messages([name]))
        except (HTTPError, OSError):  # the SuperLink itself
            raise
        except Exception as error:
            yield name, error
        else:
            yield from ((name, reply) for reply in found[:1])
