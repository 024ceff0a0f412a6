"""Programs over a mesh: the per-device jaxpr of a `shard_map` as one native program in lockstep.

Each local device has a frame of its own (arena, inputs, outputs, constants) over the same steps.
Pieces of sharded arguments are used where they are; what is not sharded yet is cut.
"""

from __future__ import annotations

import itertools
import struct
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base.config import config
from spmd.base.device import process_index
from spmd.base.errors import ShardingError
from spmd.base.source import current_source
from spmd.collectives.async_collectives import overlaps
from spmd.collectives.order_check import Schedule, agree, axis_text, order_of
from spmd.compile.executable.async_operands import (
    Operands,
    belongs_in_queue,
    deleted,
    pending,
    result_blocks,
    same_memory,
)
from spmd.compile.executable.executable import constant, pointer, take
from spmd.compile.executable.mesh_nan_check import check_mesh_nans
from spmd.compile.fingerprint import fingerprint
from spmd.compile.lazy import build, pipeline, warm_up
from spmd.compile.lower.mesh_layout import PerDevice, Topology
from spmd.compile.native.llvm.compiler import available_cores
from spmd.compile.native.program.encoded import StepsById
from spmd.compile.native.program.stored import (
    StoredProgram,
    among_given,
    load_program,
    program_key,
    save_program,
)
from spmd.compile.native.runtime.allocator import alloc
from spmd.compile.native.runtime.async_queue import QUEUE, Job
from spmd.compile.native.runtime.run import NativeProgram
from spmd.core.aval import ShapedArray
from spmd.core.ir import ClosedJaxpr
from spmd.core.trace import to_numpy
from spmd.sharding.array import Array, from_memory, from_shards
from spmd.sharding.named import NamedSharding, SingleDeviceSharding
from spmd.sharding.shard_map_rules import whole_aval
from spmd.sharding.spec import Mesh, PartitionSpec
from spmd.transport import world
from spmd.transport.flight_recorder import COMPILING, FLIGHT

if TYPE_CHECKING:
    from spmd.compile.cpu.assemble.compile_callees import CalleeCompiler
    from spmd.compile.lower.steps import Schedule as Steps
    from spmd.compile.passes.rewriter import Pass
    from spmd.compile.schedule.memory_plan import Plan

_known: weakref.WeakKeyDictionary[ClosedJaxpr, dict[Any, MeshExecutable]]
_known = weakref.WeakKeyDictionary()


# No output takes the place of an input.
NOTHING: Mapping[int, int] = {}


def mesh_executable(
    *, jaxpr: ClosedJaxpr, mesh: Mesh, in_specs: Any, out_specs: Any, kind: str, name: str
) -> MeshExecutable:
    """The executable of a `shard_map` equation, remembered with its jaxpr."""
    entries = _known.setdefault(jaxpr, {})
    key = (mesh, in_specs, out_specs, config.overlap)
    if key not in entries:
        with FLIGHT.phase(COMPILING, "compile", name):
            entries[key] = MeshExecutable(jaxpr, mesh, in_specs, out_specs, name)
    return entries[key]


def known_executables() -> list[MeshExecutable]:
    """All programs over a mesh that are in use."""
    return [made for entries in _known.values() for made in entries.values()]


def evaluate_map(
    params: dict[str, Any],
    operands: Sequence[Any],
    takes: Mapping[int, int] = NOTHING,
    executable: MeshExecutable | None = None,
) -> list[Array]:
    """Run a `shard_map` equation on global arrays, looking for NaNs where that is asked for."""
    executable = executable or mesh_executable(**params)
    if not (config.debug_nans or config.debug_infs):
        return executable(operands, takes)
    outs = executable(operands)  # nothing is written over an operand: it may have to run again
    kind = "pmap" if params["kind"] == "pmap" else "shard_map"
    executable.check_nans(f"{kind}({params['name']})", params["jaxpr"], operands, outs)
    return outs


