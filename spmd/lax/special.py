"""Special functions: error functions, gamma functions and their relatives.

The one idea: the meaning is computed in float64 with array arithmetic only, so that it runs on any
array module, and is then rounded; derivatives are written with the other functions of this file.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base.errors import RefusedError
from spmd.core.aval import typeof
from spmd.core.jvp import instantiate, jvp_flat
from spmd.lax.arithmetic import add, div, log, mul, neg, pow, square, sub
from spmd.lax.array import full_like
from spmd.lax.convert import convert_element_type, matched
from spmd.lax.elementwise import exp
from spmd.lax.families import FLOAT, NARROW_FLOATS, binary, const, fail, unary
from spmd.lax.logic import gt, select
from spmd.lax.special_incomplete_values import igamma_grad_a_values, random_gamma_grad_values
from spmd.lax.special_values import (
    BERNOULLI,
    ZETA_TERMS,
    digamma_values,
    erf_inv_values,
    erf_values,
    erfc_values,
    igamma_values,
    igammac_values,
    lgamma_values,
    zeta_values,
)

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- error functions ---------------------------------------------------------------------------


def erf(x: Any) -> Array:
    """Compute the error function, elementwise.

    `x` keeps its shape and its float dtype. It is `2 / sqrt(pi)` times the integral of `exp(-t**2)`
    from 0 to `x`. Raises `DtypeError` for other dtypes.

    >>> lax.erf(np.array([0.0, 0.5, 1.0]))
    Array([0.       , 0.5204999, 0.8427008], dtype=float32)
    """
    return erf_p.bind(x)


def erfc(x: Any) -> Array:
    """Compute `1 - erf(x)`, elementwise, accurate where erf is close to 1.

    `x` keeps its shape and its float dtype. Raises `DtypeError` for other dtypes.

    >>> lax.erfc(np.array([0.0, 0.5, 1.0]))
    Array([1.        , 0.47950011, 0.1572992 ], dtype=float32)
    """
    return erfc_p.bind(x)


def erf_inv(x: Any) -> Array:
    """Compute the inverse of `erf`, elementwise; infinite at -1 and 1, NaN beyond.

    `x` keeps its shape and its float dtype. Raises `DtypeError` for other dtypes.

    >>> lax.erf_inv(np.array([0.0, 0.5, 1.0]))
    Array([0.        , 0.47693628,        inf], dtype=float32)
    """
    return erf_inv_p.bind(x)


def _bell(x: Any) -> Any:
    """The derivative of erf."""
    return mul(const(x, 2 / math.sqrt(math.pi)), exp(neg(square(x))))


def in_float64(f: Any) -> Any:
    """An `impl` that computes in float64 and rounds to the first operand's dtype."""

    def impl(xp: Any, *arrays: Any, **params: Any) -> Any:
        out = f(xp, *(a.astype(np.float64) for a in arrays), **params)
        return out.astype(arrays[0].dtype)

    return impl


def refused(name: str, argument: str) -> Any:
    """A derivative without a closed form, which no user has asked for."""

    def rule(t: Any, *operands: Any) -> Any:
        fail(
            RefusedError,
            f"{name}: there is no derivative with respect to {argument}; "
            f"if it is constant here, wrap it in lax.stop_gradient",
        )

    return rule


erf_p = unary(
    "erf", accepts=FLOAT, impl=in_float64(erf_values), jvp=lambda t, x, out: mul(t, _bell(x))
)
erfc_p = unary(
    "erfc",
    accepts=FLOAT,
    impl=in_float64(erfc_values),
    jvp=lambda t, x, out: neg(mul(t, _bell(x))),
)
erf_inv_p = unary(
    "erf_inv",
    accepts=FLOAT,
    impl=in_float64(erf_inv_values),
    jvp=lambda t, x, out: mul(t, mul(const(x, math.sqrt(math.pi) / 2), exp(square(out)))),
)

# ---- gamma functions ---------------------------------------------------------------------------


def lgamma(x: Any) -> Array:
    """Compute the logarithm of the absolute value of the gamma function, elementwise.

    `x` keeps its shape and its float dtype. Raises `DtypeError` for other dtypes.

    >>> lax.lgamma(np.array([1.0, 4.0]))
    Array([0.       , 1.7917595], dtype=float32)
    """
    return lgamma_p.bind(x)


