"""Programs for CUDA, ready to run: words for the executor, and functions that devices load.

They are made by `assemble.py`, or come from the disk. Of those, neither steps nor kernels are in
this process; what an error or a lost module needs is made again then.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from spmd.base.config import config
from spmd.base.errors import CollectiveError, SpmdError
from spmd.compile.cuda import stream_steps_ir
from spmd.compile.cuda.driver import CudaError, Driver, driver
from spmd.compile.cuda.images import images
from spmd.compile.cuda.launch import Compiled, Function
from spmd.compile.native.program.encoded import Encoded
from spmd.compile.native.program.steps import Program
from spmd.compile.native.runtime.run import NativeProgram, mismatch_text


class CudaProgram(NativeProgram):
    """A native program with its functions, which each device loads before it first runs it.

    `kept` is what the disk has of it beside its words: the functions with the shared bytes of a
    block, the bytes of staging memory, the names of the steps, and the numbers of events, mails and
    bodies of loops that may become graphs.
    """

    has_entry_points = False

    def __init__(
        self,
        encoded: Encoded,
        kept: tuple[tuple[tuple[str, int], ...], int, tuple[str, ...], int, int, int],
        program: Program | None = None,
        functions: Sequence[Function] = (),
        again: Callable[[], NativeProgram] | None = None,
    ):
        super().__init__(encoded, program, again)
        self.may_queue = False  # the stream is the queue
        self.kept = kept
        self._functions, self.staging_bytes, self._names, *numbers = kept
        self.events, self.mails, self.bodies = numbers
        self._texts = tuple(functions)
        # By driver and device.
        self._handles: dict[tuple[Driver, int], tuple[int, ...]] = {}
        self._records: dict[tuple[Any, ...], list[Records]] = {}

    # -- for errors --

    @cached_property
    def step_names(self) -> Sequence[str]:
        """The names of the steps; the lines in those of a stored program may be old ones."""
        with suppress(ReferenceError):  # its jaxpr may be gone
            return self._made()._names
        return self._names

    @property
    def described(self) -> str:
        """The program for errors: its name, and its steps from the first to the last."""
        names = self.step_names
        if len(names) < 2:
            return f"{self.name}: {''.join(names) or 'no steps'}"
        return f"{self.name}: {len(names)} steps, from {names[0]} to {names[-1]}"

    # -- running --

    def records(self, devices: Sequence[int]) -> Records:
        """The records of its devices for a run, which puts them back when it is enqueued."""
        free = self.free_records(devices)
        try:
            return free.pop()
        except IndexError:
            return Records(self, devices)

    def free_records(self, devices: Sequence[int]) -> list[Records]:
        """Records that no run has now."""
        return self._records.setdefault((driver(), *devices), [])

    def words(self, device: int, position: int, apart: int) -> list[int]:
        """The words of the record of a device that is at a position of the program's."""
        gpu = driver()
        handles = self._handles.get((gpu, device))
        if handles is None:
            handles = self._handles[gpu, device] = self._loaded(device)
        entries, first = gpu.entries, stream_steps_ir.FUNCTIONS + len(handles)
        exchanges = gpu.exchange_stream(device) if self.events else 0
        words = [0, 0, gpu.context(device), gpu.stream(device), exchanges]
        words += [entries.current, entries.launch, entries.copy, entries.wait]
        words += [entries.record, entries.wait_event, entries.graph, 0, position, 8 * apart, first]
        words += [first + self.events, *[0] * (2 * stream_steps_ir.MOST_BODIES), *handles]
        words += [gpu.new_event(device) for _ in range(self.events)]
        return [*words, *[0] * (stream_steps_ir.MAIL_WORDS * self.mails)]

    @property
    def record_words(self) -> int:
        """The words of a record."""
        mails = stream_steps_ir.MAIL_WORDS * self.mails
        return stream_steps_ir.FUNCTIONS + len(self._functions) + self.events + mails

    def images(self, device: int) -> Mapping[str, Compiled]:
        """The modules of its functions for a device, by symbol."""
        symbols = [symbol for symbol, _ in self._functions]
        return images(symbols, driver().facts(device).arch, self._function_texts)

    def _loaded(self, device: int) -> tuple[int, ...]:
        gpu, modules = driver(), self.images(device)
        return tuple(
            gpu.function(device, loaded(device, modules[symbol]), symbol, shared)
            for symbol, shared in self._functions
        )

    def _function_texts(self) -> Sequence[Function]:
        return self._made()._texts

    def _made(self) -> CudaProgram:
        """The program with its source; one of the disk is assembled for that."""
        made = self if self.program is not None or self._again is None else self._again()
        assert isinstance(made, CudaProgram)
        return made

    def check(self, records: Records) -> None:
        """Raise the error if a driver call of a run failed; `records` are as the run left them."""
        for words in records.each():
            code = words[stream_steps_ir.STATUS]
            if not code:
                continue
            step = self.step_names[words[stream_steps_ir.STEP]]
            gpu = records.gpu
            # Exchanges of the run are done before others begin.
            for device in records.devices if self.events else ():
                gpu.order(device, gpu.exchange_stream(device), gpu.stream(device))
            if code == stream_steps_ir.NOT_CAPTURED:
                advice = "SPMD_CUDA_GRAPHS=0 runs it without graphs"
                raise CudaError(f"{self.name}: {step}: {records.failure}; {advice}")
            if code == stream_steps_ir.MISMATCH:
                raise CollectiveError(mismatch_text(step, records.told(words)))
            raise CudaError(f"{self.name}: {step}: {driver().error(code)}")


