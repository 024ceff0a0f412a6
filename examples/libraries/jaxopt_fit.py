"""jaxopt: L-BFGS, projected gradient, and a gradient through the solution of a problem."""

import jax
import jax.numpy as jnp
import jaxopt


def main():
    """Three problems with known answers."""
    k1, k2 = jax.random.split(jax.random.key(0))
    x = jax.random.normal(k1, (100, 3))
    truth = jnp.array([1.0, -2.0, 0.5])
    y = x @ truth + 0.01 * jax.random.normal(k2, (100,))

    def ridge(w, penalty):
        return jnp.mean((x @ w - y) ** 2) + penalty * jnp.sum(w**2)

    solver = jaxopt.LBFGS(ridge, maxiter=100, tol=1e-5)
    w, _ = solver.run(jnp.zeros(3), penalty=0.0)
    print("L-BFGS", w)
    assert jnp.allclose(w, truth, atol=0.02)

    box = jaxopt.ProjectedGradient(ridge, jaxopt.projection.projection_non_negative, maxiter=200)
    positive, _ = box.run(jnp.ones(3), penalty=0.0)
    assert (positive >= 0).all() and positive[1] == 0

    implicit = jaxopt.GradientDescent(ridge, maxiter=500, tol=1e-6, implicit_diff=True)

    def size(penalty):
        return jnp.sum(implicit.run(jnp.zeros(3), penalty=penalty)[0] ** 2)

    slope = jax.grad(size)(0.1)
    step = (size(0.101) - size(0.099)) / 0.002
    print("slope agrees:", bool(abs(slope - step) < 0.05 * abs(step)))
    assert abs(slope - step) < 0.05 * abs(step)


if __name__ == "__main__":
    main()