def digamma(x: Any) -> Array:
    """Compute the derivative of `lgamma`, elementwise.

    `x` keeps its shape and its float dtype. Raises `DtypeError` for other dtypes.

    >>> lax.digamma(np.array([1.0, 4.0]))
    Array([-0.5772157,  1.2561177], dtype=float32)
    """
    return digamma_p.bind(x)


def polygamma(m: Any, x: Any) -> Array:
    """Compute the `m`-th derivative of `digamma` at `x`, elementwise.

    `m` and `x` have one shape, or are scalars, and one float dtype; a Python number takes that of
    the other. `m` holds whole numbers. Raises `ShapeError` or `DtypeError` if shapes or dtypes
    differ.

    >>> lax.polygamma(1.0, np.array([1.0, 2.0]))
    Array([1.644934  , 0.64493406], dtype=float32)
    """
    return polygamma_p.bind(*matched(m, x))


def zeta(x: Any, q: Any) -> Array:
    """Compute the Hurwitz zeta function, elementwise: the sum of `(q + k) ** -x` for k >= 0.

    `x` and `q` have one shape, or are scalars, and one float dtype; a Python number takes that of
    the other. Raises `ShapeError` or `DtypeError` if shapes or dtypes differ.

    >>> lax.zeta(np.array([2.0, 4.0]), 1.0)
    Array([1.644934 , 1.0823232], dtype=float32)
    """
    return zeta_p.bind(*matched(x, q))


def _polygamma(xp: Any, m: Any, x: Any) -> Any:
    order = m + 1
    sign = xp.where(xp.fmod(m, 2) == 0, -1.0, 1.0)
    values = sign * xp.exp(lgamma_values(xp, order)) * zeta_values(xp, order, x)
    return xp.where(m == 0, digamma_values(xp, x), values)


def _zeta_slope(t: Any, x: Any, q: Any) -> Any:
    """`t` times the derivative of zeta in x: that of the formula which gives its values."""
    narrow = typeof(x).dtype in NARROW_FLOATS
    wide = [convert_element_type(v, np.float32) if narrow else v for v in (x, q, t)]
    _, (slope,) = jvp_flat(lambda x: [_zeta_formula(x, wide[1])], wide[:1], wide[2:])
    # A factor, as a select of NaN would be a slope of 0 backwards.
    defined = select(gt(x, const(x, 1)), full_like(x, 1), full_like(x, math.nan))
    return mul(convert_element_type(instantiate(slope), typeof(x).dtype), defined)


def _zeta_formula(x: Any, q: Any) -> Any:
    """`zeta_values` for x above 1 as operations that have derivatives."""
    powers = [pow(add(q, const(q, k)), neg(x)) for k in range(ZETA_TERMS)]
    end = add(q, const(q, ZETA_TERMS))
    last = pow(end, neg(x))
    rest = [div(mul(last, end), sub(x, const(x, 1))), mul(last, const(x, 0.5))]
    rising, factor = x, div(last, end)
    for k, bernoulli in enumerate(BERNOULLI, 1):
        rest.append(mul(mul(rising, factor), const(x, bernoulli / math.factorial(2 * k))))
        rising = mul(rising, mul(add(x, const(x, 2 * k - 1)), add(x, const(x, 2 * k))))
        factor = div(factor, square(end))
    return functools.reduce(add, [*powers, *rest])


lgamma_p = unary(
    "lgamma",
    accepts=FLOAT,
    impl=in_float64(lgamma_values),
    jvp=lambda t, x, out: mul(t, digamma(x)),
)
digamma_p = unary(
    "digamma",
    accepts=FLOAT,
    impl=in_float64(digamma_values),
    jvp=lambda t, x, out: mul(t, polygamma(const(x, 1), x)),
)
polygamma_p = binary(
    "polygamma",
    accepts=FLOAT,
    impl=in_float64(_polygamma),
    jvp=(
        refused("polygamma", "m"),
        lambda t, m, x, out: mul(t, polygamma(add(m, const(m, 1)), x)),
    ),
)
zeta_p = binary(
    "zeta",
    accepts=FLOAT,
    impl=in_float64(zeta_values),
    jvp=(
        lambda t, x, q, out: _zeta_slope(t, x, q),
        lambda t, x, q, out: mul(t, mul(neg(x), zeta(add(x, const(x, 1)), q))),
    ),
)

