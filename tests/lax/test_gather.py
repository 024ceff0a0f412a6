"""gather and scatter_add on random dimension numbers, against JAX."""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.api.inspect import make_jaxpr
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeError, ShapeError
from tests.lax.checks import check_abstract, check_derivatives, check_vmap

MODES = ["clip", "fill"]


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def random_case(seed):
    """An operand's shape, an index array, dimension numbers and slice sizes that fit."""
    rng, choose = np.random.default_rng(seed), random.Random(seed)
    shape = [choose.randint(1, 4) for _ in range(choose.randint(1, 4))]
    batch = [choose.randint(1, 3) for _ in range(choose.randint(0, 2))]
    dims = list(range(len(shape)))
    choose.shuffle(dims)
    walks = choose.randint(0, min(len(batch), len(shape)))
    operand_batch, rest = sorted(dims[:walks]), dims[walks:]
    indices_batch = choose.sample(range(len(batch)), walks)
    for d, along in zip(operand_batch, indices_batch, strict=True):
        batch[along] = shape[d]
    # XLA leaves out updates when index vectors have no components, hence at least one.
    index_map = rest[: choose.randint(min(1, len(rest)), len(rest))]
    collapsed = sorted(choose.sample(rest, choose.randint(0, len(rest))))
    sizes = [
        1 if d in collapsed or d in operand_batch else choose.randint(0, s)
        for d, s in enumerate(shape)
    ]
    windows = len(shape) - len(collapsed) - walks
    offsets = sorted(choose.sample(range(windows + len(batch)), windows))
    indices = rng.integers(-3, 6, (*batch, len(index_map))).astype(np.int32)
    numbers = tuple(map(tuple, (offsets, collapsed, index_map, operand_batch, indices_batch)))
    return rng, tuple(shape), indices, numbers, tuple(sizes)


def functions(numbers, sizes, mode):
    """Our gather and scatter_add, and JAX's."""
    ours = (
        lambda x, i: lax.gather(x, i, lax.GatherDimensionNumbers(*numbers), sizes, mode=mode),
        lambda x, i, u: lax.scatter_add(x, i, u, lax.ScatterDimensionNumbers(*numbers), mode=mode),
    )
    theirs = (
        lambda x, i: jax.lax.gather(
            x, i, jax.lax.GatherDimensionNumbers(*numbers), sizes, mode=mode
        ),
        lambda x, i, u: jax.lax.scatter_add(
            x, i, u, jax.lax.ScatterDimensionNumbers(*numbers), mode=mode
        ),
    )
    return ours, theirs


# ---- random dimension numbers ------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(40))
def test_gather_and_scatter_add_are_jaxs(seed, mode):
    rng, shape, indices, numbers, sizes = random_case(seed)
    (read, write), (jax_read, jax_write) = functions(numbers, sizes, mode)
    x = rng.integers(-5, 6, shape).astype(np.float32)
    wanted = np.asarray(jax_read(x, indices))
    np.testing.assert_array_equal(read(x, indices), wanted)
    check_abstract(read, x, indices)
    if 0 in indices.shape[-1:]:
        return
    updates = rng.integers(-5, 6, wanted.shape).astype(np.float32)
    np.testing.assert_array_equal(write(x, indices, updates), jax_write(x, indices, updates))
    check_abstract(write, x, indices, updates)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(8))
def test_derivatives(seed, mode):
    rng, shape, indices, numbers, sizes = random_case(seed)
    (read, write), _ = functions(numbers, sizes, mode)
    x = normal(rng, *shape)
    numbers = lax.GatherDimensionNumbers(*numbers)

    def filled(x):
        return lax.sin(lax.gather(x, indices, numbers, sizes, mode=mode, fill_value=2.0))

    check_derivatives(filled, (x,))
    updates = normal(rng, *np.shape(read(x, indices)))
    check_derivatives(lambda x, u: lax.sin(write(x, indices, u)), (x, updates))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(12))
def test_vmap(seed, mode):
    _, shape, indices, numbers, sizes = random_case(seed)
    (read, write), _ = functions(numbers, sizes, mode)
    stack = np.shape(read(np.zeros(shape, np.float32), indices))

    def make(rng):
        i = rng.integers(-3, 6, indices.shape).astype(np.int32)
        return [rng.integers(-5, 6, shape).astype(np.float32), i]

    check_vmap(read, make, seed)
    check_vmap(write, lambda rng: [*make(rng), np.ones(stack, np.float32)], seed)


# ---- dtypes ------------------------------------------------------------------------------------

ROWS = lax.GatherDimensionNumbers((1,), (0,), (0,))
OUTSIDE = np.array([[1], [7]], np.int32)


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        (np.float32, np.nan),
        (dtypes.bfloat16, np.nan),
        (np.complex64, np.nan),
        (np.int8, -128),
        (np.uint16, 65535),
        (np.bool_, True),
    ],
    ids=str,
)
def test_default_fill(dtype, fill):
    x = np.zeros((3, 2), dtype)
    out = np.asarray(lax.gather(x, OUTSIDE, ROWS, (1, 2), mode="fill"))
    assert out.dtype == x.dtype
    np.testing.assert_array_equal(out[0], x[1])
    np.testing.assert_array_equal(out[1].astype(np.complex64), np.full(2, fill, np.complex64))


