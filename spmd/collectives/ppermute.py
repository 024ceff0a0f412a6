"""ppermute: each device sends its value to one other, as a list of (source, target) pairs says."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from spmd.base.errors import ArgumentError, PermutationError
from spmd.base.source import current_source
from spmd.base.tree import tree_map
from spmd.collectives.all_gather import all_gather
from spmd.collectives.groups import (
    collective,
    make_varying,
    map_leaves,
    names_of,
    only_axis,
    rows_of,
    stack_rows,
)
from spmd.core.aval import typeof
from spmd.core.axis import size_of
from spmd.core.structural import zeros_like_aval
from spmd.lax.slicing import index_in_dim

# ---- public functions --------------------------------------------------------------------------


def ppermute(x: Any, axis_name: Any, perm: Sequence[tuple[int, int]]) -> Any:
    """Send `x` along (source, target) pairs of positions on a named axis.

    Per device, a leaf of `x` of shape `S` becomes `S`: the value of this device's source, or zeros
    if no pair of `perm` names this device as target. The dtype stays. `axis_name` is a name or a
    tuple of names; for a tuple, positions count row-major.

    Raises `ArgumentError` if a source or a target occurs twice or is out of range, and `AxisError`
    if the axis is not in scope.

    >>> ring = [(0, 1), (1, 2), (2, 3), (3, 0)]
    >>> spmd.pmap(lambda x: lax.ppermute(x, "i", ring), axis_name="i")(np.arange(4))
    Array([3, 0, 1, 2], dtype=int32)
    >>> spmd.pmap(lambda x: lax.ppermute(x, "i", [(0, 3)]), axis_name="i")(np.arange(1, 5))
    Array([0, 0, 0, 1], dtype=int32)
    """
    axes = names_of(axis_name)
    pairs = _checked("ppermute", perm, size_of(axis_name))
    return map_leaves(
        lambda leaf: ppermute_p.bind(make_varying(leaf, axes), axes=axes, perm=pairs), x
    )


def _checked(what: str, perm: Any, size: int) -> tuple[tuple[int, int], ...]:
    try:
        pairs = tuple((index(s), index(t)) for s, t in perm)
    except (TypeError, ValueError):
        raise PermutationError(
            f"{current_source()}: {what}: perm must be pairs of integers, (source, target), got "
            f"{perm!r}"
        ) from None
    for kind, ends in (("source", [s for s, _ in pairs]), ("target", [t for _, t in pairs])):
        twice = sorted({k for k in ends if ends.count(k) > 1})
        if twice:
            raise PermutationError(
                f"{current_source()}: {what}: perm={pairs} names {kind} {twice[0]} more than "
                "once; each device can send to one device and receive from one"
            )
        wrong = [k for k in ends if not 0 <= k < size]
        if wrong:
            raise PermutationError(
                f"{current_source()}: {what}: perm={pairs} names {kind} {wrong[0]}, but the axis "
                f"has positions 0 to {size - 1}"
            )
    return pairs


def pshuffle(x: Any, axis_name: Any, perm: Sequence[int]) -> Any:
    """Reorder values along a named axis: device k gets the value of device `perm[k]`.

    Per device, a leaf of `x` keeps its shape and dtype. `perm` names each position of `axis_name`
    once. Raises `ArgumentError` if it does not, and `AxisError` if the axis is not in scope.

    >>> spmd.pmap(lambda x: lax.pshuffle(x, "i", [3, 2, 1, 0]), axis_name="i")(np.arange(4))
    Array([3, 2, 1, 0], dtype=int32)
    """
    n = size_of(axis_name)
    order = [int(k) for k in perm]
    if sorted(order) != list(range(n)):
        raise ArgumentError(
            f"{current_source()}: pshuffle: perm={order} must contain each of 0 to {n - 1} once"
        )
    return ppermute(x, axis_name, [(source, k) for k, source in enumerate(order)])


def pbroadcast(x: Any, axis_name: Any, source: int) -> Any:
    """Give every device along a named axis the value of the device at position `source`.

    Per device, a leaf of `x` keeps its shape, its dtype and the bits of that device. `axis_name` is
    a name or a tuple of names. Raises `AxisError` if the axis is not in scope.

    >>> spmd.pmap(lambda x: lax.pbroadcast(x, "i", 2), axis_name="i")(np.arange(4))
    Array([2, 2, 2, 2], dtype=int32)
    """
    # Gathering keeps the bits (a NaN's payload, the sign of -0.0), which a sum with zeros does not.
    gathered = all_gather(x, axis_name)
    return tree_map(lambda leaf: index_in_dim(leaf, source, 0, keepdims=False), gathered)


# ---- rules -------------------------------------------------------------------------------------


def _members(operands: list[Any], *, perm: Any, **_: Any) -> list[Any]:
    out = [np.zeros_like(x) for x in operands]
    for source, target in perm:
        out[target] = operands[source]
    return out


def _batch(axis: Any, operands: Any, at: Any, *, axes: Any, perm: Any) -> Any:
    (x,), (dim,) = operands, at
    if axis.name not in axes:
        return ppermute_p.bind(x, axes=axes, perm=perm), dim
    only_axis("ppermute", axis, axes)
    rows = rows_of(x, dim, axis.size)
    out = [zeros_like_aval(typeof(r)) for r in rows]
    for source, target in perm:
        out[target] = rows[source]
    return stack_rows(out), 0


def _transpose(ct: Any, x: Any, *, axes: Any, perm: Any) -> Any:
    back = tuple((target, source) for source, target in perm)
    return [ppermute_p.bind(ct, axes=axes, perm=back)]


ppermute_p = collective(
    "ppermute",
    abstract=lambda x, *, axes, perm: x,
    transpose=_transpose,
    batch=_batch,
    members=_members,
)
