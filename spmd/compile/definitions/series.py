"""Special functions that are series and fractions: their `impl` itself, over traced values.

The one idea: an `impl` takes the namespace of its arrays. NumPy's gives the meaning; `Traced` has
the same functions as operations of a program, so that each special function is written once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.compile.definitions import COMPLEX_SERIES, SERIES
from spmd.compile.definitions.table import defines, write_definitions
from spmd.core.aval import typeof
from spmd.core.ir import ClosedJaxpr, Eqn
from spmd.core.primitive import Primitive
from spmd.core.structural import broadcast_in_dim
from spmd.lax import (
    arithmetic,
    elementwise,
    special,
    special_beta,
    special_hypergeometric,
    special_integrals,
    special_oscillating,
)
from spmd.lax.array import full_like
from spmd.lax.control_while import while_loop
from spmd.lax.convert import bitcast_convert_type, convert_element_type
from spmd.lax.logic import bitwise_and, eq, lt, ne, select
from spmd.lax.reduce import reduce_or

_MODULES = (
    special,
    special_beta,
    special_hypergeometric,
    special_integrals,
    special_oscillating,
)


def write_series(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Write these functions as programs, and no other definition.

    Of 64 numbers NumPy takes 0.05 to 1.1 ms in each call, a program 1 to 20 us; compiling it takes
    30 to 350 ms once.
    """
    return write_definitions(closed, _is_series)


def _is_series(eqn: Eqn) -> bool:
    return eqn.prim.name in SERIES


def _arrays(*operands: Any) -> list[Any]:
    """Operands of one shape; Python's numbers become float64."""
    given = [np.float64(x) if isinstance(x, (int, float)) else x for x in operands]
    shape = np.broadcast_shapes(*(typeof(x).shape for x in given))
    return [x if typeof(x).shape == shape else broadcast_in_dim(x, shape, ()) for x in given]


def _of_two(function: Callable[..., Any]) -> Callable[..., Any]:
    return staticmethod(lambda x, y: function(*_arrays(x, y)))


class Traced:
    """NumPy's functions as operations on traced arrays, as far as special functions go.

    Arrays are float64 or complex128.
    """

    abs = staticmethod(arithmetic.abs)
    exp = staticmethod(elementwise.exp)
    log = staticmethod(arithmetic.log)
    log1p = staticmethod(elementwise.log1p)
    sqrt = staticmethod(arithmetic.sqrt)
    sin = staticmethod(elementwise.sin)
    cos = staticmethod(elementwise.cos)
    tan = staticmethod(elementwise.tan)
    sign = staticmethod(arithmetic.sign)
    floor = staticmethod(arithmetic.floor)
    isfinite = staticmethod(arithmetic.is_finite)
    minimum, maximum = _of_two(arithmetic.min), _of_two(arithmetic.max)
    fmod = _of_two(arithmetic.rem)

    @staticmethod
    def rint(x: Any) -> Any:
        return arithmetic.round(x, arithmetic.RoundingMethod.TO_NEAREST_EVEN)

    @staticmethod
    def isnan(x: Any) -> Any:
        return ne(x, x)

    @staticmethod
    def isinf(x: Any) -> Any:
        return eq(arithmetic.abs(x), full_like(x, np.inf))

    @staticmethod
    def copysign(x: Any, y: Any) -> Any:
        size, y = _arrays(arithmetic.abs(x), y)
        # -0 has a minus, too.
        has_minus = lt(bitcast_convert_type(y, np.int64), np.int64(0))
        return select(has_minus, arithmetic.neg(size), size)

    @staticmethod
    def where(condition: Any, x: Any, y: Any) -> Any:
        condition, x, y = _arrays(condition, x, y)
        if typeof(x).dtype != typeof(y).dtype:
            x, y = (convert_element_type(v, np.complex128) for v in (x, y))
        return select(condition, x, y)

    @staticmethod
    def clip(x: Any, low: Any, high: Any) -> Any:
        return Traced.minimum(Traced.maximum(x, low), high)

    @staticmethod
    def ones_like(x: Any) -> Any:
        return full_like(x, 1)

    @staticmethod
    def zeros_like(x: Any) -> Any:
        return full_like(x, 0)

    full_like = staticmethod(full_like)

    @staticmethod
    def asarray(x: Any) -> Any:
        return x

    @staticmethod
    def atleast_1d(x: Any) -> Any:
        return x.reshape(x.shape or (1,))

    @staticmethod
    def broadcast_arrays(*arrays: Any) -> list[Any]:
        return _arrays(*arrays)

    @staticmethod
    def converge(step: Callable[..., Any], state: Any, most: int, first: int) -> Any:
        """The loop of `special_values.converge`: it counts in float64, as its steps compute."""

        def goes_on(carry: Any) -> Any:
            k, _, moving = carry
            some = reduce_or(moving, range(moving.ndim))
            return bitwise_and(some, lt(k, np.float64(first + most)))

        def again(carry: Any) -> Any:
            k, state, _ = carry
            state, moving = step(k, *state)
            return arithmetic.add(k, np.float64(1)), state, moving

        everywhere = full_like(state[0], True, dtype=np.bool_)
        return while_loop(goes_on, again, (np.float64(first), state, everywhere))[1]


def _definition(prim: Primitive) -> Callable[..., Any]:
    impl: Any = prim.impl

    def values(*operands: Any, **params: Any) -> Any:
        return impl(Traced, *operands, **params)

    values.__name__ = prim.name
    return values


for _name in sorted(SERIES | COMPLEX_SERIES):
    (_prim,) = {prim for module in _MODULES if (prim := vars(module).get(f"{_name}_p"))}
    defines(_name)(_definition(_prim))
