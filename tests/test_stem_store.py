"""What a frozen backbone says, kept on disk between runs: the same bits, computed once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from semifed.assembly import assemble, build_workplace, workplace_of
from semifed.errors import UserError
from semifed.models.backbones import Normalisation
from semifed.models.efficientnet import EfficientNetLite0
from semifed.models.stem_store import StemStore
from semifed.recipe import Recipe
from toys import equal_weights, run_toy, toy_parts, toy_recipe

LITE = {"name": "efficientnet-lite0", "weights": "random", "input_size": 32, "trainable": "last", "width": None}
FROZEN = {"conv.weight": torch.arange(6.0)}


def batch(seed: int = 0, count: int = 3) -> Tensor:
    return torch.randn(count, 2, 4, 4, generator=torch.Generator().manual_seed(seed))


class Doubling:
    """A stem that counts the batches it sees."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, images: Tensor) -> Tensor:
        self.calls += 1
        return 2 * images


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_batch_is_computed_once_and_read_in_its_layout(tmp_path: Path, layout: torch.memory_format) -> None:
    stem, images = Doubling(), batch().contiguous(memory_format=layout)
    first = StemStore(tmp_path, FROZEN, "a").maps(images, stem)
    again = StemStore(tmp_path, FROZEN, "a").maps(images.clone(), stem)
    assert stem.calls == 1
    assert torch.equal(first, again)
    assert first.stride() == again.stride()


@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 3, 4)])
def test_stems_of_any_shape_are_read_as_they_were_written(tmp_path: Path, shape: tuple[int, ...]) -> None:
    said = torch.randn(shape)
    kept = [StemStore(tmp_path, FROZEN, "a").maps(batch(), lambda _: said) for _ in range(2)]
    assert torch.equal(kept[1], said)


def test_whatever_decides_the_bits_is_part_of_the_key(tmp_path: Path) -> None:
    stem = Doubling()
    other_weights, other_name = {"conv.weight": torch.arange(6.0) + 1}, {"other.weight": torch.arange(6.0)}
    stores = [
        StemStore(tmp_path, *told)
        for told in ((FROZEN, "a"), (FROZEN, "b"), (other_weights, "a"), (other_name, "a"), ({}, "a"))
    ]
    shown = [batch(), batch(1), batch()[:2], batch().contiguous(memory_format=torch.channels_last), batch().double()]
    for store in stores:
        store.maps(batch(), stem)
    for images in shown[1:]:
        stores[0].maps(images, stem)
    with torch.autocast("cpu", torch.bfloat16):
        stores[0].maps(batch(), stem)
    assert stem.calls == len(files(tmp_path)) == 10
    for store in stores:
        store.maps(batch(), stem)
    assert stem.calls == 10


def test_another_processor_or_release_computes_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stem = Doubling()
    StemStore(tmp_path, FROZEN, "a").maps(batch(), stem)
    monkeypatch.setattr("semifed.models.stem_store.processor", lambda: "another")
    StemStore(tmp_path, FROZEN, "a").maps(batch(), stem)
    monkeypatch.setattr(torch, "__version__", "3.0")
    StemStore(tmp_path, FROZEN, "a").maps(batch(), stem)
    assert stem.calls == 3


