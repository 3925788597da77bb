"""How a process that trains small networks should run."""

import ctypes
import os
import platform
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT = 2**29  # bytes of freed memory at most
_TRIAL = """
import torch
layer = torch.nn.Conv2d(3, 16, 3)
with torch.autocast("cpu", torch.bfloat16):
    layer(torch.zeros(2, 3, 8, 8)).sum().backward()
"""
_LARGEST = 2**25  # bytes of one block that stays; larger ones, such as data sets, go back at once


def settle() -> None:
    """One thread, memory that is freed stays with the process, and a GPU that repeats itself.

    Two threads are no faster than one on small networks, and many times slower beside other processes.
    """
    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False  # ten bits of a number would be more than its last digits
    keep_freed_memory()


def keep_freed_memory() -> bool:
    """Ask glibc, if that is the C library here, not to hand freed memory back; says whether it agreed.

    A step frees and asks for tens of megabytes. By default they go back to the system and every page is touched anew,
    which costs OpenFL's steps a twentieth of their time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _KEPT)) and bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST))


def available_cores() -> int:
    """How many cores this process may use: those it may run on, or fewer where it has a share of their time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, time_share(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")) or cores)


def time_share(groups: Path, own: Path) -> int | None:
    """How many cores' time a container has, rounded up (docker --cpus, limits of Kubernetes); None without a limit."""
    try:
        name = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return None
    shares = []
    group = groups / name.strip("/")
    for directory in (group, *group.parents):
        if directory == groups.parent:
            break
        with suppress(OSError, ValueError):  # "max 100000" where there is no limit; the topmost group has no such file
            quota, period = map(int, (directory / "cpu.max").read_text().split())
            shares.append(max(1, -(-quota // period)))
    return min(shares, default=None)


@cache
def computes_bfloat16(device: str) -> bool:
    """Whether networks can compute in bfloat16.

    A virtual machine may name instructions that it does not let through, and the first product ends the process: so
    another process tries one.
    """
    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return subprocess.run([sys.executable, "-c", _TRIAL], capture_output=True).returncode == 0


@cache
def processor() -> str:
    """What the system calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    named = named_in(cpuinfo.read_text()) if cpuinfo.exists() else None
    return named or platform.processor() or platform.machine()


def named_in(cpuinfo: str) -> str | None:
    """The first processor of such a file, with family and model: virtual machines give unlike ones the same name."""
    first = cpuinfo.partition("\n\n")[0]
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    if "model name" not in told:
        return None
    kind = [f"{word} {told[key]}" for word, key in (("family", "cpu family"), ("model", "model")) if key in told]
    return " ".join([told["model name"], *kind])
