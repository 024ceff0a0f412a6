"""Repeated calls of a program on GPUs: facts that all share, and memory that they take in turns.

The one idea: the work of a device is in one stream, in order, so a call may use the arena of one
that is still running. While two threads enqueue at the same time, each has an arena of its own: it
is taken from a list and put back when the call is enqueued.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from spmd.compile.cuda.driver import Driver, driver
from spmd.compile.cuda.program import CudaProgram, Records
from spmd.compile.executable import cuda_reports
from spmd.compile.executable.cuda_backend import CudaMemory, arenas, number_of
from spmd.compile.executable.executable import Executable
from spmd.compile.native.program.steps import RankExchange


class _NoMemory:
    """An arena of no bytes."""

    address = 0


class Pool:
    """Things that calls take and put back: those that are `free`, and a way to `make` more.

    `least` are the bytes that memory must have; 0 if all that is there will do.
    """

    __slots__ = ("free", "least", "make")

    def __init__(self, free: list[Any], make: Callable[[], Any], least: int = 0):
        self.free, self.make, self.least = free, make, least


class Call:
    """The facts and the pools that all calls of an executable have in common."""

    def __init__(self, executable: Executable):
        native, gpu = executable.native, driver()
        assert isinstance(native, CudaProgram)
        self.numbers = [number_of(device) for device in executable.devices]
        # Whether a call is in the streams when it returns, and all its memory is free for the next:
        # also one in which the host reads predicates and indices of branches.
        meets = any(isinstance(step, RankExchange) for step in native.encoded.steps)
        has_host_part = native.encoded.calls_python or meets or len(self.numbers) > 1
        self.is_enqueued = not (native.staging_bytes and has_host_part)
        self.names: dict[str, Any] = {
            "CudaMemory": CudaMemory,
            "gpu": gpu,
            "fail": partial(fail, native),
        }
        pairs = list(zip(self.numbers, executable.frames.arenas, strict=True))
        self.arenas = [_arenas(gpu, number, nbytes) for number, nbytes in pairs]
        free = native.free_records(self.numbers)
        self.records = Pool(free, partial(Records, native, self.numbers))
        self.notes = [cuda_reports.noted(gpu, number).append for number in self.numbers]


def _arenas(gpu: Driver, number: int, nbytes: int) -> Pool:
    if not nbytes:
        return Pool([], _NoMemory)
    return Pool(arenas(gpu, number), partial(CudaMemory, gpu, number, nbytes), nbytes)


def fail(native: CudaProgram, status: int, frames: bytes, records: Records) -> NoReturn:
    """Raise the error of a call that was not enqueued."""
    if status:
        native.fail(status, ctypes.cast(ctypes.c_char_p(frames), ctypes.c_void_p).value)
    native.check(records)
    raise AssertionError("a call that did not fail")
