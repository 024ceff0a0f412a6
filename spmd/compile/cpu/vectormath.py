"""Elementary functions as polynomial code on virtual vectors, for f32 and f64.

Every function takes `Floats` and operands and returns the operand of its result. Errors are about 1
to 3 ulp (the tests measure them); denormals, infinities, NaN and -0.0 are right. What is rare, or
costs more than it brings, calls libm lane by lane; `sin`, `cos` and `tan` do so for a vector that
holds an argument too large for their range reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from spmd.compile.cpu.coefficients import (
    COS_POLY,
    DIGAMMA_SERIES,
    DIGAMMA_STEPS,
    ERF_CENTRE,
    ERF_INV_32,
    ERF_INV_64,
    ERF_SMALL,
    ERF_SPLIT,
    ERF_TOP,
    ERFC_POLY,
    ERFC_ROOT,
    ERFC_TOP,
    EXP_POLY,
    EXP_RANGE,
    HALF_PI,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    LOG_CUBE_32,
    LOG_EVEN_32,
    LOG_FROM,
    LOG_ODD_32,
    LOG_POLY_64,
    SIN_POLY,
    TRIG_LIMIT,
)
from spmd.compile.cpu.emit import Emitter
from spmd.compile.cpu.floats import Floats

# ---- exponentials -------------------------------------------------------------------------


def _reduce_exp(m: Floats, x: str) -> tuple[str, str]:
    """Return (r, k) with x = k ln 2 + r, |r| <= ln(2)/2."""
    whole, exponent = m.nearest(x, LOG2_E)
    r = m.fma(whole, m.const(-LN2_HIGH[m.bits]), x)
    return m.fma(whole, m.const(-LN2_LOW[m.bits]), r), exponent


def _expm1_reduced(m: Floats, r: str) -> str:
    return m.fma(m.mul(r, r), m.poly(r, EXP_POLY[m.bits]), r)


def exp(m: Floats, x: str) -> str:
    """e**x."""
    r, exponent = _reduce_exp(m, m.clamp(x, *EXP_RANGE[m.bits]))
    return m.scale(m.add(_expm1_reduced(m, r), m.const(1.0)), exponent)


def exp2(m: Floats, x: str) -> str:
    """2**x; exact for whole x."""
    limit = float(m.bias + 2)
    x = m.clamp(x, -limit - m.mantissa, limit)
    whole, exponent = m.nearest(x, 1.0)
    r = m.mul(m.sub(x, whole), m.const(math.log(2)))
    return m.scale(m.add(_expm1_reduced(m, r), m.const(1.0)), exponent)


def expm1(m: Floats, x: str) -> str:
    """e**x - 1 without cancellation near zero."""
    low = {32: -25.0, 64: -45.0}[m.bits]
    r, exponent = _reduce_exp(m, m.clamp(x, low, EXP_RANGE[m.bits][1]))
    # Half of the scale first: 2**(k-1) is finite where 2**k is not.
    half = m.power_of_two(m.int_op("sub", exponent, m.int(1)))
    result = m.fma(half, _expm1_reduced(m, r), m.sub(half, m.const(0.5)))
    result = m.add(result, result)
    return m.select(m.is_("oeq", x, m.const(0.0)), x, result)


def tanh(m: Floats, x: str) -> str:
    """Hyperbolic tangent, by expm1(-2|x|): no overflow, full precision near zero."""
    magnitude = m.abs(x)
    top = {32: 10.0, 64: 22.0}[m.bits]
    capped = m.select(m.is_("ogt", magnitude, m.const(top)), m.const(top), magnitude)
    r, exponent = _reduce_exp(m, m.mul(capped, m.const(-2.0)))
    scale = m.power_of_two(exponent)
    grown = m.fma(scale, _expm1_reduced(m, r), m.sub(scale, m.const(1.0)))
    ratio = m.div(m.neg(grown), m.add(grown, m.const(2.0)))
    return m.copysign(ratio, x)


def logistic(m: Floats, x: str) -> str:
    """1 / (1 + e**-x)."""
    one = m.const(1.0)
    return m.div(one, m.add(one, exp(m, m.neg(x))))


def _exp_half(m: Floats, magnitude: str) -> str:
    """e**x / 2 for x >= 0, finite wherever the result is."""
    r, exponent = _reduce_exp(m, m.clamp(magnitude, 0.0, EXP_RANGE[m.bits][1] + 1.0))
    exponent = m.int_op("sub", exponent, m.int(1))
    return m.scale(m.add(_expm1_reduced(m, r), m.const(1.0)), exponent)


def cosh(m: Floats, x: str) -> str:
    """Hyperbolic cosine."""
    half = _exp_half(m, m.abs(x))
    return m.add(half, m.div(m.const(0.25), half))


def sinh(m: Floats, x: str) -> str:
    """Hyperbolic sine: from expm1 where that does not overflow, else from exp."""
    magnitude = m.abs(x)
    grown = expm1(m, magnitude)
    small = m.mul(m.const(0.5), m.add(grown, m.div(grown, m.add(grown, m.const(1.0)))))
    large = _exp_half(m, magnitude)
    result = m.select(m.is_("ogt", magnitude, m.const(20.0)), large, small)
    return m.copysign(m.select(m.is_("uno", x, x), x, result), x)


# ---- logarithms -----------------------------------------------------------------------------


def _split_log(m: Floats, bits: str) -> tuple[str, str]:
    """Return (fraction, e) with x = fraction * 2**e and LOG_FROM <= fraction < 2 * LOG_FROM.

    `bits` are those of a positive x; e is an integer, times 2**mantissa: its bits, not moved down.
    """
    start = m.int(LOG_FROM[m.bits])
    e = m.int_op("and", m.int_op("sub", bits, start), m.int(-1 << m.mantissa))
    return m.of_bits(m.int_op("sub", bits, e)), e


def _log_reduced(m: Floats, f: str, e: str) -> str:
    """log(1 + f) + e ln 2, with e as `_split_log` gives it."""
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
    half_square = m.mul(square, m.const(0.5))
    s = m.div(f, m.add(f, m.const(2.0)))
    z = m.mul(s, s)
    rest = m.mul(z, m.poly(z, LOG_POLY_64))
    inner = m.fma(s, m.add(half_square, rest), m.mul(e, low))
    inner = m.sub(m.sub(half_square, inner), f)
    return m.sub(m.exact_mul(e, high), inner)


def _log_or_special(m: Floats, x: str, bits: str, ordinary: str) -> str:
    """`ordinary` where x is positive and finite, else what log has there: -inf, inf or NaN."""
    last_finite = ((1 << (m.bits - m.mantissa - 1)) - 1 << m.mantissa) - 1
    before = m.int_op("sub", bits, m.int(1))
    usual = m.emitter.compare("ult", m.integer, before, m.int(last_finite))
    # All bits set if the sign is: a NaN. Infinity and NaN stay what they are.
    sign = m.int_op("ashr", bits, m.int(m.bits - 1))
    special = m.of_bits(m.int_op("or", bits, sign))
    special = m.select(m.is_("oeq", x, m.const(0.0)), m.const(-math.inf), special)
    return m.select(usual, ordinary, special)


def log(m: Floats, x: str) -> str:
    """Natural logarithm."""
    given = m.to_bits(x)
    grown = m.to_bits(m.exact_mul(x, m.const(2.0**m.mantissa)))
    grown = m.int_op("sub", grown, m.int(m.mantissa << m.mantissa))
    tiny = m.is_("olt", x, m.const(2.0 ** (1 - m.bias)))
    bits = m.emitter.select(tiny, m.integer, grown, given)
    fraction, e = _split_log(m, bits)
    result = _log_reduced(m, m.exact_sub(fraction, m.const(1.0)), e)
    return _log_or_special(m, x, given, result)


def log1p(m: Floats, x: str) -> str:
    """log(1 + x); the rounding error of 1 + x is given back to the fraction."""
    one = m.const(1.0)
    u = m.exact_add(x, one)
    lost = m.exact_sub(x, m.exact_sub(u, one))
    bits = m.to_bits(u)
    fraction, e = _split_log(m, bits)
    bias = m.int(m.bias << m.mantissa)
    down = m.of_bits(m.int_op("sub", bias, m.emitter.intrinsic("smin", m.integer, e, bias)))
    f = m.fma(lost, down, m.exact_sub(fraction, one))
    result = _log_or_special(m, u, bits, _log_reduced(m, f, e))
    return m.select(m.is_("oeq", x, m.const(0.0)), x, result)


def atanh(m: Floats, x: str) -> str:
    """log1p(2|x| / (1 - |x|)) / 2, with x's sign."""
    magnitude = m.abs(x)
    ratio = m.div(m.add(magnitude, magnitude), m.sub(m.const(1.0), magnitude))
    result = m.mul(m.const(0.5), log1p(m, ratio))
    return m.copysign(result, x)


