"""The parts of the native runtime, and the table by which they call each other.

The one idea: a process loads the parts that its programs use. LLVM takes 0.3 s for all of them, so
where nothing is on the disk yet the first result of a machine waits for the core alone, which runs
kernels one after the other; loops, threads, exchanges and the queue come with the first program
that has them. The core has a table of functions; a part is told where that is, puts its own there,
and calls others through it. Without the pool, no work is shared.

A part is one module of text. Short functions that several parts need (`now`, `resolve`) are inlined
in each; a function of another part is called by its name, through a function that looks into the
table.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from spmd.compile.native.llvm.function_builder import Function, define
from spmd.compile.native.program import byte_code as layout
from spmd.compile.native.program.run_layout import PYTHON, RAISED_THERE, setup_symbol

# Every step function and `block` take these: context, step (or begin of a block), end of the
# block, list of active devices (i32), their number, room for the arguments of one call.
STEP_SIGNATURE = ["ptr", "ptr", "ptr", "ptr", "i64", "ptr"]

# The slots of the table: steps under their opcodes, and behind them the other functions that
# another part calls; `POOL` is the words of the pool.
_OF_STEPS = {
    "run_callback": layout.CALLBACK,
    "run_for": layout.FOR,
    "run_while": layout.WHILE,
    "run_cond": layout.COND,
    "run_collective": layout.COLLECTIVE,
    "run_segment": layout.SEGMENT,
    "run_parallel": layout.PARALLEL,
    "run_batch": layout.BATCH,
    "run_ranks": layout.RANKS,
    "run_once": layout.ONCE,
}
POOL, BLOCK, SCRATCH, RUN_STEPS, SHARE, SHARE_KERNEL, SHARE_COPY = range(13, 20)
assert SHARE_COPY < PYTHON
SLOTS: Mapping[str, int] = MappingProxyType(
    _OF_STEPS
    | {
        "block": BLOCK,
        "scratch": SCRATCH,
        "run_steps": RUN_STEPS,
        "share": SHARE,
        "share_kernel": SHARE_KERNEL,
        "share_copy": SHARE_COPY,
    }
)
_WORDS = RAISED_THERE + 3
_SIGNATURES: dict[str, tuple[str, Sequence[str]]] = {
    "block": ("i64", STEP_SIGNATURE),
    "scratch": ("ptr", ["i64"]),
    "run_steps": ("i64", ["ptr", "ptr", "ptr", "i64"]),
    "share": ("void", ["ptr", "ptr", "ptr", "i64", "i64"]),
}

_DECLARATIONS = """
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_join(i64, ptr)
declare i64 @pthread_self()
declare i32 @pthread_mutex_init(ptr, ptr)
declare i32 @pthread_mutex_lock(ptr)
declare i32 @pthread_mutex_unlock(ptr)
declare i32 @pthread_cond_init(ptr, ptr)
declare i32 @pthread_cond_wait(ptr, ptr)
declare i32 @pthread_cond_timedwait(ptr, ptr, ptr)
declare i32 @pthread_cond_signal(ptr)
declare i32 @pthread_cond_broadcast(ptr)
declare i32 @pthread_sigmask(i32, ptr, ptr)
declare i32 @sigfillset(ptr)
declare i32 @pthread_key_create(ptr, ptr)
declare ptr @pthread_getspecific(i64)
declare i32 @pthread_setspecific(i64, ptr)
declare i32 @sched_getcpu()
declare i32 @sched_getaffinity(i32, i64, ptr)
declare i32 @pthread_setaffinity_np(i64, i64, ptr)
declare i32 @pthread_getcpuclockid(i64, ptr)
declare i32 @getrusage(i32, ptr)
declare i32 @sched_yield()
declare i32 @nanosleep(ptr, ptr)
declare i32 @usleep(i32)
declare i32 @clock_gettime(i32, ptr)
declare i64 @syscall(i64, ...)
declare i32 @posix_memalign(ptr, i64, i64)
declare i32 @madvise(ptr, i64, i32)
declare void @free(ptr)
declare ptr @memcpy(ptr, ptr, i64)
declare ptr @memmove(ptr, ptr, i64)
declare ptr @memset(ptr, i32, i64)
"""

_NANOSECONDS = 1_000_000_000


def core_text(texts: Iterable[str]) -> str:
    """The module of the core, with the table."""
    words = ["null"] * _WORDS
    for name in ("block", "scratch", "run_steps"):
        words[SLOTS[name]] = f"@{name}"
    table = ", ".join(f"ptr {word}" for word in words)
    lines = f"@spmd_table = global [{_WORDS} x ptr] [{table}]"
    return "\n".join([_DECLARATIONS, lines, clock().text(), *texts])


def part_text(
    part: str, texts: Iterable[str], provides: Mapping[str, str], needs: Iterable[str] = ()
) -> str:
    """The module of a part, which puts symbols (`provides`) under names of the table.

    It calls the functions that it `needs` by their names. The names stand in the order in which
    others may rely on them: the pool comes last.
    """
    setup = Function(setup_symbol(part), "void", ["ptr"])
    (table,) = setup.params
    setup.store(table, setup.symbol("table"))
    for name, symbol in provides.items():
        slot = POOL if name == "pool" else SLOTS[name]
        address = setup.convert("ptrtoint", setup.symbol(symbol), "i64")
        setup.atomic_store(address, table, 8 * slot)
    calls = (_through_table(name).text() for name in needs)
    variable = "@table = internal global ptr null"
    return "\n".join([_DECLARATIONS, variable, *calls, *texts, setup.text()])


def _through_table(name: str) -> Function:
    """A function that calls the one that the table has."""
    returns, params = _SIGNATURES[name]
    f = Function(name, returns, params, internal=True, attributes="alwaysinline nounwind")
    function = f.load("ptr", f.load("ptr", f.symbol("table")), 8 * SLOTS[name])
    if name == "share":
        with f.if_(function.equals(0)):
            _, body, job, units, _ = f.params
            f.call(body, "void", job, f.value("i64", 0), units)
            f.ret()
    result = f.call(function, returns, *f.params)
    f.ret(None if returns == "void" else result)
    return f


@define("now", "i64")
def clock(f: Function) -> None:
    """now(): the time, as the flight record has it."""
    found = f.stack("i64", 2)
    f.call("clock_gettime", "i32", f.value("i32", int(time.CLOCK_MONOTONIC)), found)
    f.ret(f.load("i64", found) * _NANOSECONDS + f.load("i64", found, 8))
