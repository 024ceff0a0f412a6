"""Transformations, control flow and maps in combination: small programs of both libraries.

A program is a function of the library, `jax` or `spmd`, and its results must agree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

TABLE = np.arange(12, dtype=np.float32).reshape(3, 4) / 7
LINE = np.linspace(-1, 1, 5).astype(np.float32)
BLOCKS = np.random.default_rng(0).normal(size=(4, 3, 3)).astype(np.float32)
PROGRAMS: list[Callable[[Any], Any]] = []


def program(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Enter a program."""
    PROGRAMS.append(f)
    return f


@program
def jit_kwargs(lib):
    return lib.jit(lambda x, *, y=1: x * y)(TABLE, y=3)


@program
def jit_default(lib):
    return lib.jit(lambda x, y=2.0: x * y)(TABLE)


@program
def jit_nested_static(lib):
    @functools.partial(lib.jit, static_argnums=0)
    def f(n, x):
        return lib.lax.fori_loop(0, n, lambda i, x: x * 2, x)

    return f(3, LINE)


@program
def jit_method(lib):
    class M:
        def __init__(self):
            self.k = 3.0

        @functools.partial(lib.jit, static_argnums=0)
        def f(self, x):
            return x * self.k

    return M().f(LINE)


@program
def grad_dict(lib):
    return lib.grad(lambda d: (d["a"] ** 2).sum() + d["b"])({"a": LINE, "b": 1.0})


@program
def grad_argnums_tuple(lib):
    return lib.grad(lambda a, b, c: (a * b + c).sum(), argnums=(0, 2))(LINE, LINE + 1, LINE)


@program
def grad_neg_argnum(lib):
    return lib.grad(lambda a, b: (a * b).sum(), argnums=-1)(LINE, LINE + 1)


@program
def vjp_with_aux(lib):
    y, f, aux = lib.vjp(lambda x: (lib.numpy.sin(x), x * 2), LINE, has_aux=True)
    return y, f(LINE), aux


@program
def jvp_with_aux(lib):
    return lib.jvp(lambda x: (lib.numpy.sin(x), x * 2), (LINE,), (LINE,), has_aux=True)


@program
def linearized(lib):
    y, f = lib.linearize(lambda x: lib.numpy.sin(x).sum(), LINE)
    return y, f(LINE)


@program
def transposed_linear_map(lib):
    return lib.linear_transpose(lambda x: x @ TABLE, np.ones(3, np.float32))(np.ones(4, np.float32))


@program
def hessian_of_cubes(lib):
    return lib.hessian(lambda x: (x**3).sum())(LINE)


@program
def jacobians_of_two(lib):
    return lib.jacfwd(lambda x, y: lib.numpy.outer(x, y), argnums=(0, 1))(LINE, LINE)


@program
def jacobian_with_aux(lib):
    return lib.jacrev(lambda x: (x**2, x), has_aux=True)(LINE)


@program
def checkpointed(lib):
    return lib.grad(lambda x: lib.checkpoint(lambda y: lib.numpy.sin(lib.numpy.sin(y)).sum())(x))(
        LINE
    )


@program
def ckpt_policy(lib):
    return lib.grad(
        lib.checkpoint(
            lambda y: lib.numpy.sin(TABLE @ y).sum(), policy=lib.checkpoint_policies.dots_saveable
        )
    )(np.ones(4, np.float32))


@program
def vmap_nested(lib):
    return lib.vmap(lib.vmap(lambda a, b: a * b, in_axes=(0, None)), in_axes=(None, 0))(LINE, LINE)


@program
def vmap_kw(lib):
    return lib.vmap(lambda x, y: x + y)(LINE, y=LINE)


@program
def vmap_outaxes_tree(lib):
    return lib.vmap(lambda x: {"a": x, "b": (x, TABLE[0])}, out_axes={"a": 0, "b": (0, None)})(LINE)


