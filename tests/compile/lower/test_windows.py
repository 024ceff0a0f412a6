"""Convolutions and windowed reductions, compiled, are what `impl` says, and have native code."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base.config import config
from spmd.compile.lower.steps import Contract, Host, Multiply
from tests.compile.lower import test_records as suite
from tests.lax.records_windows import RECORDS
from tests.lax.test_conv import random_case


@pytest.fixture(autouse=True)
def wide_dtypes():
    with config.override("enable_x64", True):
        yield


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_compiled_windows_give_the_values_of_impl(record):
    suite.test_compiled_records_give_the_values_of_impl(record)


def steps_of(f, *args):
    """The steps of a compiled program of NumPy arrays."""
    jaxpr = spmd.make_jaxpr(f)(*args)
    return suite.compile_jaxpr(jaxpr).schedule.steps


@pytest.mark.parametrize(
    "record", [r for r in RECORDS if np.dtype(np.float32) in r.dtypes], ids=str
)
def test_float32_runs_natively(record):
    _, executable, _ = suite.compiled(record, np.dtype(np.float32))
    assert not [s.name for s in executable.schedule.steps if isinstance(s, Host)]


@pytest.mark.parametrize("seed", range(4))
def test_gradients_run_natively(seed):
    lhs, rhs, how = random_case(np.random.default_rng(seed))

    def loss(x, w):
        return (lax.conv_general_dilated(x, w, **how) ** 2).sum()

    steps = steps_of(spmd.grad(loss, (0, 1)), lhs, rhs)
    assert not [s.name for s in steps if isinstance(s, Host)]


NHWC = ("NHWC", "HWIO", "NHWC")


@pytest.mark.parametrize(
    "shapes, strides, expected",
    [
        (((2, 8, 8, 4), (3, 3, 4, 8)), (1, 1), Contract),
        (((2, 8, 8, 4), (1, 1, 4, 8)), (1, 1), Multiply),
        (((2, 8, 8, 4), (1, 1, 4, 8)), (2, 2), Contract),
        (((2, 8, 8, 4), (8, 8, 4, 8)), (1, 1), Multiply),
    ],
    ids=str,
)
def test_a_convolution_becomes_the_expected_steps(shapes, strides, expected):
    x, w = (np.ones(s, np.float32) for s in shapes)
    steps = steps_of(
        lambda x, w: lax.conv_general_dilated(x, w, strides, "VALID", dimension_numbers=NHWC), x, w
    )
    assert [type(s) for s in steps] == [expected]


def test_strided_gradient_is_not_computed_on_zeros():
    """The phases of a dilated lhs together do as many multiplications as the forward product."""
    x, w = np.ones((2, 16, 16, 8), np.float32), np.ones((3, 3, 8, 8), np.float32)

    def f(x, w):
        return lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=NHWC)

    def flops(f, *args):
        return sum(s.flops for s in steps_of(f, *args) if isinstance(s, Contract))

    forward = flops(f, x, w)
    backward = flops(spmd.grad(lambda x, w: f(x, w).sum()), x, w)
    assert forward <= backward <= 1.2 * forward


def test_windows_of_many_taps_give_the_values_of_impl():
    """Windows of more taps than are written out, in both kinds of kernels."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 20, 20, 3)).astype(np.float32)
    w = rng.normal(size=(9, 9, 1, 3)).astype(np.float32)
    how = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NHWC}
    how["feature_group_count"] = 3

    def depthwise(x, w):
        return lax.conv_general_dilated(x, w, **how)

    def pooled(x):
        return lax.reduce_window(x, -np.inf, lax.max, (1, 9, 9, 1), (1, 2, 2, 1), "SAME")

    def summed(x):
        return lax.reduce_window(x, 0.0, lax.add, (1, 9, 9, 1), (1, 2, 2, 1), "SAME")

    for f, args in ((depthwise, (x, w)), (pooled, (x,)), (summed, (x,))):
        assert not [s for s in steps_of(f, *args) if isinstance(s, Host)]
        with spmd.disable_jit():
            wanted = f(*args)
        np.testing.assert_allclose(spmd.jit(f)(*args), wanted, rtol=1e-4, atol=1e-4)
        grads = spmd.jit(spmd.grad(lambda *a, f=f: (f(*a) ** 2).sum()))(*args)
        with spmd.disable_jit():
            wanted = spmd.grad(lambda *a, f=f: (f(*a) ** 2).sum())(*args)
        np.testing.assert_allclose(grads, wanted, rtol=1e-4, atol=1e-3)
