"""The CUDA backend: values in the memory of GPUs, and runs whose work is in their streams.

The one idea: an array keeps its values where they were last needed. One that the host made moves to
the device with its first use by a program there, and keeps the host's copy, since neither changes.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base.device import Device
from spmd.compile.cuda.driver import Driver, driver
from spmd.compile.cuda.program import CudaProgram
from spmd.compile.executable import cuda_reports
from spmd.compile.executable.async_operands import deleted
from spmd.compile.executable.backend import Backend, pointer
from spmd.compile.lazy import cuda_assemble, cuda_exchange, cuda_numbers, definitions
from spmd.compile.native.program.encoded import Encoded
from spmd.compile.native.runtime.run import NativeProgram
from spmd.core.aval import ShapedArray
from spmd.core.rewriting.equations import Pass
from spmd.core.trace import to_numpy
from spmd.sharding.array import Array, from_memory
from spmd.sharding.future import DeviceMemory
from spmd.sharding.named import SingleDeviceSharding

# Values of the host up to so many bytes are copied to pinned memory first: then nothing waits.
MOST_PINNED = 2**20


class CudaMemory(DeviceMemory):
    """Memory of a GPU, which is freed with the last reference to this object.

    That at `address` belongs to another library: `lender` keeps it, and no program writes there.
    Memory of a result goes back to the `home` from which the next call takes it.
    """

    __slots__ = ("device", "driver", "home", "lender", "nbytes")

    def __init__(
        self,
        gpu: Driver,
        device: int,
        nbytes: int,
        address: int = 0,
        lender: Any = None,
        home: ResultMemory | None = None,
    ):
        if _lent:
            _give_back_lent()
        self.driver, self.device, self.nbytes, self.lender = gpu, device, nbytes, lender
        self.home, self.address = home, address or _allocated(gpu, device, max(nbytes, 1))

    def read(self, aval: ShapedArray) -> np.ndarray:
        out = np.empty(aval.shape, aval.dtype)
        if out.nbytes:
            self.driver.copy(self.device, pointer(out), self.address, out.nbytes)
        self.wait()
        out.flags.writeable = False
        return out

    def write(self, value: np.ndarray) -> None:
        """Put the elements of a C-contiguous array here."""
        if not value.nbytes:
            return
        gpu, source, nbytes = self.driver, pointer(value), value.nbytes
        if nbytes > MOST_PINNED:
            gpu.copy(self.device, self.address, source, nbytes)
            self.wait()  # the host may write to its array afterwards
            return
        pinned = gpu.allocate_pinned(nbytes)
        ctypes.memmove(pinned, source, nbytes)
        gpu.copy(self.device, self.address, pinned, nbytes)
        gpu.free_pinned(self.device, pinned)

    def is_done(self) -> bool:
        return self.driver.is_idle(self.device)

    def wait(self) -> None:
        cuda_reports.wait(self.driver, self.device)

    def __del__(self) -> None:
        address = getattr(self, "address", 0)
        if not address or sys.is_finalizing():
            return
        if self.lender is None:
            home = self.home
            if home is not None and len(home) < MOST_SETS:
                home.append(address)
            else:
                self.driver.free(self.device, address)
        else:
            _lent.append((self.driver, self.device, self.lender))
            _give_back_lent()


class ResultMemory(list[int]):
    """The addresses of memory that a result of repeated calls had, for its next values.

    A loop that gives a step its own results back alternates between two: then calls have the same
    addresses again and again, and allocate nothing. It is freed where memory is short.
    """

    __slots__ = ("__weakref__", "device", "driver")

    def __init__(self, gpu: Driver, device: int):
        self.driver, self.device = gpu, device
        _result_memory.add(self)

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def release(self) -> None:
        """Free what no array uses."""
        while self:
            self.driver.free(self.device, self.pop())

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.release()


# So many sets of results of an executable are kept for its next calls.
MOST_SETS = 2
_result_memory: weakref.WeakSet[ResultMemory] = weakref.WeakSet()

# Memory of other libraries that no array refers to any more, while work that reads it may run.
_lent: list[tuple[Driver, int, Any]] = []


def _give_back_lent() -> None:
    """Let go of what no work reads any more; the host doesn't wait for the rest."""
    asked = [_lent.pop() for _ in range(len(_lent))]
    _lent.extend(each for each in asked if not each[0].is_idle(each[1]))


