"""`spmd.scipy.interpolate` against SciPy, and gradients in values and coordinates."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd.base.errors import ArgumentError, ShapeError
from spmd.scipy.interpolate import RegularGridInterpolator
from spmd.testing import check_grads

oracle = pytest.importorskip("scipy.interpolate")
RNG = np.random.default_rng(0)
GRID = (np.array([0.0, 0.5, 2.0, 3.0]), np.array([-1.0, 0.0, 4.0]))


@pytest.fixture(autouse=True)
def wide_dtypes():
    with spmd.config.override("enable_x64", True):
        yield


@pytest.mark.parametrize("method", ["linear", "nearest"])
@pytest.mark.parametrize("fill_value", [np.nan, -7.0, None])
@pytest.mark.parametrize("inner", [(), (2,)])
def test_values(method, fill_value, inner):
    values = RNG.normal(size=(4, 3, *inner))
    xi = RNG.uniform(-2, 5, size=(6, 5, 2))
    how = {"method": method, "bounds_error": False, "fill_value": fill_value}
    found = RegularGridInterpolator(GRID, values, **how)(xi)
    wanted = oracle.RegularGridInterpolator(GRID, values, **how)(xi)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_coordinates_as_a_tuple_broadcast():
    values = RNG.normal(size=(4, 3))
    found = RegularGridInterpolator(GRID, values)((np.array([[0.2], [1.0]]), np.array([0.0, 3.0])))
    wanted = oracle.RegularGridInterpolator(GRID, values)(([[0.2], [1.0]], [0.0, 3.0]))
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_derivatives_and_jit():
    values, xi = RNG.normal(size=(4, 3)), np.array([[0.2, 1.0], [2.4, -0.3]])

    def f(values, xi):
        return RegularGridInterpolator(GRID, values)(xi)

    check_grads(f, [values, xi], 2)
    np.testing.assert_allclose(spmd.jit(f)(values, xi), f(values, xi), rtol=1e-12)


def test_mistakes_are_named():
    values = np.ones((4, 3))
    with pytest.raises(ArgumentError, match="method must be"):
        RegularGridInterpolator(GRID, values, "cubic")
    with pytest.raises(ArgumentError, match="use fill_value"):
        RegularGridInterpolator(GRID, values, bounds_error=True)
    with pytest.raises(ShapeError, match=r"points\[0\] must be a vector of 3"):
        RegularGridInterpolator(GRID, values.T)
    with pytest.raises(ShapeError, match="last dim of xi must be 2"):
        RegularGridInterpolator(GRID, values)(np.ones(3))
