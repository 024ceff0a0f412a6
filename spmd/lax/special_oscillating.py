"""Functions with waves: Faddeeva's, and the Fresnel, sine and cosine integrals; Owen's T.

The one idea is that of `special_integrals`: one function of values in double precision, and a line
for the derivative. The public functions are in `spmd.scipy.special`.

Sources: Faddeeva's function by J. A. C. Weideman, "Computation of the complex error function"
(1994), and its continued fraction far out; the Fresnel integrals are the rational approximations
of Cephes (fresnl.c); Owen's T by Gauss-Legendre quadrature (Patefield and Tandy, 2000, method T5).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spmd.core.aval import typeof
from spmd.lax.arithmetic import add, div, mul, neg, square, sub
from spmd.lax.array import full_like
from spmd.lax.elementwise import cos, exp, sin
from spmd.lax.families import COMPLEX, FLOAT, binary, const, unary
from spmd.lax.logic import eq, select
from spmd.lax.special import erf, in_float64
from spmd.lax.special_integrals import dawsn_values, expn_fraction
from spmd.lax.special_values import erfc_values, polynomial

# ---- Faddeeva's function, and the scaled complementary error function --------------------------

_ROOT_PI = math.sqrt(math.pi)
_TERMS = 64


def _weideman_coefficients() -> tuple[float, tuple[float, ...]]:
    """The scale L and the coefficients of Weideman's expansion in (L + iz) / (L - iz)."""
    count = 2 * _TERMS
    scale = math.sqrt(_TERMS / math.sqrt(2))
    angles = np.arange(-count + 1, count) * math.pi / count
    t = scale * np.tan(angles / 2)
    values = np.concatenate([[0.0], np.exp(-t * t) * (scale * scale + t * t)])
    transformed = np.fft.fft(np.fft.fftshift(values)).real / (2 * count)
    return scale, tuple(map(float, transformed[1 : _TERMS + 1]))


_SCALE, _WEIDEMAN = _weideman_coefficients()
_FAR = 7.0  # from here on the continued fraction converges to double precision


def _upper_faddeeva(xp: Any, z: Any) -> Any:
    """exp(-z**2) erfc(-iz) for z with an imaginary part that is not negative."""
    near = xp.where(xp.abs(z) < _FAR, z, 0.0)
    below = _SCALE - 1j * near
    middle = polynomial((_SCALE + 1j * near) / below, _WEIDEMAN)
    middle = 2 * middle / below**2 + 1 / (_ROOT_PI * below)
    far = xp.where(xp.abs(z) < _FAR, _FAR, z)
    fraction = far
    for k in range(24, 0, -1):
        fraction = far - (k / 2) / fraction
    return xp.where(xp.abs(z) < _FAR, middle, 1j / (_ROOT_PI * fraction))


def _wofz_values(xp: Any, z: Any) -> Any:
    wide = z.astype(np.complex128)
    is_lower = wide.imag < 0
    out = _upper_faddeeva(xp, xp.where(is_lower, -wide, wide))
    out = xp.where(is_lower, 2 * xp.exp(-(wide**2)) - out, out)
    # On the real axis both parts keep all their digits: exp(-x**2) is lost in the expansion.
    x = wide.real
    on_axis = xp.exp(-x * x) + (2j / _ROOT_PI) * dawsn_values(xp, x)
    return xp.where(wide.imag == 0, on_axis, out).astype(z.dtype)


def _wofz_jvp(t: Any, z: Any, out: Any) -> Any:
    slope = add(mul(const(z, -2), mul(z, out)), const(z, 2j / _ROOT_PI))
    return mul(t, slope)


