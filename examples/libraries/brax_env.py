"""brax: a physical environment, rolled out in a scan, over a batch, and differentiated."""

import jax
import jax.numpy as jnp
from brax import envs


def main():
    """Swing a pendulum with a fixed policy."""
    env = envs.get_environment("inverted_pendulum", backend="generalized")
    state = jax.jit(env.reset)(jax.random.PRNGKey(0))
    print("observation", state.obs.shape, "action", env.action_size)

    def rollout(gain, key):
        def step(state, _):
            action = jnp.clip(state.obs[1:2] * gain, -1, 1)
            state = env.step(state, action)
            return state, state.obs

        return jax.lax.scan(step, env.reset(key), length=20)[1]

    keys = jax.random.split(jax.random.PRNGKey(1), 4)
    paths = jax.jit(jax.vmap(rollout, in_axes=(None, 0)))(3.0, keys)
    print("paths", paths.shape, bool(jnp.isfinite(paths).all()))
    assert jnp.isfinite(paths).all()
    loss = lambda gain: jnp.sum(rollout(gain, keys[0])[:, 1] ** 2)  # noqa: E731
    slope = jax.jit(jax.grad(loss))(3.0)
    step = (loss(3.01) - loss(2.99)) / 0.02
    print("slope agrees:", bool(jnp.allclose(slope, step, rtol=0.1, atol=1e-4)))


if __name__ == "__main__":
    main()
