"""The driver of GPUs: memory pools, streams and modules of CuPy; the only file that imports it.

Machine code is loaded as NVRTC made it, never compiled by CuPy, which would flush denormals.
Native code calls `libcuda` itself: the entries are its functions. No device is touched before it is
first asked for.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import cupy
from cupy_backends.cuda.api import driver as cuda
from cupy_backends.cuda.api import runtime

from spmd.base.amounts import size_text
from spmd.base.errors import CudaError, OutOfMemoryError
from spmd.compile.cuda.driver_protocol import DeviceFacts, Entries
from spmd.compile.cuda.launch import SHARED_WITHOUT_ASKING, Compiled

_MOST_SHARED_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MEMORY_OF_A_DEVICE = 2  # cudaMemoryTypeDevice
_WITHOUT_TIME = 2  # cudaEventDisableTiming
_ANY_DIRECTION = 4  # cudaMemcpyDefault
_WITHOUT_DEFAULT = 1  # cudaStreamNonBlocking
_OF_THIS_THREAD = 1  # cudaStreamCaptureModeThreadLocal
# In the names of errors after which a context is lost, cudaError... and CUDA_ERROR_...
_LOST = "ILLEGAL", "MISALIGNED", "LAUNCHFAIL", "HARDWARESTACK", "INVALIDPC", "ASSERT"
_NO_GPU = "the NVIDIA driver shows no GPU to this process; CUDA_VISIBLE_DEVICES may hide them"


class _Gpu:
    """A device that is in use: its context, stream, pool of memory and counts."""

    def __init__(self, number: int):
        with cupy.cuda.Device(number):
            runtime.free(0)  # makes the context that CuPy and the runtime share
            self.context = cuda.ctxGetCurrent()
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self.exchange_stream = cupy.cuda.Stream(non_blocking=True)
            self.upload_stream = cupy.cuda.Stream(non_blocking=True)
            self.download_stream = cupy.cuda.Stream(non_blocking=True)
            self.pool = cupy.cuda.MemoryPool()
            facts = runtime.getDeviceProperties(number)
        name = facts["name"]
        self.facts = DeviceFacts(
            name.decode() if isinstance(name, bytes) else name,
            f"sm_{facts['major']}{facts['minor']}",
            facts["totalGlobalMem"],
        )
        self.most_in_use = 0
        every = self.stream, self.exchange_stream, self.upload_stream, self.download_stream
        self._streams: dict[int | None, Any] = {each.ptr: each for each in every}
        self._streams[None] = self.stream

    def stream_of(self, handle: int | None) -> Any:
        """CuPy's stream of a handle; that for programs if there is none."""
        return self._streams[handle]


