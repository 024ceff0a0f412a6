"""Collectives with other processes of the host as native code, over memory that they share.

The one idea: a step holds its rounds as words (`native/program/encode_collectives.py`): copies,
reductions and meetings. Nothing here knows what an all_gather is. A meeting is `ShmCommunicator`'s:
the same words of the same pages, in the same order, so a rank that runs Python and one that runs
this meet each other.

Waiting goes from pauses of the processor over yields to a futex. Only a rank that slept in vain
calls Python, which looks for the reason, raises it, or lets the wait go on.
"""

from __future__ import annotations

from spmd.compile.native.llvm.function_builder import I64, Function, Ptr, Value, define
from spmd.compile.native.program import byte_code as layout
from spmd.compile.native.program import encode_collectives
from spmd.compile.native.program.run_layout import MISMATCH, OK, TROUBLE
from spmd.compile.native.runtime.ir.execute import (
    DEVICE_COUNT,
    device_at,
    field,
    next_slot,
    report_reached,
    report_step,
    resolve,
)
from spmd.compile.native.runtime.ir.module import clock
from spmd.compile.native.runtime.ir.thread_affinity import core
from spmd.compile.native.runtime.ir.wait import relax
from spmd.transport import flight_recorder as flight
from spmd.transport.call_signature import CALL_BYTES
from spmd.transport.shm import direct_read, native_state
from spmd.transport.shm import layout as shm_layout
from spmd.transport.shm import wait as shm_wait

_NANOSECONDS = 1_000_000_000
_FIRST_PARK = int(shm_wait.FIRST_PARK_SECONDS * _NANOSECONDS)
_LONGEST_PARK = int(shm_wait.LONGEST_PARK_SECONDS * _NANOSECONDS)


def rank_texts() -> list[str]:
    """The functions of collectives between processes."""
    functions = (
        resolve(),
        clock(),
        _park(),
        _wake(),
        _first_missing(),
        _wait(),
        _enter(),
        _agree(),
        _meet(),
        _find_slots(),
        _begin_record(),
        _end_record(),
        _copy_rows(),
        _reduce(),
        _show(),
        _read_rows(),
        _run_actions(),
        _ranks(),
    )
    return [f.text() for f in functions]


def _word(f: Function, state: Value, index: int) -> Value:
    return f.load("i64", state, 8 * index)


def _page(f: Function, state: Value, rank: Value) -> Value:
    return f.at(f.load("ptr", state, 8 * native_state.PAGES), (rank + 1) * shm_layout.PAGE)


# ---- waiting -------------------------------------------------------------------------------------


def _futex(f: Function, address: Value, operation: int, value: Value, limit: Value) -> Value:
    """The system call, for a word that several processes map."""
    number = shm_wait.futex_number()
    assert number is not None
    operands = (
        f.value("i64", number),
        address,
        f.value("i32", operation),
        value,
        limit,
        f.null(),
        f.value("i32", 0),
    )
    return f.call("syscall", "i64", *operands, type="i64 (i64, ...)")


