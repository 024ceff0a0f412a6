"""The per-device program of a jaxpr of whole values: one `shard_map` equation over a mesh.

The jaxpr is traced once more, with the axes of the mesh in scope, on parts of its values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from spmd.base.config import config
from spmd.base.context import state
from spmd.base.source import UNKNOWN
from spmd.core.aval import typeof
from spmd.core.ir import ClosedJaxpr, Eqn, Literal, Var, subjaxprs
from spmd.core.rewrite import close
from spmd.core.stage import JaxprTrace
from spmd.lax.array import full
from spmd.lax.convert import convert_element_type
from spmd.partition.callbacks import calls_once, is_check
from spmd.partition.control import STRUCTURAL
from spmd.partition.equations import tell_origin, write_equation
from spmd.partition.loops import split_iterations
from spmd.partition.merging import without_repeats
from spmd.partition.moves import is_uneven
from spmd.partition.propagate import Cell, Plan, Scope, Split, even
from spmd.partition.rules import called_jaxpr
from spmd.partition.shifts import share_halos
from spmd.partition.strategies.rolling import Roll, write_roll, write_shift
from spmd.partition.strategies.rooted import brought
from spmd.partition.strategies.sections import section, write_sections
from spmd.partition.strategies.wrapping import has_split_wraps, with_rolls
from spmd.partition.sub_axes import SubAxes, seconds_of, sub_axes_of
from spmd.partition.unasked import Watch, here, watching
from spmd.partition.untyped_maps import with_typed_maps
from spmd.partition.values import Sizes, Value, form_of, literal, total_form, values_of, whole
from spmd.partition.ways import is_exact
from spmd.sharding.abstract_mesh import AxisType
from spmd.sharding.constraint import INSPECTS, inspect_sharding_p
from spmd.sharding.manual_sums import aval_with_sets
from spmd.sharding.named import NamedSharding
from spmd.sharding.shard_map_rules import mesh_axes, piece_aval, shard_map_p, vary_outputs
from spmd.sharding.spec import Mesh, PartitionSpec


def partition(
    closed: ClosedJaxpr,
    mesh: Mesh,
    in_specs: Sequence[PartitionSpec | None],
    out_specs: Sequence[PartitionSpec | None],
    plans: list[Plan] | None = None,
    uneven: bool = False,
) -> ClosedJaxpr | None:
    """A program over a mesh: one `shard_map` equation, of which each device runs the jaxpr.

    A spec that is None is left to propagation. If an argument, or a constraint, is `uneven`, parts
    of results may have different sizes. None if the program has effects outside of maps
    that are no callbacks, or maps that are not over this mesh. The plan is added to `plans`.
    """
    closed = with_typed_maps(closed, mesh)
    if not _can_partition(closed, mesh):
        return None
    closed = without_repeats(closed)
    planned, made = _planned(closed, mesh, in_specs, out_specs, uneven), None
    if has_split_wraps(planned[0]):
        other = _planned(with_rolls(closed), mesh, in_specs, out_specs, uneven)
        planned, made = _least_moved(planned, other, in_specs, out_specs)
        closed = planned[0].top.closed
    if (finer := sub_axes_of(planned[0])) is not None:
        if made is not None:  # writing changes a plan
            planned = _planned(closed, mesh, in_specs, out_specs, uneven)
        other = _planned(closed, mesh, in_specs, out_specs, finer=finer)
        planned, made = _least_moved(planned, other, in_specs, out_specs)
    if plans is not None:
        plans.append(planned[0])
    return _written(*planned) if made is None else made


def _planned(
    closed: ClosedJaxpr,
    mesh: Mesh,
    in_specs: Sequence[PartitionSpec | None],
    out_specs: Sequence[PartitionSpec | None],
    uneven: bool = False,
    finer: SubAxes | None = None,
) -> Planned:
    """The plan of a program over a mesh, or over a finer one, and the cells of its results."""
    plan = Plan(closed, mesh if finer is None else finer.mesh, uneven, finer)
    jaxpr = closed.jaxpr
    for k, (var, spec) in enumerate(zip(jaxpr.invars, in_specs, strict=True)):
        if spec is not None:
            name = jaxpr.arg_names[k] if k < len(jaxpr.arg_names) else ""
            own = spec if finer is None else finer.spec(spec)
            plan.top.cells[var].close(own, name or f"argument {k}")
    asked = [s if s is None or finer is None else finer.spec(s) for s in out_specs]
    results = plan.results(asked)
    plan.spread()
    split_iterations(plan)
    return plan, results


Planned = tuple[Plan, list[Cell]]


def _least_moved(
    one: Planned,
    other: Planned,
    in_specs: Sequence[PartitionSpec | None],
    out_specs: Sequence[PartitionSpec | None],
) -> tuple[Planned, ClosedJaxpr | None]:
    """That of two plans whose moves take less time, and its program.

    If moves are looked at the plan is made anew, as writing changes a plan, and not yet written.
    """
    found = one, other
    with watching(None):
        made = [_written(*own, is_tried=True) for own in found]
    pairs = zip(made, found, strict=True)
    costs = [seconds_of(m.eqns[0].params["jaxpr"], own[0].sizes) for m, own in pairs]
    best = 1 if costs[1] < costs[0] else 0
    if here.watch is None and config.unasked_gathers == "allow":
        return found[best], made[best]
    plan = found[best][0]
    finer, mesh = plan.sub_axes, plan.mesh
    mesh = mesh if finer is None else finer.outer
    again = _planned(plan.top.closed, mesh, in_specs, out_specs, plan.uneven, finer)
    return again, None


def _written(plan: Plan, results: list[Cell], is_tried: bool = False) -> ClosedJaxpr:
    """The program of a plan; if it `is_tried` only, no move of it is told of."""
    mesh, finer, closed = plan.mesh, plan.sub_axes, plan.top.closed
    jaxpr = closed.jaxpr
    placed = list(plan.placed.values())
    cells = [cell for _, cell in placed] + [plan.top.cells[v] for v in jaxpr.invars]
    if finer is not None:
        cells = [finer.whole(cell) for cell in cells]
    operands = (*(Var(value.aval) for value, _ in placed), *jaxpr.invars)
    specs = [spec_of_cell(cell) for cell in cells]
    pieces = [
        aval_with_sets(piece_aval(v.aval, s, mesh, "manual"))
        for v, s in zip(operands, specs, strict=True)
    ]

    def on_each(*parts: Any) -> list[Any]:
        given = values_of(cells, parts)
        for x in given:
            x.read_at, x.plain = {}, None
        constants = {id(value): x for (value, _), x in zip(placed, given, strict=False)}
        outs = _Writer(constants).run(plan.top, given[len(placed) :])
        if not plan.uneven:
            results[:] = [even(cell, plan.sizes) for cell in results]
        if finer is not None:
            results[:] = [finer.whole(cell) for cell in results]
        pairs = zip(outs, results, strict=True)
        found = [_part_of_result(x, cell, plan.sizes) for x, cell in pairs]
        types = zip(found, closed.out_avals, strict=True)
        return [convert_element_type(x, a.dtype, a.weak_type) for x, a in types]

    names = (*("" for _ in placed), *jaxpr.arg_names)
    watch, unasked = here.watch, None
    if watch is None and not is_tried and config.unasked_gathers != "allow":
        arguments = zip(jaxpr.invars, jaxpr.arg_names, strict=False)
        watch = unasked = Watch(jaxpr.name, {id(plan.top.cells[v]): name for v, name in arguments})
    with mesh_axes(mesh, "manual"), watching(watch):
        body = share_halos(close(on_each, pieces, jaxpr.name, names))
    if unasked is not None:
        unasked.report()
    explicit = mesh.has_only(AxisType.Explicit)
    wanted = [
        spec_of_cell(cell, a.explicit, in_full=explicit)
        for cell, a in zip(results, closed.out_avals, strict=True)
    ]
    params = {
        "jaxpr": vary_outputs(body, wanted, mesh, "manual"),
        "mesh": mesh,
        "in_specs": tuple(specs),
        "out_specs": tuple(wanted),
        "kind": "manual",
        "name": jaxpr.name,
    }
    if finer is not None:
        given, made = (
            tuple([as_spec(finer.split(cell.axes)) for cell in own]) for own in (cells, results)
        )
        params["outer"] = finer.outer, given, made
    if plan.uneven:
        params["uneven"] = (
            tuple([is_uneven(c.shape, c.axes, plan.sizes) for c in cells]),
            tuple(
                [
                    a if is_uneven(a.shape, c.axes, plan.sizes) else None
                    for a, c in zip(closed.out_avals, results, strict=True)
                ]
            ),
        )
    outs = tuple(Var(a) for a in closed.out_avals)
    source = next((eqn.source for eqn in jaxpr.eqns), UNKNOWN)
    eqn = Eqn(shard_map_p, operands, outs, params, jaxpr.effects - INSPECTS, source)
    made = jaxpr.replace(constvars=operands[: len(placed)], eqns=(eqn,), outvars=outs)
    return ClosedJaxpr(made, [value for value, _ in placed])


def _part_of_result(x: Value, cell: Cell, sizes: Sizes) -> Any:
    """A device's part of a result; moves are attributed to the line that makes the result."""
    before, state.source = state.source, x.source or state.source
    if here.watch is not None:
        here.watch.eqn = None
    try:
        return x.read(cell.axes, sizes, cell.unreduced)
    finally:
        state.source = before


