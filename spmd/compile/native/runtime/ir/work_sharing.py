"""Sharing a step's work with the pool, as native code: kernels, copies and batches of kernels.

The one idea: shared work is a range of units, whatever it is made of: the units of a kernel over
all active devices, pieces of a copy, or pieces of several kernels that do not wait for each other.
The core runs the same steps on one thread, and comes here when that would take too long.
"""

from __future__ import annotations

from spmd.compile.native.llvm.function_builder import I64, Function, Ptr, define
from spmd.compile.native.program import byte_code as layout
from spmd.compile.native.program.run_layout import COARSE_PS, NO_MEMORY, OK, PARALLEL_PS
from spmd.compile.native.runtime import pool_layout
from spmd.compile.native.runtime.ir.execute import (
    ARGS,
    COPY_PIECE,
    COPY_PIECE_PS,
    FINE_CHUNKS,
    JOB_ACTIVE,
    JOB_CONTEXT,
    JOB_FAILED,
    JOB_STEP,
    JOB_UNITS,
    LEAST_CHUNK_PS,
    THREADS,
    WAKE_AGAIN_PS,
    WAKE_PS,
    add_scratch,
    all_of,
    device_at,
    field,
    fill_args,
    resolve,
    write_job,
)
from spmd.compile.native.runtime.ir.thread_pool import WORKER_NS


def share_texts() -> list[str]:
    """The functions of the pool's part that the core calls, and their helpers."""
    functions = (
        resolve(),
        _share(),
        _kernel_units(),
        _share_kernel(),
        _copy_pieces(),
        _share_copy(),
    )
    return [f.text() for f in functions]


def batch_texts() -> list[str]:
    """The functions of kernel batches, a module of their own: not every program has batches."""
    return [f.text() for f in (resolve(), _batch_pieces(), _batch())]


@define("share", "void")
def _share(f: Function, context: Ptr, body: Ptr, job: Ptr, units: I64, unit_ps: I64) -> None:
    """share(context, body, job, units, unit_ps): run a body over units, on the pool if it pays."""
    threads = f.load("i64", context, THREADS)
    total = units * unit_ps
    pays = all_of(threads > 1, units > 1, total >= PARALLEL_PS)
    with f.if_(pays):
        pool = f.symbol("spmd_pool")
        # A pool that was never started counts as asleep.
        awake = f.load("i64", pool, pool_layout.STARTED) - f.atomic_load(pool, pool_layout.SLEEPERS)
        shares = f.var("i1", (awake > 0) | (total >= WAKE_PS))
        with f.if_(shares.get().equals(0) & (total >= WAKE_AGAIN_PS)):
            now = f.call("now", "i64")
            passed = now - f.atomic_load(pool, pool_layout.ALONE)
            f.atomic_store(now, pool, pool_layout.ALONE)
            shares.set(passed < WORKER_NS)
        with f.if_(shares.get()):
            pieces = f.select(total < COARSE_PS, threads, threads * FINE_CHUNKS)
            chunk = (units + pieces - 1) // pieces
            least = f.value("i64", LEAST_CHUNK_PS) // f.larger(unit_ps, 1)
            f.call("parallel_for", "void", body, job, units, f.larger(f.larger(chunk, least), 1))
            f.ret()
    f.call(body, "void", job, f.value("i64", 0), units)


@define("kernel_units", "void")
def _kernel_units(f: Function, job: Ptr, begin: I64, end: I64) -> None:
    """Pool body: units [begin, end) of a kernel step, counted over all active devices."""
    context, step = f.load("ptr", job, JOB_CONTEXT), f.load("ptr", job, JOB_STEP)
    active, units = f.load("ptr", job, JOB_ACTIVE), f.load("i64", job, JOB_UNITS)
    # A body may run on any thread, so the arguments need room of its own.
    args = f.stack_bytes((field(f, step, 3) + 2) * 8)
    sizes = f.at(step, field(f, step, 5) * 8)
    function = f.load("ptr", step, 8 * layout.HEAD)
    now = f.var("i64", begin)
    with f.loop():
        unit = now.get()
        f.break_if(unit >= end)
        position = unit // units
        first = unit - position * units
        last = f.smaller(first + (end - unit), units)
        fill_args(f, context, step, device_at(f, active, position), args)
        with f.if_else(add_scratch(f, context, step, args).equals(0)) as it:
            f.call(function, "void", args, sizes, first, last)
            it.otherwise()
            f.atomic_store(f.value("i64", 1), job, JOB_FAILED)
        now.set(unit + (last - first))


