"""`map` and `associative_scan`: what they mean, and their derivatives."""

from __future__ import annotations

import numpy as np
import pytest

from spmd import lax
from spmd.base.errors import ArgumentError, DimensionError, ShapeError
from tests.jax.compare import assert_same, cases

A = np.arange(1.0, 13.0, dtype=np.float32).reshape(4, 3) / 7
V = np.array([0.5, -1.0, 2.0], np.float32)


def affine(a, b):
    """The composition of y -> m y + n: associative, and does not commute."""
    return a[0] * b[0], a[1] * b[0] + b[1]


@cases(
    map=lambda j: j.lax.map(lambda x: j.np.sin(x) * x, V),
    map_tree=lambda j: j.lax.map(lambda x: {"o": x[0] * x[1]}, (V, V)),
    map_batches=lambda j: j.lax.map(lambda x: j.np.sin(x).sum(), A, batch_size=3),
    map_one_batch=lambda j: j.lax.map(lambda x: x * 2, V, batch_size=3),
    map_grad=lambda j: j.grad(lambda x: j.lax.map(lambda y: j.np.sin(y) * y, x).sum())(V),
    map_batches_grad=lambda j: j.jit(
        j.grad(lambda x: j.lax.map(lambda y: j.np.sin(y) * y, x, batch_size=2).sum())
    )(V),
    map_vmap=lambda j: j.vmap(lambda x: j.lax.map(lambda y: y * x.sum(), x))(A),
    scan_tree=lambda j: j.lax.associative_scan(affine, (V, V + 1)),
    scan_reverse=lambda j: j.lax.associative_scan(affine, (V, V + 1), reverse=True),
    scan_axis=lambda j: j.lax.associative_scan(j.np.add, A, axis=1),
    scan_negative_axis=lambda j: j.jit(lambda x: j.lax.associative_scan(j.np.add, x, axis=-1))(A),
    scan_bool=lambda j: j.lax.associative_scan(j.np.logical_or, V > 1),
    scan_int=lambda j: j.lax.associative_scan(j.np.maximum, np.array([3, 1, 4, 1, 5])),
    scan_grad=lambda j: j.grad(
        lambda x: (j.lax.associative_scan(j.np.multiply, x) * np.arange(3.0)).sum()
    )(V),
    scan_hessian=lambda j: j.hessian(lambda x: j.lax.associative_scan(j.np.multiply, x)[-1])(V),
    scan_vmap=lambda j: j.vmap(lambda x: j.lax.associative_scan(affine, (x, x)))(A),
)
def test_same_as_jax(case):
    assert_same(case)


@pytest.mark.parametrize("length", range(0, 18))
@pytest.mark.parametrize("reverse", [False, True])
def test_associative_scan_is_a_loop(length, reverse):
    m = np.linspace(0.5, 1.5, length).astype(np.float32)
    n = np.linspace(-1, 1, length).astype(np.float32)
    order = range(length)[::-1] if reverse else range(length)
    pairs, total = {}, None
    for k in order:
        total = (m[k], n[k]) if total is None else affine(total, (m[k], n[k]))
        pairs[k] = total
    found = lax.associative_scan(affine, (m, n), reverse=reverse)
    for part, k in zip(found, range(2), strict=True):
        wanted = [pairs[i][k] for i in range(length)]
        np.testing.assert_allclose(part, np.array(wanted, np.float32), rtol=1e-5, atol=1e-6)


def test_mistakes_are_named():
    with pytest.raises(ArgumentError, match="fn must be a function"):
        lax.associative_scan(3, V)
    with pytest.raises(ShapeError, match="same size along axis 0"):
        lax.associative_scan(affine, (V, A))
    with pytest.raises(DimensionError, match=r"axis 0 is out of bounds for float32\[\]"):
        lax.associative_scan(affine, (np.float32(1), np.float32(2)))
    with pytest.raises(ArgumentError, match="batch_size=-1, a batch has at least 1 slice"):
        lax.map(lambda x: x, V, batch_size=-1)
    with pytest.raises(ArgumentError, match="xs has no leaves"):
        lax.map(lambda x: x, (), batch_size=2)
