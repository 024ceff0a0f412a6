"""Kernels that are large enough for each way of the renderer: buffers, teams, chunks, indices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.ir import Kernel
from tests.compile.kernel.op_kernels import row_sum


def softmax(
    rows: int, columns: int, over_rows: bool = False, buffers: int = 1, dtype: str = "f32"
) -> Kernel:
    """Softmax of a matrix over one of its dims, with a row buffer (or several, all used)."""
    sizes, strides = (rows, columns), (columns, 1)
    if over_rows:
        sizes, strides = (columns, rows), (1, columns)
    b = Builder(sizes[:1], sizes[1:])
    x, out = b.arg(dtype, rows * columns), b.arg(dtype, rows * columns, "out")
    kept = [b.buffer(dtype) for _ in range(buffers)]
    with b.row():
        top = b.reduce("max", b.load(x, strides))
    with b.row():
        value = b.op("exp", b.op("sub", b.load(x, strides), top))
        for buffer in kept:
            b.store_row(buffer, value)
        total = b.reduce("add", value)
    with b.row():
        parts = [b.load_row(buffer) for buffer in kept]
        for part in parts[1:]:
            parts[0] = b.op("max", parts[0], part)
        b.store(out, strides, b.op("div", parts[0], total))
    return b.build()


def running_sum(rows: int, columns: int, over_rows: bool, reverse: bool) -> Kernel:
    """A running sum and maximum along one dim, divided by the total through a row buffer."""
    sizes, strides = (rows, columns), (columns, 1)
    if over_rows:
        sizes, strides = (columns, rows), (1, columns)
    b = Builder(sizes[:1], sizes[1:])
    x, out = b.arg("f32", rows * columns), b.arg("f32", rows * columns, "out")
    buffer = b.buffer("f32")
    with b.row():
        value = b.load(x, strides)
        both = b.op("add", b.scan("add", value, reverse), b.scan("max", value, reverse))
        b.store_row(buffer, both)
        total = b.reduce("add", value)
    with b.row():
        b.store(out, strides, b.op("sub", b.load_row(buffer), total))
    return b.build()


def positions(rows: int, columns: int) -> Kernel:
    """The positions of the extremes of each row, beside its sum."""
    b = Builder((rows,), (columns,))
    x = b.arg("f32", rows * columns)
    outs = [b.arg("i64", rows, "out"), b.arg("i32", rows, "out"), b.arg("f32", rows, "out")]
    with b.row():
        value = b.load(x, (columns, 1))
        found = [b.reduce("argmax", value, "i64"), b.reduce("argmin", value, "i32")]
        found.append(b.reduce("add", value))
    with b.point():
        for out, value in zip(outs, found, strict=True):
            b.store(out, (1,), value)
    return b.build()


def normalised(rows: int, columns: int) -> Kernel:
    """A row divided by its norm, in place, and the norm updated in place once for the row."""
    b = Builder((rows,), (columns,))
    x, count = b.arg("f32", rows * columns, "inout"), b.arg("f32", rows, "inout")
    with b.row():
        value = b.load(x, (columns, 1))
        total = b.reduce("add", b.op("mul", value, value))
    with b.point():
        norm = b.op("sqrt", b.op("add", total, b.load(count, (1,))))
        b.store(count, (1,), norm)
    with b.row():
        b.store(x, (columns, 1), b.op("div", b.load(x, (columns, 1)), norm))
    return b.build()


def handed_on(rows: int, columns: int, at_point: bool) -> Kernel:
    """A row times a number that its threads read and its first thread then replaces."""
    b = Builder((rows,), (columns,))
    x, scale = b.arg("f32", rows * columns), b.arg("f32", rows, "inout")
    out = b.arg("f32", rows * columns, "out")
    if at_point:
        with b.point():
            factor = b.load(scale, (1,))
    with b.row():
        value = b.load(x, (columns, 1))
        other = factor if at_point else b.load(scale, (1, 0))
        b.store(out, (columns, 1), b.op("mul", value, other))
    with b.point():
        b.store(scale, (1,), b.const(3, "f32"))
    return b.build()


def elementwise(points: int) -> Kernel:
    """x * x + i over a large array."""
    b = Builder((points,), ())
    x, out = b.arg("f32", points), b.arg("f32", points, "out")
    with b.row():
        value = b.load(x, (1,))
        index = b.convert(b.iota(0, "i32"), "f32")
        b.store(out, (1,), b.op("add", b.op("mul", value, value), index))
    return b.build()


def histogram(points: int, bins: int) -> Kernel:
    """Counts, one point after the other; a row reduction in the same kernel keeps it from lanes."""
    b = Builder((points,), (3,))
    index = b.arg("i32", points)
    x, table = b.arg("f32", 3 * points), b.arg("f32", bins, "inout")
    with b.row():
        total = b.reduce("add", b.load(x, (3, 1)))
    with b.point():
        place = b.op("min", b.load(index, (1,)), b.const(bins - 1, "i32"))
        b.store(table, (0,), total, gathered=((place, 1),), combine="add")
    return b.build()


# What each is there for, and a word of the text that shows that it is.
LARGE: dict[str, tuple[Callable[[], Kernel], str]] = {
    "registers": (lambda: softmax(5, 1000), "f32 row0["),
    "many registers": (lambda: softmax(1, 16384, dtype="f64"), "f64 row0[16];"),
    "scratch of wide elements": (lambda: softmax(1, 20000, dtype="f64"), "= a2;"),
    "scratch rows": (lambda: softmax(3, 20000, buffers=2), "= a2;"),
    "registers across": (lambda: softmax(70, 40, True), "f32 row0["),
    "scratch across": (lambda: softmax(1100, 33, True, buffers=2), "= a2;"),
    "scan in teams": (lambda: running_sum(5, 700, False, False), "scan_rows<Add, "),
    "scan backwards": (lambda: running_sum(5, 700, False, True), "scan_rows<Max, "),
    "scan of whole tiles": (lambda: running_sum(2, 512, False, True), "(f32 *)(shared + "),
    "scan down columns": (lambda: running_sum(90, 70, True, True), "element * 256 + threadIdx.x]"),
    "positions": (lambda: positions(4, 3000), "reduce_rows<ArgMax, "),
    "in place": (lambda: normalised(5, 300), "__syncthreads();"),
    "read by all, written by one": (lambda: handed_on(3, 200, False), "__syncthreads();"),
    "the same at the point": (lambda: handed_on(3, 200, True), "__syncthreads();"),
    "several points a thread": (lambda: elementwise(1_100_000), "item * 256"),
    "a split sum": (lambda: row_sum(1, 100_000), "reduce_rows<Add, "),
    "a split product": (lambda: row_sum(3, 30_000, "f64", "max"), "reduce_rows<Max, "),
    "in order": (lambda: histogram(400, 7), "for (int point"),
}


def large_inputs(kernel: Kernel) -> list[np.ndarray]:
    """Numbers between 0.5 and 1, so that sums can be compared closely; small indices."""
    rng = np.random.default_rng(0)
    return [
        rng.uniform(0.5, 1, arg.size).astype(arg.dtype.replace("f", "float"))
        if arg.dtype.startswith("f")
        else rng.integers(0, 9, arg.size).astype(arg.dtype.replace("i", "int"))
        for arg in kernel.args
    ]
