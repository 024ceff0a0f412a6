"""Elementary functions as polynomial code on virtual vectors, for f32 and f64.

Every function takes `Floats` and operands and returns the operand of its result. Errors are about 1
to 2 ulp (the tests measure them); denormals, infinities, NaN and -0.0 are right. What is rare, or
costs more than it brings, calls libm lane by lane; `sin`, `cos` and `tan` do so for a vector that
holds an argument too large for their range reduction.

Coefficients: exp, log, sin, cos in f32 after Cephes, in f64 after fdlibm; erf after N. Juffa;
erf_inv after M. Giles.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .emit import Emitter
from .floats import Floats

LN2_HIGH = {32: 0.693359375, 64: 6.93147180369123816490e-01}
LN2_LOW = {32: -2.12194440e-4, 64: 1.90821492927058770002e-10}
LOG2_E = 1.4426950408889634

# exp(r) = 1 + r + r*r*P(r) on |r| <= ln(2)/2.
EXP_POLY = {
    32: (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    ),
    64: tuple(1 / math.factorial(k) for k in range(13, 1, -1)),
}
EXP_RANGE = {32: (-105.0, 89.0), 64: (-746.0, 710.0)}


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

LOG_POLY_32 = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
LOG_POLY_64 = (
    1.479819860511658591e-01,
    1.531383769920937332e-01,
    1.818357216161805012e-01,
    2.222219843214978396e-01,
    2.857142874366239149e-01,
    3.999999999940941908e-01,
    6.666666666666735130e-01,
)


def _split_log(m: Floats, x: str) -> tuple[str, str]:
    """Return (f, e): x = (1 + f) * 2**e with sqrt(1/2) <= 1 + f < sqrt(2), for positive finite
    x.""" smallest = m.const(2.0 ** (1 - m.bias)) tiny = m.is_("olt", x, smallest) x =
    m.select(tiny, m.exact_mul(x, m.const(2.0**m.mantissa)), x) root = {32: 0x3F3504F3, 64:
    0x3FE6A09E667F3BCD}[m.bits] moved = m.int_op("sub", m.to_bits(x), m.int(root)) exponent =
    m.of_int(m.int_op("ashr", moved, m.int(m.mantissa))) exponent = m.select(tiny, m.sub(exponent,
    m.const(float(m.mantissa))), exponent) low = m.int_op("and", moved, m.int((1 << m.mantissa) -
    1)) fraction = m.of_bits(m.int_op("add", low, m.int(root))) return m.exact_sub(fraction,
    m.const(1.0)), exponent


def _log_reduced(m: Floats, f: str, e: str) -> str:
    """log(1 + f) + e ln 2."""
    half_square = m.mul(m.mul(f, f), m.const(0.5))
    if m.bits == 32:
        square = m.mul(f, f)
        tail = m.mul(m.mul(m.poly(f, LOG_POLY_32), f), square)
        tail = m.fma(e, m.const(LN2_LOW[32]), tail)
        tail = m.fma(square, m.const(-0.5), tail)
        return m.fma(e, m.const(LN2_HIGH[32]), m.add(f, tail))
    s = m.div(f, m.add(f, m.const(2.0)))
    z = m.mul(s, s)
    rest = m.mul(z, m.poly(z, LOG_POLY_64))
    inner = m.fma(s, m.add(half_square, rest), m.mul(e, m.const(LN2_LOW[64])))
    inner = m.sub(m.sub(half_square, inner), f)
    return m.sub(m.exact_mul(e, m.const(LN2_HIGH[64])), inner)


def log(m: Floats, x: str) -> str:
    """Natural logarithm."""
    f, e = _split_log(m, x)
    result = _log_reduced(m, f, e)
    result = m.select(m.is_("ult", x, m.const(math.inf)), result, x)
    zero = m.const(0.0)
    result = m.select(m.is_("oeq", x, zero), m.const(-math.inf), result)
    return m.select(m.is_("olt", x, zero), m.const(math.nan), result)


def log1p(m: Floats, x: str) -> str:
    """log(1 + x); the rounding error of 1 + x is given back as a first-order term."""
    one = m.const(1.0)
    u = m.exact_add(x, one)
    lost = m.exact_sub(x, m.exact_sub(u, one))
    corrected = m.add(log(m, u), m.div(lost, u))
    ordinary = m.emitter.binary(
        "and", "i1", m.is_("one", u, m.const(0.0)), m.is_("olt", u, m.const(math.inf))
    )
    result = m.select(ordinary, corrected, log(m, u))
    return m.select(m.is_("oeq", x, m.const(0.0)), x, result)


def atanh(m: Floats, x: str) -> str:
    """log1p(2|x| / (1 - |x|)) / 2, with x's sign."""
    magnitude = m.abs(x)
    ratio = m.div(m.add(magnitude, magnitude), m.sub(m.const(1.0), magnitude))
    result = m.mul(m.const(0.5), log1p(m, ratio))
    return m.copysign(result, x)


# ---- trigonometry ---------------------------------------------------------------------------

