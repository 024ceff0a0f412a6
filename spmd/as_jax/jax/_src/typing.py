"""`jax._src.typing`: the public types, and the protocols that libraries annotate with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from spmd.typing import Array, ArrayLike, DTypeLike

__all__ = [
    "Array",
    "ArrayLike",
    "DType",
    "DTypeLike",
    "DimSize",
    "DuckTypedArray",
    "Shape",
    "SupportsDType",
    "SupportsNdim",
    "SupportsShape",
    "SupportsSize",
]

DType = np.dtype
# Sizes of exported programs may be symbols.
DimSize = int | Any
Shape = Sequence[DimSize]


@runtime_checkable
class SupportsDType(Protocol):
    """A value with a dtype."""

    @property
    def dtype(self) -> Any: ...


class SupportsShape(Protocol):
    """A value with a shape."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class SupportsSize(Protocol):
    """A value with a number of elements."""

    @property
    def size(self) -> int: ...


class SupportsNdim(Protocol):
    """A value with a number of dims."""

    @property
    def ndim(self) -> int: ...


class DuckTypedArray(Protocol):
    """A value with the shape and dtype of an array."""

    @property
    def dtype(self) -> Any: ...

    @property
    def shape(self) -> Shape: ...
