"""`reshard`, `auto_axes`, `explicit_axes`: changes of explicit shardings that the user asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from spmd.base import dtypes
from spmd.base.config import config
from spmd.base.context import state
from spmd.base.errors import ArgumentError, ShardingError, ShardingTypeError
from spmd.base.lazy_import import Deferred
from spmd.base.source import current_source
from spmd.base.tree import (
    broadcast_prefix,
    keystr,
    tree_flatten_with_path,
    tree_map,
    tree_unflatten,
)
from spmd.base.util import function_name, wraps
from spmd.core.argument_names import check_arrays
from spmd.core.aval import is_arraylike, typeof
from spmd.core.call import jit_p, jit_params
from spmd.core.explicit import hooks, to_auto, to_auto_if_array
from spmd.core.ir import ClosedJaxpr
from spmd.core.primitive import Primitive, dims, linear
from spmd.core.rewrite import close
from spmd.sharding.abstract_mesh import AxisType, NamedAxes
from spmd.sharding.array import Array
from spmd.sharding.call_cache import is_evaluated
from spmd.sharding.constraint import is_placement, note_mesh_read
from spmd.sharding.mesh_scope import use_abstract_mesh
from spmd.sharding.named import NamedSharding
from spmd.sharding.spec import PartitionSpec, current_mesh

if TYPE_CHECKING:
    from spmd.core.aval import ShapedArray


# ---- reshard -----------------------------------------------------------------------------------


def reshard(xs: Any, out_shardings: Any) -> Any:
    """Lay `xs`, an array or a pytree, out over `Explicit` mesh axes as `out_shardings` says.

    `out_shardings` is a `NamedSharding`, a `PartitionSpec` over the mesh in scope or over that of
    the array's type, or a pytree prefix of those. Values, global shapes and dtypes stay; the types
    of the results have these shardings. The cotangent is laid out as `xs` is.

    Raises `ShardingError` if a dim cannot be split evenly, if there is no mesh for a spec or if an
    axis is not `Explicit`, and `ArgumentError` if `out_shardings` holds something else.

    >>> mesh = spmd.make_mesh((2, 2), ("x", "y"), (spmd.sharding.AxisType.Explicit,) * 2)
    >>> rows = spmd.device_put(np.ones((4, 8)), spmd.NamedSharding(mesh, spmd.P("x")))
    >>> spmd.typeof(spmd.reshard(rows, spmd.P(None, "y")))
    ShapedArray(float32[4,8@y])
    """
    pairs, tree = tree_flatten_with_path(xs)
    names = [f"xs{keystr(path)}" for path, _ in pairs]
    check_arrays("reshard", names, [x for _, x in pairs])
    places = broadcast_prefix(out_shardings, xs, "reshard", is_placement)
    done = [
        lay_out(x, place, f"reshard: {name}")
        for name, (_, x), place in zip(names, pairs, places, strict=True)
    ]
    return tree_unflatten(tree, done)


def lay_out(x: Any, place: Any, what: str = "out_sharding") -> Any:
    """One value laid out by a sharding or a spec over explicit axes; errors call it `what`."""
    aval = typeof(x)
    sharding = _explicit_sharding(f"{current_source()}: {what}", place, aval)
    sharding.check(aval.shape, f"{current_source()}: {what}")
    if PartitionSpec.UNCONSTRAINED in sharding.spec and sharding.mesh.are_all_axes_explicit:
        raise ShardingError(
            f"{current_source()}: {what}: {sharding.spec} leaves a dim to the compiler, and all "
            f"axes of {sharding.mesh} are Explicit; name axes, or None for a whole dim"
        )
    wanted = sharding.explicit_part(aval.ndim)
    if wanted is not None and wanted == aval.explicit:
        return x
    spec = sharding.spec.update(map(sharding.spec.axes_of, range(aval.ndim)))
    return reshard_p.bind(x, mesh=sharding.mesh, spec=spec)


def call_laid_out(
    f: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], place: Any
) -> Any:
    """`f(*args, **kwargs)`, which the compiler partitions, laid out as `place` says.

    A call with arrays over a mesh is one program, so that a sum is made as the result wants it.
    """
    if isinstance(place, NamedSharding) and place.mesh.empty:  # the type of a value over no mesh
        return f(*args, **kwargs)
    _check_terms(f, args, place)
    if is_evaluated() and any(type(x) is Array and x.shards is not None for x in args):
        arrays = tuple(x if is_arraylike(x) and hasattr(x, "shape") else None for x in args)
        rest = tuple(None if a is not None else x for x, a in zip(args, arrays, strict=True))
        avals = tuple(None if a is None else typeof(a) for a in arrays)
        named = tuple(sorted(kwargs.items()))
        context = config.tracing, current_mesh()
        if _is_key((rest, named, place)):
            program = _program_laid_out(f, avals, rest, named, place, context)
            given = [a for a in arrays if a is not None]
            return jit_p.bind(*given, **jit_params(program, function_name(f)))[0]
    return lay_out(f(*map(to_auto_if_array, args), **kwargs), place)


def _is_key(x: Any) -> bool:
    """Whether a cache can be asked for `x`; a list of arrays is no key."""
    try:
        hash(x)
    except TypeError:
        return False
    return True


def _check_terms(f: Callable[..., Any], args: Sequence[Any], place: Any) -> None:
    """Raise if the result is to be a sum along an axis along which an operand has no terms."""
    spec = place.spec if isinstance(place, NamedSharding) else place
    if not isinstance(spec, PartitionSpec) or not spec.unreduced:
        return
    for k, x in enumerate(args):
        if not is_arraylike(x) or (sharding := typeof(x).explicit) is None:
            continue
        missing = spec.unreduced - {*sharding.spec.varying_axes(), *sharding.spec.reduced}
        if missing and dtypes.is_inexact(typeof(x).dtype):
            axis = min(missing, key=repr)
            raise ShardingTypeError(
                f"{current_source()}: {function_name(f)}: out_sharding is unreduced over {axis!r}, "
                f"and operand {k} is {typeof(x).short()}, which is not split over it: devices "
                "have the result, not terms of a sum.\nUnreduced axes are those that split the "
                "dims which are summed over; leave others out."
            )


@functools.lru_cache(maxsize=1024)
def _program_laid_out(
    f: Callable[..., Any],
    avals: tuple[Any, ...],
    rest: tuple[Any, ...],
    named: tuple[Any, ...],
    place: Any,
    context: Any,
) -> ClosedJaxpr:
    """The jaxpr of a call on arrays of the given avals; `rest` are the other arguments."""

    def call(*arrays: Any) -> list[Any]:
        given = iter(arrays)
        args = [x if a is None else to_auto(next(given)) for x, a in zip(rest, avals, strict=True)]
        return [lay_out(f(*args, **dict(named)), place)]

    return close(call, [a for a in avals if a is not None], function_name(f))


def _explicit_sharding(what: str, place: Any, aval: ShapedArray) -> NamedSharding:
    """A sharding as users give one, all of whose axes are explicit."""
    if isinstance(place, PartitionSpec):
        place = NamedSharding(_mesh_for(what, place, aval), place)
    if not isinstance(place, NamedSharding):
        raise ArgumentError(
            f"{what}: {place!r} is no sharding; give a NamedSharding, or a PartitionSpec inside "
            "`with set_mesh(mesh):`"
        )
    mesh = place.mesh
    place.check_has_axes(what)
    manual = {frame.name for frame in state.axes if frame.kind != "vmap"}
    for axis in (*place.spec.varying_axes(), *place.spec.reduced):
        kind = mesh.axis_types[mesh.axis_names.index(axis)]
        if axis in manual:
            kind = AxisType.Manual
        if kind is not AxisType.Explicit:
            raise ShardingError(
                f"{what}: {place.spec} names the {kind} axis {axis!r} of {mesh}; {_ADVICE[kind]}"
            )
    return place


_ADVICE = {
    AxisType.Auto: "there the compiler decides, and with_sharding_constraint tells it what to do",
    AxisType.Manual: "inside of a map a value is one device's shard along it",
}


def _mesh_for(what: str, spec: PartitionSpec, aval: ShapedArray) -> NamedAxes:
    """The mesh of a spec: that in scope, else that of the value's own type."""
    mesh = current_mesh()
    note_mesh_read()
    if mesh is not None:
        return mesh
    if aval.explicit is None:
        raise ShardingError(
            f"{what}: {spec} without a mesh; call it inside `with spmd.set_mesh(mesh):`, or give "
            "NamedSharding(mesh, spec)"
        )
    return aval.explicit.mesh


