"""Letters between a server and clients elsewhere: named arrays and plain facts, whatever carries them.

A client's letter holds what its method reports and how long it took. Losses are added where the client shares them, the
labels it gave its images in simulations alone.
"""

import tomllib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from torch import Tensor

from semifed.aggregate import MOST_IMAGES
from semifed.assembly import build_workplace, refuse_what_is_missing
from semifed.client_round import ClientRecord, Reply, Task, Workplace, client_round, too_few_images
from semifed.data.client import ClientData
from semifed.errors import ClientFailure, legible
from semifed.fit import Diverged
from semifed.held import HeldStore
from semifed.method import payload_types
from semifed.methods import AnyMethod
from semifed.models.backbones import Normalisation
from semifed.payloads import Nothing
from semifed.pseudo import PseudoLabels
from semifed.recipe import Recipe, check_recipe
from semifed.wire import from_arrays, to_arrays

Facts = dict[str, Any]  # text, numbers and lists of them
Share = Literal["nothing", "losses", "all"]
NEVER = -1  # the round of a client that has no finished one
MOST_TERMS = 100  # of a loss, and letters of the name of one


class Letter(NamedTuple):
    """What travels."""

    arrays: dict[str, Tensor]
    facts: Facts


class Setting(NamedTuple):
    """What a client must know to build the network it is sent weights of."""

    recipe: str  # TOML, resolved
    shape: tuple[int, ...]  # of an image
    names: tuple[str, ...]  # of the known classes
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def facts(self) -> Facts:
        """For a letter."""
        return {name: value if isinstance(value, str) else list(value) for name, value in self._asdict().items()}

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Setting":
        """From a letter."""
        return cls(facts["recipe"], *(tuple(facts[name]) for name in cls._fields[1:]))

    def parsed(self) -> Recipe:
        """The recipe."""
        return check_recipe(tomllib.loads(self.recipe))


@lru_cache(maxsize=1)
def workplace(setting: Setting) -> Workplace:
    """What acts as a client; a process that answers several letters of a run builds it once."""
    normalised = Normalisation(setting.mean, setting.std)
    recipe = setting.parsed()
    refuse_what_is_missing(recipe)  # this machine may be another than the server's
    return build_workplace(recipe, setting.shape, len(setting.names), normalised)


def order(setting: Setting, run: str, task: Task, down: Any, *, left: int, finished: int) -> Letter:
    """The letter that asks a client for a round of a run.

    It goes on from what it held at the end of round `left`, and may forget what it held before `finished`.
    """
    asked = {"run": run, "round": task.round, "client": task.client, "lr": task.lr, "left": left, "finished": finished}
    return Letter(to_arrays(down), {**setting.facts(), **asked})


def answer(letter: Letter, data: ClientData, store: HeldStore, *, share: Share = "nothing") -> Letter:
    """A client's part of a round, from letter to letter; what it holds goes to its store."""
    facts = letter.facts
    round_, client, left = facts["round"], facts["client"], facts["left"]
    place = workplace(Setting.of(facts))
    _, down_type, _, kept_type = payload_types(place.method)
    if reason := too_few_images(data):
        return failed(round_, reason)
    held = None if left == NEVER else store.load(client, left, kept_type)
    down: Any = from_arrays(down_type, letter.arrays)
    try:
        reply = client_round(place, Task(round_, client, facts["lr"], held), down, data)
    except Diverged as error:
        return failed(round_, str(error))
    assert reply.held is not None
    store.save(client, round_, reply.held)
    if facts["finished"] != NEVER:
        store.forget_before(client, facts["finished"])
    told: Facts = {"round": round_, "seconds": reply.record.seconds}
    if held is None and left != NEVER and (kept_type is not Nothing or place.net.batchnorm == "local"):
        told["anew"] = True
    arrays = {f"up/{name}": array for name, array in to_arrays(reply.up).items()}
    if share != "nothing":
        told |= _losses(reply.record)
    if share == "all" and reply.record.pseudo is not None:
        arrays |= {f"pseudo/{name}": array for name, array in to_arrays(reply.record.pseudo).items()}
    return Letter(arrays, told)


def reply_of(
    letter: Letter, client: int, round_: int, method: AnyMethod, *, share: Share = "losses"
) -> Reply | ClientFailure:
    """What a client's letter says; one that is not what was asked for is a failure of that client.

    Of what it tells beside its update no more is read than `share`.
    """
    facts = letter.facts
    if facts.get("round") != round_:
        return ClientFailure(client, f"its answer was refused: it is for round {legible(facts.get('round'))}")
    if "failed" in facts:
        return ClientFailure(client, legible(facts["failed"]))
    _, _, up_type, _ = payload_types(method)
    up = {name.removeprefix("up/"): array for name, array in letter.arrays.items() if name.startswith("up/")}
    try:
        return Reply(from_arrays(up_type, up), None, _told(client, letter, share))
    except Exception as error:  # whatever a client sends may cost its own update, nothing else
        return ClientFailure(client, f"its update was refused: {legible(error)}")


def failed(round_: int, reason: str) -> Letter:
    """The letter of a client that cannot deliver."""
    return Letter({}, {"round": round_, "failed": reason})


def _losses(record: ClientRecord) -> Facts:
    return {
        "steps": record.steps,
        "images": record.images,
        "terms": list(record.terms),
        "term_values": list(record.terms.values()),
        "measured": list(record.measured),
        "measured_sums": [total for total, _ in record.measured.values()],
        "measured_numbers": [number for _, number in record.measured.values()],
    }


def _told(client: int, letter: Letter, share: Share) -> ClientRecord:
    facts = letter.facts if share != "nothing" else {"seconds": letter.facts["seconds"]}
    pseudo = {name.removeprefix("pseudo/"): a for name, a in letter.arrays.items() if name.startswith("pseudo/")}
    sums, numbers = (map(float, facts.get(name, [])) for name in ("measured_sums", "measured_numbers"))
    return ClientRecord(
        client,
        _count(facts.get("steps", 0)),
        _count(facts.get("images", 0)),
        dict(zip(_names(facts.get("terms", [])), map(float, facts.get("term_values", [])), strict=True)),
        from_arrays(PseudoLabels, pseudo) if pseudo and share == "all" else None,
        float(facts["seconds"]),
        dict(zip(_names(facts.get("measured", [])), zip(sums, numbers, strict=True), strict=True)),
    )


def _count(told: Any) -> int:
    """Of steps or images; a larger number than anyone has would not fit where it is added up."""
    if type(told) is not int or told > MOST_IMAGES:
        raise ValueError("it tells of counts that nobody has")
    return max(told, 0)


def _names(told: Any) -> list[str]:
    """Of terms of a loss, as short as ours are."""
    names = [str(name) for name in told]
    if len(names) > MOST_TERMS or any(len(name) > MOST_TERMS or not name.isprintable() for name in names):
        raise ValueError("it tells of terms that no loss has")
    return names
