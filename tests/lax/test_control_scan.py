"""`scan`: values, derivatives of every order, batching of every operand, and what it keeps."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.base.errors import (
    ArgumentError,
    GradError,
    InternalError,
    PytreeError,
    ShapeError,
)
from spmd.lax.control_scan import scan_p
from tests.jax.compare import assert_same, cases

A = np.arange(6.0, dtype=np.float32).reshape(2, 3) / 5
V = np.array([0.5, -1.0, 2.0], np.float32)


def rnn(j, **options):
    """(final, all) of a small recurrence with a weight, a start and inputs."""
    return lambda w, c, xs: j.lax.scan(lambda c, x: (j.np.tanh(w * c + x), c * x), c, xs, **options)


def total(j, **options):
    def f(w, c, xs):
        last, ys = rnn(j, **options)(w, c, xs)
        return (last * 2 + (ys**2).sum()).sum()

    return f


@cases(
    eager=lambda j: rnn(j)(1.5, 0.1, V),
    jit=lambda j: j.jit(rnn(j))(1.5, 0.1, V),
    reverse=lambda j: rnn(j, reverse=True)(1.5, 0.1, V),
    unroll=lambda j: j.jit(rnn(j, unroll=2))(1.5, 0.1, V),
    unroll_all=lambda j: j.jit(rnn(j, unroll=True))(1.5, 0.1, V),
    empty=lambda j: rnn(j)(1.5, 0.1, V[:0]),
    empty_jit=lambda j: j.jit(rnn(j))(1.5, 0.1, V[:0]),
    one=lambda j: j.jit(rnn(j))(1.5, 0.1, V[:1]),
    length=lambda j: j.lax.scan(lambda c, x: (c * 2, c), 1, None, length=4),
    no_carry=lambda j: j.lax.scan(lambda c, x: (c, x * 2), (), V),
    no_ys=lambda j: j.lax.scan(lambda c, x: (c + x, None), 0.0, V),
    trees=lambda j: j.lax.scan(
        lambda c, x: ({"s": c["s"] + x["a"], "k": [c["k"][0] + 1]}, (x["b"], c["s"])),
        {"s": np.float32(0), "k": [0]},
        {"a": V, "b": A.T},
    ),
    swap=lambda j: j.jit(lambda x: j.lax.scan(lambda c, _: ((c[1], c[0]), c), (x, 2 * x), None, 3))(
        1.0
    ),
    shift=lambda j: j.jit(lambda xs: j.lax.scan(lambda c, x: (x, c), 0.0, xs))(V),
    constant_ys=lambda j: j.lax.scan(lambda c, x: (c, 1.0), 0.0, V),
    same_value_twice=lambda j: j.jit(lambda xs: j.lax.scan(lambda c, x: (x, (x, x)), 0.0, xs))(V),
    nested=lambda j: j.jit(
        lambda w: j.lax.scan(
            lambda c, r: (c + j.lax.scan(lambda d, x: (d * w + x, d), c, r)[0], c), 0.5, A
        )
    )(1.5),
    weak_start=lambda j: j.lax.scan(lambda c, x: (c + x, c), 0.0, V)[0],
)
def test_value(case):
    assert_same(case)


@cases(
    grad=lambda j: j.grad(total(j), (0, 1, 2))(1.5, 0.1, V),
    jit_grad=lambda j: j.jit(j.grad(total(j), (0, 1, 2)))(1.5, 0.1, V),
    grad_jit=lambda j: j.grad(j.jit(total(j)), (0, 1, 2))(1.5, 0.1, V),
    reverse=lambda j: j.jit(j.grad(total(j, reverse=True), (0, 1, 2)))(1.5, 0.1, V),
    unroll=lambda j: j.jit(j.grad(total(j, unroll=2), (0, 1, 2)))(1.5, 0.1, V),
    some=lambda j: j.grad(total(j), 2)(1.5, 0.1, V),
    empty=lambda j: j.jit(j.grad(total(j), (0, 1, 2)))(1.5, 0.1, V[:0]),
    one=lambda j: j.jit(j.grad(total(j), (0, 1, 2)))(1.5, 0.1, V[:1]),
    jvp=lambda j: j.jvp(rnn(j), (1.5, 0.1, V), (1.0, 2.0, V)),
    jvp_of_start=lambda j: j.jvp(lambda c: rnn(j)(1.5, c, V), (0.1,), (1.0,)),
    linearize=lambda j: j.linearize(rnn(j), 1.5, 0.1, V)[1](1.0, 2.0, V),
    jacrev=lambda j: j.jacrev(rnn(j), (0, 1, 2))(1.5, 0.1, V),
    jacfwd=lambda j: j.jacfwd(rnn(j), (0, 1, 2))(1.5, 0.1, V),
    hessian=lambda j: j.hessian(total(j), (0, 1, 2))(1.5, 0.1, V),
    reverse_over_reverse=lambda j: j.jacrev(j.grad(total(j), (0, 2)), (0, 2))(1.5, 0.1, V),
    third=lambda j: j.grad(j.grad(j.grad(total(j))))(1.5, 0.1, V),
    integer_carry=lambda j: j.grad(
        lambda w: j.lax.scan(lambda c, _: ((c[0] + 1, c[1] * w * c[0]), None), (1, 1.0), None, 4)[
            0
        ][1]
    )(1.5),
    unchanged_carry=lambda j: j.grad(
        lambda w: j.lax.scan(lambda c, x: (c, w * x), 1.0, V)[1].sum()
    )(1.5),
    tangent_appears_late=lambda j: j.grad(
        lambda w: j.lax.scan(
            lambda c, x: ((c[1], c[2], w * x), c[0]), (0.0, 0.0, 0.0), j.np.ones(5)
        )[1].sum()
    )(1.5),
    integers_in_xs=lambda j: j.grad(
        lambda w: j.lax.scan(lambda c, i: (c * w + w[i], i), w, np.array([2, 0, 1]))[0].sum()
    )(V),
    closure=lambda j: j.grad(
        lambda w: j.lax.scan(lambda c, x: (j.np.sin(c @ w), x), V, V)[0].sum()
    )(0.3 * np.eye(3, dtype=np.float32)),
    through_cond=lambda j: j.hessian(
        lambda w: j.lax.scan(
            lambda c, x: (j.lax.cond(x > 0, lambda: j.np.sin(c * w.sum()), lambda: c * w[0]), None),
            0.1,
            V,
        )[0]
    )(V),
    nested=lambda j: j.hessian(
        lambda w: j.lax.scan(
            lambda c, r: (j.lax.scan(lambda d, x: (j.np.sin(d * w.sum()) + x, d), c, r)[0], c),
            0.5,
            A,
        )[0]
    )(V),
    in_tree=lambda j: j.grad(
        lambda p: j.lax.scan(
            lambda c, x: ({"h": j.np.tanh(p["w"] @ c["h"] + x)}, c["h"].sum()), {"h": V}, A
        )[1].sum()
    )({"w": np.eye(3, dtype=np.float32)}),
    constant_output=lambda j: j.grad(lambda w: j.lax.scan(lambda c, x: (1.0, w), 0.0, V)[0])(2.0),
)
def test_derivative(case):
    assert_same(case)


@pytest.mark.parametrize("transform", ["identity", "grad"])
@pytest.mark.parametrize(
    "axes",
    [(0, None, None), (None, 0, None), (None, None, 0), (None, None, 1), (0, 0, 0), (0, None, 1)],
)
def test_vmap_of_every_operand(axes, transform):
    args = [V, V + 1, np.stack([V, 2 * V, V - 1])]
    given = [x if a is not None else x[0] for x, a in zip(args, axes, strict=True)]

    def case(j):
        f = rnn(j) if transform == "identity" else j.grad(total(j), (0, 1, 2))
        return j.jit(j.vmap(f, in_axes=axes))(*given)

    assert_same(case)


@cases(
    carry_becomes_batched=lambda j: j.vmap(
        lambda x: j.lax.scan(lambda c, y: ((c[1], x), c[0]), (0.0, 0.0), j.np.ones(4))
    )(V),
    unbatched_ys=lambda j: j.vmap(lambda x: j.lax.scan(lambda c, y: (c + x, y), x, V))(V),
    out_axes=lambda j: j.vmap(
        lambda x: j.lax.scan(lambda c, y: (c + x, y * x), x, V)[1], out_axes=1
    )(V),
    hessian=lambda j: j.vmap(j.hessian(lambda w: total(j)(w, 0.1, V)))(V),
    grad_of_vmap=lambda j: j.grad(
        lambda v: sum(o.sum() for o in j.vmap(lambda w: rnn(j)(w, 0.1, V))(v))
    )(V),
    twice=lambda j: j.vmap(j.vmap(rnn(j), (0, None, None)), (None, None, 0))(
        V, 0.1, np.stack([V, V])
    ),
    named=lambda j: j.vmap(
        lambda x: j.lax.scan(lambda c, y: (c + j.lax.psum(x * y, "i"), c), x, V), axis_name="i"
    )(V),
)
def test_vmap(case):
    assert_same(case)


# ---- what the derivative keeps ------------------------------------------------------------------


def scans(f, *args):
    return [e for e in spmd.make_jaxpr(f)(*args).eqns if e.prim is scan_p]


def test_residuals_that_do_not_vary_are_not_stacked():
    def loss(w, xs):
        return lax.scan(lambda c, x: (snp.sin(2 * w) @ c + x, c), V, xs)[0].sum()

    w, xs = np.ones((3, 3), np.float32), np.ones((50, 3), np.float32)
    forward, backward = scans(spmd.grad(loss), w, xs)
    stacked = [v.aval.shape for v in forward.outvars if v.aval.ndim and v.aval.shape[0] == 50]
    # ys, and the carry that the derivative in w needs; not sin(2w) nor cos(2w), 50 times each.
    assert stacked == [(50, 3), (50, 3)]
    assert backward.params["num_consts"] == 2
    np.testing.assert_allclose(
        spmd.grad(loss)(w / 10, xs / 10),
        spmd.jacfwd(loss)(w / 10, xs / 10),
        rtol=1e-4,
    )


def test_body_keeps_no_dead_work():
    forward, _ = scans(
        spmd.grad(lambda w: lax.scan(lambda c, x: (snp.sin(w) * c, c), 1.0, V)[0]), 0.5
    )
    names = [e.prim.name for e in forward.params["jaxpr"].eqns]
    assert names.count("cos") == 0


def test_only_linear_carries_are_transposed():
    """A counter beside the linear carry runs ahead; what it gives is stacked, once."""
    back = spmd.linear_transpose(lambda x: lax.fori_loop(0, 4, lambda i, c: c * i + x, x), 1.0)
    ahead, backward = scans(lambda ct: back(ct), 1.0)
    assert ahead.params["num_carry"] == 1 and ahead.params["jaxpr"].out_avals[0].dtype == np.int32
    assert backward.params["reverse"]


def test_integer_carry_that_depends_on_what_is_transposed():
    def f(x):
        def body(c, _):
            n, y = c
            return (n + (y > 0).astype(int), y * (n + 2)), None

        return lax.scan(body, (0, x), None, length=2)[0][1]

    # Differentiated, the integer is just a value; only as a linear function it has no meaning.
    assert float(spmd.grad(f)(1.0)) == 6
    with pytest.raises((GradError, spmd.errors.SpmdError)):
        spmd.linear_transpose(f, 1.0)(1.0)


def test_what_no_cotangent_reaches_makes_no_nan():
    """Zero times an undefined derivative is NaN: what is dead must not be transposed."""
    undefined = lambda u, c: snp.sqrt(u - 9.0) + snp.log(c - 9.0)  # noqa: E731
    programs = [
        lambda x: lax.scan(lambda c, u: (c * u, undefined(u, c)), x, V)[0],
        lambda x: lax.scan(lambda c, u: ((c[0] * u, undefined(u, c[0])), u), (x, x), V)[0][0],
        lambda x: lax.fori_loop(0, 3, lambda i, c: (c[0] * 1.5, undefined(*c)), (x, x))[0],
        lambda x: lax.cond(x < 9, lambda x: (x * 2, undefined(x, x)), lambda x: (x, x), x)[0],
    ]
    for program in programs:
        for f in (program, spmd.jit(program), spmd.checkpoint(program)):
            slope = spmd.grad(f)(0.5)
            assert np.isfinite(slope), slope
            np.testing.assert_allclose(slope, (f(0.75) - f(0.25)) / 0.5, rtol=1e-4)
            assert spmd.grad(spmd.grad(f))(0.5) == 0


# ---- disable_jit and mistakes -------------------------------------------------------------------


def test_disable_jit_is_a_python_loop():
    wanted = rnn(_Ours)(1.5, 0.1, V), spmd.grad(total(_Ours))(1.5, 0.1, V)
    seen = []

    def body(c, x):
        seen.append(float(x))
        return snp.tanh(1.5 * c + x), c * x

    with spmd.disable_jit():
        found = lax.scan(body, 0.1, V), spmd.grad(total(_Ours))(1.5, 0.1, V)
        lax.scan(body, 0.1, V, reverse=True)
        with pytest.raises(ArgumentError, match="length 0 has no results to stack"):
            lax.scan(body, 0.1, V[:0])
    assert seen == [0.5, -1.0, 2.0, 2.0, -1.0, 0.5]
    for x, y in zip(spmd.tree.leaves(found), spmd.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


class _Ours:
    lax, np = lax, snp


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: lax.scan(3, 0.0, V), ArgumentError, "f must be a function"),
        (lambda: lax.scan(lambda c, x: (c, x), 0.0, 3.0), ShapeError, "xs is a scalar"),
        (
            lambda: lax.scan(lambda c, x: (c, x), 0.0, {"a": V, "b": A}),
            ShapeError,
            r"xs\['a'\] has shape \(3,\); xs\['b'\] has shape \(2, 3\)",
        ),
        (lambda: lax.scan(lambda c, x: (c, x), 0.0, V, length=4), ShapeError, "length is 4"),
        (lambda: lax.scan(lambda c, x: (c, x), 0.0), ArgumentError, "give length="),
        (lambda: lax.scan(lambda c, x: c, 0.0, V), PytreeError, r"pair \(carry, y\)"),
        (lambda: lax.scan(lambda c, x: ((c, c), x), 0.0, V), PytreeError, "structure"),
        (lambda: lax.scan(lambda c, x: (c, x), 0.0, V, unroll=-1), ArgumentError, "negative"),
        (
            lambda: lax.scan(lambda c, x: ({"h": A}, x), {"h": V}, V),
            ShapeError,
            r"carry\['h'\]: given float32\[3\], returned float32\[2, 3\]",
        ),
    ],
)
def test_mistakes_are_named(call, error, text):
    with pytest.raises(error, match=text) as caught:
        call()
    assert "test_control_scan.py" in str(caught.value)


def test_the_law_sees_wrong_operands():
    body = spmd.make_jaxpr(lambda c, x: (c, x))(1.0, 1.0)
    params = {"jaxpr": body, "length": 3, "reverse": False, "unroll": 1}
    params |= {"num_consts": 0, "num_carry": 1}
    with pytest.raises(InternalError, match="the body of scan"):
        spmd.make_jaxpr(lambda x: scan_p.bind(x, x, **params))(V)


def _weakly_carried(j, jnp):
    """dtypes, weak types, and the number of traces of loops whose body returns a strong type."""
    told, traces = [], []
    xs = np.ones(3, jnp.bfloat16)

    def count(value):
        traces.append(1)
        return value

    def say(*values):
        told.append([[str(v.dtype), bool(v.weak_type)] for v in values] + [len(traces)])
        traces.clear()

    c, y = j.lax.scan(lambda c, x: count((jnp.float32(2.0) * jnp.float32(1.0), c * x)), 1.0, xs)
    say(c, y)
    (n, c), y = j.lax.scan(
        lambda c, x: count(((c[0] + 1, c[1] * jnp.float32(1.0)), c[1] * x)), (0, 1.0), xs
    )
    say(n, c, y)
    c, y = j.lax.scan(lambda c, x: count((c * x, c)), 1.0, xs)
    say(c, y)
    say(*j.lax.while_loop(lambda c: c[1] < 3, lambda c: count((xs[0] * 1, c[1] + 1)), (xs[0], 0)))
    say(j.lax.fori_loop(0, 3, lambda i, c: count(c * jnp.float32(2.0)), 1.0))
    step = j.jit(lambda a: j.lax.scan(lambda c, x: (c * jnp.sin(a), c * x), 1.0, xs)[1].sum())
    say(j.grad(step)(jnp.float32(0.3)))
    return told


def test_a_weak_carry_stays_weak_inside(from_jax):
    def ask():
        import jax
        import jax.numpy as jnp

        return _weakly_carried(jax, jnp)

    assert _weakly_carried(spmd, spmd.numpy) == from_jax(ask)
