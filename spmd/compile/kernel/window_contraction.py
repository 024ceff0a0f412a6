"""Contractions over windows: a product of matrices of which one is a view with overlapping rows.

    out[r, j] = sum over k of A[r, k] B[k, j]      for each member of a batch

Rows and depth are each the index space of several dims with strides of their own, so A may be all
windows of an image, which is never laid out as a matrix: a convolution is one, and so are its
gradients. As `Product` it is a node of its own: every backend has its own best loops for it. Like a
product's, its result may be followed by an epilogue, a kernel that runs on finished rows of it.

`check_contraction` is the law.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd.base.record import record
from spmd.compile.kernel.check import KernelError
from spmd.compile.kernel.ir import Kernel
from spmd.compile.kernel.matmul import check_epilogue

DTYPES = {"f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}


@record
class Dims:
    """Some dims: their sizes, and the strides along them in two arrays, in elements."""

    sizes: tuple[int, ...]
    first: tuple[int, ...]
    second: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of points they have."""
        return int(np.prod(self.sizes, dtype=np.int64))

    def offsets(self) -> np.ndarray:
        """The offset of each point in both arrays, in row-major order: two columns."""
        out = np.zeros((*self.sizes, 2), np.int64)
        for column, strides in enumerate((self.first, self.second)):
            for d, (size, stride) in enumerate(zip(self.sizes, strides, strict=True)):
                shape = [1] * len(self.sizes)
                shape[d] = size
                out[..., column] += stride * np.arange(size).reshape(shape)
        return out.reshape(-1, 2)

    def split(self, most: int) -> tuple[Dims, Dims]:
        """The outer dims, and as many inner ones as have at most `most` points (at least one)."""
        at = len(self.sizes)
        while at and (at == len(self.sizes) or int(np.prod(self.sizes[at - 1 :])) <= most):
            at -= 1
        parts = (slice(None, at), slice(at, None))
        outer, inner = (Dims(self.sizes[p], self.first[p], self.second[p]) for p in parts)
        return outer, inner


def dims_of(triples: Sequence[tuple[int, int, int]]) -> Dims:
    """`Dims` from (size, first stride, second stride); neighbours that one stride walks are one."""
    kept: list[tuple[int, int, int]] = []
    for size, first, second in triples:
        if size == 1:
            continue
        if kept and kept[-1][1:] == (first * size, second * size):
            kept[-1] = (kept[-1][0] * size, first, second)
        else:
            kept.append((size, first, second))
    return Dims(*(tuple(d[k] for d in kept) for k in range(3)))


@record
class Contraction:
    """The arguments are A, B and out, each from its element at index zero of everything.

    Columns are contiguous in B and in out. The batch is one dim: its size, and the strides along it
    in A, B and out. An epilogue follows a batch of one whose rows are contiguous in out, too. It is
    that of a product of `rows.count` rows: its argument 0 is out, its others are the arguments
    behind out, and it may write over out where it has read it. `tf32` is as in products.
    """

    dtype: str  # of all three, f32 or f64
    rows: Dims  # strides in A and out
    depth: Dims  # strides in A and B
    columns: int
    batch: tuple[int, int, int, int] = (1, 0, 0, 0)
    epilogue: Kernel | None = None
    tf32: bool = False

    @property
    def multiply_adds(self) -> int:
        """The work of one member of the batch."""
        return self.rows.count * self.depth.count * self.columns


def check_contraction(given: Contraction) -> None:
    """Raise `KernelError` if a contraction is not well formed."""
    if given.dtype not in DTYPES:
        raise KernelError(f"a contraction of {given.dtype}, not of one of {tuple(DTYPES)}")
    for dims in (given.rows, given.depth):
        if not len(dims.sizes) == len(dims.first) == len(dims.second):
            raise KernelError(f"sizes and strides differ in number: {dims}")
        if min(dims.sizes, default=0) < 0:
            raise KernelError(f"a negative size: {dims}")
    if given.columns < 1 or given.batch[0] < 1 or not given.rows.count:
        raise KernelError(f"a contraction without results: {given}")
    reached = given.rows.offsets()[:, 1]
    reached = (np.arange(given.batch[0]) * given.batch[3])[:, None] + reached
    spread = np.diff(np.sort(reached.reshape(-1)))
    if spread.size and spread.min() < given.columns:
        raise KernelError(f"some element of out is written twice: {given}")
    if given.epilogue is not None:
        if given.batch[0] != 1 or not lies_in_order(given.rows, given.columns):
            raise KernelError(f"an epilogue of rows that do not lie in order: {given}")
        check_epilogue(given.epilogue, (), given.rows.count, given.columns, given.dtype)


def lies_in_order(rows: Dims, columns: int) -> bool:
    """Whether rows of so many columns lie one behind the other in the second array."""
    behind = columns
    for size, stride in zip(reversed(rows.sizes), reversed(rows.second), strict=True):
        if size != 1 and stride != behind:
            return False
        behind *= size
    return True
