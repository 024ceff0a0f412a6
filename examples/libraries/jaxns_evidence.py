"""jaxns: nested sampling of a small problem, whose evidence is known."""

import jax
import jax.numpy as jnp
from jaxns.core import NestedSampler
from jaxns.model import Model
from jaxns.priors import Prior
from tensorflow_probability.substrates import jax as tfp

tfpd = tfp.distributions


def narrow():
    """A standard normal in two dims, and the likelihood of a narrow Gaussian."""
    x = Prior(tfpd.Normal(loc=jnp.zeros(2), scale=jnp.ones(2)), name="x").realise()
    return tfpd.Normal(0.5, 0.3).log_prob(x).sum()


def main():
    """Estimate the evidence, and compare."""
    state = NestedSampler(model=Model(prior_model=narrow)).run(key=jax.random.PRNGKey(0))
    results = state.to_result().trim()
    exact = 2 * tfpd.Normal(0.0, jnp.sqrt(1.09)).log_prob(0.5)
    print("evidence", results.log_Z_mean, "+-", results.log_Z_uncert, "exact", exact)
    assert abs(results.log_Z_mean - exact) < 4 * results.log_Z_uncert


if __name__ == "__main__":
    main()
