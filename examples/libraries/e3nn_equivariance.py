"""e3nn-jax: spherical harmonics, tensor products, and a layer that turns with its inputs."""

import e3nn_jax as e3nn
import flax.linen as nn
import jax
import jax.numpy as jnp


class Layer(nn.Module):
    """Messages between all pairs of points."""

    @nn.compact
    def __call__(self, positions):
        vectors = positions[:, None] - positions[None, :]
        edges = e3nn.spherical_harmonics("0e + 1o + 2e", vectors, normalize=False)
        pairs = e3nn.tensor_product(edges, edges, filter_ir_out=["0e", "1o", "2e"])
        x = e3nn.flax.Linear("8x0e + 4x1o + 2x2e")(pairs)
        x = e3nn.gate(e3nn.flax.Linear("8x0e + 6x0e + 4x1o + 2x2e")(e3nn.mean(x, axis=1)))
        return e3nn.flax.Linear("1x0e + 1x1o")(x)


def main():
    """Turning the inputs turns the outputs."""
    positions = jax.random.normal(jax.random.key(0), (7, 3))
    model = Layer()
    params = jax.jit(model.init)(jax.random.key(1), positions)
    out = jax.jit(model.apply)(params, positions)
    print(out.irreps, out.array[:2])
    turn = e3nn.rand_matrix(jax.random.key(2), ())
    turned = model.apply(params, positions @ turn.T)
    error = jnp.abs(turned.array - out.transform_by_matrix(turn).array).max()
    print("turned", turned.array[0], "differs", bool(error > 1e-4))
    print(e3nn.Irreps("1x0e + 1x1o + 1x2e").D_from_angles(0.1, 0.2, 0.3)[4:6, 4:])

    def energy(positions):
        return model.apply(params, positions).filter("0e").array.sum()

    forces = jax.grad(energy)(positions)
    print("energy", energy(positions), "forces", jnp.abs(forces).sum())
    assert error < 1e-4


if __name__ == "__main__":
    main()
