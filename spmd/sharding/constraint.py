"""`with_sharding_constraint` and `shard_alike`: constraints on layouts inside `jit`.

And `inspect_sharding_p`, with which programs tell their layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.base.context import state
from spmd.base.errors import (
    ArgumentError,
    ConstraintError,
    NoMeshError,
    PytreeError,
    ShapeError,
    ShardingError,
)
from spmd.base.source import UNKNOWN, Source, current_source
from spmd.base.tree import (
    broadcast_prefix,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)
from spmd.core.argument_names import check_arrays
from spmd.core.aval import ShapedArray, set_sharding_resolver, typeof
from spmd.core.axis import cast_to_vma
from spmd.core.call import placing
from spmd.core.explicit import hooks
from spmd.core.ir import NO_EFFECTS, Atom, ClosedJaxpr, Eqn, Names, Var
from spmd.core.jvp import is_float0, zero_tangent
from spmd.core.primitive import Linear, Primitive, Refused, Zero, dims, linear
from spmd.core.vmap import to_front
from spmd.sharding.abstract_mesh import AbstractMesh
from spmd.sharding.call_cache import is_evaluated
from spmd.sharding.named import NamedSharding, Sharding, SingleDeviceSharding
from spmd.sharding.operand_layouts import check_on_devices, layouts_of
from spmd.sharding.spec import Mesh, PartitionSpec, current_mesh
from spmd.sharding.xla.layout import Format, without_layout

# The effect of an equation that calls back with a layout.
INSPECTS = frozenset(("Inspect",))


def constrain(
    name: str,
    x: Any,
    sharding: NamedSharding,
    asserts: bool = False,
    moves: bool = False,
    checks: bool = False,
) -> Any:
    """Lay one traced value out, which errors call `name`.

    Along `Explicit` axes the value is moved; with `asserts` it must be laid out so already. A value
    that is committed to other devices is an error, unless `moves`. With `checks` only `Explicit`
    axes are looked at: the caller's jaxpr has constraints for the other axes.
    """
    what = f"{current_source()}: {name}"
    frames = [frame for frame in state.axes if frame.kind != "vmap"]
    maps = [frame.name for frame in frames]
    named = [a for a in sharding.spec.all_axes() if a in maps]
    # A map along some axes of the same mesh leaves the others to the compiler.
    is_partly_manual = all(frame.kind == "manual" for frame in frames) and (
        set(maps) < set(sharding.mesh.axis_names)
    )
    if maps and (named or not is_partly_manual):
        raise ShardingError(
            f"{what}: inside a map over axis {(named or maps)[0]!r} a value is one device's shard "
            "already and cannot be laid out by a sharding. Lay the global array out, outside of "
            "the map"
        )
    aval = typeof(x)
    sharding.check_has_axes(what)
    sharding.check(aval.shape, what, uneven=asserts and not is_evaluated())
    explicit = sharding.explicit_part(aval.ndim)
    if explicit is not None and asserts and aval.explicit is not None:
        if not explicit.spec.all_axes() and not sharding.mesh.are_all_axes_explicit:
            # It speaks of the other axes alone; along these the type stays.
            explicit, now = aval.explicit, sharding.spec
            rows = range(aval.ndim)
            spec = [(*explicit.spec.axes_of(d), *now.axes_of(d)) or None for d in rows]
            free = [d < len(now) and now[d] is PartitionSpec.UNCONSTRAINED for d in rows]
            open_ = PartitionSpec.UNCONSTRAINED
            kept = [open_ if f else e for e, f in zip(spec, free, strict=True)]
            sharding = sharding.update(spec=now.update(kept))
    if explicit is not None:
        if asserts and aval.explicit is not None and aval.explicit.spec != explicit.spec:
            raise ConstraintError(
                f"{what}: the type is {aval.short()}, and the constraint says {sharding.spec}; "
                "along Explicit axes a constraint moves nothing, it checks. Use reshard"
            )
        x = hooks.reshard(x, NamedSharding(sharding.mesh, explicit.spec))
        if explicit.spec.all_axes() == sharding.spec.all_axes():
            return x
    elif checks:
        return x
    more = {"uneven": True} if sharding.uneven else {}
    if moves:
        more["moves"] = True
    spec = sharding.spec
    if PartitionSpec.UNCONSTRAINED in spec and is_evaluated() and layouts_of([x]) is None:
        # The dims of a value over no mesh that are left to the compiler are whole.
        spec = PartitionSpec(*[None if e is PartitionSpec.UNCONSTRAINED else e for e in spec])
    return sharding_constraint_p.bind(x, mesh=sharding.mesh, spec=spec, **more)


def as_sharding(what: str, place: Any) -> NamedSharding:
    """A sharding as users give one: over a mesh, a spec over that in scope, or of one device."""
    place = without_layout(place)
    if isinstance(place, Sharding):
        place = place.over_mesh()
    if isinstance(place, NamedSharding):
        return _over_devices(place)
    if isinstance(place, SingleDeviceSharding):
        return NamedSharding(Mesh([place.device], ("device",)), PartitionSpec())
    if not isinstance(place, PartitionSpec):
        raise ArgumentError(
            f"{current_source()}: {what}: {place!r} is no sharding; give a NamedSharding, or a "
            "PartitionSpec inside `with set_mesh(mesh):`"
        )
    mesh = current_mesh()
    note_mesh_read()
    if not isinstance(mesh, Mesh):
        raise NoMeshError(
            f"{current_source()}: {what}: {place} without a mesh; call it inside "
            "`with spmd.set_mesh(mesh):`, or give NamedSharding(mesh, spec)"
        )
    try:
        return NamedSharding(mesh, place)
    except ShardingError as error:
        text = error.text.removeprefix("NamedSharding: ")
        raise type(error)(f"{current_source()}: {what}: {text}") from None


def _over_devices(sharding: NamedSharding) -> NamedSharding:
    """One over axes without devices becomes one over the mesh in scope, if that has these axes."""
    if not isinstance(sharding.mesh, AbstractMesh):
        return sharding
    mesh = current_mesh()
    note_mesh_read()
    if not isinstance(mesh, Mesh) or mesh.abstract_mesh != sharding.mesh:
        return sharding
    return sharding.update(mesh=mesh)


def constrain_tree(
    x: Any,
    shardings: Any,
    what: str,
    asserts: bool = False,
    name: str = "x",
    checks: bool = False,
) -> Any:
    """Constrain the leaves of `x` by a pytree prefix of shardings.

    None leaves a leaf free; with `asserts` not all may be free. Errors call `x` `name`. `constrain`
    describes `asserts` and `checks`.
    """
    pairs, tree = tree_flatten_with_path(x)
    leaves = [leaf for _, leaf in pairs]
    names = [f"{name}{keystr(path)}" for path, _ in pairs]
    check_arrays(what, names, leaves)
    given = what if what.endswith("shardings") else f"{what}: shardings"
    places = broadcast_prefix(shardings, x, given, is_placement, name)
    if asserts and places and all(place is None for place in places):
        raise ArgumentError(
            f"{current_source()}: {what}: the sharding None constrains nothing; give P() for a "
            "value that is whole on each device, or leave the call out"
        )
    if asserts and is_evaluated():
        _check_same_devices(what, names, leaves, places)
    done = []
    for name, leaf, place in zip(names, leaves, places, strict=True):
        if isinstance(place, SingleDeviceSharding) and is_evaluated():
            leaf = hooks.put(leaf, place)
        elif place is not None:
            sharding = as_sharding(f"{what}: {name}", place)
            leaf = constrain(f"{what}: {name}", leaf, sharding, asserts, checks=checks)
        done.append(leaf)
    return tree_unflatten(tree, done)


def _check_same_devices(what: str, names: Any, leaves: Any, places: Any) -> None:
    """Raise if a constraint would move an array to other devices than those that it is on."""
    for name, x, place in zip(names, leaves, places, strict=True):
        now = getattr(x, "_sharding", None)
        place = without_layout(place)
        if isinstance(now, Sharding) and isinstance(place, (Sharding, PartitionSpec)):
            wanted = as_sharding(f"{what}: {name}", place)
            if isinstance(wanted.mesh, AbstractMesh):
                continue
            devices = wanted.layout[0]
            about = what, name, "the sharding", f"device_put({name}, sharding)"
            check_on_devices(devices, [x], lambda _, about=about: about)


def _of_struct(place: Any, shape: tuple[int, ...]) -> Any:
    """The sharding of a `ShapeDtypeStruct`, of what its user gives."""
    if isinstance(place, PartitionSpec):
        if not isinstance(current_mesh(), Mesh):
            raise ArgumentError(
                f"{current_source()}: ShapeDtypeStruct: sharding={place} without a mesh; call it "
                "inside `with spmd.set_mesh(mesh):`, or give NamedSharding(mesh, spec)"
            )
        place = as_sharding("ShapeDtypeStruct", place)
    where = place.sharding if isinstance(place, Format) else place
    if isinstance(where, Sharding):
        where.check_compatible_aval(shape)
    elif not (place is None or isinstance(place, Format)):
        raise ArgumentError(
            f"{current_source()}: ShapeDtypeStruct: sharding must be a Sharding, a PartitionSpec "
            f"or None, got {place!r}"
        )
    return place


set_sharding_resolver(_of_struct)


def shardings_of_leaves(x: Any, shardings: Any, what: str) -> list[Sharding | None]:
    """The sharding that a pytree prefix gives to each leaf of `x`."""
    places = map(without_layout, broadcast_prefix(shardings, x, what, is_placement))
    found = [as_sharding(what, p) if isinstance(p, PartitionSpec) else p for p in places]
    return [p.over_mesh() if isinstance(p, Sharding) else p for p in found]


def with_sharding_constraint(x: Any, shardings: Any) -> Any:
    """Lay `x`, an array or a pytree, out as `shardings` says, inside a jitted function too.

    `shardings` is a `NamedSharding`, a `PartitionSpec` over the mesh in scope, or a pytree prefix
    of those, in which None leaves a leaf free. Values, global shapes and dtypes stay. Under `jit`
    the compiler lays the value out so and spreads that to the values around; dims whose entry is
    `PartitionSpec.UNCONSTRAINED` are left to it. Outside the data is moved at once. The cotangent
    is laid out alike. Along `Explicit` axes nothing is moved: the type must say the same.

    Raises `ConstraintError` if it does not, `ShardingError` if a dim cannot be split evenly or if
    an axis is manual, as in `shard_map`, `NoMeshError` if there is no mesh for a spec,
    `DeviceError` if an array is on other devices, and `ArgumentError` if `shardings` holds
    something else. Inside of `jit` a dim need not divide: along automatic axes the last parts are
    smaller, and such a value leaves the program whole.

    >>> rows = spmd.NamedSharding(spmd.make_mesh((4,), ("x",)), spmd.P("x"))
    >>> f = spmd.jit(lambda x: lax.with_sharding_constraint(x * 2, rows))
    >>> f(np.arange(8.0)).sharding.spec
    P('x',)
    """
    return constrain_tree(x, shardings, "with_sharding_constraint", asserts=True)


def is_placement(x: Any) -> bool:
    """Whether an entry of in_shardings and the like is a leaf: a sharding, a spec or None."""
    return x is None or isinstance(x, (Sharding, PartitionSpec, Format))


def check_placements(what: str, shardings: Any) -> None:
    """Raise unless all leaves are shardings, specs or None, and say where data lies."""
    for path, leaf in tree_flatten_with_path(shardings, is_placement)[0]:
        name, place = f"{current_source()}: {what}{keystr(path)}", without_layout(leaf)
        if not is_placement(place):
            raise ArgumentError(
                f"{name} is {place!r} of type {type(place).__name__}; each leaf must be a "
                "NamedSharding or another Sharding, a PartitionSpec over the mesh in scope, or None"
            )
        spec = getattr(place, "spec", place)
        if isinstance(spec, PartitionSpec) and PartitionSpec.UNCONSTRAINED in spec:
            raise ShardingError(
                f"{name} is {place}, and an argument or a result lies in a way that is known; "
                "UNCONSTRAINED is for with_sharding_constraint. Leave the sharding None"
            )


def device_of_all(*trees: Any) -> Any:
    """The one `SingleDeviceSharding` that all shardings of some trees are, or None."""
    found = {place for tree in trees for place in tree_flatten(tree, is_placement)[0]} - {None}
    one = found.pop() if len(found) == 1 else None
    return one if isinstance(one, SingleDeviceSharding) else None


def prefix_key(shardings: Any) -> Any:
    """The key of a tree of shardings in a cache: equal trees have equal keys."""
    leaves, tree = tree_flatten(shardings, is_placement)
    return tuple(leaves), tree


def note_mesh_read() -> None:
    """Note that the code which is being traced depends on the mesh in scope."""
    state.mesh_reads += 1


def _batch(axis: Any, operands: Any, at: Any, *, spec: PartitionSpec, **params: Any) -> Any:
    (x,), (d,) = operands, at
    deeper = _with_batch_dim(spec, axis, d, typeof(x).ndim - 1)
    return sharding_constraint_p.bind(x, spec=deeper, **params), d


def _with_batch_dim(spec: PartitionSpec, axis: Any, d: int, ndim: int) -> PartitionSpec:
    """The spec of a value that has got a batch dim: over the axes of `vmap`'s user, or free."""
    own = axis.spmd_names
    entry = (own[0] if len(own) == 1 else own) if own else PartitionSpec.UNCONSTRAINED
    entries = [*spec, *[None] * (ndim - len(spec))]
    return PartitionSpec(*entries[:d], entry, *entries[d:])


