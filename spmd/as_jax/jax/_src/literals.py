"""`jax._src.literals`: the classes of constants in JAX's jaxprs, which spmd keeps as arrays."""

from __future__ import annotations

from typing import Any


class TypedNdArray:
    """No value is one."""


class _Typed:
    """A Python number with a dtype. spmd makes none: a number is one until an operation takes it.

    Operations of spmd take it as the number that it is.
    """

    dtype: Any

    def __new__(cls, value: Any, dtype: Any) -> Any:
        made = super().__new__(cls, value)  # type: ignore[call-arg]
        made.dtype = dtype
        return made

    def __repr__(self) -> str:
        return f"{type(self).__name__}({super().__repr__()}, {self.dtype})"


class TypedInt(_Typed, int):
    """An int with a dtype."""


class TypedFloat(_Typed, float):
    """A float with a dtype."""


class TypedComplex(_Typed, complex):
    """A complex number with a dtype."""
