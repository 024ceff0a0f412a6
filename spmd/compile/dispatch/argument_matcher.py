"""The text that matches the arguments of a repeated call against the structure compiled for.

The one idea: instead of flattening the arguments and hashing their avals, generated source takes
them apart leaf by leaf and hands each leaf to the program's entry point, native code that compares
interned avals by identity. A mismatch returns `MISS`, and the call is looked up the general way,
which is the slow twin of all this.

All containers are matched: tuples, lists, dicts and named tuples are read in place, objects of
other registered classes are taken apart by the function that their class is registered with. Leaves
are arrays, NumPy arrays of the exact dtype and numbers; calls with others stay on the general path.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base.tree import TreeDef, container_of, is_named_tuple
from spmd.base.util import MISS
from spmd.compile.dispatch.signature import Split
from spmd.compile.native.cpython import entry_layout, entry_point
from spmd.compile.native.runtime.allocator import Block, alloc
from spmd.core.aval import ShapedArray
from spmd.sharding.array import Array

# From this many leaves on a dict is read by one call, and made by one.
WIDE = 8
# Trees of more containers inside each other are left to the general path: their generated text
# would be nested as deep, and Python's parser has a limit.
DEEPEST = 50


class UnmatchedError(Exception):
    """The call has an argument or a result that generated code does not match."""


def is_number(x: Any, aval: ShapedArray) -> bool:
    """Whether `x` is a number that an entry point can write into memory."""
    return isinstance(x, (bool, int, float, np.generic)) and aval.dtype.name in entry_point.NUMBERS


def is_wide(tree: TreeDef) -> bool:
    """Whether a tree is a dict of many leaves and nothing else."""
    many = tree.kind is dict and len(tree.parts) >= WIDE
    return many and all(child.kind is None for child in tree.parts)


def packed(sizes: Sequence[int], alignment: int) -> tuple[int, list[int]]:
    """The bytes that aligned arrays take one behind the other, and where each starts."""
    *starts, total = itertools.accumulate(
        (-(-n // alignment) * alignment for n in sizes), initial=0
    )
    return total, starts


def _is_same(aux: Any, expected: Any) -> bool:
    """Whether what a class keeps beside its children is what it was; if in doubt it is not."""
    try:
        return bool(aux == expected)
    except Exception:  # the general path raises it, if it makes this comparison at all
        return False


def has_buffer(x: Any) -> bool:
    """Whether NumPy lends the memory of arrays of this dtype."""
    try:
        memoryview(x)
    except (TypeError, ValueError):
        return False
    return True


class Matcher:
    """Writes the part of a function that matches its arguments.

    With `checks` the text itself compares avals and types: for what is done before the entry point
    is called, or without it.
    """

    def __init__(self, split: Split, in_avals: Sequence[ShapedArray], checks: bool):
        if split.tree.is_deeper_than(DEEPEST):
            raise UnmatchedError
        self.split = split
        self.in_avals = in_avals
        self.checks = checks
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self.leaf = 0
        self.count = 0
        self.arrays: list[str] = []  # the name of each leaf
        # The entry point's operands, as text and as records; and words of the frames that are a
        # number of bytes behind another.
        self.operands: list[str] = []
        self.given: list[entry_point.Operand] = []
        self.offsets: list[tuple[int, int, int]] = []
        # For each wide dict the line that takes its leaves apart, and the names they get there.
        self.wide: list[tuple[str, list[str]]] = []

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
            "getrefcount": sys.getrefcount,
            "ndarray": np.ndarray,
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

    def key(self, key: Any) -> str:
        """The text of a dict's key."""
        return repr(key) if type(key) in (str, int) else self.bind(key)

    def matched(self) -> list[str]:
        """The lines that match positional and keyword arguments, static ones by equality."""
        args_tree, kwargs_tree = self.split.tree.parts
        static = dict(self.split.static_args)
        count = len(args_tree.parts) + len(static)
        self.put(f"if len(args) != {count}: return MISS")
        dynamic = iter(args_tree.parts)
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
        for key, tree in zip(keys, kwargs_tree.parts, strict=True):
            name = self.fresh()
            self.put(f"{name} = kwargs[{key!r}]")
            self.match(name, tree)
        for key, value in named.items():
            name = self.fresh()
            self.put(f"{name} = kwargs[{key!r}]")
            self.match_static(name, value)
        lines, self.lines = self.lines, []
        return lines

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
        count = len(tree.parts)
        kind = tree.kind
        is_tuple = kind in (tuple, list) or is_named_tuple(kind)
        if not is_tuple and kind is not dict:
            self.match_registered(name, tree)
            return
        expected = kind.__name__ if kind in (tuple, list, dict) else self.bind(kind)
        self.put(f"if type({name}) is not {expected} or len({name}) != {count}: return MISS")
        if is_wide(tree):
            self.match_wide(name, tree)
            return
        keys = range(count) if is_tuple else [self.key(k) for k in tree.aux]
        for key, child in zip(keys, tree.parts, strict=True):
            inner = self.fresh()
            self.put(f"{inner} = {name}[{key}]")
            self.match(inner, child)

    def match_registered(self, name: str, tree: TreeDef) -> None:
        """Match an object that the function of its class takes apart."""
        assert tree.kind is not None
        container = container_of(tree.kind)
        assert container is not None  # what is registered once stays so
        kind, flatten = self.bind(tree.kind), self.bind(container.flatten)
        children, aux, expected = self.fresh(), self.fresh(), self.bind(tree.aux)
        self.put(f"if type({name}) is not {kind}: return MISS")
        self.put(f"{children}, {aux} = {flatten}({name})")
        self.put(f"if len({children}) != {len(tree.parts)} or ({aux} is not {expected}")
        self.lines[-1] += f" and not {self.bind(_is_same)}({aux}, {expected})): return MISS"
        names = [self.fresh() for _ in tree.parts]
        if names:
            self.put(f"{', '.join(names)}, = {children}")
        for inner, child in zip(names, tree.parts, strict=True):
            self.match(inner, child)

    def match_wide(self, name: str, tree: TreeDef) -> None:
        """Match the leaves of a wide dict: one call looks all of them up."""
        get, leaves = self.bind(operator.itemgetter(*tree.aux)), self.fresh()
        names = [self.fresh() for _ in tree.parts]
        self.put(f"{leaves} = {get}({name})")
        self.wide.append((f"{', '.join(names)} = {leaves}", names))
        self.put(self.wide[-1][0])
        for inner in names:
            self.match_leaf(inner)

    def match_leaf(self, name: str) -> None:
        """Match the next leaf, whose address fills a word of the frames."""
        k, leaf = self.leaf, self.split.leaves[self.leaf]
        self.leaf += 1
        self.arrays.append(name)
        self.match_value(name, leaf, self.in_avals[k], 1 + k)

    def match_value(self, name: str, leaf: Any, aval: ShapedArray, word: int) -> None:
        """Match a leaf that is not spread over devices; a word of the frames gets its address."""
        if type(leaf) is Array:
            if leaf.shards is not None or leaf._sharding is not None:
                raise UnmatchedError
            if self.checks:
                # A tracer has an aval too, but no _sharding.
                self.put(f"if {name}.aval is not {self.bind(aval)} or {name}._sharding is not None")
                self.lines[-1] += ": return MISS"
            self.operand(name, entry_layout.ARRAY, word, aval)
        elif type(leaf) is np.ndarray and leaf.dtype == aval.dtype and leaf.flags.c_contiguous:
            dtype, shape = self.bind(leaf.dtype), self.bind(leaf.shape)
            self.put(f"if type({name}) is not ndarray or {name}.shape != {shape} or {name}.dtype")
            self.lines[-1] += f" is not {dtype} and {name}.dtype != {dtype}: return MISS"
            if not has_buffer(leaf):
                raise UnmatchedError
            # It is unfit if its memory is not in order.
            self.operand(name, entry_layout.BUFFER, word)
        elif is_number(leaf, aval):
            if self.checks:
                self.put(f"if type({name}) is not {self.bind(type(leaf))}: return MISS")
            self.operand(name, entry_point.NUMBERS[aval.dtype.name], word, type(leaf))
        else:
            raise UnmatchedError

    def operand(self, text: str, kind: int, word: int, expected: Any = None) -> None:
        """Hand the value of an expression to the entry point, which compares it with `expected`."""
        self.operands.append(text)
        self.given.append(entry_point.Operand(kind, word, expected))
