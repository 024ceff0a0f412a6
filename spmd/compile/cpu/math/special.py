"""Error and gamma functions on virtual vectors.

For f32 most of them are computed in f64: f32 alone would lose too many digits on the way. The
polynomials are as short as f32 results allow, but for the gamma functions, which have zeros at
which all digits that a term lacks show.
"""

from __future__ import annotations

import math

from spmd.compile.cpu.math.coefficients_special import (
    DIGAMMA_CENTRE,
    DIGAMMA_FROM,
    DIGAMMA_ROOT,
    DIGAMMA_SERIES,
    ERF_CENTRE,
    ERF_INV_32,
    ERF_INV_64,
    ERF_SMALL,
    ERF_SMALL_64,
    ERF_SPLIT,
    ERF_TOP,
    ERFC_CENTRE,
    ERFC_POLY,
    ERFC_ROOT,
    ERFC_TOP,
    LGAMMA_AT_TWO,
    STIRLING,
)
from spmd.compile.cpu.math.exp import expm1_reduced, reduce_exp
from spmd.compile.cpu.math.floats import Floats
from spmd.compile.cpu.math.log import log, log1p
from spmd.compile.cpu.math.trig import sin_cos_of_pi

# ---- error functions --------------------------------------------------------------------------


def erf(m: Floats, x: str) -> str:
    """Error function: in f32 one of two polynomials, evaluated in one chain."""
    if m.bits == 64:
        return _erf_64(m, x)
    t = m.abs(x)
    t = m.select(m.is_("ogt", t, m.const(ERF_TOP)), m.const(ERF_TOP), t)
    small = m.is_("olt", t, m.const(ERF_SPLIT))
    variable = m.select(small, m.exact_mul(t, t), m.exact_sub(t, m.const(ERF_CENTRE)))
    value, *others = (
        m.select(small, m.const(below), m.const(above))
        for below, above in zip(ERF_SMALL, ERFC_ROOT, strict=True)
    )
    for coefficient in others:
        value = m.fma(value, variable, coefficient)
    square = m.exact_mul(value, value)
    fourth = m.exact_mul(square, square)
    factor, base = m.select(small, t, m.neg(fourth)), m.select(small, t, m.const(1.0))
    return m.copysign(m.fma(m.select(small, value, fourth), factor, base), x)


def _erf_64(m: Floats, x: str) -> str:
    t = m.abs(x)
    small = m.fma(t, m.poly(m.exact_mul(t, t), ERF_SMALL_64), t)
    capped = m.select(m.is_("ogt", t, m.const(6.0)), m.const(6.0), t)
    large = m.exact_sub(m.const(1.0), _erfc_positive(m, capped))
    return m.copysign(m.select(m.is_("olt", t, m.const(1.0)), small, large), x)


def _erfc_positive(m: Floats, t: str) -> str:
    """erfc(t) for 0 <= t <= ERFC_TOP, in f64: P((t - c) / (t + c)) / (t + c) * e**(-t*t)."""
    c = m.const(ERFC_CENTRE[m.wanted])
    below = m.exact_add(t, c)
    inverse = m.reciprocal(below)
    q = m.exact_mul(m.exact_sub(t, c), inverse)
    if m.wanted == 64:
        # q * (t + c) should be t - c: one correction takes the three roundings off.
        error = m.fma(m.exact_add(q, m.const(1.0)), m.neg(c), t)
        q = m.fma(inverse, m.fma(m.neg(q), t, error), q)
    above = m.poly(q, ERFC_POLY[m.wanted])
    ratio = m.exact_mul(above, inverse)
    if m.wanted == 32:
        r, whole = reduce_exp(m, m.neg(m.exact_mul(t, t)))
        grown = expm1_reduced(m, r)
    else:
        missing = m.fma(m.neg(ratio), t, m.fma(m.neg(ratio), c, above))
        ratio = m.fma(missing, inverse, ratio)
        # t * t in two parts: the square of t's upper bits, which is exact, and the rest.
        high = m.of_bits(m.int_op("and", m.to_bits(t), m.int(-1 << 27)))
        rest = m.exact_mul(m.exact_sub(high, t), m.exact_add(high, t))
        r, whole = reduce_exp(m, m.neg(m.exact_mul(high, high)))
        grown = expm1_reduced(m, m.exact_add(r, rest))
    return m.scale(m.fma(ratio, grown, ratio), whole)


