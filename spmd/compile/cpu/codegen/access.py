"""Loads and stores of virtual vectors: contiguous, strided, gathered, guarded, and their tails.

The last block of a row may be shorter than a vector. The code of a block is not written twice for
that: a short block reads from and writes to a small buffer on the stack, and only the elements that
exist are copied between it and the arguments ("one body"). Where lanes run along an outer dim, the
block is as short for all its rows, and masked instructions are used instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeAlias

from spmd.base.record import field, record, replace
from spmd.compile.cpu.codegen.conversions import element_of, from_memory, memory_element, to_memory
from spmd.compile.kernel.dtypes import REAL_OF, itemsize, kind
from spmd.compile.native.llvm.vector_emitter import Emitter

# Up to this distance between lanes reading the elements between them costs less than single reads:
# sums of 6 elements take 35 us so, and 40; softmax of 8 would take 300, and takes 186.
MOST_NEAR = 6

# Bytes of a register that one instruction fills from anywhere, or of half of it.
GATHERED_BYTES = 64

# Bytes of a cache line, as long as on any machine of these widths.
CACHE_LINE = 64

Parts: TypeAlias = tuple[str, ...]
Update: TypeAlias = Callable[[Parts, Parts], Parts]


@record(frozen=False)
class Tail:
    """How the current block of lanes may be short.

    `live` lanes exist when `is_short` (an i1 operand; "true" in code for the short block only).
    `masked` asks for masked instructions, otherwise contiguous accesses go through stack buffers.
    `copies` are the (argument pointer, buffer, bytes) to write back after the block.
    """

    live: int
    is_short: str
    masked: bool
    mask: str
    copies: list[tuple[str, str, int]] = field(default_factory=list)


@record
class Place:
    """The address of one access: a base pointer's argument and element index, and the lanes' way.

    `base` is a scalar i64 operand (of lane 0). `stride` is the distance between lanes; `gathered`
    an i64 vector operand to add to each lane's index, or None.
    """

    pointer: str
    base: str
    stride: int
    dtype: str
    gathered: str | None = None

    @property
    def contiguous(self) -> bool:
        """Lanes are neighbours in memory."""
        return self.stride == 1 and self.gathered is None


@cache
def _unit(dtype: str) -> tuple[str, int]:
    """Return memory element and how many of them one element of `dtype` has."""
    return memory_element(dtype), 2 if kind(dtype) == "c" else 1


# ---- scalars --------------------------------------------------------------------------------


def load_scalar(e: Emitter, pointer: str, dtype: str, index: str) -> tuple[str, ...]:
    """Read one element at width 1."""
    element, count = _unit(dtype)
    where = e.at(element, pointer, e.mul_index(index, count))
    size = itemsize(REAL_OF.get(dtype, dtype))
    parts = []
    for part in range(count):
        raw = e.set(f"load {element}, ptr {e.at(element, where, str(part))}, align {size}")
        parts.append(from_memory(e, raw, dtype))
    return tuple(parts)


def store_scalar(e: Emitter, pointer: str, dtype: str, parts: Sequence[str]) -> None:
    """Write one element at width 1."""
    element, _ = _unit(dtype)
    where = e.at(element, pointer, "0")
    size = itemsize(REAL_OF.get(dtype, dtype))
    for part, value in enumerate(parts):
        raw = to_memory(e, value, dtype)
        e.put(f"store {element} {raw}, ptr {e.at(element, where, str(part))}, align {size}")


# ---- contiguous lanes -------------------------------------------------------------------------


def load_contiguous(e: Emitter, place: Place, tail: Tail | None) -> tuple[str, ...]:
    """Read neighbouring elements into lanes."""
    if tail is not None and tail.masked:
        return load_masked(e, place, tail.mask, None)
    where = _through_buffer(e, place, tail, read=True, write=False)
    return read_lanes(e, where, place.dtype)


def fetch(e: Emitter, place: Place, ahead: int) -> None:
    """Begin to bring the lines into the cache that lie `ahead` bytes behind a block."""
    element, count = _unit(place.dtype)
    where = e.at(element, place.pointer, e.mul_index(place.base, count))
    e.module.declare("@llvm.prefetch.p0", "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
    for line in range(0, e.width * itemsize(place.dtype), CACHE_LINE):
        pointer = e.at("i8", where, str(ahead + line))
        e.put(f"call void @llvm.prefetch.p0(ptr {pointer}, i32 0, i32 3, i32 1)")


def load_reversed(e: Emitter, place: Place, tail: Tail | None) -> tuple[str, ...]:
    """Read neighbouring elements into lanes, the last one first."""
    start = e.add_index(place.base, str(1 - e.width))
    whole = replace(place, base=start, stride=1)
    where = _through_buffer(e, whole, tail, read=True, write=False, at_end=True)
    parts = read_lanes(e, where, place.dtype)
    kind_text, order = e.type(element_of(place.dtype)), _picks(range(e.width - 1, -1, -1))
    return tuple(
        e.set(f"shufflevector {kind_text} {part}, {kind_text} poison, {order}") for part in parts
    )


def is_near(stride: int) -> bool:
    """Say whether lanes at this distance are picked from whole vectors rather than read singly."""
    return 2 <= stride <= MOST_NEAR


def load_near(e: Emitter, place: Place, tail: Tail | None) -> tuple[str, ...]:
    """Read every second to sixth element: whole registers, of which the lanes are picked."""
    element, count = _unit(place.dtype)
    assert count == 1, "complex elements are read one by one"
    where = _through_buffer(e, place, tail, read=True, write=False)
    lanes = min(e.width, e.module.target.vector_bits // (8 * itemsize(place.dtype)))
    parts = []
    for first in range(0, e.width, lanes):
        pointer = e.at(element, where, str(first * place.stride))
        parts.append(_pick_near(e, pointer, place, lanes))
    while len(parts) > 1:
        both, lanes = _picks(range(2 * lanes)), 2 * lanes
        half = e.type(element, lanes // 2)
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [e.set(f"shufflevector {half} {x}, {half} {y}, {both}") for x, y in pairs]
    return (from_memory(e, parts[0], place.dtype),)


def _pick_near(e: Emitter, pointer: str, place: Place, lanes: int) -> str:
    """Read `lanes` elements at a distance of `place.stride` from each other.

    Register number k begins at element k * (lanes - 1), so that together they end with the
    element of the last lane: nothing behind it is touched.
    """
    element, stride = memory_element(place.dtype), place.stride
    wide, size = e.type(element, lanes), itemsize(place.dtype)
    result = e.set(f"load {wide}, ptr {pointer}, align {size}")
    for number in range(1, stride):
        first = number * (lanes - 1)
        part = e.set(f"load {wide}, ptr {e.at(element, pointer, str(first))}, align {size}")
        picks = []
        for lane in range(lanes):
            inside = lane * stride - first
            if inside > 0:  # lanes of a later register do not matter yet
                picks.append(lanes + min(inside, lanes - 1))
            else:
                picks.append(lane * stride if number == 1 else lane)
        result = e.set(f"shufflevector {wide} {result}, {wide} {part}, {_picks(picks)}")
    return result


def read_lanes(e: Emitter, pointer: str, dtype: str) -> tuple[str, ...]:
    """Read a whole vector from a pointer."""
    if e.width == 1:
        return load_scalar(e, pointer, dtype, "0")
    element, count = _unit(dtype)
    size = itemsize(REAL_OF.get(dtype, dtype))
    wide = e.type(element, e.width * count)
    raw = e.set(f"load {wide}, ptr {pointer}, align {size}")
    if count == 1:
        return (from_memory(e, raw, dtype),)
    return tuple(
        e.set(f"shufflevector {wide} {raw}, {wide} poison, {_picks(range(part, 2 * e.width, 2))}")
        for part in range(2)
    )


def write_lanes(
    e: Emitter, pointer: str, dtype: str, parts: Sequence[str], stream: int = 0
) -> None:
    """Write a whole vector to a pointer; past the caches if `stream` says how it is aligned."""
    if e.width == 1:
        store_scalar(e, pointer, dtype, parts)
        return
    element, count = _unit(dtype)
    size = itemsize(REAL_OF.get(dtype, dtype))
    raw, kind_text = to_memory(e, parts[0], dtype), e.type(element, e.width * count)
    if count == 2:
        half = e.type(element)
        order = [lane + part * e.width for lane in range(e.width) for part in range(2)]
        raw = e.set(f"shufflevector {half} {parts[0]}, {half} {parts[1]}, {_picks(order)}")
    how = f"align {stream}, !nontemporal !900" if stream else f"align {size}"
    e.put(f"store {kind_text} {raw}, ptr {pointer}, {how}")


def store_contiguous(
    e: Emitter, place: Place, tail: Tail | None, parts: Parts, update: Update | None, stream: int
) -> None:
    """Write lanes to neighbouring elements; `update` combines them with the old contents."""
    where = _through_buffer(e, place, tail, read=update is not None, write=True)
    if update is not None:
        parts = update(read_lanes(e, where, place.dtype), parts)
    write_lanes(e, where, place.dtype, parts, stream)


def _picks(lanes: Sequence[int]) -> str:
    return f"<{len(lanes)} x i32> <" + ", ".join(f"i32 {lane}" for lane in lanes) + ">"


def _through_buffer(
    e: Emitter, place: Place, tail: Tail | None, read: bool, write: bool, at_end: bool = False
) -> str:
    """Return the pointer of a block: the argument's own, or a buffer's if the block is short.

    The elements that exist are the block's first ones, or its last ones with `at_end`. Only loads
    may have a stride; the buffer then has the elements between the lanes, too.
    """
    element, count = _unit(place.dtype)
    base = place.base if count == 1 else e.mul_index(place.base, count)
    real = e.at(element, place.pointer, base)
    if tail is None:
        return real
    size = itemsize(place.dtype)
    room = e.width * place.stride
    buffer = e.alloca(room * size)

    def fill() -> None:
        wide = e.type(element, room * count)
        e.put(f"store {wide} zeroinitializer, ptr {buffer}, align 64")
        skipped = str((e.width - tail.live) * size if at_end else 0)
        reach = (tail.live - 1) * place.stride + 1
        copy(e, e.at("i8", buffer, skipped), e.at("i8", real, skipped), reach * size)

    if write:
        tail.copies.append((real, buffer, tail.live * size))
    if tail.is_short == "true":
        if read:
            fill()
        return buffer
    if read:
        e.when(tail.is_short, fill)
    return e.set(f"select i1 {tail.is_short}, ptr {buffer}, ptr {real}")


def copy(e: Emitter, target: str, source: str, count: int) -> None:
    """Copy a constant number of bytes."""
    name = "@llvm.memcpy.p0.p0.i64"
    e.module.declare(name, f"declare void {name}(ptr, ptr, i64, i1)")
    e.put(f"call void {name}(ptr {target}, ptr {source}, i64 {count}, i1 false)")


def write_back(e: Emitter, tail: Tail | None) -> None:
    """Copy the elements of a short block from the buffers to the arguments."""
    if tail is None or not tail.copies:
        return

    def body() -> None:
        for real, buffer, count in tail.copies:
            copy(e, real, buffer, count)

    if tail.is_short == "true":
        body()
    else:
        e.when(tail.is_short, body)


# ---- masks ------------------------------------------------------------------------------------


def load_masked(e: Emitter, place: Place, mask: str, fill: Sequence[str] | None) -> tuple[str, ...]:
    """Read neighbouring elements where the mask holds, `fill` elsewhere (zero without one)."""
    element, count = _unit(place.dtype)
    if count == 2:
        return load_each(e, place, mask, fill)
    where = e.at(element, place.pointer, place.base)
    wide, bools = e.type(element), e.type("i1")
    name = f"@llvm.masked.load.{e.suffix(element)}.p0"
    e.module.declare(name, f"declare {wide} {name}(ptr, i32 immarg, {bools}, {wide})")
    default = "zeroinitializer" if fill is None else to_memory(e, fill[0], place.dtype)
    size = itemsize(place.dtype)
    given = f"ptr {where}, i32 {size}, {bools} {mask}, {wide} {default}"
    return (from_memory(e, e.set(f"call {wide} {name}({given})"), place.dtype),)


def store_masked(e: Emitter, place: Place, mask: str, parts: Parts) -> None:
    """Write lanes to neighbouring elements where the mask holds."""
    element, count = _unit(place.dtype)
    if count == 2:
        store_each(e, place, mask, parts, None)
        return
    where = e.at(element, place.pointer, place.base)
    wide, bools = e.type(element), e.type("i1")
    name = f"@llvm.masked.store.{e.suffix(element)}.p0"
    e.module.declare(name, f"declare void {name}({wide}, ptr, i32 immarg, {bools})")
    raw = to_memory(e, parts[0], place.dtype)
    size = itemsize(place.dtype)
    e.put(f"call void {name}({wide} {raw}, ptr {where}, i32 {size}, {bools} {mask})")


# ---- lane by lane -----------------------------------------------------------------------------


def lane_pointers(e: Emitter, place: Place, mask: str | None) -> list[str]:
    """Return where each lane's element lies; the first one where the mask does not hold."""
    element, count = _unit(place.dtype)
    lanes = range(e.width)
    if place.gathered is None and mask is None:
        # Constant distances from one pointer: the processor adds them for nothing.
        first = e.at(element, place.pointer, e.mul_index(place.base, count))
        return [e.at(element, first, str(lane * place.stride * count)) for lane in lanes]
    index = e.splat("i64", place.base)
    if place.stride:
        steps = e.lanes([lane * place.stride for lane in lanes], "i64")
        index = e.binary("add", "i64", index, steps)
    if place.gathered is not None:
        index = e.binary("add", "i64", index, place.gathered)
    if mask is not None:
        index = e.select(mask, "i64", index, e.int(0, "i64"))
    # Through memory it takes half as long again, or twice, when the elements miss the caches.
    indices = [e.extract("i64", index, lane) for lane in lanes]
    with e.at_width(1):
        return [e.at(element, place.pointer, e.mul_index(index, count)) for index in indices]


