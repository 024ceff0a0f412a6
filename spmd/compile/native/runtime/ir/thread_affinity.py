"""Cores of the pool's workers: not the core of the thread that called them.

The one idea: a system that wakes a thread may put it on the core of the thread that wakes it, most
of all on virtual machines, where idle cores do not look idle. The two then take turns, and the
system takes up to tens of milliseconds to separate them (seen: kernels at the speed of one thread
for 150 calls on end). So the caller of a job says where the workers may not run. That is a system
call a worker, and only when the caller itself has moved.

The system cannot help a worker that loses its core to another process in the middle of a
job, so the caller does: when only waiting is left, it looks whether the workers inside get
any time, brings those that do not to its own core, sleeps until they are done, and sends them back.
"""

from __future__ import annotations

import ctypes
import sys

from spmd.compile.native.llvm.function_builder import I64, Function, Ptr, Value, define
from spmd.compile.native.runtime.ir.wait import relax
from spmd.compile.native.runtime.pool_layout import INSIDE, LINE_BYTES, MASK_BYTES, MOST_PLACED

_CORES = 8 * MASK_BYTES

_IS_LINUX = sys.platform.startswith("linux")
_CAN_PLACE = _IS_LINUX and hasattr(ctypes.CDLL(None), "pthread_setaffinity_np")

# A thread that has used no time while this passes has no core.
_HELD_NS = 4000


def place_texts() -> list[str]:
    """The functions."""
    functions = (_note_cores(), _keep_off(), _used(), _bring_held())
    return [f.text() for f in functions]


def core(f: Function) -> Value:
    """1 + the core that this runs on; 0 where the system does not say."""
    if not _IS_LINUX:
        return f.value("i64", 0)
    return f.convert("sext", f.call("sched_getcpu", "i32"), "i64") + 1


@define("note_cores", "void")
def _note_cores(f: Function, mask: Ptr) -> None:
    """note_cores(mask): write down the cores that the calling thread may use, or none."""
    if _CAN_PLACE:
        size = f.value("i64", MASK_BYTES)
        f.call("memset", "ptr", mask, f.value("i32", 0), size)
        f.call("sched_getaffinity", "i32", f.value("i32", 0), size, mask)


@define("keep_off", "void")
def _keep_off(f: Function, threads: Ptr, avoided: Ptr, count: I64, mask: Ptr) -> None:
    """keep_off(threads, avoided, count, mask): keep threads off the core that this runs on.

    `avoided` is for each thread the core that it was kept off before.
    """
    if not _CAN_PLACE:
        return
    here = core(f)
    f.ret_if((count > MOST_PLACED) | (here <= 0) | (here > _CORES))
    with f.range(0, count) as i:
        before = f.at(avoided, i * 8)
        with f.if_(f.load("i64", before).differs(here)):
            f.store(here, before)
            rest = f.stack("i64", MASK_BYTES // 8)
            f.call("memcpy", "ptr", rest, mask, f.value("i64", MASK_BYTES))
            word = f.at(rest, (here - 1) // 64 * 8)
            bit = f.value("i64", 1) << ((here - 1) % 64)
            f.store(f.load("i64", word) & (bit ^ -1), word)
            # A thread that may use one core only has to share it.
            some = f.var("i64", 0)
            with f.range(0, MASK_BYTES // 8) as k:
                some.set(some.get() | f.load("i64", rest, k * 8))
            with f.if_(some.get().differs(0)):
                thread, size = f.load("i64", threads, i * 8), f.value("i64", MASK_BYTES)
                f.call("pthread_setaffinity_np", "i32", thread, size, rest)


@define("used", "i64")
def _used(f: Function, thread: I64) -> None:
    """used(thread): the processor time of a thread in nanoseconds, its present turn included."""
    if not _CAN_PLACE:
        f.ret(0)
        return
    clock, time = f.stack("i32"), f.stack("i64", 2)
    failed = f.call("pthread_getcpuclockid", "i32", thread, clock)
    with f.if_(failed.differs(0)):
        f.ret(f.call("now", "i64"))
    f.call("clock_gettime", "i32", f.load("i32", clock), time)
    f.ret(f.load("i64", time) * 1_000_000_000 + f.load("i64", time, 8))


@define("bring_held", "i64")
def _bring_held(f: Function, threads: Ptr, avoided: Ptr, lines: Ptr, count: I64) -> None:
    """bring_held(threads, avoided, lines, count): bring workers that get no time to this core.

    Gives how many. `lines` are those of the threads; see `LINE_BYTES`.
    """
    if not _CAN_PLACE:
        f.ret(0)
        return
    here = core(f)
    f.ret_if((count > MOST_PLACED) | (here <= 0) | (here > _CORES), 0)
    before, brought = f.stack("i64", MOST_PLACED), f.var("i64", 0)
    with f.range(0, count) as i:
        f.store(f.call("used", "i64", f.load("i64", threads, i * 8)), before, i * 8)
    end = f.call("now", "i64") + _HELD_NS
    with f.loop():
        f.break_if(f.call("now", "i64") >= end)
        relax(f)
    with f.range(0, count) as i:
        thread = f.load("i64", threads, i * 8)
        # Read its time first: a thread that starts to work after this was not seen to stand still.
        still = f.call("used", "i64", thread).equals(f.load("i64", before, i * 8))
        works = f.atomic_load(f.at(lines, i * LINE_BYTES), INSIDE).differs(0)
        with f.if_(still & works):
            mask, size = f.stack("i64", MASK_BYTES // 8), f.value("i64", MASK_BYTES)
            f.call("memset", "ptr", mask, f.value("i32", 0), size)
            bit = f.value("i64", 1) << ((here - 1) % 64)
            f.store(bit, f.at(mask, (here - 1) // 64 * 8))
            f.call("pthread_setaffinity_np", "i32", thread, size, mask)
            f.store(f.value("i64", 0), f.at(avoided, i * 8))
            brought.set(brought.get() + 1)
    f.ret(brought.get())
