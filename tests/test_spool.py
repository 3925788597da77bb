"""Replies beyond what memory should hold: the same numbers from files without names."""

import errno
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch

from semifed.engines import local, pool, shared_memory
from semifed.engines.shared_memory import Spool
from semifed.wire import Weights
from toys import equal_weights, run_toy, toy_parts, toy_recipe


def reply(values: int, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(values, generator=generator), "b": torch.arange(3), "c": torch.tensor(2.5)}


def test_what_is_beyond_the_room_is_the_same_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spool = Spool(room=500)
    for seed in range(2):
        given = reply(100, seed)
        kept = spool.keep(given)
        assert equal_weights(kept, given)
        assert all(kept[name].dtype == array.dtype for name, array in given.items())
        given["a"].zero_()  # a worker's buffer is written again
        assert equal_weights(kept, reply(100, seed))
    assert list(tmp_path.iterdir()) == []


def test_files_are_as_long_as_the_replies_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of 70 MB do not fit in 128 MB: a file of that length for each would waste half of a disk."""
    asked: list[int] = []
    monkeypatch.setattr(shared_memory, "FILE", 128 * 64)
    whole = shared_memory._in_a_file

    def noted(size: int) -> torch.Tensor:
        asked.append(size)
        return whole(size)

    monkeypatch.setattr(shared_memory, "_in_a_file", noted)
    for values, length in ((70 * 16, 70 * 64), (30 * 16, 4 * 30 * 64), (500 * 16, 500 * 64)):
        spool = Spool(room=0)
        for seed in range(4):
            given = {"a": torch.full((values,), float(seed))}
            assert equal_weights(spool.keep(given), given)
        assert asked == [length] * max(1, 4 * values * 4 // length)
        asked.clear()


RISE = """
import sys, torch
from semifed.engines.shared_memory import Spool
def own():  # kilobytes that no file stands behind
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon:"))
written = {"a": torch.ones(1_000_000)}
spool, before = Spool(int(sys.argv[1])), own()
cohort = [spool.keep(written) for _ in range(40)]
print(own() - before)
"""


@pytest.mark.slow
def test_a_large_cohort_is_not_held_in_memory() -> None:
    rise = [
        int(subprocess.run([sys.executable, "-c", RISE, room], capture_output=True, text=True, check=True).stdout)
        for room in ("0", "1000000000")
    ]
    assert rise[0] < 20_000  # of 160,000 kilobytes
    assert rise[1] > 140_000


def test_a_full_disk_means_memory_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    assert equal_weights(Spool(room=0).keep(reply(10)), reply(10))


@pytest.mark.parametrize("method", ["openfl", "sage", "fedmatch"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.slow
def test_a_run_whose_replies_lie_in_files_is_the_same(
    method: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = "server" if method == "openfl" else "clients"
    parts = toy_parts(toy_recipe(method, labels, {"engine": {"workers": workers}}, rounds=2))
    here = run_toy(parts, tmp_path / "memory")
    monkeypatch.setattr(local if workers == 1 else pool, "Spool", partial(Spool, 0))
    there = run_toy(parts, tmp_path / "files")
    assert equal_weights(here.weights, there.weights)
    assert [one["loss"] for one in here.rounds] == [one["loss"] for one in there.rounds]