def load_each(
    e: Emitter, place: Place, mask: str | None, fill: Sequence[str] | None
) -> tuple[str, ...]:
    """Read each lane by itself; where the mask does not hold the result is `fill`, or anything."""
    element = memory_element(place.dtype)
    count = 2 if kind(place.dtype) == "c" else 1
    size = itemsize(REAL_OF.get(place.dtype, place.dtype))
    wide, vectors = e.type(element), ["poison"] * count
    if mask is None and place.gathered is None and count == 1 and _has_gather(e, size):
        return (from_memory(e, _gather(e, place, element, size), place.dtype),)
    for lane, where in enumerate(lane_pointers(e, place, mask)):
        with e.at_width(1):
            raw = [
                e.set(f"load {element}, ptr {e.at(element, where, str(part))}, align {size}")
                for part in range(count)
            ]
        for part in range(count):
            given = f"{wide} {vectors[part]}, {element} {raw[part]}, i32 {lane}"
            vectors[part] = e.set(f"insertelement {given}") if e.width > 1 else raw[part]
    parts = [from_memory(e, vector, place.dtype) for vector in vectors]
    if mask is None or fill is None:
        return tuple(parts)
    carried = element_of(place.dtype)
    return tuple(e.select(mask, carried, x, y) for x, y in zip(parts, fill, strict=True))


