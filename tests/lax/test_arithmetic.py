"""Arithmetic where C and NumPy leave the meaning open: JAX is the oracle for each corner."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeError

INTEGERS = [d for d in dtypes.INTEGER if d.itemsize < 8 and not dtypes.is_small(d)]
SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.49999997, np.inf, -np.inf, np.nan, 1e30],
    np.float32,
)


def corner_pairs(dtype):
    """All pairs of an integer dtype's corners."""
    info = np.iinfo(dtype)
    corners = {0, 1, 2, 3, 7, info.max, info.max - 1, info.min, info.min + 1}
    corners |= {-1, -2, -3, -7} if info.min else set()
    values = np.array(sorted(corners), dtype)
    x, y = np.meshgrid(values, values)
    return x.ravel(), y.ravel()


def assert_as_jax(name, *operands):
    jax = pytest.importorskip("jax")
    found = np.asarray(getattr(lax, name)(*operands))
    wanted = np.asarray(getattr(jax.lax, name)(*map(jax.numpy.asarray, operands)))
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)
    if found.dtype.kind == "f":
        number = ~np.isnan(found)
        np.testing.assert_array_equal(np.signbit(found[number]), np.signbit(wanted[number]))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "rem", "max", "min"])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_corners(name, dtype):
    assert_as_jax(name, *corner_pairs(dtype))


@pytest.mark.parametrize("name", ["neg", "abs", "sign", "square"])
@pytest.mark.parametrize("dtype", [d for d in INTEGERS if d.kind == "i"], ids=str)
def test_signed_corners(name, dtype):
    assert_as_jax(name, corner_pairs(dtype)[0])


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "rem", "max", "min"])
def test_float_corners(name):
    x, y = (v.ravel() for v in np.meshgrid(SPECIAL, SPECIAL))
    if name in ("max", "min"):  # the sign of max(0, -0) is the backend's choice
        keep = (x != 0) | (y != 0)
        x, y = x[keep], y[keep]
    assert_as_jax(name, x, y)


@pytest.mark.parametrize("name", ["neg", "sign", "abs", "floor", "ceil", "is_finite", "sqrt"])
def test_float_unary_corners(name):
    assert_as_jax(name, SPECIAL)


@pytest.mark.parametrize("method", list(lax.RoundingMethod))
def test_round(method):
    jax = pytest.importorskip("jax")
    found = lax.round(SPECIAL, method)
    wanted = jax.lax.round(SPECIAL, jax.lax.RoundingMethod(method.value))
    np.testing.assert_array_equal(found, np.asarray(wanted))


@pytest.mark.parametrize("dtype", [np.float16, dtypes.bfloat16], ids=str)
def test_narrow_floats_are_rounded_once(dtype):
    x = np.linspace(-3, 3, 50).astype(dtype)
    found = lax.exp(x)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.exp(x.astype(np.float32)).astype(dtype))


def test_nextafter_of_bfloat16():
    x = np.array([1.0, -1.0, 0.0], dtypes.bfloat16)
    found = np.asarray(lax.nextafter(x, np.array([2.0, 2.0, 1.0], dtypes.bfloat16)))
    assert (found > x).all()
    assert found[0] == 1 + 2.0**-7


def test_complex_order_is_lexicographic():
    x = np.array([1 + 2j, 1 - 1j, 2 + 0j], np.complex64)
    y = np.array([1 + 1j, 1 + 1j, 1 + 9j], np.complex64)
    assert_as_jax("max", x, y)
    assert_as_jax("min", x, y)


# ---- powers ------------------------------------------------------------------------------------


def test_integer_pow_needs_an_integer():
    with pytest.raises(ArgumentError, match=r"y=2\.5 must be a Python integer"):
        lax.integer_pow(1.0, 2.5)
    with pytest.raises(DtypeError, match="integers have no negative powers"):
        lax.integer_pow(np.int32(2), -1)


@pytest.mark.parametrize("power", [0, 1, 2])
def test_pow_gradient_at_zero(power):
    jax = pytest.importorskip("jax")
    found = spmd.grad(lambda x: lax.pow(x, np.int32(power)))(np.float32(0))
    wanted = jax.grad(lambda x: jax.lax.pow(x, np.int32(power)))(np.float32(0))
    assert float(found) == float(wanted)


def test_pow_gradient_in_the_power_at_zero():
    assert spmd.grad(lambda y: lax.pow(np.float32(0), y))(np.float32(2)) == 0


# ---- conventions of derivatives ----------------------------------------------------------------


@pytest.mark.parametrize("f", [lax.max, lax.min])
def test_tie_gives_half_to_each(f):
    assert spmd.grad(f, argnums=(0, 1))(1.0, 1.0) == (0.5, 0.5)


@pytest.mark.parametrize(
    "name, x",
    [("abs", 0.0), ("abs", -0.0), ("sign", 2.0), ("round", 0.7), ("floor", 0.7), ("sqrt", 4.0)],
)
def test_derivative_as_jax(name, x):
    jax = pytest.importorskip("jax")
    found = spmd.grad(getattr(lax, name))(np.float32(x))
    assert float(found) == float(jax.grad(getattr(jax.lax, name))(np.float32(x)))


@pytest.mark.parametrize("name", ["abs", "real", "imag"])
def test_gradient_of_complex_to_real_as_jax(name):
    jax = pytest.importorskip("jax")
    z = np.complex64(3 - 4j)
    found = spmd.grad(getattr(lax, name))(z)
    np.testing.assert_allclose(found, jax.grad(getattr(jax.lax, name))(z), rtol=1e-6)


def test_gradient_of_abs_at_complex_zero_is_zero():
    assert spmd.grad(lax.abs)(np.complex64(0)) == 0


def test_conj_of_real_is_complex():
    assert lax.conj(np.float32(2)).dtype == np.complex64