# ---- trigonometry ---------------------------------------------------------------------------


def _sin_cos(m: Floats, x: str) -> tuple[str, str, str]:
    """Return sin and cos of the reduced argument, and its quadrant as an integer."""
    whole, quadrant = m.nearest(x, 2 / math.pi)
    r = x
    for part in HALF_PI[m.bits, m.has_fma]:
        r = m.fma(whole, m.const(-part), r)
    square = m.mul(r, r)
    sine = m.fma(m.mul(r, square), m.poly(square, SIN_POLY[m.bits]), r)
    fourth = m.mul(square, square)
    cosine = m.fma(square, m.const(-0.5), m.const(1.0))
    return sine, m.fma(fourth, m.poly(square, COS_POLY[m.bits]), cosine), quadrant


def _odd(m: Floats, quadrant: str, bit: int) -> str:
    masked = m.int_op("and", quadrant, m.int(bit))
    return m.emitter.compare("ne", m.integer, masked, m.int(0))


def _with_large(m: Floats, x: str, symbol: str, fast: Callable[[], str]) -> str:
    """Take libm's word for the whole vector if one argument is too large for `fast`."""
    e = m.emitter
    limit = m.const(TRIG_LIMIT[m.bits, m.has_fma])
    large = m.is_("ogt", m.abs(x), limit)
    if e.width > 1:
        lanes = e.type("i1")
        name = f"@llvm.vector.reduce.or.v{e.width}i1"
        e.module.declare(name, f"declare i1 {name}({lanes})")
        large = e.set(f"call i1 {name}({lanes} {large})")
    slow_label, fast_label, after = e.label(), e.label(), e.label()
    e.put(f"br i1 {large}, label %{slow_label}, label %{fast_label}")
    e.start(slow_label)
    slow = e.call_lanes(symbol + ("f" if m.bits == 32 else ""), m.element, x)
    slow_end = e.block
    e.branch(after)
    e.start(fast_label)
    quick = fast()
    fast_end = e.block
    e.branch(after)
    e.start(after)
    return e.set(f"phi {e.type(m.element)} [ {slow}, %{slow_end} ], [ {quick}, %{fast_end} ]")


