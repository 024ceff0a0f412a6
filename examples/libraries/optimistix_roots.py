"""optimistix: roots, minima, least squares and fixed points, and derivatives of their solutions."""

import jax
import jax.numpy as jnp
import optimistix as optx


def main():
    """Four problems with known answers."""
    newton = optx.Newton(rtol=1e-6, atol=1e-6)
    root = optx.root_find(lambda y, a: y**3 - a, newton, jnp.array(1.0), args=jnp.array(8.0))
    print("root", root.value)
    assert jnp.allclose(root.value, 2.0, atol=1e-4)

    def solve(a):
        return optx.root_find(lambda y, a: y**3 - a, newton, jnp.array(1.0), args=a).value

    slope = jax.grad(solve)(jnp.array(8.0))
    assert jnp.allclose(slope, 1 / 12, atol=1e-4)

    x = jnp.linspace(0, 4, 40)
    data = 2.5 * jnp.exp(-1.3 * x)
    fit = optx.least_squares(
        lambda y, _: y["scale"] * jnp.exp(-y["rate"] * x) - data,
        optx.LevenbergMarquardt(rtol=1e-6, atol=1e-6),
        {"scale": jnp.array(1.0), "rate": jnp.array(0.5)},
    )
    print("fit", fit.value["scale"], fit.value["rate"])
    assert jnp.allclose(fit.value["rate"], 1.3, atol=1e-3)

    bfgs = optx.BFGS(rtol=1e-5, atol=1e-5)
    rosenbrock = lambda y, _: (1 - y[0]) ** 2 + 100 * (y[1] - y[0] ** 2) ** 2  # noqa: E731
    low = optx.minimise(rosenbrock, bfgs, jnp.array([-1.0, 1.0]), max_steps=500)
    print("minimum", low.value)
    assert jnp.allclose(low.value, 1.0, atol=1e-2)

    lbfgs = optx.LBFGS(rtol=1e-5, atol=1e-5)
    low = optx.minimise(rosenbrock, lbfgs, jnp.array([-1.0, 1.0]), max_steps=500)
    assert jnp.allclose(low.value, 1.0, atol=1e-2)

    fixed = optx.fixed_point(
        lambda y, _: jnp.cos(y), optx.FixedPointIteration(rtol=1e-5, atol=1e-5), jnp.array(1.0)
    )
    assert jnp.allclose(fixed.value, 0.739085, atol=1e-4)


if __name__ == "__main__":
    main()
