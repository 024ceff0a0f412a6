"""Jaxpr to jaxpr: evaluating, dead code, hoisting, inlining; and evaluating under any trace."""

from __future__ import annotations

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.base.util import partition_list
from spmd.core.check import check_jaxpr
from spmd.core.ir import ClosedJaxpr
from spmd.core.rewrite import (
    dce,
    dependents,
    drop_inputs,
    eval_closed,
    hoist_consts,
    hoist_tracers,
    inline_calls,
    last_uses,
    prune_consts,
)

V = np.array([0.5, -1.0, 2.0], np.float32)
HELD = np.array([1.0, 2.0, 3.0], np.float32)


def names(closed):
    return [e.prim.name for e in closed.eqns]


def several(x, y):
    """Three results, of which each needs other equations."""
    a = snp.sin(x)
    return a * HELD, snp.cos(y), a + y


def test_evaluating_is_running():
    closed = spmd.make_jaxpr(several)(V, V)
    for found, wanted in zip(eval_closed(closed, V, V), several(V, V), strict=True):
        np.testing.assert_array_equal(found, wanted)
    # Under a trace it writes the same program again.
    again = spmd.make_jaxpr(lambda *args: eval_closed(closed, *args))(V, V)
    assert str(again) == str(closed)
    batched = spmd.vmap(lambda x: eval_closed(closed, x, V))(np.stack([V, V]))
    assert batched[0].shape == (2, 3)


def test_dead_code_is_removed():
    jaxpr = spmd.make_jaxpr(several)(V, V).jaxpr
    smaller, used = dce(jaxpr, [False, True, False])
    assert [e.prim.name for e in smaller.eqns] == ["cos"] and used == [False, True]
    check_jaxpr(smaller)
    nothing, used = dce(jaxpr, [False] * 3)
    assert nothing.eqns == () and used == [False, False]
    pruned = prune_consts(ClosedJaxpr(smaller, spmd.make_jaxpr(several)(V, V).consts))
    assert pruned.consts == ()
    only = drop_inputs(pruned, [False, True])
    np.testing.assert_array_equal(eval_closed(only, V)[0], snp.cos(V))


def test_values_die_after_their_last_use():
    jaxpr = spmd.make_jaxpr(lambda x: snp.sin(x) * x + snp.sin(x))(V).jaxpr
    dead = last_uses(jaxpr)
    assert len(dead) == len(jaxpr.eqns)
    assert not any(v in jaxpr.outvars for vs in dead for v in vs)
    assert sum(map(len, dead)) == len({v for e in jaxpr.eqns for v in (*e.invars, *e.outvars)}) - 1


def test_hoisted_constants_become_inputs():
    closed = spmd.make_jaxpr(several)(V, V)
    hoisted, consts = hoist_consts(closed)
    assert len(consts) == 1 and hoisted.consts == () and len(hoisted.in_avals) == 3
    np.testing.assert_array_equal(eval_closed(hoisted, *consts, V, V)[0], several(V, V)[0])

    def outer(w):
        inner = spmd.make_jaxpr(lambda x: x * w + HELD)(V)
        moved, tracers = hoist_tracers(inner)
        assert tracers == [w] and len(moved.consts) == 1
        assert hoist_tracers(moved) == (moved, [])
        return eval_closed(moved, *tracers, V)[0]

    np.testing.assert_array_equal(spmd.jit(outer)(2.0), V * 2 + HELD)


def test_inlining_looks_inside_every_call():
    f = spmd.jit(lambda x: spmd.checkpoint(lambda y: spmd.jit(snp.sin)(y) * HELD)(x) + 1)
    closed = spmd.make_jaxpr(f)(V)
    flat = inline_calls(closed)
    assert names(closed) == ["jit"] and names(flat) == ["sin", "mul", "add"]
    check_jaxpr(flat)
    np.testing.assert_allclose(eval_closed(flat, V)[0], f(V), rtol=1e-6)
    assert inline_calls(flat) is flat


def test_dependents_are_all_values_computed_from_a_variable():
    jaxpr = spmd.make_jaxpr(several)(V, V).jaxpr
    x, y = jaxpr.invars
    first, second, third = jaxpr.outvars
    assert dependents(jaxpr, [x]) >= {x, first, third} and second not in dependents(jaxpr, [x])
    assert first not in dependents(jaxpr, [y]) and third in dependents(jaxpr, [y])
    assert dependents(jaxpr, []) == set()


def test_walks_keep_loops_whole():
    closed = spmd.make_jaxpr(lambda xs: lax.scan(lambda c, x: (c + x, c), 0.0, xs))(V)
    again = spmd.make_jaxpr(lambda xs: eval_closed(closed, xs))(V)
    (one,), (other,) = closed.eqns, again.eqns
    assert one.params["jaxpr"] is other.params["jaxpr"]


def test_lists_come_apart_and_together():
    assert partition_list([True, False, True], "abc") == (["b"], ["a", "c"])
