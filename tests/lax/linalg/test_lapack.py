"""LAPACK under NumPy against array code and NumPy's public functions: the slow twins."""

from __future__ import annotations

import ctypes
import itertools
import sys

import numpy as np
import pytest

import spmd
from spmd.base.config import config
from spmd.lax import linalg
from spmd.lax.linalg import lapack
from spmd.lax.linalg.lu import _FEW, _eliminate, _permutation
from spmd.lax.linalg.triangular import forward_substitution

TOLERANCE = {"float32": 2e-5, "float64": 1e-12, "complex64": 2e-5, "complex128": 1e-12}
SHAPES = [(1, 1), (4, 4), (33, 33), (40, 7), (7, 40), (3, 12, 12), (2, 0, 0), (50, 3, 3)]


def _stack(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    made = rng.standard_normal((2, *shape))
    return (made[0] + 1j * made[1] if dtype.startswith("c") else made[0]).astype(dtype)


@pytest.fixture
def no_routines(monkeypatch):
    """NumPy as if linked with a library whose names are not known."""

    def use() -> None:
        monkeypatch.setattr(lapack, "_routine", lambda name, dtype: None)
        monkeypatch.setattr(lapack, "_module", lambda: None)

    return use


@pytest.fixture(autouse=True)
def wide_dtypes():
    with config.override("enable_x64", True):
        yield


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_ways_give_the_same_factors(shape, dtype, no_routines):
    x = _stack(shape, dtype)
    square = shape[-2] == shape[-1]
    positive = x @ np.conj(np.swapaxes(x, -1, -2)) + 3 * np.eye(shape[-2], dtype=dtype)

    def results():
        found = [
            *linalg.lu(x),
            *linalg.qr(x, full_matrices=True),
            *linalg.qr(x, full_matrices=False),
        ]
        found += [linalg.cholesky(positive), linalg.eigh(positive)[1], linalg.svd(x)[1]]
        if square:
            found += [linalg.solve(positive, x)]
            for left, lower, transposed, unit in itertools.product((False, True), repeat=4):
                how = {"left_side": left, "lower": lower, "transpose_a": transposed}
                found.append(linalg.triangular_solve(positive, x, unit_diagonal=unit, **how))
        return [np.asarray(y) for y in found]

    native = results()
    no_routines()
    for a, b in zip(native, results(), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        scale = max(np.abs(b).max(), 1) if b.size else 1
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE[dtype] * scale * shape[-1])


def test_matrices_on_which_lapack_fails_are_nan_and_the_others_are_not(no_routines):
    x = np.stack([np.eye(3), -np.eye(3), np.zeros((3, 3))]).astype(np.float32)

    def results():
        return np.asarray(linalg.cholesky(x)), np.asarray(linalg.solve(x, np.ones_like(x)))

    native = results()
    no_routines()
    for a, b in zip(native, results(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_nans_pivot_as_in_array_code():
    x = _stack((5, 5), "float32")
    x[3, 2] = np.nan
    made, pivots = x[None].copy(), np.zeros((1, 5), np.int32)
    assert not lapack.lu_factors(made, pivots)
    _eliminate(made, pivots)
    np.testing.assert_array_equal(np.asarray(linalg.lu(x)[0]), made[0])


def test_permutations_of_few_and_of_many():
    rng = np.random.default_rng(2)
    pivots = np.stack([np.arange(6) + rng.integers(0, 6 - np.arange(6)) for _ in range(_FEW)])
    pivots = pivots.astype(np.int32)
    many = _permutation(pivots, 8)
    np.testing.assert_array_equal(many, [_permutation(p[None], 8)[0] for p in pivots])


def test_native_code_finds_routines_that_others_do_not_see(monkeypatch):
    symbol = lapack.exported("getrf", "f")
    if symbol is None:
        pytest.skip("NumPy is linked with a library whose names are not known")
    found = lapack.addresses(b"ELF\0" + symbol.encode() + b"\0memcpy\0other_64_\0")
    assert list(found) == [symbol]
    assert not hasattr(ctypes.CDLL(None), symbol)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert lapack.exported("getrf", "f") is None


def test_operands_stay():
    a, b = _stack((20, 20), "float32"), _stack((20, 3), "float32", 1)
    kept = a.copy(), b.copy()
    forward_substitution(a, b, False)
    spmd.jit(lambda a: (linalg.lu(a), linalg.qr(a)))(a)
    np.testing.assert_array_equal(a, kept[0])
    np.testing.assert_array_equal(b, kept[1])


def test_the_library_has_its_threads_again_when_all_have_left():
    """Two busy threads that wait for each other take 100 times as long as one."""
    threads = lapack.set_threads()
    before = threads(2)
    try:
        with lapack.few_threads(64):
            with pytest.raises(ZeroDivisionError), lapack.few_threads(100):
                raise ZeroDivisionError
            assert threads(1) == 1
        assert threads(2) == 2
        for rows in (4, 5000):
            with lapack.few_threads(rows):
                assert threads(2) == 2
    finally:
        threads(before)


@pytest.mark.skipif(
    not hasattr(lapack.library(), "openblas_set_num_threads_local"), reason="another library"
)
def test_factorizations_run_on_one_thread(monkeypatch):
    seen = []
    monkeypatch.setattr(lapack, "set_threads", lambda: lambda count: seen.append(count) or 2)
    for f in (linalg.lu, linalg.eigh, linalg.svd, linalg.qr, linalg.cholesky):
        f(np.eye(40))
    assert seen == [1, 2] * 5
