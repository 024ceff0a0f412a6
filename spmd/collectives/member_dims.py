"""The dims of a collective's operand and result, as one member of the group sees them.

The `dims` slot of collectives is refused: the rows of a psum cannot be computed apart. Along axes
that the collective has nothing to do with its operand may be split all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.collectives.all_gather import all_gather_p
from spmd.collectives.all_to_all import all_to_all_p
from spmd.collectives.axis import axis_index_p, pvary_p
from spmd.collectives.ppermute import ppermute_p
from spmd.collectives.psum import pmax_p, pmin_p, psum_p
from spmd.collectives.psum_scatter import reduce_scatter_p
from spmd.core.aval import ShapedArray
from spmd.core.primitive import Dims, Primitive, dims

_SAME = (psum_p, pmax_p, pmin_p, pvary_p, ppermute_p)
_ALONG_ONE = (all_gather_p, all_to_all_p, reduce_scatter_p)


def member_dims(
    prim: Primitive,
    operands: Sequence[ShapedArray],
    results: Sequence[ShapedArray],
    params: dict[str, Any],
) -> Dims | None:
    """Equal labels for the dims that stay; None if `prim` is none of the collectives."""
    if prim is axis_index_p:
        return dims([], [()])
    if prim in _SAME:
        return dims([range(operands[0].ndim)], [range(operands[0].ndim)])
    if prim not in _ALONG_ONE:
        return None
    at, ndim = params["dim"], operands[0].ndim
    others = [d for d in range(ndim) if d != at]
    if results[0].ndim > ndim:  # an all_gather that stacks
        return dims([range(ndim)], [[*range(at), -1, *range(at, ndim)]])
    if results[0].ndim < ndim:  # a reduce_scatter of one row each
        return dims([[*range(at), -1, *range(at + 1, ndim)]], [others])
    own = [-1 if d == at else d for d in range(ndim)]
    return dims([own], [own])
