"""What all members of a family share: errors, weak types, tangents and cotangents of scalars."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import DtypeError, RefusedError, ShapeError
from spmd.core.aval import ShapedArray, typeof
from spmd.core.stage import trace_to_jaxpr
from spmd.lax.families import describe

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def trace(f, *args):
    return trace_to_jaxpr(lambda *xs: [f(*xs)], [typeof(x) for x in args])


# ---- errors ------------------------------------------------------------------------------------


def message(error, f, *args):
    with pytest.raises(error) as caught:
        trace(f, *args)
    assert "test_families.py:" in str(caught.value), "the user's line is missing"
    return str(caught.value)


def test_dtype_error_names_measures_advises():
    text = message(DtypeError, lambda x: lax.sin(x), np.zeros(3, np.int32))
    assert (
        "sin: accepts floating and complex dtypes, got int32[3] (argument x); "
        "convert with x.astype(float)"
    ) in text


@pytest.mark.parametrize(
    "f, dtype, advice",
    [
        (lambda x: lax.floor(x), np.complex64, "take x.real, x.imag or abs(x)"),
        (lambda x: lax.add(x, x), np.bool_, "convert with x.astype(float)"),
        (lambda x: lax.bitwise_and(x, x), np.float32, "convert with x.astype(int)"),
        (lambda x: lax.real(x), np.float32, "convert with x.astype(complex)"),
        (lambda x: lax.neg(x), dtypes.key_dtype, "random.key_data gives its bits"),
    ],
)
def test_dtype_errors_advise(f, dtype, advice):
    assert advice in message(DtypeError, f, np.zeros(3, dtype))


def test_different_dtypes_are_both_named():
    text = message(DtypeError, lambda x: lax.add(x, np.ones(3, np.int32)), X[0])
    assert "got float32[3] (argument x) and int32[3] (argument y)" in text


def test_different_shapes_are_both_named():
    text = message(ShapeError, lambda x: lax.mul(x, np.ones(4, np.float32)), X)
    assert "got (2, 3) (argument x) and (4,) (argument y)" in text


def test_transpose_is_refused_with_a_sentence():
    with pytest.raises(RefusedError, match=r"sin is not linear"):
        lax.sin_p.rule("transpose")


def test_describe():
    assert describe(dtypes.INTEGER) == "integer"
    assert describe(dtypes.FLOATING) == "floating"
    assert describe(dtypes.NUMERIC) == "integer, floating and complex"


# ---- operands ----------------------------------------------------------------------------------


def test_python_number_takes_the_dtype_of_the_array():
    half = np.ones(3, np.float16)
    for x in (lax.add(half, 1.5), lax.add(2, half), lax.max(np.int8(3), 4)):
        assert typeof(x).weak_type is False
    assert lax.add(half, 1.5).dtype == np.float16
    assert lax.add(np.ones(3, dtypes.bfloat16), 1).dtype == dtypes.bfloat16


def test_python_float_does_not_become_an_integer():
    with pytest.raises(DtypeError, match="int32"):
        trace(lambda x: lax.add(x, 1.5), np.ones(3, np.int32))


def test_weak_types():
    weak = ShapedArray((), np.float32, True)
    (out,) = trace_to_jaxpr(lambda x: [lax.sin(lax.mul(x, 2.0))], [weak]).out_avals
    assert out is weak
    (out,) = trace(lambda x: lax.mul(x, 2.0), X).out_avals
    assert out is ShapedArray((2, 3), np.float32)
    (out,) = trace_to_jaxpr(lambda x: [lax.eq(x, x)], [weak]).out_avals
    assert out is ShapedArray((), np.bool_, True)  # as in JAX


def test_number_with_array_is_one_equation():
    assert str(trace(lambda x: lax.mul(x, 2.0), X)) == (
        "{ lambda ; a:f32[2,3]. let b:f32[2,3] = mul a 2.0:f32[] in (b,) }"
    )


# ---- scalars beside arrays ---------------------------------------------------------------------


@pytest.mark.parametrize("f", [lax.add, lax.sub, lax.mul, lax.div, lax.max, lax.atan2])
def test_gradient_of_a_scalar_operand_is_summed(f):
    def total(s, x):
        return lax.reduce_sum(f(x, s), (0, 1))

    scalar = np.float32(1.5)
    full = np.full((2, 3), scalar)
    found = spmd.grad(total)(scalar, X)
    wanted = spmd.grad(total)(full, X)
    np.testing.assert_allclose(found, np.sum(wanted), rtol=1e-6)


def test_vmap_keeps_the_batch_dim_where_it_is():
    jaxpr = spmd.make_jaxpr(spmd.vmap(lax.add, in_axes=(1, 1), out_axes=1))(X, X).jaxpr
    assert [e.prim.name for e in jaxpr.eqns] == ["add"]


def test_vmap_of_batched_scalars():
    """One number for each row, against one array for all."""
    scalars = np.array([1.0, 2.0, 3.0], np.float32)
    found = spmd.vmap(lax.mul, in_axes=(0, None))(scalars, X)
    np.testing.assert_array_equal(found, scalars[:, None, None] * X)


def test_no_warnings_for_special_values():
    """NumPy's warnings are errors in this suite, so computing is the test."""
    for value in (np.inf, -np.inf, np.nan, 0.0, -0.0, 3e38):
        x = np.full(3, value, np.float32)
        for f in (lax.exp, lax.log, lax.sqrt, lax.rsqrt, lax.lgamma, lax.erf_inv, lax.tan):
            f(x)
        lax.div(x, np.zeros(3, np.float32))
        lax.convert_element_type(x, np.int32)
