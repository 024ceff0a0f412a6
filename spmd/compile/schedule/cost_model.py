"""The least that a step moves and computes: bytes read and written, and operations.

Counted from the program, not measured. A kernel reads each element of an operand once, however
often it uses it, and values in registers or row buffers count nothing. An operation on numbers
is one flop, whatever it is: an exponential too. Loops count their iterations; a loop that only run
time can count is taken for one iteration, and of the branches of a conditional the dearest counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spmd.base.record import record
from spmd.compile.kernel.dtypes import itemsize
from spmd.compile.kernel.ir import ROW, Kernel, Load, Map, Op, Scan, Store
from spmd.compile.kernel.matmul import Operand, Product
from spmd.compile.lower.steps import (
    Branch,
    Copy,
    Exchange,
    Host,
    Launch,
    Loop,
    Multiply,
    Once,
    Pack,
    Parallel,
    RankExchange,
    Step,
    While,
    accesses,
)
from spmd.compile.native.program.steps import rounds_of

# Operations that compute nothing: they choose, convert or rename.
_MOVES = frozenset(("convert", "bitcast", "select", "copy", "real", "imag", "complex"))


@record
class Cost:
    """Bytes read and written, and operations."""

    read: int = 0
    written: int = 0
    flops: int = 0

    @property
    def moved(self) -> int:
        """All bytes."""
        return self.read + self.written

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.read + other.read, self.written + other.written, self.flops + other.flops)

    def times(self, iterations: int) -> Cost:
        """The cost of several iterations."""
        return Cost(self.read * iterations, self.written * iterations, self.flops * iterations)


def cost_of(steps: Sequence[Step]) -> Cost:
    """The cost of a list of steps, those nested in them included."""
    total = Cost()
    for step in steps:
        total += step_cost(step)
    return total


def step_cost(step: Step) -> Cost:
    """The cost of one step; of a loop, that of all its iterations."""
    match step:
        case Launch(kernel=kernel):
            return kernel_cost(kernel)
        case Multiply(product=multiplied):
            return product_cost(multiplied)
        case Pack(packing=packed):
            count = math.prod(packed.batch) * packed.k * packed.n
            return Cost(count * itemsize(packed.source.dtype), count * itemsize(packed.carried))
        case Copy(nbytes=nbytes):
            return Cost(nbytes, nbytes)
        case Host(inputs=inputs, outputs=outputs):
            return Cost(sum(v.nbytes for v in inputs), sum(v.nbytes for v in outputs))
        case Exchange():
            nbytes = step.rows * step.count * step.dtype.itemsize
            return Cost(nbytes, nbytes)
        case RankExchange(rounds=rounds):
            return Cost(rounds.nbytes, rounds.nbytes)
        case Loop(body=body) | Parallel(body=body):
            return cost_of(body).times(rounds_of(step))
        case Once(body=body):
            return cost_of(body)
        case While(test=test, body=body):
            return cost_of(test) + cost_of(body)
        case Branch(branches=branches):
            return max(map(cost_of, branches), key=lambda cost: (cost.moved, cost.flops))
    # A step of another kind: its buffers, and its own figures.
    refs = list(dict.fromkeys((ref.buffer, writes) for ref, writes in accesses(step)))
    read = sum(buffer.nbytes for buffer, writes in refs if not writes)
    written = sum(buffer.nbytes for buffer, writes in refs if writes)
    return Cost(read, written, getattr(step, "flops", 0))


def kernel_cost(kernel: Kernel) -> Cost:
    """The cost of one launch."""
    points = {True: math.prod(kernel.sizes), False: math.prod(kernel.outer)}
    read = [0] * len(kernel.args)
    written = [0] * len(kernel.args)
    flops = 0
    for part in kernel.passes:
        row = part.level == ROW
        sizes = kernel.sizes if row else kernel.outer
        for instr in part.instrs:
            if isinstance(instr, Load):
                read[instr.arg] += _touched(instr.map, sizes)
            elif isinstance(instr, Scan) or (isinstance(instr, Op) and instr.op not in _MOVES):
                flops += points[row]
        flops += len(part.reductions) * points[row]
        for store in part.stores:
            if isinstance(store, Store):
                written[store.arg] += _touched(store.map, sizes)
                if store.combine is not None:
                    read[store.arg] += _touched(store.map, sizes)
                    flops += points[row]
    nbytes = [itemsize(arg.dtype) for arg in kernel.args]
    limits = [arg.size for arg in kernel.args]

    def total(elements: list[int]) -> int:
        pairs = zip(elements, limits, nbytes, strict=True)
        return sum(min(count, most) * width for count, most, width in pairs)

    return Cost(total(read), total(written), flops)


def _touched(place: Map, sizes: Sequence[int]) -> int:
    """The number of elements of an argument that a map names; with gathered indices, at most."""
    if place.gathered:
        return math.prod(sizes)
    return math.prod(n for n, stride in zip(sizes, place.strides, strict=True) if stride)


def product_cost(step: Product) -> Cost:
    """The cost of a product: its operands once, its epilogue's reads and writes, no C."""
    batch = math.prod(step.batch)

    def elements(operand: Operand, rows: int, columns: int) -> int:
        repeated = zip(step.batch, operand.batch, strict=True)
        return rows * columns * math.prod(n for n, stride in repeated if stride)

    after = kernel_cost(step.epilogue)
    c = batch * step.m * step.n
    read = elements(step.a, step.m, step.k) * itemsize(step.a.dtype)
    read += elements(step.b, step.k, step.n) * itemsize(step.b.dtype)
    read += after.read - c * itemsize(step.carried)
    return Cost(read, after.written, 2 * c * step.k + after.flops)
