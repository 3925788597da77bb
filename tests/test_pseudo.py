"""Which labels a model gives itself, against a loop and at the edges of the threshold."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from reference.losses import log_probabilities
from semifed.pseudo import confident_label


@given(
    st.lists(st.lists(st.floats(-20, 20, width=32), min_size=3, max_size=3), min_size=1, max_size=8), st.floats(0, 1)
)
def test_confident_label(rows: list[list[float]], threshold: float) -> None:
    label, sure = confident_label(torch.tensor(rows), threshold)
    for row, found, is_sure in zip(rows, label.tolist(), sure.tolist(), strict=True):
        probabilities = [math.exp(value) for value in log_probabilities(row)]
        assert math.isclose(probabilities[found], max(probabilities), rel_tol=1e-5)
        if abs(max(probabilities) - threshold) > 1e-5:
            assert is_sure == (max(probabilities) >= threshold)


def test_a_probability_equal_to_the_threshold_is_enough() -> None:
    _, sure = confident_label(torch.zeros(1, 2), 0.5)
    assert sure.tolist() == [True]


def test_limits_of_the_threshold() -> None:
    logits = torch.tensor([[0.0, 1.0], [3.0, -3.0]])
    assert confident_label(logits, 0.0)[1].all()
    assert not confident_label(logits, 1.0)[1].any()
    assert confident_label(torch.tensor([[0.0, 200.0]]), 1.0)[1].all()


def test_nothing_in_nothing_out() -> None:
    label, sure = confident_label(torch.zeros(0, 4), 0.9)
    assert (label.shape, label.dtype, sure.shape, sure.dtype) == ((0,), torch.int64, (0,), torch.bool)


def test_labels_carry_no_gradient() -> None:
    label, sure = confident_label(torch.randn(4, 3, requires_grad=True), 0.5)
    assert not label.requires_grad
    assert not sure.requires_grad
