"""TensorFlow Probability on JAX: distributions, bijectors, and Hamiltonian Monte Carlo."""

import jax
import jax.numpy as jnp
from tensorflow_probability.substrates import jax as tfp

tfd = tfp.distributions
tfb = tfp.bijectors


def main():
    """Fit a logistic regression by HMC."""
    x = jax.random.normal(jax.random.key(0), (200, 2))
    truth = jnp.array([1.5, -1.0])
    y = (jax.random.uniform(jax.random.key(1), (200,)) < jax.nn.sigmoid(x @ truth)).astype(float)

    def logdensity(w):
        prior = tfd.Normal(0.0, 2.0).log_prob(w).sum()
        return prior + tfd.Bernoulli(logits=x @ w).log_prob(y).sum()

    kernel = tfp.mcmc.SimpleStepSizeAdaptation(
        tfp.mcmc.HamiltonianMonteCarlo(logdensity, step_size=0.05, num_leapfrog_steps=5),
        num_adaptation_steps=150,
    )

    @jax.jit
    def sample(key):
        return tfp.mcmc.sample_chain(
            300, jnp.zeros(2), kernel=kernel, num_burnin_steps=200, trace_fn=None, seed=key
        )

    draws = sample(jax.random.PRNGKey(2))
    print("mean is near:", bool(jnp.abs(draws.mean(0) - truth).max() < 0.6))
    assert jnp.abs(draws.mean(0) - truth).max() < 0.6

    lognormal = tfb.Exp()(tfd.Normal(0.2, 0.5))
    value = lognormal.log_prob(1.3)
    assert jnp.allclose(value, tfd.LogNormal(0.2, 0.5).log_prob(1.3), rtol=1e-5)
    grad = jax.grad(lambda s: tfd.Gamma(s, 1.0).log_prob(2.0))(3.0)
    print("score of a gamma", grad)


if __name__ == "__main__":
    main()
