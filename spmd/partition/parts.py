"""An equation on parts of its operands, when the axes that split each of its dims are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.collectives.axis import axis_index
from spmd.core.aval import typeof
from spmd.core.ir import Eqn
from spmd.core.primitive import Dims
from spmd.core.structural import reshape_p
from spmd.lax.arithmetic import add
from spmd.lax.array import full, iota_p, rev_p
from spmd.lax.concatenate import concatenate_p
from spmd.lax.convert import convert_element_type
from spmd.lax.sort import sort_p
from spmd.partition.halos import (
    HALO,
    NEUTRAL,
    masked,
    windows_of,
    with_halos,
    write_concatenation,
)
from spmd.partition.indexing import ROWS, split_rows, write_indexing
from spmd.partition.propagate import Axes, Split
from spmd.partition.rules import KEPT, local_params
from spmd.partition.strategies.attention import write_attention
from spmd.partition.strategies.cumulative import CUMULATIVE, write_cumulative
from spmd.partition.strategies.ordering import PICKED_LAST, write_reversal
from spmd.partition.strategies.reshaping import lines_up, reshaped
from spmd.partition.strategies.sorting import SORTED, write_sort
from spmd.partition.values import Sizes, part_shape

# Writes an equation on parts of its operands, with the parameters that it has for parts.
Writer = Callable[[Eqn, Sequence[Any], dict[str, Any]], list[Any]]


def split_by(labels: Sequence[int], axes: Mapping[int, Axes]) -> Split:
    """The axes that split each of some dims, from those of their labels."""
    if not axes:
        return ((),) * len(labels)
    return tuple([axes[label] if label in axes else () for label in labels])


def bound(
    eqn: Eqn,
    rule: Dims,
    parts: Sequence[Any],
    splits: Sequence[Split],
    sizes: Sizes,
    axes: Mapping[int, Axes],
) -> list[Any]:
    """The equation on parts of its operands; the parts of its results, split as given."""
    shape = part_shape(eqn.outvars[0].aval.shape, splits[0], sizes)
    params = local_params(eqn, [typeof(x) for x in parts], rule, shape)
    write = writer_of(eqn, rule, splits, sizes, axes)
    if write is not None:
        return write(eqn, parts, params)
    found = eqn.prim.bind(*parts, **params)
    return found if eqn.prim.multiple else [found]


def writer_of(
    eqn: Eqn, rule: Dims, splits: Sequence[Split], sizes: Sizes, axes: Mapping[int, Axes]
) -> Writer | None:
    """The writer of an equation on parts, where that is more than its primitive on them.

    It serves all equations of a kind, so it keeps nothing of this one but its primitive.
    """
    prim, split = eqn.prim, splits[0]
    if prim in KEPT:
        return lambda eqn, parts, params: write_attention(prim, parts, params["spec"], axes, sizes)
    if prim is iota_p and split[eqn.params["dimension"]]:
        return lambda eqn, parts, params: [_iota(params, split)]
    if prim in CUMULATIVE and (along := split[eqn.params["axis"]]):
        rows = eqn.invars[0].aval.shape[eqn.params["axis"]]
        return lambda eqn, parts, params: [
            write_cumulative(prim, parts[0], along, params, sizes, rows)
        ]
    if prim is sort_p and (along := axes.get(SORTED)):
        rows = eqn.invars[0].aval.shape[eqn.params["dimension"]]
        return lambda eqn, parts, params: write_sort(parts, params, along, sizes, rows)
    if prim is rev_p:
        by_dim = dict(enumerate(split))
        whole = eqn.invars[0].aval.shape
        return lambda eqn, parts, params: [
            write_reversal(parts[0], by_dim, params["dimensions"], sizes, whole)
        ]
    if prim is reshape_p:
        old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        if 0 in old or lines_up(old, new, split, sizes):
            return None
        part = part_shape(new, split, sizes)
        return lambda eqn, parts, params: [reshaped(parts[0], old, new, split, part, sizes)]
    labels = [label for label in sorted(axes) if label >= HALO and axes[label]]
    if not labels:
        return None
    read = {label for own in rule.operands for label in own}
    halos = {label - HALO: axes[label] for label in labels if label < ROWS and label in read}
    rows = split_rows(rule, axes)
    if halos and prim is concatenate_p:
        return lambda eqn, parts, params: [write_concatenation(eqn, parts, halos, sizes)]
    if not halos and not rows:
        return None

    def write(eqn: Eqn, parts: Sequence[Any], params: dict[str, Any]) -> list[Any]:
        if halos:
            parts, params = with_halos(eqn, parts, windows_of(eqn), halos, params, sizes)
        if rows:
            return [write_indexing(eqn, parts, rows, params, sizes)]
        found = prim.bind(*parts, **params)
        return found if prim.multiple else [found]

    return write


def _iota(params: dict[str, Any], split: Split) -> Any:
    """A part of a count, which starts where the device's part does."""
    d = params["dimension"]
    dtype = params["dtype"]
    exact = dtype if dtypes.is_integer(dtype) else np.dtype(np.int32)
    counts = iota_p.bind(**(params | {"dtype": exact}))
    start = convert_element_type(axis_index(split[d]) * np.int32(params["shape"][d]), exact)
    return convert_element_type(add(counts, full(params["shape"], start)), dtype)


def without_padding(
    eqn: Eqn,
    rule: Dims,
    parts: Sequence[Any],
    axes: Mapping[int, Axes],
    shared: set[int],
    sizes: Sizes,
) -> list[Any]:
    """Operands in which the rows that a device has too many do not count in a reduction."""
    made = []
    operator = PICKED_LAST.get(eqn.prim, rule.reduces or "add")
    for x, atom, labels in zip(parts, eqn.invars, rule.operands, strict=True):
        dtype = atom.aval.dtype
        for d, label in enumerate(labels):
            own, rows = axes.get(label, ()), atom.aval.shape[d]
            # Of rows that are indexed none that is too many is read.
            if label not in shared and label < ROWS and rows % math.prod(sizes[a] for a in own):
                x = masked(x, d, own, rows, NEUTRAL[operator](dtype))
        made.append(x)
    return made