def spec_of_cell(
    cell: Cell, sharding: NamedSharding | None = None, in_full: bool = False
) -> PartitionSpec:
    """The spec that says how a value is split, and along which axes devices hold terms.

    `sharding` is that of its type.
    """
    reduced = frozenset() if sharding is None else sharding.spec.reduced
    spec = as_spec(cell.axes, in_full)
    if not cell.unreduced and not reduced:
        return spec
    return spec.update(unreduced=frozenset(cell.unreduced), reduced=reduced)


def as_spec(split: Split, in_full: bool = False) -> PartitionSpec:
    """The one way to write a split as a spec; `in_full` with an entry for each dim, as types do."""
    entries: list[Any] = [None if not a else a[0] if len(a) == 1 else a for a in split]
    while not in_full and entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def tell_layouts(plan: Plan) -> None:
    """Call back with the layouts that a plan gives to values of which the program asks for them."""
    finer = plan.sub_axes
    mesh = plan.mesh if finer is None else finer.outer
    for scope in plan.scopes:
        for eqn in scope.closed.eqns:
            if eqn.prim is not inspect_sharding_p:
                continue
            (atom,) = eqn.invars
            cell = scope.cells[atom] if isinstance(atom, Var) else Cell(atom.aval)
            cell = even(cell if finer is None else finer.whole(cell), mesh.shape)
            eqn.params["callback"](NamedSharding(mesh, as_spec(cell.axes)))


