"""The command `semifed bench`: which parts, what it prints, what it writes."""

import json
from functools import partial
from pathlib import Path

import pytest

from semifed.bench import command
from semifed.bench.aggregation import aggregation_cost
from semifed.errors import UserError


@pytest.fixture(autouse=True)
def _small_cohort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "aggregation_cost", partial(aggregation_cost, cohort=2, shapes=((3, 2), (2,))))


def test_a_part_that_does_not_exist_is_named() -> None:
    with pytest.raises(UserError, match="bench has no part 'flor'; did you mean 'floor'"):
        command.bench(["flor"], turns=1, workers=1, file=None, plots=None)


@pytest.mark.slow
def test_numbers_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "bench.json"
    command.bench(["aggregation"], turns=2, workers=1, file=file, plots=tmp_path / "plots")
    printed = capsys.readouterr().out
    assert "Aggregation" in printed
    assert "torch.stack" in printed
    written = json.loads(file.read_text())
    assert written["turns"] == 2
    assert written["machine"]["torch"]
    rows = written["parts"]["aggregation"]["rows"]
    assert rows[0]["way"] == "semifed"
    assert len(written["parts"]["aggregation"]["facts"]["seconds"]["semifed"]) == 2
