"""The compiled kernels: built once for this processor by the C compiler that is there, kept, and tried before use.

No result depends on them but speed. Where there is no compiler, where the processor does not let their instructions
through, or with SEMIFED_KERNELS=off, PyTorch's own kernels compute the same bits.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

SOURCES = tuple(Path(__file__).with_name(name) for name in ("averages.c", "normalise.c"))
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")
PATIENCE = 60  # seconds

_AT, _COUNT, _SINGLE, _DOUBLE, _KIND = (
    *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_double, ctypes.c_int),
)
SIGNATURES: dict[str, Sequence[type]] = {
    "statistics": (_AT, _COUNT, _COUNT, _DOUBLE, *[_AT] * 6, _SINGLE, _AT, _AT),
    "apply": (_AT, _COUNT, _COUNT, _AT, _AT, _AT, _KIND, _SINGLE, _AT),
    "unapply": (_AT, _AT, _AT, _COUNT, _COUNT, *[_AT] * 5, _KIND, _SINGLE, *[_AT] * 6),
    "apply_pooled": (_AT, *[_COUNT] * 4, *[_AT] * 5),
    "unapply_pooled": (*[_AT] * 4, *[_COUNT] * 4, *[_AT] * 8),
    "weighted_sum": (_AT, _AT, _COUNT, _COUNT, _AT),
    "squared_distance": (_AT, _AT, _COUNT, _AT),
}


class Unavailable(Exception):
    """Why there are no kernels here."""


@cache
def library() -> ctypes.CDLL | Unavailable:
    """The kernels, or why PyTorch's own are used."""
    try:
        return loaded(built())
    except Unavailable as reason:
        return reason


def built() -> Path:
    """The library for this source, compiler and processor; compiled if it is not there."""
    if os.environ.get("SEMIFED_KERNELS", "").lower() in ("off", "0", "no", "false"):
        raise Unavailable("SEMIFED_KERNELS says so")
    if sys.platform not in ("linux", "darwin"):
        raise Unavailable(f"they are not built on {sys.platform}")
    compiler = _compiler()
    try:
        described = "\n".join((*FLAGS, compiler, str(Path(compiler).stat().st_mtime_ns), _instructions()))
        sources = b"".join(source.read_bytes() for source in SOURCES)
        key = hashlib.sha256(sources + described.encode()).hexdigest()[:16]
        place = _place() / f"kernels-{key}.so"
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _refuse_others(place.parent)
        if place.exists():
            _refuse_others(place)
            return place
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            made = Path(folder) / place.name
            _compile(compiler, made)
            _try(made)
            made.chmod(0o700)
            made.replace(place)  # at once: other processes may be doing the same
    except OSError as failed:
        raise Unavailable(f"they cannot be kept: {failed}") from failed
    except subprocess.TimeoutExpired as failed:
        raise Unavailable(f"{compiler} or what it made did not end within {PATIENCE} seconds") from failed
    return place


def loaded(path: Path) -> ctypes.CDLL:
    """The functions with their types."""
    try:
        found = ctypes.CDLL(str(path))
    except OSError as failed:
        raise Unavailable(f"they cannot be loaded: {failed}") from failed
    for name, types in SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = types, None
    return found


def _compiler() -> str:
    for name in (os.environ.get("CC", ""), *COMPILERS):
        if name and (found := shutil.which(name)):
            return found
    raise Unavailable(f"there is no C compiler ({', '.join(COMPILERS)}, or $CC)")


def _instructions() -> str:
    """What the processor can do, as far as the system says; a home directory may be shared by several machines."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    known = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join((platform.machine(), *sorted(set(known))))


def _place() -> Path:
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as failed:
        raise Unavailable("there is no home directory to keep them in") from failed
    return root / "semifed" / "kernels"


def _refuse_others(path: Path) -> None:
    """What is loaded runs as this user: nobody but root and this user's own group may write it, or replace a folder
    on the way to it."""
    for one in (path, *path.absolute().parents):
        about = one.stat()
        others = about.st_mode & (0o002 if about.st_gid == os.getgid() else 0o022)
        if (others and not about.st_mode & stat.S_ISVTX) or about.st_uid not in (os.getuid(), 0):
            raise Unavailable(f"others may write {one}")


def _compile(compiler: str, made: Path) -> None:
    done = _run([compiler, *FLAGS, *map(str, SOURCES), "-o", str(made), "-lm"])
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        wrong = next((line for line in lines if "error" in line), *(lines[:1] or [f"code {done.returncode}"]))
        raise Unavailable(f"{compiler} does not compile them: {wrong}")


def _try(made: Path) -> None:
    """Call each function in another process: a virtual machine may name instructions it does not let through."""
    done = _run([sys.executable, "-I", __file__, str(made)])
    if done.returncode:
        raise Unavailable(f"the processor does not run them (code {done.returncode})")


def _run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=PATIENCE)


def _call_all(path: Path) -> None:
    """On two images of 4 x 4 pixels, 112 channels, and on numbers that fill no block; all zero."""
    found = loaded(path)
    rows, channels = 32, 112
    room = [(ctypes.c_float * (rows * channels))() for _ in range(16)]
    found.statistics(room[0], rows, channels, 1e-5, *room[1:7], 0.1, *room[7:9])
    found.apply(room[0], rows, channels, *room[1:4], 1, 0.0, room[4])
    found.unapply(*room[:3], rows, channels, *room[3:8], 1, 0.0, *room[8:14])
    found.apply_pooled(room[0], 2, 4, 4, channels, *room[1:6])
    found.unapply_pooled(*room[:4], 2, 4, 4, channels, *room[4:12])
    models, size = 6, rows * channels - 1
    places = (ctypes.c_void_p * models)(*map(ctypes.addressof, room[:models]))
    found.weighted_sum(places, (ctypes.c_double * models)(), models, size, room[models])
    found.squared_distance(room[0], room[1], size, (ctypes.c_double * 1)())


if __name__ == "__main__":
    _call_all(Path(sys.argv[1]))
