"""Reads that fill and writes that are dropped, at indices that point far from the array."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp

ROWS, FAR = 64, 1 << 24
RNG = np.random.default_rng(0)
# Whole vectors, a short last one, less than one.
WIDTHS = [64, 83, 5, 1]
DTYPES = ["float32", "int32", "int8", "bool", "complex64", "bfloat16"]


def array_of(shape: tuple[int, ...], dtype: str) -> Any:
    x = RNG.integers(0, 5, shape)
    return np.asarray(snp.asarray(x + 1j * x if dtype == "complex64" else x).astype(dtype))


def places(count: int = 50) -> np.ndarray:
    """Indices half of which are out of bounds, some just so and some by a lot."""
    near = RNG.integers(-2 * ROWS, 2 * ROWS, count)
    far = RNG.integers(-FAR, FAR, count)
    return np.where(RNG.integers(0, 4, count) > 0, near, far).astype(np.int32)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_far_away_are_filled(dtype: str, width: int):
    x, at = array_of((ROWS, width), dtype), places()
    inside = (at >= -ROWS) & (at < ROWS)
    expected = np.where(inside[:, None], x[np.where(inside, at, 0)], np.ones((), x.dtype))
    found = spmd.jit(lambda x, at: x.at[at].get(mode="fill", fill_value=1))(x, at)
    np.testing.assert_array_equal(np.asarray(found), expected)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_far_away_are_not_written(dtype: str, width: int):
    x, at = array_of((ROWS, width), dtype), places()
    rows = array_of((len(at), width), dtype)
    inside = (at >= -ROWS) & (at < ROWS)
    expected = x.copy()
    for k, row in zip(at[inside], rows[inside], strict=True):
        expected[k] = row
    found = spmd.jit(lambda x, at, rows: x.at[at].set(rows, mode="drop"))(x, at, rows)
    np.testing.assert_array_equal(np.asarray(found), expected)
    if dtype != "bool":
        expected = x.copy()
        for k, row in zip(at[inside], rows[inside], strict=True):
            expected[k] += row
        found = spmd.jit(lambda x, at, rows: x.at[at].add(rows, mode="drop"))(x, at, rows)
        np.testing.assert_array_equal(np.asarray(found), expected)


def test_rows_that_are_filled_in_part():
    """Whether an element is read differs within a vector, too."""
    x, at = array_of((ROWS, 40), "float32"), places()

    def f(x: Any, at: Any) -> Any:
        taken = x.at[at].get(mode="fill", fill_value=-1)
        return snp.pad(taken, ((0, 0), (3, 7)), constant_values=2.0) * 2

    inside = (at >= -ROWS) & (at < ROWS)
    taken = np.where(inside[:, None], x[np.where(inside, at, 0)], -1)
    expected = np.pad(taken, ((0, 0), (3, 7)), constant_values=2) * 2
    np.testing.assert_array_equal(np.asarray(spmd.jit(f)(x, at)), expected)


FAST: dict[str, Callable[..., Any]] = {
    "read": lambda x, at, rows: x.at[at].get(mode="fill"),
    "set": lambda x, at, rows: x.at[at].set(rows, mode="drop"),
    "add": lambda x, at, rows: x.at[at].add(rows, mode="drop"),
}


@pytest.mark.parametrize("name", FAST)
def test_rows_far_away_take_no_longer_than_others(name: str):
    """They took 200 times as long, as each touched a page that is not mapped."""
    f = spmd.jit(FAST[name])
    x, rows = (snp.ones((count, 512)) for count in (1024, 4096))
    near = snp.asarray(RNG.integers(0, 1024, 4096).astype(np.int32))
    times = []
    for at in (near, near + FAR):
        f(x, at, rows).block_until_ready()
        best = np.inf
        for _ in range(8):
            start = time.process_time()
            f(x, at, rows).block_until_ready()
            best = min(best, time.process_time() - start)
        times.append(best)
    assert times[1] < 30 * times[0]
