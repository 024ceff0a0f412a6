"""Square tiles of transposed arrays: read along memory, turned in registers, kept on the stack.

An elementwise kernel that reads one array across its lanes (x.T + y) would take every element from
another cache line. Instead a tile of `width` by `width` elements is read in rows, and a network of
shuffles turns it before the lanes read it.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.compile.cpu.codegen.access import Place, Tail
from spmd.compile.cpu.codegen.conversions import from_memory, memory_element
from spmd.compile.kernel.dtypes import itemsize, kind
from spmd.compile.kernel.ir import Instr, Kernel, Load
from spmd.compile.kernel.iteration_space import is_elementwise
from spmd.compile.native.llvm.vector_emitter import Emitter

# Below this many elements in either direction a tile is mostly edge.
LEAST_EXTENT = 8

# Bytes of a register that an instruction shuffles without a table.
GROUP_BYTES = 16


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
    """Return a stack buffer with the tile at `place`, of which `read_step` reads the lanes.

    As many lanes as a group has elements are read and turned at a time, in a loop. (A network for
    the whole tile takes LLVM twice as long, and twice as many shuffles at run time; writing groups
    where their steps are read as whole vectors waits for parts of these to be written.)
    """
    element = memory_element(place.dtype)
    size = itemsize(place.dtype)
    group = _group(element_bytes=size, width=width)
    mask = _steps_mask(e, width, first, steps) if steps % width else None
    buffer = e.alloca(width * width * size)
    live = None
    if tail is not None:
        live = e.set(f"select i1 {tail.is_short}, i64 {tail.live}, i64 {width}")

    def lanes(start: str, carried: list[str]) -> list[str]:
        rows = [
            _read_row(e, _lane_pointer(e, place, live, start, lane), element, size, mask)
            for lane in range(group)
        ]
        into = e.at(element, buffer, e.mul_index(start, width))
        for number, row in enumerate(turn_groups(e, rows, element, width)):
            where = e.at(element, into, str(number * width))
            e.put(f"store {e.type(element)} {row}, ptr {where}, align {size}")
        return carried

    with e.at_width(width):
        e.loop("0", str(width), [], lanes, group)
    return buffer


def step_pointer(e: Emitter, buffer: str, step: str, dtype: str, width: int) -> str:
    """Return where a staged tile has the first lanes of a step (an i64 scalar)."""
    group = _group(itemsize(dtype), width)
    if group == width:
        return e.at(memory_element(dtype), buffer, e.mul_index(step, width))
    row, block = e.set(f"urem i64 {step}, {group}"), e.set(f"udiv i64 {step}, {group}")
    index = e.add_index(e.mul_index(row, width), e.mul_index(block, group))
    return e.at(memory_element(dtype), buffer, index)


def read_step(e: Emitter, pointer: str, dtype: str) -> str:
    """Return the lanes of a step of a staged tile."""
    element, size, width = memory_element(dtype), itemsize(dtype), e.width
    group = _group(size, width)
    parts = []
    for first in range(0, width, group):
        where = e.at(element, pointer, str(first * width))
        parts.append(e.set(f"load {e.type(element, group)}, ptr {where}, align {size}"))
    while len(parts) > 1:
        kind_text, picks = e.type(element, group), _order(range(2 * group))
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [
            e.set(f"shufflevector {kind_text} {x}, {kind_text} {y}, {picks}") for x, y in pairs
        ]
        group *= 2
    return from_memory(e, parts[0], dtype)


def _group(element_bytes: int, width: int) -> int:
    return min(width, max(GROUP_BYTES // element_bytes, 1))


def _lane_pointer(e: Emitter, place: Place, live: str | None, start: str, lane: int) -> str:
    """Return where the row of lane `start + lane` begins; lanes that are not live read lane 0's."""
    element = memory_element(place.dtype)
    if live is None:
        index = e.add_index(place.base, e.mul_index(start, place.stride))
        return e.at(element, e.at(element, place.pointer, index), str(lane * place.stride))
    number = e.add_index(start, str(lane))
    is_there = e.set(f"icmp slt i64 {number}, {live}")
    distance = e.set(f"select i1 {is_there}, i64 {e.mul_index(number, place.stride)}, i64 0")
    return e.at(element, place.pointer, e.add_index(place.base, distance))


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


def turn_groups(e: Emitter, rows: list[str], element: str, width: int) -> list[str]:
    """Turn each group of as many lanes as there are rows: result i has the lanes i of all groups.

    Interleaving the halves of groups, once for each bit of a row's number, moves rows to lanes.
    """
    group, kind_text = len(rows), e.type(element, width)
    half, lanes = group // 2, range(0, width, group)
    low = [at + lane + row * width for at in lanes for lane in range(half) for row in range(2)]
    high = [lane + half for lane in low]
    for _ in range(group.bit_length() - 1):
        following = []
        for row in range(half):
            for picks in (low, high):
                pair = f"{kind_text} {rows[row]}, {kind_text} {rows[row + half]}"
                following.append(e.set(f"shufflevector {pair}, {_order(picks)}"))
        rows = following
    return rows


def _order(lanes: Sequence[int]) -> str:
    return f"<{len(lanes)} x i32> <" + ", ".join(f"i32 {lane}" for lane in lanes) + ">"
