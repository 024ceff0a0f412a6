"""The fast path of a pmapped or shard_mapped call: a closure written for its arguments.

Like `python_fast_call` for jit: generated source matches the arguments leaf by leaf, fills the
frames of all local devices with addresses and runs the program. Pieces of sharded arrays are used
in place; a whole array whose pieces are contiguous is cut by adding to its address.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from spmd.base.config import config
from spmd.base.tree import TreeDef
from spmd.compile.dispatch import fast_call
from spmd.compile.dispatch.async_fast_call import is_queued, now_or_later, put_enqueued
from spmd.compile.dispatch.python_fast_call import UnmatchedError, Writer, is_number
from spmd.compile.dispatch.signature import Split
from spmd.compile.executable.mesh_executable import MeshExecutable, mesh_executable
from spmd.compile.executable.select import MeshProgram
from spmd.compile.native.cpython import entry_point
from spmd.core.aval import ShapedArray, typeof
from spmd.sharding.array import Array
from spmd.sharding.call_cache import MappedCall
from spmd.sharding.named import NamedSharding


def specialise(call: MappedCall) -> Callable[..., Any] | None:
    """A closure `match(args, kwargs)` for calls like this one."""
    executable = mesh_executable(**call.params)
    if config.debug_nans or config.debug_infs or executable.undecided is not None:
        return None
    if len(executable.piece_avals) != len(call.leaves):
        return None
    queued = is_queued(call.leaves, executable.native) and not executable.topology.is_spread
    try:
        match = _MapWriter(call, executable).function()
        if not queued:
            return match
        return now_or_later(executable.native, match, _QueuedMapWriter(call, executable).function())
    except UnmatchedError:
        return None


def specialise_jitted(
    split: Split, executable: MeshProgram, out_tree: TreeDef, direct: bool = False
) -> Callable[..., Any] | None:
    """A closure for calls of a jitted function like this one, whose program is that of a mesh.

    It takes a tuple and a dict of arguments, or, if it is to be direct, the arguments one by one.
    """
    if not executable.is_plain or split.static_kwargs:
        return None
    mesh = executable.executable
    match = specialise(
        MappedCall(
            leaves=split.leaves,
            tree=split.tree,
            static=split.static_args,
            in_shardings=mesh.in_shardings,
            donated=executable.donated,
            outs=list(zip(mesh.out_avals, mesh.out_shardings, strict=True)),
            out_tree=out_tree,
            params=executable.params,
        )
    )
    return fast_call.spread(match) if direct and match is not None else match


class _MapWriter(Writer):
    """Writes the function of one kind of call."""

    def __init__(self, call: MappedCall, executable: MeshExecutable):
        split = Split(list(call.leaves), call.tree, call.static, ())
        super().__init__(split, executable, call.out_tree)
        self.call = call
        self.count_devices = len(executable.devices)
        self.bases = executable.native.frame_words // self.count_devices
        self.pieces: list[list[str] | None] = []  # the names of each leaf's shards

    @property
    def donated(self) -> Sequence[bool]:
        """Whether each argument is donated."""
        return self.call.donated

    # ---- matching ----

    def match_leaf(self, name: str) -> None:
        k = self.leaf
        leaf, sharding = self.split.leaves[k], self.call.in_shardings[k]
        aval = typeof(leaf)
        self.leaf += 1
        self.arrays.append(name)
        if type(leaf) is Array and leaf.shards is not None:
            self._match_shards(name, aval, sharding)
            return
        self.pieces.append(None)
        starts = _contiguous_starts(aval, sharding)
        if type(leaf) is Array:
            self.put(f"if {name}.aval is not {self.bind(aval)} or {name}.shards is not None:")
            self.lines[-1] += " return MISS"
            self.operand(f"{name}.ptr", entry_point.ADDRESS)
        elif type(leaf) is np.ndarray and leaf.dtype == aval.dtype and leaf.flags.c_contiguous:
            self.match_ndarray(name, leaf)
        elif is_number(leaf, aval):
            self.match_number(name, leaf, aval)
        else:
            raise UnmatchedError
        # The first device's word gets the array's address, then all pieces' words are so many bytes
        # behind it; the first itself is moved last.
        words = [d * self.bases + 1 + k for d in range(self.count_devices)]
        self.words.append(words[0])
        moved = [(word, words[0], start) for word, start in zip(words, starts, strict=True)]
        self.offsets += [*moved[1:], moved[0]]

    def _match_shards(self, name: str, aval: ShapedArray, sharding: NamedSharding) -> None:
        given = self.split.leaves[self.leaf - 1].sharding
        if given.layout != sharding.layout:
            raise UnmatchedError
        same, layout = self.bind(given), self.bind(sharding.layout)
        self.put(f"if {name}.aval is not {self.bind(aval)} or ({name}._sharding is not {same}")
        self.lines[-1] += f" and {name}._sharding.layout != {layout}): return MISS"
        shards = [self.fresh() for _ in range(self.count_devices)]
        self.put(f"{', '.join(shards)}, = {name}.shards")
        self.pieces.append(shards)
        for d, shard in enumerate(shards):
            self.place(f"{shard}.ptr", d * self.bases + self.leaf)

    # ---- running ----

    def outputs(self) -> list[ShapedArray]:
        """The avals of one device's results that the program writes."""
        return self.executable.outputs

    def results(self) -> None:
        """Allocate, run, and build the results."""
        executable = self.executable
        template: list[int] = []
        inputs, outputs = len(executable.piece_avals), len(self.outputs())
        for d in range(self.count_devices):
            arena = self.arena(executable.native.is_alone, f"arena{d}", d * self.bases)
            consts = executable.const_pointers(d)
            template += [arena, *[0] * (inputs + outputs), *consts]
        owners = self.allocate_all()
        self.run(template)
        outs = self._arrays(owners)
        self.delete_donated()
        self.put("return " + self.tree(self.out_tree, iter(outs)))

    def delete_donated(self) -> None:
        """Write the end of the donated arguments."""
        for name, gone, leaf in zip(self.arrays, self.call.donated, self.split.leaves, strict=True):
            if gone and type(leaf) is Array:
                self.put(f"{name}.delete()")

    def _arrays(self, owners: list[list[tuple[str, str]]]) -> list[str]:
        """Write the making of all results; gives their names."""
        executable = self.executable
        places = [self.bind(p) for p in executable.places]
        made = 0
        outs = []
        results = zip(executable.out_piece_avals, executable.results, strict=True)
        for (aval, result), (whole, sharding) in zip(results, self.call.outs, strict=True):
            row = []
            for d, place in enumerate(places):
                if result is None:
                    owner, address = owners[d][made]
                else:
                    shards = self.pieces[result]
                    if shards is None:
                        raise UnmatchedError
                    owner, address = f"{shards[d]}.owner", f"{shards[d]}.ptr"
                row.append(self.array(aval, address, owner, place))
            made += result is None
            name = self.fresh()
            self.put(f"{name} = Array()")
            self.put(f"{name}.aval = {self.bind(whole)}; {name}.ptr = 0")
            self.put(f"{name}.owner = {name}._numpy = None")
            self.put(f"{name}.shards = ({', '.join(row)},)")
            self.put(f"{name}._sharding = {self.bind(sharding)}")
            outs.append(name)
        return outs

    def array(self, aval: ShapedArray, place: str, owner: str, sharding: str) -> str:
        """Write the making of one device's piece; gives its name."""
        name = self.fresh()
        self.put(f"{name} = Array()")
        self.put(f"{name}.aval = {self.bind(aval)}; {name}.ptr = {place}; {name}.owner = {owner}")
        self.put(f"{name}.shards = {name}._numpy = None; {name}._sharding = {sharding}")
        return name

    def allocate_all(self) -> list[list[tuple[str, str]]]:
        """Write the allocation of all results; gives (owner, address) by device and result."""
        sizes = [max(aval.nbytes, 1) for aval in self.outputs()]
        first, count = 1 + len(self.executable.piece_avals), len(sizes)
        words = [
            d * self.bases + first + k for d in range(self.count_devices) for k in range(count)
        ]
        taken = self.executable.takes(self.call.donated)
        taken = {k: x for k, x in taken.items() if self.pieces[x] is not None}
        owners = self.slab(sizes * self.count_devices, words) if not taken else []
        if not owners:
            for place, word in enumerate(words):
                device, k = divmod(place, count)
                owner = f"block{word}"
                if k in taken:
                    mine = [shards[device] for shards in self.pieces if shards is not None]
                    mine += self.whole_arrays()
                    donated = (self.pieces[taken[k]] or [])[device]
                    self.take(owner, donated, mine, sizes[k])
                else:
                    self.put(f"{owner} = alloc({sizes[k]})")
                self.place(f"{owner}.address", word)
                owners.append((owner, f"{owner}.address"))
        return [owners[d * count : (d + 1) * count] for d in range(self.count_devices)]


