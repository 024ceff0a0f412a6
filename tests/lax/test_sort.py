"""sort, sort_key_val, argsort and top_k against JAX."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.api.inspect import make_jaxpr
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeError, ShapeError
from tests.lax.checks import check_abstract, check_derivatives, check_vmap

DTYPES = [np.bool_, np.uint8, np.int32, np.float16, dtypes.bfloat16, np.float32, np.complex64]


def wide(x):
    """As complex128: exact for every dtype, and NaN compares equal in assertions."""
    return np.asarray(x).astype(np.complex128)


def values(rng, dtype, shape=(4, 7)):
    """Few different values, among them signed zeros, NaN and infinities where there are any."""
    x = rng.integers(-3, 4, shape).astype(dtype)
    if dtypes.is_inexact(np.dtype(dtype)):
        for special in (-0.0, np.nan, np.inf, -np.inf):
            x[rng.random(shape) < 0.1] = special
    if np.dtype(dtype).kind == "c":
        x = x + (1j * rng.integers(-2, 3, shape)).astype(dtype)
    return x


@pytest.mark.parametrize("dimension", [0, -1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sort_is_jaxs(dtype, dimension):
    rng = np.random.default_rng(0)
    for _ in range(4):
        x, payload = values(rng, dtype), rng.integers(0, 100, (4, 7)).astype(np.int32)
        found = lax.sort((x, payload), dimension)
        for a, b in zip(found, jax.lax.sort((x, payload), dimension=dimension), strict=True):
            assert np.asarray(a).dtype == b.dtype
            np.testing.assert_array_equal(wide(a), wide(b))
        np.testing.assert_array_equal(wide(lax.sort(x, dimension)), wide(found[0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_keys(dtype):
    rng = np.random.default_rng(1)
    first, second = rng.integers(0, 3, (4, 7)).astype(np.int32), values(rng, dtype)
    payload = rng.standard_normal((4, 7)).astype(np.float32)
    found = lax.sort([first, second, payload], num_keys=2)
    wanted = jax.lax.sort([first, second, payload], num_keys=2)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(wide(a), wide(b))


def test_payload_may_be_keys():
    keys = np.arange(6, dtype=np.uint32).view(dtypes.key_dtype)
    _, moved = lax.sort_key_val(np.array([2.0, 0.0, 1.0], np.float32), keys)
    np.testing.assert_array_equal(
        spmd.random.key_data(moved), spmd.random.key_data(keys[[1, 2, 0]])
    )
    with pytest.raises(DtypeError, match=r"operand 0, key<fry>\[3\], has no order"):
        make_jaxpr(lambda x: lax.sort(x))(keys)


def test_argsort():
    x = np.array([[3, 1, 2, 1]], np.int32)
    out = np.asarray(lax.argsort(x))
    assert out.dtype == np.int32
    np.testing.assert_array_equal(out, [[1, 3, 2, 0]])


def test_sort_errors():
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(ArgumentError, match=r"num_keys=2 must be between 1 and .* 1"):
        lax.sort((x,), num_keys=2)
    with pytest.raises(ShapeError, match=r"operand 0 is float32\[2,3\], operand 1 is float32\[3\]"):
        make_jaxpr(lambda x: lax.sort((x, np.zeros(3, np.float32))))(x)
    with pytest.raises(ValueError, match=r"dimension 2 is out of bounds"):
        lax.sort(x, 2)


def test_sort_derivatives():
    rng = np.random.default_rng(0)
    x = rng.permutation(12).reshape(3, 4).astype(np.float32)
    y = rng.standard_normal((3, 4)).astype(np.float32)
    for dimension in (0, 1):
        check_derivatives(
            lambda x, y, d=dimension: [lax.sin(z) for z in lax.sort((x, y), d)], (x, y)
        )


def test_sort_vmap():
    def make(rng):
        return [values(rng, np.int32, (3, 5)), rng.standard_normal((3, 5)).astype(np.float32)]

    check_vmap(lambda x, y: lax.sort((x, y), 0), make)
    check_abstract(lambda x, y: lax.sort((x, y), 0), *make(np.random.default_rng(0)))


# ---- top_k -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float32, np.bool_], ids=str)
def test_top_k_is_jaxs(dtype):
    rng = np.random.default_rng(0)
    for _ in range(4):
        x = values(rng, dtype)
        for a, b in zip(lax.top_k(x, 3), jax.lax.top_k(x, 3), strict=True):
            assert np.asarray(a).dtype == b.dtype
            np.testing.assert_array_equal(wide(a), wide(b))
    a, b = lax.top_k(x, 2, axis=0), jax.lax.top_k(x, 2, axis=0)
    np.testing.assert_array_equal(a[1], b[1])
    check_abstract(lambda x: lax.top_k(x, 3), x)


def test_top_k_derivatives_and_vmap():
    rng = np.random.default_rng(0)
    x = rng.permutation(12).reshape(3, 4).astype(np.float32)
    check_derivatives(lambda x: lax.sin(lax.top_k(x, 2)[0]), (x,))
    check_vmap(lambda x: lax.top_k(x, 2, axis=0), lambda rng: [values(rng, np.int32, (3, 5))])


def test_top_k_errors():
    with pytest.raises(ShapeError, match=r"k=4 must be between 0 and the size of dim 0 .* 3"):
        make_jaxpr(lambda x: lax.top_k(x, 4))(np.zeros(3, np.float32))
    with pytest.raises(DtypeError, match=r"complex64\[3\] have no order"):
        make_jaxpr(lambda x: lax.top_k(x, 1))(np.zeros(3, np.complex64))
