"""Run directories as typed records: what was asked for, what happened each round, how it ended."""

import io
import json
import math
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from semifed.errors import UserError

Values = dict[str, float | None]


class Failure(NamedTuple):
    """A client that was asked in a round and gave nothing."""

    round: int
    client: int
    reason: str


class Reliability(NamedTuple):
    """How far a client's images were from the pivots, and how many of its pseudo-labels were right."""

    alignment: float
    correct: float


@dataclass(frozen=True)
class RoundLine:
    """One line of `rounds.jsonl`; a value that was null there is None here."""

    number: int
    client_count: int
    failures: tuple[Failure, ...]
    loss: Values
    metrics: Values
    pseudo: Values
    gate: Values
    opinions: Mapping[str, Values]
    ranks: Mapping[str, tuple[float, ...]]  # of labels in the other model's ranking, how many at each place
    pivot_norm: float | None
    client_weights: tuple[float, ...]
    reliability: tuple[Reliability, ...]
    bytes_up: float
    bytes_down: float
    images: float
    seconds: float


@dataclass(frozen=True)
class Run:
    """What a run directory holds; files that are missing are empty mappings."""

    path: Path
    recipe: Mapping[str, Any]
    rounds: Sequence[RoundLine] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    partition: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, Any] = field(default_factory=dict)
    features: Mapping[str, Any] = field(default_factory=dict)
    discovery: Mapping[str, Any] = field(default_factory=dict)
    damaged: str = ""  # what is wrong with `discovery.json`, which the rest of a report does well without

    @property
    def method(self) -> str:
        """Name of the method, as the recipe spells it."""
        return str(self.table("method").get("name") or self.summary.get("method") or "unknown method")

    @property
    def dataset(self) -> str:
        """Name or path of the dataset, as the recipe spells it."""
        return str(self.recipe.get("dataset") or self.summary.get("dataset") or "unknown dataset")

    @property
    def images(self) -> str:
        """The hash of the images that lay under that name; empty before a run ended."""
        return str(self.summary.get("data_hash") or "")

    @property
    def seed(self) -> int:
        """The seed all streams of randomness were made from."""
        return int(finite(self.recipe.get("seed", self.summary.get("seed"))) or 0)

    @property
    def planned_rounds(self) -> int | None:
        """Rounds the recipe asks for."""
        rounds = finite(self.recipe.get("rounds", self.summary.get("rounds")))
        return None if rounds is None else int(rounds)

    @property
    def last_round(self) -> int | None:
        """Number of the last recorded round."""
        return self.rounds[-1].number if self.rounds else None

    @property
    def finished(self) -> bool:
        """Whether the run wrote its summary after the last planned round."""
        if not self.summary:
            return False
        return self.last_round is None or self.planned_rounds is None or self.last_round >= self.planned_rounds

    @cached_property
    def evaluated(self) -> Sequence[RoundLine]:
        """The rounds after which the model was tested."""
        return [line for line in self.rounds if line.metrics]

    @cached_property
    def metrics(self) -> Values:
        """Metrics of the last evaluated round."""
        stored = self.summary.get("metrics")
        if stored:
            return values(stored)
        return self.evaluated[-1].metrics if self.evaluated else {}

    @property
    def discovers(self) -> bool:
        """Whether it was tested for groups among known and novel classes."""
        return "all" in self.metrics

    @cached_property
    def metrics_last10(self) -> Values:
        """Mean of each metric over the last ten evaluated rounds; None if one of them is."""
        stored = self.summary.get("metrics_last10")
        if stored:
            return values(stored)
        last = [line.metrics for line in self.evaluated if line.number > 0][-10:]
        return {key: mean_or_none([metrics.get(key) for metrics in last]) for key in self.metrics}

    def table(self, name: str) -> Mapping[str, Any]:
        """A table of the recipe, empty if it has none of that name."""
        table = self.recipe.get(name)
        return table if isinstance(table, Mapping) else {}

    def total(self, name: str) -> float | None:
        """`bytes_up`, `bytes_down`, `images` or `seconds` of the whole run, from the summary or else the rounds."""
        stored = finite(self.summary.get(name))
        if stored is not None:
            return stored
        return math.fsum(getattr(line, name) for line in self.rounds) if self.rounds else None


