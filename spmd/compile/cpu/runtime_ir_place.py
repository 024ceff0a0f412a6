"""Where the workers of the pool run: not on the core of the thread that called them.

The one idea: a system that wakes a thread may put it on the core of the one who wakes it, most of
all on virtual machines, where idle cores do not look idle; there the two take turns, and it takes
the system up to tens of milliseconds to part them (seen: kernels at the speed of one thread for 150
calls on end). So the caller of a job says where the workers may not run. That is a system call a
worker, and only when the caller itself has moved.
"""

from __future__ import annotations

import ctypes
import sys

from spmd.compile.cpu.pool_words import (
    MASK_BYTES,
    MOST_PLACED,
)
from spmd.compile.cpu.runtime_ir import Function, Value

_CORES = 8 * MASK_BYTES

_IS_LINUX = sys.platform.startswith("linux")
_CAN_PLACE = _IS_LINUX and hasattr(ctypes.CDLL(None), "pthread_setaffinity_np")

_DECLARATIONS = """
declare i32 @sched_getcpu()
declare i32 @sched_getaffinity(i32, i64, ptr)
declare i32 @pthread_setaffinity_np(i64, i64, ptr)
"""


def place_texts() -> list[str]:
    """The declarations and functions."""
    functions = (_note_cores(), _keep_off())
    return [_DECLARATIONS, *(f.text() for f in functions)]


def core(f: Function) -> Value:
    """1 + the core that this runs on; 0 where the system does not say."""
    if not _IS_LINUX:
        return f.value("i64", 0)
    return f.convert("sext", f.call("sched_getcpu", "i32"), "i64") + 1


def _note_cores() -> Function:
    """note_cores(mask): write down the cores that the calling thread may use, or none."""
    f = Function("note_cores", "void", ["ptr"], internal=True)
    (mask,) = f.params
    if _CAN_PLACE:
        size = f.value("i64", MASK_BYTES)
        f.call("memset", "ptr", mask, f.value("i32", 0), size)
        f.call("sched_getaffinity", "i32", f.value("i32", 0), size, mask)
    return f


def _keep_off() -> Function:
    """keep_off(threads, avoided, count, mask): keep threads off the core that this runs on.

    `avoided` is for each thread the core that it was kept off before.
    """
    f = Function("keep_off", "void", ["ptr", "ptr", "i64", "ptr"], internal=True)
    threads, avoided, count, mask = f.params
    if not _CAN_PLACE:
        return f
    here = core(f)
    with f.if_((count > MOST_PLACED) | (here <= 0) | (here > _CORES)):
        f.ret()
    with f.range(0, count) as i:
        before = f.at(avoided, i * 8)
        with f.if_(f.load("i64", before).differs(here)):
            f.store(here, before)
            rest = f.stack("i64", MASK_BYTES // 8)
            f.call("memcpy", "ptr", rest, mask, f.value("i64", MASK_BYTES))
            word = f.at(rest, (here - 1) // 64 * 8)
            bit = f.value("i64", 1) << ((here - 1) % 64)
            f.store(f.load("i64", word) & (bit ^ -1), word)
            # Who may use one core only has to share it.
            some = f.var("i64", 0)
            with f.range(0, MASK_BYTES // 8) as k:
                some.set(some.get() | f.load("i64", rest, k * 8))
            with f.if_(some.get().differs(0)):
                thread, size = f.load("i64", threads, i * 8), f.value("i64", MASK_BYTES)
                f.call("pthread_setaffinity_np", "i32", thread, size, rest)
    return f
