"""Elementwise functions of complex numbers, as functions of their real and imaginary parts.

Kernels have `exp`, `log` and `sqrt` of complex numbers. Branch cuts are those of C: both zeros have
their own side. Kahan, "Branch cuts for complex elementary functions" (1987), has the inverses.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.compile.definitions.stacks import full
from spmd.compile.definitions.table import defines, is_complex
from spmd.core.aval import typeof
from spmd.core.structural import broadcast_in_dim
from spmd.lax.arithmetic import abs as absolute
from spmd.lax.arithmetic import (
    add,
    conj,
    div,
    imag,
    is_finite,
    log,
    mul,
    neg,
    real,
    sqrt,
    square,
    sub,
)
from spmd.lax.arithmetic import complex as complex_of
from spmd.lax.convert import convert_element_type
from spmd.lax.elementwise import asinh as real_asinh
from spmd.lax.elementwise import atan2, cos, cosh, exp, exp2, expm1, log1p, sin, sinh, tan
from spmd.lax.logic import bitwise_and, bitwise_or, eq, gt, lt, select


def _product(x: Any, y: Any) -> Any:
    """A product that is zero where a factor is; NaN stays, and so do the signs of zeros."""
    finite = bitwise_and(eq(x, x), eq(y, y))
    zero = mul(select(is_finite(x), x, full(1, x)), select(is_finite(y), y, full(1, y)))
    none = bitwise_or(eq(x, full(0, x)), eq(y, full(0, y)))
    return select(bitwise_and(none, finite), zero, mul(x, y))


def _is_negative(x: Any) -> Any:
    """Whether a number has a minus, as -0 has."""
    return lt(atan2(x, full(-1, x)), full(0, x))


def _turned(z: Any) -> Any:
    """`1j * z`."""
    return complex_of(neg(imag(z)), real(z))


def _turned_back(z: Any) -> Any:
    """`-1j * z`."""
    return complex_of(imag(z), neg(real(z)))


# ---- exponentials and logarithms ---------------------------------------------------------------


@defines("exp2", when=is_complex)
def exp2_of(z: Any) -> Any:
    size, angle = exp2(real(z)), mul(imag(z), full(np.log(2), imag(z)))
    return complex_of(_product(size, cos(angle)), _product(size, sin(angle)))


@defines("expm1", when=is_complex)
def expm1_of(z: Any) -> Any:
    x, y = real(z), imag(z)
    half = sin(mul(y, full(0.5, y)))
    less = mul(full(2, x), square(half))
    return complex_of(sub(mul(expm1(x), cos(y)), less), _product(exp(x), sin(y)))


@defines("log1p", when=is_complex)
def log1p_of(z: Any) -> Any:
    x, y = real(z), imag(z)
    near = lt(add(absolute(x), absolute(y)), full(0.5, x))
    square_less_one = add(mul(x, add(x, full(2, x))), square(y))
    size = mul(full(0.5, x), log1p(select(near, square_less_one, full(0, x))))
    far = log(absolute(complex_of(add(x, full(1, x)), y)))
    return complex_of(select(near, size, far), atan2(y, add(x, full(1, x))))


@defines("logistic", when=is_complex)
def logistic(z: Any) -> Any:
    one = full(1, z)
    return div(one, add(one, exp(neg(z))))


@defines("pow", when=is_complex)
def power(z: Any, exponent: Any) -> Any:
    """`exp(exponent * log(z))`; of zero it is zero, or one to the power of zero."""
    shape = typeof(z).shape or typeof(exponent).shape
    z, exponent = (x if typeof(x).shape else broadcast_in_dim(x, shape, ()) for x in (z, exponent))
    exponent = convert_element_type(exponent, typeof(z).dtype)
    found = exp(mul(exponent, log(z)))
    zero = full(0, z)
    one = eq(exponent, zero)
    of_zero = select(gt(real(exponent), full(0, real(exponent))), zero, full(np.nan * (1 + 1j), z))
    return select(one, full(1, z), select(eq(z, zero), of_zero, found))


@defines("rsqrt", when=is_complex)
def rsqrt(z: Any) -> Any:
    return div(full(1, z), sqrt(z))


@defines("sign", when=is_complex)
def sign(z: Any) -> Any:
    """`z / abs(z)`; zero is zero."""
    size = absolute(z)
    none = eq(size, full(0, size))
    safe = select(none, full(1, size), size)
    return complex_of(div(real(z), safe), div(imag(z), safe))


# ---- circular and hyperbolic functions ---------------------------------------------------------


@defines("sinh", when=is_complex)
def sinh_of(z: Any) -> Any:
    x, y = real(z), imag(z)
    return complex_of(_product(cos(y), sinh(x)), _product(cosh(x), sin(y)))


@defines("cosh", when=is_complex)
def cosh_of(z: Any) -> Any:
    x, y = real(z), imag(z)
    return complex_of(mul(cosh(x), cos(y)), _product(sinh(x), sin(y)))


@defines("sin", when=is_complex)
def sin_of(z: Any) -> Any:
    return _turned_back(sinh_of(_turned(z)))


@defines("cos", when=is_complex)
def cos_of(z: Any) -> Any:
    return cosh_of(_turned(z))


@defines("tanh", when=is_complex)
def tanh_of(z: Any) -> Any:
    """Kahan's: the tangent of the imaginary part is never infinite."""
    x, y = real(z), imag(z)
    limit = float(np.arcsinh(np.finfo(typeof(x).dtype).max)) / 4
    far = gt(absolute(x), full(limit, x))
    near = select(far, full(0, x), x)
    slope, height = tan(y), sinh(near)
    beta = add(full(1, slope), square(slope))
    rho = sqrt(add(full(1, height), square(height)))
    below = add(full(1, height), mul(beta, square(height)))
    found = complex_of(div(mul(mul(beta, rho), height), below), div(slope, below))
    one = select(_is_negative(x), full(-1, x), full(1, x))
    return select(far, complex_of(one, mul(full(0, slope), slope)), found)


