"""Programs for CUDA, ready to run: words for the executor, and functions that devices load.

They are made by `assemble.py`, or come from the disk. Of those, neither steps nor kernels are in
this process; what an error or a lost module needs is made again then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from spmd.compile.cuda import stream_steps_ir
from spmd.compile.cuda.driver import CudaError, Driver, driver
from spmd.compile.cuda.images import images
from spmd.compile.cuda.launch import Compiled, Function
from spmd.compile.native.program.encoded import Encoded
from spmd.compile.native.program.steps import Program
from spmd.compile.native.runtime.run import NativeProgram


class CudaProgram(NativeProgram):
    """A native program with its functions, which each device loads before it first runs it.

    `kept` is what the disk has of it beside its words: the functions with the shared bytes of a
    block, the bytes of staging memory, and the names of the steps.
    """

    has_entry_points = False

    def __init__(
        self,
        encoded: Encoded,
        kept: tuple[tuple[tuple[str, int], ...], int, tuple[str, ...]],
        program: Program | None = None,
        functions: Sequence[Function] = (),
        again: Callable[[], NativeProgram] | None = None,
    ):
        super().__init__(encoded, program, again)
        self.may_queue = False  # the stream is the queue
        self.kept = kept
        self._functions, self.staging_bytes, self._names = kept
        self._texts = tuple(functions)
        # By driver and device.
        self._handles: dict[tuple[Driver, int], tuple[int, ...]] = {}

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

    def record(self, device: int) -> list[int]:
        """The words of a device's record of the program, for one run."""
        gpu = driver()
        handles = self._handles.get((gpu, device))
        if handles is None:
            handles = self._handles[gpu, device] = self._loaded(device)
        entries = gpu.entries
        words = [0, 0, gpu.context(device), gpu.stream(device)]
        words += [entries.current, entries.launch, entries.copy, entries.wait]
        return [*words, *handles]

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

    def check(self, record: Any) -> None:
        """Raise a `CudaError` if a driver call of a run failed; `record` is as the run left it."""
        code = int(record[stream_steps_ir.STATUS])
        if code:
            step = self.step_names[int(record[stream_steps_ir.STEP])]
            raise CudaError(f"{self.name}: {step}: {driver().error(code)}")


# By driver, device and module, which is kept.
_modules: dict[tuple[Driver, int, int], tuple[Compiled, int]] = {}


def loaded(device: int, image: Compiled) -> int:
    """The handle of a module on a device."""
    gpu = driver()
    known = _modules.get((gpu, device, id(image)))
    if known is None:
        known = _modules[gpu, device, id(image)] = image, gpu.load(device, image)
    return known[1]
