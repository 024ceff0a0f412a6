"""`shard_map`: run per-device code on the shards of global arrays.

A call checks its arguments against the specs, traces the per-device code once for their types, and
binds the primitive of `shard_map_rules`. Types say over which mesh axes a value varies, and casts
are inserted where unvarying meets varying; `check_vma=False` does without, unless the map leaves
axes to the compiler: then types stay, and what out_specs say is taken on trust (`unvary`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar, overload

import numpy as np

from spmd.base.config import config
from spmd.base.context import state
from spmd.base.device import process_index
from spmd.base.errors import ArgumentError, AxisError, PytreeError, ShardingError
from spmd.base.source import current_source
from spmd.base.traceback_filter import simplify
from spmd.base.tree import (
    TreeDef,
    broadcast_prefix,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)
from spmd.base.util import MISS, WeakCache, function_name, handles, wraps
from spmd.collectives.axis import unvary
from spmd.core.argument_names import (
    check_arrays,
    check_axis_name_free,
    debug_info,
    leaf_names,
    parameter_names,
    spread_over_arguments,
)
from spmd.core.aval import ShapedArray, typeof
from spmd.core.ir import ClosedJaxpr
from spmd.core.rewrite import hoist_tracers
from spmd.core.stage import trace_to_jaxpr
from spmd.core.trace import Tracer, to_numpy
from spmd.sharding.abstract_mesh import AxisType, NamedAxes, meshes_of_types
from spmd.sharding.array import Array, from_numpy, from_shards, shard_value
from spmd.sharding.call_cache import FastCalls, MappedCall, is_evaluated
from spmd.sharding.constraint import note_mesh_read
from spmd.sharding.named import NamedSharding
from spmd.sharding.nested_maps import is_inside_map
from spmd.sharding.operand_layouts import check_on_devices
from spmd.sharding.shard_map_rules import (
    Manual,
    axes_of_map,
    divergence_check,
    eager_map,
    manual_mesh,
    mesh_axes,
    piece_aval,
    shard_map_p,
    vary_outputs,
    whole_aval,
)
from spmd.sharding.spec import Mesh, PartitionSpec, current_mesh, scope
from spmd.sharding.unreduced_types import speaks_of_sums
from spmd.transport.flight_recorder import FLIGHT, TRACING

# ---- the public function -----------------------------------------------------------------------

_traced = WeakCache()


class _Infer:
    """The type of `Infer`, which asks for the specs that the types of arguments say."""

    def __repr__(self) -> str:
        return "Infer"


Infer: Any = _Infer()

P = ParamSpec("P")
R = TypeVar("R")


@overload
def shard_map(
    f: Callable[P, R],
    /,
    *,
    mesh: NamedAxes | None = None,
    in_specs: Any = Infer,
    out_specs: Any,
    axis_names: Any = frozenset(),
    check_vma: bool = True,
) -> Callable[P, R]: ...


@overload
def shard_map(
    f: None = None,
    /,
    *,
    mesh: NamedAxes | None = None,
    in_specs: Any = Infer,
    out_specs: Any,
    axis_names: Any = frozenset(),
    check_vma: bool = True,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def shard_map(
    f: Callable[..., Any] | None = None,
    /,
    *,
    mesh: NamedAxes | None = None,
    in_specs: Any = Infer,
    out_specs: Any,
    axis_names: Any = frozenset(),
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Run `f` on every device of a mesh, each with its own shard of the arguments.

    `in_specs` and `out_specs` are pytree prefixes of `PartitionSpec`s: which mesh axes split which
    dims. Global shape (8, 4) with `P("x")` over 4 devices is (2, 4) inside `f`; dtypes are those of
    `f`. Without `in_specs` the types of the arguments say it, along `Explicit` axes. `mesh` is by
    default that of `set_mesh`, with which it must agree, or of the surrounding `with mesh:`; an
    `AbstractMesh` stands for that in scope, or that of the arguments. An output whose spec leaves
    out an axis must be equal along it, which `check_vma` verifies while tracing;
    `check_vma=False` takes it on trust.
    `axis_names` are the axes along which `f` sees shards, by default all. Along the others its
    values are whole, and the compiler, or their types, say how they lie: specs do not name them,
    and collectives cannot. Without `f` this is a decorator.

    Raises `ShardingError` if a dim cannot be split evenly, if a spec names an axis that is unknown
    or left to the compiler, if a type says otherwise, if an output may vary along an axis that its
    spec leaves out, or if there is no mesh; `DeviceError` if an argument lies on other devices;
    `ArgumentError` if `axis_names` is no set, or specs or mesh are none. The message names the
    argument, the arithmetic and the fix.

    >>> mesh = spmd.make_mesh((4,), ("x",))
    >>> @spmd.shard_map(mesh=mesh, in_specs=spmd.P("x"), out_specs=spmd.P())
    ... def total(x):
    ...     return lax.psum(x.sum(), "x")
    >>> total(np.arange(8.0))
    Array(28., dtype=float32)
    """
    if f is None:
        return functools.partial(
            shard_map,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=axis_names,
            check_vma=check_vma,
        )

    if not callable(f):
        raise ArgumentError(
            f"shard_map: {f!r} of type {type(f).__name__} is not callable; give a function"
        )
    what = f"shard_map({function_name(f)})"
    if isinstance(axis_names, (set, frozenset)) and not axis_names:
        axis_names = None  # all
    if not (axis_names is None or isinstance(axis_names, (set, frozenset))):
        raise ArgumentError(
            f"{current_source()}: {what}: axis_names={axis_names!r} must be a set of axis names, "
            f"got a {type(axis_names).__name__}"
        )
    if not (mesh is None or isinstance(mesh, NamedAxes)):
        raise ArgumentError(f"{current_source()}: {what}: mesh must be a Mesh, got {mesh!r}")
    fast = FastCalls()
    if mesh is not None:
        _manual_axes(f, mesh, axis_names)

    @handles
    @wraps(f)
    def mapped(*args: Any) -> Any:
        try:
            if isinstance(mesh, Mesh) and is_evaluated():
                match = fast.match
                out = match(args, {})
                if out is not MISS:
                    return out
            grid = _mesh_of_call(what, mesh, args)
            if not isinstance(mesh, Mesh) and _around().issuperset(axis_names or grid.axis_names):
                _check_names_no_axes(what, in_specs, out_specs)
                return f(*args)  # the map around has made all axes manual
            manual = _manual_axes(f, grid, axis_names)
            return _call(f, grid, in_specs, out_specs, check_vma, args, fast, manual)
        except Exception as error:
            simplify(error)
            raise

    return mapped


