"""Each simplification and each fusion, on the smallest program that shows it."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as jnp
from spmd import lax, nn
from spmd.api.compiled import jit
from spmd.api.inspect import make_jaxpr
from spmd.base.config import config
from spmd.compile.expressions.equivalence import form
from spmd.compile.passes import pipeline
from spmd.compile.passes.algebra import PRODUCERS, RULES, WITH_LITERAL, Producers
from spmd.compile.passes.fusion.fuse import fuse
from spmd.compile.passes.fusion.graph import NO_EQUATION, graph_of
from spmd.compile.passes.fusion.reachability import Reach
from spmd.compile.passes.hoist_invariants import hoist_invariants
from spmd.compile.passes.inline_calls import inline_calls
from spmd.compile.passes.pipeline import run_passes
from spmd.compile.passes.simplify import simplify
from spmd.core.custom import custom_jvp
from spmd.core.ir import ClosedJaxpr, subjaxprs
from spmd.core.rewriting.equations import start
from tests.compile.programs import random_program

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
INTS = np.arange(12, dtype=np.int32).reshape(3, 4)


def names(closed):
    return [eqn.prim.name for eqn in closed.eqns]


def simplified(f, *args):
    return names(simplify(inline_calls(make_jaxpr(f)(*args))))


# ---- inline ------------------------------------------------------------------------------------


def test_inline_opens_nested_calls():
    @custom_jvp
    def g(x):
        return lax.sin(x)

    g.defjvps(lambda t, out, x: t)
    inner = jit(lambda x: g(lax.cos(x)))
    closed = make_jaxpr(lambda x: inner(inner(x)))(X)
    assert names(inline_calls(closed)) == ["cos", "sin", "cos", "sin"]


def test_inline_lifts_constants():
    table = np.arange(5, dtype=np.float32)
    closed = inline_calls(make_jaxpr(jit(lambda x: lax.add(x, table)))(table))
    assert len(closed.consts) == 1 and names(closed) == ["add"]


def test_inline_reaches_into_control_flow():
    step = jit(lambda c, x: (lax.add(c, x), lax.sin(c)))
    closed = inline_calls(make_jaxpr(lambda c, x: lax.scan(step, c, x))(X[0], X))
    body = closed.eqns[-1].params["jaxpr"]
    assert set(names(body)) == {"add", "sin"}


# ---- simplify ----------------------------------------------------------------------------------

IDENTITIES = {
    "x*1": lambda x: lax.mul(x, np.float32(1)),
    "1*x": lambda x: lax.mul(np.float32(1), x),
    "x+(-0.0)": lambda x: lax.add(x, np.float32(-0.0)),
    "x-0": lambda x: lax.sub(x, np.float32(0)),
    "x/1": lambda x: lax.div(x, np.float32(1)),
    "x**1": lambda x: lax.integer_pow(x, 1),
    "--x": lambda x: lax.neg(lax.neg(x)),
    "max(x,x)": lambda x: lax.max(x, x),
    "stop_gradient": lax.stop_gradient,
    "transposed twice": lambda x: lax.transpose(lax.transpose(x, (1, 0)), (1, 0)),
    "reshaped and back": lambda x: lax.reshape(lax.reshape(x, (2, 6)), (3, 4)),
    "select same": lambda x: lax.select(lax.gt(x, np.float32(0)), x, x),
    "through f64": lambda x: lax.convert_element_type(
        lax.convert_element_type(x, np.float32), np.float32
    ),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_identities_disappear(name):
    assert simplified(IDENTITIES[name], X) == []


NOT_IDENTITIES = {
    "x+0.0 turns -0.0 into 0.0": (lambda x: lax.add(x, np.float32(0)), ["add"]),
    "x*0 keeps NaN": (lambda x: lax.mul(x, np.float32(0)), ["mul"]),
    "x-x is NaN for inf": (lambda x: lax.sub(x, x), ["sub"]),
    "bf16 rounds": (
        lambda x: lax.convert_element_type(lax.convert_element_type(x, "bfloat16"), np.float32),
        ["convert_element_type"] * 2,
    ),
}


@pytest.mark.parametrize("name", NOT_IDENTITIES)
def test_operations_that_only_look_like_identities_stay(name):
    f, expected = NOT_IDENTITIES[name]
    assert simplified(f, X) == expected


def test_integer_zero_is_neutral():
    assert simplified(lambda x: lax.add(x, np.int32(0)), INTS) == []


def test_scalar_arithmetic_is_folded():
    def f(x):
        scale = lax.mul(np.float32(2), lax.exp(np.float32(0)))
        return lax.mul(x, lax.sub(scale, np.float32(1)))

    assert simplified(f, X) == []


def test_broadcast_scalars_become_scalar_operands():
    def f(x):
        return lax.mul(x, lax.broadcast_in_dim(np.float32(3), x.shape, ()))

    assert simplified(f, X) == ["mul"]


def test_equations_with_zeros_of_two_signs_are_not_equal():
    """0.0 == -0.0, so that parameters that are equal may still mean two things."""
    places = np.array([1, 9])

    def filled(x, places):
        return [x.at[places].get(mode="fill", fill_value=v) for v in (0.0, -0.0, 0.0, -0.0)]

    assert simplified(filled, X, places).count("gather") == 2
    signs = [np.signbit(np.asarray(r)[1]).all() for r in jit(filled)(X, places)]
    assert signs == [False, True, False, True]


def test_equal_equations_are_computed_once():
    assert simplified(lambda x: lax.mul(lax.sin(x), lax.sin(x)), X) == ["sin", "mul"]


def test_equations_with_different_parameters_are_not_merged():
    f = lambda x: lax.add(lax.rev(x, (0,)), lax.rev(x, (1,)))  # noqa: E731
    assert simplified(f, X) == ["rev", "rev", "add"]


def test_dead_code_goes():
    def f(x):
        lax.exp(x)
        return lax.sin(x)

    assert simplified(f, X) == ["sin"]


def test_barriers_keep_recomputation_apart():
    def f(x):
        first = lax.sin(x)
        (again,) = lax.optimization_barrier((x,))
        return lax.add(first, lax.sin(again))

    assert simplified(f, X).count("sin") == 2


def test_transposed_product_turns_around():
    def f(x, y):
        return lax.transpose(lax.dot_general(x, y, (((1,), (1,)), ((), ()))), (1, 0))

    assert simplified(f, X, X) == ["dot_general"]
    closed = run_passes(make_jaxpr(f)(X, X[:2]))
    assert closed.out_avals[0].shape == (2, 3)


OUTER = {
    "matrix": ((5, 1), (1, 7), (((1,), (0,)), ((), ()))),
    "columns": ((1, 5), (1, 7), (((0,), (0,)), ((), ()))),
    "batch": ((3, 5, 1), (3, 1, 7), (((2,), (1,)), ((0,), (0,)))),
    "two depths": ((3, 1, 1, 2), (3, 2, 1, 1), (((1, 2), (2, 3)), ((0,), (0,)))),
    "scalars": ((1,), (1,), (((0,), (0,)), ((), ()))),
    "empty": ((0, 1), (1, 7), (((1,), (0,)), ((), ()))),
}


@pytest.mark.parametrize("wide", (None, np.float32, np.int32), ids=str)
@pytest.mark.parametrize("name", OUTER)
def test_a_product_that_sums_nothing_is_elementwise(name, wide):
    left, right, numbers = OUTER[name]
    dtype = {None: np.float32, np.float32: np.float16, np.int32: np.int8}[wide]
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-9, 9, shape).astype(dtype) for shape in (left, right))

    def f(x, y):
        return lax.dot_general(x, y, numbers, preferred_element_type=wide)

    found = simplified(f, a, b)
    assert "mul" in found and "dot_general" not in found
    with spmd.disable_jit():
        want = np.asarray(f(a, b))
    got = np.asarray(jit(f)(a, b))
    assert got.dtype == want.dtype and np.array_equal(got, want)


def test_products_in_an_order_that_broadcasting_lacks_stay():
    def f(x, y):
        return lax.dot_general(x, y, (((2,), (2,)), ((0, 1), (1, 0))))

    assert "dot_general" in simplified(f, np.ones((2, 3, 1), "f"), np.ones((3, 2, 1), "f"))


# ---- fuse --------------------------------------------------------------------------------------


def fused(f, *args):
    closed = fuse(simplify(inline_calls(make_jaxpr(f)(*args))))
    return [str(e.params["space"]) if e.prim.name == "fused" else e.prim.name for e in closed.eqns]


def softmax(x):
    shape = x.shape
    top = lax.broadcast_in_dim(lax.reduce_max(x, (1,)), shape, (0,))
    exps = lax.exp(lax.sub(x, top))
    return lax.div(exps, lax.broadcast_in_dim(lax.reduce_sum(exps, (1,)), shape, (0,)))


def test_a_chain_is_one_kernel():
    assert fused(lambda x: lax.tanh(lax.mul(lax.exp(x), x)), X) == ["3x4"]


def test_softmax_is_one_kernel_with_rows():
    assert fused(softmax, X) == ["3(4)"]


def test_movement_is_free_inside_a_kernel():
    def f(x):
        return lax.add(lax.transpose(lax.slice(x, (0, 1), (3, 4)), (1, 0)), np.float32(1))

    assert fused(f, X) == ["3x3"]


def test_a_shared_value_is_written_by_its_consumer():
    def f(x):
        y = lax.exp(x)
        return y, lax.reduce_sum(y, (1,))

    assert fused(f, X) == ["3(4)"]


def test_matrix_products_stand_alone():
    def f(x):
        y = lax.tanh(lax.dot_general(x, x, (((1,), (1,)), ((), ()))))
        return lax.dot_general(y, x, (((1,), (0,)), ((), ())))

    assert fused(f, X) == ["dot_general", "3x3", "dot_general"]


def test_fusion_makes_no_cycle_through_a_product():
    """sin feeds the product, which feeds the root: the root's kernel cannot make it for both."""

    def f(x):
        s = lax.sin(x)
        p = lax.dot_general(s, s, (((1,), (1,)), ((), ())))
        return lax.add(lax.reduce_sum(p, (1,)), lax.reduce_sum(s, (1,)))

    spaces = fused(f, X)
    assert spaces[:2] == ["3x4", "dot_general"]