# ---- regions -----------------------------------------------------------------------------------


def auto_axes(
    f: Callable[..., Any] | None = None, /, *, axes: Any = None, out_sharding: Any = None
) -> Callable[..., Any]:
    """Make `f` a function in which the compiler decides how values lie along `Explicit` axes.

    Inside, types say nothing of the axes named in `axes` (one name or several; all by default), and
    no operation is ambiguous. `out_sharding`, a pytree prefix of shardings or specs of the results,
    says how these are laid out; the call may give it, too. Without `f` this is a decorator.

    Raises `ArgumentError` if neither gives an `out_sharding`, and `ShardingError` if an axis is
    unknown.

    >>> mesh = spmd.make_mesh((4,), ("x",), (spmd.sharding.AxisType.Explicit,))
    >>> x = spmd.device_put(np.ones((4, 4)), spmd.NamedSharding(mesh, spmd.P(None, "x")))
    >>> product = spmd.sharding.auto_axes(lambda x: x @ x.T, out_sharding=spmd.P("x"))
    >>> spmd.typeof(product(x))
    ShapedArray(float32[4@x,4])
    """
    if f is None:
        return functools.partial(auto_axes, axes=axes, out_sharding=out_sharding)
    default = out_sharding

    @wraps(f)
    def run(*args: Any, out_sharding: Any = None, **kwargs: Any) -> Any:
        wanted = default if out_sharding is None else out_sharding
        what = f"{current_source()}: auto_axes({function_name(f)})"
        if wanted is None:
            raise ArgumentError(
                f"{what}: there is no out_sharding; give auto_axes(f, out_sharding=P(...)) or "
                "f(..., out_sharding=P(...)), which says how the results are laid out"
            )
        mesh = _mesh_of_values(what, (args, kwargs))
        inside = _with_type(what, mesh, axes, AxisType.Auto)
        names = None if axes is None else _names(axes)
        given = tree_map(lambda x: _to_auto(x, names), (args, kwargs))
        with use_abstract_mesh(inside.abstract_mesh):
            out = f(*given[0], **given[1])
        places = tree_map(lambda s: _over(mesh, s), wanted, is_leaf=is_placement)
        return reshard(out, places)

    return run


