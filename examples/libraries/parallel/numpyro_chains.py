"""numpyro: chains of NUTS on each process, and the samples of all of them.

spmdrun -n 2 --as-jax examples/libraries/parallel/numpyro_chains.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.experimental import multihost_utils
from numpyro.infer import MCMC, NUTS


def model(x, y=None):
    """Linear regression with unknown noise."""
    slope = numpyro.sample("slope", dist.Normal(0, 2))
    offset = numpyro.sample("offset", dist.Normal(0, 2))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(slope * x + offset, noise), obs=y)


def main():
    """The posterior of two chains a process is that of the line that made the points."""
    numbers = np.random.default_rng(0)
    x = jnp.linspace(-1, 1, 60)
    y = 1.5 * x - 0.5 + 0.2 * numbers.normal(size=60).astype(np.float32)
    sampler = MCMC(
        NUTS(model), num_warmup=200, num_samples=200, num_chains=2,
        chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    sampler.run(jax.random.key(jax.process_index()), x, y)
    slopes = np.asarray(sampler.get_samples()["slope"])
    everyone = multihost_utils.process_allgather(slopes)
    print(f"process {jax.process_index()}: slope {everyone.mean():.2f} of {everyone.size} samples")
    assert abs(everyone.mean() - 1.5) < 0.15
    assert everyone.size == 400 * jax.process_count()


if __name__ == "__main__":
    main()
