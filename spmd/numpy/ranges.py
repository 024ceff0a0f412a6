"""Arrays of numbers in order: `arange`, `linspace`, `logspace`, `geomspace`.

Their lengths are shapes, so their arguments must be concrete numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, ConcretizationError
from spmd.core.aval import typeof
from spmd.core.explicit import lays_out_result
from spmd.core.trace import Tracer
from spmd.numpy.creation import placed
from spmd.numpy.promotion import (
    broadcast_shapes,
    broadcast_to,
    check_arraylike,
    check_arraylike_or_none,
    constant_like,
    optional_dtype,
    plain,
    result_type,
    whole_number,
)
from spmd.sharding.array import Array, ArrayLike


def _concrete_number(x: Any, name: str) -> Any:
    if isinstance(x, Tracer) and x.concrete() is None:
        raise ConcretizationError(
            f"arange: {name} is traced ({x!r}), but the length of the result must be known when "
            "a function is traced. Mark the argument it comes from static (jit's static_argnums)."
        )
    value = np.asarray(x.concrete() if isinstance(x, Tracer) else x)
    if value.ndim or dtypes.is_complex(value.dtype):
        raise ArgumentError(f"arange: {name} must be a real number, got {x!r}")
    return value.item()


@lays_out_result
def arange(
    start: ArrayLike,
    stop: ArrayLike | None = None,
    step: Any = None,
    dtype: Any = None,
    *,
    device: Any = None,
    out_sharding: Any = None,
) -> Array:
    """Make a vector of numbers from `start` (0) up to `stop`, exclusively, in steps of `step` (1).

    One argument is `stop`. The size is `ceil((stop - start) / step)`, or 0. The dtype is that
    to which the arguments are promoted, or `dtype`. `device` is a device or sharding for the
    result. `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the
    result. Raises an `ArgumentError` if `step` is 0, and a `ConcretizationError` if an argument
    is traced.

    >>> snp.arange(2, 5)
    Array([2, 3, 4], dtype=int32)
    >>> snp.arange(0.0, 1.0, 0.25)
    Array([0.  , 0.25, 0.5 , 0.75], dtype=float32)
    """
    check_arraylike_or_none("arange", start, stop, step)
    given = [x for x in (start, stop, step) if x is not None]
    found = optional_dtype(dtype, "arange")
    found = result_type(*given) if found is None else found
    if stop is None:
        start, stop = 0, start
    start, stop = _concrete_number(start, "start"), _concrete_number(stop, "stop")
    step = None if step is None else _concrete_number(step, "step")
    if step == 0:
        raise ArgumentError("arange: step must not be 0")
    result = _arange(start, stop, step, found)
    return placed(result, device)


def _arange(start: Any, stop: Any, step: Any, dtype: np.dtype) -> Any:
    size = max(0, int(np.ceil((stop - start) / (1 if step is None else step))))
    if step is None:
        numbers = lax.iota(dtype, size)
        return numbers if start == 0 else lax.add(numbers, np.array(start).astype(dtype))
    # bfloat16 cannot count to 1000: the product is formed in float32 and rounded once.
    wide = np.dtype(np.float32) if dtypes.is_float(dtype) and dtype.itemsize < 4 else dtype
    steps = lax.mul(lax.iota(wide, size), np.array(step).astype(wide))
    return lax.convert_element_type(lax.add(steps, np.array(start).astype(wide)), dtype)


def linspace(
    start: ArrayLike,
    stop: ArrayLike,
    num: int = 50,
    endpoint: bool = True,
    retstep: bool = False,
    dtype: Any = None,
    axis: int = 0,
    *,
    device: Any = None,
) -> Any:
    """Make `num` evenly spaced numbers from `start` to `stop`.

    `stop` is the last number unless `endpoint=False`. `start` and `stop` may be arrays, which
    broadcast; the numbers lie along dim `axis` of the result, which has size `num`. The dtype is
    `dtype`, or the floating one to which the ends are promoted. `retstep=True` also returns the
    distance. `device` is a device or sharding for the result. Raises an `ArgumentError` if `num` is
    negative.

    >>> snp.linspace(0, 1, 5)
    Array([0.  , 0.25, 0.5 , 0.75, 1.  ], dtype=float32)
    """
    check_arraylike("linspace", start, stop)
    num = whole_number("linspace", "num", num)
    if num < 0:
        raise ArgumentError(f"linspace: num={num} must not be negative")
    found = optional_dtype(dtype, "linspace") or dtypes.to_inexact(result_type(start, stop))
    wide = dtypes.to_inexact(found)
    start, stop = (lax.convert_element_type(plain(x), wide) for x in (start, stop))
    bounds = broadcast_shapes(typeof(start).shape, typeof(stop).shape)
    start, stop = (broadcast_to(x, bounds) for x in (start, stop))
    axis = axis + len(bounds) + 1 if axis < 0 else axis
    intervals = num - 1 if endpoint else num
    numbers = _interpolate(start, stop, num, intervals, endpoint, axis)
    if dtypes.is_integer(found):
        numbers = lax.floor(numbers)
    result = lax.convert_element_type(numbers, found)
    result = placed(result, device)
    if not retstep:
        return result
    span = lax.sub(stop, start)
    distance = np.nan if intervals < 1 else intervals
    return result, lax.div(span, constant_like(span, float(distance)))


def _interpolate(start: Any, stop: Any, num: int, intervals: int, endpoint: bool, axis: int) -> Any:
    bounds, dtype = typeof(start).shape, typeof(start).dtype
    row = (*bounds[:axis], 1, *bounds[axis:])
    if num == 0:
        return lax.full((*bounds[:axis], 0, *bounds[axis:]), 0, dtype)
    if num == 1:
        return lax.reshape(start, row)
    real = dtypes.real_of(dtype)
    # By both ends, not by start + k * step: each end is then exact, and so is symmetry.
    step = lax.div(lax.iota(real, intervals), np.array(intervals, real))
    step = lax.convert_element_type(step, dtype)
    whole = (*bounds[:axis], intervals, *bounds[axis:])
    step = lax.broadcast_in_dim(step, whole, (axis,))
    lower = lax.broadcast_in_dim(lax.reshape(start, row), whole, range(len(whole)))
    upper = lax.broadcast_in_dim(lax.reshape(stop, row), whole, range(len(whole)))
    one = np.array(1, dtype)
    inner = lax.add(lax.mul(lower, lax.sub(one, step)), lax.mul(upper, step))
    if not endpoint:
        return inner
    return lax.concatenate([inner, lax.reshape(stop, row)], axis)


def logspace(
    start: ArrayLike,
    stop: ArrayLike,
    num: int = 50,
    endpoint: bool = True,
    base: Any = 10.0,
    dtype: Any = None,
    axis: int = 0,
) -> Array:
    """Make `num` numbers from `base**start` to `base**stop`, evenly spaced on a logarithmic scale.

    The exponents are those of `linspace`, whose meaning `endpoint` and `axis` have, and so is the
    shape. The dtype is `dtype`, or the floating one to which `start` and `stop` are promoted.

    >>> snp.logspace(0, 2, 3)
    Array([  1.,  10., 100.], dtype=float32)
    """
    found = optional_dtype(dtype, "logspace") or dtypes.to_inexact(result_type(start, stop))
    exponents = linspace(start, stop, num, endpoint, dtype=dtypes.to_inexact(found), axis=axis)
    base = lax.convert_element_type(base, typeof(exponents).dtype)
    powers = lax.pow(lax.broadcast_in_dim(base, typeof(exponents).shape, ()), exponents)
    return lax.convert_element_type(powers, found)


def geomspace(
    start: ArrayLike,
    stop: ArrayLike,
    num: int = 50,
    endpoint: bool = True,
    dtype: Any = None,
    axis: int = 0,
) -> Array:
    """Make `num` numbers from `start` to `stop`, each a constant multiple of the one before.

    `start` and `stop` have one sign; they may be arrays, which broadcast. The numbers lie along dim
    `axis` of the result; `stop` is the last one unless `endpoint=False`. The dtype is `dtype`, or
    the floating one to which the ends are promoted.

    >>> snp.geomspace(1, 8, 4)
    Array([1., 2., 4., 8.], dtype=float32)
    """
    found = optional_dtype(dtype, "geomspace") or dtypes.to_inexact(result_type(start, stop))
    wide = dtypes.to_inexact(found)
    start, stop = (lax.convert_element_type(plain(x), wide) for x in (start, stop))
    bounds = broadcast_shapes(typeof(start).shape, typeof(stop).shape)
    start, stop = (broadcast_to(x, bounds) for x in (start, stop))
    # The sign is taken out so that -1 .. -1000 has a logarithm.
    sign = lax.sign(start)
    exponents = linspace(
        lax.log(lax.div(start, sign)), lax.log(lax.div(stop, sign)), num, endpoint, axis=axis
    )
    row = (*bounds[:axis], 1, *bounds[axis:]) if axis >= 0 else (*bounds, 1)
    shape = typeof(exponents).shape
    sign = lax.broadcast_in_dim(lax.reshape(sign, row), shape, range(len(shape)))
    return lax.convert_element_type(lax.mul(sign, lax.exp(exponents)), found)
