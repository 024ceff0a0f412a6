"""Executables: an optimised closed jaxpr as a native program that takes and gives arrays.

A call fills a frame (arena, inputs, outputs, constants) with addresses and runs the program.
Results are blocks of the recycling allocator; a donated input's block becomes that of a result if
the program has read it before that result is written and nobody else holds it.
"""

from __future__ import annotations

import struct
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base.errors import DeviceError
from spmd.base.source import current_source
from spmd.compile.executable.async_operands import (
    Operands,
    belongs_in_queue,
    deleted,
    pending,
    result_blocks,
    same_memory,
)
from spmd.compile.fingerprint import fingerprint
from spmd.compile.lazy import build, pipeline, warm_up
from spmd.compile.native.llvm.compiler import available_cores
from spmd.compile.native.program.encoded import StepsById
from spmd.compile.native.program.stored import (
    StoredProgram,
    among_given,
    load_program,
    program_key,
    save_program,
)
from spmd.compile.native.runtime.allocator import Block, alloc
from spmd.compile.native.runtime.async_queue import QUEUE
from spmd.compile.native.runtime.run import NativeProgram
from spmd.core.aval import ShapedArray
from spmd.core.ir import ClosedJaxpr
from spmd.core.trace import to_numpy
from spmd.sharding.array import Array, from_memory, from_shards
from spmd.sharding.named import SingleDeviceSharding

if TYPE_CHECKING:
    from spmd.compile.cpu.assemble.compile_callees import CalleeCompiler
    from spmd.compile.lower.steps import Schedule
    from spmd.compile.schedule.memory_plan import Plan

# References that an array's own block has while `take` looks at it: the array's slot, the
# local variable and getrefcount's argument.
_OWN_REFERENCES = 3


class Executable:
    """Runs one program; call it with the flat list of arguments.

    `closed` is as it was traced, `optimise` gives what the passes make of it. If an earlier process
    stored the program, neither passes nor lowering run, unless somebody asks for the
    schedule or the plan.
    """

    is_map = False

    def __init__(
        self,
        closed: ClosedJaxpr,
        optimise: Callable[[ClosedJaxpr], ClosedJaxpr],
        donated: Sequence[bool] = (),
    ):
        self.in_avals = tuple(closed.in_avals)
        self.out_avals = tuple(closed.out_avals)
        self.donated = tuple(donated) or (False,) * len(self.in_avals)
        self._optimise = optimise
        # Executables are remembered with their jaxprs, weakly: they must not keep them alive.
        self._closed = weakref.ref(closed)
        key = program_key(partial(fingerprint, closed), self.donated)
        stored = load_program(key) if key else None
        if stored is None:
            self._compile(key)
        else:
            self._load(stored, closed)
        self.prepare(closed.jaxpr.name)

    def prepare(self, name: str) -> None:
        """Note what every call needs, when the native program and the constants are there."""
        self.native.name = name
        self.const_pointers = [pointer(c) for c in self._consts]
        self.outputs = [a for a, r in zip(self.out_avals, self.results, strict=True) if r is None]
        self.result_bytes = sum(a.nbytes for a in self.outputs)
        self._report = bytes(8 * (1 + self.native.devices))
        self._pack = struct.Struct(f"{self.native.frame_words}q").pack

    @cached_property
    def schedule(self) -> Schedule:
        """The steps of the program over buffers."""
        return self._make_schedule(None)

    def _make_schedule(self, callees: CalleeCompiler | None) -> Schedule:
        closed = self._closed()
        assert closed is not None, "the jaxpr of this program is gone"
        return build.make_schedule(self._optimise(closed), callees=callees)

    @cached_property
    def plan(self) -> Plan:
        """Where the buffers lie."""
        return build.plan_program(self.schedule, self.donated, available_cores())

    def _compile(self, key: str | None) -> None:
        warm_up.warm_up_runtime()
        with build.CalleeCompiler() as callees:
            schedule = self.schedule = self._make_schedule(callees)
            self.takes = build.takes(schedule, self.plan, self.donated)
            made = build.assemble(schedule, self.plan, takes=self.takes, callees=callees)
        self.arena, self.native = self.plan.arena, made.native
        self._consts = [constant(value, aval) for _, (value, aval) in schedule.consts]
        # For each result: the input that it equals, or None.
        self.results = tuple(r if isinstance(r, int) else None for r in schedule.results)
        if key:
            self._save(key)

    def _save(self, key: str) -> None:
        closed = self._closed()
        assert closed is not None
        consts = among_given(closed, [const for _, const in self.schedule.consts], self._consts)
        save_program(key, self.native.encoded, self.arena, self.results, self.takes, consts, closed)

    def _load(self, stored: StoredProgram, closed: ClosedJaxpr) -> None:
        self.arena = stored.arena
        self.takes = stored.takes
        self.results = stored.results
        self.native = NativeProgram(stored.encoded(closed), steps_again=self._steps_again)
        given = zip(closed.consts, closed.jaxpr.constvars, strict=True)
        self._consts = stored.constants([constant(value, v.aval) for value, v in given])

    def _steps_again(self) -> StepsById:
        """The steps of a loaded program, which is compiled for that."""
        return build.assemble(self.schedule, self.plan, takes=self.takes).native.encoded.steps

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Run on arguments of exactly the avals compiled for, now or beside Python."""
        # Before anything is written over a donated argument.
        home = common_home(leaves)
        results = (
            self.enqueue(leaves) if belongs_in_queue(self.native, leaves) else self.run(leaves)
        )
        place(results, home)
        return results

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """Run now; the results are there when it returns."""
        arrays = [_readable(x, aval) for x, aval in zip(leaves, self.in_avals, strict=True)]
        owners: list[Any] = []
        for k, aval in enumerate(self.outputs):
            block = take(self.takes[k], leaves) if k in self.takes else None
            owners.append(alloc(aval.nbytes) if block is None else block)
        arena = alloc(self.arena)
        words = [arena.address, *map(pointer, arrays), *(o.address for o in owners)]
        frames = bytearray(self._pack(*words, *self.const_pointers) + self._report)
        view = np.frombuffer(frames, np.int64)
        self.native.run_address(view.__array_interface__["data"][0])
        made = [from_memory(o.address, o, a) for o, a in zip(owners, self.outputs, strict=True)]
        return self._results(leaves, made)

    def enqueue(self, leaves: Sequence[Any]) -> list[Any]:
        """Run beside Python, after what is in the queue; the results are pending.

        Where there is no memory for that, run when what is in the queue has let go of its own.
        """
        try:
            return self._enqueue(leaves)
        except MemoryError:
            QUEUE.drain()
            return self.run(leaves)

    def _enqueue(self, leaves: Sequence[Any]) -> list[Any]:
        QUEUE.make_room(self.result_bytes)
        with QUEUE.lock:
            blocks = result_blocks(self.outputs, self.takes, leaves)
        given = Operands()
        addresses = [given.add(x, aval) for x, aval in zip(leaves, self.in_avals, strict=True)]
        arena = QUEUE.arena(0, self.arena)
        kept = {**given.kept, **{id(x): x for x in (self, arena, *blocks)}}
        words = [arena.address, *addresses, *(b.address for b in blocks), *self.const_pointers]
        causes, nbytes = given.causes, self.result_bytes
        job = QUEUE.submit(self.native, words, kept, causes, nbytes, self._closed())
        made = [pending(job, b, aval) for b, aval in zip(blocks, self.outputs, strict=True)]
        return self._results(leaves, made)

    def _results(self, leaves: Sequence[Any], made: Sequence[Array]) -> list[Any]:
        fresh = iter(made)
        results: list[Any] = []
        for aval, result in zip(self.out_avals, self.results, strict=True):
            if result is None:
                results.append(next(fresh))
            else:
                results.append(_forwarded(leaves[result], aval))
        for leaf, gone in zip(leaves, self.donated, strict=True):
            if gone and type(leaf) is Array:
                leaf.delete()
        return results

    def as_text(self) -> str:
        """The steps of the program."""
        return str(self.schedule)


def compile_jaxpr(
    closed: ClosedJaxpr, donated: Sequence[bool] = (), optimised: ClosedJaxpr | None = None
) -> Executable:
    """The executable of a closed jaxpr; `donated` says which inputs it may overwrite.

    `optimised` is what the passes made of it, if they have run.
    """

    def optimise(closed: ClosedJaxpr) -> ClosedJaxpr:
        return pipeline.run_passes(closed) if optimised is None else optimised

    return Executable(closed, optimise, donated)


# ---- arguments ---------------------------------------------------------------------------------


def _readable(x: Any, aval: ShapedArray) -> Any:
    """An argument as an array whose address is that of its elements in row-major order."""
    if type(x) is Array and x.shards is None:
        if x.owner is None:
            raise deleted(x)
        x.settle()
        return x
    return np.ascontiguousarray(to_numpy(x)).reshape(aval.shape)


def pointer(x: Any) -> int:
    """The address of an array's first element."""
    return x.ptr if type(x) is Array else x.__array_interface__["data"][0]