@pytest.mark.parametrize(
    "damage",
    [lambda content: content[:40], lambda content: b"", lambda content: content[:-1] + bytes([content[-1] ^ 1])],
)
def test_a_damaged_file_is_computed_and_written_anew(tmp_path: Path, damage: Any) -> None:
    stem, store = Doubling(), StemStore(tmp_path, FROZEN, "a")
    expected = store.maps(batch(), stem)
    (path,) = files(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    for _ in range(2):
        assert torch.equal(store.maps(batch(), stem), expected)
    assert stem.calls == 2


def test_a_full_disk_costs_no_run_and_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-written part would take the room that the next checkpoint needs, and every batch would add one."""
    tried = []

    def full(self: Path, content: bytes) -> int:
        tried.append(self)
        with open(self, "wb") as file:
            file.write(content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    stem, store = Doubling(), StemStore(tmp_path, FROZEN, "a")
    for factor in (1, 2, 3):
        assert torch.equal(store.maps(factor * batch(), stem), 2 * factor * batch())
    assert files(tmp_path) == []
    assert len(tried) == 1


def test_other_code_computes_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a frozen network says may change with the code of networks, and with the package of their layers."""
    stem, code = Doubling(), tmp_path / "code"
    code.mkdir()
    for text in ("x = 1", "x = 1", "x = 2"):
        (code / "network.py").write_text(text)
        monkeypatch.setattr("semifed.models.stem_store._CODE", code)
        StemStore(tmp_path / "stems", FROZEN, "a").maps(batch(), stem)
    assert stem.calls == 2
    monkeypatch.setattr("semifed.models.stem_store._transformers", lambda: "99.0")
    StemStore(tmp_path / "stems", FROZEN, "a").maps(batch(), stem)
    assert stem.calls == 3


# -------------------------------------------------------------------------------------------- runs


def recipe(stems: Path | None, method: str = "fedlpa", workers: int = 1, **options: Any) -> Recipe:
    engine = {"workers": workers, **({} if stems is None else {"stems": str(stems)})}
    changes = {"model": LITE, "local": {"epochs": None, "steps": 1}, "engine": engine, "method": options}
    return toy_recipe(method, "clients", changes, rounds=3)


@pytest.mark.slow
def test_a_run_with_kept_stems_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one worker and on two, by another method that draws the same views; and nothing is computed twice."""
    stems = tmp_path / "stems"
    apart = run_toy(toy_parts(recipe(None)), tmp_path / "apart").weights
    other = run_toy(toy_parts(recipe(None, prior_weight=0.0)), tmp_path / "other").weights
    first = run_toy(toy_parts(recipe(stems)), tmp_path / "first").weights
    assert equal_weights(first, apart)
    assert not equal_weights(first, other)
    kept = len(files(stems))

    def never(self: EfficientNetLite0, x: Tensor) -> Tensor:
        raise AssertionError("computed again")

    with monkeypatch.context() as patched:
        patched.setattr(EfficientNetLite0, "frozen_part", never)
        assert equal_weights(run_toy(toy_parts(recipe(stems)), tmp_path / "again").weights, apart)
        assert equal_weights(run_toy(toy_parts(recipe(stems, prior_weight=0.0)), tmp_path / "second").weights, other)
    assert equal_weights(run_toy(toy_parts(recipe(stems, workers=2)), tmp_path / "pooled").weights, apart)
    assert len(files(stems)) == kept


def test_a_server_does_not_tell_its_clients_where_to_write(tmp_path: Path) -> None:
    """Deployed clients build their workplace from a recipe that came over the network."""
    parts = toy_parts(recipe(tmp_path / "stems"))
    told = build_workplace(parts.recipe, (1, 8, 8), 3, Normalisation((0.5,), (0.25,)))
    assert told.net.network.stems is None
    assert workplace_of(parts)().net.network.stems is not None
    assert assemble(parts)[0].network.stems is not None


def test_what_makes_no_sense_is_refused_in_a_line(tmp_path: Path) -> None:
    stems = {"stems": str(tmp_path / "stems")}
    parts = toy_parts(toy_recipe("fedlpa", "clients", {"engine": stems}))
    with pytest.raises(UserError, match=r"engine.stems: nothing of cnn is frozen; leave it out"):
        assemble(parts)
    with pytest.raises(
        UserError, match=r"engine.stems: the clients of flower keep nothing here; use engine.name=local"
    ):
        toy_recipe("fedlpa", "clients", {"engine": {"name": "flower", **stems}})
    with pytest.raises(UserError, match=r"engine.stems: a GPU computes them faster than a disk reads them"):
        toy_recipe("fedlpa", "clients", {"engine": {"device": "cuda", **stems}})
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match=r"engine.stems: .*file/stems cannot be written: Not a directory"):
        assemble(toy_parts(recipe(blocked / "stems")))
