"""Rules for sorting: keys become words, the words are sorted, and every operand follows.

Numbers of 32 or 64 bits that nothing follows are sorted as they are.

A key of at most 32 bits is turned into an unsigned number with the same order, put above the
position in its row, and sorted by one native step for all dtypes. Wider keys, and several keys,
are sorted part by part, the least important first, since the step is stable. The bits below the
keys say from where each operand is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeGuard

from spmd.base.record import record
from spmd.compile.expressions.index_map import strides_of
from spmd.compile.expressions.scalar_ops import storage_dtype
from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.dtypes import REAL_OF, itemsize
from spmd.compile.lower.lowering import Lowering, host, rule
from spmd.compile.lower.steps import (
    MOST_KEPT,
    SHARED_ROWS,
    SORT_WORK,
    TEMP,
    Launch,
    Ref,
    Sort,
    SortRows,
)
from spmd.core.ir import Eqn

# Writes a part of a key as a "u32", from the key's value.
Part: TypeAlias = Callable[[Builder, int], int]


@rule("sort")
def sort(lowering: Lowering, eqn: Eqn) -> None:
    """Put all operands in the order of the first ones."""
    p = eqn.params
    stored = [storage_dtype(v.aval.dtype) for v in eqn.invars]
    parts = [_parts(dtype, False) for dtype in stored[: p["num_keys"]]]
    if None in stored or None in parts:
        host(lowering, eqn)
        return
    space = _Space(lowering, eqn, p["dimension"])
    if len(stored) == 1 and sorts_alone(stored[0]):
        space.sort_alone(stored[0])
        return
    steps = [(k, part) for k, found in enumerate(parts) for part in found or ()]
    words = space.sorted_words(steps, None)
    for k in range(len(eqn.invars)):
        space.gather(words, k, k)


@rule("top_k")
def top_k(lowering: Lowering, eqn: Eqn) -> None:
    """The first of each row when its largest elements come first, and their positions."""
    (operand,) = eqn.invars
    dtype = storage_dtype(operand.aval.dtype)
    parts = _parts(dtype, True)
    if dtype is None or parts is None:
        host(lowering, eqn)
        return
    k = eqn.params["k"]
    space = _Space(lowering, eqn, eqn.params["axis"])
    few = len(parts) == 1 and k <= MOST_KEPT
    words = space.sorted_words([(0, part) for part in parts], k if few else None)
    space.gather(words, 0, 0)
    space.gather(words, None, 1)


def sorts_alone(dtype: str | None) -> TypeGuard[str]:
    """Whether numbers of a dtype are sorted without anything that follows them."""
    return dtype is not None and dtype[0] in "iuf" and itemsize(dtype) in (4, 8)


# ---- keys --------------------------------------------------------------------------------------


def _parts(dtype: str | None, largest_first: bool) -> list[Part] | None:
    """How keys of a dtype become unsigned numbers, the most important part first."""
    if dtype is None:
        return None
    if dtype[0] == "c":
        real = REAL_OF[dtype]
        return [
            _after(lambda b, x, half=half: b.op(half, x), part)
            for half in ("real", "imag")
            for part in _parts(real, largest_first) or ()
        ]
    wide = itemsize(dtype) == 8

    def number(b: Builder, x: int) -> int:
        """All bits of the key, in order."""
        made = _ordered(b, x, dtype, signs_differ=largest_first)
        return b.op("not", made) if largest_first else made

    if not wide:
        return [number]

    def upper(b: Builder, x: int) -> int:
        return b.convert(b.op("shr_logical", number(b, x), b.const(32, "u64")), "u32")

    def lower(b: Builder, x: int) -> int:
        return b.convert(number(b, x), "u32")

    return [upper, lower]


def _after(first: Part, then: Part) -> Part:
    return lambda b, x: then(b, first(b, x))


def _ordered(b: Builder, x: int, dtype: str, signs_differ: bool) -> int:
    """An unsigned number of 32 or 64 bits that is ordered like the key; NaN is the largest.

    Where signs differ, -0.0 comes before 0.0 and -NaN before NaN; else they are equal.
    """
    bits = 64 if itemsize(dtype) == 8 else 32
    unsigned, signed = f"u{bits}", f"i{bits}"
    top = b.const(1 << (bits - 1), unsigned)
    if dtype == "bool" or dtype[0] == "u":
        return b.convert(x, unsigned)
    if dtype[0] == "i":
        return b.op("xor", b.bitcast(b.convert(x, signed), unsigned), top)
    x = b.convert(x, f"f{bits}")
    raw = b.bitcast(x, signed)
    # Of negative numbers all bits are turned over, of others the sign.
    sign = b.op("shr_arith", raw, b.const(bits - 1, signed))
    turned = b.op("or", b.bitcast(sign, unsigned), top)
    made = b.op("xor", b.bitcast(raw, unsigned), turned)
    nan = b.const((1 << bits) - 1, unsigned)
    if signs_differ:
        negative = b.op("lt", raw, b.const(0, signed))
        nan = b.op("select", negative, b.const((1 << bits) - 2, unsigned), nan)
    else:
        made = b.op("select", b.op("eq", x, b.const(0.0, f"f{bits}")), top, made)
    return b.op("select", b.op("ne", x, x), nan, made)


# ---- the steps ---------------------------------------------------------------------------------


@record
class _Along:
    """An operand or a result seen from the sorted dim: strides of the others, and along it."""

    size: int
    others: tuple[int, ...]
    along: int


class _Space:
    """The kernels around the sorted words of one equation."""

    def __init__(self, lowering: Lowering, eqn: Eqn, along: int):
        self.lowering = lowering
        self.eqn = eqn
        self.along = along
        shape = eqn.invars[0].aval.shape
        self.length = shape[along]
        self.others = tuple(s for d, s in enumerate(shape) if d != along)
        self.rows = math.prod(self.others)
        # Words lie row by row, the sorted dim last.
        pitches = strides_of((*self.others, self.length))
        self.words = _Along(self.rows * self.length, pitches[:-1], 1)

    def view(self, shape: Sequence[int]) -> _Along:
        strides = strides_of(shape)
        others = tuple(s for d, s in enumerate(strides) if d != self.along)
        return _Along(math.prod(shape), others, strides[self.along])

    def sorted_words(self, parts: Sequence[tuple[int, Part]], kept: int | None) -> Ref:
        """The words in order, after sorting by each part, the last (least important) one first."""
        before: Ref | None = None
        # With their positions below them words are in one order only.
        work = self._work() if len(parts) == 1 and kept is None else ()
        for number, part in reversed(parts):
            words = Ref(self.lowering.buffer(TEMP, 8 * self.words.size))
            self._encode(number, part, before, words)
            name, source = self.eqn.prim.name, self.eqn.source
            step = Sort(self.rows, self.length, kept, (words, *work), name, source)
            self.lowering.steps.append(step)
            before = words
        assert before is not None, "there is at least one key"
        return before

    def sort_alone(self, dtype: str) -> None:
        """Sort the rows of the only operand as numbers."""
        lowering, eqn = self.lowering, self.eqn
        (atom,), (var,) = eqn.invars, eqn.outvars
        operand, nbytes = lowering.ref(atom), itemsize(dtype) * self.words.size
        there = self.view(atom.aval.shape)
        turned = there.along != 1
        if turned:
            rows = Ref(lowering.buffer(TEMP, nbytes))
            self._move(dtype, operand, there, rows, self.words)
            operand, result = rows, Ref(lowering.buffer(TEMP, nbytes))
        else:
            result = lowering.place(var)
        refs = operand, result, *self._work()
        step = SortRows(self.rows, self.length, dtype, refs, eqn.prim.name, eqn.source)
        lowering.steps.append(step)
        if turned:
            self._move(dtype, result, self.words, lowering.place(var), there)

    def _work(self) -> tuple[Ref, ...]:
        """Memory for threads that share rows, if there are only a few."""
        if self.rows > SHARED_ROWS:
            return ()
        return (Ref(self.lowering.buffer(TEMP, SORT_WORK * self.rows)),)

    def _move(self, dtype: str, source: Ref, there: _Along, target: Ref, here: _Along) -> None:
        """Copy numbers that lie in another way."""
        b = Builder((*self.others, self.length), ())
        read, written = b.arg(dtype, there.size), b.arg(dtype, here.size, "out")
        with b.row():
            value = b.load(read, (*there.others, there.along))
            b.store(written, (*here.others, here.along), value)
        self._launch(b, [source, target])

    def _encode(self, number: int, part: Part, before: Ref | None, words: Ref) -> None:
        """Write words with a part of a key above the positions that earlier sorting gave."""
        atom = self.eqn.invars[number]
        key, dtype = self.view(atom.aval.shape), storage_dtype(atom.aval.dtype)
        assert dtype is not None
        b = Builder((*self.others, self.length), ())
        source = b.arg(dtype, key.size)
        order = None if before is None else b.arg("u64", self.words.size)
        target = b.arg("u64", self.words.size, "out")
        where = (*self.words.others, 1)
        with b.row():
            if order is None:
                position = b.iota(len(self.others), "u64")
                value = b.load(source, (*key.others, key.along))
            else:
                position = self._position(b, order)
                value = b.load(source, (*key.others, 0), 0, [(self._index(b, position), key.along)])
            high = b.op("shl", b.convert(part(b, value), "u64"), b.const(32, "u64"))
            b.store(target, where, b.op("or", high, position))
        refs = [self.lowering.ref(atom), *([] if before is None else [before]), words]
        self._launch(b, refs)

    def _position(self, b: Builder, words: int) -> int:
        word = b.load(words, (*self.words.others, 1))
        return b.op("and", word, b.const(0xFFFFFFFF, "u64"))

    def _index(self, b: Builder, position: int) -> int:
        return b.convert(position, "i64")

    def gather(self, words: Ref, number: int | None, result: int) -> None:
        """Write a result: an operand in the order of the words, or (None) the positions."""
        var = self.eqn.outvars[result]
        out, dtype = self.view(var.aval.shape), storage_dtype(var.aval.dtype)
        assert dtype is not None
        b = Builder((*self.others, var.aval.shape[self.along]), ())
        refs = [words]
        order = b.arg("u64", self.words.size)
        source = -1
        if number is not None:
            atom = self.eqn.invars[number]
            refs.append(self.lowering.ref(atom))
            source = b.arg(dtype, atom.aval.size)
        target = b.arg(dtype, out.size, "out")
        with b.row():
            position = self._position(b, order)
            if number is None:
                value = b.convert(position, dtype)
            else:
                whole = self.view(self.eqn.invars[number].aval.shape)
                at = [(self._index(b, position), whole.along)]
                value = b.load(source, (*whole.others, 0), 0, at)
            b.store(target, (*out.others, out.along), value)
        self._launch(b, [*refs, self.lowering.place(var)])

    def _launch(self, b: Builder, refs: Sequence[Ref]) -> None:
        name = self.eqn.prim.name
        self.lowering.steps.append(Launch(b.build(), tuple(refs), name, self.eqn.source))
