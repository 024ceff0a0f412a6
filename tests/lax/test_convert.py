"""Conversions at the edges of what the target can hold."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeError, ShapeError
from spmd.core.aval import ShapedArray, typeof
from spmd.core.stage import trace_to_jaxpr

FLOATS = np.array([0.9, -0.9, 2.5, -2.5, 300, -300, 3e9, -3e9, 1e20, -1e20], np.float32)
FLOATS = np.concatenate([FLOATS, np.array([np.inf, -np.inf, np.nan], np.float32)])


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32])
def test_float_to_integer_saturates(dtype):
    info = np.iinfo(dtype)
    whole = np.trunc(np.nan_to_num(FLOATS.astype(np.float64), posinf=1e300, neginf=-1e300))
    wanted = [int(min(max(v, info.min), info.max)) for v in whole]
    found = lax.convert_element_type(FLOATS, dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.array(wanted, dtype))


def test_float_to_int64_saturates():
    with spmd.config.override("enable_x64", True):
        found = lax.convert_element_type(np.array([2.0**63, -(2.0**63), 2.0**62, np.nan]), np.int64)
    np.testing.assert_array_equal(found, [2**63 - 1, -(2**63), 2**62, 0])


def test_integers_wrap():
    found = lax.convert_element_type(np.array([300, -1, 128], np.int32), np.int8)
    np.testing.assert_array_equal(found, np.array([44, -1, -128], np.int8))
    found = lax.convert_element_type(np.array([-1], np.int32), np.uint32)
    np.testing.assert_array_equal(found, np.array([2**32 - 1], np.uint32))


def test_to_bool_asks_whether_it_is_not_zero():
    assert np.asarray(lax.convert_element_type(np.float32(np.nan), np.bool_))
    assert np.asarray(lax.convert_element_type(np.complex64(1j), np.bool_))
    assert not np.asarray(lax.convert_element_type(np.float32(-0.0), np.bool_))


def test_complex_loses_its_imaginary_part():
    assert lax.convert_element_type(np.complex64(3 + 4j), np.float32) == 3
    assert lax.convert_element_type(np.complex64(3.7 + 4j), np.int32) == 3


def test_gradient_through_narrow_floats():
    grad = spmd.grad(
        lambda x: lax.convert_element_type(
            lax.mul(lax.convert_element_type(x, dtypes.bfloat16), 3), np.float32
        )
    )(np.float32(1))
    assert grad.dtype == np.float32
    assert grad == 3


def test_no_equation_for_no_conversion():
    f32 = ShapedArray((3,), np.float32)
    assert not trace_to_jaxpr(lambda x: [lax.convert_element_type(x, np.float32)], [f32]).eqns


def test_python_scalars_are_converted_while_tracing():
    jaxpr = trace_to_jaxpr(
        lambda x: [lax.mul(x, lax.convert_element_type(2, np.float32))],
        [ShapedArray((3,), np.float32)],
    )
    assert [e.prim.name for e in jaxpr.eqns] == ["mul"]


def test_keys_do_not_convert():
    keys = np.zeros(3, dtypes.key_dtype)
    with pytest.raises(DtypeError, match="key_data"):
        trace_to_jaxpr(lambda k: [lax.convert_element_type(k, np.int32)], [typeof(keys)])


def test_none_is_no_dtype():
    with pytest.raises(ArgumentError, match="new_dtype is None"):
        lax.convert_element_type(1.0, None)


# ---- bits --------------------------------------------------------------------------------------


def test_bitcast_round_trip():
    x = np.array([[1.5, -2.25], [np.pi, 0.0]], np.float32)
    for dtype in (np.uint8, np.uint16, np.int32, dtypes.bfloat16):
        there = lax.bitcast_convert_type(x, dtype)
        np.testing.assert_array_equal(lax.bitcast_convert_type(there, np.float32), x)


def test_bitcast_needs_the_whole_last_dim():
    with pytest.raises(ShapeError, match="takes 4 elements of int8"):
        trace_to_jaxpr(
            lambda x: [lax.bitcast_convert_type(x, np.int32)], [ShapedArray((2, 3), np.int8)]
        )


@pytest.mark.parametrize("exponent_bits", [2, 5, 8, 11])
@pytest.mark.parametrize("mantissa_bits", [0, 3, 10, 23, 30])
def test_reduce_precision_as_jax(exponent_bits, mantissa_bits):
    jax = pytest.importorskip("jax")
    scales = 10.0 ** np.arange(-40, 39, 3)
    x = np.concatenate([s * np.linspace(-2, 2, 9) for s in scales]).astype(np.float32)
    x = np.concatenate([x, np.array([np.inf, -np.inf, np.nan, 65504, 65520], np.float32)])
    x = x[(np.abs(x) > 1.2e-38) | (x == 0) | np.isnan(x)]  # the oracle flushes subnormals
    found = lax.reduce_precision(x, exponent_bits, mantissa_bits)
    wanted = jax.lax.reduce_precision(x, exponent_bits, mantissa_bits)
    np.testing.assert_array_equal(found, np.asarray(wanted))


def test_reduce_precision_passes_tangents_through():
    out = spmd.grad(lambda x: lax.reduce_precision(x, 5, 2))(np.float32(1.1))
    assert out == 1


# ---- identities --------------------------------------------------------------------------------


def test_stop_gradient_of_a_pytree():
    def f(x):
        held = lax.stop_gradient({"x": x, "n": 3})
        return lax.mul(held["x"], x)

    assert spmd.grad(f)(np.float32(5)) == 5


def test_copy_is_another_array():
    x = np.ones(3, np.float32)
    y = np.asarray(lax.copy(x))
    assert not np.shares_memory(x, y)


def test_dtype_of_what_is_an_array_or_names_a_dtype():
    assert lax.dtype(1.5) == np.float32 and lax.dtype(True) == np.bool_
    assert lax.dtype(np.ones(2, np.float64)) == np.float32  # as it would be here, without x64
    assert lax.dtype(np.int8) == lax.dtype("int8") == np.int8
    assert lax.dtype(spmd.random.key(0)) == spmd.random.key(0).dtype
    assert spmd.jit(lambda x: lax.convert_element_type(x, lax.dtype(x)))(2).dtype == np.int32
    for x in (None, [1], "float99"):
        with pytest.raises(ArgumentError, match="no array and no dtype"):
            lax.dtype(x)