@define("park_on", "void")
def _park(f: Function, word: Ptr, seen: I64, nanoseconds: I64) -> None:
    """park(word, seen, nanoseconds): sleep until the word changes, or so long."""
    if shm_wait.futex_number() is None:
        micros = f.smaller(nanoseconds, _FIRST_PARK) // 1000
        f.call("usleep", "i32", f.convert("trunc", micros, "i32"))
        return
    limit = f.stack("i64", 2)
    f.store(nanoseconds // _NANOSECONDS, limit)
    f.store(nanoseconds % _NANOSECONDS, limit, 8)
    # The futex compares the low half, which a counter changes at every step.
    _futex(f, word, shm_wait.FUTEX_WAIT, f.convert("trunc", seen, "i32"), limit)


@define("wake_all", "void")
def _wake(f: Function, word: Ptr) -> None:
    """wake_all(word): wake every process that sleeps on the word."""
    if shm_wait.futex_number() is not None:
        most = f.value("i32", shm_wait.MOST_WAITERS)
        _futex(f, word, shm_wait.FUTEX_WAKE, most, f.null())


@define("first_missing", "i64")
def _first_missing(f: Function, state: Ptr, step: I64) -> None:
    """first_missing(state, step): the first rank that has not arrived in a step, or -1."""
    with f.range(0, _word(f, state, native_state.SIZE)) as rank:
        arrived = f.atomic_load(_page(f, state, rank), 8 * shm_layout.ARRIVED)
        f.ret_if(arrived < step, rank)
    f.ret(-1)


def _trouble(f: Function, state: Value, digest: Value, what: int) -> Value:
    """Call Python; whether it raised."""
    f.store(digest, state, 8 * native_state.DIGEST)
    function = f.load("ptr", state, 8 * native_state.TROUBLE)
    return f.call(function, "i64", f.value("i64", what)).differs(0)


@define("wait_for", "i64")
def _wait(f: Function, state: Ptr, step: I64, digest: I64) -> None:
    """wait_for(state, step, digest): wait for all, beyond the first pauses; 1 if Python raised.

    A waiter says so before it looks at the counter again, and a rank that arrives writes the
    counter before it looks for waiters: one of them sees the other.
    """
    yields = f.var("i64", _word(f, state, native_state.YIELDS))
    # Ranks that the system put on one core, though there are enough, would yield to each other for
    # thousands of calls, 13 us each where 3 would do, and not be moved: only one that slept is
    # woken on a core that is free.
    awaited = f.larger(f.call("first_missing", "i64", state, step), 0)
    theirs = f.load("i64", _page(f, state, awaited), 8 * shm_layout.CORE)
    with f.if_((_word(f, state, native_state.PAUSES) > 0) & (theirs > 0) & theirs.equals(core(f))):
        yields.set(0)
    with f.range(0, yields.get()):
        f.ret_if(f.call("first_missing", "i64", state, step) < 0, 0)
        f.call("sched_yield", "i32")
    nanoseconds = f.var("i64", _FIRST_PARK)
    with f.loop():
        awaited = f.call("first_missing", "i64", state, step)
        f.ret_if(awaited < 0, 0)
        page = _page(f, state, awaited)
        f.atomic_store(f.value("i64", 1), page, 8 * shm_layout.WAITED_FOR)
        seen = f.atomic_load(page, 8 * shm_layout.ARRIVED, "seq_cst")
        with f.if_(seen < step):
            f.call("park_on", "void", f.at(page, 8 * shm_layout.ARRIVED), seen, nanoseconds.get())
        # Woken by its arrival: the next one may be missing still. Else something may be wrong.
        with f.if_(f.atomic_load(page, 8 * shm_layout.ARRIVED) < step):
            f.ret_if(_trouble(f, state, digest, native_state.WAITING), 1)
            nanoseconds.set(f.smaller(nanoseconds.get() * 2, _LONGEST_PARK))
    f.ret(0)


# ---- meeting -------------------------------------------------------------------------------------


@define("enter_call", "void")
def _enter(f: Function, state: Ptr, digest: I64, packed: Ptr) -> None:
    """enter_call(state, digest, packed): show the call that this rank enters."""
    sequence = _word(f, state, native_state.SEQUENCE) + 1
    f.store(sequence, state, 8 * native_state.SEQUENCE)
    page = _page(f, state, _word(f, state, native_state.RANK))
    odd = sequence & 1
    shown = f.at(page, odd * 8 + 8 * shm_layout.DIGEST)
    with f.if_(f.load("i64", shown).differs(digest)):
        place = f.at(page, odd * CALL_BYTES + shm_layout.CALLS)
        f.call("memcpy", "ptr", place, packed, f.value("i64", CALL_BYTES))
        f.store(digest, shown)
    f.store(sequence + 1, page, 8 * shm_layout.ENTERED)
    f.store(core(f), page, 8 * shm_layout.CORE)


@define("agree", "i64")
def _agree(f: Function, state: Ptr, digest: I64) -> None:
    """agree(state, digest): 1 if every rank shows the same call."""
    odd = _word(f, state, native_state.SEQUENCE) & 1
    with f.range(0, _word(f, state, native_state.SIZE)) as rank:
        shown = f.at(_page(f, state, rank), odd * 8 + 8 * shm_layout.DIGEST)
        f.ret_if(f.load("i64", shown).differs(digest), 0)
    f.ret(1)


@define("meet", "i64")
def _meet(f: Function, state: Ptr, digest: I64, first: I64) -> None:
    """meet(state, digest, first): say that the slot is filled, wait for all; 1 if Python raised."""
    step = _word(f, state, native_state.STEP) + 1
    f.store(step, state, 8 * native_state.STEP)
    own = _page(f, state, _word(f, state, native_state.RANK))
    f.atomic_store(step, own, 8 * shm_layout.ARRIVED)
    waited_for = f.atomic_load(own, 8 * shm_layout.WAITED_FOR, "seq_cst")
    with f.if_(waited_for.differs(0)):
        f.atomic_store(f.value("i64", 0), own, 8 * shm_layout.WAITED_FOR)
        f.call("wake_all", "void", f.at(own, 8 * shm_layout.ARRIVED))
    pauses = f.var("i64", _word(f, state, native_state.PAUSES))
    with f.range(0, _word(f, state, native_state.SIZE)) as rank:
        page = _page(f, state, rank)
        with f.loop():
            f.break_if(f.atomic_load(page, 8 * shm_layout.ARRIVED) >= step)
            with f.if_(pauses.get() <= 0):
                f.ret_if(f.call("wait_for", "i64", state, step, digest).differs(0), 1)
            pauses.set(pauses.get() - 1)
            relax(f)
    with f.if_(first.differs(0)):
        with f.if_(f.call("agree", "i64", state, digest).equals(0)):
            f.ret_if(_trouble(f, state, digest, native_state.DIFFERENT), 1)
    f.ret(0)


# ---- the flight record ---------------------------------------------------------------------------


@define("begin_record", "i64")
def _begin_record(f: Function, state: Ptr, label: I64, nbytes: I64) -> None:
    """begin_record(state, label, bytes): record a collective's begin; gives the last phase.

    The same as `GroupLog.begin`. The record's number is written last, for readers that look on.
    """
    page = f.load("ptr", state, 8 * native_state.RECORD)
    count = f.load("i64", page, 8 * flight.COUNT)
    record = f.at(
        page,
        (count % flight.RECORDS) * (8 * flight.RECORD_WORDS) + flight.RING,
    )
    calls = f.load("ptr", state, 8 * native_state.CALLS)
    call = f.load("i64", calls) + 1
    f.store(call, calls)
    now = f.call("now", "i64")
    for word, value in (
        (flight.LABEL, label),
        (flight.BYTES, nbytes),
        (flight.GROUP, _word(f, state, native_state.GROUP)),
        (flight.ENQUEUED, now),
        (flight.ENTERED, now),
        (flight.COMPLETED, f.value("i64", 0)),
        (flight.CALL, call),
    ):
        f.store(value, record, 8 * word)
    before = f.load("i64", page, 8 * flight.PHASE)
    f.store(f.value("i64", flight.COLLECTIVE), page, 8 * flight.PHASE)
    f.store(now, page, 8 * flight.SINCE)
    f.do("fence release")
    f.store(count + 1, record, 8 * flight.SEQUENCE)
    f.store(count + 1, page, 8 * flight.COUNT)
    f.ret(before)


@define("end_record", "void")
def _end_record(f: Function, state: Ptr, place: I64, phase: I64, completed: I64) -> None:
    """end_record(state, place, phase, completed): the rank returns to its last phase.

    `place` is the number of records before this one; one that is not completed stays open.
    """
    page = f.load("ptr", state, 8 * native_state.RECORD)
    now = f.call("now", "i64")
    with f.if_(completed.differs(0)):
        record = f.at(
            page,
            (place % flight.RECORDS) * (8 * flight.RECORD_WORDS) + flight.RING,
        )
        f.store(now, record, 8 * flight.COMPLETED)
    f.store(now, page, 8 * flight.SINCE)
    f.store(phase, page, 8 * flight.PHASE)


# ---- rounds --------------------------------------------------------------------------------------


@define("find_slots", "void")
def _find_slots(f: Function, state: Ptr, table: Ptr) -> None:
    """find_slots(state, table): all ranks' slots of this step, and mine of the next."""
    slots, width = (
        f.load("ptr", state, 8 * native_state.SLOTS),
        _word(f, state, native_state.SLOT_BYTES),
    )
    odd = _word(f, state, native_state.STEP) & 1
    with f.range(0, _word(f, state, native_state.SIZE)) as rank:
        f.store(
            f.at(slots, (rank * 2 + odd) * width), table, (rank + encode_collectives.FIRST_SLOT) * 8
        )
    own = _word(f, state, native_state.RANK) * 2 + (odd ^ 1)
    f.store(f.at(slots, own * width), table, 8 * encode_collectives.NEXT)


def _place(f: Function, table: Value, words: Value, at: int | Value) -> Value:
    """The address that two words of an action stand for."""
    memory = f.load("ptr", table, f.load("i64", words, at) * 8)
    return f.at(memory, f.load("i64", words, at + 8))


@define("copy_rows", "void")
def _copy_rows(f: Function, table: Ptr, action: Ptr) -> None:
    """copy_rows(table, action): one copy, row by row."""
    target, source = (_place(f, table, action, at) for at in (16, 32))
    width, rows, ahead, behind = (f.load("i64", action, at) for at in (48, 56, 64, 72))
    with f.range(0, rows) as row:
        to, origin = f.at(target, row * ahead), f.at(source, row * behind)
        f.call("memcpy", "ptr", to, origin, width)


@define("reduce_slots", "void")
def _reduce(f: Function, table: Ptr, action: Ptr, args: Ptr) -> None:
    """reduce_slots(table, action, args): one reduction."""
    kernel, count = f.load("ptr", action, 16), f.load("i64", action, 24)
    sources, targets = f.load("i64", action, 32), f.load("i64", action, 40)
    with f.range(0, sources + targets) as i:
        f.store(_place(f, table, action, i * 16 + 8 * encode_collectives.REDUCE_WORDS), args, i * 8)
    # Both numbers stand side by side, as the kernel wants them.
    f.call(kernel, "void", args, f.at(action, 32), f.value("i64", 0), count)


@define("show_places", "void")
def _show(f: Function, state: Ptr, table: Ptr, action: Ptr) -> None:
    """show_places(state, table, action): let the others read from some places."""
    page = _page(f, state, _word(f, state, native_state.RANK))
    with f.range(0, f.load("i64", action, 16)) as i:
        shown = _place(f, table, action, i * 16 + 8 * encode_collectives.SHOW_WORDS)
        f.store(shown, f.at(page, i * 8 + 8 * shm_layout.SHOWN))


@define("read_rows", "i64")
def _read_rows(f: Function, state: Ptr, table: Ptr, action: Ptr) -> None:
    """read_rows(state, table, action): copy rows from a rank's memory; 1 if that failed."""
    number = direct_read.readv_number()
    if number is None:
        f.ret(1)  # never called: ranks read only where they found that they can
        return
    target, rank = _place(f, table, action, 16), f.load("i64", action, 32)
    page = _page(f, state, rank)
    shown = f.at(page, f.load("i64", action, 40) * 8 + 8 * shm_layout.SHOWN)
    source = f.load("i64", shown) + f.load("i64", action, 48)
    width, rows, ahead, behind = (f.load("i64", action, at) for at in (56, 64, 72, 80))
    process = f.load("i64", page, 8 * shm_layout.PROCESS)
    most = direct_read.MOST_ROWS
    ours, theirs = f.stack("i64", 2 * most), f.stack("i64", 2 * most)
    with f.range(0, rows, most) as first:
        count = f.smaller(rows - first, most)
        with f.range(0, count) as i:
            f.store(f.at(target, (first + i) * ahead), f.at(ours, i * 16))
            f.store(width, f.at(ours, i * 16), 8)
            f.store(source + (first + i) * behind, f.at(theirs, i * 16))
            f.store(width, f.at(theirs, i * 16), 8)
        operands = (f.value("i64", number), process, ours, count, theirs, count, f.value("i64", 0))
        done = f.call("syscall", "i64", *operands, type="i64 (i64, ...)")
        with f.if_(done.differs(count * width)):
            f.store(rank, state, 8 * native_state.UNREAD)
            f.ret(1)
    f.ret(0)


@define("run_actions", "i64")
def _run_actions(f: Function, state: Ptr, step: Ptr, table: Ptr, args: Ptr, own: Ptr) -> None:
    """run_actions(state, step, table, args, own): all actions of a step; 1 if Python raised.

    `own` is the part of the table behind the devices' buffers.
    """
    digest = field(f, step, 1)
    f.call("find_slots", "void", state, own)
    action = f.var("ptr", f.at(step, field(f, step, 3) * 8))
    with f.range(0, field(f, step, 4)):
        now = action.get()
        kind = f.load("i64", now)
        with f.if_(kind.equals(encode_collectives.MEET)):
            first = f.load("i64", now, 16)
            f.ret_if(f.call("meet", "i64", state, digest, first).differs(0), 1)
            f.call("find_slots", "void", state, own)
        with f.if_(kind.equals(encode_collectives.COPY)):
            f.call("copy_rows", "void", table, now)
        with f.if_(kind.equals(encode_collectives.CLEAR)):
            nbytes = f.load("i64", now, 32)
            f.call("memset", "ptr", _place(f, table, now, 16), f.value("i32", 0), nbytes)
        with f.if_(kind.equals(encode_collectives.REDUCE)):
            f.call("reduce_slots", "void", table, now, args)
        with f.if_(kind.equals(encode_collectives.SHOW)):
            f.call("show_places", "void", state, table, now)
        with f.if_(kind.equals(encode_collectives.READ)):
            with f.if_(f.call("read_rows", "i64", state, table, now).differs(0)):
                _trouble(f, state, digest, native_state.UNREADABLE)
                f.ret(1)
        action.set(f.at(now, f.load("i64", now, 8) * 8))
    f.ret(0)


@define("run_ranks", "i64")
def _ranks(
    f: Function, context: Ptr, step: Ptr, _end: Ptr, active: Ptr, count: I64, args: Ptr
) -> None:
    """Run a collective with other processes: all local devices must be there."""
    devices = f.load("i64", context, DEVICE_COUNT)
    with f.if_(count < devices):
        report_reached(f, context, step, active, count)
        f.ret(MISMATCH)
    state = f.load("ptr", step, 8 * layout.HEAD)
    others = _word(f, state, native_state.SIZE) + encode_collectives.FIRST_SLOT
    table = f.stack_bytes((devices * 2 + others) * 8)
    cursor = f.var("ptr", f.at(step, 8 * (layout.HEAD + layout.RANKS_FIELDS)))
    for first in (f.value("i64", 0), devices):
        with f.range(0, devices) as position:
            device = device_at(f, active, position)
            address = f.call("resolve", "ptr", context, cursor.get(), device)
            f.store(address, table, (device + first) * 8)
        next_slot(f, cursor)
    own = f.at(table, devices * 16)
    scratch = f.call("resolve", "ptr", context, cursor.get(), device_at(f, active, devices * 0))
    f.store(scratch, own, 8 * encode_collectives.SCRATCH)
    f.store(f.at(step, field(f, step, 5) * 8), own, 8 * encode_collectives.CONSTANT)
    page = f.load("ptr", state, 8 * native_state.RECORD)
    place, phase = f.var("i64", 0), f.var("i64", 0)
    with f.if_(page.differs(0)):
        place.set(f.load("i64", page, 8 * flight.COUNT))
        label, nbytes = field(f, step, 6), field(f, step, 7)
        phase.set(f.call("begin_record", "i64", state, label, nbytes))
    packed = f.at(step, field(f, step, 2) * 8)
    f.call("enter_call", "void", state, field(f, step, 1), packed)
    failed = f.call("run_actions", "i64", state, step, table, args, own)
    with f.if_(page.differs(0)):
        f.call("end_record", "void", state, place.get(), phase.get(), failed ^ 1)
    with f.if_(failed.differs(0)):
        report_step(f, context, step)
        f.ret(TROUBLE)
    f.ret(OK)
