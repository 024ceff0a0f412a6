"""`custom_linear_solve` and `custom_root`: values, and derivatives of the equation they solve."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd import numpy as snp
from spmd.base.config import config
from spmd.base.errors import GradError, PytreeError, ShapeError
from spmd.testing import check_grads

RNG = np.random.default_rng(5)
A = RNG.normal(size=(3, 3)) + 3 * np.eye(3)
B = RNG.normal(size=3)


@pytest.fixture(autouse=True)
def wide_dtypes():
    with config.override("enable_x64", True):
        yield


def dense(matvec, b):
    """Solve by making the matrix, out of sight of differentiation."""
    matrix = spmd.jacfwd(matvec)(snp.zeros_like(b))
    return snp.linalg.solve(lax.stop_gradient(matrix), b)


def solution(a, b):
    return lax.custom_linear_solve(lambda x: a @ x, b, dense, dense)


def iterated(a, b):
    """Richardson's iteration, which has no reverse mode of its own."""

    def solve(matvec, b):
        return lax.while_loop(
            lambda x: snp.linalg.norm(matvec(x) - b) > 1e-12,
            lambda x: x + 0.1 * (b - matvec(x)),
            snp.zeros_like(b),
        )

    return lax.custom_linear_solve(lambda x: a @ x, b, solve, symmetric=True)


def test_value_and_derivatives():
    np.testing.assert_allclose(solution(A, B), np.linalg.solve(A, B))
    np.testing.assert_allclose(spmd.jit(solution)(A, B), np.linalg.solve(A, B))
    check_grads(solution, (A, B), 2)
    symmetric = (A + A.T) / 2
    gradient = spmd.jit(spmd.grad(lambda a, b: iterated(a, b).sum()))(symmetric, B)
    x, y = np.linalg.solve(symmetric, B), np.linalg.solve(symmetric, np.ones(3))
    np.testing.assert_allclose(gradient, -np.outer(y, x), atol=1e-9)


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0)])
def test_vmap(in_axes):
    a = np.stack([A, A + 1]) if in_axes[0] == 0 else A
    b = np.stack([B, B - 1]) if in_axes[1] == 0 else B
    found = spmd.vmap(solution, in_axes)(a, b)
    gradient = spmd.vmap(spmd.grad(lambda a, b: solution(a, b).sum()), in_axes)(a, b)
    for k in range(2):
        ak, bk = (x[k] if d == 0 else x for x, d in zip((a, b), in_axes, strict=True))
        x, y = np.linalg.solve(ak, bk), np.linalg.solve(ak.T, np.ones(3))
        np.testing.assert_allclose(found[k], x)
        np.testing.assert_allclose(gradient[k], -np.outer(y, x))


def test_pytrees_and_auxiliary_results():
    def solve(matvec, b):
        unit = matvec({"x": 1.0, "y": 1.0})
        return {k: b[k] / unit[k] for k in b}, {"steps": 1}

    def f(a):
        x, aux = lax.custom_linear_solve(
            lambda v: {"x": a * v["x"], "y": 2 * a * v["y"]},
            {"x": 6.0, "y": 8.0},
            solve,
            solve,
            has_aux=True,
        )
        return x["x"] + x["y"], aux

    (value, aux), slope = spmd.value_and_grad(f, has_aux=True)(2.0)
    assert (float(value), int(aux["steps"]), float(slope)) == (5.0, 1, -2.5)


def test_errors():
    with pytest.raises(GradError, match="transpose_solve"):
        spmd.grad(lambda b: lax.custom_linear_solve(lambda x: A @ x, b, dense).sum())(B)
    with pytest.raises(ShapeError, match="matvec must return the shapes"):
        lax.custom_linear_solve(lambda x: x[:2], B, dense)
    with pytest.raises(PytreeError, match="solve must return the structure"):
        lax.custom_linear_solve(lambda x: x, B, lambda matvec, b: (b, b))


def newton(f, x):
    return lax.while_loop(lambda x: snp.abs(f(x)) > 1e-12, lambda x: x - f(x) / spmd.grad(f)(x), x)


def cube_root(a):
    return lax.custom_root(lambda x: x**3 - a, 1.0, newton, lambda g, y: y / g(1.0))


def test_custom_root():
    assert float(cube_root(8.0)) == pytest.approx(2)
    check_grads(cube_root, (np.float64(8.0),), 2)
    assert float(spmd.jit(spmd.grad(cube_root))(8.0)) == pytest.approx(1 / 12)
    found = spmd.vmap(spmd.grad(cube_root))(np.array([1.0, 8.0]))
    np.testing.assert_allclose(found, [1 / 3, 1 / 12])


def test_custom_root_of_several_unknowns():
    """The tangent system is solved with custom_linear_solve, so that reverse mode works."""

    def root(a):
        def solve(f, x):
            return lax.fori_loop(
                0, 30, lambda _, x: x - snp.linalg.solve(spmd.jacfwd(f)(x), f(x)), x
            )

        def tangent_solve(g, y):
            return lax.custom_linear_solve(g, y, dense, dense)

        return lax.custom_root(lambda x: a @ x + x**3 - 1, snp.zeros(3), solve, tangent_solve)

    matrix = A @ A.T
    x = np.asarray(root(matrix))
    np.testing.assert_allclose(matrix @ x + x**3, np.ones(3))
    check_grads(root, (matrix,), 1)


def test_custom_root_with_aux():
    root = lax.custom_root(
        lambda x: x - 3.0, 0.0, lambda f, x: (x - f(x), 7), lambda g, y: y / g(1.0), has_aux=True
    )
    assert tuple(map(float, root)) == (3.0, 7.0)
