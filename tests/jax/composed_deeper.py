"""More programs of both libraries: custom rules, nesting, odd dtypes and sizes, maps of maps.

They go into the same list as those of `composed.py`, and are compared in the same way.
"""

from __future__ import annotations

import collections

import numpy as np

from tests.jax.composed import BLOCKS, LINE, TABLE, program


@program
def custom_vjp_in_scan(lib):
    @lib.custom_vjp
    def f(x):
        return lib.numpy.sin(x)

    f.defvjp(lambda x: (f(x), x), lambda x, g: (g * 2 * lib.numpy.cos(x),))
    return lib.grad(lambda w: lib.lax.scan(lambda c, x: (f(c * w + x), c), 0.0, LINE)[0])(0.5)


@program
def custom_jvp_in_scan_vmap(lib):
    @lib.custom_jvp
    def f(x):
        return lib.numpy.sin(x)

    f.defjvp(lambda p, t: (f(p[0]), 3 * t[0]))
    return lib.vmap(lib.grad(lambda w: lib.lax.scan(lambda c, x: (f(c * w + x), c), 0.0, LINE)[0]))(
        LINE
    )


@program
def custom_vjp_closure(lib):
    def outer(k):
        @lib.custom_vjp
        def f(x):
            return x * 2

        f.defvjp(lambda x: (x * 2, None), lambda r, g: (g * 5,))
        return f(k) * k

    return lib.grad(outer)(3.0), lib.jit(lib.grad(outer))(3.0)


@program
def remat_scan(lib):
    def body(c, x):
        return lib.checkpoint(lambda c: lib.numpy.tanh(c @ BLOCKS[0] + x))(c), None

    return lib.grad(lambda c: lib.lax.scan(body, c, BLOCKS[:, 0])[0].sum())(BLOCKS[1, 0])


@program
def remat_of_jit(lib):
    return lib.jit(
        lib.grad(lib.checkpoint(lib.jit(lambda x: lib.numpy.sin(lib.numpy.cos(x)).sum())))
    )(LINE)


@program
def hessian_of_jit_vmap(lib):
    return lib.hessian(lib.jit(lambda x: lib.vmap(lambda y: lib.numpy.sin(y) * y)(x).sum()))(LINE)


@program
def jacfwd_of_scan(lib):
    return lib.jacfwd(
        lambda c: lib.lax.scan(
            lambda c, x: (lib.numpy.tanh(c @ BLOCKS[0] + x), c.sum()), c, BLOCKS[:, 0]
        )
    )(BLOCKS[1, 0])


@program
def jacrev_of_while_fwd(lib):
    return lib.jacfwd(
        lambda x: lib.lax.while_loop(lambda c: (c**2).sum() < 50, lambda c: c * 1.7 + x, x)
    )(LINE)


@program
def jvp_of_grad_of_cond(lib):
    return lib.jvp(
        lib.grad(
            lambda x: lib.lax.cond(x.sum() > 0, lambda x: (x**3).sum(), lambda x: (x**2).sum(), x)
        ),
        (LINE + 1,),
        (LINE,),
    )


@program
def vmap_cond_batched_pred_grad(lib):
    return lib.vmap(lib.grad(lambda x: lib.lax.cond(x > 0, lambda x: x**3, lambda x: x**2, x)))(
        LINE
    )


@program
def vmap_switch(lib):
    return lib.vmap(lambda i, x: lib.lax.switch(i, [lib.numpy.sin, lib.numpy.cos, lambda x: x], x))(
        np.array([0, 1, 2, 1, 0]), LINE
    )


@program
def vmap_scan_inner_axes(lib):
    return lib.vmap(
        lambda x: lib.lax.scan(lambda c, y: (c + y, c * y), 0.0, x), in_axes=1, out_axes=(0, 1)
    )(TABLE)


@program
def vmap_while_mixed(lib):
    return lib.vmap(lambda n, x: lib.lax.fori_loop(0, n, lambda i, c: c * x, 1.0))(
        np.array([0, 2, 5]), np.array([2.0, 3.0, 1.5], np.float32)
    )


@program
def vmap_matmul(lib):
    return lib.vmap(lib.vmap(lib.numpy.matmul, (None, 0)), (0, None))(BLOCKS, BLOCKS)


@program
def vmap_none_out(lib):
    return lib.vmap(lambda x: lib.numpy.ones(2), in_axes=0)(LINE)


@program
def vmap_negative_axis(lib):
    return lib.vmap(lambda x: x.sum(0), in_axes=-1, out_axes=-1)(BLOCKS)


