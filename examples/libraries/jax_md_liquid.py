"""jax-md: soft spheres that are relaxed, and moved at constant temperature with neighbour lists."""

import jax
import jax.numpy as jnp
from jax_md import energy, minimize, partition, quantity, simulate, space


def main():
    """Minimise by FIRE, then follow Newton's law."""
    size = 5.0
    displacement, shift = space.periodic(size)
    positions = jax.random.uniform(jax.random.key(0), (48, 2), minval=0.0, maxval=size)
    total = energy.soft_sphere_pair(displacement, sigma=0.8)
    init, apply = minimize.fire_descent(total, shift)
    state = init(positions)
    print("energy", total(positions))
    state = jax.jit(lambda s: jax.lax.fori_loop(0, 60, lambda _, s: apply(s), s))(state)
    print("relaxed", total(state.position) < 0.2 * total(positions))
    neighbours, pairwise = energy.lennard_jones_neighbor_list(
        displacement, size, sigma=0.5, epsilon=0.3, format=partition.Sparse
    )
    grid = jnp.stack(jnp.meshgrid(jnp.arange(6), jnp.arange(6)), -1).reshape(-1, 2) * size / 6
    nbrs = neighbours.allocate(grid)
    init, apply = simulate.nve(pairwise, shift, 2e-3)
    moving = init(jax.random.key(1), grid, kT=0.1, neighbor=nbrs)

    @jax.jit
    def step(_, carry):
        moving, nbrs = carry
        nbrs = nbrs.update(moving.position)
        return apply(moving, neighbor=nbrs), nbrs

    def whole(moving, nbrs):
        kinetic = quantity.kinetic_energy(momentum=moving.momentum, mass=moving.mass)
        return kinetic + pairwise(moving.position, neighbor=nbrs)

    before = whole(moving, nbrs)
    moving, nbrs = jax.lax.fori_loop(0, 100, step, (moving, nbrs))
    print("energy before", before, "after", whole(moving, nbrs), bool(nbrs.did_buffer_overflow))
    print("first", moving.position[0], "forces", jnp.abs(moving.force).sum())
    assert jnp.allclose(before, whole(moving, nbrs), rtol=1e-2)


if __name__ == "__main__":
    main()
