"""The `shard_map` primitive: a per-device jaxpr over a mesh, and how transformations change it.

The primitive holds the per-device jaxpr, the mesh, and a spec for each input and output. Its rules
transform the per-device jaxpr. With typed axes (`kind` "manual") a value's type says over which
mesh axes it varies; with untyped ones (`kind` "pmap") nothing is known about that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from spmd.base.context import state
from spmd.base.errors import ShardingError
from spmd.base.lazy_import import Deferred
from spmd.base.source import current_source
from spmd.base.util import split_list
from spmd.collectives.axis import pvary
from spmd.collectives.psum import psum_p
from spmd.core.aval import ShapedArray, typeof
from spmd.core.axis import AxisFrame, extend_axes
from spmd.core.call import derived, nonzero, spread
from spmd.core.explicit import match_sharding, stacked_aval
from spmd.core.ir import ClosedJaxpr, Eqn, Names
from spmd.core.jvp import jvp_jaxpr
from spmd.core.linearize import LinearizeTrace, linearize_jaxpr
from spmd.core.primitive import Linear, Primitive, Refused, Zero
from spmd.core.rewrite import close, eval_closed
from spmd.core.structural import broadcast_leading, reshape
from spmd.core.transpose import transpose_jaxpr
from spmd.core.vmap import BatchAxis, batch_jaxpr, fronts
from spmd.lax.arithmetic import div
from spmd.lax.control import inner_axes, inner_effects
from spmd.sharding.abstract_mesh import AbstractMesh, AxisType
from spmd.sharding.call_cache import is_evaluated
from spmd.sharding.manual_sums import aval_with_sets, without_sets
from spmd.sharding.named import NamedSharding
from spmd.sharding.operand_layouts import check_on_devices
from spmd.sharding.spec import Mesh, PartitionSpec

# Only maps under `disable_jit`, or with a collective in a branch, need these.
divergence_check = Deferred("spmd.sharding.divergence_check")
eager_map = Deferred("spmd.sharding.eager_map")
lockstep_interpreter = Deferred("spmd.sharding.lockstep_interpreter")

# ---- shards and wholes -------------------------------------------------------------------------


# The axes of a map that leaves others to the compiler: `manual=axes` among its parameters.
Manual = tuple[Any, ...] | None


@contextmanager
def mesh_axes(mesh: Mesh, kind: str, manual: Manual = None) -> Iterator[None]:
    """Bring a mesh's axes into scope, or those that are manual."""
    frames = [AxisFrame(n, s, kind) for n, s in mesh.shape.items() if manual is None or n in manual]
    with extend_axes(frames):
        yield


