"""Comparisons, bits, shifts and choices at their corners."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeError, ShapeError
from spmd.core.aval import typeof
from spmd.core.stage import trace_to_jaxpr

INTEGER = [d for d in dtypes.INTEGER if not dtypes.is_small(d)]
NARROW_INTEGERS = [d for d in INTEGER if d.itemsize < 8]
COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]


@pytest.mark.parametrize("name", COMPARISONS)
def test_nan_compares_as_ieee(name):
    values = np.array([0.0, -0.0, 1.0, np.nan, np.inf, -np.inf], np.float32)
    x, y = (v.ravel() for v in np.meshgrid(values, values))
    numpy_name = {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal"}
    numpy_name |= {"gt": "greater", "ge": "greater_equal"}
    np.testing.assert_array_equal(getattr(lax, name)(x, y), getattr(np, numpy_name[name])(x, y))


@pytest.mark.parametrize("name", ["shift_left", "shift_right_logical", "shift_right_arithmetic"])
@pytest.mark.parametrize("dtype", NARROW_INTEGERS, ids=str)
def test_shifts_by_any_amount(name, dtype):
    jax = pytest.importorskip("jax")
    info = np.iinfo(dtype)
    values = np.array([0, 1, 5, info.max, info.min, info.max - 6], dtype)
    bits = info.bits
    amounts = np.array([0, 1, bits - 1, bits, bits + 1, info.max, info.min, *[2] * 5], dtype)
    x, y = (v.ravel() for v in np.meshgrid(values, amounts))
    found = getattr(lax, name)(x, y)
    np.testing.assert_array_equal(found, np.asarray(getattr(jax.lax, name)(x, y)))


@pytest.mark.parametrize("dtype", INTEGER, ids=str)
def test_bit_counts(dtype):
    info = np.iinfo(dtype)
    with spmd.config.override("enable_x64", True):
        values = np.array([0, 1, 2, 3, 64, info.max, info.min], dtype)
        ones = [bin(int(v) % 2**info.bits).count("1") for v in values]
        zeros = [info.bits - (int(v) % 2**info.bits).bit_length() for v in values]
        np.testing.assert_array_equal(lax.population_count(values), ones)
        np.testing.assert_array_equal(lax.clz(values), zeros)
        assert lax.clz(values).dtype == dtype


# ---- select ------------------------------------------------------------------------------------


def test_select_moves_typed_keys():
    keys = np.zeros(3, dtypes.key_dtype)
    keys[dtypes.key_dtype.names[1]] = [1, 2, 3]
    out = lax.select(np.array([True, False, True]), keys, np.zeros(3, dtypes.key_dtype))
    np.testing.assert_array_equal(spmd.random.key_data(out)[:, 1], [1, 0, 3])
    np.testing.assert_array_equal(lax.eq(keys, out), [True, False, True])


def test_select_n_beyond_the_cases_takes_the_nearest():
    which = np.array([-1, 0, 1, 2, 9], np.int32)
    cases = [np.full(5, k, np.float32) for k in range(3)]
    np.testing.assert_array_equal(lax.select_n(which, *cases), [0, 0, 1, 2, 2])


def test_select_n_gradient_goes_where_the_value_came_from():
    which = np.array([-1, 0, 1, 2, 9], np.int32)

    def total(*cases):
        return lax.reduce_sum(lax.select_n(which, *cases), (0,))

    grads = spmd.grad(total, argnums=(0, 1, 2))(*[np.ones(5, np.float32)] * 3)
    np.testing.assert_array_equal(grads, [[1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 1]])


def test_scalar_case_stays_a_scalar_and_gets_a_summed_gradient():
    mask = np.array([True, False, True])

    def total(x, s):
        return lax.reduce_sum(lax.select(mask, x, s), (0,))

    x, s = np.ones(3, np.float32), np.float32(2)
    jaxpr = trace_to_jaxpr(lambda *a: [lax.select(mask, *a)], [typeof(x), typeof(s)])
    assert [e.prim.name for e in jaxpr.eqns] == ["select_n"]
    dx, ds = spmd.grad(total, argnums=(0, 1))(x, s)
    np.testing.assert_array_equal(dx, [1, 0, 1])
    assert ds == 1


def test_gradient_of_a_scalar_case_under_a_scalar_predicate():
    """Neither the predicate nor the differentiated case has the result's shape."""

    def f(s):
        return lax.select(np.bool_(True), s, np.ones(3, np.float32))

    out, tangent = spmd.jvp(f, (np.float32(2),), (np.float32(5),))
    np.testing.assert_array_equal(out, [2, 2, 2])
    np.testing.assert_array_equal(tangent, [5, 5, 5])


def test_select_errors():
    x = np.ones(3, np.float32)
    mask = np.ones(3, np.bool_)

    def traced(f):
        return trace_to_jaxpr(lambda a: [f(a)], [typeof(x)])

    with pytest.raises(ArgumentError, match="at least one case"):
        lax.select_n(mask)
    with pytest.raises(DtypeError, match="chooses between 2 cases, got 3"):
        traced(lambda a: lax.select_n(mask, a, a, a))
    with pytest.raises(ShapeError, match=r"\(3,\) \(argument which\) and \(4,\)"):
        traced(lambda a: lax.select(mask, np.ones(4, np.float32), np.float32(0)))
    with pytest.raises(DtypeError, match="argument which"):
        traced(lambda a: lax.select(a, a, a))


# ---- clamp -------------------------------------------------------------------------------------


def test_clamp():
    x = np.array([-2.0, 0.5, 2.0, np.nan], np.float32)
    np.testing.assert_array_equal(lax.clamp(0.0, x, 1.0), [0.0, 0.5, 1.0, np.nan])


@pytest.mark.parametrize("x", [-2.0, 0.0, 0.5, 1.0, 2.0])
def test_clamp_gradient_as_jax(x):
    jax = pytest.importorskip("jax")
    args = [np.float32(v) for v in (0.0, x, 1.0)]
    found = spmd.grad(lax.clamp, argnums=(0, 1, 2))(*args)
    wanted = jax.grad(jax.lax.clamp, argnums=(0, 1, 2))(*args)
    assert tuple(map(float, found)) == tuple(map(float, wanted))
