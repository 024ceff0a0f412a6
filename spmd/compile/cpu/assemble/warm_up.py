"""Early compilation of the native code that nearly every process needs.

A program that has to be compiled says so here first. Nothing happens where the code is on the disk,
nor on one core, where this work would delay the program.
"""

from __future__ import annotations

from functools import cache

from spmd.compile.native.llvm.compiler import available_cores, loader
from spmd.compile.native.program.run_layout import POOL
from spmd.compile.native.runtime.load import part_source, pool_calls, runtime_source


@cache
def warm_up_runtime() -> None:
    """Begin with the code of most larger programs: the runtime's core, the pool, kernel batches.

    Not with entry points: the second call of a program comes when it comes, and while larger
    programs are compiled they need the other core more.
    """
    if available_cores() > 1:
        pool, batch = part_source(POOL), part_source("batch")
        loader.begin_early({runtime_source(): None, pool: pool_calls, batch: None})
