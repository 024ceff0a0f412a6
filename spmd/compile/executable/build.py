"""The way from an optimised jaxpr to a native program, for programs that are not stored.

The modules that lower, render and plan are imported here, and executables come here through
`lazy.py`: a process that finds all its programs on the disk never loads them. Loading them would
be most of its first call's time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from spmd.base.config import config
from spmd.compile.executable.backend import Backend
from spmd.compile.lazy import factor_rules
from spmd.compile.lower import (  # noqa: F401  (they declare rules)
    attention,
    callback,
    collective,
    control,
    convolution,
    fourier,
    kernels,
    matmul,
    nested_shard_map,
    reduce_window,
    same_bytes,
    sort,
)
from spmd.compile.lower.lowering import Lowering, hints, lower, rule
from spmd.compile.lower.mesh_layout import Topology
from spmd.compile.lower.steps import Schedule
from spmd.compile.native.program.frames import Frames
from spmd.compile.schedule.memory_plan import Plan, plan_program, takes
from spmd.compile.schedule.overlap_collectives import (
    LEAST_OVERLAP_SECONDS,
    overlap_exchanges,
    summary,
)
from spmd.compile.schedule.share_work import share_work
from spmd.core.ir import ClosedJaxpr, Eqn, Var

__all__ = [
    "frames_of",
    "make_schedule",
    "plan_program",
    "summary",
    "takes",
]


def make_schedule(
    closed: ClosedJaxpr,
    backend: Backend,
    topology: Topology | None = None,
    callees: Any = None,
    varies: Sequence[Sequence[Any]] | None = None,
) -> Schedule:
    """The steps of an optimised jaxpr; `topology` is the mesh of a per-device one.

    `callees` compiles their code, from when they are written. `varies` are the axes of the mesh
    along which each argument differs; None if that is not known.
    """
    steps = lower(closed, topology, None if callees is None else callees.watch)
    if topology is not None and topology.overlaps:
        # Before anything looks at this machine: all ranks must come to the same order.
        least_seconds = 0.0 if config.overlap == "always" else LEAST_OVERLAP_SECONDS
        steps = overlap_exchanges(steps, least_seconds)
    steps = backend.assembler.legalise(steps)
    if topology is not None and varies is not None and backend.shares_work:
        steps = share_work(steps, topology, varies)
    return steps


def frames_of(schedule: Schedule, plan: Plan, devices: int) -> Frames:
    """The memory behind the frames of a program."""
    own = tuple(range(devices))
    outputs = tuple([own if b.homes is None else b.homes for b in schedule.outputs])
    return Frames(plan.arenas(devices), outputs, tuple(plan.shared_homes()))


# ---- rules that few programs need --------------------------------------------------------------


@rule("cholesky", "eigh", "lu", "qr", "solve", "svd", "triangular_solve")
def factor(lowering: Lowering, eqn: Eqn) -> None:
    """The step of a factorization."""
    factor_rules.factor(lowering, eqn)


@hints("eigh", "qr", "svd")
def note_readers(
    lowering: Lowering, eqn: Eqn, makers: dict[Var, Eqn], readers: Counter[Var]
) -> None:
    """Note which factors nothing reads: what is left takes LAPACK a part of the time."""
    lowering.unread.update(var for var in eqn.outvars if not readers[var])