class Records:
    """The records of a program's devices, with their events, for one run at a time.

    They stand one after the other, so that devices find each other's.
    """

    def __init__(self, native: CudaProgram, devices: Sequence[int]):
        self.gpu, self.devices, self.apart = driver(), tuple(devices), native.record_words
        self.words: array[int] = array("q")
        self._events, self._mails = native.events, native.mails
        # Staging memory, which the program has again and again: by device.
        self.stagings: list[int] = []
        for position, device in enumerate(devices):
            self.words.extend(native.words(device, position, self.apart))
        first = self.words.buffer_info()[0]
        self.addresses = [first + 8 * self.apart * k for k in range(len(self.devices))]
        size = native.staging_bytes
        self.stagings += [self.gpu.allocate_pinned(size) if size else 0 for _ in devices]
        self.bodies = Bodies(self) if native.bodies else None

    @property
    def failure(self) -> str:
        """The reason that a body was not captured."""
        return self.bodies.failure if self.bodies else ""

    def each(self) -> list[array[int]]:
        """A copy of the words of each device."""
        starts = range(0, len(self.words), self.apart)
        return [self.words[start : start + self.apart] for start in starts]

    def told(self, mine: array[int]) -> list[bool]:
        """Of each device, whether it has told as much as the one with these words."""
        first, size = mine[stream_steps_ir.MAILS], stream_steps_ir.MAIL_WORDS
        counts = [words[first + 1 :: size].tolist() for words in self.each()]
        # The first exchange of which others told less is the one that they did not reach.
        own = counts[mine[stream_steps_ir.DEVICE]]
        others = list(zip(*counts, strict=True))
        at = next(k for k, found in enumerate(others) if min(found) != own[k])
        return [count == own[at] for count in others[at]]

    def __del__(self) -> None:
        if not self.words or sys is None or sys.is_finalizing():
            return
        for device, staging in zip(self.devices, self.stagings, strict=False):
            if staging:
                self.gpu.free_pinned(device, staging)
        for device, words in zip(self.devices, self.each(), strict=False):
            first = words[stream_steps_ir.EVENTS]
            for event in words[first : first + self._events]:
                self.gpu.free_event(device, event)


class Graph:
    """A graph, which is freed with the last reference: a thread may use it while others replace it.

    `handle` is the driver's.
    """

    __slots__ = ("device", "gpu", "handle")

    def __init__(self, gpu: Driver, device: int, handle: int):
        self.gpu, self.device, self.handle = gpu, device, handle

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():
            self.gpu.free_graph(self.device, self.handle)


# By so many frames a record knows the graphs of its bodies.
_MOST_FRAMES = 4


class Bodies:
    """The graphs of the bodies of loops on predicates, whose launches native code captures.

    The one idea: a body is the same work in each iteration over a frame. A counter of iterations
    says when it is captured, and its graph is launched from then on; both are words of the record,
    which are those of other frames when a call has these.
    """

    def __init__(self, records: Records):
        self._gpu, (self._device,), self._words = records.gpu, records.devices, records.words
        self.failure = ""
        self._capturing, self._own = 0, 0  # the stream of a capture, and the record's own
        self._frames: bytes | None = None
        # By frames: the words, and the graphs that stand in them.
        self._known: dict[bytes, tuple[list[int], list[Graph]]] = {}
        self._graphs: list[Graph] = []
        self._function = _CAPTURE(self._captures)  # ctypes frees functions without a reference
        place = ctypes.cast(self._function, ctypes.c_void_p).value
        self._words[stream_steps_ir.CAPTURE] = place or 0

    def use(self, frames: bytes) -> None:
        """Let the next run be over frames."""
        if self._capturing:  # a run that a signal ended
            self._captures(0, 0, 1)
            self._frames = None
        if not config.cuda_graphs:
            self._put([0] * stream_steps_ir.MOST_BODIES, stream_steps_ir.CAPTURED_AT + 1)
            self._frames = None
        elif frames != self._frames:
            if self._frames is not None:
                if len(self._known) >= _MOST_FRAMES:
                    del self._known[next(iter(self._known))]
                self._known[self._frames] = self._words[_BODIES].tolist(), self._graphs
            words, self._graphs = self._known.pop(frames, ([0] * len(_ALL_BODIES), []))
            self._words[_BODIES] = array("q", words)
            self._frames = frames

    def _put(self, graphs: list[int], count: int) -> None:
        self._words[_BODIES] = array("q", [*graphs, *[count] * stream_steps_ir.MOST_BODIES])

    def _captures(self, record: int, body: int, ends: int) -> int:
        """Begin or end the capture of a body; native code calls it, on its own thread."""
        gpu, device, words = self._gpu, self._device, self._words
        try:
            if not ends:
                self._capturing = stream = gpu.begin_capture(device)
                self._own, words[stream_steps_ir.STREAM] = words[stream_steps_ir.STREAM], stream
                return 0
            stream, self._capturing = self._capturing, 0
            words[stream_steps_ir.STREAM] = self._own
            graph = Graph(gpu, device, gpu.end_capture(device, stream))
            self._graphs.append(graph)
            words[stream_steps_ir.BODIES + body] = graph.handle
            return 0
        except Exception as error:  # it can't pass through native code
            self.failure = error.text if isinstance(error, SpmdError) else repr(error)
            return 1


_CAPTURE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int64)
_ALL_BODIES = range(2 * stream_steps_ir.MOST_BODIES)
_BODIES = slice(stream_steps_ir.BODIES, stream_steps_ir.BODIES + len(_ALL_BODIES))


# By driver, device and module, which is kept.
_modules: dict[tuple[Driver, int, int], tuple[Compiled, int]] = {}


def loaded(device: int, image: Compiled) -> int:
    """The handle of a module on a device."""
    gpu = driver()
    known = _modules.get((gpu, device, id(image)))
    if known is None:
        known = _modules[gpu, device, id(image)] = image, gpu.load(device, image)
    return known[1]