@define("share_kernel", "i64")
def _share_kernel(
    f: Function, context: Ptr, step: Ptr, end: Ptr, active: Ptr, count: I64, _args: Ptr
) -> None:
    """Run a kernel step on the pool, if that pays."""
    units, unit_ps = field(f, step, 1), field(f, step, 2)
    job = write_job(f, context, step, end, active, units)
    f.call("share", "void", context, f.symbol("kernel_units"), job, units * count, unit_ps)
    failed = f.load("i64", job, JOB_FAILED)
    f.ret(f.select(failed.equals(0), f.value("i64", OK), NO_MEMORY))


@define("copy_pieces", "void")
def _copy_pieces(f: Function, job: Ptr, begin: I64, end: I64) -> None:
    """Pool body: pieces [begin, end) of a copy, job = [target, source, bytes]."""
    first = begin * COPY_PIECE
    length = f.smaller(end * COPY_PIECE, f.load("i64", job, 16)) - first
    target, source = f.load("ptr", job), f.load("ptr", job, 8)
    f.call("memcpy", "ptr", f.at(target, first), f.at(source, first), length)


@define("share_copy", "void")
def _share_copy(f: Function, context: Ptr, to: Ptr, origin: Ptr, nbytes: I64) -> None:
    """share_copy(context, to, from, bytes): a long copy between places that do not overlap."""
    job = f.stack("i64", 3)
    for i, value in enumerate((to, origin, nbytes)):
        f.store(value, job, 8 * i)
    pieces = (nbytes + (COPY_PIECE - 1)) // COPY_PIECE
    body, piece_ps = f.symbol("copy_pieces"), f.value("i64", COPY_PIECE_PS)
    f.call("share", "void", context, body, job, pieces, piece_ps)


@define("batch_pieces", "void")
def _batch_pieces(f: Function, job: Ptr, begin: I64, end: I64) -> None:
    """Pool body: pieces [begin, end) of a batch, counted over all active devices."""
    context, batch = f.load("ptr", job, JOB_CONTEXT), f.load("ptr", job, JOB_STEP)
    active, pieces = f.load("ptr", job, JOB_ACTIVE), f.load("i64", job, JOB_UNITS)
    args = f.stack_bytes(f.load("i64", context, ARGS) * 8)
    table = f.at(batch, 8 * (layout.HEAD + layout.BATCH_FIELDS))
    with f.range(begin, end) as number:
        position = number // pieces
        piece = f.at(table, (number - position * pieces) * 24)
        step = f.at(batch, f.load("i64", piece) * 8)
        sizes = f.at(step, field(f, step, 5) * 8)
        function = f.load("ptr", step, 8 * layout.HEAD)
        fill_args(f, context, step, device_at(f, active, position), args)
        with f.if_else(add_scratch(f, context, step, args).equals(0)) as it:
            first, last = f.load("i64", piece, 8), f.load("i64", piece, 16)
            f.call(function, "void", args, sizes, first, last)
            it.otherwise()
            f.atomic_store(f.value("i64", 1), job, JOB_FAILED)


@define("run_batch", "i64")
def _batch(
    f: Function, context: Ptr, step: Ptr, end: Ptr, active: Ptr, count: I64, _args: Ptr
) -> None:
    """Run a batch: all pieces of all its kernels are one job for the pool."""
    pieces = field(f, step, 0)
    job = write_job(f, context, step, end, active, pieces)
    body, piece_ps = f.symbol("batch_pieces"), field(f, step, 1)
    f.call("share", "void", context, body, job, pieces * count, piece_ps)
    f.ret(f.select(f.load("i64", job, JOB_FAILED).equals(0), f.value("i64", OK), NO_MEMORY))