def explicit_axes(
    f: Callable[..., Any] | None = None, /, *, axes: Any = None, in_sharding: Any = None
) -> Callable[..., Any]:
    """Make `f` a function in which types say how values lie along `Auto` axes of the mesh.

    `axes` names them (all by default). `in_sharding`, a pytree prefix of shardings or specs of the
    arguments, says how these are laid out at first; the call may give it, too. Along these axes the
    layouts of the results are left to the compiler again. Without `f` this is a decorator.

    Raises `ArgumentError` if neither gives an `in_sharding`, and `ShardingError` if an axis is
    unknown.

    >>> mesh = spmd.make_mesh((4,), ("x",), (spmd.sharding.AxisType.Auto,))
    >>> @spmd.jit
    ... @spmd.sharding.explicit_axes(in_sharding=spmd.P("x"))
    ... def f(x):
    ...     print(spmd.typeof(x))
    ...     return x * 2
    >>> with spmd.set_mesh(mesh):
    ...     f(np.arange(4.0))
    float32[4@x]
    Array([0., 2., 4., 6.], dtype=float32)
    """
    if f is None:
        return functools.partial(explicit_axes, axes=axes, in_sharding=in_sharding)
    default = in_sharding

    @wraps(f)
    def run(*args: Any, in_sharding: Any = None, **kwargs: Any) -> Any:
        wanted = default if in_sharding is None else in_sharding
        what = f"{current_source()}: explicit_axes({function_name(f)})"
        if wanted is None:
            raise ArgumentError(
                f"{what}: there is no in_sharding; give explicit_axes(f, in_sharding=P(...)) or "
                "f(..., in_sharding=P(...)), which says how the arguments are laid out"
            )
        mesh = _mesh_of_values(what, (args, kwargs))
        inside = _with_type(what, mesh, axes, AxisType.Explicit)
        names = inside.axis_names if axes is None else _names(axes)
        places = tree_map(lambda s: _over(inside, s), wanted, is_leaf=is_placement)
        if len(args) == 1 and not isinstance(places, (tuple, list)):
            places = (places,)
        given = reshard(args, places)
        with use_abstract_mesh(inside.abstract_mesh):
            out = f(*given, **kwargs)
        return tree_map(lambda x: _to_auto(x, names), out)

    return run


def _names(axes: Any) -> tuple[Any, ...]:
    return tuple(axes) if isinstance(axes, (tuple, list, set, frozenset)) else (axes,)


def _mesh_of_values(what: str, tree: Any) -> NamedAxes:
    """The mesh in scope, else that of the first value whose type has one."""
    mesh = current_mesh()
    note_mesh_read()
    if mesh is not None:
        return mesh
    for _, x in tree_flatten_with_path(tree)[0]:
        if is_arraylike(x) and (sharding := typeof(x).explicit) is not None:
            return sharding.mesh
    raise ShardingError(
        f"{what}: no argument is laid out over explicit axes, and there is no mesh; call it inside "
        "`with spmd.set_mesh(mesh):`"
    )


