"""Comparisons, bits, truth values and tests of floats: `equal`, `bitwise_and`, `isnan`, `isclose`.

Almost everything here gives bools or keeps integers, and so has no derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
    operand,
    plain,
    promote_args,
    promote_args_numeric,
    promote_shapes,
    promotes_inside,
    select,
)
from spmd.numpy.ufuncs import REAL_ONLY, doc_of, named
from spmd.sharding.array import Array, ArrayLike

if TYPE_CHECKING:
    from spmd.numpy.ufuncs import Binary, Unary

# ---- families ----------------------------------------------------------------------------------


# Sentences that the docstrings of a family share.
_TO_BOOL = "`x` and `y` broadcast to one shape and are promoted to one dtype; the result is bool."
_OF_BITS = """\
`x` and `y` broadcast to one shape and are promoted to one dtype, integer or bool, which the
result has. Raises a `DtypeError` for floats and complex numbers."""
_BY_PARTS = "Complex numbers are compared by real part, then by imaginary part."
_TEST = "Elementwise: the result is bool and has the shape of `x`, which may have any dtype."
_NONZERO = "Elements that are not zero are true, NaN too."


def _binary(
    name: str, op: Callable[..., Any], meaning: str, rule: str, operands: str, shown: str
) -> Binary:
    def f(x: ArrayLike, y: ArrayLike, /) -> Array:
        return op(*promote_args(name, x, y))

    return named(f, name, doc_of(name, meaning, rule, "", operands, shown))


def _numeric_binary(
    name: str, op: Callable[..., Any], meaning: str, operands: str, shown: str
) -> Binary:
    def f(x: ArrayLike, y: ArrayLike, /) -> Array:
        return op(*promote_args_numeric(name, x, y))

    return named(f, name, doc_of(name, meaning, _OF_BITS, "", operands, shown))


def _ordering(name: str, op: Callable[..., Any], meaning: str, shown: str) -> Binary:
    """A comparison; complex numbers are ordered by real part, then by imaginary part."""

    def f(x: ArrayLike, y: ArrayLike, /) -> Array:
        x, y = promote_args(name, x, y)
        if not dtypes.is_complex(typeof(x).dtype):
            return op(x, y)
        re_x, re_y = lax.real(x), lax.real(y)
        by_imag = op(lax.imag(x), lax.imag(y))
        return select(lax.eq(re_x, re_y), by_imag, op(re_x, re_y))

    example = "np.array([1, 2, 3]), 2", f"Array([{shown}], dtype=bool)"
    return named(f, name, doc_of(name, meaning, _TO_BOOL, _BY_PARTS, *example))


def _logical(name: str, op: Callable[..., Any], meaning: str, shown: str) -> Binary:
    def f(x: ArrayLike, y: ArrayLike, /) -> Array:
        return op(*map(as_bool, promote_args(name, x, y)))

    example = "np.array([0, 1, 2]), True", f"Array([{shown}], dtype=bool)"
    return named(f, name, doc_of(name, meaning, _TO_BOOL, _NONZERO, *example))


def as_bool(x: Any) -> Any:
    """Truth values: what is not zero is true."""
    return x if dtypes.is_bool(typeof(x).dtype) else lax.ne(x, constant_like(x, 0))


# ---- comparisons -------------------------------------------------------------------------------

equal = _binary(
    "equal",
    lax.eq,
    "Whether elements are equal, `x == y`.",
    _TO_BOOL,
    "np.array([1, 2, 3]), 2",
    "Array([False,  True, False], dtype=bool)",
)
not_equal = _binary(
    "not_equal",
    lax.ne,
    "Whether elements differ, `x != y`.",
    _TO_BOOL,
    "np.array([1, 2, 3]), 2",
    "Array([ True, False,  True], dtype=bool)",
)
less = _ordering("less", lax.lt, "Whether elements are less, `x < y`.", " True, False, False")
less_equal = _ordering(
    "less_equal", lax.le, "Whether elements are less or equal, `x <= y`.", " True,  True, False"
)
greater = _ordering(
    "greater", lax.gt, "Whether elements are greater, `x > y`.", "False, False,  True"
)
greater_equal = _ordering(
    "greater_equal",
    lax.ge,
    "Whether elements are greater or equal, `x >= y`.",
    "False,  True,  True",
)

logical_and = _logical(
    "logical_and", lax.bitwise_and, "Whether both elements are true.", "False,  True,  True"
)
logical_or = _logical(
    "logical_or",
    lax.bitwise_or,
    "Whether at least one of two elements is true.",
    " True,  True,  True",
)
logical_xor = _logical(
    "logical_xor",
    lax.bitwise_xor,
    "Whether exactly one of two elements is true.",
    " True, False, False",
)


def logical_not(x: ArrayLike, /) -> Array:
    """Whether each element is false, that is, zero.

    Elementwise: the result is bool and has the shape of `x`, which may have any dtype.

    >>> snp.logical_not(np.array([0, 1, 2]))
    Array([ True, False, False], dtype=bool)
    """
    return lax.bitwise_not(*map(as_bool, promote_args("logical_not", x)))


# ---- extremes by comparison ---------------------------------------------------------------------


def fmax(x1: ArrayLike, x2: ArrayLike) -> Array:
    """The larger of two elements, and the other one where one is NaN.

    `x1` and `x2` broadcast to one shape and are promoted to one dtype, which the result has.

    >>> snp.fmax(np.array([1.0, np.nan]), 0.5)
    Array([1. , 0.5], dtype=float32)
    """
    x, y = promote_args("fmax", x1, x2)
    return select(lax.bitwise_or(greater(x, y), lax.ne(y, y)), x, y)


def fmin(x1: ArrayLike, x2: ArrayLike) -> Array:
    """The smaller of two elements, and the other one where one is NaN.

    `x1` and `x2` broadcast to one shape and are promoted to one dtype, which the result has.

    >>> snp.fmin(np.array([1.0, np.nan]), 0.5)
    Array([0.5, 0.5], dtype=float32)
    """
    x, y = promote_args("fmin", x1, x2)
    return select(lax.bitwise_or(less(x, y), lax.ne(y, y)), x, y)


# ---- bits --------------------------------------------------------------------------------------

bitwise_and = _binary(
    "bitwise_and",
    lax.bitwise_and,
    "The bits that are set in both elements, `x & y`.",
    _OF_BITS,
    "np.array([5, 6]), 3",
    "Array([1, 2], dtype=int32)",
)
bitwise_or = _binary(
    "bitwise_or",
    lax.bitwise_or,
    "The bits that are set in at least one of two elements, `x | y`.",
    _OF_BITS,
    "np.array([5, 6]), 3",
    "Array([7, 7], dtype=int32)",
)
bitwise_xor = _binary(
    "bitwise_xor",
    lax.bitwise_xor,
    "The bits that are set in exactly one of two elements, `x ^ y`.",
    _OF_BITS,
    "np.array([5, 6]), 3",
    "Array([6, 5], dtype=int32)",
)
left_shift = _numeric_binary(
    "left_shift",
    lax.shift_left,
    "The elements of `x` shifted left by `y` bits, `x << y`.",
    "np.array([1, 2]), 3",
    "Array([ 8, 16], dtype=int32)",
)
bitwise_left_shift = left_shift


def bitwise_not(x: ArrayLike, /) -> Array:
    """All bits of each element inverted, `~x`; logical not of bools.

    Elementwise: the result has the shape and the dtype of `x`. Raises a `DtypeError` for floats and
    complex numbers.

    >>> snp.bitwise_not(np.array([0, 5]))
    Array([-1, -6], dtype=int32)
    """
    return lax.bitwise_not(*promote_args("bitwise_not", x))


invert = bitwise_invert = bitwise_not


def right_shift(x: ArrayLike, y: ArrayLike, /) -> Array:
    """The elements of `x` shifted right by `y` bits, `x >> y`, with the sign kept.

    `x` and `y` broadcast to one shape and are promoted to one integer dtype, which the result has;
    bools become int32. Raises a `DtypeError` for floats and complex numbers.

    >>> snp.right_shift(np.array([-8, 9]), 1)
    Array([-4,  4], dtype=int32)
    """
    x, y = promote_args_numeric("right_shift", x, y)
    unsigned = dtypes.is_unsigned(typeof(x).dtype)
    return (lax.shift_right_logical if unsigned else lax.shift_right_arithmetic)(x, y)


bitwise_right_shift = right_shift


def bitwise_count(x: ArrayLike, /) -> Array:
    """The number of bits that are set in the absolute value of each element.

    Elementwise: the result is uint8 and has the shape of `x`, which must have an integer or bool
    dtype.

    >>> snp.bitwise_count(np.array([7, -8]))
    Array([3, 1], dtype=uint8)
    """
    (x,) = promote_args_numeric("bitwise_count", x)
    x = x if dtypes.is_unsigned(typeof(x).dtype) else lax.abs(x)
    return lax.convert_element_type(lax.population_count(x), np.dtype(np.uint8))


# ---- tests of floats ---------------------------------------------------------------------------


def _test(
    name: str,
    real_test: Callable[[Any], Any],
    other: bool,
    complex_join: Callable[..., Any] | None,
    meaning: str,
    shown: str,
) -> Unary:
    """A test of floats; complex numbers join their parts' answers, integers answer `other`."""

    def answer(x: Any, out: Any) -> Array:
        x = operand(name, x, out)
        dtype = typeof(x).dtype
        if dtypes.is_float(dtype):
            return real_test(x)
        if not dtypes.is_complex(dtype):
            return filled_like(x, other, np.dtype(np.bool_))
        if complex_join is None:
            check_real(name, x)
        parts = real_test(lax.real(x)), real_test(lax.imag(x))
        return complex_join(*parts)  # type: ignore[misc]

    def f(x: ArrayLike, /) -> Array:
        return answer(x, None)

    def with_out(x: ArrayLike, /, out: None = None) -> Array:
        return answer(x, out)

    rule = _TEST if complex_join else f"{_TEST}\n{REAL_ONLY}"
    example = "np.array([1.0, np.inf, -np.inf, np.nan])", f"Array([{shown}], dtype=bool)"
    return named(f if complex_join else with_out, name, doc_of(name, meaning, rule, "", *example))


