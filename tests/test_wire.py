"""Payloads as named arrays and back, sizes, and which weights are refused."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semifed.payloads import Up
from semifed.wire import SMALL, all_finite, fault_of, from_arrays, odd_ones_out, size_in_bytes, to_arrays

DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]


class Inner(NamedTuple):
    value: Tensor
    more: dict[str, Tensor]


class Payload(NamedTuple):
    weights: dict[str, Tensor]
    samples: Tensor
    inner: Inner
    extra: Inner | None = None
    offset: Tensor | None = None


class Empty(NamedTuple):
    pass


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    tensor = tensor.to(draw(st.sampled_from(DTYPES)))
    return tensor.transpose(0, -1) if draw(st.booleans()) and tensor.ndim > 1 else tensor


names = st.text(st.characters(exclude_characters="/", codec="utf-8"), min_size=1, max_size=6)
maps = st.dictionaries(names, tensors(), max_size=3)
inners = st.builds(Inner, tensors(), maps)
payloads = st.builds(Payload, maps, tensors(), inners, st.none() | inners, st.none() | tensors())


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def check_same(one: object, other: object) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        assert same(one, other)
    elif isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in one:
            check_same(one[key], other[key])
    elif isinstance(one, tuple) and isinstance(other, tuple):
        for left, right in zip(one, other, strict=True):
            check_same(left, right)


@given(payloads)
def test_there_and_back(payload: Payload) -> None:
    check_same(from_arrays(Payload, to_arrays(payload)), payload)


def test_the_order_of_arrays_does_not_matter() -> None:
    payload = Payload({"b": torch.ones(1), "a": torch.zeros(2)}, torch.tensor(3), Inner(torch.tensor(1.0), {}))
    arrays = to_arrays(payload)
    back = from_arrays(Payload, dict(reversed(arrays.items())))
    assert to_arrays(back).keys() == arrays.keys()
    assert torch.equal(back.samples, payload.samples)


def test_names_are_paths() -> None:
    payload = Payload({"w": torch.ones(1)}, torch.tensor(3), Inner(torch.tensor(1.0), {"x": torch.ones(2)}))
    assert list(to_arrays(payload)) == ["weights/w", "samples", "inner/value", "inner/more/x"]


def test_a_tuple_of_nothing_travels_as_nothing() -> None:
    assert to_arrays(Empty()) == {}
    assert from_arrays(Empty, {}) == Empty()


def test_a_name_that_begins_like_another_is_another() -> None:
    class Two(NamedTuple):
        extra: Tensor | None
        extra_long: Tensor | None

    back = from_arrays(Two, to_arrays(Two(None, torch.ones(1))))
    assert back.extra is None
    assert back.extra_long is not None


@pytest.mark.parametrize("value", [3, "text", [torch.ones(1)], np.ones(2), (torch.ones(1),)])
def test_what_cannot_travel_is_named(value: object) -> None:
    with pytest.raises(TypeError, match=f"weights: a {type(value).__name__} cannot travel"):
        to_arrays({"weights": value})


def test_a_slash_in_a_name_is_refused() -> None:
    with pytest.raises(TypeError, match="'a/b' holds a '/'"):
        to_arrays({"a/b": torch.ones(1)})


def test_a_missing_or_foreign_array_is_named() -> None:
    arrays = to_arrays(Inner(torch.ones(1), {}))
    with pytest.raises(ValueError, match="'value' is missing"):
        from_arrays(Inner, {})
    with pytest.raises(ValueError, match="unexpected array 'surplus' for Inner"):
        from_arrays(Inner, {**arrays, "surplus": torch.ones(1)})


@given(payloads)
def test_size(payload: Payload) -> None:
    assert size_in_bytes(payload) == sum(array.numpy().nbytes for array in to_arrays(payload).values())


LIKE = {"kernel": torch.zeros(2, 3), "count": torch.tensor([1, 2])}


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"kernal": torch.zeros(2, 3)}, "'kernal' were never sent out"),
        ({"kernel": torch.zeros(3, 2)}, r"'kernel' is torch.float32 \[3, 2\], expected torch.float32 \[2, 3\]"),
        ({"kernel": torch.zeros(2, 3, dtype=torch.float64)}, "torch.float64"),
        ({"kernel": torch.full((2, 3), torch.nan)}, "'kernel' holds NaN or infinity"),
        ({"kernel": torch.tensor([[0.0, 0, 0], [0, 0, torch.inf]])}, "'kernel' holds NaN or infinity"),
        ({"kernel": torch.tensor([[0.0, 0, -torch.inf], [0, 0, 0]])}, "'kernel' holds NaN or infinity"),
    ],
)
def test_faulty_weights_are_refused(weights: dict[str, Tensor], words: str) -> None:
    fault = fault_of(Up(weights, torch.ones(())), LIKE, [])
    assert fault is not None
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(fault)


def test_sound_weights_pass_also_in_part() -> None:
    assert fault_of(Up(dict(LIKE), torch.zeros(())), LIKE, list(LIKE)) is None
    assert fault_of(Up({"kernel": torch.ones(2, 3)}, torch.ones(())), LIKE, ["kernel"]) is None


def test_an_update_without_some_of_the_weights_is_refused() -> None:
    assert fault_of(Up({"kernel": torch.ones(2, 3)}, torch.ones(())), LIKE, list(LIKE)) == (
        f"weights named '{min(set(LIKE) - {'kernel'})}' are missing"
    )


def test_weights_that_nobody_asked_for_are_refused() -> None:
    """They were broadcast, so they are known; but one client that sends them back would have others lack them."""
    fault = fault_of(Up(dict(LIKE), torch.ones(())), LIKE, ["kernel"])
    assert fault == "weights named 'count' were not asked for"


def test_complex_numbers_are_refused() -> None:
    fault = fault_of(Up(dict(LIKE), torch.ones((), dtype=torch.complex64)), LIKE, list(LIKE))
    assert fault == "'samples' holds complex numbers"


@pytest.mark.parametrize(
    ("samples", "told"), [(-1.0, "not a count"), ([2.0, 3.0], "not a count"), (float("nan"), "NaN")]
)
def test_a_count_that_is_none_is_refused(samples: float | list[float], told: str) -> None:
    fault = fault_of(Up(dict(LIKE), torch.tensor(samples)), LIKE, list(LIKE))
    assert fault is not None
    assert "samples" in fault
    assert told in fault


def test_a_count_of_another_type_costs_its_sender_alone() -> None:
    """Beside one other update nobody could say whose type is the odd one."""
    fault = fault_of(Up(dict(LIKE), torch.tensor(3.0, dtype=torch.float64)), LIKE, list(LIKE))
    assert fault == "'samples' is torch.float64, expected torch.float32"


def test_a_refusal_is_short_whatever_was_sent() -> None:
    """It is stored with the round: a million numbers in it would leave the checkpoint no room."""
    fault = fault_of(Up(dict(LIKE), torch.zeros(1_000_000)), LIKE, list(LIKE))
    assert fault == "'samples' is of shape [1000000], not a count"


class Telling(NamedTuple):
    weights: dict[str, Tensor]
    samples: Tensor
    level: Tensor
    directions: Tensor


def telling(level: Tensor, directions: Tensor) -> Telling:
    return Telling({"a": torch.zeros(2)}, torch.ones(()), level, directions)


def test_an_update_with_parts_unlike_those_of_most_others_is_named() -> None:
    usual = telling(torch.ones(()), torch.ones(3, 4))
    silent = telling(torch.ones(()), torch.empty(0))
    assert odd_ones_out([usual, silent, usual]) == [None, None, None]
    assert odd_ones_out([]) == []
    wide, long, whole = (
        telling(torch.ones(2), torch.ones(3, 4)),
        telling(torch.ones(()), torch.ones(4, 3)),
        telling(torch.ones((), dtype=torch.int64), torch.ones(3, 4)),
    )
    faults = odd_ones_out([usual, wide, usual, long, silent, whole, usual, usual])
    assert faults == [
        None,
        "'level' is torch.float32 [2], that of most others torch.float32 []",
        None,
        "'directions' is torch.float32 [4, 3], that of most others torch.float32 [3, 4]",
        None,
        "'level' is torch.int64 [], that of most others torch.float32 []",
        None,
        None,
    ]


def test_an_empty_part_is_odd_where_others_have_one_number() -> None:
    usual, silent = telling(torch.ones(()), torch.ones(3, 4)), telling(torch.empty(0), torch.empty(0, 4))
    assert odd_ones_out([usual, silent, usual]) == [
        None,
        "'level' is torch.float32 [0], that of most others torch.float32 []",
        None,
    ]


def test_only_an_empty_list_is_empty() -> None:
    """Five rows of nothing have a length, and what is stacked or added up would not fit them."""
    usual, hollow = telling(torch.ones(()), torch.ones(3, 4)), telling(torch.ones(()), torch.empty(5, 0))
    assert odd_ones_out([usual, hollow, usual])[1] == (
        "'directions' is torch.float32 [5, 0], that of most others torch.float32 [3, 4]"
    )


def test_where_two_disagree_nobody_is_believed() -> None:
    faults = odd_ones_out([telling(torch.ones(2), torch.empty(0)), telling(torch.ones(()), torch.empty(0))])
    assert faults == [
        "'level' is torch.float32 [2], that of as many others torch.float32 []",
        "'level' is torch.float32 [], that of most others torch.float32 [2]",
    ]


def test_a_negative_variance_is_refused() -> None:
    sent = {"norm.running_var": torch.ones(3), "norm.running_mean": torch.zeros(3)}
    broken = {"norm.running_var": torch.tensor([1.0, -1e-6, 1.0]), "norm.running_mean": torch.full((3,), -1.0)}
    assert fault_of(Up(broken, torch.ones(())), sent, list(sent)) == (
        "'norm.running_var' is a variance and holds negative numbers"
    )
    assert fault_of(Up({**broken, "norm.running_var": torch.zeros(3)}, torch.ones(())), sent, list(sent)) is None


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_no_number_that_is_none_hides_among_small_and_large_arrays(place: int, value: float) -> None:
    arrays = [torch.ones(3, 2), torch.ones(2, SMALL), torch.arange(4)]
    assert all_finite(arrays)
    arrays[place] = arrays[place].float()
    arrays[place][-1] = value
    assert not all_finite(arrays)
    assert all_finite([])
