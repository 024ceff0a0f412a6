"""Fast calls: closures written for one kind of call of a jitted function.

A `Writer` says how each leaf is matched, which word of the frames it fills, which results are made
and where a donated block goes, as the plain records of an entry point (`Operand`, `Result`). The
entry point does all of it in native code; all other work (containers of users, donation,
shards) is Python text around its call. If the arguments are trees of arrays and numbers, and the
results too, nothing is left to be written: the entry point itself is the closure.

A program that is long runs in the queue. Then the text matches, and the executable does the rest,
a few microseconds of Python beside a program of a millisecond.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from spmd.base.tree import LEAF, TreeDef
from spmd.compile.dispatch.argument_matcher import DEEPEST, Matcher, UnmatchedError, packed
from spmd.compile.dispatch.signature import Split
from spmd.compile.executable.async_operands import copied_bytes, most_copied
from spmd.compile.executable.executable import Executable
from spmd.compile.lazy import cuda_fast_call
from spmd.compile.native.cpython import entry_layout, entry_point
from spmd.compile.native.cpython.entry_layout import is_plain
from spmd.compile.native.cpython.object_layout import object_layout
from spmd.compile.native.runtime.allocator import (
    SMALL_ALIGNMENT,
    SMALL_BYTES,
    SizeClass,
    alloc,
    home_of,
)
from spmd.compile.native.runtime.async_queue import QUEUE
from spmd.compile.native.runtime.run import NativeProgram
from spmd.core.aval import ShapedArray
from spmd.sharding.array import Array
from spmd.sharding.call_cache import Match
from spmd.transport.flight_recorder import FLIGHT

# Results that are small together share one block; larger ones get a block each.
SLAB_BYTES = 16 * 1024
ALIGNMENT = 64
# An arena up to this size stays with its closure; larger ones go back to the allocator.
KEPT_ARENA_BYTES = 64 * 1024

_NO_KEYWORDS: dict[str, Any] = {}


def prepare() -> None:
    """Make what all closures need, which the first would have to wait for."""
    if object_layout() is not None:
        entry_point.entry_point_code()


def specialise(
    split: Split, executable: Executable, out_tree: TreeDef, direct: bool = False
) -> Callable[..., Any] | None:
    """A closure for calls like this one, or None if it is of no kind that is matched.

    `closure(args, kwargs)` gives the results, or `MISS`; with `direct`, `closure(*args)` does.
    """
    queued = is_queued(split.leaves, executable.native)

    def writer(checks: bool = False) -> Writer:
        made = writer_for(executable, Writer)
        return made(split, executable, out_tree, checks, direct and not queued)

    match = written(writer, executable.native, queued)
    return spread(match) if direct and queued and match is not None else match


def written(
    writer: Callable[..., Writer], native: NativeProgram, queued: bool
) -> Callable[..., Any] | None:
    """The closure that a writer makes; for a long program, that of the queue beside it."""
    if native.has_entry_points and object_layout() is None:
        return None  # this Python's objects are not known, so an entry point cannot read them
    try:
        match = writer().function()
        return now_or_later(native, match, writer(checks=True).enqueued()) if queued else match
    except UnmatchedError:
        return None


def writer_for(executable: Executable, writer: type[Any]) -> type[Any]:
    """The class that writes closures for an executable: `writer`, or its variant for GPUs."""
    if executable.native.has_entry_points:
        return writer
    return cuda_fast_call.on_gpus(writer)


def spread(match: Match) -> Callable[..., Any]:
    """A closure that takes the arguments one by one."""
    return lambda *args: match(args, _NO_KEYWORDS)


def is_queued(leaves: Sequence[Any], native: NativeProgram) -> bool:
    """Whether calls like this one go through the queue as long as it is open."""
    return QUEUE.is_open and native.is_long and copied_bytes(leaves) <= most_copied(native)


def now_or_later(native: NativeProgram, now: Match, later: Match) -> Match:
    """Choose for each call: `now` for callers that wait at once for results, else `later`."""
    jobs = QUEUE.jobs

    def match(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        left = native.calls_at_once
        if left and not jobs:
            native.calls_at_once = left - 1
            return now(args, kwargs)
        return later(args, kwargs)

    return match


class Writer(Matcher):
    """Writes the closure of one kind of call, or makes the entry point that is that closure."""

    # Whether the results of the program are those of the call, not shards of them.
    makes_results = True

    def __init__(
        self,
        split: Split,
        executable: Executable,
        out_tree: TreeDef,
        checks: bool = False,
        direct: bool = False,
    ):
        if out_tree.is_deeper_than(DEEPEST):
            raise UnmatchedError
        self.executable = executable
        self.out_tree = out_tree
        self.direct = direct
        # Nothing shall be taken or recorded for a call that does not fit.
        checks = checks or bool(self.takes) or FLIGHT.keeps_programs
        super().__init__(split, executable.in_avals, checks)
        self.frame = executable.native.frame_words // executable.count  # of one device
        self.slab_bytes = self.slab_word = 0
        # The blocks that the entry point makes: their classes, and the words that get their
        # addresses.
        self.fresh_blocks: list[tuple[SizeClass, int]] = []
        # Arrays whose addresses are compared: the names of the result and of the list of addresses.
        self.compared: dict[tuple[str, ...], tuple[str, str]] = {}

    # ---- differences between the call of one device and that of a mesh ----

    @property
    def donated(self) -> Sequence[bool]:
        """Whether each argument is donated."""
        return self.executable.donated

    @cached_property
    def takes(self) -> Mapping[int, int]:
        """For each output that may be written over a donated argument: which one."""
        return self.executable.takes

    def held_by(self, leaf: int, device: int) -> str | None:
        """The name of the array that is a device's shard of an argument, if it is one."""
        return self.arrays[leaf] if type(self.split.leaves[leaf]) is Array else None

    def forwarded(self, leaf: int, aval: ShapedArray, made: list[entry_point.Result]) -> list[str]:
        """The text of a result on each device that is an argument."""
        if self.held_by(leaf, 0) is None:
            raise UnmatchedError
        made.append(entry_point.Result(1 + leaf, entry_layout.of_operand(leaf), aval))
        return [f"made[{len(made) - 1}]"]

    def wholes(self, shards: Sequence[Sequence[str]]) -> list[str]:
        """The text of each result of the call, from that of its shards."""
        return [row[0] for row in shards]

    def enqueue(self) -> Callable[[Sequence[Any]], list[Any]]:
        """The call of the executable through the queue."""
        return self.executable.call

    # ---- the closure ----

    def function(self) -> Callable[..., Any]:
        """The function `match(args, kwargs)`, or `match(*args)` if it is to be direct."""
        matching = self.matched()
        self.match_distinct()
        made, shards = self.results_made()
        out, is_whole = self.out_tree, self.makes_results and is_plain(self.out_tree)
        if is_whole and self.takes_arguments():
            args, kwargs = self.split.tree.parts
            return self.open(made, out, None if self.direct else (args, kwargs))
        # Containers that the entry point does not know are made here, of a tuple of the results.
        flat = TreeDef(tuple, None, (LEAF,) * len(made))
        self.names["run"] = self.open(made, out if is_whole else flat)
        # A call of the entry point that did not fit has done nothing.
        if FLIGHT.keeps_programs:
            self.names |= {"begin": FLIGHT.begin, "completed": FLIGHT.completed}
            self.put(f"span = begin({self.executable.native.label}, 0)")
        matching, operands = self.operands_as_read(matching)
        self.put(f"made = run({operands})")
        if FLIGHT.keeps_programs:
            self.put("completed(span)")
        self.put("if made is MISS: return MISS")
        outs = [] if is_whole else self.wholes(shards)
        self.give_up()
        self.put("return made" if is_whole else "return " + self.tree(out, iter(outs)))
        match = self.compiled(matching)
        return spread(match) if self.direct else match

    def enqueued(self) -> Callable[..., Any]:
        """The function of a long program, whose run goes through the queue."""
        matching = self.matched()
        self.match_distinct()
        self.names |= {"QUEUE": QUEUE, "enqueue": self.enqueue()}
        # An array without memory is an error of the general path.
        devices = range(self.executable.count)
        held = {self.held_by(k, d) for k in range(len(self.arrays)) for d in devices}
        gone = [f" or {name}.owner is None" for name in sorted(filter(None, held))]
        self.put(f"if not QUEUE.is_open{''.join(gone)}: return MISS")
        outs = [self.fresh() for _ in range(self.out_tree.num_leaves)]
        call = f"enqueue(({''.join(f'{name}, ' for name in self.arrays)}))"
        self.put(f"{', '.join(outs)}, = {call}" if outs else call)
        if not self.makes_results:
            self.give_up()  # else the executable does it
        self.put("return " + self.tree(self.out_tree, iter(outs)))
        return self.compiled(matching)

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
        args, kwargs = tree.parts
        if self.direct and (kwargs.parts or any(c.kind is not None for c in args.parts)):
            return False
        kinds = [given.kind for given in self.given]
        known = len(kinds) == len(self.arrays) and entry_layout.BUFFER not in kinds
        return known and is_plain(tree) and not any(self.donated_arrays)

    @property
    def donated_arrays(self) -> list[bool]:
        """Of each argument whether it is an array that the call uses up."""
        pairs = zip(self.donated, self.split.leaves, strict=True)
        return [gone and type(leaf) is Array for gone, leaf in pairs]

    def whole_arrays(self) -> list[str]:
        """The names of the arguments that are arrays on one device."""
        pairs = zip(self.arrays, self.split.leaves, strict=True)
        return [name for name, leaf in pairs if type(leaf) is Array and leaf.shards is None]

    def match_distinct(self) -> None:
        """Write the check that no donated array is another argument too, which is an error."""
        arrays = self.whole_arrays()
        if any(self.donated) and len(arrays) > 1:
            ids = ", ".join(f"id({x})" for x in arrays)
            self.put(f"if len({{{ids}}}) != {len(arrays)}: return MISS")

    def give_up(self) -> None:
        """Write the end of the donated arguments."""
        whole = self.whole_arrays()
        for x, gone in zip(self.arrays, self.donated_arrays, strict=True):
            if gone:
                gives = f"{x}.ptr = 0; {x}.owner = {x}._numpy = None"
                self.put(gives if x in whole else f"{x}.delete()")

    # ---- results ----

    def results_made(self) -> tuple[list[entry_point.Result], list[list[str]]]:
        """The results that the entry point makes, and the text of each result on each device.

        Writes the allocation of the blocks that the entry point does not allocate itself.
        """
        executable = self.executable
        inputs, count, frames = len(executable.in_avals), len(executable.outputs), executable.frames
        self.template: list[int] = []
        for d, consts in enumerate(executable.const_pointers):
            words = inputs + count + len(frames.shared)
            self.template += [self.arena(d * self.frame), *[0] * words, *consts]
        places = list(enumerate(executable.places))
        first = {d: d * self.frame + 1 + inputs for d, _ in places}
        outputs = [(d, k) for d, _ in places for k in range(count) if frames.outputs[k][d] == d]
        owners = dict(zip(outputs, self.owners(outputs, first), strict=True))
        for d, _ in places:
            for k, homes in enumerate(frames.outputs):
                if homes[d] != d:
                    self.offsets.append((first[d] + k, first[homes[d]] + k, 0))
            for k, homes in enumerate(frames.shared, count):
                self.offsets.append((first[d] + k, homes[d] * self.frame, 0))
        written = itertools.count()
        made: list[entry_point.Result] = []
        shards = []
        for result, aval in zip(executable.results, executable.out_avals, strict=True):
            if result is not None:
                shards.append(self.forwarded(result, aval, made))
                continue
            k = next(written)
            shards.append([f"made[{len(made) + d}]" for d, _ in places])
            owned = [owners[homed, k] for homed in frames.outputs[k]]
            made += [entry_point.Result(first[d] + k, owned[d], aval, home) for d, home in places]
        return made, shards

    def arena(self, word: int) -> int:
        """The address of the arena at this word of the frames; 0 if each call gets its own.

        An arena stays with the closure if it is small and no two runs can meet in it.
        """
        executable = self.executable
        nbytes = executable.frames.arenas[word // self.frame]
        if executable.native.is_alone and nbytes <= KEPT_ARENA_BYTES:
            arena = alloc(nbytes)
            self.bind(arena)
            return arena.address
        self.fresh_block(nbytes, word)
        return 0

    def owners(self, outputs: Sequence[tuple[int, int]], first: Mapping[int, int]) -> list[int]:
        """The owner of each output (device, number) that is in memory of that device.

        `first` are the words of each device's outputs.
        """
        sizes = [max(self.executable.outputs[k].nbytes, 1) for _, k in outputs]
        words = [first[d] + k for d, k in outputs]
        for alignment, most in ((SMALL_ALIGNMENT, SMALL_BYTES), (ALIGNMENT, SLAB_BYTES)):
            total, starts = packed(sizes, alignment)
            if not sizes or self.takes or total > most:
                continue
            self.offsets += [
                (word, words[0], start) for word, start in zip(words[1:], starts[1:], strict=True)
            ]
            if alignment == SMALL_ALIGNMENT:
                self.slab_bytes, self.slab_word = total, words[0]
                return [entry_layout.OF_SLAB] * len(sizes)
            return [self.fresh_block(total, words[0])] * len(sizes)
        given = zip(outputs, sizes, words, strict=True)
        return [self.owner(d, k, nbytes, word) for (d, k), nbytes, word in given]

    def owner(self, device: int, k: int, nbytes: int, word: int) -> int:
        """The owner of one output: a block of the entry point, or one that Python chooses."""
        taken = self.takes.get(k)
        donor = None if taken is None else self.held_by(taken, device)
        if taken is None or donor is None:
            return self.fresh_block(nbytes, word)
        found = (self.held_by(leaf, device) for leaf in range(len(self.arrays)))
        others = [name for name in found if name is not None]
        homes = self.executable.frames.outputs[k]
        also = [self.held_by(taken, d) for d, home in enumerate(homes) if home == device != d]
        block = self.fresh()
        self.take(block, donor, others, nbytes, [name for name in also if name is not None])
        self.operand(block, entry_layout.BLOCK, word)
        return len(self.operands) - 1

    def fresh_block(self, nbytes: int, word: int) -> int:
        """Let the entry point make a block; gives the owner of its contents."""
        self.fresh_blocks.append((home_of(nbytes), word))
        return entry_layout.of_block(len(self.fresh_blocks) - 1)

    def take(
        self, owner: str, donated: str, operands: Sequence[str], nbytes: int, also: Sequence[str]
    ) -> None:
        """Write the choice between a donated array's block and a new one, as `executable.take`."""
        # Three references are ours: the array's, the variable's, and getrefcount's own. Then no
        # other array has the block; but one array may be two operands.
        alone, pointers = self.distinct(operands)
        self.put(f"{owner} = {donated}.owner")
        known = " + ".join(["3", *(f"({x}.owner is {owner})" for x in also)])
        self.put(f"if type({owner}) is not Block or getrefcount({owner}) != {known} or")
        self.lines[-1] += f" {owner}.address != {donated}.ptr"
        self.lines[-1] += f" or not {alone} and {pointers}.count({donated}.ptr) > 1:"
        self.put(f"    {owner} = alloc({nbytes})")

    def distinct(self, operands: Sequence[str]) -> tuple[str, str]:
        """The names of whether arrays have different addresses, and of the list of these."""
        key = tuple(operands)
        if key not in self.compared:
            alone, pointers = self.compared[key] = self.fresh(), self.fresh()
            self.put(f"{pointers} = [{', '.join(f'{x}.ptr' for x in operands)}]")
            self.put(f"{alone} = len(set({pointers})) == {len(operands)}")
        return self.compared[key]

    def tree(self, tree: TreeDef, leaves: Any) -> str:
        """An expression that builds a tree of results."""
        if tree.kind is None:
            return next(leaves)
        if tree.kind is type(None):
            return "None"
        parts = [self.tree(child, leaves) for child in tree.parts]
        if tree.kind is tuple:
            return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
        if tree.kind is list:
            return f"[{', '.join(parts)}]"
        if tree.kind is dict:
            pairs = zip(tree.aux, parts, strict=True)
            return "{" + ", ".join(f"{self.key(k)}: {v}" for k, v in pairs) + "}"
        flat = TreeDef(tree.kind, tree.aux, tuple(TreeDef(None, None, ()) for _ in parts))
        return f"{self.bind(flat.unflatten)}([{', '.join(parts)}])"

    def open(
        self,
        made: Sequence[entry_point.Result],
        out: TreeDef,
        given: tuple[TreeDef, TreeDef] | None = None,
    ) -> Callable[..., Any]:
        """The entry point."""
        slab = self.slab_bytes, self.slab_word
        results = entry_point.Results(made, out, given, *slab, self.fresh_blocks)
        native = self.executable.native
        kept = (self.executable, *self.names.values())
        return entry_point.make_entry_point(
            native, self.template, self.given, self.offsets, results, kept
        )
