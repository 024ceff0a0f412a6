"""Square tiles of transposed arrays: read along memory, turned in registers, kept on the stack.

An elementwise kernel that reads one array across its lanes (x.T + y) would take every element from
another cache line. Instead a tile of `width` by `width` elements is read in rows, and a network of
shuffles turns it before the lanes read it.
"""

from __future__ import annotations

from spmd.compile.cpu.emit import Emitter
from spmd.compile.cpu.render_access import Place, Tail, memory_element
from spmd.compile.kernel.dtypes import itemsize, kind
from spmd.compile.kernel.ir import Instr, Kernel, Load
from spmd.compile.kernel.space import is_elementwise

# Below this many elements in either direction a tile is mostly edge.
LEAST_EXTENT = 8


def tile_dim(kernel: Kernel, width: int) -> int | None:
    """Return the outer dim along which some load's memory is contiguous but its lanes are not."""
    lanes = kernel.vector_dim
    if lanes is None or width < 4 or len(kernel.passes) != 1 or not is_elementwise(kernel):
        return None
    if lanes != len(kernel.sizes) - 1 or kernel.sizes[lanes] < LEAST_EXTENT:
        return None
    for instr in kernel.passes[0].instrs:
        for dim in range(len(kernel.outer)):
            if kernel.outer[dim] >= LEAST_EXTENT and is_transposed(kernel, instr, dim):
                return dim
    return None


def is_transposed(kernel: Kernel, item: Instr, dim: int) -> bool:
    """Say whether `item` loads with stride 1 along `dim` and a larger one along the lanes."""
    if not isinstance(item, Load) or item.guard is not None or item.map.gathered:
        return False
    if kind(item.dtype) == "c" or kernel.args[item.arg].role != "in":
        return False
    strides = item.map.strides
    return strides[dim] == 1 and strides[kernel.vector_dim or -1] not in (0, 1)


def stage(e: Emitter, place: Place, tail: Tail | None, width: int, first: str, steps: int) -> str:
    """Return a stack buffer with the tile at `place`: row t holds what the lanes read at step t."""
    element = memory_element(place.dtype)
    size = itemsize(place.dtype)
    mask = _steps_mask(e, width, first, steps) if steps % width else None
    with e.at_width(width):
        rows = []
        for lane in range(width):
            pointer = e.at(element, place.pointer, _lane_index(e, place, tail, lane))
            rows.append(_read_row(e, pointer, element, size, mask))
        buffer = e.alloca(width * width * size)
        for step, row in enumerate(transpose(e, rows, element)):
            where = e.at(element, buffer, str(step * width))
            e.put(f"store {e.type(element)} {row}, ptr {where}, align {size}")
    return buffer


def _lane_index(e: Emitter, place: Place, tail: Tail | None, lane: int) -> str:
    """Return the first element of a lane's row; lanes that do not exist read lane 0's."""
    if lane == 0:
        return place.base
    distance = str(lane * place.stride)
    if tail is not None and lane >= tail.live:
        distance = e.set(f"select i1 {tail.is_short}, i64 0, i64 {distance}")
    return e.add_index(place.base, distance)


def _steps_mask(e: Emitter, width: int, first: str, steps: int) -> str:
    left = e.set(f"sub i64 {steps}, {first}")
    with e.at_width(width):
        return e.compare("slt", "i64", e.lanes(range(width), "i64"), e.splat("i64", left))


def _read_row(e: Emitter, pointer: str, element: str, size: int, mask: str | None) -> str:
    wide, bools = e.type(element), e.type("i1")
    if mask is None:
        return e.set(f"load {wide}, ptr {pointer}, align {size}")
    name = f"@llvm.masked.load.{e.suffix(element)}.p0"
    e.module.declare(name, f"declare {wide} {name}(ptr, i32 immarg, {bools}, {wide})")
    given = f"ptr {pointer}, i32 {size}, {bools} {mask}, {wide} zeroinitializer"
    return e.set(f"call {wide} {name}({given})")


def transpose(e: Emitter, rows: list[str], element: str) -> list[str]:
    """Turn a square of vectors: interleaving the halves log2(width) times moves rows to columns."""
    width, kind_text = len(rows), e.type(element)
    half = width // 2
    low = [lane // 2 + (lane % 2) * width for lane in range(width)]
    high = [lane + half for lane in low]
    for _ in range(width.bit_length() - 1):
        following = []
        for row in range(half):
            for picks in (low, high):
                order = f"<{width} x i32> <" + ", ".join(f"i32 {lane}" for lane in picks) + ">"
                pair = f"{kind_text} {rows[row]}, {kind_text} {rows[row + half]}"
                following.append(e.set(f"shufflevector {pair}, {order}"))
        rows = following
    return rows
