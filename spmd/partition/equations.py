"""One equation of the per-device program: on parts of its operands, or on terms of sums."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.collectives.axis import axis_index
from spmd.core.aval import typeof
from spmd.core.ir import Eqn
from spmd.core.primitive import Dims
from spmd.core.structural import (
    add_any_p,
    broadcast_in_dim_p,
    permute_dims_p,
    reduce_sum_p,
    reshape_p,
)
from spmd.lax.arithmetic import add, add_p, div_p, mul_p, neg_p, sub_p
from spmd.lax.array import full, iota_p, rev_p, squeeze_p
from spmd.lax.attention import bind_attention
from spmd.lax.concatenate import concatenate_p
from spmd.lax.convert import convert_element_type, convert_element_type_p
from spmd.lax.scatter import scatter_add_p
from spmd.lax.slicing import pad_p
from spmd.partition.callbacks import calls_once, write_callback
from spmd.partition.cost import Choice
from spmd.partition.cumulative import CUMULATIVE, write_cumulative
from spmd.partition.halos import (
    HALO,
    NEUTRAL,
    masked,
    windows_of,
    with_halos,
    write_concatenation,
)
from spmd.partition.indexing import ROWS, split_rows, write_indexing
from spmd.partition.kinds import Kind
from spmd.partition.moves import is_uneven
from spmd.partition.ordering import PICKS, write_pick, write_reversal
from spmd.partition.propagate import KEPT, Axes, Cell, Split, even
from spmd.partition.rules import local_params, may_split
from spmd.partition.values import Sizes, Value, part_shape, total_form, unsplit, whole

# Of these, a sum of terms of the operand is the sum of the results: the operand may stay partial.
_UNARY_LINEAR = (neg_p, permute_dims_p, reshape_p, reduce_sum_p, squeeze_p)
_SUMS = (add_any_p, add_p, sub_p)
# The operands in which these are linear.
_SCALINGS = {div_p: (0,), mul_p: (0, 1)}


def write_equation(
    eqn: Eqn,
    kind: Kind,
    operands: Sequence[Value],
    cells: Sequence[Cell],
    sizes: Sizes,
) -> list[Value]:
    """The results of an equation, which have the given cells; without a rule, of whole operands."""
    rule = kind.rule
    if calls_once(eqn):
        outs = write_callback(eqn, [x.read(unsplit(x.cell), sizes) for x in operands], sizes)
        return [whole(cell, x) for cell, x in zip(cells, outs, strict=True)]
    if rule is None:
        found = eqn.prim.bind(*[x.read(unsplit(x.cell), sizes) for x in operands], **eqn.params)
        outs = found if eqn.prim.multiple else [found]
        return [whole(cell, x) for cell, x in zip(cells, outs, strict=True)]
    if any(x.cell.unreduced for x in operands):
        return _on_unreduced(eqn, rule, operands, cells, sizes)
    kept = _kept_partial(eqn, rule, operands, sizes)
    if kept:
        return [_on_terms(eqn, rule, operands, cells[0], kept, sizes)]
    if not any(any(x.cell.axes) for x in operands) and not any(any(c.axes) for c in cells):
        return _on_parts(eqn, rule, operands, cells, {}, sizes)
    choice = Choice(
        eqn.prim,
        rule,
        [atom.aval for atom in eqn.invars],
        [v.aval for v in eqn.outvars],
        [x.cell.axes for x in operands],
        [cell.axes for cell in cells],
        _closed_labels(rule, cells),
        sizes,
        terms=cells[0].terms if cells else (),
        windows=kind.windows,
        edge=any(cell.edge for cell in cells),
        free=[x.axes_whole() for x in operands],
    )
    return _on_parts(eqn, rule, operands, cells, choice.axes(), sizes)


def _closed_labels(rule: Dims, cells: Sequence[Cell]) -> frozenset[int]:
    """The labels of those dims of results that have to be split as their cells say."""
    return frozenset(
        label
        for cell, labels in zip(cells, rule.results, strict=True)
        for label, closed in zip(labels, cell.closed, strict=True)
        if closed
    )


def _split_by(labels: Sequence[int], axes: Mapping[int, Axes]) -> Split:
    return tuple(axes.get(label, ()) for label in labels)


# ---- on parts ----------------------------------------------------------------------------------


def _on_parts(
    eqn: Eqn,
    rule: Dims,
    operands: Sequence[Value],
    cells: Sequence[Cell],
    axes: Mapping[int, Axes],
    sizes: Sizes,
) -> list[Value]:
    parts = [
        x.read(_split_by(labels, axes), sizes)
        for x, labels in zip(operands, rule.operands, strict=True)
    ]
    splits = [_split_by(labels, axes) for labels in rule.results]
    shared = {label for labels in rule.results for label in labels}
    over = tuple(a for label, own in axes.items() if label not in shared for a in own)
    for cell, split in zip(cells, splits, strict=True):
        for d, own in enumerate(split):
            # An open dim is split as the equation makes it.
            cell.offer(d, own, sizes, "the least time", uneven=True)
    if over:
        parts = _masked(eqn, rule, parts, axes, shared, sizes)
    if eqn.prim is scatter_add_p and over:
        return [_scattered(eqn, rule, operands[0], parts, cells[0], axes, over, sizes)]
    if eqn.prim in PICKS and over:
        outs, over = write_pick(eqn, parts[0], over), ()
    else:
        outs = _bound(eqn, rule, parts, splits, sizes, axes)
    combine = (rule.reduces or "") if over else ""
    made = [
        Value(cell, {(split, over, combine): x})
        for cell, split, x in zip(cells, splits, outs, strict=True)
    ]
    made[0].is_zero = eqn.prim is broadcast_in_dim_p and operands[0].is_zero
    return made


def _masked(
    eqn: Eqn,
    rule: Dims,
    parts: Sequence[Any],
    axes: Mapping[int, Axes],
    shared: set[int],
    sizes: Sizes,
) -> list[Any]:
    """Operands in which the rows that a device has too many do not count in a reduction."""
    made = []
    for x, atom, labels in zip(parts, eqn.invars, rule.operands, strict=True):
        dtype = atom.aval.dtype
        for d, label in enumerate(labels):
            own, rows = axes.get(label, ()), atom.aval.shape[d]
            if label not in shared and rows % math.prod(sizes[a] for a in own):
                x = masked(x, d, own, rows, NEUTRAL[rule.reduces or "add"](dtype))
        made.append(x)
    return made


def _bound(
    eqn: Eqn,
    rule: Dims,
    parts: Sequence[Any],
    splits: Sequence[Split],
    sizes: Sizes,
    axes: Mapping[int, Axes],
) -> list[Any]:
    """The equation on parts of its operands; the parts of its results, split as given."""
    if eqn.prim in KEPT:
        return bind_attention(eqn.prim, *parts, spec=eqn.params["spec"])
    shape = part_shape(eqn.outvars[0].aval.shape, splits[0], sizes)
    params = local_params(eqn, [typeof(x) for x in parts], rule, shape)
    if eqn.prim is iota_p:
        return [_iota(params, splits[0])]
    if eqn.prim in CUMULATIVE and splits[0][params["axis"]]:
        along = splits[0][params["axis"]]
        return [write_cumulative(eqn.prim, parts[0], along, params, sizes)]
    if eqn.prim is rev_p:
        split = dict(enumerate(splits[0]))
        return [write_reversal(parts[0], split, params["dimensions"], sizes)]
    labels = {label for own in rule.operands for label in own if HALO <= label < ROWS}
    halos = {label - HALO: axes[label] for label in sorted(labels) if axes.get(label)}
    if halos and eqn.prim is concatenate_p:
        return [write_concatenation(eqn, parts, halos, sizes)]
    if halos:
        parts, params = with_halos(eqn, parts, windows_of(eqn), halos, params, sizes)
    rows = split_rows(rule, axes)
    if rows:
        return [write_indexing(eqn, parts, rows, params, sizes)]
    found = eqn.prim.bind(*parts, **params)
    return found if eqn.prim.multiple else [found]


def _iota(params: dict[str, Any], split: Split) -> Any:
    """A part of a count, which starts where the device's part does."""
    d = params["dimension"]
    if not split[d]:
        return iota_p.bind(**params)
    dtype = params["dtype"]
    exact = dtype if dtypes.is_integer(dtype) else np.dtype(np.int32)
    counts = iota_p.bind(**(params | {"dtype": exact}))
    start = convert_element_type(axis_index(split[d]) * np.int32(params["shape"][d]), exact)
    return convert_element_type(add(counts, full(params["shape"], start)), dtype)