@program
def vmap_gather_scatter(lib):
    return lib.vmap(lambda x, i, u: x.at[i].set(u))(
        lib.numpy.asarray(BLOCKS), np.array([0, 1, 2, 0]), BLOCKS[:, 0]
    )


@program
def vmap_scatter_add_dup(lib):
    return lib.vmap(lambda i: lib.numpy.zeros(4).at[i].add(1.0))(np.array([[0, 0], [1, 2]]))


@program
def vmap_random_split(lib):
    return lib.vmap(lambda k: lib.random.split(k, 2))(lib.random.split(lib.random.PRNGKey(0), 3))


@program
def vmap_topk(lib):
    return lib.vmap(lambda x: lib.lax.top_k(x, 2))(BLOCKS[0])


@program
def vmap_cumsum_axis(lib):
    return lib.vmap(lambda x: lib.numpy.cumsum(x, axis=1))(BLOCKS)


@program
def vmap_argmax(lib):
    return lib.vmap(lib.numpy.argmax)(BLOCKS[0])


@program
def vmap_concat(lib):
    return lib.vmap(lambda x, y: lib.numpy.concatenate([x, y]), (0, None))(TABLE, LINE)


@program
def vmap_dyn_update(lib):
    return lib.vmap(lambda x, i: lib.lax.dynamic_update_slice(x, np.zeros(2, np.float32), (i,)))(
        TABLE, np.array([0, 1, 2])
    )


@program
def grad_at_set(lib):
    return lib.grad(lambda x, y: (x.at[1].set(y) ** 2).sum(), (0, 1))(lib.numpy.asarray(LINE), 3.0)


@program
def grad_take_along(lib):
    return lib.grad(lambda x: lib.numpy.take_along_axis(x, np.array([[0], [1], [0]]), 1).sum())(
        TABLE
    )


@program
def grad_softmax_xent(lib):
    return lib.grad(lambda x: -(lib.nn.log_softmax(x) * np.eye(3, 4, dtype=np.float32)).sum())(
        TABLE
    )


@program
def grad_std(lib):
    return lib.grad(lambda x: lib.numpy.std(x))(TABLE)


@program
def grad_logsumexp(lib):
    return lib.grad(lambda x: lib.nn.logsumexp(x, axis=1).sum())(TABLE)


@program
def grad_clip(lib):
    return lib.grad(lambda x: lib.numpy.clip(x, -0.5, 0.5).sum())(LINE)


@program
def grad_interp(lib):
    return lib.grad(lambda x: lib.numpy.interp(x, LINE, LINE**2).sum())(LINE * 0.3)


@program
def grad_roll(lib):
    return lib.grad(lambda x: (lib.numpy.roll(x, 2) * LINE).sum())(LINE)


@program
def grad_pad(lib):
    return lib.grad(lambda x: (lib.numpy.pad(x, 1, mode="edge") ** 2).sum())(LINE)


@program
def grad_tile(lib):
    return lib.grad(lambda x: (lib.numpy.tile(x, 3) ** 2).sum())(LINE)


@program
def grad_cumsum_rev(lib):
    return lib.grad(lambda x: (lib.lax.cumsum(x, reverse=True) ** 2).sum())(LINE)


@program
def grad_cummax(lib):
    return lib.grad(lambda x: (lib.lax.cummax(x) ** 2).sum())(LINE[::-1].copy())


@program
def grad_power_zero(lib):
    return lib.grad(lambda x, y: lib.numpy.power(x, y).sum(), (0, 1))(
        np.array([0.0, 1, 2], np.float32), np.array([2.0, 0, 3], np.float32)
    )


@program
def grad_abs_zero(lib):
    return lib.grad(lambda x: lib.numpy.abs(x).sum())(np.array([0.0, -1, 1], np.float32))


@program
def grad_max_tie(lib):
    return lib.grad(lambda x: lib.numpy.maximum(x, 0.0).sum())(np.array([0.0, -1, 1], np.float32))


@program
def grad_sqrt_zero(lib):
    return lib.grad(lambda x: lib.numpy.sqrt(x).sum())(np.array([0.0, 4], np.float32))


@program
def grad_int_arg(lib):
    return lib.grad(lambda x, i: x[i] * 2)(lib.numpy.asarray(LINE), 1)


@program
def grad_allow_int(lib):
    g = lib.grad(lambda x: (x * 1.0).sum(), allow_int=True)(np.arange(3))
    return str(np.asarray(g).dtype) == str(np.dtype([("float0", "V")])), g.shape == (3,)


