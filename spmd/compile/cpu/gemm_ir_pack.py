"""Packing for matrix products: a panel of an operand, in the order in which tiles read it.

    pack(source, i stride, k stride, width, depth, target, target stride)
    target[k * target stride + i] = source[i * i stride + k * k stride]    i < width, k < depth

in the carried type. One function per way the source lies in memory: `copy` where i is contiguous,
`turn` where k is (a transpose, through registers), `gather` where neither is. i are columns of B or
rows of A. `turn` stores whole vectors, also behind the width. `copy` takes the distance between
panels in place of the i stride and fills all that the width reaches over.

`panels_text` is the kernel of a step that packs a whole B for all products that read it.
"""

from __future__ import annotations

from functools import cache

from spmd.compile.cpu.gemm_ir import (
    NBYTES,
    STORED,
    Vectors,
    lane_mask,
    load_vector,
    store_vector,
    widen,
)
from spmd.compile.cpu.runtime_ir import Function, Value
from spmd.compile.cpu.units import CONTROL

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

    A row is read from end to end, as memory likes it, whatever the panels are.
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


def _turn(f: Function, v: Vectors, source: str) -> None:
    """Transpose in strips of `lanes` rows: within 16 bytes by interleaving, across by loading."""
    origin, i_stride, _, width, depth, target, target_stride = f.params
    nbytes = NBYTES[source]
    side = min(16 // v.nbytes, v.lanes)
    whole = depth - depth % side
    with f.range(0, width, v.lanes) as i:
        # Rows behind the last are read as the last: what they give is never used.
        rows = [f.at(origin, f.smaller(i + lane, width - 1) * i_stride) for lane in range(v.lanes)]
        write = f.at(target, i * v.nbytes)
        with f.range(0, whole, side) as counter:
            k = f.opaque(counter)
            columns = _turned(f, v, source, [f.at(row, k * nbytes) for row in rows], side)
            for step, column in enumerate(columns):
                f.store(column, write, (k + step) * target_stride, align=v.nbytes)
        with f.range(whole, depth) as counter:
            k = f.opaque(counter)
            for lane, row in enumerate(rows):
                element = widen(f, f.load(STORED[source], row, k * nbytes), v.element)
                f.store(element, write, k * target_stride + lane * v.nbytes)


def _turned(f: Function, v: Vectors, source: str, rows: list[Value], side: int) -> list[Value]:
    """The `side` columns, as vectors over all rows, of what the rows begin with."""
    small = f"<{side} x {STORED[source]}>"
    quarters = v.lanes // side
    values = []
    for first in range(side):
        # Part q holds row first + q * side, so that interleaving within parts puts rows in order.
        parts = [
            f.load(small, rows[first + q * side], align=NBYTES[source]) for q in range(quarters)
        ]
        values.append(widen(f, _concatenate(f, parts), v.vector))
    return _interleave_parts(f, v, values, side)


def _concatenate(f: Function, parts: list[Value]) -> Value:
    while len(parts) > 1:
        count, element = parts[0].type.strip("<>").split(" x ")
        size = int(count)
        picks = ", ".join(f"i32 {i}" for i in range(2 * size))
        type = parts[0].type
        parts = [
            f.emit(
                f"<{2 * size} x {element}>",
                f"shufflevector {type} {a.text}, {type} {b.text}, <{2 * size} x i32> <{picks}>",
            )
            for a, b in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


def _interleave_parts(f: Function, v: Vectors, values: list[Value], side: int) -> list[Value]:
    """Transpose the squares of `side` by `side` that the parts of 16 bytes form."""
    half = side // 2
    rounds = side.bit_length() - 1
    for _ in range(rounds):
        values = [
            _interleave(f, v, values[i], values[i + half], side, high)
            for i in range(half)
            for high in (False, True)
        ]
    return values


def _interleave(f: Function, v: Vectors, a: Value, b: Value, side: int, high: bool) -> Value:
    start = side // 2 if high else 0
    order = [
        part + start + i + other
        for part in range(0, v.lanes, side)
        for i in range(side // 2)
        for other in (0, v.lanes)
    ]
    picks = ", ".join(f"i32 {index}" for index in order)
    text = f"shufflevector {v.vector} {a.text}, {v.vector} {b.text}, <{v.lanes} x i32> <{picks}>"
    return f.emit(v.vector, text)
