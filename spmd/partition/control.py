"""Control flow, maps and constraints in the per-device program.

Loops and conditionals are written by the functions that users call, on parts: these settle types.
A loop's carry is split as its cell says, at both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.collectives.axis import pcast_p
from spmd.core.aval import NO_AXES, ShapedArray, typeof
from spmd.core.axis import cast_to_vma
from spmd.core.explicit import match_sharding
from spmd.core.ir import Eqn
from spmd.core.primitive import Primitive
from spmd.core.remat import optimization_barrier_p
from spmd.core.rewrite import eval_closed
from spmd.lax.control_cond import cond_p, named_switch
from spmd.lax.control_scan import scan_p
from spmd.lax.control_while import named_while, while_p
from spmd.lax.dynamic import dynamic_update_slice_p
from spmd.lax.fft import fft_p
from spmd.partition.custom_calls import Run, write_custom_call
from spmd.partition.equations import write_equation
from spmd.partition.indexing import chosen_rows
from spmd.partition.kinds import kind_of
from spmd.partition.loops import (
    branch_unevenly,
    carry_unevenly,
    make_totals,
    offer_split,
    results_of,
    write_scan,
)
from spmd.partition.propagate import Axes, Cell, Scope, Split, even
from spmd.partition.strategies.transforms import split_transforms
from spmd.partition.unasked import asked
from spmd.partition.values import Sizes, Value, form_of, read_as, values_of
from spmd.sharding.constraint import inspect_sharding_p, sharding_constraint_p
from spmd.sharding.custom_partitioning import custom_partitioning_p
from spmd.sharding.explicit_layouts import reshard_p, to_auto_p
from spmd.sharding.manual_sums import without_sets
from spmd.sharding.named import NamedSharding
from spmd.sharding.shard_map_rules import shard_map_p
from spmd.sharding.spec import PartitionSpec


def _write_constraint(
    run: Run, scope: Scope, k: int, eqn: Eqn, operands: Sequence[Value], sizes: Sizes
) -> list[Value]:
    (x,), cell = operands, scope.cells[eqn.outvars[0]]
    if eqn.prim is reshard_p and cell.unreduced:
        x.read(cell.axes, sizes, cell.unreduced)
    made, x.plain = Value(cell, x.forms), None  # forms that one gets the other has
    made.origin = x.origin
    return [made]


def _write_fft(
    run: Run, scope: Scope, k: int, eqn: Eqn, operands: Sequence[Value], sizes: Sizes
) -> list[Value]:
    """A transform; one over several split dims as transforms of one dim each."""
    cell = scope.cells[eqn.outvars[0]]
    steps = split_transforms(eqn, operands[0].cell.axes)
    if steps is None:
        kind = scope.kinds[k]
        return write_equation(eqn, kind, operands, [cell], scope.sizes, scope.grid)
    cells = {v: Cell(v.aval) for e in steps.jaxpr.eqns for v in e.outvars}
    inner = Scope(steps, cells, scope.mesh, scope.sizes)
    inner.kinds = {n: kind_of(e) for n, e in enumerate(steps.jaxpr.eqns)}
    (out,) = run(inner, operands)
    for d, axes in enumerate(out.cell.axes):
        # Half of the frequencies rarely divide: then another dim is split.
        for place in (d, *range(len(cell.axes))) if axes else ():
            if cell.offer(place, axes, sizes, "the least time"):
                break
    return [Value(cell, out.forms)]


def _write_update(
    run: Run, scope: Scope, k: int, eqn: Eqn, operands: Sequence[Value], sizes: Sizes
) -> list[Value]:
    """An update; much of a split dim, at a fixed place, as a choice between it and what stays."""
    cell = scope.cells[eqn.outvars[0]]
    steps = chosen_rows(eqn, operands[0].cell.axes)
    if steps is None:
        return write_equation(eqn, scope.kinds[k], operands, [cell], scope.sizes, scope.grid)
    cells = {v: Cell(v.aval) for e in steps.jaxpr.eqns for v in e.outvars}
    cells |= zip(steps.jaxpr.invars, [x.cell for x in operands[:2]], strict=True)
    inner = Scope(steps, cells, scope.mesh, scope.sizes)
    inner.kinds = {n: kind_of(e) for n, e in enumerate(steps.jaxpr.eqns)}
    for var, made in cells.items():
        if var.aval.shape == cell.shape:
            made.axes, made.is_split = cell.axes, cell.is_split
    (out,) = run(inner, operands[:2])
    return [Value(cell, out.forms)]


def _write_barrier(
    run: Run, scope: Scope, k: int, eqn: Eqn, operands: Sequence[Value], sizes: Sizes
) -> list[Value]:
    """Parts as they are, behind a barrier: what was gathered before it is gathered again behind."""
    cells = [scope.cells[v] for v in eqn.outvars]
    splits = [even(x.cell, sizes).axes for x in operands]
    parts = [
        x.read(split, sizes, x.cell.unreduced) for x, split in zip(operands, splits, strict=True)
    ]
    return results_of(cells, splits, optimization_barrier_p.bind(*parts))


def _write_map(
    run: Run, scope: Scope, k: int, eqn: Eqn, operands: Sequence[Value], sizes: Sizes
) -> list[Value]:
    """The body of a map, on the shards that its specs say."""
    body = eqn.params["jaxpr"]
    if eqn.params.get("manual") is not None:
        return _write_partly_manual(run, scope, k, eqn, operands, sizes)
    parts = []
    for x, spec, aval in zip(operands, eqn.params["in_specs"], body.in_avals, strict=True):
        split = tuple(spec.axes_of(d) for d in range(len(x.cell.shape)))
        with asked():
            part = x.read(split, sizes, unreduced_of(eqn, spec))
        parts.append(match_sharding(_varying(part, aval), aval))
    outs = [without_sets(x) for x in eval_closed(body, *parts)]
    return values_of([scope.cells[v] for v in eqn.outvars], outs)


def _write_partly_manual(
    run: Run, scope: Scope, k: int, eqn: Eqn, operands: Sequence[Value], sizes: Sizes
) -> list[Value]:
    """The body of a map on shards, which are split further along the compiler's axes."""
    body, (inner,) = eqn.params["jaxpr"], scope.inner[k]
    inside = [inner.cells[v] for v in body.jaxpr.invars]
    # Where the body had no types, nothing is known to be equal on all devices.
    axes = NO_AXES if inner.sizes else frozenset(eqn.params["manual"])
    with asked():
        parts = [
            _varying(x.read(_shard_split(spec, cell), sizes, unreduced_of(eqn, spec)), aval, axes)
            for x, spec, cell, aval in zip(
                operands, eqn.params["in_specs"], inside, body.in_avals, strict=True
            )
        ]
    outs = run(inner, values_of(inside, parts))
    results = [even(inner.of(atom), inner.sizes) for atom in body.jaxpr.outvars]
    found = zip(eqn.outvars, outs, results, eqn.params["out_specs"], strict=True)
    made = []
    for var, out, cell, spec in found:
        outer, part = scope.cells[var], out.read(cell.axes, sizes, cell.unreduced)
        made.append(Value(outer, {form_of(outer, _shard_split(spec, cell)): part}))
    return made