class MeshExecutable:
    """Runs a per-device program on all local devices of a mesh."""

    def __init__(
        self,
        closed: ClosedJaxpr,
        mesh: Mesh,
        in_specs: Sequence[PartitionSpec],
        out_specs: Sequence[PartitionSpec],
        name: str = "<function>",
    ):
        self.mesh = mesh
        devices = mesh.flat_devices()
        mine = process_index()
        processes = tuple(d.process_index for d in devices)
        self.topology = Topology(mesh.shape, processes, mine, tuple(devices))
        if self.topology.is_spread:
            self.topology = replace(self.topology, overlaps=overlaps())
        self.devices = [devices[k] for k in self.topology.local]
        self.piece_avals = tuple(closed.in_avals)
        self.out_piece_avals = tuple(closed.out_avals)
        self.in_shardings = [NamedSharding(mesh, s) for s in in_specs]
        self.out_shardings = [NamedSharding(mesh, s) for s in out_specs]
        self.out_avals = [
            whole_aval(a, s, mesh) for a, s in zip(closed.out_avals, out_specs, strict=True)
        ]
        self.places = [SingleDeviceSharding(d) for d in self.devices]
        # What the ranks must agree about before the first run; None when that is done, or needless.
        self.undecided: Schedule | None = None
        # Executables are remembered with their jaxprs, weakly: they must not keep them alive.
        self._closed = weakref.ref(closed)
        self.exchanges: list[str] = []  # what became of collectives, in words
        if self.topology.is_spread:
            self.schedule = self._lowered(self._passes_across(closed, name))
            self._summarise(name)
            self._compile(closed, None)
        else:
            key = self._program_key(closed)
            stored = load_program(key) if key else None
            if stored is None:
                self._compile(closed, key)
            else:
                self._load(stored, closed)
        self.native.name = closed.jaxpr.name
        made = zip(self.out_piece_avals, self.results, strict=True)
        self.outputs = [aval for aval, result in made if result is None]
        self._report = bytes(8 * (1 + len(self.devices)))
        self._pack = struct.Struct(f"{self.native.frame_words}q").pack

    @property
    def passes(self) -> Sequence[Pass]:
        """What its jaxpr goes through."""
        if not self.topology.is_spread:
            return pipeline.PASSES
        return pipeline.PASSES_OVERLAPPED if self.topology.overlaps else pipeline.PASSES_ACROSS

    def _program_key(self, closed: ClosedJaxpr) -> str | None:
        """The name under which the program is stored; a nameless axis goes by its number."""
        axes = enumerate(self.topology.sizes.items())
        sizes = tuple((axis if type(axis) is str else k, size) for k, (axis, size) in axes)
        return program_key(partial(fingerprint, closed), (), (sizes, self.topology.local))

    def _passes_across(self, closed: ClosedJaxpr, name: str) -> ClosedJaxpr:
        """The optimised jaxpr; its schedule and origins are noted."""
        report = pipeline.Report()
        names, sizes = closed.jaxpr.arg_names, self.topology.sizes
        final = pipeline.run_passes(closed, report, self.passes)
        simple = report.jaxprs[pipeline.simplify.__name__]
        traced = ClosedJaxpr(simple.jaxpr.replace(arg_names=names), simple.consts)
        extent = ", ".join(f"{axis_text(axis)}: {size}" for axis, size in sizes.items())
        ranks = ", ".join(map(str, self.topology.processes))
        mesh = f"axes {extent} over devices of ranks {ranks}"
        if self.topology.overlaps:
            mesh += ", with exchanges in flight (SPMD_OVERLAP)"
        schedule, origins = order_of(traced, final, name, current_source().short, mesh)
        if schedule.exchanges:
            self.undecided = schedule
        self._traced = [entry.kind for entry in schedule.entries]
        self.topology = replace(self.topology, origins=origins)
        return final

    def _summarise(self, name: str) -> None:
        """Note, and say under `log_compiles`, what became of the collectives."""
        self.exchanges = build.summary(self._traced, self.schedule.steps)
        if config.log_compiles or "1" in config.debug:
            for text in self.exchanges:
                print(f"spmd: {name}: {text}", file=sys.stderr)

    def agree(self) -> None:
        """Compare this program with the other ranks', unless that was done; raise if they differ.

        At the first run, not at compilation: one rank may look at a program that none runs.
        """
        if self.undecided is not None:
            agree(world.world(), self.undecided)
            self.undecided = None

    def _lowered(self, closed: ClosedJaxpr, callees: CalleeCompiler | None = None) -> Steps:
        steps = build.make_schedule(closed, self.topology, callees)
        self.topology = replace(self.topology, origins={})  # they hold the whole jaxpr
        return steps

    @cached_property
    def schedule(self) -> Steps:
        """The steps of the program over buffers."""
        closed = self._closed()
        assert closed is not None, "the jaxpr of this program is gone"
        return self._lowered(pipeline.run_passes(closed))

    @cached_property
    def plan(self) -> Plan:
        """Where the buffers lie."""
        # Several devices are the parallel work of such a program.
        threads = available_cores() if len(self.devices) == 1 else 1
        # Which arguments will be donated is not known yet: any may be.
        return build.plan_program(self.schedule, [True] * len(self.piece_avals), threads)

    def _compile(self, closed: ClosedJaxpr, key: str | None) -> None:
        warm_up.warm_up_runtime()
        count = len(self.devices)
        with build.CalleeCompiler() as callees:
            if not self.topology.is_spread:  # else it is there
                self.schedule = self._lowered(pipeline.run_passes(closed), callees)
            schedule = self.schedule
            self.native = build.assemble(schedule, self.plan, count, callees=callees).native
        self.arena = self.plan.arena
        self._consts = [_on_each(v, count) for _, v in schedule.consts]
        # For each result: the input that it equals, or None.
        self.results = tuple(r if isinstance(r, int) else None for r in schedule.results)
        if key:
            consts = [const for _, const in schedule.consts]
            kept = among_given(closed, consts, self._consts)
            save_program(key, self.native.encoded, self.arena, self.results, {}, kept, closed)

    def _load(self, stored: StoredProgram, closed: ClosedJaxpr) -> None:
        self.arena, self.results = stored.arena, stored.results
        self.native = NativeProgram(stored.encoded(closed), steps_again=self._steps_again)
        pairs = zip(closed.consts, closed.jaxpr.constvars, strict=True)
        given = [_on_each((value, v.aval), len(self.devices)) for value, v in pairs]
        self._consts = stored.constants(given)

    def _steps_again(self) -> StepsById:
        """The steps of a loaded program, which is compiled for that."""
        native = build.assemble(self.schedule, self.plan, len(self.devices)).native
        return native.encoded.steps

    def takes(self, donated: Sequence[bool]) -> dict[int, int]:
        """For outputs that may be written over a donated input: which one."""
        return build.takes(self.schedule, self.plan, donated) if any(donated) else {}

    def const_pointers(self, device: int) -> list[int]:
        """The addresses of one local device's constants."""
        return [pointer(c[device]) for c in self._consts]

    # -- calling --

    def __call__(self, operands: Sequence[Any], takes: Mapping[int, int] = NOTHING) -> list[Array]:
        """Run on global arrays; results are global arrays of this process's pieces.

        Outputs of the program may be written over the operands that they take the place of.
        """
        if belongs_in_queue(self.native, operands):
            return self.call_queued(operands, takes, self.out_shardings)
        outs = self.run(self._all_pieces(operands), takes)
        return [
            from_shards(aval, sharding, shards)
            for aval, sharding, shards in zip(self.out_avals, self.out_shardings, outs, strict=True)
        ]

    def call_queued(
        self,
        operands: Sequence[Any],
        takes: Mapping[int, int],
        out_shardings: Sequence[NamedSharding],
    ) -> list[Array]:
        """The same beside Python, after what is in the queue; the results are pending."""
        changing = [type(x) is not Array for x in operands]
        pieces = self._all_pieces(operands)
        try:
            outs = self.enqueue(pieces, takes, changing)
        except MemoryError:  # as `Executable.enqueue`
            QUEUE.drain()
            outs = self.run(pieces, takes)
        return [
            from_shards(aval, sharding, shards)
            for aval, sharding, shards in zip(self.out_avals, out_shardings, outs, strict=True)
        ]

    def _all_pieces(self, operands: Sequence[Any]) -> list[Sequence[Any]]:
        return [
            self._pieces(x, s, a)
            for x, s, a in zip(operands, self.in_shardings, self.piece_avals, strict=True)
        ]

    def check_nans(self, what: str, closed: ClosedJaxpr, operands: Any, outs: Any) -> None:
        """Raise on all ranks if a device of any rank made a NaN; `closed` is the program."""
        pieces = self._all_pieces(operands)
        check_mesh_nans(what, closed, self.mesh, pieces, [x.shards or (x,) for x in outs])

    def run(
        self, pieces: Sequence[Sequence[Any]], takes: Mapping[int, int] = NOTHING
    ) -> list[list[Array]]:
        """Run on pieces: for each operand one for each local device; results likewise."""
        for x in itertools.chain.from_iterable(pieces):
            if type(x) is Array:
                x.settle()
        self.agree()
        count = len(self.devices)
        blocks: list[list[Any]] = []
        arenas = [alloc(self.arena) for _ in range(count)]
        words: list[int] = []
        for d in range(count):
            mine = []
            given = [x[d] for x in pieces]
            for k, out in enumerate(self.outputs):
                block = take(takes[k], given) if k in takes else None
                mine.append(alloc(out.nbytes) if block is None else block)
            blocks.append(mine)
            words.append(arenas[d].address)
            words += map(pointer, given)
            words += [b.address for b in mine]
            words += [pointer(c[d]) for c in self._consts]
        frames = bytearray(self._pack(*words) + self._report)
        self.native.run_address(np.frombuffer(frames, np.int64).__array_interface__["data"][0])
        return self._results(pieces, [self._arrays(mine, None) for mine in blocks])

    def enqueue(
        self,
        pieces: Sequence[Sequence[Any]],
        takes: Mapping[int, int],
        may_change: Sequence[bool],
    ) -> list[list[Array]]:
        """Run on pieces beside Python, after what is in the queue; the results are pending.

        `may_change`: of which operands the pieces lie in memory that the caller may write to.
        """
        self.agree()
        count = len(self.devices)
        nbytes = count * sum(aval.nbytes for aval in self.outputs)
        QUEUE.make_room(nbytes)
        with QUEUE.lock:
            of_devices = ([x[d] for x in pieces] for d in range(count))
            blocks = [result_blocks(self.outputs, takes, given) for given in of_devices]
        operands = Operands()
        arenas = [QUEUE.arena(d, self.arena) for d in range(count)]
        words: list[int] = []
        for d in range(count):
            words.append(arenas[d].address)
            for x, aval, changes in zip(pieces, self.piece_avals, may_change, strict=True):
                words.append(operands.add(x[d], aval, changes))
            words += [b.address for b in blocks[d]]
            words += self.const_pointers(d)
        kept = {id(x): x for x in (self, *arenas, *itertools.chain.from_iterable(blocks))}
        kept |= operands.kept
        job = QUEUE.submit(self.native, words, kept, operands.causes, nbytes, self._closed())
        return self._results(pieces, [self._arrays(mine, job) for mine in blocks])

    def _arrays(self, blocks: Sequence[Any], job: Job | None) -> list[Array]:
        """The arrays in the blocks of one device, which are there if no job makes them."""
        pairs = zip(blocks, self.outputs, strict=True)
        if job is None:
            return [from_memory(block.address, block, aval) for block, aval in pairs]
        return [pending(job, block, aval) for block, aval in pairs]

    def _results(self, pieces: Sequence[Sequence[Any]], arrays: list[list[Array]]) -> Any:
        outs = []
        made = 0
        for aval, result in zip(self.out_piece_avals, self.results, strict=True):
            row = []
            for d, place in enumerate(self.places):
                if result is None:
                    array = arrays[d][made]
                    array._sharding = place
                    row.append(array)
                else:
                    row.append(_forward(pieces[result][d], aval, place))
            made += result is None
            outs.append(row)
        return outs

    def _pieces(self, x: Any, sharding: NamedSharding, aval: ShapedArray) -> Sequence[Any]:
        """What each local device holds of an operand, in memory order."""
        if type(x) is Array and x.shards is not None and x.sharding.layout == sharding.layout:
            for shard in x.shards:
                if shard.owner is None:
                    raise deleted(x)
            return x.shards
        if type(x) is Array and x.shards is None and x.owner is None:
            raise deleted(x)
        value = to_numpy(x)
        indices = sharding.devices_indices_map(value.shape)
        if len(self.topology.sizes) and self.topology.is_spread and not _whole_here(x):
            raise ShardingError(
                f"an argument with sharding {x.sharding} would have to move between processes to "
                f"become {sharding}"
            )
        return [np.ascontiguousarray(value[indices[d]]).reshape(aval.shape) for d in self.devices]


def _whole_here(x: Any) -> bool:
    return type(x) is not Array or x.is_fully_addressable or x.is_fully_replicated


def _on_each(const: Any, count: int) -> list[Any]:
    value, aval = const
    if isinstance(value, PerDevice):
        return [constant(v, aval) for v in value.values]
    return [constant(value, aval)] * count


def _forward(x: Any, aval: ShapedArray, place: SingleDeviceSharding) -> Array:
    """A result that is an operand's piece."""
    if type(x) is Array:
        return same_memory(x, aval, place)
    block = alloc(aval.nbytes)
    block.view(aval.shape, aval.dtype)[...] = x
    return from_memory(block.address, block, aval, place)
