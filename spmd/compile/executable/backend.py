"""Backends: what a platform does for the programs that run on its devices.

The one idea: an executable asks a record, and imports no platform. Passes, lowering, plans and the
executor are the same everywhere. A backend says how steps become native ones, where values lie,
and how a program is given them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base.device import Device
from spmd.base.record import record
from spmd.compile.executable.async_operands import deleted
from spmd.compile.lazy import cpu_assemble
from spmd.compile.native.llvm.compiler import available_cores
from spmd.compile.native.program.encoded import Encoded
from spmd.compile.native.runtime.allocator import Block, alloc
from spmd.compile.native.runtime.run import NativeProgram
from spmd.core.aval import ShapedArray
from spmd.core.rewriting.equations import Pass
from spmd.core.trace import to_numpy
from spmd.sharding.array import Array, from_memory
from spmd.sharding.future import DeviceMemory
from spmd.sharding.named import SingleDeviceSharding

# References that an array's own block has while `take` looks at it: the array's slot, the
# local variable and getrefcount's argument.
_OWN_REFERENCES = 3


def take(number: int, operands: Sequence[Any], also: Sequence[Any] = ()) -> Block | None:
    """The block of a donated operand, if it is all of it and nothing else refers to it.

    `also` are the same operand of other devices, which will share the result: they may share it
    now.
    """
    x = operands[number]
    if type(x) is not Array or type(x.owner) is not Block:
        return None
    # Two operands may be one array, or arrays over one block.
    for other, y in enumerate(operands):
        if other != number and type(y) is Array and y.owner is x.owner:
            return None
    block = x.owner
    known = _OWN_REFERENCES + sum([type(y) is Array and y.owner is x.owner for y in also])
    return block if sys.getrefcount(block) == known and block.address == x.ptr else None


@record
class Backend:
    """A platform's part in making programs and in calling them.

    Memory is an object with an `address`, which is freed with its last reference.
    """

    platform: str
    # The module that turns a schedule into a native program: its `CalleeCompiler`, `legalise` and
    # `assemble`. It is imported by the first program that is not on the disk.
    assembler: Any
    # Memory of so many bytes on a device; None is the default device.
    alloc: Callable[[int, Device | None], Any]
    # An argument on a device, so that `address` can say where its elements lie in row-major order.
    operand: Callable[[Any, ShapedArray, Device | None], Any]
    address: Callable[[Any], int]
    # The array over memory that a program has written.
    result: Callable[[Any, ShapedArray, SingleDeviceSharding | None], Array]
    # Runs a native program over the frames of its devices, which are lists of words.
    run: Callable[[NativeProgram, Sequence[list[int]], Sequence[Device | None]], None]
    # The threads that a program of one device may use.
    threads: Callable[[], int]
    # For errors: a report of who holds the memory of some devices, given the arguments of a call
    # and the bytes of its temporaries.
    memory_report: Callable[[Sequence[Device | None], Sequence[ShapedArray], int], str] = (
        lambda devices, arguments, work: f".\n{needs_less(arguments, work)}"
    )
    # The memory of a donated operand for a result, by its number among the operands of a device, if
    # nothing else refers to it; there may be the same operand of other devices behind.
    take: Callable[..., Any] = take
    # The program of an entry of the disk cache: its encoding, what its platform keeps beside it, a
    # way to compile it again, and the devices that it will run on.
    program: Callable[
        [Encoded, Any, Callable[[], NativeProgram], Sequence[Device | None]], NativeProgram
    ] = lambda encoded, kept, again, devices: NativeProgram(encoded, again=again)
    # A collective between processes in the memory of their devices, as a function that a step of
    # the host calls: of a `HostCollective`, the devices of its mesh, its kind, rows and count. None
    # if it goes through the host.
    direct: Callable[[Any, Sequence[Device], str, int, int], Any] | None = None
    # Whether devices of a process read each other's memory.
    shares_work: bool = True
    # Passes of the platform, before those of all; whether for programs over several processes.
    own_passes: Callable[[bool], Sequence[Pass]] = lambda is_spread: ()

    def passes(self, passes: Sequence[Pass], is_spread: bool = False) -> Sequence[Pass]:
        """The passes that its programs go through, where those of all are `passes`."""
        own = self.own_passes(is_spread)
        return (*own, *passes) if own else passes


# ---- the CPU's ---------------------------------------------------------------------------------


def needs_less(arguments: Sequence[ShapedArray], work: int) -> str:
    """Advice for a call of arguments, with temporaries of `work` bytes, that finds no memory."""
    lines = ["NamedSharding splits an array over several devices."]
    if work > sum(aval.nbytes for aval in arguments):
        lines.insert(0, "Smaller batches need less work memory; checkpoint does so for gradients.")
    return "\n".join(lines)


def _alloc(nbytes: int, device: Device | None) -> Any:
    return alloc(nbytes)


def readable(x: Any, aval: ShapedArray, device: Device | None = None) -> Any:
    """An argument as an array whose address is that of its elements in row-major order."""
    if type(x) is Array and x.shards is None:
        if x.owner is None:
            raise deleted(x)
        x.settle()
        return x._value if isinstance(x.owner, DeviceMemory) else x
    # Constants of definitions may be wider than what a user's array becomes.
    if type(x) is not np.ndarray or x.dtype != aval.dtype:
        x = to_numpy(x)
    return np.ascontiguousarray(x).reshape(aval.shape)


def pointer(x: Any) -> int:
    """The address of an array's first element."""
    return x.ptr if type(x) is Array else x.__array_interface__["data"][0]


def constant(value: Any, aval: ShapedArray) -> Any:
    """A constant as an array of its aval."""
    return readable(value if type(value) is Array else np.asarray(value, aval.dtype), aval)


def _result(block: Any, aval: ShapedArray, home: SingleDeviceSharding | None) -> Array:
    return from_memory(block.address, block, aval, home)


def _run(
    native: NativeProgram, frames: Sequence[list[int]], devices: Sequence[Device | None]
) -> None:
    native.run_frames(frames)


CPU = Backend("cpu", cpu_assemble, _alloc, readable, pointer, _result, _run, available_cores)
