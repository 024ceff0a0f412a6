"""`x[i]`, `x.at[i]` and `take` against NumPy (where it defines the meaning) and JAX (where not)."""

from __future__ import annotations

import random
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.api.inspect import make_jaxpr
from spmd.api.reverse import grad
from spmd.api.vectorize import vmap
from spmd.base import dtypes
from spmd.base.errors import (
    ArgumentError,
    IndexingError,
    NonConcreteBooleanIndexError,
    ShapeError,
)
from spmd.lax import reduce_sum, sin
from spmd.numpy.indexing import IndexUpdateHelper, getitem
from spmd.numpy.taking import put_along_axis, take, take_along_axis
from tests.lax.checks import check_derivatives, check_vmap, primitives_of, staged


def at(x, index):
    return IndexUpdateHelper(x)[index]


# ---- random indices ----------------------------------------------------------------------------


class RandomIndex:
    """A random index expression, and an array that it fits."""

    def __init__(self, seed):
        self.rng, self.choose = np.random.default_rng(seed), random.Random(seed)
        ndim = self.choose.randint(0, 4)
        self.shape = tuple(self.choose.randint(1, 4) for _ in range(ndim))
        if ndim and self.choose.random() < 0.1:
            self.shape = (*self.shape[:-1], 0)
        self.broadcast = tuple(self.choose.randint(1, 3) for _ in range(self.choose.randint(1, 2)))
        self.parts, self.dim = [], 0
        stop = self.choose.randint(0, ndim)
        while self.dim < stop:
            self.add(self.choose.random(), self.shape[self.dim], stop)
        if self.choose.random() < 0.05:
            self.parts.append(self.choose.random() < 0.7)
        self.index = tuple(self.parts)
        if len(self.parts) == 1 and self.choose.random() < 0.5:
            self.index = self.parts[0]

    def add(self, kind, size, stop):
        arrays = any(isinstance(p, np.ndarray) for p in self.parts)
        if kind < 0.12:
            self.parts.append(None)
        elif kind < 0.2 and Ellipsis not in [p for p in self.parts if p is Ellipsis]:
            self.parts.append(Ellipsis)
        elif kind < 0.6 or size == 0:
            self.take(self.slice() if kind < 0.4 or size == 0 else self.integer(size))
        elif kind < 0.85 or arrays:
            self.take(self.array(size))
        elif kind < 0.93 or self.dim + 1 >= stop:
            self.take(self.rng.random(size) < 0.5)
        else:
            self.take(self.rng.random(self.shape[self.dim : self.dim + 2]) < 0.5, 2)

    def take(self, part, dims=1):
        self.parts.append(part)
        self.dim += dims

    def slice(self):
        bounds = [None if self.choose.random() < 0.3 else self.choose.randint(-5, 5) for _ in "ab"]
        return slice(*bounds, self.choose.choice([None, 1, -1, 2, -2, 3]))

    def integer(self, size):
        value = self.choose.randint(-size, size - 1)
        return self.choose.choice([int, np.int32, np.int8])(value)

    def array(self, size):
        shape = tuple(self.choose.choice([n, 1]) for n in self.broadcast)
        shape = shape[self.choose.randint(0, len(shape) - 1) :]
        dtype = self.choose.choice([np.int32, np.int64, np.int8])
        return self.rng.integers(-size, size, shape).astype(dtype)


SEEDS = range(160)
UPDATES = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def updated(name, x, index, values):
    """NumPy's in-place update of a copy."""
    out = x.copy()
    if name == "set":
        out[index] = values
    else:
        UPDATES[name].at(out, index, values)
    return out


def selected(case):
    """An array and what NumPy selects from it; skips the few indices that NumPy refuses."""
    x = case.rng.integers(-9, 9, case.shape).astype(np.float32)
    try:
        return x, x[case.index]
    except IndexError:
        pytest.skip("NumPy refuses this index")


@pytest.mark.parametrize("seed", SEEDS)
def test_reading_is_numpys(seed):
    case = RandomIndex(seed)
    x, wanted = selected(case)
    for found in (
        getitem(x, case.index),
        at(x, case.index).get(mode="fill"),
        spmd.jit(lambda x: getitem(x, case.index))(x),
    ):
        assert np.shape(found) == wanted.shape
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_writing_is_numpys(seed):
    case = RandomIndex(seed)
    x, part = selected(case)
    shape = part.shape[case.choose.randint(0, part.ndim) :]
    values = case.rng.integers(-9, 9, shape).astype(np.float32)
    for name in ("set", *UPDATES):
        found = getattr(at(x, case.index), name)(values)
        np.testing.assert_array_equal(found, updated(name, x, case.index, values), err_msg=name)