def test_expensive_work_is_not_repeated_along_a_broadcast():
    def f(x, y):
        return lax.mul(lax.broadcast_in_dim(lax.exp(y), x.shape, (1,)), x)

    assert fused(f, X, X[0]) == ["4", "3x4"]


def test_long_rows_are_not_swept_twice():
    assert len(fused(softmax, np.zeros((2, 1 << 17), np.float32))) > 1


# ---- prune -------------------------------------------------------------------------------------


def bodies(f, *args):
    closed = simplify(inline_calls(make_jaxpr(f)(*args)))
    (loop,) = [e for e in closed.eqns if e.prim.name in ("scan", "while", "cond")]
    return loop


def test_a_scan_drops_carries_that_no_result_needs():
    def f(x, xs):
        def step(carry, row):
            used, counter, unused = carry
            return (lax.add(used, row), counter + 1, lax.mul(unused, used)), lax.sin(row)

        return lax.scan(step, (x, 0, x), xs)[0][0]

    loop = bodies(f, X[0], X)
    assert loop.params["num_carry"] == 1 and len(loop.outvars) == 1
    assert names(loop.params["jaxpr"]) == ["add"]
    np.testing.assert_allclose(jit(f)(X[0], X), X[0] + X.sum(0), rtol=1e-5)