@program
def vmap_cond(lib):
    return lib.vmap(lambda x: lib.lax.cond(x > 0, lambda y: y * 2, lambda y: -y, x))(LINE)


@program
def vmap_while(lib):
    return lib.vmap(lambda x: lib.lax.while_loop(lambda c: c < 3, lambda c: c + x, x))(
        np.array([0.5, 1, 2], np.float32)
    )


@program
def vmap_at(lib):
    return lib.vmap(lambda x, i: x.at[i].add(1.0))(lib.numpy.asarray(TABLE), np.array([0, 1, 3]))


@program
def vmap_index(lib):
    return lib.vmap(lambda x, i: x[i])(TABLE, np.array([0, 1, 3]))


@program
def vmap_dynslice(lib):
    return lib.vmap(lambda x, i: lib.lax.dynamic_slice(x, (i,), (2,)))(TABLE, np.array([0, 1, 3]))


@program
def vmap_sort(lib):
    return lib.vmap(lib.numpy.sort)(-TABLE)


@program
def vmap_dot(lib):
    return lib.vmap(lib.numpy.dot, in_axes=(0, None))(TABLE, TABLE.T)


@program
def vmap_grad_scan(lib):
    def f(w):
        return lib.lax.scan(lambda c, x: (lib.numpy.tanh(c * w + x), c), w, LINE)[0]

    return lib.vmap(lib.grad(f))(LINE)


@program
def grad_vmap_scan(lib):
    def f(w):
        return lib.vmap(
            lambda w: lib.lax.scan(lambda c, x: (lib.numpy.tanh(c * w + x), c), w, LINE)[0]
        )(w).sum()

    return lib.grad(f)(LINE)


@program
def grad_sort(lib):
    return lib.grad(lambda x: (lib.numpy.sort(x) * LINE).sum())(-LINE)


@program
def grad_max(lib):
    return lib.grad(lambda x: lib.numpy.max(x))(TABLE)


@program
def grad_norm(lib):
    return lib.grad(lambda x: lib.numpy.linalg.norm(x))(TABLE)


@program
def grad_where_nan(lib):
    return lib.grad(
        lambda x: lib.numpy.where(x > 0, lib.numpy.log(lib.numpy.where(x > 0, x, 1)), 0).sum()
    )(LINE)


@program
def grad_index(lib):
    return lib.grad(lambda x: x[np.array([0, 0, 2])].sum())(lib.numpy.asarray(LINE))


@program
def grad_cumprod(lib):
    return lib.grad(lambda x: lib.numpy.cumprod(x).sum())(LINE + 2)


@program
def grad_prod(lib):
    return lib.grad(lambda x: lib.numpy.prod(x))(LINE)


@program
def grad_einsum(lib):
    return lib.grad(lambda x: lib.numpy.einsum("ij,kj->ik", x, x).sum())(TABLE)


@program
def grad_complex(lib):
    return lib.grad(lambda z: lib.numpy.real(z * z).sum())(LINE.astype(np.complex64) * (1 + 1j))


@program
def grad_bf16(lib):
    return lib.grad(lambda x: (x * x).sum())(lib.numpy.asarray(LINE, lib.numpy.bfloat16))


@program
def grad_pmap(lib):
    return lib.grad(lambda x: lib.pmap(lambda y: lib.numpy.sin(y))(x).sum())(TABLE[:, :4].T.copy())


@program
def pmap_grad_psum(lib):
    return lib.pmap(lib.grad(lambda x: lib.lax.psum(x * x, "i")), axis_name="i")(
        np.arange(4.0, dtype=np.float32)
    )


@program
def pmap_vmap(lib):
    return lib.pmap(lib.vmap(lambda x: x / lib.lax.psum(x, "i")), axis_name="i")(TABLE.T.copy())


@program
def pmap_static(lib):
    return lib.pmap(lambda x, n: x * n, static_broadcasted_argnums=1)(np.arange(4.0), 3)


