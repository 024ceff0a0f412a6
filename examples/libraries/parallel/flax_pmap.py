"""flax.linen, optax: training by pmap, where each device has its own points and averages gradients.

spmdrun -n 2 --as-jax examples/libraries/parallel/flax_pmap.py
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax import linen as nn
from flax.training import train_state


class Net(nn.Module):
    """Two dense layers."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.tanh(nn.Dense(32)(x)))


@partial(jax.pmap, axis_name="batch")
def train(state, x, y):
    """One step on this device's part of the batch."""

    def loss_of(params):
        scores = state.apply_fn({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    grads = jax.lax.pmean(grads, "batch")
    return state.apply_gradients(grads=grads), jax.lax.pmean(loss, "batch")


def main():
    """Learn whether a point is inside of a circle; all devices end with the same weights."""
    here = jax.local_device_count()
    numbers = np.random.default_rng(jax.process_index())
    net = Net()
    params = net.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    state = train_state.TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(0.02))
    state = jax_utils.replicate(state)
    for _ in range(150):
        x = numbers.uniform(-1, 1, (here, 64, 2)).astype(np.float32)
        state, loss = train(state, x, (np.sum(x**2, -1) < 0.5).astype(np.int32))
    final = float(loss.addressable_shards[0].data[0])
    weight = state.params["Dense_0"]["kernel"].addressable_shards[0].data[0]
    print(f"process {jax.process_index()}: loss {final:.3f}, weights {float(jnp.sum(weight)):.5f}")
    assert final < 0.25


if __name__ == "__main__":
    main()
