"""The meaning of kernel IR: an interpreter in NumPy, the oracle of the tests of every renderer.

Each value is one array over the whole space (POINT values have size 1 in the inner dims), and each
instruction one line of NumPy. Nothing here is clever, so that a difference to compiled code is the
compiler's fault. Values of f16 and bf16 are carried in f32, as the IR says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.compile.kernel.check import check_kernel
from spmd.compile.kernel.dtypes import DTYPES, from_bits, kind
from spmd.compile.kernel.ir import (
    ROW,
    Const,
    Instr,
    Iota,
    Kernel,
    Load,
    LoadRow,
    Map,
    Op,
    Pass,
    Reduce,
    Scan,
    Store,
    StoreRow,
)
from spmd.compile.kernel.ops import identity
from tests.compile.kernel.scalar_reference import scalar_op

Array = np.ndarray[Any, Any]


def interpret(kernel: Kernel, arrays: Sequence[Array]) -> None:
    """Run `kernel` on flat arrays, one per argument, writing its outputs in place."""
    check_kernel(kernel)
    for number, (arg, array) in enumerate(zip(kernel.args, arrays, strict=True)):
        expected = DTYPES[arg.dtype].numpy
        assert array.shape == (arg.size,) and array.dtype == expected, (
            f"arg {number} is {array.dtype}{array.shape}, expected {expected}({arg.size},)"
        )
    if 0 in kernel.outer:
        return
    with np.errstate(all="ignore"):
        machine = _Machine(kernel, arrays)
        for step in kernel.passes:
            machine.run(step)


def carried(array: Array, dtype: str) -> Array:
    """Return stored elements of `dtype` in the dtype in which they are computed."""
    return array.astype(DTYPES[DTYPES[dtype].carrier].numpy)


class _Machine:
    """The values and row buffers of one run."""

    def __init__(self, kernel: Kernel, arrays: Sequence[Array]):
        self.kernel = kernel
        self.arrays = arrays
        self.values: dict[int, Array] = {}
        self.dtypes: dict[int, str] = {}
        self.rows: dict[int, Array] = {}
        self.point_shape = kernel.outer + (1,) * len(kernel.inner)

    def run(self, step: Pass) -> None:
        shape = self.kernel.sizes if step.level == ROW else self.point_shape
        for instr in step.instrs:
            self.values[instr.out] = np.broadcast_to(self.evaluate(instr, shape), shape)
            self.dtypes[instr.out] = instr.dtype
        for store in step.stores:
            if isinstance(store, StoreRow):
                self.rows[store.buffer] = self.values[store.value]
            else:
                self.store(store, shape)
        for reduction in step.reductions:
            operand = np.broadcast_to(self.values[reduction.operand], shape)
            self.values[reduction.out] = self.reduce(reduction, operand)
            self.dtypes[reduction.out] = reduction.dtype

    def evaluate(self, instr: Instr, shape: tuple[int, ...]) -> Array:
        match instr:
            case Const(bits=bits, dtype=dtype):
                return carried(np.asarray(from_bits(bits, dtype)), dtype)
            case Iota(dim=dim, dtype=dtype):
                return carried(_along(dim, shape).astype(DTYPES[dtype].numpy), dtype)
            case Op(op=op, dtype=dtype, operands=operands, attr=attr):
                given = tuple(self.dtypes[value] for value in operands)
                operation = scalar_op(op, given, dtype, attr)
                return operation(*(self.values[value] for value in operands))
            case Load():
                return self.load(instr, shape)
            case LoadRow(buffer=buffer):
                return self.rows[buffer]
            case Scan(op=op, operand=operand, reverse=reverse):
                return _scan(op, self.values[operand], reverse)
        raise AssertionError(instr)

    # ---- memory ----

    def address(self, where: Map, shape: tuple[int, ...]) -> Array:
        address = np.full(shape, where.offset, np.int64)
        for dim, stride in enumerate(where.strides):
            address = address + stride * _along(dim, shape)
        for value, stride in where.gathered:
            address = address + stride * self.values[value].astype(np.int64)
        return address

    def active(self, guard: int | None, shape: tuple[int, ...]) -> Array:
        if guard is None:
            return np.ones(shape, bool)
        return np.broadcast_to(self.values[guard], shape)

    def load(self, load: Load, shape: tuple[int, ...]) -> Array:
        active = self.active(load.guard, shape)
        address = self.address(load.map, shape)[active]
        source = self.arrays[load.arg]
        _check_addresses(address, source.size, f"load of arg {load.arg}")
        zero = np.zeros((), DTYPES[DTYPES[load.dtype].carrier].numpy)
        fill = zero if load.fill is None else self.values[load.fill]
        result = np.array(np.broadcast_to(fill, shape))
        result[active] = carried(source[address], load.dtype)
        return result

    def store(self, store: Store, shape: tuple[int, ...]) -> None:
        active = self.active(store.guard, shape)
        address = self.address(store.map, shape)[active]
        target = self.arrays[store.arg]
        _check_addresses(address, target.size, f"store to arg {store.arg}")
        values = np.broadcast_to(self.values[store.value], shape)[active]
        if store.combine is None:
            # NumPy assigns repeated indices in order, so the last point wins.
            target[address] = values.astype(target.dtype)
            return
        dtype = self.kernel.args[store.arg].dtype
        combine = scalar_op(store.combine, (dtype, dtype), dtype, None)
        for place, value in zip(address, values, strict=True):
            old = carried(target[place : place + 1], dtype)
            target[place : place + 1] = combine(old, value).astype(target.dtype)

    # ---- reductions ----

    def reduce(self, reduction: Reduce, operand: Array) -> Array:
        op = reduction.op
        rows = operand.reshape(*self.kernel.outer, -1)
        if op in ("argmax", "argmin"):
            found = getattr(np, op)(rows, axis=-1) if rows.shape[-1] else np.zeros(rows.shape[:-1])
            result = found.astype(DTYPES[reduction.dtype].numpy)
        elif op in ("add", "mul") and kind(reduction.dtype) != "b":
            result = getattr(np, "sum" if op == "add" else "prod")(rows, -1, dtype=rows.dtype)
        else:
            start = identity(op, reduction.dtype)
            combine = scalar_op(op, (reduction.dtype,) * 2, reduction.dtype, None)
            result = np.full(rows.shape[:-1], start)
            for column in range(rows.shape[-1]):
                result = combine(result, rows[..., column])
        return result.reshape(self.point_shape)


def _along(dim: int, shape: tuple[int, ...]) -> Array:
    """Return the indices of `dim`, broadcast against `shape`; inner dims of a POINT have size 1."""
    sizes = [1] * len(shape)
    sizes[dim] = shape[dim]
    return np.arange(shape[dim], dtype=np.int64).reshape(sizes)


def _check_addresses(address: Array, size: int, what: str) -> None:
    if address.size and not (0 <= address.min() and address.max() < size):
        raise AssertionError(
            f"{what}: addresses {address.min()}..{address.max()} leave its {size} elements"
        )


def _scan(op: str, values: Array, reverse: bool) -> Array:
    scans: dict[str, Callable[..., Array]] = {
        "add": np.add.accumulate,
        "mul": np.multiply.accumulate,
        "max": np.maximum.accumulate,
        "min": np.minimum.accumulate,
    }
    if not reverse:
        return scans[op](values, axis=-1, dtype=values.dtype)
    return scans[op](values[..., ::-1], axis=-1, dtype=values.dtype)[..., ::-1]
