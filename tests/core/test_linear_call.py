"""`linear_call`: a transpose of the user's, in both modes, batched, closed over tracers."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.custom_derivatives import linear_call
from spmd.errors import PytreeError, ShapeError
from spmd.sharding import PartitionSpec as P


def scaled(r, x):
    """x / r, whose transpose says 7 ct / r, so that one sees which was used."""
    return linear_call(lambda r, x: x / r, lambda r, ct: 7 * ct / r, r, x)


def transposed(f, example):
    return lambda y: spmd.linear_transpose(f, example)(y)[0]


def test_the_transpose_is_the_users_and_its_transpose_is_the_function():
    f = lambda x: scaled(2.0, x)  # noqa: E731
    assert f(8.0) == 4
    assert transposed(f, 1.0)(8.0) == 28
    assert transposed(transposed(f, 1.0), 1.0)(8.0) == 4
    assert transposed(transposed(transposed(f, 1.0), 1.0), 1.0)(8.0) == 28


def test_derivatives_use_the_function_and_its_transpose():
    f = lambda x, r: x + scaled(r, x)  # noqa: E731
    assert spmd.grad(f)(9.0, 2.0) == 1 + 7 / 2
    out, tangent = spmd.jvp(f, (9.0, 3.0), (1.0, 1.0))
    np.testing.assert_allclose([out, tangent], [12, 1 + 1 / 3 - 1], rtol=1e-6)
    np.testing.assert_allclose(spmd.jit(spmd.grad(f, 1))(9.0, 3.0), -1, rtol=1e-6)
    second = spmd.grad(lambda x: spmd.grad(lambda y: scaled(2.0, y) * y)(x) * x)
    np.testing.assert_allclose(second(3.0), 2 * (3.5 + 0.5) * 3, rtol=1e-6)


def test_either_side_alone_may_be_batched():
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_allclose(spmd.vmap(scaled, (None, 0))(2.0, x), x / 2)
    np.testing.assert_allclose(spmd.vmap(scaled, (0, None))(x + 1, 6.0), 6 / (x + 1))
    slopes = spmd.vmap(spmd.grad(scaled, 1), (0, None))(x + 1, 6.0)
    np.testing.assert_allclose(slopes, 7 / (x + 1), rtol=1e-6)
    total = spmd.grad(lambda y: snp.sum(spmd.vmap(scaled, (0, None))(x + 1, y)))(6.0)
    np.testing.assert_allclose(total, (7 / (x + 1)).sum(), rtol=1e-6)


def test_functions_may_close_over_values_take_pytrees_and_run_in_shard_map():
    def f(w, tree):
        out = linear_call(
            lambda r, t: {"sum": (t["a"] + t["b"]) * w},
            lambda r, ct: {"a": ct["sum"] * w, "b": ct["sum"] * w * r},
            snp.float32(3.0),
            tree,
        )
        return snp.sum(out["sum"])

    tree = {"a": snp.ones(2), "b": snp.ones(2)}
    found = spmd.jit(spmd.grad(f, 1))(2.0, tree)
    np.testing.assert_allclose(found["a"], [2, 2])
    np.testing.assert_allclose(found["b"], [6, 6])
    mesh = spmd.make_mesh((4,), ("i",))
    mapped = spmd.shard_map(
        lambda x, r: lax.psum(scaled(r, x), "i"), mesh=mesh, in_specs=(P("i"), P()), out_specs=P()
    )
    slope = spmd.grad(lambda x: mapped(x, 2.0)[0])(snp.arange(4.0))
    np.testing.assert_allclose(slope, np.full(4, 3.5))


def test_mistakes_are_named():
    with pytest.raises(PytreeError, match=r"linear_call\(f\): fun_transpose must return"):

        def f(r, x):
            return x

        linear_call(f, lambda r, ct: (ct, ct), (), 1.0)
    with pytest.raises(ShapeError, match=r"returned .* as the cotangent of linear argument 0"):
        linear_call(f, lambda r, ct: snp.ones(3), (), 1.0)
