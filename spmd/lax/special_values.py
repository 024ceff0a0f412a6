"""The values of the special functions, in float64, with array arithmetic only.

The one idea: each function is cut into regions where one short expansion reaches double precision;
all regions are computed for all elements, and `where` picks.

Sources: erf and erfc are the rational approximations of Sun's fdlibm (s_erf.c); erf_inv starts from
M. Giles, "Approximating the erfinv function" (2010), and is polished with Halley steps; the gamma
family uses Taylor series at 2, recurrences and Stirling's series; zeta is Euler-Maclaurin; the
incomplete gamma functions follow Cephes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

EPS = float(np.finfo(np.float64).eps)


def polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    """`c[0] + c[1] x + c[2] x**2 + ...` by Horner's rule."""
    out = x * 0.0 + coefficients[-1]
    for c in reversed(coefficients[:-1]):
        out = out * x + c
    return out


# ---- error functions ---------------------------------------------------------------------------

_ERF_SMALL_P = (
    1.28379167095512558561e-01, -3.25042107247001499370e-01, -2.84817495755985104766e-02,
    -5.77027029648944159157e-03, -2.37630166566501626084e-05,
)  # fmt: skip
_ERF_SMALL_Q = (
    1.0, 3.97917223959155352819e-01, 6.50222499887672944485e-02, 5.08130628187576562776e-03,
    1.32494738004321644526e-04, -3.96022827877536812320e-06,
)  # fmt: skip
_ERF_AT_ONE = 8.45062911510467529297e-01
_ERF_NEAR_ONE_P = (
    -2.36211856075265944077e-03, 4.14856118683748331666e-01, -3.72207876035701323847e-01,
    3.18346619901161753674e-01, -1.10894694282396677476e-01, 3.54783043256182359371e-02,
    -2.16637559486879084300e-03,
)  # fmt: skip
_ERF_NEAR_ONE_Q = (
    1.0, 1.06420880400844228286e-01, 5.40397917702171048937e-01, 7.18286544141962662868e-02,
    1.26171219808761642112e-01, 1.36370839120290507362e-02, 1.19844998467991074170e-02,
)  # fmt: skip
_ERFC_MIDDLE_P = (
    -9.86494403484714822705e-03, -6.93858572707181764372e-01, -1.05586262253232909814e01,
    -6.23753324503260060396e01, -1.62396669462573470355e02, -1.84605092906711035994e02,
    -8.12874355063065934246e01, -9.81432934416914548592e00,
)  # fmt: skip
_ERFC_MIDDLE_Q = (
    1.0, 1.96512716674392571292e01, 1.37657754143519042600e02, 4.34565877475229228821e02,
    6.45387271733267880336e02, 4.29008140027567833386e02, 1.08635005541779435134e02,
    6.57024977031928170135e00, -6.04244152148580987438e-02,
)  # fmt: skip
_ERFC_FAR_P = (
    -9.86494292470009928597e-03, -7.99283237680523006574e-01, -1.77579549177547519889e01,
    -1.60636384855821916062e02, -6.37566443368389627722e02, -1.02509513161107724954e03,
    -4.83519191608651397019e02,
)  # fmt: skip
_ERFC_FAR_Q = (
    1.0, 3.03380607434824582924e01, 3.25792512996573918826e02, 1.53672958608443695994e03,
    3.19985821950859553908e03, 2.55305040643316442583e03, 4.74528541206955367215e02,
    -2.24409524465858183362e01,
)  # fmt: skip


def _erf_below_one(xp: Any, x: Any) -> Any:
    """erf for |x| < 0.84375."""
    z = x * x
    return x + x * (polynomial(z, _ERF_SMALL_P) / polynomial(z, _ERF_SMALL_Q))


def _erf_about_one(xp: Any, a: Any) -> Any:
    """erf(a) minus erf(1), for a in [0.84375, 1.25)."""
    s = a - 1.0
    return polynomial(s, _ERF_NEAR_ONE_P) / polynomial(s, _ERF_NEAR_ONE_Q)


