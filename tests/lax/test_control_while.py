"""`while_loop` and `fori_loop`: values, forward derivatives, batching; mistakes by their text."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base.errors import DtypeError, InternalError, PytreeError, RefusedError, ShapeError
from spmd.lax.control_while import while_p
from tests.jax.compare import assert_same, cases

V = np.array([0.5, -1.0, 2.0], np.float32)
N = np.array([1, 2, 3], np.int32)


def power(j):
    """x ** 4, by a loop that counts."""
    return lambda x: j.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * x, c[1] + 1), (x, 0))[0]


def until(j):
    """Double x until it exceeds a limit: how often depends on data."""
    return lambda x, limit: j.lax.while_loop(
        lambda c: c[0] < limit, lambda c: (2 * c[0] + 0.1, c[1] + 1), (x, 0)
    )


def horner(j, lower=0, upper=5):
    return lambda x: j.lax.fori_loop(lower, upper, lambda i, c: c * x + i, x)


@cases(
    counting=lambda j: power(j)(1.5),
    jit=lambda j: j.jit(power(j))(1.5),
    data=lambda j: until(j)(0.5, 10.0),
    never=lambda j: until(j)(20.0, 10.0),
    tree=lambda j: j.lax.while_loop(
        lambda c: c["n"] < 3,
        lambda c: {"n": c["n"] + 1, "x": (c["x"][0] * 2,)},
        {"n": 0, "x": (V,)},
    ),
    closure=lambda j: j.jit(
        lambda a, b: j.lax.while_loop(lambda x: x < a, lambda x: x + b, np.float32(0))
    )(5.0, 2.0),
    swap=lambda j: j.jit(
        lambda: j.lax.while_loop(
            lambda c: c[2] < 3, lambda c: (c[1], c[0], c[2] + 1), (1.0, 2.0, 0)
        )
    )(),
    nested=lambda j: j.lax.while_loop(
        lambda c: c[0] < 3,
        lambda c: (c[0] + 1, j.lax.fori_loop(0, c[0], lambda i, d: d + i, c[1])),
        (0, 0),
    ),
    fori=lambda j: horner(j)(1.1),
    fori_empty=lambda j: horner(j, 3, 3)(1.1),
    fori_backwards=lambda j: horner(j, 3, 1)(1.1),
    fori_offset=lambda j: horner(j, -2, 3)(1.1),
    fori_traced=lambda j: j.jit(lambda k, x: horner(j, 0, k)(x))(4, 1.1),
    fori_traced_empty=lambda j: j.jit(lambda k, x: horner(j, 0, k)(x))(-1, 1.1),
    fori_unsigned=lambda j: j.lax.fori_loop(np.uint8(250), np.uint8(255), lambda i, c: c + i, 0),
    fori_array=lambda j: j.lax.fori_loop(0, 3, lambda i, x: x.at[i].add(i), V),
)
def test_value(case):
    assert_same(case)


@cases(
    jvp=lambda j: j.jvp(power(j), (1.5,), (2.0,)),
    jvp_jit=lambda j: j.jit(lambda x: j.jvp(power(j), (x,), (x,)))(1.5),
    jvp_of_limit=lambda j: j.jvp(lambda y: until(j)(0.5, y)[0], (10.0,), (1.0,)),
    jvp_of_start=lambda j: j.jvp(lambda x: until(j)(x, 10.0)[0], (0.5,), (1.0,)),
    linearize=lambda j: j.linearize(power(j), 1.5)[1](2.0),
    second=lambda j: j.jacfwd(j.jacfwd(power(j)))(V),
    tangent_appears_late=lambda j: j.jvp(
        lambda x: j.lax.while_loop(
            lambda c: c[2] < 2, lambda c: (c[1], x * c[1] + c[0], c[2] + 1), (0.0, 0.0, 0)
        )[0],
        (3.0,),
        (1.0,),
    ),
    fori_grad=lambda j: j.grad(horner(j))(1.1),
    fori_hessian=lambda j: j.hessian(lambda x: horner(j)(x).sum())(V),
    fori_traced_jvp=lambda j: j.jit(lambda k: j.jvp(horner(j, 0, k), (1.1,), (1.0,)))(3),
    fori_concrete_bounds_under_grad=lambda j: j.grad(
        lambda x, k: j.lax.fori_loop(0, k, lambda i, c: c * x + i, x)
    )(1.1, 3),
    loop_without_the_variable=lambda j: j.grad(
        lambda x: x * j.lax.while_loop(lambda c: c < 3.0, lambda c: c + 1.0, 0.0)
    )(2.0),
)
def test_derivative(case):
    assert_same(case)


@cases(
    everything=lambda j: j.vmap(lambda x, y: until(j)(x, y))(np.abs(V), V + 10),
    start=lambda j: j.vmap(lambda x: until(j)(x, 10.0))(np.abs(V)),
    limit=lambda j: j.vmap(lambda y: until(j)(0.5, y))(V + 10),
    one_carry=lambda j: j.vmap(power(j))(V),
    body_constant=lambda j: j.vmap(
        lambda k: j.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * k), (0, 1.0))
    )(V),
    trip_count=lambda j: j.vmap(
        lambda k, x: j.lax.while_loop(lambda c: c[0] < k, lambda c: (c[0] + 1, c[1] * 2), (0, x)),
        in_axes=(0, None),
    )(N, 1.0),
    unused_carry=lambda j: j.vmap(
        lambda k: j.lax.while_loop(lambda c: c[0] < k, lambda c: (c[0] + 1, c[1]), (0, 7.0))
    )(N),
    fori_trips=lambda j: j.vmap(lambda k, x: horner(j, 0, k)(x))(N, V),
    of_jvp=lambda j: j.vmap(lambda x: j.jvp(lambda x: until(j)(x, 10.0)[0], (x,), (1.0,)))(
        np.abs(V)
    ),
    jvp_of_vmap=lambda j: j.jvp(
        j.vmap(lambda k: j.lax.while_loop(lambda c: c < 3.0, lambda c: c + k, 0.0)),
        (np.abs(V),),
        (V,),
    ),
    grad_of_fori=lambda j: j.vmap(j.grad(horner(j)))(V),
    twice=lambda j: j.vmap(
        j.vmap(lambda x, y: until(j)(x, y)[1], in_axes=(None, 0)), in_axes=(0, None)
    )(np.abs(V), V + 10),
    nested=lambda j: j.vmap(
        lambda k: j.lax.fori_loop(
            0, k, lambda i, c: j.lax.fori_loop(0, i, lambda _, d: d + k, c), 0
        )
    )(N),
    matrix_carry=lambda j: j.vmap(
        lambda k: j.lax.while_loop(
            lambda c: c[0] < k, lambda c: (c[0] + 1, c[1] @ c[1]), (0, 0.5 * j.np.eye(2))
        )[1]
    )(N),
)
def test_vmap(case):
    assert_same(case)


def test_reverse_mode_is_refused_with_advice():
    with pytest.raises(
        RefusedError, match=r"lax\.scan, a fori_loop with static bounds, or forward"
    ):
        spmd.grad(power(_Ours))(1.5)


class _Ours:
    lax = lax


def test_disable_jit_runs_python():
    seen = []
    with spmd.disable_jit():
        assert lax.while_loop(lambda c: c < 3, lambda c: seen.append(c) or c + 1, 0) == 3
        assert lax.fori_loop(0, 4, lambda i, c: c + int(i), 0) == 6
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: lax.while_loop(lambda c: V > c, lambda c: c, 1.0), ShapeError, "boolean scalar"),
        (lambda: lax.while_loop(lambda c: c, lambda c: c, 1.0), DtypeError, "x != 0"),
        (lambda: lax.while_loop(lambda c: True, lambda c: (c, c), 1.0), PytreeError, "structure"),
        (
            lambda: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0], V), (0, V[:2])),
            ShapeError,
            r"carry\[1\]: given float32\[2\], returned float32\[3\]",
        ),
        (
            lambda: lax.fori_loop(0, 3, lambda i, c: c.astype("float16"), V),
            ShapeError,
            r"lax.fori_loop.*\n.*given float32\[3\], returned float16\[3\]",
        ),
        (lambda: lax.fori_loop(0, 2.5, lambda i, c: c, 1), DtypeError, "must be integers"),
    ],
)
def test_mistakes_are_named(call, error, text):
    with pytest.raises(error, match=text) as caught:
        call()
    assert "test_control_while.py" in str(caught.value)


def test_the_law_sees_wrong_operands():
    test = spmd.make_jaxpr(lambda x: x < 1)(1.0)
    body = spmd.make_jaxpr(lambda x: x)(V)
    params = {"cond_jaxpr": test, "cond_nconsts": 0, "body_jaxpr": body, "body_nconsts": 0}
    with pytest.raises(InternalError, match="the body of while"):
        spmd.make_jaxpr(lambda x: while_p.bind(x, **params))(1.0)


@pytest.mark.parametrize(
    "loop",
    [
        lambda: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, ~c[1]), (0, True)),
        lambda: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 1.5), (0, 1.0)),
        lambda: lax.while_loop(lambda c: c < 3, lambda c: c + 1, 7),
        lambda: spmd.vmap(
            lambda n: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, ~c[1]), (0, True))
        )(np.array([1, 4, 0])),
        lambda: spmd.vmap(
            lambda x: lax.while_loop(lambda c: c[1] < 9, lambda c: (c[0] + 1, c[1] + x), (0, 1.0))
        )(np.array([1.0, 4.0], np.float32)),
    ],
)
def test_disable_jit_gives_the_same_types_and_values(loop):
    wanted = spmd.tree.leaves(loop())
    with spmd.disable_jit():
        found = spmd.tree.leaves(loop())
    for x, y in zip(found, wanted, strict=True):
        assert (x.dtype, x.weak_type) == (y.dtype, y.weak_type)
        np.testing.assert_array_equal(x, y)
