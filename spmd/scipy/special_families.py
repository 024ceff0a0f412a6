"""Special functions of several parameters or results: Bessel, spherical harmonics, hypergeometric.

All are public in `spmd.scipy.special`. Those of one real argument are primitives
(`lax/special_oscillating.py`, `lax/special_hypergeometric.py`); Bessel functions and spherical
harmonics are recurrences in ordinary operations, which are compiled.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import lax
from spmd import numpy as snp
from spmd.base.errors import ArgumentError
from spmd.core.aval import typeof
from spmd.core.trace import Tracer
from spmd.lax.special_hypergeometric import hyp1f1_p, hyp2f1_p
from spmd.lax.special_oscillating import (
    cosine_integral_p,
    erfcx_p,
    faddeeva,
    fresnel_c_p,
    fresnel_s_p,
    is_complex,
    owens_t_p,
    sine_integral_p,
)
from spmd.numpy.promotion import constant_like, promote_args_inexact
from spmd.numpy.promotion import promote_dtypes_complex as _to_complex
from spmd.scipy.special_entropies import reals_of_one_shape, strong_reals

if TYPE_CHECKING:
    from spmd.sharding.array import Array


def in_single(f: Any, *xs: Any) -> Any:
    """A formula of several steps that loses digits, in float32 for 16-bit and smaller floats."""
    dtype = typeof(xs[0]).dtype
    if dtype.itemsize >= 4:
        return f(*xs)
    out = f(*(lax.convert_element_type(x, np.float32) for x in xs))
    return lax.convert_element_type(out, dtype)


# ---- logarithm of the beta function ------------------------------------------------------------

# Of log gamma's asymptotic series in 1 / x, 1 / x**3, ...
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)


def _remainder(x: Any) -> Any:
    """The difference of log gamma and Stirling's formula, for `x` of 10 and more."""
    inverse = 1 / x
    square = inverse * inverse
    total = constant_like(x, 0.0)
    for term in reversed(_STIRLING):
        total = term + square * total
    return total * inverse


def log_beta(a: Any, b: Any) -> Any:
    """The logarithm of `abs(beta(a, b))`, where log gammas of large numbers must not cancel.

    With `b` the larger, `log gamma(b) - log gamma(a + b)` is one formula after Stirling's, as in
    Didonato and Morris (1992).
    """
    a, b = snp.minimum(a, b), snp.maximum(a, b)
    c = a + b
    plain = lax.sub(lax.add(lax.lgamma(a), lax.lgamma(b)), lax.lgamma(c))
    large = (b >= 10) & (c >= 10) & snp.isfinite(c)
    # Values that a formula is not for must not reach its derivative.
    x, y = snp.where(large, a, 10.0), snp.where(large, b, 10.0)
    ratio = x / y
    rest = _remainder(y) - _remainder(x + y)
    one = rest + x - (y - 0.5) * snp.log1p(ratio) - x * snp.log(x + y)
    both = large & (a >= 10)
    u, v = snp.where(both, a, 10.0), snp.where(both, b, 10.0)
    two = (
        (_remainder(u) + _remainder(v) - _remainder(u + v))
        + 0.5 * (math.log(2 * math.pi) - snp.log(v))
        + (u - 0.5) * snp.log(u / (u + v))
        - v * snp.log1p(u / v)
    )
    small = lax.lgamma(snp.where(large & ~both, a, 1.0)) + one
    return snp.where(both, two, snp.where(large, small, plain))


# ---- error functions ---------------------------------------------------------------------------


def wofz(z: Any) -> Array:
    """Compute the Faddeeva function `exp(-z**2) erfc(-iz)`, elementwise.

    The shape stays; the result is complex64 for 32-bit dtypes and integers, complex128 for 64-bit
    floats. Raises `ArgumentError` if `z` is no array.

    >>> spmd.scipy.special.wofz(0.0)
    Array(1.+0.j, dtype=complex64)
    """
    (z,) = _to_complex(*promote_args_inexact("wofz", z))
    return faddeeva(lax.convert_element_type(z, typeof(z).dtype))


def erfcx(x: Any) -> Array:
    """Compute the scaled complementary error function `exp(x**2) erfc(x)`, elementwise.

    It is about `1 / (sqrt(pi) x)` where `erfc(x)` has long vanished. `x` keeps its shape and its
    float or complex dtype; integers become float32. Raises `ArgumentError` if `x` is no array.

    >>> spmd.scipy.special.erfcx(100.0)
    Array(0.00564161, dtype=float32)
    """
    (x,) = promote_args_inexact("erfcx", x)
    if is_complex(x):
        return faddeeva(lax.complex(lax.neg(lax.imag(x)), lax.real(x)))
    return erfcx_p.bind(lax.convert_element_type(x, typeof(x).dtype))


# ---- integrals with two results ----------------------------------------------------------------


