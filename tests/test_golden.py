"""Three rounds of every method on real digits, against stored numbers: any change of results shows here first."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from semifed.assembly import prepare_run
from semifed.methods import method_class, method_names
from semifed.recipe import check_recipe
from semifed.run import execute
from toys import Quiet, labels_of, meaningful

GOLDEN = Path(__file__).parent / "golden"
RTOL = 1e-4  # processors round differently
# Beside the run with labels at the server, where these methods have no supervised step at a client, their own setting.
AT_CLIENTS = (
    *("fixmatch-lpl", "fixmatch-gpl", "fedprox-fixmatch", "flexmatch", "fedmatch", "fedlabel", "fedloke", "feddb"),
    *("sage", "proxyfl", "fedavg-sl"),
)
AT_SOME_CLIENTS = ("rscfed", "cbafed")
FIRST = dict(reversed(meaningful()))
CASES = [
    *((name, FIRST[name]) for name in method_names()),
    *((name, "clients") for name in AT_CLIENTS),
    *((name, "some-clients") for name in AT_SOME_CLIENTS),
]


def golden(name: str, labels: str) -> Path:
    return GOLDEN / (f"{name}.json" if labels == FIRST[name] else f"{name}.{labels}.json")


def recipe_tables(name: str, labels: str | None = None) -> dict[str, Any]:
    kind = method_class(name)
    labels = labels or FIRST[name]
    regime = next(regime for regime in ("open", "known", "novel") if regime not in kind.no_meaning)
    # Three rounds make no model sure of anything: the gates must open all the same.
    asked = {field.name for field in fields(kind)}
    gates = {
        "threshold": 0.3,
        "known_threshold": 0.3,
        "entropy_threshold": 1.65,
        "helper_interval": 2,
        "warmup_rounds": 1,
    }
    options = {key: value for key, value in gates.items() if key in asked}
    scenario = {"labels": labels, "classes": regime, "clients": 4, "partition": "dirichlet", "alpha": 0.5}
    novel = {"validation_fraction": 0.2} if regime == "novel" else {}
    heads = {"projection": "mlp3(16, 8, gelu)"} if regime == "novel" else {}
    head = next(name for name in ("linear", "cosine") if name not in kind.no_meaning)
    return {
        "dataset": "digits",
        "rounds": 3,
        "clients_per_round": 3,
        "scenario": {**scenario, "known_count": 6, "subset": 240, **novel, **labels_of(labels, regime)},
        "model": {"name": "cnn", "width": [8, 8, 16], "head": head, "heads": heads},
        "views": {"weak": "crop(1)", "strong": "crop(1) randaugment(2,10) cutout(3)"},
        "method": {"name": name, **options},
        "local": {"epochs": 1, "batch": 8, "lr": 0.02, "weight_decay": 5e-4, "clip": 1.0},
        "server": {"warmup_epochs": 6, "finetune_epochs": 1, "batch": 8},
        "evaluate": {"folds": 0},
        "engine": {"workers": 1},
    }


class Watching(Quiet):
    """Notes each finished round with the norms of the weights in its checkpoint."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.rounds: list[dict[str, Any]] = []
        self._out = out

    def finished_round(self, record: Mapping[str, Any]) -> None:
        """Read the checkpoint of this round."""
        (path,) = (self._out / "checkpoint").glob("round-*.safetensors")
        norms = {
            name.removeprefix("weights/"): float(array.double().norm())
            for name, array in sorted(load_file(path).items())
            if name.startswith("weights/")
        }
        kept = ("round", "loss", "metrics", "pseudo", "bytes_up", "bytes_down", "images", "client_weights")
        self.rounds.append({**{key: record[key] for key in kept if key in record}, "norms": norms})


@pytest.mark.parametrize(("name", "labels"), CASES, ids=lambda word: word)
def test_golden_run(name: str, labels: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    out = tmp_path / "run"
    watching = Watching(out)
    execute(prepare_run(check_recipe(recipe_tables(name, labels))), out, watching)
    path = golden(name, labels)
    if request.config.getoption("--regolden"):
        path.write_text(json.dumps(watching.rounds, indent=1) + "\n")
    stored = json.loads(path.read_text())
    assert len(stored) == len(watching.rounds) == 3
    for expected, found in zip(stored, watching.rounds, strict=True):
        assert flat(found) == pytest.approx(flat(expected), rel=RTOL, abs=1e-7, nan_ok=True)


def flat(content: Any, prefix: str = "") -> dict[str, float]:
    """Every number under its path; what could not be measured is not a number."""
    if isinstance(content, dict):
        pairs = content.items()
    elif isinstance(content, list):
        pairs = {str(index): value for index, value in enumerate(content)}.items()
    else:
        return {prefix: math.nan if content is None else content}
    return {path: value for key, inner in pairs for path, value in flat(inner, f"{prefix}/{key}").items()}


def test_no_golden_file_is_left_over() -> None:
    assert set(GOLDEN.glob("*.json")) == {golden(*case) for case in CASES}


def test_a_small_change_is_noticed() -> None:
    stored = json.loads((GOLDEN / "fedavg.json").read_text())[-1]
    changed = json.loads(json.dumps(stored))
    changed["norms"]["classifier.weight"] *= 1.001
    assert flat(changed) != pytest.approx(flat(stored), rel=RTOL, abs=1e-7)
