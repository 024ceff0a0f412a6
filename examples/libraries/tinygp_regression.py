"""tinygp: Gaussian process regression, its kernel fitted by the likelihood of the data."""

import jax
import jax.numpy as jnp
import optax
from tinygp import GaussianProcess, kernels


def build(params, x):
    """A process of two kernels with the noise of the data."""
    kernel = jnp.exp(params["scale"]) * kernels.Matern52(jnp.exp(params["length"]))
    kernel += jnp.exp(params["slow"]) * kernels.ExpSquared(5.0)
    return GaussianProcess(kernel, x, diag=jnp.exp(params["noise"]), mean=params["mean"])


def main():
    """Fit, and predict between the points."""
    x = jnp.sort(jax.random.uniform(jax.random.key(0), (50,), minval=0.0, maxval=10.0))
    y = jnp.sin(x) + 0.3 * x + 0.1 * jax.random.normal(jax.random.key(1), (50,))
    names = "scale", "length", "slow", "noise", "mean"
    params = {name: jnp.zeros(()) for name in names}
    optimizer = optax.adam(0.05)

    @jax.jit
    def step(params, opt):
        loss, grads = jax.value_and_grad(lambda p: -build(p, x).log_probability(y))(params)
        updates, opt = optimizer.update(grads, opt)
        return optax.apply_updates(params, updates), opt, loss

    opt = optimizer.init(params)
    for _ in range(150):
        params, opt, loss = step(params, opt)
    print("loss", loss, {name: float(value) for name, value in params.items()})
    at = jnp.linspace(1.0, 9.0, 9)
    _, cond = build(params, x).condition(y, at)
    print("means", cond.loc)
    print("variances", cond.variance)
    assert jnp.abs(cond.loc - jnp.sin(at) - 0.3 * at).max() < 0.2
    fast = GaussianProcess(kernels.quasisep.Matern32(1.5), x, diag=0.01)
    print(
        "in linear time",
        fast.log_probability(y),
        jax.grad(
            lambda s: GaussianProcess(kernels.quasisep.Matern32(s), x, diag=0.01).log_probability(y)
        )(1.5),
    )


if __name__ == "__main__":
    main()
