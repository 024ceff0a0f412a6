"""The compiler on one screen: a closed jaxpr goes through `PASSES`, then becomes a program.

Each pass is a pure function from closed jaxpr to closed jaxpr. With `SPMD_CHECK=1` the result of
each is checked; with `SPMD_DEBUG` containing 3 it is printed under the pass's name.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from spmd.base.config import config
from spmd.base.record import field, record
from spmd.compile.definitions import OF_SMALL_MATRICES, SERIES
from spmd.compile.lazy import fourier, maps, series, small_matrices
from spmd.compile.passes.combine_psums import bucket_psums, combine_psums
from spmd.compile.passes.fuse_epilogues import fuse_epilogues
from spmd.compile.passes.fusion.fuse import fuse
from spmd.compile.passes.fusion.rematerialize import rematerialize
from spmd.compile.passes.hoist_invariants import hoist_invariants
from spmd.compile.passes.hoist_matmuls import hoist_matmuls
from spmd.compile.passes.inline_calls import inline_calls
from spmd.compile.passes.schedule_updates import schedule_updates
from spmd.compile.passes.shrink_psums import shrink_psums
from spmd.compile.passes.simplify import simplify
from spmd.compile.passes.thin_stacks import thin_stacks
from spmd.compile.passes.tile_matmul_chains import tile_matmul_chains
from spmd.compile.passes.widen_small import widen_small
from spmd.core.check import check_jaxpr
from spmd.core.ir import ClosedJaxpr
from spmd.core.rewriting.equations import Pass


def write_series(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Write special functions that are series and fractions as programs."""
    return series.write_series(closed)


def write_small_matrices(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Write factorizations of small matrices as programs, which take all of a stack at once."""
    return small_matrices.write_small_matrices(closed)


def write_large_primes(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Write Fourier transforms of sizes with large primes as programs of others."""
    return fourier.write_large_primes(closed)


def vectorize_maps(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Write loops without a carry, over a few numbers, as work on all numbers at once."""
    return maps.vectorize_maps(closed)


# Partitioning over a mesh has its place between `simplify` and `fuse`: it needs to see single
# operations, and its additions should be fused.
PASSES: tuple[Pass, ...] = (
    write_series,  # special functions that are series are loops and fused kernels
    write_small_matrices,  # factorizations of small matrices run along their stack
    write_large_primes,  # Fourier transforms of such sizes are convolutions
    inline_calls,  # nothing below needs to look inside a call
    widen_small,  # operations on float8 and int4 compute in wider dtypes
    vectorize_maps,  # loops over a few numbers without a carry are elementwise work
    hoist_invariants,  # loop-invariant code motion
    hoist_matmuls,  # the products of all iterations of a loop as one product outside
    simplify,  # constants, identities, equal equations, dead code
    thin_stacks,  # loops stack only what later loops cannot make for less
    tile_matmul_chains,  # chains of two products by blocks of rows that stay in the caches
    shrink_psums,  # sums over a device's elements, before those over devices
    fuse,  # chains of elementwise work and reductions become one kernel
    rematerialize,  # cheap values are computed again instead of stored
    fuse_epilogues,  # elementwise work after a product runs on the product's tiles
    schedule_updates,  # output-only equations early, to free their operands
)

# A program without any of these primitives has nothing for the pass.
WORKS_ON: dict[Pass, frozenset[str]] = {
    write_series: SERIES,
    write_small_matrices: OF_SMALL_MATRICES,
    write_large_primes: frozenset(("fft",)),
    vectorize_maps: frozenset(("scan",)),
    hoist_invariants: frozenset(("scan", "while")),
    hoist_matmuls: frozenset(("scan",)),
    thin_stacks: frozenset(("scan",)),
    shrink_psums: frozenset(("psum",)),
}

# For programs over a mesh that spans processes, or over GPUs.
PASSES_ACROSS: tuple[Pass, ...] = (
    write_series,
    write_small_matrices,
    write_large_primes,
    inline_calls,
    widen_small,
    vectorize_maps,
    hoist_invariants,
    hoist_matmuls,
    simplify,
    thin_stacks,
    tile_matmul_chains,
    shrink_psums,
    combine_psums,  # small sums share one exchange between processes
    fuse,
    rematerialize,
    fuse_epilogues,
    schedule_updates,
)

# The same where exchanges run while the program computes: their readers stay at the end.
PASSES_OVERLAPPED: tuple[Pass, ...] = tuple(
    bucket_psums if step is combine_psums else step
    for step in PASSES_ACROSS
    if step is not schedule_updates
)


@record
class Report:
    """How long each pass took, in seconds, and the jaxpr that it left."""

    seconds: dict[str, float] = field(default_factory=dict)
    jaxprs: dict[str, ClosedJaxpr] = field(default_factory=dict)


def run_passes(
    closed: ClosedJaxpr, report: Report | None = None, passes: Sequence[Pass] = PASSES
) -> ClosedJaxpr:
    """Apply all passes to a closed jaxpr."""
    checked = None
    for step in passes:
        started = time.perf_counter()
        needs = WORKS_ON.get(step)
        if needs is None or not needs.isdisjoint(closed.jaxpr.primitives):
            closed = step(closed)
        if config.check and closed is not checked:
            check_jaxpr(closed, after=step.__name__)
            checked = closed
        if "3" in config.debug:
            print(f"spmd: after {step.__name__}:\n{closed}", file=sys.stderr)
        if report is not None:
            report.seconds[step.__name__] = time.perf_counter() - started
            report.jaxprs[step.__name__] = closed
    return closed