def _erfc_above_one(xp: Any, a: Any) -> Any:
    """erfc for a >= 1.25; the square in exp(-a * a) is taken in two exact parts."""
    a = xp.minimum(a, 30.0)
    s = 1.0 / (a * a)
    middle = polynomial(s, _ERFC_MIDDLE_P) / polynomial(s, _ERFC_MIDDLE_Q)
    far = polynomial(s, _ERFC_FAR_P) / polynomial(s, _ERFC_FAR_Q)
    ratio = xp.where(a < 1.0 / 0.35, middle, far)
    high = (a.view(np.int64) & ~0xFFFFFFFF).view(np.float64)
    return xp.exp(-high * high - 0.5625) * xp.exp((high - a) * (high + a) + ratio) / a


def erf_values(xp: Any, x: Any) -> Any:
    """The error function."""
    a = xp.atleast_1d(xp.abs(x))
    large = xp.where(a < 1.25, _ERF_AT_ONE + _erf_about_one(xp, a), 1.0 - _erfc_above_one(xp, a))
    return xp.where(xp.abs(x) < 0.84375, _erf_below_one(xp, x), xp.sign(x) * large.reshape(x.shape))


def erfc_values(xp: Any, x: Any) -> Any:
    """One minus the error function."""
    a = xp.atleast_1d(xp.abs(x))
    tail = xp.where(a < 1.25, 1.0 - _ERF_AT_ONE - _erf_about_one(xp, a), _erfc_above_one(xp, a))
    tail = tail.reshape(x.shape)
    small = _erf_below_one(xp, x)
    # Between 0.25 and 0.84 half of the sum is exact.
    near = xp.where(x < 0.25, 1.0 - small, 0.5 - (small - 0.5))
    return xp.where(xp.abs(x) < 0.84375, near, xp.where(x < 0, 2.0 - tail, tail))


_ERF_INV_CENTRE = (
    1.50140941, 0.246640727, -0.00417768164, -0.00125372503, 0.00021858087, -4.39150654e-06,
    -3.5233877e-06, 3.43273939e-07, 2.81022636e-08,
)  # fmt: skip
_ERF_INV_TAIL = (
    2.83297682, 1.00167406, 0.00943887047, -0.0076224613, 0.00573950773, -0.00367342844,
    0.00134934322, 0.000100950558, -0.000200214257,
)  # fmt: skip
_ERF_INV_FAR = (
    4.84990640140858442, 1.01030046486453440, -0.000138719318336231, -0.000215030119300445,
    0.0000759952770300178, -0.0000196817781055317, 0.00000452606259722315,
)  # fmt: skip


def erf_inv_values(xp: Any, x: Any) -> Any:
    """The inverse of the error function."""
    a = xp.abs(x)
    w = -xp.log((1.0 - a) * (1.0 + a))
    centre = polynomial(w - 2.5, _ERF_INV_CENTRE)
    tail = polynomial(xp.sqrt(w) - 3.0, _ERF_INV_TAIL)
    far = polynomial(xp.sqrt(w) - 5.0, _ERF_INV_FAR)
    y = xp.where(w < 5.0, centre, xp.where(w < 16.0, tail, far)) * a
    for _ in range(2):
        # Far out, 1 - a is exact and erfc keeps its digits, where erf has none left.
        error = xp.where(a < 0.5, erf_values(xp, y) - a, (1.0 - a) - erfc_values(xp, y))
        step = error * (math.sqrt(math.pi) / 2) * xp.exp(y * y)
        y = y - step / (1.0 + y * step)
    y = xp.where(a == 1.0, np.inf, xp.where(a == 0.0, 0.0, y))
    return xp.where(a > 1.0, np.nan, xp.copysign(y, x))


# ---- gamma functions ---------------------------------------------------------------------------

BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
_EULER_GAMMA = 0.57721566490153286061


def _zeta_minus_one(k: int) -> float:
    """The sum of `n ** -k` from n = 2, by Euler-Maclaurin after 64 terms."""
    n = 64.0
    tail = [n ** (1 - k) / (k - 1), 0.5 * n**-k, k * n ** (-k - 1) / 12]
    tail.append(-k * (k + 1) * (k + 2) * n ** (-k - 3) / 720)
    tail.append(k * (k + 1) * (k + 2) * (k + 3) * (k + 4) * n ** (-k - 5) / 30240)
    return math.fsum([float(m) ** -k for m in range(2, 64)] + tail)


