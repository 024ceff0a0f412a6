"""The fast path where native code reads and makes arrays: less Python, and for most calls none.

A subclass of `python_fast_call.Writer`, whose Python text stays the slow twin: the entry point
compares the avals of operands and makes the results. If the arguments are trees of arrays and
numbers, and the results small, nothing is left to be written: the entry point itself is the
function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.base.tree import LEAF, TreeDef
from spmd.base.util import MISS
from spmd.compile.dispatch.async_fast_call import QueuedWriter, is_queued, now_or_later
from spmd.compile.dispatch.python_fast_call import (
    ALIGNMENT,
    KEPT_ARENA_BYTES,
    SLAB_BYTES,
    UnmatchedError,
    Writer,
    is_matchable,
    packed,
)
from spmd.compile.dispatch.signature import Split
from spmd.compile.executable.executable import Executable
from spmd.compile.native.cpython import entry_point
from spmd.compile.native.cpython.entry_layout import is_plain
from spmd.compile.native.cpython.object_layout import object_layout
from spmd.compile.native.runtime.allocator import SMALL_ALIGNMENT, SMALL_BYTES, SizeClass, home_of
from spmd.sharding.array import Array
from spmd.transport.flight_recorder import FLIGHT


def specialise(
    split: Split, executable: Executable, out_tree: TreeDef, direct: bool = False
) -> Callable[..., Any] | None:
    """A closure for calls like this one, or None if its arguments are not of matched kinds.

    `closure(args, kwargs)` gives the results, or `MISS`; with `direct`, `closure(*args)` does.
    """
    pairs = zip(split.leaves, executable.in_avals, strict=True)
    if any(not is_matchable(x, aval) for x, aval in pairs):
        return None
    try:
        queued = is_queued(split.leaves, executable.native)
        if object_layout() is not None:
            match = NativeWriter(split, executable, out_tree, direct and not queued).function()
            direct = direct and queued
        else:
            match = Writer(split, executable, out_tree).function()
        if queued:
            later = QueuedWriter(split, executable, out_tree).function()
            match = now_or_later(executable.native, match, later)
    except UnmatchedError:
        return None
    return spread(match) if direct else match


def spread(match: Callable[..., Any]) -> Callable[..., Any]:
    """A closure that takes the arguments one by one."""
    return lambda *args: match(args, _NO_KEYWORDS)


_NO_KEYWORDS: dict[str, Any] = {}


class NativeWriter(Writer):
    """Writes the function of one signature, or makes the entry point that is that function."""

    def __init__(self, split: Split, executable: Any, out_tree: TreeDef, direct: bool):
        super().__init__(split, executable, out_tree)
        self.direct = direct
        self.slab_bytes = self.slab_word = 0
        # The blocks that the entry point makes: their classes, and the words that get their
        # addresses.
        self.fresh_blocks: list[tuple[SizeClass, int]] = []
        # Then nothing shall be taken or recorded for a call that does not fit.
        self.checks = bool(executable.takes) or FLIGHT.keeps_programs
        self.template: list[int] = []

    def function(self) -> Callable[..., Any]:
        """The function `match(args, kwargs)`, or `match(*args)` if it is to be direct."""
        self.match_call()
        self.match_distinct()
        matching, self.lines = self.lines, []
        made = self.results_made()
        out = self.out_tree
        if is_plain(out) and self.takes_arguments():
            args, kwargs = self.split.tree.children
            return self.open(made, out, None if self.direct else (args, kwargs))
        # Containers that the entry point does not know are made here, of a tuple of the results.
        flat = TreeDef(tuple, None, (LEAF,) * len(made))
        self.names["run"] = self.open(made, out if is_plain(out) else flat)
        # A call of the entry point that did not fit has done nothing.
        if FLIGHT.keeps_programs:
            self.names |= {"begin": FLIGHT.begin, "completed": FLIGHT.completed}
            self.put(f"span = begin({self.executable.native.label}, 0)")
        matching, operands = self.operands_as_read(matching)
        self.put(f"made = run({operands})")
        if FLIGHT.keeps_programs:
            self.put("completed(span)")
        self.put("if made is MISS: return MISS")
        self.give_up()
        if is_plain(out):
            self.put("return made")
        else:
            self.put("return " + self.tree(out, (f"made[{k}]" for k in range(len(made)))))
        match = self.compiled(matching)
        return spread(match) if self.direct else match

    def operands_as_read(self, matching: list[str]) -> tuple[list[str], str]:
        """The lines that match, and the operands; leaves of a wide dict are not taken apart if all
        that is done with them is to hand them to the entry point."""
        if len(self.wide) == 1 and not any(self.donated_arrays):
            line, names = self.wide[0]
            at = matching.index(line)
            used = any(name in text for text in matching[at + 1 :] for name in names)
            if self.operands == names and not used:
                return matching[:at] + matching[at + 1 :], "*" + line.rpartition(" = ")[2]
        return matching, ", ".join(self.operands)

    def takes_arguments(self) -> bool:
        """Whether the entry point can be called with the arguments as they are."""
        if FLIGHT.keeps_programs or self.split.static_args or self.split.static_kwargs:
            return False
        tree = self.split.tree
        args, kwargs = tree.children
        if self.direct and (kwargs.children or any(c.kind is not None for c in args.children)):
            return False
        leaves, kinds = self.split.leaves, self.kinds
        known = len(kinds) == len(leaves) and entry_point.BUFFER not in kinds
        return known and is_plain(tree) and not any(self.donated_arrays)

    @property
    def donated_arrays(self) -> list[bool]:
        """Of each argument whether it is an array that the call uses up."""
        pairs = zip(self.executable.donated, self.split.leaves, strict=True)
        return [gone and type(leaf) is Array for gone, leaf in pairs]

    # ---- matching ----

    def match_leaf(self, name: str) -> None:
        leaf, aval = self.split.leaves[self.leaf], self.executable.in_avals[self.leaf]
        if type(leaf) is not Array:
            super().match_leaf(name)
            return
        self.leaf += 1
        self.arrays.append(name)
        if self.checks:
            self.put(f"if {name}.aval is not {self.bind(aval)}: return MISS")
        self.operand(name, entry_point.ARRAY, aval)

    def match_number(self, name: str, leaf: Any, aval: Any) -> None:
        self.operand(name, entry_point.NUMBERS[aval.dtype.name], type(leaf))

    # ---- results ----

    def results_made(self) -> list[entry_point.Result]:
        """What the entry point makes; writes the allocation of what it does not allocate itself."""
        executable = self.executable
        first = 1 + len(self.operands)
        self.words += range(1, first)
        arena = self.arena(executable.native.is_alone, "arena", 0)
        owners = self.owners([max(a.nbytes, 1) for a in executable.outputs], first)
        words = iter(range(first, first + len(owners)))
        self.template = [arena, *[0] * (first - 1 + len(owners)), *executable.const_pointers]
        made = []
        for result, aval in zip(executable.results, executable.out_avals, strict=True):
            if result is None:
                word = next(words)
                made.append(entry_point.Result(word, owners[word - first], aval))
            elif type(self.split.leaves[result]) is Array:
                made.append(entry_point.Result(1 + result, entry_point.of_operand(result), aval))
            else:
                raise UnmatchedError
        return made

    def owners(self, sizes: Sequence[int], first: int) -> list[int]:
        """Whose memory each output is; the first has the word `first`."""
        words = [first + k for k in range(len(sizes))]
        total, starts = packed(sizes, SMALL_ALIGNMENT)
        if sizes and not self.executable.takes and total <= SMALL_BYTES:
            self.slab_bytes, self.slab_word = total, first
            self.put_offsets(words, starts)
            return [entry_point.OF_SLAB] * len(sizes)
        total, starts = packed(sizes, ALIGNMENT)
        if sizes and not self.executable.takes and total <= SLAB_BYTES:
            self.put_offsets(words, starts)
            return [self.fresh_block(total, first)] * len(sizes)
        return [self.owner(k, nbytes, words[k]) for k, nbytes in enumerate(sizes)]

    def owner(self, k: int, nbytes: int, word: int) -> int:
        """The owner of one output: a block of the entry point, or one that Python chooses."""
        taken = self.executable.takes.get(k)
        if taken is None or type(self.split.leaves[taken]) is not Array:
            return self.fresh_block(nbytes, word)
        self.put_block(f"block{k}", taken, nbytes)
        return self.block(f"block{k}", word)

    def fresh_block(self, nbytes: int, word: int) -> int:
        """Let the entry point make a block; gives the owner of what is in it."""
        self.fresh_blocks.append((home_of(nbytes), word))
        return entry_point.of_block(len(self.fresh_blocks) - 1)

    def arena(self, kept: bool, name: str, word: int) -> int:
        """As `Writer.arena`, but that of one call is a block that the entry point makes."""
        if kept and self.executable.arena <= KEPT_ARENA_BYTES:
            return super().arena(kept, name, word)
        self.fresh_block(self.executable.arena, word)
        return 0

    def put_offsets(self, words: Sequence[int], starts: Sequence[int]) -> None:
        """Note that the results after the first lie so many bytes behind it."""
        pairs = zip(words[1:], starts[1:], strict=True)
        self.offsets += [(word, words[0], start) for word, start in pairs]

    def block(self, name: str, word: int) -> int:
        """Hand a block to the entry point; gives the operand's number."""
        self.operand(name, entry_point.BLOCK)
        self.words.append(word)
        return len(self.operands) - 1

    def open(
        self,
        made: Sequence[entry_point.Result],
        out: TreeDef,
        given: tuple[TreeDef, TreeDef] | None = None,
    ) -> Callable[..., Any]:
        """The entry point."""
        operands = [
            entry_point.Operand(kind, word, expected)
            for kind, word, expected in zip(self.kinds, self.words, self.expected, strict=True)
        ]
        slab = self.slab_bytes, self.slab_word
        results = entry_point.Results(made, out, given, *slab, self.fresh_blocks)
        native = self.executable.native
        kept = (self.executable, *self.names.values())
        return entry_point.make_entry_point(
            native, self.template, operands, self.offsets, results, kept
        )


__all__ = ["MISS", "NativeWriter", "specialise", "spread"]
