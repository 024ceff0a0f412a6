"""Waiting for a word that another thread writes: spinning at first, then yielding, then asleep.

The one idea: waking a thread costs 10 to 150 us, most of it on virtual machines, whose hosts have
to give an idle core back first. Most kernels take less, so a waiting thread spins for a while.
After the first moments it yields before each look, so that it only uses time that no other thread
wants. If another thread does want that time, the waiting thread sleeps soon.
"""

from __future__ import annotations

import ctypes
import platform
import sys

from spmd.compile.native.llvm.function_builder import Function, Value, define

# Looks with a pause between them (15 to 60 ns each) before a waiting thread yields.
PAUSES = 500
# Looks between two calls that let others run.
PAUSES_BETWEEN_YIELDS = 8
# A thread that yields to a busy process loses its core for several milliseconds, as if its time
# slice were used up, so it is not running when work arrives. A thread that lost as much as this
# spins a little longer for a while and then sleeps: a woken thread runs before those that have
# computed. Most busy processes are gone soon, so the while is short at first, and twice as long if
# the core is lost again. (With a busy process on the worker's core, jobs of 1.3 ms: 1.33 ms
# yielding, 0.94 so.)
CONTENDED_PAUSES = 4 * PAUSES
LOST_NS = 1_000_000
LEAST_CONTENDED_NS, MOST_CONTENDED_NS = 4_000_000, 64_000_000
# The words of a thread's note.
UNTIL, SPAN = 0, 8

# getrusage: of this thread, how often it was taken off its core (ru_nivcsw).
_COUNTS_SWITCHES = sys.platform.startswith("linux") and ctypes.sizeof(ctypes.c_long) == 8
_THIS_THREAD, _TAKEN_OFF, _USAGE_WORDS = 1, 17, 18

_MACHINE = platform.machine().lower()
_PAUSE = {
    "x86_64": ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"),
    "amd64": ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"),
    "aarch64": ("declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"),
    "arm64": ("declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"),
}
_PAUSE_DECLARATION, _PAUSE_CALL = _PAUSE.get(_MACHINE, ("", "fence seq_cst"))


def wait_texts() -> list[str]:
    """The declarations and functions."""
    return [
        _PAUSE_DECLARATION,
        _switches().text(),
        _spin("differs").text(),
        _spin("equals").text(),
    ]


def relax(f: Function) -> None:
    """Let the other thread of a core run for a moment."""
    f.do(_PAUSE_CALL)


def _spin(wanted: str) -> Function:
    """spin_until_differs(word, value, ns, contended), spin_until_equals: 1 when it does, else 0.

    0 means that time is up, or that other processes want the core. `contended` is the waiting
    thread's note of that: until when it does not yield, but sleeps, and how long that is.
    """
    params = ["ptr", "i64", "i64", "ptr"]
    f = Function(f"spin_until_{wanted}", "i64", params, internal=True)
    word, value, nanoseconds, contended = f.params

    def look(times: int) -> None:
        with f.range(0, times):
            f.ret_if(_holds(f, word, value, wanted), 1)
            relax(f)

    look(PAUSES)
    begun = f.var("i64", f.call("now", "i64"))
    spins_only = begun.get() < f.load("i64", contended, UNTIL)
    with f.if_(spins_only):
        look(CONTENDED_PAUSES)
    with f.if_((nanoseconds > 0) & spins_only.equals(0)):
        end, switches = begun.get() + nanoseconds, f.call("switches", "i64")
        with f.loop():
            f.call("sched_yield", "i32")
            now = f.call("now", "i64")
            with f.if_(now - begun.get() >= LOST_NS):
                # Or the core itself was away, as those of virtual machines are.
                taken = f.call("switches", "i64").differs(switches)
                with f.if_(taken):
                    _note_loss(f, contended, begun.get(), now)
                f.break_if(taken)
            look(PAUSES_BETWEEN_YIELDS)
            f.break_if(now >= end)
            begun.set(now)
    f.ret(f.convert("zext", _holds(f, word, value, wanted), "i64"))
    return f


def _note_loss(f: Function, contended: Value, begun: Value, now: Value) -> None:
    """Sleep from now on, for twice as long as the last time if that was just before."""
    last = f.load("i64", contended, SPAN)
    again = begun - f.load("i64", contended, UNTIL) < last
    least = f.value("i64", LEAST_CONTENDED_NS)
    span = f.smaller(f.select(again, last * 2, least), MOST_CONTENDED_NS)
    f.store(span, contended, SPAN)
    f.store(now + span, contended, UNTIL)


@define("switches", "i64")
def _switches(f: Function) -> None:
    """switches(): how often this thread was taken off its core while it wanted to run."""
    if not _COUNTS_SWITCHES:
        f.ret(0)
        return
    usage = f.stack("i64", _USAGE_WORDS)
    f.call("getrusage", "i32", f.value("i32", _THIS_THREAD), usage)
    f.ret(f.load("i64", usage, 8 * _TAKEN_OFF))


def _holds(f: Function, word: Value, value: Value, wanted: str) -> Value:
    found = f.atomic_load(word, 0)
    return found.equals(value) if wanted == "equals" else found.differs(value)