@program
def jit_static_tuple(lib):
    return lib.jit(lambda x, s: x.reshape(s), static_argnums=1)(TABLE, (2, 6))


@program
def jit_returns_input(lib):
    return lib.jit(lambda x: (x, x, 1, 2.0, None, [x]))(LINE)


@program
def jit_unused(lib):
    return lib.jit(lambda x, y: x)(LINE, TABLE)


@program
def jit_constant_out(lib):
    return lib.jit(lambda: lib.numpy.arange(3))()


@program
def jit_closure_np(lib):
    return lib.jit(lambda x: x @ TABLE)(np.ones(3, np.float32))


@program
def jit_zero_size(lib):
    return lib.jit(lambda x: (x * 2, x.sum(), lib.numpy.concatenate([x, LINE])))(
        np.zeros(0, np.float32)
    )


@program
def zero_size_mm(lib):
    return lib.jit(lambda a, b: a @ b)(np.zeros((3, 0), np.float32), np.zeros((0, 2), np.float32))


@program
def jit_bool_int_mix(lib):
    return lib.jit(lambda a, b: (a & b, a | True, ~a, a.sum(), a * 2.5, a + b))(
        np.array([True, False]), np.array([True, True])
    )


@program
def jit_complex(lib):
    return lib.jit(lambda z: (z * z, abs(z), z.real, z.conj(), lib.numpy.exp(z)))(
        LINE.astype(np.complex64) * (1 + 2j)
    )


@program
def jit_f16(lib):
    return lib.jit(lambda x: (x * x, x.sum(), lib.numpy.exp(x), x @ x))(LINE.astype(np.float16))


