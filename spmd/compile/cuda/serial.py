"""Kernels whose points act one after the other: scatters that may hit an element twice.

Points whose addresses can't meet need no order among themselves. If all strides but those of some
dims are multiples of a number that these dims' addresses stay below, two points that differ in
these dims never write the same element: each of their indices is a thread of its own, which walks
the others in order. (A table's rows are hit in any order, its columns are independent.) All other
kernels run on one thread: right, and slow.
"""

from __future__ import annotations

import math
from contextlib import ExitStack

from spmd.compile.cuda.body import Body
from spmd.compile.cuda.launch import Launch
from spmd.compile.cuda.text import Text, digits
from spmd.compile.kernel.ir import Kernel, Load, Store
from spmd.compile.kernel.iteration_space import dependencies, is_elementwise

THREADS = 128


def independent_dims(kernel: Kernel) -> tuple[int, ...]:
    """Return the dims whose points never write the same element of any scattered array."""
    if not is_elementwise(kernel):
        return ()
    kept = set(range(len(kernel.sizes)))
    written = set()
    for step in kernel.passes:
        depends = dependencies(kernel, step)
        for store in step.stores:
            if isinstance(store, Store):
                written.add(store.arg)
                bases = [depends.get(value, frozenset()) for value, _ in store.map.gathered]
                kept -= frozenset().union(*bases)
                kept &= _separate(kernel, store, kept)
    reads = {i.arg for step in kernel.passes for i in step.instrs if isinstance(i, Load)}
    if written & reads or len(written) > 1:
        return ()
    return tuple(sorted(kept))


def _separate(kernel: Kernel, store: Store, among: set[int]) -> set[int]:
    """Return the dims of `among` along which a store's addresses are told apart by a remainder."""
    strides = store.map.strides
    moving = sorted((abs(strides[d]), d) for d in among if strides[d])
    kept: set[int] = set()
    for count in range(len(moving), 0, -1):
        dims = {d for _, d in moving[:count]}
        others = [abs(s) for d, s in enumerate(strides) if d not in dims and kernel.sizes[d] > 1]
        others += [abs(stride) for _, stride in store.map.gathered]
        modulus = math.gcd(*others)
        reach = sum(abs(strides[d]) * (kernel.sizes[d] - 1) for d in dims)
        if modulus == 0 or reach < modulus:
            kept = dims
            break
    return kept


def render_serial(kernel: Kernel, text: Text) -> Launch:
    """Write the body of an elementwise kernel whose points run in row-major order."""
    body = Body(kernel, text)
    parallel = independent_dims(kernel)
    threads = math.prod(kernel.sizes[dim] for dim in parallel)
    text.add("// Points that may write the same element act in order, in one thread.")
    if parallel:
        text.add(f"const {body.index} lane = blockIdx.x * {THREADS} + threadIdx.x;")
        text.add(f"if (lane >= {threads}) return;")
        sizes = [kernel.sizes[dim] for dim in parallel]
        body.index_of(parallel, digits("lane", sizes))
    _Serial(body).write()
    if threads == 1:
        return Launch(1, (1, 1))
    return Launch(-(-threads // THREADS), (THREADS, 1))


class _Serial:
    """Writes loops over all dims that have no thread of their own."""

    def __init__(self, body: Body):
        self.body = body
        self.kernel = body.kernel

    def write(self) -> None:
        """Write the loops of the outer dims around those of each pass."""
        count = len(self.kernel.outer)
        with ExitStack() as loops:
            self._open(loops, range(count))
            for step in self.kernel.passes:
                with ExitStack() as inner:
                    self._open(inner, range(count, len(self.kernel.sizes)))
                    inner.enter_context(self.body.scope())
                    self.body.instrs(step)
                    self.body.stores(step)

    def _open(self, loops: ExitStack, dims: range) -> None:
        """Open nested loops over the dims that need one."""
        body = self.body
        loops.enter_context(body.scope())
        for dim in dims:
            if dim in body.dims:
                continue
            size = self.kernel.sizes[dim]
            if size == 1:
                body.dims[dim] = "0"
                continue
            head = f"for ({body.index} d{dim} = 0; d{dim} < {size}; d{dim}++)"
            loops.enter_context(body.text.block(head))
            body.dims[dim] = f"d{dim}"
