"""Rows of numbers sorted by vectors: beside NumPy, for any length, dtype and kind of row."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.compile.cpu.sort import quicksort, value_steps
from spmd.compile.cpu.sort.network import COLUMN_NETWORKS
from spmd.compile.cpu.sort.value_steps import (
    FLOAT,
    SIGNED,
    UNSIGNED,
    registers_for,
    values_symbol,
    values_text,
)
from spmd.compile.executable.executable import compile_jaxpr
from spmd.compile.native.llvm.compiler import compile_texts
from spmd.compile.native.program.steps import KernelStep, walk

KINDS = {"i": SIGNED, "u": UNSIGNED, "f": FLOAT}
DTYPES = ["float32", "int32", "uint32", "float64", "int64", "uint64"]
# Around the sizes of networks and registers, and rows that are cut often.
SIZES = [0, 1, 2, 7, 8, 9, 15, 16, 17, 33, 63, 64, 65, 127, 128, 129, 200, 1000, 5000]


def native(bits: int, compresses: bool) -> Callable[[np.ndarray], np.ndarray]:
    """The function that sorts rows, on processors that compress registers or do not."""
    return loaded(values_symbol(bits), values_text(bits, 0, compresses))


def loaded(symbol: str, text: str) -> Callable[[np.ndarray], np.ndarray]:
    """A function that sorts rows, of such a module."""
    address = compile_texts([text], optimize=True)[symbol]
    pointer, i64 = ctypes.c_void_p, ctypes.c_int64
    code = ctypes.CFUNCTYPE(None, pointer, pointer, i64, i64)(address)

    def run(x: np.ndarray) -> np.ndarray:
        rows, size = x.shape
        # What is not to be touched shows.
        made, scratch = np.full(x.size + 64, 77, x.dtype), np.empty(size + 64, x.dtype)
        args = (pointer * 3)(x.ctypes.data, made.ctypes.data, scratch.ctypes.data)
        code(args, (i64 * 2)(size, KINDS[x.dtype.kind]), 0, rows)
        assert (made[x.size :] == 77).all()
        return made[: x.size].reshape(x.shape)

    return run


def rows_of(dtype: str, size: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Rows of every kind: any, few different, in order, backwards, extremes, organ pipes."""
    if dtype.startswith("float"):
        any_row = rng.normal(size=size) * 10.0 ** rng.integers(-30, 30, size)
        extremes = [-np.inf, np.inf, np.finfo(dtype).tiny, -np.finfo(dtype).tiny]
    else:
        info = np.iinfo(dtype)
        any_row = rng.integers(info.min, info.max, size, dtype=dtype, endpoint=True)
        extremes = [info.min, info.max]
    few, ordered = rng.integers(0, 4, size), np.sort(any_row)
    pipes = np.minimum(np.arange(size), np.arange(size)[::-1])
    rows = [
        any_row,
        few,
        ordered,
        ordered[::-1],
        rng.choice(np.array(extremes, dtype), size),
        pipes,
    ]
    rows += [np.full(size, extremes[0]), np.full(size, extremes[1])]
    return [np.asarray(row).astype(dtype) for row in rows]


