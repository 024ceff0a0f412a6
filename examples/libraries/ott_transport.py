"""ott-jax: optimal transport between clouds of points by Sinkhorn, and gradients through it."""

import jax
import jax.numpy as jnp
from ott.geometry import costs, pointcloud
from ott.problems.linear import linear_problem
from ott.solvers.linear import sinkhorn
from ott.tools import sinkhorn_divergence


def main():
    """The plan between two clouds, and a flow that follows the divergence."""
    x = jax.random.normal(jax.random.key(0), (24, 2))
    y = 0.5 * jax.random.normal(jax.random.key(1), (30, 2)) + jnp.array([2.0, 1.0])
    geometry = pointcloud.PointCloud(x, y, epsilon=0.1, cost_fn=costs.SqEuclidean())
    out = jax.jit(sinkhorn.Sinkhorn())(linear_problem.LinearProblem(geometry))
    print("cost", out.reg_ot_cost, "primal", out.primal_cost, "converged", bool(out.converged))
    print("marginals", jnp.abs(out.matrix.sum(axis=1) - 1 / 24).max() < 1e-3, out.n_iters)
    print("moved", out.to_dual_potentials().transport(x[:2]))

    def divergence(x):
        return sinkhorn_divergence.sinkhorn_divergence(
            pointcloud.PointCloud, x=x, y=y, epsilon=0.1
        )[0]

    step = jax.jit(jax.value_and_grad(divergence))
    for _ in range(8):
        value, grad = step(x)
        x = x - 6.0 * grad
        print("divergence", value)
    assert value < 0.5


if __name__ == "__main__":
    main()