class _QueuedMapWriter(_MapWriter):
    """Writes the function of one kind of call of a long program, which runs in the queue."""

    def results(self) -> None:
        """Write the call of the executable and the making of its results."""
        executable, donated = self.executable, self.call.donated
        shardings = [sharding for _, sharding in self.call.outs]
        taken = executable.takes(donated)
        queue = partial(executable.call_queued, takes=taken, out_shardings=shardings)
        whole = zip(self.arrays, self.pieces, self.split.leaves, strict=True)
        held = [name for name, pieces, leaf in whole if pieces is None and type(leaf) is Array]
        held += [piece for pieces in self.pieces for piece in pieces or ()]
        outs = put_enqueued(self, queue, held, len(shardings))
        self.delete_donated()
        self.put("return " + self.tree(self.out_tree, iter(outs)))


def _contiguous_starts(aval: ShapedArray, sharding: NamedSharding) -> list[int]:
    """Where each local device's piece of a C-contiguous array begins, in bytes."""
    starts = []
    for index in sharding.addressable_devices_indices_map(aval.shape).values():
        cuts = [d for d, s in enumerate(index) if s != slice(None)]
        if any(aval.shape[d] != 1 for d in range(cuts[0] if cuts else 0)) or len(cuts) > 1:
            raise UnmatchedError
        start = (index[cuts[0]].start or 0) if cuts else 0
        below = aval.shape[cuts[0] + 1 :] if cuts else ()
        starts.append(start * int(np.prod(below, dtype=np.int64)) * aval.dtype.itemsize)
    return starts
