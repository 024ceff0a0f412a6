"""jaxtyping: shapes and dtypes in annotations, checked when functions are called and traced."""

import jax
import jax.numpy as jnp
from beartype import beartype
from jaxtyping import Array, Float, Int, PyTree, TypeCheckError, jaxtyped


@jaxtyped(typechecker=beartype)
def attend(
    q: Float[Array, "queries dim"],
    k: Float[Array, "keys dim"],
    v: Float[Array, "keys out"],
) -> Float[Array, "queries out"]:
    """Attention of one head."""
    return jax.nn.softmax(q @ k.T / q.shape[-1] ** 0.5) @ v


@jaxtyped(typechecker=beartype)
def count(tree: PyTree[Int[Array, "..."]]) -> int:
    """How many integers there are in a tree."""
    return sum(x.size for x in jax.tree.leaves(tree))


def main():
    """Call with right and wrong shapes, outside and inside jit and vmap."""
    q, k, v = jnp.ones((2, 4)), jnp.ones((3, 4)), jnp.ones((3, 5))
    print(attend(q, k, v).shape, jax.jit(attend)(q, k, v).shape)
    print(jax.vmap(attend)(q[None], k[None], v[None]).shape)
    for f in (attend, jax.jit(attend)):
        try:
            f(q, k, jnp.ones((4, 5)))
        except TypeCheckError as error:
            print("found:", "keys" in str(error))
        else:
            raise SystemExit("a wrong shape was not found")
    print(count({"a": jnp.arange(3), "b": [jnp.arange(4)]}))
    assert isinstance(jnp.ones((2, 2)), Float[Array, "n n"])
    assert not isinstance(jnp.ones((2, 3)), Float[Array, "n n"])


if __name__ == "__main__":
    main()
