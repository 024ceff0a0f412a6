"""Powers, cube roots, remainders and neighbours on virtual vectors."""

from __future__ import annotations

import math

from spmd.compile.cpu.math.coefficients import CBRT_START, EXP_RANGE, LN2_HIGH, LN2_LOW, LOG_TAIL_64
from spmd.compile.cpu.math.exp import exp, expm1_reduced, reduce_exp
from spmd.compile.cpu.math.floats import Floats
from spmd.compile.cpu.math.log import log, normal_bits, or_special, split_log
from spmd.compile.cpu.math.trig import of_libm, unless_any

# ---- power --------------------------------------------------------------------------------------


def pow(m: Floats, x: str, y: str) -> str:
    """x**y with C's special cases.

    In f32 e**(y log|x|) in f64; in f64 the same with a logarithm of twice the digits, or libm's
    where there is no FMA to make that cheap.
    """
    e = m.emitter
    if m.bits == 64 and not m.has_fma:
        return e.call_lanes("pow", "double", x, y)
    magnitude = m.abs(x)
    if m.bits == 32:
        result = m.in_double(
            lambda wide, a, b: exp(wide, wide.exact_mul(b, log(wide, a))), magnitude, y
        )
    else:
        result = _power_64(m, magnitude, y)
    one, zero = m.const(1.0), m.const(0.0)
    result = m.select(m.is_("oeq", magnitude, one), one, result)
    whole = m.is_("oeq", e.intrinsic("trunc", m.element, y), y)
    half = m.exact_mul(y, m.const(0.5))
    half_whole = m.is_("oeq", e.intrinsic("trunc", m.element, half), half)
    not_half = e.binary("xor", "i1", half_whole, e.int(1, "i1"))
    odd = e.binary("and", "i1", whole, not_half)
    negative = e.compare("slt", m.integer, m.to_bits(x), m.int(0))
    result = m.select(e.binary("and", "i1", negative, odd), m.neg(result), result)
    below = e.binary("and", "i1", m.is_("olt", x, zero), m.is_("ogt", x, m.const(-math.inf)))
    broken = e.binary("and", "i1", below, e.binary("xor", "i1", whole, e.int(1, "i1")))
    result = m.select(broken, m.const(math.nan), result)
    result = m.select(m.is_("uno", x, y), m.const(math.nan), result)
    always_one = e.binary("or", "i1", m.is_("oeq", x, one), m.is_("oeq", y, zero))
    return m.select(always_one, one, result)


def _power_64(m: Floats, a: str, y: str) -> str:
    """a**y for a >= 0: e to the product of y and a logarithm in two parts."""
    high, low = _log_in_two(m, a)
    product = m.exact_mul(y, high)
    rest = m.fma(y, low, m.fma(y, high, m.neg(product)))
    outside = m.is_("ugt", m.abs(product), m.const(800.0))
    rest = m.select(outside, m.const(0.0), rest)
    r, whole = reduce_exp(m, m.clamp(product, *EXP_RANGE[64]))
    grown = expm1_reduced(m, m.exact_add(r, rest))
    return m.scale(m.exact_add(grown, m.const(1.0)), whole)


def _log_in_two(m: Floats, a: str) -> tuple[str, str]:
    """log(a) as a sum of two f64, to about 2**-67: 2s + 2/3 s**3 + ... with s = (f-1)/(f+1)."""
    one = m.const(1.0)
    given, bits = normal_bits(m, a)
    fraction, shifted = split_log(m, bits)
    e = m.of_small_int(m.int_op("ashr", shifted, m.int(m.mantissa)))
    above, below = m.exact_sub(fraction, one), m.exact_add(fraction, one)
    below_rest = m.exact_sub(fraction, m.exact_sub(below, one))
    inverse = m.div(one, below)
    s = m.exact_mul(above, inverse)
    missing = m.fma(m.neg(s), below_rest, m.fma(m.neg(s), below, above))
    s_rest = m.exact_mul(missing, inverse)
    z = m.exact_mul(s, s)
    z_rest = m.fma(m.exact_add(s, s), s_rest, m.fma(s, s, m.neg(z)))
    # 2/3 s**3 in two parts; all that follows fits into the second.
    third, third_rest = m.const(2 / 3), m.const(3.700743415417188e-17)
    p = m.exact_mul(z, third)
    p_rest = m.fma(z, third_rest, m.fma(z_rest, third, m.fma(z, third, m.neg(p))))
    cube = m.exact_mul(s, p)
    cube_rest = m.fma(s_rest, p, m.fma(s, p_rest, m.fma(s, p, m.neg(cube))))
    tail = m.exact_mul(m.exact_mul(s, z), m.exact_mul(z, m.poly(z, LOG_TAIL_64)))
    cube_rest = m.exact_add(cube_rest, tail)
    # e ln 2 has zeros below, so its product with e is exact. Larger terms first.
    whole, twice = m.exact_mul(e, m.const(LN2_HIGH[64])), m.exact_add(s, s)
    first = m.exact_add(whole, twice)
    rest = m.exact_sub(twice, m.exact_sub(first, whole))
    second = m.exact_add(first, cube)
    rest = m.exact_add(rest, m.exact_sub(cube, m.exact_sub(second, first)))
    rest = m.exact_add(m.fma(e, m.const(LN2_LOW[64]), rest), m.exact_add(s_rest, s_rest))
    rest = m.exact_add(rest, cube_rest)
    high = m.exact_add(second, rest)
    return or_special(m, a, given, high), m.exact_sub(rest, m.exact_sub(high, second))


