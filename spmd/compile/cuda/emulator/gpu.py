"""One emulated GPU: its memory, and launches of kernels, which run until they are done.

The driver (`driver.py`) delays and orders work: here a call does its work at once.
"""

from __future__ import annotations

import ctypes
import math
import random
import threading
from collections.abc import Sequence

import numpy as np

from spmd.base.errors import CudaError
from spmd.compile.cuda.emulator import layout
from spmd.compile.cuda.emulator.checks import ANYBODY, SEVERAL_OF, TOUCHED_WORDS
from spmd.compile.cuda.emulator.code import Kernel, described
from spmd.compile.cuda.emulator.device_memory import CAPACITY, DeviceMemory, device_of
from spmd.compile.cuda.emulator.layout import INDEX, REPORT, TRACE_WORDS, WORDS
from spmd.compile.cuda.emulator.races import Races
from spmd.compile.cuda.emulator.traffic import Traffic
from spmd.compile.cuda.launch import Launch

# The accesses that counted mode keeps of one launch.
MOST_COUNTED = 1 << 18
_TRACE_HEAD = 2
_PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Gpu:
    """One device. Launches of several threads wait for each other."""

    def __init__(self, device: int = 0, capacity: int = CAPACITY, seed: int = 0):
        self.memory = DeviceMemory(device, capacity)
        self.races = Races(self.memory)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._words = np.zeros(len(WORDS), np.int64)
        self._report = np.zeros(len(REPORT), np.int64)
        threads, warps = layout.MOST_THREADS, layout.MOST_THREADS // layout.WARP
        lanes = threads * layout.LANE_WORDS
        self._kept = {
            "shared": np.zeros(layout.MOST_SHARED, np.uint8),
            "nowhere": np.zeros(64, np.uint8),
            "report": self._report,
            "touched": np.zeros(TOUCHED_WORDS * layout.MOST_SHARED, np.int64),
            "warp_epochs": np.zeros(warps, np.int64),
            "states": np.zeros(threads, np.uint8),
            "masks": np.zeros(threads, np.int64),
            "places": np.zeros(threads, np.int64),
            "handles": np.zeros(threads, np.int64),
            "copies": np.zeros(threads * layout.QUEUE_BYTES // 8, np.int64),
            "given": np.zeros(lanes, np.uint32),
            "taken": np.zeros(lanes, np.uint32),
            "granules": self.memory.granules,
            "accessed": self.memory.accessed,
        }
        for name, array in self._kept.items():
            self._words[INDEX[name]] = array.ctypes.data
        self._set(delta=self.memory.delta, base=self.memory.base, extent=capacity, seed=seed)
        self._trace: np.ndarray | None = None

    def launch(self, kernel: Kernel, launch: Launch, arguments: Sequence[int]) -> Traffic | None:
        """Run a kernel; what it moved, if its code counts.

        Raises:
            CudaError: a checked kernel touched what is not its own, or its threads raced or did
                not meet.
        """
        self.check(kernel, launch)
        given = np.array([*arguments, 0], np.int64)
        with self._lock:
            self._report[:] = 0
            step, first = self._order(launch.grid)
            self._set(
                block_step=step,
                block_first=first,
                grid=launch.grid,
                block_x=launch.block[0],
                block_y=launch.block[1],
                shared_bytes=launch.shared,
                arguments=given.ctypes.data,
            )
            trace = self._new_trace() if kernel.accesses else None
            _PROTOTYPE(kernel.address)(self._words.ctypes.data)
            if self._report[0] != layout.NONE:
                found: dict[str, int] = dict(zip(REPORT, self._report.tolist(), strict=True))
                raise CudaError(self._told(kernel, found))
            if trace is None:
                return None
            used = min(int(trace[0]), len(trace) - _TRACE_HEAD) // TRACE_WORDS
            records = trace[_TRACE_HEAD:][: used * TRACE_WORDS].reshape(used, TRACE_WORDS)
            return Traffic.of(kernel, records, int(trace[0]) // TRACE_WORDS)

    def check(self, kernel: Kernel, launch: Launch) -> None:
        """Raise a `CudaError` if no GPU could begin this launch."""
        if not 0 < launch.threads <= layout.MOST_THREADS or not 0 <= launch.grid < 2**31:
            raise CudaError(f"launch of {kernel.symbol}: no GPU has {launch}")
        if launch.shared > layout.MOST_SHARED:
            raise CudaError(f"launch of {kernel.symbol}: {launch.shared} shared bytes a block")

    def _order(self, grid: int) -> tuple[int, int]:
        """Any order of the blocks: a number without a divisor in common with theirs, and any."""
        step = self._random.randrange(max(grid, 1)) | 1
        while math.gcd(step, grid) > 1:
            step += 2
        return step, self._random.randrange(max(grid, 1))

    def _new_trace(self) -> np.ndarray:
        if self._trace is None:
            self._trace = np.zeros(MOST_COUNTED * TRACE_WORDS + _TRACE_HEAD, np.int64)
            self._trace[1] = MOST_COUNTED * TRACE_WORDS
            self._set(trace=self._trace.ctypes.data)
        self._trace[0] = 0
        return self._trace

    def _set(self, **words: int) -> None:
        for name, value in words.items():
            self._words[INDEX[name]] = value

    def _told(self, kernel: Kernel, found: dict[str, int]) -> str:
        """The text of a report."""
        where = described(kernel, found["place"])
        who = f"thread {found['thread']} of block {found['block']}"
        address, nbytes = found["address"], found["nbytes"]
        before = described(kernel, found["other_place"])
        what = {
            layout.READ_OUTSIDE: f"{who} read {nbytes} bytes at {self._owner(address)}",
            layout.WRITE_OUTSIDE: f"{who} wrote {nbytes} bytes at {self._owner(address)}",
            layout.MISALIGNED: f"{who} accessed {nbytes} bytes at {address:#x}, no multiple of it",
            layout.SHARED_OUTSIDE: f"{who} accessed {nbytes} bytes at {address} of the shared "
            f"memory, which has {int(self._words[INDEX['shared_bytes']])}",
            layout.RACE: f"{_other(found['other'])} and {who} accessed the {nbytes} bytes at "
            f"{address} of the shared memory with no barrier between, and one of them wrote: "
            f"the former {before}, the latter",
            layout.UNDER_WAY: f"{who} accessed the {nbytes} bytes at {address} of the shared "
            f"memory, to which thread {found['other']} copies, and nothing waits for that: the "
            f"copy began {before}, the access is",
            layout.LANE_MISSING: f"{who} waits for lanes of its warp that don't come",
            layout.THREAD_ENDED: f"{who} waits at a barrier, and others have ended",
            layout.MASKS_DIFFER: f"{who} waits for other lanes than those that wait for it",
            layout.TRAP: f"{who} trapped",
        }[found["kind"]]
        return f"kernel {kernel.symbol} on CUDA device {self.memory.device}: {what} {where}"

    def _owner(self, address: int) -> str:
        owner = device_of(address)
        if owner is None:
            return f"{address:#x}, an address of the host"
        if owner != self.memory.device:
            return f"{address:#x}, an address of CUDA device {owner}"
        return f"{address:#x}, outside of what is allocated"


def _other(number: int) -> str:
    """The thread or threads that touched a byte before, by the number of `checks` without the 1."""
    who = number + 1
    if who == ANYBODY:
        return "threads of several warps"
    return f"threads of warp {who - SEVERAL_OF}" if who >= SEVERAL_OF else f"thread {who - 1}"