@defines("tan", when=is_complex)
def tan_of(z: Any) -> Any:
    return _turned_back(tanh_of(_turned(z)))


# ---- their inverses ----------------------------------------------------------------------------


def _roots_beside_one(z: Any) -> tuple[Any, Any]:
    """`sqrt(1 - z)` and `sqrt(1 + z)`."""
    x, y = real(z), imag(z)
    one = full(1, x)
    return sqrt(complex_of(sub(one, x), neg(y))), sqrt(complex_of(add(one, x), y))


def _imag_of_product(a: Any, b: Any) -> Any:
    """The imaginary part of `conj(a) * b`."""
    return sub(_product(real(a), imag(b)), _product(imag(a), real(b)))


def _real_of_product(a: Any, b: Any) -> Any:
    """The real part of `a * b`."""
    return sub(_product(real(a), real(b)), _product(imag(a), imag(b)))


@defines("asin", when=is_complex)
def asin(z: Any) -> Any:
    less, more = _roots_beside_one(z)
    return complex_of(
        atan2(real(z), _real_of_product(less, more)), real_asinh(_imag_of_product(less, more))
    )


@defines("acos", when=is_complex)
def acos(z: Any) -> Any:
    less, more = _roots_beside_one(z)
    angle = atan2(real(less), real(more))
    return complex_of(mul(full(2, angle), angle), real_asinh(_imag_of_product(more, less)))


@defines("asinh", when=is_complex)
def asinh_of(z: Any) -> Any:
    return _turned_back(asin(_turned(z)))


@defines("acosh", when=is_complex)
def acosh(z: Any) -> Any:
    x, y = real(z), imag(z)
    one = full(1, x)
    less, more = sqrt(complex_of(sub(x, one), y)), sqrt(complex_of(add(x, one), y))
    size = real_asinh(_real_of_product(conj(less), more))
    angle = atan2(imag(less), real(more))
    return complex_of(size, mul(full(2, angle), angle))


@defines("atanh", when=is_complex)
def atanh(z: Any) -> Any:
    """A logarithm of a quotient of squares; far away it is `1 / z` and a right angle."""
    x, y = real(z), imag(z)
    one = full(1, x)
    edge = full(1 / np.finfo(typeof(x).dtype).eps, x)
    far = gt(add(absolute(x), absolute(y)), edge)
    near_x, near_y = select(far, full(0, x), x), select(far, full(0, y), y)
    below = add(square(sub(one, absolute(near_x))), square(near_y))
    size = mul(full(0.25, x), log1p(div(mul(full(4, x), absolute(near_x)), below)))
    height = sub(mul(sub(one, near_x), add(one, near_x)), square(near_y))
    angle = mul(full(0.5, x), atan2(mul(full(2, y), near_y), height))
    most = select(gt(absolute(x), absolute(y)), absolute(x), absolute(y))
    safe = select(far, most, one)
    a, b = div(x, safe), div(y, safe)
    far_size = div(div(absolute(a), add(square(a), square(b))), safe)
    far_size = select(is_finite(most), far_size, full(0, x))
    right = full(np.pi / 2, y)
    far_angle = select(_is_negative(y), neg(right), right)
    size, angle = select(far, far_size, size), select(far, far_angle, angle)
    return complex_of(select(_is_negative(x), neg(size), size), angle)


@defines("atan", when=is_complex)
def atan(z: Any) -> Any:
    return _turned_back(atanh(_turned(z)))
