"""Executables: an optimised closed jaxpr as a native program that takes and gives arrays.

A call fills a frame (arena, inputs, outputs, constants) of each device with addresses and runs the
program. One device is a mesh of one; `mesh_executable` says what differs for several. Results are
blocks of the recycling allocator; a donated input's block becomes that of a result if the program
has read it before that result is written and no other object holds it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from spmd.base.amounts import size_text
from spmd.base.config import config
from spmd.base.device import Device, default_device
from spmd.base.errors import DeviceError, OutOfMemoryError
from spmd.base.source import current_source
from spmd.compile.executable.async_operands import (
    Operands,
    belongs_in_queue,
    pending,
    same_memory,
    take_queued,
)
from spmd.compile.executable.backend import CPU, Backend, constant
from spmd.compile.fingerprint import fingerprint
from spmd.compile.lazy import build, cuda_backend, memory_check, pipeline
from spmd.compile.native.program.stored import (
    StoredProgram,
    among_given,
    load_program,
    program_key,
    save_program,
)
from spmd.compile.native.runtime.allocator import Block, alloc
from spmd.compile.native.runtime.async_queue import QUEUE, Job
from spmd.compile.native.runtime.load import warm_up_runtime
from spmd.compile.native.runtime.run import NativeProgram
from spmd.core.aval import NO_AXES, ShapedArray
from spmd.core.ir import ClosedJaxpr
from spmd.core.trace import to_numpy
from spmd.sharding.array import Array, from_memory, from_shards
from spmd.sharding.named import NamedSharding, Sharding, SingleDeviceSharding

if TYPE_CHECKING:
    from spmd.compile.lower.steps import Schedule
    from spmd.compile.schedule.memory_plan import Plan


class Executable:
    """Runs one program on the local devices; this class itself on one.

    `closed` is as it was traced, `optimise` gives the result of the passes. If an earlier process
    stored the program, neither passes nor lowering run until the schedule or the plan is needed.
    Each device has a frame of its own (arena, inputs, outputs, constants).
    """

    is_map = False
    count = 1  # devices
    devices: Sequence[Device | None] = (None,)  # None is the default device
    # The place of each device's results; None is the place of a call's operands.
    places: Sequence[SingleDeviceSharding | None] = (None,)
    # Whether all calls donate the same arguments, `donated`.
    knows_donated = True
    # The names of the arguments, as users know them.
    names: Sequence[str] = ()
    # The platform of its devices.
    backend: Backend = CPU

    def __init__(
        self,
        closed: ClosedJaxpr,
        optimise: Callable[[ClosedJaxpr], ClosedJaxpr],
        donated: Sequence[bool] = (),
        device: Device | None = None,
    ):
        if device is not None:
            self.devices, self.backend = (device,), backend_of(device)
        self.names = closed.jaxpr.arg_names
        self.in_avals = tuple(closed.in_avals)
        self.out_avals = tuple([a.update(vma=NO_AXES) if a.vma else a for a in closed.out_avals])
        self.donated = tuple(donated) or (False,) * len(self.in_avals)
        self._optimise = optimise
        # Executables are remembered with their jaxprs, weakly: they must not keep them alive.
        self._closed = weakref.ref(closed)
        key = self._key(closed)
        stored = load_program(key) if key else None
        if stored is None:
            self._compile(key)
        else:
            self._load(stored, closed)
        self.prepare(closed.jaxpr.name)

    def prepare(self, name: str) -> None:
        """Note the facts for every call, when the native program and the constants are there."""
        self.native.name = name
        # Of each device.
        address = self.backend.address
        self.const_pointers = [[address(c[d]) for c in self._consts] for d in range(self.count)]
        self.outputs = [a for a, r in zip(self.out_avals, self.results, strict=True) if r is None]
        pairs = zip(self.outputs, self.frames.outputs, strict=True)
        self.result_bytes = sum(a.nbytes * len(set(homes)) for a, homes in pairs)

    # -- compiling --

    def _key(self, closed: ClosedJaxpr) -> str | None:
        """The name under which the program is stored; None if it is not."""
        return program_key(partial(fingerprint, closed), self.donated, self.backend.platform)

    @property
    def core(self) -> Executable:
        """The executable that holds the schedule and the plan."""
        return self

    @cached_property
    def schedule(self) -> Schedule:
        """The steps of the program over buffers."""
        return self._make_schedule(self._traced_jaxpr(), None)

    def _make_schedule(self, closed: ClosedJaxpr, callees: Any) -> Schedule:
        return build.make_schedule(self._optimise(closed), self.backend, callees=callees)

    def _traced_jaxpr(self) -> ClosedJaxpr:
        closed = self._closed()
        if closed is None:
            raise ReferenceError("the jaxpr of this program is gone")
        return closed

    @cached_property
    def plan(self) -> Plan:
        """The memory plan of the buffers."""
        # Several devices are the parallel work of their program.
        threads = self.backend.threads() if self.count == 1 else 1
        donated = self.donated if self.knows_donated else [True] * len(self.in_avals)
        return build.plan_program(self.schedule, donated, threads)

    def takes_of(self, donated: Sequence[bool]) -> dict[int, int]:
        """For outputs that may be written over a donated input: which one."""
        return build.takes(self.schedule, self.plan, donated) if any(donated) else {}

    def _assemble(self, callees: Any = None) -> NativeProgram:
        takes = self.takes if self.knows_donated else None
        assemble = self.backend.assembler.assemble
        return assemble(self.schedule, self.plan, self.count, takes, callees)

    def _compile(self, key: str | None) -> None:
        warm_up_runtime()
        closed = self._traced_jaxpr()
        with self.backend.assembler.CalleeCompiler() as callees:
            schedule = self.schedule = self._make_schedule(closed, callees)
            self.takes = self.takes_of(self.donated)
            if config.check:
                given = self.donated if self.knows_donated else [True] * len(self.in_avals)
                takes = self.takes_of(given)
                memory_check.check_memory(closed.jaxpr.name, schedule, self.plan, takes)
            self.native = self._assemble(callees)
        self.frames = build.frames_of(schedule, self.plan, self.count)
        self._consts = [self._on_each(value, aval) for _, (value, aval) in schedule.consts]
        # For each result: the input that it equals, or None.
        self.results = tuple(r if isinstance(r, int) else None for r in schedule.results)
        if key:
            native, frames = self.native, self.frames
            consts = among_given(closed, [const for _, const in schedule.consts], self._on_hosts)
            facts = native.encoded, frames, self.results, self.takes, consts, closed, native.kept
            save_program(key, *facts)

    def _load(self, stored: StoredProgram, closed: ClosedJaxpr) -> None:
        self.frames, self.takes, self.results = stored.frames, stored.takes, stored.results
        words, backend = stored.encoded(closed), self.backend
        self.native = backend.program(words, stored.kept, self._assemble, self.devices)
        given = zip(closed.consts, closed.jaxpr.constvars, strict=True)
        self._consts = stored.constants(
            [self._on_each(value, v.aval) for value, v in given],
            lambda each: self._given(each, ShapedArray(each[0].shape, each[0].dtype)),
        )

    def _on_hosts(self, value: Any, aval: ShapedArray) -> list[Any]:
        """A constant as an array of the host for each device."""
        return [constant(value, aval)] * self.count

    def _on_each(self, value: Any, aval: ShapedArray) -> list[Any]:
        """A constant as an array of each device."""
        return self._given(self._on_hosts(value, aval), aval)

    def _given(self, values: Sequence[Any], aval: ShapedArray) -> list[Any]:
        """Values on the devices, one for each."""
        pairs = zip(values, self.devices, strict=True)
        return [self.backend.operand(x, aval, device) for x, device in pairs]

    @property
    def input_shardings(self) -> list[Any]:
        """The sharding of each argument: all are on the default device."""
        return [SingleDeviceSharding(default_device())] * len(self.in_avals)

    @property
    def output_shardings(self) -> list[Any]:
        """The sharding of each result."""
        return [SingleDeviceSharding(default_device())] * len(self.out_avals)

    def as_text(self) -> str:
        """The steps of the program."""
        return str(self.schedule)

    # -- calling --

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Run on arguments of exactly the avals compiled for, now or beside Python."""
        # Before anything is written over a donated argument.
        home = common_home(leaves, self.names, name=self.native.name)
        # Where the queue is empty it takes long programs only.
        in_queue = (QUEUE.jobs or self.native.is_long) and belongs_in_queue(self.native, leaves)
        results = self.call(leaves, bool(in_queue))
        place(results, home)
        return results

    def call(self, leaves: Sequence[Any], in_queue: bool = True) -> list[Any]:
        """The results, in the queue or not as told, for operands not committed to a device."""
        outs = self.start([(x,) for x in leaves], self.takes, in_queue)
        for leaf, gone in zip(leaves, self.donated, strict=True):
            if gone and type(leaf) is Array:
                leaf.delete()
        return [out for (out,) in outs]

    def start(
        self,
        operands: Sequence[Sequence[Any]],
        takes: Mapping[int, int],
        in_queue: bool,
        may_change: Sequence[bool] | None = None,
    ) -> list[list[Array]]:
        """Run on operands, given as the shards of each device; results likewise.

        In the queue it runs beside Python, after the jobs before it, and results are pending.
        Where there is no memory for that, it runs when the jobs before it have freed their own.
        `may_change` says which operands lie in memory that the caller may write to.
        """
        if in_queue:
            try:
                return self._enqueue(operands, takes, may_change or [True] * len(operands))
            except MemoryError:
                QUEUE.drain()
        try:
            return self._run(operands, takes)
        except MemoryError as error:
            raise self._too_large(error) from None

    def _too_large(self, error: MemoryError) -> OutOfMemoryError:
        """The error of a run that found no memory, with the sizes of what it was for."""
        text = error.text if isinstance(error, OutOfMemoryError) else str(error)
        results = [f"{a.short()} of {size_text(a.nbytes)}" for a in self.out_avals]
        shown = ", ".join(results[:4]) + ", ..." * (len(results) > 4)
        work = sum(self.frames.arenas)
        return OutOfMemoryError(
            f"{self.native.name}: {text}; its results are {shown}, and its work needs "
            f"{size_text(work)} beside"
            + self.backend.memory_report(self.devices, self.in_avals, work)
        )

    def _run(
        self, operands: Sequence[Sequence[Any]], takes: Mapping[int, int]
    ) -> list[list[Array]]:
        backend, devices = self.backend, self.devices
        address, typed = backend.address, [*zip(operands, self.in_avals, strict=True)]
        given = [
            [backend.operand(x[d], a, device) for x, a in typed] for d, device in enumerate(devices)
        ]
        arenas = [backend.alloc(*pair) for pair in zip(self.frames.arenas, devices, strict=True)]
        blocks = self._blocks(given, takes, backend.take)
        frames = [
            [arenas[d].address, *map(address, given[d]), *self._others(d, blocks, arenas)]
            for d in range(self.count)
        ]
        backend.run(self.native, frames, devices)
        return self._results(operands, blocks, None)

    def _enqueue(
        self,
        operands: Sequence[Sequence[Any]],
        takes: Mapping[int, int],
        may_change: Sequence[bool],
    ) -> list[list[Array]]:
        QUEUE.make_room(self.result_bytes)
        with QUEUE.lock:
            of_devices = [[x[d] for x in operands] for d in range(self.count)]
            blocks = self._blocks(of_devices, takes, take_queued)
        read = Operands()
        arenas = [QUEUE.arena(d, nbytes) for d, nbytes in enumerate(self.frames.arenas)]
        words: list[int] = []
        for d in range(self.count):
            given = zip(operands, self.in_avals, may_change, strict=True)
            words.append(arenas[d].address)
            words += [read.add(x[d], aval, changes) for x, aval, changes in given]
            words += self._others(d, blocks, arenas)
        kept = {id(x): x for x in (self, *arenas, *itertools.chain.from_iterable(blocks))}
        causes, nbytes = read.causes, self.result_bytes
        job = QUEUE.submit(self.native, words, read.kept | kept, causes, nbytes, self._closed())
        return self._results(operands, blocks, job)

    def _blocks(
        self,
        operands: Sequence[Sequence[Any]],
        takes: Mapping[int, int],
        taken: Callable[[int, Sequence[Any], Sequence[Any]], Block | None],
    ) -> list[list[Block]]:
        """Memory for the outputs of each device: of donated operands, its home's, or new."""
        blocks: list[list[Block]] = []
        for d, given in enumerate(operands):
            mine: list[Block] = []
            for k, (aval, homes) in enumerate(zip(self.outputs, self.frames.outputs, strict=True)):
                block = blocks[homes[d]][k] if homes[d] != d else None
                if block is None and k in takes:
                    x = takes[k]
                    also = [operands[e][x] for e, home in enumerate(homes) if home == d != e]
                    block = taken(x, given, also)
                if block is None:
                    block = self.backend.alloc(aval.nbytes, self.devices[d])
                mine.append(block)
            blocks.append(mine)
        return blocks

    def _others(
        self, device: int, blocks: Sequence[Sequence[Block]], arenas: Sequence[Block]
    ) -> list[int]:
        """The words of a device's frame behind its inputs."""
        shared = [arenas[homes[device]].address for homes in self.frames.shared]
        outputs = [block.address for block in blocks[device]]
        return [*outputs, *shared, *self.const_pointers[device]]

    def _results(
        self, operands: Sequence[Sequence[Any]], blocks: Sequence[Sequence[Any]], job: Job | None
    ) -> list[list[Array]]:
        """The results of each device: in its blocks, which a job may have yet to write."""
        made = itertools.count()
        outs: list[list[Array]] = []
        for aval, result in zip(self.out_avals, self.results, strict=True):
            if result is not None:
                pairs = zip(operands[result], self.places, strict=True)
                outs.append([_forwarded(x, aval, home) for x, home in pairs])
                continue
            k = next(made)
            own = zip([mine[k] for mine in blocks], self.places, strict=True)
            if job is None:
                outs.append([self.backend.result(b, aval, home) for b, home in own])
            else:
                outs.append([pending(job, b, aval, home) for b, home in own])
        return outs


