"""Every format is written here in full, by other means than the reader's, and read back; then damaged."""

import gzip
import hashlib
import io
import os
import pickle
import struct
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from semifed.data.datasets import Dataset, UnknownDataset, catalogue, content_hash, load
from semifed.data.formats import (
    IDX_FILES,
    Official,
    check_official,
    read_cifar_batch,
    read_idx,
    stratified_split,
)
from semifed.data.image_folder import image_files, read_image, read_image_folder
from semifed.errors import UserError

Array = NDArray[Any]


@pytest.fixture(autouse=True)
def nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data set of the machine may take part."""
    empty = tmp_path / "working-directory"
    empty.mkdir()
    monkeypatch.chdir(empty)
    monkeypatch.delenv("SEMIFED_DATA", raising=False)
    monkeypatch.setattr("semifed.data.datasets.SYSTEM_PLACE", str(tmp_path / "system"))


def images(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def labels(count: int, classes: int = 10) -> Array:
    return np.arange(count) % classes


def write_idx(path: Path, array: Array) -> None:
    content = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_idx_set(directory: Path, suffix: str = ".gz", train: int = 12, test: int = 7) -> dict[str, Array]:
    parts = {
        "train-images": images(train, 28, 28, seed=1),
        "train-labels": labels(train).astype(np.uint8),
        "t10k-images": images(test, 28, 28, seed=2),
        "t10k-labels": labels(test).astype(np.uint8)[::-1],
    }
    for stem, array in parts.items():
        write_idx(directory / f"{IDX_FILES[stem]}{suffix}", array)
    return parts


CIFAR10_BATCHES = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]


def python2_batch(data: Array, targets: list[int], label_key: str = "labels") -> bytes:
    """A batch as Python 2 wrote it, opcode by opcode: byte-string keys, numpy.core, protocol 2."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<I", len(value)) + value

    def integer(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n" + text(b"u1") + integer(0) + integer(1) + b"\x87R"
    dtype += b"(" + integer(3) + text(b"|") + b"NNN" + integer(-1) + integer(-1) + integer(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + integer(0) + b"\x85" + text(b"b") + b"\x87R"
    array += b"(" + integer(1) + integer(data.shape[0]) + integer(data.shape[1]) + b"\x86" + dtype + b"\x89"
    array += text(data.tobytes()) + b"tb"
    listed = b"](" + b"".join(integer(target) for target in targets) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(label_key.encode()) + listed + b"u."


def cifar_batches(names: list[str], label_key: str, rows: int = 4) -> tuple[dict[str, bytes], dict[str, Array]]:
    data = {name: images(rows, 3072, seed=i) for i, name in enumerate(names)}
    return {n: python2_batch(d, [3, 1, 4, 1][:rows], label_key) for n, d in data.items()}, data


def write_tar(path: Path, folder: str, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def write_svhn(directory: Path, train: int = 6, test: int = 5) -> tuple[Array, Array]:
    x = {"train": images(32, 32, 3, train, seed=3), "test": images(32, 32, 3, test, seed=4)}
    for part, array in x.items():
        targets = (1 + np.arange(array.shape[3])[::-1] % 10).astype(np.uint8)[:, None]
        targets[0] = 10
        scipy.io.savemat(directory / f"{part}_32x32.mat", {"X": array, "y": targets}, do_compression=True)
    return x["train"], x["test"]


def npz_arrays(train: int = 6, test: int = 4, shape: tuple[int, ...] = (5, 4, 3)) -> dict[str, Any]:
    return {
        "x_train": images(train, *shape, seed=5),
        "y_train": labels(train, 3),
        "x_test": images(test, *shape, seed=6),
        "y_test": labels(test, 3),
    }


def write_png(path: Path, pixels: Array, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)


def assert_consistent(dataset: Dataset) -> None:
    for x, y in ((dataset.x_train, dataset.y_train), (dataset.x_test, dataset.y_test)):
        assert x.dtype == torch.uint8
        assert y.dtype == torch.int64
        assert x.is_contiguous()
        assert y.is_contiguous()
        assert len(x) == len(y)
        assert x.shape[1:] == dataset.x_test.shape[1:]
    assert len(dataset.mean) == len(dataset.std) == dataset.x_test.shape[1]


def test_digits_are_scaled_and_split_by_class() -> None:
    from sklearn.datasets import load_digits

    original = load_digits()
    digits = load("digits")
    assert_consistent(digits)
    assert digits.source == "scikit-learn"
    assert digits.x_train.shape == (1297, 1, 8, 8)
    assert digits.x_test.shape == (500, 1, 8, 8)
    assert torch.bincount(digits.y_test).tolist() == [50] * 10
    scaled = sorted(
        (bytes(int(v * 255 / 16 + 0.5) for v in row), int(y))
        for row, y in zip(original.data, original.target, strict=True)
    )
    ours = [(bytes(x.flatten().tolist()), int(y)) for x, y in zip(digits.x_train, digits.y_train, strict=True)]
    ours += [(bytes(x.flatten().tolist()), int(y)) for x, y in zip(digits.x_test, digits.y_test, strict=True)]
    assert sorted(ours) == scaled
    assert content_hash(load("digits")) == content_hash(digits)


def test_the_digits_split_never_changes() -> None:
    """A new split would silently change every number measured on the digits."""
    digits = load("digits")
    order = hashlib.sha256(digits.x_test.numpy().tobytes() + digits.y_test.numpy().tobytes()).hexdigest()
    assert order == "e9df3d3c51891fdd1275b47179b3bd27ac454fef0b493940e0d220458aea6585"


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("where", ["fashion-mnist", "FashionMNIST/raw", "fashion_mnist"])
def test_idx_sets_are_found_and_read(tmp_path: Path, suffix: str, where: str) -> None:
    parts = write_idx_set(tmp_path / where, suffix)
    dataset = load("fashion-mnist", str(tmp_path))
    assert_consistent(dataset)
    np.testing.assert_array_equal(dataset.x_train.numpy()[:, 0], parts["train-images"])
    np.testing.assert_array_equal(dataset.y_train.numpy(), parts["train-labels"])
    np.testing.assert_array_equal(dataset.x_test.numpy()[:, 0], parts["t10k-images"])
    np.testing.assert_array_equal(dataset.y_test.numpy(), parts["t10k-labels"])
    assert dataset.mean == (0.2860,)
    assert dataset.std == (0.3530,)
    assert dataset.classes[9] == "ankle boot"
    assert "12 of 60,000 training images, 7 of 10,000 test images" in dataset.source


def test_the_directory_of_the_set_itself_and_dotted_names_are_accepted(tmp_path: Path) -> None:
    directory = tmp_path / "mnist"
    parts = write_idx_set(directory, "")
    for name in IDX_FILES.values():
        (directory / name).rename(directory / name.replace("-idx", ".idx"))
    dataset = load("mnist", str(directory))
    np.testing.assert_array_equal(dataset.x_test.numpy()[:, 0], parts["t10k-images"])


def test_files_that_any_set_could_have_need_a_telling_directory(tmp_path: Path) -> None:
    write_idx_set(tmp_path)
    (tmp_path / "train").mkdir()
    assert all(entry.found is None for entry in catalogue(str(tmp_path)) if entry.name != "digits")


def test_computed_moments_equal_numpy(tmp_path: Path) -> None:
    parts = write_idx_set(tmp_path / "kmnist")
    dataset = load("kmnist", str(tmp_path))
    pixels = parts["train-images"].astype(np.float64) / 255
    assert dataset.mean == pytest.approx((pixels.mean(),), abs=1e-12)
    assert dataset.std == pytest.approx((pixels.std(),), abs=1e-12)


def test_moments_are_per_channel_over_many_images_and_safe_for_constants(tmp_path: Path) -> None:
    arrays = npz_arrays(train=9000, shape=(2, 3, 3))
    arrays["x_train"][..., 1] = 51
    np.savez(tmp_path / "own.npz", **arrays)
    dataset = load(str(tmp_path / "own.npz"))
    pixels = arrays["x_train"].astype(np.float64) / 255
    assert dataset.mean == pytest.approx(tuple(pixels.mean((0, 1, 2))), abs=1e-12)
    assert dataset.std[0] == pytest.approx(pixels[..., 0].std(), abs=1e-12)
    assert dataset.mean[1] == pytest.approx(0.2)
    assert dataset.std[1] == pytest.approx(1.0)


def damaged_idx(tmp_path: Path, damage: Callable[[bytes], bytes], suffix: str = "") -> str:
    directory = tmp_path / "mnist"
    write_idx_set(directory, suffix)
    path = directory / f"train-images-idx3-ubyte{suffix}"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError) as error:
        load("mnist", str(tmp_path))
    assert path.name in str(error.value)
    return str(error.value)


def test_damaged_idx_files_are_named_with_what_was_expected(tmp_path: Path) -> None:
    assert f"expected {16 + 12 * 784:,} bytes" in damaged_idx(tmp_path, lambda content: content[:-1])
    assert f"expected {16 + 12 * 784:,} bytes" in damaged_idx(tmp_path, lambda content: content + b"\0")
    assert "expected idx magic 00000803" in damaged_idx(tmp_path, lambda content: b"\0\0\x0d\x03" + content[4:])
    assert "found nothing" in damaged_idx(tmp_path, lambda content: b"")
    assert "magic" in damaged_idx(tmp_path, lambda content: content[:9])


def test_damaged_gzip_is_named(tmp_path: Path) -> None:
    assert "complete" in damaged_idx(tmp_path, lambda content: content[:-100], ".gz")
    assert "complete" in damaged_idx(tmp_path, lambda content: b"not gzip", ".gz")
    assert "complete" in damaged_idx(tmp_path, lambda c: c[:500] + bytes([c[500] ^ 255]) + c[501:], ".gz")


def test_a_missing_idx_file_and_unequal_lengths_are_told(tmp_path: Path) -> None:
    directory = tmp_path / "mnist"
    write_idx_set(directory)
    write_idx(directory / "t10k-labels-idx1-ubyte.gz", labels(6).astype(np.uint8))
    with pytest.raises(UserError, match=r"t10k.*7 images and 6 labels"):
        load("mnist", str(tmp_path))
    (directory / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UserError, match="t10k-labels-idx1-ubyte"):
        load("mnist", str(tmp_path))


def test_labels_outside_the_classes_are_refused(tmp_path: Path) -> None:
    write_idx_set(tmp_path / "mnist")
    write_idx(tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz", np.full(7, 10, np.uint8))
    with pytest.raises(UserError, match="labels from 0 to 9, found 0 to 10"):
        load("mnist", str(tmp_path))


def test_images_of_another_size_than_the_catalogue_says_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "cifar10.npz", **npz_arrays())
    with pytest.raises(UserError, match=r"expected images \[3, 32, 32\].*found \[3, 5, 4\]"):
        load("cifar10", str(tmp_path))


def test_a_file_with_the_official_count_must_have_the_official_content(tmp_path: Path) -> None:
    path = tmp_path / "t10k-labels-idx1-ubyte"
    write_idx(path, labels(20).astype(np.uint8))
    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    assert len(read_idx(path, 1, Official(20, md5))) == 20
    assert len(read_idx(path, 1, Official(21, "0" * 32))) == 20
    with pytest.raises(UserError, match=f"{path.name}.*expected md5 {'0' * 32}.*found {md5}"):
        read_idx(path, 1, Official(20, "0" * 32))
    recompressed = path.with_suffix(".gz")
    recompressed.write_bytes(gzip.compress(path.read_bytes(), compresslevel=1))
    assert len(read_idx(recompressed, 1, Official(20, md5))) == 20


def test_mnist_files_in_the_place_of_fashion_mnist_are_noticed(tmp_path: Path) -> None:
    """The mistake the checksums are there for: the two sets have the same file names and the same counts."""
    write_idx_set(tmp_path / "fashion-mnist")
    write_idx(tmp_path / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz", labels(10_000).astype(np.uint8))
    with pytest.raises(UserError, match="expected md5 15d484375f8d13e6eb1aabb0c3f46965"):
        load("fashion-mnist", str(tmp_path))


def test_check_official_ignores_unknown_files() -> None:
    check_official("anything", b"content", 1, None)


@pytest.mark.parametrize("packed", [False, True])
def test_cifar10_is_read_packed_and_unpacked(tmp_path: Path, packed: bool) -> None:
    files, data = cifar_batches(CIFAR10_BATCHES, "labels")
    if packed:
        write_tar(tmp_path / "cifar-10-python.tar.gz", "cifar-10-batches-py", {**files, "readme.html": b"hello"})
    else:
        (tmp_path / "cifar-10-batches-py").mkdir()
        for name, content in files.items():
            (tmp_path / "cifar-10-batches-py" / name).write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    dataset = load("cifar10", str(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before
    assert_consistent(dataset)
    assert dataset.x_train.shape == (20, 3, 32, 32)
    assert dataset.y_train.tolist() == [3, 1, 4, 1] * 5
    assert dataset.classes[6] == "frog"
    # row-major red, then green, then blue, as the CIFAR page says
    row = data["data_batch_3"][2]
    assert dataset.x_train[2 * 4 + 2, 1, 5, 7] == row[1024 + 5 * 32 + 7]
    np.testing.assert_array_equal(dataset.x_test.numpy().reshape(4, 3072), data["test_batch"])
    assert dataset.mean == (0.4914, 0.4822, 0.4465)


def test_cifar100_uses_fine_labels(tmp_path: Path) -> None:
    files, data = cifar_batches(["train", "test"], "fine_labels")
    write_tar(tmp_path / "cifar-100-python.tar.gz", "cifar-100-python", files)
    dataset = load("cifar100", str(tmp_path))
    np.testing.assert_array_equal(dataset.x_train.numpy().reshape(4, 3072), data["train"])
    assert len(dataset.classes) == len(set(dataset.classes)) == 100
    assert list(dataset.classes) == sorted(dataset.classes)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_batches_pickled_by_this_python_are_read_too(protocol: int) -> None:
    for data in (images(3, 3072), np.asfortranarray(images(3, 3072))):
        content = pickle.dumps({"data": data, "labels": [0, 1, 2]}, protocol=protocol)
        x, y = read_cifar_batch("batch", content, "labels")
        np.testing.assert_array_equal(x.reshape(3, 3072), data)
        assert y.tolist() == [0, 1, 2]


class Malicious:
    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.call


def test_pickles_that_call_anything_else_are_refused_before_they_act(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for call in (
        Malicious(os.mkdir, str(trace)),
        Malicious(eval, f"__import__('os').mkdir({str(trace)!r})"),
        Malicious(getattr, str, "join"),
        Malicious(np.save, str(trace), 1),
    ):
        content = pickle.dumps({"data": call, "labels": []})
        with pytest.raises(UserError, match=r"batch: cannot be read as a CIFAR batch: it asks for"):
            read_cifar_batch("batch", content, "labels")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["working-directory"]


def test_damaged_cifar_batches_are_told() -> None:
    good = python2_batch(images(2, 3072), [0, 1])
    for content, message in (
        (good[: len(good) // 2], "cannot be read as a CIFAR batch"),
        (b"", "cannot be read as a CIFAR batch"),
        (pickle.dumps({"labels": [0]}), "expected the keys data and labels, found labels"),
        (pickle.dumps([1, 2]), "found list"),
        (python2_batch(images(2, 3072), [0, 1], "coarse"), "found coarse, data"),
        (python2_batch(images(2, 100), [0, 1]), r"uint8 \[n, 3072\], found \[2, 100\]"),
        (pickle.dumps({"data": np.zeros((2, 3072)), "labels": [0, 1]}), "not of unsigned bytes"),
        (pickle.dumps({"data": b"pixels", "labels": [0, 1]}), "found another type"),
        (python2_batch(images(2, 3072), [0]), "2 images and 1 labels"),
        (pickle.dumps({"data": images(1, 3072), "labels": ["a"]}), "list of integers"),
    ):
        with pytest.raises(UserError, match=message):
            read_cifar_batch("batch", content, "labels")


def test_incomplete_cifar_archives_are_told(tmp_path: Path) -> None:
    files, _ = cifar_batches(CIFAR10_BATCHES, "labels")
    archive = tmp_path / "cifar-10-python.tar.gz"
    write_tar(archive, "cifar-10-batches-py", {n: c for n, c in files.items() if n != "data_batch_4"})
    with pytest.raises(UserError, match=r"cifar-10-python.tar.gz.*missing: data_batch_4"):
        load("cifar10", str(tmp_path))
    write_tar(archive, "cifar-10-batches-py", files)
    archive.write_bytes(archive.read_bytes()[:-5000])
    with pytest.raises(UserError, match=r"cifar-10-python.tar.gz: cannot be read"):
        load("cifar10", str(tmp_path))
    archive.write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"cifar-10-python.tar.gz: cannot be read"):
        load("cifar10", str(tmp_path))


def test_svhn_puts_images_first_and_ten_becomes_zero(tmp_path: Path) -> None:
    train, test = write_svhn(tmp_path)
    dataset = load("svhn", str(tmp_path))
    assert_consistent(dataset)
    assert dataset.y_train.tolist() == [0, 5, 4, 3, 2, 1]
    assert dataset.y_test.tolist() == [0, 4, 3, 2, 1]
    assert dataset.x_train[4, 2, 7, 9] == train[7, 9, 2, 4]
    np.testing.assert_array_equal(dataset.x_test.numpy(), np.moveaxis(test, (3, 2), (0, 1)))


def test_damaged_svhn_files_are_told(tmp_path: Path) -> None:
    write_svhn(tmp_path)
    path = tmp_path / "test_32x32.mat"
    x, y = images(32, 32, 3, 2), np.ones((2, 1), np.uint8)
    for fields, message in (
        ({"X": x}, "expected the variables X and y, found X"),
        ({"other": x}, "found neither"),
        ({"X": x.astype(float), "y": y}, "uint8 .*found float64"),
        ({"X": x[:, :, 0], "y": y}, r"found uint8 \[32, 32, 2\]"),
        ({"X": x, "y": y[:1]}, "2 images and 1 labels"),
        ({"X": x, "y": y + 10}, "found 11 to 11"),
    ):
        scipy.io.savemat(path, fields)
        with pytest.raises(UserError, match=f"{path.name}.*{message}"):
            load("svhn", str(tmp_path))
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(UserError, match=rf"{path.name}: cannot be read as a MATLAB file"):
        load("svhn", str(tmp_path))
    path.unlink()
    with pytest.raises(UserError, match=rf"missing: {path.name}"):
        load("svhn", str(tmp_path))


def test_cinic10_takes_train_and_test_folders(tmp_path: Path) -> None:
    root = tmp_path / "CINIC-10"
    for part, base in (("train", 10), ("valid", 100), ("test", 200)):
        for offset, name in enumerate(("airplane", "truck")):
            write_png(root / part / name / "a.png", np.full((32, 32, 3), base + offset, np.uint8))
    dataset = load("cinic10", str(tmp_path))
    assert dataset.x_train[:, 0, 0, 0].tolist() == [10, 11]
    assert dataset.x_test[:, 0, 0, 0].tolist() == [200, 201]
    assert dataset.mean == (0.4789, 0.4723, 0.4305)


@settings(max_examples=30, deadline=None)
@given(
    height=st.integers(4, 9),
    width=st.integers(4, 9),
    layout=st.sampled_from(["NHW", "NHWC1", "NHWC3", "NCHW1", "NCHW3"]),
    train=st.integers(0, 5),
)
def test_npz_layouts(
    tmp_path_factory: pytest.TempPathFactory, height: int, width: int, layout: str, train: int
) -> None:
    channels = 3 if layout.endswith("3") else 1
    expected = {"train": images(train, channels, height, width), "test": images(3, channels, height, width, seed=9)}
    stored = {
        f"x_{part}": x[:, 0] if layout == "NHW" else np.moveaxis(x, 1, 3) if "HWC" in layout else x
        for part, x in expected.items()
    }
    path = tmp_path_factory.mktemp("npz") / "own.npz"
    np.savez(path, **stored, y_train=labels(train, 2), y_test=labels(3, 2))  # type: ignore[arg-type]
    dataset = load(str(path))
    assert_consistent(dataset)
    np.testing.assert_array_equal(dataset.x_train.numpy(), expected["train"])
    np.testing.assert_array_equal(dataset.x_test.numpy(), expected["test"])
    assert dataset.classes == ("0", "1")
    assert dataset.name == "own"
    assert dataset.source == str(path)


def test_npz_arrays_in_fortran_order_become_contiguous(tmp_path: Path) -> None:
    arrays = npz_arrays(shape=(3, 5, 4))
    fortran: dict[str, Any] = {key: np.asfortranarray(value) for key, value in arrays.items()}
    np.savez(tmp_path / "own.npz", **fortran)
    dataset = load(str(tmp_path / "own.npz"))
    assert_consistent(dataset)
    np.testing.assert_array_equal(dataset.x_test.numpy(), arrays["x_test"])


def test_npz_class_names_and_label_columns(tmp_path: Path) -> None:
    arrays = npz_arrays()
    for names in (np.array(["cat", "dog", "eel"]), np.array([b"cat", b"dog", b"eel"])):
        np.savez(tmp_path / "own.npz", **{**arrays, "y_test": arrays["y_test"][:, None], "classes": names})
        dataset = load(str(tmp_path / "own.npz"))
        assert dataset.classes == ("cat", "dog", "eel")
        assert dataset.y_test.tolist() == [0, 1, 2, 0]


def test_npz_subsets_of_known_sets_keep_the_name_and_show_the_file(tmp_path: Path) -> None:
    arrays = npz_arrays(shape=(32, 32, 3))
    np.savez(tmp_path / "cifar10_6and4.npz", **arrays)
    np.savez(tmp_path / "cifar100_other.npz", **arrays)
    dataset = load("cifar10", str(tmp_path))
    assert dataset.name == "cifar10"
    assert dataset.classes[0] == "airplane"
    assert dataset.source.startswith(str(tmp_path / "cifar10_6and4.npz"))
    assert "6 of 50,000 training images, 4 of 10,000 test images" in dataset.source
    np.savez(tmp_path / "cifar10_again.npz", **arrays)
    with pytest.raises(UserError, match=r"cifar10_6and4.npz.*cifar10_again.npz"):
        load("cifar10", str(tmp_path))
    np.savez(tmp_path / "cifar10.npz", **arrays)
    assert str(tmp_path / "cifar10.npz") in load("cifar10", str(tmp_path)).source


def test_test_only_sets_take_their_moments_from_the_test_images(tmp_path: Path) -> None:
    arrays = npz_arrays(shape=(28, 28)) | {"x_train": np.zeros(0, np.uint8), "y_train": np.zeros(0)}
    np.savez(tmp_path / "kmnist_test.npz", **arrays)
    dataset = load("kmnist", str(tmp_path))
    assert dataset.x_train.shape == (0, 1, 28, 28)
    assert dataset.mean == pytest.approx(((arrays["x_test"] / 255.0).mean(),), abs=1e-12)


def test_damaged_npz_files_are_told(tmp_path: Path) -> None:
    good = npz_arrays()
    path = tmp_path / "own.npz"
    for change, message in (
        ({"y_test": None}, "missing: y_test"),
        ({"x_train": good["x_train"] / 255}, "x_train: expected uint8 pixels, found float64"),
        ({"y_train": good["y_train"] / 2}, r"y_train as integers \[n\], found float64"),
        ({"y_train": np.eye(6, dtype=int)}, r"y_train as integers \[n\], found int64 \[6, 6\]"),
        ({"y_train": good["y_train"][:-1]}, r"\(train\).*6 images and 5 labels"),
        ({"y_test": good["y_test"][:-1]}, r"\(test\).*4 images and 3 labels"),
        ({"x_test": good["x_test"][..., :2]}, r"1 or 3 channels, found \[4, 5, 4, 2\]"),
        ({"x_test": good["x_test"][:, :, :3]}, r"x_train like x_test, \[3, 5, 3\].*found \[3, 5, 4\]"),
        ({"x_test": good["x_test"][:0], "y_test": good["y_test"][:0]}, "x_test is empty"),
        ({"y_test": good["y_test"] - 1}, "labels from 0 to 2, found -1 to 2"),
        ({"classes": np.array(["cat", "dog"])}, "labels from 0 to 1, found 0 to 2"),
        ({"y_test": np.array([0, 1, 2, None])}, "without pickles"),
    ):
        np.savez(path, **{key: value for key, value in (good | change).items() if value is not None})
        with pytest.raises(UserError, match=f"own.npz.*{message}"):
            load(str(path))
    np.savez(path, **good)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"no zip", pickle.dumps(1)):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"own.npz: cannot be read as .npz"):
            load(str(path))
    with path.open("wb") as stream:
        np.save(stream, good["x_test"])
    with pytest.raises(UserError, match=r"own.npz"):
        load(str(path))


def test_folders_with_train_and_test(tmp_path: Path) -> None:
    root = tmp_path / "pets"
    pixels = {
        ("train", "dog", "b.PNG"): images(6, 5, 3, seed=1),
        ("train", "dog", "a.bmp"): images(6, 5, 3, seed=2),
        ("train", "cat", "nested/c.png"): images(6, 5, 3, seed=3),
        ("test", "eel", "d.png"): images(6, 5, 3, seed=4),
    }
    for (part, name, file), array in pixels.items():
        write_png(root / part / name / file, array)
    (root / "train" / "dog" / "notes.txt").write_text("not an image")
    (root / "train" / "dog" / ".hidden.png").write_text("not an image")
    dataset = load(str(root))
    assert_consistent(dataset)
    assert dataset.name == "pets"
    assert dataset.classes == ("cat", "dog", "eel")
    assert dataset.y_train.tolist() == [0, 1, 1]
    assert dataset.y_test.tolist() == [2]
    expected = np.stack([pixels["train", "cat", "nested/c.png"], pixels["train", "dog", "a.bmp"]])
    np.testing.assert_array_equal(dataset.x_train[:2].numpy().transpose(0, 2, 3, 1), expected)


def test_flat_folders_hold_out_a_fixed_fifth_of_each_class(tmp_path: Path) -> None:
    root = tmp_path / "flat"
    for label, (name, count) in enumerate((("a", 10), ("b", 7), ("c", 2), ("d", 1))):
        for i in range(count):
            write_png(root / name / f"{i}.png", np.full((4, 4), 20 * label + i, np.uint8))
    dataset = load("flat", str(tmp_path))
    assert dataset.x_train.shape[1:] == (1, 4, 4)
    assert torch.bincount(dataset.y_train, minlength=4).tolist() == [8, 6, 1, 1]
    assert torch.bincount(dataset.y_test, minlength=4).tolist() == [2, 1, 1, 0]
    values = dataset.x_train[:, 0, 0, 0].tolist() + dataset.x_test[:, 0, 0, 0].tolist()
    assert sorted(values) == sorted([*range(10), *range(20, 27), 40, 41, 60])
    assert [value // 20 for value in values] == dataset.y_train.tolist() + dataset.y_test.tolist()
    assert content_hash(load(str(root))) == content_hash(dataset)


def test_mixed_sizes_become_the_most_frequent_square_and_grey_stays_grey(tmp_path: Path) -> None:
    root = tmp_path / "mixed"
    photograph = images(30, 40, seed=1)
    for i in range(3):
        write_png(root / "a" / f"{i}.png", images(12, 10, seed=i))
    write_png(root / "b" / "0.png", photograph)
    write_png(root / "b" / "1.png", images(30, 41))
    dataset = load(str(root))
    assert dataset.x_train.shape[1:] == (1, 12, 12)
    resized = np.asarray(Image.fromarray(photograph).resize((12, 12), Image.Resampling.BILINEAR))
    everything = torch.cat([dataset.x_train, dataset.x_test]).numpy()
    assert any(np.array_equal(image[0], resized) for image in everything)
    write_png(root / "a" / "one-in-colour.png", images(12, 10, 3))
    assert load(str(root)).x_train.shape[1:] == (3, 12, 12)


def test_large_photographs_are_brought_down_only_if_sizes_differ(tmp_path: Path) -> None:
    root = tmp_path / "large"
    for i in range(2):
        write_png(root / "a" / f"{i}.png", images(70, 90, 3, seed=i))
    assert load(str(root)).x_train.shape[1:] == (3, 70, 90)
    write_png(root / "a" / "2.png", images(20, 20, 3))
    assert load(str(root)).x_train.shape[1:] == (3, 64, 64)


def test_images_of_every_kind_become_bytes(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    deep = (np.arange(16, dtype=np.uint16) * 4096 + 7).reshape(4, 4)
    Image.fromarray(deep).save(path)
    np.testing.assert_array_equal(read_image(path)[0], np.arange(0, 256, 16).reshape(4, 4))
    colour = images(4, 4, 3)
    Image.fromarray(colour).convert("P").save(path, transparency=bytes(range(200)))
    assert read_image(path).shape == (3, 4, 4)
    Image.fromarray(images(4, 4, 2), "LA").save(path)
    assert read_image(path).shape == (1, 4, 4)
    Image.fromarray(images(4, 4, 4), "RGBA").save(path)
    assert read_image(path).shape == (3, 4, 4)
    Image.fromarray(colour).save(path)
    luma = colour.astype(float) @ [0.299, 0.587, 0.114]
    assert np.abs(read_image(path, grey=True)[0] - luma).max() <= 0.51
    floating = tmp_path / "image.tiff"
    Image.fromarray(np.zeros((4, 4), np.float32)).save(floating)
    with pytest.raises(UserError, match=r"image.tiff: expected 8- or 16-bit pixels"):
        read_image(floating)


def test_photographs_taken_sideways_are_turned_upright(tmp_path: Path) -> None:
    path = tmp_path / "photos" / "a" / "photo.png"
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera lay on its side: turn clockwise
    upright = images(6, 4)
    write_png(path, np.rot90(upright), exif=exif)
    np.testing.assert_array_equal(read_image(path)[0], upright)
    write_png(path.with_name("screen.png"), upright)
    assert load(str(tmp_path / "photos")).x_train.shape[1:] == (1, 6, 4)


@pytest.mark.parametrize(("kind", "options"), [("png", {}), ("tiff", {"compression": "tiff_lzw"})])
def test_sideways_photographs_of_one_size_keep_it(tmp_path: Path, kind: str, options: dict[str, str]) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = images(6, 4)
    for number in range(2):
        write_png(tmp_path / "photos" / "a" / f"{number}.{kind}", np.rot90(upright), exif=exif, **options)
    dataset = load(str(tmp_path / "photos"))
    np.testing.assert_array_equal(dataset.x_train[0, 0].numpy(), upright)


def test_what_is_transparent_is_white(tmp_path: Path) -> None:
    path = tmp_path / "icon.png"
    alpha = np.array([[0, 255], [128, 0]], np.uint8)
    black = np.zeros((2, 2), np.uint8)
    Image.fromarray(np.dstack([black, black, black, alpha]), "RGBA").save(path)
    np.testing.assert_array_equal(read_image(path), np.broadcast_to(255 - alpha, (3, 2, 2)))
    Image.fromarray(np.dstack([black, alpha]), "LA").save(path)
    np.testing.assert_array_equal(read_image(path)[0], 255 - alpha)
    palette = Image.fromarray(black, "P")
    palette.putpalette([10, 20, 30])
    palette.save(path, transparency=bytes([0]))
    assert (read_image(path) == 255).all()


def test_broken_folders_are_told(tmp_path: Path) -> None:
    root = tmp_path / "own"
    root.mkdir()
    with pytest.raises(UserError, match="own: expected one folder of images a class, found none"):
        load(str(root))
    (root / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty: expected images \(.*\.png.*\), found none"):
        load(str(root))
    write_png(root / "empty" / "a.png", images(4, 4))
    with pytest.raises(UserError, match="at least two images"):
        load(str(root))
    write_png(root / "empty" / "b.png", images(40, 40))
    broken = root / "empty" / "b.png"
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(UserError, match=r"b.png: not a readable image"):
        load(str(root))
    broken.write_bytes(b"text")
    with pytest.raises(UserError, match=r"b.png: not a readable image"):
        load(str(root))
    (root / "train").mkdir()
    with pytest.raises(UserError, match="expected the folder 'test' beside 'train'"):
        load(str(root))


def test_places_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    working = tmp_path / "working-directory"
    sources = {name: tmp_path / name for name in ("argument", "environment")} | {"torchvision": working / "data"}
    for number, place in enumerate(sources.values()):
        place.mkdir()
        arrays = npz_arrays(test=1 + number, shape=(28, 28))
        np.savez(place / "mnist.npz", **arrays)
    monkeypatch.setenv("SEMIFED_DATA", str(sources["environment"]))
    assert len(load("mnist", str(sources["argument"])).x_test) == 1
    assert len(load("mnist").x_test) == 2
    (sources["argument"] / "mnist.npz").unlink()
    assert len(load("mnist", str(sources["argument"])).x_test) == 2
    monkeypatch.delenv("SEMIFED_DATA")
    assert len(load("mnist").x_test) == 3
    (sources["torchvision"] / "mnist.npz").unlink()
    write_idx_set(tmp_path / "system" / "mnist", test=9)
    assert len(load("mnist").x_test) == 9


def test_missing_and_unknown_sets_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMIFED_DATA", str(tmp_path / "gone"))
    with pytest.raises(UserError) as missing:
        load("cinic10", str(tmp_path))
    for part in (str(tmp_path), str(tmp_path / "gone"), str(tmp_path / "system"), "DataShare"):
        assert part in str(missing.value)
    with pytest.raises(UnknownDataset, match="did you mean 'cifar100'") as unknown:
        load("cifar-100", str(tmp_path))
    assert "path to an .npz" in str(unknown.value)
    with pytest.raises(UserError, match=r"nowhere\.npz: expected an \.npz file or a folder of images, found nothing"):
        load(str(tmp_path / "nowhere.npz"))
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(UserError, match="found another file"):
        load(str(tmp_path / "text.txt"))
    with pytest.raises(UserError, match="data = 'no-such-directory'"):
        load("digits", "no-such-directory")


def test_the_catalogue_lists_without_reading(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"never opened")
    (tmp_path / "svhn_tiny.npz").write_bytes(b"never opened")
    entries = {entry.name: entry for entry in catalogue(str(tmp_path))}
    assert " ".join(entries) == "digits fashion-mnist mnist kmnist cifar10 cifar100 svhn cinic10"
    assert entries["digits"].found == "ships with scikit-learn"
    assert entries["digits"].summary == "8x8 grey, 10 classes, 1,297/500"
    assert entries["cifar10"].found == str(tmp_path / "cifar-10-python.tar.gz")
    assert entries["svhn"].found == str(tmp_path / "svhn_tiny.npz")
    assert entries["cifar100"].found is None
    assert entries["svhn"].summary == "32x32 colour, 10 classes, 73,257/26,032"
    assert all(entry.how for entry in entries.values())


def test_content_hash_sees_pixels_labels_and_shapes_but_not_places() -> None:
    digits = load("digits")
    original = content_hash(digits)
    assert content_hash(digits._replace(name="other", source="elsewhere")) == original
    pixel = digits.x_test.clone()
    pixel[7, 0, 3, 3] ^= 1
    label = digits.y_train.clone()
    label[5] = (label[5] + 1) % 10
    changed = [
        digits._replace(x_test=pixel),
        digits._replace(y_train=label),
        digits._replace(x_train=digits.x_train.reshape(1297, 1, 4, 16)),
        digits._replace(x_train=digits.x_train.flip(0)),
    ]
    assert len({original, *map(content_hash, changed)}) == 5
    strided = digits.x_test.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)
    assert content_hash(digits._replace(x_test=strided)) == original


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(0, 3))
def test_stratified_split_is_a_cover_with_the_counts_asked_for(values: list[int], seed: int) -> None:
    y = np.array(values, np.int64)
    counts = {label: values.count(label) // 2 for label in range(5)}
    kept, held = stratified_split(y, counts, seed)
    assert sorted([*kept, *held]) == list(range(len(values)))
    assert list(kept) == sorted(kept)
    assert list(held) == sorted(held)
    assert all(np.count_nonzero(y[held] == label) == counts[label] for label in range(5))


def test_image_files_are_sorted_and_complete(tmp_path: Path) -> None:
    for name in ("b.JPG", "a.jpeg", "sub/c.tif", ".cache/d.png", "e.csv"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = image_files(tmp_path / "images")
    assert [str(p.relative_to(tmp_path / "images")) for p in found] == ["a.jpeg", "b.JPG", "sub/c.tif"]


def test_owners_of_an_npz_reach_the_data_set(tmp_path: Path) -> None:
    arrays = npz_arrays()
    np.savez(tmp_path / "own.npz", **arrays, owner_train=np.array([0, 2, 1, 1, 0, 2]))
    owner = load(str(tmp_path / "own.npz")).owner
    assert owner is not None
    assert owner.tolist() == [0, 2, 1, 1, 0, 2]
    for wrong in (np.zeros(5, np.int64), np.zeros(6), np.array([0, 1, -1, 0, 0, 0])):
        np.savez(tmp_path / "own.npz", **arrays, owner_train=wrong)
        with pytest.raises(UserError, match="expected owner_train"):
            load(str(tmp_path / "own.npz"))


def test_a_folder_a_client(tmp_path: Path) -> None:
    for client, counts in (("berlin", (1, 2)), ("aachen", (3, 0))):
        for name, count in zip(("cat", "dog"), counts, strict=True):
            for index in range(count):
                write_png(tmp_path / "clients" / client / name / f"{index}.png", images(4, 4, seed=index))
    for name in ("cat", "dog"):
        write_png(tmp_path / "test" / name / "0.png", images(4, 4, seed=7))
    dataset = load(str(tmp_path))
    assert_consistent(dataset)
    assert dataset.owner is not None
    assert dataset.owner.tolist() == [0, 0, 0, 1, 1, 1]  # aachen, then berlin
    assert dataset.y_train.tolist() == [0, 0, 0, 0, 1, 1]
    assert len(dataset.x_test) == 2


def test_a_folder_of_no_clients_is_told(tmp_path: Path) -> None:
    (tmp_path / "clients").mkdir()
    (tmp_path / "test" / "cat").mkdir(parents=True)
    Image.new("L", (8, 8)).save(tmp_path / "test" / "cat" / "one.png")
    with pytest.raises(UserError, match="clients: expected a folder for each client, found none"):
        read_image_folder(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are text")
def test_a_class_whose_name_is_no_text_is_told_before_the_training(tmp_path: Path) -> None:
    for name in ("cat", os.fsdecode(b"caf\xe9")):
        write_png(tmp_path / name / "0.png", images(4, 4))
    with pytest.raises(UserError, match=r"the class folder 'caf\\udce9' has a name that is not UTF-8; rename it"):
        read_image_folder(tmp_path)
