"""The class that users name: `isinstance(x, spmd.Array)` holds for arrays and for tracers.

Inside the package `sharding.array.Array` means an array with values, and `Tracer` one without.
The author of a traced function need not know the difference: an array outside `jit` is an array
inside it.

>>> isinstance(snp.zeros(3), spmd.Array), isinstance(np.zeros(3), spmd.Array)
(True, False)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spmd.core.trace import Tracer
from spmd.sharding.array import Array as _WithValues

if TYPE_CHECKING:
    # Type checkers see the class with the methods.
    from spmd.sharding.array import Array
else:

    class _ArrayType(type):
        """Answers for both sorts of arrays, and shows the methods of those with values."""

        def __instancecheck__(cls, x: Any) -> bool:
            return isinstance(x, (_WithValues, Tracer))

        def __subclasscheck__(cls, other: Any) -> bool:
            # The class of a tracer is none, as in JAX: dispatch on types tells the two apart.
            return other is cls or issubclass(other, _WithValues)

        def __getattr__(cls, name: str) -> Any:
            return getattr(_WithValues, name)

        def __dir__(cls) -> list[str]:
            return dir(_WithValues)

    class Array(metaclass=_ArrayType):
        """An immutable n-dimensional array, or a tracer that stands for one.

        Made by `spmd.numpy` functions, `device_put`, and every transformed function. Operators and
        methods are those of NumPy arrays; `x.at[i].set(v)` stands for in-place updates."""

        __module__ = "spmd"

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            raise TypeError("Array: arrays are made by functions, spmd.numpy.array(...) first")
