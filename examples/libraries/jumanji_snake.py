"""jumanji: episodes of Snake and of packing a knapsack, in compiled scans over a batch."""

import jax
import jax.numpy as jnp
import jumanji
from jumanji.wrappers import AutoResetWrapper


def main():
    """Random actions among those that are allowed."""
    for name, env in (
        ("snake", AutoResetWrapper(jumanji.make("Snake-v1"))),
        ("knapsack", AutoResetWrapper(jumanji.make("Knapsack-v1"))),
    ):

        def step(carry, key, env=env):
            state, last = carry
            logits = jnp.where(last.observation.action_mask, 0.0, -jnp.inf)
            state, last = env.step(state, jax.random.categorical(key, logits))
            return (state, last), (last.reward, last.last())

        @jax.jit
        @jax.vmap
        def episode(key, env=env, step=step):
            start, rest = jax.random.split(key)
            return jax.lax.scan(step, env.reset(start), jax.random.split(rest, 60))[1]

        reward, done = episode(jax.random.split(jax.random.PRNGKey(0), 8))
        print(name, "rewards", reward.sum(axis=1), "ends", done.sum(axis=1))
        assert reward.sum() > 0


if __name__ == "__main__":
    main()
