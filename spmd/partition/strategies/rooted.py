"""Values that one device along some axes has: a row of a split dim, and what is made of it.

A row of a split dim is on the device that has its part. Results that depend on this row alone are
computed there: the other devices compute as much of rows of their own, which is never read. It
moves when another reader wants it: whole, or split, by one exchange, and by none where it is
written into a row of the device that has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from spmd.base.config import config
from spmd.collectives.axis import axis_index
from spmd.collectives.ppermute import ppermute
from spmd.core.aval import typeof
from spmd.core.ir import Eqn, Literal
from spmd.core.primitive import Dims
from spmd.core.structural import add_any_p, broadcast_in_dim_p
from spmd.lax.arithmetic import add_p, sub_p
from spmd.lax.array import full
from spmd.lax.conv import conv_general_dilated_p
from spmd.lax.dot import dot_general_p
from spmd.lax.dynamic import dynamic_slice, dynamic_update_slice, dynamic_update_slice_p
from spmd.lax.fft import fft_p
from spmd.lax.logic import eq, select
from spmd.lax.slicing import pad, pad_p
from spmd.lax.slicing import slice as slice_of
from spmd.lax.sort import sort_p
from spmd.partition.halos import HALO
from spmd.partition.moves import Root, combined, is_uneven, root_term
from spmd.partition.parts import bound, split_by
from spmd.partition.propagate import Axes, Cell, Split
from spmd.partition.rules import KEPT
from spmd.partition.values import Form, Repeated, Sizes, Value, part_shape, total_form

# A slice of several rows stays on its device up to one part in so many of the dim.
_SHARE = 4
# Primitives whose work is large enough to be split over devices instead.
_HEAVY = frozenset({conv_general_dilated_p, dot_general_p, fft_p, sort_p, *KEPT})
_SUMS = (add_any_p, add_p, sub_p)


def rows_of_one(eqn: Eqn, x: Value, cell: Cell, sizes: Sizes) -> Value | None:
    """The result of a slice whose rows one device has; None if it is no such slice."""
    own, shape = x.cell.axes, x.cell.shape
    if total_form(own) not in x.forms or x.cell.unreduced or x.axes_whole():
        return None
    start, stop = eqn.params["start_indices"], eqn.params["limit_indices"]
    steps = eqn.params["strides"] or (1,) * len(shape)
    cut = [d for d in range(len(shape)) if (start[d], stop[d], steps[d]) != (0, shape[d], 1)]
    split = [d for d in cut if own[d]]
    if len(split) != 1 or config.debug_nans or config.debug_infs:
        return None
    (d,) = split
    count = stop[d] - start[d]
    if count < 1 or (count > 1 and _SHARE * count > shape[d]) or cell.barred:
        return None
    if any(is_uneven(shape[e : e + 1], own[e : e + 1], sizes) for e in range(len(shape)) if e != d):
        return None
    rows = -(-shape[d] // math.prod(sizes[a] for a in own[d]))
    root = start[d] // rows
    if (stop[d] - 1) // rows != root:
        return None
    part = x.read(own, sizes)
    there = [
        (first - root * rows, last - root * rows)
        if e == d
        else (first, last)
        if e in cut
        else (0, typeof(part).shape[e])
        for e, (first, last) in enumerate(zip(start, stop, strict=True))
    ]
    made = slice_of(part, [a for a, _ in there], [b for _, b in there], steps)
    left = tuple([() if e == d else axes for e, axes in enumerate(own)])
    return Value(cell, {(left, own[d], Root(root)): made})


def write_at_root(
    eqn: Eqn, rule: Dims, operands: Sequence[Value], cells: Sequence[Cell], sizes: Sizes
) -> list[Value] | None:
    """The results of an equation some of whose operands one device has; None if these must move."""
    forms = [x.rooted() for x in operands]
    first = next((form for form in forms if form is not None), None)
    if first is None:
        return None
    if eqn.prim in _SUMS:
        _as_terms(operands, forms, sizes)
        if any(x.rooted() != form for x, form in zip(operands, forms, strict=True)):
            return None
    for k, form in enumerate(forms):
        if form is None or form[1:] == first[1:]:
            continue
        if form[1] != first[1] or eqn.prim in _HEAVY:
            return None
        # Rows of two devices meet on one of them.
        root = cast(Root, first[2])
        forms[k] = found = form[0], form[1], root
        operands[k].forms[found] = brought(operands[k].forms[form], form, root.place)
    if eqn.prim is pad_p and forms[0] is not None:
        made = _padded(eqn, forms[0], operands, cells[0], sizes)
        if made is not None:
            return [made]
    if eqn.prim is dynamic_update_slice_p and forms[0] is None and forms[1] is not None:
        made = _updated(eqn, forms[1], operands, cells[0], sizes)
        return None if made is None else [made]
    return _computed(eqn, rule, first, forms, operands, cells, sizes)


def _computed(
    eqn: Eqn,
    rule: Dims,
    first: Form,
    forms: Sequence[Form | None],
    operands: Sequence[Value],
    cells: Sequence[Cell],
    sizes: Sizes,
) -> list[Value] | None:
    """Results that the root has, too."""
    _, over, root = first
    pairs = zip(operands, forms, strict=True)
    size = sum(math.prod(x.cell.shape) for x, form in pairs if form is not None)
    repeats = eqn.prim is broadcast_in_dim_p
    grows = any(math.prod(cell.shape) > 2 * size for cell in cells)
    if eqn.prim in _HEAVY or any(cell.barred for cell in cells) or (grows and not repeats):
        return None
    axes = _labels(rule, forms)
    if axes is None:
        return None
    wanted = [split_by(labels, axes) for labels in rule.operands]
    for x, form, want in zip(operands, forms, wanted, strict=True):
        if is_uneven(x.cell.shape, want, sizes):
            return None
        if (form is None and not _has(x, want)) or (form is not None and form[0] != want):
            return None
    splits = [split_by(labels, axes) for labels in rule.results]
    lacking = tuple([a for n, own in axes.items() if n not in rule.results[0] for a in own])
    if lacking and (len(cells) > 1 or rule.reduces in (None, "pick")):
        return None
    if any(is_uneven(c.shape, split, sizes) for c, split in zip(cells, splits, strict=True)):
        return None
    parts = [
        x.forms[form] if form is not None else x.read(want, sizes)
        for x, form, want in zip(operands, forms, wanted, strict=True)
    ]
    outs = bound(eqn, rule, parts, splits, sizes, axes)
    if lacking:
        outs = [combined(outs[0], splits[0], lacking, rule.reduces or "add", splits[0], sizes)[0]]
    rows = zip(cells, splits, outs, strict=True)
    made = [Value(cell, {(split, over, root): x}) for cell, split, x in rows]
    if repeats:
        params = eqn.params
        made[0].origin = Repeated(
            operands[0], params["broadcast_dimensions"], params["shape"], sizes
        )
    return made


def _labels(rule: Dims, forms: Sequence[Form | None]) -> dict[int, Axes] | None:
    """The axes of each label, as operands are split that the root has; None if these differ."""
    axes: dict[int, Axes] = {}
    for form, labels in zip(forms, rule.operands, strict=True):
        for label, own in zip(labels, form[0] if form is not None else (), strict=False):
            if own and (not 0 <= label < HALO or label in rule.whole):
                return None
            if own and axes.setdefault(label, own) != own:
                return None
    return axes


def _has(x: Value, want: Split) -> bool:
    """Whether a device has its part of a value without a move."""
    if x.is_zero:
        return True
    return any(
        all(axes in ((), wanted) for axes, wanted in zip(split, want, strict=True))
        for split, over, _ in x.forms
        if not over
    )


def _as_terms(operands: Sequence[Value], forms: Sequence[Form | None], sizes: Sizes) -> None:
    """Let what different roots have be terms of one sum, with zeros on all other devices.

    So is what one root has beside terms of a sum over the same axes.
    """
    found = [x.partial() for x in operands]
    if any(form is None or x.uses > 1 for x, form in zip(operands, found, strict=True)):
        return
    one, other = (form for form in found if form is not None)
    if one == other or set(one[1]) != set(other[1]) or one[0] != other[0]:
        return
    if any(form[2] != "add" and type(form[2]) is not Root for form in (one, other)):
        return
    for x, form in zip(operands, forms, strict=True):
        if form is not None:
            split, over, root = form
            x.forms[split, over, "add"] = root_term(x.forms.pop(form), over, cast(Root, root))


# ---- written into rows ---------------------------------------------------------------------------


def _place(cell: Cell, d: int, first: int, count: int, over: Axes, sizes: Sizes) -> Any:
    """The device that has some rows of a dim, and the number of the first there; or None."""
    devices = math.prod(sizes[a] for a in over)
    if cell.axes[d] != over or cell.shape[d] % devices:
        return None
    rows = cell.shape[d] // devices
    target = first // rows
    return (target, first - target * rows) if (first + count - 1) // rows == target else None


def brought(x: Any, form: Form, target: int) -> Any:
    """The value of the root, on another device."""
    source = cast(Root, form[2]).place
    return x if source == target else ppermute(x, form[1], ((source, target),))


def _padded(
    eqn: Eqn, form: Form, operands: Sequence[Value], cell: Cell, sizes: Sizes
) -> Value | None:
    """Rows of one device among others that are padding: those of another are all padding."""
    (x, value), config = operands, eqn.params["padding_config"]
    split, over, _ = form
    if is_uneven(x.cell.shape, split, sizes) or not _has(value, ()):
        return None
    if cell.edge:  # a result without a sharding of the user's stays where it is
        for d, entry in enumerate(config):
            by_row = not split[d] and entry != (0, 0, 0)
            cell.offer(d, over if by_row else split[d], sizes, "the rows of one device")
    dims = [d for d, axes in enumerate(cell.axes) if axes == over]
    if len(dims) != 1 or split[dims[0]]:
        return None
    (d,) = dims
    low, high, between = config[d]
    count = x.cell.shape[d]
    if low < 0 or high < 0 or (between and count > 1) or not count:
        return None
    for e, own in enumerate(cell.axes):
        if e != d and (own != split[e] or (own and config[e] != (0, 0, 0))):
            return None
    found = _place(cell, d, low, count, over, sizes)
    if found is None:
        return None
    target, first = found
    part = brought(x.forms[form], form, target)
    padding = value.read((), sizes)
    shape = part_shape(cell.shape, cell.axes, sizes)
    around = [c if e != d else (first, shape[d] - first - count, 0) for e, c in enumerate(config)]
    rows = pad(part, padding, around)
    aval = typeof(rows)
    made = select(eq(axis_index(over), np.int32(target)), rows, full(shape, padding, aval.dtype))
    return Value(cell, {total_form(cell.axes): made})


def _updated(
    eqn: Eqn, form: Form, operands: Sequence[Value], cell: Cell, sizes: Sizes
) -> Value | None:
    """Rows that one device has, written over rows of one device."""
    (x, update), starts = operands[:2], eqn.invars[2:]
    split, over, _ = form
    dims = [d for d, axes in enumerate(cell.axes) if axes == over]
    if len(dims) != 1 or split[dims[0]] or not all(type(a) is Literal for a in starts):
        return None
    (d,) = dims
    if is_uneven(cell.shape, cell.axes, sizes) or not _has(x, cell.axes):
        return None
    for e, own in enumerate(cell.axes):
        if e != d and (own != split[e] or (own and update.cell.shape[e] != cell.shape[e])):
            return None
    count = update.cell.shape[d]
    places = [int(a.val) for a in starts]  # type: ignore[union-attr]
    low = min(max(places[d], 0), cell.shape[d] - count)
    found = _place(cell, d, low, count, over, sizes)
    if found is None:
        return None
    target, places[d] = found
    part, rows = brought(update.forms[form], form, target), x.read(cell.axes, sizes)
    at = [np.int32(place) for place in places]
    kept = dynamic_slice(rows, at, typeof(part).shape)
    is_there = eq(axis_index(over), np.int32(target))
    made = dynamic_update_slice(rows, select(is_there, part, kept), at)
    return Value(cell, {total_form(cell.axes): made})
