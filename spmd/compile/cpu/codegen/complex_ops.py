"""Complex operations on pairs of operands (real, imaginary).

Products are rounded one by one, never fused: z * conj(z) has to have an imaginary part of zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spmd.compile.cpu.math.floats import Floats
from spmd.compile.cpu.math.table import call_function
from spmd.compile.native.llvm.vector_emitter import Emitter

Pair = tuple[str, str]


def render(
    e: Emitter, op: str, parts: Sequence[tuple[str, ...]], element: str, attr: int | None
) -> tuple[str, ...]:
    """Write an operation that takes or gives complex values with parts of `element`."""
    if op == "complex":
        return (parts[0][0], parts[1][0])
    m = Floats(e, element)
    x: Pair = (parts[0][0], parts[0][1])
    y: Pair = (parts[-1][0], parts[-1][1])
    match op:
        case "add":
            return (m.add(x[0], y[0]), m.add(x[1], y[1]))
        case "sub":
            return (m.sub(x[0], y[0]), m.sub(x[1], y[1]))
        case "mul":
            return _multiply(m, x, y)
        case "div":
            return _divide(m, x, y)
        case "neg":
            return (m.neg(x[0]), m.neg(x[1]))
        case "conj":
            return (x[0], m.neg(x[1]))
        case "real":
            return (x[0],)
        case "imag":
            return (x[1],)
        case "eq":
            same = [m.is_("oeq", a, b) for a, b in zip(x, y, strict=True)]
            return (e.binary("and", "i1", *same),)
        case "ne":
            differ = [m.is_("une", a, b) for a, b in zip(x, y, strict=True)]
            return (e.binary("or", "i1", *differ),)
        case "abs":
            return (_modulus(m, x),)
        case "exp":
            return _exp(m, x)
        case "log":
            return _log_modulus(m, x), call_function(e, "atan2", element, x[1], x[0])
        case "sqrt":
            return _sqrt(m, x)
        case "integer_pow":
            return _integer_pow(m, x, attr or 0)
    raise AssertionError(op)


def _multiply(m: Floats, x: Pair, y: Pair) -> Pair:
    real = m.exact_sub(m.exact_mul(x[0], y[0]), m.exact_mul(x[1], y[1]))
    return real, m.exact_add(m.exact_mul(x[0], y[1]), m.exact_mul(x[1], y[0]))


def _divide(m: Floats, x: Pair, y: Pair) -> Pair:
    """Smith's quotient: scale by the larger part of the divisor, so nothing overflows early."""
    turned = m.is_("olt", m.abs(y[0]), m.abs(y[1]))
    large, small = m.select(turned, y[1], y[0]), m.select(turned, y[0], y[1])
    zero = m.is_("oeq", large, m.const(0.0))
    # 0/0 would spoil the infinities of a division by zero.
    ratio = m.select(zero, small, m.div(small, large))
    scale = m.exact_add(large, m.exact_mul(small, ratio))
    first, second = m.select(turned, x[1], x[0]), m.select(turned, x[0], x[1])
    real = m.exact_add(first, m.exact_mul(second, ratio))
    imag = m.exact_sub(second, m.exact_mul(first, ratio))
    imag = m.select(turned, m.neg(imag), imag)
    return m.div(real, scale), m.div(imag, scale)


def _modulus(m: Floats, x: Pair) -> str:
    """sqrt(re^2 + im^2) without overflow; infinite if a part is, even beside a NaN."""
    a, b = m.abs(x[0]), m.abs(x[1])
    less = m.is_("olt", a, b)
    large, small = m.select(less, b, a), m.select(less, a, b)
    ratio = m.div(small, large)
    length = m.mul(large, m.sqrt(m.fma(ratio, ratio, m.const(1.0))))
    length = m.select(m.is_("oeq", large, m.const(0.0)), small, length)
    infinity = m.const(math.inf)
    either = m.emitter.binary("or", "i1", m.is_("oeq", a, infinity), m.is_("oeq", b, infinity))
    return m.select(either, infinity, length)