def _around() -> set[Any]:
    """The axes that maps around have made manual."""
    return {frame.name for frame in state.axes if frame.kind == "manual"}


def _check_axes_free(what: str, mesh: Mesh, axes: Sequence[Any]) -> None:
    """Raise an AxisError if an axis of a map is taken by one around it."""
    around = _around()
    taken = [a for a in axes if a in around]
    if taken:
        left = [a for a in mesh.axis_names if a not in around]
        fix = (
            f"axis_names={set(left)!r} are left" if left else "then the map has no axes of its own"
        )
        raise AxisError(
            f"{current_source()}: {what}: the map around has made {taken[0]!r} manual already, and "
            f"{mesh} would do it again. Leave mesh= out: {fix}"
        )
    for axis in axes:
        check_axis_name_free(what, axis, [frame.name for frame in state.axes])


def _check_names_no_axes(what: str, in_specs: Any, out_specs: Any) -> None:
    """Raise an AxisError if specs of a map over no axes of its own name one."""
    for name, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
        for spec in tree_flatten(specs, _is_spec)[0]:
            axes = spec.all_axes() if isinstance(spec, PartitionSpec) else ()
            if axes:
                raise AxisError(
                    f"{current_source()}: {what}: {name} has {spec}, which names {axes[0]!r}: the "
                    f"map around has made {axes[0]!r} manual, so values are shards along it "
                    "already. Write P()"
                )


def _mesh_of_call(what: str, mesh: NamedAxes | None, args: Any) -> Mesh:
    """The mesh with devices that a call maps over: `mesh`, or else that in scope."""
    grid = mesh
    if mesh is None:
        grid = current_mesh()
        note_mesh_read()
    if grid is None:
        raise ShardingError(
            f"{current_source()}: {what}: no mesh; pass mesh= or call it inside `with mesh:`"
        )
    if not isinstance(grid, Mesh):
        grid = _with_devices(what, grid, args)
    if state.mesh is not None and not state.axes and not grid.has_grid_of(state.mesh):
        raise ShardingError(
            f"{current_source()}: {what}: mesh is {grid}, and set_mesh has set {state.mesh}; "
            "leave mesh= out, or call it outside of that mesh's block"
        )
    return grid


