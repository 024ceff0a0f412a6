"""lineax: direct and iterative linear solves, structured operators, gradients of solutions."""

import jax
import jax.numpy as jnp
import lineax as lx


def main():
    """Solve systems of several kinds, and check the residuals."""
    k1, k2 = jax.random.split(jax.random.key(0))
    matrix = jax.random.normal(k1, (6, 6)) + 6 * jnp.eye(6)
    vector = jax.random.normal(k2, (6,))
    operator = lx.MatrixLinearOperator(matrix)
    solution = lx.linear_solve(operator, vector)
    print("auto ", jnp.abs(matrix @ solution.value - vector).max() < 1e-4)

    spd = lx.MatrixLinearOperator(matrix @ matrix.T, lx.positive_semidefinite_tag)
    for solver in (lx.Cholesky(), lx.CG(rtol=1e-6, atol=1e-6), lx.GMRES(rtol=1e-6, atol=1e-6)):
        out = jax.jit(lambda v, s=solver: lx.linear_solve(spd, v, s).value)(vector)
        error = jnp.abs(matrix @ matrix.T @ out - vector).max()
        print(f"{type(solver).__name__:8} {error < 1e-3}")

    band = lx.TridiagonalLinearOperator(jnp.full(5, 4.0), jnp.ones(4), jnp.ones(4))
    many = jax.vmap(lambda v: lx.linear_solve(band, v).value)(jnp.eye(5))
    assert jnp.allclose(many @ band.as_matrix().T, jnp.eye(5), atol=1e-5)

    def implicit(v):
        fn = lx.FunctionLinearOperator(lambda x: matrix @ x, jax.eval_shape(lambda: vector))
        return jnp.sum(lx.linear_solve(fn, v, lx.AutoLinearSolver(well_posed=None)).value ** 2)

    gradient = jax.grad(implicit)(vector)
    inverse = jnp.linalg.inv(matrix)
    assert jnp.allclose(gradient, 2 * inverse.T @ (inverse @ vector), rtol=1e-3, atol=1e-5)
    print("gradient", gradient.shape)


if __name__ == "__main__":
    main()
