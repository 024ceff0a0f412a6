"""Where native code finds the slots of arrays, blocks and tree structures in memory.

The one idea: ask, don't assume. An object is made, its slots are given values that nothing else
has, and their addresses are looked for in the object's own bytes. Where they are not found once
each, or where an interpreter may touch objects on several threads at a time, there is no layout,
and calls are matched and results made in Python.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from spmd.compile.cpu.allocator import ALIGNMENT, Block, SizeClass
from spmd.core.tree import TreeDef
from spmd.sharding.array import Array


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    names = ("aval", "ptr", "owner", "shards", "_numpy", "_sharding")
    # Floats that nothing else refers to; and a block gives its memory back to where it came from.
    of_array = slot_offsets(Array, {name: float(k) for k, name in enumerate(names)})
    of_block = slot_offsets(Block, {"address": 1.0, "home": SizeClass(ALIGNMENT)})
    if of_array is None or of_block is None or of_array[0] != of_block[0]:
        return None
    kind, aval, ptr, owner, shards, numpy, sharding = of_array
    return Layout(kind, aval, ptr, owner, shards, numpy, sharding, of_block[1])


@cache
def tree_layout() -> TreeLayout | None:
    """The layout of tree structures, where there is one of arrays."""
    if object_layout() is None:
        return None
    names = ("kind", "aux", "children", "num_leaves", "_hash")
    found = slot_offsets(TreeDef, {name: float(k) for k, name in enumerate(names)})
    return None if found is None else TreeLayout(*found[1:])


def slot_offsets(cls: type, values: Mapping[str, Any]) -> list[int] | None:
    """Where an object keeps its type and then the given slots, in bytes from its address."""
    sample = object.__new__(cls)
    for name, value in values.items():
        setattr(sample, name, value)
    words = list((ctypes.c_int64 * (cls.__basicsize__ // 8)).from_address(id(sample)))
    wanted = [id(cls), *map(id, values.values())]
    if any(words.count(address) != 1 for address in wanted):
        return None
    return [8 * words.index(address) for address in wanted]
