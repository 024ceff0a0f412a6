"""Modified Bessel functions and the incomplete beta function, with their derivatives.

The one idea: as in `special.py`, values are computed in float64 and rounded. Below 25 the Bessel
functions are their power series, whose terms are all positive; above, the asymptotic one, whose 30
terms reach double precision there (Abramowitz and Stegun, 9.6.10 and 9.7.1).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.lax.arithmetic import add, div, log, mul, neg, sign, sub
from spmd.lax.array import full_like
from spmd.lax.convert import matched
from spmd.lax.elementwise import exp, log1p
from spmd.lax.families import FLOAT, const, elementwise, unary
from spmd.lax.logic import eq, select
from spmd.lax.special import in_float64, lgamma, refused
from spmd.lax.special_incomplete_values import betainc_values
from spmd.lax.special_values import polynomial

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- modified Bessel functions -----------------------------------------------------------------

_CUT = 25.0
_TERMS = 30


def _asymptotic(order: int) -> tuple[float, ...]:
    out = [1.0]
    for k in range(1, _TERMS):
        out.append(-out[-1] * (4 * order**2 - (2 * k - 1) ** 2) / (8 * k))
    return tuple(out)


_POWERS = {
    order: tuple(1.0 / (math.factorial(k) * math.factorial(k + order)) for k in range(56))
    for order in (0, 1)
}
_FAR = {order: _asymptotic(order) for order in (0, 1)}


# For results of at most 32 bits: Chebyshev series of exp(-x) I(x) / x**order up to 6, in x / 3 - 1,
# and of exp(-x) I(x) sqrt(x) beyond, in 12 / x - 1, as polynomials; relative errors below 3e-9.
_SPLIT = 6.0
_NEAR_6 = {
    0: (
        2.430003541618e-01,
        -1.385209149487e-01,
        1.203226954793e-01,
        -1.130795099288e-01,
        1.040248138314e-01,
        -8.931119694397e-02,
        7.012274752819e-02,
        -5.006785684187e-02,
        3.248178444873e-02,
        -1.913468067498e-02,
        1.042601029223e-02,
        -5.436639271117e-03,
        2.495609113732e-03,
        -8.520184274937e-04,
        3.635220642820e-04,
        -2.684661493522e-04,
        9.117924934596e-05,
    ),
    1: (
        6.560890443243e-02,
        -8.504416697144e-02,
        8.745868575676e-02,
        -7.891858282223e-02,
        6.397328089967e-02,
        -4.699513209248e-02,
        3.145348264789e-02,
        -1.927268009423e-02,
        1.085419752917e-02,
        -5.631550830231e-03,
        2.720023544577e-03,
        -1.250488214268e-03,
        5.220510836354e-04,
        -1.754406513858e-04,
        6.727563265221e-05,
        -4.100331559440e-05,
        1.305339661340e-05,
    ),
}
_BEYOND_6 = {
    0: (
        4.033122609499e-01,
        4.607096475667e-03,
        2.639601733161e-04,
        3.200923245959e-05,
        6.979610294288e-06,
        2.921763333615e-06,
        1.162656048142e-06,
        -3.314584244174e-07,
        -3.875952912349e-07,
    ),
    1: (
        3.861236592013e-01,
        -1.320139813212e-02,
        -4.189303249652e-04,
        -4.250110641294e-05,
        -8.437211683023e-06,
        -3.330934010898e-06,
        -1.323033541034e-06,
        3.345789080988e-07,
        4.168577782017e-07,
    ),
}


def _narrow_bessel(xp: Any, size: Any, order: int) -> Any:
    """`exp(-x) I(x) / x**order` for x >= 0 of order 0 or 1, to nine digits."""
    large = xp.maximum(size, _SPLIT)
    near = polynomial(xp.minimum(size, _SPLIT) * (2 / _SPLIT) - 1.0, _NEAR_6[order])
    # One division and one root, which take as long as everything else.
    inverse = 1.0 / large
    root = xp.sqrt(inverse)
    far = polynomial(inverse * (2.0 * _SPLIT) - 1.0, _BEYOND_6[order])
    far = far * (root * inverse if order else root)
    return xp.where(size < _SPLIT, near, far)


def _narrow_scaled_bessel(order: int) -> Any:
    def values(xp: Any, x: Any) -> Any:
        size = xp.abs(x)
        out = _narrow_bessel(xp, size, order)
        # At infinity the function is zero, and a zero times infinity would be NaN.
        return out if not order else xp.where(xp.isinf(x), 0.0 * xp.sign(x), out * x)

    return values


def _narrow_over_power(xp: Any, x: Any, *, order: int) -> Any:
    if order not in _NEAR_6:
        return _over_power(xp, x, order=order)
    size = xp.abs(x)
    out = _narrow_bessel(xp, size, order)
    # NaN at infinity, as in SciPy and JAX.
    return xp.where(xp.isfinite(x), out * xp.exp(size), np.nan)


def _by_width(wide: Any, narrow: Any) -> Any:
    """An `impl` in float64, of fewer digits where the operand's dtype is narrower."""
    wide, narrow = in_float64(wide), in_float64(narrow)

    def impl(xp: Any, x: Any, **params: Any) -> Any:
        return (wide if x.dtype == np.float64 else narrow)(xp, x, **params)

    return impl


