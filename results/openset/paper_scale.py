"""OpenFL on FashionMNIST at the paper's scale, in portions.

    python results/openset/paper_scale.py MINUTES [--state FILE.tar.xz KEY=VALUE ...]

unpacks the run as far as it got (paper_scale.tar.xz beside this file) into runs/paper_scale, unless it is there, goes
on for so many minutes, packs it again and writes paper_scale.csv: one line a test, and what the rounds since the test
before took. A run that was stopped and resumed has the bits of one that was not; another processor may round otherwise,
so each line names the one it was computed on. With another state file, overrides may try it on something smaller.
"""

import csv
import json
import signal
import statistics
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from semifed.process import processor

RECIPE = "openfl/table1-fashion-dir0.3"
STATE = Path(__file__).with_name("paper_scale.tar.xz")
KEPT = ("recipe.toml", "rounds.jsonl", "data.json", "partition.json", "checkpoint", "processors.json")
METRICS = ("accuracy", "auroc_seen", "auroc_overall", "fpr95_seen")


def go_on(run: Path, minutes: float, overrides: list[str]) -> None:
    """Train until the time is over or the run is done; Ctrl-C keeps the last finished round."""
    command = [sys.executable, "-m", "semifed", "run", RECIPE, *overrides, "--out", str(run), "--quiet"]
    resumed = [*command, "--resume"] if (run / "checkpoint").exists() else command
    process = subprocess.Popen(resumed, start_new_session=True)
    try:
        process.wait(minutes * 60)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait(300)


def records(run: Path) -> list[dict[str, Any]]:
    """One a round."""
    return [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]


def note_processor(run: Path) -> dict[str, str]:
    """Which processor computed the rounds up to which."""
    path = run / "processors.json"
    known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    known[str(records(run)[-1]["round"])] = processor()
    path.write_text(json.dumps(known))
    return known


def table(run: Path, processors: dict[str, str]) -> list[dict[str, Any]]:
    """One line a test."""
    lines, since = [], []
    for record in records(run):
        since.append(record["seconds"])
        if not (metrics := record.get("metrics")):
            continue
        up_to = min(int(last) for last in processors if int(last) >= record["round"])
        lines.append(
            {"round": record["round"]}
            | {name: round(metrics[name], 4) for name in METRICS}
            | {"current": round(metrics["current.accuracy"], 4) if "current.accuracy" in metrics else ""}
            | {f"pseudo.{name}": _shown(record.get("pseudo"), name) for name in ("used", "accuracy")}
            | {f"gate.{name}": _shown(record.get("gate"), name) for name in ("pass_known", "pass_unknown")}
            | {"seconds_a_round": round(statistics.median(since), 1), "processor": processors[str(up_to)]}
        )
        since = []
    return lines


def _shown(values: dict[str, float] | None, name: str) -> float | str:
    return round(values[name], 4) if values and values.get(name) is not None else ""


def main() -> None:
    """Unpack, go on, pack."""
    minutes, *rest = sys.argv[1:]
    state = Path(rest.pop(rest.index("--state") + 1)) if "--state" in rest else STATE
    overrides = [word for word in rest if word != "--state"]
    name = state.name.removesuffix(".tar.xz")
    run = Path("runs") / name
    if state.exists() and not run.exists():
        with tarfile.open(state) as packed:
            packed.extractall(run, filter="data")
    go_on(run, float(minutes), overrides)
    lines = table(run, note_processor(run))
    with open(state.with_name(f"{name}.csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    partial = state.with_suffix(".partial")
    with tarfile.open(partial, "w:xz") as packed:
        for part in KEPT:
            if (run / part).exists():
                packed.add(run / part, part)
    partial.replace(state)
    print(f"{records(run)[-1]['round']} rounds; {lines[-1]}")


if __name__ == "__main__":
    main()
