"""Staging: what is remembered is what would be found anew, in types, errors and lines."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.base import errors
from spmd.core.aval import ShapedArray, typeof
from spmd.core.ir import all_eqns
from spmd.core.stage import trace_to_jaxpr
from tests.lax.records import RECORDS

V = np.ones(3, np.float32)


def unremembered(prim):
    """The abstract rule as it is written."""
    return inspect.unwrap(prim.abstract)


def test_remembered_types_are_those_of_the_rules():
    """Each equation of each record, traced twice and at several types, has the rule's own types."""
    looked, kinds = 0, set()
    for record in RECORDS:
        for dtype in record.dtypes[:3]:
            avals = [typeof(x) for x in record.make(dtype)]
            for _ in range(2):
                closed = trace_to_jaxpr(lambda *xs, r=record: [r.function(lax, *xs)], avals)
                for eqn in closed.eqns:
                    fresh = unremembered(eqn.prim)(*(v.aval for v in eqn.invars), **eqn.params)
                    fresh = fresh if eqn.prim.multiple else [fresh]
                    assert [v.aval for v in eqn.outvars] == list(fresh), eqn
                    looked += 1
                    kinds.add(eqn.prim)
    assert looked > 500 and len(kinds) > 80


def test_types_follow_the_setting_of_the_moment():
    for wide in (True, False, True):
        with spmd.config.override("enable_x64", wide):
            (eqn,) = spmd.make_jaxpr(lambda: lax.iota(int, 3))().eqns
            assert eqn.outvars[0].aval.dtype == (np.int64 if wide else np.int32)
            out = spmd.make_jaxpr(lambda x: snp.sin(x) + 1)(1.0).out_avals[0]
            assert out.dtype == (np.float64 if wide else np.float32)


WRONG = {
    "dtype": lambda: lax.sin_p.bind(np.int32(1)),
    "dtypes": lambda: lax.add_p.bind(V, V.astype(np.float16)),
    "shapes": lambda: lax.mul_p.bind(V, np.ones(4, np.float32)),
    "params": lambda: lax.squeeze_p.bind(V, dimensions=(0,)),
    "concatenate": lambda: lax.concatenate_p.bind(V, V, dimension=3),
    "reduce": lambda: lax.reduce_max_p.bind(V, axes=(1,)),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_is_told_anew_each_time(name):
    """Nothing is remembered of what failed: each error is of the line that made it."""
    texts = []
    for _ in range(2):
        with pytest.raises((errors.DtypeError, errors.ShapeError)) as caught:
            spmd.make_jaxpr(WRONG[name])()
        texts.append(str(caught.value))
    assert texts[0] == texts[1]

    def on_another_line():
        return (
            WRONG[name]()  # as it is called from elsewhere, the line of the bind stays
        )

    with pytest.raises((errors.DtypeError, errors.ShapeError)) as caught:
        spmd.make_jaxpr(on_another_line)()
    assert str(caught.value) == texts[0]
    assert "test_stage.py:" in texts[0]


def test_two_lines_with_one_mistake_name_themselves():
    def first():
        return lax.sin(np.int32(1))

    def second():
        return lax.sin(np.int32(1))

    for f in (first, second):
        with pytest.raises(errors.DtypeError, match=rf":{f.__code__.co_firstlineno + 1}"):
            spmd.make_jaxpr(f)()


def bound_by_the_user(x):
    return lax.sin_p.bind(x)


@pytest.mark.parametrize(
    "how",
    [
        lambda f: f,
        spmd.grad,
        lambda f: spmd.grad(spmd.grad(f)),
        lambda f: lambda x: spmd.jvp(f, (x,), (x,)),
        lambda f: lambda x: spmd.vmap(spmd.grad(f), axis_size=2, in_axes=None)(x),
        spmd.jit,
    ],
)
def test_a_primitive_that_the_user_binds_has_the_users_line(how):
    jaxpr = spmd.make_jaxpr(how(bound_by_the_user))(1.0)
    found = {
        (e.source.file, e.source.line) for e in all_eqns(jaxpr) if e.prim.name in ("sin", "cos")
    }
    assert found == {(__file__, bound_by_the_user.__code__.co_firstlineno + 1)}


def test_zero_tangents_are_told_by_their_type():
    tangents = {typeof(x).tangent() for x in (V, np.int32(1), 1.0)}
    assert ShapedArray((3,), np.float32) in tangents and len(tangents) == 3

    def f(x, n):
        return snp.sin(x) * n

    assert spmd.jvp(f, (1.0, 2), (1.0, np.zeros((), spmd.dtypes.float0)))[1] == pytest.approx(
        2 * np.cos(1.0)
    )
