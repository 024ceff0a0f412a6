"""`spmd.numpy.linalg`: norms and products here, and the functions of two other files."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, ShapeError
from spmd.core.aval import typeof
from spmd.core.explicit import lays_out_result
from spmd.numpy import products as _products
from spmd.numpy.factorizations import (
    EighResult,
    EigResult,
    QRResult,
    SlogdetResult,
    SVDResult,
    cholesky,
    det,
    eig,
    eigh,
    eigvals,
    eigvalsh,
    inv,
    qr,
    slogdet,
    solve,
    svd,
    svdvals,
)
from spmd.numpy.grids import eye
from spmd.numpy.least_squares import cond, lstsq, matrix_rank, pinv, tensorinv, tensorsolve
from spmd.numpy.manipulation import matrix_transpose, reshape
from spmd.numpy.products import vecdot
from spmd.numpy.promotion import (
    as_array,
    check_arraylike,
    constant_like,
    plain,
    promote_args_inexact,
)
from spmd.numpy.reductions import canonical_axes, keep_dims
from spmd.numpy.reductions import max as _max
from spmd.numpy.reductions import min as _min
from spmd.numpy.reductions import sum as _sum
from spmd.numpy.searching import diagonal as _diagonal
from spmd.numpy.ufuncs import power
from spmd.sharding.array import Array, ArrayLike

__all__ = [
    "EigResult",
    "EighResult",
    "QRResult",
    "SVDResult",
    "SlogdetResult",
    "cholesky",
    "cond",
    "cross",
    "det",
    "diagonal",
    "eig",
    "eigh",
    "eigvals",
    "eigvalsh",
    "inv",
    "lstsq",
    "matmul",
    "matrix_norm",
    "matrix_power",
    "matrix_rank",
    "matrix_transpose",
    "multi_dot",
    "norm",
    "outer",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "svd",
    "svdvals",
    "tensordot",
    "tensorinv",
    "tensorsolve",
    "trace",
    "vecdot",
    "vector_norm",
]


def norm(x: ArrayLike, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Array:
    """The norm of vectors, if `axis` is one dim, or of matrices, if it is two.

    `ord` is 2 for vectors by default; it may be any number, inf or -inf. It is "fro" for matrices
    by default; it may be "nuc", 1, -1, 2, -2, inf or -inf. Without `axis` and `ord` it is the
    2-norm of the flat array. The result is a real float; integers become the default float. Raises
    a `ShapeError` for another number of dims, and an `ArgumentError` for another `ord`.

    >>> snp.linalg.norm(np.array([3.0, 4.0]))
    Array(5., dtype=float32)
    """
    (x,) = promote_args_inexact("norm", x)
    rank = typeof(x).ndim
    if axis is None and ord is None:
        dims = tuple(range(rank))
        return _kept(lax.sqrt(_sum(_squares(x), dims)), x, dims, keepdims)
    dims = canonical_axes(axis, rank, "norm")
    if len(dims) == 1:
        return _vector_norm(x, 2 if ord is None else ord, dims, keepdims)
    if len(dims) != 2:
        raise ShapeError(f"norm: with ord={ord!r}, one or two dims are needed, got {dims}")
    return _matrix_norm(x, "fro" if ord is None else ord, dims, keepdims)


def vector_norm(
    x: ArrayLike, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2
) -> Array:
    """The norm of vectors along one or several dims, taken together; all dims by default.

    `ord` is a number, inf or -inf. `keepdims` keeps the dims of `axis` with size 1. The result is a
    real float; integers become the default float.

    >>> snp.linalg.vector_norm(np.array([3.0, 4.0]), ord=1)
    Array(7., dtype=float32)
    """
    (x,) = promote_args_inexact("vector_norm", x)
    dims = canonical_axes(axis, typeof(x).ndim, "vector_norm")
    return _vector_norm(x, ord, dims, keepdims)


def matrix_norm(x: ArrayLike, /, *, keepdims: bool = False, ord: Any = "fro") -> Array:
    """The norm of matrices, the last two dims.

    `ord` is "fro", "nuc", 1, -1, 2, -2, inf or -inf. `keepdims` keeps the two dims with size 1. The
    result is a real float; integers become the default float.

    >>> snp.linalg.matrix_norm(np.array([[3.0, 0.0], [0.0, 4.0]]))
    Array(5., dtype=float32)
    """
    (x,) = promote_args_inexact("matrix_norm", x)
    n = typeof(x).ndim
    return _matrix_norm(x, ord, (n - 2, n - 1), keepdims)


def _squares(x: Any) -> Any:
    if dtypes.is_complex(typeof(x).dtype):
        return lax.real(lax.mul(x, lax.conj(x)))
    return lax.mul(x, x)


def _kept(result: Any, x: Any, dims: Sequence[int], keepdims: bool) -> Any:
    return keep_dims(result, typeof(x).shape, dims) if keepdims else result


def _vector_norm(x: Any, ord: Any, dims: tuple[int, ...], keepdims: bool) -> Any:
    size = lax.abs(x)
    if ord == 2:
        result = lax.sqrt(_sum(_squares(x), dims))
    elif ord == np.inf:
        result = _max(size, dims, initial=0)
    elif ord == -np.inf:
        result = _min(size, dims)
    elif ord == 1:
        result = _sum(size, dims)
    elif ord == 0:
        nonzero = lax.ne(x, constant_like(x, 0))
        result = _sum(nonzero, dims, dtype=typeof(size).dtype)
    elif isinstance(ord, str):
        raise ArgumentError(f"norm: {ord!r} is a norm of matrices; give two axes")
    else:
        result = power(_sum(power(size, ord), dims), power(constant_like(size, ord), -1.0))
    return _kept(result, x, dims, keepdims)


def _matrix_norm(x: Any, ord: Any, dims: tuple[int, ...], keepdims: bool) -> Any:
    rows, columns = dims
    if ord in ("fro", "f"):
        result = lax.sqrt(_sum(_squares(x), dims))
    elif ord in (1, -1, np.inf, -np.inf):
        summed, reduced = (rows, columns) if ord in (1, -1) else (columns, rows)
        sums = _sum(lax.abs(x), summed, keepdims=True)
        reduce = _max if ord in (1, np.inf) else _min
        result = lax.squeeze(reduce(sums, reduced, keepdims=True), sorted(dims))
    elif ord in ("nuc", 2, -2):
        behind = lax.transpose(x, (*(d for d in range(typeof(x).ndim) if d not in dims), *dims))
        values = svdvals(behind)
        result = {"nuc": _sum, 2: _max, -2: _min}[ord](values, -1)
    else:
        raise ArgumentError(
            f"norm: ord={ord!r} of matrices must be 'fro', 'nuc', 1, -1, 2, -2, inf or -inf"
        )
    return _kept(result, x, dims, keepdims)


def matrix_power(a: ArrayLike, n: int) -> Array:
    """Raise square matrices to an integer power.

    `a` has shape (..., m, m), which the result has too. `n` is a Python integer: 0 gives the
    identity matrix, and a negative one the power `-n` of the inverse. Integers become the default
    float. Raises a `ShapeError` if the matrices are not square, and a `TypeError` if `n` is no
    integer.

    >>> snp.linalg.matrix_power(np.array([[1, 1], [0, 1]]), 3)
    Array([[1., 3.],
           [0., 1.]], dtype=float32)
    """
    (a,) = promote_args_inexact("matrix_power", a)
    shape = typeof(a).shape
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise ShapeError(f"matrix_power: square matrices are needed, got shape {shape}")
    n = operator.index(n)
    if n < 0:
        a, n = inv(a), -n
    result = None
    while n:
        if n & 1:
            result = a if result is None else matmul(result, a)
        n >>= 1
        a = matmul(a, a) if n else a
    if result is None:
        unit = eye(shape[-1], dtype=typeof(a).dtype)
        return lax.broadcast_in_dim(unit, shape, (len(shape) - 2, len(shape) - 1))
    return as_array(result)


def multi_dot(arrays: Sequence[Any], *, precision: Any = None) -> Array:
    """The product of several matrices, in the cheapest order.

    The first and the last of `arrays` may be vectors. The operands are promoted to one dtype;
    `precision` is that of `lax.dot_general`. Neighbours share a dim of equal size.

    >>> snp.linalg.multi_dot([np.ones((2, 3)), np.ones((3, 4)), np.ones(4)])
    Array([12., 12.], dtype=float32)
    """
    items = list(arrays)
    check_arraylike("multi_dot", *items)
    items = [plain(a) for a in items]
    is_vector = [typeof(items[0]).ndim == 1, typeof(items[-1]).ndim == 1]
    if is_vector[0]:
        items[0] = reshape(items[0], (1, -1))
    if is_vector[1]:
        items[-1] = reshape(items[-1], (-1, 1))
    sizes = [typeof(a).shape[0] for a in items] + [typeof(items[-1]).shape[1]]
    cut = _cheapest_cuts(sizes)

    def build(first: int, last: int) -> Any:
        if first == last:
            return items[first]
        k = cut[first, last]
        return matmul(build(first, k), build(k + 1, last), precision=precision)

    result = build(0, len(items) - 1)
    shape = [n for n, gone in zip(typeof(result).shape, is_vector, strict=True) if not gone]
    return reshape(result, tuple(shape))


def _cheapest_cuts(sizes: Sequence[int]) -> dict[tuple[int, int], int]:
    """The best cut of each run of matrices, so that multiplying costs least."""
    count = len(sizes) - 1
    cost = {(k, k): 0 for k in range(count)}
    cut: dict[tuple[int, int], int] = {}
    for length in range(1, count):
        for i in range(count - length):
            j = i + length
            options = {
                k: cost[i, k] + cost[k + 1, j] + sizes[i] * sizes[k + 1] * sizes[j + 1]
                for k in range(i, j)
            }
            cut[i, j] = min(options, key=options.__getitem__)
            cost[i, j] = options[cut[i, j]]
    return cut


# ---- the array API standard's forms of products ------------------------------------------------


def matmul(
    x1: ArrayLike, x2: ArrayLike, /, *, precision: Any = None, preferred_element_type: Any = None
) -> Array:
    """The product of matrices: the standard's form of `spmd.numpy.matmul`.

    The last two dims are the matrices; those before them broadcast. The operands are promoted to
    one dtype. `precision` and `preferred_element_type` are those of `spmd.numpy.matmul`.

    >>> snp.linalg.matmul(np.array([[1, 2], [3, 4]]), np.array([1, 10]))
    Array([21, 43], dtype=int32)
    """
    how = {"precision": precision, "preferred_element_type": preferred_element_type}
    return _products.matmul(x1, x2, **how)


@lays_out_result
def tensordot(
    x1: ArrayLike,
    x2: ArrayLike,
    /,
    *,
    axes: Any = 2,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Array:
    """The sum of products over several dims: the standard's form of `spmd.numpy.tensordot`.

    `axes` is a number or a pair of lists of dims. The operands are promoted to one dtype.
    `precision` and `preferred_element_type` are those of `spmd.numpy.dot`. `out_sharding`, a
    sharding or spec over `Explicit` mesh axes, is the layout of the result.

    >>> snp.linalg.tensordot(np.ones((2, 3)), np.ones((3, 4)), axes=1).shape
    (2, 4)
    """
    how = {"precision": precision, "preferred_element_type": preferred_element_type}
    return _products.tensordot(x1, x2, axes, **how)


def outer(x1: ArrayLike, x2: ArrayLike, /) -> Array:
    """The products of all pairs of elements of two vectors.

    The result is a matrix of the dtype to which `x1` and `x2` are promoted. Raises a `ShapeError`
    if one is no vector.

    >>> snp.linalg.outer(np.array([1, 2]), np.array([3, 4]))
    Array([[3, 4],
           [6, 8]], dtype=int32)
    """
    shapes = [typeof(x).shape for x in (x1, x2)]
    if any(len(s) != 1 for s in shapes):
        raise ShapeError(
            f"linalg.outer: takes two vectors, got shapes {shapes[0]} and {shapes[1]}; "
            "spmd.numpy.outer flattens its arguments"
        )
    return _products.outer(x1, x2)


def cross(x1: ArrayLike, x2: ArrayLike, /, *, axis: int = -1) -> Array:
    """The cross product of vectors of three elements along a dim.

    The other dims broadcast; `x1` and `x2` are promoted to one dtype. Raises a `ShapeError` if dim
    `axis` has another size.

    >>> snp.linalg.cross(np.array([1, 0, 0]), np.array([0, 1, 0]))
    Array([0, 0, 1], dtype=int32)
    """
    shapes = [typeof(x).shape for x in (x1, x2)]
    if any(not s or not -len(s) <= axis < len(s) or s[axis] != 3 for s in shapes):
        raise ShapeError(
            f"linalg.cross: dim {axis} must have size 3, got shapes {shapes[0]} and {shapes[1]}"
        )
    return _products.cross(x1, x2, axis=axis)


def diagonal(x: ArrayLike, /, *, offset: int = 0) -> Array:
    """Take a diagonal of matrices, the **last two** dims.

    Diagonal `offset` lies that many columns to the right of the main one. The dtype stays.

    >>> snp.linalg.diagonal(np.arange(8).reshape(2, 2, 2))
    Array([[0, 3],
           [4, 7]], dtype=int32)
    """
    return _diagonal(x, offset, -2, -1)


def trace(x: ArrayLike, /, *, offset: int = 0, dtype: Any = None) -> Array:
    """The sums along a diagonal of matrices, the **last two** dims.

    Diagonal `offset` lies that many columns to the right of the main one. The dtype is `dtype`, or
    that of `sum`: small integers become the default integer.

    >>> snp.linalg.trace(np.arange(8).reshape(2, 2, 2))
    Array([ 3, 11], dtype=int32)
    """
    return _products.trace(x, offset, -2, -1, dtype)
