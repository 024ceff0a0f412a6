"""equinox: train an MLP that is a pytree; raise an error while a program runs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax


def main():
    """Train, save, load, and provoke an error."""
    key = jax.random.key(1)
    model = eqx.nn.MLP(2, "scalar", width_size=16, depth=2, activation=jax.nn.tanh, key=key)
    x = jax.random.normal(jax.random.key(2), (256, 2))
    y = jnp.sign(x[:, 0] * x[:, 1])

    @eqx.filter_value_and_grad
    def loss(model):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    optimizer = optax.adam(3e-2)
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model, state):
        value, grads = loss(model)
        updates, state = optimizer.update(grads, state, model)
        return eqx.apply_updates(model, updates), state, value

    for _ in range(300):
        model, state, value = step(model, state)
    right = jnp.mean(jnp.sign(jax.vmap(model)(x)) == y)
    print(f"loss {value:.3f}, right {right:.3f}")
    assert right > 0.95

    frozen = eqx.tree_at(lambda m: m.layers[-1].bias, model, replace_fn=jnp.zeros_like)
    assert eqx.tree_equal(frozen.layers[0], model.layers[0])

    @eqx.filter_jit
    def root(x):
        x = eqx.error_if(x, x < 0, "the root of a negative number")
        return jnp.sqrt(x)

    print("root", root(jnp.array(4.0)))
    try:
        root(jnp.array(-1.0)).block_until_ready()
    except Exception as error:
        print("found:", "negative" in str(error))
    else:
        raise SystemExit("the error was not raised")


if __name__ == "__main__":
    main()
