"""Factorizations of small matrices as programs, against LAPACK, which takes one at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base.config import config
from spmd.compile.definitions import OF_SMALL_MATRICES
from spmd.compile.definitions.small_matrices import (
    BLOCK,
    LEAST,
    MOST_PIVOTS,
    MOST_ROWS,
    MOST_ROWS_OF_FEW,
    write_small_matrices,
)

RNG = np.random.default_rng(0)
# One block, and three of which the last is not full.
COUNTS = (LEAST, 2 * BLOCK + 9)


def general(count: int, m: int, n: int, dtype: str) -> np.ndarray:
    """Matrices among which one has a column of zeros, one a NaN, and one equal pivots."""
    a = RNG.normal(size=(count, m, n))
    a[1, :, 0], a[2, 0, 0], a[3] = 0, np.nan, np.where(np.arange(m * n).reshape(m, n) % 2, 1, -1)
    return a.astype(dtype)


def definite(count: int, n: int, dtype: str) -> np.ndarray:
    """Positive definite matrices but two."""
    a = RNG.normal(size=(count, n, n))
    a = a @ a.swapaxes(1, 2) + n * np.eye(n)
    a[1], a[2] = -a[1], np.nan
    return a.astype(dtype)


def regular(count: int, n: int, dtype: str) -> np.ndarray:
    """Matrices whose triangles have small inverses."""
    return (RNG.normal(size=(count, n, n)) / n + 2 * np.eye(n)).astype(dtype)


def compare(function: Any, *operands: np.ndarray) -> None:
    """The results of all matrices at once, of few and of one, and those of LAPACK outside jit."""
    with config.override("enable_x64", operands[0].dtype == np.float64):
        expected = [np.asarray(x) for x in spmd.tree_util.tree_leaves(function(*operands))]
        program = spmd.jit(function)
        for count in (operands[0].shape[0], LEAST - 1, 1):
            given = [x[:count] for x in operands]
            assert "host" not in program.lower(*given).compile().as_text()
            found = [np.asarray(x) for x in spmd.tree_util.tree_leaves(program(*given))]
            _are_close(found, [x[:count] for x in expected])


def _are_close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    tolerance = 1e-11 if np.float64 in {x.dtype for x in found} else 2e-4
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, tolerance, tolerance)


def test_the_pass_knows_what_has_a_program():
    closed = spmd.make_jaxpr(lax.linalg.lu)(np.ones((LEAST, 2, 2), np.float32))
    assert write_small_matrices(closed).jaxpr.primitives.isdisjoint(OF_SMALL_MATRICES)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (4, 4), (5, 3), (3, 5)])
def test_lu(m: int, n: int, count: int, dtype: str):
    compare(lax.linalg.lu, general(count, m, n, dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (4, 4), (5, 3), (3, 5), (1, 3), (3, 1)])
def test_qr(m: int, n: int, full: bool, dtype: str):
    a = RNG.normal(size=(COUNTS[0], m, n)).astype(dtype)
    a[1, :, 0], a[2] = 0, a[2] * np.asarray(1e-30 if dtype == "float32" else 1e-200, dtype)
    compare(lambda a: lax.linalg.qr(a, full_matrices=full), a)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("n", [1, 3, 6])
def test_cholesky(n: int, count: int, dtype: str):
    compare(lax.linalg.cholesky, definite(count, n, dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", COUNTS)
def test_solve(count: int, dtype: str):
    a = regular(count, 4, dtype)
    a[1] = 0
    compare(lax.linalg.solve, a, RNG.normal(size=(count, 4, 3)).astype(dtype))


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_triangular_solve(left: bool, lower: bool, transposed: bool, unit: bool):
    def solve(a: Any, b: Any) -> Any:
        how = {"left_side": left, "lower": lower, "transpose_a": transposed}
        return lax.linalg.triangular_solve(a, b, unit_diagonal=unit, **how)

    shape = (LEAST, 3, 2) if left else (LEAST, 2, 3)
    compare(solve, regular(LEAST, 3, "float32"), RNG.normal(size=shape).astype(np.float32))


def test_gradients_are_those_of_lapack():
    def loss(a: Any) -> Any:
        q, r = lax.linalg.qr(a, full_matrices=False)
        x = lax.linalg.solve(a, q)
        return lax.reduce_sum(
            x * r * lax.linalg.cholesky(a @ spmd.numpy.matrix_transpose(a)), (1, 2)
        )

    compare(spmd.vmap(spmd.grad(lambda a: loss(a[None])[0])), regular(LEAST, 3, "float32"))


@pytest.mark.parametrize(
    "shape",
    [(LEAST, MOST_ROWS + 1, 2), (LEAST - 1, MOST_ROWS_OF_FEW + 1, 2), (2, MOST_ROWS)],
    ids=["large", "few", "one"],
)
def test_lapack_has_the_others(shape: tuple[int, ...]):
    text = spmd.jit(lax.linalg.lu).lower(np.ones(shape, np.float32)).compile().as_text()
    assert f"lu {math.prod(shape[:-2])}x{shape[-2]}x{shape[-1]}" in text


def test_complex_matrices_are_lapacks():
    a = RNG.normal(size=(LEAST, 2, 2)).astype(np.complex64)
    assert "host lu" in spmd.jit(lax.linalg.lu).lower(a).compile().as_text()


@pytest.mark.parametrize("shape", [(3,), (20,), (4, 9), (2, 300, 5), (MOST_PIVOTS + 1,)], ids=str)
def test_permutations_of_exchanges(shape: tuple[int, ...]):
    rows = shape[-1] + 2
    pivots = np.arange(shape[-1]) + RNG.integers(0, rows - np.arange(shape[-1]), shape)
    program = spmd.jit(lambda p: lax.linalg.lu_pivots_to_permutation(p, rows))
    given = pivots.astype(np.int32)
    assert ("host" in program.lower(given).compile().as_text()) == (shape[-1] > MOST_PIVOTS)
    expected = lax.linalg.lu_pivots_to_permutation(given, rows)
    np.testing.assert_array_equal(program(given), expected)
