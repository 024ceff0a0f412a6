"""`custom_vjp`: fwd and bwd run wherever the function is differentiated in reverse."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base.context import state
from spmd.base.errors import ArgumentError, GradError, PytreeError, RefusedError
from spmd.base.tree import register_pytree_node
from tests.jax.compare import assert_same, cases

F = np.float32

V = np.array([0.5, -1.0, 2.0], np.float32)
TREE = {"a": 2.0, "b": 5.0}


def product(j):
    """(x * y, x) with a derivative in x that is twice as large as it should be."""

    @j.custom_vjp
    def f(x, y):
        return x * y, x

    f.defvjp(
        lambda x, y: ((x * y, x), (x, y)),
        lambda res, ct: (2 * ct[0] * res[1] + ct[1], ct[0] * res[0]),
    )
    return f


def scaled(j):
    """g(x) * p['a'], where g is no array and p a tree with a leaf that has no derivative."""

    @partial(j.custom_vjp, nondiff_argnums=(0,))
    def f(g, x, p):
        return g(x) * p["a"]

    f.defvjp(
        lambda g, x, p: (f(g, x, p), (x, p)),
        lambda g, res, ct: (ct * g(res[0]) * res[1]["a"] * 3, {"a": ct * 7.0, "b": 0.0 * ct}),
    )
    return f


@cases(
    grad=lambda j: j.grad(lambda x, y: product(j)(x, y)[0], argnums=(0, 1))(1.0, 2.0),
    trees=lambda j: j.grad(lambda x, p: scaled(j)(j.np.sin, x, p), argnums=(0, 1))(1.0, TREE),
    jit=lambda j: j.jit(j.grad(lambda x, p: scaled(j)(j.np.sin, x, p), (0, 1)))(1.0, TREE),
    grad_jit=lambda j: j.grad(j.jit(lambda x: sum(product(j)(x, x))))(2.0),
    jit_vmap=lambda j: j.jit(
        j.vmap(j.grad(lambda x, y: sum(product(j)(x, y)), argnums=(0, 1)), in_axes=(0, None))
    )(V, 2.0),
    vmap_inside=lambda j: j.grad(
        lambda x, y: sum(j.vmap(product(j), in_axes=(0, None))(x, y)).sum(), argnums=(0, 1)
    )(V, 2.0),
    vmap_twice=lambda j: j.grad(
        lambda x: j.vmap(j.vmap(product(j), in_axes=(None, 0)), in_axes=(0, None))(x, V)[0].sum()
    )(V),
    scan=lambda j: j.grad(
        lambda x: j.lax.scan(lambda c, _: (product(j)(c, x)[0], None), x, None, length=3)[0]
    )(2.0),
    vmap_of_scan=lambda j: j.vmap(
        j.grad(lambda x: j.lax.scan(lambda c, _: (product(j)(c, x)[0], None), x, None, length=3)[0])
    )(V),
    second=lambda j: j.grad(j.grad(lambda x: product(j)(x, x)[0]))(2.0),
    third_jit=lambda j: j.jit(j.grad(j.grad(j.grad(lambda x: product(j)(x, x)[0] * x))))(2.0),
    hessian=lambda j: j.hessian(lambda x: product(j)(x, x)[0].sum())(V),
    jacrev=lambda j: j.jacrev(lambda x: product(j)(x, x))(V),
    checkpoint=lambda j: j.grad(j.checkpoint(lambda x: product(j)(j.np.sin(x), x)[0]))(2.0),
    cond=lambda j: j.grad(lambda x: j.lax.cond(x > 0, lambda: product(j)(x, x)[0], lambda: x))(2.0),
    integers=lambda j: (
        lambda f: (
            f.defvjp(lambda x, i: (x * i, i), lambda i, ct: (ct * i * 2, None)),
            j.grad(f)(2.0, 3),
        )[1]
    )(j.custom_vjp(lambda x, i: x * i)),
)
def test_rule_is_used(case):
    assert_same(case)


def test_rules_may_branch_on_concrete_values():
    def case(j):
        f = j.custom_vjp(lambda x: x if x > 0 else -x)
        f.defvjp(lambda x: (f(x), bool(x > 0)), lambda up, ct: (ct * (3 if up else 5),))
        return j.grad(f)(2.0), j.grad(f)(-2.0)

    assert_same(case)


def test_methods_can_have_rules():
    class Clip:
        limit = 0.5

        @partial(spmd.custom_vjp, nondiff_argnums=(0,))
        def apply(self, x):
            return x

        apply.defvjp(
            lambda self, x: (x, None),
            lambda self, _, ct: (snp.clip(ct, -self.limit, self.limit),),
        )

    assert float(spmd.jit(spmd.grad(lambda x: 9 * Clip().apply(x)))(1.0)) == 0.5


# ---- mistakes ----------------------------------------------------------------------------------


def with_rules(fwd, bwd, f=lambda x: x):
    out = spmd.custom_vjp(f)
    out.defvjp(fwd, bwd)
    return out


@pytest.mark.parametrize("around", [lambda f: f, spmd.jit], ids=["direct", "staged"])
@pytest.mark.parametrize(
    ("fwd", "bwd", "text"),
    [
        (lambda x: x, lambda r, ct: (ct,), r"must return a pair \(out, residuals\)"),
        (lambda x: (x, None), lambda r, ct: ct, "must return a tuple of 1 cotangents"),
        (lambda x: (x, None), lambda r, ct: (snp.ones(3),), r"float32\[3\] for argument leaf 0"),
        (lambda x: (x, None), lambda r, ct: (snp.int32(1),), r"int32\[\] for argument leaf 0"),
        (lambda x: (x, None), lambda r, ct: ((ct, ct),), "is not an array"),
    ],
)
def test_bad_rules_are_named(fwd, bwd, text, around):
    with pytest.raises((GradError, PytreeError, ArgumentError), match=text):
        spmd.grad(around(with_rules(fwd, bwd)))(2.0)


def test_output_structures_must_agree():
    f = with_rules(lambda x: ((x, x), None), lambda r, ct: (ct[0],))
    with pytest.raises(GradError, match="fwd rule of <lambda> returned an output of structure"):
        spmd.grad(spmd.jit(f))(2.0)


@pytest.mark.parametrize("around", [lambda f: f, spmd.jit], ids=["direct", "staged"])
def test_forward_mode_is_refused(around):
    with pytest.raises(RefusedError, match="cannot be applied to a custom_vjp function"):
        around(lambda x: spmd.jvp(lambda x: product(spmd)(x, x)[0], (x,), (x,)))(2.0)


def tripled(x):
    """2 x, whose bwd triples instead."""
    return with_rules(lambda x: (2 * x, None), lambda _, ct: (3 * ct,), lambda x: 2 * x)(x)


def with_tangent(tangent):
    """The derivative of sin by a custom_jvp rule that gives `tangent` of cos(x) and t."""
    f = spmd.custom_jvp(snp.sin)
    f.defjvp(lambda p, t: (f(*p), tangent(snp.cos(p[0]), t[0])))
    return spmd.grad(f)


@pytest.mark.parametrize("around", [lambda f: f, spmd.jit], ids=["direct", "staged"])
@pytest.mark.parametrize(
    "case",
    [
        lambda x: spmd.linear_transpose(tripled, x)(x),
        with_tangent(lambda y, t: tripled(y * t)),
        with_tangent(lambda y, t: spmd.lax.fori_loop(0, 2, lambda _, c: tripled(c), t) * y),
    ],
    ids=["linear_transpose", "tangent of a rule", "in its loop"],
)
def test_transposing_the_function_itself_is_refused(case, around):
    """Not its body's transpose in place of what its user gave."""
    with pytest.raises(RefusedError, match="a custom_vjp function cannot itself be transposed"):
        around(case)(1.0)