def erfc(m: Floats, x: str) -> str:
    """1 - erf(x) without cancellation."""
    return m.in_double(_erfc, x)


def _erfc(m: Floats, x: str) -> str:
    one, t = m.const(1.0), m.abs(x)
    top = m.const(ERFC_TOP[m.wanted])
    tail = _erfc_positive(m, m.select(m.is_("ogt", t, top), top, t))
    negative = m.is_("olt", x, m.const(0.0))
    result = m.select(negative, m.exact_sub(m.const(2.0), tail), tail)
    if m.wanted == 32:
        return result
    # Up to 1, erf(x) = x + x P: from 1/2 on, 1 - x is exact and P is all that loses digits.
    part = m.poly(m.exact_mul(x, x), ERF_SMALL_64)
    near = m.exact_sub(one, m.fma(part, x, x))
    middle = m.fma(m.neg(part), x, m.exact_sub(one, x))
    near = m.select(m.is_("olt", t, m.const(0.5)), near, middle)
    return m.select(m.is_("olt", t, one), near, result)


def erf_inv(m: Floats, x: str) -> str:
    """Inverse error function."""
    return m.in_double(_erf_inv, x)


def _erf_inv(m: Floats, x: str) -> str:
    square, one = m.exact_mul(x, x), m.const(1.0)
    if m.wanted == 32:
        # Squares of f32 are exact in f64.
        w = m.neg(log(m, m.exact_sub(one, square)))
        root = m.in_float(lambda narrow, x: narrow.sqrt(x), w)
        centre = m.poly(m.exact_sub(w, m.const(2.5)), ERF_INV_32[0])
        tail = m.poly(m.exact_sub(root, m.const(3.0)), ERF_INV_32[1])
        factor = m.select(m.is_("olt", w, m.const(5.0)), centre, tail)
    else:
        # Near 1 the rounding of the square would be most of 1 - square: take it off again.
        lost = m.div(m.fma(x, x, m.neg(square)), m.exact_sub(one, square))
        w = m.sub(lost, log1p(m, m.neg(square)))
        root = m.sqrt(w)
        centre = m.poly(m.sub(w, m.const(3.125)), ERF_INV_64[0])
        middle = m.poly(m.sub(root, m.const(3.25)), ERF_INV_64[1])
        tail = m.poly(m.sub(root, m.const(5.0)), ERF_INV_64[2])
        factor = m.select(m.is_("olt", w, m.const(16.0)), middle, tail)
        factor = m.select(m.is_("olt", w, m.const(6.25)), centre, factor)
    at_end = m.is_("oeq", m.abs(x), one)
    return m.select(at_end, m.exact_mul(x, m.const(math.inf)), m.exact_mul(factor, x))


# ---- gamma functions --------------------------------------------------------------------------


def lgamma(m: Floats, x: str) -> str:
    """The logarithm of |gamma(x)|."""
    return m.in_double(_lgamma, x, wanted=64)


def _lgamma(m: Floats, x: str) -> str:
    e, zero, infinity = m.emitter, m.const(0.0), m.const(math.inf)
    a = m.abs(x)
    above = _lgamma_positive(m, a)
    # gamma(x) gamma(-x) = -pi / (x sin(pi x)). Next to zero both sides agree but for the sign.
    sine, _ = sin_cos_of_pi(m, a)
    reflected = log(m, m.div(m.const(math.pi), m.exact_mul(a, m.abs(sine))))
    reflected = m.exact_sub(reflected, above)
    plain = e.binary("or", "i1", m.is_("oge", x, zero), m.is_("olt", a, m.const(2.0**-60)))
    result = m.select(plain, above, reflected)
    pole = e.binary("and", "i1", m.is_("oeq", sine, zero), m.is_("olt", x, zero))
    result = m.select(pole, infinity, result)
    result = m.select(m.is_("oeq", a, infinity), infinity, result)
    return m.select(m.is_("uno", x, x), x, result)


