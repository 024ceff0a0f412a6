"""The CUDA backend: values in the memory of GPUs, and runs whose work is in their streams.

The one idea: an array keeps its values where they were last needed. An array that the host made
moves to the device with its first use by a program there. It keeps the host's copy, since neither
changes.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from spmd.base.device import Device
from spmd.compile.cuda.driver import Driver, driver
from spmd.compile.cuda.program import CudaProgram
from spmd.compile.executable import cuda_moments, cuda_reports
from spmd.compile.executable.async_operands import deleted
from spmd.compile.executable.backend import Backend, pointer, readable
from spmd.compile.lazy import cuda_assemble, cuda_exchange, cuda_numbers, definitions
from spmd.compile.native.program.encoded import Encoded
from spmd.compile.native.runtime.run import NativeProgram
from spmd.core.aval import ShapedArray
from spmd.core.rewriting.equations import Pass
from spmd.sharding.array import Array, from_memory
from spmd.sharding.future import DeviceMemory
from spmd.sharding.named import SingleDeviceSharding

# Values of the host up to so many bytes are copied to pinned memory first: then nothing waits.
MOST_PINNED = 2**20


class CudaMemory(DeviceMemory):
    """Memory of a GPU, which is freed with the last reference to this object.

    That at `address` belongs to another library: `lender` keeps it, and no program writes there.
    Memory of a result goes back to the `home` from which the next call takes it. `ready` is the
    event after which its values are there; if it is 0, that is when the work which is in the stream
    for programs has ended. `stream` is that for which the memory was made, 0 for programs.
    `fetched` are its values on their way to the host.
    """

    __slots__ = ("device", "driver", "fetched", "home", "lender", "nbytes", "ready", "stream")

    def __init__(
        self,
        gpu: Driver,
        device: int,
        nbytes: int,
        address: int = 0,
        lender: Any = None,
        home: ResultMemory | None = None,
        stream: int = 0,
    ):
        if _read:
            _let_go()
        self.driver, self.device, self.nbytes, self.lender = gpu, device, nbytes, lender
        self.ready, self.stream, self.fetched = 0, stream, None
        self.home = home
        self.address = address or _allocated(gpu, device, max(nbytes, 1), stream)

    def precede(self, device: int, stream: int) -> None:
        """Let work that comes into a stream of a device wait until the values are there."""
        ready = self.ready or cuda_moments.computed(self.driver, self.device).note()
        self.driver.wait_event(device, stream, ready)

    def read(self, aval: ShapedArray) -> np.ndarray:
        out = np.empty(aval.shape, aval.dtype)
        gpu, device, nbytes = self.driver, self.device, out.nbytes
        if not nbytes:
            self.wait()
        elif self.fetched is not None:
            self._wait(partial(gpu.synchronize, device, gpu.download_stream(device)))
            ctypes.memmove(pointer(out), self.fetched.address, nbytes)
            self.fetched = None
        else:
            stream = gpu.download_stream(device)
            self.precede(device, stream)
            gpu.copy(device, pointer(out), self.address, nbytes, stream)
            self._wait(partial(gpu.synchronize, device, stream))
        out.flags.writeable = False
        return out

    def fetch(self) -> None:
        if self.fetched is not None or not self.nbytes:
            return
        gpu, device, stream = self.driver, self.device, self.driver.download_stream(self.device)
        fetched = _Fetched(gpu, device, self.nbytes)
        self.precede(device, stream)
        gpu.copy(device, fetched.address, self.address, self.nbytes, stream)
        self.fetched = fetched
        keep_while_read(self, device, stream)

    def defer(self, check: Callable[[], None]) -> None:
        cuda_reports.defer(self.driver, self.device, check)

    def is_done(self) -> bool:
        if not self.ready:
            return self.driver.is_idle(self.device)
        return self.driver.has_happened(self.device, self.ready)

    def wait(self) -> None:
        gpu, device, ready = self.driver, self.device, self.ready
        how = partial(gpu.synchronize_event, device, ready) if ready else None
        self._wait(how or partial(gpu.synchronize, device))

    def _wait(self, synchronize: Callable[[], None]) -> None:
        newest = cuda_moments.computed(self.driver, self.device).newest
        cuda_reports.wait(self.driver, self.device, synchronize, self.ready in (0, newest))

    def __del__(self) -> None:
        address = getattr(self, "address", 0)
        if not address or sys is None or sys.is_finalizing():
            return
        if self.lender is None:
            home = self.home
            if home is not None and len(home) < MOST_SETS:
                home.append(address)
            elif self.stream:
                gpu, device = self.driver, self.device
                gpu.order(device, gpu.stream(device), self.stream)  # programs have read it
                gpu.free(device, address, self.stream)
            else:
                self.driver.free(self.device, address)
        else:
            _read.append((self.driver.mark(self.device), self.lender))
            _let_go()


class _Fetched:
    """Pinned memory for values on their way to the host."""

    __slots__ = ("address", "device", "driver")

    def __init__(self, gpu: Driver, device: int, nbytes: int):
        self.driver, self.device, self.address = gpu, device, gpu.allocate_pinned(nbytes)

    def __del__(self) -> None:
        address = getattr(self, "address", 0)
        if address and sys is not None and not sys.is_finalizing():
            gpu, device = self.driver, self.device
            gpu.free_pinned(device, address, gpu.download_stream(device))


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
        if sys is not None and not sys.is_finalizing():
            self.release()


# So many sets of results of an executable are kept for its next calls.
MOST_SETS = 2
_result_memory: weakref.WeakSet[ResultMemory] = weakref.WeakSet()

# Memory that streams may still read, and whether they have: of other libraries, which no array
# refers to any more, and that from which values are copied. It stays until then, and no program
# writes over it.
_read: deque[tuple[Callable[[], bool], Any]] = deque()


def _let_go() -> None:
    """Let go of memory that was read meanwhile, the oldest first; the host doesn't wait."""
    with suppress(IndexError):  # other threads do so too
        while _read[0][0]():
            _read.popleft()


