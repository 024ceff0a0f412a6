"""Windowed reductions beside JAX's: values, gradients, any monoid, errors."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base.config import config
from spmd.base.errors import ArgumentError, ShapeError
from spmd.testing import check_grads

jax = pytest.importorskip("jax")

IDENTITY = {"add": 0.0, "max": -np.inf, "min": np.inf, "mul": 1.0}


def random_windows(rng, dilations):
    ndim = int(rng.integers(1, 5))
    shape = rng.integers(2, 7, ndim)
    x = (rng.permutation(int(np.prod(shape))).reshape(shape) / 8).astype(np.float32)
    padding = rng.choice(["SAME", "VALID", "SAME_LOWER", "pairs"])
    how = {
        "window_dimensions": rng.integers(1, 4, ndim).tolist(),
        "window_strides": rng.integers(1, 4, ndim).tolist(),
        "padding": rng.integers(0, 2, (ndim, 2)).tolist() if padding == "pairs" else padding,
    }
    if dilations:
        how["base_dilation"] = rng.choice([1, 2], ndim).tolist()
        how["window_dilation"] = rng.choice([1, 2], ndim).tolist()
    return x, how


def both(name, how):
    """The same reduction over ours and over the oracle."""
    return [
        lambda x, m=m: m.reduce_window(x, IDENTITY[name], getattr(m, name), **how)
        for m in (lax, jax.lax)
    ]


@pytest.mark.parametrize("name", IDENTITY)
@pytest.mark.parametrize("seed", range(4))
def test_values_are_those_of_jax(name, seed):
    x, how = random_windows(np.random.default_rng(seed), dilations=seed % 2)
    ours, theirs = both(name, how)
    np.testing.assert_allclose(spmd.jit(ours)(x), theirs(x), rtol=1e-4)
    columns = np.stack([x, -x], -1)
    np.testing.assert_allclose(
        spmd.vmap(ours, in_axes=-1)(columns), jax.vmap(theirs, in_axes=-1)(columns), rtol=1e-4
    )


@pytest.mark.parametrize("padding", ["SAME", "SAME_LOWER"])
def test_same_is_about_the_size_without_base_dilation(padding):
    """So it is in JAX, and in its convolutions."""
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    how = {"window_dimensions": (3, 2), "window_strides": (3, 2), "padding": padding}
    ours, theirs = both("max", how | {"base_dilation": (2, 3)})
    np.testing.assert_array_equal(ours(x), theirs(x))
    np.testing.assert_array_equal(spmd.jit(ours)(x), theirs(x))


@pytest.mark.parametrize("name", ["add", "max", "min"])
@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_those_of_jax(name, seed):
    rng = np.random.default_rng(seed)
    x, how = random_windows(rng, dilations=False)
    ours, theirs = both(name, how)
    out, pull = jax.vjp(theirs, x)
    ct = rng.normal(size=out.shape).astype(np.float32)
    found = spmd.jit(lambda x, ct: spmd.vjp(ours, x)[1](ct)[0])(x, ct)
    np.testing.assert_allclose(found, pull(ct)[0], rtol=1e-5, atol=1e-5)
    t = rng.normal(size=x.shape).astype(np.float32)
    found = spmd.jit(lambda x, t: spmd.jvp(ours, (x,), (t,))[1])(x, t)
    np.testing.assert_allclose(found, jax.jvp(theirs, (x,), (t,))[1], rtol=1e-5, atol=1e-5)


def test_first_of_equal_elements_is_selected():
    x = np.array([[1, 3, 3, 0, 0, 2]], np.float32)
    f = lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 3), (1, 3)).sum()  # noqa: E731
    assert np.asarray(spmd.grad(f)(x)).tolist() == [[0, 1, 0, 0, 0, 1]]
    low = np.full((1, 2), -np.inf, np.float32)  # as large as what is padded
    f = lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 3), (1, 2), "SAME").sum()  # noqa: E731
    assert np.asarray(spmd.grad(f)(low)).tolist() == [[1, 0]]


def test_nan_wins():
    x = np.array([1, np.nan, 2, 3, 4, np.nan], np.float32)
    for name in ("max", "min"):
        f, _ = both(name, {"window_dimensions": (2,), "window_strides": (2,)})
        found = np.asarray(f(x))
        assert np.isnan(found).tolist() == [True, False, True]
        assert np.asarray(spmd.grad(lambda x, f=f: f(x).sum())(x))[[1, 5]].tolist() == [1, 1]


# ---- any monoid --------------------------------------------------------------------------------


def test_other_init_values_count_once_each():
    x = np.arange(6, dtype=np.float32)
    how = ((3,), (2,), ((1, 1),))
    for name, init in (("max", 2.0), ("min", 2.5)):
        ours, theirs = (m.reduce_window(x, init, getattr(m, name), *how) for m in (lax, jax.lax))
        np.testing.assert_array_equal(ours, theirs)
    scaled = spmd.jit(lambda init: lax.reduce_window(x, init, lax.max, *how))(np.float32(2))
    np.testing.assert_array_equal(scaled, lax.reduce_window(x, 2.0, lax.max, *how))


def test_pytrees_and_any_function():
    """The place of the largest element of each window: a reduction of pairs."""
    rng = np.random.default_rng(0)
    x = rng.permutation(42).reshape(6, 7).astype(np.float32)
    places = np.arange(42, dtype=np.int32).reshape(6, 7)

    def larger(m):
        def f(a, b):
            first = a["x"] >= b["x"]
            return {k: m.select(first, a[k], b[k]) for k in a}

        return f

    found, wanted = (
        m.reduce_window(
            {"x": x, "at": places},
            {"x": np.float32(-np.inf), "at": np.int32(-1)},
            larger(m),
            (2, 3),
            (2, 2),
            "SAME",
        )
        for m in (lax, jax.lax)
    )
    for key in ("x", "at"):
        np.testing.assert_array_equal(found[key], wanted[key])


def test_any_function_has_gradients():
    x = np.linspace(0.5, 1.5, 6)

    def f(x):
        return lax.reduce_window(x, 1.0, lambda a, b: a * b, (3,), (2,), ((1, 0),))

    with config.override("enable_x64", True):
        check_grads(f, [x], 2)


# ---- shapes and errors -------------------------------------------------------------------------


def test_shape_tuple():
    args = ((8, 9), (3, 2), (2, 3), ((1, 2), (0, 1)), (1, 2), (2, 1))
    assert lax.reduce_window_shape_tuple(*args) == tuple(jax.lax.reduce_window_shape_tuple(*args))
    assert lax.reduce_window_shape_tuple((8, 9), (3, 2), (2, 3), "SAME") == (4, 3)


def test_empty():
    x = np.ones((0, 4), np.float32)
    found = lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2))
    assert found.shape == (0, 2)
    assert lax.reduce_window(np.ones(2, np.float32), 0.0, lax.add, (3,)).shape == (0,)


@pytest.mark.parametrize(
    "error, text, call",
    [
        (
            ArgumentError,
            "window_dimensions=(2, 2) must be 3 positive integers",
            lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2)),
        ),
        (
            ArgumentError,
            "window_strides=(1, 0, 1)",
            lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2), (1, 0, 1)),
        ),
        (
            ShapeError,
            "init values be scalars",
            lambda x: lax.reduce_window(x, x, lax.add, (1, 2, 2)),
        ),
        (
            ArgumentError,
            "pytrees of the same structure",
            lambda x: lax.reduce_window((x, x), 0.0, lax.add, (1, 2, 2)),
        ),
    ],
)
def test_errors(error, text, call):
    with pytest.raises(error) as caught:
        call(np.ones((2, 3, 4), np.float32))
    assert text in str(caught.value)