class CupyDriver:
    """`driver_protocol.Driver`, by CuPy. All methods may be called from any thread."""

    name = "cupy"
    entries_run_python = False
    carries_nccl = True

    def __init__(self) -> None:
        self._count, self._missing = _device_count()
        self._gpus: dict[int, _Gpu] = {}
        self._lock = threading.RLock()
        # CuPy frees objects without a reference: memory by address, modules by handle.
        self._memory: dict[int, Any] = {}
        self._modules: dict[int, Any] = {}
        # Pinned memory that is freed when an event has happened.
        self._leaving: deque[tuple[Any, Any]] = deque()
        self._pinned_pool = cupy.cuda.PinnedMemoryPool()
        self.entries = _entries() if self._count else Entries(*[0] * 7)

    def device_count(self) -> int:
        """How many devices this process sees; 0 where there is no GPU or no driver."""
        return self._count

    def missing(self) -> str:
        """The reason that there are no devices, and what to do, in one sentence."""
        return self._missing

    def facts(self, device: int) -> DeviceFacts:
        """The name, architecture and memory of a device."""
        return self._gpu(device).facts

    def bus_id(self, device: int) -> str:
        """The PCI bus id of a device; parts of one GPU have the same."""
        return runtime.deviceGetPCIBusId(device)

    def at(self, device: int) -> AbstractContextManager[object]:
        """Make a device this thread's current one within a `with` block."""
        self._gpu(device)
        return cupy.cuda.Device(device)

    # -- memory --

    def allocate(self, device: int, nbytes: int, stream: int | None = None) -> int:
        """The address of new memory of a device, from its pool, which knows the stream."""
        gpu = self._gpu(device)
        try:
            with cupy.cuda.Device(device), gpu.stream_of(stream):
                memory = gpu.pool.malloc(max(nbytes, 1))
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise OutOfMemoryError(self._full(device, nbytes)) from error
        with self._lock:
            self._memory[memory.ptr] = memory
            gpu.most_in_use = max(gpu.most_in_use, gpu.pool.used_bytes())
        return memory.ptr

    def _full(self, device: int, nbytes: int) -> str:
        gpu = self._gpu(device)
        with cupy.cuda.Device(device):
            unused, total = runtime.memGetInfo()
        others = max(0, total - unused - gpu.pool.total_bytes())
        return (
            f"CUDA device {device} ({gpu.facts.name}): {size_text(nbytes)} asked, "
            f"{size_text(unused + gpu.pool.free_bytes())} of {size_text(total)} free; other "
            f"processes and CUDA itself hold {size_text(others)}"
        )

    def free(self, device: int, address: int, stream: int | None = None) -> None:
        """Free memory for its stream: what uses it next comes behind the stream's work."""
        gpu = self._gpu(device)
        with cupy.cuda.Device(device), gpu.stream_of(stream):
            self._memory.pop(address)

    def allocate_pinned(self, nbytes: int) -> int:
        """The address of pinned memory of the host."""
        self._let_go()
        memory = self._pinned_pool.malloc(max(nbytes, 1))
        self._memory[memory.ptr] = memory
        return memory.ptr

    def free_pinned(self, device: int, address: int, stream: int | None = None) -> None:
        """Free pinned memory when the work that is in the stream now has ended."""
        passed = self._event(device, stream)
        self._leaving.append((passed, self._memory.pop(address)))
        self._let_go()

    def _event(self, device: int, stream: int | None) -> Any:
        """An event that happens when the work that is in the stream now has ended."""
        gpu = self._gpu(device)
        with cupy.cuda.Device(device):
            passed = cupy.cuda.Event(disable_timing=True)
            passed.record(gpu.stream_of(stream))
        return passed

    def _let_go(self) -> None:
        """Free the pinned memory that no work uses any more."""
        for _ in range(len(self._leaving)):
            passed, memory = self._leaving.popleft()
            if not passed.done:
                self._leaving.append((passed, memory))

    def memory_in_use(self, device: int) -> tuple[int, int]:
        """The bytes that are allocated and not freed now, and the most that were."""
        gpu = self._gpu(device)
        return gpu.pool.used_bytes(), gpu.most_in_use

    def device_of(self, address: int) -> int | None:
        """The device whose memory an address is in; None if it is the host's."""
        found = self._checked(runtime.pointerGetAttributes, address)
        return found.device if found.type == _MEMORY_OF_A_DEVICE else None

    # -- work --

    def context(self, device: int) -> int:
        """The handle of the device's context, the runtime's own."""
        return self._gpu(device).context

    def stream(self, device: int) -> int:
        """The handle of the device's stream."""
        return self._gpu(device).stream.ptr

    def exchange_stream(self, device: int) -> int:
        """The handle of the device's stream for exchanges."""
        return self._gpu(device).exchange_stream.ptr

    def upload_stream(self, device: int) -> int:
        """The handle of the device's stream for copies to its memory."""
        return self._gpu(device).upload_stream.ptr

    def download_stream(self, device: int) -> int:
        """The handle of the device's stream for copies to the host."""
        return self._gpu(device).download_stream.ptr

    def new_event(self, device: int) -> int:
        """The handle of an event."""
        self._gpu(device)
        with cupy.cuda.Device(device):
            return self._checked(runtime.eventCreateWithFlags, _WITHOUT_TIME)

    def record_event(self, device: int, event: int, stream: int | None = None) -> None:
        """Record an event in a stream of the device."""
        handle = self._gpu(device).stream.ptr if stream is None else stream
        with cupy.cuda.Device(device):
            self._checked(runtime.eventRecord, event, handle)

    def wait_event(self, device: int, stream: int, event: int) -> None:
        """Let work that comes into a stream of the device wait for an event."""
        with cupy.cuda.Device(device):
            self._checked(runtime.streamWaitEvent, stream, event)

    def synchronize_event(self, device: int, event: int) -> None:
        """Wait for an event."""
        with cupy.cuda.Device(device):
            self._checked(runtime.eventSynchronize, event)

    def has_happened(self, device: int, event: int) -> bool:
        """Whether an event has happened."""
        with cupy.cuda.Device(device):
            return self._checked(runtime.eventQuery, event) == 0

    def free_event(self, device: int, event: int) -> None:
        """Free an event, when it has happened."""
        with cupy.cuda.Device(device):
            runtime.eventDestroy(event)

    def order(self, device: int, first: int, then: int) -> None:
        """Let work that comes into stream `then` wait for the work that is in stream `first`."""
        self._gpu(device)
        with cupy.cuda.Device(device):
            event = self._checked(runtime.eventCreateWithFlags, _WITHOUT_TIME)
            try:
                self._checked(runtime.eventRecord, event, first)
                self._checked(runtime.streamWaitEvent, then, event)
            finally:
                runtime.eventDestroy(event)  # when it has happened

    def begin_capture(self, device: int) -> int:
        """The handle of a stream of its own, which this thread captures."""
        self._gpu(device)
        with cupy.cuda.Device(device):
            stream = self._checked(runtime.streamCreateWithFlags, _WITHOUT_DEFAULT)
            self._checked(runtime.streamBeginCapture, stream, _OF_THIS_THREAD)
        return stream

    def end_capture(self, device: int, stream: int) -> int:
        """The handle of a graph that can be launched."""
        with cupy.cuda.Device(device):
            try:
                graph = self._checked(runtime.streamEndCapture, stream)
            finally:
                runtime.streamDestroy(stream)
            try:
                return self._checked(runtime.graphInstantiate, graph)
            finally:
                runtime.graphDestroy(graph)

    def replay(self, device: int, graph: int) -> None:
        """Launch a graph in the device's stream."""
        stream = self._gpu(device).stream.ptr
        with cupy.cuda.Device(device):
            self._checked(runtime.graphLaunch, graph, stream)

    def free_graph(self, device: int, graph: int) -> None:
        """Free a graph; CUDA does so when it has ended."""
        with cupy.cuda.Device(device):
            runtime.graphExecDestroy(graph)

    def load(self, device: int, image: Compiled) -> int:
        """The handle of a module on a device."""
        self._gpu(device)
        module = cupy.cuda.function.Module()
        with cupy.cuda.Device(device):
            self._checked(module.load, image.cubin)
        with self._lock:
            self._modules[module.ptr] = module
        return module.ptr

    def function(self, device: int, module: int, symbol: str, shared: int) -> int:
        """The handle of a function of a module, for blocks of at most so many shared bytes."""
        with cupy.cuda.Device(device):
            function = self._checked(self._modules[module].get_function, symbol)
            if shared > SHARED_WITHOUT_ASKING:
                self._checked(cuda.funcSetAttribute, function.ptr, _MOST_SHARED_ATTRIBUTE, shared)
        return function.ptr

    def copy(
        self, device: int, target: int, source: int, nbytes: int, stream: int | None = None
    ) -> None:
        """Put a copy into a stream of the device, between any memories."""
        handle = self._gpu(device).stream.ptr if stream is None else stream
        with cupy.cuda.Device(device):
            self._checked(runtime.memcpyAsync, target, source, nbytes, _ANY_DIRECTION, handle)

    def copy_rows(
        self,
        device: int,
        target: int,
        target_step: int,
        source: int,
        source_step: int,
        nbytes: int,
        rows: int,
        stream: int | None = None,
    ) -> None:
        """Put a copy of rows whose starts are steps apart into a stream of the device."""
        handle = self._gpu(device).stream.ptr if stream is None else stream
        given = target, target_step, source, source_step, nbytes, rows, _ANY_DIRECTION, handle
        with cupy.cuda.Device(device):
            self._checked(runtime.memcpy2DAsync, *given)

    def clear(self, device: int, address: int, nbytes: int, stream: int | None = None) -> None:
        """Put into a stream of the device that memory becomes zeros."""
        handle = self._gpu(device).stream.ptr if stream is None else stream
        with cupy.cuda.Device(device):
            self._checked(runtime.memsetAsync, address, 0, nbytes, handle)

    def mark(self, device: int, stream: int | None = None) -> Callable[[], bool]:
        """A function that says whether the work that is in the stream now has ended."""
        passed = self._event(device, stream)
        return lambda: bool(passed.done)

    def upload(
        self, device: int, target: int, source: int, nbytes: int, before: int, after: int
    ) -> None:
        """Copy pinned memory in the stream for uploads, between two events."""
        gpu = self._gpu(device)
        stream = gpu.upload_stream.ptr
        with cupy.cuda.Device(device):
            self._checked(runtime.streamWaitEvent, stream, before)
            self._checked(runtime.memcpyAsync, target, source, nbytes, _ANY_DIRECTION, stream)
            self._checked(runtime.eventRecord, after, stream)
            self._checked(runtime.streamWaitEvent, gpu.stream.ptr, after)

    def synchronize(self, device: int, stream: int | None = None) -> None:
        """Wait for a stream of the device; raises a `CudaError` if any of its work failed."""
        gpu = self._gpu(device)
        with cupy.cuda.Device(device):
            self._checked(gpu.stream_of(stream).synchronize)

    def is_idle(self, device: int) -> bool:
        """Whether the device's stream has no work left."""
        gpu = self._gpu(device)
        with cupy.cuda.Device(device):
            return bool(gpu.stream.done)

    def error(self, code: int) -> str:
        """The meaning of an error code of `libcuda`."""
        try:
            return _explained(str(cuda.CUDADriverError(code)))
        except KeyError:  # a code that this CuPy does not know
            return f"CUDA error {code}"

    # -- inside --

    def _gpu(self, device: int) -> _Gpu:
        with self._lock:
            found = self._gpus.get(device)
            if found is None:
                if not 0 <= device < self._count:
                    raise CudaError(f"CUDA device {device}: there are {self._count}")
                found = self._gpus[device] = self._checked(_Gpu, device)
            return found

    def _checked(self, call: Any, *args: Any) -> Any:
        """The result of a call of CuPy; its errors are `CudaError`s."""
        try:
            return call(*args)
        except (runtime.CUDARuntimeError, cuda.CUDADriverError) as error:
            raise CudaError(_explained(str(error))) from error