def _can_partition(closed: ClosedJaxpr, mesh: Mesh) -> bool:
    """Whether all maps of a program are over the mesh, and only calls and checks have effects."""
    if not closed.jaxpr.effects and shard_map_p.name not in closed.jaxpr.primitives:
        return True
    nested = closed.jaxpr.nested
    for eqn in closed.eqns:
        prim = eqn.prim
        if not (eqn.effects or prim.inline or prim.expand or eqn in nested):
            continue
        if prim is shard_map_p:
            if not mesh.has_grid_of(eqn.params["mesh"]) or eqn.params["kind"] != "manual":
                return False
            continue
        call = called_jaxpr(eqn)
        inner = [call] if call is not None else _held(eqn) if eqn in nested else []
        is_known = eqn.prim is inspect_sharding_p or calls_once(eqn) or is_check(eqn)
        if eqn.effects and not inner and not is_known:
            return False
        if not all(_can_partition(found, mesh) for found in inner):
            return False
    return True


def _held(eqn: Eqn) -> list[ClosedJaxpr]:
    """The jaxprs of control flow."""
    return [x for _, x in subjaxprs(eqn.params) if isinstance(x, ClosedJaxpr)]


def _rolled(scope: Scope, eqn: Eqn, roll: Roll, env: Mapping[Var, Value]) -> Value:
    """A value whose rows are elsewhere, split as it was."""
    x, cell, sizes = env[roll.operand], scope.cells[eqn.outvars[0]], scope.sizes
    split = even(x.cell, sizes).axes
    part, along = x.read(split, sizes, cell.unreduced), split[roll.dim]
    if roll.new is None:
        part = part if x.is_zero else write_roll(part, roll, along, sizes)
        return Value(cell, {form_of(cell, split): part}, x.is_zero)

    def new(device: int | None) -> Any:
        """The new rows of a shift; of what one device has, as another will have it."""
        atom, dtype = roll.new, typeof(part).dtype
        if isinstance(atom, Literal):
            shape = list(typeof(part).shape)
            shape[roll.dim] = roll.count
            return full(shape, atom.val, dtype)
        value = env[cast(Var, atom)]
        want = tuple([() if d == roll.dim else axes for d, axes in enumerate(split)])
        form = value.rooted()
        if device is not None and form is not None and form[:2] == (want, along):
            return brought(value.forms[form], form, device)
        return value.read(want, sizes, cell.unreduced)

    return Value(cell, {form_of(cell, split): write_shift(part, roll, along, sizes, new)})


