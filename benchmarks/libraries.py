"""Training and sampling with libraries of JAX: one program, over JAX and over spmd in its place.

    python -m benchmarks libraries             both sides in turns, each in its own process
    python -m benchmarks.libraries spmd        one side: each program in its smallest form, as JSON

The libraries are those of the extra `libraries`; a case whose libraries are not installed is left
out.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy

from benchmarks.case import BOTH, Case, integers, normal
from benchmarks.sides import Side, load_side

Call = Callable[[], Any]


def _stand_in(side: Side) -> None:
    """From now on `import jax` gives this process its side."""
    if side.name == "spmd":
        import spmd.as_jax

        spmd.as_jax.install()


def _flax_training(side: Side, model: Any, x: numpy.ndarray, y: numpy.ndarray) -> Call:
    """Steps of Adam for a Flax model with integer labels; a call gives the loss."""
    import jax
    import optax
    from flax.training.train_state import TrainState

    params = model.init(jax.random.key(0), x)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    def loss(params: Any, x: Any, y: Any) -> Any:
        scores = model.apply({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()

    @jax.jit
    def step(state: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state.params, x, y)
        return state.apply_gradients(grads=grads), value

    x, y = jax.device_put(x), jax.device_put(y)

    def call() -> Any:
        nonlocal state
        state, value = step(state, x, y)
        return value

    return call


def train_mlp(side: Side, width: int, batch: int) -> Call:
    """A Flax MLP of two hidden layers."""
    _stand_in(side)
    import flax.linen as nn

    model = nn.Sequential([nn.Dense(width), nn.relu, nn.Dense(width), nn.relu, nn.Dense(10)])
    return _flax_training(side, model, normal(batch, 64), integers(10, batch))


def train_convnet(side: Side, features: int, batch: int) -> Call:
    """A Flax network of two convolutions, with pooling."""
    _stand_in(side)
    import flax.linen as nn

    model = nn.Sequential(
        [
            nn.Conv(features, (3, 3)),
            nn.relu,
            partial(nn.avg_pool, window_shape=(2, 2), strides=(2, 2)),
            nn.Conv(2 * features, (3, 3)),
            nn.relu,
            partial(nn.avg_pool, window_shape=(2, 2), strides=(2, 2)),
            lambda x: x.reshape(len(x), -1),
            nn.Dense(10),
        ]
    )
    return _flax_training(side, model, normal(batch, 16, 16, 1), integers(10, batch))


def train_transformer(side: Side, width: int, length: int, batch: int) -> Call:
    """A Flax transformer of two layers that predicts tokens."""
    _stand_in(side)
    import flax.linen as nn

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            mask = nn.make_causal_mask(x[..., 0])
            normed = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(4)(normed, normed, mask=mask)
            return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))

    model = nn.Sequential([nn.Embed(64, width), Layer(), Layer(), nn.Dense(64)])
    tokens = integers(64, batch, length + 1)
    return _flax_training(side, model, tokens[:, :-1], tokens[:, 1:])


def train_neural_ode(side: Side, width: int, batch: int) -> Call:
    """An Equinox MLP as the right side of a Diffrax equation, fitted to turning points."""
    _stand_in(side)
    import diffrax
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import optax

    model = eqx.nn.MLP(2, 2, width, 2, activation=jnp.tanh, key=jax.random.key(0))
    times = jnp.linspace(0.0, 1.0, 8)
    y0 = jnp.asarray(normal(batch, 2))
    angle = 2 * times[:, None]
    wanted = jnp.stack([jnp.cos(angle) * y0[:, 0] - jnp.sin(angle) * y0[:, 1],
                        jnp.sin(angle) * y0[:, 0] + jnp.cos(angle) * y0[:, 1]], -1)  # fmt: skip
    optimizer = optax.adam(3e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def solve(model: Any, y0: Any) -> Any:
        term = diffrax.ODETerm(lambda t, y, args: model(y))
        found = diffrax.diffeqsolve(
            term,
            diffrax.Tsit5(),
            0.0,
            1.0,
            0.1,
            y0,
            saveat=diffrax.SaveAt(ts=times),
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
        )
        return found.ys

    @eqx.filter_value_and_grad
    def loss(model: Any) -> Any:
        return jnp.mean((jax.vmap(partial(solve, model), out_axes=1)(y0) - wanted) ** 2)

    @eqx.filter_jit
    def step(model: Any, state: Any) -> Any:
        value, grads = loss(model)
        updates, state = optimizer.update(grads, state)
        return value, eqx.apply_updates(model, updates), state

    def call() -> Any:
        nonlocal model, state
        value, model, state = step(model, state)
        return value

    return call


def sample_nuts(side: Side, rows: int, samples: int) -> Call:
    """A regression by NUTS of NumPyro: warm-up and samples; a call gives the means."""
    _stand_in(side)
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS

    weights = numpy.array([1.0, -2.0, 0.5], numpy.float32)
    x = normal(rows, 3)
    y = x @ weights + 0.1 * normal(rows, seed=1)

    def model(x: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Normal(x @ w, sigma), obs=y)

    chain = MCMC(NUTS(model), num_warmup=samples, num_samples=samples, progress_bar=False)

    def call() -> Any:
        chain.run(jax.random.key(0), x, y)
        return chain.get_samples()["w"].mean(0)

    return call


FLAX, ODE, NUTS = ("flax", "optax"), ("diffrax", "equinox", "optax"), ("numpyro",)
PROGRAMS: dict[str, tuple[tuple[str, ...], Callable[..., Call], dict[str, int], float]] = {
    "flax + optax, MLP of 256, batch 128": (FLAX, train_mlp, {"width": 256, "batch": 128}, 1e-3),
    "flax + optax, convnet, 32 images": (FLAX, train_convnet, {"features": 16, "batch": 32}, 1e-3),
    "flax + optax, transformer of 64": (
        FLAX,
        train_transformer,
        {"width": 64, "length": 32, "batch": 8},
        1e-2,
    ),
    "equinox + diffrax, neural ODE": (ODE, train_neural_ode, {"width": 32, "batch": 32}, 1e-2),
    # Two chains of rounding errors part; the means of the posterior do not.
    "numpyro, NUTS of 200 samples": (NUTS, sample_nuts, {"rows": 64, "samples": 200}, 0.1),
}
SMALLEST = {"width": 8, "batch": 2, "features": 2, "length": 4, "rows": 16, "samples": 60}


def _installed(names: tuple[str, ...]) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


def library_cases() -> list[Case]:
    """The programs whose libraries are installed."""
    return [
        Case(f"libraries/{name}", partial(make, **sizes), sides=BOTH, tolerance=tolerance)
        for name, (needs, make, sizes, tolerance) in PROGRAMS.items()
        if _installed(needs)
    ]


def main() -> None:
    """Run the smallest form of each program on one side; print the results of the second call."""
    side = load_side(sys.argv[1])
    found = {}
    for name, (needs, make, sizes, _) in PROGRAMS.items():
        if _installed(needs):
            call = make(side, **{size: SMALLEST[size] for size in sizes})
            call()
            found[name] = numpy.asarray(call()).tolist()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