def _erfcx_values(xp: Any, x: Any) -> Any:
    """exp(x**2) erfc(x): by that up to 5, x squared in parts for its digits; then a fraction."""
    size = xp.abs(x)
    small = xp.minimum(size, 5.0)
    coarse = xp.rint(small * 16) / 16
    grown = xp.exp(coarse * coarse) * xp.exp((small - coarse) * (small + coarse))
    near = grown * erfc_values(xp, small)
    large = xp.maximum(size, 5.0)
    fraction = large
    for k in range(48, 0, -1):
        fraction = large + (k / 2) / fraction
    out = xp.where(size < 5.0, near, 1 / (_ROOT_PI * fraction))
    negative = xp.minimum(size, 27.0)
    coarse = xp.rint(negative * 16) / 16
    rest = (negative - coarse) * (negative + coarse)
    mirrored = 2 * xp.exp(coarse * coarse) * xp.exp(rest) - out
    return xp.where(xp.isnan(x), x, xp.where(x < 0, mirrored, out))


wofz_p = unary("wofz", accepts=COMPLEX, impl=_wofz_values, jvp=_wofz_jvp)
erfcx_p = unary(
    "erfcx",
    accepts=FLOAT,
    impl=in_float64(_erfcx_values),
    jvp=lambda t, x, out: mul(t, sub(mul(const(x, 2), mul(x, out)), const(x, 2 / _ROOT_PI))),
)

# ---- Fresnel integrals -------------------------------------------------------------------------

_SN = (
    3.18016297876567817986e11, -4.42979518059697779103e10, 2.54890880573376359104e9,
    -6.29741486205862506537e7, 7.08840045257738576863e5, -2.99181919401019853726e3,
)  # fmt: skip
_SD = (
    6.07366389490084639049e11, 2.24411795645340920940e10, 4.19320245898111231129e8,
    5.17343888770096400730e6, 4.55847810806532581675e4, 2.81376268889994315696e2, 1.0,
)  # fmt: skip
_CN = (
    9.99999999999999998822e-1, -2.05525900955013891793e-1, 1.88843319396703850064e-2,
    -6.45191435683965050962e-4, 9.50428062829859605134e-6, -4.98843114573573548651e-8,
)  # fmt: skip
_CD = (
    1.00000000000000000118e0, 4.12142090722199792936e-2, 8.68029542941784300606e-4,
    1.22262789024179030997e-5, 1.25001862479598821474e-7, 9.15439215774657478799e-10,
    3.99982968972495980367e-12,
)  # fmt: skip
_FN = (
    3.76329711269987889006e-20, 1.34283276233062758925e-16, 1.72010743268161828879e-13,
    1.02304514164907233465e-10, 3.05568983790257605827e-8, 4.63613749287867322088e-6,
    3.45017939782574027900e-4, 1.15220955073585758835e-2, 1.43407919780758885261e-1,
    4.21543555043677546506e-1,
)  # fmt: skip
_FD = (
    1.25443237090011264384e-20, 4.52001434074129701496e-17, 5.88754533621578410010e-14,
    3.60140029589371370404e-11, 1.12699224763999035261e-8, 1.84627567348930545870e-6,
    1.55934409164153020873e-4, 6.44051526508858611005e-3, 1.16888925859191382142e-1,
    7.51586398353378947175e-1, 1.0,
)  # fmt: skip
_GN = (
    1.86958710162783235106e-22, 8.36354435630677421531e-19, 1.37555460633261799868e-15,
    1.08268041139020870318e-12, 4.45344415861750144738e-10, 9.82852443688422223854e-8,
    1.15138826111884280931e-5, 6.84079380915393090172e-4, 1.87648584092575249293e-2,
    1.97102833525523411709e-1, 5.04442073643383265887e-1,
)  # fmt: skip
_GD = (
    1.86958710162783236342e-22, 8.39158816283118707363e-19, 1.38796531259578871258e-15,
    1.10273215066240270757e-12, 4.60680728146520428211e-10, 1.04314589657571990585e-7,
    1.27545075667729118702e-5, 8.14679107184306179049e-4, 2.53603741420338795122e-2,
    3.37748989120019970451e-1, 1.47495759925128324529e0, 1.0,
)  # fmt: skip
_HUGE = 36974.0  # beyond it the auxiliary functions are their first terms


