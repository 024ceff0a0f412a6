"""`vmap` for users: prefix trees of axes, and errors that name the argument and its path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from spmd.api.flat import FlatFunction, as_array, check_function
from spmd.base.errors import ArgumentError, ShardingTypeError
from spmd.base.source import current_source
from spmd.base.tree import (
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from spmd.base.tree_nodes import spread_over_structure
from spmd.base.util import api_boundary, described, function_name
from spmd.core.argument_names import (
    check_arrays,
    check_axes,
    leaf_names,
    mapped_size,
    parameter_names,
    spread_over_arguments,
)
from spmd.core.aval import ShapedArray, is_arraylike, typeof
from spmd.core.explicit import hooks
from spmd.core.mutable.cells import Cell, put_back, values_of
from spmd.core.structural import broadcast_leading, move_dim
from spmd.core.vmap import BatchAxis, batch_flat
from spmd.lax.reduce import reduce_sum
from spmd.sharding.named import NamedSharding
from spmd.sharding.spec import PartitionSpec

P = ParamSpec("P")
R = TypeVar("R")


def vmap(
    fun: Callable[P, R],
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    sum_match: bool = False,
) -> Callable[P, R]:
    """Vectorise `fun` over one dim of its arguments.

    `in_axes` is an integer, None, or a pytree prefix of the arguments: the dim of each that is
    mapped (None: shared). `out_axes` says where the mapped dim of the results goes. An argument of
    shape (n, 3) mapped over dim 0 has shape (3,) inside `fun`, and each result gets a dim of size
    n; dtypes are those of `fun`. `axis_size` is n where no argument is mapped. With `axis_name`,
    collectives inside work along the mapped dim. With `spmd_axis_name`, a mesh axis or a tuple of
    them, a `shard_map` inside splits the mapped dim over those axes, which its specs must then
    leave out: each device computes its share of the examples. With `sum_match=True` a result that
    is mapped and whose `out_axes` is None is summed over the mapped dim.

    Raises `ShapeError` if mapped sizes disagree or a dim does not exist, `PytreeError` if `in_axes`
    is no prefix, `ArgumentError` if nothing is mapped, if an argument is no array or if `out_axes`
    does not fit, and `AxisError` if `axis_name` is in use.

    >>> spmd.vmap(lambda x, y: x + y, in_axes=(0, None))(np.arange(3.0), 10.0)
    Array([10., 11., 12.], dtype=float32)
    >>> spmd.vmap(lambda x: x - lax.pmean(x, "i"), axis_name="i")(np.arange(3.0))
    Array([-1.,  0.,  1.], dtype=float32)
    """
    check_function("vmap", fun)
    check_axes(f"vmap({function_name(fun)})", "in_axes", in_axes)
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    spmd_names: tuple[Any, ...] = ()
    if spmd_axis_name is not None:
        spmd_names = spmd_axis_name if isinstance(spmd_axis_name, tuple) else (spmd_axis_name,)

    how = {"axis_name": axis_name, "axis_size": axis_size, "spmd_axis_name": spmd_axis_name}
    how["sum_match"] = sum_match

    @api_boundary
    @described(fun, "Vectorized version of {0}, over an axis of arrays that it takes.")
    def mapped(*args: P.args, **kwargs: P.kwargs) -> R:
        what = f"vmap({function_name(fun)})"
        flat, in_tree = tree_flatten((args, kwargs))
        if not all(map(is_arraylike, flat)):
            rest = _map_apart(fun, args, kwargs, in_axes, out_axes, how)
            if rest is not None:
                return rest()
        names = leaf_names(fun, args, kwargs)
        check_arrays(what, names, flat)
        named = list(zip(parameter_names(fun, len(args)), args, strict=True))
        # Keyword arguments are mapped over dim 0.
        axes = spread_over_arguments(what, "in_axes", in_axes, named)
        axes += [0] * len(tree_leaves(kwargs))
        avals = [typeof(x) for x in flat]
        size = mapped_size(what, names, avals, axes, axis_size)
        in_dims = [None if a is None else a % v.ndim for a, v in zip(axes, avals, strict=True)]
        flat_f = FlatFunction(fun, in_tree)
        layout = _mapped_layout(what, names, avals, in_dims)
        entry = None if layout is None else layout.spec[0]
        axis = BatchAxis(axis_name, size, spmd_names, entry=entry)
        outs, dims = batch_flat(flat_f, axis, flat, in_dims)
        tree = flat_f.out_tree
        assert tree is not None
        wanted = spread_over_structure(out_axes, tree, f"{what}: out_axes", "the output")
        placed = [
            _place_out(what, k, x, d, want, size, sum_match, layout)
            for k, (x, d, want) in enumerate(zip(outs, dims, wanted, strict=True))
        ]
        return tree_unflatten(tree, [as_array(x) for x in placed])

    return mapped


def _map_apart(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_axes: Any,
    out_axes: Any,
    how: dict[str, Any],
) -> Callable[[], Any] | None:
    """Call a function with mutable arrays, or unmapped values that are no arrays, as arguments.

    Mutable arrays that are mapped over are values, and results too. None if there is no such
    argument.
    """
    what = f"vmap({function_name(fun)})"
    flat, in_tree = tree_flatten((args, kwargs))
    named = list(zip(parameter_names(fun, len(args)), args, strict=True))
    axes = spread_over_arguments(what, "in_axes", in_axes, named) + [0] * len(tree_leaves(kwargs))
    places = [k for k, x in enumerate(flat) if isinstance(x, Cell) and axes[k] is not None]
    whole = {k: x for k, x in enumerate(flat) if not is_arraylike(x) and axes[k] is None}
    if not places and not whole:
        return None
    cells = [flat[k] for k in places]
    others = [k for k in range(len(flat)) if k not in whole and k not in places]

    def pure(values: list[Any], given: list[Any]) -> Any:
        leaves: dict[int, Any] = dict(whole)
        leaves |= dict(zip(others, given, strict=True))
        inner = []
        for k, cell, value in zip(places, cells, values, strict=True):
            shape = typeof(value).shape
            leaves[k] = type(cell)(value, cell.aval.update(shape=shape))
            inner.append(leaves[k])
        got, named_args = tree_unflatten(in_tree, [leaves[k] for k in range(len(flat))])
        return fun(*got, **named_args), values_of(inner)

    cell_axes = [axes[k] for k in places]
    rest_axes = [axes[k] for k in others]
    run = vmap(
        pure,
        in_axes=(cell_axes, rest_axes),
        out_axes=(out_axes, cell_axes),
        **how,
    )

    def call() -> Any:
        out, after = run(values_of(cells), [flat[k] for k in others])
        put_back(cells, after)
        return out

    return call


def _mapped_layout(
    what: str, names: Sequence[str], avals: Sequence[ShapedArray], at: Sequence[int | None]
) -> NamedSharding | None:
    """How `Explicit` axes split the mapped dims; all that are split must be so alike."""
    found: Any = None
    mesh: Any = None
    first = ""
    for name, aval, d in zip(names, avals, at, strict=True):
        if d is None or aval.explicit is None or aval.explicit.spec[d] is None:
            continue
        entry = aval.explicit.spec[d]
        if found is not None and entry != found:
            raise ShardingTypeError(
                f"{current_source()}: {what}: the mapped dim of {first} is split over {found!r} "
                f"and that of {name} ({aval.short()}) over {entry!r}; reshard one of them"
            )
        found, first, mesh = entry, first or name, aval.explicit.mesh
    return None if found is None else NamedSharding(mesh, PartitionSpec(found))


def _place_out(
    what: str,
    k: int,
    x: Any,
    dim: int | None,
    want: Any,
    size: int,
    sum_match: bool,
    layout: NamedSharding | None,
) -> Any:
    if want is None:
        if dim is not None and sum_match:
            return reduce_sum(x, (dim,))
        if dim is not None:
            raise ArgumentError(
                f"{current_source()}: {what}: out_axes is None for output {k}, but that output "
                "depends on the mapped argument; give it an integer out_axes"
            )
        return x
    ndim = typeof(x).ndim + (dim is None)
    if not isinstance(want, int) or not -ndim <= want < ndim:
        raise ArgumentError(
            f"{current_source()}: {what}: out_axes={want!r} for output {k}, whose result has "
            f"{ndim} dims; it must be an integer in [{-ndim}, {ndim})"
        )
    if dim is not None:
        return move_dim(x, dim, want)
    if layout is None:
        return broadcast_leading(x, size, want % ndim)
    return move_dim(_repeated(x, size, layout), 0, want)


def _repeated(x: Any, size: int, layout: NamedSharding) -> Any:
    """A result that all examples share, along a new first dim that is split as those mapped are."""
    out, own = broadcast_leading(x, size), typeof(x).explicit
    if own is not None:
        if set(layout.spec.all_axes()) & set(own.spec.all_axes()):
            return out
        layout = hooks.with_dim(own, 0, layout.spec[0])
    return hooks.match(out, layout.explicit_part(typeof(out).ndim))
