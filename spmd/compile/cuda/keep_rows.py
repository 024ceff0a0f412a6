"""Rows that several passes read: a team keeps them in registers, and reads memory once.

On CPUs a row is in the cache when the second pass reads it. A GPU has little cache for each of its
threads, and a register for each of a thread's elements.
"""

from __future__ import annotations

from collections import Counter

from spmd.base.record import replace
from spmd.compile.cuda.rows import REGISTERS, has_scans, plan_rows
from spmd.compile.kernel.ir import ROW, Kernel, Load, LoadRow, Map, Pass, StoreRow, is_sequential

# An argument's elements of one dtype at one place.
Key = tuple[int, str, Map]


def keep_rows(kernel: Kernel) -> Kernel:
    """The kernel with a row buffer for each load that several passes have, if registers suffice."""
    if is_sequential(kernel) or has_scans(kernel):
        return kernel
    passes = [step for step in kernel.passes if step.level == ROW]
    seen = Counter(key for step in passes for key in {*map(_key, step.instrs)} if key is not None)
    again = [key for key, count in seen.items() if count > 1 and _can_be_kept(kernel, key)]
    if not again:
        return kernel
    again.sort(key=repr)  # a set has no order that all processes share
    numbers = {key: len(kernel.buffers) + k for k, key in enumerate(again)}
    buffers = (*kernel.buffers, *(dtype for _, dtype, _ in again))
    kept: set[Key] = set()
    made = replace(
        kernel, passes=tuple(_kept(s, numbers, kept) for s in kernel.passes), buffers=buffers
    )
    return made if plan_rows(made).place == REGISTERS else kernel


def _kept(step: Pass, numbers: dict[Key, int], kept: set[Key]) -> Pass:
    """A pass that keeps what it is the first to load, and has the rest from those before it."""
    if step.level != ROW:
        return step
    instrs, stores = [], [*step.stores]
    for instr in step.instrs:
        key = _key(instr)
        if key in numbers and key in kept:
            instr = LoadRow(instr.out, instr.dtype, numbers[key])
        instrs.append(instr)
    for instr in step.instrs:
        key = _key(instr)
        if key in numbers and key not in kept:
            kept.add(key)
            stores.append(StoreRow(numbers[key], instr.out))
    return replace(step, instrs=tuple(instrs), stores=tuple(stores))


def _key(instr: object) -> Key | None:
    """The place that a load reads; None for others and for loads at computed places."""
    if not isinstance(instr, Load) or instr.guard is not None or instr.map.gathered:
        return None
    return instr.arg, instr.dtype, instr.map


def _can_be_kept(kernel: Kernel, key: Key) -> bool:
    """Whether an argument is only read, and the elements of a row lie at different places."""
    arg, _, place = key
    return kernel.args[arg].role == "in" and any(place.strides[len(kernel.outer) :])