def finite(value: object) -> float | None:
    """The value as a float if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def values(mapping: object) -> Values:
    """A JSON object as numbers by name; anything that is no finite number becomes None."""
    if not isinstance(mapping, Mapping):
        return {}
    return {str(key): finite(value) for key, value in mapping.items()}


def listed(content: Mapping[str, Any], key: str) -> list[Any]:
    """A list of a JSON object, empty if it has none of that name."""
    value = content.get(key)
    return value if isinstance(value, list) else []


def mean_or_none(numbers: Iterable[float | None]) -> float | None:
    """The mean, or None if there is nothing to average or a number is missing."""
    present = list(numbers)
    known = [number for number in present if number is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(present) else None


def read_run(path: Path) -> Run:
    """Reads a run directory, finished or not; UserError if it holds no run or a damaged file."""
    if not path.is_dir():
        raise UserError(f"{path}: no such directory; expected a run directory written by `semifed run`")
    if not any((path / name).is_file() for name in ("recipe.toml", "rounds.jsonl", "summary.json")):
        raise UserError(f"{path}: not a run directory; expected recipe.toml, rounds.jsonl or summary.json in it")
    discovery, damaged = _read_if_whole(path / "discovery.json")
    return Run(
        path=path,
        recipe=_read_recipe(path / "recipe.toml"),
        rounds=_read_rounds(path / "rounds.jsonl"),
        summary=_read_json(path / "summary.json"),
        partition=_read_json(path / "partition.json"),
        scores=_read_json(path / "scores.json"),
        features=_read_json(path / "features.json"),
        discovery=discovery,
        damaged=damaged,
    )


def read_strip(run: Run, group: int) -> bytes | None:
    """The PNG of a group's most typical images; None if there is none, or if it is damaged."""
    from PIL import Image

    try:
        content = (run.path / "groups" / f"{group:02}.png").read_bytes()
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            image.load()
    except (OSError, SyntaxError, ValueError):  # what Pillow raises depends on where a file is damaged
        return None
    return content


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Run directories among and below the paths, each once, in the order given and then by name."""
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path}: no such directory; expected a run or a directory that contains runs")
        below = list(_runs_below(path))
        if not below:
            raise UserError(f"{path}: no run found in it; a run has recipe.toml and rounds.jsonl or summary.json")
        for run in below:
            found.setdefault(run.resolve(), run)
    if not found:
        raise UserError("nothing to compare: expected at least one run directory")
    return list(found.values())


def unlike_images(runs: Sequence[Run]) -> list[str]:
    """A warning for each name of a data set under which runs found unlike images."""
    first: dict[str, dict[str, Path]] = {}
    for run in runs:
        if run.images:
            first.setdefault(run.dataset, {}).setdefault(run.images, run.path)
    return [
        f"not the same images behind dataset = {name}: {', '.join(str(path) for path in paths.values())}; "
        "rows of one and of the other are not to be compared"
        for name, paths in first.items()
        if len(paths) > 1
    ]


def _runs_below(top: Path) -> Iterable[Path]:
    for directory, inner, files in os.walk(top):
        if "recipe.toml" in files and not {"rounds.jsonl", "summary.json"}.isdisjoint(files):
            inner.clear()
            yield Path(directory)
        else:
            inner[:] = sorted(name for name in inner if not name.startswith("."))


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error


def _read_recipe(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    try:
        return tomllib.loads(text) if text is not None else {}
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML ({error})") from error


def _read_json(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    if text is None:
        return {}
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _read_if_whole(path: Path) -> tuple[dict[str, Any], str]:
    """The JSON object, or an empty one and what is wrong with the file."""
    try:
        return _read_json(path), ""
    except UserError as error:
        return {}, str(error).replace(str(path), path.name)


def _read_rounds(path: Path) -> list[RoundLine]:
    lines = [line for line in (_read_text(path) or "").split("\n") if line.strip()]
    rounds: dict[int, RoundLine] = {}
    for position, line in enumerate(lines, start=1):
        try:
            content = json.loads(line)
            number = int(content["round"])
        except (ValueError, KeyError, TypeError) as error:
            if position == len(lines):
                break  # a run killed while it wrote leaves half a line behind
            raise UserError(f"{path}, line {position}: expected a JSON object with 'round'") from error
        # A resumed run may repeat a round: the later line is the one the model went through.
        rounds[number] = _round_line(number, content)
    return [rounds[number] for number in sorted(rounds)]


def _round_line(number: int, content: Mapping[str, Any]) -> RoundLine:
    failures = tuple(
        Failure(number, int(finite(entry.get("client")) or 0), str(entry.get("reason") or "no reason given"))
        for entry in content.get("failures") or ()
    )
    return RoundLine(
        number=number,
        client_count=len(content.get("clients") or ()),
        failures=failures,
        loss=values(content.get("loss")),
        metrics=values(content.get("metrics")),
        pseudo=values(content.get("pseudo")),
        gate=values(content.get("gate")),
        opinions=_tables(content.get("opinions")),
        ranks=_ranks(content),
        pivot_norm=finite(content.get("pivot_norm")),
        client_weights=_numbers(content, "client_weights"),
        reliability=_reliability(content),
        bytes_up=finite(content.get("bytes_up")) or 0.0,
        bytes_down=finite(content.get("bytes_down")) or 0.0,
        images=finite(content.get("images")) or 0.0,
        seconds=finite(content.get("seconds")) or 0.0,
    )


def _tables(content: object) -> dict[str, Values]:
    return {str(key): values(table) for key, table in content.items()} if isinstance(content, Mapping) else {}


def _ranks(content: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    opinions = content.get("opinions")
    agreement = opinions.get("agreement") if isinstance(opinions, Mapping) else None
    if not isinstance(agreement, Mapping):
        return {}
    return {key: _numbers(agreement, key) for key in ("local_ranks", "received_ranks")}


def _numbers(content: Mapping[str, Any], key: str) -> tuple[float, ...]:
    return tuple(number for one in listed(content, key) if (number := finite(one)) is not None)


def _reliability(content: Mapping[str, Any]) -> tuple[Reliability, ...]:
    """What the clients claimed, beside what the opened labels say of them; empty where one of the two is missing."""
    clients, claimed = listed(content, "clients"), listed(content, "alignment")
    per_client = content.get("per_client")
    if not isinstance(per_client, Mapping) or len(clients) != len(claimed):
        return ()
    correct = dict(zip(listed(per_client, "client"), listed(per_client, "correct"), strict=False))
    pairs = [(finite(level), finite(correct.get(client))) for client, level in zip(clients, claimed, strict=True)]
    return tuple(Reliability(level, right) for level, right in pairs if level is not None and right is not None)
