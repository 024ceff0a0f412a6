"""penzai: named arrays, a model as data, and a change of one of its layers."""

import jax
import jax.numpy as jnp
import optax
from penzai import pz


def main():
    """Train a small model, then look into it."""
    mlp = pz.nn.Sequential(
        [
            pz.nn.Affine.from_config(
                "in", init_base_rng=jax.random.key(0), input_axes={"x": 2}, output_axes={"h": 16}
            ),
            pz.nn.Elementwise(jnp.tanh),
            pz.nn.Affine.from_config(
                "out", init_base_rng=jax.random.key(1), input_axes={"h": 16}, output_axes={"y": 1}
            ),
        ]
    )
    data = jax.random.normal(jax.random.key(2), (64, 2))
    x = pz.nx.wrap(data).tag("batch", "x")
    wanted = pz.nx.wrap((data[:, 0] * data[:, 1])[:, None]).tag("batch", "y")
    frozen, params = pz.unbind_params(mlp, freeze=True)

    optimizer = optax.adam(3e-2)
    values = tuple(params)
    state = optimizer.init(values)

    @jax.jit
    def step(values, state):
        def loss(values):
            out = pz.bind_variables(frozen, values)(x)
            return jnp.mean((out - wanted).unwrap("batch", "y") ** 2)

        value, grads = jax.value_and_grad(loss)(values)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(values, updates), state, value

    for _ in range(300):
        values, state, value = step(values, state)
    trained = pz.bind_variables(frozen, values)
    print(f"{len(values)} parameters, loss {value:.4f}")
    assert value < 0.05

    linear = pz.select(trained).at_instances_of(pz.nn.Elementwise).set(pz.nn.Identity())
    print(pz.select(linear).at_instances_of(pz.nn.Identity).count(), linear(x).named_shape)


if __name__ == "__main__":
    main()
