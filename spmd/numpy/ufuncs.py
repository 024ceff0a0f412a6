"""Elementwise arithmetic and mathematics: `add`, `sin`, `power`, `remainder`, ...

Most functions are one line: promote the operands as the function demands, apply the `lax`
operation of that meaning. Comparisons, bits and tests are in `logic.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import KeyOperationError
from spmd.base.source import current_source
from spmd.compile.dispatch.eager_cache import cached_binary, cached_unary
from spmd.core.aval import typeof
from spmd.core.stage import is_staging
from spmd.core.trace import Tracer
from spmd.numpy.programs import one_program
from spmd.numpy.promotion import (
    as_array,
    check_arraylike,
    check_real,
    constant_like,
    convert,
    default_float,
    filled_like,
    operand,
    plain,
    promote_args,
    promote_args_inexact,
    promote_args_numeric,
    promote_shapes,
    result_type,
    select,
    strong_constant,
)
from spmd.sharding.array import Array, ArrayLike

# ---- families ----------------------------------------------------------------------------------

if TYPE_CHECKING:

    class Unary(Protocol):
        """A function of one array."""

        def __call__(self, x: ArrayLike, /) -> Array: ...

    class Binary(Protocol):
        """A function of two arrays."""

        def __call__(self, x: ArrayLike, y: ArrayLike, /) -> Array: ...


# Sentences that the docstrings of a family share.
_KEEPS = "Elementwise: the result has the shape and the dtype of `x`."
_TO_FLOAT = """\
Elementwise: the result has the shape of `x`. Integers and bools become the default float (float32,
or float64 with x64); floats and complex numbers keep their dtype."""
_COMMON = "`x` and `y` broadcast to one shape and are promoted to one dtype, which the result has."
_COMMON_FLOAT = """\
`x` and `y` broadcast to one shape and are promoted to one floating or complex dtype: integers and
bools become the default float (float32, or float64 with x64)."""
_NO_BOOLS = "Raises a `DtypeError` for bools."
_ORDER = "Complex numbers are compared by real part, then by imaginary part."
REAL_ONLY = "Raises a `DtypeError` for complex numbers."


def named(f: Callable[..., Any], name: str, doc: str) -> Callable[..., Any]:
    """Give a function made by a family constructor its public name and docstring."""
    f.__name__ = f.__qualname__ = name
    f.__doc__ = doc
    f.__module__ = "spmd.numpy"
    return f


def doc_of(name: str, meaning: str, rule: str, note: str, operands: str, shown: str) -> str:
    """The docstring of a family's member: its meaning, the family's rule, and an example."""
    rule = f"{rule}\n{note}" if note else rule
    return f"{meaning}\n\n{rule}\n\n>>> snp.{name}({operands})\n{shown}\n"


def float_unary(
    name: str, op: Callable[..., Any], meaning: str, x: str, shown: str, note: str = ""
) -> Unary:
    """A function of one array whose result is floating or complex.

    The docstring says `meaning` first and ends with an example: elements `x` become `shown`.
    """

    def f(x: ArrayLike, /) -> Array:
        return op(*promote_args_inexact(name, x))

    example = f"np.array([{x}])", f"Array([{shown}], dtype=float32)"
    doc = doc_of(name, meaning, _TO_FLOAT, note, *example)
    return cached_unary(named(f, name, doc))


def unary(
    name: str, op: Callable[..., Any], meaning: str, x: str, shown: str, note: str = ""
) -> Unary:
    """A function of one array that keeps the dtype."""

    def f(x: ArrayLike, /) -> Array:
        return op(*promote_args(name, x))

    doc = doc_of(name, meaning, _KEEPS, note, f"np.array({x})", f"Array({shown})")
    return cached_unary(named(f, name, doc))


def binary(
    name: str, op: Callable[..., Any], meaning: str, operands: str, shown: str, note: str = ""
) -> Binary:
    """A function of two arrays in their common dtype."""

    def f(x: ArrayLike, y: ArrayLike, /) -> Array:
        return op(*promote_args(name, x, y))

    return cached_binary(named(f, name, doc_of(name, meaning, _COMMON, note, operands, shown)))


def float_binary(
    name: str, op: Callable[..., Any], meaning: str, operands: str, shown: str, note: str = ""
) -> Binary:
    """A function of two arrays whose result is floating or complex."""

    def f(x: ArrayLike, y: ArrayLike, /) -> Array:
        return op(*promote_args_inexact(name, x, y))

    doc = doc_of(name, meaning, _COMMON_FLOAT, note, operands, shown)
    return cached_binary(named(f, name, doc))


def _bool_or(op: Callable[..., Any], bool_op: Callable[..., Any]) -> Callable[..., Any]:
    """`op`, and for bools the operation that it is in arithmetic modulo saturation."""

    def f(x: Any, y: Any) -> Any:
        return (bool_op if dtypes.is_bool(typeof(x).dtype) else op)(x, y)

    return f


def unless_integer(op: Callable[..., Any]) -> Callable[..., Any]:
    """`op`, which changes nothing for integers and bools."""

    def f(x: Any) -> Any:
        return op(x) if dtypes.is_inexact(typeof(x).dtype) else as_array(x)

    return f


def _sign(x: Any) -> Any:
    """`lax.sign`, with a zero that has no sign: the array API standard says so, and NumPy."""
    out = lax.sign(x)
    zero = constant_like(x, 0)
    if dtypes.is_complex(typeof(x).dtype):
        undefined = constant_like(x, complex(np.nan, np.nan))
        return select(lax.ne(x, x), undefined, select(lax.eq(x, zero), zero, out))
    return lax.add(out, zero) if dtypes.is_float(typeof(x).dtype) else out


# ---- arithmetic --------------------------------------------------------------------------------

# Operands have one dtype by now, which is what `lax.add` sees to before it binds the primitive.
add = binary(
    "add",
    _bool_or(lax.add_p.bind, lax.or_p.bind),
    "The sum of two arrays, `x + y`, and the logical or of bools.",
    "np.array([1, 2]), 10",
    "Array([11, 12], dtype=int32)",
)
subtract = binary(
    "subtract",
    lax.sub_p.bind,
    "The difference of two arrays, `x - y`.",
    "np.array([1, 2]), 10",
    "Array([-9, -8], dtype=int32)",
    note=_NO_BOOLS,
)


def _multiply(x: ArrayLike, y: ArrayLike, /) -> Array:
    factors = promote_args("multiply", x, y)
    aval = typeof(factors[0])
    if dtypes.is_bool(aval.dtype):
        return lax.and_p.bind(*factors)
    # Under `jit`, `simplify` finds this in the product.
    if dtypes.is_inexact(aval.dtype) and not dtypes.is_small(aval.dtype) and not is_staging():
        for mask, other in ((x, factors[1]), (y, factors[0])):
            given = typeof(mask) if isinstance(mask, (Tracer, Array, np.ndarray)) else None
            if given is not None and dtypes.is_bool(given.dtype):
                if given.shape == np.broadcast_shapes(given.shape, typeof(other).shape):
                    return select(mask, other, constant_like(other, 0))
    return lax.mul_p.bind(*factors)


multiply = cached_binary(
    named(
        _multiply,
        "multiply",
        doc_of(
            "multiply",
            "The product of two arrays, `x * y`, and the logical and of bools.",
            _COMMON,
            "With an array of bools that has the result's shape, floats are 0 where it is False,\n"
            "as in JAX: infinities and NaNs too.",
            "np.array([1, 2]), 10",
            "Array([10, 20], dtype=int32)",
        ),
    )
)
divide = float_binary(
    "divide",
    lax.div_p.bind,
    "The quotient of two arrays, `x / y`.",
    "np.array([1, 2]), 4",
    "Array([0.25, 0.5 ], dtype=float32)",
)
true_divide = divide
negative = unary(
    "negative",
    lax.neg,
    "The negated elements, `-x`.",
    "[1, -2]",
    "[-1,  2], dtype=int32",
    note=_NO_BOOLS,
)
positive = unary(
    "positive", as_array, "The array itself, `+x`.", "[1, -2]", "[ 1, -2], dtype=int32"
)
sign = unary(
    "sign",
    _sign,
    "The sign, -1, 0 or 1, and `z / |z|` for complex numbers.",
    "[-5, 0, 2]",
    "[-1,  0,  1], dtype=int32",
    note=_NO_BOOLS,
)
maximum = binary(
    "maximum",
    lax.max_p.bind,
    "The larger of two elements, and NaN where one is NaN.",
    "np.array([1, 5]), 3",
    "Array([3, 5], dtype=int32)",
    note=_ORDER,
)
minimum = binary(
    "minimum",
    lax.min_p.bind,
    "The smaller of two elements, and NaN where one is NaN.",
    "np.array([1, 5]), 3",
    "Array([1, 3], dtype=int32)",
    note=_ORDER,
)


@cached_unary
def absolute(x: ArrayLike, /) -> Array:
    """The absolute value of elements: the modulus of complex numbers.

    Elementwise: the result has the shape and the dtype of `x`, and the floating dtype of the parts
    for complex numbers. Bools and unsigned integers stay as they are.

    >>> snp.abs(np.array([-2, 3]))
    Array([2, 3], dtype=int32)
    """
    x = operand("absolute", x)
    dtype = typeof(x).dtype
    return as_array(x) if dtypes.is_bool(dtype) or dtypes.is_unsigned(dtype) else lax.abs(x)


abs = absolute


def fabs(x: ArrayLike, /) -> Array:
    """The absolute value of real numbers, as floats.

    Elementwise: the result has the shape of `x`. Integers and bools become the default float.
    Raises a `DtypeError` for complex numbers.

    >>> snp.fabs(np.array([-2, 3]))
    Array([2., 3.], dtype=float32)
    """
    (x,) = promote_args_inexact("fabs", x)
    check_real("fabs", x)
    return lax.abs(x)


@cached_unary
def square(x: ArrayLike, /) -> Array:
    """The square of elements, `x * x`.

    Elementwise: the result has the shape and the dtype of `x`; bools become int32.

    >>> snp.square(np.array([3, -4]))
    Array([ 9, 16], dtype=int32)
    """
    return lax.square(*promote_args_numeric("square", x))


@cached_unary
def reciprocal(x: ArrayLike, /) -> Array:
    """The reciprocal of elements, `1 / x`.

    Elementwise: the result has the shape of `x`. Integers and bools become the default float, other
    than in NumPy, which divides integers by integers.

    >>> snp.reciprocal(np.array([2, 4]))
    Array([0.5 , 0.25], dtype=float32)
    """
    (x,) = promote_args_inexact("reciprocal", x)
    return lax.integer_pow(x, -1)


# ---- division with remainder -------------------------------------------------------------------


def floor_divide(x: ArrayLike, y: ArrayLike, /) -> Array:
    """The quotient rounded towards minus infinity, `x // y`.

    `x` and `y` broadcast to one shape and are promoted to one dtype, which the result has; bools
    become int32. Raises a `DtypeError` for complex numbers.

    >>> snp.floor_divide(np.array([7, -7]), 2)
    Array([ 3, -4], dtype=int32)
    """
    x, y = promote_args_numeric("floor_divide", x, y)
    check_real("floor_divide", x, y)
    dtype = typeof(x).dtype
    if dtypes.is_unsigned(dtype):
        return lax.div(x, y)
    return _integer_quotient(x, y) if dtypes.is_integer(dtype) else _float_divmod(x, y)[0]


@one_program()
def _integer_quotient(x: Any, y: Any) -> Any:
    quotient = lax.div(x, y)
    signs_differ = lax.ne(lax.sign(x), lax.sign(y))
    inexact = lax.ne(lax.rem(x, y), constant_like(x, 0))
    lower = lax.sub(quotient, constant_like(quotient, 1))
    return select(lax.bitwise_and(signs_differ, inexact), lower, quotient)


def remainder(x: ArrayLike, y: ArrayLike, /) -> Array:
    """The remainder with the sign of the divisor, `x % y`.

    `x` and `y` broadcast to one shape and are promoted to one dtype, which the result has; bools
    become int32. An integer has remainder 0 if it is divided by 0, a float NaN. Raises a
    `DtypeError` for complex numbers.

    >>> snp.remainder(np.array([7, -7]), 3)
    Array([1, 2], dtype=int32)
    """
    x, y = promote_args_numeric("remainder", x, y)
    check_real("remainder", x, y)
    return _remainder(x, y)


@one_program()
def _remainder(x: Any, y: Any) -> Any:
    zero = constant_like(x, 0)
    if dtypes.is_integer(typeof(y).dtype):
        y = select(lax.eq(y, zero), constant_like(y, 1), y)
    x, y = promote_shapes("remainder", x, y)
    rest = lax.rem(x, y)
    other_sign = lax.ne(lax.lt(rest, zero), lax.lt(y, zero))
    wrong = lax.bitwise_and(other_sign, lax.ne(rest, zero))
    rest = select(wrong, lax.add(rest, y), rest)
    return rest if dtypes.is_integer(typeof(y).dtype) else _zero_with_sign_of(y, rest)


def _zero_with_sign_of(y: Any, rest: Any) -> Any:
    """`rest`, which has the sign of the divisor `y`, also where it is zero.

    By sums, which leave a positive zero: a constant in its place would have no derivative.
    """
    zero = constant_like(rest, 0.0)
    below = lax.neg(lax.sub(zero, rest))
    return select(lax.lt(y, zero), below, lax.add(rest, zero))


mod = remainder


def fmod(x: ArrayLike, y: ArrayLike, /) -> Array:
    """The remainder with the sign of the dividend, as C's `fmod`.

    `x` and `y` broadcast to one shape and are promoted to one dtype, which the result has; bools
    become int32. An integer has remainder 0 if it is divided by 0, a float NaN. Raises a
    `DtypeError` for complex numbers.

    >>> snp.fmod(np.array([7, -7]), 3)
    Array([ 1, -1], dtype=int32)
    """
    check_arraylike("fmod", x, y)
    x, y = plain(x), plain(y)
    of_integers = dtypes.is_integer(result_type(x, y))
    x, y = promote_args_numeric("fmod", x, y)
    check_real("fmod", x, y)
    if of_integers:
        y = select(lax.eq(y, constant_like(y, 0)), constant_like(y, 1), y)
    return lax.rem(x, y)


def divmod(x: ArrayLike, y: ArrayLike, /) -> tuple[Array, Array]:
    """The pair of `floor_divide(x, y)` and `remainder(x, y)`.

    `x` and `y` broadcast to one shape and are promoted to one dtype, which both results have; bools
    become int32. Raises a `DtypeError` for complex numbers.

    >>> snp.divmod(np.array([7, -7]), 2)
    (Array([ 3, -4], dtype=int32), Array([1, 1], dtype=int32))
    """
    x, y = promote_args_numeric("divmod", x, y)
    if dtypes.is_integer(typeof(x).dtype):
        return floor_divide(x, y), remainder(x, y)
    check_real("divmod", x, y)
    return _float_divmod(x, y)


@one_program()
def _float_divmod(x: Any, y: Any) -> tuple[Any, Any]:
    # From the exact remainder, so that x == y * quotient + remainder as well as floats allow.
    zero = constant_like(x, 0)
    rest = lax.rem(x, y)
    exact = select(lax.eq(y, zero), x, lax.sub(x, rest))
    quotient = lax.div(exact, y)
    wrong = lax.bitwise_and(lax.ne(rest, zero), lax.ne(lax.sign(y), lax.sign(rest)))
    rest = select(wrong, lax.add(rest, y), rest)
    quotient = select(wrong, lax.sub(quotient, constant_like(quotient, 1)), quotient)
    # A quotient of zero has the sign of x / y, which rounds to zero, too.
    tiny = lax.mul(lax.stop_gradient(lax.div(x, y)), zero)
    quotient = select(lax.eq(quotient, zero), tiny, quotient)
    return lax.round(quotient), _zero_with_sign_of(y, rest)


# ---- powers, exponentials, logarithms ----------------------------------------------------------


def power(x: ArrayLike, y: ArrayLike, /) -> Array:
    """The elements of `x` to the power of those of `y`, `x ** y`.

    `x` and `y` broadcast to one shape and are promoted to one dtype, which the result has. A
    concrete integer `y` becomes repeated multiplication and does not change the dtype. Raises a
    `DtypeError` for integers to the power of a negative concrete integer; where an array `y` of
    integers is negative, the result is meaningless.

    >>> snp.power(np.array([2.0, 3.0]), 2)
    Array([4., 9.], dtype=float32)
    """
    check_arraylike("power", x, y)
    x, y = plain(x), plain(y)
    exponent = _concrete_integer(y)
    if exponent is not None:
        (x,) = promote_args_numeric("power", x)
        return lax.integer_pow(x, exponent)
    base, whole = promote_args_numeric("power", x, y)
    if dtypes.is_integer(typeof(base).dtype):
        return _integer_power(base, whole)
    if dtypes.is_inexact(typeof(x).dtype) and dtypes.is_integer(typeof(y).dtype):
        return lax.pow(*promote_shapes("power", x, y))
    return lax.pow(base, whole)


pow = power


def _concrete_integer(y: Any) -> int | None:
    if isinstance(y, Tracer):
        return None
    try:
        return operator.index(y)
    except TypeError:
        return None


@one_program()
def _integer_power(x: Any, y: Any) -> Any:
    """Square and multiply; 6 bits of the exponent are enough for 64-bit results."""
    zero, one = strong_constant(y, 0), strong_constant(y, 1)
    lost = lax.bitwise_and(lax.eq(x, zero), lax.ne(y, zero))
    result = select(lost, zero, one)
    for _ in range(6):
        odd = lax.ne(lax.bitwise_and(y, one), zero)
        result = select(odd, lax.mul(result, x), result)
        x = lax.mul(x, x)
        y = lax.shift_right_logical(y, one)
    return result


def float_power(x: ArrayLike, y: ArrayLike, /) -> Array:
    """The elements of `x` to the power of those of `y`, in floating point.

    `x` and `y` broadcast to one shape and are promoted to one floating or complex dtype: integers
    and bools become the default float.

    >>> snp.float_power(np.array([2, 3]), -1)
    Array([0.5       , 0.33333334], dtype=float32)
    """
    return lax.pow(*promote_args_inexact("float_power", x, y))


exp = float_unary("exp", lax.exp, "The exponential function, `e**x`.", "1.0", "2.7182817")
exp2 = float_unary("exp2", lax.exp2, "The exponential function to base 2, `2**x`.", "3.0", "8.")
expm1 = float_unary(
    "expm1", lax.expm1, "The exponential minus 1, exact near 0 too.", "1e-6", "1.0000005e-06"
)
log = float_unary(
    "log", lax.log, "The natural logarithm; NaN for a real `x < 0`.", "10.0", "2.3025851"
)
log1p = float_unary(
    "log1p",
    lax.log1p,
    "The natural logarithm of `1 + x`, exact near 0 too.",
    "1e-6",
    "9.999995e-07",
)
sqrt = float_unary(
    "sqrt", lax.sqrt, "The square root; NaN for a real `x < 0`.", "4.0, 9.0", "2., 3."
)
cbrt = float_unary(
    "cbrt",
    lax.cbrt,
    "The cube root, also of negative numbers.",
    "-8.0, -27.0",
    "-2., -3.",
    note=REAL_ONLY,
)


def log2(x: ArrayLike, /) -> Array:
    """The logarithm to base 2.

    Elementwise: the result has the shape of `x`. Integers and bools become the default float;
    floats and complex numbers keep their dtype.

    >>> snp.log2(np.array([1.0, 8.0]))
    Array([0., 3.], dtype=float32)
    """
    (x,) = promote_args_inexact("log2", x)
    return _scaled_log(x, lax.div, np.log(2.0))


def log10(x: ArrayLike, /) -> Array:
    """The logarithm to base 10.

    Elementwise: the result has the shape of `x`. Integers and bools become the default float;
    floats and complex numbers keep their dtype.

    >>> snp.log10(np.array([1.0, 100.0]))
    Array([0., 2.], dtype=float32)
    """
    (x,) = promote_args_inexact("log10", x)
    return _scaled_log(x, lax.mul, 1 / np.log(10.0))


def _scaled_log(x: Any, scale: Callable[[Any, Any], Any], factor: float) -> Any:
    y = lax.log(x)
    if not dtypes.is_complex(typeof(x).dtype):
        return scale(y, strong_constant(y, factor))
    # By parts: a complex product would turn infinities into NaN.
    parts = (scale(p, strong_constant(p, factor)) for p in (lax.real(y), lax.imag(y)))
    return lax.complex(*parts)


# ---- trigonometry ------------------------------------------------------------------------------

sin = float_unary("sin", lax.sin, "The sine of angles in radians.", "0.5", "0.47942555")
cos = float_unary("cos", lax.cos, "The cosine of angles in radians.", "0.5", "0.87758255")
tan = float_unary("tan", lax.tan, "The tangent of angles in radians.", "0.5", "0.5463025")
arcsin = asin = float_unary(
    "arcsin", lax.asin, "The inverse sine; NaN for a real `|x| > 1`.", "1.0", "1.5707964"
)
arccos = acos = float_unary(
    "arccos", lax.acos, "The inverse cosine; NaN for a real `|x| > 1`.", "0.0", "1.5707964"
)
arctan = atan = float_unary(
    "arctan", lax.atan, "The inverse tangent, in [-pi/2, pi/2].", "1.0", "0.7853981"
)
arctan2 = atan2 = float_binary(
    "arctan2",
    lax.atan2,
    "The angle of the points with ordinate `x` and abscissa `y`, in [-pi, pi].",
    "np.array([1.0, -1.0]), -1.0",
    "Array([ 2.3561945, -2.3561945], dtype=float32)",
    note=REAL_ONLY,
)
sinh = float_unary("sinh", lax.sinh, "The hyperbolic sine of `x`.", "1.0", "1.1752012")
cosh = float_unary("cosh", lax.cosh, "The hyperbolic cosine of `x`.", "1.0", "1.5430806")
tanh = float_unary("tanh", lax.tanh, "The hyperbolic tangent of `x`.", "1.0", "0.7615942")
arcsinh = asinh = float_unary(
    "arcsinh", lax.asinh, "The inverse hyperbolic sine.", "1.0", "0.8813736"
)
arccosh = acosh = float_unary(
    "arccosh",
    lax.acosh,
    "The inverse hyperbolic cosine; NaN for a real `x < 1`.",
    "2.0",
    "1.316958",
)
arctanh = atanh = float_unary(
    "arctanh",
    lax.atanh,
    "The inverse hyperbolic tangent; NaN for a real `|x| > 1`.",
    "0.5",
    "0.54930615",
)


def hypot(x: ArrayLike, y: ArrayLike, /) -> Array:
    """The length of the hypotenuse, `sqrt(x**2 + y**2)`, without overflow.

    `x` and `y` broadcast to one shape and are promoted to one floating dtype: integers and bools
    become the default float. Raises a `DtypeError` for complex numbers.

    >>> snp.hypot(np.array([3.0, 0.0]), 4.0)
    Array([5., 4.], dtype=float32)
    """
    x, y = promote_args_inexact("hypot", x, y)
    check_real("hypot", x, y)
    return _hypot(x, y)


@one_program()
def _hypot(x: Any, y: Any) -> Any:
    x, y = lax.abs(x), lax.abs(y)
    infinity = constant_like(x, np.inf)
    either_infinite = lax.bitwise_or(lax.eq(x, infinity), lax.eq(y, infinity))
    large, small = lax.max(x, y), lax.min(x, y)
    is_zero = lax.eq(large, constant_like(large, 0))
    one = strong_constant(large, 1)
    ratio = lax.div(small, select(is_zero, one, large))
    length = lax.mul(large, lax.sqrt(lax.add(one, lax.square(ratio))))
    return select(either_infinite, infinity, select(is_zero, large, length))


def deg2rad(x: ArrayLike, /) -> Array:
    """The angles in radians of angles in degrees.

    Elementwise: the result has the shape of `x`. Integers and bools become the default float.

    >>> snp.deg2rad(np.array([180, 90]))
    Array([3.1415927, 1.5707964], dtype=float32)
    """
    (x,) = promote_args_inexact("deg2rad", x)
    return lax.mul(x, constant_like(x, np.pi / 180))


def rad2deg(x: ArrayLike, /) -> Array:
    """The angles in degrees of angles in radians.

    Elementwise: the result has the shape of `x`. Integers and bools become the default float.

    >>> snp.rad2deg(np.array([np.pi]))
    Array([180.], dtype=float32)
    """
    (x,) = promote_args_inexact("rad2deg", x)
    return lax.mul(x, constant_like(x, 180 / np.pi))


radians = deg2rad
degrees = rad2deg


def sinc(x: ArrayLike, /) -> Array:
    """The normalized sinc function, `sin(pi * x) / (pi * x)`, and 1 at 0.

    Elementwise: the result has the shape of `x`. Integers and bools become the default float.

    >>> snp.sinc(np.array([0.0, 0.5]))
    Array([1.        , 0.63661975], dtype=float32)
    """
    (x,) = promote_args_inexact("sinc", x)
    pi_x = lax.mul(x, constant_like(x, float(np.pi)))
    small = lax.lt(lax.abs(pi_x), constant_like(lax.abs(pi_x), 1e-2))
    safe = select(small, constant_like(pi_x, 1), pi_x)
    return select(small, _sinc_series(pi_x), lax.div(lax.sin(safe), safe))


def _sinc_series(y: Any) -> Any:
    """The first terms of sin(y)/y: exact to rounding, derivatives too, where |y| < 0.01."""
    z = lax.square(y)
    total = constant_like(z, 1 / 362880)
    for coefficient in (-1 / 5040, 1 / 120, -1 / 6, 1.0):
        total = lax.add(lax.mul(total, z), constant_like(z, coefficient))
    return total


# ---- complex parts -----------------------------------------------------------------------------


def _with_parts(name: str, val: Any) -> Any:
    """An argument with a real and an imaginary part, which keys have not."""
    x = operand(name, val)
    if dtypes.is_key(typeof(x).dtype):
        raise KeyOperationError(
            f"{current_source()}: {name}: {typeof(x).short()} holds keys, which are no numbers; "
            "random.key_data(keys) gives their words"
        )
    return x


def real(val: ArrayLike, /) -> Array:
    """The real part of each element of `val`.

    Elementwise, in the shape of `val`. Complex numbers become floats of half their size; other
    dtypes stay.

    >>> snp.real(np.array([1 + 2j, 3.0]))
    Array([1., 3.], dtype=float32)
    """
    x = _with_parts("real", val)
    return lax.real(x) if dtypes.is_complex(typeof(x).dtype) else as_array(x)


def imag(val: ArrayLike, /) -> Array:
    """The imaginary part of each element of `val`, 0 for real numbers.

    Elementwise, in the shape of `val`. Complex numbers become floats of half their size; other
    dtypes stay.

    >>> snp.imag(np.array([1 + 2j, 3.0]))
    Array([2., 0.], dtype=float32)
    """
    x = _with_parts("imag", val)
    return lax.imag(x) if dtypes.is_complex(typeof(x).dtype) else filled_like(x, 0)


def conjugate(x: ArrayLike, /) -> Array:
    """The complex conjugate of each element.

    Elementwise: the result has the shape and the dtype of `x`; real arrays stay as they are.

    >>> snp.conj(np.array([1 + 2j]))
    Array([1.-2.j], dtype=complex64)
    """
    x = _with_parts("conjugate", x)
    return lax.conj(x) if dtypes.is_complex(typeof(x).dtype) else as_array(x)


conj = conjugate


def angle(z: ArrayLike, deg: bool = False) -> Array:
    """The angle of complex numbers in the plane, in radians, or in degrees if `deg`.

    Elementwise, in the shape of `z`. The result is floating: complex numbers give floats of half
    their size, integers and bools the default float. It is 0 or pi for real numbers.

    >>> snp.angle(np.array([1j, -1.0]), deg=True)
    Array([ 90., 180.], dtype=float32)
    """
    z = operand("angle", z)
    if not dtypes.is_inexact(typeof(z).dtype):
        z = convert(z, default_float())
    z = lax.convert_element_type(z, typeof(z).dtype)
    result = lax.atan2(imag(z), real(z))
    return rad2deg(result) if deg else result
