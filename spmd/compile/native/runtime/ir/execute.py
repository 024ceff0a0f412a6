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

from spmd.compile.native.llvm.function_builder import I64, Function, Ptr, Value, Variable, define
from spmd.compile.native.program import byte_code as layout
from spmd.compile.native.program.run_layout import (
    ALL_DEVICES,
    CALLBACK,
    FLIGHT,
    NO_MEMORY,
    OK,
    PARALLEL_PS,
    REPORT_REACHED,
    REPORT_STEP,
)
from spmd.compile.native.runtime import pool_layout
from spmd.compile.native.runtime.ir import interrupt
from spmd.compile.native.runtime.ir.module import POOL, SHARE_COPY, SHARE_KERNEL
from spmd.transport import flight_recorder as flight

# ---- the run context, on the stack of `spmd_run` (byte offsets) ----------------------------------

# Counters have a row per loop level, with a word per device; the row before the first holds the
# lane of the parallel loop around, which slots know as level -1.
FRAMES, FRAME_BYTES, COUNTERS, COUNTER_BYTES, REPORT, CALL, ARGS, THREADS = range(0, 64, 8)
DEVICE_COUNT, LEVEL_COUNT = 64, 72
assert LEVEL_COUNT < interrupt.STOP  # the words of `interrupt` follow
CONTEXT_BYTES = interrupt.END

# A pool that sleeps is woken for so much work, in picoseconds (waking it costs 10 to 50 us, on
# virtual machines 100); for less where work has come shortly before: more will, and find it awake.
# (70 us of work every 3 ms: 98 us alone, 133 if the pool is woken each time.)
WAKE_AGAIN_PS = 30_000_000
WAKE_PS = 100_000_000
FINE_CHUNKS = 16
# A copy is shared in pieces of this many bytes.
COPY_PIECE = 64 * 1024
COPY_PIECE_PS = 50 * COPY_PIECE
LEAST_CHUNK_PS = 2_000_000


def execute_texts() -> list[str]:
    """The functions of the executor."""
    functions = (
        resolve(),
        _kernel(),
        _copy(),
        _block(),
        _enter_phase(),
        _run_steps(),
        _run(),
    )
    return [f.text() for f in functions]


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