def unreduced_of(eqn: Eqn, spec: PartitionSpec) -> Axes:
    """The axes along which a map takes terms of a sum."""
    return NamedSharding(eqn.params["mesh"], spec).unreduced_axes


def _shard_split(spec: PartitionSpec, cell: Cell) -> Split:
    """How the value is split of which a shard by this spec is split as a cell says."""
    return tuple((*spec.axes_of(d), *axes) for d, axes in enumerate(cell.axes))


def _varying(x: Any, aval: ShapedArray, axes: frozenset[Any] = NO_AXES) -> Any:
    """A part that varies over the axes of its type in the body of a map, and over others."""
    have = typeof(x).vma
    return cast_to_vma(x, have | aval.vma | axes, have)


def _write_while(
    run: Run, scope: Scope, k: int, eqn: Eqn, operands: Sequence[Value], sizes: Sizes
) -> list[Value]:
    test, body = scope.inner[k]
    tested = eqn.params["cond_nconsts"]
    first = tested + eqn.params["body_nconsts"]
    carried = [body.cells[v] for v in body.closed.jaxpr.invars[first - tested :]]

    carry_unevenly([body, test], operands[first:], len(carried), sizes)
    make_totals(operands[:first], sizes)

    def going(carry: list[Any]) -> Any:
        consts = [x.copy() for x in operands[:tested]]
        (out,) = run(test, [*consts, *values_of(carried, carry)])
        return out.read((), sizes)

    def step(carry: list[Any]) -> list[Any]:
        consts = [x.copy() for x in operands[tested:first]]
        return read_as(run(body, [*consts, *values_of(carried, carry)]), carried, sizes)

    init = read_as(operands[first:], carried, sizes)
    outs = named_while("lax.while_loop", None, going, step, init)
    cells = [scope.cells[v] for v in eqn.outvars]
    for cell, c in zip(cells, carried, strict=True):
        offer_split(cell, c.axes, sizes)
    return results_of(cells, [c.axes for c in carried], outs)


def _write_cond(
    run: Run, scope: Scope, k: int, eqn: Eqn, operands: Sequence[Value], sizes: Sizes
) -> list[Value]:
    cells = [scope.cells[v] for v in eqn.outvars]
    index = operands[0].read((), sizes)
    make_totals(operands[1:], sizes)
    branch_unevenly(scope.inner[k], operands[1:], cells, sizes)

    def branch(inner: Scope) -> Callable[[], list[Any]]:
        return lambda: read_as(run(inner, [x.copy() for x in operands[1:]]), cells, sizes)

    functions = [branch(inner) for inner in scope.inner[k]]
    names = [f"branches[{n}]" for n in range(len(functions))]
    return values_of(cells, named_switch("lax.switch", index, functions, [], names))


STRUCTURAL: dict[Primitive, Callable[..., list[Value]]] = {
    scan_p: write_scan,
    while_p: _write_while,
    cond_p: _write_cond,
    shard_map_p: _write_map,
    sharding_constraint_p: _write_constraint,
    reshard_p: _write_constraint,
    to_auto_p: _write_constraint,
    pcast_p: _write_constraint,
    custom_partitioning_p: write_custom_call,
    fft_p: _write_fft,
    dynamic_update_slice_p: _write_update,
    optimization_barrier_p: _write_barrier,
    inspect_sharding_p: lambda *_: [],  # plans tell of it
}
