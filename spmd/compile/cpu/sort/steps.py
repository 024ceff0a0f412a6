"""Sorting as native code: rows of 64-bit words by their upper halves, or the least words of rows.

The one idea: the caller puts an order-preserving 32-bit key above a 32-bit position. Then one
function serves all dtypes, and the lower halves become the permutation. Long rows
are sorted by their bytes, the lowest first (a stable counting sort each, and none for a byte that
all words share); short ones by insertion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from spmd.compile.native.llvm.compiler import host
from spmd.compile.native.llvm.function_builder import Function, Value
from spmd.compile.native.llvm.vectors import vectors
from spmd.compile.native.program.steps import KernelStep, Slot

# Up to here insertion is quicker than counting.
MOST_INSERTED = 40

_BYTES, _BUCKETS = 4, 256
# Measured on one core: a word through four counting passes, and one that is only looked at.
_NS_PER_WORD = 12.0
_NS_PER_LOOK = 0.8

_DECLARED = "declare ptr @memcpy(ptr, ptr, i64)\n"

SORT, LEAST = "spmd_sort_words", "spmd_least_words"


@cache
def sort_text(kept: bool) -> str:
    """The module of the function that sorts, or of that which finds the least words."""
    attributes = vectors("f32", host().vector_bytes).attributes
    return _least(attributes).text() if kept else _DECLARED + _sort(attributes).text()


def sort_step(
    addresses: Mapping[str, int], words: Slot, rows: int, size: int, kept: int | None, name: str
) -> KernelStep:
    """Sort each of `rows` rows of `size` words in place, stably by their upper halves.

    With `kept`, at most MOST_KEPT, only that many least words (as whole unsigned numbers) are put
    in order at the row's begin; the others are undefined. `addresses` are those of `sort_text`.
    """
    if kept is None:
        cost, scratch = size * _NS_PER_WORD, 8 * size if size > MOST_INSERTED else 0
        sizes: tuple[int, ...] = (size,)
    else:
        cost, scratch, sizes = size * _NS_PER_LOOK, 0, (size, kept)
    address = addresses[SORT if kept is None else LEAST]
    return KernelStep(address, (words,), rows, cost, sizes=sizes, scratch=scratch, name=name)


def _upper(f: Function, word: Value) -> Value:
    return f.emit("i64", f"lshr i64 {word.text}, 32")


def _insert(
    f: Function, row: Value, word: Value, at: Value, before: Callable[[Value, Value], Value]
) -> None:
    """Move words of a row up from place `at` until `word` fits, and put it there."""
    place = f.var("i64", at)
    with f.loop():
        f.break_if(place.get() <= 0)
        previous = f.load("i64", row, (place.get() - 1) * 8)
        f.break_if(before(previous, word).equals(0))
        f.store(previous, row, place.get() * 8)
        place.set(place.get() - 1)
    f.store(word, row, place.get() * 8)


def _sort(attributes: str) -> Function:
    f = Function(SORT, "void", ["ptr", "ptr", "i64", "i64"], attributes=attributes)
    args, sizes, begin, end = f.params
    data, size = f.load("ptr", args), f.load("i64", sizes)
    counts = f.stack("i64", _BYTES * _BUCKETS, align=64)
    with f.range(begin, end) as number:
        row = f.at(data, number * size * 8)
        with f.if_else(size <= MOST_INSERTED) as it:
            with f.range(1, size) as i:
                word = f.load("i64", row, i * 8)
                _insert(f, row, word, i, lambda a, b: _upper(f, a) > _upper(f, b))
            it.otherwise()
            _count(f, row, size, counts)
            _by_bytes(f, row, f.load("ptr", args, 8), size, counts)
    return f


def _bucket(f: Function, word: Value, byte: int) -> Value:
    """The bucket of a word, as bytes into the counts."""
    digit = f.emit("i64", f"lshr i64 {word.text}, {32 + 8 * byte}") & (_BUCKETS - 1)
    return (digit + byte * _BUCKETS) * 8


def _count(f: Function, row: Value, size: Value, counts: Value) -> None:
    with f.range(0, _BYTES * _BUCKETS) as i:
        f.store(f.value("i64", 0), counts, i * 8)
    with f.range(0, size) as i:
        word = f.load("i64", row, i * 8)
        for byte in range(_BYTES):
            bucket = _bucket(f, word, byte)
            f.store(f.load("i64", counts, bucket) + 1, counts, bucket)


def _by_bytes(f: Function, row: Value, other: Value, size: Value, counts: Value) -> None:
    source, target = f.var("ptr", row), f.var("ptr", other)
    for byte in range(_BYTES):
        first = _bucket(f, f.load("i64", row), byte)
        with f.if_(f.load("i64", counts, first).differs(size)):
            place = f.var("i64", 0)
            with f.range(byte * _BUCKETS, (byte + 1) * _BUCKETS) as i:
                count = f.load("i64", counts, i * 8)
                f.store(place.get(), counts, i * 8)
                place.set(place.get() + count)
            with f.range(0, size) as i:
                word = f.load("i64", source.get(), i * 8)
                bucket = _bucket(f, word, byte)
                to = f.load("i64", counts, bucket)
                f.store(to + 1, counts, bucket)
                f.store(word, target.get(), to * 8)
            before = source.get()
            source.set(target.get())
            target.set(before)
    with f.if_(source.get().differs(row)):
        f.call("memcpy", "ptr", row, source.get(), size * 8)


def _least(attributes: str) -> Function:
    f = Function(LEAST, "void", ["ptr", "ptr", "i64", "i64"], attributes=attributes)
    args, sizes, begin, end = f.params
    data, size, kept = f.load("ptr", args), f.load("i64", sizes), f.load("i64", sizes, 8)

    def above(a: Value, b: Value) -> Value:
        return f.emit("i1", f"icmp ugt i64 {a.text}, {b.text}")

    with f.range(begin, end) as number:
        row = f.at(data, number * size * 8)
        with f.range(1, kept) as i:
            _insert(f, row, f.load("i64", row, i * 8), i, above)
        # The words behind the kept ones were read before they are written over.
        with f.range(kept, size) as i:
            word = f.load("i64", row, i * 8)
            with f.if_(above(f.load("i64", row, (kept - 1) * 8), word)):
                _insert(f, row, word, kept - 1, above)
    return f
