"""Linearization: primal work happens once, and only what the linear part reads is kept."""

from __future__ import annotations

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.core.linearize import linearize_flat, linearize_jaxpr
from spmd.core.primitive import Linear, Zero
from spmd.core.transpose import backward_pass, transpose_jaxpr
from spmd.core.vmap import BatchAxis, batch_flat, batch_jaxpr

V = np.array([0.5, -1.0, 2.0], np.float32)


def names(closed):
    return [e.prim.name for e in closed.eqns]


def test_linear_part_is_linear():
    outs, linear, nonzero = linearize_flat(lambda x, y: [snp.sin(x) * y, y * 0 + 1, 3.0], [V, V])
    assert nonzero == [True, True, False]
    assert {"sin", "cos"}.isdisjoint(names(linear))
    np.testing.assert_allclose(outs[0], np.sin(V) * V, rtol=1e-6)


def test_inputs_without_tangents_stay_out():
    _, linear, nonzero = linearize_flat(lambda x, y: [x * y, x + 1], [V, V], [False, True])
    assert len(linear.in_avals) == 1 and nonzero == [True, False]


def test_python_runs_once_and_on_values():
    seen = []

    def f(x):
        seen.append(x.item())
        return x * x

    y, push = spmd.linearize(f, 3.0)
    assert [float(push(t)) for t in (1.0, 2.0)] == [6.0, 12.0]
    assert seen == [3.0] and float(y) == 9.0


def test_jaxprs_are_cut_in_two():
    closed = spmd.make_jaxpr(lambda x, y, n: (snp.sin(x) * y, y, n + 1))(1.0, 2.0, 3)
    cut = linearize_jaxpr(closed, [True, False, False])
    assert cut.out_nonzero == [True, False, False]
    # cos(x) * y needs cos(x) and y; sin(x) itself is not kept.
    assert cut.num_residuals == 2
    assert cut is linearize_jaxpr(closed, [True, False, False])
    forced = linearize_jaxpr(closed, [True, False, False], [False, True, False])
    assert forced.out_nonzero == [True, True, False]


def test_residuals_are_kept_once():
    closed = spmd.make_jaxpr(lambda x: snp.exp(x) * snp.exp(x))(1.0)
    cut = linearize_jaxpr(closed, [True])
    kept = cut.primal.jaxpr.outvars[1:]
    assert len(kept) == len(set(kept))


def test_dead_tangents_keep_nothing():
    closed = spmd.make_jaxpr(lambda x: lax.stop_gradient(snp.sin(x)) + x)(1.0)
    assert linearize_jaxpr(closed, [True]).num_residuals == 0


# ---- backwards ----------------------------------------------------------------------------------


def test_cotangents_of_a_value_used_twice_add_up():
    closed = spmd.make_jaxpr(lambda x, c: (x * c, 2.0 * x, x))(1.0, 5.0)
    operands = [Linear(closed.in_avals[0]), 5.0]
    found = backward_pass(closed.jaxpr, closed.consts, operands, [1.0, 1.0, 1.0])
    assert float(found[0]) == 8.0 and found[1] is None


def test_unused_inputs_have_zero_cotangents():
    closed = spmd.make_jaxpr(lambda x, y: (2.0 * x,))(1.0, 1.0)
    linear = [Linear(a) for a in closed.in_avals]
    found = backward_pass(closed.jaxpr, (), linear, [Zero(closed.out_avals[0])])
    assert all(isinstance(ct, Zero) for ct in found)
    backward, flags = transpose_jaxpr(closed, [True, True], [True])
    assert flags == [True, False] and len(backward.out_avals) == 1
    backward, flags = transpose_jaxpr(closed, [True, True], [True], force=True)
    assert flags == [True, True] and len(backward.out_avals) == 2


# ---- vectorising --------------------------------------------------------------------------------


def test_dims_travel_as_rules_say():
    axis = BatchAxis(None, 3)
    (moved, plain), dims = batch_flat(lambda x, y: [x * 2, y * 2], axis, [V, V], [0, None])
    assert dims == [0, None] and moved.shape == plain.shape == (3,)


def test_batched_jaxprs_have_their_dim_first():
    closed = spmd.make_jaxpr(lambda x, y: (x.T, y))(np.ones((2, 4), np.float32), 1.0)
    batched, flags = batch_jaxpr(closed, BatchAxis(None, 3), [True, False])
    assert flags == [True, False] and batched.out_avals[0].shape == (3, 4, 2)
    batched, flags = batch_jaxpr(closed, BatchAxis(None, 3), [True, False], force_out=True)
    assert flags == [True, True] and batched.out_avals[1].shape == (3,)


def test_values_that_a_loop_does_not_read_get_no_cotangent():
    # The derivative of 1 / x is infinite at 0; times a cotangent of zero it would be NaN.
    def f(x):
        return lax.scan(lambda c, _: ((c[0], c[1] * c[0]), c[0]), (-1, x.sum()), 1 / x)[0][1]

    x = np.array([0.0, 1.0, -2.0], np.float32)
    for gradient in (spmd.grad(f), spmd.jit(spmd.grad(f))):
        np.testing.assert_array_equal(gradient(x), [-1, -1, -1])
