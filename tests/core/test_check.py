"""The law of jaxprs: what `check_jaxpr` accepts and what it refuses, naming the equation."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.base.errors import InternalError, ShapeError
from spmd.base.source import current_source
from spmd.core.aval import ShapedArray
from spmd.core.check import check_jaxpr
from spmd.core.ir import Literal, Var

V = np.ones(3, np.float32)
F3 = ShapedArray((3,), np.float32)


@pytest.fixture
def good():
    return spmd.make_jaxpr(lambda x: snp.sin(x) * x)(V).jaxpr


def swap(jaxpr, k, **changes):
    eqns = list(jaxpr.eqns)
    eqns[k] = eqns[k].replace(**changes)
    return jaxpr.replace(eqns=eqns)


def test_traced_programs_obey(good):
    check_jaxpr(good)
    loop = lambda w: lax.scan(lambda c, x: (snp.tanh(w * c + x), c), 0.0, V)[0]  # noqa: E731
    for f in (loop, spmd.grad(loop), spmd.hessian(loop), spmd.grad(spmd.checkpoint(loop))):
        check_jaxpr(spmd.make_jaxpr(f)(1.0))


def test_lawful_equations_are_not_written_as_text(good, monkeypatch):
    """The text of each equation after each pass took most of the time of a checked compile."""
    monkeypatch.setattr(type(good.eqns[0]), "__str__", lambda eqn: pytest.fail("written"))
    check_jaxpr(good)


def test_equations_out_of_order_are_refused(good):
    with pytest.raises(
        InternalError, match=r"read before it is defined.*after shuffle.*from.*check"
    ):
        check_jaxpr(good.replace(eqns=good.eqns[::-1]), after="shuffle")


def test_an_unknown_variable_is_refused(good):
    with pytest.raises(InternalError, match="read before it is defined"):
        check_jaxpr(swap(good, 0, invars=(Var(F3),)))
    with pytest.raises(InternalError, match="read before it is defined: the outputs"):
        check_jaxpr(good.replace(outvars=[Var(F3)]))


def test_a_variable_defined_twice_is_refused(good):
    with pytest.raises(InternalError, match="defined twice"):
        check_jaxpr(swap(good, 1, outvars=good.eqns[0].outvars))
    with pytest.raises(InternalError, match="defined twice: the inputs"):
        check_jaxpr(good.replace(invars=good.invars * 2))


def test_results_that_contradict_the_rule_are_refused(good):
    wrong = Var(ShapedArray((4,), np.float32))
    with pytest.raises(InternalError, match=r"float32\[4\] written, the rule gives float32\[3\]"):
        check_jaxpr(swap(good, 1, outvars=(wrong,)).replace(outvars=[wrong]))
    with pytest.raises(InternalError, match="2 results written, the rule gives 1"):
        check_jaxpr(swap(good, 1, outvars=(*good.eqns[1].outvars, Var(F3))))


def test_operands_that_no_rule_accepts_are_refused(good):
    other = Var(ShapedArray((4,), np.float32))
    with pytest.raises(ShapeError):
        check_jaxpr(
            swap(good.replace(invars=[*good.invars, other]), 1, invars=(other, good.invars[0]))
        )


def test_literals_are_scalars(good):
    literal = Literal(V, F3)
    with pytest.raises(InternalError, match="a literal must be a scalar"):
        check_jaxpr(swap(good, 0, invars=(literal,)))


def test_nested_jaxprs_are_checked():
    outer = spmd.make_jaxpr(spmd.jit(lambda x: snp.sin(x) * x))(V).jaxpr
    call = outer.eqns[0]
    inner = call.params["jaxpr"].jaxpr
    broken = type(call.params["jaxpr"])(inner.replace(eqns=inner.eqns[::-1]))
    with pytest.raises(InternalError, match="read before it is defined"):
        check_jaxpr(swap(outer, 0, params=call.params | {"jaxpr": broken}))


def test_calls_get_what_they_take():
    outer = spmd.make_jaxpr(spmd.jit(lambda x: snp.sum(x)))(V).jaxpr
    other = Var(ShapedArray((4,), np.float32))
    wider = outer.replace(invars=[*outer.invars, other])
    with pytest.raises(
        InternalError, match=r"operand 0 is float32\[4\], the input is float32\[3\]"
    ):
        check_jaxpr(swap(wider, 0, invars=(other,)))
    with pytest.raises(InternalError, match="0 operands for 1 inputs"):
        check_jaxpr(swap(outer, 0, invars=()))


def test_the_message_names_the_user_s_line():
    here = current_source().line + 1
    jaxpr = spmd.make_jaxpr(lambda x: snp.sin(x))(V).jaxpr
    wrong = Var(ShapedArray((4,), np.float32))
    with pytest.raises(InternalError, match=f"test_check.py:{here}"):
        check_jaxpr(swap(jaxpr, 0, outvars=(wrong,)).replace(outvars=[wrong]))
