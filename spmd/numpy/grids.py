"""Arrays made of index patterns: `eye`, `tri`, `tril`, `meshgrid`, `indices`.

All of them compare or spread iotas, which fuse into whatever uses them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd import lax
from spmd.base.errors import ArgumentError, ShapeError
from spmd.core.aval import typeof
from spmd.numpy.creation import asarray, canonical_shape, placed
from spmd.numpy.promotion import (
    as_array,
    broadcast_to,
    check_arraylike,
    constant_like,
    default_float,
    default_int,
    operand,
    optional_dtype,
    plain,
    select,
    user_dtype,
)
from spmd.sharding.array import Array, ArrayLike


def _below(shape: tuple[int, ...], k: int) -> Any:
    """A bool matrix, true on and below the diagonal number `k`."""
    index = default_int()
    rows = lax.add(lax.broadcasted_iota(index, shape, 0), np.array(operator.index(k), index))
    return lax.ge(rows, lax.broadcasted_iota(index, shape, 1))


def tri(N: int, M: int | None = None, k: int = 0, dtype: Any = None) -> Array:
    """Make a matrix with ones on and below a diagonal, and zeros above it.

    The shape is (`N`, `M`), and `M` is `N` if it is None. Diagonal `k` lies `k` columns to the
    right of the main one. `dtype` is float32 if it is None.

    >>> snp.tri(2, 3)
    Array([[1., 0., 0.],
           [1., 1., 0.]], dtype=float32)
    """
    found = np.dtype(np.float32) if dtype is None else user_dtype(dtype, "tri")
    shape = canonical_shape((N, N if M is None else M), "tri")
    return lax.convert_element_type(_below(shape, k), found)


def eye(
    N: int, M: int | None = None, k: int = 0, dtype: Any = None, *, device: Any = None
) -> Array:
    """Make a matrix with ones on a diagonal, and zeros elsewhere.

    The shape is (`N`, `M`), and `M` is `N` if it is None. Diagonal `k` lies `k` columns to the
    right of the main one. `dtype` is the default float if it is None; `device` is a device or
    sharding for the result.

    >>> snp.eye(2, 3, k=1)
    Array([[0., 1., 0.],
           [0., 0., 1.]], dtype=float32)
    """
    found = default_float() if dtype is None else user_dtype(dtype, "eye")
    shape = canonical_shape((N, N if M is None else M), "eye")
    index = default_int()
    rows = lax.add(lax.broadcasted_iota(index, shape, 0), np.array(operator.index(k), index))
    diagonal = lax.eq(rows, lax.broadcasted_iota(index, shape, 1))
    result = lax.convert_element_type(diagonal, found)
    return placed(result, device)


def identity(n: int, dtype: Any = None) -> Array:
    """Make the identity matrix of `n` rows and columns.

    `dtype` is the default float if it is None: float32, or float64 with x64. The shape is (`n`,
    `n`).

    >>> snp.identity(2)
    Array([[1., 0.],
           [0., 1.]], dtype=float32)
    """
    return eye(n, dtype=optional_dtype(dtype, "identity"))


def _triangle(name: str, m: Any, k: int, lower: bool) -> Any:
    m = operand(name, m)
    shape = typeof(m).shape
    if len(shape) < 2:
        raise ShapeError(f"{name}: the argument must have at least 2 dims, got shape {shape}")
    mask = broadcast_to(_below(shape[-2:], k if lower else k - 1), shape)
    zero = constant_like(m, 0)
    return select(mask, m, zero) if lower else select(mask, zero, m)


def tril(m: ArrayLike, k: int = 0) -> Array:
    """Keep the lower triangle of matrices, and put zeros above a diagonal.

    `m` has at least two dims; the last two are the matrices, of any size. Diagonal `k` lies `k`
    columns to the right of the main one. Shape and dtype are those of `m`.

    >>> snp.tril(np.array([[1, 2], [3, 4]]))
    Array([[1, 0],
           [3, 4]], dtype=int32)
    """
    return _triangle("tril", m, k, lower=True)


def triu(m: ArrayLike, k: int = 0) -> Array:
    """Keep the upper triangle of matrices, and put zeros below a diagonal.

    `m` has at least two dims; the last two are the matrices, of any size. Diagonal `k` lies `k`
    columns to the right of the main one. Shape and dtype are those of `m`.

    >>> snp.triu(np.array([[1, 2], [3, 4]]))
    Array([[1, 2],
           [0, 4]], dtype=int32)
    """
    return _triangle("triu", m, k, lower=False)


def meshgrid(
    *xi: ArrayLike, copy: bool = True, sparse: bool = False, indexing: str = "xy"
) -> list[Array]:
    """Make the coordinate arrays of a grid, one for each of the vectors `xi`.

    With `indexing="ij"` vector k runs along dim k; with "xy" the first two dims are exchanged, as
    in a picture. `sparse=True` leaves size 1 in the dims along which an array is constant. Each
    array has the dtype of its vector. `copy` changes nothing, as arrays are immutable. Raises a
    `ShapeError` if an argument is no vector, and an `ArgumentError` for another `indexing`.

    >>> snp.meshgrid(np.array([1, 2]), np.array([3, 4, 5]), indexing="ij", sparse=True)
    [Array([[1],
           [2]], dtype=int32), Array([[3, 4, 5]], dtype=int32)]
    """
    check_arraylike("meshgrid", *xi)
    if indexing not in ("xy", "ij"):
        raise ArgumentError(f"meshgrid: indexing must be 'xy' or 'ij', got {indexing!r}")
    vectors = [plain(x) for x in xi]
    if any(typeof(v).ndim != 1 for v in vectors):
        shapes = ", ".join(str(typeof(v).shape) for v in vectors)
        raise ShapeError(f"meshgrid: arguments must have one dim, got shapes {shapes}")
    dims = list(range(len(vectors)))
    if indexing == "xy" and len(vectors) >= 2:
        dims[:2] = [1, 0]
    sizes = [0] * len(vectors)
    for v, d in zip(vectors, dims, strict=True):
        sizes[d] = typeof(v).shape[0]
    grids = []
    for v, d in zip(vectors, dims, strict=True):
        shape = [size if k == d or not sparse else 1 for k, size in enumerate(sizes)]
        grids.append(as_array(lax.broadcast_in_dim(v, shape, (d,))))
    return grids


def indices(dimensions: Sequence[int], dtype: Any = None, sparse: bool = False) -> Any:
    """Make the index arrays of a grid of shape `dimensions`: array d holds the index along dim d.

    They are stacked along a new first dim, or with `sparse=True` a tuple of arrays with size 1 in
    the other dims. `dtype` is the default integer if it is None.

    >>> snp.indices((2, 2))[1]
    Array([[0, 1],
           [0, 1]], dtype=int32)
    """
    found = default_int() if dtype is None else user_dtype(dtype, "indices")
    shape = canonical_shape(tuple(dimensions), "indices")
    grids = []
    for d, size in enumerate(shape):
        whole = tuple(size if k == d or not sparse else 1 for k, size in enumerate(shape))
        grids.append(lax.broadcast_in_dim(lax.iota(found, size), whole, (d,)))
    if sparse:
        return tuple(grids)
    if not grids:
        return lax.full((0,), 0, found)
    return lax.concatenate([lax.reshape(g, (1, *shape)) for g in grids], 0)


def fromfunction(function: Any, shape: Any, *, dtype: Any = float, **kwargs: Any) -> Any:
    """Make the array whose elements are a function of their indices.

    `function` is called once, with an index array of shape `shape` and dtype `dtype` for each dim,
    and with `kwargs`.

    >>> snp.fromfunction(lambda i, j: i + 10 * j, (2, 2), dtype=int)
    Array([[ 0, 10],
           [ 1, 11]], dtype=int32)
    """
    shape = canonical_shape(shape, "fromfunction")
    grids = [
        lax.broadcasted_iota(user_dtype(int if dtype is None else dtype, "fromfunction"), shape, d)
        for d in range(len(shape))
    ]
    return asarray(function(*grids, **kwargs))


def ix_(*args: Any) -> tuple[Any, ...]:
    """Make an open grid of vectors, to index with: `x[snp.ix_(rows, columns)]`.

    Each of the vectors `args` gets size 1 in the dims of the others. Vectors of integers keep their
    dtype; bool vectors, which must be concrete, become the positions of what is true. Raises a
    `ShapeError` if an argument is no vector.

    >>> snp.ix_(np.array([0, 2]), np.array([1]))
    (Array([[0],
           [2]], dtype=int32), Array([[1]], dtype=int32))
    """
    vectors = [asarray(a) for a in args]
    found = []
    for k, v in enumerate(vectors):
        if typeof(v).ndim != 1:
            raise ShapeError(f"ix_: arguments must have one dim, got {typeof(v)}")
        if typeof(v).dtype == np.bool_:
            v = asarray(np.flatnonzero(np.asarray(v)))
        found.append(lax.reshape(v, _grid_shape(v, k, len(vectors))))
    return tuple(found)


def _grid_shape(v: Any, at: int, ndim: int) -> list[int]:
    return [typeof(v).shape[0] if d == at else 1 for d in range(ndim)]


class _Grid:
    """`mgrid[0:3, 0:1:5j]`: index arrays of a grid, written as slices."""

    def __init__(self, sparse: bool):
        self._sparse = sparse

    def __getitem__(self, key: Any) -> Any:
        whole = (np.ogrid if self._sparse else np.mgrid)[key]
        if isinstance(whole, np.ndarray):
            return asarray(whole)
        return [asarray(part) for part in whole]


mgrid = _Grid(sparse=False)
ogrid = _Grid(sparse=True)
