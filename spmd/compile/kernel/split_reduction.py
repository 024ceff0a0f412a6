"""Splitting a long reduction into partial results over chunks, and a small kernel that joins them.

One outer point is one unit of work, so the sum of a whole array would run on one thread.
`split_reduction` cuts the first inner dim into chunks, whose size depends on the shape only:
results are the same bits for any number of threads.
"""

from __future__ import annotations

import math

from spmd.base.record import record, replace
from spmd.compile.kernel.check import check_kernel
from spmd.compile.kernel.dtypes import DTYPES, to_bits
from spmd.compile.kernel.ir import (
    POINT,
    ROW,
    Arg,
    Const,
    Instr,
    Iota,
    Kernel,
    Load,
    Map,
    Op,
    Pass,
    Reduce,
    Scan,
    Store,
)
from spmd.compile.kernel.ops import ARG_REDUCERS


@record
class Chunks:
    """How finely reductions are split; it depends on the kind of machine, never on its load.

    Rows shorter than two chunks of at least `elements` stay whole, a row has `most` chunks at most,
    and `enough_points` outer points are enough to share out without splitting rows.
    """

    elements: int
    most: int
    enough_points: int


# For a few cores: a chunk is worth waking a thread for.
CHUNK_ELEMENTS = 16 * 1024
ENOUGH_POINTS = 32
CHUNKS = Chunks(CHUNK_ELEMENTS, most=256, enough_points=ENOUGH_POINTS)


@record
class Split:
    """A reduction in two steps.

    `partials` run first (one kernel, or two when the last chunk is shorter), then `combine`. All of
    them take the original arguments followed by one temporary array per entry of `temporaries`
    (dtype, elements), which the partials write and `combine` reads.
    """

    partials: tuple[Kernel, ...]
    combine: Kernel
    temporaries: tuple[tuple[str, int], ...]


