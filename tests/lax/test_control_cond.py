"""`cond` and `switch`: values, derivatives, batching of every operand; mistakes by their text."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.base.errors import ArgumentError, DtypeError, InternalError, PytreeError, ShapeError
from spmd.core.linearize import linearize_jaxpr
from spmd.lax.control_cond import cond_p
from tests.jax.compare import assert_same, cases

V = np.array([0.5, -1.0, 2.0], np.float32)
P = np.array([True, False, True])


def bend(j):
    """Different shapes of work in the branches, so that their residuals differ."""
    return lambda p, x, y: j.lax.cond(
        p, lambda x, y: j.np.sin(x) * y + j.np.cos(y * x), lambda x, y: 3.0 * x, x, y
    )


def choose(j):
    return lambda i, x: j.lax.switch(
        i, [lambda x: x, lambda x: x * x, lambda x: j.np.sin(x) * j.np.exp(x)], x
    )


@cases(
    true=lambda j: bend(j)(True, 0.5, 2.0),
    number_as_predicate=lambda j: bend(j)(2, 0.5, 2.0),
    jit=lambda j: j.jit(bend(j))(False, 0.5, 2.0),
    none_operand=lambda j: j.lax.cond(True, lambda _: 1.0, lambda _: 2.0, operand=None),
    keyword_operand=lambda j: j.lax.cond(False, lambda x: x, lambda x: x * 2, operand=3.0),
    trees=lambda j: j.lax.cond(
        True, lambda t: {"a": t[1], "b": [t[0]]}, lambda t: {"a": t[0], "b": [t[1]]}, (1.0, 2.0)
    ),
    no_operands=lambda j: j.lax.cond(False, lambda: V, lambda: 2 * V),
    weak_and_strong=lambda j: j.lax.cond(True, lambda: 1.0, lambda: j.np.float32(2.0)),
    passes_through=lambda j: j.jit(lambda p, x, y: j.lax.cond(p, lambda: (x, y), lambda: (y, x)))(
        True, 1.0, 2.0
    ),
    switch=lambda j: [choose(j)(i, 0.5) for i in (-3, 0, 1, 2, 9)],
    switch_jit=lambda j: [j.jit(choose(j))(i, 0.5) for i in (-3, 0, 1, 2, 9)],
    switch_one=lambda j: j.lax.switch(7, [lambda x: x + 1], 2.0),
    unsigned=lambda j: choose(j)(np.uint8(200), 0.5),
    nested=lambda j: j.jit(
        lambda x: j.lax.cond(
            x > 0, lambda: j.lax.cond(x > 1, lambda: x, lambda: 2 * x), lambda: 3 * x
        )
    )(0.5),
)
def test_value(case):
    assert_same(case)


@cases(
    grad=lambda j: [j.grad(bend(j), (1, 2))(p, 0.5, 2.0) for p in (True, False)],
    jit_grad=lambda j: [j.jit(j.grad(bend(j), (1, 2)))(p, 0.5, 2.0) for p in (True, False)],
    jvp=lambda j: j.jvp(lambda x: bend(j)(x > 0, x, x), (0.5,), (1.0,)),
    second=lambda j: j.grad(j.grad(lambda x: bend(j)(x > 0, x, x)))(0.5),
    hessian_jit=lambda j: j.jit(j.hessian(lambda x: bend(j)(True, x, x).sum()))(V),
    third=lambda j: j.grad(j.grad(j.grad(lambda x: bend(j)(True, x, x))))(0.5),
    closure=lambda j: j.grad(lambda x: j.lax.cond(x > 0, lambda: x * x, lambda: 3 * x))(2.0),
    closure_in_jit=lambda j: j.jit(
        j.grad(lambda x, y: j.lax.cond(x > 0, lambda: x * y, lambda: y), (0, 1))
    )(2.0, 3.0),
    one_branch_constant=lambda j: j.grad(lambda x: j.lax.cond(x > 0, lambda: x, lambda: 1.0))(-1.0),
    undifferentiated_output=lambda j: j.vjp(
        lambda x: j.lax.cond(True, lambda: (x * x, 1), lambda: (x, 2)), 3.0
    )[1]((1.0, np.zeros((), j.float0))),
    switch=lambda j: [j.grad(lambda x, i=i: choose(j)(i, x))(0.5) for i in range(3)],
    switch_hessian=lambda j: j.hessian(lambda x: choose(j)(2, x).sum())(V),
    linearize=lambda j: j.linearize(lambda x: choose(j)(2, x), 0.5)[1](2.0),
)
def test_derivative(case):
    assert_same(case)


@cases(
    operand=lambda j: j.vmap(bend(j), (None, 0, None))(True, V, 2.0),
    predicate=lambda j: j.vmap(bend(j), (0, None, None))(P, 0.5, 2.0),
    both=lambda j: j.vmap(bend(j), (0, 0, 0))(P, V, V),
    grad=lambda j: j.vmap(j.grad(bend(j), (1, 2)), (0, 0, None))(P, V, 2.0),
    grad_unbatched=lambda j: j.vmap(j.grad(bend(j), (1, 2)), (None, 0, None))(False, V, 2.0),
    of_predicate_from_operand=lambda j: j.vmap(j.grad(lambda x: bend(j)(x > 0, x, x)))(V),
    grad_of_vmap=lambda j: j.grad(lambda v: j.vmap(lambda x: bend(j)(x > 0, x, 2.0))(v).sum())(V),
    closure=lambda j: j.vmap(lambda x: j.lax.cond(True, lambda: x * 2, lambda: 1.0))(V),
    unbatched_result=lambda j: j.vmap(
        lambda x: j.lax.cond(True, lambda: (x, 1.0), lambda: (x, 2.0))[1], out_axes=0
    )(V),
    switch_index=lambda j: j.vmap(choose(j), (0, None))(np.array([0, 1, 9]), 0.5),
    switch_both=lambda j: j.jit(j.vmap(j.grad(choose(j), 1)))(np.array([0, 1, -1]), V),
    vmap_of_vmap=lambda j: j.vmap(j.vmap(bend(j), (0, None, None)), (None, 0, None))(P, V, 2.0),
    named=lambda j: j.vmap(
        lambda x: j.lax.cond(True, lambda: j.lax.psum(x, "i"), lambda: x), axis_name="i"
    )(V),
)
def test_vmap(case):
    assert_same(case)


def test_only_the_chosen_branch_runs():
    """Where the predicate is one value, the other branch is not computed: no NaN comes from it."""

    def f(x):
        return lax.cond(x > 0, lambda: snp.log(x), lambda: snp.float32(0.0))

    assert float(spmd.jit(spmd.grad(f))(-1.0)) == 0.0


def test_branches_share_residual_slots():
    branches = [lambda x: snp.sin(x) * x, lambda x: snp.exp(x) * x, lambda x: x]
    jaxpr = spmd.make_jaxpr(spmd.grad(lambda x, i: lax.switch(i, branches, x)))(2.0, 1)
    forward = next(e for e in jaxpr.eqns if e.prim is cond_p)
    # The value, and as many residuals as the hungriest branch needs: not their sum.
    hungriest = max(_residuals(branch) for branch in branches)
    assert len(forward.outvars) == 1 + hungriest


def _residuals(branch):
    cut = linearize_jaxpr(spmd.make_jaxpr(branch)(2.0), [True])
    return len(cut.residual_avals)


def test_disable_jit_runs_python():
    seen = []
    with spmd.disable_jit():
        out = lax.cond(True, lambda x: seen.append(x) or x, lambda x: seen.append("no") or x, 3.0)
        assert lax.switch(5, [lambda: 1.0, lambda: 2.0]) == 2.0
    assert out == 3.0 and seen == [3.0]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: lax.cond(V > 0, lambda: 1, lambda: 2), ShapeError, "pred must be a scalar"),
        (lambda: lax.cond(1j, lambda: 1, lambda: 2), DtypeError, "pred must be a bool"),
        (lambda: lax.cond(True, 1.0, lambda x: x, 2), ArgumentError, "must be functions"),
        (lambda: lax.cond(True, lambda: 1, lambda: (1,)), PytreeError, "same pytree structure"),
        (lambda: lax.cond(True, lambda: 1, lambda: 1.0), ShapeError, "same shapes and dtypes"),
        (lambda: lax.cond(True, lambda: V, lambda: 1.0), ShapeError, r"float32\[3\]"),
        (lambda: lax.switch(0, []), ArgumentError, "at least one branch"),
        (lambda: lax.switch(1.0, [lambda: 1]), DtypeError, "index must be an integer scalar"),
    ],
)
def test_mistakes_are_named(call, error, text):
    with pytest.raises(error, match=text) as caught:
        call()
    assert "test_control_cond.py" in str(caught.value)


def test_the_law_sees_wrong_operands():
    branches = tuple(spmd.make_jaxpr(lambda x: x)(V) for _ in range(2))
    with pytest.raises(InternalError, match="branch 0 of cond"):
        spmd.make_jaxpr(lambda x: cond_p.bind(0, x, branches=branches))(1.0)


def roots(j):
    def f(x, w):
        chosen = j.vmap(
            lambda v: j.lax.cond(v > 0, lambda v: j.np.sqrt(v * w), lambda v: 2 * v * w, v)
        )(x)
        branches = [lambda v: v * w, lambda v: w / v, lambda v: j.np.log(v) * w]
        return (
            chosen.sum()
            + j.vmap(lambda v, i: j.lax.switch(i, branches, v))(x, np.array([0, 0, 2])).sum()
        )

    args = np.array([-1.0, 0.0, 4.0], np.float32), np.float32(1.5)
    return [j.grad(g, (0, 1))(*args) for g in (f, j.jit(f))], j.jvp(f, args, args)


def test_branches_that_do_not_run_give_no_nan_under_grad_of_vmap():
    assert_same(roots)