@program
def jit_int8(lib):
    return lib.jit(lambda x: (x * x, x.sum(), x // 2, x % 3, -x, x << 1))(
        np.arange(-4, 5, dtype=np.int8) * 20
    )


@program
def jit_uint(lib):
    return lib.jit(lambda x: (x - 5, x.sum(), x >> 1, ~x, x * x))(np.arange(9, dtype=np.uint8) * 20)


@program
def nan_inf(lib):
    return lib.jit(
        lambda x: (
            lib.numpy.maximum(x, 0),
            lib.numpy.isnan(x),
            x.max(),
            lib.numpy.nanmax(x),
            lib.numpy.nan_to_num(x),
            lib.numpy.sign(x),
            lib.numpy.sort(x),
            x.argmax(),
            lib.numpy.tanh(x),
            lib.numpy.exp(x),
        )
    )(np.array([np.nan, np.inf, -np.inf, 1, -0.0], np.float32))


@program
def int_div_zero(lib):
    return lib.jit(lambda x, y: (x // y, x % y))(np.array([5, -5, 7]), np.array([2, 2, -2]))


@program
def bigmean_var(lib):
    return lib.jit(lambda x: (x.mean(), x.var()))(
        np.random.default_rng(1).normal(size=100003).astype(np.float32) + 100
    )


@program
def pmap_scan(lib):
    return lib.pmap(
        lambda x: lib.lax.scan(lambda c, _: (c + lib.lax.psum(c, "i"), c), x, None, length=3),
        axis_name="i",
    )(np.arange(4.0, dtype=np.float32))


@program
def pmap_while(lib):
    return lib.pmap(lambda x: lib.lax.while_loop(lambda c: c < 10, lambda c: c * 2 + 1, x))(
        np.arange(4.0, dtype=np.float32)
    )


@program
def pmap_cond_idx(lib):
    return lib.pmap(
        lambda x: lib.lax.cond(lib.lax.axis_index("i") % 2 == 0, lambda x: x, lambda x: -x, x),
        axis_name="i",
    )(np.arange(4.0, dtype=np.float32) + 1)


@program
def pmap_all_gather_grad(lib):
    return lib.pmap(lib.grad(lambda x: (lib.lax.all_gather(x, "i") ** 2).sum()), axis_name="i")(
        np.arange(4.0, dtype=np.float32)
    )


@program
def pmap_a2a(lib):
    return lib.pmap(lambda x: lib.lax.all_to_all(x, "i", 0, 0), axis_name="i")(
        np.arange(16.0, dtype=np.float32).reshape(4, 4)
    )


@program
def pmap_scatter(lib):
    return lib.pmap(lambda x: lib.lax.psum_scatter(x, "i"), axis_name="i")(
        np.arange(16.0, dtype=np.float32).reshape(4, 4)
    )


@program
def pmap_groups(lib):
    return lib.pmap(
        lambda x: lib.lax.psum(x, "i", axis_index_groups=[[0, 1], [2, 3]]), axis_name="i"
    )(np.arange(4.0))


@program
def pmap_rng(lib):
    return lib.pmap(lambda k: lib.random.normal(k, (2,)))(
        lib.random.split(lib.random.PRNGKey(0), 4)
    )


@program
def pmap_int_bool(lib):
    return lib.pmap(
        lambda x, b: (lib.lax.psum(x, "i"), lib.lax.pmax(x, "i"), lib.lax.psum(b, "i")),
        axis_name="i",
    )(np.arange(4), np.arange(4) % 2 == 0)


@program
def pmap_of_jit_vmap_grad(lib):
    return lib.pmap(lib.jit(lib.vmap(lib.grad(lambda x: (x**3).sum()))))(BLOCKS[:, :2])


@program
def vmap_of_pmap(lib):
    return lib.vmap(lib.pmap(lambda x: x * 2), in_axes=1, out_axes=1)(BLOCKS)


@program
def grad_through_pmap_psum(lib):
    return lib.grad(
        lambda x: lib.pmap(lambda y: lib.lax.psum(y**2, "i") * y, axis_name="i")(x).sum()
    )(np.arange(4.0, dtype=np.float32))


@program
def namedtuple_tree(lib):
    T = collections.namedtuple("T", "a b")
    return lib.jit(lib.grad(lambda t: (t.a * t.b).sum()))(T(LINE, LINE + 1))


@program
def partial_tree(lib):
    return lib.jit(lambda f, x: f(x))(lib.tree_util.Partial(lambda a, b: a * b, LINE), LINE)


@program
def key_types(lib):
    k = lib.random.key(3)
    ks = lib.random.split(k, (2, 2))
    return (
        lib.random.key_data(ks),
        ks.shape,
        lib.vmap(lib.vmap(lambda k: lib.random.uniform(k)))(ks),
        lib.random.key_data(lib.jit(lambda k: lib.random.fold_in(k, 2))(k)),
        lib.lax.scan(
            lambda k, _: (lib.random.split(k)[0], lib.random.uniform(k)), k, None, length=3
        )[1],
    )


@program
def linearize_twice(lib):

    def f(x):
        return lib.linearize(lib.numpy.sin, x)[1](1.0)

    return lib.grad(f)(0.3)


@program
def vjp_twice(lib):

    def f(x):
        return lib.vjp(lambda y: y**3, x)[1](1.0)[0]

    return lib.grad(f)(2.0), lib.jit(lib.vmap(lib.grad(f)))(LINE)


@program
def perturbation_confusion(lib):
    return lib.grad(lambda x: x * lib.grad(lambda y: x + y)(2.0))(5.0), lib.jvp(
        lambda x: x * lib.jvp(lambda y: x * y, (2.0,), (1.0,))[1], (3.0,), (1.0,)
    )


@program
def closure_over_tracer_scan(lib):
    return lib.grad(lambda w: lib.lax.scan(lambda c, x: (c + w * x, None), 0.0, LINE)[0])(2.0)


@program
def jit_in_scan(lib):
    return lib.lax.scan(lambda c, x: (lib.jit(lambda a, b: a + b)(c, x), c), 0.0, LINE)


@program
def nested_scan_grad(lib):
    def inner(w, x):
        return lib.lax.scan(lambda c, y: (lib.numpy.sin(c + w * y), None), x, LINE)[0]

    return lib.jit(
        lib.grad(lambda w: lib.lax.scan(lambda c, x: (c + inner(w, x), None), 0.0, LINE)[0])
    )(0.7)


@program
def scan_in_cond_grad(lib):
    return lib.grad(
        lambda w: lib.lax.cond(
            w > 0, lambda: lib.lax.scan(lambda c, x: (c * w + x, None), 1.0, LINE)[0], lambda: w
        )
    )(0.7)


@program
def scan_in_vmap_in_scan(lib):
    return lib.lax.scan(
        lambda c, x: (
            lib.vmap(lambda a: lib.lax.scan(lambda d, y: (d + y * a, None), 0.0, LINE)[0])(c) + x,
            c.sum(),
        ),
        LINE,
        LINE,
    )


@program
def big_unroll(lib):
    def f(x):
        for _ in range(60):
            x = lib.numpy.sin(x) * 1.01
        return x.sum()

    return lib.jit(lib.grad(f))(LINE)


@program
def fori_carry_tuple_arrays(lib):
    return lib.jit(
        lambda n: lib.lax.fori_loop(
            0, n, lambda i, c: (c[0].at[i].set(i * 2.0), c[1] + i), (lib.numpy.zeros(5), 0)
        )
    )(4)
