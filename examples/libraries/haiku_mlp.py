"""haiku: a recurrent network with state and random numbers, trained with optax."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax


def forward(x, train):
    """An LSTM over (time, batch, features), with dropout and a counter of calls as state."""
    calls = hk.get_state("calls", (), jnp.int32, init=jnp.zeros)
    hk.set_state("calls", calls + 1)
    core = hk.LSTM(16)
    outs, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
    last = outs[-1]
    if train:
        last = hk.dropout(hk.next_rng_key(), 0.1, last)
    return hk.nets.MLP([16, 1])(last)[:, 0]


def main():
    """Learn to add up a sequence."""
    model = hk.transform_with_state(forward)
    x = jax.random.uniform(jax.random.key(0), (10, 64, 1))
    y = x.sum(axis=(0, 2)) - 5.0
    params, state = model.init(jax.random.PRNGKey(1), x, True)
    print(hk.data_structures.tree_size(params), "parameters")
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, state, opt, key):
        def loss(params):
            out, new = model.apply(params, state, key, x, True)
            return jnp.mean((out - y) ** 2), new

        (value, state_), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt = optimizer.update(grads, opt)
        return optax.apply_updates(params, updates), state_, opt, value

    opt = optimizer.init(params)
    for key in jax.random.split(jax.random.PRNGKey(2), 300):
        params, state, opt, value = step(params, state, opt, key)
    out, _ = model.apply(params, state, None, x, False)
    error = jnp.mean((out - y) ** 2)
    print(f"loss {value:.3f}, without dropout {error:.4f}, calls {state['~']['calls']}")
    assert error < 0.1


if __name__ == "__main__":
    main()
