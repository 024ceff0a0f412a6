"""haiku, optax: training by pmap, with batch norm over all devices.

spmdrun -n 2 --as-jax examples/libraries/parallel/haiku_pmap.py
"""

from functools import partial

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax


def net_of(x, is_training):
    """Dense layers around a batch norm over all devices."""
    x = hk.Linear(16)(x)
    x = hk.BatchNorm(True, True, 0.9, cross_replica_axis="i")(x, is_training)
    return hk.Linear(1)(jax.nn.relu(x))[:, 0]


def main():
    """Fit a line with an offset; every device sees other points."""
    net = hk.transform_with_state(net_of)
    optimizer = optax.sgd(0.05, momentum=0.9)

    @partial(jax.pmap, axis_name="i")
    def begin(x):
        params, state = net.init(jax.random.key(0), x, True)
        return params, state, optimizer.init(params)

    @partial(jax.pmap, axis_name="i", donate_argnums=(0, 1, 2))
    def train(params, state, opt_state, x, y):
        def loss_of(params):
            out, after = net.apply(params, state, None, x, True)
            return jnp.mean((out - y) ** 2), after

        (loss, after), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        grads, loss = jax.lax.pmean((grads, loss), "i")
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), after, opt_state, loss

    here = jax.local_device_count()
    numbers = np.random.default_rng(jax.process_index())
    carried = begin(np.ones((here, 4, 3), np.float32))
    for _ in range(200):
        x = numbers.normal(size=(here, 32, 3)).astype(np.float32)
        *carried, loss = train(*carried, x, x @ np.float32([1, -2, 0.5]) + 3)
    final = float(loss.addressable_shards[0].data[0])
    print(f"process {jax.process_index()}: loss {final:.4f}")
    assert final < 0.5


if __name__ == "__main__":
    main()
