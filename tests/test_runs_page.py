"""The page about run directories names every file, key and metric that runs write."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from semifed.assembly import prepare_run
from semifed.recipe import check_recipe
from semifed.report import write_report
from semifed.run import execute
from test_golden import recipe_tables
from toys import Quiet

DOCS = Path(__file__).parents[1] / "docs"
SOURCE = DOCS.parent / "src" / "semifed" / "method.py"


@pytest.fixture(scope="module", params=["openfl", "fed-simgcd"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(request.param) / "run"
    tables: dict[str, Any] = recipe_tables(request.param)
    tables["evaluate"] = {**tables.get("evaluate", {}), "unseen": ["gaussian"]}
    execute(prepare_run(check_recipe(tables)), out, Quiet())
    write_report(out)
    return out


def words_of(page: str) -> set[str]:
    """What stands between backticks."""
    return set(re.findall(r"`([^`]+)`", (DOCS / page).read_text()))


def test_every_file_is_named(run: Path) -> None:
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    patterns = [re.sub(r"NN", r"\\d+", re.escape(word)) for word in words_of("runs.md")] + ["checkpoint/.*"]
    assert {name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns)} == set()


def test_every_key_of_the_summary_is_named(run: Path) -> None:
    content = json.loads((run / "summary.json").read_text())
    assert set(content) - words_of("runs.md") == set()
    assert set(content["threshold"]) - words_of("runs.md") == set()


def test_every_key_of_the_models_description_is_named(run: Path) -> None:
    page = (DOCS / "runs.md").read_text()
    named = {"model", "architecture", "heads", "method", "image", "classes"}  # in words
    assert {key for key in json.loads((run / "model/model.json").read_text()) if f"`{key}`" not in page} <= named


def test_every_metric_is_named(run: Path) -> None:
    metrics = json.loads((run / "summary.json").read_text())["metrics"]
    assert metrics
    known = {re.sub(r"auroc_unseen\.\w+", "auroc_unseen.SET", name) for name in metrics}
    prefixes = re.compile(r"^(infomap|plus|kmeans)\.|_balanced$")  # rounds.md tells of them
    assert {prefixes.sub("", name) for name in known} - words_of("runs.md") == set()


def test_every_key_of_a_round_is_named(run: Path) -> None:
    named = words_of("rounds.md")
    for line in (run / "rounds.jsonl").read_text().splitlines():
        assert set(json.loads(line)) - named == set()


def test_every_note_of_a_method_is_named() -> None:
    source = "".join(path.read_text() for path in (SOURCE, *(SOURCE.parent / "methods").glob("*.py")))
    noted = set(re.findall(r"(\w+)=", " ".join(re.findall(r"\.note\((.*)\)", source))))
    assert {"client_weights", "alignment", "beta_unknown"} <= noted
    assert noted - words_of("rounds.md") == set()