def _with_devices(what: str, mesh: Any, args: Any) -> Mesh:
    """The mesh with these axes that is in scope, or that of an argument."""
    note_mesh_read()
    found = [scope.mesh, None if is_evaluated() else meshes_of_types.get(mesh)]
    found += [getattr(getattr(x, "_sharding", None), "mesh", None) for x in tree_flatten(args)[0]]
    for one in found:
        if isinstance(one, Mesh) and one.shape_tuple == mesh.shape_tuple:
            return one.update(axis_types=mesh.axis_types)
    raise ShardingError(
        f"{current_source()}: {what}: {mesh} is a mesh without devices; pass mesh= or call it "
        "inside `with mesh:`"
    )


def _manual_axes(f: Any, mesh: NamedAxes, axis_names: Any) -> Manual:
    """The axes that are to be manual, in the mesh's order; None for all that are not so already."""
    given = [] if axis_names is None else list(axis_names)
    unknown = [a for a in given if a not in mesh.axis_names]
    if unknown:
        known = ", ".join(map(repr, mesh.axis_names))
        raise ShardingError(
            f"{current_source()}: shard_map({function_name(f)}): axis_names={axis_names!r} names "
            f"{unknown[0]!r}, but the axes of the mesh are {known}"
        )
    around = _around()
    left = [a for a in mesh.axis_names if a not in around]
    wanted = [a for a in mesh.axis_names if a in given] if given else left or mesh.axis_names
    return None if len(wanted) == len(mesh.axis_names) else tuple(wanted)


def _check_devices(what: str, names: Sequence[str], flat: Sequence[Any], mesh: Mesh) -> None:
    """Raise if an argument is committed to other devices, or to the mesh's in another order."""

    def describe(k: int) -> tuple[str, str, str, str]:
        return what, names[k], "the mesh", f"device_put({names[k]}, NamedSharding(mesh, spec))"

    check_on_devices(tuple([d.id for d in mesh.flat_devices()]), flat, describe, in_order=True)


def _call(
    f: Any,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    check_vma: bool,
    args: Any,
    fast: FastCalls,
    manual: Manual = None,
) -> Any:
    what = f"shard_map({function_name(f)})"
    # A map that leaves axes to the compiler has types, which its results need not keep.
    trusts = manual is not None and not check_vma
    kind = "manual" if check_vma or trusts else "pmap"
    flat, in_tree = tree_flatten(args)
    names = leaf_names(f, args)
    check_arrays(what, names, flat)
    if is_evaluated():  # inside jit a value from outside is a constant, which has no place
        _check_devices(what, names, flat, mesh)
    avals = [typeof(x) for x in flat]
    if in_specs is Infer:
        specs = [_inferred_spec(what, aval, mesh, manual) for aval in avals]
    else:
        specs = _flat_in_specs(what, f, in_specs, args)
    _check_axes_free(what, mesh, axes_of_map(mesh, manual))
    for name, aval, spec in zip(names, avals, specs, strict=True):
        _sharding(what, mesh, spec).check(aval.shape, f"{current_source()}: {what}: {name}")
        _check_manual(f"{current_source()}: {what}: the in_spec of {name}", spec, manual)
        _check_typed(what, name, aval, mesh, spec, manual)
    if config.disable_jit and eager_map.runs_eagerly() and eager_map.current_lockstep() is None:
        kind = "pmap" if trusts else kind
        return _run_eagerly(f, what, mesh, (in_tree, avals, specs), out_specs, kind, flat, manual)
    around = (kind, trusts, state.axes, config.tracing)
    key = (mesh, tuple(specs), tuple(avals), in_tree, _spec_key(out_specs), around, manual)
    entries = _traced.of(f)
    found = None if config.disable_jit else entries.get(key)
    if found is None:
        ins = in_tree, avals, specs
        found = _trace(f, what, mesh, ins, out_specs, kind, args, manual, trusts)
        if not found[1]:
            entries[key] = found
    closed, consts, out_tree, wanted = found
    params = {
        "jaxpr": closed,
        "mesh": mesh,
        "in_specs": (PartitionSpec(),) * len(consts) + tuple(specs),
        "out_specs": tuple(wanted),
        "kind": kind,
        "name": function_name(f),
    }
    if manual is not None:
        params["manual"] = manual
    outs = shard_map_p.bind(*consts, *flat, **params)
    if is_evaluated() and manual is None:
        shardings = [NamedSharding(mesh, s) for s in specs]
        nothing = [False] * len(flat)
        tree = tree_flatten((args, {}))[1]
        results = [(x.aval, x.sharding) for x in outs]
        fast.note_map(MappedCall(flat, tree, (), shardings, nothing, results, out_tree, params))
    return tree_unflatten(out_tree, outs)


