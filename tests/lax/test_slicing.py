"""slice, dynamic_slice and dynamic_update_slice against NumPy and JAX."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.api.inspect import make_jaxpr
from spmd.api.reverse import grad
from spmd.api.vectorize import vmap
from spmd.base import dtypes
from spmd.base.errors import DtypeError, IndexingError, ShapeError
from tests.lax.checks import check_abstract, check_derivatives, check_vmap, primitives_of, staged

DTYPES = [np.bool_, np.int8, np.uint32, dtypes.bfloat16, np.float16, np.float32, np.complex64]


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.fixture
def x():
    return normal(np.random.default_rng(0), 4, 6)


# ---- slice -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_slice_is_numpys(seed):
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(0, 7, rng.integers(1, 4)))
    starts = [int(rng.integers(0, s + 1)) for s in shape]
    limits = [int(rng.integers(a, s + 1)) for a, s in zip(starts, shape, strict=True)]
    strides = [int(rng.integers(1, 4)) for _ in shape]
    x = normal(rng, *shape)
    wanted = x[tuple(map(slice, starts, limits, strides))]
    np.testing.assert_array_equal(lax.slice(x, starts, limits, strides), wanted)
    check_abstract(lambda x: lax.slice(x, starts, limits, strides), x)


@pytest.mark.parametrize("dtype", [*DTYPES, dtypes.key_dtype], ids=str)
def test_slices_move_every_dtype(dtype):
    data = np.arange(24).astype(np.uint8).reshape(3, 8)
    x = np.ascontiguousarray(data).view(dtype) if dtype == dtypes.key_dtype else data.astype(dtype)
    words = spmd.random.key_data if dtype == dtypes.key_dtype else np.asarray
    for moved in lax.slice_in_dim(x, 1, 3), lax.dynamic_slice_in_dim(x, -2, 2):
        assert moved.dtype == x.dtype
        np.testing.assert_array_equal(words(moved), words(x[1:3]))


def test_slice_in_dim_counts_from_the_end(x):
    np.testing.assert_array_equal(lax.slice_in_dim(x, -3, None, axis=1), x[:, -3:])
    np.testing.assert_array_equal(lax.slice_in_dim(x, None, -1, 2, axis=-1), x[:, :-1:2])
    np.testing.assert_array_equal(lax.index_in_dim(x, -1, 1, keepdims=False), x[:, -1])
    with pytest.raises(IndexingError, match=r"index 6 is out of bounds for dim 1 .*size 6"):
        lax.index_in_dim(x, 6, 1)


def test_slice_of_everything_is_nothing(x):
    assert primitives_of(lambda x: lax.slice(x, (0, 0), (4, 6)), x) == []


def test_slice_errors_name_the_dim(x):
    with pytest.raises(ShapeError, match=r"dim 1 of float32\[4,6\] is cut from .*=5 to .*=7"):
        make_jaxpr(lambda x: lax.slice(x, (0, 5), (4, 7)))(x)
    with pytest.raises(ShapeError, match=r"one start, limit and stride for each of the 2 dims"):
        make_jaxpr(lambda x: lax.slice(x, (0,), (4,)))(x)
    with pytest.raises(ShapeError, match=r"strides\[0\]=-1 must be positive; reverse with lax.rev"):
        make_jaxpr(lambda x: lax.slice(x, (0, 0), (4, 6), (-1, 1)))(x)


def test_slice_derivatives(x):
    check_derivatives(lambda x: lax.slice(x, (1, 0), (4, 5), (2, 3)), (x,))
    check_derivatives(lambda x: lax.sin(lax.slice(x, (1, 1), (1, 5))), (x,))


def test_slice_vmap():
    check_vmap(lambda x: lax.slice(x, (1, 0), (4, 5), (2, 3)), lambda rng: [normal(rng, 4, 6)])


# ---- dynamic slices ----------------------------------------------------------------------------

POSITIONS = [(0, 0), (2, 3), (3, 5), (9, -1), (-2, 2), (-9, 40)]


@pytest.mark.parametrize("at", POSITIONS, ids=str)
@pytest.mark.parametrize("traced", [False, True], ids=["static", "traced"])
def test_dynamic_slices_are_jaxs(x, at, traced):
    update = -normal(np.random.default_rng(1), 2, 3)

    def read(i, j):
        return lax.dynamic_slice(x, (i, j), (2, 3))

    def write(i, j):
        return lax.dynamic_update_slice(x, update, (i, j))

    if traced:
        read, write = staged(read), staged(write)
    np.testing.assert_array_equal(read(*at), jax.lax.dynamic_slice(x, at, (2, 3)))
    np.testing.assert_array_equal(write(*at), jax.lax.dynamic_update_slice(x, update, at))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint32, np.int32], ids=str)
def test_start_indices_of_any_integer_dtype(dtype):
    x = np.arange(200, dtype=np.float32)
    top = np.array(np.iinfo(dtype).max, dtype)
    for start in (top, np.array(5, dtype)):
        wanted = x[min(int(start), 190) :][:10]
        found = staged(lambda i: lax.dynamic_slice(x, (i,), (10,)))(start)
        np.testing.assert_array_equal(found, wanted)


def test_start_indices_may_be_one_array(x):
    out = lax.dynamic_slice(x, np.array([1, 2]), (2, 2))
    np.testing.assert_array_equal(out, x[1:3, 2:4])


def test_negative_starts_can_be_refused_a_meaning(x):
    out = lax.dynamic_slice(x, (-1, 0), (2, 6), allow_negative_indices=False)
    np.testing.assert_array_equal(out, x[:2])


def test_along_one_dim(x):
    np.testing.assert_array_equal(lax.dynamic_slice_in_dim(x, 2, 3, axis=1), x[:, 2:5])
    np.testing.assert_array_equal(lax.dynamic_index_in_dim(x, -1, 1, keepdims=False), x[:, -1])
    wanted = x.copy()
    wanted[:, 2] = 7
    seven = np.full(4, 7, np.float32)
    np.testing.assert_array_equal(lax.dynamic_update_index_in_dim(x, seven, 2, 1), wanted)
    wanted[:, 4:] = 7
    sevens = np.full((4, 2), 7, np.float32)
    found = lax.dynamic_update_slice_in_dim(
        lax.dynamic_update_index_in_dim(x, seven, 2, 1), sevens, 5, axis=1
    )
    np.testing.assert_array_equal(found, wanted)


def test_dynamic_errors(x):
    with pytest.raises(ShapeError, match=r"one entry for each of the 2 dims .* got 1"):
        lax.dynamic_slice(x, (1,), (2, 2))
    with pytest.raises(ShapeError, match=r"must be integer scalars, got ~float32\[\]"):
        lax.dynamic_slice(x, (1, 0.5), (2, 2))
    with pytest.raises(ShapeError, match=r"slice_sizes=\(5, 2\)"):
        make_jaxpr(lambda x: lax.dynamic_slice(x, (1, 0), (5, 2)))(x)
    with pytest.raises(DtypeError, match=r"one dtype, got float32.* and int32"):
        make_jaxpr(lambda x: lax.dynamic_update_slice(x, np.zeros((2, 2), np.int32), (0, 0)))(x)
    with pytest.raises(ShapeError, match=r"as many dims as operand"):
        make_jaxpr(lambda x: lax.dynamic_update_slice(x, np.zeros(2, np.float32), (0, 0)))(x)


def test_dynamic_derivatives(x):
    u = x[:2, :3] * 2
    check_derivatives(lambda x: lax.sin(lax.dynamic_slice(x, (1, 4), (2, 3))), (x,))
    write = lambda x, u: lax.sin(lax.dynamic_update_slice(x, u, (1, 4)))  # noqa: E731
    check_derivatives(write, (x, u))


def test_gradient_of_a_slice_is_one_update(x):
    def f(x):
        return lax.reduce_sum(lax.dynamic_slice(x, (1, 2), (1, 1)), (0, 1))

    names = primitives_of(grad(f), x)
    assert "dynamic_update_slice" in names and "scatter_add" not in names


def test_dynamic_vmap():
    def make(rng):
        i, j = rng.integers(-9, 9, 2)
        return [normal(rng, 4, 6), np.array(i, np.int32), np.array(j, np.int32)]

    check_vmap(lambda x, i, j: lax.dynamic_slice(x, (i, j), (2, 3)), make)

    def make_update(rng):
        x, i, j = make(rng)
        return [x, normal(rng, 2, 3), i, j]

    check_vmap(lambda x, u, i, j: lax.dynamic_update_slice(x, u, (i, j)), make_update)


def test_vmap_with_common_starts_stays_a_slice(x):
    names = primitives_of(vmap(lambda x: lax.dynamic_slice(x, (2,), (3,))), x)
    assert names == ["dynamic_slice"]
    names = primitives_of(vmap(lambda x: lax.dynamic_update_slice(x, np.ones(2, "f4"), (2,))), x)
    assert "scatter" not in names and "dynamic_update_slice" in names


def test_vmap_then_grad_of_dynamic_slices():
    rng = np.random.default_rng(3)
    x, i = normal(rng, 5, 7), np.array([0, 4, 2, 9, -3], np.int32)

    def f(x):
        return vmap(lambda row, i: lax.sin(lax.dynamic_slice(row, (i,), (3,))))(x, i)

    check_derivatives(f, (x,))
