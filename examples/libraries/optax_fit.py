"""optax: fit a small network to a sine with Adam, clipped gradients and a cosine schedule."""

import jax
import jax.numpy as jnp
import optax


def network(params, x):
    """Two layers, for a column of numbers."""
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def main():
    """Train, and print the loss before and after."""
    k1, k2 = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(k1, (1, 32)),
        "b1": jnp.zeros(32),
        "w2": jax.random.normal(k2, (32, 1)) / 6,
        "b2": jnp.zeros(1),
    }
    x = jnp.linspace(-3, 3, 128)[:, None]
    y = jnp.sin(x)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.02, 50, 600)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-5)
    )
    state = optimizer.init(params)

    def loss(params):
        return optax.l2_loss(network(params, x), y).mean()

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    before = loss(params)
    for _ in range(600):
        params, state, value = step(params, state)
    print(f"loss {before:.3f} -> {value:.5f}")
    assert value < 2e-3


if __name__ == "__main__":
    main()
