"""One equation of the per-device program: on parts of its operands, or on terms of sums."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from spmd.base import dtypes
from spmd.base.context import state
from spmd.core.aval import NO_AXES, typeof
from spmd.core.ir import Eqn, Var
from spmd.core.primitive import Dims
from spmd.core.stage import JaxprTracer
from spmd.core.structural import (
    add_any_p,
    broadcast_in_dim_p,
    permute_dims_p,
    reduce_sum_p,
    reshape_p,
)
from spmd.lax.arithmetic import add, add_p, div_p, mul_p, neg_p, sub_p
from spmd.lax.array import full, squeeze_p
from spmd.lax.convert import convert_element_type_p
from spmd.lax.scatter import scatter_add_p
from spmd.lax.slicing import pad_p, slice_p
from spmd.partition.callbacks import calls_once, is_check, write_callback
from spmd.partition.checks import write_check
from spmd.partition.halos import HALO
from spmd.partition.indexing import ROWS
from spmd.partition.kinds import Kind
from spmd.partition.moves import Root, is_uneven
from spmd.partition.parts import bound, split_by, without_padding
from spmd.partition.propagate import Axes, Cell, Split, even
from spmd.partition.rules import may_split
from spmd.partition.strategies.ordering import PICKS, write_pick
from spmd.partition.strategies.reshaping import carried, groups, may_reach_second
from spmd.partition.strategies.rooted import rows_of_one, write_at_root
from spmd.partition.values import (
    Form,
    Origin,
    Plain,
    Sizes,
    Value,
    part_shape,
    tell_repeated,
    total_form,
    unsplit,
    whole,
)
from spmd.partition.ways import RENAMES, REPEAT_FROM, Repeat, Way, plain_as

# Of these, a sum of terms of the operand is the sum of the results: the operand may stay partial.
_UNARY_LINEAR = (neg_p, permute_dims_p, reshape_p, reduce_sum_p, squeeze_p)
_SUMS = (add_any_p, add_p, sub_p)
# The operands in which these are linear.
_SCALINGS = {div_p: (0,), mul_p: (0, 1)}
_KEEP_TERMS = frozenset((*_UNARY_LINEAR, *_SUMS, *_SCALINGS, convert_element_type_p))


def write_equation(
    eqn: Eqn,
    kind: Kind,
    operands: Sequence[Value],
    cells: Sequence[Cell],
    sizes: Sizes,
    grid: Any,
    repeat: Any = None,
) -> list[Value]:
    """The results of an equation, which have the given cells; without a rule, of whole operands.

    `grid` stands for `sizes`, and for the settings on which types depend. If operands are plain
    `repeat` is a key for what is written: it is kept, if others may be written so.
    """
    rule = kind.rule
    if rule is None:
        if is_check(eqn):
            return write_check(eqn, operands, sizes)
        parts = [x.read(unsplit(x.cell), sizes) for x in operands]
        if sizes and calls_once(eqn):
            outs = write_callback(eqn, parts, sizes)
        else:
            found = eqn.prim.bind(*parts, **eqn.params)
            outs = found if eqn.prim.multiple else [found]
        return [whole(cell, x) for cell, x in zip(cells, outs, strict=True)]
    key, has_terms, has_root = [grid], False, False
    for x in operands:
        cell = x.cell
        if cell.unreduced:
            return _on_unreduced(eqn, rule, operands, cells, sizes)
        axes, free = cell.axes, NO_AXES
        if len(x.forms) == 1:
            ((split, over, how),) = x.forms
            if over:
                has_terms, has_root = True, has_root or type(how) is Root
            elif split != axes:
                free = x.axes_whole()
        else:
            free = x.axes_whole()
        key += (axes, free)
    if eqn.prim is reshape_p:
        made = _carried_on(eqn, operands[0], cells[0], sizes)
        if made is not None:
            return [made]
    if has_root:
        found = write_at_root(eqn, rule, operands, cells, sizes)
        if found is not None:
            return found
    if has_terms and (kept := _kept_partial(eqn, rule, operands, sizes)):
        return [write_on_terms(eqn, kind, operands, cells[0], kept, sizes, repeat)]
    if eqn.prim is slice_p:
        made = rows_of_one(eqn, operands[0], cells[0], sizes)
        if made is not None:
            return [made]
    for cell in cells:
        key += (cell.axes, cell.closed, cell.edge, cell.terms)
        if cell.sum is not None:
            key.append(tuple(cell.sum.share.items()))
    way = kind.ways.get(found := tuple(key))
    if way is None:
        way = kind.keep(found, Way(eqn, kind, operands, cells, sizes))
    stays = way.stays and cells[0].axes == way.splits[0] and not cells[0].unreduced
    made = _on_parts(eqn, rule, way, operands, cells, sizes)
    if stays and repeat is not None and not has_terms:
        types = tuple([x[1] if type(x) is tuple else x for x in repeat[REPEAT_FROM:]])
        if (known := way.known.get(types)) is not None:
            kind.keep_repeat(repeat, Repeat(eqn, known, way.made[0], way.params, sizes))
    return made


# ---- on parts ----------------------------------------------------------------------------------


def _on_parts(
    eqn: Eqn,
    rule: Dims,
    way: Way,
    operands: Sequence[Value],
    cells: Sequence[Cell],
    sizes: Sizes,
) -> list[Value]:
    """The equation on parts of its operands, read in the forms that `way` has chosen."""
    parts = [
        x.forms[form] if form in x.forms and x.read_at is None else x.read(form[0], sizes)
        for x, form in zip(operands, way.forms, strict=True)
    ]
    if way.over and cells[0].sum is not None:
        cells[0].sum.made(way.over)
    for k, cell in enumerate(cells):
        if cell.axes != way.splits[k]:
            for d, own in enumerate(way.splits[k]):
                # An open dim is split as the equation makes it.
                cell.offer(d, own, sizes, "the least time", uneven=True)
    if way.is_plain:
        outs = way.bound(eqn, parts)
    elif not way.over:
        outs = bound(eqn, rule, parts, way.splits, sizes, way.axes)
    else:
        return _reduced(eqn, rule, way, operands[0], parts, cells, sizes)
    made = []
    for k, cell in enumerate(cells):
        made.append(value := Value(cell, {way.made[k]: outs[k]}))
        if type(part := outs[k]) is JaxprTracer and not cell.unreduced:
            if way.made[k][1] or (cell.axes == way.splits[k] and not way.over):
                value.plain = _plain(way.made[k], part)
    if eqn.prim is broadcast_in_dim_p:
        tell_repeated(made[0], operands[0], sizes)
    elif eqn.prim in RENAMES and type(eqn.invars[0]) is Var:
        made[0] = tell_origin(eqn, operands[0], made[0])
    return made


def _carried_on(eqn: Eqn, x: Value, cell: Cell, sizes: Sizes) -> Value | None:
    """A reshape that cuts or merges split dims of which a second one is split, and moves nothing.

    The result is wanted so, or the operand lies so. None for other reshapes.
    """
    old, new, count = x.cell.shape, cell.shape, math.prod(sizes.values())
    if cell.unreduced or not may_reach_second(old, new, count):
        return None
    form = x.only_form()
    if form is not None and (not form[1] or (form[2] == "add" and x.uses <= 1)):
        have, over, _ = form
        made = carried(old, new, have, sizes)
        exact = carried(new, old, made, sizes) == have and not is_uneven(old, have, sizes)
        if exact and (made == cell.axes or (over and _crosses(old, new, have, made))):
            return _reshaped(eqn, x, form, made, cell, sizes)
    want = carried(new, old, cell.axes, sizes)
    if not _crosses(old, new, want, cell.axes) or is_uneven(new, cell.axes, sizes):
        return None
    if carried(old, new, want, sizes) != cell.axes:
        return None
    x.read(want, sizes)
    return _reshaped(eqn, x, total_form(want), cell.axes, cell, sizes)


def _crosses(old: tuple[int, ...], new: tuple[int, ...], have: Split, made: Split) -> bool:
    """Whether a dim is split that is not the first of those that a reshape merges or cuts."""
    return any(
        any(split[d] for d in own[1:])
        for group in groups(old, new)
        for split, own in ((have, group.old), (made, group.new))
    )


def _reshaped(eqn: Eqn, x: Value, form: Form, split: Split, cell: Cell, sizes: Sizes) -> Value:
    shape = part_shape(cell.shape, split, sizes)
    part = eqn.prim.bind(x.forms[form], **eqn.params | {"new_sizes": shape})
    made = Value(cell, {(split, *form[1:]): part})
    if not form[1] and split == cell.axes and type(part) is JaxprTracer:
        made.plain = (split, part.aval), part
    return made


def tell_origin(eqn: Eqn, operand: Value, made: Value) -> Value:
    """Let a value know that it has the elements of another, which may exist in other forms.

    A cast of an argument, and other places of one, are not kept for readers far away either; where
    they are made twice, the first are returned.
    """
    prim, params = eqn.prim, eqn.params
    if operand.read_at is not None:
        before = operand.renamed.setdefault((prim, *params.items()), made)
        if before.cell.axes == made.cell.axes and before.forms.keys() >= made.forms.keys():
            made = before
    if made.origin is None:
        places = range(len(made.cell.shape))
        if prim is permute_dims_p:
            places = [params["permutation"].index(d) for d in places]
        old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
        is_narrower = old.itemsize < new.itemsize
        made.origin = Origin(operand, places, lambda x: prim.bind(x, **params), is_narrower)
        made.now = operand.now
        if operand.read_at is not None:
            made.read_at, made.plain = dict.fromkeys(made.forms, operand.now), None
    return made


def _reduced(
    eqn: Eqn,
    rule: Dims,
    way: Way,
    first: Value,
    parts: Sequence[Any],
    cells: Sequence[Cell],
    sizes: Sizes,
) -> list[Value]:
    """Results of which each device makes a term; `first` is the first operand."""
    shared = {label for labels in rule.results for label in labels}
    parts = without_padding(eqn, rule, parts, way.axes, shared, sizes)
    if eqn.prim is scatter_add_p:
        return [_scattered(eqn, rule, first, parts, cells[0], way.axes, way.over, sizes)]
    if eqn.prim in PICKS:
        outs = write_pick(eqn, parts[0], way.over)
    else:
        outs = bound(eqn, rule, parts, way.splits, sizes, way.axes)
    return [Value(cell, {form: x}) for cell, form, x in zip(cells, way.made, outs, strict=True)]


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
    aval, split = typeof(parts[0]), split_by(rule.results[0], axes)
    given = [full(aval.shape, 0, aval.dtype), *parts[1:]]
    (terms,) = bound(eqn, rule, given, [split], sizes, axes)
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
    if eqn.prim not in _KEEP_TERMS:
        return ()
    partial: tuple[int, ...] = ()
    for k, x in enumerate(operands):
        form = x.partial() if x.uses <= 1 else None
        if form is None:
            continue
        if form[2] != "add" or is_uneven(x.cell.shape, form[0], sizes):
            return ()
        for label, axes in zip(rule.operands[k], form[0], strict=True):
            if axes and not may_split(rule, label):
                return ()
        partial += (k,)
    if eqn.prim in _UNARY_LINEAR:
        return partial
    if eqn.prim is convert_element_type_p:
        old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
        wider = dtypes.is_float(old) and dtypes.is_float(new) and new.itemsize >= old.itemsize
        return partial if wider else ()
    if eqn.prim in _SUMS:
        return partial if len(partial) == 2 and _common(operands) else ()
    if eqn.prim in _SCALINGS and dtypes.is_inexact(eqn.outvars[0].aval.dtype):
        return partial if len(partial) == 1 and partial[0] in _SCALINGS[eqn.prim] else ()
    return ()


def write_on_terms(
    eqn: Eqn,
    kind: Kind,
    operands: Sequence[Value],
    cell: Cell,
    kept: tuple[int, ...],
    sizes: Sizes,
    repeat: Any,
) -> Value:
    """A linear equation on the terms of partial operands, whose result is partial like them.

    With a key in `repeat` what is written is kept, if nothing moved and it is one equation.
    """
    rule, written = kind.rule, cast(list[Eqn], getattr(state.trace, "eqns", []))
    assert rule is not None
    count = len(written)
    if len(kept) == 2:
        split, over = _meeting(operands, cell, sizes)
        for x in operands:
            x.read(split, sizes, over)
    else:
        split, over, _ = next(iter(operands[kept[0]].forms))
    form = split, over, "add"
    axes = dict(zip(rule.operands[kept[0]], split, strict=True))
    parts = [
        x.forms[form] if k in kept else x.read(split_by(labels, axes), sizes)
        for k, (x, labels) in enumerate(zip(operands, rule.operands, strict=True))
    ]
    shared = set(rule.results[0])
    more = tuple(a for label, own in axes.items() if label not in shared for a in own)
    out = split_by(rule.results[0], axes)
    (part,) = bound(eqn, rule, parts, [out], sizes, {})
    form = out, (*over, *more), "add"
    made = Value(cell, {form: part})
    if type(part) is not JaxprTracer or cell.unreduced:
        return made
    made.plain = _plain(form, part)
    # A value that was read in another form is not plain any more.
    pairs = zip(operands, eqn.invars, strict=True)
    stays = all([x.plain is not None for x, atom in pairs if type(atom) is Var])
    if repeat is not None and stays and len(written) == count + 1:
        last = written[-1]
        sizes_of_parts = {n: v for n, v in last.params.items() if v is not eqn.params[n]}
        known = (part.aval,), last.effects, NO_AXES, ()
        kind.keep_repeat(repeat, Repeat(eqn, known, form, sizes_of_parts or None, sizes))
    return made


def _plain(form: Form, part: JaxprTracer) -> tuple[Plain, JaxprTracer] | None:
    """How a value with this form alone is plain."""
    found = plain_as(form, part.aval)
    return None if found is None else (found, part)


def _common(operands: Sequence[Value]) -> Axes:
    """The axes along which both of two values are partial."""
    (_, one, _), (_, other, _) = (next(iter(x.forms)) for x in operands)
    return tuple([a for a in one if a in other])


def _meeting(operands: Sequence[Value], cell: Cell, sizes: Sizes) -> tuple[Split, Axes]:
    """How two values are split, and along which axes they are partial, when they are added up.

    Where only one of them is partial it is finished before; what is left is finished for both.
    """
    (split, one, _), (other_split, other, _) = (next(iter(x.forms)) for x in operands)
    if split == other_split and set(one) == set(other):
        return split, one
    over = _common(operands)
    left = even(cell, sizes).axes
    return tuple([tuple([a for a in own if a not in over]) for own in left]), over


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
        x.read(split_by(labels, axes), sizes, x.cell.unreduced or together)
        for x, labels in zip(operands, rule.operands, strict=True)
    ]
    shared = {label for labels in rule.results for label in labels}
    over = (*unreduced, *(a for label, own in axes.items() if label not in shared for a in own))
    splits = [split_by(labels, axes) for labels in rule.results]
    outs = bound(eqn, rule, parts, splits, sizes, axes)
    rows = zip(cells, splits, outs, strict=True)
    return [Value(cell, {(split, over, "add"): x}) for cell, split, x in rows]
