"""The hypergeometric functions 1F1 and 2F1 of real numbers, with derivatives in all parameters.

The one idea: the values are power series in arithmetic that does not ask whether its numbers are
real, so a derivative in a parameter is the imaginary part of the same function a tiny step off the
real axis (Squire and Trapp, "Using complex variables to estimate derivatives of real functions",
1998), which loses no digits.

Sources: J. W. Pearson, S. Olver and M. A. Porter, "Numerical methods for the computation of the
confluent and Gauss hypergeometric functions" (2014): series after the transformations of Kummer,
Euler and Pfaff.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base.errors import RefusedError
from spmd.lax.arithmetic import add, div, mul
from spmd.lax.families import FLOAT, const, elementwise, fail, quiet
from spmd.lax.special_values import EPS, converge, digamma_values, lgamma_values

_STEP = 1e-100
_MOST_TERMS = 200_000
_CUT = 700.0  # beyond it exp overflows


def _series(xp: Any, above: Sequence[Any], below: Sequence[Any], x: Any) -> Any:
    """The sum of `(above)_k / (below)_k x**k / k!`, for all elements until all have converged."""
    one = xp.ones_like(x * sum(above) * sum(below))
    # Terms may grow again while a parameter is not reached.
    start = xp.zeros_like(one.real)
    for p in (*above, *below):
        start = xp.maximum(start, xp.minimum(xp.abs(p.real), 1000.0))

    def step(k: Any, term: Any, total: Any) -> Any:
        factor = x / (k + 1)
        for p in above:
            factor = factor * (p + k)
        for q in below:
            factor = factor / (q + k)
        term = term * factor
        total = total + term
        return (term, total), (k <= start) | (xp.abs(term) > EPS / 8 * xp.abs(total))

    return converge(xp, step, (one, one), _MOST_TERMS, 0)[1]


def _is_pole(xp: Any, x: Any) -> Any:
    """Whether a parameter is a whole number of at most 0, where a series ends or divides by 0."""
    return (x.real <= 0) & (x.real == xp.rint(x.real)) & (x.imag == 0)


# ---- 1F1 ---------------------------------------------------------------------------------------


def _hyp1f1(xp: Any, a: Any, b: Any, x: Any) -> Any:
    """Negative x by Kummer: `exp(x) 1F1(b - a, b, -x)`, unless the series ends by itself."""
    ends, pole = _is_pole(xp, a), _is_pole(xp, b)
    turn = (x.real < 0) & ~ends
    divisor = xp.where(pole, 1.0, b)
    # A series that ends is exact far out; of another one the rest is known from here on.
    most = xp.where(ends, 1e60, _CUT)
    safe = xp.where(xp.abs(x.real) < most, x, xp.copysign(most, x.real))
    out = _series(xp, [xp.where(turn, b - a, a)], [divisor], xp.where(turn, -safe, safe))
    out = xp.where(turn, xp.exp(safe) * out, out)
    out = xp.where(turn & (x.real < -_CUT), _hyp1f1_far(xp, a, b, x), out)
    out = xp.where(ends & xp.isinf(x.real), out.real * np.inf, out)
    out = xp.where(a == b, xp.exp(x.real) * (1 + 1j * x.imag), out)
    out = xp.where(pole & (a != b), xp.where(ends & (a.real > b.real), out, np.inf), out)
    return xp.where(xp.isnan(a + b + x.real), np.nan, xp.where(a == 0, 1.0, out))


def _hyp1f1_far(xp: Any, a: Any, b: Any, x: Any) -> Any:
    """Far below zero: `gamma(b) / gamma(b - a) (-x)**-a` times a series (DLMF 13.7.2)."""
    size = xp.clip(-x.real, _CUT, 1e300)
    term = total = xp.ones_like(a * b)
    for k in range(20):
        term = term * (a + k) * (a - b + 1 + k) / ((k + 1) * size)
        total = total + term
    vanishes = _is_pole(xp, b - a)
    scale = _log_gamma(xp, b) - _log_gamma(xp, xp.where(vanishes, 1.0, b - a))
    out = xp.exp(scale - a * xp.log(size)) * total * _gamma_sign(xp, b) * _gamma_sign(xp, b - a)
    out = xp.where(vanishes, 0.0, out)
    endless = xp.where(xp.abs(out.real) < 1, 0.0, xp.copysign(np.inf, out.real))
    return xp.where(xp.isinf(x.real), endless, out)


def _log_gamma(xp: Any, x: Any) -> Any:
    """The logarithm of |gamma|, of numbers a tiny step off the real axis."""
    step = xp.where(x.imag == 0, 0.0, x.imag * digamma_values(xp, x.real))
    return lgamma_values(xp, x.real) + 1j * step


# ---- 2F1 ---------------------------------------------------------------------------------------


def _hyp2f1(xp: Any, a: Any, b: Any, c: Any, x: Any) -> Any:
    """Negative x by Pfaff, then a growing series by Euler; 1 by Gauss; infinite above."""
    ends = _is_pole(xp, a) | _is_pole(xp, b)
    negative = (x.real < 0) & ~ends
    scale = xp.where(negative, (1 - x) ** (-a), 1.0)
    a, b = a + 0 * x, xp.where(negative, c - b, b)
    x = xp.where(negative, x / (x - 1), x)
    # Pfaff may have made a series that ends.
    ends = ends | _is_pole(xp, b)
    rest = c - a - b
    grows = (rest.real < 0) & (x.real < 1) & ~ends
    scale = xp.where(grows, scale * (1 - x) ** rest, scale)
    first, second = xp.where(grows, c - a, a), xp.where(grows, c - b, b)
    inside = ends | (x.real < 1)
    pole = _is_pole(xp, c)
    divisor = xp.where(pole, 1.0, c)
    out = scale * _series(xp, [first, second], [divisor], xp.where(inside, x, 0.0))
    at_one = (x == 1) & ~ends
    gamma = [lgamma_values(xp, xp.where(at_one, p.real, 1.0)) for p in (c, rest, c - a, c - b)]
    gauss = xp.exp(gamma[0] + gamma[1] - gamma[2] - gamma[3])
    sign = _gamma_sign(xp, c) * _gamma_sign(xp, rest)
    sign = sign * _gamma_sign(xp, c - a) * _gamma_sign(xp, c - b)
    out = xp.where(at_one, xp.where(rest.real > 0, sign * gauss, np.inf), out)
    out = xp.where(inside | at_one, out, np.inf)
    out = xp.where(pole, np.inf, out)
    return xp.where((x == 0) | (a == 0) | (b == 0), scale, out)


def _gamma_sign(xp: Any, x: Any) -> Any:
    """The sign of the gamma function."""
    return xp.where((x.real < 0) & (xp.floor(x.real) % 2 != 0), -1.0, 1.0)


# ---- primitives --------------------------------------------------------------------------------


def _value(f: Callable[..., Any]) -> Callable[..., Any]:
    def impl(xp: Any, *arrays: Any) -> Any:
        wide = xp.broadcast_arrays(*(x.astype(np.complex128) for x in arrays))
        return f(xp, *wide).real.astype(arrays[0].dtype)

    return impl


def _slope(f: Callable[..., Any]) -> Callable[..., Any]:
    """The derivative in parameter `which`, a tiny step off the real axis."""

    def impl(xp: Any, *arrays: Any, which: int) -> Any:
        wide = list(xp.broadcast_arrays(*(x.astype(np.complex128) for x in arrays)))
        wide[which] = wide[which] + 1j * _STEP
        return (f(xp, *wide).imag / _STEP).astype(arrays[0].dtype)

    return impl


def _no_second(name: str) -> Callable[..., Any]:
    def rule(t: Any, *operands: Any, **_: Any) -> Any:
        fail(
            RefusedError,
            f"{name}: only first derivatives with respect to the parameters exist; the argument x "
            "has derivatives of every order",
        )

    return rule


def _family(name: str, parameters: tuple[str, ...], f: Callable[..., Any], in_x: Any) -> Any:
    """The function, whose derivatives in its parameters are primitives of their own."""
    arguments = (*parameters, "x")
    slope = elementwise(
        f"{name}_slope",
        arguments,
        accepts=FLOAT,
        impl=quiet(_slope(f)),
        jvp=(_no_second(name),) * len(arguments),
    )

    def along(which: int) -> Callable[..., Any]:
        return lambda t, *operands: mul(t, slope.bind(*operands[:-1], which=which))

    rules = tuple(along(k) for k in range(len(parameters)))
    return elementwise(
        name, arguments, accepts=FLOAT, impl=quiet(_value(f)), jvp=(*rules, in_x)
    ), slope


def _hyp1f1_in_x(t: Any, a: Any, b: Any, x: Any, out: Any) -> Any:
    further = hyp1f1_p.bind(add(a, const(a, 1)), add(b, const(b, 1)), x)
    return mul(t, mul(div(a, b), further))


def _hyp2f1_in_x(t: Any, a: Any, b: Any, c: Any, x: Any, out: Any) -> Any:
    further = hyp2f1_p.bind(*(add(p, const(p, 1)) for p in (a, b, c)), x)
    return mul(t, mul(div(mul(a, b), c), further))


hyp1f1_p, hyp1f1_slope_p = _family("hyp1f1", ("a", "b"), _hyp1f1, _hyp1f1_in_x)
hyp2f1_p, hyp2f1_slope_p = _family("hyp2f1", ("a", "b", "c"), _hyp2f1, _hyp2f1_in_x)
