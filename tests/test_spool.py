"""Replies beyond what memory should hold: the same numbers from files without names."""

import errno
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch

from semifed.engines import local, shared_memory
from semifed.engines.shared_memory import Spool
from semifed.payloads import Up
from toys import equal_weights, run_toy, toy_parts, toy_recipe


def reply(values: int, seed: int = 0) -> Up:
    generator = torch.Generator().manual_seed(seed)
    weights = {"a": torch.randn(values, generator=generator), "b": torch.arange(3), "c": torch.tensor(2.5)}
    return Up(weights, torch.tensor(7.0))


def own_memory() -> int:
    """Bytes of this process that no file stands behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def test_what_is_beyond_the_room_is_the_same_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spool = Spool(room=500)
    first, second = reply(100), reply(100, seed=1)
    assert spool.keep(first) is first
    kept = spool.keep(second)
    assert kept is not second
    assert equal_weights(kept.weights, second.weights)
    assert torch.equal(kept.samples, second.samples)
    assert kept.weights["a"].dtype == torch.float32
    assert kept.weights["b"].dtype == torch.int64
    assert list(tmp_path.iterdir()) == []


def test_a_large_cohort_is_not_held_in_memory() -> None:
    spool = Spool(room=0)
    spool.keep(reply(10))  # whatever the first call loads
    before = own_memory()
    cohort = [spool.keep(reply(1_000_000, seed)) for seed in range(40)]  # 160 MB
    assert own_memory() - before < 60e6
    assert torch.equal(cohort[0].weights["a"], reply(1_000_000).weights["a"])


def test_a_full_disk_means_memory_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    assert equal_weights(Spool(room=0).keep(reply(10)).weights, reply(10).weights)


@pytest.mark.parametrize("method", ["openfl", "sage", "fedmatch"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_whose_replies_lie_in_files_is_the_same(
    method: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = "server" if method == "openfl" else "clients"
    parts = toy_parts(toy_recipe(method, labels, {"engine": {"workers": workers}}, rounds=2))
    here = run_toy(parts, tmp_path / "memory")
    monkeypatch.setattr(local, "Spool", partial(Spool, 0))
    there = run_toy(parts, tmp_path / "files")
    assert equal_weights(here.weights, there.weights)
    assert [one["loss"] for one in here.rounds] == [one["loss"] for one in there.rounds]
