"""Unreduced and reduced axes in explicit types: which operations take the terms of a sum.

A value that is *unreduced* along an axis is the sum of the terms that the devices along it hold.
Only linear operations can work on terms. A *reduced* value is whole on each device, as without the
word, and its cotangent is unreduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.base import dtypes
from spmd.collectives.axis import pvary_p
from spmd.collectives.psum import psum_p
from spmd.collectives.psum_scatter import reduce_scatter_p
from spmd.core.aval import ShapedArray
from spmd.core.primitive import Primitive
from spmd.core.structural import (
    add_any_p,
    broadcast_in_dim_p,
    permute_dims_p,
    reduce_sum_p,
    reshape_p,
)
from spmd.lax.arithmetic import add_p, div_p, imag_p, mul_p, neg_p, real_p, sub_p
from spmd.lax.array import rev_p, squeeze_p
from spmd.lax.concatenate import concatenate_p, split_p
from spmd.lax.conv import conv_general_dilated_p
from spmd.lax.convert import (
    convert_element_type_p,
    copy_p,
    reduce_precision_p,
    stop_gradient_p,
)
from spmd.lax.cumulative import cumsum_p
from spmd.lax.dot import dot_general_p
from spmd.lax.dynamic import dynamic_slice_p, dynamic_update_slice_p
from spmd.lax.gather import gather_p
from spmd.lax.logic import select_n_p
from spmd.lax.slicing import pad_p, slice_p
from spmd.sharding.spec import PartitionSpec

Axes = frozenset[Any]
Avals = Sequence[ShapedArray]
# Makes the error of an equation from what is wrong, and what to do about it.
MakeError = Callable[[str, str], Exception]

# Linear in the first operand, or, as `pad`, in all; the others are numbers that all devices know.
_IN_FIRST = frozenset(
    {
        broadcast_in_dim_p,
        convert_element_type_p,
        copy_p,
        cumsum_p,
        dynamic_slice_p,
        gather_p,
        imag_p,
        neg_p,
        pad_p,
        permute_dims_p,
        real_p,
        reduce_precision_p,
        reduce_sum_p,
        reshape_p,
        rev_p,
        slice_p,
        split_p,
        squeeze_p,
        stop_gradient_p,
    }
)
# Linear in some operands together, by number from a first to a last.
_TOGETHER: dict[Primitive, slice] = {
    add_any_p: slice(None),
    add_p: slice(None),
    concatenate_p: slice(None),
    dynamic_update_slice_p: slice(0, 2),
    select_n_p: slice(1, None),
    sub_p: slice(None),
}
# Linear in one operand at a time.
_IN_ONE: dict[Primitive, tuple[int, ...]] = {div_p: (0,), mul_p: (0, 1)}
_PRODUCTS = frozenset({conv_general_dilated_p, dot_general_p})

_MAKE_SUM = "Make the sum first, with reshard(x, P(...)), or lax.psum inside of a shard_map"


def speaks_of_sums(spec: PartitionSpec) -> bool:
    """Whether a spec has axes of sums that are not made, or of which the cotangents are such."""
    return bool(spec.unreduced or spec.reduced)


def sets_of_results(
    prim: Primitive, avals: Avals, params: dict[str, Any], error: MakeError
) -> dict[str, Axes]:
    """The `unreduced` and `reduced` axes of all results of an equation."""
    if prim is psum_p or prim is pvary_p or prim is reduce_scatter_p:
        spec, axes = _spec(avals[0]), frozenset(params["axes"])
        return {"unreduced": spec.unreduced - axes, "reduced": spec.reduced - axes}
    unreduced = _unreduced(prim, avals, error)
    return {"unreduced": unreduced, "reduced": _reduced(prim, avals, error) - unreduced}


def _unreduced(prim: Primitive, avals: Avals, error: MakeError) -> Axes:
    own = [_spec(a).unreduced for a in avals]
    if not any(own):
        return frozenset()
    if prim in _IN_FIRST and not any(own[1:]):
        return own[0]
    if prim in _TOGETHER:
        of = own[_TOGETHER[prim]]
        if len(set(of)) == 1 and of[0]:
            return of[0]
        raise error(
            f"{_unequal(own)}, and terms can be added to terms along the same axes only", _MAKE_SUM
        )
    if prim in _IN_ONE:
        return _scaled(prim, avals, own, error)
    k = next(k for k, axes in enumerate(own) if axes)
    raise error(
        f"operand {k} is unreduced over {_named(own[k])}: each device holds a term of a sum, and "
        f"{prim.name} of a sum is not the sum of {prim.name} of its terms",
        _MAKE_SUM,
    )


def _scaled(prim: Primitive, avals: Avals, own: Sequence[Axes], error: MakeError) -> Axes:
    """One operand is unreduced, the other a number, or reduced along the same axes."""
    found = [k for k, axes in enumerate(own) if axes]
    if len(found) > 1 or found[0] not in _IN_ONE[prim]:
        raise error(
            f"{_unequal(own)}, and {prim.name} is linear in one of its operands only", _MAKE_SUM
        )
    (k,) = found
    other = avals[1 - k]
    if other.explicit is not None and other.ndim and _spec(other).reduced != own[k]:
        axes = "{" + _named(own[k]) + "}"
        raise error(
            f"operand {k} is unreduced over {_named(own[k])}, and operand {1 - k} is not reduced "
            f"over it: its cotangent would have to be summed there",
            f"Say where that sum is made, with reshard(x, P(..., reduced={axes})) of operand "
            f"{1 - k}, or make the sum first, with reshard(x, P(...)) of operand {k}",
        )
    return own[k]


def _reduced(prim: Primitive, avals: Avals, error: MakeError) -> Axes:
    """The axes over which operands are reduced; a product's result is so no longer."""
    own = [_spec(a).reduced for a in avals]
    if not any(own) or prim in _PRODUCTS:
        return frozenset()
    k = next(k for k, axes in enumerate(own) if axes)
    axes = own[k]
    for n, aval in enumerate(avals):
        spec = _spec(aval)
        counts = aval.explicit is not None and aval.ndim and dtypes.is_inexact(aval.dtype)
        if not counts or own[n] == axes or spec.unreduced >= axes:
            continue
        split = axes.intersection(spec.all_axes())
        state = f"split over {_named(split)}" if split else f"{_state(spec)} there"
        raise error(
            f"operand {k} is reduced over {_named(axes)}, and operand {n} is {state}: the "
            "cotangent of the one would be unreduced, that of the other not",
            f"Lay operand {k} out as operand {n} is, with reshard(x, P(...)), which moves no bytes",
        )
    return axes


def _spec(aval: ShapedArray) -> PartitionSpec:
    return PartitionSpec() if aval.explicit is None else aval.explicit.spec


def _unequal(own: Sequence[Axes]) -> str:
    """Which operands are unreduced, and over what."""
    return ", ".join(
        f"operand {k} is unreduced over {_named(axes)}" if axes else f"operand {k} is not unreduced"
        for k, axes in enumerate(own)
    )


def _state(spec: PartitionSpec) -> str:
    return f"reduced over {_named(spec.reduced)}, not" if spec.reduced else "replicated"


def _named(axes: Axes) -> str:
    return ", ".join(sorted(map(repr, axes)))
