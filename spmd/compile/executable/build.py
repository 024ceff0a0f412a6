"""The way from an optimised jaxpr to a native program, for programs that are not stored.

The modules that lower, render and plan are imported here, and executables come here through
`lazy.py`: a process that finds all its programs on the disk never loads them. Loading them would
be most of its first call's time.
"""

from __future__ import annotations

from spmd.base.config import config
from spmd.compile.cpu.assemble.assemble import assemble
from spmd.compile.cpu.assemble.compile_callees import CalleeCompiler
from spmd.compile.cpu.matmul.plan import prefers_packed
from spmd.compile.lower import (  # noqa: F401  (they declare rules)
    callback,
    collective,
    control,
    convolution,
    kernels,
    matmul,
    nested_shard_map,
    prng_keys,
    reduce_window,
    sort,
)
from spmd.compile.lower.lowering import lower
from spmd.compile.lower.mesh_layout import Topology
from spmd.compile.lower.steps import Schedule
from spmd.compile.schedule.memory_plan import plan_program, takes
from spmd.compile.schedule.overlap_collectives import (
    LEAST_OVERLAP_SECONDS,
    overlap_exchanges,
    summary,
)
from spmd.compile.schedule.prepack_operands import prepack
from spmd.core.ir import ClosedJaxpr

__all__ = ["CalleeCompiler", "assemble", "make_schedule", "plan_program", "summary", "takes"]


def make_schedule(
    closed: ClosedJaxpr, topology: Topology | None = None, callees: CalleeCompiler | None = None
) -> Schedule:
    """The steps of an optimised jaxpr; `topology` is the mesh of a per-device one.

    `callees` compiles their code, from when they are written.
    """
    steps = lower(closed, topology, None if callees is None else callees.watch)
    if topology is not None and topology.overlaps:
        # Before anything looks at this machine: all ranks must come to the same order.
        least_seconds = 0.0 if config.overlap == "always" else LEAST_OVERLAP_SECONDS
        steps = overlap_exchanges(steps, least_seconds)
    return prepack(steps, prefers_packed)
