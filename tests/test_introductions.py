"""The programs of the field's introductions, written as a user writes them, with NumPy's answers.

One test is one program. Nothing here reaches into the library: only the public names are used.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import pytest

import spmd
import spmd.numpy as jnp
from spmd import grad, jit, lax, make_jaxpr, nn, pmap, random, vmap


def close(found, wanted, rtol=1e-5, atol=1e-6):
    """Compare values as the tolerance of float32 allows."""
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=rtol, atol=atol)


# ---- jit ---------------------------------------------------------------------------------------


def test_selu_under_jit():
    def selu(x, alpha=1.67, lmbda=1.05):
        return lmbda * jnp.where(x > 0, x, alpha * jnp.exp(x) - alpha)

    x = random.normal(random.key(0), (1_000,))
    values = np.asarray(x, np.float64)
    wanted = 1.05 * np.where(values > 0, values, 1.67 * np.exp(values) - 1.67)
    close(selu(x), wanted)
    close(jit(selu)(x), wanted)
    assert jit(selu)(x).dtype == np.float32


def test_a_traced_function_prints_its_tracer_once(capsys):
    @jit
    def f(x):
        print("seen:", x)
        return x + 1

    f(jnp.array([1, 2, 3]))
    first = capsys.readouterr().out
    assert first.startswith("seen: JitTracer(int32[3])")
    assert list(np.asarray(f(jnp.array([4, 5, 6])))) == [5, 6, 7]
    assert capsys.readouterr().out == ""
    f(jnp.array([1.0, 2.0]))
    assert capsys.readouterr().out.startswith("seen: JitTracer(float32[2])")


def test_python_if_on_a_static_argument():
    @functools.partial(jit, static_argnums=(1,))
    def power(x, n):
        return x if n == 1 else x * power(x, n - 1)

    close(power(jnp.arange(4.0), 3), np.arange(4.0) ** 3)
    close(power(jnp.arange(4.0), 5), np.arange(4.0) ** 5)


def test_static_argument_by_name():
    @functools.partial(jit, static_argnames="mode")
    def reduce(x, mode="sum"):
        return x.sum() if mode == "sum" else x.max()

    assert float(reduce(jnp.arange(4.0))) == 6.0
    assert float(reduce(jnp.arange(4.0), mode="max")) == 3.0


def test_immutable_update_under_jit():
    @jit
    def f(x):
        return x.at[2].set(1)

    x = jnp.zeros(5)
    assert list(np.asarray(f(x))) == [0, 0, 1, 0, 0]
    assert not np.asarray(x).any()
    with pytest.raises(TypeError, match=r"\.at\[i\]\.set"):
        x[2] = 1


def test_donated_argument_is_gone():
    step = jit(lambda state, g: state - 0.5 * g, donate_argnums=0)
    state = jnp.ones(1000)
    new = step(state, jnp.ones(1000))
    close(new, np.full(1000, 0.5))
    assert state.is_deleted()
    with pytest.raises(RuntimeError, match="donated"):
        np.asarray(state)


def test_shape_only_evaluation():
    w = spmd.ShapeDtypeStruct((1000, 500), jnp.float32)
    x = spmd.ShapeDtypeStruct((4, 1000), jnp.bfloat16)
    out = spmd.eval_shape(lambda w, x: {"h": x @ w}, w, x)
    assert (out["h"].shape, out["h"].dtype) == ((4, 500), np.float32)


def test_double_precision_is_a_switch():
    with spmd.config.override("enable_x64", True):
        x = jnp.arange(3.0)
        assert x.dtype == np.float64
        close(jit(jnp.exp)(x), np.exp(np.arange(3.0)), rtol=1e-14)
        assert grad(jnp.sin)(1.0).dtype == np.float64
        assert random.normal(random.key(0), (2,)).dtype == np.float64
    assert jnp.arange(3.0).dtype == np.float32


def test_without_jit_python_sees_values():
    def f(x):
        if x > 2:
            return x * 10
        return x

    with spmd.disable_jit():
        assert float(jit(f)(3.0)) == 30.0
        assert float(jit(f)(1.0)) == 1.0


# ---- grad --------------------------------------------------------------------------------------


def test_tanh_by_hand_and_its_derivatives():
    def tanh(x):
        y = jnp.exp(-2.0 * x)
        return (1.0 - y) / (1.0 + y)

    t = np.tanh(1.0)
    close(grad(tanh)(1.0), 1 - t**2)
    close(grad(grad(tanh))(1.0), -2 * t * (1 - t**2))
    close(grad(grad(grad(tanh)))(1.0), -2 * (1 - t**2) * (1 - 3 * t**2), rtol=1e-4)


def test_per_example_gradients():
    def loss(w, x, y):
        return (jnp.dot(w, x) - y) ** 2

    rng = np.random.default_rng(0)
    w, x, y = rng.normal(size=3), rng.normal(size=(10, 3)), rng.normal(size=10)
    args = [a.astype(np.float32) for a in (w, x, y)]
    wanted = 2 * (x @ w - y)[:, None] * x
    close(jit(vmap(grad(loss), in_axes=(None, 0, 0)))(*args), wanted, rtol=1e-4)
    close(vmap(jit(grad(loss)), in_axes=(None, 0, 0))(*args), wanted, rtol=1e-4)


def test_jit_of_vmap_of_grad():
    xs = jnp.linspace(-3, 3, 101)
    close(jit(vmap(grad(jnp.tanh)))(xs), 1 - np.tanh(np.linspace(-3, 3, 101)) ** 2, atol=1e-6)


def test_the_gradient_s_program_shows_the_cosine():
    text = str(make_jaxpr(grad(jnp.sin))(1.0))
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0] == "{ lambda ; a:f32[]. let"
    assert lines[2:] == ["b:f32[] = cos a", "c:f32[] = mul 1.0:f32[] b", "in (c,) }"]


def test_value_and_aux():
    def loss(params, x):
        prediction = params["w"] * x
        return jnp.sum(prediction**2), prediction

    (value, aux), g = spmd.value_and_grad(loss, has_aux=True)({"w": 2.0}, jnp.arange(3.0))
    assert (float(value), float(g["w"])) == (20.0, 20.0)
    close(aux, [0, 2, 4])


def test_control_flow_of_python_under_grad():
    def f(x):
        return 3.0 * x**2 if x < 3 else -4 * x

    assert float(grad(f)(2.0)) == 12.0
    assert float(grad(f)(4.0)) == -4.0


def test_stop_gradient_in_a_temporal_difference():
    def td_loss(theta, s0, r, s1):
        v0, target = jnp.dot(theta, s0), r + jnp.dot(theta, s1)
        return -0.5 * (lax.stop_gradient(target) - v0) ** 2

    theta = np.array([0.1, -0.1, 0.0], np.float32)
    s0, s1 = np.array([1, 2, -1], np.float32), np.array([2, 1, 0], np.float32)
    wanted = (1 + theta @ s1 - theta @ s0) * s0
    close(grad(td_loss)(theta, s0, 1.0, s1), wanted)


def test_clipping_by_custom_vjp():
    @functools.partial(spmd.custom_vjp, nondiff_argnums=(0, 1))
    def clip_gradient(lo, hi, x):
        return x

    clip_gradient.defvjp(lambda lo, hi, x: (x, None), lambda lo, hi, _, g: (jnp.clip(g, lo, hi),))
    t = jnp.linspace(0, 2 * jnp.pi, 100)
    values = np.linspace(0, 2 * np.pi, 100)
    clipped = vmap(grad(lambda x: jnp.sin(clip_gradient(-0.75, 0.75, x))))
    close(clipped(t), np.clip(np.cos(values), -0.75, 0.75), atol=1e-5)
    close(jit(clipped)(t), np.clip(np.cos(values), -0.75, 0.75), atol=1e-5)


def test_log1pexp_by_custom_jvp():
    @spmd.custom_jvp
    def log1pexp(x):
        return jnp.log(1.0 + jnp.exp(x))

    @log1pexp.defjvp
    def _(primals, tangents):
        (x,), (x_dot,) = primals, tangents
        return log1pexp(x), (1 - 1 / (1 + jnp.exp(x))) * x_dot

    assert float(grad(log1pexp)(100.0)) == 1.0
    close(grad(log1pexp)(3.0), 1 / (1 + np.exp(-3.0)))
    close(jit(grad(jit(log1pexp)))(3.0), 1 / (1 + np.exp(-3.0)))
    close(vmap(jit(grad(log1pexp)))(jnp.arange(3.0)), 1 / (1 + np.exp(-np.arange(3.0))))
    naive = grad(lambda x: jnp.log(1.0 + jnp.exp(x)))(100.0)
    assert np.isnan(naive), "what the rule is there for"


def test_a_fixed_point_differentiated_implicitly():
    @functools.partial(spmd.custom_vjp, nondiff_argnums=(0,))
    def fixed_point(f, a, guess):
        def changed(carry):
            before, now = carry
            return jnp.abs(before - now) > 1e-6

        return lax.while_loop(changed, lambda c: (c[1], f(a, c[1])), (guess, f(a, guess)))[1]

    def forward(f, a, guess):
        x = fixed_point(f, a, guess)
        return x, (a, x)

    def backward(f, saved, x_bar):
        a, x = saved
        _, pull_a = spmd.vjp(lambda a: f(a, x), a)
        # The cotangent is itself a fixed point: w = x_bar + w df/dx.
        w = fixed_point(lambda x_bar, w: x_bar + spmd.vjp(lambda x: f(a, x), x)[1](w)[0],
                        x_bar, x_bar)  # fmt: skip
        return pull_a(w)[0], jnp.zeros_like(x)

    fixed_point.defvjp(forward, backward)

    def newton_sqrt(a):
        return fixed_point(lambda a, x: 0.5 * (x + a / x), a, a)

    close(newton_sqrt(2.0), np.sqrt(2), rtol=1e-6)
    close(grad(newton_sqrt)(2.0), 0.5 / np.sqrt(2))
    close(jit(vmap(grad(newton_sqrt)))(jnp.array([1.0, 2.0])), [0.5, 0.5 / np.sqrt(2)])


# ---- Jacobians and Hessians --------------------------------------------------------------------


def logistic_setup():
    rng = np.random.default_rng(1)
    w, b = rng.normal(size=3).astype(np.float32), np.float32(0.3)
    x = rng.normal(size=(4, 3)).astype(np.float32)
    return w, b, x, 1 / (1 + np.exp(-(x @ w + b)))


def test_forward_and_reverse_jacobians_agree():
    w, b, x, p = logistic_setup()

    def predict(w):
        return nn.sigmoid(jnp.dot(x, w) + b)

    wanted = (p * (1 - p))[:, None] * x
    close(spmd.jacfwd(predict)(w), wanted)
    close(spmd.jacrev(predict)(w), wanted)
    jac = spmd.jacrev(lambda params: nn.sigmoid(x @ params["w"] + params["b"]))({"w": w, "b": b})
    close(jac["w"], wanted)
    close(jac["b"], p * (1 - p))


def test_hessian():
    w, b, x, p = logistic_setup()

    def total(w):
        return jnp.sum(nn.sigmoid(x @ w + b))

    curve = p * (1 - p) * (1 - 2 * p)
    wanted = np.einsum("n,ni,nj->ij", curve, x, x)
    close(spmd.hessian(total)(w), wanted, rtol=1e-4)
    close(spmd.jacfwd(spmd.jacrev(total))(w), wanted, rtol=1e-4)
    close(spmd.jacrev(spmd.jacfwd(total))(w), wanted, rtol=1e-4)


def test_hessian_vector_products_three_ways():
    def f(x):
        return jnp.sum(jnp.tanh(x) ** 2)

    def forward_over_reverse(v):
        return spmd.jvp(grad(f), (x,), (v,))[1]

    def reverse_over_forward(v):
        return grad(lambda x: spmd.jvp(f, (x,), (v,))[1])(x)

    def reverse_over_reverse(v):
        return grad(lambda x: jnp.vdot(grad(f)(x), v))(x)

    rng = np.random.default_rng(2)
    x, v = rng.normal(size=(2, 30, 40)).astype(np.float32)
    t = np.tanh(x)
    wanted = (2 * (1 - t**2) ** 2 - 4 * t**2 * (1 - t**2)) * v
    for product in (forward_over_reverse, reverse_over_forward, reverse_over_reverse):
        close(product(v), wanted, rtol=1e-4, atol=1e-5)
        close(jit(product)(v), wanted, rtol=1e-4, atol=1e-5)


def test_linear_map_and_its_transpose():
    y, f_jvp = spmd.linearize(jnp.sin, 2.0)
    close(f_jvp(3.0), np.cos(2.0) * 3)
    close(y, np.sin(2.0))
    y, f_vjp = spmd.vjp(jnp.sin, 2.0)
    close(f_vjp(3.0)[0], np.cos(2.0) * 3)


def test_complex_derivatives():
    z = 3.0 + 4j
    close(grad(jnp.sin, holomorphic=True)(z), np.cos(z), rtol=1e-4)
    # The gradient of a real function of a complex number is conjugated, as JAX documents.
    close(grad(lambda z: jnp.abs(z) ** 2)(z), 2 * np.conj(z))


# ---- vmap --------------------------------------------------------------------------------------


def init_network(sizes, key):
    keys = random.split(key, len(sizes))
    return [
        (0.1 * random.normal(k, (n, m)), 0.1 * random.normal(random.fold_in(k, 1), (n,)))
        for m, n, k in zip(sizes[:-1], sizes[1:], keys, strict=False)
    ]


def predict(params, image):
    activations = image
    for w, b in params[:-1]:
        activations = nn.relu(jnp.dot(w, activations) + b)
    w, b = params[-1]
    logits = jnp.dot(w, activations) + b
    return logits - nn.logsumexp(logits)


def test_batched_predict():
    params = init_network([28 * 28, 64, 64, 10], random.key(0))
    images = random.normal(random.key(1), (10, 28 * 28))
    batched = vmap(predict, in_axes=(None, 0))
    found = batched(params, images)
    assert found.shape == (10, 10)
    with pytest.raises(ValueError, match="dot"):
        predict(params, images)
    for image, row in zip(images, found, strict=True):
        close(predict(params, image), row, rtol=1e-4, atol=1e-5)
    close(jit(batched)(params, images), found, rtol=1e-4, atol=1e-5)
    close(np.exp(found).sum(1), np.ones(10), rtol=1e-5)


def test_convolution_vectorised_twice():
    def convolve(x, w):
        return jnp.array([jnp.dot(x[i - 1 : i + 2], w) for i in range(1, len(x) - 1)])

    xs = np.arange(10.0, dtype=np.float32).reshape(2, 5)
    ws = np.array([[2, 3, 4], [1, 0, -1]], np.float32)
    wanted = [np.convolve(x, w[::-1], "valid") for x, w in zip(xs, ws, strict=True)]
    close(vmap(convolve)(xs, ws), wanted)
    close(vmap(convolve, in_axes=1, out_axes=1)(xs.T, ws.T), np.transpose(wanted))
    shared = [np.convolve(x, ws[0][::-1], "valid") for x in xs]
    close(vmap(convolve, in_axes=(0, None))(xs, ws[0]), shared)


def test_matrix_product_from_dots():
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    b = np.arange(12, dtype=np.float32).reshape(3, 4)
    mv = vmap(jnp.vdot, in_axes=(0, None))
    mm = vmap(mv, in_axes=(None, 1), out_axes=1)
    close(mm(a, b), a @ b)
    close(jit(mm)(a, b), a @ b)


def test_axes_given_by_a_tree():
    points = {"x": jnp.arange(3.0), "scale": 2.0}
    f = vmap(lambda p, y: p["x"] * p["scale"] + y, in_axes=({"x": 0, "scale": None}, None))
    close(f(points, 1.0), [1, 3, 5])


def test_normalised_over_a_named_axis():
    normalise = vmap(lambda x: x / lax.psum(x, "i"), axis_name="i")
    close(normalise(jnp.arange(4.0)), np.arange(4) / 6)


# ---- pmap --------------------------------------------------------------------------------------


def test_random_matrices_in_parallel():
    keys = random.split(random.key(0), 4)
    mats = pmap(lambda key: random.normal(key, (50, 60)))(keys)
    assert mats.shape == (4, 50, 60)
    result = pmap(lambda x: jnp.dot(x, x.T))(mats)
    assert result.shape == (4, 50, 50)
    values = np.asarray(mats)
    close(pmap(jnp.mean)(result), np.einsum("dij,dkj->dik", values, values).mean((1, 2)), atol=1e-4)
    for key, mat in zip(keys, values, strict=True):
        close(random.normal(key, (50, 60)), mat, rtol=1e-6)


def test_normalised_over_devices():
    @functools.partial(pmap, axis_name="i")
    def normalise(x):
        return x / lax.psum(x, "i")

    close(normalise(jnp.arange(4.0)), np.arange(4) / 6)


def test_gradients_through_communication():
    @pmap
    def f(x):
        y = jnp.sin(x)

        @pmap
        def g(z):
            return jnp.cos(z) * jnp.tan(y.sum()) * jnp.tanh(x).sum()

        return grad(lambda w: jnp.sum(g(w)))(x)

    x = np.linspace(0.1, 0.4, 4, dtype=np.float32).reshape(2, 2)
    scale = np.tan(np.sin(x).sum(1, keepdims=True)) * np.tanh(x).sum(1, keepdims=True)
    close(f(x), -np.sin(x) * scale, rtol=1e-4)

    def total(x):
        return jnp.sum(f(x))

    step = np.zeros_like(x)
    step[0, 1] = 1e-2
    slope = (float(total(x + step)) - float(total(x - step))) / 2e-2
    close(grad(total)(x)[0, 1], slope, rtol=1e-2)


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "shared"])
def test_data_parallel_step(stacked):
    """Every device has its own rows of the batch; gradients are averaged; all stay equal."""

    def loss(params, batch):
        x, y = batch
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

    def step(params, batch):
        value, g = spmd.value_and_grad(loss)(params, batch)
        g = lax.pmean(g, axis_name="batch")
        return spmd.tree.map(lambda p, g: p - 0.1 * g, params, g), lax.pmean(value, "batch")

    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(4, 8, 3)).astype("f"), rng.normal(size=(4, 8)).astype("f")
    params = {"w": np.zeros(3, "f"), "b": np.float32(0)}
    if stacked:
        run = pmap(step, axis_name="batch")
        given = spmd.tree.map(lambda p: jnp.stack([p] * 4), params)
    else:
        run = pmap(step, axis_name="batch", in_axes=(None, 0), out_axes=(None, 0))
        given = params
    for _ in range(3):
        given, value = run(given, (x, y))
        params = spmd.tree.map(
            lambda p, g: p - 0.1 * g, params,
            grad(loss)(params, (x.reshape(32, 3), y.reshape(32))),
        )  # fmt: skip
    for name, p in params.items():
        for copy in given[name] if stacked else [given[name]]:
            close(copy, np.asarray(p), rtol=1e-4)
    assert len(set(np.asarray(value).tolist())) == 1


# ---- trees -------------------------------------------------------------------------------------


@spmd.tree_util.register_dataclass
@dataclass
class Layer:
    """A user's own container: arrays, and a name that is no array."""

    weight: object
    bias: object


