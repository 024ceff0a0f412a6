"""Loops, branches and segments of the executor, as native code.

The one idea: each of these only decides which devices run a nested block next, and how often. A
loop keeps the list of devices that are still in it, a branch makes one list per choice, a segment
gives each device to a thread of its own. Of devices that do alike, one runs the block.
"""

from __future__ import annotations

from spmd.compile.native.llvm.function_builder import I64, Function, Ptr, Value, define
from spmd.compile.native.program import byte_code as layout
from spmd.compile.native.program.run_layout import OK, PARALLEL_PS, TOO_MANY_TRIPS
from spmd.compile.native.runtime.ir.execute import (
    ARGS,
    COUNTER_BYTES,
    COUNTERS,
    JOB_ACTIVE,
    JOB_CONTEXT,
    JOB_END,
    JOB_FAILED,
    JOB_STEP,
    THREADS,
    all_of,
    context_alone,
    device_at,
    field,
    next_slot,
    report_step,
    resolve,
    write_job,
)
from spmd.compile.native.runtime.ir.interrupt import between_rounds


def for_texts() -> list[str]:
    """The functions of counted loops."""
    return [f.text() for f in (resolve(), _load_integer(), _for())]


def while_texts() -> list[str]:
    """The functions of loops with a condition."""
    return [f.text() for f in (resolve(), _while())]


def cond_texts() -> list[str]:
    """The functions of branches."""
    return [f.text() for f in (resolve(), _load_integer(), _cond())]


def segment_texts() -> list[str]:
    """The functions of segments."""
    return [f.text() for f in (_segment_units(), _segment())]


def once_texts() -> list[str]:
    """The functions of what devices do alike."""
    return [_once().text()]


@define("load_integer", "i64")
def _load_integer(f: Function, address: Ptr, width: I64) -> None:
    """load_integer(address, bytes): a trip count or branch index; one byte is unsigned."""
    with f.if_(width.equals(1)):
        f.ret(f.convert("zext", f.load("i8", address), "i64"))
    with f.if_(width.equals(4)):
        f.ret(f.convert("sext", f.load("i32", address, align=1), "i64"))
    f.ret(f.load("i64", address, align=1))


def _set_counters(
    f: Function, context: Value, level: Value, active: Value, count: Value, index: Value
) -> None:
    row = f.at(f.load("ptr", context, COUNTERS), level * f.load("i64", context, COUNTER_BYTES))
    with f.range(0, count) as position:
        f.store(index, row, device_at(f, active, position) * 8)


def _run_block(
    f: Function, context: Value, begin: Value, end: Value, active: Value, count: Value, args: Value
) -> None:
    """Run a nested block, and return from this function if it failed."""
    status = f.call("block", "i64", context, begin, end, active, count, args)
    f.ret_if(status.differs(OK), status)


@define("run_for", "i64")
def _for(
    f: Function, context: Ptr, step: Ptr, end: Ptr, active: Ptr, count: I64, args: Ptr
) -> None:
    """Run a counted loop; devices whose own count is reached drop out."""
    level, fixed, width, most, reverse, words = (field(f, step, i) for i in range(6))
    body = f.at(end, words * -8)  # the body ends where the step ends
    with f.if_(fixed >= 0):
        with f.range(0, fixed) as trip:
            between_rounds(f, context)
            index = f.select(reverse.differs(0), fixed - 1 - trip, trip)
            _set_counters(f, context, level, active, count, index)
            _run_block(f, context, body, end, active, count, args)
        f.ret(OK)
    slot = f.at(step, 8 * (layout.HEAD + layout.FOR_FIELDS))
    trips, live = f.stack_bytes(count * 8), f.stack_bytes(count * 4)
    longest = f.var("i64", 0)
    with f.range(0, count) as position:
        device = device_at(f, active, position)
        address = f.call("resolve", "ptr", context, slot, device)
        own = f.call("load_integer", "i64", address, width)
        f.store(own, trips, position * 8)
        longest.set(f.larger(longest.get(), own))
    with f.if_((most >= 0) & (longest.get() > most)):
        report_step(f, context, step)
        f.ret(TOO_MANY_TRIPS)
    row = f.at(f.load("ptr", context, COUNTERS), level * f.load("i64", context, COUNTER_BYTES))
    with f.range(0, longest.get()) as trip:
        between_rounds(f, context)
        alive = f.var("i64", 0)
        with f.range(0, count) as position:
            own = f.load("i64", trips, position * 8)
            with f.if_(trip < own):
                device = f.load("i32", active, position * 4)
                f.store(device, live, alive.get() * 4)
                alive.set(alive.get() + 1)
                index = f.select(reverse.differs(0), own - 1 - trip, trip)
                f.store(index, row, f.convert("sext", device, "i64") * 8)
        _run_block(f, context, body, end, live, alive.get(), args)
    f.ret(OK)


