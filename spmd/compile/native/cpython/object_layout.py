"""The places in memory where native code finds the slots of arrays, blocks and trees.

The one idea: ask, don't assume. An object is made, its slots are given values that nothing else
has, and their addresses are looked for in the object's own bytes. Where they are not found once
each, or where an interpreter may touch objects on several threads at a time, there is no layout,
and calls are matched and results made in Python.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from spmd.base.record import record
from spmd.base.tree import TreeDef
from spmd.compile.native.runtime.allocator import ALIGNMENT, Block, SizeClass
from spmd.sharding.array import Array


@record
class Layout:
    """Byte offsets of what native code reads and writes in an `Array`, a `Block`, any object."""

    type: int
    aval: int
    ptr: int
    owner: int
    shards: int
    numpy: int
    sharding: int
    block_address: int
    block_home: int
    class_free: int  # of a `SizeClass`
    class_most: int
    int_tag: int  # where an int says how it is stored, and what it says if it has two digits
    two_digits: int
    int_digits: int


@record
class TreeLayout:
    """Byte offsets of what native code reads and writes in a `TreeDef`."""

    kind: int
    aux: int
    children: int
    num_leaves: int
    hash: int


@cache
def object_layout() -> Layout | None:
    """The layout of this interpreter's objects; None where native code must not touch them."""
    if sys.implementation.name != "cpython" or "t" in sys.abiflags:
        return None
    names = ("aval", "ptr", "owner", "shards", "_numpy", "_sharding")
    # Floats that nothing else refers to; and a block gives its memory back to where it came from.
    of_array = slot_offsets(Array, {name: float(k) for k, name in enumerate(names)})
    of_block = slot_offsets(Block, {"address": 1.0, "home": SizeClass(ALIGNMENT)})
    of_class = slot_offsets(SizeClass, {"capacity": 2.0, "free": 3.0, "most": 4.0})
    if of_array is None or of_block is None or of_class is None or of_array[0] != of_block[0]:
        return None
    kind, aval, ptr, owner, shards, numpy, sharding = of_array
    (_, address, home), (_, _, free, most) = of_block, of_class
    slots = kind, aval, ptr, owner, shards, numpy, sharding
    return Layout(*slots, address, home, free, most, *int_offsets())


@cache
def tree_layout() -> TreeLayout | None:
    """The layout of tree structures, where there is one of arrays."""
    if object_layout() is None:
        return None
    names = ("kind", "aux", "parts", "num_leaves", "_hash")
    found = slot_offsets(TreeDef, {name: float(k) for k, name in enumerate(names)})
    return None if found is None else TreeLayout(*found[1:])


# Numbers of the size of addresses: two digits of 30 bits each.
DIGIT_BITS = 30
_SAMPLES = tuple((high << DIGIT_BITS) | 0x2345678 for high in (0x1234, 0x5678, 0x9ABCD))
# A value that no int has.
NEVER = -1


@cache
def int_offsets() -> tuple[int, int, int]:
    """The place of the tag of ints of two digits, its value, and the place of their digits.

    Where that is not as it is known to be, the tag is one that no int has.
    """
    unknown = (0, NEVER, 0)
    if sys.int_info.bits_per_digit != DIGIT_BITS or sys.int_info.sizeof_digit != 4:
        return unknown
    found = set()
    for sample in _SAMPLES:
        words = list((ctypes.c_int64 * (sys.getsizeof(sample) // 8)).from_address(id(sample)))
        low, high = sample % 2**DIGIT_BITS, sample >> DIGIT_BITS
        if words.count(high << 32 | low) != 1:
            return unknown
        at = words.index(high << 32 | low)
        found.add((8 * (at - 1), words[at - 1], 8 * at))
    if len(found) > 1:
        return unknown
    at, tag, digits = found.pop()
    # Ints that are longer, or negative, must say so.
    for other in (-_SAMPLES[0], _SAMPLES[0] << DIGIT_BITS, 1 << DIGIT_BITS - 1, 7, 0):
        if ctypes.c_int64.from_address(id(other) + at).value == tag:
            return unknown
    return at, tag, digits


def slot_offsets(cls: type, values: Mapping[str, Any]) -> list[int] | None:
    """The places of an object's type and then of the given slots, in bytes from its address."""
    sample = object.__new__(cls)
    for name, value in values.items():
        setattr(sample, name, value)
    words = list((ctypes.c_int64 * (cls.__basicsize__ // 8)).from_address(id(sample)))
    wanted = [id(cls), *map(id, values.values())]
    if any(words.count(address) != 1 for address in wanted):
        return None
    return [8 * words.index(address) for address in wanted]
