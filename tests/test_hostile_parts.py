"""Whatever a client sends beside weights, it costs its own update at most, never the server."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from semifed.client_round import Reply
from semifed.engines.local import LocalEngine
from semifed.errors import ClientFailure
from semifed.method import payload_types
from semifed.methods import method_class
from semifed.models.network import Output
from semifed.run import _alike, _checked
from semifed.wire import from_arrays, to_arrays
from toys import meaningful, place_of, site_of, toy_parts, toy_recipe

TELLING = [
    (name, labels)
    for name, labels in meaningful()
    if set(payload_types(method_class(name)())[2]._fields) - {"weights", "samples"}  # type: ignore[attr-defined]
]
SOON = {("openfl", "server"), ("fedmatch", "clients"), ("fedprosub", "server")}
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda part: part.new_zeros(0),
    "nothing in rows": lambda part: part.new_zeros((max([len(part.shape) and len(part), 5]), 0)),
    "one more": lambda part: part.new_ones([size + 1 for size in part.shape] or [2]),
    "another axis": lambda part: part.new_ones((*part.shape, 1)),
    "a few": lambda part: part.new_ones(3, 7),
}


def corrupted(up: Any, *, only_first_of_many: bool = True) -> Iterator[tuple[str, Any]]:
    """An update with one of its further parts in another shape, in all ways; of maps one entry stands for all."""
    arrays = to_arrays(up)
    further = [name for name in arrays if not name.startswith("weights/") and name != "samples"]
    seen: set[str] = set()
    for name in further:
        stem = name.rpartition("/")[0] if name.count("/") > 1 else name
        if stem in seen and only_first_of_many:
            continue
        seen.add(stem)
        for kind, shape in SHAPES.items():
            yield f"{name}: {kind}", from_arrays(type(up), {**arrays, name: shape(arrays[name])})
    lost = {name for name in further if name.count("/") > 1}
    if lost:
        yield "no map", from_arrays(type(up), {name: array for name, array in arrays.items() if name not in lost})


@pytest.mark.parametrize(
    ("method", "labels"),
    [pair if pair in SOON else pytest.param(*pair, marks=pytest.mark.slow) for pair in TELLING],
)
def test_no_shape_of_a_part_ends_a_round(method: str, labels: str) -> None:
    parts = toy_parts(toy_recipe(method, labels))
    place, site, kind = place_of(parts), site_of(parts, 1), parts.method
    engine = LocalEngine(partial(place_of, parts), parts.scenario, workers=1)
    server = kind.setup(place.net.state(), site)
    answers: list[Reply | ClientFailure] = []
    said: list[Output] = []

    def ask(down: Any, /, own: Callable[[int], Any] | None = None, change: Callable[[Any], Any] = lambda up: up) -> Any:
        if not answers:
            letters = {} if own is None else {client: own(client) for client in range(3)}
            answers.extend(engine.ask(1, 0.05, range(3), down, letters))
            said.append(place.net(parts.scenario.views.plain(parts.scenario.dataset.x_test[:1])))
        first, *others = (answer for answer in answers if isinstance(answer, Reply))
        sent = [first._replace(up=change(first.up)), *others]
        expected = place.net.trained_names()

        def further(answer: Reply, down: Any) -> str | None:
            return kind.fault(answer.up, answer.record.client, down, said[0])

        checked = _alike([_checked(answer, down, expected, further) for answer in sent])
        refused.append([one.reason for one in checked if isinstance(one, ClientFailure)])
        return [one.up for one in checked if isinstance(one, Reply)]

    refused: list[list[str]] = []
    kind.round(server, ask, site)
    assert refused == [[]], "an honest client was refused"
    assert len(answers) == 3
    honest = next(answer for answer in answers if isinstance(answer, Reply)).up
    tried = 0
    for told, up in corrupted(honest):
        kind.round(server, partial(ask, change=lambda _, up=up: up), site)
        if any(tuple(a.shape) != tuple(b.shape) for a, b in zip(*map(_further, (up, honest)), strict=False)):
            assert refused[-1] or "nothing" in told, f"{told} was believed"
        tried += 1
    assert tried >= 5


def _further(up: Any) -> list[Tensor]:
    return [array for name, array in to_arrays(up).items() if not name.startswith("weights/")]


def test_a_client_cannot_speak_for_another() -> None:
    parts = toy_parts(toy_recipe("fedmatch", "clients"))
    place, kind = place_of(parts), parts.method
    server = kind.setup(place.net.state(), site_of(parts, 1))
    down = kind.broadcast(server)
    (reply,) = LocalEngine(partial(place_of, parts), parts.scenario, workers=1).ask(1, 0.05, [2], down)
    assert isinstance(reply, Reply)
    said = place.net(parts.scenario.views.plain(parts.scenario.dataset.x_test[:1]))
    assert kind.fault(reply.up, 2, down, said) is None
    assert kind.fault(reply.up, 1, down, said) == "it speaks for client 2"
