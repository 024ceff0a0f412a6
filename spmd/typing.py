"""Names for annotations: `Array`, `ArrayLike` and `DTypeLike`, as in `jax.typing`.

A function that computes with arrays takes `ArrayLike`, arrays and numbers, and returns `Array`.
Tracers count as arrays. Lists and tuples are not array-like: `spmd.numpy.asarray` converts them.

>>> isinstance(snp.zeros(3), Array)
True
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from spmd.numpy.array_type import Array

# Arrays by the class that tracers belong to as well: annotations may be checked at run time.
ArrayLike: TypeAlias = Array | np.ndarray | np.bool_ | np.number | bool | int | float | complex
# A dtype, its name, or a type that stands for one: `float`, `numpy.int8`, `spmd.numpy.bfloat16`.
DTypeLike: TypeAlias = str | type[Any] | np.dtype

__all__ = ["Array", "ArrayLike", "DTypeLike"]
