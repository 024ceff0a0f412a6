"""Waiting for a word that another thread writes: at first by looking, then politely, then asleep.

The one idea: to wake a thread costs 10 to 150 us, most of it on virtual machines, whose idle cores
have to be given back by the host first. That is longer than most kernels take, so a thread that
waits looks on for a while; but after the first moments it lets everybody else run before each look,
so that it only ever spends time that nobody wants.
"""

from __future__ import annotations

import platform

from spmd.compile.cpu.runtime_ir import Function, Value

# Looks with a pause between them (15 to 60 ns each) before a waiting thread becomes polite.
PAUSES = 500
# Looks between two calls that let others run.
POLITE_PAUSES = 8

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
        "declare i32 @sched_yield()",
        _spin("differs").text(),
        _spin("equals").text(),
    ]


def relax(f: Function) -> None:
    """Let the other thread of a core run for a moment."""
    f.do(_PAUSE_CALL)


def _spin(wanted: str) -> Function:
    """spin_until_differs(word, value, ns), spin_until_equals: 1 when it does, 0 when time is up."""
    f = Function(f"spin_until_{wanted}", "i64", ["ptr", "i64", "i64"], internal=True)
    word, value, nanoseconds = f.params

    def look(times: int) -> None:
        with f.range(0, times):
            with f.if_(_holds(f, word, value, wanted)):
                f.ret(1)
            relax(f)

    look(PAUSES)
    with f.if_(nanoseconds > 0):
        end = f.call("now", "i64") + nanoseconds
        with f.loop():
            f.call("sched_yield", "i32")
            look(POLITE_PAUSES)
            f.break_if(f.call("now", "i64") >= end)
    f.ret(f.convert("zext", _holds(f, word, value, wanted), "i64"))
    return f


def _holds(f: Function, word: Value, value: Value, wanted: str) -> Value:
    found = f.atomic_load("i64", word, 0)
    return found.equals(value) if wanted == "equals" else found.differs(value)