def constant(value: Any, aval: ShapedArray) -> Any:
    """A constant as an array of its aval."""
    return (
        _readable(value, aval)
        if type(value) is Array
        else _readable(np.asarray(value, aval.dtype), aval)
    )


def _forwarded(x: Any, aval: ShapedArray) -> Array:
    """A result that is an argument: a new array over the same memory if that is immutable."""
    if type(x) is Array:
        if x.shards is not None:
            return from_shards(aval, x.sharding, x.shards)
        return same_memory(x, aval, x._sharding)
    block = alloc(aval.nbytes)
    block.view(aval.shape, aval.dtype)[...] = to_numpy(x)
    return from_memory(block.address, block, aval)


def common_home(operands: Sequence[Any]) -> SingleDeviceSharding | None:
    """The one device that operands are committed to, if there is one.

    Raises a `DeviceError` that names two operands if they are committed to other devices, or to the
    same in another order.
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
            if x._sharding.layout[0] != first.sharding.layout[0]:
                raise DeviceError(
                    f"{current_source()}: operands are committed to different devices, "
                    f"{_where(first)} and {_where(x)}; move them to the same with "
                    "device_put(x, device) or device_put(x, y.sharding)"
                )
    return home


def _where(x: Array) -> str:
    """What an operand is and the devices it is on."""
    numbers = list(x.sharding.layout[0])
    devices = {d.id: d for d in x.devices()}
    names = ", ".join(str(devices[number]) for number in numbers)
    return f"{x.aval.short()} to {names if len(numbers) == 1 else f'[{names}]'}"


def place(results: Sequence[Any], home: SingleDeviceSharding | None) -> None:
    """Commit results to the device that operands are committed to."""
    if home is not None:
        for result in results:
            if result.shards is None:
                result._sharding = home


# ---- donation ----------------------------------------------------------------------------------


def take(number: int, operands: Sequence[Any]) -> Block | None:
    """The block of a donated operand, if it is all of it and nothing else refers to it."""
    x = operands[number]
    if type(x) is not Array or type(x.owner) is not Block:
        return None
    # Two operands may be one array, or arrays over one block.
    for other, y in enumerate(operands):
        if other != number and type(y) is Array and y.owner is x.owner:
            return None
    block = x.owner
    alone = sys.getrefcount(block) == _OWN_REFERENCES
    return block if alone and block.address == x.ptr else None