def test_closing_over_a_differentiated_value_is_refused():
    def outer(y):
        return with_rules(lambda x: (x * y, None), lambda r, ct: (ct,), lambda x: x * y)(2.0)

    for around in (lambda f: f, spmd.jit):
        with pytest.raises(GradError, match="closes over a value that is being differentiated"):
            spmd.grad(around(outer))(3.0)


def test_a_function_without_rules_is_refused():
    with pytest.raises(GradError, match=r"has no rules; set them with \.defvjp"):
        spmd.custom_vjp(lambda x: x)(1.0)


def test_residuals_are_arrays_or_what_fwd_gave():
    """A scalar argument is an array in bwd as in fwd; a number that fwd makes stays a number."""
    kinds = []

    @spmd.custom_vjp
    def f(x):
        return 2.0 * x

    def bwd(residuals, ct):
        kinds.append([type(r).__name__ for r in residuals])
        return (2.0 * ct,)

    f.defvjp(lambda x: (f(x), (x, True, 3)), bwd)
    assert spmd.grad(f)(0.5) == 2.0
    assert kinds == [["Array", "bool", "int"]]


def test_a_residual_for_all_examples_is_one_in_bwd():
    """What does not depend on the example is not batched: bwd may loop over it, or test it."""

    @spmd.custom_vjp
    def power(x, n):
        return x**3

    def bwd(residuals, ct):
        x, n = residuals
        assert n.shape == ()
        loops = spmd.lax.while_loop(lambda k: k < n, lambda k: k + 1, 0)
        kinds.append(repr(loops))  # a tracer names the class of its trace
        return loops * x**2 * ct, None

    power.defvjp(lambda x, n: (x**3, (x, n)), bwd)
    kinds: list[str] = []
    x = np.array([1.0, 2.0], np.float32)
    batched = spmd.vmap(power, in_axes=(0, None))
    found = spmd.grad(lambda x: batched(x, 3).sum())(x)
    np.testing.assert_array_equal(found, 3 * x**2)
    assert kinds and not any("BatchTrace" in kind for kind in kinds)
    found = spmd.vmap(spmd.grad(power), in_axes=(0, None))(x, np.int32(3))
    np.testing.assert_array_equal(found, 3 * x**2)
    found = spmd.grad(lambda x: spmd.vmap(batched, in_axes=(0, None))(x, 3).sum())(x[None])
    np.testing.assert_array_equal(found, 3 * x[None] ** 2)