def _has_gather(e: Emitter, size: int) -> bool:
    """Say whether one instruction reads elements of `size` bytes into the lanes."""
    registers = (GATHERED_BYTES // 2, GATHERED_BYTES)
    return e.module.target.vector_bits == 512 and size in (4, 8) and e.width * size in registers


def _gather(e: Emitter, place: Place, element: str, size: int) -> str:
    """Read lanes at a distance.

    16 lanes of rows of 10: 1.1 us where single reads take 1.7 (Emerald Rapids), and LLVM takes half
    the time.
    """
    first = e.at(element, place.pointer, place.base)
    steps = e.lanes([lane * place.stride for lane in range(e.width)], "i64")
    wide, bools, pointers = e.type(element), e.type("i1"), e.type("ptr")
    where = e.set(f"getelementptr {element}, ptr {first}, {e.type('i64')} {steps}")
    name = f"@llvm.masked.gather.{e.suffix(element)}.v{e.width}p0"
    e.module.declare(name, f"declare {wide} {name}({pointers}, i32 immarg, {bools}, {wide})")
    given = f"{pointers} {where}, i32 {size}, {bools} {e.int(1, 'i1')}, {wide} poison"
    return e.set(f"call {wide} {name}({given})")


def store_each(
    e: Emitter, place: Place, mask: str | None, parts: Parts, update: Update | None
) -> None:
    """Write the lanes one after the other, to a scratch element where the mask does not hold.

    Lanes that `update` one element in memory see each other's results in order.
    """
    carried = element_of(place.dtype)
    scratch = e.alloca(itemsize(place.dtype)) if mask is not None else ""
    # Addresses may be anything where the mask does not hold; of many at once they stay small.
    for lane, where in enumerate(lane_pointers(e, place, mask if e.width > 1 else None)):
        bit = None if mask is None else e.extract("i1", mask, lane)
        scalars = tuple(e.extract(carried, part, lane) for part in parts)
        with e.at_width(1):
            if bit is not None:
                where = e.set(f"select i1 {bit}, ptr {where}, ptr {scratch}")
            if update is not None:
                scalars = update(load_scalar(e, where, place.dtype, "0"), scalars)
            store_scalar(e, where, place.dtype, scalars)
