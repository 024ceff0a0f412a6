"""Random products with epilogues and inputs, from a seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.check import affine_range
from spmd.compile.kernel.dtypes import DTYPES
from spmd.compile.kernel.ir import Kernel, Map
from spmd.compile.kernel.matmul import Operand, Product, c_strides

SIZES = (1, 1, 2, 5, 8, 9, 16, 17, 31, 40, 64, 70, 129)
DTYPE_PAIRS = (("f32", "f32"), ("f32", "f32"), ("bf16", "f32"), ("f16", "f32"), ("f64", "f64"))


@dataclass
class ProductCase:
    """A product, and a flat array for each of its arguments."""

    product: Product
    arrays: list[np.ndarray]


def random_product(seed: int, sizes: tuple[int, int, int] | None = None) -> ProductCase:
    """Return the case of a seed, of random sizes (m, n, k) unless they are given."""
    rng = np.random.default_rng(seed)
    m, n, k = sizes or (int(rng.choice(SIZES)) for _ in range(3))
    batch = tuple(int(rng.choice([1, 2, 3])) for _ in range(rng.integers(0, 3)))
    dtype, carried = DTYPE_PAIRS[rng.integers(len(DTYPE_PAIRS))]
    if sizes is None and rng.random() < 0.05:
        k = 0
    a, left = _operand(rng, dtype, batch, m, k)
    b, right = _operand(rng, dtype, batch, k, n)
    epilogue, rest = _epilogue(rng, batch, m, n, carried, dtype)
    product = Product(m, n, k, a, b, carried, epilogue, batch)
    return ProductCase(product, [left, right, *rest])


def _values(rng: np.random.Generator, dtype: str, size: int) -> np.ndarray:
    return rng.uniform(-1, 1, size).astype(DTYPES[dtype].numpy)


def _operand(
    rng: np.random.Generator, dtype: str, batch: tuple[int, ...], rows: int, columns: int
) -> tuple[Operand, np.ndarray]:
    """A matrix by rows or columns, with gaps or without, whose batch dims may be broadcast."""
    gap = int(rng.integers(1, 3))
    if rng.random() < 0.5:
        row, column, size = gap * max(columns, 1), gap, gap * max(columns, 1) * rows
    else:
        row, column, size = gap, gap * max(rows, 1), gap * max(rows, 1) * columns
    strides = []
    for extent in reversed(batch):
        strides.append(0 if rng.random() < 0.2 else size)
        size *= extent if strides[-1] else 1
    return Operand(dtype, row, column, tuple(strides[::-1])), _values(rng, dtype, size)


def _epilogue(
    rng: np.random.Generator, batch: tuple[int, ...], m: int, n: int, carried: str, dtype: str
) -> tuple[Kernel, list[np.ndarray]]:
    """Maybe a bias along rows or columns, an activation, a residual, and one or two stores."""
    b, arrays = Builder((*batch, m), (n,)), []
    whole = c_strides(batch, m, n)
    flipped = (*whole[:-2], 1, m)
    count = int(np.prod((*batch, m, n)))
    source = b.arg(carried, count)

    def read(strides: tuple[int, ...]) -> int:
        size = affine_range(Map(strides), b.outer + b.inner)[1] + 1
        arrays.append(_values(rng, dtype, size))
        return b.convert(b.load(b.arg(dtype, size), strides), carried)

    def write(value: int, strides: tuple[int, ...], stored: str) -> None:
        arrays.append(np.zeros(count, DTYPES[stored].numpy))
        b.store(b.arg(stored, count, "out"), strides, b.convert(value, stored))

    with b.row():
        value = b.load(source, whole)
        if rng.random() < 0.5:
            along = (
                (0,) * (len(batch) + 1) + (1,) if rng.random() < 0.7 else (0,) * len(batch) + (1, 0)
            )
            value = b.op("add", value, read(along))
        if rng.random() < 0.3:
            write(value, whole, carried)
        if rng.random() < 0.5:
            value = b.op("tanh", b.op("mul", value, b.const(0.25, carried)))
        if rng.random() < 0.4:
            value = b.op("add", value, read(flipped if rng.random() < 0.3 else whole))
        write(value, flipped if rng.random() < 0.3 else whole, dtype)
    return b.build(), arrays
