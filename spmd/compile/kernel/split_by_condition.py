"""Cutting a space where a condition on an index changes, so that no piece has to ask it.

A concatenation inside a kernel reads each operand where the index lies in its part and selects:
every point pays for all parts. `cut_pieces` gives a kernel for each part instead, in which the
conditions are known: the other reads, and the selects, are gone. An edge that is cut off must be
worth a kernel of its own, so the narrow borders of a padded image stay conditions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TypeVar

from spmd.base.record import field, record, replace
from spmd.compile.kernel.check import affine_range
from spmd.compile.kernel.dtypes import DTYPES, from_bits, kind
from spmd.compile.kernel.ir import (
    Arg,
    Const,
    Instr,
    Iota,
    Kernel,
    Load,
    Map,
    Op,
    Pass,
    Store,
    StoreRow,
    is_sequential,
    operands_of,
)
from spmd.compile.kernel.iteration_space import is_elementwise

# The least points of a piece: less work is not worth a kernel.
LEAST_POINTS = 4096
# More pieces than this would take longer to compile than they save.
MOST_PIECES = 8

Accessing = TypeVar("Accessing", Load, Store)

_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}


@record
class Piece:
    """A kernel for a part of the space of another.

    Of that one's arguments it takes those numbered `args`, each from element `starts` on.
    """

    kernel: Kernel
    args: tuple[int, ...]
    starts: tuple[int, ...]


def cut_pieces(kernel: Kernel, least: int = LEAST_POINTS) -> tuple[Piece, ...]:
    """The pieces that together are an elementwise kernel; none if it had better stay whole."""
    if len(kernel.passes) != 1 or is_sequential(kernel) or not is_elementwise(kernel):
        return ()
    if math.prod(kernel.sizes) < 2 * least:
        return ()
    conditions = tuple(_conditions(kernel))
    for dim, size in enumerate(kernel.sizes):
        cuts = {c.changes(size) for c in conditions if c.dim == dim} - {0}
        bounds = [0, *sorted(cuts), size]
        row = math.prod(kernel.sizes) // size
        ranges = list(pairwise(bounds))
        shortest = min(end - begin for begin, end in ranges)
        if 2 <= len(ranges) <= MOST_PIECES and shortest * row >= least:
            return tuple(_Cutter(kernel, dim, b, conditions).piece(end) for b, end in ranges)
    return ()


# ---- conditions on an index --------------------------------------------------------------------


@record
class _Line:
    """A value that is `start + step * (index of dim)`; a constant has a step of 0."""

    dim: int
    step: int
    start: int


@record
class _Condition:
    """The value `out`: whether one line is less (or more) than another, along one dim."""

    out: int
    op: str
    dim: int
    left: _Line
    right: _Line

    def holds(self, index: int) -> bool:
        """Its value at an index."""
        left = self.left.start + self.left.step * index
        return _COMPARISONS[self.op](left, self.right.start + self.right.step * index)

    def changes(self, size: int) -> int:
        """The first index below `size` where its value is not that at 0; 0 if there is none.

        Lines cross once, so it changes once.
        """
        first = self.holds(0)
        if self.holds(size - 1) == first:
            return 0
        low, high = 0, size - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.holds(middle) == first else (low, middle)
        return high


def _conditions(kernel: Kernel) -> Iterator[_Condition]:
    """The comparisons of a kernel that depend on the index of one dim and on nothing else."""
    lines: dict[int, _Line] = {}
    for instr in kernel.passes[0].instrs:
        line = _line(instr, lines, kernel.sizes)
        if line is not None:
            lines[instr.out] = line
        if not isinstance(instr, Op) or instr.op not in _COMPARISONS:
            continue
        left, right = (lines.get(operand) for operand in instr.operands)
        if left is None or right is None:
            continue
        dims = {each.dim for each in (left, right) if each.step}
        if len(dims) == 1:
            yield _Condition(instr.out, instr.op, dims.pop(), left, right)


def _line(instr: Instr, lines: dict[int, _Line], sizes: tuple[int, ...]) -> _Line | None:
    """The line that an integer value is, as long as it does not wrap around anywhere."""
    if kind(instr.dtype) not in "iu":
        return None
    match instr:
        case Const():
            found = _Line(0, 0, int(from_bits(instr.bits, instr.dtype)))
        case Iota():
            found = _Line(instr.dim, 1, 0)
        case Op(operands=operands) if all(operand in lines for operand in operands):
            combined = _combined(instr.op, [lines[operand] for operand in operands])
            if combined is None:
                return None
            found = combined
        case _:
            return None
    ends = found.start, found.start + found.step * max(sizes[found.dim] - 1, 0) if sizes else 0
    bits = DTYPES[instr.dtype].bits
    low, high = (-(1 << bits - 1), 1 << bits - 1) if kind(instr.dtype) == "i" else (0, 1 << bits)
    return found if low <= min(ends) and max(ends) < high else None


def _combined(op: str, operands: list[_Line]) -> _Line | None:
    """An operation on lines, where it gives a line."""
    match op, operands:
        case "convert", [line]:
            return line
        case (("add" | "sub"), [left, right]):
            dims = {line.dim for line in (left, right) if line.step}
            if len(dims) > 1:
                return None
            sign = 1 if op == "add" else -1
            step, start = left.step + sign * right.step, left.start + sign * right.start
            return _Line(dims.pop() if dims else 0, step, start)
        case "mul", [left, right]:
            if left.step and right.step:
                return None
            line, factor = (left, right.start) if left.step else (right, left.start)
            return _Line(line.dim, line.step * factor, line.start * factor)
    return None


# ---- one piece ---------------------------------------------------------------------------------


@record(frozen=False)
class _Cutter:
    """Writes a kernel for the points from `begin` on along a dim."""

    kernel: Kernel
    dim: int
    begin: int
    conditions: tuple[_Condition, ...]
    same: dict[int, int] = field(default_factory=dict)  # values that are another value here
    known: dict[int, bool] = field(default_factory=dict)
    fresh: int = 0

    def piece(self, end: int) -> Piece:
        """The piece that ends there."""
        kernel, (step,) = self.kernel, self.kernel.passes
        self.fresh = 1 + max((instr.out for instr in step.instrs), default=-1)
        for condition in self.conditions:
            if condition.dim == self.dim:
                first = condition.holds(self.begin)
                if condition.holds(end - 1) == first:
                    self.known[condition.out] = first
        instrs = [made for instr in step.instrs for made in self.written(instr)]
        stores = tuple(made for store in step.stores for made in self.stored(store))
        sizes = list(kernel.sizes)
        sizes[self.dim] = end - self.begin
        outer = len(kernel.outer)
        whole = replace(
            kernel,
            outer=tuple(sizes[:outer]),
            inner=tuple(sizes[outer:]),
            passes=(Pass(step.level, _needed(instrs, stores), stores),),
        )
        return _with_fewer_arguments(whole)

    def value(self, number: int) -> int:
        """The value that stands for one of the whole kernel."""
        return self.same.get(number, number)

    def written(self, instr: Instr) -> list[Instr]:
        """The instructions that replace an instruction."""
        truth = self.truth(instr)
        if truth is not None:
            self.known[instr.out] = truth
            return [Const(instr.out, "bool", int(truth))]
        match instr:
            case Iota() if instr.dim == self.dim and self.begin:
                return self.shifted(instr)
            case Op(op="select", operands=(asked, yes, no)) if self.value(asked) in self.known:
                chosen = yes if self.known[self.value(asked)] else no
                self.same[instr.out] = self.value(chosen)
                return []
            case Op():
                operands = tuple(self.value(operand) for operand in instr.operands)
                return [replace(instr, operands=operands)]
            case Load():
                return self.loaded(instr)
        return [instr]

    def truth(self, instr: Instr) -> bool | None:
        """The value of a condition in the whole piece, if that is known."""
        if instr.out in self.known:
            return self.known[instr.out]
        if not isinstance(instr, Op) or instr.dtype != "bool":
            return None
        given = [self.known.get(self.value(operand)) for operand in instr.operands]
        if instr.op == "not" and given[0] is not None:
            return not given[0]
        decides = {"and": False, "or": True}.get(instr.op)
        if decides is None:
            return None
        if decides in given:
            return decides
        return None if None in given else not decides

    def shifted(self, instr: Iota) -> list[Instr]:
        """An index that counts from the start of the whole space."""
        inside, start = self.fresh, self.fresh + 1
        self.fresh += 2
        return [
            replace(instr, out=inside),
            Const(start, instr.dtype, self.begin),
            Op(instr.out, instr.dtype, "add", (inside, start)),
        ]

    def loaded(self, instr: Load) -> list[Instr]:
        """A read, without a guard that always holds; where it never holds nothing is read."""
        guard = None if instr.guard is None else self.value(instr.guard)
        fill = None if instr.fill is None else self.value(instr.fill)
        if guard is not None and guard in self.known:
            if not self.known[guard]:
                if fill is None:
                    return [Const(instr.out, instr.dtype, 0)]
                self.same[instr.out] = fill
                return []
            guard = fill = None
        return [replace(instr, map=self.moved(instr.map), guard=guard, fill=fill)]

    def stored(self, store: Store | StoreRow) -> list[Store]:
        """A write of the piece; none where its guard never holds."""
        assert isinstance(store, Store), "an elementwise kernel keeps no rows"
        guard = None if store.guard is None else self.value(store.guard)
        if guard is not None and guard in self.known:
            if not self.known[guard]:
                return []
            guard = None
        where, value = self.moved(store.map), self.value(store.value)
        return [replace(store, map=where, value=value, guard=guard)]

    def moved(self, where: Map) -> Map:
        """A map, counted from the start of the piece."""
        gathered = tuple((self.value(number), stride) for number, stride in where.gathered)
        offset = where.offset + where.strides[self.dim] * self.begin
        return replace(where, offset=offset, gathered=gathered)


def _needed(instrs: list[Instr], stores: tuple[Store, ...]) -> tuple[Instr, ...]:
    """The instructions that stores need."""
    wanted = {number for store in stores for number in operands_of(store)}
    kept: list[Instr] = []
    for instr in reversed(instrs):
        if instr.out in wanted:
            kept.append(instr)
            wanted.update(operands_of(instr))
    return tuple(reversed(kept))


def _with_fewer_arguments(kernel: Kernel) -> Piece:
    """A kernel without the arguments that it does not touch, and of its results only its part.

    So pieces that write to different parts of a result can be seen not to meet.
    """
    (step,) = kernel.passes
    touched: dict[int, list[Load | Store]] = {}
    for item in (*step.instrs, *step.stores):
        if isinstance(item, Load | Store):
            touched.setdefault(item.arg, []).append(item)
    numbers = tuple(sorted(touched))
    args, starts = [], []
    for number in numbers:
        arg, start = kernel.args[number], 0
        items = touched[number]
        if arg.role == "out" and not any(item.map.gathered for item in items):
            ranges = [affine_range(item.map, kernel.sizes) for item in items]
            start = min(low for low, _ in ranges)
            arg = Arg(arg.dtype, max(high for _, high in ranges) + 1 - start, arg.role)
        args.append(arg)
        starts.append(start)

    def renamed(item: Accessing) -> Accessing:
        place = numbers.index(item.arg)
        where = replace(item.map, offset=item.map.offset - starts[place])
        return replace(item, arg=place, map=where)

    instrs = tuple(renamed(i) if isinstance(i, Load) else i for i in step.instrs)
    stores = tuple(renamed(s) for s in step.stores if isinstance(s, Store))
    made = replace(kernel, args=tuple(args), passes=(Pass(step.level, instrs, stores),))
    return Piece(made, numbers, tuple(starts))