def sin(m: Floats, x: str) -> str:
    """Sine."""

    def fast() -> str:
        sine, cosine, quadrant = _sin_cos(m, x)
        result = m.select(_odd(m, quadrant, 1), cosine, sine)
        result = m.select(_odd(m, quadrant, 2), m.neg(result), result)
        return m.select(m.is_("oeq", x, m.const(0.0)), x, result)

    return _with_large(m, x, "sin", fast)


def cos(m: Floats, x: str) -> str:
    """Cosine."""

    def fast() -> str:
        sine, cosine, quadrant = _sin_cos(m, x)
        result = m.select(_odd(m, quadrant, 1), sine, cosine)
        turned = m.int_op("add", quadrant, m.int(1))
        return m.select(_odd(m, turned, 2), m.neg(result), result)

    return _with_large(m, x, "cos", fast)


def tan(m: Floats, x: str) -> str:
    """Tangent."""

    def fast() -> str:
        sine, cosine, quadrant = _sin_cos(m, x)
        odd = _odd(m, quadrant, 1)
        above = m.select(odd, m.neg(cosine), sine)
        result = m.div(above, m.select(odd, sine, cosine))
        return m.select(m.is_("oeq", x, m.const(0.0)), x, result)

    return _with_large(m, x, "tan", fast)


