"""quax: arrays with units and low-rank matrices, which unmodified functions of JAX take."""

import equinox as eqx
import jax
import jax.numpy as jnp
import quax
from quax.examples.lora import LoraArray
from quax.examples.unitful import Unitful, kilograms, meters, seconds


@jax.jit
@quax.quaxify
def energy(mass, speed, height, gravity):
    """Kinetic and potential energy; the units must agree."""
    return mass * speed**2 * 0.5 + mass * height * gravity


def main():
    """Units through a function, and a linear layer whose update has rank 2."""
    out = energy(
        Unitful(jnp.array(2.0), kilograms),
        Unitful(jnp.arange(3.0), {meters: 1, seconds: -1}),
        Unitful(jnp.array(4.0), meters),
        Unitful(jnp.array(9.81), {meters: 1, seconds: -2}),
    )
    print("energy", out.array, sorted((str(d), n) for d, n in out.units.items()))
    linear = eqx.nn.Linear(10, 12, key=jax.random.key(0))
    low_rank = LoraArray(linear.weight, rank=2, key=jax.random.key(1))
    lora = eqx.tree_at(lambda m: m.weight, linear, low_rank)
    x = jax.random.normal(jax.random.key(2), (10,))

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model, x):
        return jnp.sum((quax.quaxify(model)(x) - 1.0) ** 2)

    value, grads = loss(lora, x)
    print("loss", value, "of the plain layer", jnp.sum((linear(x) - 1.0) ** 2))
    print("gradients", jnp.abs(grads.weight.a).sum(), jnp.abs(grads.weight.b).sum())
    for _ in range(100):
        value, grads = loss(lora, x)
        lora = eqx.apply_updates(lora, jax.tree.map(lambda g: -0.01 * g, grads))
    print("loss after training", value)
    assert value < 1e-3


if __name__ == "__main__":
    main()
