"""`spmd.scipy.special`: special functions of arrays of any dtypes that promote to a float.

Most are one line over the primitives of `spmd.lax`: promote the operands, apply the formula.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import lax
from spmd import numpy as snp
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeArgumentError, DtypeError, RefusedError
from spmd.core.aval import typeof
from spmd.core.custom import custom_jvp
from spmd.lax.special_beta import bessel_i0, bessel_i1
from spmd.lax.special_integrals import dawsn_p, exp1_p, expi_p, expn_p, spence_p
from spmd.nn import logsumexp
from spmd.numpy.promotion import (
    as_array,
    constant_like,
    default_float,
    select,
)
from spmd.scipy.special_entropies import (
    boxcox,
    boxcox1p,
    entr,
    expit,
    kl_div,
    log_softmax,
    logit,
    reals_of_one_shape,
    rel_entr,
    softmax,
    strong_reals,
    xlog1py,
    xlogy,
)
from spmd.scipy.special_families import (
    bessel_jn,
    erfcx,
    fresnel,
    hyp1f1,
    hyp2f1,
    in_single,
    log_beta,
    owens_t,
    sici,
    sph_harm_y,
    wofz,
)

if TYPE_CHECKING:
    from spmd.sharding.array import Array

__all__ = [
    "bernoulli", "bessel_jn", "beta", "betainc", "betaln", "boxcox", "boxcox1p", "comb", "dawsn",
    "digamma", "entr", "erf", "erfc", "erfcx", "erfinv", "exp1", "expi", "expit", "expn",
    "factorial", "fresnel", "gamma", "gammainc", "gammaincc", "gammaln", "gammasgn", "hyp1f1",
    "hyp2f1", "i0", "i0e", "i1", "i1e", "kl_div", "log_ndtr", "log_softmax", "loggamma", "logit",
    "logsumexp", "multigammaln", "ndtr", "ndtri", "owens_t", "poch", "polygamma", "rel_entr",
    "sici", "softmax", "spence", "sph_harm_y", "wofz", "xlog1py", "xlogy", "zeta",
]  # fmt: skip

_LOG_2PI = math.log(2 * math.pi)


_RULES = """`x` keeps its shape; integers become float32 and floats keep their dtype. Raises
`ArgumentError` if `x` is no array, and `DtypeError` for complex numbers."""


def _function(
    name: str,
    op: Callable[..., Any],
    doc: str,
    example: tuple[str, str],
    operands: Callable[..., list[Any]] = reals_of_one_shape,
) -> Callable[[Any], Array]:
    """A function of one array that is one primitive; `example` is an argument and the result."""

    def f(x: Any) -> Array:
        return op(*operands(name, x))

    argument, result = example
    f.__name__ = f.__qualname__ = name
    f.__doc__ = f"{doc}\n\n{_RULES}\n\n>>> spmd.scipy.special.{name}({argument})\n{result}\n"
    return f


# ---- error functions and the normal distribution -----------------------------------------------

erf = _function(
    "erf",
    lax.erf,
    "Compute the error function, elementwise: `2 / sqrt(pi)` times the integral of `exp(-t**2)`.",
    ("np.array([0.0, 0.5, 1.0])", "Array([0.       , 0.5204999, 0.8427008], dtype=float32)"),
)
erfc = _function(
    "erfc",
    lax.erfc,
    "Compute `1 - erf(x)`, elementwise, accurate where erf is near 1.",
    ("np.array([0.0, 0.5, 1.0])", "Array([1.        , 0.47950011, 0.1572992 ], dtype=float32)"),
)
erfinv = _function(
    "erfinv",
    lax.erf_inv,
    "Compute the inverse of `erf`, elementwise: infinite at -1 and 1, NaN beyond.",
    ("np.array([0.0, 0.5, 1.0])", "Array([0.        , 0.47693628,        inf], dtype=float32)"),
)
dawsn = _function(
    "dawsn",
    dawsn_p.bind,
    "Compute Dawson's integral, elementwise: `sqrt(pi)/2 exp(-x**2) erfi(x)`.",
    ("np.array([0.0, 1.0])", "Array([0.       , 0.5380795], dtype=float32)"),
    strong_reals,
)


def ndtr(x: Any) -> Array:
    """Compute the distribution function of the standard normal distribution, elementwise.

    `x` keeps its shape; integers become float32 and floats keep their dtype. Raises `ArgumentError`
    if `x` is no array, and `DtypeError` for complex numbers.

    >>> spmd.scipy.special.ndtr(np.array([-np.inf, 0.0, 1.0]))
    Array([0.       , 0.5      , 0.8413447], dtype=float32)
    """
    (x,) = strong_reals("ndtr", x)
    return lax.mul(constant_like(x, 0.5), lax.erfc(lax.mul(x, constant_like(x, -math.sqrt(0.5)))))


def ndtri(p: Any) -> Array:
    """Compute the inverse of `ndtr`, the quantile of the standard normal distribution, elementwise.

    It is `sqrt(2) erfinv(2 p - 1)`, so a tiny `p` keeps as many digits as `2 p - 1` does; outside
    of [0, 1] it is NaN. `p` keeps its shape; integers become float32 and floats keep their dtype.
    Raises `ArgumentError` if `p` is no array, and `DtypeError` for complex numbers.

    >>> spmd.scipy.special.ndtri(np.array([0.0, 0.5, 1.0]))
    Array([-inf,   0.,  inf], dtype=float32)
    """
    (p,) = strong_reals("ndtri", p)
    two, one = constant_like(p, 2.0), constant_like(p, 1.0)
    return lax.mul(constant_like(p, math.sqrt(2)), lax.erf_inv(lax.sub(lax.mul(two, p), one)))


@functools.partial(custom_jvp, nondiff_argnums=(1,))
def _log_ndtr(x: Any, series_order: int) -> Any:
    """By erfc while it is a normal number, and by the asymptotic series far below zero.

    Near 1 the logarithm is `log1p(-ndtr(-x))`.
    """
    lower = -10.0 if dtypes.is_float(typeof(x).dtype) and typeof(x).dtype.itemsize < 8 else -20.0
    upper = constant_like(x, 0.0)
    cut = constant_like(x, lower)
    middle = lax.log(ndtr(lax.max(x, cut)))
    above = lax.log1p(lax.neg(ndtr(lax.neg(lax.max(x, upper)))))
    below = _log_ndtr_below(lax.min(x, cut), series_order)
    return select(lax.gt(x, upper), above, select(lax.gt(x, cut), middle, below))


def _log_ndtr_below(x: Any, series_order: int) -> Any:
    square = lax.square(x)
    log_scale = -0.5 * square - snp.log(-x) - 0.5 * _LOG_2PI
    total, term = 1.0, 1.0
    for k in range(1, series_order + 1):
        term = term * (-(2 * k - 1.0)) / square
        total = total + term
    return log_scale + snp.log(total)


@_log_ndtr.defjvp
def _log_ndtr_jvp(series_order: int, primals: Any, tangents: Any) -> Any:
    """`exp(log density - log_ndtr)`, which neither overflows nor divides zero by zero."""
    (x,), (t,) = primals, tangents
    out = _log_ndtr(x, series_order)
    return out, t * snp.exp(-0.5 * x * x - 0.5 * _LOG_2PI - out)


def log_ndtr(x: Any, series_order: int = 3) -> Array:
    """Compute the logarithm of `ndtr`, elementwise, accurate in both tails.

    Far below zero it is an asymptotic series of `series_order` terms. `x` keeps its shape; integers
    become float32 and floats keep their dtype. Raises `ArgumentError` if `series_order` is not in
    0..30 or `x` is no array, and `DtypeError` for complex numbers.

    >>> spmd.scipy.special.log_ndtr(np.array([-100.0, 0.0]))
    Array([-5.005524e+03, -6.931472e-01], dtype=float32)
    """
    if not isinstance(series_order, int) or not 0 <= series_order <= 30:
        raise ArgumentError(f"log_ndtr: series_order must be in 0..30, got {series_order!r}")
    return _log_ndtr(*strong_reals("log_ndtr", x), max(series_order, 1))


# ---- gamma functions ---------------------------------------------------------------------------

gammaln = _function(
    "gammaln",
    lax.lgamma,
    "Compute the logarithm of the absolute gamma function, elementwise.",
    ("np.array([1.0, 4.0])", "Array([0.       , 1.7917595], dtype=float32)"),
)
digamma = _function(
    "digamma",
    lax.digamma,
    "Compute the derivative of `gammaln`, elementwise; NaN at 0 and negative integers.",
    ("np.array([1.0, 4.0])", "Array([-0.5772157,  1.2561177], dtype=float32)"),
)


def loggamma(x: Any) -> Array:
    """Compute the logarithm of the gamma function, elementwise and real.

    For negative `x`, where the logarithm is complex, it is NaN. `x` keeps its shape; integers
    become float32 and floats keep their dtype. Raises `ArgumentError` if `x` is no array, and
    `DtypeError` for complex numbers.

    >>> spmd.scipy.special.loggamma(np.array([-1.5, 1.0, 4.0]))
    Array([      nan, 0.       , 1.7917595], dtype=float32)
    """
    (x,) = reals_of_one_shape("loggamma", x)
    return select(lax.ge(x, constant_like(x, 0.0)), lax.lgamma(x), constant_like(x, np.nan))


def gammainc(a: Any, x: Any) -> Array:
    """Compute the regularised lower incomplete gamma function, elementwise.

    It is differentiable in both arguments. `a` and `x` broadcast and are promoted to one float
    dtype. Raises `ArgumentError` if one is no array, `ShapeError` if they do not broadcast, and
    `DtypeError` for complex numbers.

    >>> spmd.scipy.special.gammainc(1.0, np.array([0.0, 1.0]))
    Array([0.        , 0.63212055], dtype=float32)
    """
    return lax.igamma(*reals_of_one_shape("gammainc", a, x))


def gammaincc(a: Any, x: Any) -> Array:
    """Compute the regularised upper incomplete gamma function, `1 - gammainc(a, x)`, elementwise.

    It is differentiable in both arguments. `a` and `x` broadcast and are promoted to one float
    dtype. Raises `ArgumentError` if one is no array, `ShapeError` if they do not broadcast, and
    `DtypeError` for complex numbers.

    >>> spmd.scipy.special.gammaincc(1.0, np.array([0.0, 1.0]))
    Array([1.        , 0.36787945], dtype=float32)
    """
    return lax.igammac(*reals_of_one_shape("gammaincc", a, x))


def polygamma(n: Any, x: Any) -> Array:
    """Compute the `n`-th derivative of `digamma`, elementwise.

    `n`, integers, and `x` broadcast and are promoted to one float dtype. Raises `ArgumentError` if
    one is no array, `ShapeError` if they do not broadcast, and `DtypeError` for complex numbers and
    orders that are no integers.

    >>> spmd.scipy.special.polygamma(1, 1.0)
    Array(1.644934, dtype=float32, weak_type=True)
    """
    if not dtypes.is_integer(typeof(n).dtype):
        raise DtypeArgumentError(f"polygamma: n must be integers, got {typeof(n)}")
    return lax.polygamma(*reals_of_one_shape("polygamma", n, x))


def zeta(x: Any, q: Any = None) -> Array:
    """Compute the Hurwitz zeta function, elementwise: the sum of `(k + q) ** -x` for k >= 0.

    Without `q` it is Riemann's, with q = 1. `x` and `q` broadcast and are promoted to one float
    dtype. Raises `ArgumentError` if one is no array, `ShapeError` if they do not broadcast, and
    `DtypeError` for complex numbers.

    >>> spmd.scipy.special.zeta(np.array([2.0, 4.0]))
    Array([1.644934 , 1.0823232], dtype=float32)
    """
    return lax.zeta(*reals_of_one_shape("zeta", x, 1.0 if q is None else q))


def gammasgn(x: Any) -> Array:
    """Compute the sign of the gamma function, elementwise.

    It is NaN at negative integers, and the sign of the zero at 0. `x` keeps its shape; integers
    become float32 and floats keep their dtype. Raises `ArgumentError` if `x` is no array, and
    `DtypeError` for complex numbers.

    >>> spmd.scipy.special.gammasgn(np.array([-1.5, -0.5, 0.5]))
    Array([ 1., -1.,  1.], dtype=float32)
    """
    (x,) = strong_reals("gammasgn", x)
    floor = lax.floor(x)
    odd = lax.ne(lax.rem(floor, constant_like(x, 2.0)), constant_like(x, 0.0))
    negative = select(odd, constant_like(x, -1.0), constant_like(x, 1.0))
    pole = snp.logical_and(lax.eq(x, floor), lax.lt(x, constant_like(x, 0.0)))
    negative = select(pole, constant_like(x, np.nan), negative)
    at_zero = snp.copysign(constant_like(x, 1.0), x)
    sign = select(lax.lt(x, constant_like(x, 0.0)), negative, at_zero)
    return select(snp.isnan(x), constant_like(x, np.nan), sign)


def gamma(x: Any) -> Array:
    """Compute the gamma function, elementwise: `exp(gammaln(x))` with its sign.

    It is NaN at negative integers. `x` keeps its shape; integers become float32 and floats keep
    their dtype. Raises `ArgumentError` if `x` is no array, and `DtypeError` for complex numbers.

    >>> spmd.scipy.special.gamma(np.array([0.5, 3.0, -1.0]))
    Array([1.7724538, 2.       ,       nan], dtype=float32)
    """
    (x,) = strong_reals("gamma", x)
    return lax.mul(gammasgn(x), lax.exp(lax.lgamma(x)))


def factorial(n: Any, exact: bool = False) -> Array:
    """Compute `n!` as `gamma(n + 1)`, elementwise; 0 for negative `n`.

    With `exact=True`, which in SciPy gives integers of any size, it raises `ArgumentError`. `n`
    keeps its shape; integers become float32 and floats keep their dtype. Raises `ArgumentError` if
    `n` is no array, and `DtypeError` for complex numbers.

    >>> spmd.scipy.special.factorial(np.array([0, 1, 2]))
    Array([1., 1., 2.], dtype=float32)
    """
    if exact:
        raise RefusedError("factorial: exact=True needs integers of any size; use math.factorial")
    (n,) = reals_of_one_shape("factorial", n)
    one, zero = constant_like(n, 1.0), constant_like(n, 0.0)
    return select(lax.lt(n, zero), zero, lax.exp(lax.lgamma(lax.add(n, one))))


def poch(z: Any, m: Any) -> Array:
    """Compute Pochhammer's rising factorial, `gamma(z + m) / gamma(z)`, elementwise.

    `z` and `m` broadcast and are promoted to one float dtype. Raises `ArgumentError` if one is no
    array, `ShapeError` if they do not broadcast, and `DtypeError` for complex numbers.

    >>> spmd.scipy.special.poch(1.0, np.array([0.0, 2.0]))
    Array([1., 2.], dtype=float32)
    """
    z, m = strong_reals("poch", z, m)
    top = lax.add(z, m)
    below = lax.lgamma(z)
    ratio = lax.exp(lax.sub(lax.lgamma(top), below))
    value = lax.mul(lax.mul(gammasgn(top), gammasgn(z)), ratio)
    # Elsewhere the ratio is 1 for m = 0 by itself, and has a derivative.
    empty = snp.logical_and(lax.eq(m, constant_like(m, 0.0)), ~snp.isfinite(below))
    return select(empty, constant_like(z, 1.0), value)


def multigammaln(a: Any, d: Any) -> Array:
    """Compute the logarithm of the gamma function of dimension `d`, elementwise.

    `d` is a static integer. `a` keeps its shape; integers become float32 and floats keep their
    dtype. Raises `ArgumentError` if `a` is no array, and `DtypeError` for complex numbers.

    >>> spmd.scipy.special.multigammaln(2.0, 2)
    Array(0.45158267, dtype=float32)
    """
    (a,) = strong_reals("multigammaln", a)
    d = operator.index(d)
    total = as_array(constant_like(a, 0.25 * d * (d - 1) * math.log(math.pi)))
    for k in range(d):
        total = lax.add(total, lax.lgamma(lax.sub(a, constant_like(a, k / 2))))
    return total


def comb(N: Any, k: Any, *, repetition: bool = False) -> Array:
    """Compute the number of ways to choose `k` of `N`, elementwise, in floats.

    With `repetition`, it is the number for `k` of `N + k - 1`. Whole operands give whole numbers,
    and impossible choices 0. `N` and `k` broadcast and are promoted to one float dtype. Raises
    `ArgumentError` if one is no array, `ShapeError` if they do not broadcast, and `DtypeError` for
    complex numbers.

    >>> spmd.scipy.special.comb(5, np.array([0, 2, 7]))
    Array([ 1., 10.,  0.], dtype=float32)
    """
    N, k = reals_of_one_shape("comb", N, k)
    one, zero = constant_like(N, 1.0), constant_like(N, 0.0)
    empty = snp.logical_and(lax.eq(k, zero), lax.ge(N, zero))
    if repetition:
        N = lax.sub(lax.add(N, k), one)
    # Values outside, NaN too, are 0 with derivative 0, so the formula must not see them.
    inside = snp.logical_and(lax.ge(k, zero), snp.logical_and(lax.ge(N, zero), lax.le(k, N)))
    N, k = select(inside, N, zero), select(inside, k, zero)
    value = in_single(_choose, N, k)
    whole = snp.logical_and(lax.eq(N, lax.floor(N)), lax.eq(k, lax.floor(k)))
    whole = snp.logical_and(whole, lax.is_finite(value))
    # A whole number, whose derivative is that of the formula.
    rest = lax.sub(lax.round(value), value)
    value = lax.add(value, lax.stop_gradient(select(whole, rest, constant_like(value, 0.0))))
    value = select(inside, value, zero)
    return select(empty, one, value) if repetition else value


def _choose(n: Any, k: Any) -> Any:
    return lax.exp(-log_beta(n - k + 1, k + 1)) / (n + 1)


# ---- beta functions ----------------------------------------------------------------------------


def betaln(a: Any, b: Any) -> Array:
    """Compute the logarithm of the absolute beta function, elementwise.

    `a` and `b` broadcast and are promoted to one float dtype. Raises `ArgumentError` if one is no
    array, `ShapeError` if they do not broadcast, and `DtypeError` for complex numbers.

    >>> spmd.scipy.special.betaln(1.0, np.array([1.0, 4.0]))
    Array([ 0.       , -1.3862944], dtype=float32)
    """
    a, b = reals_of_one_shape("betaln", a, b)
    return in_single(log_beta, a, b)


def beta(a: Any, b: Any) -> Array:
    """Compute the beta function, `gamma(a) gamma(b) / gamma(a + b)`, elementwise.

    `a` and `b` broadcast and are promoted to one float dtype. Raises `ArgumentError` if one is no
    array, `ShapeError` if they do not broadcast, and `DtypeError` for complex numbers.

    >>> spmd.scipy.special.beta(1.0, np.array([1.0, 4.0]))
    Array([1.  , 0.25], dtype=float32)
    """
    a, b = strong_reals("beta", a, b)
    return in_single(_beta, a, b)


def _beta(a: Any, b: Any) -> Any:
    sign = lax.mul(lax.mul(gammasgn(a), gammasgn(b)), gammasgn(lax.add(a, b)))
    return lax.mul(sign, lax.exp(log_beta(a, b)))


def betainc(a: Any, b: Any, x: Any) -> Array:
    """Compute the regularised incomplete beta function, elementwise.

    It is differentiable in `x` only. `a`, `b` and `x` broadcast and are promoted to one float
    dtype. Raises `ArgumentError` if one is no array, `ShapeError` if they do not broadcast, and
    `DtypeError` for complex numbers.

    >>> spmd.scipy.special.betainc(1.0, 2.0, np.array([0.0, 0.5, 1.0]))
    Array([0.  , 0.75, 1.  ], dtype=float32)
    """
    return lax.betainc(*reals_of_one_shape("betainc", a, b, x))


# ---- Bessel functions --------------------------------------------------------------------------

i0e = _function(
    "i0e",
    lax.bessel_i0e,
    "Compute `exp(-|x|)` times the modified Bessel function `i0`, elementwise.",
    ("np.array([0.0, 100.0])", "Array([1.        , 0.03994438], dtype=float32)"),
)
i1e = _function(
    "i1e",
    lax.bessel_i1e,
    "Compute `exp(-|x|)` times the modified Bessel function `i1`, elementwise.",
    ("np.array([0.0, 100.0])", "Array([0.        , 0.03974415], dtype=float32)"),
)


def i0(x: Any) -> Array:
    """Compute the modified Bessel function of the first kind of order 0, elementwise.

    `x` keeps its shape; integers become float32 and floats keep their dtype. Raises `ArgumentError`
    if `x` is no array, and `DtypeError` for complex numbers.

    >>> spmd.scipy.special.i0(np.array([0.0, 1.0]))
    Array([1.       , 1.2660658], dtype=float32)
    """
    return bessel_i0(*reals_of_one_shape("i0", x))


def i1(x: Any) -> Array:
    """Compute the modified Bessel function of the first kind of order 1, elementwise.

    `x` keeps its shape; integers become float32 and floats keep their dtype. Raises `ArgumentError`
    if `x` is no array, and `DtypeError` for complex numbers.

    >>> spmd.scipy.special.i1(np.array([0.0, 1.0]))
    Array([0.       , 0.5651591], dtype=float32)
    """
    return bessel_i1(*reals_of_one_shape("i1", x))


# ---- integrals ---------------------------------------------------------------------------------

exp1 = _function(
    "exp1",
    exp1_p.bind,
    "Compute the integral of `exp(-t) / t` from x to infinity, elementwise.",
    ("np.array([0.5, 1.0])", "Array([0.5597736 , 0.21938394], dtype=float32)"),
    strong_reals,
)
expi = _function(
    "expi",
    expi_p.bind,
    "Compute the integral of `exp(t) / t` from -infinity to x, elementwise.",
    ("np.array([0.5, 1.0])", "Array([0.4542199, 1.8951178], dtype=float32)"),
    strong_reals,
)
spence = _function(
    "spence",
    spence_p.bind,
    "Compute the dilogarithm, elementwise: the integral of `log(t) / (1 - t)` from 1 to x.",
    ("np.array([0.0, 1.0])", "Array([ 1.644934, -0.      ], dtype=float32)"),
    strong_reals,
)


def expn(n: Any, x: Any) -> Array:
    """Compute the generalised exponential integral of whole order `n`, elementwise.

    It is NaN for negative `n`, and differentiable in `x`. An array `n` that has no integer dtype
    raises `DtypeError`. `n` and `x` broadcast and are promoted to one float dtype. Raises
    `ArgumentError` if one is no array, `ShapeError` if they do not broadcast, and `DtypeError` for
    complex numbers.

    >>> spmd.scipy.special.expn(2, np.array([0.0, 1.0]))
    Array([1.        , 0.14849551], dtype=float32)
    """
    if not dtypes.is_integer(typeof(n).dtype) and not isinstance(n, (int, float)):
        raise DtypeError(f"expn: n must be integers, got {typeof(n)}; convert it with .astype(int)")
    n, x = strong_reals("expn", n, x)
    n = lax.stop_gradient(n)
    return select(lax.lt(n, constant_like(n, 0.0)), constant_like(x, np.nan), expn_p.bind(n, x))


# ---- numbers -----------------------------------------------------------------------------------


def bernoulli(n: int) -> Array:
    """Compute the first `n + 1` Bernoulli numbers (that of index 1 is -1/2).

    The result has shape (n + 1,) and the default float dtype; `n` is a Python integer. Raises
    `ArgumentError` if it is negative.

    >>> spmd.scipy.special.bernoulli(2)
    Array([ 1.        , -0.5       ,  0.16666667], dtype=float32)
    """
    n = operator.index(n)
    if n < 0:
        raise ArgumentError(f"bernoulli: n must not be negative, got {n}")
    numbers = [Fraction(1)]
    for m in range(1, n + 1):
        terms = (math.comb(m + 1, k) * numbers[k] for k in range(m))
        numbers.append(-sum(terms, Fraction(0)) / (m + 1))
    return snp.asarray(np.array([float(b) for b in numbers]), default_float())