# lgamma(2 + z) = z * (these, as a polynomial in z).
_LGAMMA_AT_TWO = (
    1.0 - _EULER_GAMMA,
    *((-1.0) ** k * _zeta_minus_one(k) / k for k in range(2, 30)),
)
_STIRLING = tuple(b / (2 * k * (2 * k - 1)) for k, b in enumerate(BERNOULLI, 1))


def _lgamma_positive(xp: Any, x: Any) -> Any:
    """lgamma for x > 0: Taylor series at 2 up to 8, after steps down or up; Stirling's beyond."""
    z = xp.where(x < 0.5, x - 1.0, xp.where(x < 1.5, x - 1.0, x - 2.0))
    logs = xp.where(x < 1.5, -xp.log1p(xp.where(x < 0.5, x, x - 1.0)), 0.0)
    logs = xp.where(x < 0.5, logs - xp.log(x), logs)
    z = xp.where(x < 0.5, x, z)
    factor = xp.ones_like(x)
    for _ in range(6):
        above = (z > 0.5) & (x < 8.0)
        factor = xp.where(above, factor * (z + 1.0), factor)
        z = xp.where(above, z - 1.0, z)
    series = z * polynomial(xp.where(xp.abs(z) <= 0.5, z, 0.0), _LGAMMA_AT_TWO)
    small = series + logs + xp.log(factor)
    return xp.where(x < 8.0, small, _stirling(xp, x))


def _stirling(xp: Any, x: Any) -> Any:
    inverse = 1.0 / xp.maximum(x, 8.0)
    correction = inverse * polynomial(inverse * inverse, _STIRLING)
    return (x - 0.5) * xp.log(x) - x + (0.5 * math.log(2 * math.pi) + correction)


def _sine_of_pi(xp: Any, a: Any) -> Any:
    """|sin(pi a)| for a >= 0, exact at whole numbers."""
    r = xp.fmod(a, 1.0)
    return xp.sin(math.pi * xp.minimum(r, 1.0 - r))


def lgamma_values(xp: Any, x: Any) -> Any:
    """The logarithm of the absolute value of the gamma function."""
    a = xp.abs(x)
    positive = _lgamma_positive(xp, xp.where(a == 0.0, 1.0, a))
    reflected = math.log(math.pi) - xp.log(a * _sine_of_pi(xp, a)) - positive
    out = xp.where(x > 0.0, positive, reflected)
    return xp.where(xp.isinf(x) | (a == 0.0), np.inf, out)


def digamma_values(xp: Any, x: Any) -> Any:
    """The derivative of lgamma; NaN at its poles."""
    a = xp.where(x <= 0.0, 1.0 - x, x)
    y, shift = a, xp.zeros_like(a)
    for _ in range(10):
        low = y < 10.0
        shift = xp.where(low, shift - 1.0 / y, shift)
        y = xp.where(low, y + 1.0, y)
    z = 1.0 / (y * y)
    series = z * polynomial(z, tuple(b / (2 * k) for k, b in enumerate(BERNOULLI, 1)))
    out = shift + xp.log(y) - 0.5 / y - series
    fraction = x - xp.rint(x)
    reflected = out - math.pi / xp.tan(math.pi * fraction)
    return xp.where(x <= 0.0, xp.where(fraction == 0.0, np.nan, reflected), out)


ZETA_TERMS = 10


def zeta_values(xp: Any, s: Any, q: Any) -> Any:
    """The Hurwitz zeta function: the sum of `(q + k) ** -s`, by Euler-Maclaurin after 10 terms."""
    total = xp.zeros_like(s * q)
    for k in range(ZETA_TERMS):
        total = total + (q + k) ** -s
    n = q + ZETA_TERMS
    total = total + n ** (1.0 - s) / (s - 1.0) + 0.5 * n**-s
    rising, factorial = s, 2.0
    for k, bernoulli in enumerate(BERNOULLI, 1):
        total = total + bernoulli / factorial * rising * n ** (-s - 2 * k + 1)
        rising = rising * (s + 2 * k - 1) * (s + 2 * k)
        factorial = factorial * (2 * k + 1) * (2 * k + 2)
    total = xp.where((q <= 0.0) & (q == xp.floor(q)), np.inf, total)
    return xp.where(s == 1.0, np.inf, xp.where(s < 1.0, np.nan, total))