# ---- cube root ----------------------------------------------------------------------------------


def cbrt(m: Floats, x: str) -> str:
    """Cube root: x**(-1/3) by iterations without division, and one exact correction."""
    a, third = m.abs(x), m.const(1 / 3)
    up = {32: 24, 64: 54}[m.bits]
    tiny = m.is_("olt", a, m.const(2.0 ** (1 - m.bias)))
    scaled = m.select(tiny, m.exact_mul(a, m.const(2.0**up)), a)
    bits = m.to_bits(scaled)
    fields = m.int_op("and", bits, m.int((1 << m.mantissa) - 1))
    fraction = m.of_bits(m.int_op("or", fields, m.int(m.bias << m.mantissa)))
    biased = m.int_op("lshr", bits, m.int(m.mantissa))
    e = m.of_small_int(m.int_op("sub", biased, m.int(m.bias)))
    # e = 3 * whole + left with left in 0, 1, 2.
    whole, exponent = m.nearest(m.exact_sub(e, m.const(1.0)), 1 / 3)
    left = m.fma(whole, m.const(-3.0), e)
    one, two = m.is_("oeq", left, m.const(1.0)), m.is_("oeq", left, m.const(2.0))

    def by_left(values: tuple[float, float, float]) -> str:
        result = m.select(one, m.const(values[1]), m.const(values[0]))
        return m.select(two, m.const(values[2]), result)

    n = m.exact_mul(fraction, by_left((1.0, 2.0, 4.0)))
    z = m.exact_mul(m.poly(fraction, CBRT_START), by_left((1.0, 2 ** (-1 / 3), 2 ** (-2 / 3))))
    for _ in range({32: 1, 64: 2}[m.bits]):
        square = m.exact_mul(z, z)
        h = m.fma(m.neg(m.exact_mul(n, z)), square, m.const(1.0))
        z = m.fma(m.exact_mul(z, h), m.fma(h, m.const(2 / 9), third), z)
    square = m.exact_mul(z, z)
    root = m.exact_mul(n, square)
    high = m.exact_mul(root, root)
    low = m.fma(root, root, m.neg(high))
    missing = m.fma(m.neg(root), low, m.fma(m.neg(root), high, n))
    root = m.fma(missing, m.exact_mul(square, third), root)
    root = m.exact_mul(root, m.power_of_two(exponent))
    root = m.select(tiny, m.exact_mul(root, m.const(2.0 ** (-up // 3))), root)
    zero, infinity = m.const(0.0), m.const(math.inf)
    usual = m.emitter.binary("and", "i1", m.is_("ogt", a, zero), m.is_("olt", a, infinity))
    return m.select(usual, m.copysign(root, x), m.exact_add(x, x))


# ---- remainder and neighbours -------------------------------------------------------------------


def rem(m: Floats, x: str, y: str) -> str:
    """C's fmod, exactly, as long as the whole quotient fits the mantissa; libm's beyond."""
    if not m.has_fma:
        return m.emitter.call_lanes("fmod" + ("f" if m.bits == 32 else ""), m.element, x, y)
    a, b = m.abs(x), m.abs(y)
    quotient = m.div(a, b)
    beyond = m.is_("ogt", quotient, m.const(2.0**m.mantissa))

    def fast() -> str:
        whole = m.emitter.intrinsic("trunc", m.element, quotient)
        # The rounded quotient may reach the next whole number, never fall below its own.
        left = m.fma(m.neg(whole), b, a)
        left = m.select(m.is_("olt", left, m.const(0.0)), m.exact_add(left, b), left)
        return m.select(m.is_("olt", a, b), x, m.copysign(left, x))

    return unless_any(m, beyond, of_libm(m, "fmod"), (x, y), fast)


def nextafter(m: Floats, x: str, y: str) -> str:
    """The float next to x in the direction of y."""
    bits = m.to_bits(x)
    outwards = m.emitter.binary(
        "xor", "i1", m.is_("olt", x, y), m.emitter.compare("slt", m.integer, bits, m.int(0))
    )
    step = m.emitter.select(outwards, m.integer, m.int(1), m.int(-1))
    moved = m.of_bits(m.int_op("add", bits, step))
    moved = m.select(m.is_("oeq", x, m.const(0.0)), m.copysign(m.of_bits(m.int(1)), y), moved)
    moved = m.select(m.is_("oeq", x, y), y, moved)
    return m.select(m.is_("uno", x, y), m.exact_add(x, y), moved)