def _allocated(gpu: Driver, device: int, nbytes: int, stream: int) -> int:
    given = (device, nbytes, stream) if stream else (device, nbytes)
    try:
        return gpu.allocate(*given)
    except MemoryError:
        kept = [m for m in list(_result_memory) if m and (m.driver, m.device) == (gpu, device)]
        if not arenas(gpu, device) and not kept:
            raise
        arenas(gpu, device).clear()
        for memory in kept:
            memory.release()
        return gpu.allocate(*given)


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
        return uploaded(readable(x, aval), number)
    owner = x.owner
    if owner is None:
        raise deleted(x)
    if type(owner) is CudaMemory and owner.device == number:
        return owner
    if type(owner) is CudaMemory:
        return _copy_of(owner, number)
    memory = uploaded(x._value, number)
    if not isinstance(owner, DeviceMemory) and x.device is device:
        x.ptr, x.owner = 0, memory
    return memory


def moved(x: Array, device: Device) -> Array:
    """A copy of an array of one GPU on another, or on the same one the array itself."""
    memory = _operand(x, x.aval, device)
    return from_memory(0, memory, x.aval, SingleDeviceSharding(device))


def uploaded(value: np.ndarray, number: int) -> CudaMemory:
    """New memory of a GPU with values of the host, copied beside what programs compute.

    The host waits for the copy of many bytes, since it may write to its array afterwards.
    """
    gpu, value, nbytes = driver(), np.ascontiguousarray(value), value.nbytes
    stream = gpu.upload_stream(number)
    memory = CudaMemory(gpu, number, nbytes, stream=stream)
    if nbytes > MOST_PINNED:
        gpu.copy(number, memory.address, pointer(value), nbytes, stream)
    elif nbytes:
        pinned = gpu.allocate_pinned(nbytes)
        ctypes.memmove(pinned, pointer(value), nbytes)
        gpu.copy(number, memory.address, pinned, nbytes, stream)
        gpu.free_pinned(number, pinned, stream)
    arrived(memory)
    if nbytes > MOST_PINNED:
        memory.wait()
    return memory


def _copy_of(source: CudaMemory, number: int) -> CudaMemory:
    """Memory of another GPU with the same values, in its stream for copies to its memory."""
    gpu = source.driver
    stream = gpu.upload_stream(number)
    memory = CudaMemory(gpu, number, source.nbytes, stream=stream)
    if source.nbytes:
        source.precede(number, stream)
        gpu.copy(number, memory.address, source.address, source.nbytes, stream)
        keep_while_read(source, number, stream)
    arrived(memory)
    return memory


def keep_while_read(memory: CudaMemory, device: int, stream: int) -> None:
    """Keep memory, as it is, until the work that is in a stream of a device now has ended."""
    _read.append((memory.driver.mark(device, stream), memory))


def arrived(memory: CudaMemory) -> None:
    """Let what comes into the stream for programs wait for the copies to memory."""
    gpu, device = memory.driver, memory.device
    memory.ready = cuda_moments.uploaded(gpu, device).note()
    gpu.wait_event(device, gpu.stream(device), memory.ready)


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
    memory.fetched = None
    return memory


def _result(memory: Any, aval: ShapedArray, home: SingleDeviceSharding | None) -> Array:
    memory.ready = cuda_moments.computed(memory.driver, memory.device).newest
    return from_memory(0, memory, aval, home)


def _run(
    native: NativeProgram, frames: Sequence[list[int]], devices: Sequence[Device | None]
) -> None:
    """Put a program's work into the streams of its devices."""
    assert isinstance(native, CudaProgram)
    gpu, numbers = driver(), [number_of(device) for device in devices]
    records = native.records(numbers)
    given = zip(frames, records.addresses, records.stagings, strict=True)
    whole = [[*words, record, staging] for words, record, staging in given]
    for number in numbers:
        cuda_reports.begun(gpu, number, native)
    if records.bodies is not None:
        records.bodies.use(native.packed(whole))
    native.run_frames(whole)
    native.check(records)
    native.free_records(numbers).append(records)
    for number in numbers:
        cuda_moments.computed(gpu, number).note()


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
    own = (definitions.choose_precision, definitions.write_definitions)
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
