"""jaxlie: poses in space, and Gauss-Newton on their manifold that aligns two clouds of points."""

import jax
import jax.numpy as jnp
import jaxlie


def main():
    """Find the pose that moved a cloud."""
    key = jax.random.key(0)
    points = jax.random.normal(key, (40, 3))
    true = jaxlie.SE3.from_rotation_and_translation(
        jaxlie.SO3.from_rpy_radians(0.3, -0.2, 0.9), jnp.array([0.5, -1.0, 2.0])
    )
    moved = jax.vmap(true.apply)(points) + 0.01 * jax.random.normal(key, (40, 3))

    @jax.jit
    def step(pose):
        def residual(delta):
            return (jax.vmap((pose @ jaxlie.SE3.exp(delta)).apply)(points) - moved).reshape(-1)

        jacobian = jax.jacfwd(residual)(jnp.zeros(6))
        delta = jnp.linalg.lstsq(jacobian, -residual(jnp.zeros(6)))[0]
        return pose @ jaxlie.SE3.exp(delta), jnp.sum(residual(jnp.zeros(6)) ** 2)

    pose = jaxlie.SE3.identity()
    for _ in range(6):
        pose, error = step(pose)
        print("error", error)
    print("pose", pose.log(), "off by", jnp.abs((true.inverse() @ pose).log()).max())
    grad = jaxlie.manifold.grad(lambda p: jnp.sum((p.apply(points[0]) - moved[0]) ** 2))(true)
    print("gradient on the manifold", grad)
    chain = jax.lax.associative_scan(
        lambda a, b: a @ b, jaxlie.SO2.exp(jnp.linspace(0.1, 0.5, 5)[:, None])
    )
    print("angles of a chain", chain.log()[:, 0])
    assert error < 0.1 and jnp.allclose(pose.translation(), true.translation(), atol=0.02)


if __name__ == "__main__":
    main()