def fresnel(x: Any) -> tuple[Array, Array]:
    """Compute the Fresnel integrals S and C, elementwise.

    They are the integrals of sin and of cos of `pi t**2 / 2` from 0 to `x`. Both have the shape of
    `x`; integers become float32 and floats keep their dtype. Raises `ArgumentError` if `x` is no
    array, and `DtypeError` for complex numbers.

    >>> s, c = spmd.scipy.special.fresnel(1.0)
    >>> round(float(s), 4), round(float(c), 4)
    (0.4383, 0.7799)
    """
    (x,) = strong_reals("fresnel", x)
    return fresnel_s_p.bind(x), fresnel_c_p.bind(x)


def sici(x: Any) -> tuple[Array, Array]:
    """Compute the sine integral Si and the cosine integral Ci, elementwise.

    Of negative `x`, Ci is that of its absolute value. Both have the shape of `x`; integers become
    float32 and floats keep their dtype. Raises `ArgumentError` if `x` is no array, and `DtypeError`
    for complex numbers.

    >>> si, ci = spmd.scipy.special.sici(1.0)
    >>> round(float(si), 4), round(float(ci), 4)
    (0.9461, 0.3374)
    """
    (x,) = strong_reals("sici", x)
    return sine_integral_p.bind(x), cosine_integral_p.bind(x)


def owens_t(h: Any, a: Any) -> Array:
    """Compute Owen's T, elementwise.

    It is the probability of `X > h` and `0 < Y < a X` for independent standard normals X and Y. `h`
    and `a` broadcast and are promoted to one float dtype. Raises `ArgumentError` if one is no
    array, `ShapeError` if they do not broadcast, and `DtypeError` for complex numbers.

    >>> spmd.scipy.special.owens_t(0.0, 1.0)
    Array(0.125, dtype=float32)
    """
    return owens_t_p.bind(*strong_reals("owens_t", h, a))


# ---- hypergeometric functions ------------------------------------------------------------------


def hyp1f1(a: Any, b: Any, x: Any) -> Array:
    """Compute the confluent hypergeometric function 1F1(a; b; x), elementwise.

    It is 1 for `a = 0`, also where `b` is 0, as in JAX. First derivatives exist in `a` and `b`,
    those of every order in `x`. `a`, `b` and `x` broadcast and are promoted to one float dtype.
    Raises `ArgumentError` if one is no array, `ShapeError` if they do not broadcast, and
    `DtypeError` for complex numbers.

    >>> spmd.scipy.special.hyp1f1(1.0, 2.0, 1.0)
    Array(1.7182819, dtype=float32)
    """
    return hyp1f1_p.bind(*strong_reals("hyp1f1", a, b, x))


def hyp2f1(a: Any, b: Any, c: Any, x: Any) -> Array:
    """Compute the hypergeometric function 2F1(a, b; c; x), elementwise; infinite for `x` above 1.

    First derivatives exist in the parameters (not at `x = 1`), those of every order in `x`. `a`,
    `b`, `c` and `x` broadcast and are promoted to one float dtype. Raises `ArgumentError` if one is
    no array, `ShapeError` if they do not broadcast, and `DtypeError` for complex numbers.

    >>> spmd.scipy.special.hyp2f1(1.0, 1.0, 2.0, 0.5)
    Array(1.3862944, dtype=float32, weak_type=True)
    """
    return hyp2f1_p.bind(*reals_of_one_shape("hyp2f1", a, b, c, x))


# ---- recurrences -------------------------------------------------------------------------------


def bessel_jn(z: Any, *, v: int, n_iter: int = 50) -> Array:
    """Compute Bessel functions of the first kind of the orders 0, 1, ..., `v`.

    The result has the shape of `z` with a new first dim for the orders; integers become float32 and
    floats keep their dtype. The method is Miller's backward recurrence over `n_iter` orders,
    normalised with `J_0 + 2 J_2 + 2 J_4 + ... = 1` (Zhang and Jin 1996); `n_iter` must be well
    above both `v` and the size of `z`. Raises `ArgumentError` if `v` is not between 0 and `n_iter`,
    or if one is no integer, and `DtypeError` for complex numbers.

    >>> spmd.scipy.special.bessel_jn(1.0, v=1)
    Array([0.7651977 , 0.44005057], dtype=float32)
    """
    (z,) = reals_of_one_shape("bessel_jn", z)
    try:
        v, n_iter = operator.index(v), operator.index(n_iter)
    except TypeError:
        raise ArgumentError(f"bessel_jn: v={v!r} and n_iter={n_iter!r} must be integers") from None
    if not 0 <= v <= n_iter:
        raise ArgumentError(f"bessel_jn: v={v} must be between 0 and n_iter={n_iter}")
    is_zero = z == 0
    safe = snp.where(is_zero, constant_like(z, 1.0), z)

    def down(carry: Any, k: Any) -> Any:
        further, last, total = carry
        f = 2 * (k + 1) * last / safe - further
        # Scaled on the way, as the numbers of small z outgrow the dtype.
        big = snp.abs(f) > 1e15
        scale = snp.where(big, constant_like(f, 1e-15), constant_like(f, 1.0))
        total = total + snp.where(snp.fmod(k, 2) == 0, 2 * f, 0 * f)
        return (last * scale, f * scale, total * scale), (f * scale, scale)

    dtype = typeof(z).dtype
    start = (snp.zeros_like(safe), snp.full_like(safe, 1e-15), snp.zeros_like(safe))
    orders = snp.arange(n_iter, -1, -1).astype(dtype)
    (_, zeroth, total), (values, scales) = lax.scan(down, start, orders)
    values, scales = values[::-1][: v + 1], scales[::-1][: v + 1]
    # A stored value is also scaled by the scales that came after it.
    later = snp.cumprod(snp.concatenate([snp.ones_like(scales[:1]), scales[:-1]]), 0)
    out = values * later / (total - zeroth)
    order = snp.reshape(snp.arange(v + 1), (v + 1, *[1] * typeof(z).ndim))
    return snp.where(is_zero, (order == 0).astype(dtype), out)


