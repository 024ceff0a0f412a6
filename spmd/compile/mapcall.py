"""The fast path of a pmapped or shard_mapped call: a closure written for its arguments.

Like `fastcall` for jit: generated source matches the arguments leaf by leaf, fills the frames of
all local devices with addresses and runs the program. Pieces of sharded arrays are used in place; a
whole array whose pieces are contiguous is cut by adding to its address.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.compile import fastcall
from spmd.compile.cpu.allocator import Block, alloc
from spmd.compile.executable import Executable
from spmd.compile.fastcall import (
    ALIGNMENT,
    KEPT_ARENA_BYTES,
    SLAB_BYTES,
    UnmatchedError,
    Writer,
    is_number,
)
from spmd.compile.lower.schedule import Buffer
from spmd.compile.meshprogram import MeshProgram
from spmd.compile.multidevice import MeshExecutable, mesh_executable
from spmd.compile.signature import Split
from spmd.core.aval import ShapedArray, typeof
from spmd.core.tree import TreeDef
from spmd.sharding.array import Array
from spmd.sharding.fastmap import MISS, MappedCall
from spmd.sharding.named import NamedSharding


def specialise(call: MappedCall) -> Callable[..., Any] | None:
    """A closure `match(args, kwargs)` for calls like this one."""
    executable = mesh_executable(**call.params)
    if len(executable.piece_avals) != len(call.leaves):
        return None
    try:
        return _MapWriter(call, executable).function()
    except UnmatchedError:
        return None


def specialise_jitted(
    split: Split, executable: Executable | MeshProgram, out_tree: TreeDef
) -> Callable[..., Any] | None:
    """A closure for calls of a jitted function like this one, on one device or a mesh."""
    if isinstance(executable, Executable):
        return fastcall.specialise(split, executable, out_tree)
    if not executable.is_plain or split.static_kwargs:
        return None
    mesh = executable.executable
    return specialise(
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


class _Frames:
    """The words of one call in flight, for all devices: constants and small arenas stay."""

    __slots__ = ("address", "arenas", "words")

    def __init__(self, executable: MeshExecutable, keep_arenas: bool):
        native = executable.native
        # Numbers among the arguments are written behind the runtime's words.
        self.words = bytearray(8 * (native.words_needed + len(executable.piece_avals)))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.words))
        self.arenas = []
        count = len(executable.devices)
        bases = native.frame_words // count
        for d in range(count):
            consts = executable.const_pointers(d)
            first = 8 * ((d + 1) * bases - len(consts))
            struct.pack_into(f"{len(consts)}q", self.words, first, *consts)
            if keep_arenas:
                self.arenas.append(alloc(executable.arena))
                struct.pack_into("q", self.words, 8 * d * bases, self.arenas[d].address)


class _MapWriter(Writer):
    """Writes the function of one kind of call."""

    def __init__(self, call: MappedCall, executable: MeshExecutable):
        split = Split(list(call.leaves), call.tree, call.static, ())
        super().__init__(split, executable, call.out_tree)
        self.call = call
        self.count_devices = len(executable.devices)
        self.addresses: list[list[str]] = [[] for _ in executable.devices]
        self.pieces: list[list[str] | None] = []  # the names of each leaf's shards
        self.keeps_arenas = executable.arena <= KEPT_ARENA_BYTES

    def function(self) -> Callable[..., Any]:
        """The compiled function `match(args, kwargs)`."""
        self.match_call()
        alive = [f"{s}.ptr" for row in self.pieces if row for s in row]
        if alive:
            self.put(f"if not ({' and '.join(alive)}): return MISS")  # a deleted array
        self.put("frame = frames.pop() if frames else new_frame()")
        self.lines += self.numbers
        matching, self.lines = self.lines, []
        self.results()
        executable, keep = self.executable, self.keeps_arenas
        inputs, outputs = len(executable.piece_avals), len(self.outputs())
        self.names |= {
            "MISS": MISS,
            "StructError": struct.error,
            "Array": Array,
            "Block": Block,
            "alloc": alloc,
            "entry": executable.native.entry,
            "fail": executable.native.fail,
            "frames": [],
            "new_frame": lambda: _Frames(executable, keep),
            "pack": struct.Struct(f"{inputs + outputs}q").pack_into,
            "pack_word": struct.Struct("q").pack_into,
            "getrefcount": sys.getrefcount,
            "ndarray": np.ndarray,
        }
        return self.compiled(matching)

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
        base = self.fresh()
        if type(leaf) is Array:
            self.put(f"if {name}.aval is not {self.bind(aval)} or {name}.shards is not None")
            self.lines[-1] += f" or not {name}.ptr: return MISS"
            self.put(f"{base} = {name}.ptr")
        elif type(leaf) is np.ndarray and leaf.dtype == aval.dtype and leaf.flags.c_contiguous:
            self.match_ndarray(name, leaf)
            self.put(f"{base} = {self.pointers.pop()}")
        elif is_number(leaf, aval):
            self.match_number(name, leaf, aval)
            self.numbers.append(f"{base} = {self.pointers.pop()}")
        else:
            raise UnmatchedError
        for addresses, start in zip(self.addresses, starts, strict=True):
            addresses.append(f"{base} + {start}" if start else base)

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
        for addresses, shard in zip(self.addresses, shards, strict=True):
            addresses.append(f"{shard}.ptr")

    # ---- running ----

    def outputs(self) -> list[ShapedArray]:
        """The avals of one device's results that the program writes."""
        results = zip(
            self.executable.out_piece_avals, self.executable.schedule.results, strict=True
        )
        return [aval for aval, result in results if isinstance(result, Buffer)]

    def results(self) -> None:
        """Allocate, run, and build the results."""
        executable = self.executable
        owners = self.allocate_all()
        bases = executable.native.frame_words // self.count_devices
        if not self.keeps_arenas:
            for d in range(self.count_devices):
                self.put(f"arena{d} = alloc({executable.arena})")
                self.put(f"pack_word(frame.words, {8 * d * bases}, arena{d}.address)")
        for d, addresses in enumerate(self.addresses):
            words = ", ".join([*addresses, *(place for _, place in owners[d])])
            if words:
                self.put(f"pack(frame.words, {8 * (d * bases + 1)}, {words})")
        header = executable.native.header_address
        self.put(f"status = entry({header}, frame.address)")
        self.put("if status: fail(status, frame.address)")
        self.put("frames.append(frame)")
        outs = self._arrays(owners)
        for name, gone, leaf in zip(self.arrays, self.call.donated, self.split.leaves, strict=True):
            if gone and type(leaf) is Array:
                self.put(f"{name}.delete()")
        self.put("return " + self.tree(self.out_tree, iter(outs)))

    def _arrays(self, owners: list[list[tuple[str, str]]]) -> list[str]:
        """Write the making of all results; gives their names."""
        executable = self.executable
        places = [self.bind(p) for p in executable.places]
        made = 0
        outs = []
        results = zip(executable.out_piece_avals, executable.schedule.results, strict=True)
        for (aval, result), (whole, sharding) in zip(results, self.call.outs, strict=True):
            row = []
            for d, place in enumerate(places):
                if isinstance(result, Buffer):
                    owner, address = owners[d][made]
                else:
                    shards = self.pieces[result]
                    if shards is None:
                        raise UnmatchedError
                    owner, address = f"{shards[d]}.owner", f"{shards[d]}.ptr"
                row.append(self.array(aval, address, owner, place))
            made += isinstance(result, Buffer)
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
        rounded = [-(-n // ALIGNMENT) * ALIGNMENT for n in sizes]
        total = sum(rounded)
        devices = range(self.count_devices)
        if sizes and total * self.count_devices <= SLAB_BYTES:
            self.put(f"slab = alloc({total * self.count_devices})")
            self.put("base = slab.address")
            starts = [sum(rounded[:k]) for k in range(len(sizes))]
            return [[("slab", f"base + {d * total + start}") for start in starts] for d in devices]
        found: list[list[tuple[str, str]]] = []
        for d in devices:
            row = []
            for k, nbytes in enumerate(sizes):
                owner = f"block{d}_{k}"
                self.put(f"{owner} = alloc({nbytes})")
                row.append((owner, f"{owner}.address"))
            found.append(row)
        return found


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
