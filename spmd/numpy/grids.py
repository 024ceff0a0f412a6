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
    optional_dtype,
    plain,
    select,
    user_dtype,
)


def _below(shape: tuple[int, ...], k: int) -> Any:
    """A bool matrix, true on and below the diagonal number `k`."""
    index = default_int()
    rows = lax.add(lax.broadcasted_iota(index, shape, 0), np.array(operator.index(k), index))
    return lax.ge(rows, lax.broadcasted_iota(index, shape, 1))


def tri(N: int, M: int | None = None, k: int = 0, dtype: Any = None) -> Any:
    """A matrix with ones on and below the diagonal number `k`."""
    found = np.dtype(np.float32) if dtype is None else user_dtype(dtype, "tri")
    shape = canonical_shape((N, N if M is None else M), "tri")
    return lax.convert_element_type(_below(shape, k), found)


def eye(N: int, M: int | None = None, k: int = 0, dtype: Any = None, *, device: Any = None) -> Any:
    """A matrix with ones on the diagonal number `k`."""
    found = default_float() if dtype is None else user_dtype(dtype, "eye")
    shape = canonical_shape((N, N if M is None else M), "eye")
    index = default_int()
    rows = lax.add(lax.broadcasted_iota(index, shape, 0), np.array(operator.index(k), index))
    diagonal = lax.eq(rows, lax.broadcasted_iota(index, shape, 1))
    result = lax.convert_element_type(diagonal, found)
    return placed(result, device)


def identity(n: int, dtype: Any = None) -> Any:
    """The identity matrix."""
    return eye(n, dtype=optional_dtype(dtype, "identity"))


def _triangle(name: str, m: Any, k: int, lower: bool) -> Any:
    check_arraylike(name, m)
    m = plain(m)
    shape = typeof(m).shape
    if len(shape) < 2:
        raise ShapeError(f"{name}: the argument must have at least 2 dims, got shape {shape}")
    mask = broadcast_to(_below(shape[-2:], k if lower else k - 1), shape)
    zero = constant_like(m, 0)
    return select(mask, m, zero) if lower else select(mask, zero, m)


def tril(m: Any, k: int = 0) -> Any:
    """The lower triangle of matrices, zeros above the diagonal number `k`."""
    return _triangle("tril", m, k, lower=True)


def triu(m: Any, k: int = 0) -> Any:
    """The upper triangle of matrices, zeros below the diagonal number `k`."""
    return _triangle("triu", m, k, lower=False)


def meshgrid(*xi: Any, copy: bool = True, sparse: bool = False, indexing: str = "xy") -> list[Any]:
    """Coordinate arrays of the grid spanned by vectors."""
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
    """The indices of a grid: an array for each dim, stacked unless `sparse`."""
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
    """The array whose elements are `function(*indices)`, called once with index arrays."""
    shape = canonical_shape(shape, "fromfunction")
    grids = [
        lax.broadcasted_iota(user_dtype(dtype, "fromfunction"), shape, d) for d in range(len(shape))
    ]
    return asarray(function(*grids, **kwargs))


def ix_(*args: Any) -> tuple[Any, ...]:
    """Vectors as an open grid, to index with: `x[ix_(rows, columns)]`."""
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
