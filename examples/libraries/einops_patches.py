"""einops: cut images into patches and put them together again, reduce, and contract by names."""

import jax
import jax.numpy as jnp
from einops import einsum, pack, rearrange, reduce, repeat, unpack


def main():
    """Compare each pattern with jax.numpy."""
    images = jax.random.normal(jax.random.key(0), (2, 8, 12, 3))
    cut = jax.jit(lambda x: rearrange(x, "b (h p) (w q) c -> b (h w) (p q c)", p=4, q=4))
    patches = cut(images)
    assert patches.shape == (2, 6, 48)
    back = rearrange(patches, "b (h w) (p q c) -> b (h p) (w q) c", h=2, p=4, q=4)
    assert jnp.array_equal(back, images)
    pooled = reduce(images, "b (h 2) (w 2) c -> b h w c", "max")
    assert pooled.shape == (2, 4, 6, 3)
    grads = jax.grad(lambda x: reduce(x, "b h w c -> b", "mean").sum())(images)
    assert jnp.allclose(grads, 1 / (8 * 12 * 3))
    scores = einsum(patches, patches, "b i d, b j d -> b i j")
    assert jnp.allclose(scores, patches @ patches.transpose(0, 2, 1), rtol=1e-4, atol=1e-4)
    packed, shapes = pack([images, pooled], "b * c")
    first, second = unpack(packed, shapes, "b * c")
    assert jnp.array_equal(first, images) and jnp.array_equal(second, pooled)
    print(patches.shape, pooled.shape, repeat(pooled[0, 0, 0], "c -> c k", k=2).shape)


if __name__ == "__main__":
    main()
