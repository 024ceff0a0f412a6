"""Scans in the per-device program: iterations that are split over devices, sums made after loops.

Iterations that need nothing of each other, but for sums, may run on the devices that have their
rows: no row moves, and each sum is made once, behind the loop. Such a scan's body knows nothing of
the axes that split its iterations.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from spmd.core.ir import Eqn, Var
from spmd.lax.arithmetic import add
from spmd.lax.control_cond import cond_p
from spmd.lax.control_scan import named_scan
from spmd.lax.control_while import while_p
from spmd.partition.custom_calls import Run
from spmd.partition.halos import HALO, are_far
from spmd.partition.indexing import ROWS
from spmd.partition.moves import Root, is_uneven
from spmd.partition.propagate import Axes, Cell, Plan, Scope, Split, even
from spmd.partition.rules import may_be_uneven, may_split
from spmd.partition.seconds import BYTE, ELEMENT, EXCHANGE
from spmd.partition.values import Form, Sizes, Value, form_of, read_as, values_of
from spmd.sharding.custom_partitioning import custom_partitioning_p
from spmd.sharding.shard_map_rules import shard_map_p

# ---- the choice --------------------------------------------------------------------------------


def split_iterations(plan: Plan) -> None:
    """Choose the scans whose iterations are split over devices, those around before those inside.

    The bodies of these leave the axes alone.
    """
    for scope in plan.scopes:
        for k, sums in scope.sums.items():
            eqn = scope.closed.jaxpr.eqns[k]
            if len(sums) < eqn.params["num_carry"]:
                continue
            axes = _leading(scope, eqn)
            (inner,) = scope.inner[k]
            n = math.prod(scope.sizes[a] for a in axes)
            if eqn.params["length"] % n and not _may_have_too_many(eqn, inner, n):
                continue
            if axes and _can_run_apart(inner, axes) and _is_cheaper(scope, eqn, inner, axes):
                scope.runs[k] = axes
                _leave_alone(inner, axes)


def _leading(scope: Scope, eqn: Eqn) -> Axes:
    """The axes that split the rows of the largest stacked operands or results."""
    first = eqn.params["num_consts"] + eqn.params["num_carry"]
    weights: dict[Axes, int] = {}
    for atom in (*eqn.invars[first:], *eqn.outvars[eqn.params["num_carry"] :]):
        axes = scope.of(atom).axes[0]
        if axes and all(a in scope.sizes for a in axes):
            weights[axes] = weights.get(axes, 0) + atom.aval.nbytes
    return max(weights, key=lambda axes: weights[axes]) if weights else ()


def _scopes(inner: Scope) -> Iterator[Scope]:
    """A scope and all inside it."""
    left = [inner]
    while left:
        scope = left.pop()
        yield scope
        left += [more for found in scope.inner.values() for more in found]


def _may_have_too_many(eqn: Eqn, inner: Scope, n: int) -> bool:
    """Whether devices may run iterations that mean nothing: no sum reads them, and all end."""
    if eqn.params["num_carry"] or eqn.params["length"] < n:
        return False
    return all(e.prim is not while_p for s in _scopes(inner) for e in s.closed.jaxpr.eqns)


def _can_run_apart(inner: Scope, axes: Axes) -> bool:
    """Whether no part of a body has effects, or is fixed to devices along the axes."""
    for scope in _scopes(inner):
        for eqn in scope.closed.jaxpr.eqns:
            if eqn.effects or eqn.prim in (custom_partitioning_p, shard_map_p):
                return False
        for cell in scope.cells.values():
            fixed = [a for d, own in enumerate(cell.axes) if cell.closed[d] for a in own]
            if not {*fixed, *cell.unreduced, *cell.terms}.isdisjoint(axes):
                return False
    return True


def _is_cheaper(scope: Scope, eqn: Eqn, inner: Scope, axes: Axes) -> bool:
    """Whether split iterations take fewer seconds than whole rows and a body that is split.

    Split, devices gather constants and add up sums that the axes split; whole, they gather rows.
    """
    n = math.prod(scope.sizes[a] for a in axes)
    params = eqn.params
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    share = BYTE * (n - 1) / n
    split = whole = 0.0
    for k, atom in enumerate(eqn.invars):
        own = scope.of(atom).axes
        if first <= k < last:
            split += EXCHANGE + 2 * share * atom.aval.nbytes
        elif k < first:
            gathered = any(a in axes for held in own for a in held)
            split += EXCHANGE + share * atom.aval.nbytes if gathered else 0
        elif own[0] == axes:
            whole += EXCHANGE + share * atom.aval.nbytes
    cells = [(v, cell) for s in _scopes(inner) for v, cell in s.cells.items()]
    work = ELEMENT * params["length"] * sum(v.aval.size for v, _ in cells)
    uses = any(a in axes for _, cell in cells for own in cell.axes for a in own)
    return split + work / n <= whole + work / (n if uses else 1)


def _leave_alone(inner: Scope, axes: Axes) -> None:
    """Take some axes from all values in a body: each device has iterations of its own there."""
    for scope in _scopes(inner):
        scope.leave({a: n for a, n in scope.sizes.items() if a not in axes})
        for cell in scope.cells.values():
            for d, own in enumerate(cell.axes):
                if any(a in axes for a in own):
                    cell.put(d, tuple(a for a in own if a not in axes), "")


# ---- carries in parts of different sizes ---------------------------------------------------------


def carry_unevenly(
    scopes: Sequence[Scope],
    operands: Sequence[Value],
    count: int,
    sizes: Sizes,
    stays: Container[int] = (),
) -> frozenset[Var]:
    """Split carries and slices as the operands are whose parts have different sizes.

    Propagation leaves these whole, so they would be gathered. They are split if the rows stay where
    they are in an iteration, or near. The first of the `scopes` has the body, whose last inputs are
    the `count` carries and the slices; those of the others are the carries. Carries that have to
    `stay` as they are come by number. The variables that may be split so are returned.
    """
    body = scopes[0].closed.jaxpr
    inputs = body.invars[len(body.invars) - len(operands) :]
    split: dict[int, tuple[int, Axes]] = {}
    for n, x in enumerate(operands):
        axes = x.cell.axes if n < count else x.cell.axes[1:]
        cell = scopes[0].cells[inputs[n]]
        for d, own in enumerate(axes):
            if not own or cell.axes[d] or n in stays or not all(a in sizes for a in own):
                continue
            if cell.shape[d] % math.prod(sizes[a] for a in own):
                split[n] = d, own
    while split:
        found = _rows_that_stay(scopes[0], {inputs[n]: d for n, (d, _) in split.items()})
        for scope in scopes[1:]:
            carries = scope.closed.jaxpr.invars[-count:]
            if _rows_that_stay(scope, {carries[n]: d for n, (d, _) in split.items()}) is None:
                found = None
        if found is None or len({own for _, own in split.values()}) > 1:
            return frozenset()
        ends = body.outvars[:count]
        rows = {n: found[v] for n, v in enumerate(ends) if type(v) is Var and v in found}
        if any(rows.get(n) != d for n, (d, _) in split.items() if n < count):
            return frozenset()
        axes = next(iter(split.values()))[1]
        more = {n: (d, axes) for n, d in rows.items() if n not in split}
        if not more:
            for n, (d, own) in split.items():
                scopes[0].cells[inputs[n]].offer(d, own, sizes, "the least time", uneven=True)
            for var in found:
                scopes[0].cells[var].edge = False
            return frozenset(found)
        if any(n in stays for n in more):
            return frozenset()
        split |= more
    return frozenset()


def branch_unevenly(
    scopes: Sequence[Scope], operands: Sequence[Value], cells: Sequence[Cell], sizes: Sizes
) -> None:
    """Split results of branches as the operands are whose parts have different sizes.

    They have the rows of such operands in some branches, and in the others nothing that another
    split would keep. The `cells` are those of the results.
    """
    uneven = [
        (n, d, own)
        for n, x in enumerate(operands)
        for d, own in enumerate(x.cell.axes)
        if own and x.cell.shape[d] % math.prod(sizes[a] for a in own)
    ]
    if len({own for _, _, own in uneven}) != 1:
        return
    found = [
        _rows_that_stay(scope, {scope.closed.jaxpr.invars[n]: d for n, d, _ in uneven}) or {}
        for scope in scopes
    ]
    for n, cell in enumerate(cells):
        ends = [(scope, scope.closed.jaxpr.outvars[n]) for scope in scopes]
        dims = [
            rows.get(v) if type(v) is Var else None
            for (_, v), rows in zip(ends, found, strict=True)
        ]
        others = [scope.of(v) for (scope, v), d in zip(ends, dims, strict=True) if d is None]
        if cell.edge or any(other.is_split or other.unreduced for other in others):
            continue
        if len(made := {d for d in dims if d is not None}) == 1:
            cell.offer(made.pop(), uneven[0][2], sizes, "the rows of branches", uneven=True)
    for scope, rows in zip(scopes, found, strict=True):
        for var in rows:
            scope.cells[var].edge = False


def _rows_that_stay(scope: Scope, starts: Mapping[Var, int]) -> dict[Var, int] | None:
    """The values made row by row of rows of others, with the dim of the rows in each.

    None if an equation needs rows that are far, or all.
    """
    found = dict(starts)
    for k, eqn in enumerate(scope.closed.jaxpr.eqns):
        read = [(n, found[a]) for n, a in enumerate(eqn.invars) if type(a) is Var and a in found]
        kind = scope.kinds.get(k)
        if not read:
            continue
        if eqn.prim is cond_p:
            ends = _rows_behind(scope.inner[k], dict(read))
            if ends is None:
                return None
            found.update((eqn.outvars[n], d) for n, d in ends.items())
            continue
        if kind is None or kind.rule is None or k in scope.rolls:
            return None
        for n, dim in read:
            label = kind.rule.operands[n][dim]
            if label >= ROWS or not may_split(kind.rule, label):
                return None
            if not may_be_uneven(eqn.prim, kind.rule, label):
                return None
            is_near = label >= HALO
            if is_near and are_far(kind.windows[label - HALO]):
                return None
            for v, labels in zip(eqn.outvars, kind.rule.results, strict=True):
                if label not in labels:
                    continue
                d = labels.index(label)
                is_cut = v.aval.shape[d] != eqn.invars[n].aval.shape[dim]
                if found.setdefault(v, d) != d or (is_cut and not is_near):
                    return None
    return found


def _rows_behind(branches: Sequence[Scope], read: Mapping[int, int]) -> dict[int, int] | None:
    """The results of a conditional that have rows of some operands, by number, with the dim.

    None if a branch needs rows that are far.
    """
    ends: dict[int, int] = {}
    for inner in branches:
        jaxpr = inner.closed.jaxpr
        rows = _rows_that_stay(inner, {jaxpr.invars[n - 1]: d for n, d in read.items()})
        if rows is None:
            return None
        for n, v in enumerate(jaxpr.outvars):
            if type(v) is Var and v in rows and ends.setdefault(n, rows[v]) != rows[v]:
                return None
    return ends


# ---- writing -----------------------------------------------------------------------------------


def write_scan(
    run: Run, scope: Scope, k: int, eqn: Eqn, operands: Sequence[Value], sizes: Sizes
) -> list[Value]:
    """A scan on parts. Sums that start at zero stay terms in the loop, and are made behind it."""
    params, (inner,), runs = eqn.params, scope.inner[k], scope.runs.get(k, ())
    first = params["num_consts"]
    last = first + params["num_carry"]
    inside = [inner.cells[v] for v in inner.closed.jaxpr.invars]
    results = [inner.of(atom) for atom in inner.closed.jaxpr.outvars]
    carried, sliced, stacked = inside[first:last], inside[last:], results[last - first :]
    sums = scope.sums[k]
    late = [n in sums and (bool(runs) or x.is_zero) for n, x in enumerate(operands[first:last])]
    terms = [c.unreduced for c in carried]

    near = (
        frozenset()
        if runs
        else carry_unevenly([inner], operands[first:], last - first, sizes, sums)
    )
    # Slices that one device has stay there, and what is stacked of such. Terms stay terms.
    given = [None if runs else x.rooted() for x in operands[last:]]
    roots: list[Form | None] = [None] * len(stacked)
    ys_near = [atom in near for atom in inner.closed.jaxpr.outvars[last - first :]]
    make_totals(operands[:first], sizes)
    fixed = read_as(operands[:first], inside[:first], sizes) if runs else []

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        consts = values_of(inside[:first], fixed) if runs else [x.copy() for x in operands[:first]]
        rows = [
            Value(cell, {form_of(cell, cell.axes) if form is None else _row(form): x})
            for cell, form, x in zip(sliced, given, xs, strict=True)
        ]
        outs = run(inner, [*consts, *values_of(carried, carry), *rows])
        ends, ys = outs[: len(carry)], outs[len(carry) :]
        made = []
        for n, (x, cell) in enumerate(zip(ends, carried, strict=True)):
            if late[n]:
                terms[n] = tuple(dict.fromkeys((*cell.unreduced, *_terms(x, cell))))
            part = x.read(cell.axes, sizes, terms[n])
            made.append(add(carry[n], part) if n in sums else part)
        stacked[:] = [
            cell if is_near else even(cell, sizes)
            for cell, is_near in zip(stacked, ys_near, strict=True)
        ]
        roots[:] = [
            None if runs or cell.unreduced else _stacked_as(y, cell, sizes)
            for y, cell in zip(ys, stacked, strict=True)
        ]
        return made, [
            y.read(cell.axes, sizes, cell.unreduced) if form is None else y.forms[form]
            for y, cell, form in zip(ys, stacked, roots, strict=True)
        ]

    init = [
        x.zeros(c.axes, sizes) if is_late else x.read(c.axes, sizes, c.unreduced)
        for x, c, is_late in zip(operands[first:last], carried, late, strict=True)
    ]
    xs = [
        x.read((runs, *c.axes), sizes, c.unreduced) if form is None else x.forms[form]
        for x, c, form in zip(operands[last:], sliced, given, strict=True)
    ]
    length = -(-params["length"] // math.prod(sizes[a] for a in runs))
    reverse, unroll = params["reverse"], params["unroll"]
    carry, ys = named_scan("lax.scan", None, body, init, xs, length, reverse=reverse, unroll=unroll)
    cells = [scope.cells[v] for v in eqn.outvars]
    made = []
    for n, (x, c) in enumerate(zip(operands[first:last], carried, strict=True)):
        over = (*runs, *terms[n]) if late[n] else terms[n]
        total = carry[n]
        if late[n] and not x.is_zero:
            total = add(x.read(c.axes, sizes, over), total)
        made.append(Value(cells[n], {(c.axes, over, "add" if over else ""): total}))
        offer_split(cells[n], c.axes, sizes)
    own_splits = [bool(runs) or is_near for is_near in ys_near]
    rows = zip(cells[len(made) :], stacked, roots, own_splits, ys, strict=True)
    return [*made, *[_stacked(*row, runs, sizes) for row in rows]]


def _stacked(
    cell: Cell, row: Cell, form: Form | None, keeps: bool, y: Any, runs: Axes, sizes: Sizes
) -> Value:
    """A stacked result of a scan, of rows laid out as `row`, or in a `form` of their own.

    If it `keeps` its split, open dims of the result are split as the rows are.
    """
    if keeps:
        offer_split(cell, (runs, *row.axes), sizes)
    own = form_of(cell, (runs, *row.axes)) if form is None else (((), *form[0]), *form[1:])
    return Value(cell, {own: y})


def _stacked_as(y: Value, cell: Cell, sizes: Sizes) -> Form | None:
    """The form in which a value is stacked, if one device has it, or devices have terms of it.

    Terms are added up behind the loop, all iterations' at once, if they are no larger than the sum.
    """
    form = y.partial()
    if form is None or type(form[2]) is Root:
        return form
    split = form[0]
    is_small = split == even(cell, sizes).axes and not is_uneven(cell.shape, split, sizes)
    return form if form[2] == "add" and is_small else None


def _row(form: Form) -> Form:
    """The form of a row of a value whose first dim is whole."""
    return (form[0][1:], *form[1:])


def offer_split(cell: Cell, split: Split, sizes: Sizes) -> None:
    """Split the open dims of a loop's result as the loop makes it."""
    for d, axes in enumerate(split):
        cell.offer(d, axes, sizes, "the rows of a loop", uneven=True)


def _terms(x: Value, cell: Cell) -> Axes:
    """The axes over which an addend of a sum is partial, but for those that split the sum."""
    form = x.partial()
    if form is None or form[2] != "add":
        return ()
    return tuple(a for a in form[1] if not any(a in own for own in cell.axes))


def make_totals(values: Sequence[Value], sizes: Sizes) -> None:
    """Finish sums that are read in a loop or a branch before it, once."""
    for x in values:
        if x.partial() is not None and not x.cell.unreduced:
            x.read(x.cell.axes, sizes)


def results_of(cells: Sequence[Cell], splits: Sequence[Any], parts: Sequence[Any]) -> list[Value]:
    """The values of which these are the parts, split as given."""
    rows = zip(cells, splits, parts, strict=True)
    return [Value(cell, {form_of(cell, split): x}) for cell, split, x in rows]
