"""Numerical odds and ends: `interp`, `trapezoid`, `gradient`, `polyval`, `unravel_index`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, RefusedError, ShapeError
from spmd.core.aval import typeof
from spmd.core.trace import Tracer
from spmd.lax.special_beta import bessel_i0
from spmd.numpy.joining import concatenate
from spmd.numpy.logic import equal, greater, less
from spmd.numpy.manipulation import broadcast_to, moveaxis, reshape
from spmd.numpy.promotion import (
    as_array,
    check_arraylike,
    check_real,
    constant_like,
    convert,
    default_float,
    default_int,
    operand,
    plain,
    promote_args_inexact,
    promote_dtypes,
    promote_dtypes_inexact,
    promote_dtypes_numeric,
    promotes_inside,
    result_type,
    select,
)
from spmd.numpy.reductions import canonical_axes, canonical_axis, cumsum
from spmd.numpy.reductions import sum as _sum
from spmd.numpy.repeating import diff
from spmd.numpy.searching import nonzero
from spmd.numpy.selection import clip
from spmd.numpy.sorting import searchsorted
from spmd.numpy.taking import take
from spmd.numpy.ufuncs import (
    absolute,
    add,
    divide,
    divmod,
    floor_divide,
    multiply,
    negative,
    power,
    remainder,
    subtract,
)
from spmd.sharding.array import Array, ArrayLike

# ---- functions given by samples ----------------------------------------------------------------


def interp(
    x: ArrayLike,
    xp: ArrayLike,
    fp: ArrayLike,
    left: Any = None,
    right: Any = None,
    period: ArrayLike | None = None,
) -> Array:
    """Interpolate linearly between the points (`xp`, `fp`), where `xp` is ascending.

    `left` and `right` are the values outside of them: by default those of the first and last point,
    and "extrapolate" continues the lines. With `period` the points repeat. `xp` and `fp` are
    vectors of one size; the result has the shape of `x` and the floating dtype to which the
    arguments are promoted. Raises a `ShapeError` for other shapes, an `ArgumentError` for other
    words, and a `DtypeError` for a complex `x`.

    >>> snp.interp(np.array([0.5, 9.0]), np.array([0.0, 1.0]), np.array([0.0, 10.0]))
    Array([ 5., 10.], dtype=float32)
    """
    check_arraylike("interp", x, xp, fp)
    if typeof(plain(xp)).ndim != 1 or typeof(plain(xp)).shape != typeof(plain(fp)).shape:
        raise ShapeError("interp: xp and fp must be vectors of equal length")
    for side, value in (("left", left), ("right", right)):
        if isinstance(value, str) and value != "extrapolate":
            raise ArgumentError(
                f"interp: {side} must be a number, None or 'extrapolate', got {value!r}"
            )
    check_real("interp", plain(x))
    x, xp = promote_dtypes_inexact(plain(x), plain(xp))
    (fp,) = promote_dtypes_inexact(plain(fp))
    if period is not None:
        if typeof(operand("interp", period)).shape:
            raise ShapeError(f"interp: period must be a scalar, got shape {typeof(period).shape}")
        period = absolute(period)
        x, xp = remainder(x, period), remainder(xp, period)
        xp, fp = lax.sort_key_val(xp, fp)
        n = typeof(xp).shape[0]
        ends = (lax.slice_in_dim(xp, n - 1, n), lax.slice_in_dim(xp, 0, 1))
        xp = concatenate([subtract(ends[0], period), xp, add(ends[1], period)])
        fp = concatenate([lax.slice_in_dim(fp, n - 1, n), fp, lax.slice_in_dim(fp, 0, 1)])
        left = right = None
    n = typeof(xp).shape[0]
    above = clip(searchsorted(xp, x, "right"), 1, n - 1)
    below = lax.sub(above, constant_like(above, 1))
    x0, x1, f0, f1 = (
        take(v, i, 0, mode="clip") for v, i in ((xp, below), (xp, above), (fp, below), (fp, above))
    )
    width = subtract(x1, x0)
    flat = lax.eq(width, constant_like(width, 0))
    slope = divide(subtract(f1, f0), select(flat, constant_like(width, 1), width))
    result = select(flat, f0, add(f0, multiply(subtract(x, x0), slope)))
    last = constant_like(above, n - 1)
    if period is None:
        first_x, last_x = take(xp, np.int32(0)), take(xp, lax.convert_element_type(last, np.int32))
        if not isinstance(left, str):
            value = take(fp, np.int32(0)) if left is None else left
            result = select(lax.lt(x, broadcast_to(first_x, typeof(x).shape)), value, result)
        if not isinstance(right, str):
            value = take(fp, np.int32(n - 1)) if right is None else right
            result = select(lax.gt(x, broadcast_to(last_x, typeof(x).shape)), value, result)
    return result


@promotes_inside(2)
def trapezoid(y: Any, x: Any = None, dx: Any = 1.0, axis: int = -1) -> Array:
    """The integral of samples along a dim by the trapezoidal rule.

    `y` are the samples; `x` says where they were taken, as a vector or in the shape of `y`; without
    it they are `dx` apart. The dtype is the floating one to which the arguments are promoted.

    >>> snp.trapezoid(np.array([0.0, 1.0, 4.0]), dx=0.5)
    Array(1.5, dtype=float32)
    """
    check_arraylike("trapezoid", y)
    if x is None:
        (y,) = promote_dtypes_inexact(plain(y))
        steps: Any = dx
    else:
        check_arraylike("trapezoid", x)
        y, x = promote_dtypes_inexact(plain(y), plain(x))
        steps = diff(x) if typeof(x).ndim == 1 else moveaxis(diff(x, axis=axis), axis, -1)
    y = moveaxis(y, axis, -1)
    d = typeof(y).ndim - 1
    n = typeof(y).shape[d]
    pairs = lax.add(lax.slice_in_dim(y, 1, n, axis=d), lax.slice_in_dim(y, 0, n - 1, axis=d))
    return multiply(_sum(multiply(steps, pairs), -1), 0.5)


def unwrap(
    p: ArrayLike, discont: Any = None, axis: int = -1, period: ArrayLike = 2 * np.pi
) -> Array:
    """Make angles along a dim continuous: add whole periods where neighbours differ by half of one.

    `discont` is the least difference to be changed, by default half of `period`. The result has the
    shape of `p` and the dtype to which `p` and `period` are promoted. Raises a `DtypeError` for
    complex numbers.

    >>> snp.unwrap(np.array([0, 5, 3]), period=6)
    Array([ 0, -1, -3], dtype=int32)
    """
    check_arraylike("unwrap", p, period)
    p, period = promote_dtypes(plain(p), plain(period))
    check_real("unwrap", p)
    d = canonical_axis(axis, typeof(p).ndim, "unwrap")
    n = typeof(p).shape[d]
    if not n:
        return as_array(p)
    whole = not dtypes.is_inexact(typeof(p).dtype)
    half = floor_divide(period, 2) if whole else divide(period, 2)
    steps = diff(p, axis=d)
    wrapped = subtract(remainder(add(steps, half), period), half)
    # A step of half a period up stays one up.
    is_half = lax.bitwise_and(equal(wrapped, negative(half)), greater(steps, 0))
    wrapped = select(is_half, half, wrapped)
    small = less(absolute(steps), divide(period, 2) if discont is None else discont)
    correction = cumsum(select(small, 0, subtract(wrapped, steps)), axis=d)
    rest = add(lax.slice_in_dim(p, 1, n, axis=d), correction)
    return concatenate([lax.slice_in_dim(p, 0, 1, axis=d), rest], d)


def gradient(f: Any, *varargs: Any, axis: Any = None, edge_order: int | None = None) -> Any:
    """The derivatives of samples by central differences, one-sided at the ends.

    `varargs` are the distances or the coordinates of the samples, one for all dims or one for each
    of `axis`, by default all. The result is a list for several dims; each array has the shape of
    `f` and the floating dtype to which it is promoted. Raises an `ArgumentError` for another
    `edge_order` than 1, and a `ShapeError` for less than 2 samples.

    >>> snp.gradient(np.array([0.0, 1.0, 4.0]))
    Array([1., 2., 3.], dtype=float32)
    """
    if edge_order not in (None, 1):
        raise RefusedError("gradient: only edge_order=1 is supported")
    check_arraylike("gradient", f, *varargs)
    a, *spacing = promote_dtypes_inexact(plain(f), *map(plain, varargs))
    dims = canonical_axes(axis, typeof(a).ndim, "gradient")
    if any(typeof(a).shape[d] < 2 for d in dims):
        raise ShapeError(f"gradient: shape {typeof(a).shape} has less than 2 elements along a dim")
    steps = spacing or [constant_like(a, 1)]
    steps = steps * len(dims) if len(steps) == 1 else steps
    if len(steps) != len(dims):
        raise ArgumentError(f"gradient: {len(spacing)} spacings do not fit {len(dims)} dims")
    results = [_derivative(a, h, d) for d, h in zip(dims, steps, strict=True)]
    return results[0] if len(results) == 1 else results


def _derivative(a: Any, h: Any, d: int) -> Any:
    n = typeof(a).shape[d]

    def part(x: Any, start: int, stop: int, dim: int = d) -> Any:
        return lax.slice_in_dim(x, start, stop, axis=dim)

    first = subtract(part(a, 1, 2), part(a, 0, 1))
    last = subtract(part(a, n - 1, n), part(a, n - 2, n - 1))
    if typeof(h).ndim == 0:
        inner = subtract(part(a, 2, n), part(a, 0, n - 2))
        middle = divide(multiply(inner, 0.5), h)
        return concatenate([divide(first, h), middle, divide(last, h)], d)
    if typeof(h).shape != (n,):
        raise ShapeError(f"gradient: coordinates {typeof(h).shape} do not fit dim {d} of size {n}")
    steps = diff(reshape(h, [n if k == d else 1 for k in range(typeof(a).ndim)]), axis=d)
    before, after = part(steps, 0, n - 2), part(steps, 1, n - 1)
    both = add(before, after)
    # The parabola through three neighbours, differentiated at the middle one.
    middle = add(
        multiply(divide(multiply(after, -1), multiply(before, both)), part(a, 0, n - 2)),
        add(
            multiply(divide(subtract(after, before), multiply(before, after)), part(a, 1, n - 1)),
            multiply(divide(before, multiply(after, both)), part(a, 2, n)),
        ),
    )
    ends = divide(first, part(steps, 0, 1)), divide(last, part(steps, n - 2, n - 1))
    return concatenate([ends[0], middle, ends[1]], d)


@promotes_inside(2)
def polyval(p: ArrayLike, x: ArrayLike, *, unroll: int = 16) -> Array:
    """The values of a polynomial whose coefficients are `p`, the highest power first.

    Elementwise, in the shape of `x`; `p` and `x` are promoted to one dtype. `unroll` changes
    nothing.

    >>> snp.polyval(np.array([1, 0, 2]), np.array([1, 3]))
    Array([ 3, 11], dtype=int32)
    """
    check_arraylike("polyval", p, x)
    coefficients = as_array(plain(p))
    total: Any = multiply(plain(x), 0)
    for k in range(typeof(coefficients).shape[0]):
        coefficient = lax.index_in_dim(coefficients, k, 0, keepdims=False)
        total = add(multiply(total, x), coefficient)
    return total


@promotes_inside()
def vander(x: ArrayLike, N: int | None = None, increasing: bool = False) -> Array:
    """The matrix whose columns are powers of a vector, the highest first, or last if `increasing`.

    The shape is (size of `x`, `N`), and `N` is that size if it is None. The dtype is
    that of `x`, and the default integer for bools. Raises a `ShapeError` if `x` is no vector.

    >>> snp.vander(np.array([1, 2, 3]))
    Array([[1, 1, 1],
           [4, 2, 1],
           [9, 3, 1]], dtype=int32)
    """
    (x,) = promote_dtypes_numeric(operand("vander", x))
    if typeof(x).ndim != 1:
        raise ShapeError(f"vander: x must have one dim, got {typeof(x)}")
    n = typeof(x).shape[0] if N is None else operator.index(N)
    exponents = lax.iota(default_int(), n)
    if not increasing:
        exponents = lax.rev(exponents, (0,))
    exponents = lax.convert_element_type(exponents, typeof(x).dtype)
    return power(reshape(x, (-1, 1)), reshape(exponents, (1, -1)))


def i0(x: ArrayLike) -> Array:
    """The modified Bessel function of the first kind and order 0.

    Elementwise: the result has the shape of `x`. Integers and bools become the default float.
    Raises a `DtypeError` for complex numbers.

    >>> snp.i0(np.array([0.0, 1.0]))
    Array([1.       , 1.2660658], dtype=float32)
    """
    (x,) = promote_args_inexact("i0", x)
    check_real("i0", x)
    return bessel_i0(x)


# ---- index arithmetic --------------------------------------------------------------------------


def unravel_index(indices: ArrayLike, shape: Any) -> tuple[Any, ...]:
    """Convert positions in a flat array to indices of an array of a shape.

    `indices` are the positions, as integers; negative ones count from the end, and those outside
    are clipped. `shape` is an integer or a tuple of integers. The result is a tuple with an array
    for each dim of `shape`; each has the shape and dtype of `indices`.

    >>> snp.unravel_index(np.array([5, -1]), (2, 4))
    (Array([1, 1], dtype=int32), Array([1, 3], dtype=int32))
    """
    check_arraylike("unravel_index", indices)
    sizes = tuple(shape) if np.iterable(shape) else (shape,)
    rest = as_array(plain(indices))
    found = []
    for size in reversed(sizes):
        rest, index = divmod(rest, size)
        found.append(index)
    above = lax.gt(rest, constant_like(rest, 0))
    if dtypes.is_unsigned(typeof(rest).dtype):
        below = lax.lt(rest, constant_like(rest, 0))
    else:
        below = lax.lt(rest, constant_like(rest, -1))
    result = []
    for size, index in zip(sizes, reversed(found), strict=True):
        inside = select(below, constant_like(index, 0), index)
        result.append(select(above, constant_like(index, int(size) - 1), inside))
    return tuple(result)


def ravel_multi_index(
    multi_index: Sequence[Any],
    dims: Sequence[int],
    mode: str = "raise",
    order: str = "C",
    *,
    dtype: Any = None,
) -> Array:
    """Convert indices of an array of shape `dims` to positions in the flat array.

    `multi_index` has an array of integers for each dim; they broadcast to one shape, which the
    result has. `mode` says what is done with an index that is out of bounds: "wrap", "clip", or
    "raise" (the default), which needs concrete indices. `order` is "C" if the last index varies
    fastest, and "F" if the first does. The result has the integer `dtype`, by default the one to
    which the indices and the default integer are promoted.

    Raises an `ArgumentError` for an index out of bounds or a traced one with "raise", for another
    `mode` or `order`, for another number of arrays than of dims, and for a `dtype` without
    integers.

    >>> snp.ravel_multi_index((np.array([1, 1]), np.array([1, 3])), (2, 4))
    Array([5, 7], dtype=int32)
    """
    if len(multi_index) != len(dims):
        raise ArgumentError(f"ravel_multi_index: {len(multi_index)} indices for {len(dims)} dims")
    check_arraylike("ravel_multi_index", *multi_index)
    if order not in ("C", "F") or mode not in ("raise", "wrap", "clip"):
        raise ArgumentError(f"ravel_multi_index: unknown mode={mode!r} or order={order!r}")
    dtype = result_type(default_int(), *multi_index) if dtype is None else dtypes.canonical(dtype)
    if not dtypes.is_integer(dtype):
        raise ArgumentError("ravel_multi_index: indices must be integers")
    sizes = [operator.index(d) for d in dims]
    total: Any = np.zeros((), dtype)
    for k, index in enumerate(multi_index):
        behind = sizes[k + 1 :] if order == "C" else sizes[:k]
        inside = _inside(convert(plain(index), dtype), sizes[k], mode)
        total = add(total, multiply(inside, np.array(math.prod(behind), dtype)))
    return as_array(total)


def _inside(index: Any, size: int, mode: str) -> Any:
    if mode == "clip":
        return clip(index, 0, size - 1)
    if mode == "wrap":
        return remainder(index, size)
    if isinstance(index, Tracer):
        raise ArgumentError(
            "ravel_multi_index: mode='raise' looks at the values, which are traced; use 'clip' or "
            "'wrap'"
        )
    values = np.asarray(index)
    if values.size and (values.min() < 0 or values.max() >= size):
        raise ArgumentError(f"ravel_multi_index: an index is outside range({size})")
    return index


def _triangle_indices(n: int, k: int, m: int | None, lower: bool) -> tuple[Any, Any]:
    make = np.tril_indices if lower else np.triu_indices
    rows, columns = make(n, k, n if m is None else m)
    index = default_int()
    return as_array(rows.astype(index)), as_array(columns.astype(index))


def tril_indices(n: int, k: int = 0, m: int | None = None) -> tuple[Any, Any]:
    """The indices of the lower triangle of a matrix: a vector of rows and one of columns.

    The matrix has `n` rows and `m` columns, by default `n`. The triangle ends at diagonal `k`: 0,
    the default, is the main one, and positive ones lie above it. Both vectors have one size and the
    default integer dtype; they are in row-major order.

    >>> snp.tril_indices(2)
    (Array([0, 1, 1], dtype=int32), Array([0, 0, 1], dtype=int32))
    """
    return _triangle_indices(n, k, m, lower=True)


def triu_indices(n: int, k: int = 0, m: int | None = None) -> tuple[Any, Any]:
    """The indices of the upper triangle of a matrix: a vector of rows and one of columns.

    The matrix has `n` rows and `m` columns, by default `n`. The triangle begins at diagonal `k`: 0,
    the default, is the main one, and positive ones lie above it. Both vectors have one size and the
    default integer dtype; they are in row-major order.

    >>> snp.triu_indices(2)
    (Array([0, 0, 1], dtype=int32), Array([0, 1, 1], dtype=int32))
    """
    return _triangle_indices(n, k, m, lower=False)


def tril_indices_from(arr: ArrayLike, k: int = 0) -> tuple[Any, Any]:
    """The indices of the lower triangle of a matrix like `arr`.

    `arr` gives only the shape, of two dims. `k` is the last diagonal and 0 by default, as for
    `tril_indices`. The result is a vector of rows and one of columns, of the default integer dtype.
    Raises a `ShapeError` if `arr` has not two dims.

    >>> snp.tril_indices_from(np.ones((2, 3)), 1)
    (Array([0, 0, 1, 1, 1], dtype=int32), Array([0, 1, 0, 1, 2], dtype=int32))
    """
    rows, columns = _matrix_shape("tril_indices_from", arr)
    return tril_indices(rows, k, columns)


def triu_indices_from(arr: ArrayLike, k: int = 0) -> tuple[Any, Any]:
    """The indices of the upper triangle of a matrix like `arr`.

    `arr` gives only the shape, of two dims. `k` is the first diagonal and 0 by default, as for
    `triu_indices`. The result is a vector of rows and one of columns, of the default integer dtype.
    Raises a `ShapeError` if `arr` has not two dims.

    >>> snp.triu_indices_from(np.ones((2, 3)), 1)
    (Array([0, 0, 1], dtype=int32), Array([1, 2, 2], dtype=int32))
    """
    rows, columns = _matrix_shape("triu_indices_from", arr)
    return triu_indices(rows, k, columns)


def _matrix_shape(name: str, arr: Any) -> tuple[int, ...]:
    aval = typeof(plain(arr))
    if aval.ndim != 2:
        raise ShapeError(f"{name}: arr must have two dims, got {aval}")
    return aval.shape


def diag_indices(n: int, ndim: int = 2) -> tuple[Any, ...]:
    """The indices of the diagonal of an array with `ndim` dims of size `n`.

    The result is a tuple of `ndim` vectors, 2 by default, of the integers below `n`, in the default
    integer dtype. Raises a `TypeError` if `n` is no integer.

    >>> snp.diag_indices(2)
    (Array([0, 1], dtype=int32), Array([0, 1], dtype=int32))
    """
    return (lax.iota(default_int(), operator.index(n)),) * ndim


def diag_indices_from(arr: ArrayLike) -> tuple[Any, ...]:
    """The indices of the diagonal of an array whose dims are of one size.

    `arr` gives only the shape. The result is a tuple with a vector for each dim, of the default
    integer dtype, as of `diag_indices`. Raises a `ShapeError` if `arr` has fewer than two dims, or
    dims of different sizes.

    >>> snp.diag_indices_from(np.ones((2, 2)))
    (Array([0, 1], dtype=int32), Array([0, 1], dtype=int32))
    """
    shape = typeof(operand("diag_indices_from", arr)).shape
    if len(shape) < 2 or len(set(shape)) != 1:
        raise ShapeError(
            f"diag_indices_from: at least 2 dims, all of one size, are needed, got shape {shape}"
        )
    return diag_indices(shape[0], len(shape))


def mask_indices(
    n: int, mask_func: Callable[[Any, Any], Any], k: Any = 0, *, size: int | None = None
) -> tuple[Any, Any]:
    """The indices at which `mask_func(ones((n, n)), k)`, `triu` for example, is not zero.

    `n` is the number of rows and columns. `mask_func` takes the matrix of ones and `k`, 0 by
    default, and returns a matrix. The result is a vector of rows and one of columns, of the default
    integer dtype. `size` is that of `nonzero`: the size of both vectors, which a traced mask needs.

    >>> snp.mask_indices(2, snp.triu)
    (Array([0, 0, 1], dtype=int32), Array([0, 1, 1], dtype=int32))
    """
    rows, columns = nonzero(mask_func(lax.full((n, n), 1, default_float()), k), size=size)
    return rows, columns