def piece_aval(
    aval: ShapedArray, spec: PartitionSpec, mesh: Mesh, kind: str, manual: Manual = None
) -> ShapedArray:
    """The type of a global value on one device, or on those of one position along manual axes."""
    shape = tuple(-(-size // mesh.axis_size(spec.axes_of(d))) for d, size in enumerate(aval.shape))
    vma = aval.vma | frozenset(spec.varying_axes()) if kind == "manual" else aval.vma
    piece = aval.update(shape=shape, vma=vma)
    if manual is not None and aval.explicit is not None:
        left = aval.explicit.with_mesh(_mesh_inside(aval.explicit.mesh, manual))
        piece = piece.update(sharding=left.explicit_part(aval.ndim))
    if kind != "manual" or not (spec.unreduced or spec.reduced):
        return piece
    inside = _mesh_inside(mesh.abstract_mesh, axes_of_map(mesh, manual))
    return aval_with_sets(piece, spec.unreduced, spec.reduced, inside)


def _mesh_inside(mesh: AbstractMesh, manual: tuple[Any, ...]) -> AbstractMesh:
    """A mesh some axes of which are manual."""
    return mesh.update(axis_types=mesh.types_with(AxisType.Manual, manual))


def whole_aval(
    aval: ShapedArray, spec: PartitionSpec, mesh: Mesh, manual: Manual = None
) -> ShapedArray:
    """The global value of which one device has this."""
    shape = tuple(size * mesh.axis_size(spec.axes_of(d)) for d, size in enumerate(aval.shape))
    bare = aval.update(shape=shape, vma=aval.vma - frozenset(axes_of_map(mesh, manual)))
    inside = aval.explicit.spec if aval.explicit is not None else PartitionSpec()
    left = [
        axes.difference(axes_of_map(mesh, manual)) for axes in (inside.unreduced, inside.reduced)
    ]
    inside = inside.update(None, *left)
    entries = [(*spec.axes_of(d), *inside.axes_of(d)) for d in range(aval.ndim)]
    whole = (spec + inside).update(entries)
    around = frozenset(f.name for f in state.axes if f.kind == "manual")
    if not around.isdisjoint(mesh.axis_names):
        return NamedSharding(_mesh_inside(mesh.abstract_mesh, tuple(around)), whole).typed(bare)
    return NamedSharding(mesh, whole).typed(bare)


def axes_of_map(mesh: Mesh, manual: Manual) -> tuple[Any, ...]:
    """The axes along which the body of a map sees shards."""
    return mesh.axis_names if manual is None else manual


def manual_mesh(mesh: Mesh, manual: Manual) -> Mesh:
    """The devices of the first position along all axes that are left to the compiler."""
    if manual is None:
        return mesh
    first = tuple(slice(None) if name in manual else 0 for name in mesh.axis_names)
    return Mesh(mesh.devices[first], tuple(name for name in mesh.axis_names if name in manual))


def vary_outputs(
    closed: ClosedJaxpr,
    specs: Sequence[PartitionSpec],
    mesh: Mesh,
    kind: str,
    manual: Manual = None,
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
    if not any(missing) and not any(s.unreduced or s.reduced for s in specs):
        return closed

    def f(*args: Any) -> list[Any]:
        outs = eval_closed(closed, *args)
        outs = [pvary(x, axes) if axes else x for x, axes in zip(outs, missing, strict=True)]
        return [_as_sum(x, s, inside) for x, s in zip(outs, specs, strict=True)]

    inside = _mesh_inside(mesh.abstract_mesh, axes_of_map(mesh, manual))
    with mesh_axes(mesh, kind, manual):
        return close(f, closed.in_avals, closed.jaxpr.name, closed.jaxpr.arg_names)


def _as_sum(x: Any, spec: PartitionSpec, mesh: AbstractMesh) -> Any:
    """An output whose type says which axes a spec has as unreduced and reduced."""
    if not spec.unreduced and not spec.reduced:
        return x
    return match_sharding(x, aval_with_sets(typeof(x), spec.unreduced, spec.reduced, mesh))


def cut(value: np.ndarray, spec: PartitionSpec, mesh: Mesh) -> list[np.ndarray]:
    """One shard for each device, in mesh order."""
    indices = NamedSharding(mesh, spec).devices_indices_map(value.shape)
    return [value[indices[d]] for d in mesh.flat_devices()]


def join(shards: Sequence[np.ndarray], spec: PartitionSpec, mesh: Mesh) -> np.ndarray:
    """The global value made of the shards of all devices."""
    parts = [mesh.axis_size(spec.axes_of(d)) for d in range(shards[0].ndim)]
    shape = tuple(n * p for n, p in zip(shards[0].shape, parts, strict=True))
    indices = NamedSharding(mesh, spec).devices_indices_map(shape)
    out = np.empty(shape, shards[0].dtype)
    for device, shard in zip(mesh.flat_devices(), shards, strict=True):
        out[indices[device]] = shard
    return out


def untyped_map(
    f: Callable[[Any], Any],
    x: Any,
    mesh: Mesh,
    given: PartitionSpec,
    made: PartitionSpec,
    name: str,
) -> Any:
    """A map of one operand without types: devices that share a result may be known to agree."""
    part = piece_aval(typeof(x), given, mesh, "pmap")
    with mesh_axes(mesh, "pmap"):
        body = close(lambda part: [f(part)], [part], name)
    specs = {"in_specs": (given,), "out_specs": (made,)}
    return shard_map_p.bind(x, jaxpr=body, mesh=mesh, **specs, kind="pmap", name=name)[0]


# ---- rules -------------------------------------------------------------------------------------


def _abstract(
    *avals: ShapedArray,
    jaxpr: ClosedJaxpr,
    mesh: Mesh,
    out_specs: Any,
    manual: Manual = None,
    **_: Any,
) -> list[ShapedArray]:
    pairs = zip(jaxpr.out_avals, out_specs, strict=True)
    return [whole_aval(a, s, mesh, manual) for a, s in pairs]


def _impl(
    xp: Any,
    *operands: Any,
    jaxpr: ClosedJaxpr,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    manual: Manual = None,
    **_: Any,
) -> list[Any]:
    mesh = manual_mesh(mesh, manual)
    shards = [cut(np.asarray(x), s, mesh) for x, s in zip(operands, in_specs, strict=True)]
    outs = lockstep_interpreter.Lockstep(mesh.shape).run(jaxpr, shards)
    return [join(x, s, mesh) for x, s in zip(outs, out_specs, strict=True)]


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    jaxpr, flags = params["jaxpr"], nonzero(tangents)
    ins, outs, mesh, kind = (params[k] for k in ("in_specs", "out_specs", "mesh", "kind"))
    manual = params.get("manual")

    def make() -> Any:
        with mesh_axes(mesh, kind, manual):
            jvp, out_flags = jvp_jaxpr(jaxpr, flags)
        specs = (*outs, *_where(out_flags, outs))
        return vary_outputs(jvp, specs, mesh, kind, manual), out_flags, specs

    key = ("shard_map jvp", tuple(flags), mesh, kind, outs)
    jvp, out_flags, specs = derived(jaxpr, key, make)
    given = [t for t in tangents if not isinstance(t, Zero)]
    changes = {"jaxpr": jvp, "in_specs": (*ins, *_where(flags, ins)), "out_specs": specs}
    found = _bound([*primals, *given], params | changes)
    found, out_tangents = split_list(found, [len(jaxpr.out_avals)])
    return found, spread(out_flags, out_tangents, [typeof(x).tangent() for x in found])


def _bound(operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """The map that a rule has made. The call of a `pmap` moves operands, which no other map does.

    Maps with types are checked where they are evaluated.
    """
    if params["kind"] == "pmap" and is_evaluated():
        check_devices_of_map(operands, params)
    return shard_map_p.bind(*operands, **params)


def check_devices_of_map(operands: Sequence[Any], params: dict[str, Any]) -> None:
    """Raise a DeviceError if a map's operand or constant is committed to other devices."""
    devices = tuple([d.id for d in params["mesh"].flat_devices()])
    closed = params["jaxpr"]

    def describe(k: int) -> tuple[str, str, str, str]:
        names = closed.jaxpr.arg_names
        name = names[k] if k < len(names) else ""
        fix = f"device_put({name or 'x'}, NamedSharding(mesh, spec))"
        if k >= len(operands):
            name = "an array from outside, which it uses,"
        return f"shard_map({params['name']})", name or f"operand {k}", "the mesh", fix

    check_on_devices(devices, [*operands, *closed.consts], describe)


def _where(flags: Sequence[bool], items: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(x for x, f in zip(items, flags, strict=True) if f)


def _linearize(trace: LinearizeTrace, primals: Any, tangents: Any, **params: Any) -> Any:
    jaxpr, flags = params["jaxpr"], nonzero(tangents)
    ins, outs, mesh, kind = (params[k] for k in ("in_specs", "out_specs", "mesh", "kind"))
    manual = params.get("manual")

    def make() -> Any:
        with mesh_axes(mesh, kind, manual):
            parts = linearize_jaxpr(jaxpr, flags)
            primal, linear, specs = _stack_residuals(parts, axes_of_map(mesh, manual), kind)
        out_specs = (*outs, *specs), _where(parts.out_nonzero, outs)
        primal = vary_outputs(primal, out_specs[0], mesh, kind, manual)
        linear = vary_outputs(linear, out_specs[1], mesh, kind, manual)
        return primal, linear, specs, out_specs, parts.out_nonzero

    key = ("shard_map linearize", tuple(flags), mesh, kind, outs)
    primal, linear, specs, out_specs, out_nonzero = derived(jaxpr, key, make)
    changes = {"jaxpr": primal, "out_specs": out_specs[0]}
    found = _bound(primals, params | changes)
    found, residuals = split_list(found, [len(jaxpr.out_avals)])
    given = [t for t in tangents if not isinstance(t, Zero)]
    changes = {
        "jaxpr": linear,
        "in_specs": (*specs, *_where(flags, ins)),
        "out_specs": out_specs[1],
    }
    out_tangents = trace.bind_linear(shard_map_p, [*residuals, *given], params | changes)
    return found, spread(out_nonzero, out_tangents, [typeof(x).tangent() for x in found])


def _stack_residuals(parts: Any, axes_here: tuple[Any, ...], kind: str) -> Any:
    """Residuals cross the boundary as global arrays: stacked over devices where they may vary."""
    avals = parts.residual_avals
    typed = kind == "manual"
    over = [tuple(a for a in axes_here if not typed or a in v.vma) for v in avals]
    stacked = [bool(axes) for axes in over]
    specs = tuple(PartitionSpec(axes) if axes else PartitionSpec() for axes in over)
    n = len(parts.primal.out_avals) - len(avals)

    def primal(*args: Any) -> list[Any]:
        outs = eval_closed(parts.primal, *args)
        residuals = [
            broadcast_leading(x, 1) if s else x
            for x, s in zip(map(without_sets, outs[n:]), stacked, strict=True)
        ]
        return [*outs[:n], *residuals]

    def linear(*args: Any) -> list[Any]:
        residuals = [
            match_sharding(reshape(x, a.shape) if s else x, a)
            for x, a, s in zip(args, avals, stacked, strict=False)
        ]
        return eval_closed(parts.linear, *residuals, *args[len(avals) :])

    plain = [aval_with_sets(a) for a in avals]
    shaped = [stacked_aval(a, 1) if s else a for a, s in zip(plain, stacked, strict=True)]
    tangent_avals = parts.linear.in_avals[len(avals) :]
    name = parts.primal.jaxpr.name
    return (
        close(primal, parts.primal.in_avals, name),
        close(linear, [*shaped, *tangent_avals], f"linear_{name}"),
        specs,
    )


def _transpose(cts: Any, *operands: Any, **params: Any) -> Any:
    """The map of the transposed per-device jaxpr; cotangents are laid out as their values are."""
    jaxpr = params["jaxpr"]
    ins, outs, mesh, kind = (params[k] for k in ("in_specs", "out_specs", "mesh", "kind"))
    manual = params.get("manual")
    linear = [isinstance(x, Linear) for x in operands]
    flags = nonzero(cts)

    def make() -> Any:
        with mesh_axes(mesh, kind, manual):
            backward, in_flags = transpose_jaxpr(jaxpr, linear, flags)
            specs = tuple(s.cotangent() for s in _where(in_flags, _where(linear, ins)))
            if kind != "manual":
                backward = _untyped_sums(backward, mesh, _where(flags, outs), specs)
        return vary_outputs(backward, specs, mesh, kind, manual), in_flags, specs

    key = ("shard_map transpose", tuple(linear), tuple(flags), mesh, kind, ins, outs)
    backward, in_flags, specs = derived(jaxpr, key, make)
    residuals = [x for x in operands if not isinstance(x, Linear)]
    given = [ct for ct in cts if not isinstance(ct, Zero)]
    known = [not lin for lin in linear]
    changes = {
        "jaxpr": backward,
        "in_specs": (*_where(known, ins), *(s.cotangent() for s in _where(flags, outs))),
        "out_specs": specs,
        "name": f"transpose_{params['name']}",
    }
    found = _bound([*residuals, *given], params | changes)
    avals = [x.aval for x in operands if isinstance(x, Linear)]
    rest = iter(spread(in_flags, found, avals))
    return [next(rest) if lin else None for lin in linear]


def _untyped_sums(
    backward: ClosedJaxpr, mesh: Mesh, ct_specs: Sequence[Any], out_specs: Sequence[Any]
) -> ClosedJaxpr:
    """Add the sums that untyped maps need to the jaxpr of cotangents.

    Cotangents of an input that devices share add up over these devices, and the cotangent of a
    shared output counts once, not once for each device.
    """
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
    manual = params.get("manual")

    split = axis.spmd_names
    inside = _share_of_examples(axis, params) if split else axis

    def make() -> Any:
        with mesh_axes(mesh, kind, manual):
            batched, out_flags = batch_jaxpr(jaxpr, inside, flags)
        specs = tuple(_deeper(s, f, split) for s, f in zip(outs, out_flags, strict=True))
        return vary_outputs(batched, specs, mesh, kind, manual), out_flags, specs

    key = ("shard_map batch", axis, tuple(flags), mesh, kind, outs)
    batched, out_flags, specs = derived(jaxpr, key, make)
    changes = {
        "jaxpr": batched,
        "in_specs": tuple(_deeper(s, f, split) for s, f in zip(ins, flags, strict=True)),
        "out_specs": specs,
    }
    found = _bound(fronts(axis, operands, at), params | changes)
    return found, [0 if b else None for b in out_flags]


def _deeper(spec: PartitionSpec, batched: bool, split: tuple[Any, ...]) -> PartitionSpec:
    """The spec of a value with its batched dim first, which is split over some mesh axes."""
    first = split[0] if len(split) == 1 else split or None
    return PartitionSpec(first, *spec) if batched else spec


def _share_of_examples(axis: BatchAxis, params: dict[str, Any]) -> BatchAxis:
    """The axis that one device vectorises over, of one that mesh axes split (spmd_axis_name)."""
    mesh, names = params["mesh"], axis.spmd_names
    what = f"{current_source()}: vmap(spmd_axis_name={names}) of shard_map({params['name']})"
    used = {a for s in (*params["in_specs"], *params["out_specs"]) for a in s.all_axes()}
    inside = set(inner_axes("jaxpr")(params))
    parts = mesh.axis_size(names)
    for name in names:
        if name in used or name in inside:
            where = "its specs use" if name in used else "a collective inside uses"
            raise ShardingError(
                f"{what}: {where} mesh axis {name!r} too; the examples are split over that "
                "axis, so the function of one example must not use it"
            )
    if axis.size % parts:
        raise ShardingError(
            f"{what}: {axis.size} examples cannot be split over {parts} devices; {axis.size} is "
            f"not a multiple of {parts}"
        )
    vary = frozenset(names) if params["kind"] == "manual" else frozenset()
    return BatchAxis(axis.name, axis.size // parts, names, axis.vary | vary)


def _outer_axes(params: dict[str, Any]) -> tuple[Any, ...]:
    own = params["mesh"].axis_names
    return tuple(a for a in inner_axes("jaxpr")(params) if a not in own)


def _text(eqn: Eqn, names: Names) -> tuple[str, dict[str, Any]]:
    """The parameters that the text of an equation shows: those of JAX, and what a pmap adds."""
    params = dict(eqn.params)
    kind, _ = params.pop("kind"), params.pop("name", None)
    manual = params.pop("manual", None)
    axes = params["mesh"].axis_names if manual is None else manual
    shown = {"check_vma": kind == "manual", "newly_manual_axes": frozenset(axes)}
    return eqn.prim.name, dict(sorted((params | shown).items()))


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
    text=_text,
)