def _scaled_bessel(order: int) -> Any:
    """`exp(-|x|) I(x)` of order 0 or 1."""

    def values(xp: Any, x: Any) -> Any:
        size = xp.abs(x)
        small = xp.minimum(size, _CUT)
        near = xp.exp(-small) * polynomial(small * small / 4.0, _POWERS[order])
        large = xp.maximum(size, _CUT)
        far = polynomial(1.0 / large, _FAR[order]) / xp.sqrt(2.0 * math.pi * large)
        if order:
            near = near * (small / 2.0)
        out = xp.where(size < _CUT, near, far)
        out = xp.where(xp.isnan(x), x, out)
        return xp.copysign(out, x) if order else out

    return values


def _over_power(xp: Any, x: Any, *, order: int) -> Any:
    """`I_n(x) / x**n` of order n, not scaled: one even function for all orders of derivatives."""
    size = xp.abs(x)
    small = xp.minimum(size, _CUT)
    powers = [0.5**order / (math.factorial(k) * math.factorial(k + order)) for k in range(56)]
    near = polynomial(small * small / 4.0, powers)
    large = xp.maximum(size, _CUT)
    # Last of all, as the exponential may be infinite and terms have either sign.
    far = polynomial(1.0 / large, _asymptotic(order)) * xp.exp(large - order * xp.log(large))
    far = far / xp.sqrt(2.0 * math.pi * large)
    # NaN at infinity, as in SciPy and JAX.
    return xp.where(size < _CUT, near, xp.where(xp.isfinite(x), far, np.nan))


def bessel_i0e(x: Any) -> Array:
    """Compute `exp(-|x|) I0(x)`, elementwise: the modified Bessel function of order 0, scaled.

    `x` keeps its shape and its float dtype. Raises `DtypeError` for other dtypes.

    >>> lax.bessel_i0e(np.array([0.0, 100.0]))
    Array([1.        , 0.03994438], dtype=float32)
    """
    return bessel_i0e_p.bind(x)


def bessel_i1e(x: Any) -> Array:
    """Compute `exp(-|x|) I1(x)`, elementwise: the modified Bessel function of order 1, scaled.

    `x` keeps its shape and its float dtype. Raises `DtypeError` for other dtypes.

    >>> lax.bessel_i1e(np.array([0.0, 100.0]))
    Array([0.        , 0.03974415], dtype=float32)
    """
    return bessel_i1e_p.bind(x)


def _i0e_jvp(t: Any, x: Any, out: Any) -> Any:
    return mul(t, sub(bessel_i1e(x), mul(sign(x), out)))


def _i1e_jvp(t: Any, x: Any, out: Any) -> Any:
    """`i0e - i1e (sign + 1 / x)`, where `i1e / x` is its limit 1/2 at 0."""
    zero = eq(x, const(x, 0))
    over = select(zero, full_like(x, 0.5), div(out, select(zero, full_like(x, 1.0), x)))
    return mul(t, sub(sub(bessel_i0e(x), mul(sign(x), out)), over))


bessel_i0e_p = unary(
    "bessel_i0e",
    accepts=FLOAT,
    impl=_by_width(_scaled_bessel(0), _narrow_scaled_bessel(0)),
    jvp=_i0e_jvp,
)
bessel_i1e_p = unary(
    "bessel_i1e",
    accepts=FLOAT,
    impl=_by_width(_scaled_bessel(1), _narrow_scaled_bessel(1)),
    jvp=_i1e_jvp,
)

# `I_n(x) / x**n` has the derivative `x I_(n+1)(x) / x**(n+1)`: nothing is divided by zero at 0.
bessel_over_power_p = unary(
    "bessel_over_power",
    accepts=FLOAT,
    impl=_by_width(_over_power, _narrow_over_power),
    jvp=lambda t, x, out, order: mul(t, mul(x, bessel_over_power_p.bind(x, order=order + 1))),
)


def bessel_i0(x: Any) -> Any:
    """The modified Bessel function of order 0, elementwise, with exact derivatives of every order.

    `jax.lax` has only the scaled ones, whose derivatives have a sign(x) in them.
    """
    return bessel_over_power_p.bind(x, order=0)


def bessel_i1(x: Any) -> Any:
    """The modified Bessel function of order 1, elementwise, with exact derivatives as well."""
    return mul(x, bessel_over_power_p.bind(x, order=1))


# ---- incomplete beta function ------------------------------------------------------------------


def betainc(a: Any, b: Any, x: Any) -> Array:
    """Compute the regularised incomplete beta function, elementwise.

    `a`, `b` and `x` have one shape, or are scalars, and one float dtype; a Python number takes that
    of the other. It grows from 0 at `x = 0` to 1 at `x = 1`, and is differentiable in `x` only.
    Raises `ShapeError` or `DtypeError` if shapes or dtypes differ.

    >>> lax.betainc(1.0, 2.0, np.array([0.0, 0.5, 1.0]))
    Array([0.  , 0.75, 1.  ], dtype=float32)
    """
    a, b = matched(a, b)
    b, x = matched(b, x)
    a, x = matched(a, x)
    return regularized_incomplete_beta_p.bind(a, b, x)


def _beta_density(t: Any, a: Any, b: Any, x: Any, out: Any) -> Any:
    one = const(x, 1)
    powers = add(mul(sub(a, one), log(x)), mul(sub(b, one), log1p(neg(x))))
    beta = sub(add(lgamma(a), lgamma(b)), lgamma(add(a, b)))
    return mul(t, exp(sub(powers, beta)))


regularized_incomplete_beta_p = elementwise(
    "regularized_incomplete_beta",
    ("a", "b", "x"),
    accepts=FLOAT,
    impl=in_float64(betainc_values),
    jvp=(refused("betainc", "a"), refused("betainc", "b"), _beta_density),
)