# ---- error function ---------------------------------------------------------------------------


def erf(m: Floats, x: str) -> str:
    """Error function: in f32 one of two polynomials, evaluated in one chain; libm in f64."""
    if m.bits == 64:
        return m.emitter.call_lanes("erf", "double", x)
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


def erfc(m: Floats, x: str) -> str:
    """1 - erf(x) without cancellation: in f32 from (1 + 2t) e**(t*t) erfc(t), t = |x|.

    Close to zero that loses digits, and erf has them. In f64 libm's.
    """
    if m.bits == 64:
        return m.emitter.call_lanes("erfc", "double", x)
    one, two = m.const(1.0), m.const(2.0)
    t = m.abs(x)
    t = m.select(m.is_("ogt", t, m.const(ERFC_TOP)), m.const(ERFC_TOP), t)
    q = m.div(m.exact_sub(t, two), m.exact_add(t, two))
    ratio = m.div(m.exact_add(m.poly(q, ERFC_POLY), one), m.fma(t, two, one))
    # t * t in two parts: the square of t's upper bits, which is exact, and the rest.
    high = m.of_bits(m.int_op("and", m.to_bits(t), m.int(-1 << 12)))
    rest = m.exact_mul(m.exact_sub(high, t), m.exact_add(high, t))
    r, exponent = _reduce_exp(m, m.neg(m.exact_mul(high, high)))
    grown = _expm1_reduced(m, m.exact_add(r, rest))
    result = m.scale(m.fma(ratio, grown, ratio), exponent)
    result = m.select(m.is_("olt", x, m.const(0.0)), m.exact_sub(two, result), result)
    small = m.fma(m.poly(m.exact_mul(x, x), ERF_SMALL), x, x)
    return m.select(m.is_("olt", t, m.const(0.5)), m.exact_sub(one, small), result)


def erf_inv(m: Floats, x: str) -> str:
    """Inverse error function."""
    square = m.exact_mul(x, x)
    # Near 1 the rounding of the square would be most of 1 - square: take it off again.
    lost = m.div(m.fma(x, x, m.neg(square)), m.exact_sub(m.const(1.0), square))
    w = m.sub(lost, log1p(m, m.neg(square)))
    root = m.sqrt(w)
    if m.bits == 32:
        centre = m.poly(m.sub(w, m.const(2.5)), ERF_INV_32[0])
        tail = m.poly(m.sub(root, m.const(3.0)), ERF_INV_32[1])
        factor = m.select(m.is_("olt", w, m.const(5.0)), centre, tail)
    else:
        centre = m.poly(m.sub(w, m.const(3.125)), ERF_INV_64[0])
        middle = m.poly(m.sub(root, m.const(3.25)), ERF_INV_64[1])
        tail = m.poly(m.sub(root, m.const(5.0)), ERF_INV_64[2])
        factor = m.select(m.is_("olt", w, m.const(16.0)), middle, tail)
        factor = m.select(m.is_("olt", w, m.const(6.25)), centre, factor)
    at_end = m.is_("oeq", m.abs(x), m.const(1.0))
    return m.select(at_end, m.exact_mul(x, m.const(math.inf)), m.mul(factor, x))