def traced_parts(index):
    """The integers of an index, and a function that puts others in their place."""
    parts = index if isinstance(index, tuple) else (index,)
    holes = [
        k
        for k, p in enumerate(parts)
        if isinstance(p, (int, np.integer, np.ndarray)) and np.asarray(p).dtype.kind == "i"
    ]

    def fill(values):
        out = list(parts)
        for k, value in zip(holes, values, strict=True):
            out[k] = value
        return tuple(out)

    return [np.asarray(parts[k], np.int32) for k in holes], fill


@pytest.mark.parametrize("seed", range(60))
def test_traced_integers_mean_the_same(seed):
    case = RandomIndex(seed)
    x, wanted = selected(case)
    integers, fill = traced_parts(case.index)
    found = spmd.jit(lambda x, *i: getitem(x, fill(i)))(x, *integers)
    np.testing.assert_array_equal(found, wanted)
    found = spmd.jit(lambda x, *i: at(x, fill(i)).add(1.0))(x, *integers)
    np.testing.assert_array_equal(found, updated("add", x, case.index, 1.0))


@pytest.mark.parametrize("seed", range(0, 60, 4))
def test_derivatives_of_random_indices(seed):
    case = RandomIndex(seed)
    x, part = selected(case)
    x, values = (case.rng.standard_normal(np.shape(v)).astype(np.float32) for v in (x, part))
    check_derivatives(lambda x: sin(getitem(x, case.index)), (x,))
    for name in ("set", "add"):
        f = lambda x, v, name=name: sin(getattr(at(x, case.index), name)(v))  # noqa: E731
        check_derivatives(f, (x, values))


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_vmap_of_random_indices(seed):
    case = RandomIndex(seed)
    _, part = selected(case)
    integers, fill = traced_parts(case.index)

    def make(rng):
        x = rng.integers(-9, 9, case.shape).astype(np.float32)
        v = rng.integers(-9, 9, part.shape).astype(np.float32)
        # -9 to 8 is often out of bounds: that must agree too.
        return [x, v, *(rng.integers(-9, 9, i.shape).astype(np.int32) for i in integers[:1])]

    def read(x, v, *i):
        return getitem(x, fill([*i, *integers[1:]]))

    def write(x, v, *i):
        return at(x, fill([*i, *integers[1:]])).set(v)

    check_vmap(read, make, seed)
    check_vmap(write, make, seed)


# ---- out of bounds -----------------------------------------------------------------------------

X = np.arange(1, 6, dtype=np.float32)
FAR = np.array([0, 4, 5, -1, -5, -6, 100], np.int32)


@pytest.mark.parametrize("mode", [None, "clip", "fill", "drop", "promise_in_bounds"])
@pytest.mark.parametrize("index", [FAR, np.int32(9), np.int32(-9)], ids=["array", "9", "-9"])
def test_out_of_bounds_is_jaxs(mode, index):
    ours, theirs = staged(lambda x, i: at(x, i).get(mode=mode)), jnp.asarray(X).at
    np.testing.assert_array_equal(ours(X, index), theirs[index].get(mode=mode))
    if mode == "promise_in_bounds":
        return
    for name in ("set", "add", "multiply", "min"):
        ours = staged(lambda x, i, name=name: getattr(at(x, i), name)(7.0, mode=mode))
        wanted = getattr(theirs[index], name)(7.0, mode=mode)
        np.testing.assert_array_equal(ours(X, index), wanted)


def test_static_integers_out_of_bounds_are_as_traced_ones():
    assert getitem(X, 9) == 5 and getitem(X, -9) == 1
    np.testing.assert_array_equal(at(X, 9).set(0.0), X)
    np.testing.assert_array_equal(at(X, 9).set(0.0, mode="clip"), updated("set", X, -1, 0.0))


def test_fill_value_and_negative_indices():
    out = at(X, FAR).get(mode="fill", fill_value=-7.0, wrap_negative_indices=False)
    np.testing.assert_array_equal(out, [1, 5, -7, -7, -7, -7, -7])
    with pytest.raises(ArgumentError, match=r"fill_value must be a static scalar"):
        at(X, FAR).get(mode="fill", fill_value=X)


