"""What commands say on standard output."""

from rich.console import Console


def terminal() -> Console:
    """Standard output as it is now: its width may have changed since the last look."""
    return Console()


def say(text: str) -> None:
    """A line for the user, as it is."""
    terminal().print(text, highlight=False, markup=False, soft_wrap=True)