def digamma(m: Floats, x: str) -> str:
    """Logarithmic derivative of the gamma function: recurrence up, then the asymptotic series."""
    one, half = m.const(1.0), m.const(0.5)
    left = m.is_("olt", x, half)
    z = m.select(left, m.exact_sub(one, x), x)
    shift = m.const(0.0)
    for step in range(DIGAMMA_STEPS):
        shift = m.exact_add(shift, m.div(one, m.exact_add(z, m.const(float(step)))))
    z = m.exact_add(z, m.const(float(DIGAMMA_STEPS)))
    inverse = m.div(one, m.exact_mul(z, z))
    series = m.mul(inverse, m.poly(inverse, DIGAMMA_SERIES))
    result = m.sub(m.sub(log(m, z), m.div(half, z)), m.add(series, shift))
    # Reflection: the period of the tangent is taken off before pi rounds it.
    nearest = m.emitter.intrinsic("roundeven", m.element, x)
    angle = m.exact_mul(m.exact_sub(x, nearest), m.const(math.pi))
    reflected = m.exact_sub(result, m.div(m.const(math.pi), tan(m, angle)))
    result = m.select(left, reflected, result)
    whole = m.emitter.binary("and", "i1", m.is_("oeq", x, nearest), left)
    return m.select(whole, m.const(math.nan), result)


# ---- power --------------------------------------------------------------------------------------


def pow(m: Floats, x: str, y: str) -> str:
    """x**y: libm's in f64; in f32 exp(y log|x|), computed in f64, with C's special cases."""
    e = m.emitter
    if m.bits == 64:
        return e.call_lanes("pow", "double", x, y)
    wide = Floats(e, "double")
    magnitude = e.cast("fpext", "float", "double", m.abs(x))
    product = wide.exact_mul(e.cast("fpext", "float", "double", y), log(wide, magnitude))
    result = e.cast("fptrunc", "double", "float", exp(wide, product))
    one, zero = m.const(1.0), m.const(0.0)
    result = m.select(m.is_("oeq", m.abs(x), one), one, result)
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


VECTOR_FUNCTIONS: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        exp,
        exp2,
        expm1,
        tanh,
        logistic,
        sinh,
        cosh,
        log,
        log1p,
        atanh,
        sin,
        cos,
        tan,
        erf,
        erfc,
        erf_inv,
        digamma,
        pow,
    )
}

# libm has these under the same names in C99, and everyone's libm keeps them below one ulp or so.
LIBM_FUNCTIONS = {
    "asin": "asin",
    "acos": "acos",
    "atan": "atan",
    "atan2": "atan2",
    "asinh": "asinh",
    "acosh": "acosh",
    "cbrt": "cbrt",
    "lgamma": "lgamma",
    "nextafter": "nextafter",
    "rem": "fmod",
}
HAS_BRANCHES = ("sin", "cos", "tan", "digamma")


def call_function(e: Emitter, name: str, element: str, *operands: str) -> str:
    """Write a vector function in place, or a call of one copy of it per module.

    A module that uses much vector math shares the copies (`Module.shares_math`): it compiles
    several times faster and runs as fast.
    """
    build = VECTOR_FUNCTIONS[name]
    if not e.module.shares_math and name not in HAS_BRANCHES:
        return build(Floats(e, element), *operands)
    symbol, kind = f"@{name}_{e.suffix(element)}", e.type(element)
    if symbol not in e.module.functions:
        inner = Emitter(e.module, e.width)
        names = [f"%x{number}" for number in range(len(operands))]
        params = ", ".join(f"{kind} {name}" for name in names)
        e.module.functions[symbol] = ""
        result = build(Floats(inner, element), *names)
        e.module.functions[symbol] = (
            f"define internal {kind} {symbol}({params}) #0 {{\n{inner.body_text()}\n"
            f"  ret {kind} {result}\n}}"
        )
    given = ", ".join(f"{kind} {operand}" for operand in operands)
    return e.set(f"call {kind} {symbol}({given})")
