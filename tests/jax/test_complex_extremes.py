"""Extremes of complex numbers, beside JAX.

And what a function of reals says about complex numbers, or a dtype about a number it has not.
"""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd import numpy as snp

jax = pytest.importorskip("jax", reason="JAX is the oracle")
jnp = pytest.importorskip("jax.numpy")

NAN, INF = np.nan, np.inf
ROWS = np.array([[1 + 2j, 1 - 3j, 0.5 + 9j], [3j, 3j, -1], [INF, complex(INF, 1), 2]], np.complex64)

# ---- complex numbers in lexicographic order ----------------------------------------------------


@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 1)])
@pytest.mark.parametrize("name", ["max", "min", "amax", "amin", "nanmax", "nanmin"])
def test_extremes_of_complex_numbers(name, axis):
    found = getattr(snp, name)(ROWS, axis=axis)
    wanted = getattr(jnp, name)(ROWS, axis=axis)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)
    compiled = spmd.jit(lambda x: getattr(snp, name)(x, axis=axis))
    np.testing.assert_array_equal(compiled(ROWS), found)


@pytest.mark.parametrize("name", ["max", "min", "ptp"])
def test_nan_wins_among_complex_numbers(name):
    for at in (0, 1, 2):
        for value in (complex(NAN, 1), complex(1, NAN)):
            row = ROWS[0].copy()
            row[at] = value
            assert np.isnan(np.asarray(getattr(snp, name)(row)))


def test_ties_of_complex_numbers_share_the_derivative():
    x = np.array([3 + 1j, 3 + 1j, 3 - 5j, 0], np.complex64)
    found = spmd.grad(lambda x: snp.max(x).real)(x)
    np.testing.assert_array_equal(found, [0.5, 0.5, 0, 0])
    np.testing.assert_array_equal(spmd.vmap(snp.min)(ROWS), snp.min(ROWS, axis=1))
    assert complex(lax.reduce_max(np.zeros((0,), np.complex64), (0,))) == complex(-INF, -INF)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16", "float32"])
def test_nan_is_skipped_in_dtypes_without_infinity(dtype):
    x = [1.0, NAN, -3.0]
    for name in ("nanmax", "nanmin", "nanargmax", "nanargmin"):
        found = getattr(snp, name)(snp.array(x, dtype))
        assert float(found) == float(getattr(np, name)(x)), name


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["i0", "isneginf", "isposinf", "signbit", "spacing", "unwrap"])
def test_functions_of_reals_refuse_complex_numbers_as_jax_does(name):
    with pytest.raises(ValueError):
        getattr(jnp, name)(1j)
    with pytest.raises(ValueError, match=f"{name} does not support complex input"):
        getattr(snp, name)(1j)


@pytest.mark.parametrize("how", ["array", "asarray", "name"])
@pytest.mark.parametrize(
    ("value", "dtype"),
    [(-1.5, "uint8"), (300.5, "uint8"), (1e10, "int32"), (3j, "int32"), (3j, "float32")],
)
def test_numbers_that_a_dtype_has_not(value, dtype, how):
    def make(lib):
        return getattr(lib, dtype)(value) if how == "name" else getattr(lib, how)(value, dtype)

    for lib in (jnp, snp):
        with pytest.raises((OverflowError, TypeError)):
            make(lib)


def test_fractions_are_cut_off_and_dtypes_kept():
    assert int(snp.uint8(-0.5)) == 0 and int(snp.int8(-128.5)) == -128
    found = snp.vander(np.array([1, 2], np.int8))
    assert found.dtype == np.int8
    np.testing.assert_array_equal(found, [[1, 1], [2, 1]])
    assert not snp.angle(-1.5).weak_type
    assert snp.isrealobj("a")  # pyright: ignore[reportArgumentType]
    assert snp.fft.fft(snp.array([1.0, 2.0], "float8_e5m2")).dtype == np.complex64
