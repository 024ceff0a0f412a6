"""Native sorting: every dtype, every dim, ties in their order, NaNs last, zeros of both signs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.base.config import config
from spmd.compile.cpu.sort.steps import MOST_INSERTED
from spmd.compile.executable.executable import compile_jaxpr
from spmd.compile.lower.steps import MOST_KEPT
from spmd.compile.native.program.steps import Host, walk

RNG = np.random.default_rng(11)
DTYPES = ["float32", "int32", "uint32", "int8", "uint8", "int16", "float16", "bfloat16", "bool"]
WIDE = ["float64", "int64", "uint64"]
# Rows that are inserted and rows that are counted; the sorted dim first, last and between.
SHAPES = [((7,), 0), ((MOST_INSERTED + 1,), 0), ((900,), 0), ((5, 300), 1), ((300, 5), 0)]
SHAPES += [((3, 50, 4), 1), ((4, 1), 1)]


def _array(shape: tuple[int, ...], dtype: str) -> Any:
    values = RNG.standard_normal(shape) * 20
    values = np.abs(values) if dtype.startswith("uint") else values
    return snp.asarray(values).astype(dtype)


def _same(f: Callable[..., Any], *args: Any) -> None:
    """A function compiled natively gives the bits that the primitives' `impl` gives."""
    program = compile_jaxpr(spmd.make_jaxpr(f)(*args))
    assert not any(isinstance(s, Host) for s in walk(program.native.program.steps))
    found = program([snp.asarray(x) for x in args])
    with spmd.disable_jit():
        expected = spmd.tree_util.tree_leaves(f(*args))
    for a, b in zip(map(np.asarray, found), map(np.asarray, expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
def test_sorts_and_positions_are_those_of_numpy(shape, dim, dtype):
    x, ties = _array(shape, dtype), _array(shape, "int8") % 5
    _same(lambda x, y: lax.sort((x, y), dim), x, ties)
    _same(lambda x, y: (lax.argsort(x, dim), lax.argsort(y, dim)), x, ties)
    _same(lambda x, y: lax.sort((y, x, x), dim, num_keys=2), x, ties)


@pytest.mark.parametrize("dtype", WIDE)
def test_wide_keys_are_sorted_by_halves(dtype):
    with config.override("enable_x64", True):
        x = _array((6, 200), dtype)
        x = x * 3**30 if dtype != "float64" else x
        _same(lambda x: (lax.sort(x, 1), lax.argsort(x, 0), *lax.top_k(x, 3)), x)


def test_complex_keys_are_sorted_by_both_parts():
    x = (RNG.integers(-2, 3, (4, 99)) + 1j * RNG.integers(-9, 9, (4, 99))).astype(np.complex64)
    _same(lambda x: (lax.sort(x, 1), lax.argsort(x, 1)), x)


@pytest.mark.parametrize("k", [1, 3, MOST_KEPT, MOST_KEPT + 1, 130])
@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8", "bfloat16"])
def test_the_largest_come_first(k, dtype):
    _same(lambda x: lax.top_k(x, k), _array((9, 130), dtype))
    _same(lambda x: lax.top_k(x, k, axis=0), _array((130, 9), dtype))


SPECIAL = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1, -1, 1e-45, -1e-45, 3e38, -3e38]


@pytest.mark.parametrize("rounds", [1, 3, 40])
def test_zeros_infinities_and_nans_have_their_order(rounds):
    x = RNG.permutation(np.array(SPECIAL * rounds, np.float32))
    _same(lambda x: lax.argsort(x), x)
    _same(lambda x: lax.top_k(x, min(x.size, 30))[1], x)
    _same(lambda x: lax.top_k(x, x.size)[1], x)
    _same(lambda x: lax.sort(x), x)


@pytest.mark.parametrize("order", [1, -1])
def test_sorted_rows_stay_as_they_are(order):
    x = np.arange(500, dtype=np.int32)[::order]
    _same(lambda x: (lax.sort(x), lax.argsort(x), *lax.top_k(x, 8)), x)


def test_rows_are_sorted_inside_a_loop():
    def f(x):
        return lax.scan(lambda c, x: (lax.sort(c + x), lax.top_k(c, 2)[1]), x[0], x)

    _same(f, _array((6, 70), "float32"))


def test_gradients_follow_the_permutation():
    x = _array((3, 40), "float32")
    w = _array((3, 40), "float32")
    found = spmd.jit(spmd.grad(lambda x: (lax.sort(x, 1) * w).sum()))(x)
    back = np.argsort(np.argsort(np.asarray(x), 1), 1)
    np.testing.assert_array_equal(np.asarray(found), np.take_along_axis(np.asarray(w), back, 1))
