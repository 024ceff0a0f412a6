"""Calls of Python in a partitioned program: on whole values, once, by the first device.

The call's result is added to the zeros of all other devices, so that every device has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.collectives.axis import axis_index
from spmd.collectives.psum import psum
from spmd.core.aval import ShapedArray
from spmd.core.ir import Eqn
from spmd.core.primitive import Primitive
from spmd.lax.array import full
from spmd.lax.callback import debug_callback_p, io_callback_p, pure_callback_p
from spmd.lax.control_cond import named_switch
from spmd.lax.convert import convert_element_type
from spmd.lax.logic import eq

_CHECKS = frozenset(("check",))
CALLBACKS: tuple[Primitive, ...] = (pure_callback_p, io_callback_p, debug_callback_p)


def calls_once(eqn: Eqn) -> bool:
    """Whether an equation is a call of Python whose results the first device can hand out."""
    return eqn.prim in CALLBACKS and not any(v.aval.dtype.names for v in eqn.outvars)


def is_check(eqn: Eqn) -> bool:
    """Whether an equation checks a value, as `checkify.check` does, and has no results."""
    return eqn.effects == _CHECKS and not eqn.outvars


def write_callback(eqn: Eqn, operands: Sequence[Any], sizes: Mapping[Any, int]) -> list[Any]:
    """The equation on whole operands; its results are whole on every device."""
    axes = tuple(sizes)
    avals = [v.aval for v in eqn.outvars]

    def nothing() -> list[Any]:
        return [full(a.shape, 0, _summed(a)) for a in avals]

    def act() -> list[Any]:
        outs = eqn.prim.bind(*operands, **eqn.params)
        return [convert_element_type(x, _summed(a)) for x, a in zip(outs, avals, strict=True)]

    is_first = convert_element_type(eq(axis_index(axes), np.int32(0)), np.dtype(np.int32))
    outs = named_switch("lax.cond", is_first, [nothing, act], [], ["nothing", "the callback"])
    return [convert_element_type(psum(x, axes), a.dtype) for x, a in zip(outs, avals, strict=True)]


def _summed(aval: ShapedArray) -> np.dtype:
    """The dtype in which a result is added to zeros."""
    return np.dtype(np.int32) if dtypes.is_bool(aval.dtype) else aval.dtype
