"""`shard_map`: run per-device code on the pieces of global arrays.

The primitive holds the per-device jaxpr, the mesh, and a spec for each input and output. Its rules
transform the per-device jaxpr. With typed axes (`kind` "manual") a value's type says over which
mesh axes it varies, and casts are inserted where unvarying meets varying; `pmap` uses untyped axes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from spmd.collectives.axis import pvary
from spmd.collectives.psum import psum_p
from spmd.core.aval import ShapedArray, typeof
from spmd.core.axis import AxisFrame, extend_axes
from spmd.core.call import derived, nonzero, spread
from spmd.core.context import state
from spmd.core.errors import PytreeError, ShardingError
from spmd.core.ir import ClosedJaxpr
from spmd.core.jvp import jvp_jaxpr
from spmd.core.linearize import LinearizeTrace, linearize_jaxpr
from spmd.core.names import check_arrays, check_axis_name_free, debug_info, leaf_names
from spmd.core.primitive import Linear, Primitive, Refused, Zero
from spmd.core.rewrite import close, eval_closed, hoist_tracers
from spmd.core.source import current_source
from spmd.core.stage import trace_to_jaxpr
from spmd.core.structural import broadcast_leading, reshape
from spmd.core.transpose import transpose_jaxpr
from spmd.core.tree import broadcast_prefix, tree_flatten, tree_unflatten
from spmd.core.util import WeakCache, function_name, split_list
from spmd.core.vmap import batch_jaxpr, fronts
from spmd.lax.arithmetic import div
from spmd.lax.control import inner_axes, inner_effects
from spmd.sharding.lockstep import Lockstep
from spmd.sharding.named import NamedSharding
from spmd.sharding.spec import Mesh, PartitionSpec, current_mesh

# ---- the public function -----------------------------------------------------------------------

_traced = WeakCache()


def shard_map(
    f: Callable[..., Any] | None = None,
    /,
    *,
    mesh: Mesh | None = None,
    in_specs: Any,
    out_specs: Any,
    axis_names: Any = None,
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Run `f` on every device of a mesh, each with its own pieces of the arguments.

    `in_specs` and `out_specs` are pytree prefixes of `PartitionSpec`s: which mesh axes split which
    dims. Global shape (8, 4) with `P("x")` over 4 devices is (2, 4) inside `f`. An output whose
    spec leaves out an axis must be equal along it. Raises a `ShardingError` that names the
    argument, the arithmetic and the fix.
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

    @functools.wraps(f)
    def mapped(*args: Any) -> Any:
        grid = mesh if mesh is not None else current_mesh()
        if grid is None:
            raise ShardingError(
                f"{current_source()}: shard_map({function_name(f)}): no mesh; pass mesh= or call "
                "it inside `with mesh:`"
            )
        return _call(f, grid, in_specs, out_specs, check_vma, args)

    return mapped


def _call(f: Any, mesh: Mesh, in_specs: Any, out_specs: Any, check_vma: bool, args: Any) -> Any:
    what = f"shard_map({function_name(f)})"
    flat, in_tree = tree_flatten(args)
    names = leaf_names(f, args)
    check_arrays(what, names, flat)
    specs = _flat_specs(what, "in_specs", in_specs, args)
    avals = [typeof(x) for x in flat]
    for name, aval, spec in zip(names, avals, specs, strict=True):
        NamedSharding(mesh, spec).check(aval.shape, f"{current_source()}: {what}: {name}")
    for axis in mesh.axis_names:
        check_axis_name_free(what, axis, [frame.name for frame in state.axes])
    kind = "manual" if check_vma else "pmap"
    key = (mesh, tuple(specs), tuple(avals), in_tree, _spec_key(out_specs), kind, state.axes)
    entries = _traced.of(f)
    found = entries.get(key)
    if found is None:
        found = _trace(f, what, mesh, (in_tree, avals, specs), out_specs, kind, args)
        if not found[1]:
            entries[key] = found
    closed, consts, out_tree, wanted = found
    outs = shard_map_p.bind(
        *consts,
        *flat,
        jaxpr=closed,
        mesh=mesh,
        in_specs=(PartitionSpec(),) * len(consts) + tuple(specs),
        out_specs=tuple(wanted),
        kind=kind,
        name=function_name(f),
    )
    return tree_unflatten(out_tree, outs)


def _spec_key(specs: Any) -> Any:
    leaves, tree = tree_flatten(specs, _is_spec)
    return tuple(leaves), tree


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _flat_specs(what: str, name: str, specs: Any, tree: Any) -> list[PartitionSpec]:
    if isinstance(specs, list):
        specs = tuple(specs)
    try:
        found = broadcast_prefix(specs, tree, name, _is_spec)
    except PytreeError as error:
        raise PytreeError(f"{current_source()}: {what}: {error}") from None
    for s in found:
        if not (s is None or _is_spec(s)):
            raise ShardingError(
                f"{current_source()}: {what}: {name} must hold PartitionSpecs, got {s!r}"
            )
    return [PartitionSpec() if s is None else s for s in found]


def _trace(
    f: Any, what: str, mesh: Mesh, ins: Any, out_specs: Any, kind: str, args: Any
) -> tuple[ClosedJaxpr, list[Any], Any, list[PartitionSpec]]:
    in_tree, avals, specs = ins
    trees: list[Any] = []

    def flat(*xs: Any) -> list[Any]:
        outs, tree = tree_flatten(f(*tree_unflatten(in_tree, xs)))
        trees[:] = [tree]
        return outs

    local = [piece_aval(a, s, mesh, kind) for a, s in zip(avals, specs, strict=True)]
    with mesh_axes(mesh, kind):
        closed = trace_to_jaxpr(flat, local, debug_info(f, args))
    closed, consts = hoist_tracers(closed)
    out_tree = trees[0]
    dummy = tree_unflatten(out_tree, list(range(out_tree.num_leaves)))
    wanted = _flat_specs(what, "out_specs", out_specs, dummy)
    for k, (aval, spec) in enumerate(zip(closed.out_avals, wanted, strict=True)):
        _check_out(what, k, aval, spec, mesh)
    return vary_outputs(closed, wanted, mesh, kind), consts, out_tree, wanted


def _check_out(what: str, k: int, aval: ShapedArray, spec: PartitionSpec, mesh: Mesh) -> None:
    if len(spec) > aval.ndim:
        raise ShardingError(
            f"{current_source()}: {what}: output {k} has shape {aval.shape} on each device, but "
            f"its out_spec {spec} has {len(spec)} entries; it may have at most one for each dim"
        )
    mesh.axis_size(spec.all_axes())
    loose = [a for a in mesh.axis_names if a in aval.vma and a not in spec.all_axes()]
    if loose:
        names = ", ".join(repr(a) for a in loose)
        raise ShardingError(
            f"{current_source()}: {what}: output {k} has out_spec {spec}, which says that it is "
            f"equal along mesh axis {names}, but it varies there (its type is {aval}). Combine it "
            f"first, e.g. lax.psum(x, {loose[0]!r}), or put {loose[0]!r} into the out_spec."
        )


# ---- pieces and wholes -------------------------------------------------------------------------


@contextmanager
def mesh_axes(mesh: Mesh, kind: str) -> Iterator[None]:
    """Bring a mesh's axes into scope."""
    with extend_axes([AxisFrame(n, s, kind) for n, s in mesh.shape.items()]):
        yield


