"""Build and run programs: the Python side of the executor.

The one idea: `build_program` checks and encodes a `Program` once; after that a run is one foreign
call with two addresses. The program owns its words; the caller owns the frames, one buffer per
concurrent call, so that a program may run in several threads at once.

    native = build_program(Program(bases=(nbytes, ...), steps=(...), devices=n))
    frames = native.new_frames()           # i64 words: frames[device * bases + base] = address
    frames[:] = ...
    native.run(frames)

Dispatchers that count nanoseconds skip the buffer: see `spmd.compile.native.cpython.entry_point`.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from spmd.base.errors import CollectiveError, SpmdError
from spmd.compile.lazy import encode
from spmd.compile.native.program import run_layout
from spmd.compile.native.program.encoded import Encoded, StepsById
from spmd.compile.native.program.steps import Host, Loop, Program, RankExchange, Step, View
from spmd.compile.native.runtime.load import load_parts, num_threads, raise_signal, runtime
from spmd.transport.flight_recorder import FLIGHT
from spmd.transport.progress_thread import PROGRESS

# A program is long if all threads together (or so many) would compute for this time at least.
LONG_NS = 1e6
_MOST_LONG_THREADS = 8
# A program that takes longer, on one thread, waits for the others where these are being compiled.
_PATIENT_NS = 1e8

# Programs estimated below this keep the GIL: releasing and taking it back costs more than what
# another thread could do meanwhile. A loop whose trips are not known may take any time.
SHORT_PS = 20_000_000

_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


def build_program(program: Program) -> NativeProgram:
    """Check a program, compile its code, and make it ready to run.

    A malformed program (a slot outside its base, overlapping groups, ...) is a ValueError.
    """
    return NativeProgram(encode.encoded(program), program)


class NativeProgram:
    """A program ready to run. Immutable; may run in several threads at once.

    `program` is its source; None if it came from the disk as words. Then `again` compiles it, for a
    failed run to say which step it was.
    """

    # Whether native entry points may call it with the addresses of arrays of the host.
    has_entry_points = True
    # Facts that its platform stores with its words, in built-in types.
    kept: Any = None

    def __init__(
        self,
        encoded: Encoded,
        program: Program | None = None,
        again: Callable[[], NativeProgram] | None = None,
    ):
        devices = encoded.devices
        self.encoded = encoded
        self.program = program
        self._again = again
        self.name = ""
        self.devices = devices
        self.cost_ns = encoded.cost_ps * devices / 1000
        self._words = encoded.words
        self._everyone = np.arange(devices, dtype=np.int32)
        self._callbacks = _Callbacks(encoded.steps, devices) if encoded.calls_python else None
        # Kept by the queue: how many of the next calls run at once although they are long, because
        # their caller waits for them at once, and how many there were when that was last found.
        self.calls_at_once = self.trust = 0
        # Whether it may run beside Python: not if it calls Python or meets other ranks.
        meets = any(isinstance(step, RankExchange) for step in encoded.steps)
        self.may_queue = not encoded.calls_python and not meets
        self._failure = np.zeros(1 + devices, dtype=np.int64)
        loaded = runtime()
        load_parts(encoded.parts, self.cost_ns >= _PATIENT_NS or encoded.is_open)
        self._header = np.zeros(run_layout.HEADER_WORDS, dtype=np.int64)
        self._header[:] = [
            _address(self._words),
            len(self._words),
            devices,
            encoded.bases,
            encoded.levels,
            encoded.max_args,
            self._callbacks.address if self._callbacks else 0,
            _address(self._everyone),
            loaded.run_address,
            _address(self._failure),
            FLIGHT.address,
        ]
        # For dispatchers: entry(header_address, frames_address) -> status, to be handed to `fail`
        # when it is not 0.
        # Whether a run holds the GIL from begin to end.
        self.keeps_gil = encoded.cost_ps * devices < SHORT_PS and not encoded.is_open
        self.entry: Callable[[int, int], int] = (
            loaded.run_short if self.keeps_gil else loaded.run_long
        )
        self.header_address = _address(self._header)
        self.frame_words = devices * encoded.bases
        # The report of a failed run follows the frames: the step, and a word per device.
        self.words_needed = self.frame_words + 1 + devices
        self._pack = struct.Struct(f"{self.words_needed}q").pack
        self._no_report = (0,) * (1 + devices)

    def new_frames(self) -> np.ndarray:
        """A zeroed buffer for the frames of one call: int64 words, device after device.

        Word `device * len(bases) + base` is the address of a base; the words behind
        `frame_words` belong to the runtime.
        """
        return np.zeros(self.words_needed, dtype=np.int64)

    def run(self, frames: np.ndarray) -> None:
        """Run the program over `frames` (from `new_frames`, all addresses filled in)."""
        if frames.dtype != np.int64 or frames.size < self.words_needed:
            raise ValueError(
                f"frames of {frames.size} words of {frames.dtype}; "
                f"needed are {self.words_needed} of int64, see new_frames"
            )
        self.run_address(_address(frames))

    def run_frames(self, frames: Sequence[Sequence[int]]) -> None:
        """Run the program over the frames of its devices, each a list of addresses."""
        words = np.frombuffer(bytearray(self.packed(frames)), np.int64)  # which lives as long
        self.run_address(_address(words))

    def packed(self, frames: Sequence[Sequence[int]]) -> bytes:
        """The words that a run has: the frames, and room for the report of a failed one."""
        return self._pack(*itertools.chain.from_iterable(frames), *self._no_report)

    def run_address(self, frames: int) -> None:
        """Run the program over frames at an address; `words_needed` words must be there."""
        span = FLIGHT.begin(self.label, 0) if FLIGHT.keeps_programs else 0
        status = self.entry(self.header_address, frames)
        if span:
            FLIGHT.completed(span)
        if status:
            self.fail(status, frames)

    @property
    def label(self) -> int:
        """The number of its runs' label in timelines."""
        return FLIGHT.label("program", program=self.name)

    def fail(self, status: int, frames: int | None = None) -> NoReturn:
        """Raise the exception of a run's status; an entry point gives no frames."""
        PROGRESS.settle()  # exchanges in flight write to the memory of this run
        if status == run_layout.INTERRUPTED:
            raise_signal()
        place = _address(self._failure) if frames is None else frames + 8 * self.frame_words
        report = (ctypes.c_int64 * (1 + self.devices)).from_address(place)
        if status == run_layout.NO_MEMORY:
            raise MemoryError("no memory for the scratch space of a kernel")
        if status == run_layout.RAISED and self._callbacks:
            raise self._callbacks.take()
        step = self._step(report[run_layout.REPORT_STEP])
        if status == run_layout.TROUBLE and isinstance(step, RankExchange):
            raise step.take()
        if status == run_layout.MISMATCH:
            name = getattr(step, "name", "collective")
            reached = report[run_layout.REPORT_REACHED :]
            raise CollectiveError(mismatch_text(name, list(map(bool, reached))))
        if status == run_layout.TOO_MANY_TRIPS and isinstance(step, Loop):
            raise SpmdError(
                f"a loop was told at run time to make more than its {step.max_trips} trips"
            )
        raise AssertionError(f"status {status} of step {step}")

    def _step(self, number: int) -> Step:
        steps = self.encoded.steps
        if self.program is None and self._again is not None:
            steps = self._again().encoded.steps
        return steps[number]

    @property
    def is_long(self) -> bool:
        """Whether its caller had better go on than wait."""
        if not self.may_queue or self.cost_ns < LONG_NS:
            return False
        return self.cost_ns >= LONG_NS * min(num_threads(), _MOST_LONG_THREADS)

    @property
    def is_alone(self) -> bool:
        """Whether no other Python code can run, on any thread, from begin to end of a run."""
        return self.keeps_gil and self._callbacks is None


