"""diffrax: an ordinary and a stochastic differential equation, and a neural one that is trained."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax


def main():
    """Compare with exact solutions, then fit a spiral."""
    decay = diffrax.ODETerm(lambda t, y, rate: -rate * y)
    out = diffrax.diffeqsolve(
        decay, diffrax.Tsit5(), 0.0, 3.0, 0.1, jnp.array([2.0]), args=0.7,
        saveat=diffrax.SaveAt(ts=jnp.linspace(0, 3, 7)),
        stepsize_controller=diffrax.PIDController(rtol=1e-6, atol=1e-6),
    )  # fmt: skip
    exact = 2 * jnp.exp(-0.7 * out.ts)
    print(f"decay: {out.stats['num_steps']} steps")
    assert jnp.allclose(out.ys[:, 0], exact, rtol=1e-4)

    path = diffrax.VirtualBrownianTree(0.0, 1.0, tol=1e-3, shape=(), key=jax.random.key(0))
    noise = diffrax.ControlTerm(lambda t, y, args: 0.1 * y, path)
    drift = diffrax.ODETerm(lambda t, y, args: -y)
    terms = diffrax.MultiTerm(drift, noise)
    sde = diffrax.diffeqsolve(terms, diffrax.EulerHeun(), 0.0, 1.0, 0.01, jnp.array(1.0))
    assert 0.2 < sde.ys[0] < 0.6

    ts = jnp.linspace(0, 2, 20)
    target = jnp.exp(-0.3 * ts)[:, None] * jnp.stack([jnp.cos(2 * ts), jnp.sin(2 * ts)], -1)
    field = eqx.nn.MLP(2, 2, 24, 1, activation=jnp.tanh, key=jax.random.key(1))
    optimizer = optax.adam(2e-2)
    state = optimizer.init(eqx.filter(field, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(field, state):
        def loss(field):
            term = diffrax.ODETerm(lambda t, y, args: field(y))
            ys = diffrax.diffeqsolve(
                term, diffrax.Heun(), 0.0, 2.0, 0.05, target[0], saveat=diffrax.SaveAt(ts=ts)
            ).ys
            return jnp.mean((ys - target) ** 2)

        value, grads = eqx.filter_value_and_grad(loss)(field)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(field, updates), state, value

    for _ in range(150):
        field, state, value = step(field, state)
    print("neural ODE:", value < 5e-3)
    assert value < 5e-3


if __name__ == "__main__":
    main()
