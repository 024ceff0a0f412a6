"""chex: a dataclass as a pytree, assertions on shapes and trees, and a test over variants."""

import chex
import jax
import jax.numpy as jnp


@chex.dataclass
class Particle:
    """Position and velocity."""

    position: chex.Array
    velocity: chex.Array


def step(p: Particle, dt: float) -> Particle:
    """One step in the field of a spring."""
    chex.assert_equal_shape([p.position, p.velocity])
    velocity = p.velocity - dt * p.position
    return p.replace(position=p.position + dt * velocity, velocity=velocity)


def main():
    """Run with and without jit, and compare."""
    start = Particle(position=jnp.ones((4, 2)), velocity=jnp.zeros((4, 2)))
    chex.assert_tree_all_finite(start)
    chex.assert_shape(start.position, (4, None))
    chex.assert_type(start.velocity, jnp.float32)

    traced = jax.jit(chex.assert_max_traces(step, n=1))
    fast, slow = start, start
    for _ in range(100):
        fast, slow = traced(fast, 0.01), step(slow, 0.01)
    chex.assert_trees_all_close(fast, slow, rtol=1e-5)

    @chex.chexify
    @jax.jit
    def positive_log(x):
        chex.assert_tree_all_finite(jnp.log(x))
        return jnp.log(x)

    print("log", positive_log(jnp.array([1.0, 2.0])))
    try:
        positive_log(jnp.array([0.0, 2.0]))
        chex.block_until_chexify_assertions_complete()
    except (AssertionError, ValueError) as error:
        print("found:", str(error).splitlines()[0][:60])
    else:
        raise SystemExit("a log of 0 was not found")
    print(f"x after 1 s {fast.position[0, 0]:.4f}")


if __name__ == "__main__":
    main()
