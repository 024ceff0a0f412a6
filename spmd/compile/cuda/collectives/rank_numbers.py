"""Reductions between ranks in numbers that NCCL reduces: a pass over programs of several processes.

Sums of 16-bit floats and integers become sums in 32 bits, rounded once. NCCL's maximum of a NaN and
a number may be the number, so `pmax` and `pmin` of floats compare integers that are ordered as the
floats are, with NaN at the end that wins. The conversions are kernels, and fuse with others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.config import config
from spmd.base.source import Source
from spmd.collectives.psum import pmax_p
from spmd.compile.cuda.collectives.rank_exchange import is_agreed
from spmd.core.aval import ShapedArray
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, all_eqns
from spmd.core.primitive import Primitive
from spmd.core.rewriting.equations import Walk, finish, map_subjaxprs, start
from spmd.core.stage import trace_to_jaxpr
from spmd.lax.array import full_like
from spmd.lax.convert import bitcast_convert_type, convert_element_type
from spmd.lax.logic import bitwise_and, bitwise_xor, ne, select, shift_right_arithmetic
from spmd.transport.origin import Origin

_SUMS, _EXTREMES = ("psum", "reduce_scatter"), ("pmax", "pmin")
# The dtypes in which sums of others are made.
_WIDE = {
    dtypes.bfloat16: np.float32,
    np.dtype(np.float16): np.float32,
    np.dtype(np.int16): np.int32,
    np.dtype(np.uint16): np.uint32,
}


def in_numbers_of_nccl(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Rewrite reductions that NCCL lacks, if the ranks use it."""
    if not any(map(_is_lacking, all_eqns(closed.jaxpr))):
        return closed
    return _written(closed) if is_agreed(Origin(program=closed.jaxpr.name)) else closed


def _is_lacking(eqn: Eqn) -> bool:
    if eqn.prim.name not in (*_SUMS, *_EXTREMES):
        return False
    aval = eqn.invars[0].aval
    if eqn.prim.name in _SUMS:
        return aval.size > 0 and aval.dtype in _WIDE
    is_half_integer = aval.dtype in (np.int16, np.uint16)
    return aval.size > 0 and (is_half_integer or dtypes.is_float(aval.dtype))


def _written(closed: ClosedJaxpr) -> ClosedJaxpr:
    writer = start(closed)
    _Writer(writer).run(closed.jaxpr)
    return finish(writer, closed)


class _Writer(Walk):
    def replaces(self, eqn: Eqn, ins: tuple[Atom, ...], source: Source) -> bool:
        """Write a reduction in other numbers."""
        if not _is_lacking(eqn):
            return False
        params = tuple(eqn.params.items())
        self.call(_traced(eqn.prim, eqn.invars[0].aval, params), eqn, ins, source)
        return True

    def params_of(self, eqn: Eqn) -> dict[str, Any]:
        return map_subjaxprs(eqn, _written)


@functools.lru_cache(maxsize=256)
def _traced(prim: Primitive, aval: ShapedArray, params: tuple[tuple[str, Any], ...]) -> ClosedJaxpr:
    is_sum = aval.dtype in _WIDE and (prim.name in _SUMS or not dtypes.is_float(aval.dtype))
    rule = _widened if is_sum else _ordered

    def reduced(x: Any) -> Sequence[Any]:
        return [rule(prim, x, dict(params))]

    with config.override("enable_x64", True):  # float64 has integers of 64 bits
        return trace_to_jaxpr(reduced, (aval,))


def _widened(prim: Primitive, x: Any, params: dict[str, Any]) -> Any:
    wide = convert_element_type(x, _WIDE[x.dtype])
    return convert_element_type(prim.bind(wide, **params), x.dtype)


def _ordered(prim: Primitive, x: Any, params: dict[str, Any]) -> Any:
    is_double = x.dtype == np.float64
    float_, integer = (np.float64, np.int64) if is_double else (np.float32, np.int32)
    wide = convert_element_type(x, float_)
    bits = bitcast_convert_type(wide, integer)
    limits = np.iinfo(integer)
    nan = full_like(bits, limits.max if prim is pmax_p else limits.min)
    key = prim.bind(select(ne(wide, wide), nan, _turned(bits)), **params)
    return convert_element_type(bitcast_convert_type(_turned(key), float_), x.dtype)


def _turned(bits: Any) -> Any:
    """The bits of floats as integers in their order, and back."""
    limits = np.iinfo(bits.dtype)
    sign = shift_right_arithmetic(bits, full_like(bits, limits.bits - 1))
    return bitwise_xor(bits, bitwise_and(sign, full_like(bits, limits.max)))
