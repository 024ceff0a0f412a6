"""Widening: operations on dtypes of 8 bits and fewer compute in a wider one and round.

No processor computes in float8 or int4. Their elements are stored in a byte each; kernels move
them, and host steps convert them. So an addition of float8 numbers becomes two conversions to
float32, an addition, and a conversion of its result. `widened` says this for one operation;
operations outside `jit` ask it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.core.aval import ShapedArray
from spmd.core.ir import ClosedJaxpr, Eqn, Var
from spmd.core.primitive import Primitive
from spmd.core.rewriting.equations import JaxprBuilder, finish, map_subjaxprs, start
from spmd.lax.convert import convert_element_type_p

# Primitives that move elements, convert them, or run jaxprs in which they are widened.
_MOVES = frozenset(
    "broadcast_in_dim reshape permute_dims optimization_barrier name convert_element_type "
    "bitcast_convert_type stop_gradient copy select_n concatenate split squeeze rev cond slice pad "
    "scan gather scatter dynamic_slice dynamic_update_slice while sharding_constraint shard_alike "
    "all_gather all_to_all pvary unvary pcast ppermute reshard to_auto pure_callback io_callback "
    "debug_callback shard_map custom_linear_solve".split()
)


def is_widened(
    prim: Primitive, avals: Sequence[ShapedArray], results: Sequence[ShapedArray]
) -> bool:
    """Whether an operation has to be computed in wider dtypes."""
    for aval in (*avals, *results):
        # All programs pass here: most dtypes are told apart by their size.
        if aval.dtype.itemsize == 1 and aval.dtype in dtypes.SMALL:
            return prim.inline is None and prim.expand is None and prim.name not in _MOVES
    return False


def wide_params(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of an operation with the small dtypes among them widened."""
    small = {k: v for k, v in params.items() if isinstance(v, np.dtype) and v in dtypes.SMALL}
    return params | {name: dtypes.wide_of(dtype) for name, dtype in small.items()}


def conversion(aval: ShapedArray, dtype: np.dtype) -> dict[str, Any]:
    """The parameters that convert a value to a dtype."""
    return {"new_dtype": dtype, "weak_type": aval.weak_type}


def widen_small(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Compute in float32 and 32-bit integers what is written for smaller dtypes."""
    nested = closed.jaxpr.nested
    if not nested and not any(map(_is_widened, closed.eqns)):
        return closed
    writer = start(closed)
    for eqn in closed.eqns:
        if _is_widened(eqn):
            _write_wide(writer, eqn)
        else:
            writer.keep(eqn, map_subjaxprs(eqn, widen_small) if eqn in nested else None)
    return finish(writer, closed)


def _is_widened(eqn: Eqn) -> bool:
    return is_widened(eqn.prim, [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars])


def _write_wide(writer: JaxprBuilder, eqn: Eqn) -> None:
    ins = []
    for atom in writer.read_all(eqn.invars):
        if dtypes.is_small(atom.aval.dtype):
            given = conversion(atom.aval, dtypes.wide_of(atom.aval.dtype))
            atom = writer.emit(convert_element_type_p, [atom], given, eqn.source)
        ins.append(atom)
    small = [dtypes.is_small(v.aval.dtype) for v in eqn.outvars]
    outs = [
        Var(v.aval.update(dtype=dtypes.wide_of(v.aval.dtype))) if s else v
        for v, s in zip(eqn.outvars, small, strict=True)
    ]
    params = wide_params(eqn.params)
    writer.eqns.append(Eqn(eqn.prim, tuple(ins), tuple(outs), params, eqn.effects, eqn.source))
    for wide, old, is_small in zip(outs, eqn.outvars, small, strict=True):
        if is_small:
            given = conversion(old.aval, old.aval.dtype)
            writer.eqns.append(
                Eqn(convert_element_type_p, (wide,), (old,), given, source=eqn.source)
            )
