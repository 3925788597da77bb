"""What commands say."""

from collections.abc import Iterable

from rich.console import Console


def terminal() -> Console:
    """Standard output as it is now: its width may have changed since the last look."""
    return Console()


def say(text: str) -> None:
    """A line, never broken to fit."""
    terminal().print(text, highlight=False, markup=False, soft_wrap=True)


def say_once(lines: Iterable[str]) -> None:
    """Notes, each of them once."""
    for line in dict.fromkeys(lines):
        say(f"note: {line}")