def sph_harm_y(
    n: Any, m: Any, theta: Any, phi: Any, diff_n: int | None = None, n_max: int | None = None
) -> Array:
    """Compute the spherical harmonic of degree `n` and order `m`, elementwise.

    `theta` is the polar angle and `phi` the azimuth. The functions are orthonormal, with the
    Condon-Shortley phase. The arguments broadcast, and the result is complex. `n_max`, the largest
    degree, must be given where `n` is traced; larger degrees are clipped to it. `diff_n` is
    SciPy's; here `grad` gives derivatives. Raises `ArgumentError` for a `diff_n` or a missing
    `n_max`.

    >>> spmd.scipy.special.sph_harm_y(1, 0, 0.0, 0.0)
    Array(0.48860252+0.j, dtype=complex64)
    """
    if diff_n is not None:
        raise ArgumentError("sph_harm_y: diff_n is not supported; differentiate with spmd.grad")
    if n_max is None:
        if isinstance(n, Tracer):
            raise ArgumentError("sph_harm_y: n is traced, so n_max, its largest value, is needed")
        n_max = int(np.max(np.asarray(n)))
    theta, phi = reals_of_one_shape("sph_harm_y", theta, phi)
    dtype = typeof(theta).dtype
    shape = np.broadcast_shapes(*(np.shape(x) for x in (n, m, theta, phi)))
    n, order = (snp.broadcast_to(snp.asarray(x), shape) for x in (n, snp.abs(m)))
    n = snp.minimum(n, n_max)
    legendre = _legendre(n, order, snp.broadcast_to(theta, shape), n_max, dtype)
    turn = order.astype(dtype) * phi
    out = lax.complex(legendre * snp.cos(turn), legendre * snp.sin(turn))
    sign = snp.where(order % 2 == 0, 1.0, -1.0).astype(dtype)
    mirrored = lax.complex(sign * snp.real(out), -sign * snp.imag(out))
    return snp.where(snp.broadcast_to(snp.asarray(m), shape) < 0, mirrored, out)


def _legendre(n: Any, m: Any, theta: Any, n_max: int, dtype: np.dtype) -> Any:
    """Normalised associated Legendre functions of cos(theta), by the recurrence in the degree.

    Element by element: up the diagonal until the degree is m, then with m fixed until it is n.
    """
    x, sine = snp.cos(theta), snp.sin(theta)
    # The root of `1 - x * x`, of angles outside of [0, pi] too; at 0 it has the slope of a sine.
    sine = snp.where(sine < 0, -sine, sine)
    order = m.astype(dtype)
    last = snp.zeros_like(x)
    value = snp.full_like(x, math.sqrt(1 / (4 * math.pi)))
    for degree in range(1, n_max + 1):
        diagonal = -math.sqrt((2 * degree + 1) / (2 * degree)) * sine * value
        is_above = degree > m
        room = snp.where(is_above, degree**2 - order**2, 1.0).astype(dtype)
        a = snp.sqrt((4 * degree**2 - 1) / room)
        before = snp.where(is_above, (degree - 1) ** 2 - order**2, 0.0).astype(dtype)
        b = snp.where(before > 0, before, 0.0) / max(4 * (degree - 1) ** 2 - 1, 1)
        root = snp.where(b > 0, snp.sqrt(snp.where(b > 0, b, 1.0)), 0.0).astype(dtype)
        upward = a * (x * value - root * last)
        moves = degree <= n
        last, value = (
            snp.where(moves & is_above, value, last),
            snp.where(moves, snp.where(is_above, upward, diagonal), value),
        )
    return snp.where((m > n) | (n < 0), snp.zeros_like(value), value)


__all__ = [
    "bessel_jn", "erfcx", "fresnel", "hyp1f1", "hyp2f1", "owens_t", "sici", "sph_harm_y", "wofz",
]  # fmt: skip