def _text(eqn: Eqn, names: Names) -> tuple[str, dict[str, Any]]:
    """The name and the parameters that the text of an equation shows, those of JAX."""
    params = dict(eqn.params)
    spec, moves = params["spec"], params.pop("moves", False)
    placed = NamedSharding(params.pop("mesh"), params.pop("spec").update(), memory_kind="device")
    if moves:
        return "device_put", {"devices": (placed,), "srcs": (None,), **params}
    free = frozenset(d for d, entry in enumerate(spec) if entry is PartitionSpec.UNCONSTRAINED)
    return eqn.prim.name, {
        "layout": None,
        "sharding": placed,
        "unconstrained_dims": free,
        **params,
    }


# ---- shardings of jitted functions -------------------------------------------------------------


def _at_edges(closed: ClosedJaxpr, ins: Sequence[Any], outs: Sequence[Any]) -> ClosedJaxpr:
    """A jaxpr whose inputs and outputs are laid out by shardings, where those are given."""
    jaxpr = closed.jaxpr
    before: list[Eqn] = []
    after: list[Eqn] = []
    first = jaxpr.eqns[0].source if jaxpr.eqns else UNKNOWN
    last = jaxpr.eqns[-1].source if jaxpr.eqns else UNKNOWN

    def lies(eqns: list[Eqn], read: Atom, made: Var, place: Any, source: Source) -> None:
        more = {"uneven": True} if place.uneven else {}
        params = {"mesh": place.mesh, "spec": place.spec, **more}
        eqns.append(Eqn(sharding_constraint_p, (read,), (made,), params, NO_EFFECTS, source))

    invars, outvars = list(jaxpr.invars), list(jaxpr.outvars)
    for k, (var, place) in enumerate(zip(jaxpr.invars, ins, strict=True)):
        if _is_constraint(place, var.aval):
            given = invars[k] = Var(var.aval)
            lies(before, given, var, place, first)
    for k, (atom, place) in enumerate(zip(jaxpr.outvars, outs, strict=True)):
        if _is_constraint(place, atom.aval):
            made = outvars[k] = Var(atom.aval)
            lies(after, atom, made, place, last)
    if not before and not after:
        return closed
    eqns = [*before, *jaxpr.eqns, *after]
    return ClosedJaxpr(jaxpr.replace(invars=invars, eqns=eqns, outvars=outvars), closed.consts)


