"""Jaxprs as text, letter by letter: golden files that a reader can compare with JAX's."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.ad_checkpoint import checkpoint_name
from spmd.core.ir import Literal, Names, all_eqns, letters

V = np.ones(3, np.float32)
W = np.ones((3, 3), np.float32)
ROW = W[0]


@spmd.custom_jvp
def doubled(x):
    return 2 * x


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))

PROGRAMS = {
    "grad_of_sin": (spmd.grad(snp.sin), 1.0),
    "constants": (lambda x: x + W[0], V),
    "no_equations": (lambda x, y: (y, x, 3), 1.0, 2),
    "unused_results": (lambda x: lax.cond(True, lambda: (x, 2 * x), lambda: (x, x))[0], 1.0),
    "nested_jit": (spmd.jit(lambda x: spmd.jit(snp.sin)(x) * 2), 1.0),
    "scan": (lambda xs: lax.scan(lambda c, x: (c + x, c * x), 0.0, xs), V),
    "grad_of_scan": (
        spmd.grad(lambda w: lax.scan(lambda c, x: (snp.tanh(w * c + x), None), 0.0, V)[0]),
        1.0,
    ),
    "while": (lambda x: lax.while_loop(lambda c: c < 10, lambda c: 2 * c, x), 1.0),
    "switch": (lambda i, x: lax.switch(i, [snp.sin, snp.cos, lambda x: x], x), 1, 1.0),
    "vmap": (spmd.vmap(lambda x, y: snp.dot(x, y), in_axes=(0, None)), W, V),
    "checkpoint": (
        spmd.grad(spmd.checkpoint(lambda x: snp.sin(checkpoint_name(snp.sin(x), "inner")))),
        1.0,
    ),
    "custom_jvp": (doubled, 1.0),
    "weak_and_strong": (lambda x: (x + 1, x * np.float32(2)), V),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_jaxprs_print_as_the_golden_text(name, golden):
    f, *args = PROGRAMS[name]
    golden(f"jaxprs/{name}.txt", f"{spmd.make_jaxpr(f)(*args)}\n")


def test_letters_count_on():
    assert [letters(n) for n in (0, 25, 26, 27, 51, 52, 26 * 26)] == [
        "a", "z", "ba", "bb", "bz", "ca", "baa",
    ]  # fmt: skip
    names = Names()
    variables = spmd.make_jaxpr(lambda x, y: (x, y))(1.0, 2.0).jaxpr.invars
    assert [names(v) for v in reversed(variables)] == ["a", "b"]


def test_values_stand_where_they_are_used():
    jaxpr = spmd.make_jaxpr(lambda x: x * snp.float32(2) + 1)(V)
    literals = [a for e in jaxpr.eqns for a in e.invars if isinstance(a, Literal)]
    assert [repr(a) for a in literals] == ["2.0:f32[]", "1.0:f32[]"]
    assert [a.aval.weak_type for a in literals] == [False, False]
    assert not jaxpr.consts


def test_each_array_becomes_one_constant():
    jaxpr = spmd.make_jaxpr(lambda x: x + V + ROW + V)(V)
    assert len(jaxpr.consts) == 2


def test_nested_equations_are_found():
    jaxpr = spmd.make_jaxpr(PROGRAMS["nested_jit"][0])(1.0)
    assert [e.prim.name for e in all_eqns(jaxpr)] == ["jit", "jit", "sin", "mul"]


def test_replace_makes_a_new_one():
    jaxpr = spmd.make_jaxpr(lambda x: x * 2)(1.0).jaxpr
    eqn = jaxpr.eqns[0]
    other = eqn.replace(prim=lax.add_p)
    assert (eqn.prim, other.prim, other.invars) == (lax.mul_p, lax.add_p, eqn.invars)
    assert jaxpr.replace(eqns=[other]).eqns == (other,) and jaxpr.eqns == (eqn,)
    assert "mul" in str(eqn)
    with pytest.raises(AttributeError):
        eqn.prim = lax.add_p


def test_equations_are_found_by_their_primitives_in_order():
    jaxpr = spmd.make_jaxpr(lambda x: snp.sin(snp.exp(snp.sin(x)) * snp.cos(x)))(1.0).jaxpr
    assert {p.name: numbers for p, numbers in jaxpr.by_primitive.items()} == {
        "sin": [0, 4], "exp": [1], "cos": [2], "mul": [3],
    }  # fmt: skip
    found = jaxpr.eqns_of(lax.mul_p, lax.sin_p, lax.tan_p)
    assert found == [(k, jaxpr.eqns[k]) for k in (0, 3, 4)]
