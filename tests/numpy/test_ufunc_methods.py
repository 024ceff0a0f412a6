"""Ufunc objects against JAX and NumPy: each method, by an operation of its own and by folding."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base.errors import SpmdError
from spmd.testing import check_grads
from tests.numpy.oracle import assert_agrees, case, jnp, values

X = values(4, 3, 5)
I = values(4, 3, 5, dtype=np.int32)  # noqa: E741
B = values(4, 3, 5, dtype=bool)
MASK = values(4, 3, 5, dtype=bool)[::-1].copy()
PLACES = np.array([0, 2, 2, 1, 2])

FLOAT = "add subtract multiply maximum minimum logaddexp logaddexp2".split()
BITS = "bitwise_and bitwise_or bitwise_xor".split()
TRUTH = "logical_and logical_or logical_xor".split()
UFUNCS = FLOAT + BITS + TRUTH


def operand(name: str) -> np.ndarray:
    return X if name in FLOAT else I if name in BITS else B


@pytest.mark.parametrize("name", UFUNCS)
def test_attributes_are_jax_s(name):
    ours, theirs = getattr(snp, name), getattr(jnp, name)
    assert isinstance(ours, snp.ufunc)
    assert (ours.nin, ours.nout, ours.nargs) == (theirs.nin, theirs.nout, theirs.nargs)
    assert ours.identity == theirs.identity
    assert (ours.__name__, bool(ours.__doc__)) == (name, True)
    assert pickle.loads(pickle.dumps(ours)) is ours


def reductions(name):
    x, at = operand(name), {"rtol": 1e-5, "atol": 1e-5}
    masked = {"where": MASK, "initial": x.dtype.type(1)}

    def f(xp):
        return getattr(xp, name)

    yield case(f"{name}-reduce", lambda xp, x: f(xp).reduce(x), x, **at)
    yield case(f"{name}-axis", lambda xp, x: f(xp).reduce(x, axis=-1, keepdims=True), x, **at)
    yield case(f"{name}-all", lambda xp, x: f(xp).reduce(x, axis=None), x, **at)
    yield case(f"{name}-where", lambda xp, x: f(xp).reduce(x, axis=1, **masked), x, **at)
    yield case(f"{name}-accumulate", lambda xp, x: f(xp).accumulate(x, axis=1), x, **at)
    yield case(f"{name}-outer", lambda xp, x: f(xp).outer(x[0], x[1, 0]), x, **at)
    yield case(f"{name}-reduceat", lambda xp, x, i: f(xp).reduceat(x, i, 0), x, PLACES[:3], **at)
    update = (lambda xp, x, i, v: f(xp).at(x, i, v, inplace=False), x, PLACES, x[:1].repeat(5, 0))
    yield case(f"{name}-at", *update, **at)


@pytest.mark.parametrize("names", [FLOAT, BITS, TRUTH], ids=["floats", "bits", "truth"])
def test_methods_are_jax_s(names):
    assert_agrees(*(c for name in names for c in reductions(name)))


@pytest.mark.parametrize("name", UFUNCS)
def test_own_operations_are_folds(name):
    """What a ufunc does by an operation of its own, against the same function without any."""
    own, x = getattr(snp, name), operand(name)
    folded = snp.ufunc(own, 2, 1, identity=own.identity)
    how = {"axis": 1, "where": MASK, "initial": x.dtype.type(1)}
    np.testing.assert_allclose(own.reduce(x, **how), folded.reduce(x, **how), 1e-5, 1e-5)
    np.testing.assert_allclose(own.accumulate(x, 2), folded.accumulate(x, 2), 1e-5, 1e-5)
    by = own.at(x, PLACES, x[0], inplace=False), folded.at(x, PLACES, x[0], inplace=False)
    np.testing.assert_allclose(*by, 1e-5, 1e-5)


def test_indices_of_at_are_of_any_kind():
    a = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    hypot = snp.frompyfunc(lambda x, y: (x * x + y * y) ** 0.5, 2, 1)
    for index in (1, (0, 2), slice(0, 2), ([0, 0, 2], [1, 1, 3]), (slice(None), [1, 1])):
        expected = a.copy()
        np.hypot.at(expected, index, np.float32(3))
        np.testing.assert_allclose(hypot.at(a, index, 3.0, inplace=False), expected, rtol=1e-5)
    doubled = snp.frompyfunc(lambda x: 2 * x, 1, 1)
    np.testing.assert_array_equal(doubled.at(a[0], [0, 3, 3], inplace=False), [0, 1, 2, 12])


def test_frompyfunc_makes_functions_of_arrays():
    spread = snp.frompyfunc(lambda x, y: (x + y, x - y), 2, 2)
    total, gap = spread(X, X[0, 0])  # of other rank: the map over the last dim is the innermost
    np.testing.assert_allclose(total, X + X[0, 0], rtol=1e-6)
    np.testing.assert_allclose(gap, X - X[0, 0], rtol=1e-6)
    subtract = lambda x, y: x - y  # noqa: E731
    minus = snp.frompyfunc(subtract, 2, 1)
    np.testing.assert_allclose(minus.reduce(X, axis=(0, 2)), _left_fold(X), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(minus.accumulate(X), np.subtract.accumulate(X), rtol=1e-5)
    assert minus == snp.frompyfunc(subtract, 2, 1) and minus != spread
    with_identity = snp.frompyfunc(lambda x, y: x * y, 2, 1, identity=1)
    assert with_identity.reduce(np.zeros((0, 2))).tolist() == [1, 1]


def _left_fold(x):
    rows = x.transpose(0, 2, 1).reshape(-1, x.shape[1])
    return rows[0] - rows[1:].sum(0)


def test_methods_under_transformations():
    for name in ("subtract", "multiply", "logaddexp", "maximum"):
        f = getattr(snp, name)
        check_grads(lambda x, f=f: f.reduce(x, axis=1), (X[:, :, 0],), 2, atol=1e-3, rtol=1e-3)
        at_once = spmd.jit(spmd.vmap(lambda x, f=f: f.accumulate(x, 1), 2, 2))(X)
        np.testing.assert_allclose(at_once, f.accumulate(X, 1), rtol=1e-5, atol=1e-6)


def test_where_needs_a_value_for_nothing():
    assert np.asarray(snp.add.reduce(X, where=np.zeros_like(MASK))).tolist() == [[0] * 5] * 3
    largest = snp.maximum.reduce(X, where=MASK, initial=-9.0)
    np.testing.assert_array_equal(largest, np.maximum.reduce(X, where=MASK, initial=-9.0))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: snp.add.at(X, PLACES, 1.0), "add.at: arrays are immutable; pass inplace=False"),
        (lambda: snp.maximum.reduce(X, where=MASK), "maximum.reduce has no identity, so a where"),
        (lambda: snp.subtract.reduce(np.zeros((0, 2))), "no elements along axis=0, and no ident"),
        (lambda: snp.add.reduceat(X, MASK), "indices must be a vector of integers"),
        (lambda: snp.maximum.accumulate(X, axis=None), "axis must be one integer, got None"),
        (lambda: snp.frompyfunc(abs, 1, 1).reduce(X), "has nin=1, nout=1"),
        (lambda: snp.add(X, X, out=X), "out= is not supported, as arrays are immutable"),
        (lambda: snp.bitwise_or.reduce(X), "bitwise_or.reduce: integers are needed, got float32"),
    ],
)
def test_errors_name_what_is_wrong(call, text):
    with pytest.raises(SpmdError) as caught:
        call()
    assert text in str(caught.value)


def test_tracers_are_arrays():
    seen = []
    spmd.vmap(spmd.grad(spmd.jit(lambda x: seen.append(isinstance(x, spmd.Array)) or x)))(X[0, 0])
    assert seen == [True] and isinstance(snp.zeros(2), snp.ndarray)
    assert not isinstance(X, spmd.Array) and not isinstance(1.0, spmd.Array)
    assert issubclass(type(snp.zeros(2)), spmd.Array) and spmd.Array is snp.ndarray
    with pytest.raises(TypeError, match="arrays are made by functions"):
        spmd.Array(3)


def test_jit_of_a_ufunc_calls_it():
    # A ufunc has attributes of its own, which must not take the place of the wrapper's.
    x = snp.arange(3.0)
    np.testing.assert_array_equal(spmd.jit(snp.add)(x, x), 2 * np.arange(3))
    np.testing.assert_array_equal(spmd.jit(spmd.jit(snp.sin))(x), snp.sin(x))
    np.testing.assert_array_equal(spmd.pmap(snp.add)(x[:1], x[:1]), [0.0])

    def f(x):
        return x

    f.note = "mine"
    assert spmd.jit(f).note == "mine"
