"""Which replies of a round count; all others become failures of their clients, and cost nobody else anything."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from semifed.client_round import Reply
from semifed.errors import ClientFailure, legible
from semifed.models.network import Output
from semifed.robust import absurd
from semifed.shapes import Asked, misshapen
from semifed.wire import Weights, fault_of, odd_ones_out

Answers = list[Reply | ClientFailure]


def sizes_of(said: Output, method: object) -> dict[str, int]:
    """What axes are called: by what a network says of images, and by the whole numbers among a method's fields."""
    own = {name: value for name, value in vars(method).items() if type(value) is int}
    heads = {name: head.shape[-1] for name, head in said.heads.items()}
    return {**own, **heads, "features": said.features.shape[1], "classes": said.logits.shape[1]}


def checked(
    answers: Sequence[Reply | ClientFailure], down: Any, expected: Collection[str], sizes: Mapping[str, int]
) -> Answers:
    """Replies that can be averaged, with their weights in our order; `expected` are the names of these."""
    return [
        answer if isinstance(answer, ClientFailure) else _checked(answer, down, expected, sizes) for answer in answers
    ]


def _checked(answer: Reply, down: Any, expected: Collection[str], sizes: Mapping[str, int]) -> Reply | ClientFailure:
    client = answer.record.client
    try:
        fault = fault_of(answer.up, down.weights, expected) or misshapen(answer.up, Asked(client, down, sizes))
    except Exception as error:  # whatever a client sends may cost its own update, nothing else
        fault = f"it cannot be looked at ({type(error).__name__})"
    if fault is not None:
        return _refused(client, fault)
    return answer._replace(up=answer.up._replace(weights={name: answer.up.weights[name] for name in expected}))


class _Measured(NamedTuple):
    """All of an update that was sent out before, whatever else it is called beside weights."""

    weights: Weights
    samples: Tensor


def believable(answers: Sequence[Reply | ClientFailure], down: Any) -> Answers:
    """Without those of an absurd size."""
    received = _maps(down)
    updates = [
        _Measured({name: part for name, part in _maps(one.up).items() if name in received}, one.up.samples)
        for one in answers
        if isinstance(one, Reply)
    ]
    return _without_faulty(answers, iter(absurd(updates, received)))


def _maps(payload: Any) -> Weights:
    """The tensors of all maps in a payload, under the names of these maps and their own (FedMatch sends two)."""
    found: Weights = {}
    for name, part in payload._asdict().items():
        if isinstance(part, dict):
            found |= {f"{name}/{own}": tensor for own, tensor in part.items()}
        elif hasattr(part, "_asdict"):
            found |= _maps(part)
    return found


def alike(answers: Sequence[Reply | ClientFailure]) -> Answers:
    """Without those shaped unlike most others."""
    return _without_faulty(answers, iter(odd_ones_out([one.up for one in answers if isinstance(one, Reply)])))


def reasons(answers: Sequence[Reply | ClientFailure]) -> str:
    """Why the first few failed, in a line."""
    failures = [answer for answer in answers if isinstance(answer, ClientFailure)]
    return "; ".join(f"client {failure.client}: {failure.reason}" for failure in failures[:3])


def _without_faulty(answers: Sequence[Reply | ClientFailure], faults: Iterator[str | None]) -> Answers:
    return [
        _refused(answer.record.client, fault) if isinstance(answer, Reply) and (fault := next(faults)) else answer
        for answer in answers
    ]


def _refused(client: int, fault: str) -> ClientFailure:
    return ClientFailure(client, f"its update was refused: {legible(fault)}")
