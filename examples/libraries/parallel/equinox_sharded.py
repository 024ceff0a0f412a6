"""equinox, optax: plain jit of a model whose first layer and batch are split by the compiler.

spmdrun -n 2 --as-jax examples/libraries/parallel/equinox_sharded.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def main():
    """Learn the parity of two signs."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
    model = eqx.nn.MLP(2, 1, width_size=64, depth=2, key=jax.random.key(0))
    optimizer = optax.adamw(0.01)

    def placed(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    params, static = eqx.partition(model, eqx.is_array)
    # Rows of the first weights are over the devices, all else is whole on each.
    params = jax.tree.map(lambda x: placed(x, P("x") if x.shape == (64, 2) else P()), params)
    state = jax.jit(optimizer.init)(params)

    def loss_of(params, x, y):
        scores = jax.vmap(eqx.combine(params, static))(x)[:, 0]
        return optax.sigmoid_binary_cross_entropy(scores, y).mean()

    @jax.jit
    def train(params, state, x, y):
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    numbers = np.random.default_rng(0)  # the same on all processes, which place their parts
    for _ in range(150):
        x = numbers.normal(size=(128, 2)).astype(np.float32)
        y = (x[:, 0] * x[:, 1] > 0).astype(np.float32)
        params, state, loss = train(params, state, placed(x, P("x")), placed(y, P("x")))
    print(f"process {jax.process_index()}: loss {float(loss):.4f}")
    assert float(loss) < 0.25
    assert jax.tree.leaves(params)[0].sharding.spec[0] == "x"
    assert jnp.isfinite(loss)


if __name__ == "__main__":
    main()