def compile_jaxpr(
    closed: ClosedJaxpr,
    donated: Sequence[bool] = (),
    optimised: ClosedJaxpr | None = None,
    device: Device | None = None,
) -> Executable:
    """The executable of a closed jaxpr; `donated` says which inputs it may overwrite.

    `optimised` is the result of the passes, if they have run; `device` is that of `device_of`.
    """

    def optimise(closed: ClosedJaxpr) -> ClosedJaxpr:
        if optimised is not None:
            return optimised
        return pipeline.run_passes(closed, passes=backend_of(device).passes(pipeline.PASSES))

    return Executable(closed, optimise, donated, device)


def backend_of(device: Device | None) -> Backend:
    """The backend for programs on a device; None is the default device of a host without GPUs."""
    return CPU if device is None or device.platform == "cpu" else cuda_backend.BACKEND


# ---- arguments ---------------------------------------------------------------------------------


def _forwarded(x: Any, aval: ShapedArray, home: SingleDeviceSharding | None) -> Array:
    """A result that is an argument: a new array over the same memory if that is immutable."""
    if type(x) is Array:
        if x.shards is not None:
            return from_shards(aval, x.sharding, x.shards)
        return same_memory(x, aval, home or x._sharding)
    block = alloc(aval.nbytes)
    block.view(aval.shape, aval.dtype)[...] = to_numpy(x)
    return from_memory(block.address, block, aval, home)


