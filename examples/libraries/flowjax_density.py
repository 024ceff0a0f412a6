"""flowjax: a coupling flow of rational splines, fitted to samples of two moons."""

import jax.numpy as jnp
import jax.random as jr
from flowjax.bijections import RationalQuadraticSpline
from flowjax.distributions import Normal
from flowjax.flows import coupling_flow
from flowjax.train import fit_to_data


def moons(key, n):
    """Points on two arcs, with noise."""
    angle = jr.uniform(key, (n,), maxval=jnp.pi)
    upper = jnp.stack([jnp.cos(angle), jnp.sin(angle)], 1)
    lower = jnp.stack([1 - jnp.cos(angle), 0.5 - jnp.sin(angle)], 1)
    side = jr.bernoulli(jr.fold_in(key, 1), shape=(n, 1))
    return jnp.where(side, upper, lower) + 0.1 * jr.normal(jr.fold_in(key, 2), (n, 2))


def main():
    """Fit by maximum likelihood; draw samples."""
    x = moons(jr.key(0), 1000)
    flow = coupling_flow(
        jr.key(1),
        base_dist=Normal(jnp.zeros(2)),
        transformer=RationalQuadraticSpline(knots=6, interval=4),
        flow_layers=3,
    )
    before = -flow.log_prob(x).mean()
    flow, losses = fit_to_data(
        jr.key(2), flow, x, learning_rate=3e-3, max_epochs=8, show_progress=False
    )
    print("loss", before, *losses["train"])
    after = -flow.log_prob(x).mean()
    print("samples", flow.sample(jr.key(3), (1000,)).mean(0), "loss after", after)
    assert after < before - 0.5


if __name__ == "__main__":
    main()
