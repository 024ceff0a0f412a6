"""gymnax: episodes of CartPole in one compiled scan, and a random search for a linear policy."""

import gymnax
import jax
import jax.numpy as jnp


def main():
    """Search policies by vmap over parameters and keys."""
    env, params = gymnax.make("CartPole-v1")

    def episode(weights, key):
        key, first = jax.random.split(key)
        obs, state = env.reset(first, params)

        def step(carry, key):
            obs, state, alive, total = carry
            action = (obs @ weights > 0).astype(jnp.int32)
            obs, state, reward, done, *_ = env.step(key, state, action, params)
            total = total + reward * alive
            return (obs, state, alive * (1 - done), total), None

        carry = obs, state, jnp.array(1.0), jnp.array(0.0)
        return jax.lax.scan(step, carry, jax.random.split(key, 200))[0][3]

    candidates = jax.random.normal(jax.random.key(0), (32, 4))
    keys = jax.random.split(jax.random.key(1), 4)
    each = jax.vmap(jax.vmap(episode, in_axes=(None, 0)), in_axes=(0, None))
    returns = jax.jit(each)(candidates, keys).mean(axis=1)
    best = returns.max()
    print(f"returns from {returns.min():.0f} to {best:.0f}")
    assert best > 100


if __name__ == "__main__":
    main()
