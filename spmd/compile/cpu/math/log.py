"""Logarithms and inverse hyperbolic functions on virtual vectors."""

from __future__ import annotations

import math

from spmd.compile.cpu.math.coefficients import (
    LN2_HIGH,
    LN2_LOW,
    LOG_CUBE_32,
    LOG_EVEN_32,
    LOG_FROM,
    LOG_ODD_32,
    LOG_POLY_64,
)
from spmd.compile.cpu.math.coefficients_special import LOG_WIDE_32
from spmd.compile.cpu.math.floats import Floats


def split_log(m: Floats, bits: str) -> tuple[str, str]:
    """Return (fraction, e) with x = fraction * 2**e and LOG_FROM <= fraction < 2 * LOG_FROM.

    `bits` are those of a positive x; e is an integer, times 2**mantissa: its bits, not moved down.
    """
    start = m.int(LOG_FROM[m.bits])
    e = m.int_op("and", m.int_op("sub", bits, start), m.int(-1 << m.mantissa))
    return m.of_bits(m.int_op("sub", bits, e)), e


def _log_reduced(m: Floats, f: str, e: str) -> str:
    """log(1 + f) + e ln 2, with e as `split_log` gives it."""
    e, unit = m.of_int(e), 2.0**-m.mantissa
    high, low = m.const(LN2_HIGH[m.bits] * unit), m.const(LN2_LOW[m.bits] * unit)
    square = m.mul(f, f)
    if m.bits == 32:
        # Even and odd powers apart: a shorter chain.
        tail = m.fma(m.poly(square, LOG_ODD_32), f, m.poly(square, LOG_EVEN_32))
        tail = m.fma(m.fma(tail, f, m.const(LOG_CUBE_32)), f, m.const(-0.5))
        if m.has_fma:
            return m.fma(e, m.const(math.log(2) * unit), m.fma(tail, square, f))
        tail = m.fma(e, low, m.mul(tail, square))
        return m.fma(e, high, m.add(f, tail))
    if m.wanted == 32:
        tail = m.fma(f, m.poly(f, LOG_WIDE_32), m.const(-0.5))
        return m.fma(e, m.const(math.log(2) * unit), m.fma(tail, square, f))
    half_square = m.mul(square, m.const(0.5))
    s = m.div(f, m.add(f, m.const(2.0)))
    z = m.mul(s, s)
    rest = m.mul(z, m.poly(z, LOG_POLY_64))
    inner = m.fma(s, m.add(half_square, rest), m.mul(e, low))
    inner = m.sub(m.sub(half_square, inner), f)
    return m.sub(m.exact_mul(e, high), inner)


def or_special(m: Floats, x: str, bits: str, ordinary: str) -> str:
    """`ordinary` where x is positive and finite, else the logarithm's -inf, inf or NaN."""
    last_finite = ((1 << (m.bits - m.mantissa - 1)) - 1 << m.mantissa) - 1
    before = m.int_op("sub", bits, m.int(1))
    usual = m.emitter.compare("ult", m.integer, before, m.int(last_finite))
    # All bits set if the sign is: a NaN. Infinity and NaN stay.
    sign = m.int_op("ashr", bits, m.int(m.bits - 1))
    special = m.of_bits(m.int_op("or", bits, sign))
    special = m.select(m.is_("oeq", x, m.const(0.0)), m.const(-math.inf), special)
    return m.select(usual, ordinary, special)


def normal_bits(m: Floats, x: str) -> tuple[str, str]:
    """Return the bits of a positive x, and those that a denormal would have with more exponent."""
    given = m.to_bits(x)
    grown = m.to_bits(m.exact_mul(x, m.const(2.0**m.mantissa)))
    grown = m.int_op("sub", grown, m.int(m.mantissa << m.mantissa))
    tiny = m.is_("olt", x, m.const(2.0 ** (1 - m.bias)))
    return given, m.emitter.select(tiny, m.integer, grown, given)


def log(m: Floats, x: str) -> str:
    """Natural logarithm."""
    given, bits = normal_bits(m, x)
    fraction, e = split_log(m, bits)
    result = _log_reduced(m, m.exact_sub(fraction, m.const(1.0)), e)
    return or_special(m, x, given, result)


