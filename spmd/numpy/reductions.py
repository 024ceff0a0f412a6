"""Reductions and running reductions: `sum`, `max`, `all`, `argmax`, `cumsum`, `nansum`.

One function, `_reduce`, holds what they share: dims, dtype of the computation, `where`, `initial`
and `keepdims`. Means and quantiles are in `statistics.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import (
    ArgumentError,
    ConcretizationError,
    DimensionError,
    DtypeArgumentError,
    ShapeError,
)
from spmd.base.record import record
from spmd.compile.dispatch.eager_cache import cached_options
from spmd.core.aval import typeof
from spmd.numpy.logic import as_bool, isnan
from spmd.numpy.promotion import (
    as_array,
    check_arraylike,
    constant_like,
    convert,
    default_int,
    operand,
    optional_dtype,
    plain,
    promote_dtypes_numeric,
    select,
)
from spmd.sharding.array import Array, ArrayLike

Axis: TypeAlias = int | Sequence[int] | None

# ---- what reductions share ---------------------------------------------------------------------


def canonical_axis(axis: Any, ndim: int, name: str) -> int:
    """One dim in `range(ndim)`; an error names the function and what was allowed."""
    try:
        d = operator.index(axis)
    except ConcretizationError:
        raise
    except TypeError:
        raise ArgumentError(f"{name}: axis must be an integer, got {axis!r}") from None
    if not -ndim <= d < ndim:
        raise DimensionError(f"{name}: axis {d} is out of bounds for an array of {ndim} dims")
    return d + ndim if d < 0 else d


def canonical_axes(axis: Axis, ndim: int, name: str) -> tuple[int, ...]:
    """The dims that `axis` means, None meaning all."""
    if axis is None:
        return tuple(range(ndim))
    # Arrays are iterable and have `__index__`, whatever their dims.
    is_one = not isinstance(axis, Iterable) or (
        hasattr(axis, "__index__") and not getattr(axis, "ndim", 0)
    )
    many: Any = (axis,) if is_one else axis
    dims = tuple([canonical_axis(d, ndim, name) for d in many])
    if len(set(dims)) != len(dims):
        raise ArgumentError(f"{name}: duplicate value in axis={axis}")
    return dims


def keep_dims(result: Any, shape: Sequence[int], dims: Sequence[int]) -> Any:
    """Put reduced dims back with size 1."""
    kept = [d for d in range(len(shape)) if d not in dims]
    ones = [1 if d in dims else size for d, size in enumerate(shape)]
    return lax.broadcast_in_dim(result, ones, kept)


def check_where(name: str, where: Any) -> Any:
    """The mask of a reduction: None or bools."""
    if where is None:
        return None
    check_arraylike(name, where)
    if not dtypes.is_bool(typeof(where).dtype):
        raise DtypeArgumentError(f"{name}: where must be a bool array, got {typeof(where)}")
    return plain(where)


def wide_float(dtype: np.dtype) -> np.dtype:
    """float32 for 16-bit floats, which lose too much when many are added."""
    return np.dtype(np.float32) if dtypes.is_float(dtype) and dtype.itemsize < 4 else dtype


def _sum_dtype(dtype: np.dtype) -> np.dtype:
    """Sums of small integers are at least as wide as the default integer."""
    if dtypes.is_bool(dtype):
        return default_int()
    if dtypes.is_integer(dtype):
        default = dtypes.canonical(np.uint64) if dtypes.is_unsigned(dtype) else default_int()
        return dtype if dtype.itemsize >= default.itemsize else default
    return dtype


@record
class _Reduction:
    """The difference between `sum` and `max`: an operation, and the value that changes nothing."""

    name: str
    reduce: Callable[[Any, Sequence[int]], Any]
    combine: Callable[[Any, Any], Any]
    identity: Callable[[np.dtype], Any]


def _reduce(
    kind: _Reduction,
    a: Any,
    axis: Axis,
    keepdims: bool,
    initial: Any,
    where: Any,
    compute: np.dtype | None = None,
    result_dtype: np.dtype | None = None,
) -> Any:
    """Reduce `a`, converted to `compute`; the identity fills what `where` masks out."""
    aval = typeof(a)
    dims = canonical_axes(axis, aval.ndim, kind.name)
    compute = compute or aval.dtype
    if initial is None and kind in (_MAX, _MIN):
        _check_has_elements(kind.name, aval.shape, dims, where)
    a = lax.convert_element_type(a, compute)
    if where is not None:
        a = select(where, a, kind.identity(compute))
        dims = canonical_axes(axis, typeof(a).ndim, kind.name)
    result = kind.reduce(a, dims) if dims else a
    if initial is not None:
        if typeof(initial).ndim:
            raise ShapeError(f"{kind.name}: initial must be a scalar, got {typeof(initial)}")
        if isinstance(initial, float) and np.isinf(initial) and dtypes.is_integer(compute):
            limits = dtypes.min_value(compute), dtypes.max_value(compute)
            initial = limits[initial > 0]
        result = kind.combine(convert(initial, compute), result)
    if keepdims:
        result = keep_dims(result, typeof(a).shape, dims)
    return as_array(lax.convert_element_type(result, result_dtype or compute))


def _check_has_elements(name: str, shape: Any, dims: Any, where: Any) -> None:
    if where is not None:
        raise ArgumentError(
            f"{name}: with where= there may be nothing to reduce; give initial= as well"
        )
    if 0 in [shape[d] for d in dims]:
        raise ShapeError(
            f"{name}: zero-size array to reduction operation {name}, which has no identity; "
            f"shape {shape} is empty along axis {dims}. Give initial="
        )


def _number(value: int) -> Callable[[np.dtype], Any]:
    return lambda dtype: np.array(value, dtype)


def _reduce_max(a: Any, dims: Sequence[int]) -> Any:
    return (lax.reduce_or if dtypes.is_bool(typeof(a).dtype) else lax.reduce_max)(a, dims)


def _reduce_min(a: Any, dims: Sequence[int]) -> Any:
    return (lax.reduce_and if dtypes.is_bool(typeof(a).dtype) else lax.reduce_min)(a, dims)


_SUM = _Reduction("sum", lax.reduce_sum, lax.add, _number(0))
_PROD = _Reduction("prod", lax.reduce_prod, lax.mul, _number(1))
_MAX = _Reduction("max", _reduce_max, lax.max, dtypes.min_value)
_MIN = _Reduction("min", _reduce_min, lax.min, dtypes.max_value)
_ALL = _Reduction("all", lax.reduce_and, lax.bitwise_and, _number(1))
_ANY = _Reduction("any", lax.reduce_or, lax.bitwise_or, _number(0))


# ---- sums, products, extremes ------------------------------------------------------------------


def _additive(
    kind: _Reduction, a: Any, axis: Axis, dtype: Any, out: Any, keepdims: bool, initial: Any,
    where: Any, promote_integers: bool,
) -> Any:  # fmt: skip
    name = kind.name
    a = operand(name, a, out)
    (a,) = promote_dtypes_numeric(a) if dtype is None else (a,)
    wanted = optional_dtype(dtype, name)
    source = typeof(a).dtype
    result = wanted or (_sum_dtype(source) if promote_integers else source)
    compute = wide_float(result) if wanted is None else result
    mask = check_where(name, where)
    if dtypes.is_bool(compute):
        return (any if kind is _SUM else all)(a, axis, keepdims=keepdims, where=mask)
    return _reduce(kind, a, axis, keepdims, initial, mask, compute, result)


@cached_options
def sum(
    a: ArrayLike,
    axis: Axis = None,
    dtype: Any = None,
    out: None = None,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike | None = None,
    promote_integers: bool = True,
) -> Array:
    """The sum of elements along dims.

    `axis` is one dim, several, or None for all; `keepdims` keeps them with size 1. `where` is a
    bool mask that broadcasts against `a`: what it excludes counts as 0. `initial` is a scalar added
    to each sum. The dtype is `dtype`, or that of `a`; bools and small integers become the default
    integer (int32, or int64 with x64) unless `promote_integers=False`, and 16-bit floats are added
    in float32.

    >>> snp.sum(np.array([[1, 2], [3, 4]]), axis=0)
    Array([4, 6], dtype=int32)
    """
    return _additive(_SUM, a, axis, dtype, out, keepdims, initial, where, promote_integers)


@cached_options
def prod(
    a: ArrayLike,
    axis: Axis = None,
    dtype: Any = None,
    out: None = None,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike | None = None,
    promote_integers: bool = True,
) -> Array:
    """The product of elements along dims.

    `axis` is one dim, several, or None for all; `keepdims` keeps them with size 1. `where` is a
    bool mask that broadcasts against `a`: what it excludes counts as 1. `initial` is a scalar
    factor of each product. The dtype is `dtype`, or that of `a`; bools and small integers become
    the default integer (int32, or int64 with x64) unless `promote_integers=False`.

    >>> snp.prod(np.array([[1, 2], [3, 4]]), axis=0)
    Array([3, 8], dtype=int32)
    """
    return _additive(_PROD, a, axis, dtype, out, keepdims, initial, where, promote_integers)


@cached_options
def max(
    a: ArrayLike,
    axis: Axis = None,
    out: None = None,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike | None = None,
) -> Array:
    """The largest element along dims, and NaN where one is NaN.

    `axis` is one dim, several, or None for all; `keepdims` keeps them with size 1. `where` is a
    bool mask that broadcasts against `a`, and needs `initial`, a scalar that is compared too. The
    dtype is that of `a`. Raises a `ShapeError` if there are no elements and no `initial`.

    >>> snp.max(np.array([[1, 5], [7, 2]]), axis=1)
    Array([5, 7], dtype=int32)
    """
    a = operand("max", a, out)
    return _reduce(_MAX, a, axis, keepdims, initial, check_where("max", where))


@cached_options
def min(
    a: ArrayLike,
    axis: Axis = None,
    out: None = None,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike | None = None,
) -> Array:
    """The smallest element along dims, and NaN where one is NaN.

    `axis` is one dim, several, or None for all; `keepdims` keeps them with size 1. `where` is a
    bool mask that broadcasts against `a`, and needs `initial`, a scalar that is compared too. The
    dtype is that of `a`. Raises a `ShapeError` if there are no elements and no `initial`.

    >>> snp.min(np.array([[1, 5], [7, 2]]), axis=1)
    Array([1, 2], dtype=int32)
    """
    a = operand("min", a, out)
    return _reduce(_MIN, a, axis, keepdims, initial, check_where("min", where))


amax = max
amin = min


@cached_options
def all(
    a: ArrayLike,
    axis: Axis = None,
    out: None = None,
    keepdims: bool = False,
    *,
    where: ArrayLike | None = None,
) -> Array:
    """Whether all elements along dims are true, that is, not zero.

    `axis` is one dim, several, or None for all; `keepdims` keeps them with size 1. `where` is a
    bool mask that broadcasts against `a`: what it excludes counts as true. The result is bool.

    >>> snp.all(np.array([[1, 1], [1, 0]]), axis=1)
    Array([ True, False], dtype=bool)
    """
    a = as_bool(operand("all", a, out))
    return _reduce(_ALL, a, axis, keepdims, None, check_where("all", where))


@cached_options
def any(
    a: ArrayLike,
    axis: Axis = None,
    out: None = None,
    keepdims: bool = False,
    *,
    where: ArrayLike | None = None,
) -> Array:
    """Whether some element along dims is true, that is, not zero.

    `axis` is one dim, several, or None for all; `keepdims` keeps them with size 1. `where` is a
    bool mask that broadcasts against `a`: what it excludes counts as false. The result is bool.

    >>> snp.any(np.array([[0, 1], [0, 0]]), axis=1)
    Array([ True, False], dtype=bool)
    """
    a = as_bool(operand("any", a, out))
    return _reduce(_ANY, a, axis, keepdims, None, check_where("any", where))


@cached_options
def count_nonzero(a: ArrayLike, axis: Axis = None, keepdims: bool = False) -> Array:
    """The number of elements along dims that are not zero.

    `axis` is one dim, several, or None for all; `keepdims` keeps them with size 1. The result has
    the default integer dtype: int32, or int64 with x64.

    >>> snp.count_nonzero(np.array([[0, 1], [2, 3]]), axis=1)
    Array([1, 2], dtype=int32)
    """
    return sum(as_bool(operand("count_nonzero", a)), axis, default_int(), keepdims=keepdims)


@cached_options
def ptp(a: ArrayLike, axis: Axis = None, out: None = None, keepdims: bool = False) -> Array:
    """The largest element minus the smallest, along dims.

    `axis` is one dim, several, or None for all; `keepdims` keeps them with size 1. The dtype is
    that of `a`.

    >>> snp.ptp(np.array([[1, 5], [7, 2]]), axis=1)
    Array([4, 5], dtype=int32)
    """
    a = operand("ptp", a, out)
    return lax.sub(max(a, axis, keepdims=keepdims), min(a, axis, keepdims=keepdims))


# ---- positions of extremes ---------------------------------------------------------------------


def _arg_extreme(
    name: str, find: Callable[..., Any], a: Any, axis: Any, out: Any, keepdims: Any
) -> Any:
    a = operand(name, a, out)
    shape = typeof(a).shape
    if axis is None:
        dims, flat = tuple(range(len(shape))), lax.reshape(a, (typeof(a).size,))
        d = 0
    else:
        d = canonical_axis(axis, len(shape), name)
        dims, flat = (d,), a
    if typeof(flat).shape[d] == 0:
        raise ShapeError(f"{name}: attempt to get {name} of an empty sequence, shape {shape}")
    result = find(flat, d, default_int())
    return keep_dims(result, shape, dims) if keepdims else result


@cached_options
def argmax(
    a: ArrayLike, axis: int | None = None, out: None = None, keepdims: bool | None = None
) -> Array:
    """The position of the largest element along a dim: the first of several, and that of a NaN.

    `axis` is one dim, or None for the position in the flat array; `keepdims` keeps reduced dims
    with size 1. The result has the default integer dtype: int32, or int64 with x64. Raises a
    `ShapeError` if there are no elements.

    >>> snp.argmax(np.array([[1, 5], [7, 2]]), axis=1)
    Array([1, 0], dtype=int32)
    """
    return _arg_extreme("argmax", lax.argmax, a, axis, out, keepdims)


@cached_options
def argmin(
    a: ArrayLike, axis: int | None = None, out: None = None, keepdims: bool | None = None
) -> Array:
    """The position of the smallest element along a dim: the first of several, and that of a NaN.

    `axis` is one dim, or None for the position in the flat array; `keepdims` keeps reduced dims
    with size 1. The result has the default integer dtype: int32, or int64 with x64. Raises a
    `ShapeError` if there are no elements.

    >>> snp.argmin(np.array([[1, 5], [7, 2]]), axis=1)
    Array([0, 1], dtype=int32)
    """
    return _arg_extreme("argmin", lax.argmin, a, axis, out, keepdims)


# ---- running reductions ------------------------------------------------------------------------


def _running(
    name: str,
    op: Callable[..., Any],
    a: Any,
    axis: int | None,
    dtype: Any,
    out: Any = None,
    promote: bool = False,
) -> Any:
    a = operand(name, a, out)
    if axis is None or typeof(a).ndim == 0:
        a, axis = lax.reshape(a, (typeof(a).size,)), 0
    d = canonical_axis(axis, typeof(a).ndim, name)
    source = typeof(a).dtype
    result = optional_dtype(dtype, name)
    if result is None:
        result = _sum_dtype(source) if promote or dtypes.is_bool(source) else source
    if dtypes.is_bool(result):
        steps = op(lax.convert_element_type(as_bool(a), default_int()), d)
        return as_bool(steps)
    return op(lax.convert_element_type(a, result), d)


def cumsum(a: ArrayLike, axis: int | None = None, dtype: Any = None, out: None = None) -> Array:
    """The running sum along a dim: element k is the sum of elements 0 to k.

    The result has the shape of `a`; with `axis=None` it is that of the flat array. The dtype is
    `dtype`, or that of `a`; bools become the default integer. Small integers keep their dtype, and
    wrap around.

    >>> snp.cumsum(np.array([1, 2, 3]))
    Array([1, 3, 6], dtype=int32)
    """
    return _running("cumsum", lax.cumsum, a, axis, dtype, out)


def cumprod(a: ArrayLike, axis: int | None = None, dtype: Any = None, out: None = None) -> Array:
    """The running product along a dim: element k is the product of elements 0 to k.

    The result has the shape of `a`; with `axis=None` it is that of the flat array. The dtype is
    `dtype`, or that of `a`; bools become the default integer. Small integers keep their dtype, and
    wrap around.

    >>> snp.cumprod(np.array([1, 2, 3]))
    Array([1, 2, 6], dtype=int32)
    """
    return _running("cumprod", lax.cumprod, a, axis, dtype, out)


def _cumulative(
    name: str, op: Any, first: int, x: Any, axis: Any, dtype: Any, include_initial: bool
) -> Any:
    check_arraylike(name, x)
    ndim = typeof(x).ndim
    if ndim == 0 or (axis is None and ndim > 1):
        raise ArgumentError(f"{name}: axis must be given for an array of {ndim} dims")
    d = canonical_axis(0 if axis is None else axis, ndim, name)
    steps = _running(name, op, x, d, dtype, promote=True)
    if not include_initial:
        return steps
    shape = [1 if k == d else size for k, size in enumerate(typeof(steps).shape)]
    return lax.concatenate([lax.full(shape, first, typeof(steps).dtype), steps], d)


def cumulative_sum(
    x: ArrayLike, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False
) -> Array:
    """The running sum along a dim, as the array API standard defines it.

    The result has the shape of `x`, and one element more in front, 0, if `include_initial`. `axis`
    may be left out for vectors. The dtype is `dtype`, or that of `x`; bools and small integers
    become the default integer.

    >>> snp.cumulative_sum(np.array([1, 2, 3]), include_initial=True)
    Array([0, 1, 3, 6], dtype=int32)
    """
    return _cumulative("cumulative_sum", lax.cumsum, 0, x, axis, dtype, include_initial)


def cumulative_prod(
    x: ArrayLike, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False
) -> Array:
    """The running product along a dim, as the array API standard defines it.

    The result has the shape of `x`, and one element more in front, 1, if `include_initial`. `axis`
    may be left out for vectors. The dtype is `dtype`, or that of `x`; bools and small integers
    become the default integer.

    >>> snp.cumulative_prod(np.array([1, 2, 3]), include_initial=True)
    Array([1, 1, 2, 6], dtype=int32)
    """
    return _cumulative("cumulative_prod", lax.cumprod, 1, x, axis, dtype, include_initial)


# ---- the same, ignoring NaN --------------------------------------------------------------------


def _without_nan(name: str, a: Any, fill: Any, out: Any = None) -> tuple[Any, Any]:
    """`a` with NaN replaced by `fill`, or what it gives for a dtype, and where they were.

    Dtypes that have no NaN have no mask either: None.
    """
    a = operand(name, a, out)
    if not dtypes.is_inexact(typeof(a).dtype):
        return a, None
    mask = isnan(a)
    value = fill(typeof(a).dtype) if callable(fill) else fill
    return select(mask, constant_like(a, value), a), mask


def nansum(
    a: ArrayLike,
    axis: Axis = None,
    dtype: Any = None,
    out: None = None,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike | None = None,
) -> Array:
    """The sum of the elements along dims that are not NaN, and 0 if all are.

    `axis`, `dtype`, `keepdims`, `initial` and `where` are those of `sum`: `axis=None` takes all
    dims, and small integers become the default integer.

    >>> snp.nansum(np.array([1.0, np.nan, 3.0]))
    Array(4., dtype=float32)
    """
    filled, _ = _without_nan("nansum", a, 0)
    return sum(filled, axis, dtype, out, keepdims, initial, where)


def nanprod(
    a: ArrayLike,
    axis: Axis = None,
    dtype: Any = None,
    out: None = None,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike | None = None,
) -> Array:
    """The product of the elements along dims that are not NaN, and 1 if all are.

    `axis`, `dtype`, `keepdims`, `initial` and `where` are those of `prod`: `axis=None` takes all
    dims, and small integers become the default integer.

    >>> snp.nanprod(np.array([2.0, np.nan, 3.0]))
    Array(6., dtype=float32)
    """
    filled, _ = _without_nan("nanprod", a, 1)
    return prod(filled, axis, dtype, out, keepdims, initial, where)


def _nan_extreme(name: str, reduce: Any, fill: Any, a: Any, axis: Any, out: Any, keepdims: Any,
                 initial: Any, where: Any) -> Any:  # fmt: skip
    filled, mask = _without_nan(name, a, fill, out)
    result = reduce(filled, axis, None, keepdims, initial, where)
    if mask is None or initial is not None:
        return result
    nothing = all(mask, axis, keepdims=keepdims)
    return select(nothing, constant_like(result, np.nan), result)


def nanmax(
    a: ArrayLike,
    axis: Axis = None,
    out: None = None,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike | None = None,
) -> Array:
    """The largest of the elements along dims that are not NaN, and NaN if all are.

    `axis`, `keepdims`, `initial` and `where` are those of `max`; the dtype is that of `a`.

    >>> snp.nanmax(np.array([1.0, np.nan, 3.0]))
    Array(3., dtype=float32)
    """
    return _nan_extreme("nanmax", max, dtypes.min_value, a, axis, out, keepdims, initial, where)


def nanmin(
    a: ArrayLike,
    axis: Axis = None,
    out: None = None,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike | None = None,
) -> Array:
    """The smallest of the elements along dims that are not NaN, and NaN if all are.

    `axis`, `keepdims`, `initial` and `where` are those of `min`; the dtype is that of `a`.

    >>> snp.nanmin(np.array([1.0, np.nan, 3.0]))
    Array(1., dtype=float32)
    """
    return _nan_extreme("nanmin", min, dtypes.max_value, a, axis, out, keepdims, initial, where)


def _nan_arg(find: Any, name: str, fill: Any, a: Any, axis: Any, out: Any, keepdims: Any) -> Any:
    filled, mask = _without_nan(name, a, fill, out)
    position = find(filled, axis, keepdims=keepdims)
    if mask is None:
        return position
    nothing = all(mask, axis, keepdims=bool(keepdims))
    return select(nothing, constant_like(position, -1), position)


def nanargmax(
    a: ArrayLike, axis: int | None = None, out: None = None, keepdims: bool | None = None
) -> Array:
    """The position of the largest element along a dim that is not NaN, and -1 if all are.

    `axis` and `keepdims` are those of `argmax`; the result has the default integer dtype.

    >>> snp.nanargmax(np.array([1.0, np.nan, 3.0]))
    Array(2, dtype=int32)
    """
    return _nan_arg(argmax, "nanargmax", dtypes.min_value, a, axis, out, keepdims)


def nanargmin(
    a: ArrayLike, axis: int | None = None, out: None = None, keepdims: bool | None = None
) -> Array:
    """The position of the smallest element along a dim that is not NaN, and -1 if all are.

    `axis` and `keepdims` are those of `argmin`; the result has the default integer dtype.

    >>> snp.nanargmin(np.array([np.nan, 2.0, 1.0]))
    Array(2, dtype=int32)
    """
    return _nan_arg(argmin, "nanargmin", dtypes.max_value, a, axis, out, keepdims)


def nancumsum(a: ArrayLike, axis: int | None = None, dtype: Any = None, out: None = None) -> Array:
    """The running sum along a dim, with NaN counted as 0.

    Shape and dtype are those of `cumsum`.

    >>> snp.nancumsum(np.array([1.0, np.nan, 3.0]))
    Array([1., 1., 4.], dtype=float32)
    """
    return cumsum(_without_nan("nancumsum", a, 0)[0], axis, dtype, out)


def nancumprod(a: ArrayLike, axis: int | None = None, dtype: Any = None, out: None = None) -> Array:
    """The running product along a dim, with NaN counted as 1.

    Shape and dtype are those of `cumprod`.

    >>> snp.nancumprod(np.array([2.0, np.nan, 3.0]))
    Array([2., 2., 6.], dtype=float32)
    """
    return cumprod(_without_nan("nancumprod", a, 1)[0], axis, dtype, out)