# ---- jaxprs stay small -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "names"),
    [
        (lambda x, i: getitem(x, 0), ["slice", "squeeze"]),
        (lambda x, i: getitem(x, slice(1, 3)), ["slice"]),
        (lambda x, i: getitem(x, slice(None, None, -1)), ["rev"]),
        (lambda x, i: getitem(x, (Ellipsis, None)), ["broadcast_in_dim"]),
        (lambda x, i: getitem(x, Ellipsis), []),
        (lambda x, i: getitem(x, i), ["lt", "add", "select_n", "dynamic_slice", "squeeze"]),
        (lambda x, i: at(x, 2).set(1.0), ["broadcast_in_dim", "dynamic_update_slice"]),
        (lambda x, i: at(x, slice(None)).add(1.0), ["broadcast_in_dim", "add"]),
    ],
)
def test_what_is_written_down(f, names):
    assert primitives_of(f, X, np.int32(1)) == names


# ---- the other updates -------------------------------------------------------------------------


def test_divide_power_and_apply():
    index = np.array([1, 1, 3])
    ours, theirs = at(X, index), jnp.asarray(X).at[index]
    np.testing.assert_allclose(ours.divide(2.0), theirs.divide(2.0))
    np.testing.assert_allclose(ours.power(2.0), theirs.power(2.0))
    np.testing.assert_allclose(ours.apply(sin), theirs.apply(jnp.sin), rtol=1e-6)
    found = at(X, slice(1, 3)).apply(sin)
    np.testing.assert_allclose(found[1:3], np.sin(X[1:3]), rtol=1e-6)
    ints = at(np.arange(5), 3).divide(2)
    assert np.asarray(ints).dtype == np.float32
    np.testing.assert_array_equal(ints, [0, 1, 2, 1.5, 4])


def test_apply_has_a_gradient_where_nothing_repeats():
    check_derivatives(lambda x: at(x, slice(1, 4)).apply(sin), (X,))
    f = lambda x: at(x, FAR[:2]).apply(sin, unique_indices=True)  # noqa: E731
    check_derivatives(f, (X,))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.float16, dtypes.bfloat16])
@pytest.mark.parametrize("value", [3, 2.5, np.int32(3), np.float32(2.5), True], ids=repr)
def test_the_array_keeps_its_dtype(dtype, value):
    x = np.arange(5).astype(dtype)
    for index in (2, np.array([2, 2, 7])):
        for name in ("set", "add", "max"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of values that do not fit
                found = np.asarray(getattr(at(x, index), name)(value))
                wanted = np.asarray(getattr(jnp.asarray(x).at[index], name)(value))
            assert found.dtype == x.dtype
            np.testing.assert_array_equal(found.astype("f4"), wanted.astype("f4"))


def test_keys_are_indexed():
    keys = np.arange(8, dtype=np.uint32).view(dtypes.key_dtype)
    data = spmd.random.key_data
    np.testing.assert_array_equal(data(getitem(keys, np.array([2, 0]))), data(keys[[2, 0]]))
    np.testing.assert_array_equal(data(at(keys, 1).set(keys[3])), data(keys[[0, 3, 2, 3]]))


# ---- masks -------------------------------------------------------------------------------------


def test_a_traced_mask_can_be_set_to_a_scalar():
    def f(x, mask):
        return at(at(x, mask).set(0.0), mask).add(2.0)

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(staged(f)(x, x > 3), np.where(x > 3, 2, x))
    np.testing.assert_array_equal(staged(f)(x, x[:, 0] > 1), [[0, 1, 2], [2, 2, 2]])
    check_derivatives(lambda x: sin(f(x, np.array([True, False]))), (x,))


def test_a_traced_mask_cannot_select():
    with pytest.raises(NonConcreteBooleanIndexError, match=r"test_indexing.*where\(mask"):
        make_jaxpr(lambda x, m: getitem(x, m))(X, X > 2)


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([0, 1], r"a list is no index .* x\[array\(indices\)\]"),
        ((0, 0), r"too many indices: the array has shape \(5,\), that is 1 dims, but 2"),
        ((Ellipsis, Ellipsis), r"only one ellipsis"),
        (1.0, r"integer or boolean dtype, got float32\[\]"),
        ("a", r"'a' of type str is no index"),
        (np.ones(3, bool), r"shape \(3,\) must have the shape of the dims .* \(5,\)"),
        (slice(0.5, 2), r"bounds of a slice must be integers or None, got 0.5"),
    ],
)
def test_index_errors(index, message):
    with pytest.raises(IndexingError, match=message):
        getitem(X, index)


