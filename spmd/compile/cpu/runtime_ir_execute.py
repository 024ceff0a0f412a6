"""The executor as native code: walks the words of `encode` for all devices in lockstep.

The one idea: a block of steps runs for a list of *active* devices. Loops and branches on which
devices disagree only shorten that list, so control flow needs no threads per device and a
collective is a memory operation between two steps. With one device the list has one entry and
costs nothing.

Work goes to the pool in three ways: the units of a kernel over all active devices, the pieces of
a collective, or whole collective-free segments, a device per unit, when there are at least as many
devices as threads.
"""

from __future__ import annotations

from spmd.collectives.transport import flight
from spmd.compile.cpu import encode as layout
from spmd.compile.cpu import pool_words
from spmd.compile.cpu.run_words import (
    CALLBACK,
    EVERYONE,
    FLIGHT,
    MISMATCH,
    NO_MEMORY,
    OK,
    RAISED,
    REPORT_REACHED,
    REPORT_STEP,
)
from spmd.compile.cpu.runtime_ir import Function, Value, Variable
from spmd.compile.cpu.runtime_ir_pool import WORKER_NS

# ---- the run context, on the stack of `spmd_run` (byte offsets) ----------------------------------

# Counters have a row per loop level, with a word per device; the row before the first holds the
# lane of the parallel loop around, which slots know as level -1.
FRAMES, FRAME_BYTES, COUNTERS, COUNTER_BYTES, REPORT, CALL, ARGS, THREADS = range(0, 64, 8)
DEVICE_COUNT, LEVEL_COUNT = 64, 72
CONTEXT_BYTES = 80

# Work is shared from this much on (an awake pool costs about 1 us to fork and join, waking it 10 to
# 50 us, on virtual machines 100). In picoseconds. One that sleeps is woken for less where work has
# come shortly before: more will, and find it awake. (70 us of work every 3 ms: 98 us alone, 133 if
# the pool is woken each time.)
PARALLEL_PS = 3_000_000
WAKE_AGAIN_PS = 30_000_000
WAKE_PS = 100_000_000
# Up to here one chunk a thread, beyond it many, so that a slow thread can be helped out, and what a
# job that runs backwards finds in the caches is not overwritten before it is read (4 MB to 4 MB on
# two threads: 16 chunks each take 0.9 of the time of 4).
COARSE_PS = 50_000_000
FINE_CHUNKS = 16
# A copy is shared in pieces of this many bytes.
COPY_PIECE = 64 * 1024
COPY_PIECE_PS = 50 * COPY_PIECE
LEAST_CHUNK_PS = 2_000_000


def execute_texts() -> list[str]:
    """The functions of the executor."""
    functions = (
        _resolve(),
        _share(),
        _kernel_units(),
        _kernel(),
        _gang_pieces(),
        _gang(),
        _copy_pieces(),
        _copy(),
        _callback(),
        _block(),
        _enter_phase(),
        _run_steps(),
        _run(),
    )
    return [f.text() for f in functions]


# Every step function and `block` take these: context, step (or begin of a block), end of the
# block, list of active devices (i32), their number, room for the arguments of one call.
STEP_SIGNATURE = ["ptr", "ptr", "ptr", "ptr", "i64", "ptr"]


def field(f: Function, step: Value, index: int) -> Value:
    """The field `index` of a step, behind its head."""
    return f.load("i64", step, 8 * (layout.HEAD + index))


def device_at(f: Function, active: Value, position: Value) -> Value:
    """The device number at a position of an active list."""
    return f.convert("sext", f.load("i32", active, position * 4), "i64")


def next_slot(f: Function, cursor: Variable) -> None:
    """Move a cursor behind the slot it points to."""
    strides = f.load("i64", cursor.get(), 16)
    cursor.set(f.at(cursor.get(), strides * 16 + 24))


