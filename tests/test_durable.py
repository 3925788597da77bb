"""Files that survive a power cut: what is written, and how often the disk is waited for."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file

from semifed import durable
from semifed.checkpoint import Checkpoint
from semifed.client_round import Held
from semifed.durable import packed, write_together
from semifed.engines.local import LocalEngine
from semifed.errors import UserError
from semifed.held import HeldStore
from semifed.payloads import Nothing
from semifed.run import execute
from semifed.wire import Weights
from toys import Quiet, place_of, toy_parts, toy_recipe


class Waits:
    """How often the disk is waited for, and for what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, whole: bool) -> None:
        self.files = self.disks = 0
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._file)
        monkeypatch.setattr(durable, "_sync_file_system", self._disk if whole else lambda _: False)

    def _file(self, opened: int) -> None:
        self.files += 1
        self._fsync(opened)

    def _disk(self, _: Path) -> bool:
        self.disks += 1
        return True


def held_by(clients: int) -> dict[int, Held]:
    return {client: Held(Nothing(), {"w": torch.full((3,), float(client))}, {}) for client in range(clients)}


def test_the_disk_is_waited_for_as_often_whatever_the_number_of_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []
    for clients in (1, 20):
        waits = Waits(monkeypatch, whole=True)
        held = held_by(clients)
        checkpoint = Checkpoint(tmp_path / str(clients))
        checkpoint.save(1, Nothing(), {}, dict.fromkeys(held, 1), held)
        waited.append((waits.files, waits.disks))
        for client in held:
            found = checkpoint.store.load(client, 1, Nothing)
            assert found is not None
            assert found.momentum["w"].tolist() == [float(client)] * 3
    assert waited[0] == waited[1] == (2, 1)


def test_where_the_system_cannot_each_file_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits(monkeypatch, whole=False)
    files = [(tmp_path / str(number) / "file", bytes([number])) for number in range(5)]
    write_together(files)
    assert [path.read_bytes() for path, _ in files] == [content for _, content in files]
    assert waits.files == 5 + 5 + 1  # files, their directories, and the one above, which has new names too


def test_this_system_brings_its_disk_up_to_date(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("anything")
    assert durable._sync_file_system(tmp_path / "file") == (sys.platform == "linux")


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(UserError, match="cannot be written"):
        write_together([(tmp_path / "file" / "below", b"")])


@pytest.mark.parametrize("kind", ["apart", "twice", "transposed", "parts of one", "overlapping", "empty"])
def test_packed_arrays_come_back(kind: str, tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    arrays: dict[str, Weights] = {
        "apart": {"a": whole, "b": whole + 1},
        "twice": {"a": whole, "b": whole, "c": whole.view(4, 3)},
        "transposed": {"a": whole.T, "b": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)},
        "parts of one": {"a": whole[0], "b": whole[1:]},
        "overlapping": {"a": whole, "b": whole[1:], "c": whole[:2]},
        "empty": {"a": torch.empty(0, 4), "b": torch.empty(0), "c": torch.tensor(3)},
    }
    content = packed(arrays[kind], {"note": "text"})
    (tmp_path / "file").write_bytes(content)
    for found in (load(content), load_file(tmp_path / "file")):
        assert found.keys() == arrays[kind].keys()
        assert all(torch.equal(found[name], array) for name, array in arrays[kind].items())


def test_only_what_lies_twice_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(durable, "save", lambda arrays, metadata: given.update(arrays) or b"")
    array, other = torch.ones(3), torch.ones(3)
    packed({"a": array, "b": other, "c": array}, {})
    assert given["a"] is array
    assert given["b"] is other
    assert given["c"] is not array


def test_what_clients_of_earlier_rounds_hold_is_on_disk_alone(tmp_path: Path) -> None:
    changes = {"local": {"keep_optimizer": True}}
    parts = toy_parts(toy_recipe("fedavg", "clients", changes, clients_per_round=1, rounds=6))
    engine = LocalEngine(partial(place_of, parts), parts.scenario, workers=1)
    execute(parts, tmp_path / "run", Quiet(), engine=engine)
    assert len(engine.left) > 2
    assert list(engine._held) == [client for client, round_ in engine.left.items() if round_ == 6]
    engine.ask(7, 0.05, [], None)
    assert not engine._held
    for client, round_ in engine.left.items():
        stored = Checkpoint(tmp_path / "run" / "checkpoint").store.load(client, round_, Nothing)
        found = engine._held_by(client)
        assert stored is not None
        assert found is not None
        assert found.momentum.keys() == stored.momentum.keys() != set()
        assert all(torch.equal(found.momentum[name], array) for name, array in stored.momentum.items())


def test_a_damaged_memory_is_told_when_it_is_needed(tmp_path: Path) -> None:
    store = HeldStore(tmp_path)
    store.save(3, 1, held_by(1)[0])
    store.path(3, 1).write_bytes(b"rest is missing")
    with pytest.raises(UserError, match=r"000001\.safetensors is damaged and cannot be resumed from"):
        store.load(3, 1, Nothing)


def test_a_client_that_is_asked_twice_in_a_round_never_tears_what_it_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, (first, second) = HeldStore(tmp_path), held_by(2).values()
    store.save(3, 1, first)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space left")))
        with pytest.raises(UserError, match="cannot be written"):
            store.save(3, 1, second)
    kept = store.load(3, 1, Nothing)
    assert kept is not None
    assert torch.equal(kept.momentum["w"], first.momentum["w"])
