"""Which labels a model gives itself, against a loop and at the edges of the threshold."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from reference.losses import log_probabilities
from reference.openset import decisions, masks
from semifed.models.network import Output
from semifed.pseudo import Gates, confident_label, gates, known_score


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


def output_of(seed: int, count: int, classes: int) -> Output:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, classes, generator=generator)
    ova = 2 * torch.randn(count, 2, classes, generator=generator)
    return Output(logits, torch.zeros(count, 1), {"ova": ova})


@given(st.integers(0, 999), st.integers(0, 8), st.integers(1, 5), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_gates(seed: int, count: int, classes: int, threshold: float, known: float, negative: float) -> None:
    output = output_of(seed, count, classes)
    found = gates(output, threshold, known, negative)
    label, confident, is_known, surely_not = masks(
        output.logits.double().numpy(), output.heads["ova"].double().numpy(), threshold, known, negative
    )
    assert found.label.tolist() == label
    assert found.confident.tolist() == confident
    assert found.known.tolist() == is_known
    assert found.negative.tolist() == surely_not
    assert found.dual.tolist() == [a and b for a, b in zip(confident, is_known, strict=True)]


@given(st.integers(0, 999), st.integers(1, 8), st.integers(1, 5))
def test_known_score(seed: int, count: int, classes: int) -> None:
    ova = output_of(seed, count, classes).heads["ova"]
    label = torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(seed))
    expected = [math.exp(row[k][1]) for row, k in zip(decisions(ova.double().numpy()), label.tolist(), strict=True)]
    torch.testing.assert_close(known_score(ova, label), torch.tensor(expected, dtype=torch.float32).reshape(-1))


def test_scores_equal_to_their_thresholds_are_enough() -> None:
    even = Output(torch.zeros(1, 2), torch.zeros(1, 1), {"ova": torch.zeros(1, 2, 2)})
    assert gates(even, 0.5, 0.5, 0.5).dual.all()
    assert gates(even, 0.5, 0.5, 0.5).negative.all()
    assert not gates(even, 0.5, 0.51, 0.51).dual.any()
    assert not gates(even, 0.5, 0.51, 0.51).negative.any()


def test_gates_carry_no_gradient_and_can_be_asked_for_some_images() -> None:
    output = output_of(1, 6, 3)
    open_ = Output(output.logits.requires_grad_(), output.features, {"ova": output.heads["ova"].requires_grad_()})
    found = gates(open_, 0.4, 0.4, 0.4)
    assert not any(part.requires_grad for part in found)
    some = torch.tensor([4, 0, 4])
    here = found.at(some)
    assert isinstance(here, Gates)
    for part, whole in zip(here, found, strict=True):
        assert part.tolist() == [whole[i].tolist() for i in (4, 0, 4)]
