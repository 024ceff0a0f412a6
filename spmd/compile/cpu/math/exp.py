"""Exponentials and hyperbolic functions on virtual vectors."""

from __future__ import annotations

import math

from spmd.compile.cpu.math.coefficients import (
    EXP_POLY,
    EXP_RANGE,
    EXP_TABLE,
    EXP_TABLE_LOST,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    SINH_SMALL,
    TANH_SMALL,
    TANH_SPLIT,
)
from spmd.compile.cpu.math.coefficients_piecewise import TANH_PIECES
from spmd.compile.cpu.math.floats import Floats
from spmd.compile.cpu.math.register_tables import in_pieces, look_up


def reduce_exp(m: Floats, x: str) -> tuple[str, str]:
    """Return (r, k) with x = k ln 2 + r, |r| <= ln(2)/2, k as `Floats.scale` takes it."""
    whole, _ = m.nearest(x, LOG2_E)
    r = m.fma(whole, m.const(-LN2_HIGH[m.bits]), x)
    return m.fma(whole, m.const(-LN2_LOW[m.bits]), r), whole


def expm1_reduced(m: Floats, r: str) -> str:
    return m.fma(m.mul(r, r), m.poly(r, EXP_POLY[m.wanted]), r)


def _power_by_table(m: Floats, shifted: str, k: str, r: str, fine: bool = False) -> str:
    """2**k e**r for k in sixteenths, to which `_sixteenths` has added, and |r| <= ln(2)/32.

    A `fine` one corrects the rounding of the table, too: 0.6 ulp instead of 1.05.
    """
    curved = m.fma(r, m.const(1 / 6), m.const(0.5))
    square = m.exact_mul(r, r)
    if fine:
        r = m.exact_add(r, look_up(m, "sixteenths_lost", EXP_TABLE_LOST, shifted))
    power = look_up(m, "sixteenths", EXP_TABLE, shifted)
    return m.scale_floor(m.fma(power, m.fma(square, curved, r), power), k)


def _sixteenths(m: Floats, x: str, factor: float) -> tuple[str, str]:
    """Round x * factor to sixteenths: (a float whose lowest four bits count them, the result)."""
    magic = m.const(1.5 * 2.0 ** (m.mantissa - 4))
    shifted = m.fma(x, m.const(factor), magic)
    return shifted, m.exact_sub(shifted, magic)


def _exp_by_table(m: Floats, x: str, fine: bool) -> str:
    """e**x where it does not overflow; garbage far below that."""
    shifted, k = _sixteenths(m, x, LOG2_E)
    r = m.fma(k, m.const(-LN2_LOW[32]), m.fma(k, m.const(-LN2_HIGH[32]), x))
    return _power_by_table(m, shifted, k, r, fine)


def exp(m: Floats, x: str, fine: bool = False) -> str:
    """e**x; with `fine` within 0.6 ulp where that is cheap."""
    low, high = EXP_RANGE[m.wanted]
    # A result that underflows takes processors a hundred times longer. Zeros are chosen instead: a
    # masked softmax is full of them.
    if m.has_tables:
        remains = m.is_("uge", x, m.const(low))
        x = m.select(m.is_("ogt", x, m.const(high)), m.const(high), x)
        return m.select(remains, _exp_by_table(m, x, fine), m.const(0.0))
    vanishes = m.is_("olt", x, m.const(low))
    x = m.select(vanishes, m.const(0.0), x)
    x = m.select(m.is_("ogt", x, m.const(high)), m.const(high), x)
    r, whole = reduce_exp(m, x)
    result = m.scale(m.add(expm1_reduced(m, r), m.const(1.0)), whole)
    return m.select(vanishes, m.const(0.0), result)