def resolve() -> Function:
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
    """A copy of a context for one thread of the pool: it shares no work."""
    context = f.stack("i64", CONTEXT_BYTES // 8)
    f.call("memcpy", "ptr", context, outer, f.value("i64", CONTEXT_BYTES))
    f.store(f.value("i64", 1), context, THREADS)
    return context


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


def fill_args(f: Function, context: Value, step: Value, device: Value, args: Value) -> Variable:
    """Write the addresses of a kernel's slots to `args`; the cursor ends behind the last slot."""
    cursor = f.var("ptr", f.at(step, 8 * (layout.HEAD + layout.KERNEL_FIELDS)))
    with f.range(0, field(f, step, 3)) as i:
        address = f.call("resolve", "ptr", context, cursor.get(), device)
        f.store(address, args, i * 8)
        next_slot(f, cursor)
    return cursor


def add_scratch(f: Function, context: Value, step: Value, args: Value) -> Value:
    """Put the extra operands of some kernels behind the args; 1 if there is no memory.

    These are the scratch pointer, and the context, for loops.
    """
    f.store(context, args, (field(f, step, 3) + 1) * 8)
    wanted = field(f, step, 4)
    failed = f.var("i64", 0)
    with f.if_(wanted > 0):
        memory = f.call("scratch", "ptr", wanted)
        f.store(memory, args, field(f, step, 3) * 8)
        failed.set(f.convert("zext", memory.equals(0), "i64"))
    return failed.get()


def write_job(f: Function, *values: Value) -> Value:
    """A job over devices on the stack: context, step or begin, end, active list, units."""
    job = f.stack("i64", JOB_BYTES // 8)
    for i, value in enumerate(values):
        f.store(value, job, 8 * i)
    f.store(f.value("i64", 0), job, JOB_FAILED)
    return job


@define("run_kernel", "i64")
def _kernel(
    f: Function, context: Ptr, step: Ptr, _end: Ptr, active: Ptr, count: I64, args: Ptr
) -> None:
    """Run a kernel step: in place for short work, else on the pool."""
    units, unit_ps = field(f, step, 1), field(f, step, 2)
    threads = f.load("i64", context, THREADS)
    with f.if_(all_of(threads > 1, units * unit_ps * count >= PARALLEL_PS)):
        f.ret(f.call(_of_table(f, SHARE_KERNEL), "i64", *f.params))
    function = f.load("ptr", step, 8 * layout.HEAD)
    sizes = f.at(step, field(f, step, 5) * 8)
    with f.range(0, count) as position:
        fill_args(f, context, step, device_at(f, active, position), args)
        f.ret_if(add_scratch(f, context, step, args).differs(0), NO_MEMORY)
        f.call(function, "void", args, sizes, f.value("i64", 0), units)
    f.ret(OK)


@define("run_copy", "i64")
def _copy(
    f: Function, context: Ptr, step: Ptr, _end: Ptr, active: Ptr, count: I64, _args: Ptr
) -> None:
    """Run a copy step for each active device; long copies are shared if they do not overlap."""
    cursor = f.var("ptr", f.at(step, 8 * (layout.HEAD + layout.COPY_FIELDS)))
    target = cursor.get()
    next_slot(f, cursor)
    source = cursor.get()
    nbytes, threads = field(f, step, 0), f.load("i64", context, THREADS)
    is_long = (threads > 1) & (nbytes >= 4 * COPY_PIECE)
    with f.range(0, count) as position:
        device = device_at(f, active, position)
        to = f.call("resolve", "ptr", context, target, device)
        origin = f.call("resolve", "ptr", context, source, device)
        distance = f.convert("ptrtoint", to, "i64") - f.convert("ptrtoint", origin, "i64")
        apart = (distance >= nbytes) | (nbytes + distance <= 0)
        with f.if_else(is_long & apart) as it:
            f.call(_of_table(f, SHARE_COPY), "void", context, to, origin, nbytes)
            it.otherwise()
            f.call("memmove", "ptr", to, origin, nbytes)
    f.ret(OK)


# ---- failures ------------------------------------------------------------------------------------


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


# ---- blocks and programs -------------------------------------------------------------------------

# The most frequent kinds of steps; the others are looked up.
_STEPS = ((layout.KERNEL, "run_kernel"), (layout.COPY, "run_copy"))


def _of_table(f: Function, slot: int) -> Value:
    """A function of another part."""
    return f.load("ptr", f.symbol("spmd_table"), 8 * slot)


@define("block", "i64")
def _block(
    f: Function, context: Ptr, begin: Ptr, end: Ptr, active: Ptr, count: I64, args: Ptr
) -> None:
    """Run the steps from begin to end for the active devices."""
    now = f.var("ptr", begin)
    with f.loop():
        step = now.get()
        f.break_if(step.equals(end))
        opcode = f.load("i64", step)
        after = f.at(step, f.load("i64", step, 8) * 8)
        given = (context, step, after, active, count, args)
        status = f.var("i64", -1)
        for number, name in _STEPS:
            with f.if_(opcode.equals(number)):
                status.set(f.call(name, "i64", *given))
        with f.if_(status.get() < OK):
            function = f.load("ptr", f.symbol("spmd_table"), opcode * 8)
            status.set(f.call(function, "i64", *given))
        with f.if_(status.get().differs(OK)):
            f.ret(status.get())
        interrupt.leave_if_unfinished(f, context)
        now.set(after)
    f.ret(OK)


@define("enter_phase", "i64")
def _enter_phase(f: Function, record: Ptr, phase: I64) -> None:
    """enter_phase(flight, phase): write the rank's phase and its start into the flight record.

    Gives the phase before. A process that is alone writes nothing, and reads no clock.
    """
    f.ret_if(f.load("i64", record, 8 * flight.SIZE) <= 1, phase)
    before = f.load("i64", record, 8 * flight.PHASE)
    f.store(phase, record, 8 * flight.PHASE)
    f.store(f.call("now", "i64"), record, 8 * flight.SINCE)
    f.ret(before)


@define("run_steps", "i64")
def _run_steps(f: Function, header: Ptr, frames: Ptr, stop: Ptr, serves: I64) -> None:
    """run_steps(header, frames, stop, serves): run a program; the report follows the frames.

    Its loops end when the word `stop` is not 0; the thread `serves` asks Python now and then for
    signals (0: none does).
    """
    code, words, devices, bases, levels, most = (f.load("i64", header, 8 * i) for i in range(6))
    context = f.stack("i64", CONTEXT_BYTES // 8)
    args = f.stack_bytes(most * 8)
    counters = f.stack_bytes((levels + 1) * devices * 8)
    # Without the pool, no work of this program is shared.
    pool, workers = f.atomic_load(f.symbol("spmd_table"), 8 * POOL), f.var("i64", 0)
    with f.if_(pool.differs(0)):
        place = f.convert("inttoptr", pool, "ptr")
        workers.set(f.load("i64", place, pool_layout.WORKERS))
    for offset, value in (
        (FRAMES, frames),
        (FRAME_BYTES, bases * 8),
        (COUNTERS, f.at(counters, devices * 8)),
        (COUNTER_BYTES, devices * 8),
        (REPORT, f.at(frames, bases * devices * 8)),
        (CALL, f.load("ptr", header, 8 * CALLBACK)),
        (ARGS, most),
        (THREADS, workers.get() + 1),
        (DEVICE_COUNT, devices),
        (LEVEL_COUNT, levels),
        *interrupt.words(f, stop, serves),
    ):
        f.store(value, context, offset)
    begin = f.convert("inttoptr", code, "ptr")
    end = f.at(begin, words * 8)
    all_devices = f.load("ptr", header, 8 * ALL_DEVICES)
    f.ret(f.call("block", "i64", context, begin, end, all_devices, devices, args))


@define("spmd_run", "i64", exported=True)
def _run(f: Function, header: Ptr, frames: Ptr) -> None:
    """spmd_run(header, frames): run a program on a thread of Python, as the flight record says."""
    record = f.load("ptr", header, 8 * FLIGHT)
    before = f.call("enter_phase", "i64", record, f.value("i64", flight.PROGRAM))
    programs = f.load("i64", record, 8 * flight.PROGRAMS)
    f.store(programs + 1, record, 8 * flight.PROGRAMS)
    stop = f.var("i64", 0)
    serves = f.call("pthread_self", "i64")
    status = f.call("run_steps", "i64", header, frames, stop.pointer, serves)
    f.call("enter_phase", "i64", record, before)
    f.ret(status)
