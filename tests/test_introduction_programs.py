"""Whole small programs of the field's introductions: training, simulating, sampling, searching.

Each is written as a user writes it, and its answer is checked against NumPy or against theory.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

import spmd
import spmd.numpy as jnp
from spmd import grad, jit, lax, nn, random, vmap


def close(found, wanted, rtol=1e-5, atol=1e-6):
    """Compare values as the tolerance of float32 allows."""
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=rtol, atol=atol)


# ---- training ----------------------------------------------------------------------------------


def test_logistic_regression():
    inputs = np.array([[0.52, 1.12, 0.77], [0.88, -1.08, 0.15], [0.52, 0.06, -1.30],
                       [0.74, -2.49, 1.39]], np.float32)  # fmt: skip
    targets = np.array([True, True, False, True])

    def predict(weights, inputs):
        return 0.5 * (jnp.tanh(jnp.dot(inputs, weights) / 2) + 1)

    def training_loss(weights):
        preds = predict(weights, inputs)
        label_probs = preds * targets + (1 - preds) * (1 - targets)
        return -jnp.sum(jnp.log(label_probs))

    training_gradient = jit(grad(training_loss))
    weights, check = jnp.zeros(3), np.zeros(3)
    first = float(training_loss(weights))
    for _ in range(100):
        weights -= 0.1 * training_gradient(weights)
        check -= 0.1 * inputs.T @ (1 / (1 + np.exp(-inputs @ check)) - targets)
    close(weights, check, rtol=1e-4)
    assert first == pytest.approx(4 * np.log(2), rel=1e-5)
    assert float(training_loss(weights)) < 0.6


def train_moons(optimise):
    """A network on two half circles; the accuracy that `optimise` reaches."""
    rng = np.random.default_rng(0)
    angle = np.pi * rng.random(200)
    side = np.arange(200) % 2
    x = np.stack([np.cos(angle), np.sin(angle)], 1) * (1 - 2 * side)[:, None]
    x = (x + np.stack([side, 0.5 * side], 1) + 0.08 * rng.normal(size=x.shape)).astype(np.float32)
    keys = random.split(random.key(0), 2)
    params = {
        "hidden": {"w": random.normal(keys[0], (2, 16)), "b": jnp.zeros(16)},
        "out": {"w": 0.2 * random.normal(keys[1], (16, 2)), "b": jnp.zeros(2)},
    }

    def logits(params, x):
        h = nn.relu(x @ params["hidden"]["w"] + params["hidden"]["b"])
        return h @ params["out"]["w"] + params["out"]["b"]

    def loss(params):
        targets = nn.one_hot(side, 2)
        return -jnp.mean(jnp.sum(targets * nn.log_softmax(logits(params, x)), axis=-1))

    params = optimise(loss, params)
    return np.mean(np.argmax(logits(params, x), axis=-1) == side)


def test_network_trained_by_momentum():
    def optimise(loss, params):
        @jit
        def step(params, velocity):
            g = grad(loss)(params)
            velocity = spmd.tree.map(lambda v, g: 0.9 * v + g, velocity, g)
            return spmd.tree.map(lambda p, v: p - 0.1 * v, params, velocity), velocity

        velocity = spmd.tree.map(jnp.zeros_like, params)
        for _ in range(200):
            params, velocity = step(params, velocity)
        return params

    assert train_moons(optimise) > 0.97


def test_network_trained_by_adam_in_one_loop():
    """The whole training is one compiled program: a `fori_loop` over pytrees."""

    def optimise(loss, params):
        def step(i, state):
            params, m, v = state
            g = grad(loss)(params)
            m = spmd.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
            v = spmd.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, g)
            rate = 0.03 * jnp.sqrt(1 - 0.999 ** (i + 1.0)) / (1 - 0.9 ** (i + 1.0))
            new = spmd.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), params, m, v)
            return new, m, v

        zeros = spmd.tree.map(jnp.zeros_like, params)
        return jit(lambda s: lax.fori_loop(0, 200, step, s))((params, zeros, zeros))[0]

    assert train_moons(optimise) > 0.97


# ---- sequences ---------------------------------------------------------------------------------


def gru(params, h, x):
    """One step of a gated recurrent unit."""
    gates = nn.sigmoid(x @ params["wg"] + h @ params["ug"])
    reset, update = jnp.split(gates, 2, axis=-1)
    candidate = jnp.tanh(x @ params["wc"] + (reset * h) @ params["uc"])
    h = update * h + (1 - update) * candidate
    return h, h


def gru_data():
    rng = np.random.default_rng(0)
    sizes = {"wg": (3, 10), "ug": (5, 10), "wc": (3, 5), "uc": (5, 5)}
    params = {k: (0.5 * rng.normal(size=s)).astype(np.float32) for k, s in sizes.items()}
    return params, rng.normal(size=(7, 2, 3)).astype(np.float32)


def test_recurrent_network_is_its_loop():
    params, xs = gru_data()
    last, every = lax.scan(functools.partial(gru, params), jnp.zeros((2, 5)), xs)
    h = jnp.zeros((2, 5))
    for x, wanted in zip(xs, every, strict=True):
        h, _ = gru(params, h, x)
        close(wanted, h)
    close(last, h)


@pytest.mark.parametrize("unroll", [1, 3])
def test_gradient_through_time(unroll):
    params, xs = gru_data()

    def scanned(params):
        _, every = lax.scan(functools.partial(gru, params), jnp.zeros((2, 5)), xs, unroll=unroll)
        return jnp.mean(every**2)

    def unrolled(params):
        h, total = jnp.zeros((2, 5)), 0.0
        for x in xs:
            h, _ = gru(params, h, x)
            total += jnp.mean(h**2)
        return total / len(xs)

    found, wanted = jit(grad(scanned))(params), grad(unrolled)(params)
    assert spmd.tree.structure(found) == spmd.tree.structure(wanted)
    for name in params:
        close(found[name], wanted[name], rtol=1e-4, atol=1e-6)
    checkpointed = grad(lambda p: spmd.checkpoint(scanned)(p))(params)
    close(checkpointed["uc"], wanted["uc"], rtol=1e-4, atol=1e-6)


def attention_block(params, x):
    """Pre-norm causal self-attention and a gelu network, on one sequence `(time, features)`."""

    def norm(x):
        centred = x - x.mean(-1, keepdims=True)
        return centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5)

    time, width = x.shape
    q, k, v = jnp.split(norm(x) @ params["qkv"], 3, axis=-1)
    q, k, v = (y.reshape(time, 2, width // 2) for y in (q, k, v))
    scores = jnp.einsum("qhd,khd->hqk", q, k) / np.sqrt(width // 2)
    scores = jnp.where(jnp.tril(jnp.ones((time, time), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("hqk,khd->qhd", nn.softmax(scores), v).reshape(time, width)
    x = x + mixed @ params["proj"]
    return x + nn.gelu(norm(x) @ params["up"]) @ params["down"]


def block_data():
    rng = np.random.default_rng(1)
    sizes = {"qkv": (8, 24), "proj": (8, 8), "up": (8, 32), "down": (32, 8)}
    params = {k: (0.3 * rng.normal(size=s)).astype(np.float32) for k, s in sizes.items()}
    return params, rng.normal(size=(3, 6, 8)).astype(np.float32)


def numpy_block(params, x):
    """The same block of one sequence in float64 NumPy."""

    def norm(x):
        c = x - x.mean(-1, keepdims=True)
        return c / np.sqrt((c**2).mean(-1, keepdims=True) + 1e-5)

    p = {k: v.astype(np.float64) for k, v in params.items()}
    x = x.astype(np.float64)
    q, k, v = np.split(norm(x) @ p["qkv"], 3, axis=-1)
    mixed = []
    for h in (slice(0, 4), slice(4, 8)):
        s = q[:, h] @ k[:, h].T / 2.0
        s[np.triu_indices(len(x), 1)] = -np.inf
        e = np.exp(s - s.max(-1, keepdims=True))
        mixed.append(e / e.sum(-1, keepdims=True) @ v[:, h])
    x = x + np.concatenate(mixed, -1) @ p["proj"]
    u = norm(x) @ p["up"]
    u = 0.5 * u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))
    return x + u @ p["down"]


def test_transformer_block():
    params, xs = block_data()
    found = jit(vmap(attention_block, in_axes=(None, 0)))(params, xs)
    for x, row in zip(xs, found, strict=True):
        close(row, numpy_block(params, x), rtol=1e-4, atol=1e-5)
    changed = xs.copy()
    changed[:, 4:] += 1
    later = vmap(attention_block, in_axes=(None, 0))(params, changed)
    close(later[:, :4], found[:, :4], rtol=1e-4, atol=1e-5)


def test_gradient_of_the_transformer_block():
    params, xs = block_data()

    def loss(params):
        return jnp.mean(vmap(attention_block, in_axes=(None, 0))(params, xs) ** 2)

    found = jit(grad(loss))(params)

    def numpy_loss(params):
        return np.mean([numpy_block(params, x) ** 2 for x in xs])

    rng = np.random.default_rng(2)
    for name, p in params.items():
        direction = rng.normal(size=p.shape)
        sides = [numpy_loss({**params, name: p + s * 1e-5 * direction}) for s in (1, -1)]
        slope = (sides[0] - sides[1]) / 2e-5
        assert float(np.sum(np.asarray(found[name]) * direction)) == pytest.approx(slope, rel=1e-3)


# ---- loops -------------------------------------------------------------------------------------


def test_k_means():
    rng = np.random.default_rng(0)
    centres = np.array([[0, 0], [5, 5], [0, 5]], np.float32)
    points = np.concatenate([c + 0.3 * rng.normal(size=(40, 2)) for c in centres]).astype("f")

    @functools.partial(jit, static_argnums=1)
    def k_means(points, steps):
        def step(_, means):
            distance = vmap(lambda p: jnp.sum((p - means) ** 2, axis=-1))(points)
            members = nn.one_hot(jnp.argmin(distance, axis=-1), 3)
            return members.T @ points / members.sum(0)[:, None]

        return lax.fori_loop(0, steps, step, points[jnp.array([0, 40, 80])])

    wanted = points.reshape(3, 40, 2).mean(1)
    close(k_means(points, 10), wanted, rtol=1e-4, atol=1e-5)


def test_n_body_conserves_energy_and_momentum():
    rng = np.random.default_rng(1)
    x0, v0 = rng.normal(size=(5, 3)).astype("f"), 0.1 * rng.normal(size=(5, 3)).astype("f")
    v0 -= v0.mean(0)

    def potential(x):
        apart = x[:, None] - x[None, :]
        distance = jnp.sqrt(jnp.sum(apart**2, -1) + 0.1)
        return -jnp.sum(jnp.triu(1 / distance, k=1))

    def energy(x, v):
        return potential(x) + 0.5 * jnp.sum(v**2)

    @jit
    def simulate(x, v):
        def step(_, state):
            x, v = state
            v = v - 0.005 * grad(potential)(x)
            x = x + 0.01 * v
            return x, v - 0.005 * grad(potential)(x)

        return lax.fori_loop(0, 300, step, (x, v))

    x, v = simulate(x0, v0)
    assert np.abs(np.asarray(x) - x0).max() > 0.3
    assert float(energy(x, v)) == pytest.approx(float(energy(x0, v0)), rel=5e-3)
    close(np.sum(v, 0), np.zeros(3), atol=1e-4)


def test_lorenz_orbit_and_its_sensitivity():
    def lorenz(state):
        x, y, z = state
        return jnp.array([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])

    def runge_kutta(state, _):
        h = 0.01
        k1 = lorenz(state)
        k2 = lorenz(state + h / 2 * k1)
        k3 = lorenz(state + h / 2 * k2)
        k4 = lorenz(state + h * k3)
        state = state + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return state, state

    @jit
    def orbit(start):
        return lax.scan(runge_kutta, start, None, length=100)[1]

    start = np.array([1.0, 1.0, 1.0], np.float32)

    def numpy_orbit(s):
        def f(s):
            x, y, z = s
            return np.array([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])

        out = []
        for _ in range(100):
            k1 = f(s)
            k2 = f(s + 0.005 * k1)
            k3 = f(s + 0.005 * k2)
            k4 = f(s + 0.01 * k3)
            s = s + 0.01 / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            out.append(s)
        return np.array(out)

    close(orbit(start), numpy_orbit(start.astype(float)), rtol=1e-3, atol=1e-3)
    jacobian = spmd.jacfwd(lambda s: orbit(s)[-1])(start)
    step = 1e-5 * np.eye(3)
    wanted = [(numpy_orbit(start + s)[-1] - numpy_orbit(start - s)[-1]) / 2e-5 for s in step]
    close(jacobian, np.transpose(wanted), rtol=5e-3, atol=5e-3)


def test_mandelbrot_counts_escapes():
    def escape_time(c):
        def going_on(state):
            z, n = state
            return (jnp.abs(z) <= 2) & (n < 50)

        return lax.while_loop(going_on, lambda s: (s[0] ** 2 + c, s[1] + 1), (c * 0, 0))[1]

    y, x = np.meshgrid(np.linspace(-1.2, 1.2, 13), np.linspace(-2, 0.5, 17), indexing="ij")
    grid = (x + 1j * y).astype(np.complex64)
    found = np.asarray(jit(vmap(vmap(escape_time)))(grid))

    def by_hand(c):
        z, n = 0j, 0
        while abs(z) <= 2 and n < 50:
            z, n = z * z + c, n + 1
        return n

    wanted = np.array([[by_hand(complex(c)) for c in row] for row in grid])
    # On the border of the set the last bit of a product decides.
    assert np.mean(found != wanted) < 0.03
    assert found.dtype == np.int32 and found.max() == 50 and found.min() <= 2


def test_bisection_with_cond():
    def bisect(f, lo, hi):
        def halve(_, bounds):
            lo, hi = bounds
            mid = 0.5 * (lo + hi)
            return lax.cond(f(mid) > 0, lambda: (lo, mid), lambda: (mid, hi))

        return lax.fori_loop(0, 30, halve, (lo, hi))[0]

    close(jit(lambda: bisect(lambda x: x**3 - 2, 0.0, 2.0))(), 2 ** (1 / 3))
    many = vmap(lambda a: bisect(lambda x: x**3 - a, 0.0, 2.0))(jnp.array([1.0, 2.0, 3.0]))
    close(many, np.array([1, 2, 3]) ** (1 / 3))


def test_fibonacci_by_scan_and_by_associative_scan():
    _, fib = lax.scan(lambda c, _: ((c[1], c[0] + c[1]), c[1]), (0, 1), None, length=10)
    assert list(np.asarray(fib)) == [1, 1, 2, 3, 5, 8, 13, 21, 34, 55]
    m = jnp.broadcast_to(jnp.array([[1, 1], [1, 0]]), (10, 2, 2))
    powers = lax.associative_scan(jnp.matmul, m)
    assert list(np.asarray(powers[:, 0, 1])) == list(np.asarray(fib))


# ---- chance ------------------------------------------------------------------------------------


def test_same_key_same_numbers():
    key = random.key(42)
    assert np.array_equal(random.normal(key, (3,)), random.normal(key, (3,)))
    one, two = random.split(key)
    assert not np.array_equal(random.normal(one, (3,)), random.normal(two, (3,)))
    subkeys = random.split(key, 3)
    each = np.stack([random.normal(k) for k in subkeys])
    close(vmap(random.normal)(subkeys), each)


def test_metropolis_samples_a_normal_distribution():
    def log_density(x):
        return -0.5 * (x - 1.0) ** 2 / 0.25

    @functools.partial(jit, static_argnums=1)
    def sample(key, steps):
        def step(x, key):
            move, accept = random.split(key)
            proposal = x + 0.8 * random.normal(move)
            ratio = log_density(proposal) - log_density(x)
            x = jnp.where(jnp.log(random.uniform(accept)) < ratio, proposal, x)
            return x, x

        return lax.scan(step, 0.0, random.split(key, steps))[1]

    chains = vmap(lambda key: sample(key, 300))(random.split(random.key(0), 100))
    kept = np.asarray(chains)[:, 50:]
    assert kept.mean() == pytest.approx(1.0, abs=0.03)
    assert kept.std() == pytest.approx(0.5, abs=0.03)


def test_estimating_pi():
    @jit
    def inside(key):
        return jnp.mean(jnp.sum(random.uniform(key, (20_000, 2)) ** 2, axis=1) < 1)

    estimate = 4 * np.mean([inside(k) for k in random.split(random.key(1), 4)])
    assert estimate == pytest.approx(np.pi, abs=0.02)


def test_dropout_keeps_the_mean():
    x = jnp.ones((100, 100))
    keep = random.bernoulli(random.key(3), 0.8, x.shape)
    dropped = jnp.where(keep, x / 0.8, 0)
    assert float(dropped.mean()) == pytest.approx(1.0, abs=0.02)
    assert set(np.unique(dropped)) == {0.0, np.float32(1.25)}


def test_reparametrised_gradient_of_an_expectation():
    def expected(params, key):
        z = params["mean"] + jnp.exp(params["log_std"]) * random.normal(key, (5_000,))
        return jnp.mean(z**2)

    params = {"mean": 0.5, "log_std": -1.0}
    g = jit(grad(expected))(params, random.key(0))
    assert float(g["mean"]) == pytest.approx(1.0, abs=0.05)
    assert float(g["log_std"]) == pytest.approx(2 * np.exp(-2.0), rel=0.1)
