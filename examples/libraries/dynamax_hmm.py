"""dynamax: a hidden Markov model fitted by expectation maximisation, and a Kalman smoother."""

import jax
import jax.numpy as jnp
from dynamax.hidden_markov_model import GaussianHMM
from dynamax.linear_gaussian_ssm import LinearGaussianSSM


def main():
    """Sample from models, and infer what is hidden."""
    model = GaussianHMM(num_states=3, emission_dim=2)
    params, _ = model.initialize(
        jax.random.key(0),
        emission_means=jnp.array([[-3.0, 0.0], [0.0, 3.0], [3.0, 0.0]]),
        emission_covariances=jnp.tile(jnp.eye(2), (3, 1, 1)),
    )
    states, emissions = model.sample(params, jax.random.key(1), 200)
    start, props = model.initialize(
        jax.random.key(2),
        emission_means=jnp.array([[-2.0, 0.0], [0.0, 2.0], [2.0, 0.0]]),
        emission_covariances=jnp.tile(2.0 * jnp.eye(2), (3, 1, 1)),
    )
    fitted, likelihoods = model.fit_em(start, props, emissions, num_iters=12, verbose=False)
    print("likelihoods", likelihoods[::3])
    print("means", fitted.emissions.means)
    guess = model.most_likely_states(fitted, emissions)
    print("right", (guess == states).mean())
    linear = LinearGaussianSSM(state_dim=3, emission_dim=2)
    params, _ = linear.initialize(jax.random.key(3))
    _, seen = linear.sample(params, jax.random.key(4), 50)
    smooth = jax.jit(linear.smoother)(params, seen)
    print("smoothed", smooth.marginal_loglik, smooth.smoothed_means[::20])
    assert likelihoods[-1] > likelihoods[0] and (guess == states).mean() > 0.8


if __name__ == "__main__":
    main()
