"""Readers of the file formats in which image data sets are published.

Every reader returns the same `Arrays` or tells, with the name of the file, what it expected and what it
found. Files are untrusted: nothing in them is executed, and nothing is unpacked to disk.
"""

import gzip
import hashlib
import io
import lzma
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from semifed.errors import UserError

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]

SPLIT_SEED = 20_240_229
DAMAGE = (OSError, EOFError, ValueError, KeyError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)


class Arrays(NamedTuple):
    """A data set as read: images uint8 [n, c, h, w], labels int64 [n], names and owners if the files give them."""

    x_train: Pixels
    y_train: Labels
    x_test: Pixels
    y_test: Labels
    classes: tuple[str, ...] | None = None
    owner: Labels | None = None  # client of each training image, where the files say so
    undivided: bool = False  # nobody said which are to be tested on: we held some out


class Official(NamedTuple):
    """What a published file holds: its number of images and the md5 of its (uncompressed) content."""

    images: int
    md5: str


def check_official(where: str, content: bytes, count: int, official: Official | None) -> None:
    """Refuse a file with the published number of images but not the published content; subsets pass."""
    if official is None or count != official.images:
        return
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != official.md5:
        raise UserError(f"{where}: not the official file: expected md5 {official.md5} of its content, found {found}")


def _paired(where: str, x: Pixels, y: Labels) -> None:
    if len(x) != len(y):
        raise UserError(f"{where}: expected one label an image, found {len(x)} images and {len(y)} labels")


def stratified_split(labels: Labels, test_counts: Mapping[int, int], seed: int = SPLIT_SEED) -> tuple[Labels, Labels]:
    """Ascending train and test positions, `test_counts[c]` of class c for the test, the same for ever."""
    test: list[Labels] = []
    for label in np.unique(labels):
        # RandomState, unlike Generator, promises the same stream in every NumPy to come
        members = np.random.RandomState([seed, int(label)]).permutation(np.flatnonzero(labels == label))
        test.append(members[: test_counts[int(label)]])
    chosen = np.sort(np.concatenate(test))
    return np.setdiff1d(np.arange(len(labels)), chosen, assume_unique=True), chosen


IDX_FILES = {
    "train-images": "train-images-idx3-ubyte",
    "train-labels": "train-labels-idx1-ubyte",
    "t10k-images": "t10k-images-idx3-ubyte",
    "t10k-labels": "t10k-labels-idx1-ubyte",
}


def idx_file(directory: Path, stem: str) -> Path | None:
    """The idx file of `IDX_FILES` in a directory, plain or .gz, also with the older dot before `idx`."""
    name = IDX_FILES[stem]
    spellings = (name, name.replace("-idx", ".idx"))
    return next((p for s in spellings for p in (directory / s, directory / f"{s}.gz") if p.is_file()), None)


def read_idx(path: Path, rank: int, official: Official | None = None) -> Pixels:
    """The unsigned bytes of one idx file of the given number of dimensions."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except DAMAGE as error:
        raise UserError(f"{path}: cannot be read ({error}); expected a complete idx file") from None
    header = 4 + 4 * rank
    magic = 0x0800 + rank
    if len(content) < header or struct.unpack(">I", content[:4])[0] != magic:
        found = content[:4].hex() or "nothing"
        raise UserError(f"{path}: expected idx magic {magic:08x} (unsigned bytes, {rank}-d), found {found}")
    shape = struct.unpack(f">{rank}I", content[4:header])
    expected = header + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        sizes = "x".join(map(str, shape))
        raise UserError(f"{path}: expected {expected:,} bytes for {sizes}, found {len(content):,}; is it cut short?")
    check_official(str(path), content, shape[0], official)
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def read_idx_set(directory: Path, official: Mapping[str, Official]) -> Arrays:
    """The four idx files of a directory."""
    parts: dict[str, Pixels] = {}
    for stem, name in IDX_FILES.items():
        path = idx_file(directory, stem)
        if path is None:
            raise UserError(f"{directory}: expected {name} or {name}.gz beside the other idx files")
        parts[stem] = read_idx(path, 3 if stem.endswith("images") else 1, official.get(stem))
    arrays = Arrays(
        parts["train-images"][:, None],
        parts["train-labels"].astype(np.int64),
        parts["t10k-images"][:, None],
        parts["t10k-labels"].astype(np.int64),
    )
    _paired(f"{directory} (train)", arrays.x_train, arrays.y_train)
    _paired(f"{directory} (t10k)", arrays.x_test, arrays.y_test)
    return arrays


class _PickledDtype:
    """Stands in for numpy.dtype while a pickle is read: keeps the type code, ignores everything else."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        self.code = code.decode("ascii") if isinstance(code, bytes) else code

    def __setstate__(self, _: object) -> None: ...