# ---- incomplete gamma functions ----------------------------------------------------------------

# Enough for the slowest elements, those with x close to a large a: about 10 * sqrt(a) terms.
_MOST_STEPS = 20_000


def converge(
    xp: Any,
    step: Callable[..., tuple[tuple[Any, ...], Any]],
    state: tuple[Any, ...],
    most: int,
    first: int = 1,
) -> tuple[Any, ...]:
    """Apply `step(k, *state)` for k = first, ... until no element moves.

    A step returns the next state and an array that says which elements have not converged. At most
    `most` steps are made. A namespace of traced values brings its own loop.
    """
    loop = getattr(xp, "converge", None)
    if loop is not None:
        return loop(step, state, most, first)
    for k in range(first, first + most):
        state, moving = step(k, *state)
        if not xp.any(moving):
            break
    return state


def _gamma_kernel(xp: Any, a: Any, x: Any) -> Any:
    """`x ** a * exp(-x) / gamma(a)`."""
    return xp.exp(a * xp.log(x) - x - lgamma_values(xp, a))


def _lower_series(xp: Any, a: Any, x: Any) -> Any:
    """The lower function by its power series; converges fast for x < a + 1."""

    def step(k: Any, term: Any, total: Any, n: Any) -> Any:
        n = n + 1.0
        term = term * (x / n)
        total = total + term
        return (term, total, n), term > total * EPS

    one = xp.ones_like(x)
    return converge(xp, step, (one, one, a), _MOST_STEPS)[1] / a


def _upper_fraction(xp: Any, a: Any, x: Any) -> Any:
    """The upper function by its continued fraction (modified Lentz); for x >= a + 1."""
    tiny = 1e-300
    b = x + 1.0 - a

    def step(k: Any, b: Any, c: Any, d: Any, out: Any) -> Any:
        numerator = -k * (k - a)
        b = b + 2.0
        d = numerator * d + b
        d = 1.0 / xp.where(xp.abs(d) < tiny, tiny, d)
        c = b + numerator / c
        c = xp.where(xp.abs(c) < tiny, tiny, c)
        return (b, c, d, out * d * c), xp.abs(d * c - 1.0) > 4 * EPS

    start = (b, xp.full_like(x, 1.0 / tiny), 1.0 / b, 1.0 / b)
    return converge(xp, step, start, _MOST_STEPS)[3]


def _incomplete(xp: Any, a: Any, x: Any) -> tuple[Any, Any]:
    """The lower and the upper function."""
    a, x = xp.broadcast_arrays(a, x)
    by_series = x < a + 1.0
    valid = (a > 0.0) & (x > 0.0) & xp.isfinite(x) & xp.isfinite(a)
    kernel = _gamma_kernel(xp, xp.where(valid, a, 1.0), xp.where(valid, x, 1.0))
    low = valid & by_series
    high = valid & ~by_series
    series = _lower_series(xp, xp.where(low, a, 1.0), xp.where(low, x, 0.5)) * kernel
    fraction = _upper_fraction(xp, xp.where(high, a, 1.0), xp.where(high, x, 2.0)) * kernel
    lower = xp.where(by_series, series, 1.0 - fraction)
    upper = xp.where(by_series, 1.0 - series, fraction)
    at_zero = (x == 0.0) & (a > 0.0) | xp.isinf(a) & xp.isfinite(x)
    at_end = xp.isinf(x) & xp.isfinite(a) | (a == 0.0) & (x > 0.0)
    lower = xp.where(at_zero, 0.0, xp.where(at_end, 1.0, lower))
    upper = xp.where(at_zero, 1.0, xp.where(at_end, 0.0, upper))
    outside = (a < 0.0) | (x < 0.0) | xp.isnan(a) | xp.isnan(x) | (a == 0.0) & (x == 0.0)
    outside = outside | xp.isinf(a) & xp.isinf(x)
    return xp.where(outside, np.nan, lower), xp.where(outside, np.nan, upper)


def igamma_values(xp: Any, a: Any, x: Any) -> Any:
    """The regularised lower incomplete gamma function."""
    return _incomplete(xp, a, x)[0]


def igammac_values(xp: Any, a: Any, x: Any) -> Any:
    """The regularised upper incomplete gamma function."""
    return _incomplete(xp, a, x)[1]
