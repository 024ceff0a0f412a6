"""Trigonometry and its inverses on virtual vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from spmd.compile.cpu.math.coefficients import (
    ASIN_POLY,
    ATAN_POLY,
    COS_POLY,
    HALF_PI,
    HALF_PI_SHORT,
    SHORT_LIMIT,
    SIN_POLY,
    TAN_POLY,
    TRIG_LIMIT,
)
from spmd.compile.cpu.math.floats import Floats


def _reduce_angle(m: Floats, x: str) -> tuple[str, str | None, str]:
    """Return (r, rest, quadrant) with x = quadrant pi/2 + r + rest, |r| <= pi/4 or a little more.

    For f32 that is done in f64: a few instructions for exact digits up to 2**44.
    """
    if m.bits == 64:
        whole, quadrant = m.nearest(x, 2 / math.pi)
        r = x
        for part in HALF_PI[m.has_fma]:
            r = m.fma(whole, m.const(-part), r)
        return r, None, quadrant
    e, wide = m.emitter, Floats(m.emitter, "double", wanted=32)
    exact, _, quadrant = _reduce_angle(wide, e.cast("fpext", "float", "double", x))
    r = e.cast("fptrunc", "double", "float", exact)
    rest = wide.exact_sub(exact, e.cast("fpext", "float", "double", r))
    quadrant = e.cast("trunc", "i64", "i32", quadrant)
    return r, e.cast("fptrunc", "double", "float", rest), quadrant


def _reduce_short(m: Floats, x: str) -> tuple[str, str]:
    """Return (r, quadrant) of an f32 argument up to SHORT_LIMIT, in f32: a third of the code."""
    whole, quadrant = m.nearest(x, 2 / math.pi)
    r = x
    for part in HALF_PI_SHORT:
        r = m.fma(whole, m.const(-part), r)
    return r, quadrant


def _is_short(m: Floats) -> bool:
    return m.bits == 32 and m.has_fma


def _sin_cos(m: Floats, x: str) -> tuple[str, str, str]:
    """Return sin and cos of the reduced argument, and its quadrant as an integer."""
    if _is_short(m):
        r, quadrant = _reduce_short(m, x)
    else:
        r, _, quadrant = _reduce_angle(m, x)
    square = m.mul(r, r)
    sine = m.fma(m.mul(r, square), m.poly(square, SIN_POLY[m.bits]), r)
    cosine = m.fma(square, m.poly(square, (*COS_POLY[m.bits], -0.5)), m.const(1.0))
    return sine, cosine, quadrant


def _odd(m: Floats, quadrant: str, bit: int) -> str:
    masked = m.int_op("and", quadrant, m.int(bit))
    return m.emitter.compare("ne", m.integer, masked, m.int(0))


def unless_any(
    m: Floats, rare: str, symbol: str, operands: Sequence[str], fast: Callable[[], str]
) -> str:
    """Take libm's word for the whole vector if the condition `rare` holds in one lane.

    `symbol` is a function of libm, or a value that points to one.
    """
    e = m.emitter
    if e.width > 1:
        lanes = e.type("i1")
        name = f"@llvm.vector.reduce.or.v{e.width}i1"
        e.module.declare(name, f"declare i1 {name}({lanes})")
        rare = e.set(f"call i1 {name}({lanes} {rare})")
    slow_label, fast_label, after = e.label(), e.label(), e.label()
    e.put(f"br i1 {rare}, label %{slow_label}, label %{fast_label}")
    e.start(slow_label)
    slow = e.call_lanes(symbol, m.element, *operands)
    slow_end = e.block
    e.branch(after)
    e.start(fast_label)
    quick = fast()
    fast_end = e.block
    e.branch(after)
    e.start(after)
    return e.set(f"phi {e.type(m.element)} [ {slow}, %{slow_end} ], [ {quick}, %{fast_end} ]")


def of_libm(m: Floats, name: str) -> str:
    """The name of libm's function for this type."""
    return name + ("f" if m.bits == 32 else "")


def _is_large(m: Floats, x: str, limit: float) -> str:
    return m.is_("ogt", m.abs(x), m.const(limit))