def _scattered(
    eqn: Eqn,
    rule: Dims,
    operand: Value,
    parts: Sequence[Any],
    cell: Cell,
    axes: Mapping[int, Axes],
    over: Axes,
    sizes: Sizes,
) -> Value:
    """Each device adds its updates to zeros; the sum of these and of the operand is the result."""
    aval, split = typeof(parts[0]), _split_by(rule.results[0], axes)
    given = [full(aval.shape, 0, aval.dtype), *parts[1:]]
    (terms,) = _bound(eqn, rule, given, [split], sizes, axes)
    made = Value(cell, {(split, over, "add"): terms})
    if operand.is_zero:
        return made
    return Value(cell, {total_form(split): add(parts[0], made.read(split, sizes))})


# ---- on terms of a sum -------------------------------------------------------------------------


def _kept_partial(eqn: Eqn, rule: Dims, operands: Sequence[Value], sizes: Sizes) -> tuple[int, ...]:
    """The operands that stay partial, by number, as the result may then be partial like them.

    None do where that is not exact, where a total would have to be made more than once, or where a
    split dim has to be whole, as one that a reshape merges behind another.
    """
    forms = [x.partial() if x.uses <= 1 else None for x in operands]
    partial = tuple(k for k, form in enumerate(forms) if form is not None)
    if any(form is not None and form[2] != "add" for form in forms):
        return ()
    for x, form in zip(operands, forms, strict=True):
        if form is not None and is_uneven(x.cell.shape, form[0], sizes):
            return ()
    for form, labels in zip(forms, rule.operands, strict=True):
        pairs = zip(labels, form[0] if form else (), strict=False)
        if any(axes and not may_split(rule, label) for label, axes in pairs):
            return ()
    if eqn.prim in _UNARY_LINEAR:
        return partial
    if eqn.prim is convert_element_type_p:
        old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
        wider = dtypes.is_float(old) and dtypes.is_float(new) and new.itemsize >= old.itemsize
        return partial if wider else ()
    if eqn.prim in _SUMS:
        return partial if len(partial) == 2 and len(set(forms)) == 1 else ()
    if eqn.prim in _SCALINGS and dtypes.is_inexact(eqn.outvars[0].aval.dtype):
        return partial if len(partial) == 1 and partial[0] in _SCALINGS[eqn.prim] else ()
    return ()