def _exp(m: Floats, x: Pair) -> Pair:
    e = m.emitter
    # The length may be too large where its product with a small sine or cosine is not.
    limit, step = {32: (80.0, 64.0), 64: (700.0, 512.0)}[m.bits]
    large = m.is_("ogt", x[0], m.const(limit))
    moved = m.exact_sub(x[0], m.select(large, m.const(step), m.const(0.0)))
    length = call_function(e, "exp", m.element, moved)
    factor = m.select(large, m.const(math.exp(step)), m.const(1.0))
    real = m.exact_mul(length, call_function(e, "cos", m.element, x[1]))
    imag = m.exact_mul(length, call_function(e, "sin", m.element, x[1]))
    # A real argument has a real exponential, infinite or not.
    on_axis = m.is_("oeq", x[1], m.const(0.0))
    # Zero and infinite lengths keep their value in a direction that is not a number: C99's G.6.3.
    infinite = m.is_("oeq", m.abs(x[0]), m.const(math.inf))
    lost = e.binary("and", "i1", infinite, m.is_("uno", real, real))
    vanished = e.binary("and", "i1", lost, m.is_("olt", x[0], m.const(0.0)))
    real = m.exact_mul(m.select(e.binary("or", "i1", on_axis, lost), length, real), factor)
    imag = m.select(vanished, length, m.exact_mul(imag, factor))
    return real, m.select(on_axis, x[1], imag)


def _log_modulus(m: Floats, x: Pair) -> str:
    """log|z| as log(large) + log1p((small/large)**2) / 2, which does not overflow.

    Around |z| = 1 that would cancel; there it is log1p(|z|**2 - 1) / 2.
    """
    a, b, one = m.abs(x[0]), m.abs(x[1]), m.const(1.0)
    less = m.is_("olt", a, b)
    large, small = m.select(less, b, a), m.select(less, a, b)
    zero = m.is_("oeq", large, m.const(0.0))
    ratio = m.div(small, m.select(zero, one, large))
    above = m.exact_mul(m.exact_sub(large, one), m.exact_add(large, one))
    above = m.fma(small, small, above)
    near = m.is_("olt", m.abs(above), m.const(0.5))
    tail = call_function(
        m.emitter, "log1p", m.element, m.select(near, above, m.exact_mul(ratio, ratio))
    )
    whole = call_function(m.emitter, "log", m.element, m.select(near, one, large))
    result = m.exact_add(whole, m.exact_mul(tail, m.const(0.5)))
    infinity = m.const(math.inf)
    either = m.emitter.binary("or", "i1", m.is_("oeq", a, infinity), m.is_("oeq", b, infinity))
    result = m.select(m.is_("uno", x[0], x[1]), m.const(math.nan), result)
    return m.select(either, infinity, result)


def _sqrt(m: Floats, x: Pair) -> Pair:
    """The root with a non-negative real part; the branch cut takes the sign of im."""
    # Both parts are brought into a range where neither sums overflow nor halves underflow.
    a, b = m.abs(x[0]), m.abs(x[1])
    largest = m.select(m.is_("olt", a, b), b, a)
    tiny = m.is_("olt", largest, m.const(2.0 ** (m.mantissa + 2 - m.bias)))
    huge = m.is_("ogt", largest, m.const(2.0 ** (m.bias - 3)))
    power = m.mantissa + 5 & ~1
    up, back = m.const(2.0 ** (2 * power)), m.const(2.0**-power)
    one = m.const(1.0)
    factor = m.select(tiny, up, m.select(huge, m.const(2.0**-6), one))
    undo = m.select(tiny, back, m.select(huge, m.const(2.0**3), one))
    x = (m.exact_mul(x[0], factor), m.exact_mul(x[1], factor))
    a, length = m.abs(x[0]), _modulus(m, x)
    half = m.const(0.5)
    t = m.sqrt(m.exact_add(m.exact_mul(a, half), m.exact_mul(length, half)))
    zero = m.is_("oeq", t, m.const(0.0))
    other = m.select(zero, m.const(0.0), m.div(m.exact_mul(m.abs(x[1]), half), t))
    right = m.is_("oge", x[0], m.const(0.0))
    real, imag = m.select(right, t, other), m.select(right, other, t)
    real, imag = m.exact_mul(real, undo), m.exact_mul(imag, undo)
    infinite = m.is_("oeq", m.abs(x[1]), m.const(math.inf))
    imag = m.select(infinite, m.const(math.inf), imag)
    real = m.select(infinite, m.const(math.inf), real)
    return real, m.copysign(imag, x[1])


def _integer_pow(m: Floats, x: Pair, exponent: int) -> Pair:
    one = (m.const(1.0), m.const(0.0))
    result, power, left = one, x, abs(exponent)
    while left:
        if left & 1:
            result = power if result is one else _multiply(m, result, power)
        left >>= 1
        power = _multiply(m, power, power) if left else power
    return result if exponent >= 0 else _divide(m, one, result)