def _write_sections(scope: Scope, numbers: Sequence[int], env: dict[Var, Value]) -> bool:
    """Write slices that together are all of a value at once, if all are to be split as it is."""
    eqns = [scope.closed.jaxpr.eqns[n] for n in numbers]
    atom, sizes = eqns[0].invars[0], scope.sizes
    cut = section(eqns[0])
    if not isinstance(atom, Var) or cut is None:
        return False
    (d, _, size), x = cut, env[atom]
    split, cells = x.cell.axes, [scope.cells[eqn.outvars[0]] for eqn in eqns]
    devices = math.prod(sizes[a] for a in split[d])
    alike = all(c.axes == split and not c.unreduced and not c.barred for c in cells)
    if not split[d] or size % devices or not alike or x.only_form() != total_form(split):
        return False
    if is_uneven(x.cell.shape, split, sizes):
        return False
    parts = write_sections(x.read(split, sizes), d, len(eqns), split[d], sizes)
    for eqn, value in zip(eqns, values_of(cells, parts), strict=True):
        env[eqn.outvars[0]] = value
        value.uses = scope.uses.get(eqn.outvars[0], 0)
    return True


class _Writer:
    """Runs jaxprs on values, under the trace of the per-device program.

    `placed` holds, by identity, the constants that are operands of the program.
    """

    def __init__(self, placed: dict[int, Value]):
        self.placed = placed
        self.now = 0  # how many equations were met

    def run(self, scope: Scope, given: Sequence[Value]) -> list[Value]:
        """All equations of a jaxpr; its results."""
        jaxpr = scope.closed.jaxpr
        env: dict[Var, Value] = dict(zip(jaxpr.invars, given, strict=True))
        for var, value in zip(jaxpr.constvars, scope.closed.consts, strict=True):
            env[var] = self.placed.get(id(value)) or whole(scope.cells[var], value)
        uses, rolls, cells, kinds = scope.uses, scope.rolls, scope.cells, scope.kinds
        sizes, grid, trace, sections = scope.sizes, scope.grid, state.trace, scope.sections
        # Only equations of a jaxpr that is traced are written again as others were.
        repeats = type(trace) is JaxprTrace
        for var, value in env.items():
            value.uses = max(value.uses, uses.get(var, 0))

        before = state.source
        try:
            for k, eqn in enumerate(jaxpr.eqns):
                source = eqn.source
                state.source = before if source is UNKNOWN else source
                if k in rolls:
                    if (roll := rolls[k]) is not None:
                        env[eqn.outvars[0]] = out = _rolled(scope, eqn, roll, env)
                        out.uses = uses.get(eqn.outvars[0], 0)
                    continue
                self.now += 1
                key, known, prim = None, None, eqn.prim
                if k in sections:
                    if eqn.outvars[0] in env or _write_sections(scope, sections[k], env):
                        continue
                if repeats and prim not in STRUCTURAL and source is not UNKNOWN:
                    known = kinds[k].repeats
                if known is not None:
                    key = _repeat_key(scope, eqn, env)
                if known is not None and key in known:
                    var = eqn.outvars[0]
                    repeat = known[key]
                    out = repeat.write(eqn, env, cells[var], trace, source)
                    if repeat.renames and type(eqn.invars[0]) is Var:
                        out = tell_origin(eqn, env[eqn.invars[0]], out)
                    env[var] = out
                    out.uses = uses[var] if var in uses else 0
                    continue
                operands = [
                    env[a] if type(a) is Var else literal(a)  # type: ignore[arg-type]
                    for a in eqn.invars
                ]
                for x in operands:
                    if x.read_at is not None:
                        x.let_go(self.now)
                if here.watch is not None:
                    here.watch.eqn = eqn
                if prim in STRUCTURAL:
                    write = STRUCTURAL[prim]
                    outs = write(self.run, scope, k, eqn, operands, scope.sizes)
                else:
                    made_as = [cells[v] for v in eqn.outvars]
                    outs = write_equation(eqn, kinds[k], operands, made_as, sizes, grid, key)
                n = 0
                for var in eqn.outvars:
                    env[var] = out = outs[n]
                    out.uses = uses[var] if var in uses else 0
                    n += 1
        finally:
            state.source = before
        return [literal(a) if isinstance(a, Literal) else env[a] for a in jaxpr.outvars]


def _repeat_key(scope: Scope, eqn: Eqn, env: Mapping[Var, Value]) -> Any:
    """The key of equations of one kind that are written alike; None if this one has no such key."""
    cell = scope.cells[eqn.outvars[0]]
    if cell.sum is not None:
        return None
    key: tuple[Any, ...] = scope.grid, cell.axes, cell.closed, cell.edge, cell.terms
    for a in eqn.invars:
        if type(a) is Var:
            plain = (x := env[a]).plain
            if plain is None or (x.uses > 1 and len(plain[0]) > 2):
                return None
            key += plain[:1]
        elif is_exact(a):
            key += (a.aval,)
        else:
            return None
    return key
