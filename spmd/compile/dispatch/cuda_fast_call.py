"""Fast calls of programs on GPUs: closures that match the arguments and enqueue the program.

The one idea: what does not change between calls is bound when the closure is written: handles, the
frames' layout, records and arenas that earlier calls have returned. A call allocates its results,
fills the frames and hands them to the executor, which enqueues the launches; nothing waits on the
host. Numbers and NumPy arrays become one copy, beside the calls before it. Arrays must be on the
device already: others take the general path, which moves them there. So do calls of programs in
which the host has a part (callbacks, predicates, exchanges with other processes).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import Any

import numpy as np

from spmd.base.config import config
from spmd.base.device import default_device
from spmd.compile.dispatch.argument_matcher import UnmatchedError, has_buffer, is_number, packed
from spmd.compile.executable import cuda_backend, cuda_calls, cuda_moments
from spmd.compile.executable.cuda_backend import ResultMemory
from spmd.compile.executable.cuda_graphs import graphs_of, without_graphs
from spmd.compile.executable.cuda_uploads import Uploads
from spmd.core.aval import ShapedArray
from spmd.sharding.array import Array
from spmd.sharding.named import SingleDeviceSharding
from spmd.transport.flight_recorder import FLIGHT

# Of a class that stands before a writer: what it calls is the writer's.
_Base: Any = object
_NO_KEYWORDS: dict[str, Any] = {}
# How numbers are packed, by the names of their dtypes.
_FORMATS = {"float32": "f", "float64": "d", "int32": "i", "int64": "q", "bool": "?"}
_ALIGNMENT = 64


@cache
def on_gpus(writer: type[Any]) -> type[Any]:
    """The class that writes, for GPUs, the closures of calls that a writer writes for CPUs."""
    return type(f"{writer.__name__}OnGpus", (CudaCalls, writer), {})


class CudaCalls(_Base):
    """The part of a writer that is other for GPUs than for CPUs."""

    def function(self) -> Callable[..., Any]:
        """The function `match(args, kwargs)`."""
        native, call = self.executable.native, cuda_calls.Call(self.executable)
        if not call.is_enqueued:  # the host has a part in it
            if config.cuda_graphs:
                without_graphs(native, "the host has a part in it")
            raise UnmatchedError
        self.names |= call.names | {"enqueue": native.entry, "kept": self.executable}
        matching = self.matched()
        self.match_distinct()
        self.match_place()
        inputs = [self.memories(d, number) for d, number in enumerate(call.numbers)]
        starts = self.uploaded(call.numbers[0])
        outputs = [self.blocks(d, number, inputs[d]) for d, number in enumerate(call.numbers)]
        arenas = [self.checked_out(pool) for pool in call.arenas]
        records = self.checked_out(call.records)
        frames: list[str] = []
        for d, arena in enumerate(arenas):
            given = [f"{m}.address + {at}" for m, at in zip(inputs[d], starts, strict=True)]
            written = [f"{x}.address" for x in outputs[d]]
            consts = [str(address) for address in self.executable.const_pointers[d]]
            frames += [f"{arena}.address", *given, *written, *consts]
            frames += [f"{records}.addresses[{d}]", f"{records}.stagings[{d}]"]
        frames += ["0"] * (native.words_needed - native.frame_words)
        self.names["pack"] = struct.Struct(f"{len(frames)}q").pack
        self.put(f"frames = pack({', '.join(frames)})")
        for note in call.notes:
            self.put(f"{self.bind(note)}({self.bind(native)})")
        if FLIGHT.keeps_programs:
            self.names |= {"begin": FLIGHT.begin, "completed": FLIGHT.completed}
            self.put(f"span = begin({native.label}, 0)")
        graphs = graphs_of(native, call)
        if native.bodies:
            self.put(f"{records}.bodies.use(frames)")
        if graphs is None:
            self.put(f"status = enqueue({native.header_address}, frames)")
        else:
            self.names |= {"known": graphs.known.get, "enqueue": graphs.enqueue}
            self.names["replay"] = partial(self.names["gpu"].replay, *call.numbers)
            self.put("graph, status = known(frames), 0")
            self.put(f"if graph is None: status = enqueue(frames, {records})")
            self.put("else: replay(graph.handle)")
        if FLIGHT.keeps_programs:
            self.put("completed(span)")
        statuses = [f"{records}.words[{k * native.record_words}]" for k in range(len(arenas))]
        self.put(f"if {' or '.join(['status', *statuses])}: fail(status, frames, {records})")
        if self.uploads:
            self.put("give_back(upload)")
        for d, number in enumerate(call.numbers):
            self.note(d, number, outputs[d])
        for name, pool in zip((*arenas, records), (*call.arenas, call.records), strict=True):
            self.put(f"{self.bind(pool.free.append)}({name})")
        outs = self.wholes(self.shards_made(inputs, outputs))
        self.give_up()
        self.put("return " + self.tree(self.out_tree, iter(outs)))
        match = self.compiled(matching)
        return (lambda *args: match(args, _NO_KEYWORDS)) if self.direct else match

    # ---- matching ----

    def match_leaf(self, name: str) -> None:
        """Match the next leaf, which must have shards where there are several devices."""
        leaf = self.split.leaves[self.leaf]
        is_sharded = type(leaf) is Array and leaf.shards is not None
        if is_sharded != self.makes_shards:
            raise UnmatchedError
        super().match_leaf(name)

    @property
    def makes_shards(self) -> bool:
        """Whether results are arrays of shards."""
        return not self.makes_results

    def match_place(self) -> None:
        """Write that an operand is committed, where the program's device is not the default one."""
        if self.makes_shards or self.executable.devices[0] in (None, default_device()):
            return
        self.put(f"if ({self.common_home()}) is None: return MISS")

    def match_value(self, name: str, leaf: Any, aval: ShapedArray, word: int) -> None:
        """Match an array that is on the program's device, committed to it or not."""
        if type(leaf) is not Array:
            self.match_value_of_host(name, leaf, aval)
            return
        (device,) = self.executable.devices
        home, given = self.bind(SingleDeviceSharding(device or default_device())), self.fresh()
        self.put(f"if {name}.aval is not {self.bind(aval)}: return MISS")
        self.put(f"{given} = {name}._sharding")
        self.put(f"if {given} is not None and {given} is not {home} and {given} != {home}:")
        self.lines[-1] += " return MISS"

    def match_value_of_host(self, name: str, leaf: Any, aval: ShapedArray) -> None:
        """Match a number or a NumPy array, whose bytes are copied with those of the others."""
        if is_number(leaf, aval):
            self.put(f"if type({name}) is not {self.bind(type(leaf))}: return MISS")
            self.uploads[name] = aval, _FORMATS[aval.dtype.name]
        elif type(leaf) is np.ndarray and leaf.dtype == aval.dtype and has_buffer(leaf):
            dtype, shape = self.bind(leaf.dtype), self.bind(leaf.shape)
            self.put(f"if type({name}) is not ndarray or {name}.shape != {shape} or {name}.dtype")
            self.lines[-1] += f" is not {dtype} and {name}.dtype != {dtype} or not"
            self.lines[-1] += f" {name}.flags.c_contiguous: return MISS"
            self.uploads[name] = aval, ""
        else:
            raise UnmatchedError

    @cached_property
    def uploads(self) -> dict[str, tuple[ShapedArray, str]]:
        """By the name of a value of the host, its type, and for a number how it is packed."""
        return {}

    def uploaded(self, number: int) -> list[int]:
        """Write the one copy of all values of the host; where each operand's memory begins."""
        sizes = [max(aval.nbytes, 1) for aval, _ in self.uploads.values()]
        total, starts = packed(sizes, _ALIGNMENT)
        if not self.uploads:
            return [0] * len(self.arrays)
        if total > cuda_backend.MOST_PINNED:
            raise UnmatchedError
        uploads = Uploads(self.names["gpu"], number, total)
        self.names |= {"begin_upload": uploads.begin, "send": uploads.send}
        self.names |= {"give_back": uploads.give_back, "memoryview": memoryview}
        self.put("upload = begin_upload()")
        self.put("if upload is None: return MISS")
        self.put("view = upload.view")
        self.put("try:")
        for (name, (aval, format)), start in zip(self.uploads.items(), starts, strict=True):
            if format:
                pack = self.bind(struct.Struct(format).pack_into)
                self.put(f"    {pack}(view, {start}, {name})")
            elif aval.nbytes:
                end = start + aval.nbytes
                self.put(f'    view[{start}:{end}] = memoryview({name}).cast("B")')
        self.names["unfit"] = (struct.error, TypeError, OverflowError)
        self.put("except unfit:")
        self.put("    give_back(upload)")
        self.put("    return MISS")
        self.put("send(upload)")
        places = dict(zip(self.uploads, starts, strict=True))
        return [places.get(name, 0) for name in self.arrays]

    def memories(self, device: int, number: int) -> list[str]:
        """The names of the memory of each operand on a device."""
        found = []
        for leaf, name in enumerate(self.arrays):
            if name in self.uploads:
                found.append("upload")
                continue
            held = self.held_by(leaf, device)
            found.append(memory := self.fresh())
            self.put(f"{memory} = {held}.owner")
            self.put(f"if type({memory}) is not CudaMemory or {memory}.device != {number} or")
            self.lines[-1] += f" {memory}.driver is not gpu: return MISS"
        return found

    # ---- memory ----

    def blocks(self, device: int, number: int, inputs: Sequence[str]) -> list[str]:
        """The names of the memory of each result on a device: a donated operand's, or new."""
        found = []
        for k, aval in enumerate(self.executable.outputs):
            found.append(block := self.fresh())
            taken = self.takes.get(k)
            if taken is None or self.held_by(taken, device) is None:
                self.allocate(block, number, aval.nbytes)
                continue
            # References to it are the array's, the variable's, and getrefcount's own; another
            # operand over the same memory has a variable too.
            memory = inputs[taken]
            self.put(f"if {memory}.lender is None and getrefcount({memory}) == 3:")
            self.put(f"    {block} = {memory}; {block}.fetched = None")
            self.put("else:")
            self.allocate(block, number, aval.nbytes, "    ")
        return found

    def note(self, device: int, number: int, blocks: Sequence[str]) -> None:
        """Write that an event happens when the results of a device are there."""
        moments = cuda_moments.computed(self.names["gpu"], number)
        record = partial(moments.gpu.record_event, number)
        self.names |= {f"moments{device}": moments, f"next{device}": moments.next}
        self.put(f"moments{device}.newest = ready = next{device}()")
        self.put(f"{self.bind(record)}(ready)")
        for block in blocks:
            self.put(f"{block}.ready = ready")

    def allocate(self, name: str, number: int, nbytes: int, indent: str = "") -> None:
        """Write that a name is memory, of an earlier call if there is some, else new."""
        home = self.bind(ResultMemory(self.names["gpu"], number))
        given = f"{name} = CudaMemory(gpu, {number}, {nbytes}"
        self.put(f"{indent}try: {given}, {home}.pop(), None, {home})")
        self.put(f"{indent}except IndexError:")
        self.make(f"{given}, 0, None, {home})", indent + "    ")

    def make(self, made: str, indent: str = "") -> None:
        """Write an allocation; the general path tells of one that fails."""
        for line in ("try:", f"    {made}", "except MemoryError:", "    return MISS"):
            self.put(indent + line)

    def checked_out(self, pool: cuda_calls.Pool) -> str:
        """The name of what a call has for itself, and gives back when it is enqueued."""
        name, free = self.fresh(), self.bind(pool.free)
        make = f"{name} = {self.bind(pool.make)}()"
        self.put(f"if {free}: {name} = {free}.pop()")
        self.put("else:")
        self.make(make, "    ")
        if pool.least:
            self.put(f"if {name}.nbytes < {pool.least}:")
            self.make(make, "    ")
        return name

    # ---- results ----

    def shards_made(
        self, inputs: Sequence[Sequence[str]], outputs: Sequence[Sequence[str]]
    ) -> list[list[str]]:
        """The names of each result on each device, over the memory that is written."""
        executable, made, k = self.executable, [], 0
        for result, aval in zip(executable.results, executable.out_avals, strict=True):
            rows = outputs if result is None else inputs
            at = k if result is None else result
            if result is not None and self.arrays[result] in self.uploads:
                raise UnmatchedError
            k += result is None
            given = aval if aval.explicit is None else aval.update(sharding=None)
            pairs = zip(rows, executable.places, strict=True)
            made.append([self.shard(row[at], given, home) for row, home in pairs])
        return made

    def shard(self, memory: str, aval: ShapedArray, home: SingleDeviceSharding | None) -> str:
        """The name of a new array over memory."""
        name = self.fresh()
        place = self.bind(home) if home is not None else self.common_home()
        self.put(f"{name} = Array(); {name}.aval = {self.bind(aval)}; {name}.ptr = 0")
        self.put(f"{name}.owner = {memory}; {name}.shards = {name}._numpy = None")
        self.put(f"{name}._sharding = {place}")
        return name

    def common_home(self) -> str:
        """The text of the device that an operand is committed to; None if none is."""
        return " or ".join(f"{x}._sharding" for x in self.whole_arrays()) or "None"