class _PickledArray:
    """Stands in for numpy.ndarray, so that no pickle reaches NumPy's own reconstruction in C."""

    def __init__(self, *_: object) -> None:
        self.value: Pixels | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, buffer = state
        self.value = _bytes_array(buffer, dtype, shape, "F" if fortran else "C").value


def _bytes_array(buffer: object, dtype: _PickledDtype, shape: tuple[int, ...], order: Any = "C") -> _PickledArray:
    if not (isinstance(buffer, (bytes, bytearray)) and isinstance(dtype, _PickledDtype) and dtype.code == "u1"):
        raise pickle.UnpicklingError("an array that is not of unsigned bytes")
    array = _PickledArray()
    array.value = np.frombuffer(buffer, np.uint8).reshape(shape, order="F" if order == "F" else "C")
    return array


def _latin1(text: str, _encoding: str) -> bytes:
    return text.encode("latin1")


class _ArraysOnly(pickle.Unpickler):
    _ALLOWED: Mapping[tuple[str, str], Any] = {
        ("numpy", "ndarray"): _PickledArray,
        ("numpy", "dtype"): _PickledDtype,
        ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy.core.numeric", "_frombuffer"): _bytes_array,
        ("numpy._core.numeric", "_frombuffer"): _bytes_array,
        ("_codecs", "encode"): _latin1,  # how protocol 2 writes bytes
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no image batch needs")
        return self._ALLOWED[module, name]


def read_cifar_batch(
    where: str, content: bytes, label_key: str, official: Official | None = None
) -> tuple[Pixels, Labels]:
    """Images [n, 3, 32, 32] and labels of one pickled batch; only byte arrays and plain values are made."""
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise UserError(f"{where}: cannot be read as a CIFAR batch: {error}") from None
    fields: dict[object, Any] = {}
    if isinstance(batch, dict):
        fields = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    if "data" not in fields or label_key not in fields:
        found = ", ".join(sorted(map(str, fields))) or type(batch).__name__
        raise UserError(f"{where}: expected the keys data and {label_key}, found {found}")
    data, labels = fields["data"], fields[label_key]
    if not isinstance(data, _PickledArray) or data.value is None or data.value.ndim != 2 or data.value.shape[1] != 3072:
        shape = "another type" if not isinstance(data, _PickledArray) or data.value is None else list(data.value.shape)
        raise UserError(f"{where}: expected 'data' as uint8 [n, 3072], found {shape}")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise UserError(f"{where}: expected '{label_key}' as a list of integers")
    x, y = data.value.reshape(-1, 3, 32, 32), np.array(labels, np.int64)
    _paired(where, x, y)
    check_official(where, content, len(x), official)
    return x, y


def read_cifar_set(
    path: Path, train: Sequence[str], test: str, label_key: str, official: Mapping[str, Official]
) -> Arrays:
    """A CIFAR data set from its unpacked directory or from the published .tar.gz, which is not unpacked."""
    wanted = (*train, test)
    contents: dict[str, bytes] = {}
    try:
        if path.is_dir():
            contents = {name: (path / name).read_bytes() for name in wanted if (path / name).is_file()}
        else:
            with tarfile.open(path, "r:*") as archive:
                for member in archive:
                    name = Path(member.name).name
                    if name in wanted and (stream := archive.extractfile(member)) is not None:
                        contents[name] = stream.read()
    except (*DAMAGE, tarfile.TarError) as error:
        raise UserError(f"{path}: cannot be read as a CIFAR archive ({error}); is it cut short?") from None
    missing = [name for name in wanted if name not in contents]
    if missing:
        raise UserError(f"{path}: expected the batches {', '.join(wanted)}; missing: {', '.join(missing)}")
    batches = [read_cifar_batch(f"{path}: {n}", contents.pop(n), label_key, official.get(n)) for n in wanted]
    x_train = np.concatenate([x for x, _ in batches[:-1]])
    y_train = np.concatenate([y for _, y in batches[:-1]])
    return Arrays(x_train, y_train, *batches[-1])


def read_svhn_file(path: Path, official: Official | None = None) -> tuple[Pixels, Labels]:
    """Images [n, 3, h, w] and labels of one cropped-digit .mat file; its label 10 is the digit 0."""
    from scipy.io import loadmat  # slow to import and needed by this set alone

    try:
        content = path.read_bytes()
        fields = loadmat(io.BytesIO(content), variable_names=("X", "y"))
    except Exception as error:  # SciPy reports damage in many ways
        raise UserError(f"{path}: cannot be read as a MATLAB file ({error}); is it complete?") from None
    if "X" not in fields or "y" not in fields:
        found = [key for key in fields if not key.startswith("__")]
        raise UserError(f"{path}: expected the variables X and y, found {', '.join(found) or 'neither'}")
    x, y = fields["X"], fields["y"].reshape(-1)
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[2] != 3:
        raise UserError(f"{path}: expected X as uint8 [h, w, 3, n], found {x.dtype} {list(x.shape)}")
    if not np.all(np.isin(y, np.arange(11))):
        raise UserError(f"{path}: expected the labels 1 to 10 in y, found {y.min()} to {y.max()}")
    x = np.ascontiguousarray(x.transpose(3, 2, 0, 1))
    _paired(str(path), x, y)
    check_official(str(path), content, len(x), official)
    return x, y.astype(np.int64) % 10


def read_svhn_set(directory: Path, official: Mapping[str, Official]) -> Arrays:
    """SVHN's train_32x32.mat and test_32x32.mat."""
    names = ("train_32x32.mat", "test_32x32.mat")
    for name in names:
        if not (directory / name).is_file():
            raise UserError(f"{directory}: expected {' and '.join(names)}; missing: {name}")
    (x_train, y_train), (x_test, y_test) = (read_svhn_file(directory / n, official.get(n)) for n in names)
    return Arrays(x_train, y_train, x_test, y_test)


def _channels_first(where: str, x: NDArray[Any]) -> Pixels:
    if x.dtype != np.uint8:
        raise UserError(f"{where}: expected uint8 pixels, found {x.dtype}")
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[3] in (1, 3):
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    if x.ndim == 4 and x.shape[1] in (1, 3):
        return x
    raise UserError(f"{where}: expected shape NHW, NHWC or NCHW with 1 or 3 channels, found {list(x.shape)}")


def read_npz(path: Path) -> Arrays:
    """A data set from {x,y}_{train,test}, optionally `classes` and `owner_train`; training may be empty."""
    fields: dict[str, NDArray[Any]] = {}
    wanted = ("x_train", "y_train", "x_test", "y_test")
    try:
        # opened here because NumPy leaves the file open when it is no archive
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            fields = {key: archive[key] for key in (*wanted, "classes", "owner_train") if key in archive.files}
    except (*DAMAGE, TypeError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read as .npz without pickles ({error})") from None
    missing = [key for key in wanted if key not in fields]
    if missing:
        raise UserError(f"{path}: expected the arrays {', '.join(wanted)}; missing: {', '.join(missing)}")
    images: dict[str, Pixels] = {}
    labels: dict[str, Labels] = {}
    for part in ("train", "test"):
        y = fields[f"y_{part}"]
        if y.ndim == 2 and y.shape[1] == 1:
            y = y[:, 0]
        if y.ndim != 1 or (len(y) and y.dtype.kind not in "iu"):
            raise UserError(f"{path}: expected y_{part} as integers [n], found {y.dtype} {list(y.shape)}")
        labels[part] = y.astype(np.int64)
    images["test"] = _channels_first(f"{path}: x_test", fields["x_test"])
    if len(images["test"]) == 0:
        raise UserError(f"{path}: x_test is empty; only the training arrays may be")
    geometry = images["test"].shape[1:]
    if fields["x_train"].size:
        images["train"] = _channels_first(f"{path}: x_train", fields["x_train"])
    else:
        images["train"] = np.zeros((0, *geometry), np.uint8)
    if images["train"].shape[1:] != geometry:
        found = list(images["train"].shape[1:])
        raise UserError(f"{path}: expected x_train like x_test, {list(geometry)} (c, h, w), found {found}")
    for part in ("train", "test"):
        _paired(f"{path} ({part})", images[part], labels[part])
    classes = fields.get("classes")
    names = None if classes is None else tuple(_text(name) for name in classes.reshape(-1).tolist())
    owner = _owner(path, fields.get("owner_train"), len(labels["train"]))
    return Arrays(images["train"], labels["train"], images["test"], labels["test"], names, owner)


def _owner(path: Path, owner: NDArray[Any] | None, count: int) -> Labels | None:
    if owner is None:
        return None
    if owner.shape != (count,) or owner.dtype.kind not in "iu" or owner.min(initial=0) < 0:
        found = f"{owner.dtype} {list(owner.shape)}"
        raise UserError(f"{path}: expected owner_train as client numbers from 0 on, [{count}], found {found}")
    return owner.astype(np.int64)


def _text(name: object) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