@pytest.mark.parametrize("compresses", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sorted_rows_are_those_of_numpy(dtype, compresses):
    if compresses and not value_steps.can_compress():
        pytest.skip("this processor cannot compress registers")
    run, rng = native(8 * np.dtype(dtype).itemsize, compresses), np.random.default_rng(5)
    for size in SIZES:
        x = np.stack(rows_of(dtype, size, rng))
        np.testing.assert_array_equal(run(x), np.sort(x, axis=1), err_msg=str(size))


@pytest.mark.parametrize("compresses", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_equal_numbers_stay_as_they_came(dtype, compresses):
    if compresses and not value_steps.can_compress():
        pytest.skip("this processor cannot compress registers")
    bits = 8 * np.dtype(dtype).itemsize
    run, rng = native(bits, compresses), np.random.default_rng(6)
    tiny = np.finfo(dtype).smallest_subnormal
    for size in (1, 5, 40, 300, 3000):
        x = rng.choice(np.array([0.0, -0.0, np.nan, 1, -1, tiny, -tiny, np.inf], dtype), (4, size))
        whole = x.view(f"u{bits // 8}")
        whole[np.isnan(x)] ^= rng.integers(0, 99, np.isnan(x).sum()).astype(whole.dtype)
        whole[np.isnan(x)] ^= (rng.integers(0, 2, np.isnan(x).sum()) << bits - 1).astype(
            whole.dtype
        )
        order = np.argsort(x, axis=1, kind="stable")
        np.testing.assert_array_equal(
            run(x).view(whole.dtype), np.take_along_axis(whole, order, 1), err_msg=str(size)
        )


def test_networks_sort_every_row_of_zeros_and_ones():
    # What does that sorts anything (Knuth's 0-1 principle).
    for size, pairs in COLUMN_NETWORKS.items():
        rows = np.array(np.unravel_index(np.arange(2**size), (2,) * size))
        for i, j in pairs:
            rows[i], rows[j] = np.minimum(rows[i], rows[j]), np.maximum(rows[i], rows[j])
        assert (np.diff(rows, axis=0) >= 0).all()


def against_pivots(size: int) -> tuple[np.ndarray, int]:
    """A row in which every pivot is nearly the least key, and how many keys partitions see."""
    samples, fewest = quicksort.LARGE_SAMPLE, quicksort.LARGE_SAMPLE_FROM
    places, keys = np.arange(size), np.full(size, size, np.int32)
    following = seen = 0
    # Partitions leave what is behind the pivot in its order, so samples can be foreseen.
    while len(places) >= fewest:
        step = len(places) // samples
        sampled = places[np.arange(samples) * step + step // 2]
        missing = samples // 2 + 1 - np.count_nonzero(keys[sampled] < size)
        free = sampled[keys[sampled] == size][: max(missing, 0)]
        keys[free] = following + np.arange(len(free))
        following += len(free)
        seen += len(places)
        places = places[keys[places] >= np.sort(keys[sampled])[samples // 2]]
    rest = keys == size
    keys[rest] = following + np.arange(np.count_nonzero(rest))
    return keys, seen


def test_bad_pivots_do_not_make_it_quadratic():
    if not value_steps.can_compress():
        pytest.skip("this processor cannot compress registers")
    size = 30_000
    keys, seen = against_pivots(size)
    assert seen > 10 * (2 * size.bit_length() + quicksort.EXTRA_PASSES) * size
    np.testing.assert_array_equal(native(32, True)(keys[None])[0], np.arange(size))


@pytest.mark.parametrize("bits", [32, 64])
def test_rows_with_bad_pivots_are_sorted_by_bytes(bits, monkeypatch):
    if not value_steps.can_compress():
        pytest.skip("this processor cannot compress registers")
    x = np.random.default_rng(9).integers(-(2**30), 2**30, (2, 5000)).astype(f"i{bits // 8}")
    for patience in (1, 3):
        monkeypatch.setattr(quicksort, "EXTRA_PASSES", patience - 2 * (5000).bit_length())
        text = values_text.__wrapped__(bits, 0, True)
        text = text.replace(values_symbol(bits), f"impatient_{bits}_{patience}")
        np.testing.assert_array_equal(
            loaded(f"impatient_{bits}_{patience}", text)(x), np.sort(x, axis=1)
        )


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_long_rows_are_cut_and_shared(rows):
    rng, size = np.random.default_rng(7), 40_000
    x = rng.normal(size=(rows, size)).astype(np.float32)
    x[-1, rng.integers(0, size, 900)] = np.nan
    x[0, rng.integers(0, size, 900)] = -0.0
    x[0, rng.integers(0, size, 900)] = 0.0
    for given in (x, rng.integers(-3, 3, (rows, size)).astype(np.int32), np.ones_like(x)):
        program = compile_jaxpr(spmd.make_jaxpr(lax.sort)(given))
        steps = [s for s in walk(program.native.program.steps) if isinstance(s, KernelStep)]
        cut = rows < 5 and value_steps.can_compress()
        assert (len(steps) > 1) == cut
        (found,) = program([spmd.numpy.asarray(given)])
        expected = np.sort(given, axis=1, kind="stable")
        np.testing.assert_array_equal(np.asarray(found).view("u4"), expected.view("u4"))


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8"])
def test_positions_in_long_rows_are_stable(dtype):
    rng = np.random.default_rng(10)
    x = rng.integers(0, 200, (2, 30_000)).astype(dtype)
    if dtype == "float32":
        x[rng.random(x.shape) < 0.1] = np.nan
        x[rng.random(x.shape) < 0.1] = -0.0
    numbers = np.arange(x.size, dtype=np.float32).reshape(x.shape)
    program = compile_jaxpr(
        spmd.make_jaxpr(lambda x, y: (lax.argsort(x), *lax.sort((x, y))))(x, numbers)
    )
    order, keys, followed = map(np.asarray, program([spmd.numpy.asarray(v) for v in (x, numbers)]))
    expected = np.argsort(x, axis=1, kind="stable")
    np.testing.assert_array_equal(order, expected)
    np.testing.assert_array_equal(keys, np.take_along_axis(x, expected, 1))
    np.testing.assert_array_equal(followed, np.take_along_axis(numbers, expected, 1))


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint32"])
def test_short_rows_have_code_of_their_own(dtype):
    rng = np.random.default_rng(12)
    texts = set()
    for size in (1, 3, 16, 17, 64, 65, 128, 129):
        x = np.stack(rows_of(dtype, size, rng))
        np.testing.assert_array_equal(spmd.jit(lax.sort)(x), np.sort(x, axis=1))
        texts.add(values_text(32, registers_for(f"{x.dtype.kind}32", size)))
    assert 2 < len(texts) <= len(COLUMN_NETWORKS) + 1
    sizes = sorted(map(len, texts))
    assert sizes[0] < sizes[-1] / 3


def test_other_dims_are_sorted_where_they_lie():
    x = np.random.default_rng(8).normal(size=(30, 50, 7)).astype(np.float32)
    for dim in range(3):
        found = spmd.jit(lambda x, dim=dim: lax.sort(x, dim) + 1)(x)
        np.testing.assert_array_equal(np.asarray(found), np.sort(x, axis=dim) + 1)