def split_reduction(kernel: Kernel, chunks: Chunks = CHUNKS) -> Split | None:
    """Split a kernel of one ROW pass of reductions (and POINT passes), if that is worth it."""
    check_kernel(kernel)
    if not _can_split(kernel, chunks):
        return None
    rest = math.prod(kernel.inner[1:])
    extent = kernel.inner[0]
    chunk = max(chunks.elements // rest, -(-extent // chunks.most), 1)
    whole, left = divmod(extent, chunk)
    if whole < 2:
        return None
    points, row = math.prod(kernel.outer), kernel.passes[0]
    count = whole + (left > 0)
    temporaries = tuple(
        (DTYPES[reduction.dtype].carrier, points * count) for reduction in row.reductions
    )
    partials = [_partial(kernel, temporaries, count, 0, whole, chunk, 0)]
    if left:
        partials.append(_partial(kernel, temporaries, count, whole, 1, left, whole * chunk))
    return Split(tuple(partials), _combine(kernel, temporaries, count), temporaries)


def _can_split(kernel: Kernel, chunks: Chunks) -> bool:
    if not kernel.passes or not kernel.inner or 0 in kernel.sizes or kernel.buffers:
        return False
    row, *others = kernel.passes
    if row.level != ROW or any(step.level != POINT for step in others) or row.stores:
        return False
    if not row.reductions or any(item.op in ARG_REDUCERS for item in row.reductions):
        return False
    if any(isinstance(instr, Scan) for instr in row.instrs):
        return False
    few = math.prod(kernel.outer) < chunks.enough_points
    return few and math.prod(kernel.inner) >= 2 * chunks.elements


def _row_major(sizes: tuple[int, ...], last: int) -> tuple[int, ...]:
    strides, step = [], last
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _fresh(kernel: Kernel) -> int:
    used = [item.out for step in kernel.passes for item in (*step.instrs, *step.reductions)]
    return max(used, default=-1) + 1


# ---- partial results ----------------------------------------------------------------------


def _partial(
    kernel: Kernel,
    temporaries: tuple[tuple[str, int], ...],
    count: int,
    first: int,
    chunks: int,
    chunk: int,
    start: int,
) -> Kernel:
    """Reduce `chunks` chunks from element `start` on, into the slots from `first` on."""
    split_dim, fresh = len(kernel.outer), _fresh(kernel)
    row = kernel.passes[0]
    instrs: list[Instr] = []
    for instr in row.instrs:
        if isinstance(instr, Iota) and instr.dim == split_dim:
            made = _shifted_iota(instr, fresh, split_dim, chunk, start)
            fresh += len(made) - 1
            instrs += made
        elif isinstance(instr, Iota):
            instrs.append(replace(instr, dim=instr.dim + (instr.dim > split_dim)))
        elif isinstance(instr, Load):
            instrs.append(replace(instr, map=_cut(instr.map, split_dim, chunk, start)))
        else:
            instrs.append(instr)
    reductions, stores = [], []
    strides = (*_row_major(kernel.outer, count), 1)
    for number, (reduction, (dtype, _)) in enumerate(zip(row.reductions, temporaries, strict=True)):
        operand = reduction.operand
        if dtype != reduction.dtype:
            instrs.append(Op(fresh, dtype, "convert", (operand,)))
            operand, fresh = fresh, fresh + 1
        reductions.append(replace(reduction, dtype=dtype, operand=operand))
        where = Map(strides, first)
        stores.append(Store(len(kernel.args) + number, where, reduction.out))
    return Kernel(
        (*kernel.args, *(Arg(dtype, size, "out") for dtype, size in temporaries)),
        (*kernel.outer, chunks),
        (chunk, *kernel.inner[1:]),
        (Pass(ROW, tuple(instrs), (), tuple(reductions)), Pass(POINT, (), tuple(stores))),
    )


def _cut(where: Map, dim: int, chunk: int, start: int) -> Map:
    stride = where.strides[dim]
    strides = (*where.strides[:dim], stride * chunk, *where.strides[dim:])
    return replace(where, strides=strides, offset=where.offset + stride * start)


def _shifted_iota(instr: Iota, fresh: int, dim: int, chunk: int, start: int) -> list[Instr]:
    """Write `start + chunk * (index of the chunk) + (index inside)` in place of an index."""
    dtype = instr.dtype
    number, inside, size, base, scaled, moved = range(fresh, fresh + 6)
    return [
        Iota(number, dtype, dim),
        Iota(inside, dtype, dim + 1),
        Const(size, dtype, to_bits(chunk, dtype)),
        Const(base, dtype, to_bits(start, dtype)),
        Op(scaled, dtype, "mul", (number, size)),
        Op(moved, dtype, "add", (scaled, base)),
        Op(instr.out, dtype, "add", (moved, inside)),
    ]


# ---- joining them -------------------------------------------------------------------------


def _combine(kernel: Kernel, temporaries: tuple[tuple[str, int], ...], count: int) -> Kernel:
    fresh = _fresh(kernel)
    loads: list[Instr] = []
    reductions, converts = [], []
    strides = (*_row_major(kernel.outer, count), 1)
    for number, (reduction, (dtype, _)) in enumerate(
        zip(kernel.passes[0].reductions, temporaries, strict=True)
    ):
        loads.append(Load(fresh, dtype, len(kernel.args) + number, Map(strides)))
        result = reduction.out
        if dtype != reduction.dtype:
            result = fresh + 1
            converts.append(Op(reduction.out, reduction.dtype, "convert", (result,)))
        reductions.append(Reduce(result, dtype, reduction.op, fresh))
        fresh += 2
    passes = [Pass(ROW, tuple(loads), (), tuple(reductions))]
    if converts:
        passes.append(Pass(POINT, tuple(converts)))
    return Kernel(
        (*kernel.args, *(Arg(dtype, size) for dtype, size in temporaries)),
        kernel.outer,
        (count,),
        (*passes, *kernel.passes[1:]),
    )
