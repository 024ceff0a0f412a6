"""flax.linen: a small convolutional network with batch norm and dropout, and its training state."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state


class Net(nn.Module):
    """Two convolutions and a dense layer."""

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.relu(nn.Conv(8, (3, 3))(x))
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(16, (3, 3))(x)).mean(axis=(1, 2))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(2)(x)


class State(train_state.TrainState):
    """With the running statistics of batch norm."""

    batch_stats: dict


def main():
    """Learn which images have a bright row, and which a bright column."""
    key = jax.random.key(0)
    images = jax.random.normal(key, (128, 8, 8, 1)) * 0.3
    labels = jnp.arange(128) % 2
    at = jnp.arange(128) // 2 % 8
    rows = jax.nn.one_hot(at, 8)[:, :, None, None]
    columns = jax.nn.one_hot(at, 8)[:, None, :, None]
    images = images + jnp.where(labels[:, None, None, None] == 0, rows, columns)

    net = Net()
    variables = net.init(jax.random.key(1), images[:1], train=False)
    print(nn.tabulate(net, jax.random.key(0))(images[:1], train=False).count("Conv_"))
    state = State.create(
        apply_fn=net.apply,
        params=variables["params"],
        tx=optax.adam(1e-2),
        batch_stats=variables["batch_stats"],
    )

    @jax.jit
    def step(state, key):
        def loss(params):
            logits, updates = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                images,
                train=True,
                mutable=["batch_stats"],
                rngs={"dropout": key},
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), updates

        (value, updates), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"])
        return state, value

    for key in jax.random.split(jax.random.key(2), 60):
        state, value = step(state, key)
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    right = (net.apply(variables, images, train=False).argmax(-1) == labels).mean()
    print(f"loss {value:.3f}, right {right:.3f}")
    assert right > 0.9


if __name__ == "__main__":
    main()