def _wave(m: Floats, x: str, turn: str, symbol: str) -> str:
    """sin(x + turn pi/2), where `turn` is an integer in all lanes."""

    def fast() -> str:
        sine, cosine, quadrant = _sin_cos(m, x)
        turned = m.int_op("add", quadrant, turn)
        # The reduction loses the sign of a zero.
        sine = m.select(m.is_("oeq", x, m.const(0.0)), x, sine)
        result = m.select(_odd(m, turned, 1), cosine, sine)
        return m.select(_odd(m, turned, 2), m.neg(result), result)

    # Arguments too large for the range reduction go to libm.
    limit = SHORT_LIMIT if _is_short(m) else TRIG_LIMIT[m.bits, m.has_fma]
    return unless_any(m, _is_large(m, x, limit), symbol, (x,), fast)


def sin(m: Floats, x: str) -> str:
    """Sine."""
    return _wave(m, x, m.int(0), of_libm(m, "sin"))


def cos(m: Floats, x: str) -> str:
    """Cosine."""
    return _wave(m, x, m.int(1), of_libm(m, "cos"))


def sin_or_cos(m: Floats, x: str, turn: str) -> str:
    """Sine for a scalar `turn` (i32) of 0, cosine for 1: one function for kernels with both."""
    e = m.emitter
    with e.at_width(1):
        pair = [e.external(of_libm(m, name), m.element, 1) for name in ("sin", "cos")]
        is_cosine = e.set(f"icmp ne i32 {turn}, 0")
        symbol = e.set(f"select i1 {is_cosine}, ptr {pair[1]}, ptr {pair[0]}")
        turn = turn if m.bits == 32 else e.cast("zext", "i32", m.integer, turn)
    return _wave(m, x, e.splat(m.integer, turn), symbol)


def sin_cos_of_pi(m: Floats, x: str) -> tuple[str, str]:
    """sin(pi x) and cos(pi x) up to one common sign, exact at whole numbers."""
    nearest = m.emitter.intrinsic("roundeven", m.element, x)
    angle = m.exact_mul(m.exact_sub(x, nearest), m.const(math.pi))
    sine, cosine, quadrant = _sin_cos(m, angle)
    odd, turned = _odd(m, quadrant, 1), m.neg(cosine)
    # A quarter turn up or down: the common sign does not matter.
    return m.select(odd, turned, sine), m.select(odd, sine, cosine)


def tan(m: Floats, x: str) -> str:
    """Tangent: an odd polynomial of the reduced argument, or minus its reciprocal."""

    def fast() -> str:
        r, rest, quadrant = _reduce_angle(m, x)
        square = m.exact_mul(r, r)
        cube, poly = m.exact_mul(r, square), m.poly(square, TAN_POLY[m.bits])
        # The slope is 1 + tan**2.
        rest = m.const(0.0) if rest is None else m.fma(rest, square, rest)
        tangent = m.exact_add(r, m.fma(cube, poly, rest))
        turned = m.div(m.const(-1.0), tangent)
        result = m.select(_odd(m, quadrant, 1), turned, tangent)
        return m.select(m.is_("oeq", x, m.const(0.0)), x, result)

    large = _is_large(m, x, TRIG_LIMIT[m.bits, m.has_fma])
    return unless_any(m, large, of_libm(m, "tan"), (x,), fast)


# ---- inverse trigonometry -------------------------------------------------------------------

_HALF_PI_LOW = {32: -4.37113883e-08, 64: 6.123233995736766e-17}
_PI_LOW = {32: -8.74227766e-08, 64: 1.2246467991473532e-16}
_QUARTER_PI_LOW = {32: 0.0, 64: 3.061616997868383e-17}
_TAN_EIGHTH_PI = 0.41421356237309503


def _half_pi_minus(m: Floats, x: str) -> str:
    """pi/2 - x for an x that is not more than pi/2."""
    low = m.exact_sub(x, m.const(_HALF_PI_LOW[m.bits]))
    return m.exact_sub(m.const(math.pi / 2), low)


def _asin_parts(m: Floats, x: str) -> tuple[str, str, str]:
    """Return (inside, base, rest): base + rest is asin|x| if |x| < 1/2, else half of acos|x|.

    Beyond 1/2 the angle is that of the sine sqrt((1 - |x|) / 2).
    """
    half, a = m.const(0.5), m.abs(x)
    inside = m.is_("olt", a, half)
    square = m.select(inside, m.exact_mul(x, x), m.fma(a, m.const(-0.5), half))
    base = m.select(inside, a, m.sqrt(square))
    rest = m.exact_mul(m.exact_mul(base, square), m.poly(square, ASIN_POLY[m.bits]))
    return inside, base, rest


