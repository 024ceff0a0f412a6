"""`jax.experimental.hijax`: values of libraries' own types under transformations.

A mutable type (`MutableHiType`, as Flax's variables have) works: its values are cells
(`core/mutable/cells.py`), and its operations run what they are lowered to as they are traced, so
that jaxprs show arrays only. A type that is not mutable can be declared; an operation over values
of it, or over arrays alone, says that it can't be used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd.as_jax import report
from spmd.as_jax.refuse import missing
from spmd.base.errors import RefusedError
from spmd.core.aval import ShapedArray as AbstractValue
from spmd.core.jvp import instantiate as instantiate_zeros
from spmd.core.mutable.cells import register_box_type, type_of_boxed, use_boxes
from spmd.core.primitive import Linear as UndefinedPrimal
from spmd.core.primitive import Zero
from spmd.sharding.mesh_scope import typeof

__all__ = [
    "AbstractValue",
    "AvalMutableQDD",
    "AvalQDD",
    "HiPrimitive",
    "HiType",
    "MutableHiType",
    "Zero",
    "aval_method",
    "aval_property",
    "control_flow_allowed_effects",
    "instantiate_zeros",
    "is_undefined_primal",
    "register_hitype",
]
__getattr__ = missing("jax.experimental.hijax")
_WHY = (
    "of libraries' own types spmd has the mutable ones; use classes registered as pytrees, and "
    "custom_jvp or custom_vjp for rules of derivatives"
)


def is_undefined_primal(x: Any) -> bool:
    """Whether an operand is one with respect to which a primitive is transposed."""
    return isinstance(x, UndefinedPrimal)


class HiPrimitive:
    """An operation that makes, reads or writes values of mutable types.

    Derived classes give `abstract_eval` and `to_lojax`, which computes it from arrays.
    """

    multiple_results = False

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name

    def bind(self, *args: Any, **params: Any) -> Any:
        """Apply it; refuse one that neither takes nor gives a value of a mutable type."""
        if not any(isinstance(type_of_boxed(x), MutableHiType) for x in args):
            self._check_makes_one(args, params)
        return use_boxes(lambda: self.to_lojax(*args, **params), args, self.name)

    def _check_makes_one(self, args: tuple[Any, ...], params: dict[str, Any]) -> None:
        result = self.abstract_eval(*map(typeof, args), **params)
        kinds = result[0] if isinstance(result, tuple) else result
        for kind in kinds if isinstance(kinds, list | tuple) else [kinds]:
            if isinstance(kind, MutableHiType | AvalQDD):
                return
        report.note("refused", f"jax.experimental.hijax.HiPrimitive ({self.name})")
        raise RefusedError(f"{self.name}: {_WHY}")

    def abstract_eval(self, *avals: Any, **params: Any) -> Any:
        """The types of the results, and the effects."""
        raise NotImplementedError(f"{self.name} has no abstract_eval")

    def to_lojax(self, *args: Any, **params: Any) -> Any:
        """The operation in terms of arrays."""
        raise NotImplementedError(f"{self.name} has no to_lojax")


class HiType:
    """The base of types that are not mutable."""

    has_qdd = False


class MutableHiType(HiType):
    """The base of types whose values change, and with them what arrays they hold."""

    has_qdd = True

    def lo_ty_qdd(self, state: Any, /) -> list[Any]:
        """The types of the arrays that a value in a state holds."""
        raise NotImplementedError(f"{type(self).__name__} has no lo_ty_qdd")

    def new_from_loval(self, state: Any, /, *values: Any) -> Any:
        """A new value in a state, of the arrays that it holds."""
        raise NotImplementedError(f"{type(self).__name__} has no new_from_loval")

    def read_loval(self, state: Any, value: Any, /) -> list[Any]:
        """The arrays that a value in a state holds."""
        raise NotImplementedError(f"{type(self).__name__} has no read_loval")

    def update_from_loval(self, state: Any, value: Any, /, *values: Any) -> None:
        """Bring a value into a state, with the arrays that it holds then."""
        raise NotImplementedError(f"{type(self).__name__} has no update_from_loval")


class AvalQDD:
    """A type, with the state of a value of it."""

    def __init__(self, aval: Any, qdd: Any):
        self.aval, self.qdd = aval, qdd


class AvalMutableQDD:
    """A type, with the state of a value of it that an operation may change."""

    def __init__(self, aval: Any, mutable_qdd: Any):
        self.aval, self.mutable_qdd = aval, mutable_qdd


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


def register_hitype(val_cls: type, typeof_fn: Callable[[Any], Any]) -> None:
    """Declare a class whose values are of a type; `typeof_fn(value)` is that type."""
    register_box_type(val_cls, typeof_fn)