class _Callbacks:
    """The Python functions of a program behind one native function pointer.

    An exception cannot pass through native code: it is kept for the thread it happened in, the
    executor stops with `RAISED`, and `take` hands it out.
    """

    def __init__(self, steps: StepsById, devices: int):
        self._steps = steps
        self._devices = tuple(range(devices))
        self._raised: dict[int, BaseException] = {}
        self._native = _CALLBACK(self._call)
        self.address = ctypes.cast(self._native, ctypes.c_void_p).value or 0

    def take(self) -> BaseException:
        """The exception that stopped the run of this thread."""
        return self._raised.pop(threading.get_ident())

    def _call(self, number: int, device: int, args: int) -> int:
        try:
            step = self._steps[number]
            assert isinstance(step, Host)
            if step.together:
                self._call_together(step, args)
            else:
                inputs, outputs = _views(step, args)
                step.function(device, inputs, outputs)
        except BaseException as error:
            self._raised[threading.get_ident()] = error
            return 1
        return 0

    def _call_together(self, step: Host, args: int) -> None:
        width = 8 * (len(step.inputs) + len(step.outputs))
        views = [_views(step, args + width * device) for device in self._devices]
        step.function(self._devices, [v[0] for v in views], [v[1] for v in views])


def _views(step: Host, args: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """NumPy arrays over the operands of one device, whose addresses stand at `args`."""
    count = len(step.inputs) + len(step.outputs)
    addresses = (ctypes.c_int64 * count).from_address(args)
    views = [
        _array(address, view)
        for address, view in zip(addresses, (*step.inputs, *step.outputs), strict=True)
    ]
    inputs = views[: len(step.inputs)]
    for array in inputs:
        array.flags.writeable = False
    return inputs, views[len(step.inputs) :]


def _array(address: int, view: View) -> np.ndarray:
    memory: Any = bytearray()
    if view.nbytes:
        memory = (ctypes.c_char * view.nbytes).from_address(address)
    return np.ndarray(view.shape, view.dtype, memory)


def mismatch_text(name: str, reached: Sequence[bool]) -> str:
    """The error of a collective that only some devices reached."""
    here = [device for device, there in enumerate(reached) if there]
    missing = [device for device, there in enumerate(reached) if not there]
    return (
        f"{name}: devices {here} reached it, devices {missing} did not: their loops or branches "
        f"took another way.\nEvery device of a group must reach a collective; move it out of the "
        f"branch or loop, or make the condition equal on all devices of the group."
    )


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
