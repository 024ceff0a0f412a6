"""Run rendered CUDA source on the CPU: compile it behind `emulator.h`, launch, compare.

Any C++17 compiler will do: the machine's, or that of the `ziglang` wheel, which the dev group
installs so that these tests run everywhere.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from spmd.compile.cuda.kernel import module_text
from spmd.compile.cuda.launch import Function, Rendered
from spmd.compile.kernel.dtypes import DTYPES

HEADER = Path(__file__).with_name("emulator.h")
FLAGS = (
    "-std=c++17 -O1 -fPIC -shared -ffp-contract=off -fno-strict-aliasing -fno-exceptions -fno-rtti "
    "-U_FORTIFY_SOURCE -w"
).split()
# Bytes before and after each array that no kernel may touch.
FENCE = 256


class EmulationError(Exception):
    """A kernel did what a GPU would not forgive: a missed meeting, a write outside its memory."""


@functools.cache
def compiler() -> tuple[str, ...]:
    """The command of a C++ compiler: the machine's own, else that of the `ziglang` wheel."""
    for name in ("g++", "clang++"):
        if found := shutil.which(name):
            return (found,)
    assert importlib.util.find_spec("ziglang"), "no C++ compiler: pip install ziglang"
    # Its default of trapping on undefined behaviour needs its runtime; no C++ library is used.
    return (sys.executable, "-m", "ziglang", "c++", "-fno-sanitize=undefined", "-nostdlib++")


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="spmd-emulator-")


@functools.cache
def _build(source: str) -> ctypes.CDLL:
    name = hashlib.sha256(source.encode()).hexdigest()[:16]
    path = Path(_folder().name) / f"{name}.cc"
    path.write_text(source, encoding="utf-8")
    library = path.with_suffix(".so")
    command = [*compiler(), *FLAGS, "-I", str(HEADER.parent), str(path), "-o", str(library), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[:8000]}"
    return ctypes.CDLL(str(library))


class Emulator:
    """One module of functions, compiled together; `run` launches those of a rendered kernel."""

    def __init__(self, functions: Iterable[Function], source: str | None = None):
        functions = list(functions)
        symbols = dict.fromkeys(function.symbol for function in functions)
        lines = ['#include "emulator.h"', "namespace emulated {"]
        lines += [module_text(functions) if source is None else source]
        lines += [*(f"ENTRY({symbol})" for symbol in symbols), "}  // namespace emulated", ""]
        self.library = _build("\n".join(lines))

    def run(self, rendered: Rendered, arrays: Sequence[np.ndarray]) -> None:
        """Launch all functions on flat arrays, the kernel's arguments in order, in place."""
        scratch = [
            np.full(elements, np.nan, np.float64).astype(DTYPES[dtype].numpy)
            if DTYPES[dtype].kind in "fc"
            else np.zeros(elements, DTYPES[dtype].numpy)
            for dtype, elements in rendered.temporaries
        ]
        fenced = [_Fenced(array) for array in (*arrays, *scratch)]
        for function in rendered.functions:
            self._launch(function, [fenced[number].address for number in function.arguments])
        for number, (array, copy) in enumerate(zip(arrays, fenced, strict=False)):
            if not copy.intact():
                raise EmulationError(f"a write outside argument {number}")
            array[...] = copy.inside()

    def _launch(self, function: Function, addresses: Sequence[int]) -> None:
        launch = function.launch
        pointers = (ctypes.c_void_p * max(len(addresses), 1))(*addresses)
        message = ctypes.create_string_buffer(200)
        entry = getattr(self.library, f"emulate_{function.symbol}")
        numbers = (launch.grid, *launch.block, launch.shared, int(function.barriers))
        if entry(*map(ctypes.c_int, numbers), pointers, message):
            raise EmulationError(f"{message.value.decode()}\n{function.text}")


class _Fenced:
    """A copy of an array, aligned as device memory is, between bytes that must stay as they are."""

    def __init__(self, array: np.ndarray):
        self.dtype = array.dtype
        nbytes = array.nbytes
        room = np.full(nbytes + 2 * FENCE + 256, 0xFF, np.uint8)
        start = -room.ctypes.data % 256
        self.room = room[start : start + nbytes + 2 * FENCE]
        self.room[FENCE : FENCE + nbytes] = np.frombuffer(array.tobytes(), np.uint8)
        self.address = self.room.ctypes.data + FENCE

    def inside(self) -> np.ndarray:
        return self.room[FENCE : self.room.size - FENCE].view(self.dtype)

    def intact(self) -> bool:
        size = self.room.size - FENCE
        return bool((self.room[:FENCE] == 0xFF).all() and (self.room[size:] == 0xFF).all())
