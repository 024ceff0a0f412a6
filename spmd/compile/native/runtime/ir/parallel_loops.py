"""Parallel loops of the executor, as native code.

The one idea: a lane is a worker's place for the temporaries of an iteration. Each lane has its
own loop counters and takes the next trips by an atomic ticket until none is left, so a slow thread
delays no other. Results depend on no order: an iteration writes only its own part of them.
"""

from __future__ import annotations

from spmd.compile.native.llvm.function_builder import I32, I64, Function, Ptr, Value, define
from spmd.compile.native.program import byte_code as layout
from spmd.compile.native.program.run_layout import OK, PARALLEL_PS
from spmd.compile.native.runtime.ir.execute import (
    ARGS,
    COUNTER_BYTES,
    COUNTERS,
    LEVEL_COUNT,
    THREADS,
    all_of,
    context_alone,
    field,
)

# The job of a parallel loop: context, step, end of the body, the active device, failure, and the
# ticket, which has a cache line of its own.
_CONTEXT, _STEP, _END, _ACTIVE, _FAILED, _TICKET = 0, 8, 16, 24, 32, 64
_JOB_BYTES = 128


def parallel_texts() -> list[str]:
    """The functions of parallel loops."""
    functions = (_place(), _trips(), _lane(), _parallel())
    return [f.text() for f in functions]


@define("place_trip", "void")
def _place(f: Function, context: Ptr, step: Ptr, trip: I64, device: I32) -> None:
    """place(context, step, trip, device): set a device's counters to the indices of a trip."""
    level, dims = field(f, step, 0), field(f, step, 1)
    counters, row = f.load("ptr", context, COUNTERS), f.load("i64", context, COUNTER_BYTES)
    sizes = f.at(step, 8 * (layout.HEAD + layout.PARALLEL_FIELDS))
    column = f.convert("sext", device, "i64") * 8
    rest = f.var("i64", trip)
    with f.range(0, dims) as i:
        d = (dims - 1) - i
        size = f.load("i64", sizes, d * 8)
        outer = rest.get() // size
        f.store(rest.get() - outer * size, f.at(counters, (level + d) * row), column)
        rest.set(outer)


def _trips() -> Function:
    """trips(context, step, body, end, active, args, first, last): some trips on one device."""
    params = ["ptr", "ptr", "ptr", "ptr", "ptr", "ptr", "i64", "i64"]
    f = Function("run_trips", "i64", params, internal=True)
    context, step, body, end, active, args, first, last = f.params
    with f.range(first, last) as trip:
        f.call("place_trip", "void", context, step, trip, f.load("i32", active))
        one = f.value("i64", 1)
        status = f.call("block", "i64", context, body, end, active, one, args)
        f.ret_if(status.differs(OK), status)
    f.ret(OK)
    return f


@define("parallel_lane", "void")
def _lane(f: Function, job: Ptr, lane: I64, _: I64) -> None:
    """Pool body: run trips in lane `begin` until none is left."""
    outer, step = f.load("ptr", job, _CONTEXT), f.load("ptr", job, _STEP)
    end, active = f.load("ptr", job, _END), f.load("ptr", job, _ACTIVE)
    # The lane's own counters start like the outer's.
    context = context_alone(f, outer)
    row = f.load("i64", outer, COUNTER_BYTES)
    nbytes = (f.load("i64", outer, LEVEL_COUNT) + 1) * row
    counters = f.stack_bytes(nbytes)
    f.call("memcpy", "ptr", counters, f.at(f.load("ptr", outer, COUNTERS), row * -1), nbytes)
    device = f.convert("sext", f.load("i32", active), "i64")
    f.store(lane, counters, device * 8)
    f.store(f.at(counters, row), context, COUNTERS)
    args = f.stack_bytes(f.load("i64", outer, ARGS) * 8)
    total, grain = field(f, step, 2), field(f, step, 4)
    body = f.at(end, field(f, step, 6) * -8)
    with f.loop():
        first = f.atomic("add", job, _TICKET, grain)
        f.break_if(first >= total)
        last = f.smaller(first + grain, total)
        given = (context, step, body, end, active, args, first, last)
        status = f.call("run_trips", "i64", *given)
        with f.if_(status.differs(OK)):
            f.atomic_store(status, job, _FAILED)
            f.atomic_store(total, job, _TICKET)


@define("run_parallel", "i64")
def _parallel(
    f: Function, context: Ptr, step: Ptr, end: Ptr, active: Ptr, count: I64, args: Ptr
) -> None:
    """Run a parallel loop: on the pool if it pays and one device is active, else in order."""
    total, lanes, cost = field(f, step, 2), field(f, step, 3), field(f, step, 5)
    threads = f.load("i64", context, THREADS)
    pays = all_of(threads > 1, lanes > 1, total > 1, cost * total >= PARALLEL_PS)
    with f.if_(pays & count.equals(1)):
        job = f.stack("i64", _JOB_BYTES // 8, align=64)
        zero = f.value("i64", 0)
        for offset, value in ((_CONTEXT, context), (_STEP, step), (_END, end), (_ACTIVE, active)):
            f.store(value, job, offset)
        f.store(zero, job, _FAILED)
        f.store(zero, job, _TICKET)
        units = f.smaller(lanes, total)
        share = (context, f.symbol("parallel_lane"), job, units, cost * total // units)
        f.call("share", "void", *share)
        f.ret(f.atomic_load(job, _FAILED))
    body = f.at(end, field(f, step, 6) * -8)
    row = f.load("i64", context, COUNTER_BYTES)
    lane_row = f.at(f.load("ptr", context, COUNTERS), row * -1)
    with f.range(0, count) as position:
        own = f.at(active, position * 4)
        _first_lane(f, lane_row, own)
        given = (context, step, body, end, own, args, f.value("i64", 0), total)
        status = f.call("run_trips", "i64", *given)
        f.ret_if(status.differs(OK), status)
    f.ret(OK)


def _first_lane(f: Function, lane_row: Value, device: Value) -> None:
    """Put a device in lane 0."""
    column = f.convert("sext", f.load("i32", device), "i64") * 8
    f.store(f.value("i64", 0), lane_row, column)
