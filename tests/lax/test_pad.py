"""pad, concatenate and split against NumPy and JAX."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.api.inspect import make_jaxpr
from spmd.api.reverse import grad
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeError, ShapeError
from tests.lax.checks import check_abstract, check_derivatives, check_vmap, primitives_of


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.fixture
def x():
    return normal(np.random.default_rng(0), 4, 6)


# ---- pad ---------------------------------------------------------------------------------------


def _random_config(rng, shape):
    config = []
    for size in shape:
        interior = int(rng.integers(0, 3))
        grown = size + max(size - 1, 0) * interior
        low = int(rng.integers(-grown, 4))
        config.append((low, int(rng.integers(-grown - min(low, 0), 4)), interior))
    return config


@pytest.mark.parametrize("seed", range(40))
def test_pad_is_jaxs(seed):
    rng = np.random.default_rng(seed)
    x = normal(rng, *rng.integers(0, 5, rng.integers(1, 4)))
    config = _random_config(rng, x.shape)
    wanted = np.asarray(jax.lax.pad(x, np.float32(7), config))
    np.testing.assert_array_equal(lax.pad(x, 7.0, config), wanted)
    check_abstract(lambda x: lax.pad(x, 7.0, config), x)


@pytest.mark.parametrize("seed", range(8))
def test_pad_derivatives(seed):
    rng = np.random.default_rng(seed)
    x, value = normal(rng, 3, 4), normal(rng)
    config = _random_config(rng, x.shape)
    check_derivatives(lambda x, v: lax.sin(lax.pad(x, v, config)), (x, value))


def test_cotangent_of_the_padding_value_survives_infinities():
    x = np.ones((4, 6), np.float32)
    # Subtracting the operand's share from the total would give inf - inf.
    weights = lax.pad(np.full((4, 6), np.inf, np.float32), 1.0, ((1, 0, 0), (0, 0, 0)))

    def f(value):
        return lax.reduce_sum(lax.mul(lax.pad(x, value, ((1, 0, 0), (0, 0, 0))), weights), (0, 1))

    assert float(grad(f)(np.float32(0))) == 6


def test_pad_vmap():
    config = ((1, -1, 1), (-1, 2, 0))
    check_vmap(lambda x, v: lax.pad(x, v, config), lambda rng: [normal(rng, 3, 4), normal(rng)])


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, dtypes.bfloat16, np.complex64], ids=str)
def test_pad_takes_a_python_number_for_any_dtype(dtype):
    out = np.asarray(lax.pad(np.zeros(2, dtype), 1, ((1, 0, 1),)))
    assert out.dtype == dtype
    np.testing.assert_array_equal(out.astype(np.complex64), [1, 0, 1, 0])


def test_pad_errors(x):
    with pytest.raises(
        ShapeError, match=r"padding_config\[1\]=\(-4, -3, 0\) gives dim 1 .* size -1"
    ):
        make_jaxpr(lambda x: lax.pad(x, 0.0, ((0, 0, 0), (-4, -3, 0))))(x)
    with pytest.raises(ShapeError, match=r"for each of the 2 dims"):
        make_jaxpr(lambda x: lax.pad(x, 0.0, ((1, 0, 0),)))(x)
    with pytest.raises(ShapeError, match=r"must hold \(low, high, interior\)"):
        lax.pad(x, 0.0, ((0, 0), (0, 0)))
    with pytest.raises(DtypeError, match=r"one dtype, got float32.* and int32"):
        make_jaxpr(lambda x: lax.pad(x, np.int32(0), ((1, 0, 0), (0, 0, 0))))(x)


# ---- concatenate -------------------------------------------------------------------------------


@pytest.mark.parametrize("dimension", [0, 1, 2])
@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, dtypes.bfloat16, np.complex64], ids=str)
def test_concatenate_is_numpys(dimension, dtype):
    rng = np.random.default_rng(0)
    shapes = [[2, 3, 4] for _ in range(3)]
    for size, shape in zip((1, 0, 5), shapes, strict=True):
        shape[dimension] = size
    xs = [rng.integers(0, 2, shape).astype(dtype) for shape in shapes]
    wanted = np.concatenate(xs, dimension)
    found = np.asarray(lax.concatenate(xs, dimension))
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)
    check_abstract(lambda *xs: lax.concatenate(xs, dimension), *xs)


def test_concatenate_moves_keys():
    keys = np.arange(6, dtype=np.uint32).view(dtypes.key_dtype)
    out = lax.concatenate([keys, keys[:1]], 0)
    np.testing.assert_array_equal(
        spmd.random.key_data(out), spmd.random.key_data(np.append(keys, keys[:1]))
    )


def test_concatenate_derivatives(x):
    y = x[:, :2] * 3
    check_derivatives(lambda x, y: lax.sin(lax.concatenate([x, y, x], 1)), (x, y))


def test_concatenate_vmap():
    def make(rng):
        return [normal(rng, 2, 3), normal(rng, 2, 1), normal(rng, 2, 2)]

    check_vmap(lambda *xs: lax.concatenate(xs, 1), make)


def test_concatenate_errors(x):
    with pytest.raises(ArgumentError, match=r"at least one operand"):
        lax.concatenate([], 0)
    with pytest.raises(ShapeError, match=r"apart from dim 0; .*\[4,6\], operand 1 .*\[4,5\]"):
        make_jaxpr(lambda x: lax.concatenate([x, lax.slice_in_dim(x, 0, 5, axis=1)], 0))(x)
    with pytest.raises(DtypeError, match=r"operand 0 is float32.*, operand 1 is int32"):
        make_jaxpr(lambda x: lax.concatenate([x, np.zeros((4, 6), np.int32)], 0))(x)
    with pytest.raises(ShapeError, match=r"dimension=2 must be in range\(2\)"):
        make_jaxpr(lambda x: lax.concatenate([x, x], 2))(x)


# ---- split -------------------------------------------------------------------------------------


def test_split_is_numpys(x):
    pieces = lax.split(x, (1, 0, 5), axis=-1)
    for found, wanted in zip(pieces, np.split(x, [1, 1], 1), strict=True):
        np.testing.assert_array_equal(found, wanted)
    check_abstract(lambda x: lax.split(x, (1, 0, 5), 1), x)


def test_split_derivatives(x):
    check_derivatives(lambda x: [lax.sin(p) for p in lax.split(x, (1, 2, 3), 1)], (x,))


def test_gradient_of_a_split_is_one_concatenation(x):
    def f(x):
        first, _, last = lax.split(x, (1, 2, 3), 1)
        return lax.add(lax.reduce_sum(first, (0, 1)), lax.reduce_sum(last, (0, 1)))

    names = primitives_of(grad(f), x)
    assert names.count("concatenate") == 1 and "pad" not in names
    wanted = np.zeros_like(x)
    wanted[:, :1] = wanted[:, 3:] = 1
    np.testing.assert_array_equal(grad(f)(x), wanted)


def test_split_vmap():
    check_vmap(lambda x: lax.split(x, (1, 2), 1), lambda rng: [normal(rng, 2, 3)])


def test_split_errors(x):
    with pytest.raises(ShapeError, match=r"sizes=\(1, 2\) add up to 3, but dim 1 .* has size 6"):
        make_jaxpr(lambda x: lax.split(x, (1, 2), 1))(x)
