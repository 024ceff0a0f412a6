"""Sorting rows of numbers by themselves, as native steps: nothing has to follow them.

The one idea: numbers become signed keys of the same order, keys are sorted (`quicksort.py`), and
become numbers again. Of floats the other bits of negative ones are turned over. Zeros of both signs
are equal, and so are all NaNs, which come last: if a row has any whose bits could be told apart,
they are written in the order in which they came.

A few long rows are cut into pieces first, so that threads can share them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from spmd.compile.cpu.sort.network import COLUMN_NETWORKS, Keys
from spmd.compile.cpu.sort.quicksort import RARE, declarations, halving, inner, sorter
from spmd.compile.kernel.dtypes import itemsize
from spmd.compile.native.llvm.compiler import host
from spmd.compile.native.llvm.function_builder import Function, Value
from spmd.compile.native.llvm.vectors import splat
from spmd.compile.native.program.steps import KernelStep, Slot

# The kind of a number's bits: the last of a step's sizes.
SIGNED, UNSIGNED, FLOAT = range(3)
_KINDS = {"i": SIGNED, "u": UNSIGNED, "f": FLOAT}

# Few rows are cut if they are so long, into as many pieces as so many halvings make.
_LONG = 1 << 14
_HALVINGS = 4
_PIECES = 1 << _HALVINGS
# The words kept for a cut row: the bounds of its pieces, and whether it has odd numbers.
_WORDS = _PIECES + 2

# Measured on one core: nanoseconds for a key, once and for each halving of a row.
_NS_PER_KEY, _NS_PER_HALVING = 1.5, 0.3


@cache
def values_text(
    bits: int, registers: int = 0, compresses: bool | None = None, cut: bool = False
) -> str:
    """The module of the functions that sort rows of numbers of so many bits.

    They are for rows that so many registers hold (0: of any length), or for those that are `cut`.
    `compresses` says whether the processor compresses registers (None: as this one).
    """
    keys = Keys(bits, host().vector_bytes)
    sorts = sorter(keys, can_compress() if compresses is None else compresses, registers)
    parts, declared = [*sorts.functions, _again(keys)], list(sorts.declared)
    if cut:
        halves, more = halving(keys, sorts)
        parts += [*halves, _cut(keys), _pieces(keys, sorts.name), _odd(keys)]
        declared += more
    else:
        parts.append(_rows(keys, registers, sorts.name))
    return "\n".join((declarations(keys), *declared, *(f.text() for f in parts)))


def text_for(dtype: str, size: int, has_work: bool) -> str:
    """The module that rows of so many numbers need, with memory for cutting them or without."""
    bits = 8 * itemsize(dtype)
    if has_work and shares_rows(size):
        return values_text(bits, cut=True)
    return values_text(bits, registers_for(dtype, size))


def can_compress() -> bool:
    """Whether this processor moves chosen lanes of a register together."""
    return host().has("avx512f")


def shares_rows(size: int) -> bool:
    """Whether threads share rows of so many numbers, where there are only a few rows."""
    return size >= _LONG and can_compress()


def values_symbol(bits: int, part: str = "rows", registers: int = 0) -> str:
    """The name of a function that sorts numbers of so many bits, in rows of so many registers."""
    return f"spmd_sort_{part}_i{bits}" + (f"_{registers}" if registers else "")


def registers_for(dtype: str, size: int) -> int:
    """The number of registers that hold rows of so many numbers; 0 if networks sort none."""
    lanes = host().vector_bytes // itemsize(dtype)
    return next((n for n in sorted(COLUMN_NETWORKS) if size <= n * lanes), 0)


def values_steps(
    addresses: Mapping[str, int],
    slots: tuple[Slot, ...],
    rows: int,
    size: int,
    dtype: str,
    name: str,
) -> tuple[KernelStep, ...]:
    """Write each of `rows` rows of `size` numbers in order; NaNs last, equal ones as they came.

    `slots` are numbers and results, which may be written over the operand if they are whole;
    and maybe SORT_WORK bytes a row. `addresses` are those of `values_text`.
    """
    keys = Keys(8 * itemsize(dtype), host().vector_bytes)
    kind = _KINDS[dtype[0]]
    scratch = keys.nbytes * (size + keys.lanes)
    halvings, registers = size.bit_length(), registers_for(dtype, size)

    def step(part: str, units: int, cost: float, slots: tuple[Slot, ...]) -> KernelStep:
        address = addresses[values_symbol(keys.bits, part, registers)]
        sizes = size, kind
        return KernelStep(address, slots, units, cost, sizes=sizes, scratch=scratch, name=name)

    if len(slots) < 3 or not shares_rows(size):
        cost = size * (_NS_PER_KEY + _NS_PER_HALVING * halvings)
        return (step("rows", rows, cost, slots[:2]),)
    piece = size / _PIECES * (_NS_PER_KEY + _NS_PER_HALVING * (halvings - _HALVINGS))
    found = (
        step("cut", rows, size * _NS_PER_HALVING * _HALVINGS, slots),
        step("pieces", rows * _PIECES, piece, slots),
    )
    return (*found, step("odd", rows, 1.0, slots)) if kind == FLOAT else found


# ---- rows --------------------------------------------------------------------------------------


def _exponents(keys: Keys) -> int:
    """The bits of infinity: of a NaN more than these are set."""
    return 0x7F800000 if keys.bits == 32 else 0x7FF << 52


def _step(keys: Keys, part: str, registers: int = 0, rare: bool = False) -> Function:
    params = ["ptr", "ptr", "i64", "i64"]
    name = values_symbol(keys.bits, part, registers)
    attributes = f"{keys.attributes} noinline{RARE}" if rare else keys.attributes
    return Function(name, "void", params, attributes=attributes)


def _turning(f: Function, keys: Keys, kind: Value) -> tuple[Value, Value, Value]:
    """The bits turned over in negative numbers, those in all, and the last key before NaNs."""
    is_float, none = kind.equals(FLOAT), f.value(keys.element, 0)
    found = (
        f.select(is_float, f.value(keys.element, keys.largest), 0),
        f.select(kind.equals(UNSIGNED), f.value(keys.element, keys.least), none),
        f.select(is_float, f.value(keys.element, _exponents(keys)), keys.largest),
    )
    negative, every, last = (splat(f, value, keys.lanes) for value in found)
    return negative, every, last


def _rows(keys: Keys, registers: int, sorts: str) -> Function:
    """Rows that one thread sorts each."""
    f = _step(keys, "rows", registers)
    args, sizes, begin, end = f.params
    source, target, scratch = (f.load("ptr", args, 8 * k) for k in range(3))
    size, kind = f.load("i64", sizes), f.load("i64", sizes, 8)
    turning = _turning(f, keys, kind)
    with f.range(begin, end) as number:
        row = number * size * keys.nbytes
        here, there = f.at(source, row), f.at(target, row)
        odd = _keyed(f, keys, here, there, size, turning)
        f.call(sorts, "void", there, size, scratch)
        _numbered(f, keys, there, size, turning)
        with f.if_(odd & kind.equals(FLOAT)):
            f.call("sort_again", "void", here, there, size)
    return f


def _cut(keys: Keys) -> Function:
    """Rows to keys in pieces: each is sorted behind the one before."""
    f = _step(keys, "cut")
    args, sizes, begin, end = f.params
    source, target, work, scratch = (f.load("ptr", args, 8 * k) for k in range(4))
    size, kind = f.load("i64", sizes), f.load("i64", sizes, 8)
    turning = _turning(f, keys, kind)
    with f.range(begin, end) as number:
        row, words = number * size * keys.nbytes, f.at(work, number * (8 * _WORDS))
        there = f.at(target, row)
        odd = _keyed(f, keys, f.at(source, row), there, size, turning)
        f.store(f.convert("zext", odd, "i64"), words, 8 * (_PIECES + 1))
        f.store(f.value("i64", 0), words)
        f.store(size, words, 8 * _PIECES)
        apart = f.var("i64", 8 * _PIECES)
        with f.range(0, _HALVINGS):
            step = apart.get()
            with f.range(0, 8 * _PIECES, step) as at:
                first, last = f.load("i64", words, at), f.load("i64", words, at + step)
                place = f.at(there, first * keys.nbytes)
                low = f.call("sort_halves", "i64", place, last - first, scratch)
                f.store(first + low, words, at + step // 2)
            apart.set(step // 2)
    return f


def _pieces(keys: Keys, sorts: str) -> Function:
    """Pieces of keys to pieces of rows."""
    f = _step(keys, "pieces")
    args, sizes, begin, end = f.params
    target, work, scratch = (f.load("ptr", args, 8 * k) for k in range(1, 4))
    size, kind = f.load("i64", sizes), f.load("i64", sizes, 8)
    turning = _turning(f, keys, kind)
    with f.range(begin, end) as piece:
        number = piece // _PIECES
        words = f.at(work, number * (8 * _WORDS) + piece % _PIECES * 8)
        first, last = f.load("i64", words), f.load("i64", words, 8)
        place = f.at(target, (number * size + first) * keys.nbytes)
        f.call(sorts, "void", place, last - first, scratch)
        _numbered(f, keys, place, last - first, turning)
    return f


def _odd(keys: Keys) -> Function:
    """Numbers of cut rows that are equal, but not the same."""
    f = _step(keys, "odd", rare=True)
    args, sizes, begin, end = f.params
    source, target, work = (f.load("ptr", args, 8 * k) for k in range(3))
    size = f.load("i64", sizes)
    with f.range(begin, end) as number:
        odd = f.load("i64", f.at(work, number * (8 * _WORDS)), 8 * (_PIECES + 1))
        with f.if_(odd.differs(0)):
            row = number * size * keys.nbytes
            f.call("sort_again", "void", f.at(source, row), f.at(target, row), size)
    return f


def _keyed(
    f: Function,
    keys: Keys,
    source: Value,
    target: Value,
    size: Value,
    turning: tuple[Value, Value, Value],
) -> Value:
    """Write numbers as keys; say whether there was a NaN or a -0.0."""
    negative, every, last = turning
    found = f.var(keys.mask, 0)

    def key(x: Value) -> Value:
        nan = (x & keys.largest) > last
        found.set(found.get() | nan | x.equals(keys.least))
        made = x ^ (x >> (keys.bits - 1) & negative) ^ every
        return f.select(nan, f.value(keys.vector, keys.largest), made)

    _each(f, keys, source, target, size, key)
    return f.convert("bitcast", found.get(), f"i{keys.lanes}").differs(0)


def _numbered(
    f: Function, keys: Keys, place: Value, size: Value, turning: tuple[Value, Value, Value]
) -> None:
    """Write keys as the numbers they stand for."""
    negative, every, _ = turning

    def number(x: Value) -> Value:
        x = x ^ every
        return x ^ (x >> (keys.bits - 1) & negative)

    _each(f, keys, place, place, size, number)


def _each(
    f: Function,
    keys: Keys,
    source: Value,
    target: Value,
    size: Value,
    made: Callable[[Value], Value],
) -> None:
    # One loop whose last turn is like the others: it waits for memory, and is compiled but once.
    with f.range(0, size, keys.lanes) as i:
        at, left = i * keys.nbytes, size - i
        live = f.select(left < keys.lanes, left, keys.lanes)
        x = keys.load(f, f.at(source, at), live, beyond=0)
        keys.store(f, made(x), f.at(target, at), live)


def _again(keys: Keys) -> Function:
    """Write zeros and NaNs as they came: `sort_again(source, target, count)`.

    Both are equal among themselves, and of each there may be different ones.
    """
    f = inner(keys, "sort_again", "void", "ptr", "ptr", "i64")
    source, target, count = f.params
    top = keys.least

    def kinds(i: Value) -> tuple[Value, Value, Value]:
        """A number without its sign, the number, and whether it is a NaN."""
        x = f.load(keys.element, source, i * keys.nbytes)
        size = x & keys.largest
        return size, x, size > _exponents(keys)

    zero, nan = f.var("i64", 0), f.var("i64", count)
    with f.range(0, count) as i:
        _, x, is_nan = kinds(i)
        below = (x < 0) & x.differs(top) & (is_nan ^ 1)
        zero.set(zero.get() + f.convert("zext", below, "i64"))
        nan.set(nan.get() - f.convert("zext", is_nan, "i64"))
    with f.range(0, count) as i:
        size, x, is_nan = kinds(i)
        for holds, place in ((size.equals(0), zero), (is_nan, nan)):
            with f.if_(holds):
                f.store(x, target, place.get() * keys.nbytes)
                place.set(place.get() + 1)
    return f