def _equals(value: float, of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: lax.eq(of(x), constant_like(x, value))


isfinite = _test(
    "isfinite",
    lax.is_finite,
    True,
    lax.bitwise_and,
    "Whether elements are neither infinite nor NaN.",
    " True, False, False, False",
)
isinf = _test(
    "isinf",
    _equals(np.inf, lax.abs),
    False,
    lax.bitwise_or,
    "Whether elements are infinite, of either sign.",
    "False,  True,  True, False",
)
isnan = _test(
    "isnan",
    lambda x: lax.ne(x, x),
    False,
    lax.bitwise_or,
    "Whether elements are NaN.",
    "False, False, False,  True",
)
isposinf = _test(
    "isposinf",
    _equals(np.inf, as_array),
    False,
    None,
    "Whether elements are plus infinity.",
    "False,  True, False, False",
)
isneginf = _test(
    "isneginf",
    _equals(-np.inf, as_array),
    False,
    None,
    "Whether elements are minus infinity.",
    "False, False,  True, False",
)


def isreal(x: ArrayLike) -> Array:
    """Whether the imaginary part of each element is zero.

    Elementwise: the result is bool and has the shape of `x`; it is true for all dtypes but complex
    ones.

    >>> snp.isreal(np.array([1j, 1.0]))
    Array([False,  True], dtype=bool)
    """
    x = operand("isreal", x)
    if not dtypes.is_complex(typeof(x).dtype):
        return filled_like(x, True, np.dtype(np.bool_))
    imaginary = lax.imag(x)
    return lax.eq(imaginary, constant_like(imaginary, 0))


def iscomplex(x: ArrayLike) -> Array:
    """Whether the imaginary part of each element differs from zero.

    Elementwise: the result is bool and has the shape of `x`; it is false for all dtypes but complex
    ones.

    >>> snp.iscomplex(np.array([1j, 1.0]))
    Array([ True, False], dtype=bool)
    """
    return lax.bitwise_not(isreal(x))


def iscomplexobj(x: ArrayLike) -> bool:
    """Whether an array has a complex dtype, whatever its shape and elements are.

    Lists of numbers and objects with a dtype, as `snp.complex64` itself, are fine too.

    >>> snp.iscomplexobj(np.array([1j, 1.0])), snp.iscomplexobj(snp.float32)
    (True, False)
    """
    if x is None:
        return False
    found = getattr(x, "dtype", None)
    if not isinstance(found, np.dtype):
        found = (np.asarray(x) if isinstance(x, (list, tuple, str)) else typeof(x)).dtype
    return np.issubdtype(found, np.complexfloating)


def isrealobj(x: ArrayLike) -> bool:
    """Whether an array has a dtype that is not complex, whatever its shape and elements are.

    >>> snp.isrealobj(np.array([1.0, 2.0]))
    True
    """
    return not iscomplexobj(x)


def isscalar(element: ArrayLike) -> bool:
    """Whether `element` is a number of any dtype, or an array of shape ().

    >>> snp.isscalar(3.0), snp.isscalar(np.zeros(1))
    (True, False)
    """
    return is_arraylike(element) and typeof(element).ndim == 0


# ---- equality up to rounding -------------------------------------------------------------------


def isclose(
    a: ArrayLike, b: ArrayLike, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False
) -> Array:
    """Whether elements are equal up to a tolerance, `|a - b| <= atol + rtol * |b|`.

    `a`, `b`, `rtol` and `atol` broadcast to one shape; the result is bool. `a` and `b` are promoted
    to one dtype, integers to floats; random keys are close if they are equal. Infinities are close
    to themselves only, and NaN to NaN if `equal_nan`.

    >>> snp.isclose(np.array([1.0, 2.0]), np.array([1.0, 2.1]))
    Array([ True, False], dtype=bool)
    """
    a, b = promote_args("isclose", a, b)
    dtype = typeof(a).dtype
    if dtypes.is_key(dtype):
        return lax.eq(a, b)
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


def allclose(
    a: ArrayLike, b: ArrayLike, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False
) -> Array:
    """Whether all elements are equal up to a tolerance: `all(isclose(a, b))`, a bool of shape ().

    `a` and `b` broadcast to one shape. `rtol`, `atol` and `equal_nan` are those of `isclose`.

    >>> snp.allclose(np.array([1.0, 2.0]), np.array([1.0, 2.000001]))
    Array(True, dtype=bool)
    """
    return _all(isclose(a, b, rtol, atol, equal_nan))


def array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> Array:
    """Whether two arrays have the same shape and equal elements: a bool of shape ().

    `a1` and `a2` are arrays, or lists and tuples of numbers, of any dtype. NaN is equal to NaN only
    if `equal_nan`.

    >>> snp.array_equal(np.array([1, 2]), np.array([1.0, 2.0]))
    Array(True, dtype=bool)
    """
    a1, a2 = map(_array_of, (a1, a2))
    if typeof(a1).shape != typeof(a2).shape:
        return as_array(np.bool_(False))
    same = equal(a1, a2)
    if equal_nan:
        same = lax.bitwise_or(same, lax.bitwise_and(isnan(a1), isnan(a2)))
    return _all(same)


@promotes_inside(0)
def array_equiv(a1: Any, a2: Any) -> Array:
    """Whether two arrays broadcast to one shape and are equal there: a bool of shape ().

    `a1` and `a2` are arrays, or lists and tuples of numbers, of any dtype.

    >>> snp.array_equiv(np.array([1, 1]), 1)
    Array(True, dtype=bool)
    """
    a1, a2 = map(_array_of, (a1, a2))
    try:
        same = equal(a1, a2)
    except ValueError:
        return as_array(np.bool_(False))
    return _all(same)


def _array_of(x: Any) -> Any:
    return np.asarray(x) if isinstance(x, (list, tuple, str)) else plain(x)


def _all(x: Any) -> Any:
    return lax.reduce_and(x, tuple(range(typeof(x).ndim)))
