"""The emulator as a driver: its streams are late, and their order is chance.

A GPU may be ahead or behind, so a program must not depend on it. Here work is done only when
somebody waits for it, and work of other devices at random moments: a wait that a program lacks
shows. Operands and sizes are checked when a call is made and again when its work is done, in which
time memory may have been freed. A failure of work is told to the next one who waits for its stream,
and drops what is behind it; unlike a GPU, the device can be used again after that.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from spmd.base.errors import CudaError, OutOfMemoryError, SpmdError
from spmd.compile.cuda.driver_protocol import DeviceFacts, Entries
from spmd.compile.cuda.emulator.code import Kernel, load, symbols_of
from spmd.compile.cuda.emulator.device_memory import CAPACITY, POISON, device_of
from spmd.compile.cuda.emulator.gpu import Gpu
from spmd.compile.cuda.emulator.layout import MOST_SHARED, Mode
from spmd.compile.cuda.emulator.races import READ, WRITTEN
from spmd.compile.cuda.emulator.streams import Streams, Work
from spmd.compile.cuda.launch import SHARED_WITHOUT_ASKING, Compiled, Launch

ARCH = "sm_90"
# The driver keeps 1 KiB of each block's shared memory for itself.
_MOST_SHARED = MOST_SHARED - 1024
_PINNED_ALIGNMENT = 256
# Handles of streams, functions, graphs and events: numbers that are neither addresses nor small.
_FIRST_STREAM, _FIRST_FUNCTION, _FIRST_MODULE = 0x5700_0000, 0x6F00_0000, 0x3D00_0000
_FIRST_CONTEXT, _FIRST_GRAPH, _FIRST_EVENT = 0x2B00_0000, 0x7900_0000, 0xE500_0000
# Codes of failures begin here; CUDA's own end before.
_FIRST_CODE = 100_000
_KEPT_FAILURES = 256

_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_uint64,  # function
    *[ctypes.c_uint32] * 7,  # grid, block, shared bytes
    ctypes.c_uint64,  # stream
    ctypes.c_void_p,  # pointers to the arguments
    ctypes.c_void_p,
)
_COPY = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 4)
_WAIT = _CURRENT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)
_RECORD = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 2)
_WAIT_EVENT = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 2, ctypes.c_uint32)


# The names of a device's default streams in CUDA, for any thread and for each.
_DEFAULT_STREAMS = 1, 2


class EmulatorDriver:
    """`driver_protocol.Driver`, by emulated GPUs. All methods may be called from any thread."""

    name = "emulator"
    entries_run_python = True
    carries_nccl = False  # a test that stands in for NCCL says otherwise

    def __init__(
        self, devices: int = 1, mode: Mode = "checked", seed: int = 0, capacity: int = CAPACITY
    ):
        self.mode: Mode = mode
        self._gpus = [Gpu(k, capacity, seed) for k in range(devices)]
        self._lock = threading.RLock()
        self._streams = Streams(devices, seed, threading.Condition(self._lock))
        self._default_streams: dict[tuple[int, int], int] = {}
        # By thread of the system: Python forgets its own names of native threads after each call.
        self._current: dict[int, int] = {}
        self._modules: list[tuple[int, dict[str, Kernel]]] = []
        # Device, kernel, and the most shared bytes that its blocks may have.
        self._functions: list[tuple[int, Kernel, int]] = []
        self.pinned: dict[int, np.ndarray] = {}
        # Ranges of which `free` was called, until the work before it is done.
        self._freed: dict[int, int] = {}
        self._in_use = [0] * devices
        self._most_in_use = [0] * devices
        # By device.
        self._exchange_streams = [self._streams.new(k) for k in range(devices)]
        self._upload_streams = [self._streams.new(k) for k in range(devices)]
        self._download_streams = [self._streams.new(k) for k in range(devices)]
        # The newest record of each event, as work of a stream; None before the first.
        self.events: dict[int, Work | None] = {}
        self._next_event = _FIRST_EVENT
        self._graphs: list[tuple[int, list[Work] | None]] = []
        # Handles of streams for captures, by device.
        self._idle_streams: list[list[int]] = [[] for _ in range(devices)]
        self._failures: dict[int, str] = {}
        self._codes = _FIRST_CODE
        # ctypes frees functions without a reference.
        self._kept = (
            _CURRENT(self._current_entry),
            _LAUNCH(self._launch_entry),
            _COPY(self._copy_entry),
            _WAIT(self._wait_entry),
            _RECORD(self._record_entry),
            _WAIT_EVENT(self._wait_event_entry),
            _RECORD(self._graph_entry),
        )
        addresses = [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in self._kept]
        self.entries = Entries(*addresses)

    def device_count(self) -> int:
        """How many devices there are."""
        return len(self._gpus)

    def missing(self) -> str:
        """The reason that there are no devices."""
        return "SPMD_NUM_CUDA_DEVICES is 0"

    def facts(self, device: int) -> DeviceFacts:
        """The name, architecture and memory of a device."""
        gpu = self._gpu(device)
        return DeviceFacts(f"emulated GPU {device}", ARCH, gpu.memory.capacity)

    def bus_id(self, device: int) -> str:
        """A name that no other emulated device has."""
        self._gpu(device)
        return f"emulated {os.getpid()}:{device}"

    @contextmanager
    def at(self, device: int) -> Iterator[None]:
        """Make a device this thread's current one within a `with` block."""
        thread = threading.get_native_id()
        before = self._current.get(thread)
        self._gpu(device)
        self._current[thread] = device
        try:
            yield
        finally:
            if before is None:
                del self._current[thread]
            else:
                self._current[thread] = before

    # -- memory --

    def allocate(self, device: int, nbytes: int, stream: int | None = None) -> int:
        """The address of new memory of a device, full of NaN; for a stream of another library."""
        with self._lock:
            gpu = self._gpu(device)
            self._streams.check_no_capture("an allocation")
            if nbytes < 0:
                raise CudaError(f"allocate: {nbytes} bytes")
            try:
                address = gpu.memory.allocate(nbytes)
            except OutOfMemoryError:
                self._streams.run(device)  # what is freed behind its work
                address = gpu.memory.allocate(nbytes)
            number = self._stream_number(device, stream)
            gpu.races.allocated(address, number, self._streams.last(number))
            self._in_use[device] += nbytes
            self._most_in_use[device] = max(self._most_in_use[device], self._in_use[device])
            return address

    def free(self, device: int, address: int, stream: int | None = None) -> None:
        """Free memory when the work that is in the device's stream, or another, now is done."""
        with self._lock:
            memory = self._gpu(device).memory
            if address in self._freed:
                raise CudaError(f"free: {address:#x} of CUDA device {device} is freed already")
            nbytes = memory.size_of(address)
            self._freed[address] = nbytes
            self._in_use[device] -= nbytes

            def release() -> None:
                try:
                    self._touch(device, "free", address, nbytes, WRITTEN)
                finally:
                    self._gpus[device].races.freed(address)
                    memory.free(address)
                    del self._freed[address]

            number = self._stream_number(device, stream)
            self._streams.put(number, release, always=True)

    def allocate_pinned(self, nbytes: int) -> int:
        """The address of host memory, full of NaN."""
        with self._lock:
            self._streams.check_no_capture("an allocation")
            room = np.full(nbytes + _PINNED_ALIGNMENT, POISON, np.uint8)
            address = -(-room.ctypes.data // _PINNED_ALIGNMENT) * _PINNED_ALIGNMENT
            self.pinned[address] = room
            return address

    def free_pinned(self, device: int, address: int, stream: int | None = None) -> None:
        """Free host memory when the work that is now in a stream of the device is done."""
        with self._lock:
            if address not in self.pinned:
                raise CudaError(f"free_pinned: {address:#x} is no pinned memory")
            number = self._stream_number(device, stream)
            self._streams.put(number, lambda: self.release_pinned(address), always=True)

    def release_pinned(self, address: int) -> None:
        """Free host memory that no work uses any more."""
        with self._lock:
            self.pinned.pop(address)[:] = POISON

    def memory_in_use(self, device: int) -> tuple[int, int]:
        """The bytes that are allocated and not freed now, and the most that were."""
        self._gpu(device)
        return self._in_use[device], self._most_in_use[device]

    def device_of(self, address: int) -> int | None:
        """The device that an address belongs to; None for the host's."""
        return device_of(address)

    # -- work --

    def context(self, device: int) -> int:
        """The handle of the device's context."""
        self._gpu(device)
        return _FIRST_CONTEXT + device

    def stream(self, device: int) -> int:
        """The handle of the device's stream."""
        self._gpu(device)
        return _FIRST_STREAM + device

    def exchange_stream(self, device: int) -> int:
        """The handle of the device's stream for exchanges; from now on races are looked for."""
        self._look_for_races()
        self._gpu(device)
        return _FIRST_STREAM + self._exchange_streams[device]

    def upload_stream(self, device: int) -> int:
        """The handle of the device's stream for copies to its memory; races are looked for."""
        self._look_for_races()
        self._gpu(device)
        return _FIRST_STREAM + self._upload_streams[device]

    def download_stream(self, device: int) -> int:
        """The handle of the device's stream for copies to the host; races are looked for."""
        self._look_for_races()
        self._gpu(device)
        return _FIRST_STREAM + self._download_streams[device]

    def new_event(self, device: int) -> int:
        """The handle of an event."""
        with self._lock:
            self._gpu(device)
            event, self._next_event = self._next_event, self._next_event + 1
            self.events[event] = None
            return event

    def free_event(self, device: int, event: int) -> None:
        """Free an event."""
        with self._lock:
            del self.events[event]

    def record_event(self, device: int, event: int, stream: int | None = None) -> None:
        """Let an event happen when the work that is in the device's stream, or another, has."""
        with self._lock:
            number = self._stream_number(device, stream)
            if event not in self.events:
                raise CudaError(f"{event:#x} is no event")
            self.events[event] = self._streams.mark(number)

    def has_happened(self, device: int, event: int) -> bool:
        """Whether an event has happened; repeated queries let its stream proceed."""
        with self._lock:
            mark = self.events[event]
            return mark is None or self._streams.has_happened(mark)

    def wait_event(self, device: int, stream: int, event: int) -> None:
        """Let work that comes into a stream wait for an event as it was recorded last."""
        with self._lock:
            if event not in self.events:
                raise CudaError(f"{event:#x} is no event")
            mark = self.events[event]
            if mark is not None:
                self._streams.wait_for(self._number(device, stream), mark)

    def synchronize_event(self, device: int, event: int) -> None:
        """Do the work before an event; raises a `CudaError` if any of its device's failed."""
        with self._lock:
            self._gpu(device)
            self._streams.check_no_capture("a wait for an event")
            if event not in self.events:
                raise CudaError(f"{event:#x} is no event")
            mark = self.events[event]
            if mark is not None:
                self._streams.wait_until(mark)

    def new_stream(self, device: int) -> int:
        """The handle of another stream of a device, as other libraries have them."""
        with self._lock:
            self._gpu(device)
            self._look_for_races()
            return _FIRST_STREAM + self._streams.new(device)

    def order(self, device: int, first: int, then: int) -> None:
        """Let work that comes into stream `then` wait for the work that is in stream `first`."""
        with self._lock:
            before, after = self._number(device, first), self._number(device, then)
            self._streams.wait_for(after, self._streams.mark(before))

    def mark(self, device: int, stream: int | None = None) -> Callable[[], bool]:
        """A function that says whether the work that is now in a stream of the device is done.

        Repeated questions let the work get on.
        """
        with self._lock:
            number = self._stream_number(device, stream)
            event = self._streams.mark(number)

        def has_happened() -> bool:
            with self._lock:
                if not event.is_done:
                    self._streams.step(number)
                return self._streams.has_happened(event)

        return has_happened

    def submit(self, stream: int, work: Callable[[], object]) -> None:
        """Put work of another library into a stream; it gives `WAITS` while it can't go on."""
        with self._lock:
            self._streams.put(self._number(-1, stream), work)

    def host_address(self, address: int, nbytes: int, what: str, how: int = 0) -> int:
        """The host's address of a range of any memory, which work of another library touches.

        `how` is `READ` or `WRITTEN`.
        """
        with self._lock:
            found, owner = self._memory(address, nbytes, what), device_of(address)
            if how and owner is not None:
                self._touch(owner, what, address, nbytes, how)
            return found

    def load(self, device: int, image: Compiled) -> int:
        """The handle of a module on a device; its PTX is translated."""
        self._gpu(device)
        if not image.ptx:
            raise CudaError("load: the module has machine code only, and the emulator runs PTX")
        kernels = load(image.ptx, symbols_of(image.ptx), self.mode, image.source)
        with self._lock:
            self._modules.append((device, kernels))
            return _FIRST_MODULE + len(self._modules) - 1

    def function(self, device: int, module: int, symbol: str, shared: int) -> int:
        """The handle of a function of a module, for blocks of at most so many shared bytes."""
        with self._lock:
            owner, kernels = _at(self._modules, module - _FIRST_MODULE, "module", module)
            if owner != device:
                raise CudaError(
                    f"function {symbol}: the module is on CUDA device {owner}, not {device}"
                )
            if symbol not in kernels:
                raise CudaError(f"function {symbol}: the module has {', '.join(kernels)}")
            if shared > _MOST_SHARED:
                raise CudaError(
                    f"function {symbol}: {shared} shared bytes a block; there are {_MOST_SHARED}"
                )
            most = max(shared, SHARED_WITHOUT_ASKING)
            self._functions.append((device, kernels[symbol], most))
            return _FIRST_FUNCTION + len(self._functions) - 1

    def copy(
        self, device: int, target: int, source: int, nbytes: int, stream: int | None = None
    ) -> None:
        """Put a copy into the device's stream, or another, between any memories."""
        with self._lock:
            self._put_copy(self._stream_number(device, stream), target, source, nbytes)

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
        """Put a copy of rows whose starts are steps apart into the device's stream, or another."""
        if nbytes > min(target_step, source_step):
            raise CudaError(
                f"copy_rows: rows of {nbytes} bytes, {target_step} and {source_step} apart"
            )
        with self._lock:
            number = self._stream_number(device, stream)
            self._put_copy(number, target, source, nbytes, rows, target_step, source_step)

    def upload(
        self, device: int, target: int, source: int, nbytes: int, before: int, after: int
    ) -> None:
        """Put a copy into the stream for uploads, between two events."""
        with self._lock:
            stream = self.upload_stream(device)
            self.wait_event(device, stream, before)
            self._put_copy(self._number(device, stream), target, source, nbytes)
            self.record_event(device, after, stream)
            self.wait_event(device, self.stream(device), after)

    def clear(self, device: int, address: int, nbytes: int, stream: int | None = None) -> None:
        """Put into the device's stream, or another, that memory becomes zeros."""
        with self._lock:
            number = self._stream_number(device, stream)
            self._memory(address, nbytes, "clear")
            self._streams.put(number, lambda: self._clear(address, nbytes))

    def _clear(self, address: int, nbytes: int) -> None:
        ctypes.memset(self._memory(address, nbytes, "clear"), 0, nbytes)
        owner = device_of(address)
        if owner is not None:
            self._touch(owner, "a clearing", address, nbytes, WRITTEN)

    def synchronize(self, device: int, stream: int | None = None) -> None:
        """Do the work of the device's stream, or another; raises a `CudaError` if any failed."""
        with self._lock:
            number = self._stream_number(device, stream)
            self._streams.check_no_capture("a wait for a stream")
            self._streams.wait(number)

    def is_idle(self, device: int) -> bool:
        """Whether the stream has no work left; repeated queries let its work proceed."""
        with self._lock:
            self._gpu(device)
            return self._streams.is_idle(device)

    def begin_capture(self, device: int) -> int:
        """The handle of a stream of the device whose work is kept, not done."""
        with self._lock:
            self._gpu(device)
            idle = self._idle_streams[device]
            stream = idle.pop() if idle else _FIRST_STREAM + self._streams.new(device)
            self.capture(device, stream)
            return stream

    def capture(self, device: int, stream: int) -> None:
        """Begin a capture of a stream that has no work."""
        self._streams.capture(self._number(device, stream))

    def end_capture(self, device: int, stream: int) -> int:
        """The handle of a graph, the work of a captured stream."""
        with self._lock:
            self._graphs.append((device, self._streams.end_capture(self._number(device, stream))))
            self._idle_streams[device].append(stream)
            return _FIRST_GRAPH + len(self._graphs) - 1

    def replay(self, device: int, graph: int) -> None:
        """Put a graph into the device's stream."""
        with self._lock:
            owner, works = _at(self._graphs, graph - _FIRST_GRAPH, "graph", graph)
            if owner != device or works is None:
                raise CudaError(f"graph {graph:#x} is of CUDA device {owner}, or is freed")
            self._streams.replay(device, works)

    def free_graph(self, device: int, graph: int) -> None:
        """Free a graph; work that has begun goes on."""
        with self._lock:
            self._graphs[graph - _FIRST_GRAPH] = device, None

    def error(self, code: int) -> str:
        """The meaning of an error code."""
        return self._failures.get(code, f"error {code} of the emulator")

    # -- what native code calls --

    def _current_entry(self, context: int) -> int:
        def call() -> None:
            self._gpu(context - _FIRST_CONTEXT)
            self._current[threading.get_native_id()] = context - _FIRST_CONTEXT

        return self._coded(call)

    def _launch_entry(
        self,
        function: int,
        grid: int,
        grid_y: int,
        grid_z: int,
        x: int,
        y: int,
        z: int,
        shared: int,
        stream: int,
        arguments: int | None,
        more: int | None,
    ) -> int:
        def call() -> None:
            device, kernel, most = _at(
                self._functions, function - _FIRST_FUNCTION, "function", function
            )
            number = self._current_stream(stream)
            if self._streams.device_of(number) != device:
                raise CudaError(
                    f"launch of {kernel.symbol}: it is on CUDA device {device}, "
                    f"and the stream is of device {self._streams.device_of(number)}"
                )
            if (grid_y, grid_z, z) != (1, 1, 1) or 0 in (grid, x, y) or more:
                raise CudaError(
                    f"launch of {kernel.symbol}: grid {grid, grid_y, grid_z}, block {x, y, z}"
                )
            if shared > most:
                raise CudaError(
                    f"launch of {kernel.symbol}: {shared} shared bytes a block, and its function "
                    f"was made for {most}"
                )
            places = (ctypes.c_void_p * kernel.parameters).from_address(arguments or 0)
            given = [ctypes.c_int64.from_address(place or 0).value for place in places]
            launch = Launch(grid, (x, y), shared)
            gpu = self._gpus[device]
            gpu.check(kernel, launch)

            def run() -> None:
                gpu.launch(kernel, launch, given)
                work = self._streams.running
                assert work is not None
                gpu.races.touch_kernel(work, f"kernel {kernel.symbol}", given)

            self._streams.put(number, run)

        return self._coded(call)

    def _copy_entry(self, target: int, source: int, nbytes: int, stream: int) -> int:
        return self._coded(
            lambda: self._put_copy(self._current_stream(stream), target, source, nbytes)
        )

    def _wait_entry(self, stream: int) -> int:
        return self._coded(lambda: self._streams.wait(self._current_stream(stream)))

    def _record_entry(self, event: int, stream: int) -> int:
        return self._coded(lambda: self.record_event(self._current_device(stream), event, stream))

    def _wait_event_entry(self, stream: int, event: int, flags: int) -> int:
        return self._coded(lambda: self.wait_event(self._current_device(stream), stream, event))

    def _graph_entry(self, graph: int, stream: int) -> int:
        def call() -> None:
            device = self._current_device(stream)
            if stream != self.stream(device):
                raise CudaError(f"graph {graph:#x} is for the stream of CUDA device {device}")
            self.replay(device, graph)

        return self._coded(call)

    def _coded(self, call: Callable[[], None]) -> int:
        """0, or the code of the failure of a call."""
        try:
            with self._lock:
                call()
            return 0
        except Exception as error:  # it can't pass through native code
            with self._lock:
                self._codes += 1
                text = error.text if isinstance(error, SpmdError) else repr(error)
                self._failures[self._codes] = text
                self._failures.pop(self._codes - _KEPT_FAILURES, None)
                return self._codes

    # -- inside --

    def _gpu(self, device: int) -> Gpu:
        if not 0 <= device < len(self._gpus):
            raise CudaError(f"CUDA device {device}: there are {len(self._gpus)} (emulated)")
        return self._gpus[device]

    def _current_stream(self, stream: int) -> int:
        """The number of a stream, whose device must be this thread's current one."""
        current = self._current.get(threading.get_native_id())
        number = self._number(-1 if current is None else current, stream)
        device = self._streams.device_of(number)
        if current != device:
            raise CudaError(
                f"a stream of CUDA device {device}, and the current device is {current}"
            )
        return number

    def _stream_number(self, device: int, stream: int | None) -> int:
        """The number of a stream of a device; None is that for programs."""
        self._gpu(device)
        return device if stream is None else self._number(device, stream)

    def _current_device(self, stream: int) -> int:
        """The device of a stream, this thread's current one."""
        return self._streams.device_of(self._current_stream(stream))

    def _number(self, device: int, stream: int) -> int:
        """The number of a stream; the default ones are each device's own."""
        if stream in _DEFAULT_STREAMS:
            known = self._default_streams.get((device, stream))
            if known is None:
                known = self._streams.new(device)
                self._default_streams[device, stream] = known
            return known
        number = stream - _FIRST_STREAM
        if not 0 <= number < len(self._streams):
            raise CudaError(f"{stream:#x} is no stream")
        return number

    def _memory(self, address: int, nbytes: int, what: str) -> int:
        """The host's address of a range of any memory."""
        owner = device_of(address)
        if owner is None:
            if not address and nbytes:
                raise CudaError(f"{what} address 0")
            return address
        memory = self._gpu(owner).memory
        view = memory.view(address, nbytes, what)
        start = memory.start_of(address)
        if start in self._freed and self._streams.running is None:
            raise CudaError(f"{what} {address:#x} of CUDA device {owner}, which is freed")
        return view.ctypes.data

    def _look_for_races(self) -> None:
        if self.mode == "checked":
            for gpu in self._gpus:
                gpu.races.is_on = True

    def _touch(self, device: int, name: str, address: int, nbytes: int, how: int) -> None:
        """The work that is being done touches memory."""
        work = self._streams.running
        assert work is not None
        self._gpus[device].races.touch(work, name, address, nbytes, how)

    def _put_copy(
        self,
        number: int,
        target: int,
        source: int,
        nbytes: int,
        rows: int = 1,
        target_step: int = 0,
        source_step: int = 0,
    ) -> None:
        ends = [(rows - 1) * step + nbytes if rows else 0 for step in (target_step, source_step)]
        self._memory(target, ends[0], "copy to")
        self._memory(source, ends[1], "copy from")

        def move() -> None:
            into = self._memory(target, ends[0], "copy to")
            out_of = self._memory(source, ends[1], "copy from")
            for row in range(rows):
                ctypes.memmove(into + row * target_step, out_of + row * source_step, nbytes)
                places = (source + row * source_step, READ), (target + row * target_step, WRITTEN)
                for address, how in places:
                    owner = device_of(address)
                    if owner is not None:
                        self._touch(owner, "a copy", address, nbytes, how)

        self._streams.put(number, move)


def _at(table: Sequence, index: int, kind: str, handle: int):
    """An entry of a table of handles."""
    if not 0 <= index < len(table):
        raise CudaError(f"{handle:#x} is no {kind}")
    return table[index]