def _with_type(what: str, mesh: Any, axes: Any, kind: AxisType) -> Any:
    """The mesh with some of its axes, or all, of another type."""
    names = mesh.axis_names if axes is None else _names(axes)
    for axis in names:
        if axis not in mesh.axis_names:
            known = ", ".join(map(repr, mesh.axis_names))
            raise ShardingError(f"{what}: axes names {axis!r}, but the mesh has {known}")
    return mesh.update(axis_types=mesh.types_with(kind, names))


def _over(mesh: NamedAxes, place: Any) -> Any:
    return NamedSharding(mesh, place) if isinstance(place, PartitionSpec) else place


def _to_auto(x: Any, axes: Sequence[Any] | None) -> Any:
    """`x`, whose layout along some axes, or all, is left to the compiler."""
    if not is_arraylike(x) or typeof(x).explicit is None:
        return x
    return to_auto_p.bind(x, axes=None if axes is None else tuple(axes))


# ---- primitives --------------------------------------------------------------------------------


def _reshard_abstract(x: ShapedArray, *, mesh: NamedAxes, spec: PartitionSpec) -> ShapedArray:
    return x.update(sharding=NamedSharding(mesh, spec).explicit_part(x.ndim))


def _reshard_transpose(ct: Any, x: Any, *, mesh: NamedAxes, spec: PartitionSpec) -> list[Any]:
    sharding = x.aval.explicit
    return [ct if sharding is None else hooks.reshard(ct, sharding.cotangent())]


def _reshard_batch(
    axis: Any, operands: Any, at: Any, *, mesh: NamedAxes, spec: PartitionSpec
) -> Any:
    (x,), (d,) = operands, at
    aval = typeof(x)
    entry = aval.explicit.spec[d] if aval.explicit is not None else axis.entry
    entries = [*spec, *[None] * (aval.ndim - 1 - len(spec))]
    deeper = spec.update((*entries[:d], entry, *entries[d:]))
    return reshard_p.bind(x, mesh=mesh, spec=deeper), d


def _same_dims(x: ShapedArray, **_: Any) -> Any:
    return dims([range(x.ndim)], [range(x.ndim)])


reshard_p = Primitive(
    "reshard",
    abstract=_reshard_abstract,
    impl=lambda xp, x, *, mesh, spec: x,
    jvp=linear,
    transpose=_reshard_transpose,
    batch=_reshard_batch,
    dims=_same_dims,
    vma="given",
    text=lambda eqn, names: ("reshard", {}),  # the type of its result says the layout
)


def _auto_abstract(x: ShapedArray, *, axes: tuple[Any, ...] | None) -> ShapedArray:
    if axes is None or x.explicit is None:
        return x.update(sharding=None)
    mesh = x.explicit.mesh
    left = x.explicit.with_mesh(mesh.update(axis_types=mesh.types_with(AxisType.Auto, axes)))
    return x.update(sharding=left.explicit_part(x.ndim))


to_auto_p = Primitive(
    "to_auto",
    abstract=_auto_abstract,
    impl=lambda xp, x, *, axes: x,
    jvp=linear,
    transpose=lambda ct, x, *, axes: [ct],
    batch=lambda axis, operands, at, *, axes: (to_auto_p.bind(*operands, axes=axes), at[0]),
    dims=_same_dims,
    vma="given",
)


# ---- hooks of core/explicit.py -----------------------------------------------------------------


def without_dim(sharding: NamedSharding, d: int) -> NamedSharding:
    """The sharding of a value that has lost a dim, over which it is not split."""
    spec = sharding.spec
    return NamedSharding(sharding.mesh, spec.update((*spec[:d], *spec[d + 1 :])))


def with_dim(sharding: NamedSharding, d: int, entry: Any) -> NamedSharding:
    """The sharding of a value that has got a dim, split over the axes of `entry`."""
    spec = sharding.spec
    return NamedSharding(sharding.mesh, spec.update((*spec[:d], entry, *spec[d:])))


# The types of results: for programs over `Explicit` axes only.
explicit_types = Deferred("spmd.sharding.explicit_types")

hooks.results = lambda prim, avals, outs, params: explicit_types.results(prim, avals, outs, params)
hooks.reshard = lay_out
hooks.to_auto = lambda x: to_auto_p.bind(x, axes=None)
hooks.laid_out = call_laid_out
hooks.without_dim = without_dim
hooks.with_dim = with_dim
