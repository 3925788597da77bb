"""Learning-rate schedules: closed forms, limits, refused words; and the runnable examples of the contract."""

import doctest
import math
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semifed import method, rng, schedule, sweep, wire
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
    assert all(later < earlier for earlier, later in zip(factors, factors[1:], strict=False))
    assert schedule_factor("cosine", 10, 10) == pytest.approx(0.0)


@pytest.mark.parametrize(
    "word", ["", "linear", "cosine()", "cosine(2)", "cosine(-0.1)", "cosine(x)", "cosine(.)", "Cosine"]
)
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match="schedule: .* none of constant, cosine"):
        schedule_factor(word, 0, 1)


@pytest.mark.parametrize("module", [rng, schedule, sweep, method, wire], ids=lambda module: module.__name__)
def test_examples_in_the_documentation_run(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 0 or module is wire
