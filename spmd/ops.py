"""Reductions over segments: rows of an array that share a number, `jax.ops`.

Rows need not be sorted by segment. Rows whose number is negative or too large are left out.
"""

from __future__ import annotations

import operator as _operator
from collections.abc import Callable
from typing import Any

import numpy as _np

from spmd import lax as _lax
from spmd.base import dtypes as _dtypes
from spmd.base.errors import ArgumentError as _ArgumentError
from spmd.base.errors import ConcretizationError as _ConcretizationError
from spmd.base.errors import DtypeError as _DtypeError
from spmd.base.errors import ShapeError as _ShapeError
from spmd.core.aval import typeof as _typeof
from spmd.core.explicit import lays_out_result as _lays_out_result
from spmd.core.trace import Tracer as _Tracer
from spmd.numpy.promotion import as_array as _as_array
from spmd.numpy.promotion import broadcast_to as _broadcast_to
from spmd.numpy.promotion import check_arraylike as _check_arraylike
from spmd.numpy.reductions import max as _max
from spmd.numpy.reductions import min as _min
from spmd.numpy.reductions import prod as _prod
from spmd.numpy.reductions import sum as _sum

__all__ = ["segment_max", "segment_min", "segment_prod", "segment_sum"]


def _family(
    name: str,
    scatter: str,
    fold: Callable[..., Any],
    identity: Callable[[_np.dtype], Any],
    doc: str,
) -> Callable[..., Any]:
    """A reduction of the rows of each segment."""

    @_lays_out_result
    def f(
        data: Any,
        segment_ids: Any,
        num_segments: int | None = None,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
        bucket_size: int | None = None,
        mode: Any = None,
        out_sharding: Any = None,
    ) -> Any:
        _check_arraylike(name, data, segment_ids)
        data, ids = _as_array(data), _as_array(segment_ids)
        data = _rows_for(name, data, ids)
        count = _count(name, ids, num_segments)
        dtype, rest = _typeof(data).dtype, _typeof(data).shape[_typeof(ids).ndim :]
        how = {
            "indices_are_sorted": indices_are_sorted,
            "unique_indices": unique_indices,
            "mode": mode,
        }

        def reduced(rows: Any, numbers: Any) -> Any:
            start = _lax.full((count, *rest), identity(dtype), dtype)
            # Negative numbers would count from the end: they are out of bounds instead.
            beyond = _lax.full(_typeof(numbers).shape, count, _typeof(numbers).dtype)
            wild = _lax.lt(numbers, _lax.full_like(numbers, 0))
            numbers = _lax.select(wild, beyond, numbers)
            return getattr(start.at[numbers], scatter)(rows, **how)

        if bucket_size is None:
            return reduced(data, ids)
        if _typeof(ids).ndim != 1:
            raise _ShapeError(f"{name}: bucket_size= takes a vector of segment_ids, got {ids}")
        rows = _typeof(ids).shape[0]
        if rows <= bucket_size:
            return reduced(data, ids)
        if bucket_size < 1:
            raise _ArgumentError(f"{name}: bucket_size={bucket_size} must be at least 1")
        parts = [
            reduced(data[k : k + bucket_size], ids[k : k + bucket_size])
            for k in range(0, rows, bucket_size)
        ]
        return fold(_lax.concatenate([p[None] for p in parts], 0), axis=0, dtype_of=data)

    f.__name__ = f.__qualname__ = name
    f.__doc__ = doc + _REST
    return f


_REST = """

    `data` has shape (n, ...), `segment_ids` (n,) integers; the result has shape
    (num_segments, ...). Numbers may have more dims, or `data` one row or be a scalar: `data` is
    broadcast to `segment_ids.shape + data.shape[1:]`. Without `num_segments` it is one more than
    the largest number, which then must be concrete. `mode` as in `x.at[]`; `bucket_size` reduces
    that many rows at a time and joins the results, which is more exact for long sums.
    `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the result.
    Raises `ShapeError` and `DtypeError`.

    >>> segment_sum(np.array([1.0, 2.0, 4.0]), np.array([0, 1, 0]), num_segments=3)
    Array([5., 2., 0.], dtype=float32)
    """


def _rows_for(name: str, data: Any, ids: Any) -> Any:
    """`data` with one row for each segment number."""
    d, i = _typeof(data), _typeof(ids)
    if not _dtypes.is_integer(i.dtype):
        raise _DtypeError(f"{name}: segment_ids must be integers, got {i}")
    shape = (*i.shape, *d.shape[1:])
    if d.shape == shape:
        return data
    fits = d.ndim <= len(shape) and all(
        a in (1, b) for a, b in zip(d.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise _ShapeError(
            f"{name}: segment_ids must have a number for each row of data; got {i} and data {d}, "
            f"which does not broadcast to {shape}"
        )
    return _broadcast_to(data, shape)


def _count(name: str, ids: Any, num_segments: int | None) -> int:
    if num_segments is not None:
        num_segments = _operator.index(num_segments)
        if num_segments < 0:
            raise _ArgumentError(f"{name}: num_segments={num_segments} must not be negative")
        return num_segments
    if isinstance(ids, _Tracer):
        raise _ConcretizationError(
            f"{name}: the number of segments depends on traced data; give num_segments="
        )
    values = _np.asarray(ids)
    return int(values.max()) + 1 if values.size else 0


def _folded(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, axis, dtype_of: _lax.convert_element_type(
        f(x, axis=axis), _typeof(dtype_of).dtype
    )


segment_sum = _family(
    "segment_sum", "add", _folded(_sum), lambda dtype: 0, "The sum of the rows of each segment."
)
segment_prod = _family(
    "segment_prod",
    "multiply",
    _folded(_prod),
    lambda dtype: 1,
    "The product of the rows of each segment; 1 for a segment without rows.",
)
segment_max = _family(
    "segment_max",
    "max",
    _folded(_max),
    _dtypes.min_value,
    "The largest row of each segment; the least value there is for one without rows.",
)
segment_min = _family(
    "segment_min",
    "min",
    _folded(_min),
    _dtypes.max_value,
    "The smallest row of each segment; the largest value there is for one without rows.",
)
