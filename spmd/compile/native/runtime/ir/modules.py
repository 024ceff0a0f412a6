"""The texts of the native runtime: a module for the core and one for each part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import MappingProxyType

from spmd.compile.native.llvm.modules import CONTROL
from spmd.compile.native.program.run_layout import POOL, QUEUE
from spmd.compile.native.runtime.ir.async_queue import queue_texts
from spmd.compile.native.runtime.ir.callbacks import callback_texts
from spmd.compile.native.runtime.ir.control_flow import (
    cond_texts,
    for_texts,
    once_texts,
    segment_texts,
    while_texts,
)
from spmd.compile.native.runtime.ir.execute import execute_texts
from spmd.compile.native.runtime.ir.interrupt import interrupt_texts
from spmd.compile.native.runtime.ir.local_collectives import exchange_texts
from spmd.compile.native.runtime.ir.module import clock, core_text, part_text
from spmd.compile.native.runtime.ir.parallel_loops import parallel_texts
from spmd.compile.native.runtime.ir.rank_collectives import rank_texts
from spmd.compile.native.runtime.ir.scratch import scratch_texts
from spmd.compile.native.runtime.ir.thread_affinity import place_texts
from spmd.compile.native.runtime.ir.thread_pool import pool_texts
from spmd.compile.native.runtime.ir.wait import wait_texts
from spmd.compile.native.runtime.ir.work_sharing import batch_texts, share_texts

# The texts that run a kind of steps, `run_PART`.
_OF_STEPS: Mapping[str, Callable[[], Iterable[str]]] = MappingProxyType(
    {
        "callback": callback_texts,
        "for": for_texts,
        "while": while_texts,
        "cond": cond_texts,
        "segment": segment_texts,
        "parallel": parallel_texts,
        "collective": exchange_texts,
        "batch": batch_texts,
        "ranks": rank_texts,
        "once": once_texts,
    }
)


# A text may be written on one thread, to be compiled early, and asked for on another.
@cache
def core() -> str:
    """The module of the core."""
    return core_text([*scratch_texts(), *interrupt_texts(), *execute_texts()])


@cache
def part(name: str) -> str:
    """The module of a part."""
    if name == POOL:
        texts = [clock().text(), *wait_texts(), *place_texts(), *pool_texts(), *share_texts()]
        shared = {name: name for name in ("share", "share_kernel", "share_copy")}
        return part_text(POOL, texts, shared | {"pool": "spmd_pool"}, needs=("scratch",))
    if name == QUEUE:
        # It runs for moments between programs of a millisecond.
        return f"{CONTROL}\n{part_text(QUEUE, queue_texts(), {}, needs=('run_steps',))}"
    step = f"run_{name}"
    return part_text(name, _OF_STEPS[name](), {step: step}, needs=("block", "share", "scratch"))
