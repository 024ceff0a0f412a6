"""Factorizations as native steps, against the same primitives outside `jit`, by NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base.config import config
from spmd.compile.lower import linalg
from spmd.lax.linalg import lapack

TOLERANCE = {"float32": 2e-3, "float64": 1e-10, "complex64": 2e-3, "complex128": 1e-10}
SHAPES = [(9, 9), (33, 33), (3, 20, 20), (20, 9), (9, 20), (2, 30, 12), (1, 20), (20, 1)]
SQUARE = [s for s in SHAPES if s[-1] == s[-2]]


@pytest.fixture(autouse=True)
def wide_dtypes() -> Iterator[None]:
    with config.override("enable_x64", True):
        yield


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    made = np.random.default_rng(seed).normal(size=(2, *shape))
    return (made[0] + 1j * made[1] if dtype.startswith("c") else made[0]).astype(dtype)


def definite(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    a = numbers(shape, dtype)
    return (a @ np.conj(np.swapaxes(a, -1, -2)) + shape[-1] * np.eye(shape[-1])).astype(dtype)


def compare(function: Callable[..., Any], *operands: np.ndarray, host: bool = False) -> None:
    """The results of a program whose only step is LAPACK, and those of NumPy."""
    program = spmd.jit(function)
    assert ("host" in program.lower(*operands).compile().as_text()) == host
    found, expected = (spmd.tree.leaves(f(*operands)) for f in (program, function))
    tolerance = TOLERANCE[operands[0].dtype.name]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        a, b = np.asarray(one), np.asarray(other)
        most = max(1, np.nan_to_num(abs(b)).max(initial=0))
        np.testing.assert_allclose(a, b, tolerance, tolerance * most)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rectangular(shape: tuple[int, ...], dtype: str):
    x = numbers(shape, dtype)
    for full in (False, True):
        compare(lambda x, full=full: lax.linalg.qr(x, full_matrices=full), x)
        compare(lambda x, full=full: lax.linalg.svd(x, full_matrices=full), x)
        compare(lambda x, full=full: lax.linalg.qr(x, full_matrices=full)[1], x)
    compare(lambda x: lax.linalg.svd(x, compute_uv=False), x)
    compare(lambda x: lax.linalg.svd(x)[1], x)
    compare(lambda x: lax.linalg.svd(x)[0], x)
    compare(lax.linalg.lu, x, host=dtype.startswith("c"))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SQUARE, ids=str)
def test_square(shape: tuple[int, ...], dtype: str):
    a, b = definite(shape, dtype), numbers((*shape[:-1], 3), dtype, 1)
    compare(lax.linalg.cholesky, a)
    for lower in (False, True):
        compare(lambda a, low=lower: lax.linalg.eigh(a, lower=low, symmetrize_input=False), a)
    compare(lambda a: lax.linalg.eigh(a)[1], a)
    compare(lax.linalg.solve, numbers(shape, dtype), b)
    compare(lax.linalg.solve, numbers(shape, dtype), b[..., :1])
    compare(spmd.numpy.linalg.inv, numbers(shape, dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SQUARE, ids=str)
def test_triangular(shape: tuple[int, ...], dtype: str):
    a = (numbers(shape, dtype) / shape[-1] + 2 * np.eye(shape[-1])).astype(dtype)
    b = numbers((*shape[:-1], 3), dtype, 1)
    names = ("left_side", "lower", "transpose_a", "conjugate_a", "unit_diagonal")
    for flags in itertools.product((False, True), repeat=len(names)):
        how = dict(zip(names, flags, strict=True))
        side = b if how["left_side"] else np.ascontiguousarray(np.swapaxes(b, -1, -2))
        # LAPACK conjugates only what it transposes.
        host = dtype.startswith("c") and how["conjugate_a"] and not how["transpose_a"]
        compare(lambda a, b, how=how: lax.linalg.triangular_solve(a, b, **how), a, side, host=host)


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (4, 0), (2, 0, 0), (0, 3, 3)], ids=str)
def test_lapack_is_not_told_of_empty_matrices(shape: tuple[int, ...], capfd: Any):
    x = np.zeros(shape, np.float32)
    functions = [lax.linalg.svd, lambda a: lax.linalg.svd(a, compute_uv=False), lax.linalg.qr]
    functions += [lax.linalg.eigh, lax.linalg.cholesky] * (shape[-1] == shape[-2])
    for f in functions:
        for one, other in zip(*(spmd.tree.leaves(g(x)) for g in (spmd.jit(f), f)), strict=True):
            np.testing.assert_array_equal(one, other, strict=True)
    assert capfd.readouterr() == ("", "")  # LAPACK prints what it refuses


@pytest.mark.parametrize("n", [9, 40])
def test_matrices_that_lapack_refuses_are_nan(n: int):
    """One of a stack, and the others are as without it."""
    a = np.stack([definite((n, n), "float32")] * 3)
    a[1] = -a[1]
    compare(lax.linalg.cholesky, a)
    a[1] = 0
    compare(lax.linalg.solve, a, np.ones((3, n, 2), np.float32))
    a[1, 2, 1] = np.nan
    compare(lax.linalg.lu, a)
    compare(lambda a: lax.linalg.svd(a, compute_uv=False), a)
    compare(lambda a: lax.linalg.svd(a, full_matrices=False), a)
    assert np.isnan(spmd.jit(lambda a: lax.linalg.eigh(a)[1])(a)[1]).all()


def test_pivots_of_columns_with_nan_are_those_of_array_code():
    a = numbers((12, 12), "float32")
    a[3, 2] = np.nan
    compare(lax.linalg.lu, a)


def test_gradients_and_loops_are_native_too():
    a, b = definite((12, 12), "float32"), numbers((12,), "float32")

    def loss(a: Any, b: Any) -> Any:
        return spmd.numpy.linalg.slogdet(a)[1] + b @ spmd.numpy.linalg.solve(a, b)

    compare(spmd.grad(loss), a, b)

    def body(x: Any, _: Any) -> Any:
        x = spmd.numpy.linalg.solve(a, x) * 10
        return x, x.sum()

    compare(lambda b: lax.scan(body, b, None, length=5), b)


def test_stacks_are_shared_by_threads_and_threads_of_lapack_come_back():
    before = lapack.set_threads()(2)
    try:
        for n in (30, 600):
            a = definite((8, n, n) if n < 100 else (n, n), "float32")
            compare(lambda a: lax.linalg.eigh(a)[1], a)
        assert lapack.set_threads()(2) == 2 or lapack.threads_symbol() is None
    finally:
        lapack.set_threads()(before)


def test_without_the_routines_numpy_computes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linalg, "exported", lambda name, dtype: None)
    compare(lax.linalg.eigh, definite((11, 11), "float32"), host=True)


def test_a_stored_program_finds_the_routines(tmp_path: Any, run_python: Any):
    """A second process links code that calls them, without LLVM."""
    program = (
        "import sys, numpy as np, spmd\n"
        "a = np.eye(11, dtype=np.float32) * 4\n"
        "print(float(spmd.jit(spmd.numpy.linalg.det)(a)), 'llvmlite' in sys.modules)\n"
    )
    settings = {"SPMD_CACHE_DIR": str(tmp_path), "SPMD_CHECK": "0"}
    first, second = (run_python(["-c", program], settings) for _ in range(2))
    assert first.stdout.split() == [str(4.0**11), "True"], first.stderr
    assert second.stdout.split() == [str(4.0**11), "False"], second.stderr
