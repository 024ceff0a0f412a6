"""Host steps: primitives that run without native code, and their form on disk.

The one idea: a host step runs an equation that the user's program had before any pass, and a
process that loads a stored program has traced it. So a stored program has the number of the
equation, not its parameters: these may be anything, and are there already. Equations that a pass
made are not found, nor those that know their place (callbacks, exchanges): such programs are not
stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from spmd.compile.fingerprint import eqn_text
from spmd.core.ir import ClosedJaxpr, Eqn, Jaxpr, subjaxprs
from spmd.core.primitive import Primitive


class HostCall:
    """Runs a primitive's `impl` over NumPy.

    Each operand is (True, the number of an input) or (False, its value).
    """

    __slots__ = ("_impl", "params", "prim", "slots")

    def __init__(
        self, prim: Primitive, params: dict[str, Any], slots: tuple[tuple[bool, Any], ...]
    ):
        self.prim, self.params, self.slots = prim, params, slots
        self._impl = prim.rule("impl")

    def __call__(self, device: int, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> None:
        operands = [inputs[value] if given else value for given, value in self.slots]
        with np.errstate(all="ignore"):
            found = self._impl(np, *operands, **self.params)
        values = found if self.prim.multiple else [found]
        for target, value in zip(outputs, values, strict=True):
            target[...] = value


# ---- on disk -----------------------------------------------------------------------------------

# The number of the equation; for each operand the number of the input that it is, or an array.
Kept: TypeAlias = tuple[int, tuple[Any, ...]]


def keep(function: Any, closed: ClosedJaxpr) -> Kept | None:
    """A host step's function in built-in types, which mean something beside `closed` only."""
    if type(function) is not HostCall:
        return None
    text = eqn_text(function.prim, function.params)
    if text is None:
        return None
    slots = [value if given else keep_array(value) for given, value in function.slots]
    if None in slots:
        return None
    for number, eqn in enumerate(_equations(closed)):
        if eqn.prim is function.prim and eqn_text(eqn.prim, eqn.params) == text:
            return number, tuple(slots)
    return None


def find(kept: Kept, closed: ClosedJaxpr) -> HostCall:
    """The function of a host step that was kept beside an equal program."""
    number, slots = kept
    eqn = next(e for k, e in enumerate(_equations(closed)) if k == number)
    made = [(True, s) if isinstance(s, int) else (False, array_of(s)) for s in slots]
    return HostCall(eqn.prim, eqn.params, tuple(made))


def _equations(closed: ClosedJaxpr | Jaxpr) -> Iterator[Eqn]:
    """All equations that are no calls, in an order that equal programs share."""
    for eqn in closed.eqns:
        inside = eqn.stands_for()
        if inside is not None:
            yield from _equations(inside)
            continue
        yield eqn
        for _, inner in subjaxprs(eqn.params):
            yield from _equations(inner)


# ---- arrays and dtypes -------------------------------------------------------------------------


def keep_dtype(dtype: np.dtype) -> str | None:
    """The name of a dtype, if it says everything."""
    return dtype.name if dtype.names is None and np.dtype(dtype.name) == dtype else None


def keep_array(array: np.ndarray) -> tuple[str, tuple[int, ...], bytes] | None:
    """An array in built-in types."""
    dtype = keep_dtype(array.dtype)
    return None if dtype is None else (dtype, array.shape, array.tobytes())


def array_of(kept: tuple[str, tuple[int, ...], bytes]) -> np.ndarray:
    """The array that was kept."""
    dtype, shape, data = kept
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
