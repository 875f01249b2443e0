"""CPU threads of the command and the server: how many, and what they do while they wait.

This module must not import torch: the OpenMP library under it reads the environment once, when it
is loaded.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def wait_passively() -> None:
    """Let idle threads sleep instead of spin, unless the user set ``OMP_WAIT_POLICY``.

    Spinning threads slow down every other process on the machine, and each other where several
    commands run. GNU's and LLVM's OpenMP both read this variable, and child processes inherit it.
    In a process that has loaded torch it would come too late, so nothing is changed there.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def default_threads(processes: int = 1) -> int | None:
    """Return the threads of each of several processes, or None if ``OMP_NUM_THREADS`` says it."""
    return None if os.environ.get("OMP_NUM_THREADS") else max(1, usable_cpus() // processes)


def usable_cpus(root: Path = Path("/")) -> int:
    """Return how many CPUs this process may use: by affinity, and by the quota of its cgroup."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota(root)
    return cpus if quota >= cpus else math.ceil(quota)


def cgroup_quota(root: Path = Path("/")) -> float:
    """Return the CPUs that the cgroup of this process may use, as containers set; inf: no limit.

    A group is limited by itself and by all groups above it. root: where /proc and /sys are.
    """
    return min(_quotas(root), default=math.inf)


def _quotas(root: Path) -> Iterator[float]:
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # A container sees its own group at the top, and its path may not exist in it.
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        for n in range(len(parts) + 1):
            folder = mount.joinpath(*parts[:n])
            if controllers:
                limit = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
            else:
                quota, _, period = _read(folder / "cpu.max").partition(" ")
                limit = quota, period
            with contextlib.suppress(ValueError, ZeroDivisionError):  # "max", or no such file
                cpus = float(limit[0]) / float(limit[1])
                if cpus > 0:  # -1 in version 1: no limit
                    yield cpus


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