def test_a_carry_that_another_needs_stays():
    def f(x):
        return lax.fori_loop(0, 4, lambda i, c: (lax.add(c[0], c[1]), lax.neg(c[1])), (x, x))[0]

    assert bodies(f, X).params["num_carry"] == 2
    np.testing.assert_allclose(jit(f)(X), X, rtol=1e-6)


def test_a_while_loop_keeps_what_its_test_reads():
    def f(x):
        def test(c):
            return c[1] < 3

        def body(c):
            return lax.add(c[0], x), c[1] + 1, lax.sin(c[2])

        return lax.while_loop(test, body, (x, 0, x))[0]

    loop = bodies(f, X)
    assert len(loop.outvars) == 2
    np.testing.assert_allclose(jit(f)(X), 4 * X, rtol=1e-6)


def test_a_cond_loses_unused_results():
    def f(x, flag):
        return lax.cond(flag, lambda y: (lax.sin(y), y), lambda y: (y, lax.cos(y)), x)[0]

    loop = bodies(f, X, True)
    assert len(loop.outvars) == 1 and all(len(b.eqns) <= 1 for b in loop.params["branches"])
    np.testing.assert_allclose(jit(f)(X, True), np.sin(X), rtol=1e-6)
    np.testing.assert_array_equal(jit(f)(X, False), X)


# ---- what is asked often -------------------------------------------------------------------------


def test_a_pass_with_nothing_to_do_keeps_every_equation():
    closed = make_jaxpr(lambda x: lax.tanh(lax.add(lax.sin(x), x)))(X)
    assert inline_calls(closed) is closed and hoist_invariants(closed) is closed
    kept = simplify(closed)
    assert all(new is old for new, old in zip(kept.eqns, closed.eqns, strict=True))


