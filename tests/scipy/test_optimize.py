"""`spmd.scipy.optimize.minimize` on functions with known minima, compiled and vectorised too."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base.errors import ArgumentError, ShapeError
from spmd.scipy.optimize import minimize


@pytest.fixture(autouse=True)
def wide_dtypes():
    with spmd.config.override("enable_x64", True):
        yield


def rosenbrock(x):
    return snp.sum(100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


def himmelblau(p):
    x, y = p
    return (x**2 + y - 11.0) ** 2 + (x + y**2 - 7.0) ** 2


@pytest.mark.parametrize("size", [2, 5])
def test_rosenbrock(size):
    result = minimize(rosenbrock, np.zeros(size), method="BFGS")
    assert bool(result.success)
    assert int(result.status) == 0
    np.testing.assert_allclose(result.x, np.ones(size), atol=1e-5)
    assert float(np.max(np.abs(result.jac))) < 1e-5
    assert int(result.nfev) >= int(result.nit) > 0


def test_inverse_hessian_of_a_quadratic():
    a = np.array([[3.0, 1.0], [1.0, 2.0]])
    b = np.array([1.0, -1.0])
    result = minimize(lambda x, a: 0.5 * x @ a @ x - b @ x, np.ones(2), (a,), method="BFGS")
    np.testing.assert_allclose(result.x, np.linalg.solve(a, b), atol=1e-5)
    np.testing.assert_allclose(result.hess_inv, np.linalg.inv(a), atol=1e-2)


def test_compiled_and_vectorised():
    starts = np.array([[1.0, 1.0], [-2.0, 2.0], [-3.0, -3.0]])

    def solve(x0):
        result = minimize(himmelblau, x0, method="BFGS")
        return result.x, result.fun

    x, f = spmd.jit(spmd.vmap(solve))(starts)
    np.testing.assert_allclose(f, 0, atol=1e-9)
    for start, found in zip(starts, np.asarray(x), strict=True):
        np.testing.assert_allclose(found, solve(start)[0], atol=1e-6)


def test_ends_are_told_apart():
    few = minimize(rosenbrock, np.zeros(2), method="BFGS", options={"maxiter": 2})
    assert (bool(few.success), int(few.status), int(few.nit)) == (False, 1, 2)
    downhill = minimize(lambda x: -snp.sum(x), np.zeros(2), method="BFGS")
    assert (bool(downhill.success), int(downhill.status)) == (False, 3)
    there = minimize(rosenbrock, np.ones(2), method="BFGS")
    assert (bool(there.success), int(there.nit)) == (True, 0)


def test_mistakes_are_named():
    with pytest.raises(ArgumentError, match="method must be 'BFGS'"):
        minimize(rosenbrock, np.zeros(2), method="Newton-CG")
    with pytest.raises(ArgumentError, match="unknown options"):
        minimize(rosenbrock, np.zeros(2), method="BFGS", options={"xtol": 1.0})
    with pytest.raises(ShapeError, match="x0 must be a vector"):
        minimize(rosenbrock, np.zeros((2, 2)), method="BFGS")


@pytest.mark.parametrize("steepness", [1e-2, 1e4])
def test_the_scale_of_a_function_is_found(steepness):
    x0 = np.array([1.0, 1.0], np.float32)
    f = lambda x: snp.mean((steepness * x) ** 2)  # noqa: E731
    result = minimize(f, x0, method="BFGS", options={"gtol": 1e-6})
    assert bool(result.success)
    np.testing.assert_allclose(result.x, np.zeros(2), atol=1e-2)