def _is_constraint(place: Any, aval: ShapedArray) -> bool:
    """Whether a sharding is to be a constraint: along `Explicit` axes the jaxpr has moves."""
    return isinstance(place, NamedSharding) and place.explicit_part(aval.ndim) is None


def _batched(place: Any, axis: Any, ndim: int) -> Any:
    """The sharding of a value of `ndim` dims, for one that has a batch dim in front of them."""
    if not isinstance(place, NamedSharding):
        return place
    return place.update(spec=_with_batch_dim(place.spec, axis, 0, ndim))


placing.at_edges, placing.batched = _at_edges, _batched


# `uneven=True` is there if parts may have different sizes at the edges of a program, too;
# `moves=True` if the user moves the value, even from other devices.
sharding_constraint_p = Primitive(
    "sharding_constraint",
    abstract=lambda x, **params: x,
    impl=lambda xp, x, **params: x,
    jvp=linear,
    transpose=lambda ct, x, **params: [sharding_constraint_p.bind(ct, **params)],
    batch=_batch,
    dims=lambda x, **params: dims([range(x.ndim)], [range(x.ndim)]),
    text=_text,
)


# ---- shard_alike -------------------------------------------------------------------------------


def shard_alike(x: Any, y: Any) -> tuple[Any, Any]:
    """Lay `x` and `y` out alike, in the way that the compiler chooses; return both.

    They are arrays or pytrees of one structure, whose leaves have equal shapes; dtypes may differ,
    and values, shapes and dtypes stay. Under `jit` each pair is split over the same mesh axes, so
    that one of them need not be placed: it lies as the other does. Of two that are split
    differently one is moved. Cotangents are laid out alike, too. Where no mesh is in play the
    arguments are returned as they are. **Along `Explicit` axes the types must not differ.**

    Raises `PytreeError` if the structures differ, `ShapeError` if shapes do, `ShardingTypeError` if
    types split a dim differently, and `ArgumentError` if a leaf is no array.

    >>> mesh = spmd.make_mesh((4,), ("i",), spmd.sharding.AxisType.Auto)
    >>> x = spmd.device_put(np.arange(8.0), spmd.NamedSharding(mesh, spmd.P("i")))
    >>> _, y = spmd.jit(lambda x, y: spmd.sharding.shard_alike(x, y))(x, np.ones(8))
    >>> y.sharding.spec
    P('i',)
    """
    leaves, names, trees = [], [], []
    for name, value in ("x", x), ("y", y):
        pairs, tree = tree_flatten_with_path(value)
        leaves.append([leaf for _, leaf in pairs])
        names.append([f"{name}{keystr(path)}" for path, _ in pairs])
        check_arrays("shard_alike", names[-1], leaves[-1])
        trees.append(tree)
    if trees[0] != trees[1]:
        raise PytreeError(
            f"{current_source()}: shard_alike: x has the structure {trees[0]}, and y has "
            f"{trees[1]}; give two pytrees of one structure"
        )
    for one, other, a, b in zip(*leaves, *names, strict=True):
        if typeof(one).shape != typeof(other).shape:
            raise ShapeError(
                f"{current_source()}: shard_alike: {a} has shape {typeof(one).shape}, and {b} has "
                f"{typeof(other).shape}; only values of equal shapes can be laid out alike. "
                "Reshape or broadcast one of them first"
            )
    if is_evaluated() and layouts_of([*leaves[0], *leaves[1]]) is None:
        return x, y
    done = [shard_alike_p.bind(one, other) for one, other in zip(*leaves, strict=True)]
    firsts, seconds = [one for one, _ in done], [other for _, other in done]
    return tree_unflatten(trees[0], firsts), tree_unflatten(trees[0], seconds)


