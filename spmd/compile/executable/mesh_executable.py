"""Programs over a mesh: the per-device jaxpr of a `shard_map` as one native program in lockstep.

Each local device has a frame of its own (arena, inputs, outputs, constants) over the same steps.
Pieces of sharded arguments are used where they are; other arguments are cut.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base.config import config
from spmd.base.device import Device, process_index
from spmd.base.digest import blake2b
from spmd.base.errors import ShardingError
from spmd.base.record import replace
from spmd.base.source import current_source
from spmd.collectives.async_collectives import overlaps
from spmd.collectives.order_check import Schedule, agree, axis_text, needed, order_of
from spmd.compile.executable.async_operands import belongs_in_queue, deleted
from spmd.compile.executable.backend import constant
from spmd.compile.executable.executable import Executable, backend_of
from spmd.compile.executable.mesh_nan_check import Whole, check_mesh_nans
from spmd.compile.executable.nan_check import held, look
from spmd.compile.fingerprint import fingerprint
from spmd.compile.lazy import build, pipeline, redistribute, replicas
from spmd.compile.lower.mesh_layout import PerDevice, Topology
from spmd.compile.native.program.stored import program_key
from spmd.core.aval import ShapedArray
from spmd.core.ir import ClosedJaxpr
from spmd.core.trace import to_numpy
from spmd.sharding.array import Array, filled_up, from_shards
from spmd.sharding.named import NamedSharding, SingleDeviceSharding
from spmd.sharding.shard_map_rules import whole_aval
from spmd.sharding.spec import Mesh, PartitionSpec
from spmd.transport import world
from spmd.transport.flight_recorder import COMPILING, FLIGHT

if TYPE_CHECKING:
    from spmd.compile.lower.steps import Schedule as Steps
    from spmd.core.rewriting.equations import Pass

programs_by_map: weakref.WeakKeyDictionary[ClosedJaxpr, dict[Any, MeshExecutable]]
programs_by_map = weakref.WeakKeyDictionary()


# No output takes the place of an input.
NOTHING: Mapping[int, int] = {}


# For each operand, whether it has parts of unequal size; for each result that has, its whole.
Uneven = tuple[tuple[bool, ...], tuple[ShapedArray | None, ...]]
# The user's mesh, where a program is over a finer one, and the specs over it of operands, results.
Outer = tuple[Mesh, tuple[PartitionSpec, ...], tuple[PartitionSpec, ...]]


def mesh_executable(
    *,
    jaxpr: ClosedJaxpr,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    kind: str,
    name: str,
    uneven: Uneven | None = None,
    outer: Outer | None = None,
    memory_kinds: tuple[str | None, ...] = (),
) -> MeshExecutable:
    """The executable of a `shard_map` equation, remembered with its jaxpr."""
    entries = programs_by_map.setdefault(jaxpr, {})
    key = (mesh, in_specs, out_specs, kind, config.overlap, uneven, outer, memory_kinds)
    if key not in entries:
        with FLIGHT.phase(COMPILING, "compile", name):
            entries[key] = MeshExecutable(
                jaxpr, mesh, in_specs, out_specs, name, kind, uneven, outer, memory_kinds
            )
    return entries[key]


# Told of each map that is evaluated: its executable and parameters. There are closures for no call
# while there are listeners.
listeners: list[Callable[[MeshExecutable, dict[str, Any]], None]] = []


def known_executables() -> list[MeshExecutable]:
    """All programs over a mesh that are in use."""
    return [made for entries in programs_by_map.values() for made in entries.values()]


def evaluate_map(
    params: dict[str, Any],
    operands: Sequence[Any],
    takes: Mapping[int, int] = NOTHING,
    executable: MeshExecutable | None = None,
    whole: Whole | None = None,
) -> list[Array]:
    """Run a `shard_map` equation on global arrays, looking for NaNs where that is asked for.

    `whole` is the program of which partitioning made the equation.
    """
    executable = executable or mesh_executable(**params)
    for listener in listeners:
        listener(executable, params)
    if not (config.debug_nans or config.debug_infs):
        return executable(operands, takes)
    operands = held(operands)
    if whole is not None:
        whole = replace(whole, arguments=held(whole.arguments))
    outs = executable(operands)  # nothing is written over an operand: it may have to run again
    kind = "jit" if whole is not None else "pmap" if params["kind"] == "pmap" else "shard_map"
    name, closed = f"{kind}({params['name']})", params["jaxpr"]
    if executable.topology.is_spread:  # all ranks look now: they may not all read
        executable.check_nans(name, closed, operands, outs, whole)
    else:
        look(outs, lambda made: executable.check_nans(name, closed, operands, made, whole))
    return outs


class MeshExecutable(Executable):
    """Runs a per-device program on all local devices of a mesh."""

    knows_donated = False
    devices: Sequence[Device]

    def __init__(
        self,
        closed: ClosedJaxpr,
        mesh: Mesh,
        in_specs: Sequence[PartitionSpec],
        out_specs: Sequence[PartitionSpec],
        name: str = "<function>",
        kind: str = "manual",
        uneven: Uneven | None = None,
        outer: Outer | None = None,
        memory_kinds: Sequence[str | None] = (),
    ):
        self.mesh, self.name, self.arg_names = mesh, name, closed.jaxpr.arg_names
        # The mesh of arguments and results.
        self.outer_mesh, given, made = outer or (mesh, in_specs, out_specs)
        # The axes along which each argument differs; None if its spec does not say that for sure.
        self.varies = [s.varying_axes() for s in in_specs] if kind == "manual" else None
        devices = mesh.flat_devices()
        mine = process_index()
        processes = tuple(d.process_index for d in devices)
        self.topology = Topology(mesh.shape, processes, mine, tuple(devices))
        self.devices = [devices[k] for k in self.topology.local]
        self.count, self.backend = len(self.devices), backend_of(devices[0])
        if self.topology.is_spread:
            direct = self.backend.direct
            self.topology = replace(self.topology, overlaps=overlaps(), direct=direct)
        # One object for equal specs, which is found to be whole or not once.
        known = {spec: NamedSharding(self.outer_mesh, spec) for spec in (*given, *made)}
        self.in_shardings = [known[s] for s in given]
        self.out_shardings = [known[s] for s in made]
        self.whole_avals = [
            whole_aval(a, s, mesh) for a, s in zip(closed.out_avals, out_specs, strict=True)
        ]
        if uneven is not None:
            self._note_uneven(*uneven)
        for k, memory_kind in enumerate(memory_kinds):
            if memory_kind is not None:
                self.out_shardings[k] = self.out_shardings[k].with_memory_kind(memory_kind)
        self.places = [SingleDeviceSharding(d) for d in self.devices]
        # The schedule that ranks must agree on before the first run; None if done or needless.
        self.undecided: Schedule | None = None
        # That of a program which exchanges nothing, if all ranks have devices of its mesh.
        self._unneeded: Schedule | None = None
        self._whole: ClosedJaxpr | None = None  # the program that was partitioned, until then
        self.exchanges: list[str] = []  # the exchanges that collectives became, in words
        super().__init__(closed, self._run_passes)

    def _note_uneven(self, ins: Sequence[bool], outs: Sequence[ShapedArray | None]) -> None:
        """Say which operands and results have parts of unequal size, and of what these are."""
        for k, is_uneven in enumerate(ins):
            if is_uneven:
                s = self.in_shardings[k]
                self.in_shardings[k] = NamedSharding(s.mesh, s.spec, uneven=True)
        for k, whole in enumerate(outs):
            if whole is not None:
                s = self.out_shardings[k]
                self.out_shardings[k] = NamedSharding(s.mesh, s.spec, uneven=True)
                self.whole_avals[k] = whole

    # -- compiling --

    @property
    def passes(self) -> Sequence[Pass]:
        """The passes of its jaxpr."""
        if not self.topology.is_spread:
            # Without shared memory an exchange is launches and copies on each device.
            own = pipeline.PASSES if self.backend.shares_work else pipeline.PASSES_ACROSS
            return self.backend.passes(own)
        across = pipeline.PASSES_OVERLAPPED if self.topology.overlaps else pipeline.PASSES_ACROSS
        return self.backend.passes(across, is_spread=True)

    def _key(self, closed: ClosedJaxpr) -> str | None:
        """The name under which the program is stored; a nameless axis goes by its number."""
        if self.topology.is_spread:
            return None
        axes = enumerate(self.topology.sizes.items())
        sizes = tuple((axis if type(axis) is str else k, size) for k, (axis, size) in axes)
        names = list(self.topology.sizes)
        varies = self.varies and [[names.index(a) for a in axes] for axes in self.varies]
        mesh = sizes, self.topology.local, varies
        return program_key(partial(fingerprint, closed), (), self.backend.platform, mesh)

    def _make_schedule(self, closed: ClosedJaxpr, callees: Any) -> Steps:
        final = self._optimise(closed)  # which notes origins in the topology, if it is spread
        if not self.topology.is_spread:
            return build.make_schedule(final, self.backend, self.topology, callees, self.varies)
        steps = build.make_schedule(final, self.backend, self.topology, varies=self.varies)
        self.topology = replace(self.topology, origins={})  # they hold the whole jaxpr
        self.exchanges = build.summary(self._traced, steps.steps)
        if config.log_compiles or "1" in config.debug:
            for text in self.exchanges:
                print(f"spmd: {self.name}: {text}", file=sys.stderr)
        return steps

    def _run_passes(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        """The optimised jaxpr; over several processes, its schedule and origins are noted."""
        if not self.topology.is_spread:
            return pipeline.run_passes(closed, passes=self.passes)
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
        specs = self.in_shardings if self.varies is not None else ()
        laid_out = [str(s.spec.without_trailing()) for s in specs]
        caller = current_source().short
        schedule, origins = order_of(traced, final, self.name, caller, mesh, laid_out)
        if schedule.exchanges:
            self.undecided = schedule
        elif len(set(self.topology.processes)) == world.world().size:
            self._unneeded = schedule
        self._traced = [entry.kind for entry in schedule.entries]
        self.topology = replace(self.topology, origins=origins)
        return final

    def _on_hosts(self, value: Any, aval: ShapedArray) -> list[Any]:
        if isinstance(value, PerDevice):
            return [constant(v, aval) for v in value.values]
        return super()._on_hosts(value, aval)

    # -- calling --

    def agree(self) -> None:
        """Compare this program with the other ranks', unless that was done; raise if they differ.

        At the first run, not at compilation: one rank may look at a program that none runs.
        """
        if self.undecided is not None:
            agree(world.world(), self.undecided, self._whole)
            self.undecided = self._whole = None

    def agree_in_any_case(self) -> None:
        """Have the ranks agree on this program even if it exchanges nothing.

        The layouts of its arguments decide that, and another rank may have others.
        """
        self.undecided, self._unneeded = self.undecided or self._unneeded, None

    def made_of(self, whole: ClosedJaxpr) -> None:
        """Have the ranks agree on all equations of `whole`, which was partitioned into this."""
        undecided, unneeded = self.undecided, self._unneeded
        if undecided is not None or unneeded is not None:
            text = fingerprint(needed(whole)) or ""
            code = blake2b(text.encode(), digest_size=16).hexdigest()
            self.undecided = undecided and replace(undecided, code=code)
            self._unneeded = unneeded and replace(unneeded, code=code)
            self._whole = whole

    def __call__(self, leaves: Sequence[Any], takes: Mapping[int, int] = NOTHING) -> list[Array]:
        """Run on global arrays; results are global arrays of this process's shards.

        Outputs of the program may be written over the operands that they take the place of.
        """
        in_queue = belongs_in_queue(self.native, leaves)
        return self.call(leaves, in_queue, takes)

    def call(
        self,
        leaves: Sequence[Any],
        in_queue: bool = True,
        takes: Mapping[int, int] = NOTHING,
        out_shardings: Sequence[NamedSharding] | None = None,
    ) -> list[Array]:
        """The results, in the queue or not as told, with `out_shardings` if given."""
        # Only this call holds the shards that are cut here.
        may_change = [type(x) is not Array for x in leaves]
        shards = self._all_shards(leaves)
        self.agree()
        if self.compares_host_values:
            self._compare_host_values(leaves)
        outs = self.start(shards, takes, in_queue, may_change)
        wholes = zip(self.whole_avals, out_shardings or self.out_shardings, outs, strict=True)
        return [from_shards(aval, sharding, shards) for aval, sharding, shards in wholes]

    @property
    def compares_host_values(self) -> bool:
        """Whether arguments that each process has the whole of are compared at each call."""
        is_global = self.topology.is_spread and self.varies is not None
        return is_global and "collectives" in config.debug

    def _compare_host_values(self, leaves: Sequence[Any]) -> None:
        """Raise a ReplicaError on all ranks if an argument of the host differs between them."""
        first = len(leaves) - len(self.arg_names)
        found = {
            self.arg_names[k - first] if k >= first else f"constant {k}": x
            for k, x in enumerate(leaves)
            if type(x) is not Array or x.shards is None
        }
        if found:
            what = f"{current_source()}: {self.name}: arguments of the host"
            replicas.compare_host_values(world.world(), found, what)

    def check_nans(
        self, what: str, closed: ClosedJaxpr, operands: Any, outs: Any, whole: Whole | None
    ) -> None:
        """Raise on all ranks if a device of any rank made a NaN; `closed` is the program."""
        shards, found = self._all_shards(operands), [x.shards or (x,) for x in outs]
        check_mesh_nans(what, closed, self.mesh, shards, found, whole)

    def _all_shards(self, operands: Sequence[Any]) -> list[Sequence[Any]]:
        return [
            self._shards(x, s, a)
            for x, s, a in zip(operands, self.in_shardings, self.in_avals, strict=True)
        ]

    def _shards(self, x: Any, sharding: NamedSharding, aval: ShapedArray) -> Sequence[Any]:
        """The shard of an operand on each local device, in memory order."""
        if type(x) is Array and x.shards is not None and x.sharding.layout == sharding.layout:
            for shard in x.shards:
                if shard.owner is None:
                    raise deleted(x)
            return x.shards
        if type(x) is Array and x.shards is None and x.owner is None:
            raise deleted(x)
        if type(x) is Array and x.shards is not None:
            laid_out = redistribute.redistributed(x, sharding)
            if laid_out is not None:
                return laid_out.shards or ()
        value = to_numpy(x)
        if sharding.is_fully_replicated and (type(x) is not Array or x.shards is None):
            return [np.ascontiguousarray(value).reshape(aval.shape)] * self.count
        indices = sharding.devices_indices_map(value.shape)
        if len(self.topology.sizes) and self.topology.is_spread and not _whole_here(x):
            raise ShardingError(
                f"an argument with sharding {x.sharding} would have to move between processes to "
                f"become {sharding}"
            )
        parts = [filled_up(value[indices[d]], aval.shape) for d in self.devices]
        return [np.ascontiguousarray(part).reshape(aval.shape) for part in parts]


def _whole_here(x: Any) -> bool:
    return type(x) is not Array or x.is_fully_addressable or x.is_fully_replicated
