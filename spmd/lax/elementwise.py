"""Exponentials, logarithms, and trigonometric and hyperbolic functions: a line of mathematics each.

The one idea: the derivative is written with the function's own result wherever that is possible,
so that nothing is computed twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.lax.arithmetic import add, div, mul, neg, rsqrt, square, sub
from spmd.lax.convert import matched
from spmd.lax.families import FLOAT, INEXACT, binary, const, precisions, unary

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- exponentials and logarithms ---------------------------------------------------------------


def exp(x: Any, *, accuracy: Any = None) -> Array:
    """Compute e to the power `x`, elementwise.

    `x` keeps its shape and its float or complex dtype. Raises `DtypeError` for integers and
    booleans.
    Every `accuracy`, a `lax.AccuracyMode` or a `lax.Tolerance`, is met: see docs/accuracy.md.

    >>> lax.exp(np.array([-1.0, 0.0, 2.0]))
    Array([0.36787945, 1.        , 7.389056  ], dtype=float32)
    """
    if accuracy is not None:
        precisions.check_accuracy("exp", accuracy)
    return exp_p.bind(x)


def exp2(x: Any, *, accuracy: Any = None) -> Array:
    """Compute 2 to the power `x`, elementwise.

    `x` keeps its shape and its float or complex dtype. Raises `DtypeError` for integers and
    booleans.
    Every `accuracy`, a `lax.AccuracyMode` or a `lax.Tolerance`, is met: see docs/accuracy.md.

    >>> lax.exp2(np.array([-1.0, 0.0, 2.0]))
    Array([0.5, 1. , 4. ], dtype=float32)
    """
    if accuracy is not None:
        precisions.check_accuracy("exp2", accuracy)
    return exp2_p.bind(x)


def expm1(x: Any, *, accuracy: Any = None) -> Array:
    """Compute `exp(x) - 1`, elementwise, accurate near 0.

    `x` keeps its shape and its float or complex dtype. Raises `DtypeError` for integers and
    booleans.
    Every `accuracy`, a `lax.AccuracyMode` or a `lax.Tolerance`, is met: see docs/accuracy.md.

    >>> lax.expm1(np.array([1e-10, 1.0]))
    Array([1.0000000e-10, 1.7182817e+00], dtype=float32)
    """
    if accuracy is not None:
        precisions.check_accuracy("expm1", accuracy)
    return expm1_p.bind(x)


def log1p(x: Any, *, accuracy: Any = None) -> Array:
    """Compute `log(1 + x)`, elementwise, accurate near 0.

    `x` keeps its shape and its float or complex dtype. Raises `DtypeError` for integers and
    booleans.
    Every `accuracy`, a `lax.AccuracyMode` or a `lax.Tolerance`, is met: see docs/accuracy.md.

    >>> lax.log1p(np.array([1e-10, 1.0]))
    Array([1.000000e-10, 6.931472e-01], dtype=float32)
    """
    if accuracy is not None:
        precisions.check_accuracy("log1p", accuracy)
    return log1p_p.bind(x)


def logistic(x: Any, *, accuracy: Any = None) -> Array:
    """Compute the sigmoid `1 / (1 + exp(-x))`, elementwise.

    `x` keeps its shape and its float or complex dtype. Raises `DtypeError` for integers and
    booleans.
    Every `accuracy`, a `lax.AccuracyMode` or a `lax.Tolerance`, is met: see docs/accuracy.md.

    >>> lax.logistic(np.array([-np.inf, 0.0, 1.0]))
    Array([0.        , 0.5       , 0.73105854], dtype=float32)
    """
    if accuracy is not None:
        precisions.check_accuracy("logistic", accuracy)
    return logistic_p.bind(x)


def _exp2(xp: Any, x: Any) -> Any:
    return xp.exp(x * x.dtype.type(np.log(2.0))) if x.dtype.kind == "c" else xp.exp2(x)


def _expm1(xp: Any, x: Any) -> Any:
    out = xp.expm1(x)
    if x.dtype.kind != "c":
        return out
    # C99 G.6.3.2: a real argument gives a real result, infinities included; a zero or infinite
    # magnitude is kept when the phase is NaN.
    out = xp.array(out)
    lost = xp.isinf(x.real) & ~xp.isfinite(x.imag)
    vanished = lost & (x.real < 0)
    out.real[...] = xp.where(lost, xp.where(vanished, -1, xp.inf), out.real)
    out.imag[...] = xp.where(x.imag == 0, x.imag, xp.where(vanished, 0, out.imag))
    return out


exp_p = unary("exp", accepts=INEXACT, jvp=lambda t, x, out: mul(t, out))
exp2_p = unary(
    "exp2",
    accepts=INEXACT,
    impl=_exp2,
    jvp=lambda t, x, out: mul(const(x, np.log(2.0)), mul(t, out)),
)
expm1_p = unary(
    "expm1",
    accepts=INEXACT,
    impl=_expm1,
    jvp=lambda t, x, out: mul(t, add(out, const(out, 1))),
)
log1p_p = unary("log1p", accepts=INEXACT, jvp=lambda t, x, out: div(t, add(x, const(x, 1))))
logistic_p = unary(
    "logistic",
    accepts=INEXACT,
    impl=lambda xp, x: 1 / (1 + xp.exp(-x)),
    jvp=lambda t, x, out: mul(t, mul(out, sub(const(out, 1), out))),
)

# ---- trigonometric -----------------------------------------------------------------------------


def sin(x: Any, *, accuracy: Any = None) -> Array:
    """Compute the sine of `x` radians, elementwise.

    `x` keeps its shape and its float or complex dtype. Raises `DtypeError` for integers and
    booleans.
    Every `accuracy`, a `lax.AccuracyMode` or a `lax.Tolerance`, is met: see docs/accuracy.md.

    >>> lax.sin(np.array([0.0, 0.5, 1.0]))
    Array([0.        , 0.47942555, 0.841471  ], dtype=float32)
    """
    if accuracy is not None:
        precisions.check_accuracy("sin", accuracy)
    return sin_p.bind(x)


def cos(x: Any, *, accuracy: Any = None) -> Array:
    """Compute the cosine of `x` radians, elementwise.

    `x` keeps its shape and its float or complex dtype. Raises `DtypeError` for integers and
    booleans.
    Every `accuracy`, a `lax.AccuracyMode` or a `lax.Tolerance`, is met: see docs/accuracy.md.

    >>> lax.cos(np.array([0.0, 0.5, 1.0]))
    Array([1.        , 0.87758255, 0.5403023 ], dtype=float32)
    """
    if accuracy is not None:
        precisions.check_accuracy("cos", accuracy)
    return cos_p.bind(x)


def tan(x: Any, *, accuracy: Any = None) -> Array:
    """Compute the tangent of `x` radians, elementwise.

    `x` keeps its shape and its float or complex dtype. Raises `DtypeError` for integers and
    booleans.
    Every `accuracy`, a `lax.AccuracyMode` or a `lax.Tolerance`, is met: see docs/accuracy.md.

    >>> lax.tan(np.array([0.0, 0.5, 1.0]))
    Array([0.       , 0.5463025, 1.5574079], dtype=float32)
    """
    if accuracy is not None:
        precisions.check_accuracy("tan", accuracy)
    return tan_p.bind(x)


def asin(x: Any) -> Array:
    """Compute the inverse of the sine, elementwise; NaN for floats outside of [-1, 1].

    `x` keeps its shape and its float or complex dtype. Raises `DtypeError` for integers and
    booleans.

    >>> lax.asin(np.array([0.0, 0.5, 1.0]))
    Array([0.       , 0.5235988, 1.5707964], dtype=float32)
    """
    return asin_p.bind(x)


def acos(x: Any) -> Array:
    """Compute the inverse of the cosine, elementwise; NaN for floats outside of [-1, 1].

    `x` keeps its shape and its float or complex dtype. Raises `DtypeError` for integers and
    booleans.

    >>> lax.acos(np.array([0.0, 0.5, 1.0]))
    Array([1.5707964, 1.0471976, 0.       ], dtype=float32)
    """
    return acos_p.bind(x)


def atan(x: Any) -> Array:
    """Compute the inverse of the tangent, elementwise.

    `x` keeps its shape and its float or complex dtype. Raises `DtypeError` for integers and
    booleans.

    >>> lax.atan(np.array([0.0, 1.0, np.inf]))
    Array([0.       , 0.7853981, 1.5707964], dtype=float32)
    """
    return atan_p.bind(x)


def atan2(x: Any, y: Any) -> Array:
    """Compute the angle of the point (y, x), elementwise: `atan(x / y)` in the right quadrant.

    `x` and `y` have one shape, or are scalars, and one float dtype; a Python number takes that of
    the other. Raises `ShapeError` or `DtypeError` if shapes or dtypes differ: lax does not
    broadcast or promote, `snp.arctan2` does.

    >>> lax.atan2(np.array([1.0, 1.0]), np.array([1.0, -1.0]))
    Array([0.7853981, 2.3561945], dtype=float32)
    """
    return atan2_p.bind(*matched(x, y))


def _one_minus_square(x: Any) -> Any:
    return sub(const(x, 1), square(x))


sin_p = unary("sin", accepts=INEXACT, jvp=lambda t, x, out: mul(t, cos(x)))
cos_p = unary("cos", accepts=INEXACT, jvp=lambda t, x, out: neg(mul(t, sin(x))))
tan_p = unary("tan", accepts=INEXACT, jvp=lambda t, x, out: mul(t, add(const(x, 1), square(out))))
asin_p = unary(
    "asin",
    accepts=INEXACT,
    impl="arcsin",
    jvp=lambda t, x, out: mul(t, rsqrt(_one_minus_square(x))),
)
acos_p = unary(
    "acos",
    accepts=INEXACT,
    impl="arccos",
    jvp=lambda t, x, out: mul(t, neg(rsqrt(_one_minus_square(x)))),
)
atan_p = unary(
    "atan",
    accepts=INEXACT,
    impl="arctan",
    jvp=lambda t, x, out: div(t, add(const(x, 1), square(x))),
)
atan2_p = binary(
    "atan2",
    accepts=FLOAT,
    impl="arctan2",
    jvp=(
        lambda t, x, y, out: mul(t, div(y, add(square(x), square(y)))),
        lambda t, x, y, out: mul(t, div(neg(x), add(square(x), square(y)))),
    ),
)

# ---- hyperbolic --------------------------------------------------------------------------------


def sinh(x: Any) -> Array:
    """Compute the hyperbolic sine, elementwise.

    `x` keeps its shape and its float or complex dtype. Raises `DtypeError` for integers and
    booleans.

    >>> lax.sinh(np.array([0.0, 0.5, 1.0]))
    Array([0.       , 0.5210953, 1.1752012], dtype=float32)
    """
    return sinh_p.bind(x)


def cosh(x: Any) -> Array:
    """Compute the hyperbolic cosine, elementwise.

    `x` keeps its shape and its float or complex dtype. Raises `DtypeError` for integers and
    booleans.

    >>> lax.cosh(np.array([0.0, 0.5, 1.0]))
    Array([1.       , 1.127626 , 1.5430806], dtype=float32)
    """
    return cosh_p.bind(x)


def tanh(x: Any, *, accuracy: Any = None) -> Array:
    """Compute the hyperbolic tangent, elementwise.

    `x` keeps its shape and its float or complex dtype. Raises `DtypeError` for integers and
    booleans.
    Every `accuracy`, a `lax.AccuracyMode` or a `lax.Tolerance`, is met: see docs/accuracy.md.

    >>> lax.tanh(np.array([0.0, 0.5, 1.0]))
    Array([0.        , 0.46211717, 0.7615942 ], dtype=float32)
    """
    if accuracy is not None:
        precisions.check_accuracy("tanh", accuracy)
    return tanh_p.bind(x)


def asinh(x: Any) -> Array:
    """Compute the inverse of the hyperbolic sine, elementwise.

    `x` keeps its shape and its float or complex dtype. Raises `DtypeError` for integers and
    booleans.

    >>> lax.asinh(np.array([0.0, 0.5, 1.0]))
    Array([0.        , 0.48121184, 0.8813736 ], dtype=float32)
    """
    return asinh_p.bind(x)


def acosh(x: Any) -> Array:
    """Compute the inverse of the hyperbolic cosine, elementwise; NaN for floats below 1.

    `x` keeps its shape and its float or complex dtype. Raises `DtypeError` for integers and
    booleans.

    >>> lax.acosh(np.array([0.0, 1.0, 2.0]))
    Array([     nan, 0.      , 1.316958], dtype=float32)
    """
    return acosh_p.bind(x)


def atanh(x: Any) -> Array:
    """Compute the inverse of the hyperbolic tangent, elementwise; infinite at -1 and 1.

    `x` keeps its shape and its float or complex dtype. Raises `DtypeError` for integers and
    booleans.

    >>> lax.atanh(np.array([0.0, 0.5, 1.0]))
    Array([0.        , 0.54930615,        inf], dtype=float32)
    """
    return atanh_p.bind(x)


sinh_p = unary("sinh", accepts=INEXACT, jvp=lambda t, x, out: mul(t, cosh(x)))
cosh_p = unary("cosh", accepts=INEXACT, jvp=lambda t, x, out: mul(t, sinh(x)))
# (t + t tanh)(1 - tanh), as JAX has it: 1 - tanh**2 would lose the digits near tanh = 1.
tanh_p = unary(
    "tanh",
    accepts=INEXACT,
    jvp=lambda t, x, out: mul(add(t, mul(t, out)), sub(const(out, 1), out)),
)
asinh_p = unary(
    "asinh",
    accepts=INEXACT,
    impl="arcsinh",
    jvp=lambda t, x, out: mul(t, rsqrt(add(square(x), const(x, 1)))),
)
acosh_p = unary(
    "acosh",
    accepts=INEXACT,
    impl="arccosh",
    jvp=lambda t, x, out: mul(t, rsqrt(sub(square(x), const(x, 1)))),
)
atanh_p = unary(
    "atanh",
    accepts=INEXACT,
    impl="arctanh",
    jvp=lambda t, x, out: div(t, _one_minus_square(x)),
)