def common_home(
    operands: Sequence[Any],
    names: Sequence[str] = (),
    in_any_order: bool = False,
    name: str = "",
) -> SingleDeviceSharding | None:
    """The one device that operands are committed to, if there is one.

    Raises a `DeviceError` that names two operands if they are committed to other devices, or to the
    same in another order, unless that may be `in_any_order`; `names` are what a user calls them,
    and `name` is that of the function.
    """
    home, first = None, None
    for x in operands:
        if type(x) is not Array or x._sharding is None:
            continue
        if type(x._sharding) is SingleDeviceSharding:
            home = x._sharding
        if first is None:
            first = x
        elif x._sharding is not first._sharding:
            one, other = x._sharding.layout[0], first.sharding.layout[0]
            is_far = one != other and not (in_any_order and set(one) == set(other))
            if is_far or _platform(x.sharding) != _platform(first.sharding):
                raise _far_apart(operands, names, first, x, name)
    return home


def _platform(sharding: Sharding) -> str:
    """The platform of a sharding's devices; each numbers its own from 0."""
    if isinstance(sharding, NamedSharding):
        return sharding.mesh.devices.flat[0].platform
    return next(iter(sharding.device_set)).platform


def _far_apart(
    operands: Sequence[Any], names: Sequence[str], one: Array, other: Array, name: str
) -> DeviceError:
    """The error for two operands that are committed to different devices."""
    numbers = [next(k for k, x in enumerate(operands) if x is y) for y in (one, other)]
    known = [names[k] if k < len(names) and names[k] else f"operand {k}" for k in numbers]
    places = [
        f"{name} ({x.aval.short()}) to {_where(x)}"
        for name, x in zip(known, (one, other), strict=True)
    ]
    source, target = known if names else ("x", "y")
    what = f"jit({name}): " if names and name else ""
    return DeviceError(
        f"{current_source()}: {what}operands are committed to different devices, {places[0]} and "
        f"{places[1]}; move one: device_put({source}, {target}.sharding)"
    )


def _where(x: Array) -> str:
    """An operand's devices, as text."""
    numbers = list(x.sharding.layout[0])
    devices = {d.id: d for d in x.devices()}
    names = ", ".join(str(devices[number]) for number in numbers)
    return names if len(numbers) == 1 else f"[{names}]"


def place(results: Sequence[Any], home: SingleDeviceSharding | None) -> None:
    """Commit results to the device that operands are committed to."""
    if home is not None:
        for result in results:
            if result.shards is None:
                result._sharding = home
