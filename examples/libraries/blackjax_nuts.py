"""blackjax: sample a banana by NUTS with window adaptation, several chains under vmap."""

import blackjax
import jax
import jax.numpy as jnp


def logdensity(position):
    """A curved density in two dimensions."""
    x, y = position["x"], position["y"]
    return -0.5 * x**2 - 0.5 * ((y - 0.5 * x**2) / 0.5) ** 2


def main():
    """Adapt, sample, and check the moments."""
    start = {"x": jnp.array(0.5), "y": jnp.array(0.5)}
    warmup = blackjax.window_adaptation(blackjax.nuts, logdensity)
    (state, parameters), _ = warmup.run(jax.random.key(0), start, num_steps=300)
    kernel = blackjax.nuts(logdensity, **parameters)

    @jax.jit
    def chain(key, state):
        def one(state, key):
            state, info = kernel.step(key, state)
            return state, (state.position, info.acceptance_rate)

        return jax.lax.scan(one, state, jax.random.split(key, 500))[1]

    keys = jax.random.split(jax.random.key(1), 4)
    positions, rates = jax.vmap(chain, in_axes=(0, None))(keys, state)
    mean_x, mean_y = positions["x"].mean(), positions["y"].mean()
    print("chains", positions["x"].shape, bool(rates.mean() > 0.6))
    assert abs(mean_x) < 0.25 and abs(mean_y - 0.5) < 0.25
    rhat = blackjax.diagnostics.potential_scale_reduction(positions["x"])
    print("R-hat below 1.1:", bool(rhat < 1.1))


if __name__ == "__main__":
    main()
