"""A gate in the queue: while it is shut, nothing behind it runs, and pending arrays can be seen.

The gate is a job like any other: a native function that waits for a word in memory to change.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np

from spmd.compile.native.llvm.compiler import compile_texts
from spmd.compile.native.program.steps import KernelStep, Program, Slot
from spmd.compile.native.runtime.async_queue import QUEUE, Job
from spmd.compile.native.runtime.run import NativeProgram, build_program

# It yields the processor: what the tests do meanwhile is not to be slowed down.
_GATE = """
declare i32 @sched_yield()
define void @spmd_test_gate(ptr %args, ptr %sizes, i64 %begin, i64 %end) {
entry:
  %place = load ptr, ptr %args
  br label %again
again:
  %yielded = call i32 @sched_yield()
  %word = load atomic i64, ptr %place seq_cst, align 8
  %shut = icmp eq i64 %word, 0
  br i1 %shut, label %again, label %open
open:
  ret void
}
"""
# So long that nobody who waits for a job behind it tries to run it.
_COST_NS = 1e12


@cache
def _program() -> NativeProgram:
    address = compile_texts([_GATE])["spmd_test_gate"]
    return build_program(Program((8,), (KernelStep(address, (Slot(0),), 1, _COST_NS),)))


class Gate:
    """Shut when it is made; `open` lets the queue go on."""

    def __init__(self) -> None:
        self._word = np.zeros(1, np.int64)
        place = self._word.__array_interface__["data"][0]
        kept = {id(self._word): self._word}
        self.job: Job = QUEUE.submit(_program(), [place], kept, [], 0)

    def open(self) -> None:
        """Let the queue go on."""
        self._word[0] = 1


@contextmanager
def shut_gate(seconds: float | None = None) -> Iterator[Gate]:
    """Hold the queue up for the length of a block, or until it has been open for some seconds.

    With `seconds` the gate opens by itself, later than whoever waits begins to.
    """
    gate = Gate()
    timer = None if seconds is None else threading.Timer(seconds, gate.open)
    try:
        if timer is not None:
            timer.start()
        yield gate
    finally:
        gate.open()
        if timer is not None:
            timer.cancel()
            timer.join()
        QUEUE.drain()
