"""One kernel for each operation and each conversion, over all dtypes, with inputs; and how results
of two ways to run a kernel are compared. Every renderer runs these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.dtypes import DTYPES, kind
from spmd.compile.kernel.format import format_kernel
from spmd.compile.kernel.ir import Kernel
from spmd.compile.kernel.ops import OPS, result_dtype, supports
from tests.compile.kernel.random_kernels import Case

TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-5, "complex64": 2e-5}


def assert_close(
    kernel: Kernel, expected: Sequence[np.ndarray], got: Sequence[np.ndarray], loose: float = 1
) -> None:
    """Compare all arrays: integers exactly, floats relative to the largest value around."""
    for number, (x, y) in enumerate(zip(expected, got, strict=True)):
        if x.dtype.kind in "biu":
            np.testing.assert_array_equal(y, x, f"arg {number} of\n{format_kernel(kernel)}")
            continue
        tolerance = loose * TOLERANCE.get(x.dtype.name, 1e-11)
        wide_x, wide_y = x.astype(np.complex128), y.astype(np.complex128)
        finite = np.abs(wide_x[np.isfinite(wide_x)])
        scale = max(finite.max(initial=0), 1)
        np.testing.assert_allclose(
            wide_y,
            wide_x,
            rtol=tolerance,
            atol=tolerance * scale,
            err_msg=f"arg {number} of\n{format_kernel(kernel)}",
        )


def operands_for(dtype: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Values of a dtype with the corners that operations trip over."""
    numpy_dtype = DTYPES[dtype].numpy
    if kind(dtype) == "b":
        return rng.integers(0, 2, count).astype(bool)
    if kind(dtype) in "iu":
        info = np.iinfo(numpy_dtype)
        corners = np.array([0, 1, 2, 7, info.max, info.min, info.max - 1], numpy_dtype)
        raw = rng.integers(0, 256, count * numpy_dtype.itemsize).astype(np.uint8)
        return np.where(rng.random(count) < 0.5, raw.view(numpy_dtype), rng.choice(corners, count))
    values = rng.uniform(-0.95, 0.95, count) * rng.choice([1, 1, 3], count)
    if kind(dtype) == "c":
        return (values + 1j * rng.uniform(-2, 2, count)).astype(numpy_dtype)
    corners = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 2.0], count)
    return np.where(rng.random(count) < 0.8, values, corners).astype(numpy_dtype)


