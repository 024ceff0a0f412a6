"""flax.linen, optax: training by shard_map over the devices of all processes.

spmdrun -n 2 --as-jax examples/libraries/parallel/flax_shard_map.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


class Net(nn.Module):
    """Three dense layers with a norm between them."""

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.gelu(nn.Dense(32)(x)))
        return nn.Dense(1)(nn.gelu(nn.Dense(32)(x)))[..., 0]


def main():
    """Fit a function of two variables; the loss is that of all processes."""
    mesh = jax.make_mesh((jax.device_count(),), ("batch",))
    net, optimizer = Net(), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01))

    def step(params, state, x, y):
        def loss_of(params):
            return jax.lax.pmean(jnp.mean((net.apply(params, x) - y) ** 2), "batch")

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    specs = (P(), P(), P("batch"), P("batch"))
    train = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P()))

    def everywhere(x):
        return jax.make_array_from_process_local_data(NamedSharding(mesh, P("batch")), x)

    params = net.init(jax.random.key(0), jnp.ones((1, 2)))
    params = jax.device_put(params, NamedSharding(mesh, P()))
    state = jax.jit(optimizer.init)(params)
    numbers = np.random.default_rng(jax.process_index())
    for _ in range(200):
        x = numbers.uniform(-1, 1, (64, 2)).astype(np.float32)
        y = np.sin(3 * x[:, 0]) * x[:, 1]
        params, state, loss = train(params, state, everywhere(x), everywhere(y))
    print(f"process {jax.process_index()}: loss {float(loss):.5f}")
    assert float(loss) < 0.02


if __name__ == "__main__":
    main()