def test_keys_are_moved_and_filled():
    keys = np.arange(12, dtype=np.uint32).view(dtypes.key_dtype).reshape(3, 2)
    out = spmd.random.key_data(lax.gather(keys, OUTSIDE, ROWS, (1, 2), mode="fill"))
    np.testing.assert_array_equal(out[0], spmd.random.key_data(keys)[1])
    assert (out[1] == 0xFFFFFFFF).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32, np.uint64, np.int64], ids=str)
def test_indices_of_any_integer_dtype(dtype):
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    indices = np.array([[0], [np.iinfo(dtype).max]], dtype)
    prim_out = lax.gather_p.impl(
        np,
        x,
        indices,
        dimension_numbers=ROWS,
        slice_sizes=(1, 2),
        mode=lax.GatherScatterMode.CLIP,
        fill_value=None,
    )
    np.testing.assert_array_equal(prim_out, x[[0, 2]])


@pytest.mark.parametrize("dtype", [np.float16, dtypes.bfloat16], ids=str)
def test_small_floats_are_summed_in_float32(dtype):
    ones = np.ones((5000, 1), dtype)
    out = lax.scatter_add(
        np.zeros(1, dtype),
        np.zeros((5000, 1), np.int32),
        ones[:, 0],
        lax.ScatterDimensionNumbers((), (0,), (0,)),
    )
    assert np.asarray(out, np.float32)[0] == np.asarray(5000, dtype).astype(np.float32)


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "sizes", "message"),
    [
        (((1,), (0,), (0, 1)), (1, 2), r"start_index_map=\(0, 1\) has 2 entries"),
        (((1,), (), (0,)), (1, 2), r"account for 1 operand dims; float32\[3,2\] has 2"),
        (((1,), (0,), (0,)), (1, 3), r"slice_sizes\[1\]=3 is out of range"),
        (((1,), (0,), (0,)), (0, 2), r"slice_sizes\[0\]=0 must be 1, as dim 0 is collapsed"),
        (((1,), (0,), (0,)), (1,), r"one size for each dim of the operand"),
        (((3,), (0,), (0,)), (1, 2), r"offset_dims=\(3,\) must be increasing dims in range\(2\)"),
        (((1,), (), (0,), (0,), (0,)), (1, 2), r"must not share dims"),
        (((1,), (), (1,), (0,), (0,)), (1, 2), r"dims \(0,\) of the operand .* as large as"),
    ],
)
def test_gather_errors(numbers, sizes, message):
    x = np.zeros((3, 2), np.float32)
    numbers = lax.GatherDimensionNumbers(*numbers)
    with pytest.raises(ShapeError, match=message):
        make_jaxpr(lambda x: lax.gather(x, OUTSIDE, numbers, sizes))(x)


def test_more_errors():
    x = np.zeros((3, 2), np.float32)
    with pytest.raises(DtypeError, match=r"indices must be integers, got float32\[2,1\]"):
        make_jaxpr(lambda x: lax.gather(x, OUTSIDE.astype(np.float32), ROWS, (1, 2)))(x)
    with pytest.raises(ArgumentError, match=r"mode='edge' .* one of 'fill', 'drop', 'clip'"):
        lax.gather(x, OUTSIDE, ROWS, (1, 2), mode="edge")
    numbers = lax.ScatterDimensionNumbers(*ROWS)
    with pytest.raises(ShapeError, match=r"updates must have shape \(2, 2\).*got float32\[3,2\]"):
        make_jaxpr(lambda x: lax.scatter_add(x, OUTSIDE, x, numbers))(x)
    with pytest.raises(DtypeError, match=r"scatter_add: does not combine .* bool\[3,2\]"):
        b = x.astype(bool)
        make_jaxpr(lambda b, u: lax.scatter_add(b, OUTSIDE, u, numbers))(b, b[:2])
    with pytest.raises(DtypeError, match=r"one dtype, got float32.* and int32"):
        make_jaxpr(lambda x: lax.scatter_add(x, OUTSIDE, np.zeros((2, 2), "i4"), numbers))(x)


def test_index_take():
    x = np.arange(24.0).reshape(2, 3, 4)
    rows, columns = np.array([0, 3, -1]), np.array([-2, 1, 4])
    found = lax.index_take(x, (rows, columns), (0, 2))
    np.testing.assert_array_equal(found, x[rows % 2, :, columns % 4])
    np.testing.assert_array_equal(lax.index_take(x, (rows,), (1,)), x.swapaxes(0, 1)[rows % 3])
    with pytest.raises(ShapeError, match="2 arrays of indices for 1 axes"):
        lax.index_take(x, (rows, columns), (0,))