def _resolve() -> Function:
    """resolve(context, slot, device): the address of a slot in a device's frame."""
    params = ["ptr", "ptr", "i64"]
    f = Function("resolve", "ptr", params, internal=True, attributes="alwaysinline nounwind")
    context, slot, device = f.params
    frames = f.load("ptr", context, FRAMES)
    frame = f.at(frames, f.load("i64", context, FRAME_BYTES) * device)
    base = f.load("ptr", frame, f.load("i64", slot) * 8)
    address = f.var("ptr", f.at(base, f.load("i64", slot, 8)))
    strides = f.load("i64", slot, 16)
    with f.if_(strides > 0):
        counters = f.load("ptr", context, COUNTERS)
        row = f.load("i64", context, COUNTER_BYTES)
        with f.range(0, strides) as i:
            level = f.load("i64", slot, i * 16 + 24)
            stride = f.load("i64", slot, i * 16 + 32)
            index = f.load("i64", f.at(counters, level * row), device * 8)
            address.set(f.at(address.get(), index * stride))
    f.ret(address.get())
    return f


def context_alone(f: Function, outer: Value) -> Value:
    """A copy of a context for one thread of the pool: there is nobody to share work with."""
    context = f.stack("i64", CONTEXT_BYTES // 8)
    f.call("memcpy", "ptr", context, outer, f.value("i64", CONTEXT_BYTES))
    f.store(f.value("i64", 1), context, THREADS)
    return context


# ---- sharing work --------------------------------------------------------------------------------


def _share() -> Function:
    """share(context, body, job, units, unit_ps): run a body over units, on the pool if it pays."""
    f = Function("share", "void", ["ptr", "ptr", "ptr", "i64", "i64"], internal=True)
    context, body, job, units, unit_ps = f.params
    threads = f.load("i64", context, THREADS)
    total = units * unit_ps
    pays = all_of(threads > 1, units > 1, total >= PARALLEL_PS)
    with f.if_(pays):
        pool = f.symbol("spmd_pool")
        # A pool that was never started counts as asleep.
        awake = f.load("i64", pool, pool_words.STARTED) - f.atomic_load(
            "i64", pool, pool_words.SLEEPERS
        )
        shares = f.var("i1", (awake > 0) | (total >= WAKE_PS))
        with f.if_(shares.get().equals(0) & (total >= WAKE_AGAIN_PS)):
            now = f.call("now", "i64")
            passed = now - f.atomic_load("i64", pool, pool_words.ALONE)
            f.atomic_store(now, pool, pool_words.ALONE)
            shares.set(passed < WORKER_NS)
        with f.if_(shares.get()):
            pieces = f.select(total < COARSE_PS, threads, threads * FINE_CHUNKS)
            chunk = (units + pieces - 1) // pieces
            least = f.value("i64", LEAST_CHUNK_PS) // f.larger(unit_ps, 1)
            f.call("parallel_for", "void", body, job, units, f.larger(f.larger(chunk, least), 1))
            f.ret()
    f.call(body, "void", job, f.value("i64", 0), units)
    return f


def all_of(*conditions: Value) -> Value:
    """The conjunction of conditions."""
    result = conditions[0]
    for condition in conditions[1:]:
        result = result & condition
    return result


# ---- kernels -------------------------------------------------------------------------------------

# A job over devices: context, step or begin, end, active list, units per device, failure flag.
JOB_CONTEXT, JOB_STEP, JOB_END, JOB_ACTIVE, JOB_UNITS, JOB_FAILED = range(0, 48, 8)
JOB_BYTES = 48


def _fill_args(f: Function, context: Value, step: Value, device: Value, args: Value) -> Variable:
    """Write the addresses of a kernel's slots to `args`; the cursor ends behind the last slot."""
    cursor = f.var("ptr", f.at(step, 8 * (layout.HEAD + layout.KERNEL_FIELDS)))
    with f.range(0, field(f, step, 3)) as i:
        address = f.call("resolve", "ptr", context, cursor.get(), device)
        f.store(address, args, i * 8)
        next_slot(f, cursor)
    return cursor


def _add_scratch(f: Function, step: Value, args: Value) -> Value:
    """Put the scratch pointer behind the args if the kernel wants one; 1 if there is no memory."""
    wanted = field(f, step, 4)
    failed = f.var("i64", 0)
    with f.if_(wanted > 0):
        memory = f.call("scratch", "ptr", wanted)
        f.store(memory, args, field(f, step, 3) * 8)
        failed.set(f.convert("zext", memory.equals(0), "i64"))
    return failed.get()


def _kernel_units() -> Function:
    """Pool body: units [begin, end) of a kernel step, counted over all active devices."""
    f = Function("kernel_units", "void", ["ptr", "i64", "i64"], internal=True)
    job, begin, end = f.params
    context, step = f.load("ptr", job, JOB_CONTEXT), f.load("ptr", job, JOB_STEP)
    active, units = f.load("ptr", job, JOB_ACTIVE), f.load("i64", job, JOB_UNITS)
    # A body may run on any thread, so the arguments need room of its own.
    args = f.stack_bytes((field(f, step, 3) + 1) * 8)
    sizes = f.at(step, field(f, step, 5) * 8)
    function = f.load("ptr", step, 8 * layout.HEAD)
    now = f.var("i64", begin)
    with f.loop():
        unit = now.get()
        f.break_if(unit >= end)
        position = unit // units
        first = unit - position * units
        last = f.smaller(first + (end - unit), units)
        _fill_args(f, context, step, device_at(f, active, position), args)
        with f.if_else(_add_scratch(f, step, args).equals(0)) as it:
            f.call(function, "void", args, sizes, first, last)
            it.otherwise()
            f.atomic_store(f.value("i64", 1), job, JOB_FAILED)
        now.set(unit + (last - first))
    return f


def write_job(f: Function, *values: Value) -> Value:
    """A job over devices on the stack: context, step or begin, end, active list, units."""
    job = f.stack("i64", JOB_BYTES // 8)
    for i, value in enumerate(values):
        f.store(value, job, 8 * i)
    f.store(f.value("i64", 0), job, JOB_FAILED)
    return job


def _kernel() -> Function:
    """Run a kernel step: in place for short work, else on the pool."""
    f = Function("run_kernel", "i64", STEP_SIGNATURE, internal=True)
    context, step, end, active, count, args = f.params
    units, unit_ps = field(f, step, 1), field(f, step, 2)
    threads = f.load("i64", context, THREADS)
    with f.if_(all_of(threads > 1, units * unit_ps * count >= PARALLEL_PS)):
        job = write_job(f, context, step, end, active, units)
        f.call("share", "void", context, f.symbol("kernel_units"), job, units * count, unit_ps)
        failed = f.load("i64", job, JOB_FAILED)
        f.ret(f.select(failed.equals(0), f.value("i64", OK), NO_MEMORY))
    function = f.load("ptr", step, 8 * layout.HEAD)
    sizes = f.at(step, field(f, step, 5) * 8)
    with f.range(0, count) as position:
        _fill_args(f, context, step, device_at(f, active, position), args)
        with f.if_(_add_scratch(f, step, args).differs(0)):
            f.ret(NO_MEMORY)
        f.call(function, "void", args, sizes, f.value("i64", 0), units)
    f.ret(OK)
    return f


def _gang_pieces() -> Function:
    """Pool body: pieces [begin, end) of a gang, counted over all active devices."""
    f = Function("gang_pieces", "void", ["ptr", "i64", "i64"], internal=True)
    job, begin, end = f.params
    context, gang = f.load("ptr", job, JOB_CONTEXT), f.load("ptr", job, JOB_STEP)
    active, pieces = f.load("ptr", job, JOB_ACTIVE), f.load("i64", job, JOB_UNITS)
    args = f.stack_bytes(f.load("i64", context, ARGS) * 8)
    table = f.at(gang, 8 * (layout.HEAD + layout.GANG_FIELDS))
    with f.range(begin, end) as number:
        position = number // pieces
        piece = f.at(table, (number - position * pieces) * 24)
        step = f.at(gang, f.load("i64", piece) * 8)
        sizes = f.at(step, field(f, step, 5) * 8)
        function = f.load("ptr", step, 8 * layout.HEAD)
        _fill_args(f, context, step, device_at(f, active, position), args)
        with f.if_else(_add_scratch(f, step, args).equals(0)) as it:
            first, last = f.load("i64", piece, 8), f.load("i64", piece, 16)
            f.call(function, "void", args, sizes, first, last)
            it.otherwise()
            f.atomic_store(f.value("i64", 1), job, JOB_FAILED)
    return f


def _gang() -> Function:
    """Run a gang: all pieces of all its kernels are one job for the pool."""
    f = Function("run_gang", "i64", STEP_SIGNATURE, internal=True)
    context, step, end, active, count, _ = f.params
    pieces = field(f, step, 0)
    job = write_job(f, context, step, end, active, pieces)
    body, piece_ps = f.symbol("gang_pieces"), field(f, step, 1)
    f.call("share", "void", context, body, job, pieces * count, piece_ps)
    f.ret(f.select(f.load("i64", job, JOB_FAILED).equals(0), f.value("i64", OK), NO_MEMORY))
    return f


def _copy_pieces() -> Function:
    """Pool body: pieces [begin, end) of a copy, job = [target, source, bytes]."""
    f = Function("copy_pieces", "void", ["ptr", "i64", "i64"], internal=True)
    job, begin, end = f.params
    first = begin * COPY_PIECE
    length = f.smaller(end * COPY_PIECE, f.load("i64", job, 16)) - first
    target, source = f.load("ptr", job), f.load("ptr", job, 8)
    f.call("memcpy", "ptr", f.at(target, first), f.at(source, first), length)
    return f


def _copy() -> Function:
    """Run a copy step for each active device; long copies are shared if they do not overlap."""
    f = Function("run_copy", "i64", STEP_SIGNATURE, internal=True)
    context, step, _, active, count, _ = f.params
    cursor = f.var("ptr", f.at(step, 8 * (layout.HEAD + layout.COPY_FIELDS)))
    target = cursor.get()
    next_slot(f, cursor)
    source = cursor.get()
    nbytes, job = field(f, step, 0), f.stack("i64", 3)
    with f.range(0, count) as position:
        device = device_at(f, active, position)
        to = f.call("resolve", "ptr", context, target, device)
        origin = f.call("resolve", "ptr", context, source, device)
        distance = f.convert("ptrtoint", to, "i64") - f.convert("ptrtoint", origin, "i64")
        apart = (distance >= nbytes) | (nbytes + distance <= 0)
        with f.if_else((nbytes >= 4 * COPY_PIECE) & apart) as it:
            for i, value in enumerate((to, origin, nbytes)):
                f.store(value, job, 8 * i)
            pieces = (nbytes + (COPY_PIECE - 1)) // COPY_PIECE
            body, piece_ps = f.symbol("copy_pieces"), f.value("i64", COPY_PIECE_PS)
            f.call("share", "void", context, body, job, pieces, piece_ps)
            it.otherwise()
            f.call("memmove", "ptr", to, origin, nbytes)
    f.ret(OK)
    return f


# ---- Python --------------------------------------------------------------------------------------


def report_step(f: Function, context: Value, step: Value) -> Value:
    """Note which step failed; gives the report, for the devices that reached it."""
    report = f.load("ptr", context, REPORT)
    f.store(f.load("i64", step, 16), report, 8 * REPORT_STEP)
    return report


def report_reached(f: Function, context: Value, step: Value, active: Value, count: Value) -> None:
    """Note which step failed and that only the active devices had reached it."""
    report = report_step(f, context, step)
    with f.range(0, f.load("i64", context, DEVICE_COUNT)) as device:
        f.store(f.value("i64", 0), report, device * 8 + 8 * REPORT_REACHED)
    with f.range(0, count) as position:
        device = device_at(f, active, position)
        f.store(f.value("i64", 1), report, device * 8 + 8 * REPORT_REACHED)


def _callback() -> Function:
    """Call Python, `callback(step id, device, args)`: for each device, or for all as device -1."""
    f = Function("run_callback", "i64", STEP_SIGNATURE, internal=True)
    context, step, _, active, count, args = f.params
    devices = f.load("i64", context, DEVICE_COUNT)
    views, together = field(f, step, 0), field(f, step, 1).differs(0)
    with f.if_(together & (count < devices)):
        report_reached(f, context, step, active, count)
        f.ret(MISMATCH)
    width = f.select(together, count, 1)
    table = f.var("ptr", args)
    with f.if_(together):
        table.set(f.stack_bytes(width * views * 8 + 8))
    call, number = f.load("ptr", context, CALL), f.load("i64", step, 16)
    first = f.at(step, 8 * (layout.HEAD + layout.CALLBACK_FIELDS))
    with f.range(0, count) as position:
        device = device_at(f, active, position)
        row = f.at(table.get(), f.select(together, position, 0) * views * 8)
        cursor = f.var("ptr", first)
        with f.range(0, views) as i:
            f.store(f.call("resolve", "ptr", context, cursor.get(), device), row, i * 8)
            next_slot(f, cursor)
        last = position.equals(count - 1)
        with f.if_(last | together.equals(0)):
            who = f.select(together, -1, device)
            status = f.call(call, "i64", number, who, table.get())
            with f.if_(status.differs(0)):
                report_step(f, context, step)
                f.ret(RAISED)
    f.ret(OK)
    return f


# ---- blocks and programs -------------------------------------------------------------------------

_STEPS = (
    (layout.KERNEL, "run_kernel"),
    (layout.COPY, "run_copy"),
    (layout.COLLECTIVE, "run_collective"),
    (layout.CALLBACK, "run_callback"),
    (layout.SEGMENT, "run_segment"),
    (layout.FOR, "run_for"),
    (layout.WHILE, "run_while"),
    (layout.COND, "run_cond"),
    (layout.PARALLEL, "run_parallel"),
    (layout.GANG, "run_gang"),
    (layout.RANKS, "run_ranks"),
)


def _block() -> Function:
    """Run the steps from begin to end for the active devices."""
    f = Function("block", "i64", STEP_SIGNATURE, internal=True)
    context, begin, end, active, count, args = f.params
    now = f.var("ptr", begin)
    with f.loop():
        step = now.get()
        f.break_if(step.equals(end))
        opcode = f.load("i64", step)
        after = f.at(step, f.load("i64", step, 8) * 8)
        status = f.var("i64", OK)
        for number, name in _STEPS:
            with f.if_(opcode.equals(number)):
                status.set(f.call(name, "i64", context, step, after, active, count, args))
        with f.if_(status.get().differs(OK)):
            f.ret(status.get())
        now.set(after)
    f.ret(OK)
    return f


def _enter_phase() -> Function:
    """enter_phase(flight, phase): say in the flight record what the rank does now, and since when.

    Gives what it did before. A process that is alone writes nothing, and reads no clock.
    """
    f = Function("enter_phase", "i64", ["ptr", "i64"], internal=True)
    record, phase = f.params
    with f.if_(f.load("i64", record, 8 * flight.SIZE) <= 1):
        f.ret(phase)
    before = f.load("i64", record, 8 * flight.PHASE)
    f.store(phase, record, 8 * flight.PHASE)
    f.store(f.call("now", "i64"), record, 8 * flight.SINCE)
    f.ret(before)
    return f


def _run_steps() -> Function:
    """run_steps(header, frames): run a program; the frames are followed by the report."""
    f = Function("run_steps", "i64", ["ptr", "ptr"], internal=True)
    header, frames = f.params
    code, words, devices, bases, levels, most = (f.load("i64", header, 8 * i) for i in range(6))
    context = f.stack("i64", CONTEXT_BYTES // 8)
    args = f.stack_bytes(most * 8)
    counters = f.stack_bytes((levels + 1) * devices * 8)
    workers = f.load("i64", f.symbol("spmd_pool"), pool_words.WORKERS)
    for offset, value in (
        (FRAMES, frames),
        (FRAME_BYTES, bases * 8),
        (COUNTERS, f.at(counters, devices * 8)),
        (COUNTER_BYTES, devices * 8),
        (REPORT, f.at(frames, bases * devices * 8)),
        (CALL, f.load("ptr", header, 8 * CALLBACK)),
        (ARGS, most),
        (THREADS, workers + 1),
        (DEVICE_COUNT, devices),
        (LEVEL_COUNT, levels),
    ):
        f.store(value, context, offset)
    begin = f.convert("inttoptr", code, "ptr")
    end = f.at(begin, words * 8)
    everyone = f.load("ptr", header, 8 * EVERYONE)
    f.ret(f.call("block", "i64", context, begin, end, everyone, devices, args))
    return f


def _run() -> Function:
    """spmd_run(header, frames): run a program on a thread of Python, as the flight record says."""
    f = Function("spmd_run", "i64", ["ptr", "ptr"])
    header, frames = f.params
    record = f.load("ptr", header, 8 * FLIGHT)
    before = f.call("enter_phase", "i64", record, f.value("i64", flight.PROGRAM))
    programs = f.load("i64", record, 8 * flight.PROGRAMS)
    f.store(programs + 1, record, 8 * flight.PROGRAMS)
    status = f.call("run_steps", "i64", header, frames)
    f.call("enter_phase", "i64", record, before)
    f.ret(status)
    return f
