"""Packing for matrix products: a panel of an operand, in the order in which tiles read it.

    pack(source, i stride, k stride, width, depth, target, target stride)
    target[k * target stride + i] = source[i * i stride + k * k stride]    i < width, k < depth

in the carried type. One function per way the source lies in memory: `copy` where i is contiguous,
`turn` where k is (a transpose, through registers), `gather` where neither is. i are columns of B or
rows of A. `turn` also stores up to three elements behind the width. `copy` takes the distance
between panels in place of the i stride and fills all that the width reaches over.

`panels_text` is the kernel of a step that packs a whole B for all products that read it.
"""

from __future__ import annotations

from functools import cache

from spmd.compile.native.llvm.function_builder import Function, Value
from spmd.compile.native.llvm.modules import CONTROL
from spmd.compile.native.llvm.vectors import (
    NBYTES,
    STORED,
    Vectors,
    lane_mask,
    load_vector,
    store_vector,
    widen,
)

PACK_PARAMS = ["ptr", "i64", "i64", "i64", "i64", "ptr", "i64"]


def pack_symbol(v: Vectors, source: str, way: str) -> str:
    """The name of a packing function of elements of a kernel dtype."""
    return f"pack_{way}_{source}_{v.symbol}"


@cache
def pack_text(v: Vectors, source: str, way: str) -> str:
    """The module of a packing function."""
    write = {"copy": _copy, "turn": _turn, "gather": _gather}[way]
    f = Function(pack_symbol(v, source, way), "void", PACK_PARAMS, attributes=v.attributes)
    write(f, v, source)
    return f"{v.declarations(STORED[source])}\n{f.text()}"


# ---- a whole operand ---------------------------------------------------------------------------

# The run-time numbers of the kernel below: which packing function, whether it is `copy`, sizes of
# B, of a unit and of a panel, strides in bytes.
PANEL_SIZES = (
    "pack whole n k columns depth column_blocks depth_blocks panel batch1 batch2 "
    "b_k b_col b_batch0 b_batch1 b_batch2 target_batch"
).split()


def panels_symbol(v: Vectors) -> str:
    """The kernel that packs all columns of B."""
    return f"panels_{v.symbol}"


def panels_text(v: Vectors) -> str:
    """The module of the kernel that packs B; unit = (matrix of the batch, columns, depth)."""
    params = ["ptr", "ptr", "i64", "i64"]
    f = Function(panels_symbol(v), "void", params, attributes=v.attributes)
    args, sizes, begin, end = f.params
    of = {name: f.load("i64", sizes, 8 * i) for i, name in enumerate(PANEL_SIZES)}
    pack = f.convert("inttoptr", of["pack"], "ptr")
    row, column = of["panel"] * v.nbytes, of["k"] * v.nbytes
    with f.range(begin, end) as unit:
        blocks = unit // of["depth_blocks"]
        k_first = (unit - blocks * of["depth_blocks"]) * of["depth"]
        batch = blocks // of["column_blocks"]
        first = (blocks - batch * of["column_blocks"]) * of["columns"]
        depth = f.smaller(of["k"] - k_first, of["depth"])
        columns = f.smaller(of["n"] - first, of["columns"])
        rest = batch // of["batch2"]
        outer = rest // of["batch1"]
        index = (outer, rest - outer * of["batch1"], batch - rest * of["batch2"])
        source = f.at(f.load("ptr", args), first * of["b_col"] + k_first * of["b_k"])
        for i, number in enumerate(index):
            source = f.at(source, number * of[f"b_batch{i}"])
        offset = batch * of["target_batch"] + first * column + k_first * row
        target = f.at(f.load("ptr", args, 8), offset)
        with f.if_else(of["whole"].differs(0)) as it:
            strides = column * of["panel"], of["b_k"]
            f.call(pack, "void", source, *strides, columns, depth, target, row)
            it.otherwise()
            with f.range(0, columns, of["panel"]) as j:
                width, strides = f.smaller(columns - j, of["panel"]), (of["b_col"], of["b_k"])
                origin, place = f.at(source, j * of["b_col"]), f.at(target, j * column)
                f.call(pack, "void", origin, *strides, width, depth, place, row)
    return f"{CONTROL}\n{f.text()}"


# ---- the packing functions ---------------------------------------------------------------------


