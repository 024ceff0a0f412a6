"""Native functions for `cp.async`: copies to shared memory that land as late as their wait allows.

A thread keeps its copies in a queue, each with the number of its group. A wait for all but the last
groups lands the copies of the others, and the end of the thread lands all. Where a queue is full,
its oldest copy lands; a GPU may do that at any time.

In checked mode the target of a copy that is under way belongs to nobody: an access to it is
reported, whatever the order of threads is, as nothing was waited for. Where a copy begins and where
it lands it is a write of its thread, which races like any other.

PTX ISA, section 9.7.9 (cp.async).
"""

from __future__ import annotations

from spmd.compile.cuda.emulator import layout
from spmd.compile.cuda.emulator.checks import EPOCH, TOUCHED_WORDS, UNDER_WAY
from spmd.compile.cuda.emulator.layout import COPY_SLOTS, COPY_WORDS, QUEUE_BYTES, WORDS
from spmd.compile.native.llvm.function_builder import Function, Value, Words

# A queue begins with: copies that have landed, copies that have begun, groups that are complete.
_LANDED, _BEGUN, _GROUPS, _RING = 0, 8, 16, 32
# A copy: shared address (negative: refused), the host's address, bytes of the target and of the
# source, the number of its group, its place.
_TARGET, _SOURCE, _SIZE, _VALID, _GROUP, _PLACE = range(0, 8 * COPY_WORDS, 8)


def reset_text(symbol: str) -> str:
    """`void (env, thread)`: a thread begins, without copies."""
    f = Function(symbol, "void", ["ptr", "i64"])
    queue = _queue(f, *f.params)
    for offset in (_LANDED, _BEGUN, _GROUPS):
        f.store(f.value("i64", 0), queue, offset)
    f.ret()
    return f.text()


def begin_text(symbol: str, land: str, checks: tuple[str, str, str] | None) -> str:
    """`void (env, thread, target, source, size, valid, place)`: begin a copy.

    `valid` bytes come from the source, the rest of the `size` bytes becomes zero. `checks` are the
    functions that check accesses to global and shared memory, and the one that reports.
    """
    f = Function(symbol, "void", ["ptr", *["i64"] * 6])
    environment, thread, target, source, size, valid, place = f.params
    words = Words(f, environment, WORDS)
    queue = _queue(f, environment, thread)
    with f.if_((f.load("i64", queue, _BEGUN) - f.load("i64", queue, _LANDED)) >= COPY_SLOTS):
        # The oldest copy, and with it those of its group.
        groups = f.load("i64", queue, _GROUPS)
        oldest = f.load("i64", _entry(f, queue, f.load("i64", queue, _LANDED)), _GROUP)
        f.call(land, "void", environment, thread, groups - oldest - 1)
    kept, host = f.var("i64", target), f.var("i64", source + words["delta"])
    if checks is not None:
        check_global, check_shared, report = checks
        one, zero = f.value("i64", 1), f.value("i64", 0)
        with f.if_((source & (size - 1)).differs(0)):
            kind = f.value("i64", layout.MISALIGNED)
            f.call(report, "void", environment, kind, source, size, thread, place, zero, zero)
        with f.if_(valid > 0):
            given = source, valid, thread, place, zero
            checked = f.call(check_global, "ptr", environment, *given)
            host.set(f.convert("ptrtoint", checked, "i64"))
        checked = f.call(check_shared, "ptr", environment, target, size, thread, place, one)
        with f.if_else(
            f.convert("ptrtoint", checked, "i64").equals(words["shared"] + target)
        ) as it:
            who = (words["epoch"] << EPOCH) | (thread + (1 + UNDER_WAY))
            _mark(f, words, target, size, who, place)
            it.otherwise()
            kept.set(-1)
    begun = f.load("i64", queue, _BEGUN)
    entry = _entry(f, queue, begun)
    values = kept.get(), host.get(), size, valid, f.load("i64", queue, _GROUPS), place
    for k, value in enumerate(values):
        f.store(value, entry, 8 * k)
    f.store(begun + 1, queue, _BEGUN)
    f.ret()
    return f.text()


def commit_text(symbol: str) -> str:
    """`void (env, thread)`: the copies since the last group are one."""
    f = Function(symbol, "void", ["ptr", "i64"])
    queue = _queue(f, *f.params)
    f.store(f.load("i64", queue, _GROUPS) + 1, queue, _GROUPS)
    f.ret()
    return f.text()


def land_text(symbol: str, check_shared: str | None) -> str:
    """`void (env, thread, keep)`: land the copies of all groups but the last `keep` complete ones.

    With -1 those that are in no complete group land too.
    """
    f = Function(symbol, "void", ["ptr", "i64", "i64"])
    environment, thread, keep = f.params
    words = Words(f, environment, WORDS)
    queue = _queue(f, environment, thread)
    limit = f.load("i64", queue, _GROUPS) - keep
    with f.loop():
        landed = f.load("i64", queue, _LANDED)
        f.break_if(landed >= f.load("i64", queue, _BEGUN))
        entry = _entry(f, queue, landed)
        f.break_if(f.load("i64", entry, _GROUP) >= limit)
        target, size, valid, place = (
            f.load("i64", entry, k) for k in (_TARGET, _SIZE, _VALID, _PLACE)
        )
        with f.if_(target >= 0):
            if check_shared is not None:
                none, one = f.value("i64", 0), f.value("i64", 1)
                _mark(f, words, target, size, none, none)
                given = target, size, thread, place, one
                f.call(check_shared, "ptr", environment, *given)
            into = f.convert("inttoptr", words["shared"] + target, "ptr")
            source = f.convert("inttoptr", f.load("i64", entry, _SOURCE), "ptr")
            plain, zero = f.value("i1", 0), f.value("i8", 0)
            f.call("llvm.memset.p0.i64", "void", into, zero, size, plain)
            f.call("llvm.memcpy.p0.p0.i64", "void", into, source, valid, plain)
        f.store(landed + 1, queue, _LANDED)
    f.ret()
    return f.text()


def _mark(
    f: Function, words: Words, target: Value, size: Value, writer: Value, place: Value
) -> None:
    """Set the writer of some shared bytes."""
    touched = f.convert("inttoptr", words["touched"], "ptr")
    with f.range(target, target + size) as byte:
        entry = f.at(touched, byte * (8 * TOUCHED_WORDS))
        f.store(writer, entry)
        f.store(place, entry, 8)


def _queue(f: Function, environment: Value, thread: Value) -> Value:
    copies = Words(f, environment, WORDS)["copies"]
    return f.convert("inttoptr", copies + thread * QUEUE_BYTES, "ptr")


def _entry(f: Function, queue: Value, number: Value) -> Value:
    """The place of a copy in its queue."""
    return f.at(queue, (number % COPY_SLOTS) * (8 * COPY_WORDS) + _RING)
