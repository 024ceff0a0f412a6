"""Division by a divisor of a whole row: its reciprocal once, in two parts, then products.

The one idea: a division of registers keeps the divider busy for ten cycles, and for sixteen in f64;
five instructions of other kinds take three. `high + low` is the reciprocal to twice the digits of
the type, so that `x * high + x * low` is the quotient before its one rounding, but for 2**-47 of
it: all exact quotients are exact, and of the others one in a few million is the other neighbour.

`high` is rounded towards zero: both products of an infinity have its sign. Where the second would
be denormal, which takes a hundred times as long, it is left out (quotients that small are right to
2 ulp). Divisors whose reciprocal has no such parts are scaled first, and the quotients after.
"""

from __future__ import annotations

import math

from spmd.base.record import record
from spmd.compile.cpu.math.floats import Floats
from spmd.compile.native.llvm.vector_emitter import rounded

# By the bits of the element: exponents beyond which a divisor is scaled, by so many binary digits.
_FAR = {32: (100, 64), 64: (900, 512)}


@record
class Inverse:
    """1 / divisor, of a divisor times `scale`: operands of some width, or of every width.

    Up to `least` the low part counts for nothing. A `scale` of None is one.
    """

    high: str
    low: str
    least: str
    scale: str | None
    width: int


def inverse_of(m: Floats, divisor: str) -> Inverse:
    """Write the reciprocal of an operand; zeros, infinities and NaN have one, too."""
    exponent, digits = _FAR[m.bits]
    magnitude, one = m.abs(divisor), m.const(1.0)
    scale = m.select(m.is_("ogt", magnitude, m.const(2.0**exponent)), m.const(2.0**-digits), one)
    tiny = m.is_("olt", magnitude, m.const(2.0**-exponent))
    scale = m.select(tiny, m.const(2.0**digits), scale)
    divisor = m.exact_mul(divisor, scale)
    negative = m.neg(divisor)
    high = m.div(one, divisor)
    before = m.of_bits(m.int_op("sub", m.to_bits(high), m.int(1)))
    above = m.is_("olt", m.fma(negative, high, one), m.const(0.0))
    high = m.select(above, before, high)
    low = m.exact_mul(m.fma(negative, high, one), high)
    small = m.exact_mul(m.abs(divisor), m.const(_small(m)))
    # A low part of zero, or NaN, would make infinities NaN.
    least = m.select(m.is_("ueq", low, m.const(0.0)), m.const(math.inf), small)
    return Inverse(high, low, least, scale, m.emitter.width)


def _small(m: Floats) -> float:
    """Quotients from which on `x * low` is normal, unless the reciprocal is very nearly `high`."""
    return 2.0 ** (2 - m.bias + m.mantissa * 3 // 2)


def inverse_of_constant(m: Floats, divisor: float) -> Inverse | None:
    """The reciprocal of a constant; None where dividing by it is a product anyway, or too far."""
    exponent, _ = _FAR[m.bits]
    mantissa = math.frexp(divisor)[0]
    if abs(mantissa) in (0.0, 0.5) or not 2.0**-exponent < abs(divisor) < 2.0**exponent:
        return None
    from fractions import Fraction  # and decimals with it: few programs divide by constants

    exact = 1 / Fraction(divisor)
    high = rounded(float(exact), m.element)
    if abs(Fraction(high)) > abs(exact):
        high -= math.copysign(2.0 ** (math.frexp(high)[1] - m.mantissa - 1), high)
    low = rounded(float(exact - Fraction(high)), m.element)
    least = abs(divisor) * _small(m) if low else math.inf
    return Inverse(m.const(high), m.const(low), m.const(least), None, m.emitter.width)


def divide(m: Floats, x: str, by: Inverse) -> str:
    """x / divisor, at the emitter's width."""
    e, width = m.emitter, m.emitter.width

    def at_width(operand: str) -> str:
        return operand if by.width == width else e.splat(m.element, operand)

    counts = m.is_("ogt", m.abs(x), at_width(by.least))
    # A zero that keeps the sign of the zero that it is added to.
    low = m.select(counts, m.exact_mul(x, at_width(by.low)), m.const(-0.0))
    quotient = m.fma(x, at_width(by.high), low)
    return quotient if by.scale is None else m.exact_mul(quotient, at_width(by.scale))
