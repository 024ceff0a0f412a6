"""The number of cores this process may compute on: the size of the pool and of parallel compiles.

Three things bound it: the cores that the process is bound to, the CPU time that its container may
use, and the ranks of the same job that share the machine without being bound to cores of their own.
"""

from __future__ import annotations

import math
import os
from functools import cache

from spmd.base.errors import LaunchError
from spmd.transport.environment import detect

_CGROUP = "/sys/fs/cgroup"


def available_cores() -> int:
    """The number of cores this process may use, at least one."""
    bound = _bound_cores()
    if bound == (os.cpu_count() or 1):
        bound //= _ranks_here()
    quota = _quota()
    return max(1, bound if quota is None else min(bound, quota))


def _bound_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def _ranks_here() -> int:
    """The ranks of this job on this host, as the launcher's environment tells."""
    try:
        return max(1, detect(os.environ).local_size or 1)
    except LaunchError:  # joining the job raises it
        return 1


@cache
def _quota(root: str | os.PathLike[str] = _CGROUP) -> int | None:
    """The cores' worth of time that the control group of this process may use, rounded up."""
    try:
        if os.path.exists(os.path.join(root, "cpu.max")):  # version 2
            most, period = _text(root, "cpu.max").split()
        else:
            most = _text(root, "cpu", "cpu.cfs_quota_us").strip()
            period = _text(root, "cpu", "cpu.cfs_period_us").strip()
        if most == "max" or int(most) <= 0:
            return None
        return max(1, math.ceil(int(most) / int(period)))
    except (OSError, ValueError):
        return None


def _text(*parts: str | os.PathLike[str]) -> str:
    with open(os.path.join(*parts), encoding="utf-8") as file:
        return file.read()