# pi/2 in three parts: with FMA each as long as the element; without, short enough that products
# with small integers are exact.
HALF_PI = {
    (32, True): (1.57079637050628662109375, -4.37113900018624283e-8, -1.71512489330936e-15),
    (32, False): (1.5703125, 4.837512969970703125e-4, 7.549789948768648e-8),
    (64, True): (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591833e-33),
    (64, False): (1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624879595063154e-21),
}
TRIG_LIMIT = {(32, True): 71476.0, (32, False): 8192.0, (64, True): 1e6, (64, False): 1e5}
SIN_POLY = {
    32: (2.86567956e-6, -1.98559923e-4, 8.33338592e-3, -1.66666672e-1),
    64: (
        1.58969099521155010221e-10,
        -2.50507602534068634195e-08,
        2.75573137070700676789e-06,
        -1.98412698298579493134e-04,
        8.33333333332248946124e-03,
        -1.66666666666666324348e-01,
    ),
}
COS_POLY = {
    32: (2.44677067e-5, -1.38877297e-3, 4.16666567e-2),
    64: (
        -1.13596475577881948265e-11,
        2.08757232129817482790e-09,
        -2.75573143513906633035e-07,
        2.48015872894767294178e-05,
        -1.38888888888741095749e-03,
        4.16666666666666019037e-02,
    ),
}


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
    return e.set(
        f"phi {e.type(m.element)} [ {slow}, %{slow_end} ], [ {quick}, %{fast_end} ]"
    )


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

ERF_SMALL = (
    -5.96761703e-4,
    4.99119423e-3,
    -2.67681349e-2,
    1.12819925e-1,
    -3.76125336e-1,
    1.28379166e-1,
)
ERF_LARGE = (
    -1.72853470e-5,
    3.83197126e-4,
    -3.88396438e-3,
    2.42546219e-2,
    -1.06777877e-1,
    -6.34846687e-1,
    -1.28717512e-1,
)


def erf(m: Floats, x: str) -> str:
    """Error function: polynomials in f32, libm in f64."""
    if m.bits == 64:
        return m.emitter.call_lanes("erf", "double", x)
    t = m.abs(x)
    square = m.mul(x, x)
    t = m.select(m.is_("ogt", t, m.const(6.0)), m.const(6.0), t)
    decay = m.sub(m.mul(m.poly(t, ERF_LARGE), t), t)
    large = m.copysign(m.sub(m.const(1.0), exp(m, decay)), x)
    small = m.fma(m.poly(square, ERF_SMALL), x, x)
    return m.select(m.is_("ogt", t, m.const(0.927734375)), large, small)


ERF_INV_32 = (
    (
        2.81022636e-08,
        3.43273939e-07,
        -3.5233877e-06,
        -4.39150654e-06,
        0.00021858087,
        -0.00125372503,
        -0.00417768164,
        0.246640727,
        1.50140941,
    ),
    (
        -0.000200214257,
        0.000100950558,
        0.00134934322,
        -0.00367342844,
        0.00573950773,
        -0.0076224613,
        0.00943887047,
        1.00167406,
        2.83297682,
    ),
)
ERF_INV_64 = (
    (
        -3.6444120640178196996e-21,
        -1.685059138182016589e-19,
        1.2858480715256400167e-18,
        1.115787767802518096e-17,
        -1.333171662854620906e-16,
        2.0972767875968561637e-17,
        6.6376381343583238325e-15,
        -4.0545662729752068639e-14,
        -8.1519341976054721522e-14,
        2.6335093153082322977e-12,
        -1.2975133253453532498e-11,
        -5.4154120542946279317e-11,
        1.051212273321532285e-09,
        -4.1126339803469836976e-09,
        -2.9070369957882005086e-08,
        4.2347877827932403518e-07,
        -1.3654692000834678645e-06,
        -1.3882523362786468719e-05,
        0.0001867342080340571352,
        -0.00074070253416626697512,
        -0.0060336708714301490533,
        0.24015818242558961693,
        1.6536545626831027356,
    ),
    (
        2.2137376921775787049e-09,
        9.0756561938885390979e-08,
        -2.7517406297064545428e-07,
        1.8239629214389227755e-08,
        1.5027403968909827627e-06,
        -4.013867526981545969e-06,
        2.9234449089955446044e-06,
        1.2475304481671778723e-05,
        -4.7318229009055733981e-05,
        6.8284851459573175448e-05,
        2.4031110387097893999e-05,
        -0.0003550375203628474796,
        0.00095328937973738049703,
        -0.0016882755560235047313,
        0.0024914420961078508066,
        -0.0037512085075692412107,
        0.005370914553590063617,
        1.0052589676941592334,
        3.0838856104922207635,
    ),
    (
        -2.7109920616438573243e-11,
        -2.5556418169965252055e-10,
        1.5076572693500548083e-09,
        -3.7894654401267369937e-09,
        7.6157012080783393804e-09,
        -1.4960026627149240478e-08,
        2.9147953450901080826e-08,
        -6.7711997758452339498e-08,
        2.2900482228026654717e-07,
        -9.9298272942317002539e-07,
        4.5260625972231537039e-06,
        -1.9681778105531670567e-05,
        7.5995277030017761139e-05,
        -0.00021503011930044477347,
        -0.00013871931833623122026,
        1.0103004648645343977,
        4.8499064014085844221,
    ),
)


def erf_inv(m: Floats, x: str) -> str:
    """Inverse error function."""
    w = m.neg(log1p(m, m.neg(m.exact_mul(x, x))))
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


# ---- power --------------------------------------------------------------------------------------


def pow(m: Floats, x: str, y: str) -> str:
    """x**y. In f32 it is exp(y log|x|) computed in f64, with the special cases of C; f64 is
    libm's.""" e = m.emitter if m.bits == 64:
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
        erf_inv,
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
    "erfc": "erfc",
    "lgamma": "lgamma",
    "nextafter": "nextafter",
    "rem": "fmod",
}
HAS_BRANCHES = ("sin", "cos", "tan")


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
