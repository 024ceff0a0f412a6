"""Stretches of a long body that repeat: written once, as a function that the body calls.

The one idea: a loop that Python has unrolled (forty times `x = sin(x * c) + 0.5`) is the same
operations again and again, with other constants. LLVM's time, and ours, grows with their number;
their meaning does not. So a stretch that returns with a period becomes a function of its operands,
and of the constants that differ. It has one result, and is long enough that a call is nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from spmd.base.record import record
from spmd.compile.cpu.codegen.conversions import constant_parts, element_of
from spmd.compile.cpu.codegen.scalar_ops import Value, render_op
from spmd.compile.cpu.math.table import INSTRUCTIONS
from spmd.compile.kernel.dtypes import kind
from spmd.compile.kernel.ir import Const, Instr, Kernel, Op, Reduce, operands_of
from spmd.compile.native.llvm.vector_emitter import Emitter

# Runs of fewer operations are written as they are, and those without this many instructions on
# each register in a stretch: a call with its constants takes about one in a hundred of them.
LEAST_RUN = 24
LEAST_WORK = 100.0
# The most operations from a stretch to the next.
LONGEST_PERIOD = 40
# The cost of a call for LLVM, in operations; the most vectors that a function is given.
_CALL = 2
_MOST_VECTORS = 2
# Operations that do the same with a constant as with any other number.
_PLAIN = ("add", "sub", "mul")

_Signature: TypeAlias = tuple[object, ...]
Column: TypeAlias = tuple[int, ...]


@record
class Repeat:
    """`count` stretches of `length` operations each, from `first` on, whose result is one value."""

    ops: tuple[Op, ...]
    first: int
    length: int
    count: int
    # The place of its result in a stretch.
    result: int
    # The values that operands are, in each of the stretches: of all operands of a stretch in their
    # order, of the vectors that it is given, and of the numbers that differ.
    columns: tuple[tuple[Column, ...], ...]
    given: tuple[Column, ...]
    numbers: tuple[Column, ...]

    @property
    def stretch(self) -> tuple[Op, ...]:
        """The operations of the first stretch."""
        return self.ops[self.first : self.first + self.length]

    @property
    def end(self) -> int:
        """The first operation behind all stretches."""
        return self.first + self.count * self.length


def find_repeat(
    ops: Sequence[Op],
    defined: Mapping[int, Instr | Reduce],
    escaping: frozenset[int],
) -> Repeat | None:
    """The repeat of a run of operations that saves most, if there is one.

    `escaping` are values that others than the run read.
    """
    if len(ops) < LEAST_RUN:
        return None
    numbers: dict[_Signature, int] = {}
    places = {op.out: k for k, op in enumerate(ops)}
    kinds = [
        numbers.setdefault(_signature(op, k, places, defined), len(numbers))
        for k, op in enumerate(ops)
    ]
    for period in range(1, min(LONGEST_PERIOD, len(ops) // 3) + 1):
        first, end = _longest(kinds, period)
        if end - first < max(3 * period, LEAST_RUN):
            continue
        each = sum(INSTRUCTIONS.get(op.op, 1.0) for op in ops[first : first + period])
        least = -(-LEAST_WORK // each) if each else len(ops)
        for start in range(first, first + period):
            periods = (end - start) // period
            sizes = [m for m in range(int(least), periods // 2 + 1)]
            sizes.sort(key=lambda m: m * period + periods // m * _CALL + periods % m * period)
            if not sizes:
                continue
            length, count = sizes[0] * period, periods // sizes[0]
            result = _only_result(ops, start, length, count, places, escaping)
            if result is not None:
                stretches = [ops[start + k * length :][:length] for k in range(count)]
                return _described(tuple(ops), start, stretches, result, defined)
    return None


def _described(
    ops: tuple[Op, ...],
    first: int,
    stretches: Sequence[Sequence[Op]],
    result: int,
    defined: Mapping[int, Instr | Reduce],
) -> Repeat | None:
    """The repeat of these stretches; None if they would be given too much."""
    inside = {op.out for op in stretches[0]}
    columns: list[tuple[Column, ...]] = []
    given: dict[Column, None] = {}
    numbers: dict[Column, None] = {}
    for same in zip(*stretches, strict=True):
        columns.append(tuple(zip(*(op.operands for op in same), strict=True)))
        for column in columns[-1]:
            bits = {made.bits for v in column if isinstance(made := defined[v], Const)}
            if len(bits) > 1:
                numbers[column] = None
            elif not bits and column[0] not in inside:
                given[column] = None
    crossing = [stretches[0][result].dtype, *(defined[column[0]].dtype for column in given)]
    if len(given) > _MOST_VECTORS or "b" in map(kind, crossing):
        return None
    sizes = len(stretches[0]), len(stretches)
    return Repeat(ops, first, *sizes, result, tuple(columns), tuple(given), tuple(numbers))


def _signature(
    op: Op, place: int, places: Mapping[int, int], defined: Mapping[int, Instr | Reduce]
) -> _Signature:
    """An operation with the distances to operands in the run, and the operands from outside."""
    read: list[object] = []
    for value in op.operands:
        made_by = defined[value]
        if value in places:
            read.append(place - places[value])
        elif not isinstance(made_by, Const):
            read.append(("outside", value))
        elif op.op in _PLAIN and kind(made_by.dtype) == "f":
            read.append(("number", made_by.dtype))
        else:
            read.append(("number", made_by.dtype, made_by.bits))
    return op.op, op.dtype, op.attr, *read


def _longest(kinds: Sequence[int], period: int) -> tuple[int, int]:
    """The longest part in which everything is as it was one period before."""
    best, first = (0, 0), 0
    for k in range(period, len(kinds)):
        if kinds[k] != kinds[k - period]:
            first = k - period + 1
        elif k + 1 - first > best[1] - best[0]:
            best = first, k + 1
    return best


def _only_result(
    ops: Sequence[Op],
    first: int,
    length: int,
    count: int,
    places: Mapping[int, int],
    escaping: frozenset[int],
) -> int | None:
    """The place in each stretch of its one value read outside of it; None if there are more."""
    end = first + count * length
    result: int | None = None
    for k in range(first, len(ops)):
        mine = (k - first) // length if k < end else -1
        read = [places.get(value, -1) for value in ops[k].operands]
        outside = [p for p in read if first <= p < end and (p - first) // length != mine]
        if mine >= 0 and ops[k].out in escaping:
            outside.append(k)
        for place in outside:
            if result is None:
                result = (place - first) % length
            elif result != (place - first) % length:
                return None
    return result


# ---- writing -----------------------------------------------------------------------------------


def write_repeat(
    e: Emitter,
    repeat: Repeat,
    defined: Mapping[int, Instr | Reduce],
    get: Callable[[int], Value],
) -> Iterator[tuple[int, Value]]:
    """Write the calls of a repeat; gives the result of each, which `get` is to know then."""
    name = e.module.helper(_function(e, repeat, defined, get))
    for number in range(repeat.count):
        arguments = [_typed(e, get(column[number])) for column in repeat.given]
        with e.at_width(1):
            for column in repeat.numbers:
                made_by = defined[column[number]]
                assert isinstance(made_by, Const)
                (literal,) = constant_parts(e, made_by.dtype, made_by.bits)
                arguments.append(f"{element_of(made_by.dtype)} {literal}")
        out = repeat.ops[repeat.first + number * repeat.length + repeat.result]
        kind_of = e.type(element_of(out.dtype))
        called = e.set(f"call {kind_of} {name}({', '.join(arguments)})")
        yield out.out, Value(out.dtype, (called,), e.width)


def _typed(e: Emitter, value: Value) -> str:
    return f"{e.type(element_of(value.dtype))} {value.parts[0]}"


def _function(
    e: Emitter,
    repeat: Repeat,
    defined: Mapping[int, Instr | Reduce],
    get: Callable[[int], Value],
) -> str:
    """The text of a stretch as a function `@NAME`."""
    inner, params = Emitter(e.module, e.width), []
    values: dict[Column, Value] = {}
    for number, column in enumerate(repeat.given):
        values[column] = Value(defined[column[0]].dtype, (f"%x{number}",), e.width)
        params.append(_typed(e, values[column]))
    for number, column in enumerate(repeat.numbers):
        dtype = defined[column[0]].dtype
        element = element_of(dtype)
        params.append(f"{element} %c{number}")
        values[column] = Value(dtype, (inner.splat(element, f"%c{number}"),), e.width)
    known: dict[int, Value] = {}
    for op, columns in zip(repeat.stretch, repeat.columns, strict=True):
        operands = [
            values.get(column) or known.get(column[0]) or get(column[0]) for column in columns
        ]
        parts = render_op(inner, op.op, operands, op.dtype, op.attr)
        known[op.out] = Value(op.dtype, tuple(parts), e.width)
    result = known[repeat.stretch[repeat.result].out]
    of = e.type(element_of(result.dtype))
    head = f"define internal {of} @NAME({', '.join(params)}) noinline #0 {{"
    return f"{head}\n{inner.body_text()}\n  ret {of} {result.parts[0]}\n}}"


# ---- a whole body ------------------------------------------------------------------------------


def runs(items: Sequence[Instr], repeats: Callable[[Instr], bool]) -> Iterator[list[Instr]]:
    """The runs of items that may repeat, and the others one by one."""
    run: list[Instr] = []
    for item in items:
        if repeats(item):
            run.append(item)
            continue
        if run:
            yield run
        run = []
        yield [item]
    if run:
        yield run


def readers_elsewhere(kernel: Kernel, run: Sequence[Instr]) -> frozenset[int]:
    """The values that something else than a run reads."""
    mine = {id(item) for item in run}
    return frozenset(
        value
        for step in kernel.passes
        for item in (*step.instrs, *step.reductions, *step.stores)
        if id(item) not in mine
        for value in operands_of(item)
    )