def _quarter_waves(xp: Any, x: Any) -> tuple[Any, Any]:
    """Sine and cosine of pi x**2 / 2, with whole turns taken off before x is squared."""
    whole = xp.rint(x / 2)
    rest = x - 2 * whole
    turns = whole * rest
    phase = (math.pi / 2) * (4 * (turns - xp.rint(turns)) + rest * rest)
    return xp.sin(phase), xp.cos(phase)


def _fresnel(xp: Any, x: Any) -> tuple[Any, Any]:
    size = xp.abs(x)
    small = xp.minimum(size, 1.6)
    t = small**4
    s_near = small**3 * polynomial(t, _SN) / polynomial(t, _SD)
    c_near = small * polynomial(t, _CN) / polynomial(t, _CD)
    large = xp.where(xp.isfinite(size), xp.maximum(size, 1.6), 1.6)
    wave_s, wave_c = _quarter_waves(xp, large)
    t = math.pi * large * large
    u = 1 / (t * t)
    f = 1 - u * polynomial(u, _FN) / polynomial(u, _FD)
    g = polynomial(u, _GN) / polynomial(u, _GD) / t
    f, g = xp.where(large > _HUGE, 1.0, f), xp.where(large > _HUGE, 0.0, g)
    s_far = 0.5 - (f * wave_c + g * wave_s) / (math.pi * large)
    c_far = 0.5 + (f * wave_s - g * wave_c) / (math.pi * large)
    both = []
    for near, far in ((s_near, s_far), (c_near, c_far)):
        out = xp.where(size < 1.6, near, xp.where(xp.isinf(size), 0.5, far))
        both.append(xp.where(xp.isnan(x), x, xp.copysign(out, x)))
    return both[0], both[1]


def _phase(x: Any) -> Any:
    return mul(const(x, math.pi / 2), square(x))


fresnel_s_p = unary(
    "fresnel_s",
    accepts=FLOAT,
    impl=in_float64(lambda xp, x: _fresnel(xp, x)[0]),
    jvp=lambda t, x, out: mul(t, sin(_phase(x))),
)
fresnel_c_p = unary(
    "fresnel_c",
    accepts=FLOAT,
    impl=in_float64(lambda xp, x: _fresnel(xp, x)[1]),
    jvp=lambda t, x, out: mul(t, cos(_phase(x))),
)

# ---- sine and cosine integrals -----------------------------------------------------------------

_EULER_GAMMA = 0.57721566490153286061
_SINE = tuple((-1.0) ** k / ((2 * k + 1) * math.factorial(2 * k + 1)) for k in range(20))
_COSINE = tuple((-1.0) ** k / (2 * k * math.factorial(2 * k)) for k in range(1, 20))


def _sici(xp: Any, x: Any) -> tuple[Any, Any]:
    """Si and Ci of |x|: power series up to 4, the exponential integral of ix above."""
    size = xp.abs(x)
    small = xp.where(size < 4.0, size, 1.0)
    squared = small * small
    positive = xp.where(small > 0.0, small, 1.0)
    si_near = small * polynomial(squared, _SINE)
    ci_near = _EULER_GAMMA + xp.log(positive) + squared * polynomial(squared, _COSINE)
    large = xp.where((size >= 4.0) & xp.isfinite(size), size, 4.0)
    tail = xp.exp(-1j * large) * expn_fraction(xp, 1.0, 1j * large)  # E1(ix) = -Ci + i (Si - pi/2)
    si = xp.where(size < 4.0, si_near, math.pi / 2 + tail.imag)
    ci = xp.where(size < 4.0, ci_near, -tail.real)
    si = xp.where(xp.isinf(size), math.pi / 2, si)
    ci = xp.where(xp.isinf(size), 0.0, xp.where(size == 0.0, -np.inf, ci))
    return xp.where(xp.isnan(x), x, si), xp.where(xp.isnan(x), x, ci)


def _sine_integral_values(xp: Any, x: Any) -> Any:
    return xp.copysign(_sici(xp, x)[0], x)