def _copy(f: Function, v: Vectors, source: str) -> None:
    """Copy rows to as many panels as they reach over, `target stride` wide and `i stride` apart.

    A row is read from end to end, which suits the memory, for panels of any width.
    """
    origin, panel_stride, k_stride, width, depth, target, target_stride = f.params
    stored, nbytes = STORED[source], NBYTES[source]
    panel = target_stride // v.nbytes
    with f.range(0, depth) as k:
        read, write = f.at(origin, k * k_stride), f.var("ptr", f.at(target, k * target_stride))
        with f.range(0, width, panel) as first:
            line, place = f.at(read, first * nbytes), write.get()
            count = f.smaller(width - first, panel)
            whole = count - count % v.lanes
            with f.range(0, whole, v.lanes) as i:
                value = load_vector(f, v, f.at(line, i * nbytes), None, stored)
                f.store(value, place, i * v.nbytes, align=v.nbytes)
            with f.if_(whole < count):
                rest = lane_mask(f, v.lanes, count - whole)
                value = load_vector(f, v, f.at(line, whole * nbytes), rest, stored)
                store_vector(f, v, value, f.at(place, whole * v.nbytes), rest)
            write.set(f.at(place, panel_stride))


def _gather(f: Function, v: Vectors, source: str) -> None:
    origin, i_stride, k_stride, width, depth, target, target_stride = f.params
    with f.range(0, depth) as k, f.range(0, width) as i:
        element = f.load(STORED[source], origin, i * i_stride + k * k_stride)
        f.store(widen(f, element, v.element), target, k * target_stride + i * v.nbytes)


# Rows that are turned at a time, and elements of each.
_SIDE = 4
# As deep a part of a panel stays in the L1 cache while strips of it are written.
_TURNED_DEPTH = 64


def _turn(f: Function, v: Vectors, source: str) -> None:
    """Transpose in squares: four rows in registers, read along memory and written across."""
    origin, i_stride, _, width, depth, target, target_stride = f.params
    with f.range(0, depth, _TURNED_DEPTH) as first:
        read, write = f.at(origin, first * NBYTES[source]), f.at(target, first * target_stride)
        count = f.smaller(depth - first, _TURNED_DEPTH)
        with f.range(0, width, _SIDE) as i:
            # Rows behind the last are read as the last: their results are never used.
            lines = [f.at(read, i * i_stride)]
            for number in range(1, _SIDE):
                after = f.at(lines[-1], i_stride)
                lines.append(f.select(i + number < width, after, lines[-1]))
            _turn_strip(f, v, source, lines, count, f.at(write, i * v.nbytes))


def _turn_strip(
    f: Function, v: Vectors, source: str, lines: list[Value], depth: Value, target: Value
) -> None:
    """Transpose four lines."""
    nbytes, target_stride = NBYTES[source], f.params[-1]
    whole, columns = depth - depth % _SIDE, f.var("i64", 0)
    places = f.apart(target, target_stride, _SIDE)
    with f.range(0, whole, _SIDE) as counter:
        k, offset = f.opaque(counter), f.opaque(columns.get())
        start = k * nbytes
        rows = [_quad(f, v, source, line, start) for line in lines]
        for column, place in zip(_turned(f, v, rows), places, strict=True):
            f.store(column, place, offset, align=v.nbytes)
        columns.set(offset + target_stride * _SIDE)
    with f.range(whole, depth) as counter:
        k, offset = f.opaque(counter), f.opaque(columns.get())
        start, place = k * nbytes, f.at(target, offset)
        for number, line in enumerate(lines):
            element = widen(f, f.load(STORED[source], line, start), v.element)
            f.store(element, place, number * v.nbytes)
        columns.set(offset + target_stride)


def _quad(f: Function, v: Vectors, source: str, row: Value, offset: Value) -> Value:
    """Neighbouring elements of a row, as carried ones."""
    read = f.load(f"<{_SIDE} x {STORED[source]}>", row, offset, align=NBYTES[source])
    return widen(f, read, f"<{_SIDE} x {v.element}>")


def _turned(f: Function, v: Vectors, rows: list[Value]) -> list[Value]:
    """The columns of a square, given its rows."""
    for _ in range(2):
        rows = [
            _shuffled(f, v, rows[i], rows[i + 2], picks)
            for i in range(2)
            for picks in ((0, 4, 1, 5), (2, 6, 3, 7))
        ]
    return rows


def _shuffled(f: Function, v: Vectors, a: Value, b: Value, picks: tuple[int, ...]) -> Value:
    type = f"<{_SIDE} x {v.element}>"
    order = ", ".join(f"i32 {index}" for index in picks)
    text = f"shufflevector {type} {a.text}, {type} {b.text}, <{_SIDE} x i32> <{order}>"
    return f.emit(type, text)
