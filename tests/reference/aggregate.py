"""The server's means, number by number in exact fractions."""

from collections.abc import Sequence
from fractions import Fraction


def fair_shares(counts: Sequence[float]) -> list[Fraction]:
    """n_k / Σ n, or 1/K each if all are 0."""
    exact = [Fraction(count) for count in counts]
    total = sum(exact)
    return [count / total if total else Fraction(1, len(exact)) for count in exact]


def weighted_sum(values: Sequence[float], shares: Sequence[Fraction]) -> Fraction:
    """Σ_k share_k · value_k without rounding."""
    return sum((Fraction(value) * share for value, share in zip(values, shares, strict=True)), Fraction(0))
