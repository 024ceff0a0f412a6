"""Choosing values: `clip`, `select`, `choose`, `piecewise`, `nan_to_num`.

`where` is in `searching.py`, because with one argument it searches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, ConcretizationError, DtypeArgumentError
from spmd.core.aval import typeof
from spmd.core.trace import Tracer
from spmd.numpy.creation import asarray
from spmd.numpy.logic import as_bool, isnan, isneginf, isposinf
from spmd.numpy.promotion import (
    as_array,
    broadcast_to,
    check_arraylike,
    check_arraylike_or_none,
    check_real,
    constant_like,
    convert,
    operand,
    plain,
    promote_dtypes,
    promote_shapes,
    refuse_out,
)
from spmd.numpy.promotion import select as choose_by_mask
from spmd.numpy.ufuncs import maximum, minimum, remainder
from spmd.sharding.array import Array, ArrayLike


def clip(arr: Any = None, /, min: Any = None, max: Any = None) -> Array:
    """Raise elements below `min` to it, and lower elements above `max` to it.

    `arr`, `min` and `max` broadcast to one shape and are promoted to one dtype; either bound may be
    None. Raises a `DtypeError` for complex numbers, and an `ArgumentError` without an array.

    >>> snp.clip(np.array([1, 5, 9]), 2, 6)
    Array([2, 5, 6], dtype=int32)
    """
    if arr is None:
        raise ArgumentError("clip: no array was given")
    check_arraylike("clip", arr)
    check_arraylike_or_none("clip", min, max)
    arr, min, max = plain(arr), plain(min), plain(max)
    check_real("clip", *(x for x in (arr, min, max) if x is not None))
    if min is not None:
        arr = maximum(min, arr)
    if max is not None:
        arr = minimum(max, arr)
    return as_array(arr)


def select(condlist: Sequence[Any], choicelist: Sequence[Any], default: Any = 0) -> Array:
    """Take elements from the first of several choices whose condition holds.

    `condlist` has the conditions and `choicelist` the arrays, equally many; `default` stands where
    no condition holds. All broadcast to one shape, and the choices are promoted to one dtype.
    Raises an `ArgumentError` if the lists differ in length or are empty.

    >>> x = np.array([1, 5, 9])
    >>> snp.select([x < 3, x < 7], [x, 10 * x], default=-1)
    Array([ 1, 50, -1], dtype=int32)
    """
    if len(condlist) != len(choicelist) or not len(condlist):
        raise ArgumentError(
            f"select: condlist and choicelist must be equally long and not empty, got "
            f"{len(condlist)} and {len(choicelist)}"
        )
    check_arraylike("select", *condlist, *choicelist, default)
    default, *choices = promote_dtypes(plain(default), *map(plain, choicelist))
    result = default
    for condition, choice in reversed(list(zip(condlist, choices, strict=True))):
        result = choose_by_mask(as_bool(plain(condition)), choice, result)
    return as_array(result)


def choose(a: ArrayLike, choices: Any, out: None = None, mode: str = "raise") -> Array:
    """Take elements of several arrays, `choices[a]` element by element.

    `a` and the arrays broadcast to one shape, and the arrays are promoted to one dtype. `mode` says
    what is done with an index that is out of bounds: "wrap", "clip", or "raise", which needs a
    concrete `a`. Raises a `DtypeError` if `a` is no array of integers, an `ArgumentError` for such
    an index or another `mode`, and a `ConcretizationError` for a traced `a` with "raise".

    >>> snp.choose(np.array([0, 1, 0]), [np.array([1, 2, 3]), 10])
    Array([ 1, 10,  3], dtype=int32)
    """
    refuse_out("choose", out)
    items = list(choices)
    check_arraylike("choose", a, *items)
    a = plain(a)
    count = len(items)
    if not dtypes.is_integer(typeof(a).dtype):
        raise DtypeArgumentError(f"choose: the index must be integers, got {typeof(a)}")
    if mode == "raise":
        if isinstance(a, Tracer):
            raise ConcretizationError(
                "choose: mode='raise' looks at the values of the index, which is traced; "
                "use mode='wrap' or mode='clip'"
            )
        values = np.asarray(a)
        if values.size and (values.min() < 0 or values.max() >= count):
            raise ArgumentError(f"choose: the index has entries outside range({count})")
    elif mode == "wrap":
        a = remainder(a, count)
    elif mode == "clip":
        a = clip(a, 0, count - 1)
    else:
        raise ArgumentError(f"choose: mode must be 'raise', 'wrap' or 'clip', got {mode!r}")
    a, *items = promote_shapes("choose", a, *promote_dtypes(*map(plain, items)))
    items = [lax.convert_element_type(x, typeof(x).dtype) for x in items]
    return lax.select_n(lax.convert_element_type(a, np.dtype(np.int32)), *items)


def piecewise(x: Any, condlist: Any, funclist: Sequence[Any], *args: Any, **kw: Any) -> Array:
    """Apply to each element the function whose condition holds.

    `condlist` has bool arrays of the shape of `x` and `funclist` functions or numbers; one function
    more is the default, which is 0 otherwise. `args` and `kw` are further arguments of the
    functions. The result has the dtype of `x`. Raises an `ArgumentError` if the numbers of
    conditions and functions do not fit.

    Every function sees the whole array, and `where` picks. For differentiation, `x` is a constant
    to a function where its condition does not hold.

    >>> x = np.array([-1.0, 2.0])
    >>> snp.piecewise(x, [x < 0], [lambda v: -v, lambda v: 10 * v])
    Array([ 1., 20.], dtype=float32)
    """
    check_arraylike("piecewise", x)
    x = as_array(x)
    many = isinstance(condlist, (list, tuple)) and np.ndim(condlist[0]) >= 0
    conditions = list(condlist) if many or typeof(condlist).ndim > typeof(x).ndim else [condlist]
    functions: list[Any] = list(funclist)
    if len(functions) == len(conditions):
        functions.append(0)
    if len(functions) != len(conditions) + 1:
        raise ArgumentError(
            f"piecewise: {len(conditions)} conditions need {len(conditions)} or "
            f"{len(conditions) + 1} functions, got {len(functions)}"
        )

    conditions = [as_bool(asarray(condition)) for condition in conditions]

    def value(k: int, f: Any) -> Any:
        if isinstance(f, Callable):  # type: ignore[arg-type]
            f = f(_constant_outside(conditions, k, x), *args, **kw)
        return convert(plain(f), typeof(x).dtype)

    result = value(-1, functions[-1])
    for k, condition in enumerate(conditions):
        result = choose_by_mask(condition, value(k, functions[k]), result)
    return broadcast_to(result, typeof(x).shape)


def _constant_outside(conditions: Sequence[Any], k: int, x: Any) -> Any:
    """`x`, constant where another than condition `k` decides: a slope may be infinite there."""
    if not isinstance(x, Tracer) or not dtypes.is_inexact(typeof(x).dtype):
        return x
    later = functools.reduce(lax.bitwise_or, conditions[k + 1 :], np.bool_(False))
    chosen = lax.bitwise_not(later)
    if k >= 0:
        chosen = lax.bitwise_and(conditions[k], chosen)
    return choose_by_mask(chosen, x, lax.stop_gradient(x))


def nan_to_num(
    x: Any, copy: bool = True, nan: Any = 0.0, posinf: Any = None, neginf: Any = None
) -> Array:
    """Replace NaN and infinities by finite numbers.

    NaN becomes `nan`, and infinities become `posinf` and `neginf`, by default the largest and
    smallest finite number of the dtype. Elementwise: the result has the shape and dtype of `x`, and
    arrays of integers stay. `copy` changes nothing, as arrays are immutable.

    >>> snp.nan_to_num(np.array([1.0, np.nan, np.inf]), posinf=9.0)
    Array([1., 0., 9.], dtype=float32)
    """
    x = operand("nan_to_num", x)
    dtype = typeof(x).dtype
    if not dtypes.is_inexact(dtype):
        return as_array(x)
    if dtypes.is_complex(dtype):
        options = {"nan": nan, "posinf": posinf, "neginf": neginf}
        return lax.complex(nan_to_num(lax.real(x), **options), nan_to_num(lax.imag(x), **options))
    info = dtypes.finfo(dtype)
    posinf = float(info.max) if posinf is None else posinf
    neginf = float(info.min) if neginf is None else neginf
    for test, value in ((isnan, nan), (isposinf, posinf), (isneginf, neginf)):
        replacement = constant_like(x, value) if isinstance(value, (int, float)) else value
        x = choose_by_mask(test(x), convert(replacement, dtype), x)
    return x
