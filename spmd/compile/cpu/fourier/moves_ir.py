"""How points reach the passes and leave them, and the loop over transforms.

The one idea: in memory a complex number's two parts lie together, and either the lanes do (a
transform along another dim than the last) or the points (along the last one). In the first case a
point of all lanes is two registers that are taken apart; in the second, squares of registers are
transposed first. Masks keep lanes and points that are not there out of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from spmd.compile.cpu.fourier.passes_ir import Arithmetic, Number
from spmd.compile.native.llvm.function_builder import Function, Value, Words
from spmd.compile.native.llvm.vectors import (
    Vectors,
    lane_mask,
    load_vector,
    splat,
    store_vector,
    vectors,
)

LANES, POINTS = "lanes", "points"

# The numbers that the loop gets, then four for each pass: its address, m, s, where its roots begin.
SIZES: Sequence[str] = (
    "passes blocks lanes outer_read outer_written block_read block_written "
    "load points_read stride_read load_exchanges "
    "store points_written stride_written store_exchanges "
    "half turns turns_stride turns_plane turns_block"
).split()

# Memory, array of points, number of points, stride in bytes, live lanes, distance of the real part
# from a point's begin.
_MOVE = ("ptr", "ptr", "i64", "i64", "i64", "i64")


def move_symbol(v: Vectors, kind: str, along: str) -> str:
    """The name of a function that loads or stores points."""
    return f"fourier_{kind}_{along}_{v.symbol}"


def loop_symbol(v: Vectors) -> str:
    """The name of the loop over transforms."""
    return f"spmd_transforms_{v.symbol}"


def _shuffled(f: Function, a: Value, b: Value, lanes: Sequence[int]) -> Value:
    """Lanes of two vectors, those of the second numbered behind those of the first."""
    text = ", ".join(f"i32 {lane}" for lane in lanes)
    mask = f"<{len(lanes)} x i32> <{text}>"
    return f.emit(a.type, f"shufflevector {a.type} {a.text}, {b.type} {b.text}, {mask}")


def _apart(f: Function, v: Vectors, a: Value, b: Value) -> Number:
    """The parts of the complex numbers in two registers."""
    return Number(*(_shuffled(f, a, b, range(k, 2 * v.lanes, 2)) for k in range(2)))


def _together(f: Function, v: Vectors, number: Number) -> list[Value]:
    """The two registers in which parts lie as complex numbers."""
    pairs = [lane for k in range(v.lanes) for lane in (k, v.lanes + k)]
    parts = (pairs[: v.lanes], pairs[v.lanes :])
    return [_shuffled(f, number.real, number.imag, part) for part in parts]


def _transposed(f: Function, v: Vectors, rows: list[Value]) -> list[Value]:
    """The transpose of a square of complex numbers, by exchanges of ever smaller blocks."""
    size = len(rows)
    distance = size // 2
    while distance:
        made = list(rows)
        for i in range(size):
            if i & distance:
                continue
            low = [c if not c & distance else size + c - distance for c in range(size)]
            high = [c + distance if not c & distance else size + c for c in range(size)]
            for place, columns in ((i, low), (i + distance, high)):
                lanes = [2 * c + k for c in columns for k in range(2)]
                made[place] = _shuffled(f, rows[i], rows[i + distance], lanes)
        rows, distance = made, distance // 2
    return rows


@cache
def load_text(dtype: str, width: int, along: str) -> str:
    """The module of the function that reads points into an array of them."""
    v = vectors(dtype, width)
    name = move_symbol(v, "load", along)
    f = Function(name, "void", _MOVE, attributes=v.attributes)
    memory, array, count, stride, live, real_at = f.params
    a = Arithmetic(f, v)
    imag_at = v.nbytes_of_vector - real_at

    def keep(point: Value, number: Number) -> None:
        place = a.point(array, point)
        f.store(number.real, place, real_at, align=width)
        f.store(number.imag, place, imag_at, align=width)

    if along == LANES:
        masks = _halves(f, v, live)
        with f.range(0, count) as p:
            row = f.at(memory, p * stride)
            parts = [load_vector(f, v, f.at(row, k * width), mask) for k, mask in enumerate(masks)]
            keep(p, _apart(f, v, *parts))
    else:
        square = v.lanes // 2
        rows = [f.at(memory, f.smaller(live - 1, k) * stride) for k in range(v.lanes)]
        with f.range(0, count, square) as p:
            mask = lane_mask(f, v.lanes, (count - p) * 2)
            read = [load_vector(f, v, f.at(r, p * (2 * v.nbytes)), mask) for r in rows]
            halves = [_transposed(f, v, read[k : k + square]) for k in (0, square)]
            for k, pair in enumerate(zip(*halves, strict=True)):
                keep(p + k, _apart(f, v, *pair))
    return "\n".join((v.declarations(), f.text()))


@cache
def store_text(dtype: str, width: int, along: str, turned: bool) -> str:
    """The module of the function that writes points, times a number.

    With `turned` (of lanes) each is also multiplied by a root: real parts lie at `turns`, rows of
    points at a stride, imaginary ones a plane further on.
    """
    v = vectors(dtype, width)
    name = move_symbol(v, "store_turned" if turned else "store", along)
    params = (*_MOVE, v.element, "ptr", "i64", "i64")
    f = Function(name, "void", params, attributes=v.attributes)
    memory, array, count, stride, live, real_at, scale, turns, turns_stride, plane = f.params
    a = Arithmetic(f, v)
    imag_at = v.nbytes_of_vector - real_at
    scales = splat(f, scale, v.lanes)

    def point(number: Value) -> Number:
        place = a.point(array, number)
        parts = (f.load(v.vector, place, at, align=width) for at in (real_at, imag_at))
        return Number(*(a.mul(part, scales) for part in parts))

    if along == LANES:
        masks = _halves(f, v, live)
        of_lanes = lane_mask(f, v.lanes, live)
        with f.range(0, count) as p:
            made = point(p)
            if turned:
                row = f.at(turns, p * turns_stride)
                parts = (load_vector(f, v, place, of_lanes) for place in (row, f.at(row, plane)))
                made = a.times(made, Number(*parts))
            row = f.at(memory, p * stride)
            for k, part in enumerate(_together(f, v, made)):
                store_vector(f, v, part, f.at(row, k * width), masks[k])
    else:
        square = v.lanes // 2
        rows = [f.at(memory, f.smaller(live - 1, k) * stride) for k in range(v.lanes)]
        counts = [f.select(live > k, count, 0) for k in range(v.lanes)]
        with f.range(0, count, square) as p:
            pairs = [_together(f, v, point(p + k)) for k in range(square)]
            for half in range(2):
                made = _transposed(f, v, [pair[half] for pair in pairs])
                for k, part in enumerate(made, half * square):
                    mask = lane_mask(f, v.lanes, (counts[k] - p) * 2)
                    store_vector(f, v, part, f.at(rows[k], p * (2 * v.nbytes)), mask)
    return "\n".join((v.declarations(), f.text()))


def _halves(f: Function, v: Vectors, live: Value) -> list[Value]:
    """The masks of the two registers that hold the complex numbers of live lanes."""
    return [lane_mask(f, v.lanes, live * 2 - k * v.lanes) for k in range(2)]


@cache
def loop_text(dtype: str, width: int) -> str:
    """The module of the loop over blocks of lanes: load, pass by pass, store."""
    v = vectors(dtype, width)
    f = Function(loop_symbol(v), "void", ["ptr", "ptr", "i64", "i64"], attributes=v.attributes)
    args, sizes, begin, end = f.params
    read, written, roots, scratch = (f.load("ptr", args, 8 * k) for k in range(4))
    w = Words(f, sizes, SIZES)
    with f.range(begin, end) as unit:
        outer, block = unit // w["blocks"], unit % w["blocks"]
        live = f.smaller(w["lanes"] - block * v.lanes, v.lanes)
        source = f.at(read, outer * w["outer_read"] + block * w["block_read"])
        target = f.at(written, outer * w["outer_written"] + block * w["block_written"])
        here, there = f.var("ptr", scratch), f.var("ptr", f.at(scratch, w["half"]))
        given = (w["points_read"], w["stride_read"], live, w["load_exchanges"])
        f.call(w["load"], "void", source, here.get(), *given)
        with f.range(0, w["passes"]) as number:
            at = f.at(sizes, number * 32 + 8 * len(SIZES))
            address, m, s, where = (f.load("i64", at, 8 * k) for k in range(4))
            f.call(address, "void", here.get(), there.get(), m, s, f.at(roots, where))
            before = here.get()
            here.set(there.get())
            there.set(before)
        given = (w["points_written"], w["stride_written"], live, w["store_exchanges"])
        scale = f.load(v.element, roots)
        turns = f.at(f.at(roots, w["turns"]), block * w["turns_block"])
        rest = (scale, turns, w["turns_stride"], w["turns_plane"])
        f.call(w["store"], "void", target, here.get(), *given, *rest)
    return f.text()
