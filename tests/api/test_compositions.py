"""Transformations in and around each other give what JAX gives, to second and third order."""

from __future__ import annotations

import numpy as np
import pytest

from tests.jax.compare import assert_same, cases

A = np.arange(6.0, dtype=np.float32).reshape(2, 3)
V = np.array([0.5, -1.0, 2.0], np.float32)
Z = np.array([1 + 2j, 2.0], np.complex64)


@cases(
    identity=lambda j: j.grad(lambda x: x)(2.0),
    constant=lambda j: j.grad(lambda x: 1.0)(2.0),
    constant_of_array=lambda j: j.grad(lambda x: j.np.float32(1.0))(V),
    argnums=lambda j: j.grad(lambda x, y: (x * y).sum(), argnums=(1, 0))(V, V + 1),
    negative_argnum=lambda j: j.grad(lambda x, y: x * y, argnums=-1)(2.0, 3.0),
    keyword=lambda j: j.grad(lambda x, y: x * y)(2.0, y=3.0),
    tree=lambda j: j.grad(lambda p: (p["w"] * p["b"][0]).sum())({"w": V, "b": [2.0, None]}),
    aux=lambda j: j.grad(lambda x: (x * x, {"twice": 2 * x}), has_aux=True)(3.0),
    value=lambda j: j.value_and_grad(lambda x: x**3)(2.0),
    value_aux=lambda j: j.value_and_grad(lambda x: (x**3, x), has_aux=True)(2.0),
    allow_int=lambda j: j.grad(lambda x, i: x * i, argnums=(0, 1), allow_int=True)(2.0, 3),
    holomorphic=lambda j: j.grad(lambda z: z**3, holomorphic=True)(np.complex64(1 + 2j)),
    of_complex=lambda j: j.grad(lambda z: j.np.abs(z) ** 2)(np.complex64(1 + 2j)),
    third=lambda j: j.grad(j.grad(j.grad(lambda x: j.np.tanh(x) ** 3)))(0.5),
    third_jit=lambda j: j.jit(j.grad(j.jit(j.grad(j.jit(j.grad(lambda x: x**5))))))(0.5),
    jit_vmap_grad=lambda j: j.jit(j.vmap(j.grad(lambda x: j.np.tanh(x) ** 3)))(V),
    vmap_grad_jit=lambda j: j.vmap(j.grad(j.jit(lambda x: j.np.tanh(x) ** 3)))(V),
    grad_vmap_jit=lambda j: j.grad(lambda x: j.vmap(j.jit(j.np.sin))(x).sum())(V),
    grad_of_vmap_of_grad=lambda j: j.grad(lambda x: j.vmap(j.grad(j.np.sin))(x).sum())(V),
)
def test_grad_of_transformations_is_that_of_jax(case):
    assert_same(case)


@cases(
    jvp=lambda j: j.jvp(lambda x, y: x * j.np.sin(y), (V, V), (V + 1, V)),
    jvp_tree=lambda j: j.jvp(
        lambda p: p["a"] * p["b"], ({"a": V, "b": 2.0},), ({"a": V, "b": 1.0},)
    ),
    jvp_of_integers=lambda j: j.jvp(
        lambda x, i: x * i, (2.0, np.arange(3)), (1.0, np.zeros(3, j.float0))
    ),
    jvp_aux=lambda j: j.jvp(lambda x: (x * x, x + 1), (V,), (V,), has_aux=True),
    jvp_constant=lambda j: j.jvp(lambda x: (j.np.float32(1.0), x), (2.0,), (1.0,)),
    jvp_of_jvp=lambda j: j.jvp(lambda x: j.jvp(j.np.sin, (x,), (x,))[1], (V,), (V,)),
    jvp_of_grad=lambda j: j.jvp(j.grad(lambda x: (x**3).sum()), (V,), (V,)),
    grad_of_jvp=lambda j: j.grad(lambda x: j.jvp(j.np.sin, (x,), (x,))[1])(0.5),
    linearize=lambda j: j.linearize(lambda x, y: x * j.np.sin(y), V, V)[1](V, V),
    linearize_constant=lambda j: j.linearize(lambda x: (j.np.float32(1), x * x), 2.0)[1](1.0),
    linearize_vmapped=lambda j: j.vmap(j.linearize(lambda x: x * x, V)[1])(np.stack([V, V])),
    linearize_in_jit=lambda j: j.jit(lambda x, t: j.linearize(j.np.sin, x)[1](t))(V, V),
    vjp=lambda j: j.vjp(lambda x, y: (x * y, j.np.sin(x)), V, V)[1]((V, V)),
    vjp_of_integers=lambda j: j.vjp(lambda x, i: x * i, 2.0, np.arange(3))[1](V),
    vjp_identities=lambda j: j.vjp(lambda x, y: (y, x), 2.0, V)[1]((V, np.float32(1.0))),
    vjp_aux=lambda j: j.vjp(lambda x: (x * x, x + 1), V, has_aux=True)[2],
    vjp_complex=lambda j: j.vjp(lambda z: j.np.sin(z) * z, np.complex64(1 + 2j))[1](
        np.complex64(1 - 1j)
    ),
    vjp_twice=lambda j: (lambda back: (back(V), back(2 * V)))(j.vjp(j.np.sin, V)[1]),
    transpose=lambda j: j.linear_transpose(lambda x, y: (2 * x + y, x.sum()), V, V)(
        (V, np.float32(3))
    ),
    transpose_of_loop=lambda j: j.linear_transpose(
        lambda x: j.lax.fori_loop(0, 3, lambda i, c: c * i + x, x), V
    )(V),
)
def test_forward_and_reverse_mode_are_those_of_jax(case):
    assert_same(case)