def piece_aval(aval: ShapedArray, spec: PartitionSpec, mesh: Mesh, kind: str) -> ShapedArray:
    """What one device sees of a global value."""
    shape = tuple(size // mesh.axis_size(spec.axes_of(d)) for d, size in enumerate(aval.shape))
    vma = aval.vma | frozenset(spec.all_axes()) if kind == "manual" else aval.vma
    return aval.update(shape=shape, vma=vma)


def whole_aval(aval: ShapedArray, spec: PartitionSpec, mesh: Mesh) -> ShapedArray:
    """The global value of which one device has this."""
    shape = tuple(size * mesh.axis_size(spec.axes_of(d)) for d, size in enumerate(aval.shape))
    return aval.update(shape=shape, vma=aval.vma - frozenset(mesh.axis_names))


def vary_outputs(
    closed: ClosedJaxpr, specs: Sequence[PartitionSpec], mesh: Mesh, kind: str
) -> ClosedJaxpr:
    """The jaxpr with each output cast to vary over the axes that its spec splits it over.

    An output that is equal on all devices may be joined like one that is not. Its cotangent then
    differs by device, and only the cast, whose transpose is psum, adds these up.
    """
    if kind != "manual":
        return closed
    missing = [
        tuple(a for a in s.all_axes() if a not in v.vma)
        for v, s in zip(closed.out_avals, specs, strict=True)
    ]
    if not any(missing):
        return closed

    def f(*args: Any) -> list[Any]:
        outs = eval_closed(closed, *args)
        return [pvary(x, axes) if axes else x for x, axes in zip(outs, missing, strict=True)]

    with mesh_axes(mesh, kind):
        return close(f, closed.in_avals, closed.jaxpr.name)


def cut(value: np.ndarray, spec: PartitionSpec, mesh: Mesh) -> list[np.ndarray]:
    """One piece for each device, in mesh order."""
    indices = NamedSharding(mesh, spec).devices_indices_map(value.shape)
    return [value[indices[d]] for d in mesh.flat_devices()]


def join(pieces: Sequence[np.ndarray], spec: PartitionSpec, mesh: Mesh) -> np.ndarray:
    """The global value made of the pieces of all devices."""
    parts = [mesh.axis_size(spec.axes_of(d)) for d in range(pieces[0].ndim)]
    shape = tuple(n * p for n, p in zip(pieces[0].shape, parts, strict=True))
    indices = NamedSharding(mesh, spec).devices_indices_map(shape)
    out = np.empty(shape, pieces[0].dtype)
    for device, piece in zip(mesh.flat_devices(), pieces, strict=True):
        out[indices[device]] = piece
    return out


# ---- rules -------------------------------------------------------------------------------------


def _abstract(
    *avals: ShapedArray, jaxpr: ClosedJaxpr, mesh: Mesh, out_specs: Any, **_: Any
) -> list[ShapedArray]:
    return [whole_aval(a, s, mesh) for a, s in zip(jaxpr.out_avals, out_specs, strict=True)]


def _impl(
    xp: Any, *operands: Any, jaxpr: ClosedJaxpr, mesh: Mesh, in_specs: Any, out_specs: Any, **_: Any
) -> list[Any]:
    pieces = [cut(np.asarray(x), s, mesh) for x, s in zip(operands, in_specs, strict=True)]
    outs = Lockstep(mesh.shape).run(jaxpr, pieces)
    return [join(x, s, mesh) for x, s in zip(outs, out_specs, strict=True)]


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    jaxpr, flags = params["jaxpr"], nonzero(tangents)
    ins, outs, mesh, kind = (params[k] for k in ("in_specs", "out_specs", "mesh", "kind"))

    def make() -> Any:
        with mesh_axes(mesh, kind):
            jvp, out_flags = jvp_jaxpr(jaxpr, flags)
        specs = (*outs, *_where(out_flags, outs))
        return vary_outputs(jvp, specs, mesh, kind), out_flags, specs

    key = ("shard_map jvp", tuple(flags), mesh, kind, outs)
    jvp, out_flags, specs = derived(jaxpr, key, make)
    given = [t for t in tangents if not isinstance(t, Zero)]
    changes = {"jaxpr": jvp, "in_specs": (*ins, *_where(flags, ins)), "out_specs": specs}
    found = shard_map_p.bind(*primals, *given, **(params | changes))
    found, out_tangents = split_list(found, [len(jaxpr.out_avals)])
    return found, spread(out_flags, out_tangents, [typeof(x).tangent() for x in found])


def _where(flags: Sequence[bool], items: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(x for x, f in zip(items, flags, strict=True) if f)


def _linearize(trace: LinearizeTrace, primals: Any, tangents: Any, **params: Any) -> Any:
    jaxpr, flags = params["jaxpr"], nonzero(tangents)
    ins, outs, mesh, kind = (params[k] for k in ("in_specs", "out_specs", "mesh", "kind"))

    def make() -> Any:
        with mesh_axes(mesh, kind):
            parts = linearize_jaxpr(jaxpr, flags)
            primal, linear, specs = _stack_residuals(parts, mesh, kind)
        out_specs = (*outs, *specs), _where(parts.out_nonzero, outs)
        primal = vary_outputs(primal, out_specs[0], mesh, kind)
        linear = vary_outputs(linear, out_specs[1], mesh, kind)
        return primal, linear, specs, out_specs, parts.out_nonzero

    key = ("shard_map linearize", tuple(flags), mesh, kind, outs)
    primal, linear, specs, out_specs, out_nonzero = derived(jaxpr, key, make)
    changes = {"jaxpr": primal, "out_specs": out_specs[0]}
    found = shard_map_p.bind(*primals, **(params | changes))
    found, residuals = split_list(found, [len(jaxpr.out_avals)])
    given = [t for t in tangents if not isinstance(t, Zero)]
    changes = {
        "jaxpr": linear,
        "in_specs": (*specs, *_where(flags, ins)),
        "out_specs": out_specs[1],
    }
    out_tangents = trace.bind_linear(shard_map_p, [*residuals, *given], params | changes)
    return found, spread(out_nonzero, out_tangents, [typeof(x).tangent() for x in found])


def _stack_residuals(parts: Any, mesh: Mesh, kind: str) -> Any:
    """Residuals cross the boundary as global arrays: stacked over devices where they may vary."""
    avals = parts.residual_avals
    typed = kind == "manual"
    over = [tuple(a for a in mesh.axis_names if not typed or a in v.vma) for v in avals]
    stacked = [bool(axes) for axes in over]
    specs = tuple(PartitionSpec(axes) if axes else PartitionSpec() for axes in over)
    n = len(parts.primal.out_avals) - len(avals)

    def primal(*args: Any) -> list[Any]:
        outs = eval_closed(parts.primal, *args)
        residuals = [
            broadcast_leading(x, 1) if s else x for x, s in zip(outs[n:], stacked, strict=True)
        ]
        return [*outs[:n], *residuals]

    def linear(*args: Any) -> list[Any]:
        residuals = [
            reshape(x, a.shape) if s else x for x, a, s in zip(args, avals, stacked, strict=False)
        ]
        return eval_closed(parts.linear, *residuals, *args[len(avals) :])

    shaped = [
        a.update(shape=(1, *a.shape)) if s else a for a, s in zip(avals, stacked, strict=True)
    ]
    tangent_avals = parts.linear.in_avals[len(avals) :]
    name = parts.primal.jaxpr.name
    return (
        close(primal, parts.primal.in_avals, name),
        close(linear, [*shaped, *tangent_avals], f"linear_{name}"),
        specs,
    )


def _transpose(cts: Any, *operands: Any, **params: Any) -> Any:
    jaxpr = params["jaxpr"]
    ins, outs, mesh, kind = (params[k] for k in ("in_specs", "out_specs", "mesh", "kind"))
    linear = [isinstance(x, Linear) for x in operands]
    flags = nonzero(cts)

    def make() -> Any:
        with mesh_axes(mesh, kind):
            backward, in_flags = transpose_jaxpr(jaxpr, linear, flags)
            specs = _where(in_flags, _where(linear, ins))
            if kind != "manual":
                backward = _untyped_sums(backward, mesh, _where(flags, outs), specs)
        return vary_outputs(backward, specs, mesh, kind), in_flags, specs

    key = ("shard_map transpose", tuple(linear), tuple(flags), mesh, kind, ins, outs)
    backward, in_flags, specs = derived(jaxpr, key, make)
    residuals = [x for x in operands if not isinstance(x, Linear)]
    given = [ct for ct in cts if not isinstance(ct, Zero)]
    known = [not lin for lin in linear]
    changes = {
        "jaxpr": backward,
        "in_specs": (*_where(known, ins), *_where(flags, outs)),
        "out_specs": specs,
        "name": f"transpose_{params['name']}",
    }
    found = shard_map_p.bind(*residuals, *given, **(params | changes))
    avals = [x.aval for x in operands if isinstance(x, Linear)]
    rest = iter(spread(in_flags, found, avals))
    return [next(rest) if lin else None for lin in linear]


def _untyped_sums(
    backward: ClosedJaxpr, mesh: Mesh, ct_specs: Sequence[Any], out_specs: Sequence[Any]
) -> ClosedJaxpr:
    """Without types: a shared input's cotangents add up over the devices that share it, and a
    shared output's cotangent is counted once, not once for each device."""
    n = len(backward.in_avals) - len(ct_specs)

    def f(*args: Any) -> list[Any]:
        shares = [
            _divide(ct, mesh.size // mesh.axis_size(s.all_axes()))
            for ct, s in zip(args[n:], ct_specs, strict=True)
        ]
        found = eval_closed(backward, *args[:n], *shares)
        return [_sum_missing(x, s, mesh) for x, s in zip(found, out_specs, strict=True)]

    return close(f, backward.in_avals, backward.jaxpr.name)


def _divide(ct: Any, by: int) -> Any:
    return ct if by == 1 else div(ct, np.asarray(by, typeof(ct).dtype)[()])


def _sum_missing(x: Any, spec: PartitionSpec, mesh: Mesh) -> Any:
    missing = tuple(a for a in mesh.axis_names if a not in spec.all_axes())
    return psum_p.bind(x, axes=missing, groups=None) if missing else x


def _batch(axis: Any, operands: Any, at: Any, **params: Any) -> Any:
    jaxpr, flags = params["jaxpr"], [d is not None for d in at]
    ins, outs, mesh, kind = (params[k] for k in ("in_specs", "out_specs", "mesh", "kind"))

    def make() -> Any:
        with mesh_axes(mesh, kind):
            batched, out_flags = batch_jaxpr(jaxpr, axis, flags)
        specs = tuple(_deeper(s, f) for s, f in zip(outs, out_flags, strict=True))
        return vary_outputs(batched, specs, mesh, kind), out_flags, specs

    key = ("shard_map batch", axis, tuple(flags), mesh, kind, outs)
    batched, out_flags, specs = derived(jaxpr, key, make)
    changes = {
        "jaxpr": batched,
        "in_specs": tuple(_deeper(s, f) for s, f in zip(ins, flags, strict=True)),
        "out_specs": specs,
    }
    found = shard_map_p.bind(*fronts(axis, operands, at), **(params | changes))
    return found, [0 if b else None for b in out_flags]


def _deeper(spec: PartitionSpec, batched: bool) -> PartitionSpec:
    return PartitionSpec(None, *spec) if batched else spec


def _outer_axes(params: dict[str, Any]) -> tuple[Any, ...]:
    own = params["mesh"].axis_names
    return tuple(a for a in inner_axes("jaxpr")(params) if a not in own)


shard_map_p = Primitive(
    "shard_map",
    abstract=_abstract,
    impl=_impl,
    jvp=_jvp,
    linearize=_linearize,
    transpose=_transpose,
    batch=_batch,
    dims=Refused("a shard_map is partitioned already"),
    multiple=True,
    vma="given",
    axes=_outer_axes,
    effects=inner_effects("jaxpr"),
)