def _spec_key(specs: Any) -> Any:
    leaves, tree = tree_flatten(specs, _is_spec)
    return tuple(leaves), tree


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _flat_in_specs(what: str, f: Any, specs: Any, args: Any) -> list[PartitionSpec]:
    if isinstance(specs, list):
        specs = tuple(specs)
    named = list(zip(parameter_names(f, len(args)), args, strict=True))
    found = spread_over_arguments(what, "in_specs", specs, named, _is_spec)
    return _only_specs(what, "in_specs", found, lambda: leaf_names(f, args))


def _flat_out_specs(what: str, specs: Any, outs: Any) -> list[PartitionSpec]:
    if isinstance(specs, list):
        specs = tuple(specs)
    try:
        found = broadcast_prefix(specs, outs, "out_specs", _is_spec, "the output")
    except PytreeError as error:
        raise PytreeError(f"{what}: {error.text}") from None
    return _only_specs(what, "out_specs", found, lambda: _output_names(outs))


def _output_names(outs: Any) -> list[str]:
    """The names of the outputs in errors: a number, and the path where that says more."""
    paths = [path for path, _ in tree_flatten_with_path(outs)[0]]
    return [
        f"output {k}" + (f" ({keystr(path)})" if len(path) > 1 else "")
        for k, path in enumerate(paths)
    ]


def _only_specs(
    what: str, name: str, found: list[Any], leaves: Callable[[], Sequence[str]]
) -> list[PartitionSpec]:
    for k, s in enumerate(found):
        if not (s is None or _is_spec(s)):
            leaf = leaves()[k]
            advice = f"; its spec is {s.spec}" if isinstance(s, NamedSharding) else ""
            raise ArgumentError(
                f"{current_source()}: {what}: {name} must hold PartitionSpecs, got {s!r} for "
                f"{leaf}{advice}"
            )
    return [PartitionSpec() if s is None else s for s in found]


