"""`jax._src.random.threefry2x32`: the generator's functions, whose keys are two words."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd import random
from spmd.as_jax.refuse import missing

__all__ = [
    "threefry_fold_in",
    "threefry_random_bits",
    "threefry_seed",
    "threefry_split",
]
__getattr__ = missing("jax._src.random.threefry2x32")


def threefry_seed(seed: Any) -> Any:
    """The words of the key for an integer."""
    return random.key_data(random.key(seed, impl="threefry2x32"))


def threefry_split(key: Any, shape: tuple[int, ...]) -> Any:
    """The words of new keys, along leading dims of this shape."""
    return random.key_data(random.split(_key(key), shape))


def threefry_fold_in(key: Any, data: Any) -> Any:
    """The words of the key for a number below this key."""
    return random.key_data(random.fold_in(_key(key), data))


def threefry_random_bits(key: Any, bit_width: int, shape: tuple[int, ...]) -> Any:
    """Random unsigned integers of 8, 16, 32 or 64 bits."""
    return random.bits(_key(key), shape, np.dtype(f"uint{bit_width}"))


def _key(words: Any) -> Any:
    return random.wrap_key_data(words, impl="threefry2x32")