@cases(
    jacfwd=lambda j: j.jacfwd(lambda x, y: {"o": j.np.outer(x, y)}, argnums=(0, 1))(V, V),
    jacrev=lambda j: j.jacrev(lambda x, y: {"o": j.np.outer(x, y), "s": x.sum()}, (0, 1))(V, V),
    jacrev_aux=lambda j: j.jacrev(lambda x: (x * x, x.sum()), has_aux=True)(V),
    jacfwd_aux=lambda j: j.jacfwd(lambda x: (x * x, x.sum()), has_aux=True)(V),
    holomorphic_rev=lambda j: j.jacrev(lambda z: z**3, holomorphic=True)(Z),
    holomorphic_fwd=lambda j: j.jacfwd(lambda z: z**3, holomorphic=True)(Z),
    holomorphic_hessian=lambda j: j.hessian(lambda z: (z**3).sum(), holomorphic=True)(Z),
    hessian=lambda j: j.hessian(lambda x: (j.np.sin(x) * x**2).sum())(V),
    hessian_of_jit=lambda j: j.hessian(j.jit(lambda x: (j.np.sin(x) * x**2).sum()))(V),
    jit_of_hessian=lambda j: j.jit(j.hessian(lambda x: (j.np.sin(x) * x**2).sum()))(V),
    hessian_of_tree=lambda j: j.hessian(lambda p: (j.np.sin(p["a"]) * p["b"] ** 2).sum())(
        {"a": V, "b": V + 1}
    ),
    hessian_aux=lambda j: j.hessian(lambda x: ((x * x).sum(), x.sum()), has_aux=True)(V),
    reverse_over_reverse=lambda j: j.jacrev(j.jacrev(lambda x: (j.np.sin(x) * x).sum()))(V),
    reverse_over_forward=lambda j: j.jacrev(j.jacfwd(lambda x: (j.np.sin(x) * x).sum()))(V),
    vmap_of_hessian=lambda j: j.vmap(j.hessian(lambda x: (x**3).sum()))(A),
)
def test_jacobians_are_those_of_jax(case):
    assert_same(case)


@cases(
    shared=lambda j: j.vmap(lambda x, y: j.np.tanh(x) * y, in_axes=(0, None))(V, 2.0),
    out_axes=lambda j: j.vmap(lambda x: {"a": x, "b": x * 2}, out_axes={"a": 1, "b": 0})(A),
    unmapped_out=lambda j: j.vmap(lambda x: (x, j.np.float32(3)), out_axes=(0, None))(A),
    constant=lambda j: j.vmap(lambda x: 3.0)(A),
    axis_size=lambda j: j.vmap(lambda x: x, in_axes=None, axis_size=3)(A),
    keyword=lambda j: j.vmap(lambda x, y: x + y)(V, y=V),
    negative=lambda j: j.vmap(lambda x: x * 2, in_axes=-1, out_axes=-1)(A),
    tree=lambda j: j.vmap(lambda p, x: p["w"] * x + p["b"], ({"w": 0, "b": None}, None))(
        {"w": V, "b": 2.0}, 3.0
    ),
    named=lambda j: j.vmap(lambda x: x - j.lax.pmean(x, "i"), axis_name="i")(V),
    grad_of_named=lambda j: j.grad(
        lambda v: j.vmap(lambda x: j.lax.psum(x * x, "i") * x, axis_name="i")(v).sum()
    )(V),
    nested=lambda j: j.vmap(j.vmap(lambda x, y: x * y, (None, 0)), (0, None))(V, V),
    nested_named=lambda j: j.vmap(
        j.vmap(lambda x: j.lax.psum(x, ("i", "j")), axis_name="j"), axis_name="i"
    )(A),
    of_jit=lambda j: j.vmap(j.jit(lambda x, y: x @ y), in_axes=(0, None))(A, V),
    in_jit_twice=lambda j: (lambda f: (f(V), f(V + 1)))(j.jit(j.vmap(lambda x: x * 2))),
)
def test_vmap_of_transformations_is_that_of_jax(case):
    assert_same(case)


@cases(
    closure=lambda j: j.grad(lambda x: j.jit(lambda y: x * y)(x))(3.0),
    closure_only=lambda j: j.grad(lambda x: j.jit(lambda: x * x)())(3.0),
    closure_vmap=lambda j: j.vmap(lambda x: j.grad(j.jit(lambda y: x * y * y))(x))(V),
    closure_jvp=lambda j: j.jvp(lambda x: j.jit(lambda y: x * y)(2.0), (3.0,), (1.0,)),
    nested=lambda j: j.jit(lambda x: j.jit(lambda y: j.jit(lambda z: x * y * z)(y))(x))(3.0),
    same_function_twice=lambda j: (lambda f: j.grad(lambda x: f(x) * f(2 * x))(1.5))(
        j.jit(lambda x: j.np.sin(x))
    ),
    only_some_differentiated=lambda j: j.grad(lambda x: j.jit(lambda a, b, i: a * b[i])(x, V, 1))(
        2.0
    ),
)
def test_jit_inside_transformations_is_that_of_jax(case):
    assert_same(case)


@pytest.mark.parametrize("order", ["jit(vmap(grad))", "vmap(jit(grad))", "vmap(grad(jit))"])
def test_order_of_transformations_does_not_matter(order):
    def case(j):
        f = lambda x: (j.np.tanh(x) ** 2).sum()  # noqa: E731
        for name in reversed(order.rstrip(")").split("(")):
            f = getattr(j, name)(f)
        return f(A)

    assert_same(case)
