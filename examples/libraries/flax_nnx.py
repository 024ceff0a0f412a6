"""flax.nnx: modules that are Python objects, with an optimizer, jit, and a scan over layers."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Block(nnx.Module):
    """A dense layer with a residual connection and layer norm."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(dim, dim, rngs=rngs)
        self.norm = nnx.LayerNorm(dim, rngs=rngs)

    def __call__(self, x):
        return x + nnx.gelu(self.linear(self.norm(x)))


class Model(nnx.Module):
    """Blocks in one scan, and a head."""

    def __init__(self, dim: int, depth: int, *, rngs: nnx.Rngs):
        self.embed = nnx.Linear(1, dim, rngs=rngs)

        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Block(dim, rngs=rngs)

        self.blocks = make(rngs.split(depth))
        self.head = nnx.Linear(dim, 1, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def through(x, block):
            return block(x)

        return self.head(through(self.embed(x), self.blocks))


def main():
    """Fit a curve."""
    model = Model(16, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    x = jnp.linspace(-2, 2, 64)[:, None]
    y = jnp.cos(3 * x)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return jnp.mean((model(x) - y) ** 2)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    first = step(model, optimizer)
    for _ in range(400):
        value = step(model, optimizer)
    graph, state = nnx.split(model)
    again = nnx.merge(graph, state)
    assert jnp.array_equal(again(x), model(x))
    print(f"loss {first:.3f} -> {value:.4f}; {len(jax.tree.leaves(state))} arrays")
    assert value < 0.02


if __name__ == "__main__":
    main()
