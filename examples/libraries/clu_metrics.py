"""clu: metrics that are collections, gathered in jitted steps, and an inventory of parameters."""

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from clu import metrics, parameter_overview


@flax.struct.dataclass
class Metrics(metrics.Collection):
    """What an evaluation reports."""

    accuracy: metrics.Accuracy
    loss: metrics.Average.from_output("loss")
    last: metrics.LastValue.from_output("loss")


def main():
    """Merge the metrics of four batches."""
    model = nn.Dense(3)
    x = jax.random.normal(jax.random.key(0), (4, 16, 5))
    y = jax.random.randint(jax.random.key(1), (4, 16), 0, 3)
    params = model.init(jax.random.key(2), x[0])
    print(parameter_overview.get_parameter_overview(params["params"], include_stats=False))

    @jax.jit
    def evaluate(so_far, x, y):
        logits = model.apply(params, x)
        loss = -jnp.take_along_axis(nn.log_softmax(logits), y[:, None], 1)[:, 0]
        return so_far.merge(Metrics.single_from_model_output(logits=logits, labels=y, loss=loss))

    so_far = Metrics.empty()
    for batch in zip(x, y, strict=True):
        so_far = evaluate(so_far, *batch)
    print({name: float(value) for name, value in so_far.compute().items()})
    logits = jax.vmap(lambda x: model.apply(params, x))(x)
    assert jnp.allclose(so_far.compute()["accuracy"], (logits.argmax(-1) == y).mean())


if __name__ == "__main__":
    main()