def test_dataclasses_are_trees():
    def loss(layers, x):
        for layer in layers:
            x = jnp.tanh(x @ layer.weight + layer.bias)
        return jnp.sum(x)

    layers = [Layer(jnp.ones((3, 2)), jnp.zeros(2)), Layer(jnp.ones((2, 1)), jnp.zeros(1))]
    x = jnp.full(3, 0.1)
    g = jit(grad(loss))(layers, x)
    assert isinstance(g[0], Layer) and g[0].weight.shape == (3, 2)
    hidden = np.tanh(0.3)
    out = np.tanh(2 * hidden)
    close(g[1].bias, [1 - out**2])
    close(g[0].bias, np.full(2, (1 - out**2) * (1 - hidden**2)))


def test_trees_of_gradients_are_zipped():
    params = {"a": [jnp.ones(2), jnp.zeros(1)], "b": (jnp.arange(3.0),)}
    g = grad(lambda p: sum(jnp.sum(x**2) for x in spmd.tree.leaves(p)))(params)
    new = spmd.tree.map(lambda p, g: p - 0.25 * g, params, g)
    close(new["b"][0], np.arange(3) * 0.5)
    assert spmd.tree.structure(new) == spmd.tree.structure(params)
    assert [spmd.tree_util.keystr(path) for path, _ in spmd.tree.leaves_with_path(params)] == [
        "['a'][0]", "['a'][1]", "['b'][0]",
    ]  # fmt: skip
