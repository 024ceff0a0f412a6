"""Comparisons, bits, truth values and tests of floats: `equal`, `bitwise_and`, `isnan`, `isclose`.

Almost everything here gives bools or keeps integers, and so has no derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.core.aval import is_arraylike, typeof
from spmd.numpy.promotion import (
    as_array,
    check_arraylike,
    check_real,
    constant_like,
    filled_like,
    plain,
    promote_args,
    promote_args_numeric,
    promote_shapes,
    promotes_inside,
    select,
)
from spmd.numpy.ufuncs import named

# ---- families ----------------------------------------------------------------------------------


def _binary(name: str, op: Callable[..., Any], doc: str) -> Callable[..., Any]:
    def f(x: Any, y: Any, /) -> Any:
        return op(*promote_args(name, x, y))

    return named(f, name, doc)


def _numeric_binary(name: str, op: Callable[..., Any], doc: str) -> Callable[..., Any]:
    def f(x: Any, y: Any, /) -> Any:
        return op(*promote_args_numeric(name, x, y))

    return named(f, name, doc)


def _ordering(name: str, op: Callable[..., Any], doc: str) -> Callable[..., Any]:
    """A comparison; complex numbers are ordered by real part, then by imaginary part."""

    def f(x: Any, y: Any, /) -> Any:
        x, y = promote_args(name, x, y)
        if not dtypes.is_complex(typeof(x).dtype):
            return op(x, y)
        re_x, re_y = lax.real(x), lax.real(y)
        by_imag = op(lax.imag(x), lax.imag(y))
        return select(lax.eq(re_x, re_y), by_imag, op(re_x, re_y))

    return named(f, name, doc)


def _logical(name: str, op: Callable[..., Any], doc: str) -> Callable[..., Any]:
    def f(x: Any, y: Any, /) -> Any:
        return op(*map(as_bool, promote_args(name, x, y)))

    return named(f, name, doc)


def as_bool(x: Any) -> Any:
    """Truth values: what is not zero is true."""
    return x if dtypes.is_bool(typeof(x).dtype) else lax.ne(x, constant_like(x, 0))


# ---- comparisons -------------------------------------------------------------------------------

equal = _binary("equal", lax.eq, "Whether elements are equal.")
not_equal = _binary("not_equal", lax.ne, "Whether elements differ.")
less = _ordering("less", lax.lt, "Whether x < y.")
less_equal = _ordering("less_equal", lax.le, "Whether x <= y.")
greater = _ordering("greater", lax.gt, "Whether x > y.")
greater_equal = _ordering("greater_equal", lax.ge, "Whether x >= y.")

logical_and = _logical("logical_and", lax.bitwise_and, "Whether both are true (not zero).")
logical_or = _logical("logical_or", lax.bitwise_or, "Whether one is true (not zero).")
logical_xor = _logical("logical_xor", lax.bitwise_xor, "Whether exactly one is true (not zero).")


def logical_not(x: Any, /) -> Any:
    """Whether elements are zero (false)."""
    return lax.bitwise_not(*map(as_bool, promote_args("logical_not", x)))


# ---- extremes by comparison ---------------------------------------------------------------------


def fmax(x1: Any, x2: Any) -> Any:
    """The larger of two; the other one if one is NaN."""
    x, y = promote_args("fmax", x1, x2)
    return select(lax.bitwise_or(greater(x, y), lax.ne(y, y)), x, y)


def fmin(x1: Any, x2: Any) -> Any:
    """The smaller of two; the other one if one is NaN."""
    x, y = promote_args("fmin", x1, x2)
    return select(lax.bitwise_or(less(x, y), lax.ne(y, y)), x, y)


# ---- bits --------------------------------------------------------------------------------------

bitwise_and = _binary("bitwise_and", lax.bitwise_and, "Bits set in both.")
bitwise_or = _binary("bitwise_or", lax.bitwise_or, "Bits set in one or both.")
bitwise_xor = _binary("bitwise_xor", lax.bitwise_xor, "Bits set in exactly one.")
left_shift = _numeric_binary("left_shift", lax.shift_left, "x shifted left by y bits.")
bitwise_left_shift = left_shift


def bitwise_not(x: Any, /) -> Any:
    """All bits turned over; logical not for bools."""
    return lax.bitwise_not(*promote_args("bitwise_not", x))


invert = bitwise_invert = bitwise_not


def right_shift(x: Any, y: Any, /) -> Any:
    """`x` shifted right by `y` bits, keeping the sign."""
    x, y = promote_args_numeric("right_shift", x, y)
    unsigned = typeof(x).dtype.kind == "u"
    return (lax.shift_right_logical if unsigned else lax.shift_right_arithmetic)(x, y)


bitwise_right_shift = right_shift


def bitwise_count(x: Any, /) -> Any:
    """How many bits of `|x|` are set, as uint8."""
    (x,) = promote_args_numeric("bitwise_count", x)
    x = x if typeof(x).dtype.kind == "u" else lax.abs(x)
    return lax.convert_element_type(lax.population_count(x), np.dtype(np.uint8))


# ---- tests of floats ---------------------------------------------------------------------------


def _test(
    name: str,
    real_test: Callable[[Any], Any],
    other: bool,
    complex_join: Callable[..., Any] | None,
    doc: str,
):
    """A test of floats; complex numbers join their parts' answers, integers answer `other`."""

    def f(x: Any, /) -> Any:
        check_arraylike(name, x)
        x = plain(x)
        dtype = typeof(x).dtype
        if dtypes.is_float(dtype):
            return real_test(x)
        if not dtypes.is_complex(dtype):
            return filled_like(x, other, np.dtype(np.bool_))
        if complex_join is None:
            check_real(name, x)
        parts = real_test(lax.real(x)), real_test(lax.imag(x))
        return complex_join(*parts)  # type: ignore[misc]

    return named(f, name, doc)