def _alike_jvp(primals: Any, tangents: Any) -> Any:
    outs = shard_alike_p.bind(*primals)
    is_zero = [isinstance(t, Zero) or is_float0(t) for t in tangents]
    if not any(is_zero):
        return outs, shard_alike_p.bind(*tangents)
    return outs, [
        zero_tangent(x) if zero else cast_to_vma(t, typeof(x).vma, typeof(t).vma)
        for x, t, zero in zip(outs, tangents, is_zero, strict=True)
    ]


def _alike_transpose(cts: Any, *operands: Any) -> list[Any]:
    linear_in = [isinstance(x, Linear) for x in operands]
    if all(linear_in) and not any(isinstance(ct, Zero) for ct in cts):
        return shard_alike_p.bind(*cts)
    return [ct if lin else None for ct, lin in zip(cts, linear_in, strict=True)]


def _alike_batch(axis: Any, operands: Any, at: Any) -> Any:
    if at[0] == at[1]:
        return shard_alike_p.bind(*operands), at
    moved = [to_front(x, d, axis.size) for x, d in zip(operands, at, strict=True)]
    return shard_alike_p.bind(*moved), (0, 0)


shard_alike_p = Primitive(
    "shard_alike",
    abstract=lambda x, y: [x, y],
    impl=lambda xp, x, y: [x, y],
    jvp=_alike_jvp,
    transpose=_alike_transpose,
    batch=_alike_batch,
    dims=lambda x, y: dims([range(x.ndim)] * 2, [range(x.ndim)] * 2),
    multiple=True,
)


# ---- looking at layouts ------------------------------------------------------------------------


def _inspect_batch(axis: Any, operands: Any, at: Any, **params: Any) -> Any:
    # As in JAX, the layout is that of all examples together.
    inspect_sharding_p.bind(*operands, **params)
    return [], []


def _inspect_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return inspect_sharding_p.bind(*primals, **params), []


def _inspect_eager(x: Any, *, callback: Callable[[Any], None]) -> list[Any]:
    callback(x.sharding)
    return []


# Calls back with the layout that a value has in a program, where that is compiled.
inspect_sharding_p = Primitive(
    "inspect_sharding",
    abstract=lambda x, **_: [],
    impl=lambda xp, x, **_: [],
    eager=_inspect_eager,
    jvp=_inspect_jvp,
    transpose=Refused("a tangent that is only looked at has no cotangent"),
    batch=_inspect_batch,
    dims=Refused("it is a wish to see a layout"),
    multiple=True,
    effects=lambda params: INSPECTS,
)