def asin(m: Floats, x: str) -> str:
    """Inverse sine."""
    inside, base, rest = _asin_parts(m, x)
    twice, low = m.exact_add(base, base), m.const(_HALF_PI_LOW[m.bits])
    far = m.exact_sub(m.const(math.pi / 2), twice)
    lost = m.exact_sub(m.exact_sub(m.const(math.pi / 2), far), twice)
    far = m.exact_add(far, m.exact_sub(lost, m.exact_sub(m.exact_add(rest, rest), low)))
    return m.copysign(m.select(inside, m.exact_add(base, rest), far), x)


def acos(m: Floats, x: str) -> str:
    """Inverse cosine."""
    inside, base, rest = _asin_parts(m, x)
    angle = m.exact_add(base, rest)
    centre = _half_pi_minus(m, m.copysign(angle, x))
    twice = m.exact_add(angle, angle)
    from_pi = m.exact_sub(m.const(math.pi), m.exact_sub(twice, m.const(_PI_LOW[m.bits])))
    far = m.select(m.is_("olt", x, m.const(0.0)), from_pi, twice)
    return m.select(inside, centre, far)


def _atan_ratio(m: Floats, small: str, large: str) -> str:
    """atan(small / large) for 0 <= small <= large, large not 0."""
    if m.bits == 32:
        t = m.div(small, large)
        square = m.exact_mul(t, t)
        return m.fma(m.exact_mul(t, square), m.poly(square, ATAN_POLY[32]), t)
    # In f64 the interval is halved first: atan(t) = pi/4 + atan((t - 1) / (t + 1)).
    turned = m.is_("ogt", small, m.exact_mul(large, m.const(_TAN_EIGHTH_PI)))
    above = m.select(turned, m.exact_sub(small, large), small)
    below = m.select(turned, m.exact_add(small, large), large)
    t = m.div(above, below)
    square = m.exact_mul(t, t)
    rest = m.exact_mul(m.exact_mul(t, square), m.poly(square, ATAN_POLY[64]))
    low = m.select(turned, m.const(_QUARTER_PI_LOW[64]), m.const(0.0))
    base = m.select(turned, m.const(math.pi / 4), m.const(0.0))
    return m.exact_add(base, m.exact_add(m.exact_add(rest, low), t))


def atan(m: Floats, x: str) -> str:
    """Inverse tangent."""
    a, one = m.abs(x), m.const(1.0)
    swapped = m.is_("ogt", a, one)
    angle = _atan_ratio(m, m.select(swapped, one, a), m.select(swapped, a, one))
    return m.copysign(m.select(swapped, _half_pi_minus(m, angle), angle), x)


def atan2(m: Floats, y: str, x: str) -> str:
    """The angle of the point (x, y), with C's special cases."""
    e, one, zero = m.emitter, m.const(1.0), m.const(0.0)
    a, b = m.abs(y), m.abs(x)
    swapped = m.is_("ogt", a, b)
    small, large = m.select(swapped, b, a), m.select(swapped, a, b)
    # Sums of the largest numbers would overflow; a half loses nothing there.
    halved = m.is_("ogt", large, m.const(2.0 ** (m.bias - 2)))
    factor = m.select(halved, m.const(0.5), one)
    small, large = m.exact_mul(small, factor), m.exact_mul(large, factor)
    # 0/0 counts as 0 and inf/inf as 1.
    equal = e.binary(
        "and", "i1", m.is_("oeq", small, large), m.is_("oeq", small, m.const(math.inf))
    )
    small = m.select(equal, one, small)
    large = m.select(e.binary("or", "i1", equal, m.is_("oeq", large, zero)), one, large)
    angle = _atan_ratio(m, small, large)
    angle = m.select(swapped, _half_pi_minus(m, angle), angle)
    left = e.compare("slt", m.integer, m.to_bits(x), m.int(0))
    from_pi = m.exact_sub(m.const(math.pi), m.exact_sub(angle, m.const(_PI_LOW[m.bits])))
    angle = m.copysign(m.select(left, from_pi, angle), y)
    return m.select(m.is_("uno", x, y), m.const(math.nan), angle)