def _cosine_integral_values(xp: Any, x: Any) -> Any:
    return xp.where(x == -np.inf, np.nan, _sici(xp, x)[1])


def _sine_over(x: Any) -> Any:
    """sin(x) / x, which is 1 at 0; the limit is no constant, so that it has a derivative."""
    zero = eq(x, const(x, 0))
    away = select(zero, full_like(x, 1), x)
    near = sub(const(x, 1), div(square(x), const(x, 6)))
    return select(zero, near, div(sin(away), away))


sine_integral_p = unary(
    "sine_integral",
    accepts=FLOAT,
    impl=in_float64(_sine_integral_values),
    jvp=lambda t, x, out: mul(t, _sine_over(x)),
)
cosine_integral_p = unary(
    "cosine_integral",
    accepts=FLOAT,
    impl=in_float64(_cosine_integral_values),
    jvp=lambda t, x, out: mul(t, div(cos(x), x)),
)

# ---- Owen's T ----------------------------------------------------------------------------------

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)
_DEVIATIONS = 9.0  # beyond so many of them the integrand is below rounding


def _owens_inner(xp: Any, h: Any, a: Any) -> Any:
    """T(h, a) for h >= 0 and a in [0, 1], by quadrature over where the integrand is."""
    end = xp.minimum(a, _DEVIATIONS / xp.maximum(h, 1e-3))
    total = xp.zeros_like(h * a)
    for node, weight in zip(_NODES, _WEIGHTS, strict=True):
        x = 0.5 * end * (1 + node)
        total = total + weight * xp.exp(-0.5 * (h * x) ** 2) / (1 + x * x)
    return xp.exp(-0.5 * h * h) * total * end / (4 * math.pi)


def _owens_t_values(xp: Any, h: Any, a: Any) -> Any:
    """Slopes above 1 by `T(h, a) + T(ah, 1 / a)`, which is known."""
    h, a = xp.broadcast_arrays(h, a)
    # At an infinite height nothing is above, and 0 times infinity does not arise.
    height, slope = xp.minimum(xp.abs(h), 1e8), xp.abs(a)
    steep = slope > 1.0
    turned = xp.where(steep, xp.where(xp.isinf(slope), 0.0, slope * height), height)
    part = _owens_inner(xp, turned, xp.where(steep, 1 / xp.where(steep, slope, 1.0), slope))
    one = erfc_values(xp, height * math.sqrt(0.5))
    product = xp.where(xp.isinf(slope) & (height == 0.0), 0.0, slope * height)
    other = erfc_values(xp, product * math.sqrt(0.5))
    both = xp.where(height == 0.0, 0.25, 0.25 * (one + other - one * other)) - part
    out = xp.where(steep, xp.where(xp.isinf(slope), 0.25 * one, both), part)
    return xp.where(xp.isnan(h) | xp.isnan(a), np.nan, xp.sign(a) * out)


def _owens_t_height(t: Any, h: Any, a: Any, out: Any) -> Any:
    bell = exp(mul(const(h, -0.5), square(h)))
    reach = erf(mul(const(h, math.sqrt(0.5)), mul(a, h)))
    return mul(t, mul(const(h, -0.5 / math.sqrt(2 * math.pi)), mul(bell, reach)))


def _owens_t_slope(t: Any, h: Any, a: Any, out: Any) -> Any:
    spread = add(const(a, 1), square(a))
    bell = exp(neg(mul(const(h, 0.5), mul(square(h), spread))))
    return mul(t, div(bell, mul(const(a, 2 * math.pi), spread)))


owens_t_p = binary(
    "owens_t",
    accepts=FLOAT,
    impl=in_float64(_owens_t_values),
    jvp=(_owens_t_height, _owens_t_slope),
)


def faddeeva(z: Any) -> Any:
    """exp(-z**2) erfc(-iz) of complex numbers."""
    return wofz_p.bind(z)


def is_complex(x: Any) -> bool:
    """Whether x holds complex numbers."""
    return typeof(x).dtype in COMPLEX
