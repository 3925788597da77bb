"""Random streams: the same for the same address, unrelated for any other."""

import subprocess
import sys

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from semifed.rng import numpy_stream, stream_seed, torch_stream

keys = st.lists(st.one_of(st.integers(-5, 2**40), st.text(max_size=6)), max_size=4).map(tuple)


@given(keys)
def test_an_address_has_one_seed_of_63_bits(key: tuple[int | str, ...]) -> None:
    assert stream_seed(*key) == stream_seed(*key)
    assert 0 <= stream_seed(*key) < 2**63


@given(keys, keys)
def test_different_addresses_have_different_seeds(one: tuple[int | str, ...], other: tuple[int | str, ...]) -> None:
    assert (stream_seed(*one) == stream_seed(*other)) == (one == other)


def test_a_separator_inside_a_word_is_no_separator() -> None:
    assert stream_seed("a/str:b") != stream_seed("a", "b")


def test_a_number_is_not_its_digits() -> None:
    assert len({stream_seed(1, 2), stream_seed(12), stream_seed("1", 2), stream_seed(1, "2")}) == 4


def test_neighbouring_streams_are_unrelated() -> None:
    streams = np.stack([numpy_stream(0, round_, "batches").normal(size=2000) for round_ in range(12)])
    correlation = np.corrcoef(streams) - np.eye(12)
    assert np.abs(correlation).max() < 0.12


def test_streams_start_afresh_and_leave_the_global_state_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = torch.rand(4, generator=torch_stream(0, "x"))
    assert torch.equal(first, torch.rand(4, generator=torch_stream(0, "x")))
    assert not torch.equal(first, torch.rand(4, generator=torch_stream(1, "x")))
    assert torch.equal(state, torch.get_rng_state())
    assert numpy_stream(0, "x").integers(1000) == numpy_stream(0, "x").integers(1000)


def test_seeds_do_not_depend_on_the_process_or_its_hash_seed() -> None:
    code = "from semifed.rng import stream_seed; print(stream_seed(3, 'client', 7))"
    command, environment = [sys.executable, "-c", code], {"PYTHONHASHSEED": "1"}
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert int(printed) == stream_seed(3, "client", 7) == 4422692797955604259
