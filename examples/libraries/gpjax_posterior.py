"""gpjax: the posterior of a Gaussian process, its parameters fitted by scipy's L-BFGS."""

import gpjax as gpx
import jax
import jax.numpy as jnp

jax.config.update("jax_enable_x64", True)


def main():
    """Fit a curve, and predict it."""
    x = jnp.sort(jax.random.uniform(jax.random.key(0), (40, 1), minval=-3.0, maxval=3.0), axis=0)
    y = jnp.sin(4 * x) + jnp.cos(2 * x) + 0.2 * jax.random.normal(jax.random.key(1), x.shape)
    data = gpx.Dataset(X=x, y=y)
    prior = gpx.gps.Prior(
        mean_function=gpx.mean_functions.Zero(), kernel=gpx.kernels.RBF(lengthscale=0.5)
    )
    posterior = prior * gpx.likelihoods.Gaussian()
    fitted, history = gpx.fit_scipy(
        model=posterior,
        objective=lambda p, d: -gpx.objectives.conjugate_mll(p, d),
        train_data=data,
        verbose=False,
    )
    print("loss", history[0], history[-1])
    at = x[::8] + 0.01
    out = fitted.likelihood(fitted.predict(at, train_data=data))
    print("means", out.mean)
    print("variances", out.variance)
    assert jnp.abs(out.mean - (jnp.sin(4 * at) + jnp.cos(2 * at))[:, 0]).max() < 0.5


if __name__ == "__main__":
    main()
