"""`custom_jvp`: the rule is used wherever the function is differentiated; mistakes are named."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base.errors import ArgumentError, GradError
from tests.jax.compare import assert_same, cases

V = np.array([0.5, -1.0, 2.0], np.float32)


def product(j):
    """x * y, whose derivative in x is twice as large as it should be: rules must be seen to run."""

    @j.custom_jvp
    def f(x, y):
        return x * y

    @f.defjvp
    def rule(primals, tangents):
        (x, y), (tx, ty) = primals, tangents
        return f(x, y), 2 * tx * y + x * ty

    return f


def sine(j, tangent):
    """sin, whose derivative is what `tangent(x, t)` says."""

    @j.custom_jvp
    def f(x):
        return j.np.sin(x)

    @f.defjvp
    def rule(primals, tangents):
        return f(primals[0]), tangent(primals[0], tangents[0])

    return f


@cases(
    grad=lambda j: j.grad(product(j), argnums=(0, 1))(2.0, 3.0),
    jvp=lambda j: j.jvp(product(j), (2.0, 3.0), (1.0, 1.0)),
    jit_grad=lambda j: j.jit(j.grad(product(j), argnums=(0, 1)))(2.0, 3.0),
    grad_jit=lambda j: j.grad(j.jit(product(j)), argnums=(0, 1))(2.0, 3.0),
    second=lambda j: j.grad(lambda x: j.grad(product(j))(x, x))(2.0),
    hessian=lambda j: j.hessian(lambda v: product(j)(v, v).sum())(V),
    vmap_grad=lambda j: j.vmap(j.grad(product(j), argnums=(0, 1)), in_axes=(0, None))(V, 3.0),
    grad_vmap=lambda j: j.grad(lambda v: j.vmap(product(j), in_axes=(0, None))(v, 3.0).sum())(V),
    grad_vmap_shared=lambda j: j.grad(lambda y: j.vmap(product(j), in_axes=(0, None))(V, y).sum())(
        3.0
    ),
    scan=lambda j: j.grad(
        lambda x: j.lax.scan(lambda c, _: (product(j)(c, x), None), x, None, length=3)[0]
    )(2.0),
    cond=lambda j: j.grad(lambda x: j.lax.cond(x > 0, lambda: product(j)(x, x), lambda: x))(2.0),
    checkpoint=lambda j: j.grad(j.checkpoint(lambda x: product(j)(j.np.sin(x), x)))(2.0),
    keyword=lambda j: j.grad(lambda x: product(j)(x, y=x))(2.0),
    undifferentiated=lambda j: j.grad(lambda x: x * product(j)(2.0, 3.0))(1.0),
)
def test_rule_is_used(case):
    assert_same(case)


TANGENTS = {
    "jit": lambda j: sine(j, lambda x, t: j.jit(lambda x, t: j.np.cos(x) * t)(x, t)),
    "fori": lambda j: sine(j, lambda x, t: j.lax.fori_loop(0, 3, lambda i, c: c * x + i * t, t)),
    "known carry": lambda j: sine(
        j,
        lambda x, t: j.lax.scan(
            lambda c, _: ((j.np.sin(c[0]), c[1] * c[0]), None), (x, t), None, length=3
        )[0][1],
    ),
    "xs": lambda j: sine(
        j, lambda x, t: j.lax.scan(lambda c, w: (c * w + t, c), t, j.np.arange(3.0) * x)[1].sum()
    ),
    "nested": lambda j: sine(
        j,
        lambda x, t: j.lax.scan(
            lambda c, _: (j.lax.fori_loop(0, 2, lambda i, d: d * (x + i), c), None),
            t,
            None,
            length=3,
        )[0],
    ),
    "jit in scan": lambda j: sine(
        j,
        lambda x, t: j.lax.scan(
            lambda c, _: (j.jit(lambda k, c: (k + 1, c * k))(*c), None), (1, t), None, length=3
        )[0][1],
    ),
    "cond": lambda j: sine(
        j, lambda x, t: j.lax.cond(x > 0, lambda: t * x, lambda: t * j.np.sin(x))
    ),
    "checkpoint": lambda j: sine(
        j, lambda x, t: j.checkpoint(lambda t, x: t * j.np.sin(j.np.sin(x)))(t, x)
    ),
}
AROUND = {
    "grad": lambda j, f: j.grad(f)(np.float32(1.3)),
    "jit(grad)": lambda j, f: j.jit(j.grad(f))(np.float32(1.3)),
    "grad(jit)": lambda j, f: j.grad(j.jit(f))(np.float32(1.3)),
    "grad(grad)": lambda j, f: j.grad(j.grad(f))(np.float32(1.3)),
    "vmap(grad)": lambda j, f: j.vmap(j.grad(f))(V),
    "jvp": lambda j, f: j.jvp(f, (np.float32(1.3),), (np.float32(0.5),)),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("tangent", TANGENTS)
def test_rules_may_call_anything(tangent, around):
    """Calls and loops over primals and tangents together are transposed."""
    assert_same(lambda j: AROUND[around](j, TANGENTS[tangent](j)))


def test_rule_may_branch_on_concrete_values():
    def case(j):
        @j.custom_jvp
        def f(x):
            return x * 2 if x > 0 else x

        f.defjvp(lambda p, t: (f(*p), t[0] * 5 if p[0] > 0 else t[0]))
        return j.grad(f)(2.0), j.grad(f)(-2.0), j.jvp(f, (2.0,), (1.0,)), j.grad(j.grad(f))(1.0)

    assert_same(case)


def test_rules_take_defaults_and_nondifferentiated_arguments():
    def case(j):
        @partial(j.custom_jvp, nondiff_argnums=(0, 2))
        def f(g, x, power=3.0):
            return g(x) ** power

        f.defjvp(lambda g, power, p, t: (f(g, p[0], power), t[0] * power * 10))
        return j.grad(f, 1)(j.np.sin, 2.0), j.grad(lambda x: f(j.np.cos, x, power=2.0))(1.0)

    assert_same(case)


def test_nondifferentiated_arguments_may_be_given_by_name():
    def case(j):
        f = j.custom_jvp(lambda g, x: g(x), nondiff_argnames="g")
        f.defjvp(lambda g, p, t: (f(g, p[0]), t[0] * 4))
        h = j.custom_vjp(lambda x, g: g(x), nondiff_argnames=("g",))
        h.defvjp(lambda x, g: (h(x, g), x), lambda g, x, ct: (ct * g(x),))
        return j.grad(f, 1)(j.np.sin, 2.0), j.grad(h)(2.0, j.np.cos)

    assert_same(case)
    with pytest.raises(ArgumentError, match=r"names 'h', but its parameters are \(g, x\)"):
        spmd.custom_jvp(lambda g, x: g(x), nondiff_argnames="h")


def test_each_argument_may_have_a_rule_of_its_own():
    def case(j):
        f = j.custom_jvp(lambda x, y: x * y)
        f.defjvps(lambda t, out, x, y: t * y * 2, None)
        return j.grad(f, argnums=(0, 1))(2.0, 3.0)

    assert_same(case)


def test_methods_can_have_rules():
    class Scale:
        factor = 3.0

        @partial(spmd.custom_jvp, nondiff_argnums=(0,))
        def apply(self, x):
            return self.factor * x

        @apply.defjvp
        def _(self, primals, tangents):
            return self.apply(primals[0]), 7 * tangents[0]

    assert float(spmd.grad(Scale().apply)(1.0)) == 7


def test_evaluation_is_the_function_itself():
    f = product(spmd)
    assert f(2.0, 3.0) == 6.0
    assert f.__name__ == "f"


# ---- mistakes ----------------------------------------------------------------------------------


def with_rule(rule, f=lambda x: x):
    out = spmd.custom_jvp(f)
    out.defjvp(rule)
    return out


@pytest.mark.parametrize("around", [lambda f: f, spmd.jit], ids=["direct", "staged"])
@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (lambda p, t: (p[0], snp.ones(3)), r"tangent float32\[3\] for output 0"),
        (lambda p, t: p[0], r"must return a pair \(primal_out, tangent_out\)"),
        (lambda p, t: (p[0], (t[0], t[0])), "tangent_out"),
    ],
)
def test_bad_rules_are_named(rule, text, around):
    with pytest.raises((GradError, spmd.errors.PytreeError), match=text):
        spmd.grad(around(with_rule(rule)))(2.0)


def test_output_structures_must_agree():
    f = with_rule(lambda p, t: ((p[0], p[0]), (t[0], t[0])))
    with pytest.raises(GradError, match="they must be the same"):
        spmd.grad(spmd.jit(f))(2.0)


def test_a_function_without_a_rule_is_refused():
    with pytest.raises(GradError, match=r"f has no rule; set one with \.defjvp"):

        @spmd.custom_jvp
        def f(x):
            return x

        f(1.0)


def test_closing_over_a_differentiated_value_is_refused():
    def outer(y):
        return with_rule(lambda p, t: (p[0] * y, t[0] * y), lambda x: x * y)(2.0)

    for around in (lambda f: f, spmd.jit):
        with pytest.raises(GradError, match="closes over a value that is being differentiated"):
            spmd.grad(around(outer))(3.0)


def test_keyword_only_arguments_are_refused():
    f = with_rule(lambda p, t: (p[0], t[0]), lambda x, *, flag: x)
    with pytest.raises(ArgumentError, match=r"keyword-only arguments \(flag\)"):
        spmd.grad(lambda x: f(x, flag=True))(1.0)
