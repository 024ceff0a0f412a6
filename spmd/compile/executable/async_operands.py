"""Calls of programs through the queue: the choice of calls, and their operands.

The one idea: a call that waits in the queue reads its operands later, so it keeps their memory and
not the arrays, copies what its caller may still change (NumPy arrays), and knows the jobs whose
results it reads, lest it run on the remains of a failed one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.base.errors import DeletedError
from spmd.compile.native.runtime.allocator import Block
from spmd.compile.native.runtime.async_queue import QUEUE, Job
from spmd.compile.native.runtime.run import NativeProgram
from spmd.core.aval import ShapedArray
from spmd.core.trace import to_numpy
from spmd.sharding.array import Array, from_memory
from spmd.sharding.future import DeviceMemory, Future

# References that an object has while `take_queued` looks at it: the slot that holds it, the local
# variable and getrefcount's argument.
_OWN_REFERENCES = 3


def deleted(x: Array) -> DeletedError:
    """The error for an argument that was donated before."""
    return DeletedError(
        f"an argument ({x.aval}) was deleted or donated to an earlier call (donate_argnums); "
        "use that call's result instead"
    )


def belongs_in_queue(program: NativeProgram, operands: Sequence[Any]) -> bool:
    """Whether a call is better made in the queue: it is long, or needs results from there."""
    if not QUEUE.is_open or not program.may_queue:
        return False
    if not QUEUE.jobs or not any(map(_is_pending, operands)):
        if not program.is_long:
            return False
        if program.calls_at_once and not QUEUE.jobs:
            program.calls_at_once -= 1
            return False
    return copied_bytes(operands) <= most_copied(program)


def copied_bytes(operands: Sequence[Any]) -> int:
    """The bytes that a call in the queue would have to copy."""
    return sum(x.nbytes for x in operands if isinstance(x, np.ndarray))


def most_copied(program: NativeProgram) -> float:
    """How many bytes a call may copy: at 20 bytes a nanosecond, a twentieth of its own time."""
    return max(program.cost_ns, 4096)


def _is_pending(x: Any) -> bool:
    if type(x) is not Array:
        return False
    shards = x.shards or (x,)
    return any(type(p.owner) is Future and not p.owner.work.is_done() for p in shards)


class Operands:
    """The operands of one call: their memory, by id, and the jobs that have yet to write it."""

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}
        self.causes: list[Job] = []

    def add(self, x: Any, aval: ShapedArray, may_change: bool = True) -> int:
        """Take an operand; gives the address of its elements.

        `may_change`: a NumPy array is the caller's, and is copied.
        """
        if type(x) is not Array or x.shards is not None or isinstance(x.owner, DeviceMemory):
            value = np.ascontiguousarray(to_numpy(x)).reshape(aval.shape)
            value = value.copy() if may_change and type(x) is not Array else value
            self.kept[id(value)] = value
            return value.__array_interface__["data"][0]
        # The owner first: a thread that settles the array sets it last.
        owner = x.owner
        if type(owner) is Future:
            if not owner.work.is_done():
                assert isinstance(owner.work, Job)
                self.causes.append(owner.work)
                self.kept[id(owner.block)] = owner.block
                return owner.address
            x.settle()
            owner = x.owner
        if owner is None:
            raise deleted(x)
        self.kept[id(owner)] = owner
        return x.ptr


def pending(work: Job, block: Any, aval: ShapedArray, sharding: Any = None) -> Array:
    """An array that a job writes into a block."""
    return from_memory(0, Future(work, block, block.address), aval, sharding)


def same_memory(x: Array, aval: ShapedArray, sharding: Any) -> Array:
    """Another array over the memory of one, which may be pending."""
    owner = x.owner  # first, see `Operands.add`
    return from_memory(x.ptr, owner, aval, sharding)


def take_queued(number: int, operands: Sequence[Any], also: Sequence[Any] = ()) -> Block | None:
    """The block of a donated operand, as `executable.take`, for a call in the queue.

    The jobs before it may hold the block too: they have ended when this one runs. The queue's lock
    is held.
    """
    x = operands[number]
    if type(x) is not Array:
        return None
    start, block = x.ptr, x.owner
    if type(block) is Future:
        if sys.getrefcount(block) != _OWN_REFERENCES:
            return None
        start, block = block.address, block.block
    if type(block) is not Block or block.address != start:
        return None
    for other, y in enumerate(operands):
        if other != number and type(y) is Array and memory_of(y) is block:
            return None
    sharing = [y for y in also if type(y) is Array and memory_of(y) is block]
    for y in sharing:
        if type(y.owner) is Future and sys.getrefcount(y.owner) != _OWN_REFERENCES - 1:
            return None
    own = _OWN_REFERENCES + len(sharing) + QUEUE.holders(block)
    return block if sys.getrefcount(block) == own else None


def memory_of(x: Array) -> Any:
    """The object that owns the memory of an array's elements."""
    return x.owner.block if type(x.owner) is Future else x.owner