def test_reachability_by_bits_is_that_of_a_walk(monkeypatch):
    by_bits, answers = Reach.any_reaches, []
    at_once, early = Reach.is_between, []

    def both(self, starts, group):
        found = by_bits(self, starts, group)
        assert found == self.any_walks_to(starts, group)
        answers.append(found)
        return found

    def between(self, start, end):
        found = at_once(self, start, end)
        if found:
            readers = [user for k in start.members - start.copies for user in self._users[k]]
            assert self.any_walks_to([k for k in readers if k not in start.members], end)
        early.append(found)
        return found

    monkeypatch.setattr(Reach, "any_reaches", both)
    monkeypatch.setattr(Reach, "is_between", between)

    def network(params, x):
        for w, b in params:
            y = jnp.tanh(x @ w + b)
            x = x + nn.softmax(y * y.mean(1, keepdims=True), axis=1)
        return (x * x).sum()

    params = [(np.ones((8, 8), np.float32), np.ones(8, np.float32))] * 3
    grads = jit(spmd.grad(network)).trace(params, np.ones((4, 8), np.float32)).jaxpr
    run_passes(grads)
    run_passes(make_jaxpr(lambda x: (lax.sin(x), lax.cos(x)))(X))
    assert {True, False} <= set(answers)
    assert {True, False} <= set(early)


def test_groups_that_are_alike_have_one_kernel():
    def layers(x):
        for _ in range(6):
            x = lax.sort(x)  # no kernel: what is before and after it stays apart
            x = lax.exp(lax.mul(lax.sin(x), np.float32(0.5)))
        return lax.mul(x, np.float32(-0.0))

    fused = run_passes(jit(layers).trace(np.ones((4, 4), np.float32)).jaxpr)
    groups = [e.params["jaxpr"] for e in fused.eqns if e.prim.name == "fused"]
    forms = {form(g) for g in groups}
    assert None not in forms and 1 < len(forms) < len(groups)
    other = run_passes(jit(lambda x: lax.mul(x, np.float32(0.0))).trace(np.ones(4)).jaxpr)
    minus = run_passes(jit(lambda x: lax.mul(x, np.float32(-0.0))).trace(np.ones(4)).jaxpr)
    assert form(other.eqns[0].params["jaxpr"]) != form(minus.eqns[0].params["jaxpr"])


def test_the_graph_of_a_jaxpr_is_what_its_variables_say():
    closed, _ = random_program(7, length=60)
    graph = graph_of(closed.eqns)
    for k, eqn in enumerate(closed.eqns):
        makers = [[j for j, e in enumerate(closed.eqns) if v in e.outvars] for v in eqn.invars]
        assert graph.sources[k] == [found[0] if found else NO_EQUATION for found in makers]
        readers = [j for j, e in enumerate(closed.eqns) if set(eqn.outvars) & set(e.invars)]
        assert graph.users[k] == readers
        assert all(graph.makers[v] == k for v in eqn.outvars)


def test_a_jaxpr_knows_which_equations_nest_jaxprs():
    def f(x):
        turned = lax.cond(x[0, 0] > 0, lax.sin, lax.cos, x)
        return lax.scan(lambda c, row: (c + row, c), turned[0], turned)[1]

    closed = make_jaxpr(f)(X)
    expected = {eqn for eqn in closed.eqns if list(subjaxprs(eqn.params))}
    assert closed.jaxpr.nested == expected and {"cond", "scan"} <= {e.prim.name for e in expected}


@pytest.mark.parametrize("name", sorted(WITH_LITERAL))
def test_rules_that_need_a_literal_find_nothing_without(name):
    function = {"add_any": lax.add}.get(name) or getattr(lax, name)
    closed = make_jaxpr(function)(X, X)
    (eqn,) = closed.eqns
    assert RULES[name](start(closed), eqn, eqn.invars) is None
    assert RULES[name](start(closed), eqn, eqn.invars[:1] * 2) is None


def test_rules_ask_only_for_what_is_remembered(monkeypatch):
    asked, of = set(), Producers.of

    def recorded(self, atom, name):
        asked.add(name)
        return of(self, atom, name)

    monkeypatch.setattr(Producers, "of", recorded)
    for seed in range(8):
        simplify(random_program(seed, length=60)[0])
    for identity in IDENTITIES.values():
        simplified(identity, X)
    simplified(lambda x: lax.conj(x).T @ x, X.astype(np.complex64))
    simplified(lambda x: lax.bitwise_not(x), X > 0)
    assert asked == PRODUCERS


def test_a_jaxpr_that_a_pass_left_as_it_was_is_checked_once(monkeypatch):
    checked = []
    monkeypatch.setattr(pipeline, "check_jaxpr", lambda closed, after: checked.append(after))
    closed = spmd.make_jaxpr(lambda x: x)(np.ones(3))

    def keep(closed):
        return closed

    def replace(closed):
        return ClosedJaxpr(closed.jaxpr, closed.consts)

    with config.override("check", True):
        run_passes(closed, passes=(keep, keep, replace, keep))
    assert checked == ["keep", "replace"]
