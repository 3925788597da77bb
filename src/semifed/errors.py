"""Mistakes of the user, told in one or two lines, and clients that could not deliver."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple


class UserError(Exception):
    """Something the user can put right: shown without a traceback, exit code 2."""


MOST_NAMES = 50  # in a hint
LONGEST = 300  # letters of a text that a client may have shown


class ClientFailure(NamedTuple):
    """Why a client that was asked gave nothing this round."""

    client: int
    reason: str


def not_written(path: Path, error: OSError) -> UserError:
    """A full disk or a missing permission, in words."""
    return UserError(f"{path} cannot be written: {error.strerror or error}; what was finished before is kept")


def legible(said: object) -> str:
    """What a client says, as a line that may be shown and stored: it could send anything."""
    text = str(said)
    shown = "".join(letter if letter.isprintable() else " " for letter in text[:LONGEST])
    return shown + ("…" if len(text) > LONGEST else "")


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint for a misspelt name: the closest valid one, or all of them (of very many the first) if none is close."""
    names = sorted(valid)
    if not names:
        return "nothing may stand here"
    close = get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"did you mean '{close[0]}'?" if close else f"valid: {', '.join(names[:MOST_NAMES])}{more}"