def _device_count() -> tuple[int, str]:
    """How many devices there are, and why, if there are none."""
    try:
        return runtime.getDeviceCount(), _NO_GPU
    except runtime.CUDARuntimeError as error:
        text = str(error)
    if text.startswith("cudaErrorNoDevice"):
        return 0, _NO_GPU
    if not text.startswith("cudaErrorInsufficientDriver"):
        raise CudaError(_explained(text))
    have, needed = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if not have:
        return 0, f"there is no NVIDIA driver; install one for CUDA {_version(needed)}"
    return 0, (
        f"the NVIDIA driver is for CUDA {_version(have)}, and CuPy here for CUDA "
        f"{_version(needed)}; install a newer driver"
    )


def _version(number: int) -> str:
    """A version as CUDA has it, 13020, as text."""
    return f"{number // 1000}.{number % 1000 // 10}"


def library() -> Any:
    """The driver's library, which CuPy has loaded too."""
    return ctypes.CDLL("libcuda.so.1")


def _entries() -> Entries:
    """The functions of `libcuda`, by address."""
    names = (
        *("cuCtxSetCurrent", "cuLaunchKernel", "cuMemcpyAsync", "cuStreamSynchronize"),
        *("cuEventRecord", "cuStreamWaitEvent", "cuGraphLaunch"),
    )
    functions = [getattr(library(), name) for name in names]
    return Entries(*[ctypes.cast(f, ctypes.c_void_p).value or 0 for f in functions])


def _explained(text: str) -> str:
    """CUDA's own words, with a hint where a kernel failed: the context is lost after that."""
    letters = text.upper().replace("_", "")
    if any(word in letters for word in _LOST):
        return (
            f"{text}. No CUDA call of this process works after that; SPMD_CUDA_DRIVER=emulator "
            "runs the same program and names the line"
        )
    return text
