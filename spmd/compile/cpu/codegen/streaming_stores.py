"""Stores past the caches: for results too large to be there when they are read.

The one idea: a store into a line that is in no cache reads the line first, and drives out one that
may still be wanted; for whole lines neither is needed. But data that was stored past the caches has
to be fetched when it is read. So only results far larger than the caches go that way, and the
kernel alone decides: the readers do not matter then.

Such stores need aligned vectors, and lines that were not just read: over an operand they take four
times as long as others. The layout of the lanes is known here, the addresses of the arrays are not:
so there are two functions, one of which has ordinary stores, and a check of the addresses.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from spmd.compile.cpu.codegen.loop_nest import Plan
from spmd.compile.kernel.dtypes import itemsize
from spmd.compile.kernel.ir import ROW, Kernel, Store
from spmd.compile.native.llvm.function_builder import STREAM_ALIGNMENT, STREAM_METADATA
from spmd.compile.native.llvm.vector_emitter import Emitter, Module

# Measured (2 cores of a Xeon, two threads, x*x): results of 8 MiB take 0.8 of the time so, of 32
# MiB 0.58, of 48 MiB 0.43. With a sum of the result after it: 1.5, 0.78 and 0.74 of the time, and
# the same at 24 MiB.
STREAM_FROM = 24 * 2**20

# Pieces written along memory may be parts of lines, which are combined on their way.
_LEAST_ALIGNMENT = 16


def streamed(plan: Plan, stream_from: int) -> dict[Store, int]:
    """Return the stores of a plan that shall go past the caches, with their alignments.

    None do, unless together they write `stream_from` bytes.
    """
    kernel = plan.kernel
    along = kernel.vector_dim == len(kernel.sizes) - 1 and plan.tile_dim is None
    least = _LEAST_ALIGNMENT if along else STREAM_ALIGNMENT
    found: dict[Store, int] = {}
    nbytes = 0
    for step in kernel.passes:
        for store in step.stores:
            if step.level != ROW or not isinstance(store, Store) or plan.width == 1:
                continue
            alignment = _alignment(kernel, store, plan.width)
            if alignment >= least:
                found[store] = alignment
                nbytes += _nbytes(kernel, store)
    return found if nbytes >= stream_from else {}


def _alignment(kernel: Kernel, store: Store, width: int) -> int:
    """Return a divisor of all addresses of a store's vectors, if the array begins at one."""
    dim = kernel.vector_dim
    if store.guard is not None or store.combine or store.map.gathered or dim is None:
        return 0
    if kernel.args[store.arg].role != "out" or store.map.strides[dim] != 1:
        return 0
    others = (stride for k, stride in enumerate(store.map.strides) if k != dim)
    size = itemsize(kernel.args[store.arg].dtype)
    return math.gcd(STREAM_ALIGNMENT, *(size * n for n in (width, store.map.offset, *others)))


def _nbytes(kernel: Kernel, store: Store) -> int:
    sizes = zip(kernel.sizes, store.map.strides, strict=True)
    count = math.prod(size for size, stride in sizes if stride)
    return count * itemsize(kernel.args[store.arg].dtype)


def either_text(
    module: Module,
    kernel: Kernel,
    streams: dict[Store, int],
    body: Callable[[dict[Store, int]], str],
) -> tuple[str, str]:
    """Return helper functions, and the body of a function that calls the one that is right.

    `body` writes the kernel with those stores past the caches.
    """
    params = "ptr %args, ptr %sizes, i64 %begin, i64 %end"
    module.declare("!900", STREAM_METADATA)
    functions = [
        f"define internal void @{name}({params}) noinline #0 {{\n{body(stores)}\n}}"
        for name, stores in (("past_caches", streams), ("through_caches", {}))
    ]
    e = Emitter(module, 1)
    fits, odd = e.label(), e.label()
    e.put(f"br i1 {_fits(e, kernel, streams)}, label %{fits}, label %{odd}")
    given = "ptr %args, ptr %sizes, i64 %begin, i64 %end"
    for label, name in ((fits, "past_caches"), (odd, "through_caches")):
        e.start(label)
        e.put(f"call void @{name}({given})")
        # Stores past the caches are in no order: the next step may run on another core.
        if label == fits:
            e.put("fence seq_cst")
        e.put("ret void")
    return "\n".join(functions), e.body_text()


def _fits(e: Emitter, kernel: Kernel, streams: dict[Store, int]) -> str:
    """Say whether the arrays are aligned, and lie where nothing is read."""
    written = {store.arg for store in streams}
    read = [k for k, arg in enumerate(kernel.args) if arg.role == "in"]
    addresses = {
        arg: e.set(f"load i64, ptr {e.at('i64', '%args', str(arg))}, align 8")
        for arg in sorted({*written, *read})
    }
    result = "true"
    for arg in sorted(written):
        least = max(alignment for store, alignment in streams.items() if store.arg == arg)
        odd = e.set(f"and i64 {addresses[arg]}, {least - 1}")
        conditions = [e.set(f"icmp eq i64 {odd}, 0")]
        conditions += [e.set(f"icmp ne i64 {addresses[arg]}, {addresses[k]}") for k in read]
        for condition in conditions:
            result = e.set(f"and i1 {result}, {condition}")
    return result
