"""The fast path of a jitted call: a closure written for one signature.

The one idea: instead of flattening the arguments and hashing their avals, generated source
*matches* them against the structure that was compiled for, leaf by leaf, comparing interned avals
by identity; then it packs the raw addresses into a frame and calls the program. A mismatch returns
`MISS` and the call is looked up the general way. Two small arrays cost about a microsecond.

Only what is common is matched: tuples, lists, dicts, named tuples and None, with single-device
arrays, NumPy arrays of the exact dtype and numbers as leaves. Everything else stays on the general
path.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.compile.cpu.allocator import Block, alloc
from spmd.compile.executable import Executable
from spmd.compile.lower.schedule import Buffer
from spmd.compile.signature import Split
from spmd.core.aval import ShapedArray
from spmd.core.tree import TreeDef
from spmd.sharding.array import Array
from spmd.sharding.fastmap import MISS

# Results that are small together share one block; larger ones get a block each.
SLAB_BYTES = 16 * 1024
ALIGNMENT = 64
# An arena up to this size stays with its frame; larger ones go back to the allocator.
KEPT_ARENA_BYTES = 64 * 1024


def specialise(
    split: Split, executable: Executable, out_tree: TreeDef
) -> Callable[..., Any] | None:
    """A closure for calls like this one, or None if its arguments are not of matched kinds.

    `closure(args, kwargs)` gives the results, or `MISS`.
    """
    pairs = zip(split.leaves, executable.in_avals, strict=True)
    if any(not _is_matchable(x, aval) for x, aval in pairs):
        return None
    try:
        return Writer(split, executable, out_tree).function()
    except UnmatchedError:
        return None


class UnmatchedError(Exception):
    """The call has a container that generated code does not match."""


# How `struct` writes a number as an element of a dtype; what does not fit is an error, so a miss.
_FORMATS = {"float32": "f", "float64": "d", "int32": "i", "int64": "q", "bool": "?"}


def _is_matchable(x: Any, aval: ShapedArray) -> bool:
    if type(x) is Array:
        return x.shards is None and x._sharding is None
    if type(x) is np.ndarray:
        return x.dtype == aval.dtype and x.flags.c_contiguous
    return is_number(x, aval)


def is_number(x: Any, aval: ShapedArray) -> bool:
    """Whether `x` is a number that generated code can write into memory."""
    return isinstance(x, (bool, int, float, np.generic)) and aval.dtype.name in _FORMATS


# ---- frames ------------------------------------------------------------------------------------


class Frame:
    """The words of one call in flight: constants stay, addresses are packed in for each call."""

    __slots__ = ("address", "arena", "words")

    def __init__(self, executable: Executable):
        native = executable.native
        # Numbers among the arguments are written behind the runtime's words.
        self.words = bytearray(8 * (native.words_needed + len(executable.in_avals)))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.words))
        consts = executable.const_pointers
        struct.pack_into(f"{len(consts)}q", self.words, 8 * executable.first_const, *consts)
        self.arena = None
        if executable.arena <= KEPT_ARENA_BYTES:
            self.arena = alloc(executable.arena)
            struct.pack_into("q", self.words, 0, self.arena.address)


# ---- the source --------------------------------------------------------------------------------


class Writer:
    """Writes the function of one signature."""

    def __init__(self, split: Split, executable: Any, out_tree: TreeDef):
        self.executable = executable
        self.out_tree = out_tree
        self.split = split
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self.leaf = 0
        self.count = 0
        self.pointers: list[str] = []
        self.numbers: list[str] = []
        self.arrays: list[str] = []

    def function(self) -> Callable[..., Any]:
        """The compiled function `match(args, kwargs)`."""
        self.match_call()
        self.put("frame = frames.pop() if frames else new_frame()")
        self.lines += self.numbers
        matching, self.lines = self.lines, []
        self.results()
        executable = self.executable
        words = 1 + len(self.pointers) + len(executable.outputs)
        self.names |= {
            "MISS": MISS,
            "StructError": struct.error,
            "Array": Array,
            "Block": Block,
            "alloc": alloc,
            "entry": executable.native.entry,
            "fail": executable.native.fail,
            "frames": [],
            "new_frame": lambda: Frame(executable),
            "pack": struct.Struct(f"{words - 1}q").pack_into,
            "pack_word": struct.Struct("q").pack_into,
            "getrefcount": sys.getrefcount,
            "ndarray": np.ndarray,
        }
        return self.compiled(matching)

    def compiled(self, matching: Sequence[str]) -> Callable[..., Any]:
        """The function of the lines that match arguments and the lines written since."""
        source = "\n".join(
            (
                "def match(args, kwargs):",
                "    try:",
                *("        " + line for line in matching),
                "    except (AttributeError, KeyError, StructError, OverflowError):",
                "        return MISS",
                *("    " + line for line in self.lines),
            )
        )
        exec(compile(source, "<spmd fast path>", "exec"), self.names)
        return self.names["match"]

    def put(self, line: str) -> None:
        self.lines.append(line)

    def bind(self, value: Any) -> str:
        """A name of the generated code for a value."""
        self.count += 1
        name = f"v{self.count}"
        self.names[name] = value
        return name

    def fresh(self) -> str:
        self.count += 1
        return f"x{self.count}"

    # ---- matching ----

    def match_call(self) -> None:
        """Match positional and keyword arguments, static ones by equality."""
        args_tree, kwargs_tree = self.split.tree.children
        static = dict(self.split.static_args)
        count = len(args_tree.children) + len(static)
        self.put(f"if len(args) != {count}: return MISS")
        dynamic = iter(args_tree.children)
        for k in range(count):
            name = self.fresh()
            self.put(f"{name} = args[{k}]")
            if k in static:
                self.match_static(name, static[k])
            else:
                self.match(name, next(dynamic))
        named = dict(self.split.static_kwargs)
        keys = kwargs_tree.aux or ()
        self.put(f"if len(kwargs) != {len(keys) + len(named)}: return MISS")
        for key, tree in zip(keys, kwargs_tree.children, strict=True):
            name = self.fresh()
            self.put(f"{name} = kwargs[{key!r}]")
            self.match(name, tree)
        for key, value in named.items():
            name = self.fresh()
            self.put(f"{name} = kwargs[{key!r}]")
            self.match_static(name, value)

    def match_static(self, name: str, value: Any) -> None:
        expected, kind = self.bind(value), self.bind(type(value))
        self.put(f"if {name} is not {expected} and (type({name}) is not {kind} or")
        self.put(f"        {name} != {expected}): return MISS")

    def match(self, name: str, tree: TreeDef) -> None:
        """Match one subtree."""
        if tree.kind is None:
            self.match_leaf(name)
            return
        if tree.kind is type(None):
            self.put(f"if {name} is not None: return MISS")
            return
        count = len(tree.children)
        kind = tree.kind
        is_tuple = kind in (tuple, list) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
        if not is_tuple and kind is not dict:
            raise UnmatchedError
        expected = kind.__name__ if kind in (tuple, list, dict) else self.bind(kind)
        self.put(f"if type({name}) is not {expected} or len({name}) != {count}: return MISS")
        keys = range(count) if is_tuple else [self._key(k) for k in tree.aux]
        for key, child in zip(keys, tree.children, strict=True):
            inner = self.fresh()
            self.put(f"{inner} = {name}[{key}]")
            self.match(inner, child)

    def _key(self, key: Any) -> str:
        return repr(key) if type(key) in (str, int) else self.bind(key)

    def match_leaf(self, name: str) -> None:
        leaf, aval = self.split.leaves[self.leaf], self.executable.in_avals[self.leaf]
        self.leaf += 1
        self.arrays.append(name)
        if type(leaf) is np.ndarray:
            self.match_ndarray(name, leaf)
            return
        if type(leaf) is not Array:
            self.match_number(name, leaf, aval)
            return
        # A tracer has an aval too, but no ptr; a deleted or multi-device array has ptr 0.
        self.put(f"if {name}.aval is not {self.bind(aval)} or {name}._sharding is not None")
        self.lines[-1] += f" or not {name}.ptr: return MISS"
        self.pointers.append(f"{name}.ptr")

    def match_ndarray(self, name: str, leaf: np.ndarray) -> None:
        dtype, shape = self.bind(leaf.dtype), self.bind(leaf.shape)
        self.put(f"if type({name}) is not ndarray or {name}.dtype != {dtype} or")
        self.lines[-1] += f" {name}.shape != {shape} or"
        self.lines[-1] += f" not {name}.flags.c_contiguous: return MISS"
        self.pointers.append(f"{name}.__array_interface__['data'][0]")

    def match_number(self, name: str, leaf: Any, aval: ShapedArray) -> None:
        place = 8 * (self.executable.native.words_needed + len(self.numbers))
        write = self.bind(struct.Struct(_FORMATS[aval.dtype.name]).pack_into)
        self.put(f"if type({name}) is not {self.bind(type(leaf))}: return MISS")
        self.numbers.append(f"{write}(frame.words, {place}, {name})")
        self.pointers.append(f"frame.address + {place}")

    # ---- running ----

    def results(self) -> None:
        """Allocate, run, and build the results."""
        executable = self.executable
        owners = self.allocate()
        if executable.arena > KEPT_ARENA_BYTES:
            self.put(f"arena = alloc({executable.arena})")
            self.put("pack_word(frame.words, 0, arena.address)")
        words = ", ".join([*self.pointers, *(place for _, place in owners)])
        if words:
            self.put(f"pack(frame.words, 8, {words})")
        header = executable.native.header_address
        self.put(f"status = entry({header}, frame.address)")
        self.put("if status: fail(status, frame.address)")
        self.put("frames.append(frame)")
        made = iter(zip(owners, executable.outputs, strict=True))
        outs = []
        for result, aval in zip(executable.schedule.results, executable.out_avals, strict=True):
            if isinstance(result, Buffer):
                (owner, place), _ = next(made)
                outs.append(self.array(aval, place, owner, "None"))
            elif type(self.split.leaves[result]) is Array:
                x = self.arrays[result]
                outs.append(self.array(aval, f"{x}.ptr", f"{x}.owner", "None"))
            else:
                raise UnmatchedError
        for x, gone, leaf in zip(self.arrays, executable.donated, self.split.leaves, strict=True):
            if gone and type(leaf) is Array:
                self.put(f"{x}.ptr = 0; {x}.owner = {x}._numpy = None")
        self.put("return " + self.tree(self.out_tree, iter(outs)))

    def allocate(self) -> list[tuple[str, str]]:
        """Write the allocation of all outputs; gives (owner, address) of each."""
        executable = self.executable
        sizes = [max(aval.nbytes, 1) for aval in executable.outputs]
        rounded = [-(-n // ALIGNMENT) * ALIGNMENT for n in sizes]
        if len(sizes) > 1 and sum(rounded) <= SLAB_BYTES and not executable.takes:
            self.put(f"slab = alloc({sum(rounded)})")
            self.put("base = slab.address")
            starts = [sum(rounded[:k]) for k in range(len(sizes))]
            return [("slab", f"base + {start}") for start in starts]
        found = []
        for k, nbytes in enumerate(sizes):
            owner = f"block{k}"
            taken = executable.takes.get(k)
            if taken is None or type(self.split.leaves[taken]) is not Array:
                self.put(f"{owner} = alloc({nbytes})")
            else:
                # Three references are ours: the array's, the variable's, and getrefcount's own.
                self.put(f"{owner} = {self.arrays[taken]}.owner")
                self.put(f"if type({owner}) is not Block or getrefcount({owner}) != 3:")
                self.put(f"    {owner} = alloc({nbytes})")
            found.append((owner, f"{owner}.address"))
        return found

    def array(self, aval: ShapedArray, place: str, owner: str, sharding: str) -> str:
        """Write the making of one result; gives its name."""
        name = self.fresh()
        self.put(f"{name} = Array()")
        self.put(f"{name}.aval = {self.bind(aval)}; {name}.ptr = {place}; {name}.owner = {owner}")
        self.put(f"{name}.shards = {name}._numpy = {name}._sharding = {sharding}")
        return name

    def tree(self, tree: TreeDef, leaves: Any) -> str:
        """An expression that builds a tree of results."""
        if tree.kind is None:
            return next(leaves)
        if tree.kind is type(None):
            return "None"
        parts = [self.tree(child, leaves) for child in tree.children]
        if tree.kind is tuple:
            return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
        if tree.kind is list:
            return f"[{', '.join(parts)}]"
        if tree.kind is dict:
            pairs = zip(tree.aux, parts, strict=True)
            return "{" + ", ".join(f"{self._key(k)}: {v}" for k, v in pairs) + "}"
        flat = TreeDef(tree.kind, tree.aux, tuple(TreeDef(None, None, ()) for _ in parts))
        return f"{self.bind(flat.unflatten)}([{', '.join(parts)}])"
