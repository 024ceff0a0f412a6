"""Fast calls of pmapped and shard_mapped functions: each device has a frame, each argument shards.

Shards of a sharded array are used in place; a whole array whose shards are contiguous is cut by
adding to its address. The entry point makes the shards of results, Python text the whole arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from spmd.base.config import config
from spmd.base.tree import TreeDef
from spmd.compile.dispatch import fast_call
from spmd.compile.dispatch.argument_matcher import UnmatchedError
from spmd.compile.dispatch.signature import Split
from spmd.compile.executable.mesh_executable import MeshExecutable, listeners, mesh_executable
from spmd.compile.executable.mesh_program import MeshProgram
from spmd.compile.native.cpython import entry_layout, entry_point
from spmd.core.aval import ShapedArray, typeof
from spmd.sharding.array import Array, from_memory
from spmd.sharding.call_cache import MappedCall
from spmd.sharding.named import NamedSharding


def specialise(call: MappedCall) -> Callable[..., Any] | None:
    """A closure `match(args, kwargs)` for calls like this one."""
    executable = mesh_executable(**call.params)
    if config.debug_nans or config.debug_infs or executable.undecided is not None or listeners:
        return None
    if executable.compares_host_values:
        return None
    if len(executable.in_avals) != len(call.leaves):
        return None
    native = executable.native
    queued = fast_call.is_queued(call.leaves, native) and not executable.topology.is_spread
    writer = fast_call.writer_for(executable, _MapWriter)
    return fast_call.written(partial(writer, call, executable), native, queued)


def specialise_jitted(
    split: Split, executable: MeshProgram, out_tree: TreeDef, direct: bool = False
) -> Callable[..., Any] | None:
    """A closure for calls of a jitted function like this one, whose program is that of a mesh.

    It takes a tuple and a dict of arguments, or, if it is to be direct, the arguments one by one.
    """
    if not executable.is_plain or split.static_kwargs:
        return None
    mesh = executable.core
    match = specialise(
        MappedCall(
            leaves=split.leaves,
            tree=split.tree,
            static=split.static_args,
            in_shardings=mesh.in_shardings,
            donated=executable.donated,
            outs=list(zip(mesh.whole_avals, mesh.out_shardings, strict=True)),
            out_tree=out_tree,
            params=executable.params,
        )
    )
    return fast_call.spread(match) if direct and match is not None else match


class _MapWriter(fast_call.Writer):
    """Writes the closure of one kind of call."""

    makes_results = False
    executable: MeshExecutable

    def __init__(self, call: MappedCall, executable: MeshExecutable, checks: bool = False):
        self.call = call
        self.shards: list[list[str] | None] = []  # the names of each leaf's shards
        split = Split(list(call.leaves), call.tree, call.static, ())
        super().__init__(split, executable, call.out_tree, checks)

    @property
    def donated(self) -> Sequence[bool]:
        """Whether each argument is donated."""
        return self.call.donated

    @property
    def donated_arrays(self) -> list[bool]:
        """Of each argument whether it is an array that the call uses up, not one that it cuts."""
        is_one = self.executable.mesh.size == 1
        pairs = zip(super().donated_arrays, self.split.leaves, strict=True)
        return [gone and (is_one or leaf.shards is not None) for gone, leaf in pairs]

    @cached_property
    def takes(self) -> Mapping[int, int]:
        """For each output that may be written over shards of a donated argument: of which one."""
        found = self.executable.takes_of(self.call.donated).items()
        given = self.call.leaves
        return {k: x for k, x in found if type(given[x]) is Array and given[x].shards is not None}

    def held_by(self, leaf: int, device: int) -> str | None:
        """The name of a shard, or of an argument that is an array on one device."""
        shards = self.shards[leaf]
        return super().held_by(leaf, device) if shards is None else shards[device]

    def enqueue(self) -> Callable[[Sequence[Any]], list[Any]]:
        """The call of the executable through the queue."""
        shardings = [sharding for _, sharding in self.call.outs]
        return partial(self.executable.call, takes=self.takes, out_shardings=shardings)

    def takes_arguments(self) -> bool:
        """Whether the entry point can be called with the arguments as they are: it knows none."""
        return False

    # ---- matching ----

    def match_leaf(self, name: str) -> None:
        """Match the next leaf, whose shards' addresses fill a word of each frame."""
        k, leaf = self.leaf, self.split.leaves[self.leaf]
        sharding, aval = self.call.in_shardings[k], typeof(leaf)
        self.leaf += 1
        self.arrays.append(name)
        words = [d * self.frame + 1 + k for d in range(self.executable.count)]
        if type(leaf) is Array and leaf.shards is not None:
            self.shards.append(self._match_shards(name, leaf, aval, sharding, words))
            return
        self.shards.append(None)
        starts = _contiguous_starts(aval, sharding)
        if type(leaf) is Array:
            # An array that is committed to a device may not be moved: it is matched by its place.
            place = "None" if leaf._sharding is None else self.bind(leaf._sharding)
            self.put(f"if {name}.aval is not {self.bind(aval)} or {name}.shards is not None or")
            self.lines[-1] += f" {name}._sharding is not {place}: return MISS"
            self.operand(f"{name}.ptr", entry_layout.ADDRESS, words[0])
        else:
            self.match_value(name, leaf, aval, words[0])
        # The first device's word gets the array's address, then all shards' words are so many bytes
        # behind it; the first itself is moved last.
        moved = [(word, words[0], start) for word, start in zip(words, starts, strict=True)]
        self.offsets += [*moved[1:], moved[0]]

    def _match_shards(
        self, name: str, leaf: Array, aval: ShapedArray, sharding: NamedSharding, words: list[int]
    ) -> list[str]:
        given = leaf.sharding
        if not isinstance(given, NamedSharding) or given.layout != sharding.layout:
            raise UnmatchedError
        same, layout = self.bind(given), self.bind(sharding.layout)
        self.put(f"if {name}.aval is not {self.bind(aval)} or ({name}._sharding is not {same}")
        self.lines[-1] += f" and {name}._sharding.layout != {layout}): return MISS"
        shards = [self.fresh() for _ in words]
        self.put(f"{', '.join(shards)}, = {name}.shards")
        for shard, word in zip(shards, words, strict=True):
            # A deleted array has ptr 0, which is unfit.
            self.operand(f"{shard}.ptr", entry_layout.ADDRESS, word)
        return shards

    # ---- results ----

    def forwarded(self, leaf: int, aval: ShapedArray, made: list[entry_point.Result]) -> list[str]:
        """The text of a result on each device that is an argument's shard."""
        shards = self.shards[leaf]
        if shards is None:
            raise UnmatchedError
        return [
            f"from_memory({x}.ptr, {x}.owner, {self.bind(aval)}, {self.bind(home)})"
            for x, home in zip(shards, self.executable.places, strict=True)
        ]

    def wholes(self, shards: Sequence[Sequence[str]]) -> list[str]:
        """Write the making of all results; gives their names."""
        self.names["from_memory"] = from_memory
        outs = []
        for row, (aval, sharding) in zip(shards, self.call.outs, strict=True):
            name = self.fresh()
            self.put(f"{name} = Array(); {name}.aval = {self.bind(aval)}; {name}.ptr = 0")
            self.put(f"{name}.owner = {name}._numpy = None; {name}.shards = ({', '.join(row)},)")
            self.put(f"{name}._sharding = {self.bind(sharding)}")
            outs.append(name)
        return outs


def _contiguous_starts(aval: ShapedArray, sharding: NamedSharding) -> list[int]:
    """The start of each local device's shard of a C-contiguous array, in bytes."""
    starts = []
    if sharding.uneven:
        raise UnmatchedError  # the last shards are shorter than what the program reads
    for index in sharding.addressable_devices_indices_map(aval.shape).values():
        cuts = [d for d, s in enumerate(index) if s != slice(None)]
        if any(aval.shape[d] != 1 for d in range(cuts[0] if cuts else 0)) or len(cuts) > 1:
            raise UnmatchedError
        start = (index[cuts[0]].start or 0) if cuts else 0
        below = aval.shape[cuts[0] + 1 :] if cuts else ()
        starts.append(start * int(np.prod(below, dtype=np.int64)) * aval.dtype.itemsize)
    return starts
