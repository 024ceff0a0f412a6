"""What nearly every process needs of native code, begun with before it is asked for.

A program that has to be compiled says so here first. Nothing happens where the code is on the disk,
and on one core, where it would take the time of what it waits for.
"""

from __future__ import annotations

from functools import cache

from spmd.compile.cpu.door import door_source
from spmd.compile.cpu.loader import available_cores, loader
from spmd.compile.cpu.runtime import pool_calls, pool_source, runtime_source


@cache
def expect_runtime() -> None:
    """Begin with the core of the runtime, the pool, and the code of doors; once a process."""
    if available_cores() > 1:
        loader.begin_early({runtime_source(): None, pool_source(): pool_calls, door_source(): None})
