"""Calls: each is differentiated, batched and transposed once, and forgotten with its function."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.core.call import jit_p
from spmd.core.ir import all_eqns

V = np.array([0.5, -1.0, 2.0], np.float32)


def counted():
    """A function under jit, and the list that grows whenever it is traced."""
    traces = []

    @spmd.jit
    def f(x):
        traces.append(x)
        return snp.sin(x) * x

    return f, traces


def inner_jaxprs(f, *args):
    return [e.params["jaxpr"] for e in all_eqns(spmd.make_jaxpr(f)(*args)) if e.prim is jit_p]


@pytest.mark.parametrize(
    "how",
    [
        lambda f: f,
        spmd.grad,
        spmd.jacfwd,
        lambda f: spmd.grad(lambda x: spmd.grad(f)(x)),
        lambda f: lambda x: spmd.vmap(f)(snp.stack([x, x])),
    ],
    ids=["plain", "grad", "jacfwd", "second order", "vmap"],
)
def test_work_on_a_call_is_done_once(how):
    f, traces = counted()
    one, other = inner_jaxprs(how(f), 1.0), inner_jaxprs(how(f), 1.0)
    assert len(traces) == 1
    assert one and all(a is b for a, b in zip(one, other, strict=True))


def test_two_calls_share_their_parts():
    f, traces = counted()
    jaxprs = inner_jaxprs(spmd.grad(lambda x: f(x) + f(2 * x)), 1.0)
    assert len(traces) == 1 and len(jaxprs) == 4 and len(set(map(id, jaxprs))) == 2


def test_derivatives_depend_on_the_axes_in_scope():
    f = spmd.jit(lambda x: x * lax.axis_size("i"))
    sizes = [
        float(spmd.vmap(spmd.grad(f), axis_name="i")(np.ones(n, np.float32))[0]) for n in (2, 3)
    ]
    assert sizes == [2.0, 3.0]


def test_functions_are_forgotten():
    def make():
        @spmd.jit
        def f(x):
            return x * 2

        f(1.0), spmd.grad(f)(1.0), spmd.jit(spmd.grad(f))(1.0)
        closed = spmd.make_jaxpr(f)(1.0).eqns[0].params["jaxpr"]
        return weakref.ref(f), weakref.ref(closed)

    function, closed = make()
    gc.collect()
    assert function() is None and closed() is None


def test_tracers_are_not_kept_in_caches():
    """A call that closes over an outer value is traced for each value anew."""

    def outer(x):
        return spmd.jit(lambda y: x * y)(x)

    assert [float(spmd.grad(outer)(x)) for x in (2.0, 3.0)] == [4.0, 6.0]
    np.testing.assert_allclose(spmd.vmap(spmd.grad(outer))(V), 2 * V)


def test_inputs_that_a_call_ignores_have_zero_derivatives():
    f = spmd.jit(lambda x, y, i: (x * 2, y, i))
    out, back = spmd.vjp(lambda x, y: f(x, y, 3)[:2], 1.0, 2.0)
    assert [float(v) for v in back((1.0, 0.0))] == [2.0, 0.0]
    assert float(spmd.jvp(lambda x: f(x, 5.0, 3)[1], (1.0,), (1.0,))[1]) == 0.0
    assert [float(v) for v in out] == [2.0, 2.0]