# ---- incomplete gamma functions ----------------------------------------------------------------


def igamma(a: Any, x: Any) -> Array:
    """Compute the regularised lower incomplete gamma function, elementwise.

    `a` and `x` have one shape, or are scalars, and one float dtype; a Python number takes that of
    the other. It grows from 0 at `x = 0` to 1, and is differentiable in both. Raises `ShapeError`
    or `DtypeError` if shapes or dtypes differ.

    >>> lax.igamma(1.0, np.array([0.0, 1.0]))
    Array([0.        , 0.63212055], dtype=float32)
    """
    return igamma_p.bind(*matched(a, x))


def igammac(a: Any, x: Any) -> Array:
    """Compute `1 - igamma(a, x)`, elementwise, accurate where igamma is close to 1.

    `a` and `x` have one shape, or are scalars, and one float dtype; a Python number takes that of
    the other. It is differentiable in both. Raises `ShapeError` or `DtypeError` if shapes or dtypes
    differ.

    >>> lax.igammac(1.0, np.array([0.0, 1.0]))
    Array([1.        , 0.36787945], dtype=float32)
    """
    return igammac_p.bind(*matched(a, x))


def _density(a: Any, x: Any) -> Any:
    """The derivative of igamma in x: the density of the gamma distribution."""
    return exp(sub(mul(sub(a, const(a, 1)), log(x)), add(x, lgamma(a))))


igamma_p = binary(
    "igamma",
    accepts=FLOAT,
    impl=in_float64(igamma_values),
    jvp=(
        lambda t, a, x, out: mul(t, igamma_grad_a(a, x)),
        lambda t, a, x, out: mul(t, _density(a, x)),
    ),
)
igammac_p = binary(
    "igammac",
    accepts=FLOAT,
    impl=in_float64(igammac_values),
    jvp=(
        lambda t, a, x, out: neg(mul(t, igamma_grad_a(a, x))),
        lambda t, a, x, out: neg(mul(t, _density(a, x))),
    ),
)


def igamma_grad_a(a: Any, x: Any) -> Array:
    """Compute the derivative of `igamma` in `a`, elementwise.

    `a` and `x` have one shape, or are scalars, and one float dtype. Raises `ShapeError` or
    `DtypeError` if shapes or dtypes differ.

    >>> lax.igamma_grad_a(1.0, np.array([0.5, 1.0])).round(3)
    Array([-0.489, -0.432], dtype=float32)
    """
    return igamma_grad_a_p.bind(*matched(a, x))


def random_gamma_grad(a: Any, x: Any) -> Array:
    """Compute the derivative in `a` of a sample `x` of the gamma distribution, elementwise.

    The sample's probability is held: it is `-igamma_grad_a(a, x) / density(a, x)`, what implicit
    reparameterisation needs. `a` and `x` have one shape, or are scalars, and one float dtype.
    Raises `ShapeError` or `DtypeError` if shapes or dtypes differ.

    >>> lax.random_gamma_grad(1.0, np.array([0.5, 1.0])).round(3)
    Array([0.807, 1.174], dtype=float32)
    """
    return random_gamma_grad_p.bind(*matched(a, x))


def _log_slope(a: Any, x: Any) -> Any:
    """The derivative of the density's logarithm in a."""
    return sub(log(x), digamma(a))


def _random_gamma_grad_in_x(t: Any, a: Any, x: Any, out: Any) -> Any:
    """With g = -P_a / p: `-(log p)_a - g (log p)_x`."""
    in_x = sub(div(sub(a, const(a, 1)), x), const(x, 1))
    return neg(mul(t, add(_log_slope(a, x), mul(out, in_x))))


igamma_grad_a_p = binary(
    "igamma_grad_a",
    accepts=FLOAT,
    impl=in_float64(igamma_grad_a_values),
    jvp=(
        refused("igamma_grad_a", "a"),
        lambda t, a, x, out: mul(t, mul(_density(a, x), _log_slope(a, x))),
    ),
)
random_gamma_grad_p = binary(
    "random_gamma_grad",
    accepts=FLOAT,
    impl=in_float64(random_gamma_grad_values),
    jvp=(refused("random_gamma_grad", "a"), _random_gamma_grad_in_x),
)
