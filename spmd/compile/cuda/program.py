"""Programs for CUDA, ready to run: words for the executor, and functions that devices load.

They are made by `assemble.py`, or come from the disk. Of those, neither steps nor kernels are in
this process; what an error or a lost module needs is made again then.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from spmd.base.errors import CollectiveError
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
    block, the bytes of staging memory, the names of the steps, and the numbers of events and mails.
    """

    has_entry_points = False

    def __init__(
        self,
        encoded: Encoded,
        kept: tuple[tuple[tuple[str, int], ...], int, tuple[str, ...], int, int],
        program: Program | None = None,
        functions: Sequence[Function] = (),
        again: Callable[[], NativeProgram] | None = None,
    ):
        super().__init__(encoded, program, again)
        self.may_queue = False  # the stream is the queue
        self.kept = kept
        self._functions, self.staging_bytes, self._names, self.events, self.mails = kept
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
        words += [entries.record, entries.wait_event, position, 8 * apart, first]
        words += [first + self.events, *handles]
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
        for position, device in enumerate(devices):
            self.words.extend(native.words(device, position, self.apart))
        first = self.words.buffer_info()[0]
        self.addresses = [first + 8 * self.apart * k for k in range(len(self.devices))]

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
        for device, words in zip(self.devices, self.each(), strict=False):
            first = words[stream_steps_ir.EVENTS]
            for event in words[first : first + self._events]:
                self.gpu.free_event(device, event)


# By driver, device and module, which is kept.
_modules: dict[tuple[Driver, int, int], tuple[Compiled, int]] = {}


def loaded(device: int, image: Compiled) -> int:
    """The handle of a module on a device."""
    gpu = driver()
    known = _modules.get((gpu, device, id(image)))
    if known is None:
        known = _modules[gpu, device, id(image)] = image, gpu.load(device, image)
    return known[1]
