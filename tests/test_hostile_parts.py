"""Whatever a client sends beside weights, it costs its own update at most, never the server."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import pytest
from torch import Tensor, empty, ones, zeros

from semifed.client_round import Reply
from semifed.engines.local import LocalEngine
from semifed.errors import ClientFailure
from semifed.method import payload_types
from semifed.methods import method_class
from semifed.models.network import Output
from semifed.replies import alike, believable, checked, sizes_of
from semifed.shapes import Asked, PerClass, Scalar, Shaped, misshapen
from semifed.wire import all_finite, from_arrays, to_arrays
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
    sizes = sizes_of(place.net(parts.scenario.views.plain(parts.scenario.dataset.x_test[:1])), kind)

    def ask(down: Any, /, own: Callable[[int], Any] | None = None, change: Callable[[Any], Any] = lambda up: up) -> Any:
        if not answers:
            letters = {} if own is None else {client: own(client) for client in range(3)}
            answers.extend(engine.ask(1, 0.05, range(3), down, letters))
        first, *others = (answer for answer in answers if isinstance(answer, Reply))
        sent = [first._replace(up=change(first.up)), *others]
        counted = alike(checked(sent, down, place.net.trained_names(), sizes))
        refused.append([one.reason for one in counted if isinstance(one, ClientFailure)])
        return [one.up for one in counted if isinstance(one, Reply)]

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


@pytest.mark.parametrize("number", [3e38, 1e30, -1e30, 1e9])
@pytest.mark.parametrize(
    ("method", "labels"),
    [pair if pair in SOON else pytest.param(*pair, marks=pytest.mark.slow) for pair in TELLING],
)
def test_no_number_in_a_part_ends_a_run(method: str, labels: str, number: float) -> None:
    parts = toy_parts(toy_recipe(method, labels))
    place, kind = place_of(parts), parts.method
    engine = LocalEngine(partial(place_of, parts), parts.scenario, workers=1)
    sizes = sizes_of(place.net(parts.scenario.views.plain(parts.scenario.dataset.x_test[:1])), kind)

    def ask(down: Any, /, own: Callable[[int], Any] | None = None) -> Any:
        letters = {} if own is None else {client: own(client) for client in range(3)}
        answers = engine.ask(site.round, 0.05, range(3), down, letters)
        assert all(isinstance(answer, Reply) for answer in answers), "honest clients cannot go on"
        first, *others = (answer for answer in answers if isinstance(answer, Reply))
        sent = [first._replace(up=exaggerated(first.up, number)), *others]
        counted = believable(alike(checked(sent, down, place.net.trained_names(), sizes)), down)
        assert all(isinstance(one, Reply) for one in counted[1:]), "an honest client was refused"
        return [one.up for one in counted if isinstance(one, Reply)]

    site = site_of(parts, 1)
    server = kind.setup(place.net.state(), site)
    for round_ in (1, 2, 3):
        site = site_of(parts, round_)
        server = kind.round(server, ask, site)
        assert all_finite(to_arrays(server).values())


def exaggerated(up: Any, number: float) -> Any:
    """An update that claims a number far beyond belief for everything beside its weights and who it is."""
    return from_arrays(
        type(up),
        {
            name: array.new_full(array.shape, number) if _is_claim(name, array) else array
            for name, array in to_arrays(up).items()
        },
    )


def _is_claim(name: str, array: Tensor) -> bool:
    return array.is_floating_point() and not name.startswith("weights/")


def _further(up: Any) -> list[Tensor]:
    return [array for name, array in to_arrays(up).items() if not name.startswith("weights/")]


def test_a_client_cannot_speak_for_another() -> None:
    parts = toy_parts(toy_recipe("fedmatch", "clients"))
    place, kind = place_of(parts), parts.method
    server = kind.setup(place.net.state(), site_of(parts, 1))
    down = kind.broadcast(server)
    (reply,) = LocalEngine(partial(place_of, parts), parts.scenario, workers=1).ask(1, 0.05, [2], down)
    assert isinstance(reply, Reply)
    sizes = sizes_of(place.net(parts.scenario.views.plain(parts.scenario.dataset.x_test[:1])), kind)
    assert misshapen(reply.up, Asked(2, down, sizes)) is None
    assert misshapen(reply.up, Asked(1, down, sizes)) == "it speaks for client 2"


class Inner(NamedTuple):
    known: Annotated[Tensor, Shaped(2)]


class Telling(NamedTuple):
    weights: dict[str, Tensor]
    samples: Tensor
    level: Scalar
    counts: PerClass
    directions: Annotated[Tensor, Shaped("classes", "projection", optional=True)]
    inner: Inner
    psi: dict[str, Tensor]
    free: Tensor


class Sent(NamedTuple):
    weights: dict[str, Tensor]
    psi: dict[str, Tensor]


TOLD = Telling({}, ones(()), ones(()), ones(3), ones(3, 4), Inner(ones(2)), {"a": ones(2, 2)}, ones(7, 7))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, None),
        ({"directions": empty(0)}, None),
        ({"free": ones(1)}, None),
        ({"level": ones(1)}, "'level' is of shape [1], expected []"),
        ({"counts": empty(0)}, "'counts' is of shape [0], expected [classes]"),
        ({"directions": ones(4, 3)}, "'directions' is of shape [4, 3], expected [classes, projection]"),
        ({"directions": empty(3, 0)}, "'directions' is of shape [3, 0], expected [classes, projection]"),
        ({"inner": Inner(ones(3))}, "'inner/known' is of shape [3], expected [2]"),
        ({"psi": {}}, "'psi/a' is missing"),
        ({"psi": {"a": ones(2, 2), "b": ones(1)}}, "'psi/b' was never sent out"),
        ({"psi": {"a": ones(4)}}, "'psi/a' is of shape [4], expected [2, 2]"),
    ],
)
def test_types_say_which_shapes_travel(changes: dict[str, Any], told: str | None) -> None:
    asked = Asked(0, Sent({}, {"a": zeros(2, 2)}), {"classes": 3, "projection": 4})
    assert misshapen(TOLD._replace(**changes), asked) == told


def test_sizes_are_those_of_the_network_and_of_the_method() -> None:
    said = Output(zeros(1, 6), zeros(1, 128), {"projection": zeros(1, 32), "ova": zeros(1, 2, 6)})
    found = sizes_of(said, method_class("fed-agcl")(most_groups=9))
    assert found["classes"] == 6
    assert found["features"] == 128
    assert found["projection"] == 32
    assert found["most_groups"] == 9


@pytest.mark.parametrize("method", sorted({name for name, _ in TELLING}))
def test_every_part_that_a_method_reports_has_a_shape(method: str) -> None:
    """Only what has one is checked against more than other clients' word."""

    def unshaped(kind: Any, path: str = "") -> list[str]:
        found = []
        for name, hint in get_type_hints(kind, include_extras=True).items():
            base = get_args(hint)[0] if get_origin(hint) is Annotated else hint
            if hasattr(base, "_fields"):
                found += unshaped(base, f"{path}{name}/")
            elif base is Tensor and hint is Tensor:
                found.append(f"{path}{name}")
        return found

    assert unshaped(payload_types(method_class(method)())[2]) == ["samples"]
