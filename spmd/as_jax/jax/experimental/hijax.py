"""`jax.experimental.hijax`: types of their users' own in jaxprs, which spmd has not.

The classes can be subclassed and the functions called while a library is imported; a primitive or a
value of such a type says that it can't be used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd.as_jax import report
from spmd.as_jax.refuse import missing
from spmd.base.errors import RefusedError
from spmd.core.aval import ShapedArray as AbstractValue
from spmd.core.jvp import instantiate as instantiate_zeros
from spmd.core.primitive import Linear as UndefinedPrimal

__all__ = [
    "AbstractValue",
    "AvalMutableQDD",
    "AvalQDD",
    "HiPrimitive",
    "HiType",
    "MutableHiType",
    "aval_method",
    "aval_property",
    "control_flow_allowed_effects",
    "instantiate_zeros",
    "is_undefined_primal",
    "register_hitype",
]
__getattr__ = missing("jax.experimental.hijax")
_WHY = "spmd has no types of its users' own in jaxprs; use classes registered as pytrees"


def is_undefined_primal(x: Any) -> bool:
    """Whether an operand is one with respect to which a primitive is transposed."""
    return isinstance(x, UndefinedPrimal)


class HiPrimitive:
    """A primitive over such types: it has a name, and can't be applied."""

    def __init__(self, name: str):
        self.name = name

    def bind(self, *args: Any, **params: Any) -> Any:
        """Refuse."""
        report.note("refused", f"jax.experimental.hijax.HiPrimitive ({self.name})")
        raise RefusedError(f"{self.name}: {_WHY}")


class HiType:
    """The base of such types."""


class MutableHiType(HiType):
    """The base of such types whose values change."""


class AvalQDD:
    """A type, with what is known of a value that changes."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise RefusedError(f"AvalQDD: {_WHY}")


class AvalMutableQDD(AvalQDD):
    """The same of a value that may still change."""


class aval_property:
    """A property of the values of a type, from a function of their aval."""

    def __init__(self, fget: Callable[..., Any]):
        self.fget = fget


class aval_method:
    """A method of the values of a type, from a function of their aval."""

    def __init__(self, fun: Callable[..., Any]):
        self.fun = fun


class _AllowedEffects:
    def add_type(self, effect: type) -> None:
        """Nothing: no operation of spmd has such effects."""


control_flow_allowed_effects = _AllowedEffects()


def register_hitype(val_cls: type, typeof_fn: Callable[..., Any]) -> None:
    """Nothing: a value of this class is no array, as operations say that get one."""
