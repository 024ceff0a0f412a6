"""numpyro: Bayesian regression by NUTS, and the same posterior by variational inference."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal


def model(x, y=None):
    """A line with noise of unknown size."""
    slope = numpyro.sample("slope", dist.Normal(0, 5))
    offset = numpyro.sample("offset", dist.Normal(0, 5))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(slope * x + offset, sigma), obs=y)


def main():
    """Infer the line, and compare the two ways."""
    x = jnp.linspace(-1, 1, 60)
    y = 1.5 * x - 0.5 + 0.2 * jax.random.normal(jax.random.key(0), (60,))
    mcmc = MCMC(NUTS(model), num_warmup=200, num_samples=300, progress_bar=False)
    mcmc.run(jax.random.key(1), x, y)
    samples = mcmc.get_samples()
    means = {name: float(v.mean()) for name, v in samples.items()}
    print({name: round(v, 1) for name, v in sorted(means.items())})
    assert abs(means["slope"] - 1.5) < 0.15 and abs(means["offset"] + 0.5) < 0.1

    guide = AutoNormal(model)
    svi = SVI(model, guide, numpyro.optim.Adam(0.03), Trace_ELBO())
    fit = svi.run(jax.random.key(2), 800, x, y, progress_bar=False)
    median = guide.median(fit.params)
    assert abs(float(median["slope"]) - means["slope"]) < 0.1

    predict = Predictive(model, samples)
    ys = predict(jax.random.key(3), jnp.array([0.0, 2.0]))["y"]
    print("predicted", ys.shape, bool(abs(ys[:, 1].mean() - 2.5) < 0.3))


if __name__ == "__main__":
    main()
