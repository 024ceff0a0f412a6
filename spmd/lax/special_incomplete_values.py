"""The values of the incomplete beta function and of the gamma functions' derivatives in `a`.

The same conventions as `special_values.py`. The derivatives in `a` differentiate, step by step, the
power series (below a + 1) and the continued fraction (above) that the incomplete gamma functions
are computed with, as R. Moore, "Algorithm AS 187" (1982), does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.lax.special_values import EPS, converge, digamma_values, lgamma_values

_MOST_STEPS = 20_000
_TINY = 1e-300
_BIG = 2.0**60

# ---- incomplete gamma, in a --------------------------------------------------------------------


def _series(xp: Any, a: Any, x: Any) -> tuple[Any, Any]:
    """The sum of `x**n / ((a + 1) ... (a + n))` and its derivative in a."""

    def step(k: Any, term: Any, total: Any, n: Any, slope: Any, slopes: Any) -> Any:
        n = n + 1.0
        slope = (slope - term / n) * (x / n)
        term = term * (x / n)
        total, slopes = total + term, slopes + slope
        moving = (term > total * EPS) | (-slope > -slopes * EPS)
        return (term, total, n, slope, slopes), moving

    one, zero = xp.ones_like(x), xp.zeros_like(x)
    out = converge(xp, step, (one, one, a, zero, zero), _MOST_STEPS)
    return out[1], out[4]


def _fraction(xp: Any, a: Any, x: Any) -> tuple[Any, Any]:
    """`gamma(a) Q(a, x) / (x**a exp(-x))` by its continued fraction, and its derivative in a."""

    def step(
        c: Any, y: Any, z: Any, out: Any, slope: Any, before: tuple[Any, ...], last: tuple[Any, ...]
    ) -> Any:
        y, z = y + 1.0, z + 2.0
        yc = y * c
        p, q = (last[k] * z - before[k] * yc for k in (0, 1))
        dp, dq = (last[k + 2] * z - last[k] - before[k + 2] * yc + before[k] * c for k in (0, 1))
        new = p / q
        new_slope = (dp - new * dq) / q
        moved = xp.abs(new - out) > 16 * EPS * xp.abs(new)
        moved = moved | (xp.abs(new_slope - slope) > 16 * EPS * (xp.abs(new) + xp.abs(new_slope)))
        scale = xp.where(xp.abs(p) > _BIG, 1.0 / _BIG, 1.0)
        before, last = tuple(v * scale for v in last), tuple(v * scale for v in (p, q, dp, dq))
        return (y, z, new, new_slope, before, last), moved

    y = 1.0 - a
    z = x + y + 1.0
    one, zero = xp.ones_like(x), xp.zeros_like(x)
    before, last = (one, x, zero, zero), (x + 1.0, z * x, zero, -x)
    out = last[0] / last[1]
    slope = (last[2] - out * last[3]) / last[1]
    ends = converge(xp, step, (y, z, out, slope, before, last), _MOST_STEPS)
    return ends[2], ends[3]


def _slopes(xp: Any, a: Any, x: Any) -> tuple[Any, Any, Any, Any]:
    """The base of both functions: valid points, and there d sample / da, clamped a and x."""
    a, x = xp.broadcast_arrays(a, x)
    valid = (a > 0.0) & (x > 0.0) & xp.isfinite(x) & xp.isfinite(a)
    low = valid & (x < a + 1.0)
    high = valid & ~low
    lower_a, lower_x = xp.where(low, a, 1.0), xp.where(low, x, 0.5)
    total, slope = _series(xp, lower_a, lower_x)
    log_slope = xp.log(lower_x) - digamma_values(xp, lower_a + 1.0)
    lower = -(lower_x / lower_a) * (total * log_slope + slope)
    upper_a, upper_x = xp.where(high, a, 1.0), xp.where(high, x, 2.0)
    total, slope = _fraction(xp, upper_a, upper_x)
    log_slope = xp.log(upper_x) - digamma_values(xp, upper_a)
    upper = upper_x * (total * log_slope + slope)
    return valid, xp.where(low, lower, upper), xp.where(valid, a, 1.0), xp.where(valid, x, 1.0)


def _edges(xp: Any, a: Any, x: Any) -> Any:
    """Zero where the lower function is constant in a, NaN outside of its domain."""
    constant = (a > 0.0) & ((x == 0.0) | xp.isinf(x))
    return xp.where(constant, 0.0, np.nan)


def igamma_grad_a_values(xp: Any, a: Any, x: Any) -> Any:
    """The derivative of the regularised lower incomplete gamma function in a."""
    valid, sample, safe_a, safe_x = _slopes(xp, a, x)
    density = xp.exp((safe_a - 1.0) * xp.log(safe_x) - safe_x - lgamma_values(xp, safe_a))
    return xp.where(valid, -sample * density, _edges(xp, a, x))


def random_gamma_grad_values(xp: Any, a: Any, x: Any) -> Any:
    """The derivative in a of the sample x, its probability held: no density, so no underflow."""
    valid, sample, _, _ = _slopes(xp, a, x)
    return xp.where(valid, sample, _edges(xp, a, x))


# ---- incomplete beta ---------------------------------------------------------------------------


def _beta_fraction(xp: Any, a: Any, b: Any, x: Any) -> Any:
    """The continued fraction of the incomplete beta function (modified Lentz); x below the mean."""

    def step(m: Any, c: Any, d: Any, out: Any) -> Any:
        even = m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0))
        change = xp.ones_like(x)
        for numerator in (even, odd):
            d = 1.0 + numerator * d
            d = 1.0 / xp.where(xp.abs(d) < _TINY, _TINY, d)
            c = 1.0 + numerator / c
            c = xp.where(xp.abs(c) < _TINY, _TINY, c)
            change = change * (c * d)
        return (c, d, out * change), xp.abs(change - 1.0) > 4 * EPS

    d = 1.0 - (a + b) * x / (a + 1.0)
    d = 1.0 / xp.where(xp.abs(d) < _TINY, _TINY, d)
    return converge(xp, step, (xp.ones_like(x), d, d), _MOST_STEPS)[2]


def betainc_values(xp: Any, a: Any, b: Any, x: Any) -> Any:
    """The regularised incomplete beta function (Numerical Recipes, 6.4)."""
    a, b, x = xp.broadcast_arrays(a, b, x)
    inside = (a > 0.0) & (b > 0.0) & (x > 0.0) & (x < 1.0) & xp.isfinite(a) & xp.isfinite(b)
    p, q, t = (xp.where(inside, v, s) for v, s in ((a, 1.0), (b, 1.0), (x, 0.25)))
    beta = lgamma_values(xp, p) + lgamma_values(xp, q) - lgamma_values(xp, p + q)
    front = xp.exp(p * xp.log(t) + q * xp.log1p(-t) - beta)
    swap = t > (p + 1.0) / (p + q + 2.0)
    first, second = xp.where(swap, q, p), xp.where(swap, p, q)
    tail = front * _beta_fraction(xp, first, second, xp.where(swap, 1.0 - t, t)) / first
    out = xp.where(swap, 1.0 - tail, tail)
    return xp.where(inside, out, _beta_edges(xp, a, b, x))


def _beta_edges(xp: Any, a: Any, b: Any, x: Any) -> Any:
    """The ends of x; and limits in a and b, where all probability is at 0 or at 1."""
    at_zero = ((a == 0.0) & (b > 0.0)) | ((a > 0.0) & xp.isfinite(a) & (b == np.inf))
    at_one = ((b == 0.0) & (a > 0.0)) | ((b > 0.0) & xp.isfinite(b) & (a == np.inf))
    usual = (a > 0.0) & (b > 0.0) & xp.isfinite(a) & xp.isfinite(b)
    ends = xp.where(x == 0.0, 0.0, xp.where(x == 1.0, 1.0, np.nan))
    between = xp.where(at_zero, 1.0, xp.where(at_one, 0.0, np.nan))
    known = usual | at_zero | at_one
    within = (x > 0.0) & (x < 1.0)
    return xp.where(known, xp.where(within, between, ends), np.nan)
