"""How the learning rate, and what weights a term, change from round to round."""

import math
import re


def schedule_factor(schedule: str, round_: int, rounds: int) -> float:
    """What the learning rate is multiplied with in a round (0-based): constant, cosine or cosine(end).

    `hold(n)` before cosine keeps the rate for n rounds first.

    >>> [round(schedule_factor("cosine(0.1)", r, 4), 3) for r in range(5)]
    [1.0, 0.868, 0.55, 0.232, 0.1]
    >>> [schedule_factor("hold(2) cosine", r, 4) for r in range(5)]
    [1.0, 1.0, 1.0, 0.5, 0.0]
    """
    if schedule == "constant":
        return 1.0
    match = re.fullmatch(r"(?:hold\((\d{1,9})\) )?cosine(?:\(([0-9.eE+-]+)\))?", schedule)
    try:
        end = float(match[2]) if match and match[2] else 0.0
    except ValueError:
        match = None
    if match is None or not 0 <= end <= 1:
        raise ValueError(
            f"schedule: '{schedule}' is none of constant, cosine, cosine(END) with END from 0 to 1, hold(N) cosine(END)"
        )
    held = int(match[1] or 0)
    done = max(round_ - held, 0) / max(rounds - held, 1)
    return end + (1 - end) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def ramp_up(round_: int, length: float) -> float:
    """What a term's weight is multiplied with in a round (counted from 1): round / length until that reaches 1.

    >>> [ramp_up(r, 2.5) for r in range(1, 5)]
    [0.4, 0.8, 1.0, 1.0]
    """
    return min(1.0, round_ / length) if length > 0 else 1.0


def opening(share: float, rounds: int) -> int:
    """How many rounds are the first share of all, a started one counted whole.

    >>> [opening(share, 50) for share in (0.0, 0.1, 0.11, 1.0)]
    [0, 5, 6, 50]
    """
    return math.ceil(round(share * rounds, 6))