@pytest.mark.parametrize(
    ("ct", "wanted"), [(F(5), [5, 5, 5]), ((F(5), None), [5, 0, 0]), ((None, F(5)), [0, 5, 5])]
)
def test_cotangents_may_be_a_prefix_of_an_argument(ct, wanted):
    f = spmd.custom_vjp(lambda x: x[0] * x[1]["a"] * x[1]["b"])
    f.defvjp(lambda x: (f(x), None), lambda *_: (ct,))
    found = spmd.grad(f)((F(1), {"a": F(2), "b": F(3)}))
    assert spmd.tree.leaves(found) == wanted


def test_cotangents_that_are_no_prefix():
    f = spmd.custom_vjp(lambda x: x["a"] * x["b"])
    f.defvjp(lambda x: (f(x), None), lambda *_: ({"a": F(5)},))
    with pytest.raises(PytreeError, match="returned must be a dict"):
        spmd.grad(f)({"a": F(2), "b": F(3)})


def test_containers_are_made_anew_in_fwd():
    """Containers that ask for the trace they are made under find that of the code that has them."""

    class Box:
        def __init__(self, x):
            self.x, self.trace = x, state.trace

    register_pytree_node(Box, lambda b: ((b.x,), None), lambda _, xs: Box(*xs))
    f = spmd.custom_vjp(lambda x: Box(x * 2))
    seen = []

    def fwd(x):
        out = f(x)
        seen.append(out.trace is state.trace)
        return out, None

    f.defvjp(fwd, lambda _, g: (g.x * 2,))
    assert spmd.grad(lambda x: f(x).x)(3.0) == 2
    assert seen == [True]