def exp2(m: Floats, x: str) -> str:
    """2**x; exact for whole x."""
    limit = float(m.bias + 2)
    x = m.clamp(x, -limit - m.mantissa, limit)
    if m.has_tables:
        shifted, k = _sixteenths(m, x, 1.0)
        return _power_by_table(m, shifted, k, m.mul(m.sub(x, k), m.const(math.log(2))))
    whole, _ = m.nearest(x, 1.0)
    r = m.mul(m.sub(x, whole), m.const(math.log(2)))
    return m.scale(m.add(expm1_reduced(m, r), m.const(1.0)), whole)


def expm1(m: Floats, x: str) -> str:
    """e**x - 1 without cancellation near zero."""
    low = {32: -25.0, 64: -45.0}[m.bits]
    r, whole = reduce_exp(m, m.clamp(x, low, EXP_RANGE[m.bits][1]))
    # Half of the scale first: 2**(k-1) is finite where 2**k is not.
    half = m.power_of_two(m.int_op("sub", m.integer_of(whole), m.int(1)))
    result = m.fma(half, expm1_reduced(m, r), m.sub(half, m.const(0.5)))
    result = m.add(result, result)
    return m.select(m.is_("oeq", x, m.const(0.0)), x, result)


def tanh(m: Floats, x: str) -> str:
    """Hyperbolic tangent: in pieces, or odd up to one half, then 1 - 2 / (e**2x + 1)."""
    if m.has_tables:
        return m.copysign(in_pieces(m, m.abs(x), TANH_PIECES), x)
    one, two = m.const(1.0), m.const(2.0)
    magnitude = m.abs(x)
    top = {32: 10.0, 64: 22.0}[m.bits]
    capped = m.select(m.is_("ogt", magnitude, m.const(top)), m.const(top), magnitude)
    r, whole = reduce_exp(m, m.exact_mul(capped, two))
    grown = m.scale(m.exact_add(expm1_reduced(m, r), one), whole, normal=True)
    large = m.exact_sub(one, m.div(two, m.exact_add(grown, one)))
    square = m.exact_mul(x, x)
    small = m.fma(m.exact_mul(magnitude, square), m.poly(square, TANH_SMALL[m.bits]), magnitude)
    result = m.select(m.is_("olt", magnitude, m.const(TANH_SPLIT)), small, large)
    return m.copysign(result, x)


def logistic(m: Floats, x: str) -> str:
    """1 / (1 + e**-x), from e**-|x|, which neither overflows nor loses a denormal result."""
    one = m.const(1.0)
    decayed = exp(m, m.neg(m.abs(x)), fine=True)
    above = m.select(m.is_("olt", x, m.const(0.0)), decayed, one)
    below = m.exact_add(decayed, one)
    ratio = m.div(above, below)
    # The rounding error of the sum; a line is near enough to 1 / below between 1 and 2.
    lost = m.exact_sub(decayed, m.exact_sub(below, one))
    inverse = m.fma(below, m.const(-0.4853), m.const(1.4571))
    return m.fma(m.neg(m.exact_mul(ratio, inverse)), lost, ratio)


def _exp_half(m: Floats, magnitude: str) -> str:
    """e**x / 2 for x >= 0, finite wherever the result is."""
    r, whole = reduce_exp(m, m.clamp(magnitude, 0.0, EXP_RANGE[m.bits][1] + 1.0))
    return m.scale(m.fma(expm1_reduced(m, r), m.const(0.5), m.const(0.5)), whole)


def cosh(m: Floats, x: str) -> str:
    """Hyperbolic cosine."""
    half = _exp_half(m, m.abs(x))
    return m.add(half, m.div(m.const(0.25), half))


def sinh(m: Floats, x: str) -> str:
    """Hyperbolic sine: an odd polynomial up to 1, then from half the exponential."""
    magnitude = m.abs(x)
    square = m.exact_mul(x, x)
    small = m.fma(m.exact_mul(magnitude, square), m.poly(square, SINH_SMALL[m.bits]), magnitude)
    half = _exp_half(m, magnitude)
    large = m.exact_sub(half, m.div(m.const(0.25), half))
    return m.copysign(m.select(m.is_("olt", magnitude, m.const(1.0)), small, large), x)