def op_cases() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every operation with every operand dtype that kernels may contain."""
    for name, info in OPS.items():
        for dtype in DTYPES:
            dtypes = ("bool", dtype, dtype) if name == "select" else (dtype,) * info.arity
            if info.result == "free" or result_dtype(name, dtypes, "") is None:
                continue
            if supports(name, dtypes, result_dtype(name, dtypes, "") or ""):
                yield name, dtypes


OP_NAMES = sorted({name for name, _ in op_cases()})


def op_case(name: str) -> Case:
    """One operation on all its dtypes."""
    rng = np.random.default_rng(0)
    count = 203
    b = Builder((), (count,))
    arrays = []
    with b.row():
        for op, dtypes in op_cases():
            if op != name:
                continue
            values = []
            for dtype in dtypes:
                values.append(b.load(b.arg(dtype, count), (1,)))
                arrays.append(operands_for(dtype, count, rng))
            for attr in (-2, 0, 5) if name == "integer_pow" else (None,):
                result = b.op(op, *values, attr=attr)
                arrays.append(np.zeros(count, DTYPES[b.dtype(result)].numpy))
                b.store(b.arg(b.dtype(result), count, "out"), (1,), result)
    return Case(b.build(), arrays)


def conversion_case(source: str) -> Case:
    """One dtype converted to all dtypes."""
    rng = np.random.default_rng(1)
    count = 131
    b = Builder((), (count,))
    arrays = [operands_for(source, count, rng)]
    if kind(source) == "f":
        arrays[0][:40] = (rng.standard_normal(40) * 2e4).astype(arrays[0].dtype)
    given = b.arg(source, count)
    with b.row():
        value = b.load(given, (1,))
        for target in DTYPES:
            arrays.append(np.zeros(count, DTYPES[target].numpy))
            b.store(b.arg(target, count, "out"), (1,), b.convert(value, target))
    return Case(b.build(), arrays)


BITCASTS = ("f32 i32", "u64 f64", "f16 u16", "i16 bf16", "i8 u8")


def bitcast_case(pair: str) -> Case:
    """One dtype's bits as another's; NaNs may lose their payload, so there are none."""
    source, target = pair.split()
    rng = np.random.default_rng(2)
    b = Builder((), (37,))
    given, out = b.arg(source, 37), b.arg(target, 37, "out")
    with b.row():
        b.store(out, (1,), b.bitcast(b.load(given, (1,)), target))
    arrays = [operands_for(source, 37, rng), np.zeros(37, DTYPES[target].numpy)]
    if "bf16" in pair or "f16" in pair.split():
        arrays[0] = np.arange(37).astype(arrays[0].dtype)
    return Case(b.build(), arrays)


def transposed_case(shape: tuple[int, int], dtype: str) -> Case:
    """One array read across its memory, one backwards."""
    rows, columns = shape
    count = rows * columns
    b = Builder((2, rows), (columns,))
    x, y = b.arg(dtype, 2 * count), b.arg(dtype, columns)
    turned, flipped = b.arg(dtype, 2 * count, "out"), b.arg(dtype, 2 * count, "out")
    with b.row():
        b.store(turned, (count, columns, 1), b.load(x, (count, 1, rows)))
        b.store(flipped, (count, columns, 1), b.load(y, (0, 0, -1), columns - 1))
    data = operands_for(dtype, 2 * count, np.random.default_rng(6))
    arrays = [data, operands_for(dtype, columns, np.random.default_rng(7))]
    return Case(b.build(), [*arrays, np.zeros_like(data), np.zeros_like(data)])


def spread_case(rows: int, columns: int, stride: int, dtype: str) -> Case:
    """Rows of every `stride`-th element of an array that ends with the last one."""
    size = ((rows * columns) - 1) * stride + 1
    b = Builder((rows,), (columns,))
    x, out = b.arg(dtype, size), b.arg(dtype, rows * columns, "out")
    with b.row():
        b.store(out, (columns, 1), b.load(x, (columns * stride, stride)))
    data = operands_for(dtype, size, np.random.default_rng(8))
    return Case(b.build(), [data, np.zeros(rows * columns, data.dtype)])


def stacked_case(rows: int, columns: int, dtype: str) -> Case:
    """The largest of each column of two arrays, of which one lies under the other, and of a fill.

    Whether a row is read does not depend on the lane. A last row is in neither array.
    """
    b = Builder((columns,), (2 * rows + 1,), 0)
    x, y = b.arg(dtype, rows * columns), b.arg(dtype, rows * columns)
    out = b.arg(dtype, columns, "out")
    with b.row():
        row = b.iota(1, "i32")
        upper = b.op("lt", row, b.const(rows, "i32"))
        lower = b.op("and", b.op("not", upper), b.op("lt", row, b.const(2 * rows, "i32")))
        first = b.load(x, (1, columns), guard=upper)
        second = b.load(y, (1, columns), -rows * columns, guard=lower, fill=b.const(3, dtype))
        value = b.op("select", upper, first, second)
        largest = b.reduce("or" if dtype == "bool" else "max", value)
    with b.point():
        b.store(out, (1,), largest)
    rng = np.random.default_rng(9)
    arrays = [operands_for(dtype, rows * columns, rng) for _ in range(2)]
    return Case(b.build(), [*arrays, np.zeros(columns, arrays[0].dtype)])


def row_sum(rows: int, columns: int, dtype: str = "f32", op: str = "add") -> Kernel:
    """A reduction of the rows of a matrix."""
    b = Builder((rows,), (columns,))
    x, out = b.arg(dtype, rows * columns), b.arg(dtype, rows, "out")
    with b.row():
        total = b.reduce(op, b.load(x, (columns, 1)))
    with b.point():
        b.store(out, (1,), total)
    return b.build()


def renumbered(kernel: Kernel, first: int) -> Kernel:
    """The same kernel with value numbers that start at `first`."""

    def moved(item: Any) -> Any:
        changes: dict[str, Any] = {}
        for name in ("out", "operand", "value", "guard", "fill"):
            number = getattr(item, name, None)
            if number is not None:
                changes[name] = number + first
        if hasattr(item, "operands"):
            changes["operands"] = tuple(number + first for number in item.operands)
        if hasattr(item, "map"):
            gathered = tuple((number + first, stride) for number, stride in item.map.gathered)
            changes["map"] = replace(item.map, gathered=gathered)
        return replace(item, **changes)

    return replace(
        kernel,
        passes=tuple(
            replace(
                step,
                instrs=tuple(map(moved, step.instrs)),
                stores=tuple(map(moved, step.stores)),
                reductions=tuple(map(moved, step.reductions)),
            )
            for step in kernel.passes
        ),
    )
