"""Powers with exponents that the compiler knows: their accuracy, and what special bases give."""

from __future__ import annotations

import numpy as np
import pytest

from spmd import lax
from spmd.api.compiled import jit
from spmd.base.config import config
from spmd.compile.expressions.scalar_ops import KNOWN_POWERS
from spmd.compile.lower.lowering import lower
from spmd.compile.lower.steps import Launch
from spmd.compile.passes import pipeline

CORNERS = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 2.0, -2.5, 3e-39, 1e-45, 3.4e38, 1e-20]
CASES = [(y, dtype) for y in sorted(KNOWN_POWERS) for dtype in (np.float32, np.float64)]


def bases(dtype):
    rng = np.random.default_rng(0)
    low, high = (-100, 88) if dtype == np.float32 else (-740, 709)
    wide = np.exp(rng.uniform(low, high, 5000))
    return np.concatenate([CORNERS, wide, rng.uniform(0.5, 4, 5000)]).astype(dtype)


@pytest.mark.parametrize(("y", "dtype"), CASES)
def test_powers_with_known_exponents_are_accurate(y, dtype):
    with config.override("enable_x64", True), np.errstate(all="ignore"):
        x = bases(dtype)
        got = np.asarray(jit(lambda x: x ** dtype(y))(x))
        assert got.dtype == dtype
        exact = np.power(x.astype(np.longdouble), np.longdouble(y))
        wanted = exact.astype(dtype)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
        np.testing.assert_array_equal(np.signbit(got)[wanted == 0], np.signbit(wanted)[wanted == 0])
        finite = np.isfinite(wanted)
        near_top = np.abs(exact[~finite]) < np.finfo(dtype).max * (1 + 4 * np.finfo(dtype).eps)
        np.testing.assert_array_equal(got[~finite][~near_top], wanted[~finite][~near_top])
        error = np.abs(got[finite].astype(np.longdouble) - exact[finite])
        assert (error / np.spacing(np.abs(wanted[finite]))).max() <= 2


def ops_of(function, x):
    closed = pipeline.run_passes(jit(function).trace(x).jaxpr)
    launches = [step for step in lower(closed).steps if isinstance(step, Launch)]
    passes = [step for launch in launches for step in launch.kernel.passes]
    return {getattr(instr, "op", None) for step in passes for instr in step.instrs}


def test_only_other_exponents_cost_a_pow():
    x = np.ones(10, np.float32)
    assert "pow" not in ops_of(lambda x: x**-1.5, x)
    assert "pow" in ops_of(lambda x: x**1.7, x)


@pytest.mark.parametrize("power", [np.int32, np.uint8, np.int64])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
def test_integer_exponents_are_converted_in_the_kernel(dtype, power):
    with config.override("enable_x64", True):
        x = np.array([0.9, 1.0, 0.0, 1.5, 2.0, 3.0], dtype)
        y = np.array([3, 7, 0, 2, 11, 4], power)
        traced = jit(lax.pow).trace(x, y)
        steps = lower(pipeline.run_passes(traced.jaxpr)).steps
        # Kernels have no powers of complex numbers at all.
        assert all(isinstance(step, Launch) for step in steps) == (dtype != np.complex64)
        got = np.asarray(jit(lax.pow)(x, y))
    assert got.dtype == dtype
    np.testing.assert_allclose(got, np.power(x, y.astype(dtype)), rtol=1e-5, atol=1e-5)
