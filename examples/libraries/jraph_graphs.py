"""jraph: a graph network over batches of padded graphs, trained to count their edges."""

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax


def graph(rng, nodes, edges):
    """A random graph, with ones as features."""
    return jraph.GraphsTuple(
        nodes=np.ones((nodes, 1), np.float32),
        edges=np.ones((edges, 1), np.float32),
        senders=rng.integers(0, nodes, edges),
        receivers=rng.integers(0, nodes, edges),
        n_node=np.array([nodes]),
        n_edge=np.array([edges]),
        globals=np.zeros((1, 1), np.float32),
    )


def main():
    """Train a network of one step."""
    rng = np.random.default_rng(0)
    sizes = [(int(rng.integers(3, 7)), int(rng.integers(2, 10))) for _ in range(16)]
    batch = jraph.batch([graph(rng, *s) for s in sizes])
    batch = jraph.pad_with_graphs(batch, n_node=120, n_edge=180, n_graph=17)
    wanted = jnp.array([e / 10 for _, e in sizes] + [0.0])
    mask = jraph.get_graph_padding_mask(batch)

    def apply(params, batch):
        network = jraph.GraphNetwork(
            update_edge_fn=lambda e, s, r, g: jnp.tanh(e @ params["edge"]),
            update_node_fn=lambda n, s, r, g: jnp.tanh(r @ params["node"]),
            update_global_fn=lambda n, e, g: e @ params["out"],
        )
        return network(batch).globals[:, 0]

    k1, k2, k3 = jax.random.split(jax.random.key(0), 3)
    params = {
        "edge": jax.random.normal(k1, (1, 4)),
        "node": jax.random.normal(k2, (4, 4)),
        "out": jax.random.normal(k3, (4, 1)) * 0.1,
    }
    optimizer = optax.adam(0.02)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        def loss(params):
            return jnp.sum(jnp.where(mask, apply(params, batch) - wanted, 0) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    for _ in range(200):
        params, state, value = step(params, state)
    print(f"{len(jraph.unbatch(jraph.unpad_with_graphs(batch)))} graphs, loss {value:.4f}")
    assert value < 1e-2


if __name__ == "__main__":
    main()