def test_more_errors():
    with pytest.raises(IndexingError, match=r"(?s)must be static.*lax.dynamic_slice"):
        make_jaxpr(lambda x, i: getitem(x, slice(i, None)))(X, 1)
    with pytest.raises(IndexingError, match=r"out of bounds for dim 0, which has size 0"):
        getitem(X[:0], 0)
    with pytest.raises(ShapeError, match=r"values of shape \(3,\) cannot be broadcast .* \(2,\)"):
        at(X, slice(0, 2)).set(np.ones(3))
    with pytest.raises(ArgumentError, match=r"x.at\[...\].add has no argument modes"):
        at(X, 0).add(1.0, modes="clip")
    with pytest.raises(ArgumentError, match=r"x.at\[...\].set: values must be an array"):
        at(X, 0).set("a")


# ---- take --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [None, "fill", "clip", "wrap"])
@pytest.mark.parametrize("axis", [None, 0, -1])
def test_take_is_jaxs(mode, axis):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for indices in (FAR, np.array([[1, -1], [0, 2]]), 2, np.int8(-1)):
        wanted = np.asarray(jnp.take(x, indices, axis, mode=mode))
        np.testing.assert_array_equal(take(x, indices, axis, mode=mode), wanted)


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_along_an_axis_is_jaxs(axis):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4)).astype(np.float32)
    shape = (5,) if axis is None else (3, 4)
    indices = rng.integers(-4, 5, shape)
    wanted = np.asarray(jnp.take_along_axis(x, indices, axis))
    np.testing.assert_array_equal(take_along_axis(x, indices, axis), wanted)
    values = rng.standard_normal(shape).astype(np.float32)
    unique = np.argsort(x, axis)[..., :1] if axis in (1, -1) else np.argsort(x, axis)[:1]
    values = values.ravel()[: unique.size].reshape(unique.shape)
    wanted = np.asarray(jnp.put_along_axis(x, unique, values, axis, inplace=False))
    np.testing.assert_array_equal(put_along_axis(x, unique, values, axis, inplace=False), wanted)


@pytest.mark.parametrize("shape", [(0, 3), (2, 3), (0, 1)])
@pytest.mark.parametrize("transformed", [lambda f: f, spmd.jit], ids=["eager", "jit"])
def test_along_an_empty_axis_is_jaxs(shape, transformed):
    x, indices = np.ones((0, 3), np.float32), np.zeros(shape, np.int32)
    wanted = np.asarray(jnp.take_along_axis(x, indices, 0))
    found = transformed(lambda x, i: take_along_axis(x, i, 0))(x, indices)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted, strict=True)


def test_take_derivatives():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    check_derivatives(lambda x: sin(take(x, np.array([0, 0, 3]), 1)), (x,))
    order = np.array([[1, 0], [3, 3], [0, 2]])
    check_derivatives(lambda x: sin(take_along_axis(x, order, 1)), (x,))
    rows = vmap(lambda x, i: take(x, i))(x, np.array([0, 3, 1]))
    np.testing.assert_array_equal(rows, [0, 7, 9])
    picked = grad(lambda x: reduce_sum(take(x, np.array([0, 0, 3]), 1), (0, 1)))(x)
    np.testing.assert_array_equal(np.asarray(picked)[0], [2, 0, 0, 1])


@pytest.mark.parametrize("dtype", [d.name for d in dtypes.INTEGER if not dtypes.is_small(d)])
def test_traced_indices_of_every_integer_dtype(dtype):
    x = np.arange(5.0, dtype=np.float32)
    uses = {
        "read": lambda x, i: x[i],
        "read many": lambda x, i: x[i[None]],
        "read two": lambda x, i: x[None][i * 0, i],
        "set": lambda x, i: x.at[i].set(9),
        "add": lambda x, i: x.at[i[None]].add(1),
    }
    with jax.enable_x64(True), spmd.enable_x64(True):
        limits = np.iinfo(dtype)
        for value in {1, 4, min(100, limits.max), limits.max, max(-2, limits.min), limits.min}:
            i = np.asarray(value, dtype)
            for name, use in uses.items():
                theirs, ours = jax.jit(use)(x, i), spmd.jit(use)(x, i)
                if -(2**31) < value < 2**31:  # beyond, JAX's indices wrap around
                    np.testing.assert_array_equal(ours, theirs, f"{name} at {value}")
                else:
                    np.testing.assert_array_equal(ours, use(spmd.numpy.asarray(x), i), name)