def _on_terms(
    eqn: Eqn,
    rule: Dims,
    operands: Sequence[Value],
    cell: Cell,
    kept: tuple[int, ...],
    sizes: Sizes,
) -> Value:
    """A linear equation on the terms of partial operands, whose result is partial like them."""
    form = operands[kept[0]].partial()
    assert form is not None
    split, over, combine = form
    axes = dict(zip(rule.operands[kept[0]], split, strict=True))
    parts = [
        x.forms[form] if k in kept else x.read(_split_by(labels, axes), sizes)
        for k, (x, labels) in enumerate(zip(operands, rule.operands, strict=True))
    ]
    shared = set(rule.results[0])
    more = tuple(a for label, own in axes.items() if label not in shared for a in own)
    out = _split_by(rule.results[0], axes)
    (made,) = _bound(eqn, rule, parts, [out], sizes, {})
    return Value(cell, {(out, (*over, *more), combine): made})


def _on_unreduced(
    eqn: Eqn,
    rule: Dims,
    operands: Sequence[Value],
    cells: Sequence[Cell],
    sizes: Sizes,
) -> list[Value]:
    """A linear equation on operands whose types say that devices hold terms of sums."""
    axes: dict[int, Axes] = {}
    unreduced: Axes = ()
    used: set[Any] = set()
    numbered = zip(operands, rule.operands, strict=True)
    for x, labels in sorted(numbered, key=lambda pair: not pair[0].cell.unreduced):
        unreduced = unreduced or x.cell.unreduced
        used.update(unreduced)
        for label, own in zip(labels, even(x.cell, sizes).axes, strict=True):
            # A dim that halos would split is gathered.
            stays = may_split(rule, label) and not HALO <= label < ROWS
            if label not in axes and stays and used.isdisjoint(own):
                axes[label] = own
                used.update(own)
    # The padding, too, is to be counted once.
    together = unreduced if eqn.prim is pad_p else ()
    parts = [
        x.read(_split_by(labels, axes), sizes, x.cell.unreduced or together)
        for x, labels in zip(operands, rule.operands, strict=True)
    ]
    shared = {label for labels in rule.results for label in labels}
    over = (*unreduced, *(a for label, own in axes.items() if label not in shared for a in own))
    splits = [_split_by(labels, axes) for labels in rule.results]
    outs = _bound(eqn, rule, parts, splits, sizes, axes)
    rows = zip(cells, splits, outs, strict=True)
    return [Value(cell, {(split, over, "add"): x}) for cell, split, x in rows]
