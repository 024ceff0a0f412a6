"""`jax.extend.random`: generators of keys, and the block cipher of the default one."""

from __future__ import annotations

from typing import Any

import spmd
import spmd.numpy as snp
from spmd.as_jax.refuse import missing
from spmd.lax.keys.threefry import threefry2x32, threefry2x32_p
from spmd.random import key, key_data, wrap_key_data
from spmd.random.generators import define_prng_impl, find

__all__ = [
    "define_prng_impl",
    "random_seed",
    "rbg_prng_impl",
    "seed_with_impl",
    "threefry2x32_p",
    "threefry_2x32",
    "threefry_prng_impl",
    "unsafe_rbg_prng_impl",
]
__getattr__ = missing("jax.extend.random")

threefry_prng_impl = find("jax.extend.random", "threefry2x32")
rbg_prng_impl = find("jax.extend.random", "rbg")
unsafe_rbg_prng_impl = find("jax.extend.random", "unsafe_rbg")


def random_seed(seeds: Any, impl: Any) -> Any:
    """Make typed keys of integer seeds, of the shape of those."""

    def make(seed: Any) -> Any:
        return key(seed, impl=impl)

    for _ in range(getattr(seeds, "ndim", 0)):
        make = spmd.vmap(make)
    return make(seeds)


def seed_with_impl(impl: Any, seed: Any) -> Any:
    """Make typed keys of integer seeds; the generator comes first."""
    return random_seed(seed, impl)


def threefry_2x32(keypair: Any, count: Any) -> Any:
    """Encrypt an array of uint32 words: the first half of them with the second.

    `keypair` is two words. An odd number of words is filled up with a zero. The result has the
    shape and the dtype of `count`.
    """
    count = snp.asarray(count)
    words = snp.ravel(count)
    if words.size % 2:
        words = snp.concatenate([words, snp.zeros(1, words.dtype)])
    half = words.size // 2
    cipher = wrap_key_data(snp.stack([snp.uint32(word) for word in keypair]), impl="threefry2x32")
    out = key_data(threefry2x32(cipher, words[:half], words[half:]))
    return snp.ravel(out.T)[: count.size].reshape(count.shape)