def log1p(m: Floats, x: str) -> str:
    """log(1 + x)."""
    return _log1p_sum(m, x, None)


def _log1p_sum(m: Floats, x: str, rest: str | None) -> str:
    """log(1 + x + rest) for a tiny `rest`; the error of 1 + x is given back to the fraction."""
    one = m.const(1.0)
    u = m.exact_add(x, one)
    lost = m.exact_sub(x, m.exact_sub(u, one))
    if rest is not None:
        lost = m.exact_add(lost, rest)
    bits = m.to_bits(u)
    fraction, e = split_log(m, bits)
    bias = m.int(m.bias << m.mantissa)
    down = m.of_bits(m.int_op("sub", bias, m.emitter.intrinsic("smin", m.integer, e, bias)))
    f = m.fma(lost, down, m.exact_sub(fraction, one))
    result = or_special(m, u, bits, _log_reduced(m, f, e))
    return m.select(m.is_("oeq", x, m.const(0.0)), x, result)


def atanh(m: Floats, x: str) -> str:
    """log1p(2|x| / (1 - |x|)) / 2, with x's sign."""
    one, a = m.const(1.0), m.abs(x)
    above, below = m.exact_add(a, a), m.exact_sub(one, a)
    ratio = m.div(above, below)
    # The rounding errors of difference and quotient; 1 / (1 - a) is 1 + ratio / 2.
    lost = m.exact_sub(m.exact_sub(one, below), a)
    missing = m.fma(m.neg(ratio), lost, m.fma(m.neg(ratio), below, above))
    rest = m.exact_mul(missing, m.fma(ratio, m.const(0.5), one))
    rest = m.select(m.is_("olt", a, one), rest, m.const(0.0))
    return m.copysign(m.exact_mul(m.const(0.5), _log1p_sum(m, ratio, rest)), x)


def _log1p_or_huge(m: Floats, magnitude: str, x: str, rest: str) -> str:
    """log(1 + x + rest), or log(2 * magnitude) where that is as good and squares may overflow."""
    huge = m.is_("ogt", magnitude, m.const(2.0 ** (m.mantissa + 5)))
    argument = m.select(huge, magnitude, x)
    result = _log1p_sum(m, argument, m.select(huge, m.const(0.0), rest))
    return m.exact_add(result, m.select(huge, m.const(math.log(2)), m.const(0.0)))


def asinh(m: Floats, x: str) -> str:
    """log1p(|x| + x*x / (1 + sqrt(1 + x*x))), with x's sign."""
    one, a = m.const(1.0), m.abs(x)
    square = m.exact_mul(x, x)
    above = m.div(square, m.exact_add(m.sqrt(m.exact_add(square, one)), one))
    total = m.exact_add(a, above)
    rest = m.exact_sub(above, m.exact_sub(total, a))
    tiny = m.is_("olt", a, m.const(2.0 ** -(m.mantissa // 2 + 2)))
    return m.copysign(m.select(tiny, a, _log1p_or_huge(m, a, total, rest)), x)


def acosh(m: Floats, x: str) -> str:
    """log1p(t + sqrt(2t + t*t)) with t = x - 1; NaN below 1."""
    one = m.const(1.0)
    t = m.exact_sub(x, one)
    twice = m.exact_add(t, t)
    square = m.fma(t, t, twice)
    root = m.sqrt(square)
    # The rounding errors of square, root and sum. (Below 1 the root is NaN; at 1 it is zero.)
    lost = m.exact_add(m.fma(t, t, m.exact_sub(twice, square)), m.fma(m.neg(root), root, square))
    lost = m.div(lost, m.select(m.is_("oeq", root, m.const(0.0)), one, m.exact_add(root, root)))
    total = m.exact_add(root, t)
    rest = m.exact_add(lost, m.exact_sub(t, m.exact_sub(total, root)))
    result = _log1p_or_huge(m, x, total, rest)
    return m.select(m.is_("olt", x, one), m.const(math.nan), result)
