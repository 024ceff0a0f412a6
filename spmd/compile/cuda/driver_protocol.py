"""The driver protocol: what the CUDA backend asks of a GPU, or of the emulator of one.

The one idea: programs are run by the native executor, whose steps call the driver's own C
functions; Python only makes modules, memory and streams. So a driver is a few methods, and a table
of addresses with the signatures of the CUDA driver API. There are two: CuPy's, on GPUs, and the
emulator's, anywhere (`SPMD_CUDA_DRIVER`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from spmd.base.record import record
from spmd.compile.cuda.launch import Compiled


@record
class DeviceFacts:
    """A GPU: its name, its architecture as NVRTC calls it, and its bytes of memory."""

    name: str
    arch: str
    memory: int


@record
class Entries:
    """Addresses of C functions; each gives 0, or an error code that `Driver.error` explains.

    current cuCtxSetCurrent(context): the device of the calls below, by this thread
    launch  cuLaunchKernel(function, grid x, y, z, block x, y, z, shared bytes, stream,
            pointers to the arguments, null)
    copy    cuMemcpyAsync(target, source, bytes, stream): between any memories
    wait    cuStreamSynchronize(stream)
    record  cuEventRecord(event, stream)
    wait_event  cuStreamWaitEvent(stream, event, 0)
    graph   cuGraphLaunch(graph, stream)
    """

    current: int
    launch: int
    copy: int
    wait: int
    record: int
    wait_event: int
    graph: int


class Driver(Protocol):
    """The interface of a CUDA driver; devices are numbered from 0 within this process."""

    name: str
    # Whether `entries` run Python code: then no program may hold the GIL while it runs.
    entries_run_python: bool
    # Whether NCCL may be given its streams and its memory.
    carries_nccl: bool
    entries: Entries

    def device_count(self) -> int:
        """How many devices this process has; 0 where there is no GPU."""
        ...

    def missing(self) -> str:
        """The reason that there are no devices, and what to do, in one sentence."""
        ...

    def facts(self, device: int) -> DeviceFacts:
        """The name, architecture and memory of a device."""
        ...

    def bus_id(self, device: int) -> str:
        """A name of the device that no other one of the host has, in any process."""
        ...

    def at(self, device: int) -> AbstractContextManager[object]:
        """Make a device this thread's current one within a `with` block."""
        ...

    # -- memory --

    # Streams are those for programs where no other is named.

    def allocate(self, device: int, nbytes: int, stream: int | None = None) -> int:
        """The address of new memory of a device, aligned to 256 bytes; its contents are undefined.

        Raises a MemoryError if there is none left. Work of the stream may use it at once.
        """
        ...

    def free(self, device: int, address: int, stream: int | None = None) -> None:
        """Free memory as soon as the work that is now in the stream it was made for has ended."""
        ...

    def allocate_pinned(self, nbytes: int) -> int:
        """The address of host memory that copies of all devices may read and write."""
        ...

    def free_pinned(self, device: int, address: int, stream: int | None = None) -> None:
        """Free host memory as soon as the work that is in the stream now has ended."""
        ...

    def memory_in_use(self, device: int) -> tuple[int, int]:
        """The bytes of a device that arrays and arenas hold now, and the most that they held."""
        ...

    def device_of(self, address: int) -> int | None:
        """The device whose memory an address is in; None if it is the host's."""
        ...

    # -- work --

    def context(self, device: int) -> int:
        """The handle of the device's context."""
        ...

    def stream(self, device: int) -> int:
        """The handle of the device's stream for programs: its work runs in order, later."""
        ...

    def exchange_stream(self, device: int) -> int:
        """The handle of the device's stream for exchanges with other devices."""
        ...

    def upload_stream(self, device: int) -> int:
        """The handle of the device's stream for copies to its memory."""
        ...

    def download_stream(self, device: int) -> int:
        """The handle of the device's stream for copies to the host."""
        ...

    def new_event(self, device: int) -> int:
        """The handle of an event, for which nothing waits before it is recorded."""
        ...

    def record_event(self, device: int, event: int, stream: int | None = None) -> None:
        """Let an event happen when the work that is in the stream now has ended."""
        ...

    def wait_event(self, device: int, stream: int, event: int) -> None:
        """Let work that comes into a stream of the device wait for an event, of any device."""
        ...

    def synchronize_event(self, device: int, event: int) -> None:
        """Wait for an event as it was recorded last; raises a `CudaError` as `synchronize`."""
        ...

    def has_happened(self, device: int, event: int) -> bool:
        """Whether an event has happened as it was recorded last; the host doesn't wait."""
        ...

    def free_event(self, device: int, event: int) -> None:
        """Free an event; what waits for it goes on waiting."""
        ...

    def order(self, device: int, first: int, then: int) -> None:
        """Let work that is put into stream `then` from now on wait for that in stream `first`.

        Both are handles of streams of the device, by which the host does not wait; 1 and 2 are
        CUDA's names for its default streams.
        """
        ...

    def begin_capture(self, device: int) -> int:
        """The handle of a stream of the device whose work is kept for a graph, not done.

        Until `end_capture` this thread may not allocate, nor wait for a stream.
        """
        ...

    def end_capture(self, device: int, stream: int) -> int:
        """The handle of a graph: what `begin_capture`'s stream was given, as one piece of work."""
        ...

    def replay(self, device: int, graph: int) -> None:
        """Put a graph into the device's stream."""
        ...

    def free_graph(self, device: int, graph: int) -> None:
        """Free a graph; what the device's stream has of it is still done."""
        ...

    def load(self, device: int, image: Compiled) -> int:
        """The handle of a module on a device."""
        ...

    def function(self, device: int, module: int, symbol: str, shared: int) -> int:
        """The handle of a function of a module, which blocks of so many shared bytes may run."""
        ...

    def copy(
        self, device: int, target: int, source: int, nbytes: int, stream: int | None = None
    ) -> None:
        """Put a copy into a stream of the device, between any memories."""
        ...

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
        """Put a copy of rows of `nbytes` each into a stream, whose starts are steps apart."""
        ...

    def clear(self, device: int, address: int, nbytes: int, stream: int | None = None) -> None:
        """Put into a stream of the device that memory becomes zeros."""
        ...

    def mark(self, device: int, stream: int | None = None) -> Callable[[], bool]:
        """A function that says whether the work that is in the stream now has ended."""
        ...

    def upload(
        self, device: int, target: int, source: int, nbytes: int, before: int, after: int
    ) -> None:
        """Copy pinned memory beside the work of the device's stream, in the stream for uploads.

        The copy waits for the event `before`; `after` is recorded behind it. Work that comes into
        the device's stream from now on waits for it.
        """
        ...

    def synchronize(self, device: int, stream: int | None = None) -> None:
        """Wait for a stream of the device; raises a `CudaError` if any of its work failed."""
        ...

    def is_idle(self, device: int) -> bool:
        """Whether the device's stream has no work left."""
        ...

    def error(self, code: int) -> str:
        """The meaning of an error code, in one sentence."""
        ...
