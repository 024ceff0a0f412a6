"""distrax: distributions, bijectors, and a small normalizing flow fitted by maximum likelihood."""

import distrax
import jax
import jax.numpy as jnp
import optax


def main():
    """Check densities, then fit a flow to a skewed sample."""
    mixture = distrax.MixtureSameFamily(
        distrax.Categorical(probs=jnp.array([0.3, 0.7])),
        distrax.Normal(jnp.array([-2.0, 1.0]), jnp.array([0.5, 0.8])),
    )
    samples, logp = mixture.sample_and_log_prob(seed=jax.random.key(0), sample_shape=(2000,))
    print("mean", bool(abs(samples.mean() - 0.1) < 0.15), bool(jnp.isfinite(logp).all()))
    normal = distrax.MultivariateNormalDiag(jnp.zeros(3), jnp.ones(3))
    assert jnp.allclose(normal.kl_divergence(normal), 0.0)

    target = jnp.exp(0.6 * jax.random.normal(jax.random.key(1), (1000,)) + 0.3)

    def flow(params):
        layers = distrax.Chain(
            [distrax.Lambda(jnp.exp), distrax.ScalarAffine(params["shift"], jnp.exp(params["log"]))]
        )
        return distrax.Transformed(distrax.Normal(0.0, 1.0), layers)

    optimizer = optax.adam(0.05)
    params = {"shift": jnp.array(0.0), "log": jnp.array(0.0)}
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(lambda p: -flow(p).log_prob(target).mean())(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    for _ in range(200):
        params, state, _ = step(params, state)
    print(f"shift {params['shift']:.2f} scale {jnp.exp(params['log']):.2f}")
    assert abs(params["shift"] - 0.3) < 0.08


if __name__ == "__main__":
    main()
