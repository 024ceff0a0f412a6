"""Exponentials, logarithms, and trigonometric and hyperbolic functions: a line of mathematics each.

The one idea: the derivative is written with the function's own result wherever that is possible,
so that nothing is computed twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.lax.arithmetic import add, div, mul, neg, rsqrt, square, sub
from spmd.lax.convert import matched
from spmd.lax.families import FLOAT, INEXACT, binary, const, unary

# ---- exponentials and logarithms ---------------------------------------------------------------


def exp(x: Any) -> Any:
    """e to the power x, elementwise."""
    return exp_p.bind(x)


def exp2(x: Any) -> Any:
    """2 to the power x, elementwise."""
    return exp2_p.bind(x)


def expm1(x: Any) -> Any:
    """`exp(x) - 1`, elementwise, accurate near 0."""
    return expm1_p.bind(x)


def log1p(x: Any) -> Any:
    """`log(1 + x)`, elementwise, accurate near 0."""
    return log1p_p.bind(x)


def logistic(x: Any) -> Any:
    """The sigmoid `1 / (1 + exp(-x))`, elementwise."""
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


def sin(x: Any) -> Any:
    """The sine, elementwise."""
    return sin_p.bind(x)


def cos(x: Any) -> Any:
    """The cosine, elementwise."""
    return cos_p.bind(x)


def tan(x: Any) -> Any:
    """The tangent, elementwise."""
    return tan_p.bind(x)


def asin(x: Any) -> Any:
    """The inverse of the sine, elementwise; NaN outside [-1, 1]."""
    return asin_p.bind(x)


def acos(x: Any) -> Any:
    """The inverse of the cosine, elementwise; NaN outside [-1, 1]."""
    return acos_p.bind(x)


def atan(x: Any) -> Any:
    """The inverse of the tangent, elementwise."""
    return atan_p.bind(x)


def atan2(x: Any, y: Any) -> Any:
    """The angle of the point (y, x), elementwise: `atan(x / y)` in the right quadrant."""
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


def sinh(x: Any) -> Any:
    """The hyperbolic sine, elementwise."""
    return sinh_p.bind(x)


def cosh(x: Any) -> Any:
    """The hyperbolic cosine, elementwise."""
    return cosh_p.bind(x)


def tanh(x: Any) -> Any:
    """The hyperbolic tangent, elementwise."""
    return tanh_p.bind(x)


def asinh(x: Any) -> Any:
    """The inverse of the hyperbolic sine, elementwise."""
    return asinh_p.bind(x)


def acosh(x: Any) -> Any:
    """The inverse of the hyperbolic cosine, elementwise; NaN below 1."""
    return acosh_p.bind(x)


def atanh(x: Any) -> Any:
    """The inverse of the hyperbolic tangent, elementwise; NaN outside [-1, 1]."""
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
