"""Graphs: calls of a program that are captured once, and then given to the GPU as one launch.

The one idea: all that a call depends on stands in its frames: the addresses of its arguments,
results, arena and record. So a call whose frames were there before is the same work, and its graph
is found by their bytes. Calls alternate between few frames, as results do (`ResultMemory`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from spmd.base.config import config
from spmd.compile.cuda import stream_steps_ir
from spmd.compile.cuda.driver import CudaError, driver
from spmd.compile.cuda.program import CudaProgram, Graph, Records
from spmd.compile.executable.cuda_calls import Call

# An executable has so many graphs.
MOST_GRAPHS = 4
# Frames that are seen for this time are captured; they replace the oldest graph at the other.
_CAPTURED_AT, _REPLACED_AT = 2, 8
# Frames that are remembered.
_MOST_SEEN = 16
# A graph of more launches than this is not made: it would take long, and much memory.
_MOST_LAUNCHES = 10_000


class Graphs:
    """The graphs of an executable on one device, by the bytes of the frames of a call."""

    def __init__(self, native: CudaProgram, device: int):
        self.native, self.gpu, self.device = native, driver(), device
        self._launch: Callable[[Any], int] = partial(native.entry, native.header_address)
        self.known: dict[bytes, Graph] = {}
        self._seen: dict[bytes, int] = {}
        self.is_on = True
        self._lock = threading.Lock()

    def enqueue(self, frames: bytes, records: Records) -> int:
        """Enqueue a call that has no graph, and capture it if its frames repeat; its status."""
        if not self.is_on or not self._repeats(frames):
            return self._launch(frames)
        try:
            graph = self._captured(frames, records)
        except CudaError as error:  # nothing was done: the GPU takes launches as before
            self.is_on = False
            without_graphs(self.native, error.text)
            return self._launch(frames)
        with self._lock:
            if len(self.known) >= MOST_GRAPHS:
                del self.known[next(iter(self.known))]
            self.known[frames] = graph
        self.gpu.replay(self.device, graph.handle)
        return 0

    def _repeats(self, frames: bytes) -> bool:
        """Whether frames were seen so often that they get a graph."""
        with self._lock:
            seen = self._seen.pop(frames, 0) + 1
            is_full = len(self.known) >= MOST_GRAPHS
            if seen >= (_REPLACED_AT if is_full else _CAPTURED_AT):
                return True
            if len(self._seen) >= _MOST_SEEN:
                del self._seen[next(iter(self._seen))]
            self._seen[frames] = seen
            return False

    def _captured(self, frames: bytes, records: Records) -> Graph:
        """The graph of a call, which is not done."""
        native, words = self.native, records.words
        stream = self.gpu.begin_capture(self.device)
        words[stream_steps_ir.STREAM], own = stream, words[stream_steps_ir.STREAM]
        try:
            self._launch(frames)
        finally:
            words[stream_steps_ir.STREAM] = own
            handle = self.gpu.end_capture(self.device, stream)
        graph = Graph(self.gpu, self.device, handle)
        try:
            native.check(records)
        except CudaError:
            words[stream_steps_ir.STATUS] = 0
            raise
        return graph


def without_graphs(native: CudaProgram, reason: str) -> None:
    """Tell those who log compiles why a program has no graphs."""
    if config.log_compiles:
        print(f"spmd: {native.name}: without graphs: {reason}", file=sys.stderr)


def graphs_of(native: CudaProgram, call: Call) -> Graphs | None:
    """The graphs of a program; None if it would have none, or one is not less than its launches."""
    if not config.cuda_graphs:
        return None
    if len(call.numbers) > 1:
        without_graphs(native, f"it runs on {len(call.numbers)} GPUs")
        return None
    if native.encoded.calls_python or native.staging_bytes:
        if not native.bodies:
            without_graphs(native, "the host has a part in it")
        return None
    launches = native.encoded.cost_ps / (1000 * stream_steps_ir.LAUNCH_NS)
    if not 2 <= launches <= _MOST_LAUNCHES:
        if launches > 1:
            without_graphs(native, f"it has {launches:.0f} launches, more than {_MOST_LAUNCHES}")
        return None
    return Graphs(native, call.numbers[0])
