"""Learning-rate schedules: closed forms, limits, refused words."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semifed.schedule import schedule_factor


@given(st.integers(1, 500), st.data())
def test_constant(rounds: int, data: st.DataObject) -> None:
    assert schedule_factor("constant", data.draw(st.integers(0, rounds)), rounds) == 1.0


@given(st.integers(1, 300), st.floats(0, 1), st.data())
def test_cosine(rounds: int, end: float, data: st.DataObject) -> None:
    round_ = data.draw(st.integers(0, rounds))
    expected = end + (1 - end) * math.cos(math.pi * round_ / rounds / 2) ** 2  # the half-angle form
    assert schedule_factor(f"cosine({end!r})", round_, rounds) == pytest.approx(expected, abs=1e-12)


def test_cosine_runs_from_one_to_its_end_and_never_up() -> None:
    factors = [schedule_factor("cosine(0.2)", round_, 10) for round_ in range(11)]
    assert factors[0] == 1.0
    assert factors[-1] == pytest.approx(0.2)
    assert all(later < earlier for earlier, later in pairwise(factors))
    assert schedule_factor("cosine", 10, 10) == pytest.approx(0.0)


@pytest.mark.parametrize(
    "word", ["", "linear", "cosine()", "cosine(2)", "cosine(-0.1)", "cosine(x)", "cosine(.)", "Cosine"]
)
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"schedule: .* none of constant, cosine"):
        schedule_factor(word, 0, 1)
