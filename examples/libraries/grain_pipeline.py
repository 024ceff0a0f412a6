"""grain: a deterministic input pipeline that feeds a jitted training step."""

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np


def main():
    """Shuffle, map, batch; then fit a line to what comes out."""
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(512, 2)).astype(np.float32)
    rows = [{"x": x, "y": np.float32(x @ [2.0, -1.0] + 0.5)} for x in xs]
    data = (
        grain.MapDataset.source(rows)
        .shuffle(seed=1)
        .map(lambda row: {**row, "x": np.append(row["x"], np.float32(1.0))})
        .repeat(4)
        .batch(32, drop_remainder=True)
    )

    @jax.jit
    def step(w, batch):
        loss = lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2)  # noqa: E731
        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    w, seen = jnp.zeros(3), 0
    for batch in data.to_iter_dataset():
        w, _ = step(w, batch)
        seen += len(batch["y"])
    print(seen, "rows", w)
    assert jnp.allclose(w, jnp.array([2.0, -1.0, 0.5]), atol=1e-2)


if __name__ == "__main__":
    main()
