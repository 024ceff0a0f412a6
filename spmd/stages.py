"""The stages of a jitted call, as in `jax.stages`: what `trace`, `lower` and `compile` return.

>>> lowered = spmd.jit(lambda x: x + 1).lower(1.0)
>>> isinstance(lowered, Lowered), isinstance(lowered.compile(), Compiled)
(True, True)
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, runtime_checkable

from spmd.compile.dispatch.stages import ArgInfo, Compiled, Lowered, Traced

__all__ = ["ArgInfo", "Compiled", "CompilerOptions", "Lowered", "Traced", "Wrapped"]

CompilerOptions: TypeAlias = dict[str, str | bool | int | float]


@runtime_checkable
class Wrapped(Protocol):
    """A function that can be called, or taken through its stages: what `jit` and `pmap` return.

    >>> isinstance(spmd.jit(abs), Wrapped), isinstance(abs, Wrapped)
    (True, False)
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        ...

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Trace a call with arguments like these, without running it."""
        ...

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Trace a call, and run the compiler's passes."""
        ...
