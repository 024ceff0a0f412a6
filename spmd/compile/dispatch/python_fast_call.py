"""The fast path of a jitted call: a closure written for one signature.

The one idea: instead of flattening the arguments and hashing their avals, generated source
*matches* them against the structure that was compiled for, leaf by leaf, comparing interned avals
by identity; then it hands the raw addresses to the program's entry point. A mismatch returns `MISS`
and the call is looked up the general way. `fast_call.py` leaves the leaves to native code.

Only what is common is matched: tuples, lists, dicts, named tuples and None, with single-device
arrays, NumPy arrays of the exact dtype and numbers as leaves. Everything else stays on the general
path.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base.tree import TreeDef, is_named_tuple
from spmd.base.util import MISS
from spmd.compile.dispatch.signature import Split
from spmd.compile.native.cpython import entry_point
from spmd.compile.native.runtime.allocator import SMALL_ALIGNMENT, SMALL_BYTES, Block, alloc
from spmd.core.aval import ShapedArray
from spmd.sharding.array import Array
from spmd.transport.flight_recorder import FLIGHT

# Results that are small together share one block; larger ones get a block each.
SLAB_BYTES = 16 * 1024
ALIGNMENT = 64
# From this many leaves on a dict is read by one call, and made by one.
WIDE = 8
# Trees of more containers inside each other are left to the general path: what is written for them
# would be nested as deep, and Python's parser has a limit.
DEEPEST = 50
# An arena up to this size stays with its closure; larger ones go back to the allocator.
KEPT_ARENA_BYTES = 64 * 1024


class UnmatchedError(Exception):
    """The call has a container that generated code does not match."""


def is_matchable(x: Any, aval: ShapedArray) -> bool:
    if type(x) is Array:
        return x.shards is None and x._sharding is None
    if type(x) is np.ndarray:
        return x.dtype == aval.dtype and x.flags.c_contiguous
    return is_number(x, aval)


def _has_buffer(x: Any) -> bool:
    """Whether NumPy lends the memory of arrays of this dtype."""
    try:
        memoryview(x)
    except (TypeError, ValueError):
        return False
    return True


def is_number(x: Any, aval: ShapedArray) -> bool:
    """Whether `x` is a number that an entry point can write into memory."""
    return isinstance(x, (bool, int, float, np.generic)) and aval.dtype.name in entry_point.NUMBERS


def is_wide(tree: TreeDef) -> bool:
    """Whether a tree is a dict of many leaves and nothing else."""
    many = tree.kind is dict and len(tree.children) >= WIDE
    return many and all(child.kind is None for child in tree.children)


def packed(sizes: Sequence[int], alignment: int) -> tuple[int, list[int]]:
    """The bytes that aligned pieces take one behind the other, and where each starts."""
    *starts, total = itertools.accumulate(
        (-(-n // alignment) * alignment for n in sizes), initial=0
    )
    return total, starts


# ---- the source --------------------------------------------------------------------------------


class Writer:
    """Writes the function of one signature."""

    def __init__(self, split: Split, executable: Any, out_tree: TreeDef):
        if split.tree.is_deeper_than(DEEPEST) or out_tree.is_deeper_than(DEEPEST):
            raise UnmatchedError
        self.executable = executable
        self.out_tree = out_tree
        self.split = split
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self.leaf = 0
        self.count = 0
        # What the entry point is given, the kind of each, the word of the frames for it; and the
        # words that are so many bytes behind another.
        self.operands: list[str] = []
        self.kinds: list[int] = []
        self.words: list[int] = []
        self.expected: list[Any] = []
        self.offsets: list[tuple[int, int, int]] = []
        self.arrays: list[str] = []
        # Arrays whose addresses were compared: whether they differ, and what they are.
        self.compared: dict[tuple[str, ...], tuple[str, str]] = {}
        # For each wide dict the line that takes its leaves apart, and the names they get there.
        self.wide: list[tuple[str, list[str]]] = []

    def function(self) -> Callable[..., Any]:
        """The compiled function `match(args, kwargs)`."""
        self.match_call()
        self.match_distinct()
        matching, self.lines = self.lines, []
        self.results()
        return self.compiled(matching)

    def compiled(self, matching: Sequence[str]) -> Callable[..., Any]:
        """The function of the lines that match arguments and the lines written since."""
        source = "\n".join(
            (
                "def match(args, kwargs):",
                "    try:",
                *("        " + line for line in matching),
                "    except (AttributeError, KeyError):",
                "        return MISS",
                *("    " + line for line in self.lines),
            )
        )
        self.names |= {
            "MISS": MISS,
            "Array": Array,
            "Block": Block,
            "alloc": alloc,
            "fail": self.executable.native.fail,
            "getrefcount": sys.getrefcount,
            "ndarray": np.ndarray,
            "zero": b"\0",
        }
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
        is_tuple = kind in (tuple, list) or is_named_tuple(kind)
        if not is_tuple and kind is not dict:
            raise UnmatchedError
        expected = kind.__name__ if kind in (tuple, list, dict) else self.bind(kind)
        self.put(f"if type({name}) is not {expected} or len({name}) != {count}: return MISS")
        if is_wide(tree):
            self.match_wide(name, tree)
            return
        keys = range(count) if is_tuple else [self._key(k) for k in tree.aux]
        for key, child in zip(keys, tree.children, strict=True):
            inner = self.fresh()
            self.put(f"{inner} = {name}[{key}]")
            self.match(inner, child)

    def match_wide(self, name: str, tree: TreeDef) -> None:
        """Match the leaves of a wide dict: one call looks all of them up."""
        get, leaves = self.bind(operator.itemgetter(*tree.aux)), self.fresh()
        names = [self.fresh() for _ in tree.children]
        self.put(f"{leaves} = {get}({name})")
        self.wide.append((f"{', '.join(names)} = {leaves}", names))
        self.put(self.wide[-1][0])
        for inner in names:
            self.match_leaf(inner)

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
        # A tracer has an aval too, but no _sharding; a deleted array has ptr 0, which is unfit.
        self.put(f"if {name}.aval is not {self.bind(aval)} or {name}._sharding is not None:")
        self.lines[-1] += " return MISS"
        self.operand(f"{name}.ptr", entry_point.ADDRESS)

    def operand(self, text: str, kind: int, expected: Any = None) -> None:
        """Hand the value of an expression to the entry point, which compares it with `expected`."""
        self.operands.append(text)
        self.kinds.append(kind)
        self.expected.append(expected)

    def match_ndarray(self, name: str, leaf: np.ndarray) -> None:
        dtype, shape = self.bind(leaf.dtype), self.bind(leaf.shape)
        self.put(f"if type({name}) is not ndarray or {name}.shape != {shape} or")
        self.lines[-1] += f" {name}.dtype is not {dtype} and {name}.dtype != {dtype}: return MISS"
        if not _has_buffer(leaf):
            raise UnmatchedError
        self.operand(name, entry_point.BUFFER)  # which is unfit if its memory is not in order

    def match_number(self, name: str, leaf: Any, aval: ShapedArray) -> None:
        self.put(f"if type({name}) is not {self.bind(type(leaf))}: return MISS")
        self.operand(name, entry_point.NUMBERS[aval.dtype.name])

    @property
    def donated(self) -> Sequence[bool]:
        """Whether each argument is donated."""
        return self.executable.donated

    def match_distinct(self) -> None:
        """Write the check that no donated array is another argument too, which is an error."""
        arrays = self.whole_arrays()
        if any(self.donated) and len(arrays) > 1:
            ids = ", ".join(f"id({x})" for x in arrays)
            self.put(f"if len({{{ids}}}) != {len(arrays)}: return MISS")

    # ---- running ----

    def results(self) -> None:
        """Allocate, run, and build the results."""
        executable = self.executable
        first = 1 + len(self.operands)
        self.words += range(1, first)
        template = [0] * first
        template[0] = self.arena(executable.native.is_alone, "arena", 0)
        owners = self.allocate([max(a.nbytes, 1) for a in executable.outputs], first)
        template += [*(0 for _ in owners), *executable.const_pointers]
        self.run(template)
        outs = self.forward(owners)
        self.give_up()
        self.put("return " + self.tree(self.out_tree, iter(outs)))

    def arena(self, kept: bool, name: str, word: int) -> int:
        """The address of an arena that stays with the closure, or 0 if each call gets its own.

        It may stay if it is small and no two runs can meet in it.
        """
        executable = self.executable
        if kept and executable.arena <= KEPT_ARENA_BYTES:
            arena = alloc(executable.arena)
            self.bind(arena)
            return arena.address
        self.put(f"{name} = alloc({executable.arena})")
        self.place(f"{name}.address", word)
        return 0

    def place(self, text: str, word: int) -> None:
        """Hand an address to the entry point, for a word of the frames."""
        self.operand(text, entry_point.ADDRESS)
        self.words.append(word)

    def run(self, template: list[int]) -> None:
        """Write the call of the program."""
        operands = list(zip(self.kinds, self.words, strict=True))
        self.names["run"] = entry_point.make_entry_point(
            self.executable.native, template, operands, self.offsets
        )
        if FLIGHT.keeps_programs:
            self.names |= {"begin": FLIGHT.begin, "completed": FLIGHT.completed}
            self.put(f"span = begin({self.executable.native.label}, 0)")
        # The slab of small results is the last operand, and `base` its address.
        self.put(f"base = run({', '.join(self.operands)})")
        if FLIGHT.keeps_programs:
            self.put("completed(span)")
        self.put("if base < 0:")
        self.put(f"    if base == {entry_point.UNFIT}: return MISS")
        self.put("    fail(-base)")

    def give_up(self) -> None:
        """Write the end of the donated arguments."""
        donated = self.executable.donated
        for x, gone, leaf in zip(self.arrays, donated, self.split.leaves, strict=True):
            if gone and type(leaf) is Array:
                self.put(f"{x}.ptr = 0; {x}.owner = {x}._numpy = None")

    def forward(self, owners: list[tuple[str, str]]) -> list[str]:
        """Write the making of the results; gives their names."""
        executable = self.executable
        made = iter(owners)
        outs = []
        for result, aval in zip(executable.results, executable.out_avals, strict=True):
            if result is None:
                owner, place = next(made)
                outs.append(self.array(aval, place, owner, "None"))
            elif type(self.split.leaves[result]) is Array:
                x = self.arrays[result]
                outs.append(self.array(aval, f"{x}.ptr", f"{x}.owner", "None"))
            else:
                raise UnmatchedError
        return outs

    def allocate(self, sizes: Sequence[int], first: int) -> list[tuple[str, str]]:
        """Write the allocation of all outputs; gives (owner, address) of each.

        The first of them has the word `first`.
        """
        takes = self.executable.takes
        if not takes and (slab := self.slab(sizes, [first + k for k in range(len(sizes))])):
            return slab
        found = []
        for k, nbytes in enumerate(sizes):
            owner = f"block{k}"
            self.put_block(owner, takes.get(k), nbytes)
            self.place(f"{owner}.address", first + k)
            found.append((owner, f"{owner}.address"))
        return found

    def put_block(self, name: str, taken: int | None, nbytes: int) -> None:
        """Write the choice of an output's block: a donated one's, or a new one."""
        if taken is None or type(self.split.leaves[taken]) is not Array:
            self.put(f"{name} = alloc({nbytes})")
        else:
            self.take(name, self.arrays[taken], self.whole_arrays(), nbytes)

    def whole_arrays(self) -> list[str]:
        """The names of the arguments that are arrays on one device."""
        pairs = zip(self.arrays, self.split.leaves, strict=True)
        return [name for name, leaf in pairs if type(leaf) is Array]

    def take(self, owner: str, donated: str, operands: Sequence[str], nbytes: int) -> None:
        """Write the choice between a donated array's block and a new one, as `executable.take`."""
        # Three references are ours: the array's, the variable's, and getrefcount's own. Then no
        # other array has the block; but one array may be two operands.
        alone, everyone = self.distinct(operands)
        self.put(f"{owner} = {donated}.owner")
        self.put(f"if type({owner}) is not Block or getrefcount({owner}) != 3 or")
        self.lines[-1] += f" {owner}.address != {donated}.ptr"
        self.lines[-1] += f" or not {alone} and {everyone}.count({donated}.ptr) > 1:"
        self.put(f"    {owner} = alloc({nbytes})")

    def distinct(self, operands: Sequence[str]) -> tuple[str, str]:
        """The names of whether arrays have different addresses, and of the list of these."""
        key = tuple(operands)
        if key not in self.compared:
            alone, everyone = self.compared[key] = self.fresh(), self.fresh()
            self.put(f"{everyone} = [{', '.join(f'{x}.ptr' for x in operands)}]")
            self.put(f"{alone} = len(set({everyone})) == {len(operands)}")
        return self.compared[key]

    def slab(self, sizes: Sequence[int], words: Sequence[int]) -> list[tuple[str, str]]:
        """Write one allocation for results that are small together; empty if they are not."""
        for alignment, most in ((SMALL_ALIGNMENT, SMALL_BYTES), (ALIGNMENT, SLAB_BYTES)):
            total, starts = packed(sizes, alignment)
            if not total or total > most:
                continue
            if alignment == SMALL_ALIGNMENT:
                # A bytes object that nobody has seen yet: no call, and no finaliser.
                self.put(f"slab = zero * {total}")
                self.operand("slab", entry_point.BYTES)
                self.words.append(words[0])
            else:
                self.put(f"slab = alloc({total})")
                self.place("slab.address", words[0])
            pairs = zip(words[1:], starts[1:], strict=True)
            self.offsets += [(word, words[0], start) for word, start in pairs]
            return [("slab", f"base + {start}" if start else "base") for start in starts]
        return []

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