def _equals(value: float, of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: lax.eq(of(x), constant_like(x, value))


isfinite = _test(
    "isfinite", lax.is_finite, True, lax.bitwise_and, "Whether neither infinite nor NaN."
)
isinf = _test("isinf", _equals(np.inf, lax.abs), False, lax.bitwise_or, "Whether infinite.")
isnan = _test("isnan", lambda x: lax.ne(x, x), False, lax.bitwise_or, "Whether NaN.")
isposinf = _test("isposinf", _equals(np.inf, as_array), False, None, "Whether +infinity.")
isneginf = _test("isneginf", _equals(-np.inf, as_array), False, None, "Whether -infinity.")


def isreal(x: Any) -> Any:
    """Whether the imaginary part is zero."""
    check_arraylike("isreal", x)
    x = plain(x)
    if not dtypes.is_complex(typeof(x).dtype):
        return filled_like(x, True, np.dtype(np.bool_))
    imaginary = lax.imag(x)
    return lax.eq(imaginary, constant_like(imaginary, 0))


def iscomplex(x: Any) -> Any:
    """Whether the imaginary part is not zero."""
    return lax.bitwise_not(isreal(x))


def iscomplexobj(x: Any) -> bool:
    """Whether the dtype is complex."""
    return x is not None and dtypes.is_complex(typeof(x).dtype)


def isrealobj(x: Any) -> bool:
    """Whether the dtype is not complex."""
    return not iscomplexobj(x)


def isscalar(element: Any) -> bool:
    """Whether something is a number or an array without dims."""
    return is_arraylike(element) and typeof(element).ndim == 0


# ---- equality up to rounding -------------------------------------------------------------------


def isclose(a: Any, b: Any, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False) -> Any:
    """Whether |a - b| <= atol + rtol * |b|; infinities are close to themselves only."""
    a, b = promote_args("isclose", a, b)
    dtype = typeof(a).dtype
    if dtypes.is_bool(dtype) or dtypes.is_integer(dtype):
        a, b = (lax.convert_element_type(v, dtypes.to_inexact(dtype)) for v in (a, b))
    size_of_b = lax.abs(b)
    rtol, atol = (constant_or_array(size_of_b, t) for t in (rtol, atol))
    bound = lax.add(
        *promote_shapes("isclose", atol, lax.mul(*promote_shapes("isclose", rtol, size_of_b)))
    )
    near = lax.le(*promote_shapes("isclose", lax.abs(lax.sub(a, b)), bound))
    both_finite = lax.bitwise_and(isfinite(a), isfinite(b))
    close = select(both_finite, near, lax.eq(a, b))
    if equal_nan:
        close = lax.bitwise_or(close, lax.bitwise_and(isnan(a), isnan(b)))
    return close


def constant_or_array(like: Any, value: Any) -> Any:
    """A tolerance in the dtype of the numbers that it is compared with."""
    check_arraylike("isclose", value)
    if isinstance(value, (int, float)):
        return constant_like(like, float(value))
    return lax.convert_element_type(value, typeof(like).dtype)


def allclose(a: Any, b: Any, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False) -> Any:
    """Whether all elements are close: a bool array of rank 0."""
    return _all(isclose(a, b, rtol, atol, equal_nan))


def array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> Any:
    """Whether shapes and all elements are equal."""
    a1, a2 = map(_array_of, (a1, a2))
    if typeof(a1).shape != typeof(a2).shape:
        return as_array(np.bool_(False))
    same = equal(a1, a2)
    if equal_nan:
        same = lax.bitwise_or(same, lax.bitwise_and(isnan(a1), isnan(a2)))
    return _all(same)


@promotes_inside(0)
def array_equiv(a1: Any, a2: Any) -> Any:
    """Whether the arrays are equal after broadcasting."""
    a1, a2 = map(_array_of, (a1, a2))
    try:
        same = equal(a1, a2)
    except ValueError:
        return as_array(np.bool_(False))
    return _all(same)


def _array_of(x: Any) -> Any:
    return np.asarray(x) if isinstance(x, (list, tuple)) else plain(x)


def _all(x: Any) -> Any:
    return lax.reduce_and(x, tuple(range(typeof(x).ndim)))
