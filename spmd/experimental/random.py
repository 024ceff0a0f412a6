"""Random numbers from a generator that keeps its state, `stateful_rng`.

A generator is a key and a counter in a mutable array: each draw folds the counter into the key and
adds 1. Inside `jit` the counter is an input and a result of the program. The numbers are JAX's.
"""

from __future__ import annotations

import operator
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import spmd.numpy as snp
from spmd import random
from spmd.base.errors import ArgumentError
from spmd.base.source import current_source
from spmd.base.tree import register_dataclass
from spmd.ref import Ref, new_ref
from spmd.sharding.call_cache import is_evaluated

if TYPE_CHECKING:
    from spmd.sharding.array import Array

__all__ = ["StatefulPRNG", "stateful_rng"]


def _shape(size: Any, *like: Any) -> tuple[int, ...]:
    if size is None:
        return np.broadcast_shapes(*(snp.shape(x) for x in like))
    return (operator.index(size),) if np.ndim(size) == 0 else tuple(map(operator.index, size))


@register_dataclass
@dataclass(frozen=True, eq=False)
class StatefulPRNG:
    """A generator with a state, which `stateful_rng` makes; every draw changes it.

    It is an argument of functions, but not a result, as its counter is a mutable array.
    """

    _base_key: Array
    _counter: Ref

    def key(self, shape: int | Sequence[int] = ()) -> Array:
        """A new key, or an array of them, of the dtype of the generator's.

        Raises an `ArgumentError` for a generator that was split, outside of `vmap`.

        >>> stateful_rng(0).key().dtype
        key<fry>
        """
        if self._base_key.shape:
            raise ArgumentError(
                f"{current_source()}: StatefulPRNG: this generator was split into "
                f"{self._base_key.shape}; map over it with vmap, or use spawn, whose results are "
                "generators of their own"
            )
        key = random.fold_in(self._base_key, self._counter[...])
        self._counter[...] += 1
        parts = _shape(shape)
        return random.split(key, parts) if parts else key

    def random(self, size: Any = None, dtype: Any = float) -> Array:
        """Draw numbers between 0 and 1, of shape `size`.

        >>> stateful_rng(42).random(2).shape
        (2,)
        """
        return random.uniform(self.key(), _shape(size), dtype=dtype)

    def uniform(
        self, low: Any = 0, high: Any = 1, size: Any = None, *, dtype: Any = float
    ) -> Array:
        """Draw numbers between `low` and `high`; the shape is `size`, or that of both.

        >>> stateful_rng(42).uniform()
        Array(0.5302608, dtype=float32)
        """
        shape = _shape(size, low, high)
        return random.uniform(self.key(), shape, minval=low, maxval=high, dtype=dtype)

    def normal(
        self, loc: Any = 0, scale: Any = 1, size: Any = None, *, dtype: Any = float
    ) -> Array:
        """Draw normal numbers of mean `loc` and standard deviation `scale`.

        >>> stateful_rng(42).normal(size=(2, 3)).shape
        (2, 3)
        """
        drawn = random.normal(self.key(), _shape(size, loc, scale), dtype)
        return (snp.asarray(loc) + snp.asarray(scale) * drawn).astype(drawn.dtype)

    def integers(self, low: Any, high: Any = None, size: Any = None, *, dtype: Any = int) -> Array:
        """Draw integers from `low` up to `high`, which is left out; `high` alone begins at 0.

        >>> bool((stateful_rng(42).integers(10, size=100) < 10).all())
        True
        """
        low, high = (0, low) if high is None else (low, high)
        return random.randint(self.key(), _shape(size, low, high), low, high, dtype=dtype)

    def split(self, num: int | Sequence[int]) -> StatefulPRNG:
        """An array of new generators, for `vmap` to map over.

        >>> spmd.vmap(lambda rng: rng.uniform())(stateful_rng(123).split(3)).shape
        (3,)
        """
        return StatefulPRNG(self.key(num), new_ref(snp.zeros(_shape(num), int)))

    def spawn(self, n_children: int) -> list[StatefulPRNG]:
        """A list of new generators.

        >>> len(stateful_rng(123).spawn(2))
        2
        """
        return [StatefulPRNG(key, new_ref(0)) for key in self.key(n_children)]


def stateful_rng(seed: Any = None, *, impl: Any = None) -> StatefulPRNG:
    """Make a generator with a state from a seed, or from the system's randomness.

    `impl` names the generator of keys as for `random.key`. Raises an `ArgumentError` without a
    seed inside a transformation: the program would draw the same numbers in each call.

    >>> rng = stateful_rng(42)
    >>> draw = spmd.jit(rng.uniform)
    >>> draw(), draw()
    (Array(0.5302608, dtype=float32), Array(0.72766423, dtype=float32))
    """
    if seed is None:
        if not is_evaluated():
            raise ArgumentError(
                f"{current_source()}: stateful_rng: give a seed; inside a transformation one of "
                "the system's randomness would be the same in every call"
            )
        seed = np.int64(secrets.randbits(63))
    return StatefulPRNG(random.key(seed, impl=impl), new_ref(0))