@program
def pmap_tree(lib):
    return lib.pmap(lambda d: {"s": d["x"] + d["y"][0]})({"x": np.arange(4), "y": [np.ones(4)]})


@program
def pmap_outaxis(lib):
    return lib.pmap(lambda x: x, in_axes=1, out_axes=1)(TABLE)


@program
def jit_pmap(lib):
    return lib.jit(lib.pmap(lambda x: x * 2))(np.arange(4.0))


@program
def pmap_ppermute(lib):
    return lib.pmap(
        lambda x: lib.lax.ppermute(x, "i", [(j, (j + 1) % 4) for j in range(4)]), axis_name="i"
    )(np.arange(4))


@program
def vmap_collectives(lib):
    def f(x):
        return (
            lib.lax.psum(x, "i"),
            lib.lax.pmax(x, "i"),
            lib.lax.all_gather(x, "i"),
            lib.lax.axis_index("i"),
            lib.lax.pmean(x, "i"),
        )

    return lib.vmap(f, axis_name="i")(LINE)


@program
def mapped_rows(lib):
    return lib.lax.map(lambda x: x.sum(), TABLE)


@program
def switch_between_three(lib):
    return [
        lib.lax.switch(i, [lambda x: x, lambda x: x * 2, lambda x: x * 3], LINE) for i in range(3)
    ]


@program
def cond_closure_grad(lib):
    return lib.grad(lambda x, y: lib.lax.cond(x > 0, lambda: x * y, lambda: y), argnums=(0, 1))(
        2.0, 3.0
    )


@program
def scan_dict(lib):
    return lib.lax.scan(
        lambda c, x: ({"n": c["n"] + 1, "s": c["s"] + x["v"]}, None),
        {"n": 0, "s": 0.0},
        {"v": LINE},
    )


@program
def scan_none_xs(lib):
    return lib.lax.scan(lambda c, _: (c * 2, c), 1.0, length=4)


@program
def scan_hessian(lib):
    return lib.hessian(
        lambda w: lib.lax.scan(lambda c, x: (lib.numpy.sin(c * w + x), None), w, LINE)[0]
    )(0.3)


@program
def fori_grad(lib):
    return lib.grad(lambda x: lib.lax.fori_loop(0, 3, lambda i, c: c * x + i, 1.0))(2.0)


@program
def while_jvp(lib):
    return lib.jvp(
        lambda x: lib.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * x), (0, x))[1],
        (2.0,),
        (1.0,),
    )


@program
def associative_scan(lib):
    return lib.lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (LINE, LINE))


@program
def custom_jvp_nondiff(lib):
    @functools.partial(lib.custom_jvp, nondiff_argnums=(0,))
    def app(f, x):
        return f(x)

    @app.defjvp
    def _(f, pr, ta):
        return app(f, pr[0]), 2.0 * ta[0]

    return lib.grad(lambda x: app(lib.numpy.sin, x))(1.0)


@program
def custom_vjp_kwargs(lib):
    @lib.custom_vjp
    def f(x, y):
        return x * y

    f.defvjp(lambda x, y: (x * y, (x, y)), lambda r, g: (g * r[1], g * r[0] * 2))
    return lib.grad(lambda x: f(x, y=3.0))(2.0), lib.jit(
        lib.vmap(lib.grad(f, (0, 1)), in_axes=(0, None))
    )(LINE, 2.0)


@program
def jit_rng_loop(lib):
    @lib.jit
    def f(key):
        return lib.lax.fori_loop(
            0, 3, lambda i, s: s + lib.random.normal(lib.random.fold_in(key, i)), 0.0
        )

    return f(lib.random.PRNGKey(1))


@program
def vmap_random(lib):
    return lib.vmap(lambda k: lib.random.normal(k, (2,)))(
        lib.random.split(lib.random.PRNGKey(0), 3)
    )