def _lgamma_positive(m: Floats, a: str) -> str:
    """lgamma for a >= 0: a series at 2 and the recurrence below 8, Stirling's series beyond.

    One logarithm serves all: of a, or of the recurrence's product.
    """
    e, half, one = m.emitter, m.const(0.5), m.const(1.0)
    lowest, low = m.is_("olt", a, half), m.is_("olt", a, m.const(1.5))
    factor, y = one, a
    for _ in range(6):
        high = m.is_("ogt", y, m.const(2.5))
        lowered = m.exact_sub(y, one)
        factor = m.select(high, m.exact_mul(factor, lowered), factor)
        y = m.select(high, lowered, y)
    z = m.select(low, m.exact_sub(a, one), m.exact_sub(y, m.const(2.0)))
    z = m.select(lowest, a, z)
    factor = m.select(low, m.select(lowest, m.exact_mul(a, m.exact_add(a, one)), a), factor)
    far = m.is_("oge", a, m.const(8.0))
    logarithm = log(m, m.select(far, a, factor))
    signed = m.select(low, m.neg(logarithm), logarithm)
    near = m.fma(z, m.poly(z, LGAMMA_AT_TWO), signed)
    inverse = m.div(one, a)
    series = m.poly(m.exact_mul(inverse, inverse), STIRLING)
    series = m.fma(inverse, series, m.const(0.5 * math.log(2 * math.pi) - 0.5))
    beyond = m.fma(m.exact_sub(a, half), m.exact_sub(logarithm, one), series)
    return e.select(far, m.element, beyond, near)


def digamma(m: Floats, x: str) -> str:
    """Logarithmic derivative of the gamma function; NaN at its poles."""
    return m.in_double(_digamma, x, wanted=64)


def _digamma(m: Floats, x: str) -> str:
    e, zero, one = m.emitter, m.const(0.0), m.const(1.0)
    left = m.is_("ole", x, zero)
    above = _digamma_positive(m, m.select(left, m.exact_sub(one, x), x))
    # digamma(1 - x) - digamma(x) = pi / tan(pi x)
    sine, cosine = sin_cos_of_pi(m, x)
    angle = m.div(m.exact_mul(cosine, m.const(math.pi)), sine)
    result = m.select(left, m.exact_sub(above, angle), above)
    whole = m.is_("oeq", x, e.intrinsic("roundeven", m.element, x))
    pole = e.binary("and", "i1", whole, left)
    return m.select(pole, m.const(math.nan), result)


def _digamma_positive(m: Floats, v: str) -> str:
    """digamma for v > 0: a polynomial around its root in [1, 2], the recurrence, the series."""
    one, zero = m.const(1.0), m.const(0.0)
    low = m.is_("olt", v, one)
    y = m.select(low, m.exact_add(v, one), v)
    # The sum of reciprocals as one quotient.
    above, below = m.select(low, m.const(-1.0), zero), m.select(low, v, one)
    for _ in range(DIGAMMA_FROM - 2):
        high = m.is_("oge", y, m.const(2.0))
        lowered = m.exact_sub(y, one)
        above = m.select(high, m.fma(above, lowered, below), above)
        below = m.select(high, m.exact_mul(below, lowered), below)
        y = m.select(high, lowered, y)
    from_root = m.exact_sub(m.exact_sub(y, m.const(DIGAMMA_ROOT[0])), m.const(DIGAMMA_ROOT[1]))
    centre = m.poly(m.exact_sub(y, m.const(1.5)), DIGAMMA_CENTRE)
    near = m.fma(from_root, centre, m.div(above, below))
    inverse = m.div(one, v)
    square = m.exact_mul(inverse, inverse)
    series = m.fma(square, m.poly(square, DIGAMMA_SERIES), m.exact_mul(inverse, m.const(0.5)))
    far = m.exact_sub(log(m, v), series)
    return m.select(m.is_("oge", v, m.const(float(DIGAMMA_FROM))), far, near)
