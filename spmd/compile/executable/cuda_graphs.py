"""Graphs: calls of a program that are captured once, and then given to the GPU as one launch.

The one idea: all that a call depends on stands in its frames: the addresses of its arguments,
results, arena and record. So a call whose frames were there before is the same work, and its graph
is found by their bytes. Calls alternate between few frames, as results do (`ResultMemory`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from spmd.base.config import config
from spmd.compile.cuda import stream_steps_ir
from spmd.compile.cuda.driver import CudaError, driver
from spmd.compile.cuda.program import CudaProgram, Records
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
        self.known: dict[bytes, int] = {}
        self._seen: dict[bytes, int] = {}
        self.is_on = True

    def enqueue(self, frames: bytes, records: Records) -> int:
        """Enqueue a call that has no graph, and capture it if its frames repeat; its status."""
        native, seen = self.native, self._seen.pop(frames, 0) + 1
        is_full = len(self.known) >= MOST_GRAPHS
        if not self.is_on:
            return self._launch(frames)
        if seen < (_REPLACED_AT if is_full else _CAPTURED_AT):
            if len(self._seen) >= _MOST_SEEN:
                self._seen.pop(next(iter(self._seen)), None)
            self._seen[frames] = seen
            return self._launch(frames)
        if is_full:
            self._forget(next(iter(self.known)))
        try:
            graph = self.known[frames] = self._captured(frames, records)
        except CudaError as error:  # nothing was done: the GPU takes launches as before
            self.is_on = False
            if config.log_compiles:
                print(f"spmd: {native.name}: without graphs: {error.text}", file=sys.stderr)
            return self._launch(frames)
        self.gpu.replay(self.device, graph)
        return 0

    def _captured(self, frames: bytes, records: Records) -> int:
        """The graph of a call, which is not done."""
        native, words = self.native, records.words
        stream = self.gpu.begin_capture(self.device)
        words[stream_steps_ir.STREAM], own = stream, words[stream_steps_ir.STREAM]
        try:
            self._launch(frames)
        finally:
            words[stream_steps_ir.STREAM] = own
            graph = self.gpu.end_capture(self.device, stream)
        try:
            native.check(records)
        except CudaError:
            words[stream_steps_ir.STATUS] = 0
            self.gpu.free_graph(self.device, graph)
            raise
        return graph

    def _forget(self, frames: bytes) -> None:
        graph = self.known.pop(frames, None)
        if graph is not None:
            self.gpu.free_graph(self.device, graph)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            for frames in list(self.known):
                self._forget(frames)


def graphs_of(native: CudaProgram, call: Call) -> Graphs | None:
    """The graphs of a program; None if it would have none, or one is not less than its launches."""
    if not config.cuda_graphs or len(call.numbers) > 1 or native.encoded.calls_python:
        return None
    launches = native.encoded.cost_ps / (1000 * stream_steps_ir.LAUNCH_NS)
    if not 2 <= launches <= _MOST_LAUNCHES:
        return None
    return Graphs(native, call.numbers[0])
