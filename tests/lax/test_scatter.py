"""The scatters that replace, multiply, or keep extremes, against NumPy and JAX."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.api.forward import jvp
from spmd.api.inspect import make_jaxpr
from spmd.api.reverse import grad
from spmd.base import dtypes
from spmd.base.errors import DtypeError, RefusedError
from tests.lax.checks import check_abstract, check_derivatives, check_vmap

ROWS = lax.ScatterDimensionNumbers((1,), (0,), (0,))
JAX_ROWS = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))
# Row 1 is updated twice, 9 is out of bounds.
INDICES = np.array([[1], [3], [1], [9]], np.int32)
NAMES = ["scatter", "scatter_add", "scatter_sub", "scatter_mul", "scatter_min", "scatter_max"]
MODES = ["drop", "clip"]


def operands(rng, dtype=np.float32):
    x, u = rng.integers(-4, 5, (4, 3)), rng.integers(-4, 5, (4, 3))
    return x.astype(dtype), u.astype(dtype)


def oracle(name, x, u, mode):
    """One update after the other, in order."""
    out = x.copy()
    combine = {
        "scatter": lambda a, b: b,
        "scatter_add": np.add,
        "scatter_sub": np.subtract,
        "scatter_mul": np.multiply,
        "scatter_min": np.minimum,
        "scatter_max": np.maximum,
    }[name]
    for (row,), update in zip(INDICES, u, strict=True):
        if mode == "clip":
            row = min(max(row, 0), len(x) - 1)
        if 0 <= row < len(x):
            out[row] = combine(out[row], update)
    return out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float32, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_updates_are_applied_in_order(name, dtype, mode):
    x, u = operands(np.random.default_rng(0), dtype)
    scatter = getattr(lax, name)
    found = np.asarray(scatter(x, INDICES, u, ROWS, mode=mode))
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(
        found.astype(np.float32), oracle(name, x, u, mode).astype(np.float32)
    )
    check_abstract(lambda x, u: scatter(x, INDICES, u, ROWS, mode=mode), x, u)


@pytest.mark.parametrize("name", NAMES)
def test_same_as_jax(name):
    x, u = operands(np.random.default_rng(1))
    wanted = getattr(jax.lax, name)(x, INDICES, u, JAX_ROWS)
    np.testing.assert_array_equal(getattr(lax, name)(x, INDICES, u, ROWS), wanted)


@pytest.mark.parametrize("name", ["scatter_min", "scatter_max"])
def test_nan_propagates(name):
    x = np.array([[1.0, np.nan, 1.0]] * 4, np.float32)
    u = np.array([[np.nan, 2.0, 2.0]] * 4, np.float32)
    out = np.asarray(getattr(lax, name)(x, INDICES, u, ROWS))
    assert np.isnan(out[1, :2]).all() and not np.isnan(out[1, 2])


def test_scatter_replaces_bools_complex_numbers_and_keys():
    keys = np.arange(24, dtype=np.uint32).view(dtypes.key_dtype).reshape(4, 3)
    for x in (keys, np.eye(4, 3, dtype=bool), np.eye(4, 3).astype(np.complex64)):
        u = x[::-1].copy()
        out, wanted = lax.scatter(x, INDICES, u, ROWS), oracle("scatter", x, u, "drop")
        if x is keys:
            out, wanted = map(spmd.random.key_data, (out, wanted))
        np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["scatter", "scatter_add", "scatter_sub"])
def test_derivatives_of_linear_scatters(name, mode):
    rng = np.random.default_rng(0)
    x, u = (rng.standard_normal((4, 3)).astype(np.float32) for _ in range(2))

    def f(x, u):
        return lax.sin(getattr(lax, name)(x, INDICES, u, ROWS, mode=mode))

    check_derivatives(f, (x, u))


def test_only_the_update_that_wins_has_a_gradient():
    x, u = operands(np.random.default_rng(0))

    def total(x, u):
        return lax.reduce_sum(lax.scatter(x, INDICES, u, ROWS), (0, 1))

    ct_x, ct_u = grad(total, argnums=(0, 1))(x, u)
    np.testing.assert_array_equal(np.asarray(ct_x)[:, 0], [1, 0, 1, 0])
    np.testing.assert_array_equal(np.asarray(ct_u)[:, 0], [0, 1, 1, 0])


@pytest.mark.parametrize("name", ["scatter_min", "scatter_max"])
def test_derivatives_of_extremal_scatters(name):
    rng = np.random.default_rng(0)
    x, u = (rng.permutation(12).reshape(4, 3).astype(np.float32) for _ in range(2))
    check_derivatives(lambda x, u: lax.sin(getattr(lax, name)(x, INDICES, u, ROWS)), (x, u / 2))


@pytest.mark.parametrize("name", ["scatter_min", "scatter_max"])
def test_ties_share_the_tangent_as_in_jax(name):
    x, u = np.ones((4, 3), np.float32), np.ones((4, 3), np.float32)
    rng = np.random.default_rng(2)
    t = tuple(rng.standard_normal((4, 3)).astype(np.float32) for _ in range(2))
    _, found = jvp(lambda x, u: getattr(lax, name)(x, INDICES, u, ROWS), (x, u), t)
    _, wanted = jax.jvp(lambda x, u: getattr(jax.lax, name)(x, INDICES, u, JAX_ROWS), (x, u), t)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_derivatives_of_scatter_mul():
    rng = np.random.default_rng(0)
    x, u = (rng.standard_normal((4, 3)).astype(np.float32) for _ in range(2))
    unique = INDICES[[0, 1, 3]]
    check_derivatives(lambda x: lax.sin(lax.scatter_mul(x, INDICES, u, ROWS)), (x,))
    check_derivatives(
        lambda x, u: lax.sin(lax.scatter_mul(x, unique, u, ROWS, unique_indices=True)), (x, u[:3])
    )
    with pytest.raises(RefusedError, match=r"pass unique_indices=True if that is so"):
        grad(lambda u: lax.reduce_sum(lax.scatter_mul(x, INDICES, u, ROWS), (0, 1)))(u)


@pytest.mark.parametrize("name", NAMES)
def test_vmap(name):
    def make(rng):
        x, u = operands(rng)
        return [x, rng.integers(-2, 6, (4, 1)).astype(np.int32), u]

    check_vmap(lambda x, i, u: getattr(lax, name)(x, i, u, ROWS), make)


def test_dtypes_without_order_are_refused():
    x = np.zeros((4, 3), np.complex64)
    with pytest.raises(DtypeError, match=r"scatter_max: does not combine .* complex64\[4,3\]"):
        make_jaxpr(lambda x: lax.scatter_max(x, INDICES, x, ROWS))(x)


@pytest.mark.parametrize("mode", ["clip", "drop", "promise_in_bounds"])
@pytest.mark.parametrize("method", ["set", "add", "max"])
def test_nothing_is_written_to_an_empty_array(mode, method):
    def update(x):
        return getattr(x.at[np.array([0, 1, 1])], method)(1.0, mode=mode)

    empty = snp.zeros((0, 2))
    assert update(empty).shape == spmd.jit(update)(empty).shape == (0, 2)


@pytest.mark.parametrize("wrap", [lambda f: f, spmd.jit])
def test_scatter_apply_applies_once_for_each_index(wrap):
    elements = lax.ScatterDimensionNumbers((), (0,), (0,))
    x, indices = np.arange(1.0, 6.0, dtype=np.float32), np.array([[0], [2], [2], [9]])

    def f(x, indices, **options):
        double = lambda e: lax.cond(e > 2, lambda v: v * 10, lambda v: v + 0.5, e)  # noqa: E731
        return lax.scatter_apply(
            x, indices, double, elements, update_shape=indices.shape[:1], **options
        )

    np.testing.assert_array_equal(wrap(f)(x, indices), [1.5, 2, 300, 4, 5])
    once = spmd.grad(lambda x: snp.sum(wrap(lambda x: f(x, indices[:2], unique_indices=True))(x)))
    np.testing.assert_array_equal(once(x), [1, 1, 10, 1, 1])
    rows = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    table = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    found = lax.scatter_apply(table, np.array([[2]]), lax.neg, rows, update_shape=(1, 2))
    np.testing.assert_array_equal(found, [[0, 1], [2, 3], [-4, -5]])