def _sharding(what: str, mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    try:
        return NamedSharding(mesh, spec)
    except ShardingError as error:
        text = error.text.removeprefix("NamedSharding: ")
        raise type(error)(f"{current_source()}: {what}: {text}") from None


def _trace(
    f: Any,
    what: str,
    mesh: Mesh,
    ins: Any,
    out_specs: Any,
    kind: str,
    args: Any,
    manual: Manual,
    trusts: bool,
) -> tuple[ClosedJaxpr, list[Any], Any, list[PartitionSpec]]:
    """The per-device jaxpr of a call, values that it closes over, and the spec of each output."""
    in_tree, avals, specs = ins
    trees: list[Any] = []

    def flat(*xs: Any) -> list[Any]:
        outs, tree = tree_flatten(f(*tree_unflatten(in_tree, xs)))
        trees[:] = [tree]
        return _trusted(what, out_specs, tree, outs, axes_of_map(mesh, manual)) if trusts else outs

    local = [piece_aval(a, s, mesh, kind, manual) for a, s in zip(avals, specs, strict=True)]
    debug = debug_info(f, args)
    before = scope.enter(mesh)
    try:
        with mesh_axes(mesh, kind, manual), FLIGHT.phase(TRACING, "trace", debug.name):
            closed = trace_to_jaxpr(flat, local, debug)
    finally:
        scope.leave(before)
    closed, consts = hoist_tracers(closed)
    if not trusts and not is_inside_map() and divergence_check.is_suspect(closed):
        given = divergence_check.Given
        outside = [given(frozenset(x.vma), "a value from outside") for x in map(typeof, consts)]
        flat_args = tree_flatten(args)[0]
        inputs = [
            _given(x, s, mesh, name, kind)
            for x, s, name in zip(flat_args, specs, leaf_names(f, args), strict=True)
        ]
        sizes = manual_mesh(mesh, manual).shape
        divergence_check.check_divergence(what, closed, sizes, [*outside, *inputs])
    out_tree = trees[0]
    wanted = _checked_outputs(what, out_specs, out_tree, closed.out_avals, mesh, manual)
    return vary_outputs(closed, wanted, mesh, kind, manual), consts, out_tree, wanted


def _trusted(
    what: str, out_specs: Any, tree: TreeDef, outs: Sequence[Any], axes: Sequence[Any]
) -> list[Any]:
    """Outputs, unvarying along the axes that their specs leave out: the user promises that."""
    specs = _flat_out_specs(what, out_specs, tree_unflatten(tree, list(range(tree.num_leaves))))
    return [
        unvary(x, tuple(a for a in axes if a not in spec.varying_axes()))
        for x, spec in zip(outs, specs, strict=True)
    ]


def _given(x: Any, spec: PartitionSpec, mesh: Mesh, name: str, kind: str) -> Any:
    """The facts about an argument when the per-device code is traced: a `Given`."""
    rows = None
    if is_evaluated() and not isinstance(x, Tracer):
        rows = _local_shards(x, NamedSharding(mesh, spec))
    return divergence_check.Given(
        frozenset(spec.all_axes()), name, rows, must_tell=kind == "manual"
    )


def _checked_outputs(
    what: str,
    out_specs: Any,
    out_tree: TreeDef,
    avals: Sequence[ShapedArray],
    mesh: Mesh,
    manual: Manual,
) -> list[PartitionSpec]:
    """The spec of each output."""
    dummy = tree_unflatten(out_tree, list(range(out_tree.num_leaves)))
    wanted = _flat_out_specs(what, out_specs, dummy)
    for name, aval, spec in zip(_output_names(dummy), avals, wanted, strict=True):
        _check_manual(f"{current_source()}: {what}: the out_spec of {name}", spec, manual)
        _check_out(what, name, aval, spec, mesh, axes_of_map(mesh, manual))
    return wanted


def _check_manual(what: str, spec: PartitionSpec, manual: Manual) -> None:
    """Raise if a spec names an axis that is left to the compiler."""
    for axis in (*spec.varying_axes(), *spec.reduced):
        if manual is not None and axis not in manual:
            raise ShardingError(
                f"{what}, {spec}, names {axis!r}, which is not among axis_names={set(manual)!r}; "
                "the compiler decides along it, so leave it out"
            )


def _inferred_spec(what: str, aval: ShapedArray, mesh: Mesh, manual: Manual) -> PartitionSpec:
    """The spec of an argument, from its type."""
    if AxisType.Explicit not in mesh.axis_types:
        raise ArgumentError(
            f"{current_source()}: {what}: there are no in_specs, and the types of arguments say "
            f"nothing along the axes of {mesh}; give in_specs"
        )
    axes = axes_of_map(mesh, manual)
    if aval.explicit is None:
        return PartitionSpec()
    spec = aval.explicit.spec
    split = map(spec.axes_of, range(aval.ndim))
    entries = [tuple(a for a in own if a in axes) for own in split]
    return spec.update(entries, spec.unreduced.intersection(axes), spec.reduced.intersection(axes))


def _check_typed(
    what: str, name: str, aval: ShapedArray, mesh: Mesh, spec: PartitionSpec, manual: Manual
) -> None:
    """Raise if the type of an argument says that it is laid out otherwise than its spec."""
    has_sums = spec.unreduced or spec.reduced
    is_typed = aval.explicit is not None and (
        any(aval.explicit.spec) or speaks_of_sums(aval.explicit.spec)
    )
    # Where types say all, what is whole is said to be so; beside other axes it may be split as JAX
    # does. A value without a type lies nowhere yet.
    says_all = manual is None and mesh.are_all_axes_explicit and aval.explicit is not None
    if aval.explicit is None or not (is_typed or says_all):
        if has_sums:
            _raise_not_typed(what, name, aval, spec)
        return
    kinds = zip(aval.explicit.mesh.axis_names, aval.explicit.mesh.axis_types, strict=True)
    explicit = [a for a, kind in kinds if kind is AxisType.Explicit]
    for d in range(aval.ndim):
        own = [a for a in aval.explicit.spec.axes_of(d) if manual is None or a in manual]
        if own != [a for a in spec.axes_of(d) if a in explicit]:
            _raise_not_typed(what, name, aval, spec)
    if AxisType.Explicit not in mesh.axis_types and not has_sums:
        return  # over the same devices, along axes of other types
    mine = _inferred_spec(what, aval, mesh, manual)
    if (mine.unreduced, mine.reduced) != (spec.unreduced, spec.reduced):
        _raise_not_typed(what, name, aval, spec)


def _raise_not_typed(what: str, name: str, aval: ShapedArray, spec: PartitionSpec) -> NoReturn:
    raise ShardingError(
        f"{current_source()}: {what}: {name} is {aval.short()}, and its in_spec is {spec}; "
        f"nothing is moved silently. Leave in_specs out, or pass reshard({name}, {spec})"
    )


def _check_out(
    what: str, name: str, aval: ShapedArray, spec: PartitionSpec, mesh: Mesh, axes: Sequence[Any]
) -> None:
    if len(spec) > aval.ndim:
        raise ShardingError(
            f"{current_source()}: {what}: {name} has shape {aval.shape} on each device, but "
            f"its out_spec {spec} has {len(spec)} entries; it may have at most one for each dim"
        )
    _sharding(what, mesh, spec)
    _check_sum(f"{current_source()}: {what}: {name}", aval, spec)
    loose = [a for a in axes if a in aval.vma and a not in spec.varying_axes()]
    if loose:
        along = ", ".join(repr(a) for a in loose)
        raise ShardingError(
            f"{current_source()}: {what}: {name} has out_spec {spec}, which says that it is "
            f"equal along mesh axis {along}, but it varies there (its type is {aval}). Combine it "
            f"first, e.g. lax.psum(x, {loose[0]!r}), or put {loose[0]!r} into the out_spec."
        )


def _check_sum(what: str, aval: ShapedArray, spec: PartitionSpec) -> None:
    """Raise unless an output can be the terms of a sum, or reduced, where its spec says so."""
    _, reduced = aval.manual_sets()
    for axis in sorted(spec.unreduced - aval.vma, key=repr):
        raise ShardingError(
            f"{what} has out_spec {spec}, which says that each device along {axis!r} has a term "
            f"of a sum, but it is equal there (its type is {aval}); leave {axis!r} out of unreduced"
        )
    for axis in sorted(reduced - spec.reduced, key=repr):
        raise ShardingError(
            f"{what} is {aval}, and its out_spec {spec} does not say that it is reduced along "
            f"{axis!r}; write P(..., reduced={{{axis!r}}})"
        )


# ---- op by op ----------------------------------------------------------------------------------


def _run_eagerly(
    f: Any,
    what: str,
    mesh: Mesh,
    ins: Any,
    out_specs: Any,
    kind: str,
    flat: Sequence[Any],
    manual: Manual,
) -> Any:
    """`disable_jit`: the function runs once, on every local device's concrete shards."""
    in_tree, avals, specs = ins
    trees: list[TreeDef] = []

    def run(*xs: Any) -> list[Any]:
        outs, tree = tree_flatten(f(*tree_unflatten(in_tree, xs)))
        trees[:] = [tree]
        return outs

    grid = manual_mesh(mesh, manual)
    local = [piece_aval(a, s, mesh, kind) for a, s in zip(avals, specs, strict=True)]
    shards = [_local_shards(x, NamedSharding(grid, s)) for x, s in zip(flat, specs, strict=True)]
    found, out_avals = eager_map.run_lockstep(
        run, shards, local, grid.shape, grid.flat_devices(), kind
    )
    wanted = _checked_outputs(what, out_specs, trees[0], out_avals, mesh, manual)
    outs = [_join(x, a, s, grid) for x, a, s in zip(found, out_avals, wanted, strict=True)]
    if manual is not None:
        places = [NamedSharding(mesh, s) for s in wanted]
        outs = [
            shard_value(to_numpy(x), whole_aval(a, s.spec, mesh), s, process_index())
            for x, a, s in zip(outs, out_avals, places, strict=True)
        ]
    return tree_unflatten(trees[0], outs)


def _local_shards(x: Any, sharding: NamedSharding) -> list[np.ndarray]:
    """The shard of an argument on each local device."""
    if isinstance(x, Array) and x.shards is not None and x.sharding.layout == sharding.layout:
        return [np.asarray(shard) for shard in x.shards]
    value = to_numpy(x)
    mine = sharding.addressable_devices_indices_map(value.shape)
    return [value[index] for index in mine.values()]


def _join(
    values: Sequence[np.ndarray], aval: ShapedArray, spec: PartitionSpec, mesh: Mesh
) -> Array:
    sharding = NamedSharding(mesh, spec)
    whole = whole_aval(aval, spec, mesh)
    devices = sharding.addressable_devices_indices_map(whole.shape)
    shard = aval.update(vma=whole.vma)
    shards = [from_numpy(x, shard, d) for x, d in zip(values, devices, strict=True)]
    return from_shards(whole, sharding, shards)
