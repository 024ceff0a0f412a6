"""Integrals without a closed form: exponential, sine and cosine integrals, dilogarithm, Dawson.

The one idea: the derivative of an integral is its integrand, so each primitive is one function of
values and a line. `jax.lax` has none of these; the public functions are in `spmd.scipy.special`.

Sources: exponential integrals by power series below 1 and continued fractions above (Numerical
Recipes, 6.3), Ei by its asymptotic series from 40 on; the dilogarithm by the Bernoulli series in
log(x) after reflection; Dawson's integral by Rybicki's sampling sum (Numerical Recipes, 6.10).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spmd.lax.arithmetic import div, log, mul, neg, sub
from spmd.lax.array import full_like
from spmd.lax.elementwise import exp
from spmd.lax.families import FLOAT, binary, const, unary
from spmd.lax.logic import eq, select
from spmd.lax.special import in_float64, refused
from spmd.lax.special_values import BERNOULLI, EPS, converge, polynomial

_EULER_GAMMA = 0.57721566490153286061
_MOST_STEPS = 2_000

# ---- exponential integrals ---------------------------------------------------------------------

_HARMONIC = tuple(1.0 / (k * math.factorial(k)) for k in range(1, 130))
_FACTORIALS = tuple(float(math.factorial(k)) for k in range(40))


def expn_fraction(xp: Any, n: Any, x: Any) -> Any:
    """`exp(x) expn(n, x)` by its continued fraction (modified Lentz), for x of at least 1."""

    def step(k: Any, b: Any, c: Any, d: Any, out: Any) -> Any:
        numerator = -k * (n - 1.0 + k)
        b = b + 2.0
        d = 1.0 / (numerator * d + b)
        c = b + numerator / c
        return (b, c, d, out * (c * d)), xp.abs(c * d - 1.0) > 4 * EPS

    b = x + n
    start = (b, xp.full_like(b, 1e300), 1.0 / b, 1.0 / b)
    return converge(xp, step, start, _MOST_STEPS)[3]


def _exp1_values(xp: Any, x: Any) -> Any:
    """The integral of exp(-t) / t from x to infinity; NaN for negative x."""
    small = xp.where((x > 0.0) & (x < 1.0), x, 0.5)
    large = xp.where(x >= 1.0, xp.minimum(x, 800.0), 1.0)
    near = -_EULER_GAMMA - xp.log(small) + small * polynomial(-small, _HARMONIC[:20])
    far = xp.exp(-large) * expn_fraction(xp, xp.ones_like(large), large)
    out = xp.where(x < 1.0, near, far)
    return xp.where(x == 0.0, np.inf, xp.where(x >= 0.0, out, np.nan))


def _expi_values(xp: Any, x: Any) -> Any:
    """The principal value of the integral of exp(t) / t from minus infinity to x."""
    middle = xp.where((x > 0.0) & (x < 40.0), x, 1.0)
    near = _EULER_GAMMA + xp.log(middle) + middle * polynomial(middle, _HARMONIC)
    large = xp.maximum(x, 40.0)
    far = xp.exp(large) / large * polynomial(1.0 / large, _FACTORIALS)
    far = xp.where(xp.isinf(large), np.inf, far)
    out = xp.where(x < 40.0, near, far)
    negative = -_exp1_values(xp, xp.where(x < 0.0, -x, 1.0))
    out = xp.where(x < 0.0, negative, xp.where(x == 0.0, -np.inf, out))
    return xp.where(xp.isnan(x), x, out)


def _expn_values(xp: Any, n: Any, x: Any) -> Any:
    """The integral of exp(-x t) / t**n from 1 to infinity, for whole n.

    Orders below 0 appear in derivatives: `x E(n, x) = exp(-x) - n E(n + 1, x)`.
    """
    n, x = xp.broadcast_arrays(n, x)
    valid = (n == xp.floor(n)) & (x >= 0.0)
    safe_n = xp.where(valid & (n >= 0.0), n, 0.0)
    large = xp.where(valid & (x >= 1.0), xp.minimum(x, 800.0), 1.0)
    far = xp.exp(-large) * expn_fraction(xp, safe_n, large)
    small = xp.where(valid & (x < 1.0) & (x > 0.0), x, 0.5)
    out = xp.where(x >= 1.0, far, _expn_below_one(xp, xp.maximum(safe_n, 1.0), small))
    positive = xp.where(valid & (x > 0.0), x, 1.0)
    decay = xp.exp(-positive) / positive
    out = xp.where(safe_n == 0.0, decay, out)

    def step(order: Any, below: Any, out: Any) -> Any:
        below = decay + order * below / positive
        return (below, xp.where(n == -order, below, out)), n < -order

    _, out = converge(xp, step, (decay, out), _MOST_STEPS)
    at_zero = xp.where(safe_n > 1.0, 1.0 / xp.where(safe_n > 1.0, safe_n - 1.0, 1.0), np.inf)
    return xp.where(valid, xp.where(x == 0.0, at_zero, out), np.nan)


def _expn_below_one(xp: Any, n: Any, x: Any) -> Any:
    """The power series, in which the term of index n - 1 has a logarithm."""
    order, log_x = n - 1.0, xp.log(x)

    def step(k: Any, total: Any, term: Any, harmonic: Any, special: Any) -> Any:
        here = order == k
        total = total - xp.where(here, 0.0, term / xp.where(here, 1.0, k - order))
        special = xp.where(here, term * (harmonic - log_x), special)
        harmonic = harmonic + 1.0 / (k + 1)
        term = term * (-x / (k + 1))
        return (total, term, harmonic, special), k < 24 + n

    zero, one = xp.zeros_like(x), xp.ones_like(x)
    start = (zero, one, xp.full_like(x, -_EULER_GAMMA), zero)
    total, _, _, special = converge(xp, step, start, _MOST_STEPS, first=0)
    return total + special


exp1_p = unary(
    "exp1",
    accepts=FLOAT,
    impl=in_float64(_exp1_values),
    # Of order 0 it is `exp(-x) / x`, but NaN where the function is.
    jvp=lambda t, x, out: neg(mul(t, expn_p.bind(const(x, 0), x))),
)
expi_p = unary(
    "expi",
    accepts=FLOAT,
    impl=in_float64(_expi_values),
    jvp=lambda t, x, out: mul(t, div(exp(x), x)),
)
expn_p = binary(
    "expn",
    accepts=FLOAT,
    impl=in_float64(_expn_values),
    jvp=(
        refused("expn", "n"),
        lambda t, n, x, out: neg(mul(t, expn_p.bind(sub(n, const(n, 1)), x))),
    ),
)

# ---- dilogarithm -------------------------------------------------------------------------------

_DILOGARITHM = tuple(b / math.factorial(2 * k + 1) for k, b in enumerate(BERNOULLI, 1))


def _spence_middle(xp: Any, x: Any) -> Any:
    """The series in w = -log(x), for x from 1/2 to 1."""
    w = -xp.log(x)
    return w * (1.0 - w / 4.0 + w * w * polynomial(w * w, _DILOGARITHM))


def _spence_to_one(xp: Any, x: Any) -> Any:
    """x in (0, 1]: below 1/2 by `spence(x) + spence(1 - x) = pi**2 / 6 - log(x) log(1 - x)`."""
    mirrored = xp.where(x < 0.5, 1.0 - x, x)
    middle = _spence_middle(xp, mirrored)
    product = xp.log(x) * xp.log1p(-xp.where(x < 0.5, x, 0.25))
    return xp.where(x < 0.5, math.pi**2 / 6 - product - middle, middle)


def _spence_values(xp: Any, x: Any) -> Any:
    """The integral of log(t) / (1 - t) from 1 to x; above 1 by inversion."""
    safe = xp.where(x > 0.0, x, 1.0)
    inside = _spence_to_one(xp, xp.where(safe > 1.0, 1.0 / safe, safe))
    out = xp.where(safe > 1.0, -0.5 * xp.log(safe) ** 2 - inside, inside)
    return xp.where(x == 0.0, math.pi**2 / 6, xp.where(x > 0.0, out, np.nan))


def _spence_jvp(t: Any, x: Any, out: Any) -> Any:
    """The integrand, whose limit at 1 is -1."""
    one = eq(x, full_like(x, 1.0))
    away = select(one, full_like(x, 2.0), x)
    quotient = div(log(away), sub(const(x, 1), away))
    return mul(t, select(one, full_like(x, -1.0), quotient))


spence_p = unary("spence", accepts=FLOAT, impl=in_float64(_spence_values), jvp=_spence_jvp)

# ---- Dawson's integral -------------------------------------------------------------------------

_STEP = 0.25
_DAWSON = tuple((-2.0) ** k / math.prod(range(1, 2 * k + 2, 2)) for k in range(12))


def dawsn_values(xp: Any, x: Any) -> Any:
    """`exp(-x**2)` times the integral of exp(t**2) from 0 to x."""
    size = xp.abs(x)
    small = xp.minimum(size, 0.4)
    near = small * polynomial(small * small, _DAWSON)
    finite = xp.where(xp.isfinite(size), size, 1.0)
    centre = 2.0 * xp.rint(finite / (2.0 * _STEP))
    rest = finite - centre * _STEP
    far = xp.zeros_like(size)
    for k in range(-27, 28, 2):
        far = far + xp.exp(-((rest - k * _STEP) ** 2)) / (centre + k)
    out = xp.where(size < 0.4, near, far / math.sqrt(math.pi))
    out = xp.where(xp.isinf(size), 0.0, xp.where(xp.isnan(x), x, out))
    return xp.copysign(out, x)


def _dawsn_jvp(t: Any, x: Any, out: Any) -> Any:
    return mul(t, sub(const(x, 1), mul(const(x, 2), mul(x, out))))


dawsn_p = unary("dawsn", accepts=FLOAT, impl=in_float64(dawsn_values), jvp=_dawsn_jvp)
