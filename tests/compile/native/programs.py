"""A workbench for tests of the runner: kernels to run, and frames filled from NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from spmd.compile.native.llvm.compiler import compile_texts
from spmd.compile.native.llvm.function_builder import Function
from spmd.compile.native.program.steps import KernelStep, Program, Slot, Step
from spmd.compile.native.runtime.run import NativeProgram, build_program

F32 = np.dtype(np.float32)
I32 = np.dtype(np.int32)


def address(array: np.ndarray) -> int:
    """Where the data of an array lies."""
    return array.__array_interface__["data"][0]


@cache
def kernel_address(operation: str, type: str) -> int:
    """z[unit] = x[unit] op y[unit], compiled; comparisons give bytes."""
    symbol = f"test_{operation.replace(' ', '_')}_{type}"
    f = Function(symbol, "void", ["ptr", "ptr", "i64", "i64"])
    args, _, begin, end = f.params
    x, y, z = (f.load("ptr", args, 8 * i) for i in range(3))
    nbytes = 8 if type in ("double", "i64") else 4
    with f.range(begin, end) as unit:
        a, b = f.load(type, x, unit * nbytes), f.load(type, y, unit * nbytes)
        if "cmp" in operation:
            flag = f.emit("i1", f"{operation} {type} {a.text}, {b.text}")
            f.store(f.convert("zext", flag, "i8"), z, unit)
        else:
            f.store(f.emit(type, f"{operation} {type} {a.text}, {b.text}"), z, unit * nbytes)
    return compile_texts([f.text()], optimize=True)[symbol]


def binary(
    operation: str, type: str, x: Slot, y: Slot, z: Slot, count: int = 1, cost_ns: float = 0.3
) -> KernelStep:
    """A kernel step z = x op y over `count` elements."""
    nbytes = 8 if type in ("double", "i64") else 4
    out = count if "cmp" in operation else count * nbytes
    return KernelStep(
        kernel_address(operation, type),
        (x, y, z),
        count,
        cost_ns,
        extents=(count * nbytes, count * nbytes, out),
    )


def compile_for(steps: Sequence[Step], arrays: Sequence[Sequence[np.ndarray]]) -> NativeProgram:
    """A program whose bases are the arrays of a device; one list of arrays per device."""
    bases = tuple(array.nbytes for array in arrays[0])
    return build_program(Program(bases, tuple(steps), len(arrays)))


def run(steps: Sequence[Step], arrays: Sequence[Sequence[np.ndarray]]) -> NativeProgram:
    """Build and run a program over the arrays of each device."""
    native = compile_for(steps, arrays)
    frames = native.new_frames()
    flat = [address(array) for device in arrays for array in device]
    frames[: len(flat)] = flat
    native.run(frames)
    return native