def _allocated(gpu: Driver, device: int, nbytes: int) -> int:
    try:
        return gpu.allocate(device, nbytes)
    except MemoryError:
        kept = [m for m in list(_result_memory) if m and (m.driver, m.device) == (gpu, device)]
        if not arenas(gpu, device) and not kept:
            raise
        arenas(gpu, device).clear()
        for memory in kept:
            memory.release()
        return gpu.allocate(device, nbytes)


# By driver and device, the arenas of repeated calls that none uses now, see `cuda_calls.py`.
_arenas: dict[tuple[Driver, int], list[CudaMemory]] = {}


def arenas(gpu: Driver, device: int) -> list[CudaMemory]:
    """The arenas on a device that no call uses now; a call takes one out and puts it back."""
    return _arenas.setdefault((gpu, device), [])


def release_arenas() -> None:
    """Free the arenas that no call uses now, and the memory that results will have."""
    for free in _arenas.values():
        free.clear()
    for memory in list(_result_memory):
        memory.release()


def number_of(device: Device | None) -> int:
    """The number of a device in this process; None is the default device."""
    return 0 if device is None else device.local_hardware_id


def _alloc(nbytes: int, device: Device | None) -> CudaMemory:
    return CudaMemory(driver(), number_of(device), nbytes)


def _operand(x: Any, aval: ShapedArray, device: Device | None) -> CudaMemory:
    """The memory of an argument; an array that is on the host moves."""
    number = number_of(device)
    if type(x) is CudaMemory:
        return x
    if type(x) is not Array or x.shards is not None:
        return _uploaded(np.ascontiguousarray(to_numpy(x)).reshape(aval.shape), number)
    owner = x.owner
    if owner is None:
        raise deleted(x)
    if type(owner) is CudaMemory and owner.device == number:
        return owner
    memory = _uploaded(x._value, number)
    if not isinstance(owner, DeviceMemory) and x.device is device:
        x.ptr, x.owner = 0, memory
    return memory


def _uploaded(value: np.ndarray, number: int) -> CudaMemory:
    memory = CudaMemory(driver(), number, value.nbytes)
    memory.write(np.ascontiguousarray(value))
    return memory


# References that memory has while `_take` looks at it: the list of operands, the local variable,
# getrefcount's argument, and the operand that is an array.
_OWN_REFERENCES = 4


def _take(number: int, operands: Sequence[Any], also: Sequence[Any] = ()) -> CudaMemory | None:
    """The memory of a donated operand, if nothing else refers to it.

    That of other libraries stays as it is: they see it, and were told that it does not change.
    """
    memory: CudaMemory = operands[number]
    if memory.lender is not None or sys.getrefcount(memory) > _OWN_REFERENCES:
        return None
    return memory


def _result(memory: Any, aval: ShapedArray, home: SingleDeviceSharding | None) -> Array:
    return from_memory(0, memory, aval, home)


def _run(
    native: NativeProgram, frames: Sequence[list[int]], devices: Sequence[Device | None]
) -> None:
    """Put a program's work into the streams of its devices."""
    assert isinstance(native, CudaProgram)
    gpu, numbers = driver(), [number_of(device) for device in devices]
    records = native.records(numbers)
    size = native.staging_bytes
    stagings = [gpu.allocate_pinned(size) if size else 0 for _ in numbers]
    try:
        given = zip(frames, records.addresses, stagings, strict=True)
        for number in numbers:
            cuda_reports.begun(gpu, number, native)
        native.run_frames([[*words, record, staging] for words, record, staging in given])
    finally:
        for number, staging in zip(numbers, stagings, strict=True):
            if staging:
                gpu.free_pinned(number, staging)
    native.check(records)
    native.free_records(numbers).append(records)


def _program(
    encoded: Encoded,
    kept: Any,
    again: Callable[[], NativeProgram],
    devices: Sequence[Device | None],
) -> NativeProgram:
    """A program of the disk, and its machine code while its jaxpr is there to make that again."""
    made = CudaProgram(encoded, kept, again=again)
    for device in devices:
        made.images(number_of(device))
    return made


def _direct(collective: Any, *how: Any) -> Any:
    """A collective between processes by NCCL, where that can be."""
    return cuda_exchange.direct(collective, *how)


def _own_passes(is_spread: bool) -> Sequence[Pass]:
    own = (definitions.write_definitions,)
    return (*own, cuda_numbers.in_numbers_of_nccl) if is_spread else own


BACKEND = Backend(
    "cuda",
    cuda_assemble,
    _alloc,
    _operand,
    lambda memory: memory.address,
    _result,
    _run,
    lambda: 1,
    cuda_reports.memory_report,
    _take,
    _program,
    direct=_direct,
    shares_work=False,
    own_passes=_own_passes,
)