@define("run_while", "i64")
def _while(
    f: Function, context: Ptr, step: Ptr, end: Ptr, active: Ptr, count: I64, args: Ptr
) -> None:
    """Run a while loop; devices whose predicate is false drop out."""
    level, test_words, body_words = (field(f, step, i) for i in range(3))
    body = f.at(end, body_words * -8)
    test = f.at(body, test_words * -8)
    slot = f.at(step, 8 * (layout.HEAD + layout.WHILE_FIELDS))
    live = f.stack_bytes(count * 4)
    f.call("memcpy", "ptr", live, active, count * 4)
    alive, trip = f.var("i64", count), f.var("i64", 0)
    with f.loop():
        between_rounds(f, context)
        _set_counters(f, context, level, live, alive.get(), trip.get())
        _run_block(f, context, test, body, live, alive.get(), args)
        kept = f.var("i64", 0)
        with f.range(0, alive.get()) as position:
            device = f.load("i32", live, position * 4)
            wide = f.convert("sext", device, "i64")
            predicate = f.load("i8", f.call("resolve", "ptr", context, slot, wide))
            with f.if_(predicate.differs(0)):
                f.store(device, live, kept.get() * 4)
                kept.set(kept.get() + 1)
        alive.set(kept.get())
        f.break_if(alive.get().equals(0))
        _run_block(f, context, body, end, live, alive.get(), args)
        trip.set(trip.get() + 1)
    f.ret(OK)


@define("run_cond", "i64")
def _cond(
    f: Function, context: Ptr, step: Ptr, _end: Ptr, active: Ptr, count: I64, args: Ptr
) -> None:
    """Run the chosen branch of each device; the branches run in order, each for its devices."""
    width, branches = field(f, step, 0), field(f, step, 1)
    slot = f.at(step, 8 * (layout.HEAD + layout.COND_FIELDS))
    cursor = f.var("ptr", slot)
    next_slot(f, cursor)
    lengths = cursor.get()
    # All choices are read before any branch runs: a branch may overwrite the index.
    choices, live = f.stack_bytes(count * 8), f.stack_bytes(count * 4)
    with f.range(0, count) as position:
        device = device_at(f, active, position)
        index = f.call(
            "load_integer", "i64", f.call("resolve", "ptr", context, slot, device), width
        )
        f.store(f.smaller(f.larger(index, 0), branches - 1), choices, position * 8)
    begin = f.var("ptr", f.at(lengths, branches * 8))
    with f.range(0, branches) as branch:
        finish = f.at(begin.get(), f.load("i64", lengths, branch * 8) * 8)
        alive = f.var("i64", 0)
        with f.range(0, count) as position:
            with f.if_(f.load("i64", choices, position * 8).equals(branch)):
                f.store(f.load("i32", active, position * 4), live, alive.get() * 4)
                alive.set(alive.get() + 1)
        with f.if_(alive.get() > 0):
            _run_block(f, context, begin.get(), finish, live, alive.get(), args)
        begin.set(finish)
    f.ret(OK)


@define("segment_units", "void")
def _segment_units(f: Function, job: Ptr, begin: I64, end: I64) -> None:
    """Pool body: a whole segment for the active devices at positions [begin, end)."""
    outer = f.load("ptr", job, JOB_CONTEXT)
    context = context_alone(f, outer)
    args = f.stack_bytes(f.load("i64", outer, ARGS) * 8)
    active = f.load("ptr", job, JOB_ACTIVE)
    first, last = f.load("ptr", job, JOB_STEP), f.load("ptr", job, JOB_END)
    with f.range(begin, end) as position:
        own = f.at(active, position * 4)
        status = f.call("block", "i64", context, first, last, own, f.value("i64", 1), args)
        with f.if_(status.differs(OK)):
            f.atomic_store(status, job, JOB_FAILED)


@define("run_segment", "i64")
def _segment(
    f: Function, context: Ptr, step: Ptr, end: Ptr, active: Ptr, count: I64, args: Ptr
) -> None:
    """Run a collective-free segment: a device per thread, or all devices in lockstep."""
    first = f.at(step, 8 * (layout.HEAD + layout.SEGMENT_FIELDS))
    cost = field(f, step, 0)
    threads = f.load("i64", context, THREADS)
    with f.if_(all_of(threads > 1, count >= threads, cost * count >= PARALLEL_PS)):
        job = write_job(f, context, first, end, active, count)
        f.call("share", "void", context, f.symbol("segment_units"), job, count, cost)
        f.ret(f.load("i64", job, JOB_FAILED))
    f.ret(f.call("block", "i64", context, first, end, active, count, args))


@define("run_once", "i64")
def _once(
    f: Function, context: Ptr, step: Ptr, end: Ptr, active: Ptr, count: I64, args: Ptr
) -> None:
    """Run a block on those of the active devices that do it for the others."""
    body = f.at(end, field(f, step, 0) * -8)
    chosen = f.at(step, 8 * (layout.HEAD + layout.ONCE_FIELDS))
    live = f.stack_bytes(count * 4)
    alive = f.var("i64", 0)
    with f.range(0, count) as position:
        device = device_at(f, active, position)
        with f.if_(f.load("i64", chosen, device * 8).differs(0)):
            f.store(f.load("i32", active, position * 4), live, alive.get() * 4)
            alive.set(alive.get() + 1)
    with f.if_(alive.get() > 0):
        _run_block(f, context, body, end, live, alive.get(), args)
    f.ret(OK)
